"""No body makes a 500, and every refusal has the shape of its protocol.

Bodies begin as requests that make sense, and lose that in up to two places.
"""

import asyncio
import copy
import json

import httpx
import pytest
from fake_engine import FakeEngine, app_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"]

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        [
            *("auto", "named:x", "x-anthropic-billing-header: a", "data:image/png;base64,AA==", "\ud800"),
            *("document", "tool_reference", "robot"),
        ]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)

# --------------------------------------------------------------------------- requests that make sense

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
name = st.sampled_from(["read", "write"])
schema = st.dictionaries(text, st.integers() | text | st.lists(text, max_size=2), max_size=2)


def block(kind: str, **fields):
    return st.fixed_dictionaries({"type": st.just(kind), **fields})


text_block = block("text", text=text)
source = block("base64", media_type=st.just("image/png"), data=st.just("AAAA"))
image_block = block("image", source=source)
tool_use = block("tool_use", id=text, name=name, input=schema)
reference = block("tool_reference", tool_name=name)
tool_result = block(
    "tool_result",
    tool_use_id=text,
    content=text | st.lists(text_block | image_block | reference, max_size=2),
)
thinking = block("thinking", thinking=text, signature=text)
image_url = block("image_url", image_url=st.just({"url": "data:image/png;base64,AAAA"}))


def message(role: str, content, **more):
    return st.fixed_dictionaries({"role": st.just(role), "content": content, **more})


anthropic_messages = st.lists(
    message("user", text | st.lists(text_block | image_block | tool_result, max_size=3))
    | message("assistant", text | st.lists(text_block | tool_use | thinking, max_size=3))
    | message("system", text),
    min_size=1,
    max_size=4,
)
call = st.fixed_dictionaries(
    {
        "id": text,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": name, "arguments": schema.map(json.dumps)}),
    }
)
openai_messages = st.lists(
    message("user", text | st.lists(text_block | image_url, max_size=3))
    | message("assistant", text | st.none(), tool_calls=st.lists(call, max_size=2), reasoning_content=text)
    | message("tool", text | st.lists(text_block, max_size=2), tool_call_id=text)
    | message("developer", text),
    min_size=1,
    max_size=4,
)
anthropic_tool = st.fixed_dictionaries(
    {"name": name, "input_schema": schema}, optional={"defer_loading": st.booleans()}
) | st.just({"type": "web_search_20250305", "name": "web_search"})
openai_tool = block("function", function=st.fixed_dictionaries({"name": name, "parameters": schema}))

common = {
    "stream": st.booleans(),
    "max_tokens": st.integers(1, 9),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 9),
}
openai_common = {
    **common,
    "stop": st.text(min_size=1, max_size=3).filter(str.isascii),
    "logit_bias": st.dictionaries(st.integers(0, 9).map(str), st.integers(-9, 9), max_size=2),
    "seed": st.integers(-9, 9),
    "stream_options": st.just({"include_usage": True}),
    "response_format": st.just({"type": "text"}),
}
anthropic_body = st.fixed_dictionaries(
    {"model": st.just("tiny"), "messages": anthropic_messages},
    optional={
        **common,
        "system": text | st.lists(text_block, max_size=2),
        "tools": st.lists(anthropic_tool, max_size=2),
        "tool_choice": st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "none"}]),
        "stop_sequences": st.just(["a"]),
        "thinking": st.sampled_from([{"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}]),
        "metadata": st.just({"user_id": "{}"}),
    },
)
VALID = {
    "/v1/messages": anthropic_body,
    "/v1/messages/count_tokens": anthropic_body,
    "/v1/chat/completions": st.fixed_dictionaries(
        {"model": st.just("tiny"), "messages": openai_messages},
        optional={
            **openai_common,
            "tools": st.lists(openai_tool, max_size=2),
            "tool_choice": st.sampled_from(["auto", "none"]),
            "chat_template_kwargs": st.just({"enable_thinking": True, "style": [1]}),
            "reasoning_effort": st.sampled_from(["none", "high"]),
            "logprobs": st.just(True),
            "n": st.just(1),
        },
    ),
    "/v1/completions": st.fixed_dictionaries(
        {"model": st.just("tiny"), "prompt": st.sampled_from(["Once", ["Once"], [1, 2], [[1, 2]]])},
        optional={**openai_common, "logprobs": st.integers(0, 5)},
    ),
}

# --------------------------------------------------------------------------- and their ruin


def places(value):
    """Every (container, key) in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def ruined(data, body):
    body = copy.deepcopy(body)  # A strategy may hand out the same list every time.
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(list(places(body))))
        if data.draw(st.booleans()):
            container[key] = data.draw(junk)
        else:
            del container[key]
        if not body:
            break
    return body


async def post(path: str, content: bytes) -> httpx.Response:
    transport = httpx.ASGITransport(app=app_of(FakeEngine()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return await client.post(path, content=content)


def status(path: str, content: bytes) -> int:
    answer = asyncio.run(post(path, content))
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        given = answer.json()
        assert given["error"]["message"]
        assert ("request_id" in given) is path.startswith("/v1/messages")
    return answer.status_code


def quick(examples: int):
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("path", PATHS)
@quick(50)
@given(data=st.data())
def test_bodies_that_make_sense(path, data):
    assert status(path, json.dumps(data.draw(VALID[path])).encode()) == 200


@pytest.mark.parametrize("path", PATHS)
@quick(150)
@given(data=st.data())
def test_bodies_that_no_longer_do(path, data):
    # json.dumps writes lone surrogates as escapes, as a careless client would.
    status(path, json.dumps(ruined(data, data.draw(VALID[path]))).encode())


@pytest.mark.parametrize("path", PATHS)
@quick(80)
@given(content=st.binary(max_size=60) | junk.map(lambda value: json.dumps(value).encode()))
@example(content=b"[" * 100_000)
@example(content=b'{"messages":' * 50_000)
@example(content=b'{"model":"tiny","messages":[{"role":"user","content":"\\udfff"}]}')
@example(content=b'{"model":"tiny","prompt":"x","messages":[],"temperature":1e400}')
@example(content=b"\xef\xbb\xbf{}")
def test_any_bytes(path, content):
    status(path, content)
