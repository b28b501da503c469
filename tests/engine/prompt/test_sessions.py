"""Sessions: whose branch a request goes on with, whose it pins, and where its tokens went astray."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from families import build_family
from fast_or_slow import rest_slow
from mlx_lm.tokenizer_utils import load as load_tokenizer
from msgspec.structs import replace
from rig import BLOCK, Rig

from omlxd.api.anthropic import request as anthropic
from omlxd.chat import Conversation, GenerateRequest, Message, RawPrompt, TextPart, Tool
from omlxd.engine.prompt.pipeline import PromptPipeline
from omlxd.engine.prompt.sessions import Sessions, Standing, is_side_request, lineage_of
from omlxd.engine.prompt.turn_memory import Scope
from omlxd.kv.hashing import chain_root, hash_blocks
from omlxd.models import demo

TRACES = Path(os.environ.get("OMLXD_TRACES", Path(__file__).parents[4] / "shared" / "traces"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    demo.write_tokenizer(path, demo.VOCAB)
    demo.write_json(path / "config.json", {"model_type": "qwen3"})
    return path


@pytest.fixture
def desk(folder):
    return Desk(PromptPipeline(load_tokenizer(folder)))


class Desk:
    """Takes requests as the host does, and ends them well."""

    def __init__(self, prompts: PromptPipeline):
        self.prompts, self.sessions = prompts, Sessions()
        self.hashes: list[bytes] = []

    def take(self, request: GenerateRequest, *, complete: bool = True) -> Standing:
        rendered = self.prompts.render(request.prompt, scope=Scope(request.session, request.cache_salt))
        self.hashes = hash_blocks(chain_root(b"n" * 32, request.cache_salt), rendered.tokens, 16)
        lineage = lineage_of(request, rendered, self.hashes)
        assert lineage is not None
        standing = self.sessions.begin(lineage)
        if complete:
            self.sessions.end(lineage, len(rendered.tokens) // 16)
        return standing


def ask(*texts: str, session: str = "s", system: str = demo.PROSE[:500], parent: str = "") -> GenerateRequest:
    messages = [Message(("user", "assistant")[i % 2], (TextPart(text),)) for i, text in enumerate(texts)]
    head = Message("system", (TextPart(system),))
    return GenerateRequest(Conversation((head, *messages)), session=session, parent_agent=parent)


# --------------------------------------------------------------------------- branches


def test_a_conversation_extends_itself(desk):
    assert not desk.take(ask("Hello")).extends
    assert desk.take(ask("Hello")).extends
    assert desk.take(ask("Hello", "Hi.", "And?")).extends
    assert desk.take(ask("Hello", "Hi.", "And?", "Well.", "So?")).extends
    assert not desk.take(ask("Hello", "Hi.", "Or?")).extends
    assert desk.take(ask("Hello", "Hi.", "Or?", "Yes.", "Good")).extends
    assert not desk.take(ask("Hello", session="another")).extends
    assert desk.sessions.figures()["sessions"] == 2
    assert desk.sessions.figures()["session_branches"] == 3
    assert desk.sessions.rejected == 0


def test_a_broken_off_request_is_no_branch(desk):
    desk.take(ask("Hello"), complete=False)
    assert not desk.take(ask("Hello", "Hi.", "And?")).extends
    assert desk.sessions.figures()["session_branches"] == 1


def test_conversations_without_a_name_are_told_apart_by_their_first_messages(desk):
    desk.take(ask("Hello", session=""))
    assert desk.take(ask("Hello", "Hi.", "And?", session="")).extends
    assert not desk.take(ask("Good morning", session="")).extends
    assert desk.sessions.figures()["sessions"] == 2


def test_a_raw_prompt_has_no_session(desk):
    assert lineage_of(GenerateRequest(RawPrompt("x")), desk.prompts.render(RawPrompt("x")), []) is None


# --------------------------------------------------------------------------- astray


def test_tokens_that_changed_under_the_same_canonical_form_are_counted_with_their_place(desk):
    reminder = "<system-reminder>\n{}\n</system-reminder>\n"
    desk.take(ask(demo.PROSE[:900] + reminder.format("seven") + demo.PROSE[:400]))
    before = desk.hashes
    standing = desk.take(ask(demo.PROSE[:900] + reminder.format("eight") + demo.PROSE[:400], "Hi.", "And?"))
    assert standing.extends and desk.sessions.rejected == 1
    place = standing.rejected_at
    assert place is not None and 10 < place < len(before)
    assert before[:place] == desk.hashes[:place] and before[place] != desk.hashes[place]
    assert desk.take(ask("Hello")).rejected_at is None


def test_clean_traffic_counts_nothing(desk):
    """The recorded sessions, sub-agents and all."""
    if not TRACES.is_dir():
        pytest.skip(f"no traces in {TRACES}")
    pinned = extended = taken = 0
    for path in sorted(TRACES.glob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            headers = {name.lower(): value for name, value in line["headers"].items()}
            request = anthropic.parse(json.dumps(line["body"]).encode(), headers).generate
            standing = desk.take(request)
            taken += 1
            extended += standing.extends
            pinned += bool(standing.pins)
            assert is_side_request(request, standing) == ("x-claude-code-agent-id" in headers)
    counted = {**desk.sessions.figures(), **desk.prompts.figures()}
    zero = {name for name in counted if "rejected" in name or "healed" in name}
    assert len(zero) == 8 and not any(counted[name] for name in zero)
    assert extended > taken / 2 and pinned >= 2, (extended, taken, pinned)


# --------------------------------------------------------------------------- parents


def test_a_sub_agent_pins_the_branch_of_the_agent_that_started_it(desk):
    desk.take(ask("Hello", demo.PROSE, "Go"))
    main = desk.hashes
    first = desk.take(ask("Find it", session="s/one", system="You search."))
    assert list(first.pins) == main and not first.extends
    one = desk.hashes
    nested = desk.take(ask("Look", session="s/two", system="You look.", parent="one"))
    assert list(nested.pins) == one
    again = desk.take(ask("Find it", "Found.", "More", session="s/one", system="You search."))
    assert again.extends and list(again.pins) == main
    assert not desk.take(ask("Hello", demo.PROSE, "Go", "Done.", "Thanks")).pins


def test_without_headers_the_longest_branch_of_another_head_is_the_parent(desk):
    assert not desk.take(ask("A title?", system="You write titles.")).pins
    assert not desk.take(ask("Hello", demo.PROSE, "Go")).pins
    main = desk.hashes
    assert list(desk.take(ask("Find it", system="You search.")).pins) == main
    assert not desk.take(ask("Hello", demo.PROSE, "Go", "Done.", "Thanks")).pins


def test_a_compaction_does_not_pin_what_it_replaces(desk):
    desk.take(ask("Hello", demo.PROSE, "Go"))
    assert not desk.take(ask("A summary of all that was")).pins


# --------------------------------------------------------------------------- bounds


def test_sessions_and_branches_are_bounded(folder):
    sessions = Sessions(most_blocks=500)
    desk = Desk(PromptPipeline(load_tokenizer(folder)))
    desk.sessions = sessions
    for i in range(100):
        desk.take(ask("Hello", session=f"s{i}"))
        held = sum(8 + sum(len(b.hashes) for b in s.branches) for s in sessions._sessions.values())
        assert held == sessions._sessions.cost <= 500
    assert desk.take(ask("Hello", "Hi.", "And?", session="s99")).extends
    assert not desk.take(ask("Hello", "Hi.", "And?", session="s0")).extends
    for i in range(50):
        desk.take(ask(f"Branch {i}", session="wide"))
    assert len(sessions._sessions.get(("wide", "")).branches) <= 16


# --------------------------------------------------------------------------- in the cache


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_family("qwen3", tmp_path_factory.mktemp("model"))


def prompt_of(length: int, seed: int) -> list[int]:
    return [(i * 31 + seed * 101 + i // 7) % 900 + 20 for i in range(length)]


@pytest.mark.parametrize("pinning", rest_slow([True, False], True))
def test_a_sub_agent_never_evicts_its_parents_branch(model, pinning):
    """A hot tier that holds the parent and a little more: the sub-agent computes twice as much."""
    parent, child = prompt_of(20 * BLOCK + 5, 1), prompt_of(40 * BLOCK + 5, 2)
    with Rig(model) as rig:
        rig.run(parent, n=2)
        held = rig.pool.hot_bytes
    with Rig(model, hot=held + held // 4) as rig:
        first = rig.run(parent, n=2)
        names = list(first.sequence.kv.hashes) if pinning else ()
        for turn in range(2):
            rig.run(child + [30] * turn, n=2, pins=names)
            assert all(block.ref_cnt == 0 for block in rig.pool._blocks)
            assert rig.pool.hot_bytes <= held + held // 4
        again = rig.run(parent, n=2)
        assert (again.hot == 20 * BLOCK) is pinning
        assert again.got == first.got


@pytest.mark.slow
def test_a_sub_agent_that_is_over_goes_before_its_parent(model):
    """Something else needs room later: the sub-agent's tail is evicted first."""
    parent, child, other = (
        prompt_of(20 * BLOCK + 5, 1),
        prompt_of(20 * BLOCK + 5, 2),
        prompt_of(15 * BLOCK, 3),
    )
    with Rig(model) as rig:
        rig.run(parent, n=2)
        held = rig.pool.hot_bytes
    with Rig(model, hot=held * 2 + held // 10) as rig:
        first = rig.run(parent, n=2)
        rig.run(child, n=2, pins=list(first.sequence.kv.hashes))
        rig.run(other, n=2)
        assert rig.run(parent, n=2).hot == 20 * BLOCK


def test_a_cancelled_sub_agent_lets_go(model):
    parent = prompt_of(10 * BLOCK, 1)
    with Rig(model) as rig:
        first = rig.run(parent, n=2)
        output = rig.start(prompt_of(200, 2), n=100_000, pins=list(first.sequence.kv.hashes))
        assert output.first.wait(120)
        assert any(block.ref_cnt for block in rig.pool._blocks)
        rig.scheduler.cancel(output.sequence)
        rig.settle()
        assert all(block.ref_cnt == 0 for block in rig.pool._blocks)


@pytest.mark.slow
def test_a_missing_checkpoint_is_noted(tmp_path_factory):
    """For a model with state: turns that extend one another note nothing, a lost checkpoint is noted."""
    model = build_family("qwen3_5", tmp_path_factory.mktemp("hybrid"))
    with Rig(model) as rig:
        assert rig.checkpointer is not None
        rig.checkpointer.interval = 2 * BLOCK
        tokens = prompt_of(8 * BLOCK + 9, 5)
        for _ in range(3):
            output = rig.run(tokens, n=BLOCK)
            assert output.sequence.kv.unreached == 0
            tokens = [*output.sequence.tokens, *prompt_of(BLOCK, 9)]
        rig.checkpointer.checkpoints.deepest = lambda hashes, reach: min(reach, 1)  # type: ignore[method-assign]
        output = rig.run(tokens, n=2)
        assert output.sequence.kv.unreached > 5


# --------------------------------------------------------------------------- side requests

TITLES = [
    ("You are a title generator. You output ONLY a thread title. Nothing else.", "Mend the bug"),
    ("", "Generate a title for this conversation:\n", "Mend the bug"),
    ("Generate a concise, sentence-case title (3-7 words) that captures the topic of this session.", "Mend"),
    (
        "Analyze if this message indicates a new conversation topic. If it does, extract a 2-3 word title.",
        "A",
    ),
    ("", "Your job is to provide a short title for a task that will be created from that prompt.\n\nMend"),
    ("You are an expert in crafting pithy titles for chatbot conversations.", "Mend the bug"),
    ("", "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history."),
    ("", "### Task:\nSuggest 3-5 relevant follow-up questions that the user might ask in this chat."),
    ("", "Mend", "Done.", "So?", "Yes.", "Generate a concise 3-7 word title for this conversation."),
]
OTHERS = [
    ("You are a coding agent. Use the task tool for long tasks.", "Write a title for my post on bread."),
    ("", "Fix the title of this page, in this session"),
    ("", "Hello", "Generate a title for this conversation.", "What does that do?"),
]


@pytest.mark.parametrize("said", [*TITLES, *OTHERS])
def test_titles_are_known_by_their_prompts(said):
    system, *texts = said
    request = ask(*texts, system=system or "You help.")
    assert is_side_request(request, Standing()) == (said in TITLES)
    assert isinstance(request.prompt, Conversation)
    tools = replace(request.prompt, tools=(Tool("read"),))
    assert not is_side_request(replace(request, prompt=tools), Standing()), "an agent's own turn has tools"


def test_sub_agents_are_side_requests(desk):
    main = ask("Hello", demo.PROSE, "Go")
    assert not is_side_request(main, desk.take(main))
    unnamed = ask("Find it", system="You search.")
    assert is_side_request(unnamed, desk.take(unnamed)), (
        "of the same session, with a system prompt of its own"
    )
    for named in (ask("Look", session="s/two"), ask("Look", session="t", parent="one")):
        assert is_side_request(named, Standing())
    for alone in ("s", "/home", "s/"):
        assert not is_side_request(ask("Look", session=alone), Standing())
