"""gpt-oss's channels: parsed from tokens, rendered back, healed where that is safe."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from parsing import READ, merged
from templates import HARMONY

from omlxd.chat import Conversation, Message, TextPart, ThinkingPart, ToolCallDelta, ToolCallPart
from omlxd.chat import ToolResultPart as Result
from omlxd.engine.constrain.harmony_grammar import CONTROLS
from omlxd.engine.output.parser import OutputParser
from omlxd.engine.prompt.pipeline import PromptPipeline
from omlxd.engine.prompt.turn_memory import Answer, Scope
from omlxd.engine.sequence.sequence import Likelihood
from omlxd.models import demo

TAGS = re.compile("(" + "|".join(map(re.escape, CONTROLS)) + ")")
THINK = "<|channel|>analysis<|message|>Let me see.<|end|>"
FINAL = "<|channel|>final<|message|>Hello.<|return|>"
GO = "<|start|>assistant"
CALL = "<|channel|>commentary to=functions.Read <|constrain|>json<|message|>"
READ_A = ("call", "Read", '{"path": "a"}')


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """As gpt-oss's: its tags are special tokens, two of them end a turn."""
    folder = tmp_path_factory.mktemp("tokenizer")
    demo.write_tokenizer(folder, demo.VOCAB)
    demo.write_json(folder / "config.json", {"model_type": "gpt_oss"})
    tokenizer = load_tokenizer(folder)
    tokenizer._tokenizer.add_special_tokens({"additional_special_tokens": list(CONTROLS)})
    ends = ("<|return|>", "<|call|>", "<|endoftext|>")
    tokenizer._eos_token_ids = {tokenizer.convert_tokens_to_ids(end) for end in ends}
    tokenizer._think_start = tokenizer._think_end = None
    tokenizer._tokenizer.chat_template = HARMONY
    return tokenizer


known: dict[str, list[int]] = {}


def tokens_of(tokenizer, text: str, each: int = 0) -> list[int]:
    """`text` in its own tokens, or in those of pieces of `each` letters."""
    pieces: list[str] = []
    for piece in TAGS.split(text):
        step = each if each and piece not in CONTROLS else max(1, len(piece))
        pieces += [piece[i : i + step] for i in range(0, len(piece), step)]
    for piece in {*pieces} - known.keys():
        known[piece] = tokenizer.encode(piece, add_special_tokens=False)
    return [id for piece in pieces for id in known[piece]]


def events_of(tokenizer, text, reason: Any = "stop", tools=(READ,), each=0, **how):
    parser = OutputParser(tokenizer, tools=tools, **how)
    tokens = tokens_of(tokenizer, text, each)
    return [event for token in tokens for event in parser.add_token(token)] + parser.finish(reason)


def parse(tokenizer, text, **how):
    """The events, which must be the same however the tokens are cut."""
    whole = merged(events_of(tokenizer, text, **how))
    assert whole == merged(events_of(tokenizer, text, each=1, **how))
    return whole


# --------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (THINK + GO + FINAL, [("reasoning", "Let me see."), ("text", "Hello.")]),
        (FINAL, [("text", "Hello.")]),
        (FINAL.removesuffix("<|return|>"), [("text", "Hello.")]),
        # A preamble is for the user, and so is what comes in no channel or an unknown one.
        (
            "<|channel|>commentary<|message|>I read.<|end|>" + GO + FINAL,
            [("text", "I read.\n\nHello.")],
        ),
        ("<|message|>Hello.<|end|>", [("text", "Hello.")]),
        ("<|channel|>other<|message|>Hello.<|end|>", [("text", "Hello.")]),
        (THINK + GO + THINK, [("reasoning", "Let me see.\n\nLet me see.")]),
        # Calls, with the recipient at either place, and of names that are no function's.
        (THINK + GO + CALL + '{"path": "a"}<|call|>', [("reasoning", "Let me see."), READ_A]),
        (CALL + '{"path": "a"}', [READ_A]),
        (' to=functions.Read<|channel|>commentary json<|message|>{"path": "a"}<|call|>', [READ_A]),
        ('<|channel|>analysis to=functions.Read<|message|>{"path": "a"}<|call|>', [READ_A]),
        ('<|channel|>commentary to=Read code<|message|>{"path": "a"}<|call|>', [READ_A]),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [("reasoning", "1 + 1")]),
        (CALL + "{}<|call|>", [("call", "Read", "{}")]),
        (CALL + "<|call|>", [("call", "Read", "{}")]),
        (CALL + '{"path": "a"}<|call|>' + GO + CALL + '{"path": "a"}<|call|>', [READ_A, READ_A]),
        (
            "<|channel|>commentary<|message|>I read.<|end|>" + GO + CALL + '{"path": "a"}<|call|>',
            [("text", "I read."), READ_A],
        ),
        # Without headers: a model held to a grammar, whose calls are spelled as others' are.
        ("Hello.<|return|>", [("text", "Hello.")]),
        ('{"a": 1}', [("text", '{"a": 1}')]),
        ('<tool_call>\n{"name": "Read", "arguments": {"path": "a"}}\n</tool_call>', [READ_A]),
        ("to you", [("text", "to you")]),
        ("t", [("text", "t")]),
        (THINK + "Hello.", [("reasoning", "Let me see."), ("text", "Hello.")]),
        # Missing and stray tags.
        (
            "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.",
            [("reasoning", "Hm."), ("text", "Yes.")],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|start|>assistant" + FINAL,
            [("reasoning", "Hm."), ("text", "Hello.")],
        ),
        ("<|channel|>final\nHello.", [("text", "Hello.")]),
        ("<|channel|>final<|message|>a<|message|>b<|constrain|>c", [("text", "abc")]),
        ("<|end|><|end|>" + FINAL, [("text", "Hello.")]),
        ("<|channel|>anal", []),
        ("", []),
    ],
)
def test_messages(tokenizer, text, events):
    assert parse(tokenizer, text) == events


def test_a_header_that_never_ends_is_text(tokenizer):
    words = "so many words " * 30
    assert parse(tokenizer, "<|channel|>final " + words) == [("text", words)]


# --------------------------------------------------------------------------- calls


def test_arguments_are_sent_on_while_they_are_written(tokenizer):
    parser = OutputParser(tokenizer, (READ,))
    told = [e for t in tokens_of(tokenizer, CALL + '{"path": "a long') for e in parser.add_token(t)]
    assert "".join(event.text for event in told if isinstance(event, ToolCallDelta)) == '{"path": "a long'


@pytest.mark.parametrize(
    ("body", "events"),
    [
        ('{"path": "1e3", "limit": "5"}', [("call", "Read", '{"path": "1e3", "limit": 5}')]),
        ('{"path": 123}', [("call", "Read", '{"path": "123"}')]),
        ('{"path": "say <|call|>"}', [("cut", "Read", '{"path": "say ', "{}")]),
        ('{"path": "a', [("cut", "Read", '{"path": "a', "{}")]),
        ('{"path": "a"} and', [("cut", "Read", '{"path": "a"}', '{"path": "a"}'), ("text", "and\n")]),
        ("no json", [("text", "to=functions.Read no json")]),
        ("[1]", [("text", "to=functions.Read [1]")]),
        ('{"path', [("text", 'to=functions.Read {"path')]),
    ],
)
def test_arguments(tokenizer, body, events):
    found = parse(tokenizer, CALL + body + "<|call|>")
    # Behind the tag inside the string another header begins, which is text here.
    assert found[: len(events)] == events and (len(found) == len(events) or "<|call|>" in body)


def test_the_letters_of_a_tag_in_a_text_are_text(tokenizer):
    """Only the token is the tag."""
    parser = OutputParser(tokenizer, (READ,))
    letters = [id for letter in '{"path": "<|call|>"}' for id in tokenizer.encode(letter)]
    tokens = [*tokens_of(tokenizer, CALL), *letters, tokenizer.convert_tokens_to_ids("<|call|>")]
    events = [event for token in tokens for event in parser.add_token(token)] + parser.finish("stop")
    assert merged(events) == [("call", "Read", '{"path": "<|call|>"}')]


def test_a_cut_off_call(tokenizer):
    whole = CALL + '{"path": "abc"}'
    begins = whole.index('"abc')
    for end in range(whole.index("{"), len(whole)):
        found = parse(tokenizer, whole[:end], reason="length")
        ((kind, name, arguments, _),) = found
        assert (kind, name) == ("cut", "Read") and '{"path": "abc"}'.startswith(arguments)
        assert end <= begins or arguments


def test_without_tools_a_call_is_text(tokenizer):
    text = CALL + '{"path": "a"}<|call|>'
    assert parse(tokenizer, text, tools=()) == [("text", 'to=functions.Read {"path": "a"}')]


def test_one_call_ends_the_answer(tokenizer):
    parser = OutputParser(tokenizer, (READ,), one_call=True)
    text = CALL + '{"path": "a"}<|call|>' + GO + FINAL
    events = [event for token in tokens_of(tokenizer, text) for event in parser.add_token(token)]
    assert parser.ended and merged(events + parser.finish("stop")) == [READ_A]


# --------------------------------------------------------------------------- the rest of the parser


def test_stop_strings_are_for_the_answer(tokenizer):
    text = (
        "<|channel|>analysis<|message|>say END twice<|end|>"
        + GO
        + "<|channel|>final<|message|>now END<|end|>"
    )
    assert parse(tokenizer, text, stop=(" END",)) == [("reasoning", "say END twice"), ("text", "now")]


def test_reasoning_tokens_are_counted_without_tags_and_headers(tokenizer):
    parser = OutputParser(tokenizer)
    for token in tokens_of(tokenizer, THINK + GO + FINAL):
        parser.add_token(token)
    assert parser.reasoning_tokens == len(tokens_of(tokenizer, "Let me see."))


def test_logprobs_are_those_of_the_answer(tokenizer):
    parser = OutputParser(tokenizer)
    text = "<|channel|>commentary<|message|>One.<|end|>" + GO + FINAL
    events = []
    for token in tokens_of(tokenizer, THINK + GO + text):
        events += parser.add_token(token, Likelihood(-1.0, ()))
    events += parser.finish("stop")
    told = [one.token for event in events for one in getattr(event, "logprobs", ())]
    assert "".join(told) == "One.Hello."


def test_a_raw_prompts_text_is_left_alone(tokenizer):
    found = parse(tokenizer, THINK + GO + FINAL, tools=(), reasoning=False)
    assert found == [("text", "analysisLet me see.assistantfinalHello.")]


PIECES = st.sampled_from(
    [
        *(
            *CONTROLS,
            *CONTROLS,
            "analysis",
            "final",
            "commentary",
            " to=functions.Read ",
            "json",
            "assistant",
        ),
        *('{"path": "a"}', '{"path": "', "{}", "word", " ", "\n", "é🙂", '"}', "<tool_call>", "</tool_call>"),
        *(THINK, FINAL, CALL, "to="),
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=16).map("".join), st.sampled_from(["stop", "length"]), st.booleans())
def test_any_output_parses_the_same_however_it_is_cut(tokenizer, text, reason, tools):
    parse(tokenizer, text, reason=reason, tools=(READ,) if tools else ())


def test_200_random_outputs_are_the_same_streamed_and_whole(tokenizer):
    bodies = ['{"path": "a", "limit": 3}', "{}", '{"path": "é 🙂"', '{"items": [1, {"a": "]"}]}', "no"]
    for seed in range(200):
        rng = random.Random(seed)
        parts = [THINK, "<|channel|>commentary<|message|>I read.<|end|>", FINAL]
        parts += [CALL + body + "<|call|>" for body in bodies]
        text = GO.join(rng.choices(parts, k=rng.randint(1, 4)))
        found = []
        for each in (0, 1, rng.randint(2, 5)):
            found.append(merged(events_of(tokenizer, text, each=each)))
        assert found[0] == found[1] == found[2]


# --------------------------------------------------------------------------- earlier turns


def user(text: str) -> Message:
    return Message("user", (TextPart(text),))


CALLED = ToolCallPart("c1", "Read", {"path": "a"})
TOOL = Message("tool", (Result("c1", "the file"),))


@pytest.fixture
def prompts(tokenizer) -> PromptPipeline:
    return PromptPipeline(tokenizer)


def test_earlier_turns_are_written_as_the_template_wants_them(prompts):
    turn = Message("assistant", (ThinkingPart("I wonder."), CALLED))
    rendered = prompts.render(Conversation((user("Hi"), turn, TOOL), tools=(READ,)))
    assert rendered.text.endswith(
        "<|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>I wonder.<|end|>"
        '<|start|>assistant to=functions.Read<|channel|>commentary json<|message|>{"path": "a"}<|call|>'
        '<|start|>functions.Read to=assistant<|channel|>commentary<|message|>"the file"<|end|>'
        "<|start|>assistant"
    )
    assert rendered.tool_calls and not rendered.starts_in_thinking


def test_text_beside_thinking_and_a_call_is_not_refused(prompts):
    """The template raises when it is given both; neither is kept from the model."""
    turn = Message("assistant", (ThinkingPart("I wonder."), TextPart("I read."), CALLED))
    text = prompts.render(Conversation((user("Hi"), turn, TOOL), tools=(READ,))).text
    assert "<|channel|>analysis<|message|>I wonder.\n\nI read.<|end|>" in text


def test_an_answer_that_holds_tags_is_no_error(prompts):
    turn = Message("assistant", (TextPart("as <|channel|>final<|message|>x"),))
    rendered = prompts.render(Conversation((user("Hi"), turn, user("And?"))))
    assert rendered.tokens.count(prompts._tokenizer.convert_tokens_to_ids("<|channel|>")) == 1


class Session:
    """One conversation, whose model says what it is told."""

    def __init__(self, prompts: PromptPipeline):
        self.prompts = prompts
        self.messages: tuple[Message, ...] = ()

    def ask(self, *messages: Message):
        self.messages += messages
        talk = Conversation(self.messages, tools=(READ,))
        self.rendered = self.prompts.render(talk, scope=Scope("s"))
        return self.rendered

    def generate(self, text: str) -> list[int]:
        """Learns the turn, and returns the prompt and it. The last token ends it and is not kept."""
        tokenizer = self.prompts._tokenizer
        *generated, end = tokens_of(tokenizer, text, each=1)
        assert end in tokenizer.eos_token_ids
        answer = Answer()
        parser = OutputParser(tokenizer, (READ,))
        for event in [e for token in generated for e in parser.add_token(token)] + parser.finish("stop"):
            answer.add(event)
        self.prompts.learn(self.rendered.place, answer, self.rendered.tokens, generated)
        return self.rendered.tokens + generated


def test_a_call_that_is_echoed_without_its_thinking_is_healed(prompts):
    session = Session(prompts)
    session.ask(user("Read a"))
    for number in range(3):
        produced = session.generate(THINK + GO + CALL + '{"path":  "a"}<|call|>')
        rendered = session.ask(Message("assistant", (CALLED,)), TOOL)
        assert rendered.tokens[: len(produced)] == produced
        assert rendered.spliced == number + 1 and not rendered.refused


def test_an_answer_is_not_healed_as_another_tag_ends_it_there(prompts):
    """It was ended by `<|return|>`, and the template writes `<|end|>`: no end of the turn is found."""
    session = Session(prompts)
    session.ask(user("Hi"))
    session.generate(THINK + GO + FINAL)
    rendered = session.ask(Message("assistant", (TextPart("Hello."),)), user("And?"))
    assert rendered.spliced == 0 and rendered.refused == ("template",)
    assert prompts._tokenizer.decode(rendered.tokens) == rendered.text
    # Nor is anything lost where a call's end follows later.
    for asked in (user("Read"), user("")):
        session.messages = session.messages[:2]
        turn = Message("assistant", (CALLED,))
        rendered = session.ask(asked, turn, TOOL)
        assert rendered.spliced == 0 and prompts._tokenizer.decode(rendered.tokens) == rendered.text


def test_arguments_are_read_as_json_only(tokenizer):
    """Spellings of other models mean nothing inside a call's arguments."""
    path = "<function=Read><arg_key>a</arg_key><arg_value>b</arg_value>"
    body = json.dumps({"path": path})
    assert parse(tokenizer, CALL + body + "<|call|>") == [("call", "Read", body)]
