"""Two liberties that clients take with every field: null for what is not given, and 2.0 for 2.

The types of a body stay strict; `lenient` rewrites a value that they refuse. Free-form JSON (a schema, a
call's arguments) is what the client means, and stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from msgspec import ValidationError, inspect

_type_info = cache(inspect.type_info)


def may_help(error: ValidationError) -> bool:
    """Return whether `lenient` could mend msgspec's `error`."""
    return str(error).partition(" - at ")[0].endswith(("got `null`", "got `float`"))


def lenient(value: Any, kind: Any) -> Any:
    """Return `value`, JSON that is to be a `kind`, without null for optional fields and with 2 for 2.0."""
    return _lenient(value, _type_info(kind))


def as_integer(value: Any) -> Any:
    """Return a float without a fraction as an integer, and all else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


def _lenient(value: Any, kind: inspect.Type) -> Any:
    match _meant(value, kind):
        case inspect.IntType():
            return as_integer(value)
        case inspect.StructType() as struct if isinstance(value, dict):
            return _of_struct(value, struct)
        case inspect.DictType(value_type=inner) if isinstance(value, dict):
            return {key: _lenient(item, inner) for key, item in value.items()}
        case inspect.ListType(item_type=inner) if isinstance(value, list):
            return [_lenient(item, inner) for item in value]
        case _:
            return value


def _of_struct(value: dict[str, Any], struct: inspect.StructType) -> dict[str, Any]:
    fields = {field.encode_name: field for field in struct.fields}
    result: dict[str, Any] = {}
    for name, item in value.items():
        field = fields.get(name)
        if field is None:
            result[name] = item
        elif item is not None or field.required or _takes_null(field.type):
            result[name] = _lenient(item, field.type)
    return result


def _takes_null(kind: inspect.Type) -> bool:
    return any(isinstance(each, inspect.NoneType | inspect.AnyType | inspect.RawType) for each in _each(kind))


def _meant(value: Any, kind: inspect.Type) -> inspect.Type:
    """Return the type of a union that fits `value`; `AnyType` where none does."""
    for each in _each(kind):
        match each:
            case inspect.StructType(tag_field=str(field), tag=tag) if isinstance(value, dict):
                if value.get(field) == tag:
                    return each
            case inspect.StructType() | inspect.DictType() if isinstance(value, dict):
                return each
            case inspect.ListType() if isinstance(value, list):
                return each
            case inspect.FloatType() if isinstance(value, float):
                return each
            case _:
                pass
    integers = (each for each in _each(kind) if isinstance(each, inspect.IntType))
    return next(integers, inspect.AnyType())


def _each(kind: inspect.Type) -> Sequence[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _each(kind.type)
    return (
        [inner for each in kind.types for inner in _each(each)]
        if isinstance(kind, inspect.UnionType)
        else [kind]
    )
