"""A model that reads no images: the error names it, and one that does if there is one."""

from __future__ import annotations

import anthropic
import openai
import pytest
from fake_engine import INFO, FakeEngine
from msgspec.structs import replace
from sdk_clients import claude, gpt

from omlxd.chat import Conversation, ImagePart, Message, RawPrompt, TextPart, ToolResultPart
from omlxd.errors import InvalidRequest
from omlxd.front.engines.protocol import check_images

IMAGE = ImagePart(b"png", "image/png", "messages.0.content.0")


def engine(model_id: str, images: bool | None, blind: str = "") -> FakeEngine:
    made = FakeEngine(model_id=model_id)
    made.info = None if images is None else replace(INFO, model_id=model_id, images=images, blind=blind)
    return made


def asked(*parts) -> Conversation:
    return Conversation((Message("user", parts),))


def refusal(of: FakeEngine, *others: FakeEngine, prompt=None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_images(of, [of, *others], prompt or asked(IMAGE))
    assert caught.value.param == IMAGE.param
    return caught.value.message


def test_the_error_names_the_model_and_one_that_sees():
    text, other, seeing = engine("org/text", False), engine("org/other", None), engine("org/vl", True)
    at = "messages.0.content.0: "
    assert refusal(text, other) == at + "org/text reads no images, and no installed model does"
    assert (
        refusal(text, other, seeing) == at + "org/text reads no images, and org/vl does: ask for that model"
    )
    result = Conversation((Message("tool", (ToolResultPart("c", "see", images=(IMAGE,)),)),))
    assert "org/vl" in refusal(text, seeing, prompt=result)
    blind = engine("org/half", False, "mlx-vlm is not installed")
    assert "org/half reads no images (mlx-vlm is not installed)" in refusal(blind)


def test_what_can_be_read_is_let_through():
    text, unknown, seeing = engine("org/text", False), engine("org/other", None), engine("org/vl", True)
    for model, prompt in (
        (seeing, asked(IMAGE)),
        (unknown, asked(IMAGE)),  # Its engine knows.
        (text, asked(TextPart("hi"))),
        (text, RawPrompt("hi")),
    ):
        check_images(model, [model], prompt)


async def test_clients_get_it_before_the_model_is_asked():
    text = engine("org/text", False)
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    async with claude(text) as client:
        with pytest.raises(anthropic.BadRequestError, match="org/text reads no images"):
            await client.messages.create(model="text", messages=messages, max_tokens=3)
        with pytest.raises(anthropic.BadRequestError, match="org/text reads no images"):
            await client.messages.count_tokens(model="text", messages=messages)
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with gpt(text) as client:
        with pytest.raises(openai.BadRequestError, match="org/text reads no images") as caught:
            await client.chat.completions.create(model="text", messages=[{"role": "user", "content": [url]}])
    assert caught.value.param == "messages.0.content.0.image_url"
    assert not text.requests and not text.counted
