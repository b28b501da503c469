"""Documents and search results into text, in tags, as Anthropic advises for long prompts; a PDF stays one:

    <document>
    <title>Kettles</title>
    <document_content>
    …
    </document_content>
    </document>

The same block always gives the same text, so prefixes hold. Answers cite nothing.
"""

from __future__ import annotations

import msgspec

from ... import chat
from ...errors import bad_field
from ..body import PDF, free_json, from_base64, pdf
from . import blocks

MAX_DOCUMENT_BYTES = 8 << 20
"""Of a document in base64: some two million tokens, more than a context holds."""

_AS_TEXT = 'send its text, as {"type": "text", "media_type": "text/plain", "data": "…"}'


def document_part(block: blocks.Document, param: str) -> chat.TextPart | chat.DocumentPart:
    """A PDF, or the document's text in its tags. Raises InvalidRequest for what is neither."""
    source, where = block.source, f"{param}.source"
    if isinstance(source, blocks.Base64Source) and _kind(source) == PDF:
        raw = from_base64(source.data, "document", f"{where}.data")
        return pdf(raw, block.title, where, block.context)
    about = [("title", block.title), ("context", block.context)]
    return chat.TextPart(_framed("document", about, "document_content", _body(block, where)))


def search_result_text(block: blocks.SearchResult) -> str:
    """A search result in its tags."""
    body = block.content if isinstance(block.content, str) else "\n".join(text.text for text in block.content)
    return _framed("search_result", [("source", block.source), ("title", block.title)], "content", body)


def browser_state_text(block: blocks.BrowserState, param: str) -> str:
    """The tabs as JSON, in a tag."""
    state = {"tabs": block.tabs}
    if block.state_changes:
        state["state_changes"] = block.state_changes
    text = msgspec.json.encode(free_json(state, param)).decode()
    return f"<browser_state>\n{text}\n</browser_state>"


def _framed(tag: str, about: list[tuple[str, str | None]], content: str, body: str) -> str:
    lines = [f"<{name}>{value}</{name}>" for name, value in about if value]
    return "\n".join([f"<{tag}>", *lines, f"<{content}>", body, f"</{content}>", f"</{tag}>"])


def _body(block: blocks.Document, param: str) -> str:
    source = block.source
    if isinstance(source, blocks.TextSource):
        return source.data
    if isinstance(source, blocks.ContentSource):
        return _content(source, f"{param}.content")
    if isinstance(source, blocks.Base64Source):
        return _decoded(source, param)
    kind = source.__struct_config__.tag
    why = "are not fetched" if kind == "url" else "are not kept here"
    raise bad_field(param, f"documents of type {kind!r} {why}; {_AS_TEXT}")


def _content(source: blocks.ContentSource, param: str) -> str:
    if isinstance(source.content, str):
        return source.content
    for index, item in enumerate(source.content):
        if isinstance(item, blocks.Image):
            raise bad_field(
                f"{param}.{index}",
                "an image within a document is not read; leave it out or tell what it shows",
            )
    return "\n".join(item.text for item in source.content if isinstance(item, blocks.Text))


def _decoded(source: blocks.Base64Source, param: str) -> str:
    kind = _kind(source)
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
