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
from .json_schema import NO_SCHEMA, Unenforceable, branches, closed, why_not
from .value_grammar import Check, Literal, ValueRules, ValueSyntax, but_not, plain, regex_of, text_regex

log = logging.getLogger(__name__)

TEXT = r"TEXT: /(.|\n)*/"
INPUT = "input"
"""The one parameter of a tool whose input has a grammar."""


class CallGrammar:
    """Writes Lark rules for calls to `tools`. Raises InvalidRequest where there can be no such grammar.

    A tool that isn't strict is left out if the format can't hold its name; no tool left is an error.

    inputs  grammars that the rules name by `@`
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
        """The text by which a call is known to begin."""
        return opening_of(self._format)

    def rules(self, many: bool, opened: bool = False) -> str:
        """Rule `calls`: one call, with `many` one and more. `opened`: the `opening` stands there already."""
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
        """The rules of a call that is held to its tool's schema, as far as it can be."""
        _check_type(tool)
        try:
            if problem := self._check({**tool.parameters, "type": "object"}):
                raise Unenforceable(problem)
            return make(row, rule, tool, True)
        except NO_SCHEMA as error:
            _loosen(tool, why_not(error))
        try:
            return make(row, rule, tool, False)
        except NO_SCHEMA as error:
            why = f"a call of {tool.name!r} can't be forced in this model's format: {why_not(error)}"
            raise bad_field("tools", f"{why}; use tool_choice auto") from error

    def _rules(self, rule: str, root: dict[str, Any], values: ValueSyntax, strict: bool) -> ValueRules:
        return ValueRules(rule, root, values, self._literal, self._check, strict, self._terminals)

    # ----------------------------------------------------------------- one text of a grammar

    def _input_call(self, row: CallFormat, rule: str, tool: Tool) -> str:
        """A call of a tool whose one parameter is a text of a grammar. Raises InvalidRequest."""
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
        schema = enforceable(tool, self._check)
        if row.never:
            values = ValueSyntax(never=row.never)
            rules = self._rules(rule, schema, values, True)
            with contextlib.suppress(Unenforceable):  # llguidance's own knows more keywords
                return [f"{rule}: {before} {rules.term(schema)} {after}", *rules.rules]
        return [f"{rule}: {before} {json_term(schema)} {after}"]

    # ----------------------------------------------------------------- a tag a parameter

    def _tag_call(self, row: TagCalls, rule: str, tool: Tool, strict: bool) -> list[str]:
        terms = [self._literal(self._opened(row.head(tool.name)))]
        values = ValueSyntax(never=(row.close, *row.never))
        rules = self._rules(rule, tool.parameters, values, strict)
        for key, schema, must in self._parameters(row, tool, strict):
            term = rules.rule(self._tag_parameter(row, rules, key, schema, tool.parameters, strict))
            terms.append(term if must else f"{term}?")
        return [f"{rule}: {' '.join(terms)} {self._literal(row.after)}", *rules.rules]

    def _parameters(
        self, row: TagCalls | ValueCalls, tool: Tool, strict: bool
    ) -> list[tuple[str, Any, bool]]:
        """(name, schema, whether it must be there) of each. Raises Unenforceable."""
        alternatives = branches({**tool.parameters, "type": "object"}, tool.parameters, strict)
        if len(alternatives) != 1 or alternatives[0].get("type") != "object":
            raise Unenforceable("alternatives of whole arguments")
        schema = alternatives[0]
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

    def _tag_parameter(
        self, row: TagCalls, rules: ValueRules, key: str, schema: Any, root: dict[str, Any], strict: bool
    ) -> str:
        """A parameter with its tags. Where text may stand, all but null is read as text."""
        try:
            alternatives = branches(schema, root, strict)
        except Unenforceable:
            if strict:
                raise
            alternatives = [{}]
        texts = [branch for branch in alternatives if _may_be_text(branch)]
        bare: list[str] = []
        for branch in texts:
            bare += self._text(row, rules, branch, strict)
        word = row.typed
        terms = [self._between(row, key, "string", term) for term in dict.fromkeys(bare)]
        close = f"{self._literal(row.pad)} {self._literal(row.close + row.pad + row.tail)}"
        for branch in alternatives:
            kind = branch.get("type", "")
            if not texts or (kind == "null" and not word) or (word and kind not in ("", "string")):
                kinds = [kind] if kind else _kinds(branch)
                value = f"({rules.term(branch)}) {close}"
                terms += [self._between(row, key, name, value) for name in _type_words(kinds)]
        return " | ".join(dict.fromkeys(terms))

    def _between(self, row: TagCalls, key: str, kind: str, value: str) -> str:
        if not row.typed:
            return f"{self._literal(row.key + key + row.keyed)} {value}"
        return f"{self._literal(row.key + attribute(key) + row.keyed % kind)} {value}"

    def _text(self, row: TagCalls, rules: ValueRules, branch: dict[str, Any], strict: bool) -> list[str]:
        """Terms for bare text and what closes it."""
        close = self._literal(row.close + row.pad + row.tail)
        if "enum" in branch:
            choices = [value for value in branch["enum"] if isinstance(value, str)]
            return [self._choice(row, text) for text in choices]
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

    def _value_call(self, row: ValueCalls, rule: str, tool: Tool, strict: bool) -> list[str]:
        rules = self._rules(rule, tool.parameters, row.values, strict)
        pairs: list[tuple[str, bool]] = []
        for key, schema, must in self._parameters(row, tool, strict):
            name = plain(f"{key}=") if row.python else rules.key(key)
            pairs.append((f"{name} {rules.term(schema)}", must))
        before = self._literal(self._opened(row.before)) + " " + plain(tool.name + row.opens)
        members = rules.members(pairs)
        return [f"{rule}: {before} {members} {self._literal(row.closes)}", *rules.rules]


def _loosen(tool: Tool, why: str) -> None:
    """Its calls are not held to all of its schema. Raises InvalidRequest if the tool is strict."""
    if tool.strict:
        raise bad_field("tools", f"the strict schema of {tool.name!r} can't be enforced: {why}")
    _say_loose(tool.name, why)


@functools.lru_cache(256)
def _say_loose(name: str, why: str) -> None:
    """Once for each tool and reason. Both are text of a request, so only debug has them."""
    log.warning("a tool's schema can't be enforced, and its calls may differ; with `strict` it is refused")
    log.debug("the schema of %r can't be enforced: %s", name, why)


def _check_type(tool: Tool) -> None:
    """A call's arguments are an object, whatever type the schema has. Raises InvalidRequest as `_loosen`."""
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        _loosen(tool, f"its type is {kind!r}, and arguments are an object")


def no_grammar_in_json(tool: Tool) -> InvalidRequest:
    """The text of such a tool stands in a JSON string, where other letters mean it than the grammar has."""
    return bad_field(
        "tools",
        f"the grammar of {tool.name!r} can't be enforced: this model writes its calls as JSON; give "
        "the tool a format of text, or of a regular expression",
    )


def enforceable(tool: Tool, check: Check) -> dict[str, Any]:
    """The schema of a tool's arguments, or any object. Raises InvalidRequest if the tool is strict."""
    _check_type(tool)
    schema = {"properties": {}, **tool.parameters, "type": "object"}
    if problem := check(schema):
        _loosen(tool, problem)
        return {"type": "object"}
    return schema


JSON_OPTIONS: dict[str, Any] = {
    # A model that can't decide would else write space until its limit.
    "whitespace_pattern": r"[ \n\t]{0,24}",
    "whitespace_flexible": True,
    "lenient": False,
    "coerce_one_of": False,
}


def json_term(schema: dict[str, Any]) -> str:
    """A term for JSON that is as `schema` says."""
    schema = {**closed(schema), "x-guidance": JSON_OPTIONS}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _may_be_text(branch: dict[str, Any]) -> bool:
    if "enum" in branch:
        return any(isinstance(value, str) for value in branch["enum"])
    return branch.get("type", "string") == "string"


def _kinds(branch: dict[str, Any]) -> list[str]:
    """JSON types of a branch's certain values, texts aside."""
    words = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return [words.get(type(value), "null") for value in branch.get("enum", ()) if not isinstance(value, str)]


def _type_words(kinds: list[str]) -> list[str]:
    """What a tag may call these types: a whole number is a number too."""
    names = [word for kind in kinds for word in ((kind, "number") if kind == "integer" else (kind,))]
    return list(dict.fromkeys(names)) or ["object"]
