"""Grammars of gpt-oss's messages. The output begins inside a header, and a call ends its turn."""

from __future__ import annotations

from collections.abc import Sequence

from ...chat import Tool
from .call_grammar import TEXT, enforceable, json_term, no_grammar_in_json, note_left_out
from .schema.enforceable import Check
from .value_grammar import Literal

_GO_ON = "<|end|><|start|>assistant"
_BODY = "<|message|>"


class HarmonyGrammar:
    """Writes Lark rules for harmony. Raises InvalidRequest if there can be none.

    thinking  analysis may come first
    left_out  keywords of schemas that the rules don't hold calls to
    """

    def __init__(self, tools: Sequence[Tool], literal: Literal, check: Check, thinking: bool):
        self._literal = literal
        self._thinking = thinking
        self.left_out: list[str] = []
        names = [f"call_{index}" for index in range(len(tools))]
        self._calls = [f"calls: {' | '.join(names)}"] if names else []
        for name, tool in zip(names, tools, strict=True):
            to = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json{_BODY}"
            if tool.input_grammar:
                raise no_grammar_in_json(tool)
            schema, left_out = enforceable(tool, check)
            self.left_out += note_left_out(f"tools.{tool.name}", left_out)
            self._calls.append(f"{name}: {literal(to)} {json_term(schema)} {literal('<|call|>')}")

    def forced(self) -> str:
        """Return a grammar of one call."""
        return self._grammar(f"start: {self._thought} calls")

    def answer(self, term: str) -> str:
        """Return a grammar of a final message that is `term`, or of a call if there are tools."""
        final = f"{self._literal('<|channel|>final' + _BODY)} {term}"
        calls = " | calls" if self._calls else ""
        return self._grammar(f"start: {self._thought} (final{calls})", f"final: {final}")

    def free(self) -> str:
        """Return a grammar of any messages, and calls by their tools' schemas."""
        channels = '("analysis" | "commentary")' if self._thinking else '"commentary"'
        other = (
            f"{self._literal('<|channel|>')} {channels} {self._literal(_BODY)} TEXT {self._literal(_GO_ON)}"
        )
        final = f"{self._literal('<|channel|>final' + _BODY)} TEXT"
        return self._grammar("start: other* (final | calls)", f"other: {other}", f"final: {final}", TEXT)

    @property
    def _thought(self) -> str:
        return "thought?" if self._thinking else ""

    def _grammar(self, *rules: str) -> str:
        lines = [*rules, *self._calls]
        if self._thinking and "thought" in rules[0]:
            head = self._literal("<|channel|>analysis" + _BODY)
            lines += [f"thought: {head} TEXT {self._literal(_GO_ON)}", TEXT]
        return "\n".join(lines)


CONTROLS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
"""Control tokens of which harmony's vocabulary has all."""
