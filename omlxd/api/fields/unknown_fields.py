"""Reports a request's fields that nobody reads: a mistyped name changes nothing, silently.

`body.decode` notes them for whoever began `noting` the request. Objects of any content (a tool's schema,
the arguments of a call) are their sender's own.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import msgspec
from msgspec import inspect

MOST_BYTES = 1 << 20
"""Bytes of a body whose inner objects are read too; of a longer one, only the outermost."""
MOST_MEMBERS = 100_000
"""Members of a longer body that is read: all may be outermost fields, each a piece of its own."""
MOST_FIELDS, MOST_NAMES = 20, 1000
_NAME_CHARS = 80


class UnknownFields:
    """Unknown fields of one request: those that none of the structs that read its body has."""

    def __init__(self) -> None:
        self._names: dict[str, None] | None = None

    def note(self, kind: Any, body: bytes) -> None:
        """Note the unknown fields of `body`, decoded as `kind` without an error."""
        found, before = unknown_fields(kind, body), self._names
        if before is None:
            self._names = found
        else:
            both = {**before, **found}
            self._names = {name: None for name in both if _within(name, before) and _within(name, found)}

    @property
    def names(self) -> list[str]:
        """Names, `MOST_FIELDS` at most. `messages.*.nam`: of some message."""
        return list(self._names or ())[:MOST_FIELDS]


def _within(name: str, unknown: dict[str, None]) -> bool:
    """Return whether `unknown` has the field or one around it."""
    return any(name == each or name.startswith(f"{each}.") for each in unknown)


noted: ContextVar[UnknownFields | None] = ContextVar("noted", default=None)


def noting() -> UnknownFields:
    """Note the fields of bodies that are decoded from now on, in this task and those it starts."""
    fields = UnknownFields()
    noted.set(fields)
    return fields


def unknown_fields(kind: Any, body: bytes) -> dict[str, None]:
    """Return the fields of `body` that no struct of `kind` has, in order, or the first of them.

    {} for what can't be read, or is too large to be looked at.
    """
    found: dict[str, None] = {}
    if len(body) > MOST_BYTES and body.count(b'":') > MOST_MEMBERS:
        return found
    try:
        _look(_place(kind), msgspec.Raw(body), "", found, len(body) <= MOST_BYTES)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
    return found


class _Place:
    """Types at a place of a body. `structs`: by tag, None for one without."""

    def __init__(self) -> None:
        self.tag_field = ""
        self.structs: dict[Any, dict[str, _Place]] = {}
        self.items: _Place | None = None
        self.is_free = False
        """Whether the place takes an object of any content, too."""

    def add(self, kind: inspect.Type) -> None:
        match kind:
            case inspect.Metadata():
                self.add(kind.type)
            case inspect.UnionType():
                for each in kind.types:
                    self.add(each)
            case inspect.StructType():
                self.tag_field = self.tag_field or kind.tag_field or ""
                self.structs[kind.tag] = _fields(kind)
            case inspect.ListType() | inspect.VarTupleType():
                self.items = self.items or _Place()
                self.items.add(kind.item_type)
            case inspect.AnyType() | inspect.DictType() | inspect.RawType():
                self.is_free = True

    @property
    def is_looked_at(self) -> bool:
        return bool(self.structs) or self.items is not None


_places: dict[Any, _Place] = {}
_fields_of: dict[type, dict[str, _Place]] = {}


def _place(kind: Any) -> _Place:
    place = _places.get(kind)
    if place is None:
        place = _places[kind] = _Place()
        place.add(inspect.type_info(kind))
    return place


def _fields(kind: inspect.StructType) -> dict[str, _Place]:
    """Return the places of a struct's fields; a recursive struct comes once."""
    fields = _fields_of.get(kind.cls)
    if fields is None:
        fields = _fields_of[kind.cls] = {}
        for field in kind.fields:
            fields[field.encode_name] = place = _Place()
            place.add(field.type)
    return fields


_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[msgspec.Raw])


def _look(place: _Place, value: msgspec.Raw, path: str, found: dict[str, None], deep: bool) -> None:
    text = bytes(value).lstrip()
    if place.items is not None and text[:1] == b"[":
        for item in _list.decode(text):
            _look(place.items, item, f"{path}*.", found, deep)
    if not place.structs or place.is_free or text[:1] != b"{":
        return
    given = _object.decode(text)
    tag = given.get(place.tag_field) if place.tag_field else None
    key = None if tag is None else msgspec.json.decode(tag)
    fields = place.structs.get(key) if isinstance(key, (str, int)) or key is None else None
    if fields is None:
        if len(place.structs) != 1:
            return
        (fields,) = place.structs.values()
    for name, inner in given.items():
        if name == place.tag_field:
            continue
        if (known := fields.get(name)) is None:
            if len(found) < MOST_NAMES:
                found[f"{path}{name}"[:_NAME_CHARS]] = None
        elif deep and known.is_looked_at:
            _look(known, inner, f"{path}{name}.", found, deep)
