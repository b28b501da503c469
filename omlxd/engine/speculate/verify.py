"""Shapes of verify steps: how many tokens one forward may check."""

from __future__ import annotations

WIDTHS = (1, 2, 4, 7, 15)
"""Draft tokens of a row in a verify step.

Milliseconds of a forward of SmolLM2-135M in float32 on a CPU, by all its tokens:

| tokens | 1 | 3 | 5 | 9 | 16 | 36 | 64 | 144 | 256 |
|---|---|---|---|---|---|---|---|---|---|
| OpenBLAS | 75 | 101 | 98 | 115 | 133 | 217 | 370 | 697 | 1,156 |
| MLX's own BLAS | 94 | 243 | 389 | 684 | 1,178 | | | | |

With the first that is a step and what as many tokens of a prompt take; with the second drafts seldom pay.
"""

SIZES = (3, 15, 28, 60)
"""Draft tokens of all rows in a packed verify step, filled up, or as many as there is room for. Each size is
compiled for itself, and costs little more than a smaller one: SmolLM2 in bfloat16 on an H200 took 4.0 ms for
4 rows and 7 draft tokens or fewer, 7.0 for 16 rows and 112, and 2.5 and 2.9 for steps. With
(1, 2, 4, 7, 15, 30, 60) 161 were compiled, 15 ms each, in 18 rounds of 16 and of 4 streams. Up to 32 tokens
five layers are one launch: 4 streams on one H100 were at 1.42, 1.26 and 0.92 times the speed without drafts
with (3, 15, 60), and with these at 1.64, 1.77 and 0.98 (edits, logs, prose)."""

MOST_TOKENS = 256
"""Tokens of all rows in a verify step: logits of a vocabulary of 150,000 tokens take 150 MB."""

MOST_CREDIT = 2.0
"""Plain steps that drafts may lose at once: of those that plain steps paid, and that drafts won. With 1.0,
four simulated edits on an H100 were at 2.65 and 16 logs at 1.00, for want of credit at the beginning; with
this at 3.64 and 1.16."""


def most_of_row() -> int:
    """Return the tokens that the widest verify step gives a row at most."""
    return WIDTHS[-1] + 1


def packed_size(guesses: int, most: int) -> int:
    """Return the size of a packed verify step with so many draft tokens of all rows, `most` at most."""
    return next((size for size in SIZES if guesses <= size < most), most)


def filled_up(tokens: list[int], rows: int, most: int) -> list[int]:
    """Return `tokens` of so many rows and, behind them, tokens of no meaning up to the size of a packed
    verify step, `most` at most."""
    return tokens + [0] * (rows + packed_size(len(tokens) - rows, most - rows) - len(tokens))
