"""Documents and search results into text, in tags, as Anthropic advises for long prompts; a PDF stays one:

    <document>
    <title>Kettles</title>
    <document_content>
    …
    </document_content>
    </document>

An image in a document stays in its place. The same block always gives the same parts, so prefixes hold.
Answers cite nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from ... import chat
from ...errors import bad_field
from ..fields.body import NOT_FETCHED, PDF, free_json, from_base64, image, image_url, is_pdf, pdf
from . import blocks

MAX_DOCUMENT_BYTES = 8 << 20
"""Bytes of a document in base64 at most: some two million tokens, more than a context holds."""

_AS_TEXT = 'send its text, as {"type": "text", "media_type": "text/plain", "data": "…"}'


_Body = chat.TextPart | chat.ImagePart


def document_parts(block: blocks.Document, param: str) -> list[_Body | chat.DocumentPart]:
    """Return a PDF, or a document's text and images in its tags. Raises InvalidRequest."""
    source, where = block.source, f"{param}.source"
    if isinstance(source, blocks.Base64Source) and (_kind(source) == PDF or is_pdf(source.data)):
        raw = from_base64(source.data, "document", f"{where}.data")
        return [pdf(raw, block.title, where, block.context)]
    about = [("title", block.title), ("context", block.context)]
    opening, closing = _frame("document", about, "document_content")
    return [*_joined([opening, *_body(block, where), closing])]


def image_block(block: blocks.Image, param: str) -> chat.ImagePart:
    """Read an image. Raises InvalidRequest."""
    if isinstance(block.source, blocks.UrlSource) and (block.source.url or "")[:5].lower() == "data:":
        return image_url(block.source.url or "", f"{param}.source")
    if not isinstance(block.source, blocks.Base64Source):
        kind = block.source.__struct_config__.tag
        raise bad_field(f"{param}.source", f"{NOT_FETCHED} ({kind!r}); send the image itself, as base64")
    return image(block.source.data, block.source.media_type, f"{param}.source")


def search_result_text(block: blocks.SearchResult) -> str:
    """Return a search result in its tags."""
    body = block.content if isinstance(block.content, str) else "\n".join(text.text for text in block.content)
    about = [("source", block.source), ("title", block.title)]
    opening, closing = _frame("search_result", about, "content")
    return "\n".join([opening, body, closing])


def browser_state_text(block: blocks.BrowserState, param: str) -> str:
    """Return the tabs as JSON, in a tag."""
    state = {"tabs": block.tabs}
    if block.state_changes:
        state["state_changes"] = block.state_changes
    text = msgspec.json.encode(free_json(state, param)).decode()
    return f"<browser_state>\n{text}\n</browser_state>"


def _frame(tag: str, about: Sequence[tuple[str, str | None]], content: str) -> tuple[str, str]:
    """Return the lines before and after a document's content."""
    lines = [f"<{name}>{value}</{name}>" for name, value in about if value]
    return "\n".join([f"<{tag}>", *lines, f"<{content}>"]), f"</{content}>\n</{tag}>"


def _joined(lines: Iterable[str | chat.ImagePart]) -> Iterator[_Body]:
    """Yield lines in a row as one text, and images as they are."""
    for kind, run in groupby(lines, type):
        if kind is str:
            yield chat.TextPart("\n".join(map(str, run)))
        else:
            yield from (part for part in run if isinstance(part, chat.ImagePart))


def _body(block: blocks.Document, param: str) -> list[str | chat.ImagePart]:
    source = block.source
    if isinstance(source, blocks.TextSource):
        return [source.data]
    if isinstance(source, blocks.ContentSource):
        return _content(source, f"{param}.content")
    if isinstance(source, blocks.Base64Source):
        return [_decoded(source, param)]
    kind = source.__struct_config__.tag
    why = "are not fetched" if kind == "url" else "are not kept here"
    raise bad_field(param, f"documents of type {kind!r} {why}; send a PDF as base64; of others {_AS_TEXT}")


def _content(source: blocks.ContentSource, param: str) -> list[str | chat.ImagePart]:
    if isinstance(source.content, str):
        return [source.content]
    return [
        image_block(item, f"{param}.{index}") if isinstance(item, blocks.Image) else item.text
        for index, item in enumerate(source.content)
    ] or [""]


def _decoded(source: blocks.Base64Source, param: str) -> str:
    kind = _kind(source)
    if kind.startswith("image/"):
        raise bad_field(f"{param}.media_type", "an image is no document; send it as a block of type image")
    if not (kind.startswith("text/") or kind == "application/json"):
        raise bad_field(
            f"{param}.media_type",
            f"documents of type {source.media_type[:80]!r} are not read, only PDFs, text/* and "
            f"application/json; {_AS_TEXT}",
        )
    where = f"{param}.data"
    if len(source.data) > MAX_DOCUMENT_BYTES * 4 // 3 + 4:
        raise bad_field(where, f"a document in base64 may hold {MAX_DOCUMENT_BYTES} bytes; send less of it")
    raw = from_base64(source.data, "document", where)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad_field(
            where, f"the document is not UTF-8 (byte {error.start}); convert it, or {_AS_TEXT}"
        ) from None


def _kind(source: blocks.Base64Source) -> str:
    return source.media_type.partition(";")[0].strip().lower()
