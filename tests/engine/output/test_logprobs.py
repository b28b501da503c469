"""Log-probabilities: what they are, and that they stand beside the text that they tell of."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from fake_engine import USAGE, FakeEngine, app_of
from families import build_family
from host import Host, chat, finished, raw, text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import READ, tokenizer  # noqa: F401 -- a fixture

from omlxd.chat import Finished, TextDelta, TokenLogprob
from omlxd.engine.output.parser import OutputParser
from omlxd.engine.sequence.sequence import Likelihood
from omlxd.models import demo


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory):
    host = Host(build_family("qwen3", tmp_path_factory.mktemp("model")))
    yield host
    host.close()


def told(events) -> list[TokenLogprob]:
    return [token for event in events if isinstance(event, TextDelta) for token in event.logprobs]


def bytes_of(tokens: list[TokenLogprob]) -> bytes:
    return b"".join(token.raw or token.token.encode() for token in tokens)


# --------------------------------------------------------------------------- values


def test_they_are_the_log_softmax_of_the_models_logits(host: Host):
    events = host.ask(raw("Tell me of kettles", temperature=0.7, seed=3, logprobs=3, max_tokens=12))
    tokens = told(events)
    model, tokenizer = host.engine.loaded.model, host.engine.loaded.tokenizer
    ids = list(tokenizer.encode("Tell me of kettles"))
    for token in tokens:
        logits = host_logits(host, model, ids)
        logs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        best = np.sort(logs)[::-1][:3]
        assert np.allclose([value for _, value in token.top], best, atol=1e-3)
        nearest = int(np.argmin(np.abs(logs - token.logprob)))
        assert abs(logs[nearest] - token.logprob) < 1e-3
        ids.append(
            int(next(i for i in np.argsort(np.abs(logs - token.logprob)) if spelled(host, i) == token))
        )
    assert finished(events).usage.completion_tokens == len(tokens) == 12


def host_logits(host: Host, model, ids: list[int]) -> np.ndarray:
    box = []
    import threading

    done = threading.Event()

    def work() -> None:
        box.append(np.array(model(mx.array([ids]))[0, -1].astype(mx.float32)))
        done.set()

    host.engine.scheduler.post(work)
    assert done.wait(120)
    return box[0]


class spelled:
    """Equal to a TokenLogprob of the same bytes."""

    def __init__(self, host: Host, id: int):
        from omlxd.engine.output.detokenizer import bytes_of

        self.raw = bytes_of(host.engine.loaded.tokenizer, int(id))

    def __eq__(self, other) -> bool:
        return self.raw == (other.raw or other.token.encode())


def test_rows_of_a_batch_get_their_own(host: Host):
    asked = [raw(f"Prompt {n}", temperature=0, logprobs=n % 3, max_tokens=20) for n in range(4)]
    asked.append(raw("Prompt 9", temperature=0, max_tokens=20))
    alone = [told(host.ask(request)) for request in asked]
    together = [told(host.events(id)) for id in [host.send(request) for request in asked]]
    assert not alone[4] and not together[4]
    for one, two in zip(alone[:4], together[:4], strict=True):
        assert len(one) == 20
        assert [token.token for token in one] == [token.token for token in two]
        assert np.allclose([t.logprob for t in one], [t.logprob for t in two], atol=1e-3)
        assert [len(token.top) for token in one] == [len(token.top) for token in two]
    assert [len(tokens[0].top) for tokens in alone[:4]] == [0, 1, 2, 0]


def test_of_an_answer_and_not_of_its_thinking(host: Host):
    close = host.engine.loaded.tokenizer.think_end_id
    request = chat(thinking=True, temperature=1, seed=5, logit_bias={close: 7.0}, logprobs=0, max_tokens=200)
    events = host.ask(request)
    # A tag's token that also ends an unfinished character is told with that.
    spoken = bytes_of(told(events)).decode(errors="replace").replace("</think>", "")
    assert text_of(events) and "".join(spoken.split()) == "".join(text_of(events).split())


# --------------------------------------------------------------------------- alignment


def parsed(tokenizer, tokens: list[int], reason="stop", **how):
    parser = OutputParser(tokenizer, tools=(READ,), **how)
    events = [
        event
        for n, token in enumerate(tokens)
        for event in parser.add_token(token, Likelihood(-float(n), ((token, -float(n)),)))
    ]
    return events + parser.finish(reason), parser


PIECES = [
    "Hello",
    " world",
    "\n",
    "  ",
    "🙂",
    "é",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    " END",
    "{}",
]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=16).map("".join),
    st.booleans(),
    st.sampled_from([(), ("END",), ("o w", "🙂")]),
)
def test_tokens_come_once_in_order_and_cover_the_text(tokenizer, text, thinking, stop):
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    events, parser = parsed(tokenizer, ids, starts_in_thinking=thinking, stop=stop)
    tokens = told(events)
    numbers = [token.logprob for token in tokens]
    assert numbers == sorted(set(numbers), reverse=True)
    answer = text_of(events)
    for token in tokens:
        shown = (token.raw or token.token.encode()).decode(errors="ignore")
        tail = answer[token.at :]
        assert parser.stopped or shown.startswith(tail) or not shown or _meets(tail, shown)
    if not parser.stopped and not thinking and not any(tag in text for tag in PIECES[6:10]):
        assert bytes_of(tokens).decode() == answer == text


def _meets(tail: str, shown: str) -> bool:
    """Whether a token stands at the place that it names; its beginning or end may be a tag's."""
    return any(tail.startswith(shown[at:]) or tail.startswith(shown[:at]) for at in range(len(shown) + 1))


def test_a_character_of_several_tokens(tokenizer):
    ids = list(tokenizer.encode("a🙃b", add_special_tokens=False))
    events, _ = parsed(tokenizer, ids)
    tokens = told(events)
    assert len(tokens) == len(ids) > 3 and bytes_of(tokens) == "a🙃b".encode()
    assert [token.at for token in tokens] == [0, *[1] * (len(ids) - 2), 2]
    assert tokens[1].token == "\ufffd" and tokens[1].raw and tokens[1].top_raw == (tokens[1].raw,)


def test_what_a_stop_string_cut_off_is_not_told(tokenizer):
    ids = list(tokenizer.encode("one two three", add_special_tokens=False))
    events, _ = parsed(tokenizer, ids, stop=("two",))
    assert text_of(events) == "one "
    assert b"two" not in bytes_of(told(events)).replace(b" two", b"") and b"three" not in bytes_of(
        told(events)
    )


# --------------------------------------------------------------------------- protocols

SMILE = "🙂".encode()
TOKENS = (
    TokenLogprob("a", -0.5, (("a", -0.5), ("b", -1.0))),
    TokenLogprob("\ufffd", -1.5, (("\ufffd", -1.5),), SMILE[:2], 1, (SMILE[:2],)),
    TokenLogprob("\ufffd", -2.5, (("x", -0.1),), SMILE[2:], 1),
)
SCRIPT = [TextDelta("a", TOKENS[:1]), TextDelta("🙂", TOKENS[1:]), Finished("stop", USAGE)]


async def post(path: str, **body):
    from app_client import client

    engine = FakeEngine(SCRIPT)
    async with client(app_of(engine)) as http:
        answer = await http.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return answer, engine.requests[0].sampling.logprobs


def streamed(text: str) -> list[dict]:
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_chat():
    asked = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    answer, wanted = await post("/v1/chat/completions", **asked)
    assert wanted == 2
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [[97], list(SMILE[:2]), list(SMILE[2:])]
    assert content[1]["top_logprobs"] == [{"token": "\ufffd", "logprob": -1.5, "bytes": list(SMILE[:2])}]
    answer, _ = await post("/v1/chat/completions", **asked, stream=True)
    chunks = [chunk["choices"][0]["logprobs"] for chunk in streamed(answer.text)]
    assert [token for chunk in chunks if chunk for token in chunk["content"]] == content


async def test_completions():
    answer, wanted = await post("/v1/completions", prompt="hi", logprobs=1)
    assert wanted == 1
    legacy = answer.json()["choices"][0]["logprobs"]
    assert legacy["text_offset"] == [0, 1, 1] and legacy["token_logprobs"] == [-0.5, -1.5, -2.5]
    answer, _ = await post("/v1/completions", prompt="hi", logprobs=1, stream=True)
    chunks = [chunk["choices"][0]["logprobs"] for chunk in streamed(answer.text)]
    assert [at for chunk in chunks if chunk for at in chunk["text_offset"]] == [0, 1, 1]


async def test_responses():
    asked = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer, wanted = await post("/v1/responses", **asked)
    assert wanted == 1 and answer.json()["top_logprobs"] == 1
    whole = answer.json()["output"][0]["content"][0]["logprobs"]
    assert [token["token"] for token in whole] == ["a", "\ufffd", "\ufffd"]
    answer, _ = await post("/v1/responses", **asked, stream=True)
    events = streamed(answer.text)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [token for delta in deltas for token in delta] == whole
    _, wanted = await post("/v1/responses", input="hi")
    assert wanted is None


def test_any_token_has_its_bytes(tokenizer):
    from omlxd.engine.output.detokenizer import bytes_of as raw_bytes

    text = "naïve 世界 🙂 code()\n"
    assert b"".join(raw_bytes(tokenizer, id) for id in tokenizer.encode(text)) == text.encode()
    assert raw_bytes(tokenizer, demo.VOCAB + 9) == b""
