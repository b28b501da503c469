"""Documents and search results of Anthropic's API: as text in a frame, or refused with what to send."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from omlxd.api.anthropic import request
from omlxd.api.anthropic.documents import MAX_DOCUMENT_BYTES
from omlxd.chat import Conversation, DocumentPart, Message, TextPart, ToolResultPart
from omlxd.errors import InvalidRequest

NOISE = {
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
    "citations": {"enabled": True},
    "of_the_future": 1,
}


def parts(*blocks: dict[str, Any]):
    body = {"messages": [{"role": "user", "content": list(blocks)}]}
    prompt = request.parse(json.dumps(body).encode()).generate.prompt
    assert isinstance(prompt, Conversation)
    (message,) = prompt.messages
    return message.parts


def refused(*blocks: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parts(*blocks)
    assert caught.value.param and caught.value.message.startswith(caught.value.param)
    return caught.value


def document(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


def plain(text: str = "Water boils.") -> dict[str, Any]:
    return {"type": "text", "media_type": "text/plain", "data": text}


def packed(data: bytes, media_type: str = "text/plain") -> dict[str, Any]:
    return {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}


def content(*blocks: Any) -> dict[str, Any]:
    return {"type": "content", "content": list(blocks)}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def result(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": list(blocks), **more}


FRAMED = """\
<document>
<title>Kettles</title>
<context>A manual of 1931.</context>
<document_content>
Water boils.
</document_content>
</document>"""
BARE = "<document>\n<document_content>\nWater boils.\n</document_content>\n</document>"

SEARCH = {
    "type": "search_result",
    "source": "https://kettles.example/1",
    "title": "Kettles",
    "content": [text("Water boils."), text("Tea follows.", **NOISE)],
}
SEARCH_TEXT = """\
<search_result>
<source>https://kettles.example/1</source>
<title>Kettles</title>
<content>
Water boils.
Tea follows.
</content>
</search_result>"""


def test_a_document_is_told_with_its_title_and_context():
    block = document(plain(), title="Kettles", context="A manual of 1931.")
    assert parts(block) == (TextPart(FRAMED),)


@pytest.mark.parametrize(
    "source",
    [
        plain(),
        {"type": "text", "data": "Water boils."},
        {"type": "content", "content": "Water boils."},
        content(text("Water boils.", **NOISE)),
        packed(b"Water boils."),
        packed(b"Water boils.", "text/markdown; charset=utf-8"),
        packed(b"\xef\xbb\xbfWater boils.", "application/json"),
    ],
)
@pytest.mark.parametrize("about", [{}, {"title": None, "context": ""}])
def test_every_way_to_send_a_text_is_the_same_text(source, about):
    assert parts(document(source, **about)) == (TextPart(BARE),)


def test_texts_within_a_document_are_lines():
    assert parts(document(content(text("a"), text("b"))))[0].text.splitlines()[2:4] == ["a", "b"]


def test_base64_with_line_breaks_is_read():
    source = packed("é".encode() * 100)
    source["data"] = "\n".join(source["data"][at : at + 76] for at in range(0, len(source["data"]), 76))
    assert "é" * 100 in parts(document(source))[0].text


def test_a_search_result_is_told_with_its_source_and_title():
    assert parts(SEARCH) == (TextPart(SEARCH_TEXT),)


def test_blocks_keep_their_order_among_texts():
    assert parts(text("Read:"), document(plain()), SEARCH, text("Why?")) == (
        TextPart("Read:"),
        TextPart(BARE),
        TextPart(SEARCH_TEXT),
        TextPart("Why?"),
    )


def test_both_may_stand_in_the_result_of_a_tool():
    assert parts(result(text("Found:"), SEARCH, document(plain()), is_error=True)) == (
        ToolResultPart("t", f"Found:\n{SEARCH_TEXT}\n{BARE}", is_error=True),
    )


@pytest.mark.parametrize("block", [document(plain(), title="t"), SEARCH])
def test_cache_control_and_citations_are_never_in_the_prompt(block):
    assert parts(block) == parts({**block, **NOISE})
    assert parts(result(block)) == parts(result({**block, **NOISE}, cache_control={"type": "ephemeral"}))
    assert "citations" not in str(parts({**block, **NOISE}))


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
URL_IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}


@pytest.mark.parametrize(
    ("source", "where", "words"),
    [
        (
            {"type": "url", "url": "https://a.example/b.pdf"},
            "",
            ["'url' are not fetched", "send a PDF as base64", '"type": "text"'],
        ),
        ({"type": "file", "file_id": "file_1"}, "", ["'file' are not kept here", '"type": "text"']),
        (packed(b"\x89PNG", "image/png"), ".media_type", ["a block of type image"]),
        (packed(b"PK", "application/zip"), ".media_type", ["'application/zip'", "text/*", '"type": "text"']),
        (packed(b"caf\xe9"), ".data", ["not UTF-8 (byte 3)", "convert it"]),
        ({**packed(b""), "data": "%%"}, ".data", ["not valid base64"]),
        ({**packed(b""), "data": "ééé="}, ".data", ["not valid base64"]),
        (content(text("a"), URL_IMAGE), ".content.1.source", ["as base64"]),
    ],
)
def test_what_is_no_text_is_refused_with_what_to_do(source, where, words):
    for blocks, at in (
        ((text("x"), document(source)), "messages.0.content.1.document"),
        ((result(text("x"), document(source)),), "messages.0.content.0.tool_result.content.1.document"),
    ):
        error = refused(*blocks)
        assert error.param == f"{at}.source{where}"
        assert all(word in error.message for word in words), error.message


@pytest.mark.parametrize("said", ["application/pdf", "text/plain", "application/octet-stream"])
def test_a_pdf_is_one_whatever_its_type_is_said_to_be(said: str):
    [part] = parts(document(packed(b"%PDF-1.7 and more", said), title="k"))
    assert isinstance(part, DocumentPart) and (part.media_type, part.name) == ("application/pdf", "k")


def test_images_of_a_document_stay_in_their_place():
    block = document(content(text("a"), IMAGE, text("b"), text("c"), IMAGE), title="Kettles")
    first, picture, second, other, end = parts(block)
    assert first == TextPart("<document>\n<title>Kettles</title>\n<document_content>\na")
    assert (second, end) == (TextPart("b\nc"), TextPart("</document_content>\n</document>"))
    assert (picture.data, picture.param) == (
        b"\0\0\0",
        "messages.0.content.0.document.source.content.1.source",
    )
    assert other.param.endswith("content.4.source")
    [in_result] = parts(result(block))
    assert in_result.text == "\n".join([first.text, second.text, end.text])
    assert [image.data for image in in_result.images] == [picture.data, other.data]


def test_a_document_in_base64_has_a_bound():
    assert len(parts(document(packed(b"a" * MAX_DOCUMENT_BYTES)))[0].text) > MAX_DOCUMENT_BYTES
    assert str(MAX_DOCUMENT_BYTES) in refused(document(packed(b"a" * (MAX_DOCUMENT_BYTES + 9)))).message


@pytest.mark.parametrize(
    ("block", "param"),
    [
        (document({"type": "of_the_future"}), "messages.0.content.0.source.type"),
        (document({"type": "text"}), "messages.0.content.0.source.data"),
        ({"type": "document"}, "messages.0.content.0.source"),
        ({"type": "search_result", "title": "t", "content": []}, "messages.0.content.0.source"),
        ({**SEARCH, "content": [IMAGE]}, "messages.0.content.0.content.0.type"),
        ({"type": "container_upload", "file_id": "f"}, "messages.0.content.0"),
    ],
)
def test_blocks_that_are_not_whole_are_named(block, param):
    assert refused(block).param == param


@pytest.mark.parametrize("block", [document(plain()), SEARCH])
@pytest.mark.parametrize("role", ["assistant", "system"])
def test_only_a_user_or_a_tool_shows_documents(block, role):
    body = {"messages": [{"role": role, "content": [block]}]}
    article = "an" if role == "assistant" else "a"
    said = f"content of type '{block['type']}' can't stand in {article} {role} message"
    with pytest.raises(InvalidRequest, match=said):
        request.parse(json.dumps(body).encode())


def test_a_conversation_about_a_document_extends_itself():
    first = {"role": "user", "content": [document(plain(), **NOISE), text("Why?")]}
    again = {"role": "user", "content": [document(plain()), text("Why?", **NOISE)]}
    more = [again, {"role": "assistant", "content": "Heat."}, {"role": "user", "content": "And tea?"}]

    def messages(*given: Any) -> tuple[Message, ...]:
        prompt = request.parse(json.dumps({"messages": given}).encode()).generate.prompt
        assert isinstance(prompt, Conversation)
        return prompt.messages

    assert messages(*more)[:1] == messages(first)
