"""Files within a request: what is text becomes text of the message; all else is refused by name."""

from __future__ import annotations

import binascii
import re

from ...chat import TextPart
from ...errors import bad_field

MAX_BYTES = 8 * 1024 * 1024
"""Of one file."""
_DATA_URL = re.compile(r"data:([\w.+/-]*)(?:;[\w=.+-]+)*;base64,")
_NO_NAME = re.compile(r'[\x00-\x1f\x7f"<>]')


def text_file(data: str | None, name: str | None, file_id: str | None, url: object, param: str) -> TextPart:
    """Return the text of a file, between tags with its name.

    data  base64, with or without `data:…;base64,` before it
    Raises InvalidRequest for what is not sent here, is too large, or is no text in UTF-8.
    """
    if url is not None:
        raise bad_field(f"{param}.file_url", "URLs are not fetched; send file_data")
    if data is None and file_id is not None:
        raise bad_field(f"{param}.file_id", "no files are kept here; send file_data")
    where = f"{param}.file_data"
    if data is None:
        raise bad_field(where, "this field is required")
    match = _DATA_URL.match(data[:200])
    encoded = data[match.end() :] if match else data
    if len(encoded) // 4 * 3 > MAX_BYTES:
        raise bad_field(where, f"a file may be at most {MAX_BYTES >> 20} MiB")
    try:
        raw = binascii.a2b_base64(encoded, strict_mode=True)
    except ValueError:
        raise bad_field(where, "this is not valid base64, which is needed as URLs are not fetched") from None
    text = _text_of(raw, match[1] if match else "", name or "", where)
    attribute = f' name="{_NO_NAME.sub("_", name)[:200]}"' if name else ""
    return TextPart(f"<file{attribute}>\n{text}{'' if text.endswith(chr(10)) else chr(10)}</file>")


def _text_of(raw: bytes, media_type: str, name: str, param: str) -> str:
    if raw.startswith(b"%PDF"):
        raise bad_field(param, "PDFs are not read here; send their text")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        kind = name[:100] or media_type or "this file"
        raise bad_field(param, f"only text in UTF-8 is read, and {kind!r} is none; send its text")
    return text
