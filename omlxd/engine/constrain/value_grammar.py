"""JSON schemas as Lark rules, for values that a call writes in another form than one JSON object.

| syntax | string                   | key   | words               | of                     |
|--------|--------------------------|-------|---------------------|------------------------|
| JSON   | "…" with escapes         | "key" | true, false, null   | a tag a parameter      |
| Python | the same                 | "key" | also True and so on | pythonic (LFM2)        |
| Gemma  | bare text between quotes | key   | true, false, null   | Gemma 4, FunctionGemma |

No string holds a text that ends the call (`never`). Values follow the schema; properties come in its order,
and no others if it names any.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .schema.enforceable import Check
from .schema.json_schema import LOOSE, NO_SCHEMA, Unenforceable, branches, why_not

Literal = Callable[[str], str]
"""Spells text as a term of Lark, special tokens as tokens."""

_ANY_TEXT = "(?s:.*)"
MOST_COUNTED = 50
"""Letters of a bare text that its expression counts: with 100 llguidance's lexer gives up."""
_LETTER = r'([^"\\\x00-\x1f\x7f]|\\(["\\nrtbf]|u[0-9a-c][0-9a-f]{3}))'
"""Pattern of a letter of a string, in JSON's quotes and in Python's."""
_INTEGER = r"-?(0|[1-9][0-9]{0,17})"
_NUMBER = _INTEGER + r"(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?"
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXT_RULES = ("pattern", "format")
_T = TypeVar("_T")


@dataclass(slots=True, frozen=True)
class ValueSyntax:
    """A syntax of values. `quote`: what stands on each side of a bare string; "": strings as in JSON.
    `never`: in no string.
    """

    quote: str = ""
    words: tuple[str, str, str] = ('"true"', '"false"', '"null"')
    spaces: bool = True
    never: tuple[str, ...] = ()


PYTHON_WORDS = ('("True" | "true")', '("False" | "false")', '("None" | "null")')


def plain(text: str) -> str:
    """Spell text as a term of Lark, letter by letter: no control token, whatever it says."""
    return json.dumps(text, ensure_ascii=False)


def regex_of(text: str) -> str:
    """Return a regular expression for `text`, to stand between slashes."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/])", r"\\\1", text).replace("\n", "\\n")


_ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}


def ascii_classes(regex: str) -> str:
    r"""Give `\d` and `\w` their ASCII meaning, as in JSON schemas and vLLM; llguidance's are Unicode."""
    return re.sub(r"\\(.)", lambda escape: _ASCII.get(escape[1], escape[0]), regex, flags=re.DOTALL)


def but_not(texts: Sequence[str], last: str = "") -> str:
    """End a terminal whose text holds none of `texts`, and `last` nowhere but at its end."""
    patterns = [f"({'|'.join(map(regex_of, texts))}){_ANY_TEXT}"] if texts else []
    if last:
        patterns.append(f"{regex_of(last)}(?s:.+)")
    return f" & ~/{_ANY_TEXT}({'|'.join(patterns)})/" if patterns else ""


def text_regex(schema: dict[str, Any]) -> str:
    """Return the regular expression of a bare string. Raises Unenforceable."""
    if "format" in schema:
        raise Unenforceable(f"format {schema['format']!r} of a text that is written without quotes")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if max(least, most or 0) > MOST_COUNTED:
        raise Unenforceable(f"a length over {MOST_COUNTED} of a text that is written without quotes")
    body = _ANY_TEXT if not least and most is None else f"(?s:.){{{least},{'' if most is None else most}}}"
    if (pattern := schema.get("pattern")) is None:
        return body
    pattern = ascii_classes(pattern)
    if body == _ANY_TEXT and pattern.startswith("^(?:") and pattern.endswith(")$"):
        return _in_slashes(pattern[1:-1])
    if body != _ANY_TEXT:
        raise Unenforceable("pattern beside a length, of a text that is written without quotes")
    begins, ends = pattern.startswith("^"), _ENDS.search(pattern) is not None
    if "|" in pattern and (begins or ends):
        raise Unenforceable(f"pattern {pattern!r} of a text that is written without quotes")
    regex = pattern[begins : len(pattern) - ends]
    regex = regex if begins else f"{_ANY_TEXT}({regex})"
    return f"({_in_slashes(regex if ends else f'{regex}{_ANY_TEXT}')})"


_ENDS = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
"""Matches a text's end, and no dollar sign."""


def _in_slashes(regex: str) -> str:
    """Put `regex` between slashes; its own escapes stay."""
    return re.sub(r"\\.|/", lambda each: r"\/" if each[0] == "/" else each[0], regex, flags=re.DOTALL)


@dataclass(slots=True)
class ValueRules:
    """Rules for the values of one tool.

    prefix     of the names of all rules
    root       the schema that `$ref` looks into
    strict     raise Unenforceable for what can't be enforced, else leave it out
    left_out   what was, in words
    terminals  body → name, shared by all tools
    """

    prefix: str
    root: dict[str, Any]
    syntax: ValueSyntax
    literal: Literal
    check: Check
    strict: bool
    terminals: dict[str, str]
    rules: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _made: dict[str, str] = field(default_factory=dict)
    _names: int = 0

    @property
    def _space(self) -> str:
        return self.terminal("/[ \\n]{1,8}/") + "?" if self.syntax.spaces else ""

    def term(self, schema: Any) -> str:
        """Return a term for values by `schema`. Raises Unenforceable."""
        key = json.dumps(schema, sort_keys=True, default=str)
        if (name := self._made.get(key)) is None:
            name = self._made[key] = self._name()  # first: a schema may hold itself
            self._rule_as(name, self._any_of(schema))
        return name

    def spelled(self, value: Any) -> str:
        """Return a term for just `value`. Raises Unenforceable."""
        syntax = self.syntax
        if syntax.quote and isinstance(value, str):
            if any(text in value for text in (syntax.quote, *syntax.never)):
                raise Unenforceable(f"the text {value[:60]!r}, which this model's format can't hold")
            quote = self.literal(syntax.quote)
            return f"{quote} {plain(value)} {quote}" if value else f"{quote} {quote}"
        if syntax.quote and isinstance(value, list):
            return f'"[" {self._spelled_row([self.spelled(item) for item in value])} "]"'
        if syntax.quote and isinstance(value, dict):
            row = [f"{self.key(key)} {self.spelled(item)}" for key, item in value.items()]
            return f'"{{" {self._spelled_row(row)} "}}"'
        text = json.dumps(value, ensure_ascii=False)
        if any(each in text for each in syntax.never):
            text = text.replace("<", "\\u003c").replace("\x7f", "\\u007f")
        return plain(text)

    def key(self, name: str) -> str:
        """Return a term for a member's name and the text before its value."""
        if self.syntax.quote and re.fullmatch(r"\w+", name):
            return plain(f"{name}:")
        return f'{self.spelled(name)} ":" {self._space}'

    def members(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """Return a term for members in this order; each is (term, whether it is required)."""
        if not pairs:
            return ""
        comma = f'"," {self._space}'
        names = [self._name() for _ in range(2 * len(pairs))]
        firsts, rests = names[: len(pairs)], names[len(pairs) :]
        for index, (term, must) in enumerate(pairs):
            more = rests[index + 1] if index + 1 < len(pairs) else ""
            later = f" | {firsts[index + 1]}" if more and not must else ""
            self._rule_as(firsts[index], f"{term} {more}{later}")
            self._rule_as(rests[index], f"({comma} {term}){'' if must else '?'} {more}")
        return firsts[0] if any(must for _, must in pairs) else f"{firsts[0]}?"

    # ----------------------------------------------------------------- schemas

    def alternatives(self, schema: Any) -> list[dict[str, Any]]:
        """Return `branches` of the schema that have a form. Raises Unenforceable for others if strict."""
        try:
            return branches(schema, self.root, True)
        except Unenforceable as error:
            self._leave_out(error)
        try:
            return branches(schema, self.root, False)
        except Unenforceable:
            return [{}]

    def one_object(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return `schema` as one object's. Raises Unenforceable for alternatives of objects if strict."""
        objects = [each for each in self.alternatives(schema) if each.get("type", "object") == "object"]
        if len(objects) == 1:
            return objects[0]
        self._leave_out(Unenforceable("alternatives of whole arguments"))
        schemas: dict[str, list[Any]] = {}
        for each in objects:
            for key, inner in (each.get("properties") or {}).items():
                schemas.setdefault(key, []).append(inner)
        needed = [{*(each.get("required") or ())} for each in objects]
        properties = {key: {"anyOf": those} if len(those) > 1 else those[0] for key, those in schemas.items()}
        return {"properties": properties, "required": [*set[str].intersection(*needed)] if needed else []}

    def as_far_as_can_be(self, branch: dict[str, Any], make: Callable[[dict[str, Any]], _T]) -> _T | None:
        """Return `make(branch)`, or of its enforceable part, or None. Raises Unenforceable if strict."""
        left: tuple[str, ...] = ()
        for words in ((*LOOSE, *_BOUNDS), ("minLength", "maxLength"), None):
            try:
                return make({key: value for key, value in branch.items() if key not in left})
            except NO_SCHEMA as error:
                self._leave_out(error)
            left = (*left, *(words or ()))
        return None

    def _leave_out(self, error: Exception) -> None:
        if self.strict:
            raise error
        self.left_out.append(why_not(error))

    def _any_of(self, schema: Any) -> str:
        made = (self.as_far_as_can_be(branch, self._branch) for branch in self.alternatives(schema))
        terms = [term for term in made if term is not None]
        if not terms and self.strict:
            raise Unenforceable("a schema that allows nothing")
        return " | ".join(dict.fromkeys(terms or [self._anything()]))

    def values(self, values: Sequence[Any], spell: Callable[[Any], str]) -> list[str]:
        """Return terms of enumerated values that the format can hold. Raises Unenforceable."""
        terms: list[str] = []
        for value in values:
            try:
                terms.append(spell(value))
            except Unenforceable as error:
                self._leave_out(error)
        if values and not terms:
            raise Unenforceable("texts that this model's format can't hold")
        return terms

    def _branch(self, schema: dict[str, Any]) -> str:
        """Return a term for a schema of one type, or of enumerated values."""
        if "enum" in schema:
            return " | ".join(self.values(schema["enum"], self.spelled))
        match schema.get("type"):
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number(schema)
            case "boolean":
                return f"{self.syntax.words[0]} | {self.syntax.words[1]}"
            case "null":
                return self.syntax.words[2]
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
        return self._anything()

    def _string(self, schema: dict[str, Any]) -> str:
        if self.syntax.quote:
            text = self.bare(text_regex(schema), self.syntax.quote, self.syntax.never)
            return f"{self.literal(self.syntax.quote)} {text}"
        if rules := {name: schema[name] for name in _TEXT_RULES if name in schema}:
            lengths = {name: schema[name] for name in ("minLength", "maxLength") if name in schema}
            return self._json({"type": "string", **rules, **lengths})
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        count = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        return self.terminal(f'/"{_LETTER}{count}"/{but_not(self.syntax.never)}')

    def _number(self, schema: dict[str, Any]) -> str:
        bounds = {name: schema[name] for name in _BOUNDS if name in schema}
        if bounds:
            return self._json({"type": schema["type"], **bounds})
        integer = schema["type"] == "integer"
        return self.terminal(f"/{_INTEGER if integer else _NUMBER}/")

    def _json(self, schema: dict[str, Any]) -> str:
        if problem := self.check(schema):
            raise Unenforceable(problem)
        return f"%json {json.dumps(schema, ensure_ascii=False)}"

    def _array(self, schema: dict[str, Any]) -> str:
        space = self._space
        if "prefixItems" in schema:
            items = [self.term(item) for item in schema["prefixItems"]]
            return f'"[" {space} {self._spelled_row(items)} {space} "]"'
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return f'"[" {space} "]"'
        item = self.term(schema.get("items", True))
        count = f"{{{max(least, 1) - 1},{'' if most is None else most - 1}}}"
        row = f'{item} ("," {space} {item}){count}'
        return f'"[" {space} {row if least else f"({row})?"} {space} "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        space = self._space
        properties = schema.get("properties") or {}
        required = [key for key in schema.get("required") or () if key not in properties]
        others = schema.get("additionalProperties", True)
        if others is False and required:
            raise Unenforceable(f"the required property {required[0]!r}, which it does not allow")
        pairs = {**properties, **dict.fromkeys(required, others)}
        if not pairs:
            if others is False:
                return f'"{{" {space} "}}"'
            return f'"{{" {space} {self._map(others)} {space} "}}"'
        must = set(schema.get("required") or ())
        members: list[tuple[str, bool]] = []
        for key, inner in pairs.items():
            try:
                members.append((f"{self.key(key)} {self.term(inner)}", key in must))
            except Unenforceable as error:
                if key in must:
                    raise
                self._leave_out(error)
        return f'"{{" {space} {self.members(members)} {space} "}}"'

    def _map(self, values: Any) -> str:
        """Return members of any name."""
        if self.syntax.quote:
            key = self.terminal("/[A-Za-z_][A-Za-z0-9_]{0,60}:/")
        else:
            key = f'{self._string({})} ":" {self._space}'
        pair = f"{key} {self.term(values)}"
        return f'({pair} ("," {self._space} {pair})*)?'

    def _anything(self) -> str:
        if (name := self._made.get("any")) is None:
            name = self._made["any"] = self._name()
            kinds = ({"type": kind} for kind in ("string", "number", "boolean", "null"))
            terms = [self._branch(kind) for kind in kinds]
            row = f'({name} ("," {self._space} {name})*)?'
            terms.append(f'"[" {self._space} {row} {self._space} "]"')
            self._made.setdefault("true", name)
            terms.append(f'"{{" {self._space} {self._map(True)} {self._space} "}}"')
            self._rule_as(name, " | ".join(terms))
        return name

    # ----------------------------------------------------------------- rules

    def _spelled_row(self, terms: Sequence[str]) -> str:
        return f' "," {self._space} '.join(terms)

    def _name(self) -> str:
        self._names += 1
        return f"{self.prefix}_{self._names}"

    def rule(self, body: str) -> str:
        """Add a rule; returns its name."""
        name = self._name()
        self._rule_as(name, body)
        return name

    def _rule_as(self, name: str, body: str) -> None:
        self.rules.append(f"{name}: {body}")

    def terminal(self, body: str) -> str:
        """Return the name of a terminal, the same one for the same body."""
        return self.terminals.setdefault(f": {body}", f"T_{len(self.terminals)}")

    def bare(self, body: str, end: str, never: Sequence[str], pad: str = "", also: str = "") -> str:
        """Return a term for text that is `body` and holds none of `never`, and `end` behind it.

        pad   stands before an `end` that is no control token; also: further words of that terminal
        """
        closing = self.literal(end)
        if closing.startswith("<["):  # a control token, which no terminal holds
            return f"{self.terminal(f'/{body}/{but_not((*never, end))}')} {closing}"
        return self.closed(f"/{body}{pad}{regex_of(end)}/{but_not(never, last=end)}{also}")

    def closed(self, body: str) -> str:
        """Return the name of a terminal whose text ends as soon as it can."""
        return self.terminals.setdefault(f"[lazy]: {self.terminal(body)}", f"t_{len(self.terminals)}")
