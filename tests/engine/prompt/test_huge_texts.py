"""Texts far too long for a model: refused by their bytes, or in pieces, and nobody waits for them."""

from __future__ import annotations

import functools
import resource
import sys
import threading
import time
import weakref

import pytest
from daemon import wait_until
from fast_or_slow import rest_slow
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from talk import folder, user  # noqa: F401 (a fixture)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers_zoo import PLAIN, fast, zoo

from omlxd.chat import Conversation, RawPrompt
from omlxd.engine.prompt import token_cache
from omlxd.engine.prompt.pipeline import PromptPipeline
from omlxd.engine.prompt.token_bound import TokenBound
from omlxd.engine.prompt.token_cache import TokenCache
from omlxd.engine.server.service import Lane
from omlxd.errors import InvalidRequest, PromptTooLong

CONTEXT = 131_071
NAMES = ["demo", "bytes", "bytes-prefix", "bytes-nfc", "bytes-odd", "unigram-first", "unigram-never", "llama"]
FRAGMENTS = [
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "word",
        " word",
        "the user",
        "a b",
        "\nThe",
        "7 of",
        "don't",
        " 12 345",
        "1",
    ),
    *("é", "e\u0301", "漢字", "。", "😀", "<|im_end|>", "<|im", "▁", "x y\nz", "\u00a0", "://", "=====", "A"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=60).map("".join)


@functools.cache
def _zoo():
    return zoo()


@functools.cache
def cache_of(name: str) -> TokenCache:
    return TokenCache(fast(_zoo()[name]), max_bytes=0)


@pytest.mark.parametrize("name", rest_slow(NAMES, "demo", "bytes-odd", "unigram-first"))
@given(text=TEXTS)
@settings(max_examples=150)
def test_pieces_give_the_ids_of_the_whole(name, text):
    cache = cache_of(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "PIECE_CHARS", 8)  # So most of these texts are cut.
        assert cache.encode(text) == cache._tokenizer.encode(text, add_special_tokens=False)
        assert cache.encode(text, special=True) == cache._tokenizer.encode(text, add_special_tokens=True)


@pytest.mark.parametrize("name", rest_slow(NAMES, "demo", "bytes-odd", "unigram-first"))
@given(text=TEXTS)
@settings(max_examples=150)
def test_a_text_has_no_fewer_tokens_than_its_bound(name, text):
    cache = cache_of(name)
    tokens = len(cache._tokenizer.encode(text, add_special_tokens=False))
    assert (
        cache.bound.token_bytes.least([text], trimmed=True) <= cache.bound.token_bytes.least([text]) <= tokens
    )


def test_prose_is_cut_in_many_pieces():
    cache = cache_of("demo")
    assert len(cache._parts("The user asks.\n" * 100_000)) >= 4


@pytest.mark.parametrize(
    "unit", ["The user asks.\n", "aine 31 bine 62 ", '{"a":["kestrel","wing"]},', "第一行。\n"]
)
def test_a_prompt_of_usual_length_is_tokenised_in_pieces(unit):
    """They have the ids of the whole, and none is more than a small part of it."""
    cache, text = TokenCache(fast(_zoo()["demo"])), unit * (40_000 // len(unit))
    asked: list[int] = []

    class Watched:
        def encode_batch_fast(self, parts, **named):
            asked.append(sum(map(len, parts)))
            return backend.encode_batch_fast(parts, **named)

    assert cache.bound
    backend, cache._backend = cache._backend, Watched()
    numbered = "".join(f"{text[at : at + 2000]} of {at} " for at in range(0, len(text), 2000))
    assert cache.encode(numbered) == cache._tokenizer.encode(numbered, add_special_tokens=False)
    assert sum(asked) >= len(numbered)
    assert max(asked) <= token_cache.PIECE_CHARS


def test_a_run_of_spaces_of_any_length_has_the_ids_of_the_whole(monkeypatch):
    """Which tokens it has may depend on its length, and on what follows: it is looked at as a whole, or no
    text is cut behind it."""
    monkeypatch.setattr(token_cache, "PIECE_CHARS", 8)
    like, tokenizer = zoo()["bytes"], Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = like.pre_tokenizer, like.decoder
    texts, alphabet = [" " * 32 + "x"] * 40 + [" " * 8 + "\n"] * 9, pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(PLAIN)
    cache = TokenCache(fast(tokenizer), max_bytes=0)
    for length in range(80):
        text = "a" + " " * length + "\ne"
        assert cache.encode(text) == cache._tokenizer.encode(text, add_special_tokens=False)
    assert cache.joins


def test_where_no_place_near_by_is_one_to_cut_at_one_far_away_is(monkeypatch):
    far = token_cache.FAR_CHARS // 2
    monkeypatch.setattr(TokenCache, "_parts_at", lambda self, text, at: at >= far)
    lengths = [len(part) for part in cache_of("demo")._parts("The user asks.\n" * 20_000)]
    assert far <= lengths[0] < far + 20
    assert max(lengths[1:]) <= token_cache.PIECE_CHARS


@pytest.mark.slow
def test_minified_json_is_cut_too():
    text = '{"a":[{"name":"kestrel","wing":"left"},' * 60_000
    cache = cache_of("demo")
    assert len(cache._parts(text)) >= 4
    assert cache.encode(text) == cache._tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "prompt",
    [
        Conversation(tuple(user("") for _ in range(2000))),
        Conversation((user("<|im_end|>" * 3000),)),
        RawPrompt(text="<|im_end|>" * 3000),
    ],
)
def test_many_messages_or_tokens_are_refused_before_they_are_tokenised(prompts, prompt):
    with pytest.raises(PromptTooLong):
        prompts.render(prompt, refuse=1000)


def test_a_word_that_spans_two_is_no_place_to_cut():
    tokenizer = zoo()["bytes"]
    tokenizer.add_tokens(["of the"])
    assert TokenBound(_zoo()["bytes"]).joints.search("of the")
    assert not TokenBound(tokenizer).joints.search("of the")


@pytest.fixture
def prompts(folder) -> PromptPipeline:  # noqa: F811
    return PromptPipeline(load_tokenizer(folder))


@pytest.mark.parametrize("unit", [" ", "the user ", "1234567890", "漢字", "\n", "é"])
@pytest.mark.parametrize("raw", [True, False])
def test_ten_megabytes_are_refused_in_a_moment(prompts, unit, raw):
    text = unit * (10_600_000 // len(unit.encode()))
    prompt = RawPrompt(text=text) if raw else Conversation((user(text),))
    prompts.render(Conversation((user("x"),)))
    began = time.process_time()
    with pytest.raises(PromptTooLong):
        prompts.render(prompt, refuse=CONTEXT)
    assert time.process_time() - began < 1.0  # 0.1 s; tokenising it took 5 to 10 s


def test_a_run_that_the_bound_lets_pass_is_refused_in_words(prompts):
    for raw in (True, False):
        text = " " * 10_600_000
        with pytest.raises(InvalidRequest, match="can't be tokenised in parts"):
            prompts.render(RawPrompt(text=text) if raw else Conversation((user(text),)), refuse=10**6)


def test_a_text_is_read_no_further_than_twice_what_is_allowed(prompts, monkeypatch):
    monkeypatch.setattr(token_cache, "PIECE_CHARS", 1024)
    cache = prompts.tokens
    text = "".join(f"The user asks {number}.\n" for number in range(50_000))
    with pytest.raises(PromptTooLong):
        cache.encode(text, most=1000)
    assert cache.misses < 5000
    assert len(cache.encode("The user asks.\n" * 400, most=1000)) > 1000  # Counted to its end.


def test_a_tokenizer_that_panics_fails_one_request(prompts, monkeypatch):
    class PanicException(BaseException):
        pass

    class Backend:
        def encode_batch_fast(self, *args, **named):
            raise PanicException("Onig: Regex search error: retry-limit-in-match over")

    monkeypatch.setattr(prompts.tokens, "_backend", Backend())
    with pytest.raises(InvalidRequest, match="can't read this text"):
        prompts.render(Conversation((user("x"),)))


@pytest.mark.slow
def test_memory_of_pieces(prompts):
    """Of 2 MB of words and digits with room for all of them: pieces are let go before the next is read."""
    text = "".join(f"the user asks {number:07d}\n" for number in range(100_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokens = prompts.tokens.encode(text, most=10**7)
    unit = 1024 if sys.platform == "darwin" else 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit
    assert len(tokens) > 1_000_000
    assert grown < 250_000  # kB; at one go 1.4 GB for 4 MB of digits


def test_a_lane_serves_clients_by_turns():
    lane = Lane("test", 1)
    order: list[str] = []
    go, over = threading.Event(), threading.Event()
    lane.put_work("a", "", lambda: go.wait(60) and None)
    for number in range(3):
        lane.put_work("a", "", lambda number=number: order.append(f"a{number}"))
    lane.put_work("b", "", lambda: order.append("b0"))
    lane.put_work("c", "", lambda: order.append("c0"))
    lane.put_work("a", "", over.set)
    go.set()
    assert over.wait(60)
    assert order.index("b0") <= 1 and order.index("c0") <= 2
    assert [work for work in order if work[0] == "a"] == ["a0", "a1", "a2"]
    lane.close()


def test_a_client_of_many_sessions_has_one_turn_in_two():
    lane, go, over = Lane("test", 1), threading.Event(), threading.Event()
    order: list[str] = []
    lane.put_work("crowd", "", lambda: go.wait(60) and None)
    for number in range(20):
        lane.put_work("crowd", f"s{number}", lambda: order.append("crowd"))
    for _ in range(3):
        lane.put_work("small", "only", lambda: order.append("small"))
    lane.put_work("crowd", "s19", over.set)
    go.set()
    assert over.wait(60)
    assert order[:6].count("small") == 3
    lane.close()


def test_what_a_client_asks_with_another_priority_has_turns_of_its_own():
    lane, go, over = Lane("test", 1), threading.Event(), threading.Event()
    order: list[int] = []
    lane.put_work("me", "", lambda: go.wait(60) and None, 1)
    for priority in (1, 1, 1, 0):
        lane.put_work("me", "", functools.partial(order.append, priority), priority)
    lane.put_work("me", "", over.set, 1)
    go.set()
    assert over.wait(60)
    assert order.index(0) <= 1
    lane.close()


def test_work_that_fails_does_not_end_a_lane():
    lane, over = Lane("test", 1), threading.Event()

    def fail() -> None:
        raise BaseException("a panic")

    lane.put_work("", "", fail)
    lane.put_work("", "", over.set)
    assert over.wait(60)
    lane.close()


def test_an_idle_lane_holds_no_work():
    class Request:
        pass

    lane, request = Lane("test", 1), Request()
    held = weakref.ref(request)
    lane.put_work("", "", functools.partial(id, request))
    del request
    wait_until(lambda: held() is None)
    lane.close()
