"""Files in a request: text becomes text of the message, anything else is refused by name."""

from __future__ import annotations

import base64
import json

import pytest
from fake_engine import FakeEngine
from responses import item, messages
from sdk_clients import gpt

from omlxd.api.fields import text_files
from omlxd.api.openai import chat_request
from omlxd.chat import Message, TextPart, ToolResultPart
from omlxd.errors import InvalidRequest


def encoded(content: str | bytes) -> str:
    raw = content.encode() if isinstance(content, str) else content
    return base64.b64encode(raw).decode()


def url(content: str | bytes, media_type: str = "text/plain") -> str:
    return f"data:{media_type};base64,{encoded(content)}"


def file(**fields):
    return {"type": "input_file", **fields}


def of_responses(given: dict) -> str:
    (message,) = messages(item("user", given))
    (part,) = message.parts
    assert isinstance(part, TextPart)
    return part.text


def of_chat(given: dict) -> str:
    content = [{"type": "file", "file": {key: given[key] for key in given if key != "type"}}]
    body = {"messages": [{"role": "user", "content": content}]}
    (message,) = chat_request.parse(json.dumps(body).encode()).generate.prompt.messages
    return message.parts[0].text


@pytest.mark.parametrize("of", [of_responses, of_chat])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            file(file_data=url("a,b\n1,2\n", "text/csv"), filename="t.csv"),
            '<file name="t.csv">\na,b\n1,2\n</file>',
        ),
        (file(file_data=encoded("# é")), "<file>\n# é\n</file>"),
        (file(file_data=url("{}", "application/json;charset=utf-8")), "<file>\n{}\n</file>"),
        (file(file_data=url("\ufeffx", ""), filename='a"b\n<c>.md'), '<file name="a_b__c_.md">\nx\n</file>'),
        (file(file_data="DATA:Text/Plain;base64,YW\nJj"), "<file>\nabc\n</file>"),
        (
            file(file_data=url('if raw[:5] == b"%PDF-": ...\n')),
            '<file>\nif raw[:5] == b"%PDF-": ...\n</file>',
        ),
        (file(file_data="", filename="empty.txt"), '<file name="empty.txt">\n\n</file>'),
    ],
)
def test_text_becomes_text(of, given, told):
    assert of(given) == told


@pytest.mark.parametrize("of", [of_responses, of_chat])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (file(file_data=url(b"PK\x03\x04\xff", "application/zip"), filename="a.docx"), "'a.docx' is neither"),
        (file(file_data=url(b"a\0b")), "'text/plain' is neither"),
        (file(file_data="%%"), "not valid base64"),
        (file(file_data="data:text/plain,hello"), "not valid base64"),
        (file(file_data="https://a.example/b.pdf"), "URLs are not fetched"),
        (file(file_data=encoded(b"a" * (text_files.MAX_BYTES + 9))), "at most 8 MiB"),
        (file(file_id="file-1"), "no files are kept here"),
        (file(filename="x.txt"), "file_data: this field is required"),
    ],
)
def test_what_is_no_text_is_refused_by_name(of, given, says):
    with pytest.raises(InvalidRequest, match=says) as refused:
        of(given)
    assert refused.value.param and refused.value.param in refused.value.message


def test_a_url_is_not_fetched():
    with pytest.raises(InvalidRequest, match="URLs are not fetched") as refused:
        of_responses(file(file_url="http://127.0.0.1:1/x.txt"))
    assert refused.value.param == "input.0.content.0.file_url"


def test_a_tool_may_give_a_file_back():
    output = [{"type": "input_text", "text": "found"}, file(file_data=encoded("x"), filename="n.md")]
    assert messages({"type": "function_call_output", "call_id": "c", "output": output}) == (
        Message("tool", (ToolResultPart("c", 'found\n<file name="n.md">\nx\n</file>'),)),
    )


async def test_the_sdk_sends_files():
    engine = FakeEngine()
    text = {"type": "input_text", "text": "Sum up."}
    async with gpt(engine) as client:
        content = [file(file_data=url("one\n"), filename="n.txt"), text]
        await client.responses.create(model="tiny", input=[{"role": "user", "content": content}])
        same = [
            {"type": "file", "file": {"file_data": url("one\n"), "filename": "n.txt"}},
            {"type": "text", "text": "Sum up."},
        ]
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": same}])
    first, second = (request.prompt.messages for request in engine.requests)
    assert (
        first
        == second
        == (Message("user", (TextPart('<file name="n.txt">\none\n</file>'), TextPart("Sum up."))),)
    )
