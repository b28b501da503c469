"""Request bodies: bytes into typed structs, with errors that name the field at fault (`messages.0.role`).

`check_shape` bounds the JSON of a body before anything is built: a megabyte of `[],[],…` becomes 30 MB of
lists, and 32 of those kept this process busy for half a minute.
"""

from __future__ import annotations

import binascii
import codecs
import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from ...chat import Conversation, DocumentPart, GenerateRequest, ImagePart, RawPrompt, Struct
from ...common.units import duration
from ...errors import InvalidRequest, bad_field
from .lenient import lenient, may_help
from .unknown_fields import noted

MOST_CONTAINERS = 200_000
"""Objects and lists in a body: twice what 32 MB of a coding agent's conversation hold."""
MOST_VALUES = 2_000_000
"""Commas in a body, about as many as values: a prompt may be a list of a million token ids."""
MOST_MEMBERS = 300_000
"""Colons in a body, for members of objects: three for each object that 32 MB of an agent's conversation hold.
A new name takes 1 us, ten times as long as a value, and no other thread of this process runs meanwhile.
"""


_left: ContextVar[int] = ContextVar("_left", default=MOST_CONTAINERS)
"""Objects and lists that JSON texts within the body may still hold; ten values count as one."""


def check_shape(body: bytes) -> None:
    """Raise InvalidRequest for a body of too many objects, lists or values, JSON or not."""
    _left.set(MOST_CONTAINERS)
    if len(body) <= 2 * MOST_CONTAINERS or _fits(body):
        return
    # Signs within strings are text, which costs no more than its length.
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if text.count(b'"') > MOST_VALUES or not _fits(b"".join(text.split(b'"')[::2])):
        raise InvalidRequest(
            f"The request body holds more than {MOST_CONTAINERS:,} JSON objects and lists, "
            f"{MOST_MEMBERS:,} fields, or {MOST_VALUES:,} values; send fewer."
        )


def check_nested(text: str, param: str) -> None:
    """Check JSON text that is a value of the body, with all such texts of the body, like `check_shape`."""
    left = _left.get() - text.count("{") - text.count("[") - text.count(",") // 10
    if left < 0:
        raise bad_field(param, "too much JSON within the request's texts; send less")
    _left.set(left)


def _fits(text: bytes) -> bool:
    containers = text.count(b"{") + text.count(b"[")
    return (
        containers <= MOST_CONTAINERS and text.count(b",") <= MOST_VALUES and text.count(b":") <= MOST_MEMBERS
    )


MAX_DEPTH = 64
"""Levels of nesting in free-form JSON. msgspec's own limit depends on the stack in use."""

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_TOKENS = 2**31 - 1

T = TypeVar("T")


class ScoresShape(Struct, frozen=True):
    """Form of scores. `activated`: probabilities, not logarithms. `logits`: with labels' first tokens."""

    activated: bool = True
    logits: bool = False


class ParsedRequest(Struct, frozen=True):
    """A parsed body.

    model          as the client spelled it, or ""
    n              answers to each prompt
    more_prompts   answered side by side with that of `generate`, all else being the same
    labels         of each prompt, texts whose likelihood as its answer is asked for
    scores         how that is told
    fields         of each prompt, what the body calls the field that an engine's error names
    include_usage  an OpenAI stream ends with a chunk of usage (other protocols always have it)
    keep_alive     seconds that the model stays loaded after it (`keep_alive_of`); None: not said
    """

    model: str
    stream: bool
    generate: GenerateRequest
    include_usage: bool = False
    keep_alive: float | None = None
    n: int = 1
    more_prompts: tuple[Conversation | RawPrompt, ...] = ()
    labels: tuple[tuple[str, ...], ...] = ()
    scores: ScoresShape = ScoresShape()
    fields: tuple[dict[str, str], ...] = ()

    @property
    def answers(self) -> int:
        """Choices of the answer: `n` of the first prompt, then `n` of the next."""
        return self.n * (1 + len(self.more_prompts))


_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def mended(body: bytes) -> bytes:
    """Return `body` without a byte order mark, and with U+FFFD for halves of surrogate pairs."""
    body = body.removeprefix(codecs.BOM_UTF8)
    if (b"\\ud" not in body and b"\\uD" not in body) or b"\0" in body:
        return body
    # Of two backslashes neither begins an escape.
    hidden = body.replace(b"\\\\", b"\0\0")
    return _LONE_SURROGATE.sub(rb"\\ufffd", hidden).replace(b"\0\0", b"\\\\")


_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_MISSING = re.compile(r"^Object missing required field `(.*?)`$")
NO_SUCH_FIELD = "there is no such field"
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode `body` as the decoder's type, with the liberties of `lenient.py`.

    Raises InvalidRequest, whatever the bytes are.
    """
    check_shape(body)
    try:
        decoded = _decoded(decoder, body)
        if (fields := noted.get()) is not None:
            fields.note(decoder.type, body)
        return decoded
    except msgspec.ValidationError as error:
        raise _field_error(str(error), decoder.type) from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {_why_malformed(body, error)}.") from None


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if not may_help(error):
            raise
    value = lenient(_any_decoder.decode(body), decoder.type)
    return decoder.decode(msgspec.json.encode(value))


def convert(value: Any, kind: type[T]) -> T:
    """Convert JSON within a body to a `kind`. Raises msgspec.ValidationError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if not may_help(error):
            raise
    return msgspec.convert(lenient(value, kind), kind)


def _why_malformed(body: bytes, error: Exception) -> str:
    if not body.strip():
        return "it is empty"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return str(error)


def _field_error(text: str, body: Any) -> InvalidRequest:
    """Turn msgspec's `text` into an error. `body`: the type that was decoded."""
    match = _PATH.search(text)
    allowed: list[Any] = []
    if match and text.startswith("Invalid"):
        allowed = _allowed(inspect.type_info(body), _STEP.findall(match[1]))
    path = _dotted(match[1]) if match else ""
    text = text[: match.start()] if match else text
    if missing := _MISSING.match(text):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return bad_field(param, "this field is required")
    if unknown := _UNKNOWN.match(text):
        return bad_field(f"{path}.{unknown[1]}" if path else unknown[1], NO_SUCH_FIELD)
    if path.endswith("type") and text.startswith("Invalid value"):
        kind = text.removeprefix("Invalid value ").strip("'")
        if path.startswith("tools."):
            return bad_field(path, f"a tool of type {kind!r} is not served; describe it as a function")
        if path.startswith("questions."):
            return bad_field(path, f"use one of {', '.join(map(str, allowed))}, not {kind!r}")
        if len(allowed) == 1 and not path.removesuffix(".type")[-1:].isdigit():  # No part of a content.
            return bad_field(path, f"it must be {allowed[0]!r}, not {kind!r}")
        return unsupported(kind, path)
    if not path:
        return InvalidRequest(f"The request body must be a JSON object: {text}.")
    if allowed and text.startswith("Invalid enum value"):
        text = f"{text}; use one of {', '.join(map(str, allowed))}"
    return bad_field(path, text.replace("`", ""))


_STEP = re.compile(r"\[[\d.]+\]|[^.\[\]]+")


def _allowed(kind: inspect.Type, steps: Sequence[str]) -> list[Any]:
    """Return literals and tags of structs that may end `steps` of msgspec's path; [] for any."""
    match kind:
        case inspect.Metadata():
            return _allowed(kind.type, steps)
        case inspect.UnionType():
            return [value for each in kind.types for value in _allowed(each, steps)]
        case inspect.LiteralType() if not steps:
            return list(kind.values)
        case inspect.ListType() if steps:
            return _allowed(kind.item_type, steps[1:])
        case inspect.DictType() if steps[:1] == ["[...]"]:
            return _allowed(kind.value_type, steps[1:])
        case inspect.StructType() if steps:
            if [kind.tag_field] == steps:
                return [kind.tag]
            types = (field.type for field in kind.fields if field.encode_name == steps[0])
            return [value for each in types for value in _allowed(each, steps[1:])]
        case _:
            return []


def _dotted(path: str) -> str:
    """Spell `messages[0].role` as `messages.0.role`."""
    return re.sub(r"\[(\d+)\]", r".\1", path).replace("[...]", ".*").strip(".")


# --------------------------------------------------------------------------- free-form JSON


def free_json(value: Any, param: str) -> dict[str, Any]:
    """Return a JSON object of any content, fit for msgpack.

    Integers past 64 bits become floats: a model may have written one into an earlier call, and refusing it
    would end that conversation. Raises InvalidRequest for no object, or one nested deeper than MAX_DEPTH.
    """
    if not isinstance(value, dict):
        raise bad_field(param, "a JSON object is needed")
    return _fit(value, param, MAX_DEPTH)


def json_text(value: Any, param: str) -> str:
    """Return the JSON text of a value of any content. Raises InvalidRequest, as `free_json`."""
    return msgspec.json.encode(_fit(value, param, MAX_DEPTH)).decode()


def _fit(value: Any, param: str, depth: int) -> Any:
    if not depth:
        raise bad_field(param, f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {key: _fit(item, param, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_fit(item, param, depth - 1) for item in value]
    if type(value) is int and not -(2**63) <= value < 2**64:
        try:
            return float(value)
        except OverflowError:
            raise bad_field(param, "a number is out of range") from None
    return value


_any_decoder = msgspec.json.Decoder(Any)


def json_object(text: str, param: str) -> dict[str, Any]:
    """Read a JSON object from text; "" is an empty one."""
    if not text.strip():
        return {}
    check_nested(text, param)
    try:
        value = _any_decoder.decode(mended(text.encode()))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise bad_field(param, "this is not valid JSON") from None
    return free_json(value, param)


RAW_INPUT = "input"
"""Name of a call's one argument that is text: a custom tool's, or arguments that are no JSON object."""


def lenient_arguments(text: str, param: str) -> dict[str, Any]:
    """Return a call's arguments from JSON text. Broken text stays: refusing it ends the conversation."""
    try:
        return json_object(text, param)
    except InvalidRequest:
        return {RAW_INPUT: text}


def stable_json(value: Any) -> str:
    """Return the same JSON text for equal values, whatever the order of their keys."""
    return msgspec.json.encode(value, order="deterministic").decode()


# --------------------------------------------------------------------------- fields


MAX_NAME_CHARS = 256
_TOOL_NAME = re.compile(r"[\w./-](?:[\w.:/-]*[\w./-])?")


def checked_name(name: str, param: str) -> str:
    """Return `name` if the output's reader knows it again in every format of calls. Raises InvalidRequest.

    OpenAI and Anthropic allow letters, digits, `_` and `-`, and 64 or 128 of them.
    """
    if len(name) > MAX_NAME_CHARS:
        raise bad_field(param, f"longer than {MAX_NAME_CHARS} characters")
    if not _TOOL_NAME.fullmatch(name):
        raise bad_field(
            param,
            f"{name[:80]!r} is no name of a tool: letters, digits, _, -, . and / are, and : within; "
            "a description may say the rest",
        )
    return name


def stops(value: str | list[str] | None, param: str) -> tuple[str, ...]:
    """Check stop strings for number and length."""
    texts = (value,) if isinstance(value, str) else tuple(value or ())
    if len(texts) > MAX_STOPS:
        raise bad_field(param, f"at most {MAX_STOPS} strings, got {len(texts)}")
    for text in texts:
        if not text:
            raise bad_field(param, "a stop string must not be empty")
        if len(text) > MAX_STOP_CHARS:
            raise bad_field(param, f"a stop string is longer than {MAX_STOP_CHARS} characters")
    return texts


def nucleus(top_p: float | None, top_k: int | None) -> dict[str, Any]:
    """Return `top_p` and `top_k` of a Sampling, whose top_p is above 0: top_p 0 means the likeliest token."""
    if top_p == 0:
        return {"top_p": None, "top_k": 1}
    return {"top_p": top_p, "top_k": None if top_k is None else min(max(top_k, 0), MAX_TOKENS)}


MOST_IMAGE_BYTES = 20 << 20
"""Bytes of an image at most, as OpenAI's. Claude Code sends at most 3.75 MiB."""
PDF = "application/pdf"


_SENT_AS = "send a PNG, JPEG, WebP or GIF, and a PDF as a document or file"
LOW_SIDE = 512
"""Pixels of the longer side of an image whose `detail` is `low`, as OpenAI's."""
_UNTOLD = ("", "application/octet-stream")
"""Media types that say nothing, as in `data:;base64,`: the bytes decide."""
DETAILS = ("auto", "low", "high", "original")


def image(data: str, media_type: str, param: str, detail: str | None = None) -> ImagePart:
    """Read an image from base64 text."""
    if detail is not None and detail not in DETAILS:
        raise bad_field(param, f"its detail is one of {', '.join(DETAILS)}, not {detail[:80]!r}")
    if media_type not in _UNTOLD and not media_type.startswith("image/"):
        raise bad_field(param, f"media type {media_type[:80]!r} is no image; {_SENT_AS}")
    raw = from_base64(data, "image", param)
    if not raw:
        raise bad_field(param, "the image is empty")
    if len(raw) > MOST_IMAGE_BYTES:
        raise bad_field(param, f"an image may be at most {MOST_IMAGE_BYTES >> 20} MiB")
    return ImagePart(raw, media_type, param, side=LOW_SIDE if detail == "low" else 0)


def is_pdf(encoded: str) -> bool:
    """Return whether base64 text begins as a PDF does."""
    return encoded.lstrip()[:7] == "JVBERi0"  # %PDF-


def pdf(data: bytes, name: str | None, param: str, context: str | None = None) -> DocumentPart:
    """Read a PDF for the engine."""
    return DocumentPart(data, PDF, (name or "")[:1000], context or "", param)


def refuse(asked: dict[str, tuple[Any, str]]) -> None:
    """Raise InvalidRequest for the first field that is asked for. Field → (is it?, why not)."""
    for param, (wanted, why) in asked.items():
        if wanted:
            raise bad_field(param, why)


_PLAIN_ALPHABET = str.maketrans("-_", "+/")


def from_base64(data: str, what: str, param: str) -> bytes:
    """Decode base64 text, also with lines, the URL's alphabet or no padding. Raises InvalidRequest."""
    with contextlib.suppress(ValueError):
        return binascii.a2b_base64(data, strict_mode=True)
    plain = "".join(data.split()).translate(_PLAIN_ALPHABET).rstrip("=")
    try:
        return binascii.a2b_base64(plain + "=" * (-len(plain) % 4), strict_mode=True)
    except ValueError:
        raise bad_field(param, f"the {what} is not valid base64; {NOT_FETCHED}") from None


NOT_FETCHED = "URLs are not fetched and files are not read"


def unsupported(kind: str, param: str) -> InvalidRequest:
    """Make the error for content of a kind that no prompt has."""
    return bad_field(param, f"content of type {kind!r} is not supported, and {NOT_FETCHED}; send text")


def misplaced(what: str, role: str, param: str) -> InvalidRequest:
    """Make the error for `what` in a message of `role`."""
    article = "an" if role.startswith(("a", "e", "i", "o", "u")) else "a"
    shown = role != "user" and any(word in what for word in ("image", "document", "PDF"))
    advice = "; put it into a user message" if shown else ""
    return bad_field(param, f"{what} can't stand in {article} {role} message{advice}")


def not_contacted(param: str) -> InvalidRequest:
    """Make the error for a server of tools, which nothing here contacts."""
    return bad_field(
        param,
        "URLs are not fetched and servers of tools are not asked; give their tools as functions, "
        "and call the servers yourself",
    )


DATA_URL = re.compile(r"data:([\w.+/-]*)(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)


_IMAGES_IN_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
"""Beginnings of PNG, JPEG, GIF and WebP in base64, which Ollama's clients send without `data:`."""


def image_url(url: str, param: str, detail: str | None = None) -> ImagePart:
    """Read an image from a `data:` URL; others are refused, as nothing here fetches URLs."""
    match = DATA_URL.match(url[:200])
    if url.startswith(_IMAGES_IN_BASE64):
        return image(url, "", param, detail)
    if not match and url[:5].lower() == "data:":
        raise bad_field(
            param, "a data: URL is read as data:image/png;base64,… alone, with its data in base64"
        )
    if not match:
        raise bad_field(param, f"{NOT_FETCHED}; send the image itself, as a data: URL with base64")
    return image(url[match.end() :], match[1].lower(), param, detail)


TIMEOUT_HEADER = "x-omlxd-timeout"


def with_timeout(parsed: ParsedRequest, headers: Mapping[str, str]) -> ParsedRequest:
    """Set in `parsed` the client's own limit in seconds, from a header: no protocol has a field for it."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return parsed
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise bad_field(TIMEOUT_HEADER, "seconds are needed, as 30 or 0.5")
    return msgspec.structs.replace(
        parsed, generate=msgspec.structs.replace(parsed.generate, timeout_s=seconds)
    )


def session_header(headers: Mapping[str, str], *names: str) -> str:
    """Join the headers that are present among `names` with `/`. Header keys in lower case."""
    return "/".join(value[:200] for name in names if (value := headers.get(name, "").strip()))


class _Body(msgspec.Struct):
    keep_alive: str | float | int | None = None


_decoder = msgspec.json.Decoder(_Body)


def keep_alive_of(body: bytes) -> float | None:
    """Return the seconds that the model stays loaded after this request; infinite: for good; None: not said.

    As Ollama has it: `"5m"`, `300`, `0` (until the request has ended), `-1`. Raises InvalidRequest.
    """
    if b'"keep_alive"' not in body:
        return None
    try:
        value = _decoder.decode(body).keep_alive
        return None if value is None else duration(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
        raise InvalidRequest(
            'keep_alive: write a length of time as "5m", seconds, 0 or -1', param="keep_alive"
        ) from None
