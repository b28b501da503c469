"""Grammars of tool calls, in the spelling that a model's own template teaches it.

A call is told by how the parser for the model reads it (engine/constrain/call_formats.py). Three kinds: those
whose arguments are one JSON object, those with a tag a parameter, where text stands bare and the rest is
JSON, and those whose values are spelled in a language of their own (value_grammar.py). Harmony's
messages are in harmony_grammar.py.

A tool that isn't strict is held to its schema where that can be enforced; what of it can't be is
passed over: a forced choice promises a call, not its schema.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from ...chat import Tool
from ...errors import InvalidRequest
from .call_formats import SPELLINGS, JsonCalls, Spelling, TagCalls, ValueCalls, unreadable
from .json_schema import Unenforceable, branches, closed
from .value_grammar import (
    Check,
    Literal,
    ValueRules,
    ValueSpelling,
    but_not,
    plain,
    regex_of,
    text_regex,
)

TEXT = r"TEXT: /(.|\n)*/"
INPUT = "input"
"""The one parameter of a tool whose input has a grammar."""


class CallGrammar:
    """Rules of Lark for calls to `tools`. Raises InvalidRequest where there can be no such grammar.

    A tool that isn't strict and whose name the format can't hold is left out, as no call of it could
    be read; with no other left, that is an error.

    inputs  grammars that the rules name by `@`
    """

    def __init__(self, spelling: str, tools: Sequence[Tool], literal: Literal, check: Check, param: str):
        found = SPELLINGS.get(spelling)
        if found is None:
            raise InvalidRequest(
                f"{param}: calls in this model's format ({spelling}) can't be enforced; "
                "use tool_choice auto, and tools that are not strict",
                param=param,
            )
        self._spelling = found
        self._literal = literal
        self._check = check
        self._skip = 0
        self.inputs: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._tools = [tool for tool in tools if not unreadable(found, tool.name, tool=True)]
        for tool in tools:
            if tool not in self._tools and (tool.strict or not self._tools):
                raise InvalidRequest(
                    f"{param}: this model's format ({spelling}) can't hold the name {tool.name!r}; give the "
                    "tool a name of letters, digits and underscores",
                    param=param,
                )

    @property
    def opening(self) -> str:
        """The text by which a call is known to begin."""
        spelling = self._spelling
        whole = spelling.section + spelling.before
        ends = [at + 1 for mark in (">", "]") if (at := whole.find(mark)) >= 0]
        return whole[: min(ends)] if ends else whole

    def rules(self, many: bool, opened: bool = False) -> str:
        """Rule `calls`: one call, or with `many` one and more, in the spelling's way.

        opened  the `opening` stands there already
        """
        self._skip = len(self.opening) if opened else 0
        spelling, literal = self._spelling, self._literal
        names = [f"call_{index}" for index in range(len(self._tools))]
        rules = [f"call: {' | '.join(names)}"]
        self._terminals.clear()
        for pair in zip(names, self._tools, strict=True):
            if pair[1].input_grammar:
                rules.append(self._input_call(spelling, *pair))
                continue
            match spelling:
                case JsonCalls():
                    rules += self._json_call(spelling, *pair)
                case TagCalls():
                    rules += self._held(self._tag_call, spelling, *pair)
                case ValueCalls():
                    rules += self._held(self._value_call, spelling, *pair)
        rules += [f"{name}{body}" for body, name in self._terminals.items()]
        more = f"({literal(spelling.part)} call)*" if many else ""
        section = literal(spelling.section[self._skip :])
        return "\n".join([f"calls: {section} call {more} {literal(spelling.end)}", *rules])

    def _opened(self, before: str) -> str:
        return before if self._spelling.section else before[self._skip :]

    def _held(self, make: Callable[..., list[str]], spelling: Any, rule: str, tool: Tool) -> list[str]:
        """The rules of a call that is held to its tool's schema, as far as it can be."""
        make = _whole(make)
        try:
            if problem := self._check({**tool.parameters, "type": "object"}):
                raise Unenforceable(problem)
            return make(spelling, rule, tool, True)
        except Unenforceable as problem:
            if tool.strict:
                raise InvalidRequest(
                    f"tools: the strict schema of {tool.name!r} can't be enforced: {problem}", param="tools"
                ) from problem
        try:
            return make(spelling, rule, tool, False)
        except Unenforceable as problem:
            raise InvalidRequest(
                f"tools: a call of {tool.name!r} can't be forced in this model's format: {problem}; use "
                "tool_choice auto",
                param="tools",
            ) from problem

    def _rules(self, rule: str, root: dict[str, Any], values: ValueSpelling, strict: bool) -> ValueRules:
        return ValueRules(rule, root, values, self._literal, self._check, strict, self._terminals)

    # ----------------------------------------------------------------- one text of a grammar

    def _input_call(self, spelling: Spelling, rule: str, tool: Tool) -> str:
        """A call of a tool whose one parameter is a text of a grammar. Raises InvalidRequest."""
        literal = self._literal
        text = f"@input_{len(self.inputs)}"
        self.inputs[text[1:]] = tool.input_grammar
        before = literal(self._opened(spelling.before))
        if isinstance(spelling, TagCalls):
            begin, end = spelling.cdata or ("", "")
            close = literal(spelling.close + spelling.pad + spelling.tail)
            value = f"{literal(begin)} {text} {literal(end + spelling.pad)} {close}"
            given = self._between(spelling, INPUT, "string", value)
            told = f"{literal(tool.name + spelling.named)} {given} {literal(spelling.after)}"
        elif isinstance(spelling, ValueCalls) and spelling.values.quote:
            mark = literal(spelling.values.quote)
            given = f"{plain(INPUT + ':')} {mark} {text} {mark}"
            told = f"{plain(tool.name + spelling.opens)} {given} {literal(spelling.closes)}"
        else:
            raise no_grammar_in_json(tool)
        return f"{rule}: {before} {told}"

    # ----------------------------------------------------------------- one JSON object

    def _json_call(self, spelling: JsonCalls, rule: str, tool: Tool) -> list[str]:
        name = json.dumps(tool.name, ensure_ascii=False) if spelling.quoted else tool.name
        before = self._literal(self._opened(spelling.before) + name + spelling.between)
        after = self._literal(spelling.after)
        schema = enforceable(tool, self._check)
        if spelling.never:
            values = ValueSpelling(never=spelling.never)
            rules = self._rules(rule, schema, values, True)
            with contextlib.suppress(Unenforceable):  # llguidance's own knows more keywords
                return [f"{rule}: {before} {rules.term(schema)} {after}", *rules.rules]
        return [f"{rule}: {before} {json_term(schema)} {after}"]

    # ----------------------------------------------------------------- a tag a parameter

    def _tag_call(self, spelling: TagCalls, rule: str, tool: Tool, strict: bool) -> list[str]:
        name = _attribute(tool.name) if spelling.typed else tool.name
        terms = [self._literal(self._opened(spelling.before) + name + spelling.named)]
        values = ValueSpelling(never=(spelling.close, *spelling.never))
        rules = self._rules(rule, tool.parameters, values, strict)
        for key, given, must in self._parameters(spelling, tool, strict):
            term = rules.rule(self._tag_parameter(spelling, rules, key, given, tool.parameters, strict))
            terms.append(term if must else f"{term}?")
        return [f"{rule}: {' '.join(terms)} {self._literal(spelling.after)}", *rules.rules]

    def _parameters(
        self, spelling: TagCalls | ValueCalls, tool: Tool, strict: bool
    ) -> list[tuple[str, Any, bool]]:
        """(name, schema, whether it must be there) of each. Raises Unenforceable."""
        found = branches({**tool.parameters, "type": "object"}, tool.parameters, strict)
        if len(found) != 1 or found[0].get("type") != "object":
            raise Unenforceable("alternatives of whole arguments")
        schema = found[0]
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        others = schema.get("additionalProperties", True)
        named = {**properties, **{key: others for key in required if key not in properties}}
        told: list[tuple[str, Any, bool]] = []
        for key, given in named.items():
            must = key in required
            if not unreadable(spelling, key, tool=False):
                told.append((key, given, must))
            elif must:
                raise Unenforceable(f"the required parameter {key!r}, whose name the format can't hold")
        return told

    def _tag_parameter(
        self,
        spelling: TagCalls,
        rules: ValueRules,
        key: str,
        given: Any,
        root: dict[str, Any],
        strict: bool,
    ) -> str:
        """A parameter with its tags. Where text may stand, all but null is read as text."""
        try:
            found = branches(given, root, strict)
        except Unenforceable:
            if strict:
                raise
            found = [{}]
        texts = [branch for branch in found if _may_be_text(branch)]
        told: list[str] = []
        for branch in texts:
            told += self._text(spelling, rules, branch, strict)
        word = spelling.typed
        terms = [self._between(spelling, key, "string", term) for term in dict.fromkeys(told)]
        close = (
            f"{self._literal(spelling.pad)} {self._literal(spelling.close + spelling.pad + spelling.tail)}"
        )
        for branch in found:
            kind = branch.get("type", "")
            if not texts or (kind == "null" and not word) or (word and kind not in ("", "string")):
                kinds = [kind] if kind else _kinds(branch)
                value = f"({rules.term(branch)}) {close}"
                terms += [self._between(spelling, key, name, value) for name in _type_words(kinds)]
        return " | ".join(dict.fromkeys(terms))

    def _between(self, spelling: TagCalls, key: str, kind: str, value: str) -> str:
        if not spelling.typed:
            return f"{self._literal(spelling.key + key + spelling.keyed)} {value}"
        return f"{self._literal(spelling.key + _attribute(key) + spelling.keyed % kind)} {value}"

    def _text(self, spelling: TagCalls, rules: ValueRules, branch: dict[str, Any], strict: bool) -> list[str]:
        """Terms for bare text and what closes it."""
        close = self._literal(spelling.close + spelling.pad + spelling.tail)
        if "enum" in branch:
            choices = [value for value in branch["enum"] if isinstance(value, str)]
            return [self._choice(spelling, text) for text in choices]
        body = text_regex(branch)
        if spelling.cdata is not None:
            begin, end = spelling.cdata
            inside = rules.closed(f"/{body}{regex_of(end)}/{but_not(spelling.never, last=end)}")
            told = [f"{self._literal(begin)} {inside} {close}"]
            if body == "(?s:.*)":
                told.append(f"{rules.terminal(f'/{spelling.plain}/')} {close}")
            return told
        free = body == "(?s:.*)"
        if close.startswith("<["):  # a control token, which no terminal holds
            never = but_not((*spelling.never, spelling.close))
            return [f"{rules.terminal(f'/{body}/{never}')} {close}"]
        pad = "" if free else regex_of(spelling.pad)
        never = but_not(spelling.never, last=spelling.close)
        if not free and not spelling.pad:  # a newline on each side would be taken off
            never += r" & ~/\n(?s:.*)/"
        text = rules.closed(f"/{body}{pad}{regex_of(spelling.close)}/{never}")
        return [f"{text} {self._literal(spelling.pad + spelling.tail)}"]

    def _choice(self, spelling: TagCalls, text: str) -> str:
        if any(each in text for each in (spelling.close, *spelling.never)):
            raise Unenforceable(f"the text {text[:60]!r}, which this model's format can't hold")
        told = plain(text) if text else ""
        if spelling.cdata is not None and (text != text.strip() or set("<&\n") & set(text)):
            begin, end = spelling.cdata
            if end in text:
                raise Unenforceable(f"the text {text[:60]!r}, which this model's format can't hold")
            told = f"{self._literal(begin)} {told} {self._literal(end)}"
        close = spelling.close + spelling.pad + spelling.tail
        return f"{told} {self._literal(spelling.pad)} {self._literal(close)}"

    # ----------------------------------------------------------------- values in their own language

    def _value_call(self, spelling: ValueCalls, rule: str, tool: Tool, strict: bool) -> list[str]:
        rules = self._rules(rule, tool.parameters, spelling.values, strict)
        pairs: list[tuple[str, bool]] = []
        for key, given, must in self._parameters(spelling, tool, strict):
            told = plain(f"{key}=") if spelling.python else rules.key(key)
            pairs.append((f"{told} {rules.term(given)}", must))
        before = self._literal(self._opened(spelling.before)) + " " + plain(tool.name + spelling.opens)
        members = rules.members(pairs)
        return [f"{rule}: {before} {members} {self._literal(spelling.closes)}", *rules.rules]


def _whole(make: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """`make`, for which a schema whose words have values of the wrong types is unenforceable too."""

    def made(*given: Any) -> list[str]:
        try:
            return make(*given)
        except (TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
            raise Unenforceable("what is no JSON schema") from error

    return made


def no_grammar_in_json(tool: Tool) -> InvalidRequest:
    """The text of such a tool stands in a JSON string, where other letters mean it than the grammar has."""
    return InvalidRequest(
        f"tools: the grammar of {tool.name!r} can't be enforced: this model writes its calls as JSON; give "
        "the tool a format of text, or of a regular expression",
        param="tools",
    )


def enforceable(tool: Tool, check: Check) -> dict[str, Any]:
    """The schema of a tool's arguments, or any object. Raises InvalidRequest if the tool is strict."""
    schema = {"properties": {}, **tool.parameters, "type": "object"}
    if problem := check(schema):
        if tool.strict:
            raise InvalidRequest(
                f"tools: the strict schema of {tool.name!r} can't be enforced: {problem}", param="tools"
            )
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
    told = [word for kind in kinds for word in ((kind, "number") if kind == "integer" else (kind,))]
    return list(dict.fromkeys(told)) or ["object"]


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")
