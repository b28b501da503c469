"""Checks of a `GenerateRequest` whose prompt has been rendered: whether the model can serve it, and how."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...chat import GenerateRequest
from ...errors import InvalidRequest, PromptTooLong, bad_field
from .. import mlx_adapter
from ..constrain.constraint import ConstraintCompiler
from ..constrain.limits import Limits, Marks
from ..constrain.repetition import Repetition
from ..mlx_adapter import LoadedModel, PromptCacheFile
from ..output.parser import OutputParser
from ..output.unopened import GuessingParser, UnopenedThoughts
from ..prompt.pipeline import PromptPipeline, RenderedPrompt
from ..vision.images import PromptImages

INSPECTED = 8192
"""Tokens whose keys may be written: of an 8B shape they take 1 GB in float32."""


@dataclass(slots=True, frozen=True)
class CheckedRequest:
    """The checked parts of a request, of which its sequence is made.

    tokens      of the prompt, images' included
    images      those of the prompt; None: it has none
    room        tokens that the context has for the answer
    wanted      tokens that the client wants at most; None: as many as there is room for
    labels      answers to be scored, as tokens
    prediction  tokens that the client predicts
    constraint  what the answer may be, and where it ends; None: anything
    eos         tokens that end it
    file        of the prompt's KV; None: it is computed
    """

    tokens: list[int]
    images: PromptImages | None
    room: int
    wanted: int | None
    labels: Seq[Seq[int]]
    prediction: list[int]
    constraint: Limits | None
    eos: frozenset[int]
    file: PromptCacheFile | None

    @property
    def max_new(self) -> int:
        return self.room if self.wanted is None else max(1, min(self.wanted, self.room))


class RequestChecks:
    """Checks the requests to one model. Thread-safe.

    kv_off    why no prompt cache is taken; None: they are
    unopened  how often answers of this model began with an unopened thought
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: PromptPipeline,
        block_size: int,
        kv_off: str | None,
        unopened: UnopenedThoughts,
    ):
        self._loaded, self._prompts = loaded, prompts
        self._block, self._kv_off, self._unopened = block_size, kv_off, unopened
        self._constraints = ConstraintCompiler(loaded.tokenizer, loaded.vocab_size)
        spaces = prompts.renderer.around_mark(loaded.tokenizer.think_end or "")
        self._marks = Marks.of(loaded.tokenizer, loaded.vocab_size, spaces)

    def check(
        self,
        request: GenerateRequest,
        rendered: RenderedPrompt,
        tokens: list[int],
        images: PromptImages | None,
        context: int,
    ) -> CheckedRequest:
        """Check a request; returns the parts of its sequence. Raises OmlxdError.

        tokens   of the prompt, images' included
        context  tokens of prompt and answer at most
        """
        if self._loaded.split and (
            request.labels or request.keys_file or request.import_file or request.export_to
        ):
            raise InvalidRequest(
                "Several ranks share this model (--ranks): they score no labels, show no keys, and take and "
                "write no prompt caches."
            )
        file = self._open_cache(request, len(tokens)) if request.import_file else None
        if file is not None:
            tokens = tokens[: file.tokens]
        if request.export_to:
            why = "it has images" if images is not None else mlx_adapter.unwritable(self._loaded)
            if why:
                raise InvalidRequest(f"This prompt's KV can't be written for mlx-lm: {why}.")
        self._check_length(request, len(tokens), context)
        labels = self._prompts.labels(rendered, request.labels, context)
        self._check_ids(request, tokens, labels)
        sampling = request.sampling
        wanted = sampling.usual_max_tokens if sampling.max_tokens is None else sampling.max_tokens
        prediction = self._prediction(request.prediction, context) if request.prediction else []
        constraint = None
        if labels:
            wanted = max(map(len, labels))
        else:
            constraint = self._limits(request, rendered, tokens)
        ends = () if sampling.ignore_eos else self._loaded.tokenizer.eos_token_ids
        eos = frozenset((*ends, *sampling.stop_token_ids))
        room = context - len(tokens)
        return CheckedRequest(tokens, images, room, wanted, labels, prediction, constraint, eos, file)

    def _limits(self, request: GenerateRequest, rendered: RenderedPrompt, tokens: list[int]) -> Limits | None:
        """The grammar and the limits of an answer; None: it has none."""
        sampling = request.sampling
        grammar = self._constraints.compile(request, thinking=rendered.starts_in_thinking)
        if grammar is not None and sampling.ignore_eos:
            raise bad_field("ignore_eos", "the answer ends as its format or its calls do; leave it out")
        marks = self._marks if rendered.reasoning else None
        looks = request.loop_stop and not sampling.ignore_eos  # Who ignores ends wants so many tokens.
        if grammar is None and not looks and (marks is None or rendered.thinking_budget is None):
            return None
        return Limits(
            grammar,
            marks,
            rendered.thinking_budget,
            thinking=in_thought(request, rendered, self._unopened),
            repetition=Repetition(tokens, len(tokens)) if looks else None,
            least=sampling.min_tokens,
        )

    def _open_cache(self, request: GenerateRequest, tokens: int) -> PromptCacheFile:
        """Open the prompt cache. Raises InvalidRequest if it can't be that of this prompt's first tokens."""
        file = mlx_adapter.open_prompt_cache(Path(request.import_file), self._loaded, self._block)
        if self._kv_off is not None:
            raise InvalidRequest(f"The prompt cache is not taken: {self._kv_off} is on.")
        if file.tokens > tokens:
            raise InvalidRequest(
                f"The prompt cache is not taken: it holds {file.tokens} tokens, and the prompt has only "
                f"{tokens}; give the prompt that it was made of.",
                param="prompt",
            )
        return file

    def _check_length(self, request: GenerateRequest, tokens: int, context: int) -> None:
        if tokens >= context:
            raise PromptTooLong(tokens, context - 1)
        if not tokens:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if request.keys_file and tokens > INSPECTED:
            raise bad_field("prompt", f"at most {INSPECTED} tokens are inspected, and it has {tokens}")
        if request.query is not None and not -tokens <= request.query < tokens:
            raise bad_field("query", f"the prompt has {tokens} tokens, and none at {request.query}")

    def _check_ids(self, request: GenerateRequest, tokens: Seq[int], labels: Seq[Seq[int]]) -> None:
        sampling = request.sampling
        named: list[tuple[str, Any]] = [
            ("prompt", tokens),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
        ]
        named += [(f"labels.{index}", label) for index, label in enumerate(labels)]
        for param, ids in named:
            least, most = min(ids, default=0), max(ids, default=0)
            if least < 0 or most >= self._loaded.vocab_size:
                bad = least if least < 0 else most
                raise bad_field(param, f"token id {bad} is not in this model's vocabulary")

    def _prediction(self, text: str, context: int) -> list[int]:
        """The tokens of a client's prediction that the model has.

        Raises InvalidRequest if the context has no room for them.
        """
        with contextlib.suppress(PromptTooLong):
            tokens = self._prompts.tokens.encode(text, most=context)
            if len(tokens) <= context:
                return [token for token in tokens if token < self._loaded.vocab_size]
        raise bad_field("prediction", f"it has more tokens than the model's context, {context}: shorten it")


def guesses_thought(request: GenerateRequest, rendered: RenderedPrompt) -> bool:
    """Whether the answer may begin inside a thought that nothing opens."""
    must_call = getattr(request.prompt, "must_call", False)
    return rendered.begins_openly and not (request.format or must_call or request.labels)


def in_thought(request: GenerateRequest, rendered: RenderedPrompt, unopened: UnopenedThoughts) -> bool:
    """Whether the answer begins inside a thought, as far as is known before it."""
    thinks = getattr(request.prompt, "thinking", None) is not False
    guessed = thinks and unopened.expected and guesses_thought(request, rendered)
    return rendered.starts_in_thinking or guessed


def parser_of(
    request: GenerateRequest, rendered: RenderedPrompt, tokenizer: Any, unopened: UnopenedThoughts
) -> OutputParser | GuessingParser:
    """What reads the answer. `unopened`: how often answers of this model began with an unopened thought."""
    prompt, sampling = request.prompt, request.sampling
    must_call = getattr(prompt, "must_call", False)
    parser = partial(
        OutputParser,
        tokenizer,
        getattr(prompt, "tools", ()) if rendered.tool_calls else (),
        stop=sampling.stop,
        reasoning=rendered.reasoning,
        one_call=getattr(prompt, "one_call", False),
        must_call=must_call,
        min_tokens=sampling.min_tokens,
        shows_special=sampling.shows_special,
        shows_stop=sampling.shows_stop,
        held=request.format is not None,
        allowed=getattr(prompt, "allowed_tools", ()),
    )
    if guesses_thought(request, rendered):
        thinks = getattr(prompt, "thinking", None) is not False
        return GuessingParser(parser, unopened, thinks, request.collected)
    return parser(rendered.starts_in_thinking)
