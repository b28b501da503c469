"""Turns as they were generated: put back exactly, in their own place, and nowhere else."""
# ruff: noqa: F811 -- `folder` and `prompts` are fixtures of talk.py

from __future__ import annotations

import json

import pytest
from families import build_family
from host import Host, chat, finished, text_of
from mlx_lm.tokenizer_utils import load as load_tokenizer
from msgspec.structs import replace
from talk import (
    CALL,
    ME,
    READ,
    Session,
    echo,
    folder,  # noqa: F401
    pipeline,
    prompts,  # noqa: F401
    thought,
    tool,
    user,
)
from templates import QWEN3

from omlxd.api.anthropic import request
from omlxd.api.openai import chat_request
from omlxd.chat import (
    Conversation,
    Message,
    ReasoningDelta,
    TextDelta,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolCallPart,
)
from omlxd.engine.prompt.pipeline import PromptPipeline
from omlxd.engine.prompt.turn_memory import Answer, Scope
from omlxd.models import demo

# --------------------------------------------------------------------------- append-only turns


@pytest.mark.parametrize("thinking", [True, False])
def test_an_append_only_session_keeps_its_whole_prefix(prompts, thinking):
    """Tool loops and questions, thinking echoed or not: nothing of any earlier turn is computed again."""
    session = Session(prompts)
    plain = session.ask(user("Read a.txt")).text
    answer = session.generate(thought(prompts, f"Reading.\n{CALL}"))
    assert len(answer.calls) == 1
    for text in ("the file", "more of the file"):
        session.ask(echo(answer, thinking), tool(text))
        assert session.kept() and text in prompts._tokenizer.decode(session.rendered.tokens)
        answer = session.generate(thought(prompts, f"Once more.\n{CALL}"))
    session.ask(echo(answer, thinking), tool("the end"))
    answer = session.generate(thought(prompts, "It says:  nothing\n"))
    for question in ("Sure?", "Really?"):
        session.ask(echo(answer, thinking), user(question))
        assert session.kept()
        answer = session.generate(thought(prompts, f"Yes, {question}"))
    assert session.rendered.spliced == 5
    assert not session.rendered.refused and not prompts.memory.refusals
    decoded = prompts._tokenizer.decode(session.rendered.tokens)
    assert decoded.startswith(plain) and decoded.count("Let me  see.") == 5
    at = 0
    for word in ("the file", "more of the file", "the end", "It says:", "Sure?", "Yes, Sure?", "Really?"):
        at = decoded.index(word, at)


def test_the_rest_is_what_the_template_writes(prompts):
    """The healed prompt differs from the rendered one within assistant turns alone."""
    session = Session(prompts)
    session.ask(user("Hello"))
    answer = session.generate(thought(prompts, "Hi."))
    rendered = session.ask(echo(answer), user("A file?"))
    decoded = prompts._tokenizer.decode(rendered.tokens)
    tail = rendered.text[rendered.text.index("Hi.") + 3 :].lstrip()
    assert decoded.endswith(tail) and "A file?" in tail


def test_what_needs_no_healing_is_left_alone(folder):
    prompts = pipeline(folder, demo.TEMPLATE)
    session = Session(prompts)
    rendered = session.ask(user("Hello"))
    text = "I think.\n</think>\n\nHi there."
    generated = prompts._tokenizer.encode(text, add_special_tokens=False)
    answer = Answer()
    answer.add(ReasoningDelta("I think."))
    answer.add(TextDelta("Hi there."))
    prompts.learn(rendered.place, answer, rendered.tokens, generated)
    following = session.ask(echo(answer, thinking=True), user("And?"))
    assert following.spliced == 0 and following.refused == ()
    assert following.tokens[: len(rendered.tokens) + len(generated)] == rendered.tokens + generated
    assert prompts.figures()["prompt_turns_healed_total"] == 0


def test_thinking_switched_off_and_on_between_turns(folder):
    prompts = pipeline(folder, QWEN3)
    session = Session(prompts)
    session.ask(user("Hello"), thinking=False)
    answer = session.generate("Hi.")
    session.ask(echo(answer), user("Think!"), thinking=True)
    assert session.kept()
    answer = session.generate(thought(prompts, "Thought."))
    session.ask(echo(answer), user("Stop that"), thinking=False)
    assert session.kept() and session.rendered.spliced == 2


# --------------------------------------------------------------------------- echoes of every shape


def test_echoes_of_both_protocols(folder):
    """Arguments written anew, ids changed, content as parts or text, null content."""
    prompts = pipeline(folder, QWEN3)
    session = Session(prompts, messages=(user("Read a.txt"),))
    session.ask()
    answer = session.generate(thought(prompts, CALL))
    assert answer.texts == ["", ""] and answer.calls
    name, arguments = answer.calls[0]
    written_anew = json.dumps(dict(reversed(json.loads(arguments).items())), indent=4).replace("2.0", "2")
    schema = READ.parameters
    openai = {
        "messages": [
            {"role": "user", "content": "Read a.txt"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "x", "type": "function", "function": {"name": name, "arguments": written_anew}}
                ],
            },
            {"role": "tool", "tool_call_id": "x", "content": "text"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "Read", "description": "Reads a file.", "parameters": schema},
            }
        ],
    }
    claude = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Read a.txt", "cache_control": {"type": "ephemeral"}}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Let me  see.", "signature": ""},
                    {"type": "tool_use", "id": "toolu_1", "name": name, "input": json.loads(written_anew)},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "text"}],
            },
        ],
        "tools": [{"name": "Read", "description": "Reads a file.", "input_schema": schema}],
    }
    for parse, body in ((chat_request.parse, openai), (request.parse, claude)):
        conversation = parse(json.dumps(body).encode(), {}).generate.prompt
        rendered = prompts.render(conversation, scope=ME)
        assert rendered.tokens[: len(session.produced)] == session.produced
        assert rendered.spliced == 1 and rendered.refused == ()


def test_two_branches_with_the_same_prefix(prompts):
    one = Session(prompts)
    one.ask(user("Pick"))
    left = one.generate(thought(prompts, "Left."))
    other = Session(prompts)
    other.ask(user("Pick"))
    right = other.generate(thought(prompts, "Right."))
    for session, answer in ((one, left), (other, right), (one, left)):
        session.messages = session.messages[:2]
        session.ask(echo(answer), user("Go"))
        assert session.kept() and session.rendered.spliced == 1


def test_edited_text_is_what_the_client_sent(prompts):
    for edit in ("Hello there, edited", "Hi  there", ""):
        session = Session(prompts, Scope(f"edit-{edit}"))
        session.ask(user("Hello"))
        session.generate(thought(prompts, "Hi there"))
        rendered = session.ask(Message("assistant", (TextPart(edit),)), user("And?"))
        assert rendered.spliced == 0 and rendered.refused == ("edited",)
        assert prompts._tokenizer.decode(rendered.tokens) == rendered.text


def test_edited_arguments_and_thinking(prompts):
    session = Session(prompts)
    session.ask(user("Read a.txt"))
    answer = session.generate(thought(prompts, CALL))
    call = ToolCallPart("id0", "Read", {"path": "b.txt", "lines": 2})
    rendered = session.ask(Message("assistant", (call,)), tool("b"))
    assert rendered.spliced == 0 and rendered.refused == ("edited",)
    session.messages = session.messages[:2]
    rewritten = Message("assistant", (ThinkingPart("Something else."), *echo(answer).parts))
    rendered = session.ask(rewritten, tool("b"))
    assert rendered.spliced == 0 and rendered.refused == ("thinking_edited",)


def test_an_edit_further_up_ends_healing_there(prompts):
    """What comes before the edit is healed, what comes after is not; nothing is lost of the text."""
    session = Session(prompts)
    session.ask(user("One"))
    first = session.generate(thought(prompts, "First."))
    session.ask(echo(first), user("Two"))
    second = session.generate(thought(prompts, "Second."))
    start = session.messages[:2]
    talk = (*start, echo(first), user("Two, edited"), echo(second), user("Three"))
    rendered = prompts.render(Conversation(talk, tools=(READ,)), scope=ME)
    assert rendered.spliced == 1
    decoded = prompts._tokenizer.decode(rendered.tokens)
    assert decoded.count("Let me  see.") == 1 and "Two, edited" in decoded and "Second." in decoded


# --------------------------------------------------------------------------- never somebody else's


def test_another_session_is_never_healed(prompts):
    session = Session(prompts)
    session.ask(user("Hello"))
    answer = session.generate(thought(prompts, "OK"))
    for scope in (Scope("session-2"), Scope("session-1", "salt"), Scope()):
        other = Session(prompts, scope)
        other.ask(user("Hello"))
        rendered = other.ask(echo(answer), user("Go on"))
        assert rendered.spliced == 0 and rendered.refused == ()
        assert "Let me" not in prompts._tokenizer.decode(rendered.tokens)


def test_the_same_text_elsewhere_in_the_session_is_not_healed(prompts):
    session = Session(prompts)
    session.ask(user("Hello"))
    answer = session.generate(thought(prompts, "OK"))
    rendered = Session(prompts).ask(user("Something else"), echo(answer), user("Go on"))
    assert rendered.spliced == 0
    assert "Let me" not in prompts._tokenizer.decode(rendered.tokens)


def test_conversations_without_a_name(prompts):
    """Told apart by their first messages, then by thinking that comes back; with neither, none is healed."""
    first = Session(prompts, Scope())
    first.ask(user("Hello"))
    answer = first.generate(thought(prompts, "OK"))
    first.ask(echo(answer), user("Go on"))
    assert first.kept() and first.rendered.spliced == 1
    second = Session(prompts, Scope())
    second.ask(user("Hello"))
    looked = second.generate(thought(prompts, "OK").replace("see", "look"))
    rendered = second.ask(echo(answer), user("Go on"))
    assert rendered.spliced == 0 and rendered.refused == ("ambiguous",)
    for session, other in ((first, "look"), (second, "see")):
        session.messages = session.messages[:2]
        session.ask(
            echo(answer, thinking=True) if session is first else echo(looked, thinking=True), user("Go")
        )
        decoded = prompts._tokenizer.decode(session.rendered.tokens)
        assert session.rendered.spliced == 1 and f"Let me  {other}" not in decoded


def test_a_turn_cut_off_is_not_remembered(prompts):
    session = Session(prompts)
    session.ask(user("Hello"))
    answer = session.generate(thought(prompts, "OK"), ended=False)
    rendered = session.ask(echo(answer), user("Go on"))
    assert rendered.spliced == 0 and rendered.refused == ()


def test_an_answer_that_the_limit_of_tokens_cut_is_remembered(tmp_path):
    """As it was generated, whatever tokens its text would have; not one that is cut within a thought."""
    host = Host(build_family("qwen3", tmp_path))
    try:
        memory = host.engine.prompts.memory
        assert memory is not None
        healed = 0
        for question in ("Hello", "What?", "Where?"):
            asked = chat(question, temperature=0, max_tokens=40)
            events = host.ask(asked)
            assert finished(events).reason == "length"
            answer = Message("assistant", (TextPart(text_of(events)),))
            talk = replace(asked.prompt, messages=(*asked.prompt.messages, answer, user("Go on")))
            rendered = host.engine.prompts.render(talk, scope=Scope())
            before = host.engine.prompts.render(asked.prompt).tokens
            (turn,) = memory._places.get((rendered.session, rendered.chain[1])).turns.values()
            assert len(turn.tokens) == 40
            assert rendered.tokens[: turn.length] == [*before, *turn.tokens]
            healed += rendered.spliced
            assert rendered.unknown == 0
        assert healed
        places = len(memory._places)
        thinks = host.ask(chat("Think", thinking=True, temperature=0, max_tokens=4))
        assert finished(thinks).reason == "length" and not text_of(thinks)
        assert len(memory._places) == places
    finally:
        host.close()


def test_prompts_that_are_only_counted_or_explained_are_none_of_the_figures(folder):
    prompts = pipeline(folder, QWEN3)
    session = Session(prompts)
    session.ask(user("Hello"))
    answer = session.generate(thought(prompts, "OK"))
    nobodys = (user("Hi"), Message("assistant", (TextPart("Yes"),)), user("Sure?"))
    before = prompts.figures()
    rendered = [session.ask(echo(answer), user("Go on")), Session(prompts).ask(*nobodys)]
    assert [(one.spliced, one.unknown) for one in rendered] == [(1, 0), (0, 1)]
    assert prompts.memory.spliced == before["prompt_turns_healed_total"] == prompts.memory.unknown == 0
    for one in rendered:
        prompts.begin(one)
        prompts.end(one.place)
    after = prompts.figures()
    assert after["prompt_turns_healed_total"] == 1 and after["prompt_turns_unknown_total"] == 1


def test_healing_off(folder):
    prompts = PromptPipeline(load_tokenizer(folder), turn_memory=False)
    assert prompts.memory is None
    rendered = prompts.render(Conversation((user("Hello"),)), scope=ME)
    prompts.learn(rendered.place, Answer(), rendered.tokens, [1])
    assert "prompt_turns_healed_total" not in prompts.figures()


def test_a_prompt_that_would_no_longer_fit(folder):
    prompts = pipeline(folder, QWEN3)
    session = Session(prompts)
    session.ask(user("Hello"))
    answer = session.generate(thought(prompts, "OK"))
    plain = session.ask(echo(answer), user("Go on"))
    talk = Conversation(session.messages, tools=(READ,))
    tight = prompts.render(talk, scope=ME, most=len(plain.tokens) - 1)
    assert tight.spliced == 0 and tight.refused == ("too_long",)
    assert prompts._tokenizer.decode(tight.tokens) == tight.text


def test_answers_as_events():
    answer = Answer()
    for event in (TextDelta("a"), TextDelta("b"), ToolCall("1", "T", '{"x": 1}'), TextDelta("c")):
        answer.add(event)
    assert answer.texts == ["ab", "c"] and answer.calls == [("T", '{"x": 1}')]
