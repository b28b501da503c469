"""What a terminal shows of what was written to it: enough of one for prompt_toolkit and rich."""

from __future__ import annotations

import re

_PARTS = re.compile(
    r"\x1b\[([?>]?)([\d;]*)([A-Za-z])|\x1b\].*?(?:\x07|\x1b\\)|\x1b[=>]|\x1b[()].|[\r\n\b\x07]|[^\x1b\r\n\b\x07]+",
    re.S,
)


def shown(written: str, columns: int = 80) -> str:
    """Its lines, as if the screen had no end at the bottom."""
    lines: list[list[str]] = [[]]
    row = column = 0
    for part in _PARTS.finditer(written):
        text = part[0]
        if text == "\r":
            column = 0
        elif text == "\n":
            row += 1
        elif text == "\b":
            column = max(0, column - 1)
        elif part[3] and not part[1]:
            count = int((part[2] or "0").split(";")[0] or 0)
            row, column = _command(lines, row, column, part[3], count)
        elif text[0] not in "\x1b\x07":
            for letter in text:
                if column == columns:
                    row, column = row + 1, 0
                line = _line(lines, row)
                line.extend(" " * (column + 1 - len(line)))
                line[column] = letter
                column += 1
        _line(lines, row)
    return "\n".join("".join(line).rstrip() for line in lines).rstrip()


def _line(lines: list[list[str]], row: int) -> list[str]:
    while len(lines) <= row:
        lines.append([])
    return lines[row]


def _command(lines: list[list[str]], row: int, column: int, letter: str, count: int) -> tuple[int, int]:
    if letter == "A":
        row = max(0, row - max(1, count))
    elif letter == "B":
        row += max(1, count)
    elif letter == "C":
        column += max(1, count)
    elif letter == "D":
        column = max(0, column - max(1, count))
    elif letter == "G":
        column = max(0, count - 1)
    elif letter == "K":
        line = _line(lines, row)
        line[column if count == 0 else 0 :] = []
    elif letter == "J" and count == 0:
        _line(lines, row)[column:] = []
        del lines[row + 1 :]
    return row, column
