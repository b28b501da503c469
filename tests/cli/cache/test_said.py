"""Client, first words and turns of a cached prefix, from its tokens, over the marks of all templates."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from omlxd.cli.cache.listing.said import MARKS, Reader, Said
from omlxd.common.clients import client_of_prompt, client_of_request, own_words

BLOCK = 16
END = "<end_of_turn>\n"
NOTES = "<system-reminder>\nThe date is today.\n</system-reminder>\n"


def reader_of(folder: Path, control: str) -> Reader:
    """A tokeniser of letters whose one control token is `control`."""
    letters = {chr(code): at for at, code in enumerate([10, *range(32, 127), ord("｜")])}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([control])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Reader(str(folder))


def blocks_of(reader: Reader, text: str) -> list[bytes]:
    ids = reader._tokenizer.encode(text, add_special_tokens=False).ids
    return [b",".join(b"%d" % id for id in ids[at : at + BLOCK]) for at in range(0, len(ids), BLOCK)]


@pytest.mark.parametrize(("control", "mark"), MARKS, ids=[control for control, _ in MARKS])
@pytest.mark.parametrize("notes", ["", NOTES])
def test_what_a_prefix_says(tmp_path: Path, control: str, mark: str, notes: str):
    reader = reader_of(tmp_path, control)
    system = "You are Claude Code, the official CLI. "
    trunk = blocks_of(reader, system)
    first = blocks_of(reader, f"{mark}{notes}What is  the\ncapital?{END}")
    more = blocks_of(reader, f"{mark}And of Spain?{END}{mark}<tool_response>\n4{END}{mark}Thanks!")
    said = reader.go_on(Said(), trunk)
    assert (said.client, said.words, said.turns) == ("Claude Code", "", 0)
    said = reader.go_on(said, first)
    assert said.turns == 1 and said.words.startswith("What is the capital?")
    said = reader.go_on(said, more)
    assert (said.client, said.turns) == ("Claude Code", 3), "a call's result is nobody's turn"
    assert "date" not in said.words


def test_without_a_tokeniser_nothing_is_said(tmp_path: Path):
    said = Reader(str(tmp_path)).go_on(Said(), [b"1,2,3", b"4"])
    assert said == Said(tokens=4)


def test_tokens_that_are_nonsense_are_passed_over(tmp_path: Path):
    reader = reader_of(tmp_path, "<|im_start|>")
    assert reader.go_on(Said(), [b"", b"x,y", b"999999999,1"]).turns == 0


@pytest.mark.parametrize(
    ("agent", "session", "name"),
    [
        ("claude-cli/2.1.0 (external, cli)", "x", "Claude Code"),
        ("codex_exec/0.171.0", "", "Codex"),
        ("opencode/1.2 ai-sdk/5", "", "opencode"),
        ("Mozilla/5.0 (X11)", "page-1", "This page"),
        ("Mozilla/5.0 (X11)", "", "Browser"),
        ("OpenAI/Python 2.1", "", "OpenAI SDK"),
        ("my-tool/1.0", "", "my-tool"),
        ("omlxd-chat/0.1.0", "chat-1", "omlxd chat"),
        ("omlxd-cache/0.1.0", "", "omlxd cache"),
        ("omlxd-/1", "", "omlxd-"),
        ("", "", ""),
    ],
)
def test_who_asks(agent: str, session: str, name: str):
    assert client_of_request(agent, session) == name


def test_the_users_own_words():
    assert own_words(f"{NOTES}<env>x</env> hi <b>you</b>") == "hi <b>you</b>"
    assert own_words("<system-reminder> it does not end") == ""
    assert client_of_prompt("You are a helper.") == ""
