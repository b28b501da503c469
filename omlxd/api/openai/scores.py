"""How likely texts are as the answer of a model: `POST /v1/classify` and `POST /v1/score`, in vLLM's shapes.

Each text is the answer once, whatever the model would say; its prompt is computed once. A generative model
has no classes of its own, so a classification names them: `labels`. A prompt that can't be served is an error
of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, Union

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from ...chat import (
    ChoiceEvent,
    Conversation,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    RawPrompt,
    Restarted,
    Sampling,
    TextDelta,
    Usage,
)
from ...errors import InvalidRequest, OmlxdError, bad_field
from ..body import ParsedRequest, decode
from ..errors import OpenAIDetail, openai_detail
from . import chat_request
from .fields import UsageBody, usage_body

MOST_LABELS = 64
MOST_TEXTS = 128
MOST_SCORES = 1024
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
Labels = Annotated[list[Label], msgspec.Meta(min_length=1, max_length=MOST_LABELS)]
_Texts = Union[str, Annotated[list[str], msgspec.Meta(min_length=1, max_length=MOST_TEXTS)]]


class ClassifyBody(msgspec.Struct):
    """`input`: prompts without a template; or `messages`, as in /v1/chat/completions."""

    labels: Labels
    input: _Texts | None = None
    messages: msgspec.Raw | UnsetType = UNSET
    model: str | None = None


class ScoreBody(msgspec.Struct):
    """One `text_1` with each `text_2`, or as many of both, in pairs."""

    text_1: _Texts
    text_2: _Texts
    model: str | None = None


_classify, _score = msgspec.json.Decoder(ClassifyBody), msgspec.json.Decoder(ScoreBody)


def parse_classify(body: bytes, headers: Mapping[str, str]) -> ParsedRequest:
    """A body of /v1/classify. Raises InvalidRequest naming the field."""
    asked = decode(_classify, body)
    if (asked.input is None) == (asked.messages is UNSET):
        raise bad_field("input", "either input or messages is needed")
    if asked.messages is not UNSET:
        return labelled(chat_request.parse(body, headers), asked.labels)
    prompts = _list(asked.input or "")
    return _scored(asked.model, prompts, [check_labels(asked.labels)] * len(prompts), "labels")


def parse_score(body: bytes, headers: Mapping[str, str]) -> ParsedRequest:
    """A body of /v1/score. Raises InvalidRequest naming the field."""
    asked = decode(_score, body)
    first, second = _list(asked.text_1), _list(asked.text_2)
    if not all(second):
        raise bad_field("text_2", "it must not be empty")
    if len(first) == 1:
        return _scored(asked.model, first, [second], "text_2")
    if len(first) != len(second):
        raise bad_field("text_2", f"as many as text_1 are needed, {len(first)}, or one text_1")
    return _scored(asked.model, first, [[text] for text in second], "text_2")


def labelled(parsed: ParsedRequest, labels: Sequence[str]) -> ParsedRequest:
    """`parsed`, whose one prompt is answered by each of `labels`. Raises InvalidRequest."""
    prompt = parsed.generate.prompt
    if isinstance(prompt, Conversation):
        # A label is no thought: the answer begins at once, unless the request says otherwise.
        prompt = replace(prompt, thinking=bool(prompt.thinking))
    generate = replace(parsed.generate, prompt=prompt, sampling=_SAMPLING, format=None)
    return replace(parsed, stream=False, generate=generate, labels=(check_labels(labels),))


def check_labels(labels: Sequence[str]) -> tuple[str, ...]:
    if len(set(labels)) < len(labels):
        raise bad_field("labels", "each may stand there once")
    return tuple(labels)


_SAMPLING = Sampling(temperature=0.0, logprobs=0)


def _scored(
    model: str | None, prompts: Sequence[str], labels: Sequence[Sequence[str]], param: str
) -> ParsedRequest:
    if sum(map(len, labels)) > MOST_SCORES:
        raise bad_field(param, f"at most {MOST_SCORES} texts are scored in a request; send several")
    first, *more = [RawPrompt(text) for text in prompts]
    return ParsedRequest(
        model=model or "",
        stream=False,
        generate=GenerateRequest(first, sampling=_SAMPLING),
        more_prompts=tuple(more),
        labels=tuple(map(tuple, labels)),
    )


def _list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


# --------------------------------------------------------------------------- answers


class Score(msgspec.Struct, frozen=True):
    """`logprob`: natural logarithm of the label's probability as the answer's beginning, over its `tokens`.

    share  of the probability of all labels together
    """

    label: str
    logprob: float
    tokens: int
    share: float


class Scores:
    """Takes the events of a `labelled` request; then has the scores of each prompt. `labels`: its own."""

    def __init__(self, labels: Sequence[Sequence[str]]):
        self._labels = [label for of_prompt in labels for label in of_prompt]
        self._width = len(labels[0])
        self._logprobs: dict[int, list[float]] = {}
        self._failed: dict[int, OmlxdError] = {}
        self.usage = Usage()

    def event(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.usage = replace(event.usage, decode_s=0.0)  # Labels are given, and nothing is decoded.
        elif isinstance(event, ChoiceEvent):
            self._take(event.index, event.event)

    def _take(self, index: int, event: Event) -> None:
        logprobs = self._logprobs.setdefault(index, [])
        if isinstance(event, Restarted):
            logprobs.clear()
        elif isinstance(event, TextDelta):
            logprobs += [token.logprob for token in event.logprobs]
        elif isinstance(event, Failed):
            self._failed[index] = OmlxdError.from_event(event)
        elif isinstance(event, Finished) and len(logprobs) != event.usage.completion_tokens:
            self._failed[index] = InvalidRequest(f"labels: {self._labels[index][:200]!r} can't be scored")

    def __iter__(self) -> Iterator[list[Score] | OmlxdError]:
        """Yield the scores of each prompt, in the order of its labels, or the error of one of them."""
        for start in range(0, len(self._labels), self._width):
            choices = range(start, start + self._width)
            failed = next((self._failed[index] for index in choices if index in self._failed), None)
            yield failed or self._scores(choices)

    def _scores(self, choices: range) -> list[Score]:
        sums = [math.fsum(self._logprobs[index]) for index in choices]
        parts = [math.exp(value - max(sums)) for value in sums]
        return [
            Score(self._labels[index], value, len(self._logprobs[index]), part / sum(parts))
            for index, value, part in zip(choices, sums, parts, strict=True)
        ]


class Classification(msgspec.Struct):
    """`label`: the likeliest. `probs`: of the labels in the request's order; `logprobs`: before they are
    set against each other."""

    index: int
    label: str | UnsetType = UNSET
    probs: list[float] | UnsetType = UNSET
    num_classes: int | UnsetType = UNSET
    logprobs: list[float] | UnsetType = UNSET
    error: OpenAIDetail | UnsetType = UNSET


class PairScore(msgspec.Struct):
    """`score`: of `text_2` after `text_1`, the geometric mean of its tokens' probabilities."""

    index: int
    score: float | UnsetType = UNSET
    error: OpenAIDetail | UnsetType = UNSET
    object: Literal["score"] = "score"


class _List(msgspec.Struct):
    id: str
    created: int
    model: str
    usage: UsageBody
    object: Literal["list"] = "list"


class Classifications(_List, kw_only=True):
    data: list[Classification]


class PairScores(_List, kw_only=True):
    data: list[PairScore]


class ScoresCollector:
    """`sse.Collector` of a classification (`pairs` False) or of scores."""

    def __init__(self, id: str, parsed: ParsedRequest, created: int, *, pairs: bool):
        self._id, self._parsed, self._created, self._pairs = id, parsed, created, pairs
        self._scores = Scores(parsed.labels)

    def event(self, event: Event) -> None:
        self._scores.event(event)

    def response(self) -> bytes:
        fields = self._id, self._created, self._parsed.model, usage_body(self._scores.usage)
        if self._pairs:
            return msgspec.json.encode(PairScores(*fields, data=self._pair_scores()))
        data = [_classification(index, scores) for index, scores in enumerate(self._scores)]
        return msgspec.json.encode(Classifications(*fields, data=data))

    def _pair_scores(self) -> list[PairScore]:
        data: list[PairScore] = []
        for scores in self._scores:
            if isinstance(scores, OmlxdError):
                data.append(PairScore(len(data), error=openai_detail(scores)))
                continue
            for score in scores:
                data.append(PairScore(len(data), math.exp(score.logprob / score.tokens)))
        return data


def _classification(index: int, scores: list[Score] | OmlxdError) -> Classification:
    if isinstance(scores, OmlxdError):
        return Classification(index, error=openai_detail(scores))
    best = max(scores, key=lambda score: score.logprob)
    shares, logprobs = [score.share for score in scores], [score.logprob for score in scores]
    return Classification(index, best.label, shares, len(scores), logprobs)
