"""PDFs of a conversation as text, or as a picture of each page for a model that sees.

    <document>
    <title>kettles.pdf</title>
    <document_content>
    [page 1]
    …
    </document_content>
    </document>

The same bytes always give the same parts, so prefixes hold.
"""

from __future__ import annotations

import sys

from msgspec.structs import replace

from ... import chat
from ...errors import bad_field
from .media import Media, TimeLeft


def read_documents(
    conversation: chat.Conversation, media: Media, *, sees: bool, most_images: int = sys.maxsize
) -> chat.Conversation:
    """Return `conversation` without a DocumentPart. Raises InvalidRequest, which names the PDF (one that
    can't be read, or all of them take too long), or the first image above `most_images`.
    """
    left = TimeLeft("PDF")
    messages = tuple(_read_message(message, media, sees, left) for message in conversation.messages)
    images = [part for part in chat.media_of(messages) if isinstance(part, chat.ImagePart)]
    if len(images) > most_images:
        raise bad_field(
            images[most_images].param or "messages",
            f"a request may hold {most_images} images, the pages of PDFs among them, and has {len(images)}; "
            "leave out earlier ones, send a part of a PDF, or have the daemon's owner raise max-images",
        )
    return replace(conversation, messages=messages)


def _read_message(message: chat.Message, media: Media, sees: bool, left: TimeLeft) -> chat.Message:
    if not any(isinstance(part, chat.DocumentPart) for part in chat.media_of([message])):
        return message
    parts: list[chat.Part] = []
    for part in message.parts:
        if isinstance(part, chat.DocumentPart):
            parts += _parts(part, media, sees, left)
        elif isinstance(part, chat.ToolResultPart):
            parts.append(_read_result(part, media, sees, left))
        else:
            parts.append(part)
    return replace(message, parts=tuple(parts))


def _read_result(
    result: chat.ToolResultPart, media: Media, sees: bool, left: TimeLeft
) -> chat.ToolResultPart:
    parts = [part for document in result.documents for part in _parts(document, media, sees, left)]
    texts = [part.text for part in parts if isinstance(part, chat.TextPart)]
    images = [part for part in parts if isinstance(part, chat.ImagePart)]
    text = "\n".join(filter(None, [result.text, *texts]))
    return replace(result, text=text, images=(*result.images, *images), documents=())


def _parts(
    document: chat.DocumentPart, media: Media, sees: bool, left: TimeLeft
) -> list[chat.TextPart | chat.ImagePart]:
    about = (("title", document.name), ("context", document.context))
    opening = ["<document>", *(f"<{tag}>{text}</{tag}>" for tag, text in about if text), "<document_content>"]
    closing = ["</document_content>", "</document>"]
    if sees:
        pages = [
            chat.ImagePart(document.data, document.media_type, document.param, page, name=document.name)
            for page in range(1, len(media.pages(document, left)) + 1)
        ]
        return [chat.TextPart("\n".join(opening)), *pages, chat.TextPart("\n".join(closing))]
    texts = [
        f"[page {page}]\n{text.strip() or '(no text on this page)'}"
        for page, text in enumerate(media.texts(document, left), 1)
    ]
    return [chat.TextPart("\n".join([*opening, *texts, *closing]))]
