"""Every field of every request: null means that it is not given, and 2.0 is 2.

The structs are found by reflection: all that a decoder, a route or `convert` of the front and the APIs reads.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from app_client import EMBEDDING, body, client
from fake_engine import FakeEngine, app_of
from msgspec import inspect

import omlxd.api
import omlxd.front
from omlxd.api.fields.body import convert, decode
from omlxd.api.openai.chat_request import ChatBody
from omlxd.errors import InvalidRequest
from omlxd.front.http.routes import Operation


def modules() -> Iterator[Any]:
    for room in (omlxd.api, omlxd.front):
        for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            yield importlib.import_module(found.name)


def routes() -> list[Operation]:
    return [route for route in app_of(FakeEngine()).routes if isinstance(route, Operation)]


def read_types() -> Iterator[Any]:
    """Types that are read from what a client sends."""
    for module in modules():
        yield from (value.type for value in vars(module).values() if isinstance(value, msgspec.json.Decoder))
        source = module.__loader__.get_source(module.__name__)
        for spelled in re.findall(r"\bconvert\([^()]+, ([\w\[\]]*[A-Z][\w\[\]]*)\)", source):
            yield eval(spelled, vars(module))
    yield from (route.body for route in routes() if route.body is not None)


def structs_in(kind: inspect.Type, seen: dict[type, inspect.StructType]) -> None:
    match kind:
        case inspect.StructType() if kind.cls not in seen:
            seen[kind.cls] = kind
            for field in kind.fields:
                structs_in(field.type, seen)
        case inspect.UnionType():
            for each in kind.types:
                structs_in(each, seen)
        case inspect.ListType():
            structs_in(kind.item_type, seen)
        case inspect.DictType():
            structs_in(kind.value_type, seen)
        case inspect.Metadata():
            structs_in(kind.type, seen)
        case _:
            pass


def request_structs() -> list[inspect.StructType]:
    seen: dict[type, inspect.StructType] = {}
    for kind in read_types():
        structs_in(inspect.type_info(kind), seen)
    return list(seen.values())


STRUCTS = request_structs()


def least(kind: inspect.Type) -> Any:
    """A small JSON value of that type."""
    match kind:
        case inspect.StructType():
            tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
            needed = {field.encode_name: least(field.type) for field in kind.fields if field.required}
            return tag | needed
        case inspect.UnionType():
            return least(kind.types[0])
        case inspect.Metadata():
            return least(kind.type)
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.IntType():
            return max(2, kind.ge or 0)
        case inspect.FloatType():
            return 0.5
        case inspect.StrType():
            return "a" * (kind.min_length or 1)
        case inspect.ListType():
            return [least(kind.item_type)] * (kind.min_length or 0)
        case inspect.BoolType():
            return True
        case inspect.DictType():
            return {}
        case _:
            return "a"


def read(kind: type, value: Any) -> bytes:
    """`value` as a body, and as JSON within a body: as msgspec spells what is read."""
    whole = msgspec.json.encode(decode(msgspec.json.Decoder(kind), json.dumps(value).encode()))
    if b"Raw" not in repr(inspect.type_info(kind)).encode():
        assert msgspec.json.encode(convert(value, kind)) == whole
    return whole


def test_the_structs_are_found():
    names = {kind.cls.__qualname__ for kind in STRUCTS}
    assert {"ChatBody", "EmbeddingsBody", "RerankBody", "Options", "ClassifyBody", "MessagesBody"} <= names
    assert {"ResponsesBody", "_Choice", "_RawTool", "Content", "Load", "LMStudioLoadBody"} <= names


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: f"{kind.cls.__module__}.{kind.cls.__name__}")
def test_null_is_not_given(kind: inspect.StructType):
    given = least(kind)
    for field in kind.fields:
        if not field.required:
            assert read(kind.cls, given | {field.encode_name: None}) == read(kind.cls, given), field.name


def integers(kind: inspect.Type) -> inspect.IntType | None:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if any(isinstance(each, inspect.FloatType | inspect.AnyType) for each in kinds):
        return None
    return next((each for each in kinds if isinstance(each, inspect.IntType)), None)


NUMBERED = [(kind, field) for kind in STRUCTS for field in kind.fields if integers(field.type)]


@pytest.mark.parametrize(
    ("kind", "field"), NUMBERED, ids=lambda it: getattr(it, "name", None) or it.cls.__name__
)
def test_a_number_is_a_number(kind: inspect.StructType, field: inspect.Field):
    given, name = least(kind), field.encode_name
    number = least(integers(field.type))
    told = read(kind.cls, given | {name: number})
    for spelled in (float(number), f"{number}e0", f"{number}0e-1"):
        text = json.dumps(given | {name: "@"}).replace('"@"', str(spelled)).encode()
        assert msgspec.json.encode(decode(msgspec.json.Decoder(kind.cls), text)) == told
    with pytest.raises(InvalidRequest) as error:
        read(kind.cls, given | {name: number + 0.5})
    assert error.value.param == name and "int" in error.value.message


def test_free_json_stays():
    parameters = {"type": "object", "default": None, "x": {"maximum": 2.0, "default": None}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": None}}
    text = json.dumps(body("/v1/chat/completions", tools=[tool], max_tokens=2.0, stream_options=None))
    read = decode(msgspec.json.Decoder(ChatBody), text.encode())
    assert read.max_tokens == 2 and json.dumps(read.tools[0].function.parameters) == json.dumps(parameters)


DOORS = [route.path for route in routes() if route.body and not route.path.startswith("/omlxd")]


@pytest.mark.parametrize("path", DOORS)
async def test_a_door_takes_null_for_all_that_is_optional(path: str):
    kind = next(inspect.type_info(route.body) for route in routes() if route.path == path)
    assert isinstance(kind, inspect.StructType)
    given = body(path)
    if path in ("/v1/classify", "/v1/score"):
        given = {"model": "tiny", "input": "hi", "labels": ["a", "b"], "text_1": "a", "text_2": "b"}
    given = {
        field.encode_name: given[field.encode_name] for field in kind.fields if field.encode_name in given
    }
    nulls = {
        field.encode_name: None
        for field in kind.fields
        if field.encode_name not in given and not field.required
    }
    told = []
    for more in ({}, nulls):
        engine = FakeEngine(model_id="tiny")
        engine.kind = "embedding" if path in EMBEDDING else engine.kind
        async with client(app_of(engine)) as http:
            answer = await http.post(path, json=given | more)
        told.append((answer.status_code, [*engine.requests], [*engine.embedded]))
    assert told[0] == told[1]
