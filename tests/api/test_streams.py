"""Events into streams and bodies: golden bytes, and that both forms of one answer agree."""

import json

import msgspec
import pytest
from fake_engine import EVERYTHING, USAGE
from hypothesis import given
from hypothesis import strategies as st

from omlxd.api.anthropic.answer import AnthropicCollector, AnthropicStream
from omlxd.api.errors import http_error, protocol_of
from omlxd.api.openai.chat_answer import OpenAIChatCollector, OpenAIChatStream
from omlxd.api.openai.completions import OpenAICompletionCollector, OpenAICompletionStream
from omlxd.chat import ErrorCode, Finished, Progress, ReasoningDelta, TextDelta, TokenLogprob, ToolCall
from omlxd.errors import OmlxdError, Overloaded, PromptTooLong, Unavailable


def sent(encoder, events) -> bytes:
    return encoder.start() + b"".join(encoder.event(event) for event in events)


def collected(collector, events):
    for event in events:
        collector.event(event)
    return json.loads(collector.response())


def datas(stream: bytes) -> list:
    lines = [line[6:] for line in stream.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


ANTHROPIC_GOLDEN = """\
event: message_start
data: {"type":"message_start","message":{"type":"message","id":"msg_1","model":"m","content":[],\
"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":0,"cache_creation_input_tokens":0,\
"cache_read_input_tokens":0,"output_tokens":0},"role":"assistant"}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":\
{"type":"thinking","thinking":"","signature":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"Let me "}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"think."}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"SIGNATURE"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"I will "}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"look."}}

event: content_block_stop
data: {"type":"content_block_stop","index":1}

event: content_block_start
data: {"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"call_1",\
"name":"read","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta",\
"partial_json":"{\\"path\\":\\"/tmp/a\\",\\"n\\":1}"}}

event: content_block_stop
data: {"type":"content_block_stop","index":2}

event: content_block_start
data: {"type":"content_block_start","index":3,"content_block":{"type":"tool_use","id":"call_2",\
"name":"read","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":3,"delta":{"type":"input_json_delta","partial_json":"{}"}}

event: content_block_stop
data: {"type":"content_block_stop","index":3}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":\
{"input_tokens":36,"cache_creation_input_tokens":0,"cache_read_input_tokens":64,"output_tokens":7,\
"output_tokens_details":{"thinking_tokens":3},\
"omlxd":{"cached_hot":48,"cached_cold":16,"computed":36,"ttft_s":0.25,"queue_s":0.0,"restore_s":0.0,\
"prefill_s":0.0,"decode_s":0.0,"tokens_per_s":0.0,\
"drafted":0,"accepted":0}}}

event: message_stop
data: {"type":"message_stop"}

"""


def test_anthropic_golden():
    stream = sent(AnthropicStream("msg_1", "m", "req_1"), EVERYTHING).decode()
    signature = datas(stream.encode())[4]["delta"]["signature"]
    assert len(signature) == 32
    assert stream == ANTHROPIC_GOLDEN.replace("SIGNATURE", signature)


def test_the_signature_depends_on_the_text_alone():
    def signature(*texts):
        events = [*map(ReasoningDelta, texts), Finished("stop", USAGE)]
        return collected(AnthropicCollector("i", "m"), events)["content"][0]["signature"]

    assert signature("ab", "c") == signature("a", "bc") != signature("abd")


def test_anthropic_ping_and_error():
    encoder = AnthropicStream("msg_1", "m", "req_1")
    assert encoder.ping() == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert encoder.error(Overloaded("busy")) == (
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"busy"},'
        b'"request_id":"req_1"}\n\n'
    )


def test_anthropic_message_start_tells_the_prompt_as_soon_as_the_cache_was_looked_up():
    def first(*events) -> dict:
        encoder = AnthropicStream("msg_1", "m", "req_1")
        assert encoder.start() == b""
        told = datas(b"".join(encoder.event(event) for event in events))
        assert [data["type"] for data in told].count("message_start") == 1
        return told[0]["message"]["usage"]

    expected = {
        "input_tokens": 36,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 64,
        "output_tokens": 0,
    }
    assert first(Progress(64, 100), Progress(80, 100), TextDelta("a"), Finished("stop", USAGE)) == expected
    assert first(Finished("stop", USAGE)) == expected
    assert first(TextDelta("a"))["input_tokens"] == 0


CHAT_HEAD = '{"id":"c1","created":5,"model":"m","choices":[{"index":0,"delta":'
CHAT_TAIL = ',"logprobs":null,"finish_reason":null}],"object":"chat.completion.chunk"}'
CHAT_GOLDEN = [
    CHAT_HEAD + '{"role":"assistant","content":""}' + CHAT_TAIL,
    CHAT_HEAD + '{"reasoning_content":"Let me "}' + CHAT_TAIL,
    CHAT_HEAD + '{"reasoning_content":"think."}' + CHAT_TAIL,
    CHAT_HEAD + '{"content":"I will "}' + CHAT_TAIL,
    CHAT_HEAD + '{"content":"look."}' + CHAT_TAIL,
    CHAT_HEAD
    + '{"tool_calls":[{"id":"call_1","function":{"name":"read","arguments":"{\\"path\\":\\"/tmp/a\\",'
    + '\\"n\\":1}"},"type":"function","index":0}]}'
    + CHAT_TAIL,
    CHAT_HEAD
    + '{"tool_calls":[{"id":"call_2","function":{"name":"read","arguments":"{}"},"type":"function",'
    + '"index":1}]}'
    + CHAT_TAIL,
    CHAT_HEAD + "{}" + CHAT_TAIL.replace("null}]", '"tool_calls"}]'),
    "[DONE]",
]


def test_openai_chat_golden():
    stream = sent(OpenAIChatStream("c1", "m", 5, "req_1"), EVERYTHING).decode()
    assert stream == "".join(f"data: {chunk}\n\n" for chunk in CHAT_GOLDEN)


OPENAI_USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "total_tokens": 107,
    "prompt_tokens_details": {"cached_tokens": 64},
    "completion_tokens_details": {
        "reasoning_tokens": 3,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
    "omlxd": {
        **{"cached_hot": 48, "cached_cold": 16, "computed": 36, "ttft_s": 0.25},
        **dict.fromkeys(("queue_s", "restore_s", "prefill_s", "decode_s", "tokens_per_s"), 0.0),
        **{"drafted": 0, "accepted": 0},
    },
}


@pytest.mark.parametrize("encoder_type", [OpenAIChatStream, OpenAICompletionStream])
def test_openai_usage_comes_last_when_asked_for(encoder_type):
    events = [TextDelta("x"), Finished("length", USAGE)]
    chunks = datas(sent(encoder_type("c1", "m", 5, "r", include_usage=True), events))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == OPENAI_USAGE
    assert all("usage" not in chunk for chunk in datas(sent(encoder_type("c1", "m", 5, "r"), events)))


def test_openai_pings_and_errors_are_data():
    chat = OpenAIChatStream("c1", "m", 5, "req_1")
    assert chat.ping().decode() == f"data: {CHAT_HEAD}{{}}{CHAT_TAIL}\n\n"
    (chunk,) = datas(OpenAICompletionStream("c1", "m", 5, "req_1").ping())
    assert chunk["choices"] == [{"text": "", "logprobs": None, "finish_reason": None, "index": 0}]
    assert chat.error(PromptTooLong(9, 8)) == (
        b'data: {"error":{"message":"This model\'s maximum context length is 9 tokens. However, your '
        b"messages resulted in 9 tokens: the prompt is too long, and your input exceeds the context window "
        b'of this model, which leaves 8 for it.",'
        b'"type":"invalid_request_error","param":null,"code":"context_length_exceeded"}}\n\n'
    )
    (chunk,) = datas(OpenAICompletionStream("c1", "m", 5, "req_1").error(PromptTooLong(9, 8)))
    assert chunk["error"]["code"] == "context_length_exceeded"
    assert chunk["error"]["message"] == (
        "This model's maximum context length is 9 tokens. However, your prompt is too long: it resulted in 9 "
        "tokens and exceeds the context window, which leaves 8 for it."
    )


def test_logprobs():
    token = TokenLogprob("é", -0.5, (("é", -0.5), ("e", -1.0)))
    events = [
        TextDelta("é", (token,)),
        TextDelta("a", (TokenLogprob("a", -0.1, at=1),)),
        Finished("stop", USAGE),
    ]
    chat = collected(OpenAIChatCollector("c", "m", 5), events)["choices"][0]["logprobs"]["content"]
    assert chat[0] == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            {"token": "e", "logprob": -1.0, "bytes": [101]},
        ],
    }
    streamed = datas(sent(OpenAIChatStream("c", "m", 5, "r"), events))
    assert [c["choices"][0]["logprobs"]["content"] for c in streamed[1:3]] == [chat[:1], chat[1:]]
    legacy = collected(OpenAICompletionCollector("c", "m", 5), events)["choices"][0]["logprobs"]
    assert legacy == {
        "tokens": ["é", "a"],
        "token_logprobs": [-0.5, -0.1],
        "top_logprobs": [{"é": -0.5, "e": -1.0}, {}],
        "text_offset": [0, 1],
    }


# --------------------------------------------------------------------------- both forms agree

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
arguments = st.dictionaries(texts, st.integers(-5, 5) | texts, max_size=3).map(
    lambda value: msgspec.json.encode(value).decode()
)
answers = st.tuples(
    st.lists(
        st.builds(TextDelta, texts)
        | st.builds(ReasoningDelta, texts)
        | st.builds(ToolCall, texts, texts, arguments)
        | st.builds(Progress, st.integers(0, 5), st.integers(0, 5)),
        max_size=8,
    ),
    st.sampled_from(["stop", "stop_sequence", "length", "tool_calls"]).map(
        lambda reason: Finished(reason, USAGE, "END" if reason == "stop_sequence" else None)
    ),
).map(lambda pair: [*pair[0], pair[1]])


@given(answers)
def test_anthropic_forms_agree(events):
    stream = datas(sent(AnthropicStream("i", "m", "r"), events))
    message = stream[0]["message"]
    for data in stream:
        if data["type"] == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append({**data["content_block"], "json": ""})
        elif data["type"] == "content_block_delta":
            block = message["content"][data["index"]]
            for key, value in data["delta"].items():
                if key == "partial_json":
                    block["json"] += value
                elif key != "type":
                    block[key] += value
        elif data["type"] == "message_delta":
            message |= data["delta"] | {"usage": data["usage"]}
    for block in message["content"]:
        if (text := block.pop("json")) and block["type"] == "tool_use":
            block["input"] = json.loads(text)
    assert message == collected(AnthropicCollector("i", "m"), events)
    kinds = [data["type"] for data in stream]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


@given(answers)
def test_openai_forms_agree(events):
    chunks = datas(sent(OpenAIChatStream("i", "m", 5, "r", include_usage=True), events))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    whole = collected(OpenAIChatCollector("i", "m", 5), events)
    message = whole["choices"][0]["message"]
    assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert reasoning == message.get("reasoning_content", "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    assert calls == message.get("tool_calls", [])
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]


# --------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("code", "anthropic", "openai"),
    [
        ("invalid_request", (400, "invalid_request_error"), (400, "invalid_request_error", None)),
        (
            "prompt_too_long",
            (400, "invalid_request_error"),
            (400, "invalid_request_error", "context_length_exceeded"),
        ),
        ("authentication", (401, "authentication_error"), (401, "invalid_request_error", "invalid_api_key")),
        ("not_found", (404, "not_found_error"), (404, "invalid_request_error", "model_not_found")),
        (
            "request_too_large",
            (413, "request_too_large"),
            (413, "invalid_request_error", "request_too_large"),
        ),
        ("overloaded", (529, "overloaded_error"), (503, "server_error", "overloaded")),
        ("unavailable", (503, "overloaded_error"), (503, "server_error", "unavailable")),
        ("internal", (500, "api_error"), (500, "server_error", "internal_error")),
    ],
)
def test_error_shapes(code: ErrorCode, anthropic, openai):
    wrong_key = code == "authentication"
    error = OmlxdError("so it is", code=code, param="model")
    answer = http_error(error, "anthropic", "req_1")
    assert (answer.status, json.loads(answer.body)) == (
        anthropic[0],
        {
            "type": "error",
            "error": {"type": anthropic[1], "message": "invalid x-api-key. " * wrong_key + "so it is"},
            "request_id": "req_1",
        },
    )
    answer = http_error(error, "openai", "req_1")
    assert (answer.status, json.loads(answer.body)) == (
        openai[0],
        {
            "error": {
                "message": "Incorrect API key provided. " * wrong_key + "so it is",
                "type": openai[1],
                "param": "model",
                "code": openai[2],
            }
        },
    )


def test_retry_after_is_there_and_never_above_a_minute():
    def header(error):
        return dict(http_error(error, "anthropic", "r").headers).get("retry-after")

    assert header(Overloaded("x", retry_after=7)) == "7"
    assert header(Unavailable("x", retry_after=3600)) == "60"
    assert 1 <= int(header(Overloaded("x")) or 0) <= 60
    assert 1 <= int(header(Unavailable("x")) or 0) <= 60
    assert header(OmlxdError("x")) is None


def test_protocol_of():
    assert protocol_of("/v1/messages") == protocol_of("/v1/messages/count_tokens") == "anthropic"
    assert protocol_of("/v1/messagesx") == protocol_of("/") == "openai"
    assert protocol_of("/v1/completions", versioned=True) == "completions"
