"""Scores of texts as a model's answer: `POST /v1/classify` and `POST /v1/score`, in vLLM's shapes.

A generative model has no classes of its own, so a classification names them: `labels`. Without them the next
token is drawn. With them nothing is generated: the prompt's last logits say how likely a label of one token
is, and a longer one is read behind the prompt (engine/schedule/scoring.py). A prompt that can't be served is
an error of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Literal, Union

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from ... import chat
from ...errors import OmlxdError, bad_field
from ..errors import OpenAIDetail, openai_detail
from ..fields.body import ParsedRequest, ScoresShape, decode
from ..fields.types import Temperature, TopLogprobs
from . import chat_request
from .fields import TopLogprob, UsageBody, top_logprobs, usage_body

MOST_LABELS = 64
MOST_TEXTS = 128
MOST_SCORES = 1024
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
Labels = Annotated[list[Label], msgspec.Meta(min_length=1, max_length=MOST_LABELS)]
_Texts = Union[str, Annotated[list[str], msgspec.Meta(min_length=1, max_length=MOST_TEXTS)]]


class ClassifyBody(msgspec.Struct):
    """A body of /v1/classify. `input`: prompts without a template; or `messages`, as in /v1/chat/completions.

    labels          None: the next token is drawn, by `temperature` and `seed`, and is the label
    use_activation  False: `probs` are what the softmax is of
    logits          also each label's first token's logit
    top_logprobs    so many of the tokens that the answer would likeliest begin with
    """

    labels: Labels | None = None
    input: _Texts | None = None
    messages: list[msgspec.Raw] | None = None
    model: str | None = None
    use_activation: bool | None = None
    logits: bool = False
    top_logprobs: TopLogprobs = 0
    temperature: Temperature | None = None
    seed: int | None = None


class ScoreBody(msgspec.Struct):
    """Pairs: one `text_1` with each `text_2`, or as many of both; the other names are vLLM's for them."""

    text_1: _Texts | UnsetType = UNSET
    text_2: _Texts | UnsetType = UNSET
    queries: _Texts | UnsetType = UNSET
    documents: _Texts | UnsetType = UNSET
    items: _Texts | UnsetType = UNSET
    data_1: _Texts | UnsetType = UNSET
    data_2: _Texts | UnsetType = UNSET
    model: str | None = None


_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_classify, _score = msgspec.json.Decoder(ClassifyBody), msgspec.json.Decoder(ScoreBody)


def parse_classify(body: bytes, headers: Mapping[str, str]) -> ParsedRequest:
    """Read a body of /v1/classify. Raises InvalidRequest."""
    asked = decode(_classify, body)
    if (asked.input is None) == (asked.messages is None):
        raise bad_field("input", "either input or messages is needed")
    if asked.messages is not None:
        parsed = chat_request.parse(without_top(body), headers)
    else:
        texts = asked.input or ""
        parsed = _prompts(asked.model, _list(texts))
        parsed = replace(parsed, fields=tuple({"prompt": name} for name in _names("input", texts)))
    shape = ScoresShape(asked.use_activation is not False, asked.logits)
    if asked.labels is None:
        if asked.logits:
            raise bad_field("logits", "they are those of labels; name some, or leave it out")
        one = labelled(parsed, (), asked.top_logprobs)
        drawn = replace(
            one.generate.sampling,
            temperature=asked.temperature or 0.0,
            seed=asked.seed,
            max_tokens=1,
            ignore_eos=True,
            shows_special=True,
        )
        return replace(one, generate=replace(one.generate, sampling=drawn), labels=(), scores=shape)
    parsed = labelled(parsed, asked.labels, asked.top_logprobs)
    if parsed.answers * len(asked.labels) > MOST_SCORES:
        raise bad_field("labels", f"at most {MOST_SCORES} texts are scored in a request; send several")
    return replace(parsed, scores=shape)


def parse_score(body: bytes, headers: Mapping[str, str]) -> ParsedRequest:
    """Read a body of /v1/score. Raises InvalidRequest."""
    asked = decode(_score, body)
    (name, given), (other, others) = _sides(asked)
    first, second, names = _list(given), _list(others), _names(name, given)
    if len(first) == 1:
        # A pair each, so that a bad text is an error of its own.
        first, names = first * len(second), names * len(second)
    if len(first) != len(second):
        raise bad_field(other, f"as many as {name} are needed, {len(first)}, or one of {name}")
    fields = zip(names, _names(other, others), strict=True)
    return replace(
        _prompts(asked.model, first),
        labels=tuple((text,) for text in second),
        fields=tuple({"prompt": prompt, "labels.0": label} for prompt, label in fields),
    )


def _sides(asked: ScoreBody) -> list[tuple[str, str | list[str]]]:
    """Return name and texts of both sides. Raises InvalidRequest where one is missing or a third is given."""
    given = {name: getattr(asked, name) for name in dict.fromkeys(chain(*_PAIRS))}
    given = {name: texts for name, texts in given.items() if texts is not UNSET}
    pair = max(_PAIRS, key=lambda pair: len(given.keys() & {*pair}))
    for name in pair:
        if name not in given:
            raise bad_field(name, "this field is required")
    if more := given.keys() - {*pair}:
        raise bad_field(min(more), f"the texts are those of {' and '.join(pair)} already; leave it out")
    return [(name, given[name]) for name in pair]


def labelled(parsed: ParsedRequest, labels: Sequence[str], top: int = 0) -> ParsedRequest:
    """Have each prompt of `parsed` answered by each of `labels`. Raises InvalidRequest."""
    if len(set(labels)) < len(labels):
        raise bad_field("labels", "each may stand there once")
    prompt = parsed.generate.prompt
    if isinstance(prompt, chat.Conversation):
        # A label is no thought: the answer begins at once, unless the request says otherwise.
        prompt = replace(prompt, thinking=bool(prompt.thinking))
    sampling = replace(SAMPLING, logprobs=top)
    generate = replace(parsed.generate, prompt=prompt, sampling=sampling, format=None)
    prompts = 1 + len(parsed.more_prompts)
    return replace(parsed, stream=False, n=1, generate=generate, labels=(tuple(labels),) * prompts)


def without_top(body: bytes) -> bytes:
    """Return a body of labels and messages as a chat's, where `top_logprobs` would need `logprobs`."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields.pop("top_logprobs", None)
    return msgspec.json.encode(fields)


SAMPLING = chat.Sampling(temperature=0.0, logprobs=0)


def _prompts(model: str | None, prompts: Sequence[str]) -> ParsedRequest:
    first, *more = [chat.RawPrompt(text) for text in prompts]
    generate = chat.GenerateRequest(first, sampling=SAMPLING)
    return ParsedRequest(model or "", stream=False, generate=generate, more_prompts=tuple(more))


def _list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _names(field: str, texts: str | list[str]) -> list[str]:
    """Return each text's name in errors."""
    return [field] if isinstance(texts, str) else [f"{field}.{index}" for index in range(len(texts))]


# --------------------------------------------------------------------------- answers


class Score(msgspec.Struct, frozen=True):
    """A label's score. `logprob`: natural logarithm of the label's probability as the answer's beginning,
    over its `tokens`.

    share  of the probability of all labels together
    logit  of its first token
    """

    label: str
    logprob: float
    tokens: int
    share: float
    logit: float


class Scores:
    """Takes the events of a `labelled` request, and has the scores of each prompt. `labels`: its own."""

    def __init__(self, labels: Sequence[Sequence[str]]):
        self._labels = labels
        self._scored: dict[int, chat.Scored] = {}
        self._failed: dict[int, OmlxdError] = {}
        self.usage = chat.Usage()

    def event(self, event: chat.Event) -> None:
        if isinstance(event, chat.Finished):
            self.usage = replace(event.usage, decode_s=0.0)  # Labels are given, and nothing is decoded.
        elif isinstance(event, chat.ChoiceEvent):
            if isinstance(event.event, chat.Scored):
                self._scored[event.index] = event.event
            elif isinstance(event.event, chat.Failed):
                self._failed[event.index] = OmlxdError.from_event(event.event)

    def top(self, index: int) -> list[TopLogprob]:
        """Return the tokens that would likeliest begin an answer to a prompt, as many as asked for."""
        return top_logprobs(self._scored[index].likeliest)

    def __iter__(self) -> Iterator[list[Score] | OmlxdError]:
        """Yield the scores of each prompt, in the order of its labels, or its error."""
        for index, labels in enumerate(self._labels):
            yield self._failed.get(index) or _scores(labels, self._scored[index])


def _scores(labels: Sequence[str], scored: chat.Scored) -> list[Score]:
    sums = [math.fsum(tokens) for tokens in scored.logprobs]
    parts = [math.exp(value - max(sums)) for value in sums]
    return [
        Score(label, value, len(tokens), part / sum(parts), logit)
        for label, value, tokens, part, logit in zip(
            labels, sums, scored.logprobs, parts, scored.logits, strict=True
        )
    ]


class Classification(msgspec.Struct):
    """A prompt's classification. `label`: the likeliest. `probs`: of the labels in the request's order;
    `logprobs`: before they are set against each other; `logits`: of the labels' first tokens, before the
    softmax over all tokens.
    """

    index: int
    label: str | UnsetType = UNSET
    probs: list[float] | UnsetType = UNSET
    num_classes: int | UnsetType = UNSET
    logprobs: list[float] | UnsetType = UNSET
    logits: list[float] | UnsetType = UNSET
    top_logprobs: list[TopLogprob] | UnsetType = UNSET
    """Likeliest tokens without labels: `label` is the drawn one, of which `probs` and `logprobs` are."""
    error: OpenAIDetail | UnsetType = UNSET


class PairScore(msgspec.Struct):
    """A pair's score: of `text_2` after `text_1`, the geometric mean of its tokens' probabilities."""

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
        self._drawn: list[list[chat.Event]] = [[] for _ in range(0 if parsed.labels else parsed.answers)]

    def event(self, event: chat.Event) -> None:
        self._scores.event(event)
        if self._drawn:
            of_choice = isinstance(event, chat.ChoiceEvent)
            if of_choice or len(self._drawn) == 1:
                self._drawn[event.index if of_choice else 0].append(event.event if of_choice else event)

    def response(self) -> bytes:
        fields = self._id, self._created, self._parsed.model, usage_body(self._scores.usage)
        if self._pairs:
            return msgspec.json.encode(PairScores(*fields, data=self._pair_scores()))
        data = [self._classification(index, scores) for index, scores in enumerate(self._scores)]
        data += [self._next_token(index, events) for index, events in enumerate(self._drawn)]
        return msgspec.json.encode(Classifications(*fields, data=data))

    def _pair_scores(self) -> list[PairScore]:
        data: list[PairScore] = []
        for index, scores in enumerate(self._scores):
            if isinstance(scores, OmlxdError):
                data.append(PairScore(index, error=openai_detail(scores)))
            else:
                (score,) = scores
                data.append(PairScore(index, math.exp(score.logprob / score.tokens)))
        return data

    def _next_token(self, index: int, events: list[chat.Event]) -> Classification:
        for event in events:
            if isinstance(event, chat.Failed):
                return Classification(index, error=openai_detail(OmlxdError.from_event(event)))
        said = [event for event in events if isinstance(event, chat.TextDelta)]
        drawn = next((each for event in said for each in event.logprobs), None)
        if drawn is None:  # A tag, which is no text.
            return Classification(index, "".join(event.text for event in said))
        value = [drawn.logprob]
        probs = [math.exp(drawn.logprob)] if self._parsed.scores.activated else value
        row = Classification(index, drawn.token, probs, 1, value)
        if self._parsed.generate.sampling.logprobs:
            row.top_logprobs = top_logprobs(drawn)
        return row

    def _classification(self, index: int, scores: list[Score] | OmlxdError) -> Classification:
        if isinstance(scores, OmlxdError):
            return Classification(index, error=openai_detail(scores))
        shape, best = self._parsed.scores, max(scores, key=lambda score: score.logprob)
        logprobs = [score.logprob for score in scores]
        probs = [score.share for score in scores] if shape.activated else logprobs
        row = Classification(index, best.label, probs, len(scores), logprobs)
        if shape.logits:
            row.logits = [score.logit for score in scores]
        if self._parsed.generate.sampling.logprobs:
            row.top_logprobs = self._scores.top(index)
        return row
