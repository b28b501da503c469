"""Grammars of tool calls, in the spelling that a model's own template teaches it.

A call is told by how mlx-lm's parser for the model reads it. Two kinds can be written as a grammar:
those whose arguments are one JSON object (Hermes and Qwen, Mistral, Kimi K2), and those with a tag
a parameter (Qwen coder, GLM, LongCat, MiniMax), where text stands bare and the rest is JSON. The
others are refused by name when a call is to be forced or a schema is strict.

A tool that isn't strict is held to its schema where that can be enforced, else to any JSON object:
a forced choice promises a call, not its schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..chat import Tool
from ..errors import InvalidRequest

TEXT = r"TEXT: /(.|\n)*/"

Check = Callable[[dict[str, Any]], str]
"""A JSON schema → why it can't be enforced, or ""."""
Literal = Callable[[str], str]
"""Text → a term of Lark, special tokens as tokens."""


@dataclass(slots=True, frozen=True)
class _JsonCalls:
    """`section`, then calls of `before NAME between ARGUMENTS after` parted by `part`, then `end`."""

    section: str
    before: str
    between: str
    after: str
    end: str
    part: str = ""
    quoted: bool = True
    """The name stands in a JSON string."""


@dataclass(slots=True, frozen=True)
class _TagCalls:
    """`before NAME named`, then for each parameter `key KEY keyed VALUE valued`, then `after`.

    close  begins `valued` but for space: bare text ends before it
    """

    before: str
    named: str
    key: str
    keyed: str
    close: str
    after: str
    pad: str = ""
    part: str = "\n"


_HERMES = _JsonCalls("", '<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "", part="\n")
_GLM = _TagCalls("<tool_call>", "", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>")

_SPELLINGS: dict[str, _JsonCalls | _TagCalls] = {
    "": _HERMES,
    "json_tools": _HERMES,
    "mistral": _JsonCalls("[TOOL_CALLS]", '[{"name": ', ', "arguments": ', "}]", ""),
    "mistral[ARGS]": _JsonCalls("", "[TOOL_CALLS]", "[ARGS]", "", "", quoted=False),
    "kimi_k2": _JsonCalls(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        quoted=False,
    ),
    "qwen3_coder": _TagCalls(
        "<tool_call>\n<function=",
        ">\n",
        "<parameter=",
        ">\n",
        "</parameter>",
        "</function>\n</tool_call>",
        pad="\n",
    ),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": _TagCalls(
        "<longcat_tool_call>",
        "",
        "<longcat_arg_key>",
        "</longcat_arg_key><longcat_arg_value>",
        "</longcat_arg_value>",
        "</longcat_tool_call>",
    ),
    "minimax_m2": _TagCalls(
        '<minimax:tool_call>\n<invoke name="',
        '">\n',
        '<parameter name="',
        '">',
        "</parameter>",
        "</invoke>\n</minimax:tool_call>",
    ),
}


def spelling_name(tokenizer: Any) -> str:
    """The name of a model's spelling, as in mlx_lm.tool_parsers; "": none is known, ours is taught."""
    parser = tokenizer.tool_parser
    name = parser.__module__.rpartition(".")[2] if parser is not None else ""
    return "mistral[ARGS]" if name == "mistral" and "[ARGS]" in str(tokenizer.chat_template) else name


class CallGrammar:
    """Rules of Lark for calls to `tools`. Raises InvalidRequest where there can be no such grammar."""

    def __init__(self, spelling: str, tools: Sequence[Tool], literal: Literal, check: Check, param: str):
        found = _SPELLINGS.get(spelling)
        if found is None:
            raise InvalidRequest(
                f"{param}: calls in this model's format ({spelling}) can't be enforced; "
                "use tool_choice auto, and tools that are not strict",
                param=param,
            )
        self._spelling = found
        self._literal = literal
        self._check = check
        self._tools = tools
        self._skip = 0

    @property
    def opening(self) -> str:
        """The text by which a call is known to begin."""
        spelling = self._spelling
        whole = spelling.section + spelling.before if isinstance(spelling, _JsonCalls) else spelling.before
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
        if isinstance(spelling, _JsonCalls):
            rules += [self._json_call(spelling, *pair) for pair in zip(names, self._tools, strict=True)]
            ends = literal(spelling.section[self._skip :]), literal(spelling.end)
        else:
            for pair in zip(names, self._tools, strict=True):
                rules += self._tag_call(spelling, *pair)
            ends = "", ""
        more = f"({literal(spelling.part)} call)*" if many else ""
        return "\n".join([f"calls: {ends[0]} call {more} {ends[1]}", *rules])

    def _json_call(self, spelling: _JsonCalls, rule: str, tool: Tool) -> str:
        name = json.dumps(tool.name, ensure_ascii=False) if spelling.quoted else tool.name
        before = self._literal(self._opened(spelling.before, spelling.section) + name + spelling.between)
        return f"{rule}: {before} {_json_term(self._schema(tool))} {self._literal(spelling.after)}"

    def _opened(self, before: str, section: str = "") -> str:
        return before if section else before[self._skip :]

    def _schema(self, tool: Tool) -> dict[str, Any]:
        schema = {**tool.parameters, "type": "object"} if tool.parameters else {"type": "object"}
        if problem := self._check(schema):
            if tool.strict:
                raise InvalidRequest(
                    f"tools: the strict schema of {tool.name!r} can't be enforced: {problem}", param="tools"
                )
            return {"type": "object"}
        return schema

    # ----------------------------------------------------------------- a tag a parameter

    def _tag_call(self, spelling: _TagCalls, rule: str, tool: Tool) -> list[str]:
        schema = self._schema(tool)
        properties = schema.get("properties")
        required = schema.get("required")
        rules, terms = [], [self._literal(self._opened(spelling.before) + tool.name + spelling.named)]
        for index, (key, given) in enumerate((properties if isinstance(properties, dict) else {}).items()):
            name = f"{rule}_{index}"
            value, terminal = self._value(spelling, given, schema, tool, f"{name}_text")
            rules += terminal
            before = self._literal(spelling.key + key + spelling.keyed)
            rules.append(f"{name}: {before} {value}")
            terms.append(name if isinstance(required, list) and key in required else f"{name}?")
        return [f"{rule}: {' '.join(terms)} {self._literal(spelling.after)}", *rules]

    def _value(
        self, spelling: _TagCalls, given: Any, root: dict[str, Any], tool: Tool, terminal: str
    ) -> tuple[str, list[str]]:
        """A value and what closes it: a term, and the terminals that it needs."""
        close = spelling.pad + spelling.close + spelling.pad
        kinds = given.get("type") if isinstance(given, dict) else None
        if isinstance(given, dict) and _all_text(given.get("enum")):
            choices = " | ".join(self._literal(choice) for choice in given["enum"])
            return f"({choices}) {self._literal(close)}", []
        if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
            if tool.strict and (limits := sorted(_TEXT_LIMITS & given.keys())):
                raise InvalidRequest(
                    f"tools: the strict schema of {tool.name!r} can't be enforced in this model's format: "
                    f"{', '.join(limits)}",
                    param="tools",
                )
            ending = spelling.close.replace("/", r"\/")
            return f"{terminal} {self._literal(spelling.pad)}", [f"{terminal}[lazy]: /(.|\\n)*{ending}/"]
        inner = {"not_a_schema": True} if not isinstance(given, dict) else given
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return f"{_json_term({**shared, **inner})} {self._literal(close)}", []


_TEXT_LIMITS = frozenset({"pattern", "format", "minLength", "maxLength", "const", "allOf", "anyOf", "oneOf"})


def _all_text(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(v, str) and v for v in values)


def _json_term(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(schema, ensure_ascii=False)}"
