"""The format of a request's answer, as one grammar for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from ...chat import AnswerFormat, Conversation, GenerateRequest, Tool
from ...errors import InvalidRequest
from .call_formats import carries_text
from .call_grammar import JSON_OPTIONS, TEXT, CallGrammar, json_term, note_left_out
from .harmony_grammar import CONTROLS, HarmonyGrammar
from .schema.enforceable import enforce
from .schema.json_schema import closed
from .value_grammar import ascii_classes

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(slots=True, frozen=True)
class Wanted:
    """Requirements of a request's answer.

    chat    the prompt, if it is a conversation
    tools   that may be called; empty: calls are not looked for
    forced  one of them must be called
    param   the request's field that asks for it
    """

    chat: Conversation | None
    format: AnswerFormat | None
    tools: Sequence[Tool]
    forced: bool
    param: str

    @classmethod
    def of(cls, request: GenerateRequest, bare_text: Callable[[], bool]) -> Wanted | None:
        """Return a request's requirements; None: the answer may be anything.

        bare_text()  whether calls can carry the text of a custom tool's grammar. If not, calls that are not
                     forced are free: the tool's description has the grammar, and Codex always sends one.
        """
        chat = request.prompt if isinstance(request.prompt, Conversation) else None
        tools, forced = _tools_of(chat), chat is not None and chat.must_call
        if not forced and any(tool.input_grammar for tool in tools) and not bare_text():
            tools = [msgspec.structs.replace(tool, input_grammar="") for tool in tools]
        limited = chat is not None and 0 < len(tools) < len(chat.tools)
        if request.format is None and not forced and not limited and not any(map(_is_held, tools)):
            return None
        param = "tool_choice" if forced or limited else "tools"
        if request.format is not None and not forced:
            param = request.format.param
        return cls(chat, request.format, tools, forced, param)


def _is_held(tool: Tool) -> bool:
    """Return whether each call of `tool` must follow its schema, even if no call is forced."""
    return tool.strict or bool(tool.input_grammar)


def _tools_of(chat: Conversation | None) -> Sequence[Tool]:
    """Return the tools that may be called."""
    if chat is None or chat.tool_choice == "none":
        return ()
    if chat.tool_choice.startswith("named:"):
        return [tool for tool in chat.tools if chat.tool_choice == f"named:{tool.name}"]
    return [tool for tool in chat.tools if not chat.allowed_tools or tool.name in chat.allowed_tools]


class Grammars:
    """Grammars for one tokenizer. Every method raises InvalidRequest for what can't be enforced.

    call_format  a name of call_formats.py
    controls     tokens that no text holds → their ids
    bare_text    calls can carry the text of a custom tool's grammar
    harmony      the model writes gpt-oss's messages
    """

    def __init__(self, vocabulary: LLTokenizer, call_format: str, controls: Mapping[str, int]):
        self.vocabulary = vocabulary
        self._call_format = call_format
        self._controls = controls
        words = sorted(map(re.escape, controls), key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(words)})") if words else re.compile(r"((?!))")
        self.harmony = controls.keys() >= set(CONTROLS)
        self.bare_text = not self.harmony and carries_text(call_format)

    def of(self, wanted: Wanted) -> tuple[str, tuple[str, ...]]:
        """Return the grammar, and the parts of the request's schemas that it does not enforce."""
        left_out: list[str] = []
        if wanted.format is not None and wanted.format.kind == "json" and not wanted.forced:
            format = self._enforceable(wanted.format, left_out)
            wanted = replace(wanted, format=format)
        if self.harmony and wanted.chat is not None:
            grammar = self._messages(wanted, wanted.chat.thinking is not False, left_out)
        elif not wanted.tools:
            assert wanted.format is not None
            grammar = self._answer(wanted.format)
        else:
            grammar = self._calls(wanted, left_out)
        if problem := self._problem(grammar):
            raise InvalidRequest(f"{wanted.param}: this can't be enforced: {problem}", param=wanted.param)
        return grammar, tuple(left_out)

    # ----------------------------------------------------------------- answers

    def _enforceable(self, format: AnswerFormat, left_out: list[str]) -> AnswerFormat:
        schema, without, problem = enforce(format.schema, self._why_not, strict=format.strict)
        if problem:
            raise InvalidRequest(f"{format.param}: {problem}", param=format.param)
        left_out += note_left_out(format.param, without)
        return msgspec.structs.replace(format, schema=schema)

    def _answer(self, format: AnswerFormat) -> str:
        try:
            return _grammar_of(format)
        except ValueError as error:
            raise InvalidRequest(f"{format.param}: {brief(str(error))}", param=format.param) from error

    def _need_json(self, format: AnswerFormat) -> None:
        if format.kind != "json":
            raise InvalidRequest(f"{format.param}: it can't stand beside tools", param=format.param)

    # ----------------------------------------------------------------- calls

    def _calls(self, wanted: Wanted, left_out: list[str]) -> str:
        calls = CallGrammar(self._call_format, wanted.tools, self._literal, self._why_not, wanted.param)
        calls.left_out = left_out
        if not wanted.forced and wanted.format is None:
            return _packed(self._free_text(calls), calls.inputs)
        rules = calls.rules(many=wanted.chat is None or not wanted.chat.one_call)
        if wanted.forced:
            return _packed(f"start: calls\n{rules}", calls.inputs)
        assert wanted.format is not None
        self._need_json(wanted.format)
        answer = f"answer: {json_term(wanted.format.schema)}"
        return _packed(f"start: calls | answer\n{answer}\n{rules}", calls.inputs)

    def _free_text(self, calls: CallGrammar) -> str:
        """Return a grammar of any text, with calls in it."""
        opening = self._literal(calls.opening)
        if opening.startswith("<["):  # A special token, which no text holds.
            return f"start: TEXT (calls TEXT)*\n{TEXT}\n{calls.rules(many=True)}"
        rules = calls.rules(many=False, opened=True)
        return f"start: (begun calls)* TEXT\n{TEXT}\nbegun[lazy]: /(.|\\n)*/ {opening}\n{rules}"

    def _messages(self, wanted: Wanted, thinking: bool, left_out: list[str]) -> str:
        messages = HarmonyGrammar(wanted.tools, self._literal, self._why_not, thinking)
        left_out += messages.left_out
        if wanted.forced:
            return messages.forced()
        if wanted.format is None:
            return messages.free()
        if wanted.tools or wanted.format.kind == "json":
            self._need_json(wanted.format)
            return messages.answer(json_term(wanted.format.schema))
        inner = self._answer(wanted.format)
        answer = json.loads(inner)["grammars"][0] if inner.startswith("{") else {"lark_grammar": inner}
        messages_grammar = {"name": "messages", "lark_grammar": messages.answer("@answer")}
        return json.dumps({"grammars": [messages_grammar, {**answer, "name": "answer"}]})

    # ----------------------------------------------------------------- what can be enforced

    def _why_not(self, schema: dict[str, Any]) -> str:
        try:
            return self._problem(_grammar_of(AnswerFormat("json", schema)))
        except ValueError as error:
            return brief(str(error))

    def _problem(self, grammar: str) -> str:
        """Return the problem of a grammar. Warnings count: they name what would be ignored."""
        from llguidance import LLMatcher

        _, messages = LLMatcher.validate_grammar_with_warnings(grammar, self.vocabulary)
        return brief(messages[0]) if messages else ""

    def _literal(self, text: str) -> str:
        """Spell text as a term of Lark: special tokens by their ids, the rest as a string."""
        terms = []
        for piece in filter(None, self._cut.split(text)):
            id = self._controls.get(piece)
            terms.append(json.dumps(piece, ensure_ascii=False) if id is None else f"<[{id}]>")
        return " ".join(terms)


def _packed(grammar: str, inputs: Mapping[str, str]) -> str:
    """Pack a grammar with those that it names by `@`."""
    if not inputs:
        return grammar
    others = [{"name": name, "lark_grammar": text} for name, text in inputs.items()]
    return json.dumps({"grammars": [{"name": "calls", "lark_grammar": grammar}, *others]})


MOST_CHARS = 1 << 18
"""Characters of a grammar that is no JSON schema: 10,000 choices take 0.6 s, 100,000 took 115 s."""


def _grammar_of(format: AnswerFormat) -> str:
    """Make a grammar of a schema. Raises ValueError for what is no schema at all."""
    from llguidance import LLMatcher

    options: Any = JSON_OPTIONS
    if (chars := len(format.text) + sum(map(len, format.choices))) > MOST_CHARS:
        raise ValueError(f"it has {chars} characters, and {MOST_CHARS} is the most")
    match format.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(closed(format.schema), overrides=options)
        case "regex":
            return LLMatcher.grammar_from_regex(ascii_classes(format.text))
        case "lark":
            return LLMatcher.grammar_from_lark(_lark(format.text))
        case "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in format.choices)
            return LLMatcher.grammar_from_lark(f"start: {choices}")


def _lark(text: str) -> str:
    """Convert a grammar from Lark's or GBNF's syntax to Lark. Raises ValueError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # its parser raises what it likes
        raise ValueError(f"the grammar can't be read: {error}") from error


def brief(text: str) -> str:
    """Put llguidance's words on one line, without its account of the state, which holds the answer's text."""
    return " ".join(text.partition("<state>")[0].split())[:300]
