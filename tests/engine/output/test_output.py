"""The output parser: any chunking gives the same events, and nothing that a model writes is lost."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer, TokenizerWrapper
from parsing import READ, call, merged, parse, tokenizer  # noqa: F401 -- a fixture
from tokenizers_zoo import fast, zoo

from omlxd.chat import ReasoningDelta, TextDelta
from omlxd.engine.output.detokenizer import detokenizer
from omlxd.engine.output.held_text import StopStrings
from omlxd.engine.output.parser import OutputParser
from omlxd.models import demo

# --------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("text", "thinking", "events"),
    [
        ("Hello", False, [("text", "Hello")]),
        ("why\n</think>\n\nHello", True, [("reasoning", "why"), ("text", "Hello")]),
        ("<think>\nwhy\n</think>\n\nHello", False, [("reasoning", "why"), ("text", "Hello")]),
        ("<think>\nwhy\n</think>\n\nHello", True, [("reasoning", "why"), ("text", "Hello")]),
        ("never closed \n", True, [("reasoning", "never closed")]),
        ("orphan</think>\n\nHello", False, [("text", "orphan"), ("text", "Hello")]),
        ("a<think>b</think>c", False, [("text", "a"), ("reasoning", "b"), ("text", "c")]),
        ("b\n</think>\n\n", True, [("reasoning", "b")]),
        ("</think>\n\nHello", True, [("text", "Hello")]),
        ("ask <think> twice</think>x", True, [("reasoning", "ask <think> twice"), ("text", "x")]),
        ("a < b and <thin air", False, [("text", "a < b and <thin air")]),
        ("  two spaces  ", False, [("text", "  two spaces  ")]),
    ],
)
def test_reasoning(tokenizer, text, thinking, events):
    wanted = merged([TextDelta(e[1]) if e[0] == "text" else ReasoningDelta(e[1]) for e in events])
    assert parse(tokenizer, text, starts_in_thinking=thinking) == wanted
    assert parse(tokenizer, *text, starts_in_thinking=thinking) == wanted


def test_a_raw_prompts_text_is_left_alone(tokenizer):
    text = " a<think>b</think> <tool_call>{}</tool_call>\n"
    assert parse(tokenizer, text, tools=(), reasoning=False) == [("text", text)]


def test_reasoning_tokens_are_counted_without_their_tags(tokenizer):
    parser = OutputParser(tokenizer, starts_in_thinking=True)
    inside = tokenizer.encode("The user wants something.\n")
    for token in [*inside, tokenizer.think_end_id, *tokenizer.encode("\n\nHello")]:
        parser.add_token(token)
    assert parser.reasoning_tokens == len(inside)


@pytest.mark.parametrize(
    ("text", "reason", "events"),
    [
        (f"I need it.\n<tool_call>\n{call(path='a')}\n</tool_call>\n", "stop", ["a"]),
        (
            f"<tool_call>{call(path='a')}</tool_call><tool_call>{call(path='b')}</tool_call>",
            "stop",
            ["a", "b"],
        ),
        (f"<tool_call>{call(path='a')}", "stop", ["a"]),
        # It only mused of that call, broke off, or wrote none.
        (f"Not <tool_call>{call(path='a')}</tool_call>, rather", "stop", []),
        (f"Not <tool_call>{call(path='a')}</tool_call>, but <tool_call>{call(path='b')}", "stop", ["b"]),
        (f"<tool_call>{call(path='a')}</tool_call>", "length", []),
        ("<tool_call>no call</tool_call>", "stop", []),
    ],
)
def test_calls_that_a_never_closed_thought_ends_with(tokenizer, text, reason, events):
    wanted = [("reasoning", text.rstrip()), *(("call", "Read", f'{{"path": "{path}"}}') for path in events)]
    assert parse(tokenizer, text, starts_in_thinking=True, reason=reason) == wanted
    assert parse(tokenizer, *text, starts_in_thinking=True, reason=reason) == wanted


def test_a_call_in_a_closed_thought_is_thought(tokenizer):
    text = f"<tool_call>{call(path='a')}</tool_call></think>No."
    wanted = [("reasoning", text.split("</think>")[0]), ("text", "No.")]
    assert parse(tokenizer, text, starts_in_thinking=True) == wanted


# --------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("text", "stop", "shown", "matched"),
    [
        ("one two three", ("two",), "one ", "two"),
        ("one two three", ("four",), "one two three", None),
        ("aaab", ("aab",), "a", "aab"),
        ("abcd", ("bcd", "c"), "ab", "c"),
        ("xabcy", ("abc", "bc"), "x", "abc"),
        ("one\n\ntwo", ("\n\n",), "one", "\n\n"),
        ("one\n", ("\n",), "one", "\n"),
        ("ends with sto", ("stop",), "ends with sto", None),
        ("🙂🙃", ("🙃",), "🙂", "🙃"),
    ],
)
def test_stop_strings(tokenizer, text, stop, shown, matched):
    for chunks in ((text,), tuple(text)):
        parser = OutputParser(tokenizer, stop=stop)
        events = [event for chunk in chunks for event in parser.add_text(chunk)]
        assert parser.stopped == matched
        assert merged(events + parser.finish("stop")) == [("text", shown)]
        assert parser.stopped == matched


def test_a_stop_string_shows_as_soon_as_it_stands_there(tokenizer):
    parser = OutputParser(tokenizer, stop=("\n",))
    parser.add_text("one\n")
    assert parser.stopped == "\n"
    assert parser.add_text("two") == [] == parser.finish("stop")


def test_reasoning_has_no_stop_strings(tokenizer):
    wanted = [("reasoning", "say END twice"), ("text", "now")]
    text = "say END twice</think>now END again"
    assert parse(tokenizer, *text, starts_in_thinking=True, stop=(" END",)) == wanted


def test_a_stop_string_over_token_borders(tokenizer):
    parser = OutputParser(tokenizer, stop=("er ret",))
    events = []
    for token in tokenizer.encode("The server returns an error"):
        events += parser.add_token(token)
    assert merged(events) == [("text", "The serv")] and parser.stopped == "er ret"


# --------------------------------------------------------------------------- any text, any chunks

PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "</function>"),
        *("<function=Read>", "<parameter=path>", "</parameter>", "<arg_key>path</arg_key>", "<arg_value>"),
        *("</arg_value>", "<", "</", ">", "think>", "\n", " ", "  \n", "word", " END", "EN", "D", "{", '"'),
        *('{"name": "Read", "arguments": {"path": "', '"}}', "\\", "Read", "é🙂", "a b"),
        call(path="a"),
        call(path="</tool_call>"),
    ]
)
TEXTS = st.lists(PIECES, max_size=24).map("".join)


@st.composite
def chunked(draw):
    text = draw(TEXTS)
    cuts = sorted(draw(st.sets(st.integers(0, max(len(text), 1)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=400, deadline=None)
@given(
    chunked(),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
    st.sampled_from([(), ("END",), ("END", "\n\n", "word"), ("</", "Read")]),
)
def test_chunks_never_matter(tokenizer, texts, thinking, reason, stop):
    text, chunks = texts
    how = {"reason": reason, "starts_in_thinking": thinking, "stop": stop}
    assert parse(tokenizer, *chunks, **how) == parse(tokenizer, text, **how)


@settings(max_examples=200, deadline=None)
@given(chunked(), st.booleans())
def test_no_words_are_lost(tokenizer, texts, thinking):
    """Less tags and space, everything comes out: as text, as reasoning or as a call."""
    text, chunks = texts
    events = parse(tokenizer, *chunks, tools=(), starts_in_thinking=thinking)

    def bare(value: str) -> str:
        return "".join(value.replace("<think>", "").replace("</think>", "").split())

    assert bare("".join(event[1] for event in events)) == bare(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, demo.VOCAB + 3), max_size=60), st.booleans())
def test_any_tokens_parse_as_their_text(tokenizer, tokens, thinking):
    parser = OutputParser(tokenizer, tools=(READ,), starts_in_thinking=thinking)
    events = [event for token in tokens for event in parser.add_token(token)]
    events = merged(events + parser.finish("stop"))
    assert parser.reasoning_tokens <= len(tokens)
    if not {tokenizer.convert_tokens_to_ids(special) for special in demo.SPECIALS[:3]} & set(tokens):
        text = tokenizer.decode([token for token in tokens if token < demo.VOCAB])
        assert events == parse(tokenizer, text, starts_in_thinking=thinking)


# --------------------------------------------------------------------------- small parts


def test_end_of_turn_and_roles_are_no_text(tokenizer):
    parser = OutputParser(tokenizer)
    events = []
    for token in tokenizer.encode("Hi<|im_start|> you<|im_end|>"):
        events += parser.add_token(token)
    assert merged(events + parser.finish("stop")) == [("text", "Hi you")]


def test_the_detokenizer_keeps_spaces_and_whole_characters(tokenizer):
    for text in (" leading", "naïve 世界 🙂🏽\n", "\t\tx  "):
        text_of = detokenizer(tokenizer)
        pieces = [text_of.add(token) for token in tokenizer.encode(text)]
        assert "".join(pieces) + text_of.finish() == text
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["demo", "unigram-first", "llama"])
def test_a_token_past_the_tokenizers_vocabulary_is_no_text(kind: str):
    """Models pad their vocabularies, and nothing keeps one from sampling the padding."""
    wrapped = TokenizerWrapper(fast(zoo()[kind]), SPMStreamingDetokenizer)
    text_of = detokenizer(wrapped)
    one, two = wrapped.encode("a word"), wrapped.encode("b")
    padded = "".join(map(text_of.add, [*one, len(wrapped), len(wrapped) + 90, *two])) + text_of.finish()
    text_of = detokenizer(wrapped)
    assert padded == "".join(map(text_of.add, [*one, *two])) + text_of.finish()


def test_half_a_character_at_the_end_is_marked(tokenizer):
    text_of = detokenizer(tokenizer)
    first = tokenizer.encode("🙂")[0]
    assert text_of.add(first) == ""
    assert text_of.finish() == "\ufffd"


def test_stop_strings_alone():
    stops = StopStrings(("", "x", "x"))
    assert stops.feed("ab") == "ab" and stops.matched is None
    assert StopStrings(()).feed("ab") == "ab"


def test_it_is_cheap(tokenizer):
    tokens = tokenizer.encode(demo.PROSE.replace("<tool_call>", "").replace("</tool_call>", "") * 2)

    def took() -> float:
        """Seconds of this thread's own work for a token, which other programs don't count for."""
        parser = OutputParser(tokenizer, tools=(READ,), stop=("STOP HERE", "\n\nHuman:"))
        start = time.thread_time()
        for token in tokens:
            parser.add_token(token)
        return (time.thread_time() - start) / len(tokens)

    assert min(took() for _ in range(3)) < 500e-6  # 20 µs is the goal, on a quiet machine
