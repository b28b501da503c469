"""Images and PDFs in the three protocols: the same parts of a conversation, and the same limits."""

from __future__ import annotations

import base64
import json
import re
from typing import ClassVar

import openai
import pytest
from fake_engine import FakeEngine
from media_files import pdf
from msgspec.structs import replace
from sdk_clients import claude, gpt

from omlxd import chat
from omlxd.api.anthropic import request as anthropic_request
from omlxd.api.fields.body import MOST_IMAGE_BYTES, from_base64, image_url
from omlxd.api.ollama import request as ollama_request
from omlxd.api.openai import chat_request
from omlxd.api.responses import request as responses_request
from omlxd.errors import InvalidRequest

PNG = b"\x89PNG\r\n\x1a\n..."
PAGES = pdf(["A kettle boils."])


def data_url(raw: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(raw).decode()}"


def source(raw: bytes, media_type: str = "image/png") -> dict:
    return {"type": "base64", "media_type": media_type, "data": base64.b64encode(raw).decode()}


class Anthropic:
    call: ClassVar = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c1", "name": "read", "input": {}}],
    }

    @staticmethod
    def image(raw: bytes) -> dict:
        return {"type": "image", "source": source(raw)}

    @staticmethod
    def pdf(raw: bytes) -> dict:
        return {"type": "document", "title": "k.pdf", "source": source(raw, "application/pdf")}

    @staticmethod
    def body(user: list, result: list) -> dict:
        results = [{"type": "tool_result", "tool_use_id": "c1", "content": result}]
        text = {"type": "text", "text": "look"}
        messages = [{"role": "user", "content": [text, *user]}, Anthropic.call]
        return {"messages": [*messages, {"role": "user", "content": results}], "model": "tiny"}

    parse = staticmethod(anthropic_request.parse)
    user_at, result_at = (
        "messages.0.content.1.image.source",
        "messages.2.content.0.tool_result.content.0.image.source",
    )


class Chat:
    call: ClassVar = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}

    @staticmethod
    def image(raw: bytes) -> dict:
        return {"type": "image_url", "image_url": {"url": data_url(raw), "detail": "high"}}

    @staticmethod
    def pdf(raw: bytes) -> dict:
        return {"type": "file", "file": {"filename": "k.pdf", "file_data": data_url(raw, "application/pdf")}}

    @staticmethod
    def body(user: list, result: list) -> dict:
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "look"}, *user]},
            {"role": "assistant", "content": None, "tool_calls": [Chat.call]},
            {"role": "tool", "tool_call_id": "c1", "content": result},
        ]
        return {"messages": messages, "model": "tiny"}

    parse = staticmethod(chat_request.parse)
    user_at, result_at = "messages.0.content.1.image_url", "messages.2.content.0.image_url"


class Responses:
    call: ClassVar = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}

    @staticmethod
    def image(raw: bytes) -> dict:
        return {"type": "input_image", "image_url": data_url(raw), "detail": "auto"}

    @staticmethod
    def pdf(raw: bytes) -> dict:
        return {"type": "input_file", "filename": "k.pdf", "file_data": data_url(raw, "application/pdf")}

    @staticmethod
    def body(user: list, result: list) -> dict:
        first = {"role": "user", "content": [{"type": "input_text", "text": "look"}, *user]}
        output = {"type": "function_call_output", "call_id": "c1", "output": result}
        return {"input": [first, Responses.call, output], "model": "tiny"}

    parse = staticmethod(responses_request.parse)
    user_at, result_at = "input.0.content.1.image_url", "input.2.output.0.image_url"


class Ollama:
    parse = staticmethod(ollama_request.parse_chat)

    @staticmethod
    def messages(image: str) -> dict:
        return {"messages": [{"role": "user", "content": "look", "images": [image]}]}


PROTOCOLS = pytest.mark.parametrize("protocol", [Anthropic, Chat, Responses])


def messages(protocol, user: list, result: list) -> tuple[chat.Message, ...]:
    prompt = protocol.parse(json.dumps(protocol.body(user, result)).encode()).generate.prompt
    assert isinstance(prompt, chat.Conversation)
    return prompt.messages


def refused(protocol, user: list, result: list) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        messages(protocol, user, result)
    assert caught.value.message.startswith(f"{caught.value.param}: ")
    return caught.value


@PROTOCOLS
def test_images_and_pdfs_stand_in_messages_and_in_results(protocol):
    both = [protocol.image(PNG), protocol.pdf(PAGES)]
    user, _, tool = messages(protocol, both, both)
    text, image, document = user.parts
    assert text == chat.TextPart("look")
    assert image == chat.ImagePart(PNG, "image/png", protocol.user_at)
    assert document == chat.DocumentPart(PAGES, "application/pdf", "k.pdf", "", document.param)
    assert document.param.startswith(protocol.user_at.split(".content")[0])
    [result] = tool.parts
    assert (result.text, result.images) == ("", (replace(image, param=protocol.result_at),))
    assert result.documents == (replace(document, param=result.documents[0].param),)


@PROTOCOLS
def test_an_image_is_limited_in_bytes(protocol):
    assert len(messages(protocol, [protocol.image(b"x" * MOST_IMAGE_BYTES)], [])) == 3
    error = refused(protocol, [protocol.image(b"x" * (MOST_IMAGE_BYTES + 9))], [])
    assert error.param == protocol.user_at and "at most 20 MiB" in error.message
    assert "is empty" in refused(protocol, [], [protocol.image(b"")]).message


CLAUDE_CODE_FINDS = re.compile(
    r"messages[.[](\d+)[\].]+content[.[](\d+)[\].]+(?:tool_result[.[]content[.[](\d+)[\].]+)?(image|document|pdf)"
)
"""What it looks for in an error (2.1.329): a note then stands for the block, and it asks again."""


@pytest.mark.parametrize("kind", ["image", "document"])
def test_claude_code_finds_which_block_to_take_out(kind):
    good, bad = (
        (Anthropic.image, Anthropic.pdf)[kind == "document"],
        {"type": kind, "source": source(b"", "image/png")},
    )
    for user, result, place in (([good(PNG), bad], [], "0 2 None"), ([], [good(PAGES), bad], "2 0 1")):
        found = CLAUDE_CODE_FINDS.search(refused(Anthropic, user, result).message)
        assert found and " ".join(map(str, found.groups())) == f"{place} {kind}"


def test_the_model_reads_what_anthropic_s_client_says_of_a_pdf():
    block = {**Anthropic.pdf(PAGES), "context": "from the shop", "citations": {"enabled": True}}
    [document] = chat.media_of(messages(Anthropic, [block], []))
    assert isinstance(document, chat.DocumentPart)
    assert (document.name, document.context) == ("k.pdf", "from the shop")


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_a_pdf_stands_beside_what_a_user_says(role):
    for protocol, body in (
        (Chat, {"messages": [{"role": role, "content": [Chat.pdf(PAGES)]}]}),
        (Responses, {"input": [{"role": role, "content": [Responses.pdf(PAGES)]}]}),
    ):
        with pytest.raises(InvalidRequest, match=f"a PDF can't stand in an? {role} message"):
            protocol.parse(json.dumps(body).encode())


async def test_the_sdks_send_images_and_pdfs():
    engine = FakeEngine()
    async with claude(engine) as client:
        body = Anthropic.body([Anthropic.image(PNG), Anthropic.pdf(PAGES)], [Anthropic.image(PNG)])
        await client.messages.create(**body, max_tokens=9)
        await client.messages.count_tokens(**body)
    async with gpt(engine) as client:
        await client.chat.completions.create(
            **Chat.body([Chat.image(PNG), Chat.pdf(PAGES)], [Chat.image(PNG)])
        )
        await client.responses.create(
            **Responses.body([Responses.image(PNG), Responses.pdf(PAGES)], [Responses.image(PNG)])
        )
        remote = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
        with pytest.raises(openai.BadRequestError, match="URLs are not fetched"):
            await client.chat.completions.create(**Chat.body([remote], []))
    assert len(engine.requests) == 3 and len(engine.counted) == 1
    for request in engine.requests:
        media = list(chat.media_of(request.prompt.messages))
        assert [part.data for part in media] == [PNG, PAGES, PNG]


def test_an_image_by_a_files_id_is_an_error_of_that_field():
    image = {"type": "input_image", "file_id": "file-1"}
    for asked in ([image], []), ([], [image]):
        with pytest.raises(InvalidRequest, match="no files are kept here; send image_url") as caught:
            messages(Responses, *asked)
        assert caught.value.param and caught.value.param.endswith(".file_id")


@pytest.mark.parametrize("protocol", [Chat, Responses])
def test_an_image_that_is_missing_or_in_no_base64_is_told_from_one_at_a_url(protocol):
    empty, plain = (
        protocol.image(PNG),
        json.dumps(protocol.image(PNG)).replace(data_url(PNG), "data:image/png,abc"),
    )
    del empty["image_url"]
    for image, words in ((empty, "required|missing"), (json.loads(plain), "with its data in base64")):
        error = refused(protocol, [image], [])
        assert re.search(words, error.message) and "not fetched" not in error.message


@pytest.mark.parametrize("protocol", [Chat, Responses])
def test_detail_low_bounds_the_longer_side(protocol):
    def image(detail: str) -> dict:
        return json.loads(json.dumps(protocol.image(PNG)).replace('"high"', '"auto"').replace("auto", detail))

    def sides(detail: str) -> list[int]:
        asked = messages(protocol, [image(detail)], [image(detail)])
        return [part.side for part in chat.media_of(asked) if isinstance(part, chat.ImagePart)]

    assert [sides(detail) for detail in ("low", "auto", "high", "original")] == [[512] * 2, *[[0, 0]] * 3]
    for asked in ([image("tiny")], []), ([], [image("tiny")]):
        with pytest.raises(
            InvalidRequest, match=r"its detail is one of auto, low, high, original, not 'tiny'"
        ):
            messages(protocol, *asked)


RAW = bytes(range(256)) + b"?"


@pytest.mark.parametrize(
    "text",
    [
        base64.encodebytes(RAW).decode(),
        base64.urlsafe_b64encode(RAW).decode(),
        base64.b64encode(RAW).decode().rstrip("="),
        "\n " + base64.b64encode(RAW).decode() + "\r\n",
    ],
    ids=["lines", "the URL's alphabet", "no padding", "blanks around it"],
)
def test_base64_as_people_write_it_is_read(text: str):
    assert from_base64(text, "image", "data") == RAW
    assert image_url(f"DATA:Image/PNG;base64,{text}", "url") == chat.ImagePart(RAW, "image/png", param="url")


@pytest.mark.parametrize("text", ["%%", "AAAAA", "AA=A", "ééé="])
def test_what_is_no_base64_is_an_error_of_its_field(text: str):
    with pytest.raises(InvalidRequest, match="not valid base64"):
        from_base64(text, "image", "data")


def test_an_error_says_where_an_image_belongs():
    image, text = Anthropic.image(PNG), {"role": "user", "content": "look"}
    file = {"type": "file", "file": {"filename": "a.png", "file_data": data_url(PNG)}}
    wrong = {"type": "image", "source": source(PNG, "text/plain")}
    at, in_chat = "messages.0.content.0", Ollama.messages
    for parse, body, param, words in (
        (Anthropic.parse, {"messages": [{"role": "system", "content": [image]}, text]}, at, "a user"),
        (
            Anthropic.parse,
            {"messages": [{"role": "user", "content": [wrong]}]},
            f"{at}.image.source",
            "a PNG",
        ),
        (Chat.parse, {"messages": [{"role": "system", "content": [Chat.image(PNG)]}]}, at, "a user"),
        (
            Chat.parse,
            {"messages": [{"role": "user", "content": [file]}]},
            f"{at}.file.file_data",
            "image_url",
        ),
        (Ollama.parse, in_chat("http://127.0.0.1:1/a.png"), "messages.0.images.0", "URLs are not fetched"),
        (Ollama.parse, in_chat("./a.png"), "messages.0.images.0", "files are not read"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            parse(json.dumps({"model": "tiny", "max_tokens": 9, **body}).encode())
        assert caught.value.param == param and words in caught.value.message
    body = json.dumps({"model": "tiny", **in_chat(data_url(PNG))}).encode()
    [shown] = chat.media_of(Ollama.parse(body).generate.prompt.messages)
    assert shown.data == PNG
