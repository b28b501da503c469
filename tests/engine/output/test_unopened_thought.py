"""A thought that no tag opened: split at once if nothing has been read, and expected of the next answers."""

# ruff: noqa: F811 -- `tokenizer` is a fixture of parsing.py

from __future__ import annotations

from functools import partial

import pytest
from daemon import demo_model_with
from gguf_files import TEMPLATE
from host import Host, chat
from msgspec.structs import replace
from parsing import READ, call, merged, tokenizer  # noqa: F401 -- a fixture

from omlxd.chat import Finished, ReasoningDelta, Restarted, TextDelta, TokenIds
from omlxd.engine.output.parser import OutputParser
from omlxd.engine.output.unopened import GuessingParser, UnopenedThoughts
from omlxd.models import demo

CALL = f"<tool_call>{call(path='a')}</tool_call>"
MADE = ("call", "Read", '{"path": "a"}')


def read(tokenizer, memory, text, collected, *, assume=True, reason="stop", stop=()):
    """What the client has in the end; streamed events are never taken back."""
    make = partial(OutputParser, tokenizer, (READ,), stop=stop)
    parser = GuessingParser(make, memory, assume, collected)
    events = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        events += parser.add_token(token)
        if parser.current.ended:
            break
    events += parser.finish(reason)
    starts = [at for at, event in enumerate(events) if isinstance(event, Restarted)]
    assert not starts or collected
    return merged(events[starts[-1] + 1 if starts else 0 :])


@pytest.mark.parametrize(
    ("text", "reason", "parts", "unopened"),
    [
        ("I muse.</think>\n\nYes.", "stop", [("reasoning", "I muse."), ("text", "Yes.")], True),
        ("</think>Yes.", "stop", [("text", "Yes.")], True),
        (f"Hm.</think>{CALL}", "stop", [("reasoning", "Hm."), MADE], True),
        ("I muse.</think>", "length", [("reasoning", "I muse.")], True),
        ("It is spelled </think>", "stop", [("text", "It is spelled")], False),
        ("Yes.", "stop", [("text", "Yes.")], False),
        ("<think>a</think>b</think>c", "stop", [("reasoning", "a"), ("text", "bc")], False),
        (f"Hm.{CALL}x</think>y", "stop", [("text", "Hm."), MADE, ("text", "xy")], False),
    ],
)
def test_a_collected_answer_is_split_at_once(tokenizer, text, reason, parts, unopened):
    memory = UnopenedThoughts("tiny")
    assert read(tokenizer, memory, text, True, reason=reason) == parts
    assert memory.expected is unopened
    memory = UnopenedThoughts("tiny")
    assert all(kind != "reasoning" for kind, *_ in read(tokenizer, memory, text, False)) or "<think>" in text
    assert memory.expected is (unopened and reason == "stop")


@pytest.mark.parametrize("collected", [True, False])
def test_a_streamed_thought_is_shown_once_and_told_in_one_line(tokenizer, collected, caplog):
    memory, text = UnopenedThoughts("tiny"), "I muse.</think>\n\nYes."
    assert read(tokenizer, memory, text, False) == [("text", "I muse.Yes.")]
    for _ in range(2):
        parts = read(tokenizer, memory, text, collected, stop=("muse",))
        assert parts == [("reasoning", "I muse."), ("text", "Yes.")] and memory.expected
    assert read(tokenizer, memory, "So", collected, reason="length") == [("reasoning", "So")]
    assert memory.expected, "a thought that is cut off is one"
    assert read(tokenizer, memory, text, False, assume=False) == [("text", "I muse.Yes.")]
    (line,) = caplog.messages
    assert line.startswith("tiny: ") and "`starts-in-thinking = true`" in line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Yes.", [("text", "Yes.")]),
        (f"Hm.{CALL}", [("text", "Hm."), MADE]),
        ("One END two", [("text", "One")]),
    ],
)
def test_an_answer_without_a_closing_tag_takes_the_memory_back_and_is_text(tokenizer, text, parts):
    for collected in (True, False):
        memory = UnopenedThoughts("tiny")
        memory.note(seen=True)
        found = read(tokenizer, memory, text, collected, stop=(" END",))
        assert not memory.expected
        assert found == parts if collected else found[-len(parts) :] == parts
        assert read(tokenizer, memory, text, collected, stop=(" END",)) == parts


def split_of(events):
    """(whether it has a thought and then text, token ids, place of the first event that counts)."""
    start = max((at for at, e in enumerate(events) if isinstance(e, Restarted)), default=-1) + 1
    kinds = [type(e) for e in events[start:] if isinstance(e, ReasoningDelta | TextDelta)]
    ids = [id for e in events[start:] if isinstance(e, TokenIds) for id in e.ids]
    return kinds[0] is ReasoningDelta and TextDelta in kinds, ids, start


@pytest.mark.slow
def test_an_engine_splits_what_is_collected_and_remembers(tmp_path):
    """The demo model is talked into closing a thought that nobody opened."""
    host = Host(demo_model_with(TEMPLATE, tmp_path / "chatml"))

    def ask(seed: int, collected: bool):
        asked = chat(thinking=None, max_tokens=100, seed=seed, logit_bias={demo.VOCAB - 3: 6})
        return host.ask(replace(asked, collected=collected, return_token_ids=True))

    try:
        memory = host.engine._unopened
        for seed in range(30):
            thought, ids, _ = split_of(ask(seed, collected=False))
            if memory.expected:
                break
        assert memory.expected and not thought, "the first one is shown as text"
        assert split_of(ask(seed, collected=False)) == (True, ids, 0)
        memory.expected = False
        events = ask(seed, collected=True)
        thought, again, start = split_of(events)
        assert thought and again == ids and start > 1
        assert isinstance(events[-1], Finished) and events[-1].usage.reasoning_tokens > 0
    finally:
        host.close()
