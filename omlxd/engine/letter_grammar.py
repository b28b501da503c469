"""A Lark grammar of a text, as the grammar of the same text where a tool call holds it.

In a JSON string a quote, a backslash and control characters become their one escape (Python reads the
same); between tags all stays as it is. Every letter becomes a terminal of its own: one that matches
more would have to look ahead past an escape, or past the tag that ends the text, which a lexer can't.
So a text may be cut into the grammar's terminals in any way, as in Lark's Earley parser by itself.
What can't be carried over letter by letter is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Ranges = list[tuple[int, int]]
"""Code points, each pair with its last."""

_MOST = 0x10FFFF
_TOKENS = re.compile(
    r"(?P<comment>//[^\n]*)"
    r'|(?P<string>"(?:[^"\\\n]|\\.)*"i?)'
    r"|(?P<regex>/(?!/)(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*)"
    r"|(?P<import>%import[^\n]*)"
    r"|(?P<refused>%\w+|\.\.|[&~@]|<[^\s>]*>)"
)
_IMPORT = re.compile(r"%import\s+common\s*(?:\.\s*(\w+)(?:\s*->\s*(\w+))?|\(([^)]*)\))\s*(?://.*)?$")
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "NUMBER": r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    "LETTER": "[a-zA-Z]",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
}
_CATEGORIES: dict[Any, Ranges] = {
    codes.CATEGORY_DIGIT: [(48, 57)],
    codes.CATEGORY_SPACE: [(9, 13), (32, 32)],
    codes.CATEGORY_WORD: [(48, 57), (65, 90), (95, 95), (97, 122)],
}
_NEGATED = {
    codes.CATEGORY_NOT_DIGIT: codes.CATEGORY_DIGIT,
    codes.CATEGORY_NOT_SPACE: codes.CATEGORY_SPACE,
    codes.CATEGORY_NOT_WORD: codes.CATEGORY_WORD,
}


class LetterGrammar:
    """One grammar carried over. Raises ValueError for what can't be.

    escaped  the text stands in a JSON string
    """

    def __init__(self, grammar: str, escaped: bool):
        self._escaped = escaped
        self._terminals: dict[str, str] = {}
        body = self._carried(grammar)
        self.lark = "\n".join([body, *(f"{name}: {term}" for term, name in self._terminals.items())])

    def _carried(self, grammar: str) -> str:
        out: list[str] = []
        at = 0
        for token in _TOKENS.finditer(grammar):
            out.append(_lowered(grammar[at : token.start()]))
            at = token.end()
            match token.lastgroup:
                case "comment":
                    pass
                case "string":
                    out.append(self._string(token[0]))
                case "regex":
                    body, _, flags = token[0][1:].rpartition("/")
                    out.append(f"({self._regex(body, flags)})")
                case "import":
                    out.append(self._imported(token[0]))
                case _:
                    raise ValueError(f"{token[0]} can't stand in the grammar of a tool's input")
        return "".join([*out, _lowered(grammar[at:])])

    def _string(self, token: str) -> str:
        if token.endswith("i"):
            raise ValueError(f"{token}: write it as a regular expression")
        letters = " ".join(self._letters([(ord(letter), ord(letter))]) for letter in json.loads(token))
        return f"({letters})" if letters else '""'

    def _imported(self, line: str) -> str:
        match = _IMPORT.match(line.strip())
        if match is None:
            raise ValueError(f"{line.strip()} can't stand in the grammar of a tool's input")
        names = [match[1]] if match[1] else [name.strip() for name in match[3].split(",")]
        if unknown := [name for name in names if name not in _COMMON]:
            raise ValueError(f"common.{unknown[0]} can't stand in the grammar of a tool's input")
        return "\n".join(f"{_lowered(match[2] or name)}: {self._regex(_COMMON[name], '')}" for name in names)

    # ----------------------------------------------------------------- regular expressions

    def _regex(self, pattern: str, flags: str) -> str:
        if set(flags) - {"s"}:
            raise ValueError(f"the flags of /{pattern}/{flags} can't be carried over")
        try:
            parsed = parser.parse(pattern, re.DOTALL if flags else 0)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"/{pattern}/ can't be read: {error}") from error
        return self._sequence(parsed, dotall=bool(flags))

    def _sequence(self, nodes: Any, dotall: bool) -> str:
        return " ".join(self._node(code, argument, dotall) for code, argument in nodes)

    def _node(self, code: Any, argument: Any, dotall: bool) -> str:
        if code is codes.LITERAL:
            return self._letters([(argument, argument)])
        if code is codes.NOT_LITERAL:
            return self._letters(_others([(argument, argument)]))
        if code is codes.ANY:
            return self._letters([(0, _MOST)] if dotall else _others([(10, 10)]))
        if code is codes.IN:
            return self._letters(_set(argument))
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, inner = argument
            return f"({self._sequence(inner, dotall)}){_count(least, most)}"
        if code is codes.SUBPATTERN:
            _, added, dropped, inner = argument
            if (added | dropped) & ~re.DOTALL:
                raise ValueError("flags within a regular expression can't be carried over")
            return (
                f"({self._sequence(inner, (dotall or bool(added & re.DOTALL)) and not dropped & re.DOTALL)})"
            )
        if code is codes.BRANCH:
            return f"({'|'.join(self._sequence(branch, dotall) for branch in argument[1])})"
        raise ValueError(f"{str(code).lower()} in a regular expression can't be carried over")

    def _letters(self, ranges: Ranges) -> str:
        """A term for one of these letters, as it is written where the text stands."""
        bare = _BARE if self._escaped else _TEXT
        inside = [
            (max(first, low), min(last, high))
            for first, last in ranges
            for low, high in bare
            if max(first, low) <= min(last, high)
        ]
        told = [self._terminal(f"/[{''.join(map(_range, inside))}]/")] if inside else []
        if self._escaped:
            for code, escape in _ESCAPED.items():
                if any(first <= code <= last for first, last in ranges):
                    told.append(self._terminal(json.dumps(escape)))
        if not told:
            raise ValueError("a regular expression that matches no letter")
        return told[0] if len(told) == 1 else f"({' | '.join(told)})"

    def _terminal(self, term: str) -> str:
        return self._terminals.setdefault(term, f"L_{len(self._terminals)}")


def _lowered(text: str) -> str:
    """Names of terminals as names of rules, which they become; no rule of a call's is named so."""
    return re.sub(
        r"[A-Za-z_][A-Za-z0-9_]*", lambda name: name[0] if name[0].islower() else f"u_{name[0].lower()}", text
    )


def _count(least: Any, most: Any) -> str:
    if most is codes.MAXREPEAT:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"


def _set(items: Sequence[tuple[Any, Any]]) -> Ranges:
    found: Ranges = []
    for code, argument in items:
        if code is codes.LITERAL:
            found.append((argument, argument))
        elif code is codes.RANGE:
            found.append(argument)
        elif code is codes.CATEGORY:
            known = _CATEGORIES.get(argument)
            found += known if known is not None else _others(_CATEGORIES[_NEGATED[argument]])
    return _others(found) if items and items[0][0] is codes.NEGATE else found


def _others(ranges: Ranges) -> Ranges:
    """All code points but these."""
    found: Ranges = []
    next_ = 0
    for first, last in sorted(ranges):
        if first > next_:
            found.append((next_, first - 1))
        next_ = max(next_, last + 1)
    return [*found, (next_, _MOST)] if next_ <= _MOST else found


_ESCAPED = {code: json.dumps(chr(code))[1:-1] for code in (*range(0x20), 0x22, 0x5C)}
_TEXT = _others([(0xD800, 0xDFFF)])
_BARE = _others([(code, code) for code in _ESCAPED] + [(0xD800, 0xDFFF)])


def _range(pair: tuple[int, int]) -> str:
    first, last = (f"\\x{{{code:x}}}" for code in pair)
    return first if first == last else f"{first}-{last}"
