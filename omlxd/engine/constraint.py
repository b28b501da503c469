"""What the next token may be: grammars and JSON schemas, as masks over the vocabulary (llguidance).

| state    | allowed                                                  | next                           |
|----------|----------------------------------------------------------|--------------------------------|
| open     | what the grammar allows, or the tag that opens thinking  | grammar, thinking              |
| thinking | anything but the end of the turn                         | gap, at the tag that closes it |
| gap      | what the grammar allows, or space (`GAP_TOKENS`)         | gap, grammar                   |
| grammar  | what the grammar allows; the turn's end where that may be | done, at the turn's end       |
| done     | anything: the row is on its way out                      |                                |

Compiling happens on a request's thread; a step costs the engine thread one mask of a constrained
row, computed while the device works on the forward pass (decode_batch.py).

llguidance is imported by the first constraint: an engine that is asked for none starts without it.
"""

from __future__ import annotations

import enum
import json
import logging
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..chat import AnswerFormat, Conversation, GenerateRequest, Tool
from ..errors import InvalidRequest, OmlxdError
from .call_grammar import TEXT, CallGrammar, spelling_name

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

GAP_TOKENS = 2
"""Tokens of space between the end of thinking and the answer: models are used to an empty line there."""

_OPTIONS: Any = {
    # A model that can't decide would else write space until its limit.
    "whitespace_pattern": r"[ \n\t]{0,24}",
    "whitespace_flexible": True,
    "lenient": False,
    "coerce_one_of": False,
}


class _State(enum.Enum):
    OPEN = enum.auto()
    THINKING = enum.auto()
    GAP = enum.auto()
    GRAMMAR = enum.auto()
    DONE = enum.auto()


class Constraint:
    """One request's. `mask` says what its next token may be, `advance` takes the token it became.

    mask   (vocabulary,) bool, or None: anything
    error  why it can't go on, or None; the request has to fail then
    """

    def __init__(self, matcher: LLMatcher, facts: _Facts, *, thinking: bool, may_think: bool):
        self._matcher = matcher
        self._facts = facts
        self._bits = np.zeros((facts.known + 31) // 32, np.int32)
        self._state = _State.THINKING if thinking else _State.OPEN if may_think else _State.GRAMMAR
        self._recent: list[int] = []
        self._gap = 0
        self.error: OmlxdError | None = None
        self.mask: np.ndarray | None = self._next_mask()

    def advance(self, token: int) -> None:
        """Call it once for each token, in order. Never raises; see `error`."""
        if self.error is None and self._state is not _State.DONE:
            self._take(token)
            self.mask = self._next_mask()

    def _take(self, token: int) -> None:
        facts = self._facts
        if self._state is _State.OPEN and facts.think_start[:1] == (token,) and not self._in_grammar(token):
            self._state = _State.THINKING
        elif self._state is _State.THINKING:
            self._recent = [*self._recent, token][-len(facts.think_end) :]
            if tuple(self._recent) == facts.think_end:
                self._state = _State.GAP
        elif self._state is _State.GAP and token in facts.spaces and self._gap < GAP_TOKENS:
            self._gap += 1
        elif token in facts.ends:
            self._state = _State.DONE
        else:
            self._state = _State.GRAMMAR
            if not self._matcher.consume_token(token):
                self._fail()

    def _in_grammar(self, token: int) -> bool:
        return self._matcher.validate_tokens([token]) == 1

    def _next_mask(self) -> np.ndarray | None:
        facts = self._facts
        if self._state is _State.DONE or self.error is not None:
            return None
        if self._state is _State.THINKING:
            return facts.not_ended
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            self._fail()
            return None
        mask = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: facts.vocab].view(np.bool_)
        if self._state is _State.OPEN and facts.think_start:
            mask[facts.think_start[0]] = True
        elif self._state is _State.GAP and self._gap < GAP_TOKENS:
            mask[facts.space_ids] = True
        return mask

    def _fail(self) -> None:
        reason = _brief(self._matcher.get_error())
        log.warning("a grammar failed: %s", reason)
        self.error = OmlxdError(f"the answer's grammar grew too complex to go on: {reason}")


class _Facts:
    """What constraints need of a tokenizer and its model; the same for all of them.

    vocab  width of the model's logits
    known  tokens that the matcher knows, no fewer
    ends   tokens that end a turn
    """

    def __init__(self, tokenizer: Any, vocab: int, known: int):
        self.vocab = vocab
        self.known = known
        self.ends = frozenset(tokenizer.eos_token_ids)
        self.think_start: tuple[int, ...] = tuple(tokenizer.think_start_tokens or ())
        self.think_end: tuple[int, ...] = tuple(tokenizer.think_end_tokens or ())
        spaces = (tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n", " "))
        self.spaces = frozenset(ids[0] for ids in spaces if len(ids) == 1)
        self.space_ids = np.array(sorted(self.spaces), dtype=np.int64)
        self.not_ended = np.ones(vocab, np.bool_)
        self.not_ended[[end for end in self.ends if end < vocab]] = False


class ConstraintCompiler:
    """Of one loaded model. `tokenizer`: mlx-lm's TokenizerWrapper; `vocab`: width of its logits.

    Thread-safe. The first constraint waits for a table of the tokenizer, about a second for a large one.
    """

    def __init__(self, tokenizer: Any, vocab: int):
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._building = threading.Lock()
        self._made: tuple[LLTokenizer, _Facts] | None = None
        self._specials: re.Pattern[str] | None = None

    def compile(self, request: GenerateRequest, *, thinking: bool) -> Constraint | None:
        """The constraint that `request` asks for, if any. Raises InvalidRequest for one that can't be.

        thinking  the prompt ends inside a thinking block
        """
        prompt = request.prompt
        chat = prompt if isinstance(prompt, Conversation) else None
        tools, forced = _tools_of(chat)
        strict = any(tool.strict for tool in tools)
        if request.format is None and not forced and not strict:
            return None
        param = request.format.param if request.format and not forced else "tools"
        from llguidance import LLMatcher

        known, facts = self._parts(param)
        many = chat is None or chat.parallel_calls
        grammar = self._grammar(request.format, tools, forced=forced, many=many)
        matcher = LLMatcher(known, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidRequest(f"{param}: {_brief(matcher.get_error())}", param=param)
        may_think = chat is not None and chat.thinking is not False
        return Constraint(matcher, facts, thinking=thinking, may_think=may_think)

    # ----------------------------------------------------------------- grammars

    def _grammar(
        self, format: AnswerFormat | None, tools: Sequence[Tool], *, forced: bool, many: bool
    ) -> str:
        from llguidance import LLMatcher

        if not tools:
            assert format is not None
            try:
                return self._checked(_grammar_of(format), format.param)
            except ValueError as error:
                problem = _brief(str(error))
                raise InvalidRequest(f"{format.param}: {problem}", param=format.param) from error
        param = "tool_choice" if forced else "tools"
        calls = CallGrammar(spelling_name(self._tokenizer), tools, self._literal, self._why_not, param)
        if not forced and format is None:
            return self._checked(LLMatcher.grammar_from_lark(self._free_text(calls)), param)
        rules = calls.rules(many)
        if forced:
            return self._checked(LLMatcher.grammar_from_lark(f"start: calls\n{rules}"), param)
        assert format is not None
        if format.kind != "json":
            raise InvalidRequest(f"{format.param}: it can't stand beside tools", param=format.param)
        if problem := self._why_not(format.schema):
            raise InvalidRequest(f"{format.param}: {problem}", param=format.param)
        start = f"start: calls | answer\nanswer: %json {json.dumps(format.schema, ensure_ascii=False)}"
        return self._checked(LLMatcher.grammar_from_lark(f"{start}\n{rules}"), format.param)

    def _free_text(self, calls: CallGrammar) -> str:
        """Any text, and calls in it that are as the grammar has them."""
        opening = self._literal(calls.opening)
        if opening.startswith("<["):  # A special token, which no text holds.
            return f"start: TEXT (calls TEXT)*\n{TEXT}\n{calls.rules(many=True)}"
        rules = calls.rules(many=False, opened=True)
        return f"start: (begun calls)* TEXT\n{TEXT}\nbegun[lazy]: /(.|\\n)*/ {opening}\n{rules}"

    def _why_not(self, schema: dict[str, Any]) -> str:
        try:
            return self._problem(_grammar_of(AnswerFormat("json", schema)))
        except ValueError as error:
            return _brief(str(error))

    def _checked(self, grammar: str, param: str) -> str:
        if problem := self._problem(grammar):
            raise InvalidRequest(f"{param}: this can't be enforced: {problem}", param=param)
        return grammar

    def _problem(self, grammar: str) -> str:
        """Warnings count: they tell of what would be ignored."""
        from llguidance import LLMatcher

        _, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._parts("")[0])
        return _brief(messages[0]) if messages else ""

    def _literal(self, text: str) -> str:
        """Text as a term of Lark: special tokens by their ids, the rest as a string."""
        if not text:
            return ""
        assert self._specials is not None
        terms = []
        for piece in filter(None, self._specials.split(text)):
            special = self._specials.fullmatch(piece)
            id = self._tokenizer.convert_tokens_to_ids(piece) if special else None
            terms.append(f"<[{id}]>" if special else json.dumps(piece, ensure_ascii=False))
        return " ".join(terms)

    # ----------------------------------------------------------------- the tokenizer

    def _parts(self, param: str) -> tuple[LLTokenizer, _Facts]:
        with self._building:
            if self._made is None:
                self._made = self._make(param)
            return self._made

    def _make(self, param: str) -> tuple[LLTokenizer, _Facts]:
        from llguidance import LLTokenizer
        from llguidance.hf import from_tokenizer

        inner = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
        try:
            made = from_tokenizer(
                inner,
                n_vocab=max(self._vocab, len(inner)),
                eos_token=sorted(self._tokenizer.eos_token_ids),
                slices=LLTokenizer.json_slices(),
            )
        except Exception as error:  # no fast tokenizer, or one that llguidance can't read
            log.warning("no grammars for this tokenizer: %s", error)
            raise InvalidRequest(
                f"{param}: this model's tokenizer can't be held to a grammar", param=param
            ) from error
        added = {str(token) for id, token in inner.added_tokens_decoder.items() if made.is_special_token(id)}
        words = sorted(map(re.escape, added), key=len, reverse=True)
        self._specials = re.compile(f"({'|'.join(words)})") if words else re.compile(r"((?!))")
        return made, _Facts(self._tokenizer, self._vocab, made.vocab_size)


def _tools_of(chat: Conversation | None) -> tuple[Sequence[Tool], bool]:
    """The tools that may be called, and whether one must be. `none`: nothing may."""
    if chat is None or chat.tool_choice == "none":
        return (), False
    if chat.tool_choice.startswith("named:"):
        name = chat.tool_choice.removeprefix("named:")
        return [tool for tool in chat.tools if tool.name == name], True
    return chat.tools, chat.tool_choice == "required"


def _grammar_of(format: AnswerFormat) -> str:
    """Raises ValueError for what is no schema at all."""
    from llguidance import LLMatcher

    match format.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(format.schema, overrides=_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(format.text)
        case "lark":
            return LLMatcher.grammar_from_lark(_lark(format.text))
        case "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in format.choices)
            return LLMatcher.grammar_from_lark(f"start: {choices}")


def _lark(text: str) -> str:
    """A grammar in Lark's or in GBNF's syntax, as Lark. Raises ValueError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # its parser raises what it likes
        raise ValueError(f"the grammar can't be read: {error}") from error


def _brief(text: str) -> str:
    return " ".join(text.split())[:300]
