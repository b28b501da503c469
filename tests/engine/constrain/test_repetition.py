"""Endless loops are told from honest repetition: 200 long answers that repeat themselves are no loops."""

from __future__ import annotations

import base64
import random
import re
from collections.abc import Callable, Sequence

import pytest

from omlxd.engine.constrain import repetition
from omlxd.engine.constrain.repetition import LONG, MOST, ONE, OTHER, REACH, THOUGHT, Repetition

_PIECES = re.compile(r" ?[A-Za-z]+|\d|\s*\n+| ?[^\sA-Za-z0-9]{1,8}|\s+")
WORDS = [
    a + b for a in ("ba", "ke", "lo", "mi", "ru", "so", "ti") for b in ("n", "r", "st", "lt", "ck", "sh")
]


def tokens_of(text: str) -> list[int]:
    """As large vocabularies cut a text: words with their space, single digits, runs of signs."""
    ids: dict[str, int] = {}
    return [ids.setdefault(piece, len(ids)) for piece in _PIECES.findall(text)]


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


# --------------------------------------------------------------------------- honest answers


def _csv(rng: random.Random) -> str:
    same = f"{prose(rng, 1)},0,0,{rng.randrange(100)},{prose(rng, 2)}\n"
    return "id,a,b,c,name\n" + "".join(
        same if rng.random() < 0.9 else f"{i},0,0,1,x\n" for i in range(rng.randrange(100, 600))
    )


def _code(rng: random.Random) -> str:
    block = "".join(f"    {prose(rng, 1)}({rng.randrange(10)}, None)\n" for _ in range(rng.randrange(1, 12)))
    return "\n".join(f"def {rng.choice(WORDS)}():\n{block}" for _ in range(rng.randrange(30, 120)))


def _equal_lines(rng: random.Random) -> str:
    return f"    assert {prose(rng, 2)} == {rng.randrange(9)};\n" * rng.randrange(100, 500)


def _objects(rng: random.Random) -> str:
    fields = ", ".join(
        f'"{prose(rng, 1)}": {rng.choice(["null", "0", "true"])}' for _ in range(rng.randrange(2, 9))
    )
    return "[\n" + f"  {{{fields}}},\n" * rng.randrange(100, 500) + "]"


def _log(rng: random.Random) -> str:
    line = f"[INFO] {prose(rng, 6)} ok\n"
    return "".join(line if rng.random() < 0.97 else f"[WARN] {prose(rng, 4)}\n" for _ in range(600))


def _poem(rng: random.Random) -> str:
    refrain = "".join(prose(rng, 7) + "\n" for _ in range(4))
    return "\n".join(prose(rng, 28) + "\n" + refrain for _ in range(40))


def _art(rng: random.Random) -> str:
    row = " " * rng.randrange(30) + "#" * rng.randrange(30) + "|" + "-" * 20 + "|\n"
    return row * rng.randrange(50, 300) + ("#" * 60 + "\n") * 100


def _matrix(rng: random.Random) -> str:
    size = rng.randrange(8, 65)
    return ("[" + "0, " * (size - 1) + "0],\n") * size


def _bits(rng: random.Random) -> str:
    return ", ".join(rng.choice("01") for _ in range(4000))


def _zeros(rng: random.Random) -> str:
    return rng.choice(["0", "0, ", "-", "=", "0x00, ", "| | "]) * rng.randrange(500, 2000)


def _base64(rng: random.Random) -> str:
    return base64.b64encode(rng.randbytes(6000)).decode() + "A" * 2000 + "\n" + "AAAA" * 400


def _asked_for(rng: random.Random) -> str:
    return (prose(rng, rng.randrange(1, 14)) + rng.choice([" ", "\n", ". "])) * rng.randrange(100, 700)


def _cards(rng: random.Random) -> str:
    card = f'<div class="card">\n  <h2>{prose(rng, 8)}</h2>\n  <p>{prose(rng, 60)}</p>\n</div>\n'
    return card * rng.randrange(10, 80)


def _file_again(rng: random.Random) -> str:
    file = "".join(f"{prose(rng, 8)} = {rng.randrange(1000)}\n" for _ in range(120))
    return "\n".join([file] * 8)


HONEST: tuple[Callable[[random.Random], str], ...] = (
    *(_csv, _code, _equal_lines, _objects, _log, _poem, _art, _matrix, _bits, _zeros, _base64),
    *(_asked_for, _cards, _file_again),
)


def feed(found: Repetition, tokens: Sequence[int], over: Callable[[Repetition], bool]) -> int:
    """Tokens after which it is over; 0: it is not."""
    for at, token in enumerate(tokens, 1):
        found.add(token)
        if over(found):
            return at
    return 0


def ends_answer(found: Repetition) -> bool:
    return found.ends_answer(written=False)


def test_two_hundred_honest_answers_are_no_loops():
    rng = random.Random(1)
    answers = [(kind.__name__, kind(rng)) for kind in HONEST * 15][:199]
    answers.append(("a large matrix", ("[" + "0, " * 99 + "0],\n") * 100))
    for kind, text in answers:
        found = Repetition()
        assert not feed(found, tokens_of(text), ends_answer), (kind, found.period, found.run)


# --------------------------------------------------------------------------- loops


def test_a_loop_of_one_token_may_be_broken_once():
    """As Qwen2.5 Coder 0.5B wrote it; a picture's lines end sooner."""
    zeros = [15] * 8011 + [2] + [15] * 1000
    assert 0 < feed(Repetition(), zeros, ends_answer) <= ONE + 2 * OTHER + 2 * repetition.GRAM
    assert not feed(Repetition(), ([15] * (2 * OTHER - 1) + [198]) * 64, ends_answer)


@pytest.mark.parametrize("period", [1, 2, 4, 8, 33, 150, 300, REACH])
def test_a_loop_of_any_period_is_found(period: int):
    rng = random.Random(period)
    loop = [rng.randrange(50_000) for _ in range(period)]
    start = [rng.randrange(50_000) for _ in range(300)]
    tokens = start + loop * (LONG // period + 3)
    limit = ONE if period == 1 else MOST
    found = feed(Repetition(), tokens, ends_answer)
    assert found and limit <= found - len(start) <= limit + period + repetition.GRAM, "once it is certain"
    found = feed(Repetition(), tokens, Repetition.ends_thought)
    assert found and THOUGHT <= found - len(start) <= THOUGHT + period + repetition.GRAM, (
        "in a thought earlier"
    )


@pytest.mark.parametrize(
    ("period", "asked", "written"),
    [(100, slice(20, 60), False), (5, slice(0, 5), False), (100, slice(0), True)],
)
def test_what_the_prompt_has_and_what_a_grammar_writes_may_be_repeated_for_longer(period, asked, written):
    loop = list(range(100, 100 + period))
    found = Repetition([1, 2, 3, *loop[asked], 4], 4 + len(loop[asked]))
    at = feed(found, loop * (2 * LONG // period), lambda each: each.ends_answer(written=written))
    assert LONG <= at <= LONG + 2 * period + repetition.GRAM
    unasked = feed(Repetition([1, 2], 2), loop * (2 * LONG // period), ends_answer)
    assert MOST <= unasked <= MOST + 2 * period + repetition.GRAM


def test_a_thought_whose_repeats_drift_is_ended_and_a_table_is_not():
    rng = random.Random(2)
    said = [f"{prose(rng, 40)} " for _ in range(4)]
    drifting = "".join(f"Wait, {rng.randrange(10)}: {''.join(said)}" for _ in range(300))
    assert feed(Repetition(), tokens_of(drifting), Repetition.ends_thought)
    assert not feed(Repetition(), tokens_of(drifting), ends_answer), "an answer may count up"
    table = "".join(f"| {i} | {prose(rng, 2)} | {i * i} | 0 | 0 | ok |\n" for i in range(1500))
    assert not feed(Repetition(), tokens_of(table), Repetition.ends_thought)
