"""Grammars of tool calls in the model's own format (call_formats.py); harmony_grammar.py has gpt-oss's.

A tool that isn't strict is held to as much of its schema as can be enforced: a forced choice promises a
call, not its schema.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ...chat import Tool
from ...errors import InvalidRequest, bad_field
from .call_formats import (
    CALL_FORMATS,
    CallFormat,
    JsonCalls,
    TagCalls,
    ValueCalls,
    attribute,
    opening_of,
    unreadable,
)
from .schema.enforceable import Check, enforce
from .schema.json_schema import NO_SCHEMA, Unenforceable, closed, why_not
from .value_grammar import Literal, ValueRules, ValueSyntax, but_not, plain, regex_of, text_regex

log = logging.getLogger(__name__)

TEXT = r"TEXT: /(.|\n)*/"
INPUT = "input"
"""Name of the one parameter of a tool whose input has a grammar."""


class CallGrammar:
    """Writes Lark rules for calls to `tools`. Raises InvalidRequest if there can be none.

    A tool that isn't strict is left out if the format can't hold its name; no tool left is an error.

    inputs    grammars that the rules name by `@`
    left_out  keywords of schemas that the rules don't hold calls to
    """

    def __init__(self, name: str, tools: Sequence[Tool], literal: Literal, check: Check, param: str):
        row = CALL_FORMATS.get(name)
        if row is None:
            raise bad_field(
                param,
                f"calls in this model's format ({name}) can't be enforced; "
                "use tool_choice auto, and tools that are not strict",
            )
        self._format = row
        self._literal = literal
        self._check = check
        self._skip = 0
        self.inputs: dict[str, str] = {}
        self.left_out: list[str] = []
        self._terminals: dict[str, str] = {}
        self._tools = [tool for tool in tools if not unreadable(row, tool.name, tool=True)]
        for tool in tools:
            if tool not in self._tools and (tool.strict or not self._tools):
                raise bad_field(
                    param,
                    f"this model's format ({name}) can't hold the name {tool.name!r}; give the "
                    "tool a name of letters, digits and underscores",
                )

    @property
    def opening(self) -> str:
        """Text that identifies a call's beginning."""
        return opening_of(self._format)

    def rules(self, many: bool, opened: bool = False) -> str:
        """Return rule `calls`: one call, or with `many` several. `opened`: the `opening` is already there."""
        self._skip = len(self.opening) if opened else 0
        row, literal = self._format, self._literal
        names = [f"call_{index}" for index in range(len(self._tools))]
        rules = [f"call: {' | '.join(names)}"]
        self._terminals.clear()
        for pair in zip(names, self._tools, strict=True):
            if pair[1].input_grammar:
                rules.append(self._input_call(row, *pair))
                continue
            match row:
                case JsonCalls():
                    rules += self._json_call(row, *pair)
                case TagCalls():
                    rules += self._held(self._tag_call, row, *pair)
                case ValueCalls():
                    rules += self._held(self._value_call, row, *pair)
        rules += [f"{name}{body}" for body, name in self._terminals.items()]
        more = f"({literal(row.part)} call)*" if many else ""
        section = literal(row.section[self._skip :])
        return "\n".join([f"calls: {section} call {more} {literal(row.end)}", *rules])

    def _opened(self, before: str) -> str:
        return before if self._format.section else before[self._skip :]

    def _held(self, make: Callable[..., list[str]], row: Any, rule: str, tool: Tool) -> list[str]:
        """Return the rules of a call that follows its tool's schema, as far as possible."""
        schema, left_out = enforceable(tool, self._check)
        values = row.values if isinstance(row, ValueCalls) else ValueSyntax(never=(row.close, *row.never))
        rules = self._rules(rule, schema, values, tool.strict)
        try:
            made = make(row, rule, tool.name, rules)
        except NO_SCHEMA as error:
            why = why_not(error)
            if tool.strict:
                raise cant_enforce(tool, why) from error
            why = f"a call of {tool.name!r} can't be forced in this model's format: {why}"
            raise bad_field("tools", f"{why}; use tool_choice auto") from error
        self._note(tool, [*left_out, *rules.left_out])
        return made

    def _note(self, tool: Tool, left_out: Sequence[str]) -> None:
        self.left_out += note_left_out(f"tools.{tool.name}", left_out)

    def _rules(self, rule: str, root: dict[str, Any], values: ValueSyntax, strict: bool) -> ValueRules:
        return ValueRules(rule, root, values, self._literal, self._check, strict, self._terminals)

    # ----------------------------------------------------------------- one text of a grammar

    def _input_call(self, row: CallFormat, rule: str, tool: Tool) -> str:
        """Return the rule of a call whose one parameter is a text of a grammar. Raises InvalidRequest."""
        literal = self._literal
        text = f"@input_{len(self.inputs)}"
        self.inputs[text[1:]] = tool.input_grammar
        before = literal(self._opened(row.before))
        if isinstance(row, TagCalls):
            begin, end = row.cdata or ("", "")
            close = literal(row.close + row.pad + row.tail)
            value = f"{literal(begin)} {text} {literal(end + row.pad)} {close}"
            parameter = self._between(row, INPUT, "string", value)
            call = f"{literal(tool.name + row.named)} {parameter} {literal(row.after)}"
        elif isinstance(row, ValueCalls) and row.values.quote:
            quote = literal(row.values.quote)
            parameter = f"{plain(INPUT + ':')} {quote} {text} {quote}"
            call = f"{plain(tool.name + row.opens)} {parameter} {literal(row.closes)}"
        else:
            raise no_grammar_in_json(tool)
        return f"{rule}: {before} {call}"

    # ----------------------------------------------------------------- one JSON object

    def _json_call(self, row: JsonCalls, rule: str, tool: Tool) -> list[str]:
        before = self._literal(self._opened(row.head(tool.name)))
        after = self._literal(row.after)
        schema, left_out = enforceable(tool, self._check)
        self._note(tool, left_out)
        if row.never:
            values = ValueSyntax(never=row.never)
            rules = self._rules(rule, schema, values, True)
            with contextlib.suppress(Unenforceable):  # llguidance's own knows more keywords
                return [f"{rule}: {before} {rules.term(schema)} {after}", *rules.rules]
        return [f"{rule}: {before} {json_term(schema)} {after}"]

    # ----------------------------------------------------------------- a tag a parameter

    def _tag_call(self, row: TagCalls, rule: str, name: str, rules: ValueRules) -> list[str]:
        terms = [self._literal(self._opened(row.head(name)))]
        for key, schema, must in self._parameters(row, rules):
            term = rules.rule(self._tag_parameter(row, rules, key, schema))
            terms.append(term if must else f"{term}?")
        return [f"{rule}: {' '.join(terms)} {self._literal(row.after)}", *rules.rules]

    def _parameters(self, row: TagCalls | ValueCalls, rules: ValueRules) -> list[tuple[str, Any, bool]]:
        """Return (name, schema, whether it is required) of each parameter. Raises Unenforceable."""
        schema = rules.one_object(rules.root)
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        others = schema.get("additionalProperties", True)
        named = {**properties, **{key: others for key in required if key not in properties}}
        parameters: list[tuple[str, Any, bool]] = []
        for key, inner in named.items():
            must = key in required
            if not unreadable(row, key, tool=False):
                parameters.append((key, inner, must))
            elif must:
                raise Unenforceable(f"the required parameter {key!r}, whose name the format can't hold")
        return parameters

    def _tag_parameter(self, row: TagCalls, rules: ValueRules, key: str, schema: Any) -> str:
        """Return a parameter with its tags. Where text may stand, all but null is read as text."""
        alternatives = rules.alternatives(schema)
        texts = [branch for branch in alternatives if _may_be_text(branch)]
        bare: list[str] = []
        for branch in texts:
            bare += rules.as_far_as_can_be(branch, lambda branch: self._text(row, rules, branch)) or ()
        word = row.typed
        terms = [self._between(row, key, "string", term) for term in dict.fromkeys(bare)]
        close = f"{self._literal(row.pad)} {self._literal(row.close + row.pad + row.tail)}"
        for branch in alternatives:
            kind = branch.get("type", "")
            if not texts or (kind == "null" and not word) or (word and kind not in ("", "string")):
                kinds = [kind] if kind else _kinds(branch)
                value = f"({rules.term(branch)}) {close}"
                terms += [self._between(row, key, name, value) for name in _type_words(kinds)]
        if not terms:
            raise Unenforceable(f"the parameter {key!r}")
        return " | ".join(dict.fromkeys(terms))

    def _between(self, row: TagCalls, key: str, kind: str, value: str) -> str:
        if not row.typed:
            return f"{self._literal(row.key + key + row.keyed)} {value}"
        return f"{self._literal(row.key + attribute(key) + row.keyed % kind)} {value}"

    def _text(self, row: TagCalls, rules: ValueRules, branch: dict[str, Any]) -> list[str]:
        """Return terms for bare text and its closing tag."""
        close = self._literal(row.close + row.pad + row.tail)
        if "enum" in branch:
            choices = [value for value in branch["enum"] if isinstance(value, str)]
            return rules.values(choices, lambda text: self._choice(row, text))
        body = text_regex(branch)
        if row.cdata is not None:
            begin, end = row.cdata
            inside = rules.closed(f"/{body}{regex_of(end)}/{but_not(row.never, last=end)}")
            terms = [f"{self._literal(begin)} {inside} {close}"]
            if body == "(?s:.*)":
                terms.append(f"{rules.terminal(f'/{row.plain}/')} {close}")
            return terms
        held = body != "(?s:.*)"
        # Without a pad a newline on each side would be taken off.
        also = r" & ~/\n(?s:.*)/" if held and not row.pad else ""
        text = rules.bare(body, row.close, row.never, regex_of(row.pad) if held else "", also)
        return [f"{text} {self._literal(row.pad + row.tail)}"]

    def _choice(self, row: TagCalls, text: str) -> str:
        if any(each in text for each in (row.close, *row.never)):
            raise Unenforceable(f"the text {text[:60]!r}, which this model's format can't hold")
        term = plain(text) if text else ""
        if row.cdata is not None and (text != text.strip() or set("<&\n") & set(text)):
            begin, end = row.cdata
            if end in text:
                raise Unenforceable(f"the text {text[:60]!r}, which this model's format can't hold")
            term = f"{self._literal(begin)} {term} {self._literal(end)}"
        close = row.close + row.pad + row.tail
        return f"{term} {self._literal(row.pad)} {self._literal(close)}"

    # ----------------------------------------------------------------- values in their own language

    def _value_call(self, row: ValueCalls, rule: str, tool: str, rules: ValueRules) -> list[str]:
        pairs: list[tuple[str, bool]] = []
        for key, schema, must in self._parameters(row, rules):
            name = plain(f"{key}=") if row.python else rules.key(key)
            pairs.append((f"{name} {rules.term(schema)}", must))
        before = self._literal(self._opened(row.before)) + " " + plain(tool + row.opens)
        members = rules.members(pairs)
        return [f"{rule}: {before} {members} {self._literal(row.closes)}", *rules.rules]


def cant_enforce(tool: Tool, why: str) -> InvalidRequest:
    return bad_field("tools", f"the strict schema of {tool.name!r} can't be enforced: {why}")


MOST_NOTES = 32


def note_left_out(where: str, left_out: Sequence[str]) -> list[str]:
    """Log keywords that are not enforced, and return them for a client, with `where` before each."""
    notes = [f"{where}: {why}"[:200] for why in dict.fromkeys(left_out)][:MOST_NOTES]
    if notes:
        _say_left_out(tuple(notes))
    return notes


@functools.lru_cache(256)
def _say_left_out(notes: tuple[str, ...]) -> None:
    """Log each list once; the keywords are a request's text, which debug alone shows."""
    log.warning(
        "%d keywords of a schema are not enforced (usage.omlxd.not_enforced names them); "
        "with `strict` it is refused",
        len(notes),
    )
    log.debug("not enforced: %s", "; ".join(notes))


def no_grammar_in_json(tool: Tool) -> InvalidRequest:
    """Make the error for a grammar in a JSON string, where other letters mean its text."""
    return bad_field(
        "tools",
        f"the grammar of {tool.name!r} can't be enforced: this model writes its calls as JSON; give "
        "the tool a format of text, or of a regular expression",
    )


def enforceable(tool: Tool, check: Check) -> tuple[dict[str, Any], list[str]]:
    """Return the schema of a tool's arguments, an object, and what it leaves out of the tool's own.

    Raises InvalidRequest if the tool is strict, and something would be left out.
    """
    kind = tool.parameters.get("type", "object")
    odd = kind != "object" and not (isinstance(kind, list) and "object" in kind)
    if odd and tool.strict:
        raise cant_enforce(tool, f"its type is {kind!r}, and arguments are an object")
    schema = {"properties": {}, **tool.parameters, "type": "object"}
    schema, left_out, problem = enforce(schema, check, strict=tool.strict, mend=True)
    if problem and tool.strict:
        raise cant_enforce(tool, problem)
    if problem:
        schema, left_out = {}, [problem]
    return {**schema, "type": "object"}, (["/type"] if odd else []) + left_out


JSON_OPTIONS: dict[str, Any] = {
    # A model that can't decide would else write space until its limit.
    "whitespace_pattern": r"[ \n\t]{0,24}",
    "whitespace_flexible": True,
    "lenient": False,
    "coerce_one_of": False,
}


def json_term(schema: dict[str, Any]) -> str:
    """Return a term for JSON by `schema`."""
    schema = {**closed(schema), "x-guidance": JSON_OPTIONS}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _may_be_text(branch: dict[str, Any]) -> bool:
    if "enum" in branch:
        return any(isinstance(value, str) for value in branch["enum"])
    return branch.get("type", "string") == "string"


def _kinds(branch: dict[str, Any]) -> list[str]:
    """Return the JSON types of a branch's enumerated values, texts aside."""
    words = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return [words.get(type(value), "null") for value in branch.get("enum", ()) if not isinstance(value, str)]


def _type_words(kinds: list[str]) -> list[str]:
    """Return words of a tag for these types: an integer is a number too."""
    names = [word for kind in kinds for word in ((kind, "number") if kind == "integer" else (kind,))]
    return list(dict.fromkeys(names)) or ["object"]
