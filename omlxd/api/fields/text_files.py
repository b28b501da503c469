"""Reads files within a request: text becomes text, a PDF a document; all else is refused by name."""

from __future__ import annotations

import re

from ...chat import DocumentPart, TextPart
from ...errors import InvalidRequest, bad_field
from .body import DATA_URL, NOT_FETCHED, PDF, from_base64, misplaced, pdf

MAX_BYTES = 8 * 1024 * 1024
"""Bytes of one text at most; a PDF may be as large as a request."""
_IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8")
_NO_NAME = re.compile(r'[\x00-\x1f\x7f"<>]')


def file_part(
    data: str | None, name: str | None, file_id: str | None, url: object, role: str, param: str
) -> TextPart | DocumentPart:
    """Return a PDF, or the text of a file, between tags with its name.

    data  base64, with or without `data:…;base64,` before it
    role  of the message that the file stands in
    Raises InvalidRequest for what is not sent here, is too large, or is neither.
    """
    if url is not None:
        raise bad_field(f"{param}.file_url", "URLs are not fetched; send file_data")
    if data is None and file_id is not None:
        raise bad_field(f"{param}.file_id", "no files are kept here; send file_data")
    where = f"{param}.file_data"
    if data is None:
        raise bad_field(where, "this field is required")
    match = DATA_URL.match(data[:200])
    try:
        raw = from_base64(data[match.end() :] if match else data, "file", where)
    except InvalidRequest:
        if match:
            raise
        raise bad_field(where, f"the file is not valid base64 ({NOT_FETCHED})") from None
    media_type = match[1].lower() if match else ""
    if media_type == PDF or raw[:1024].lstrip().startswith(b"%PDF-"):
        if role not in ("user", "tool"):
            raise misplaced("a PDF", role, param)
        return pdf(raw, name, where)
    text = _text_of(raw, media_type, name or "", where)
    attribute = f' name="{_NO_NAME.sub("_", name)[:200]}"' if name else ""
    return TextPart(f"<file{attribute}>\n{text}{'' if text.endswith(chr(10)) else chr(10)}</file>")


def _text_of(raw: bytes, media_type: str, name: str, param: str) -> str:
    if len(raw) > MAX_BYTES:
        raise bad_field(param, f"a file of text may be at most {MAX_BYTES >> 20} MiB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        kind = name[:100] or media_type or "this file"
        if media_type.startswith("image/") or raw.startswith(_IMAGES):
            raise bad_field(param, f"{kind!r} is an image; send it as image_url or input_image")
        raise bad_field(
            param, f"only PDFs and text in UTF-8 are read, and {kind!r} is neither; send its text"
        )
    return text
