"""The output parser: any chunking gives the same events, and nothing that a model writes is lost."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.tool_parsers import glm47, json_tools, mistral, qwen3_coder

from omlxd.chat import Event, ReasoningDelta, TextDelta, Tool, ToolCall
from omlxd.engine.detokenizer import detokenizer
from omlxd.engine.markup import in_json_string
from omlxd.engine.output import OutputParser, prepare
from omlxd.engine.stop_strings import StopStrings
from omlxd.engine.tool_calls import ToolCallReader
from omlxd.models import demo

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "limit": {"type": "integer"},
        "ratio": {"type": "number"},
        "deep": {"type": "boolean"},
        "items": {"type": "array"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "any": {},
    },
}
READ = Tool("Read", "Reads.", SCHEMA)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    demo.write_tokenizer(folder, demo.VOCAB)
    demo.write_json(folder / "config.json", {"model_type": "qwen3"})
    tokenizer = load_tokenizer(folder)
    prepare(tokenizer)
    return tokenizer


def merged(events: list[Event]) -> list[tuple[str, ...]]:
    """Events with neighbours of a kind joined and call ids left out."""
    out: list[tuple[str, ...]] = []
    for event in events:
        if isinstance(event, ToolCall):
            out.append(("call", event.name, event.arguments))
            continue
        assert isinstance(event, TextDelta | ReasoningDelta) and event.text
        kind = "text" if isinstance(event, TextDelta) else "reasoning"
        if out and out[-1][0] == kind:
            out[-1] = (kind, out[-1][1] + event.text)
        else:
            out.append((kind, event.text))
    return out


def parse(tokenizer, *chunks: str, reason="stop", tools=(READ,), **how) -> list[tuple[str, ...]]:
    parser = OutputParser(tokenizer, tools=tools, **how)
    events = [event for chunk in chunks for event in parser.add_text(chunk)]
    return merged(events + parser.finish(reason))


def call(**arguments) -> str:
    return json.dumps({"name": "Read", "arguments": arguments})


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


# --------------------------------------------------------------------------- tool calls


def test_calls_in_order_with_the_text_around_them(tokenizer):
    text = (
        f"I read.\n<tool_call>\n{call(path='a')}\n</tool_call>\n<tool_call>\n{call(path='b')}\n</tool_call>\n"
    )
    wanted = [("text", "I read."), ("call", "Read", '{"path": "a"}'), ("call", "Read", '{"path": "b"}')]
    assert parse(tokenizer, text) == wanted
    assert parse(tokenizer, text + "\nDone.") == [*wanted, ("text", "Done.")]


def test_ids_are_unique(tokenizer):
    parser = OutputParser(tokenizer, tools=(READ,))
    events = parser.add_text(f"<tool_call>{call(path='a')}</tool_call>" * 20)
    ids = {event.id for event in events if isinstance(event, ToolCall)}
    assert len(ids) == 20 and all(len(id) == 29 and id.startswith("call_") for id in ids)


def test_a_call_after_reasoning(tokenizer):
    text = f"I need it.\n</think>\n\n<tool_call>\n{call(path='a')}\n</tool_call>"
    wanted = [("reasoning", "I need it."), ("call", "Read", '{"path": "a"}')]
    assert parse(tokenizer, text, starts_in_thinking=True) == wanted


def test_an_end_tag_inside_a_json_string_belongs_to_it(tokenizer):
    path = 'say "</tool_call>" <tool_call> here'
    text = f"<tool_call>\n{call(path=path)}\n</tool_call>"
    assert parse(tokenizer, *text) == [("call", "Read", json.dumps({"path": path}))]


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        '{"name": "Read", "arguments": [1]}',
        '{"name": "", "arguments": {}}',
        '{"name": "two words", "arguments": {}}',
        '{"arguments": {}}',
        "[1, 2]",
        "{" * 5000,
        '{"name": "Read", "arguments": {"x": NaN}}',
        "<function=Read><parameter=path>a</function>",
        "<function=Read>",
        "Read<arg_key>path</arg_key><arg_value>a",
        "",
    ],
)
def test_what_is_no_call_is_text(tokenizer, body):
    text = f"before \n<tool_call>{body}</tool_call> after"
    assert parse(tokenizer, text) == [("text", text)]
    assert parse(tokenizer, *text) == [("text", text)]


def test_a_cut_off_call_is_text(tokenizer):
    whole = f"x <tool_call>\n{call(path='abc')}\n</tool_call>"
    for end in range(3, len(whole)):
        assert parse(tokenizer, whole[:end], reason="length") == [("text", whole[:end])]


def test_a_call_without_its_end_tag_counts_if_the_model_ended_its_turn(tokenizer):
    text = f"<tool_call>\n{call(path='a')}\n"
    assert parse(tokenizer, text, reason="stop") == [("call", "Read", '{"path": "a"}')]


def test_calls_behind_a_broken_one_are_found(tokenizer):
    broken = '<tool_call>{"name": "Read", "arguments": {"path": "a}}</tool_call>'
    good = f"<tool_call>{call(path='b')}</tool_call>"
    wanted = [("text", broken), ("call", "Read", '{"path": "b"}')]
    assert parse(tokenizer, broken + good) == wanted
    assert parse(tokenizer, *(broken + good)) == wanted


def test_without_tools_calls_are_text(tokenizer):
    text = f"<tool_call>{call(path='a')}</tool_call>"
    assert parse(tokenizer, text, tools=()) == [("text", text)]


@pytest.mark.parametrize(
    "body",
    [
        "Read\n<arg_key>path</arg_key>\n<arg_value>123</arg_value>\n<arg_key>limit</arg_key>\n"
        "<arg_value>5</arg_value>",
        "<function=Read>\n<parameter=path>\n123\n</parameter>\n<parameter=limit>\n5\n</parameter>\n</function>",
        '{"name": "Read", "arguments": {"path": 123, "limit": "5"}}',
        '{"name": "Read", "arguments": "{\\"path\\": \\"123\\", \\"limit\\": 5}"}',
        '{"name": "Read", "parameters": {"path": "123", "limit": 5.0}}',
    ],
)
def test_every_spelling_is_typed_by_the_schema(tokenizer, body):
    wanted = [("call", "Read", '{"path": "123", "limit": 5}')]
    assert parse(tokenizer, f"<tool_call>\n{body}\n</tool_call>") == wanted


def test_a_bare_function_of_qwens_coder(tokenizer):
    text = "Reading.\n<function=Read>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>"
    wanted = [("text", "Reading."), ("call", "Read", '{"path": "a"}')]
    assert parse(tokenizer, text) == wanted
    assert parse(tokenizer, *text) == wanted


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("path", "123", "123"),
        ("path", "null", "null"),
        ("path", '{"a": 1}', '{"a": 1}'),
        ("path", " indented\n  text", " indented\n  text"),
        ("limit", "7", 7),
        ("limit", "7.0", 7),
        ("limit", "seven", "seven"),
        ("ratio", "0.5", 0.5),
        ("deep", "true", True),
        ("deep", "True", True),
        ("items", "[1, 'a']", [1, "a"]),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("either", "5", "5"),
        ("count", "null", None),
        ("count", "5", 5),
        ("any", "5", "5"),
        ("any", "[5]", [5]),
        ("undeclared", "5", 5),
        ("undeclared", "word", "word"),
    ],
)
def test_bare_values(key, given, value):
    reader = ToolCallReader((READ,))
    for text in (
        f"Read<arg_key>{key}</arg_key><arg_value>{given}</arg_value>",
        f"<function=Read><parameter={key}>{given}</parameter></function>",
    ):
        calls = reader.read(text)
        assert calls is not None and json.loads(calls[0].arguments) == {key: value}


def test_a_tool_that_was_not_listed_can_be_called(tokenizer):
    # Deferred tools are told in a tool's result, not in the list.
    text = '<tool_call>{"name": "mcp__x.Search", "arguments": {"q": "Grüße"}}</tool_call>'
    assert parse(tokenizer, text) == [("call", "mcp__x.Search", '{"q": "Grüße"}')]


def test_arguments_are_always_valid_utf8(tokenizer):
    text = '<tool_call>{"name": "Read", "arguments": {"path": "\\ud800 é"}}</tool_call>'
    ((_, _, arguments),) = parse(tokenizer, text)
    arguments.encode()
    assert json.loads(arguments) == {"path": "\ud800 é"}


@pytest.mark.parametrize("module", [json_tools, glm47, qwen3_coder, mistral])
def test_other_models_parsers(tokenizer, module):
    model = wrapper(tokenizer, module)
    if module is mistral:
        text = 'Hm. [TOOL_CALLS]Read[ARGS]{"path": "a"}'
        wanted = [("text", "Hm."), ("call", "Read", '{"path": "a"}')]
        assert parse(model, *text) == wanted
        assert parse(model, text[:-2], reason="length") == [("text", text[:-2])]
        return
    text = f"<tool_call>{call(path='a')}</tool_call>"
    assert parse(model, text) == [("call", "Read", '{"path": "a"}')]
    assert parse(model, "<tool_call>what is this</tool_call>") == [
        ("text", "<tool_call>what is this</tool_call>")
    ]


class wrapper(SimpleNamespace):
    """The demo's tokenizer with another model's tool parser."""

    def __init__(self, tokenizer, module):
        super().__init__(
            **{
                name: getattr(tokenizer, name)
                for name in (
                    *("think_start", "think_end", "eos_token_ids", "bos_token_id", "pad_token_id"),
                    *("all_special_ids", "encode", "backend_tokenizer", "added_tokens_decoder"),
                    "convert_ids_to_tokens",
                )
            },
            has_tool_calling=True,
            tool_call_start=module.tool_call_start,
            tool_call_end=module.tool_call_end,
            tool_parser=module.parse_tool_call,
            size=len(tokenizer),
        )

    def __len__(self):
        return self.size

    __hash__ = object.__hash__


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


def test_half_a_character_at_the_end_is_marked(tokenizer):
    text_of = detokenizer(tokenizer)
    first = tokenizer.encode("🙂")[0]
    assert text_of.add(first) == ""
    assert text_of.finish() == "\ufffd"


def test_in_json_string():
    assert in_json_string('{"a": "b')
    assert in_json_string('{"a": "b\\"')
    assert not in_json_string('{"a": "b\\\\"')
    assert not in_json_string('say "')


def test_stop_strings_alone():
    stops = StopStrings(("", "x", "x"))
    assert stops.feed("ab") == "ab" and stops.matched is None
    assert StopStrings(()).feed("ab") == "ab"


def test_it_is_cheap(tokenizer):
    tokens = tokenizer.encode(demo.PROSE.replace("<tool_call>", "").replace("</tool_call>", "") * 2)
    parser = OutputParser(tokenizer, tools=(READ,), stop=("STOP HERE", "\n\nHuman:"))
    start = time.perf_counter()
    for token in tokens:
        parser.add_token(token)
    assert (time.perf_counter() - start) / len(tokens) < 100e-6  # 20 µs is the goal, on a quiet machine
