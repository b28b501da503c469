"""Writes the answers to questions, as TypeSafe's System One, OpenAI's Decisions or mlx-vlm has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import msgspec

from ... import chat
from ...errors import OmlxdError
from ..openai.scores import Scores
from ..responses.objects import UsageBody, usage_body
from .questions import Question, confidence, expected
from .request import DecisionsRequest


class _Tagged(msgspec.Struct, tag_field="type"):
    pass


# --------------------------------------------------------------------------- System One


class NoulAnswer(_Tagged, tag="noul"):
    """`noul`: the probability of yes."""

    noul: float


class ChoiceAnswer(_Tagged, tag="choice"):
    choice: str
    probabilities: dict[str, float]
    confidence: float


class ScoreAnswer(_Tagged, tag="score"):
    """`score`: the expected level, from 0; `legend`: the levels' texts."""

    score: float
    legend: dict[str, str]
    probabilities: dict[str, float]
    confidence: float


class SystemOneAnswer(msgspec.Struct):
    model: str
    answers: dict[str, Union[NoulAnswer, ChoiceAnswer, ScoreAnswer]]
    usage: UsageBody


def _systemone(question: Question, each: Sequence[float]) -> NoulAnswer | ChoiceAnswer | ScoreAnswer:
    if question.kind == "noul":
        return NoulAnswer(each[0])
    if question.kind == "choice":
        return ChoiceAnswer(str(_best(question, each)), _by_value(question, each), confidence(each))
    return ScoreAnswer(expected(each), _legend(question), _by_level(each), confidence(each))


# --------------------------------------------------------------------------- mlx-vlm


class _Metadata(msgspec.Struct, omit_defaults=True):
    """`confidence`: the likeliest option's probability. `legend`: of a score alone."""

    confidence: float
    legend: dict[str, str] | None = None


class BoolAnswer(_Tagged, tag="bool"):
    value: bool
    probability: float


class ValueAnswer(_Tagged, tag="choice"):
    value: str
    probabilities: dict[str, float]
    metadata: _Metadata


class LevelAnswer(_Tagged, tag="score"):
    value: float
    probabilities: dict[str, float]
    metadata: _Metadata


def _mlx_vlm(question: Question, each: Sequence[float]) -> BoolAnswer | ValueAnswer | LevelAnswer:
    if question.kind == "noul":
        return BoolAnswer(each[0] >= 0.5, each[0])
    if question.kind == "choice":
        best = str(_best(question, each))
        return ValueAnswer(best, _by_value(question, each), _Metadata(max(each)))
    return LevelAnswer(expected(each), _by_level(each), _Metadata(max(each), _legend(question)))


# --------------------------------------------------------------------------- OpenAI


class PredicateAnswer(_Tagged, tag="predicate"):
    name: str | None
    probability: float


class ValueProbability(msgspec.Struct):
    value: Union[str, bool]
    probability: float


class ChosenAnswer(_Tagged, tag="choice"):
    name: str | None
    choice: Union[str, bool]
    probabilities: list[ValueProbability]
    confidence: float


class LevelProbability(msgspec.Struct):
    value: int
    label: str
    probability: float


class ScaleAnswer(_Tagged, tag="score"):
    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float


class Decision(msgspec.Struct):
    """The answer of /v1/decisions: to a list of questions a list, to an object of them an object."""

    model: str
    answers: Union[
        list[Union[PredicateAnswer, ChosenAnswer, ScaleAnswer]],
        dict[str, Union[BoolAnswer, ValueAnswer, LevelAnswer]],
    ]
    usage: UsageBody


def _openai(question: Question, each: Sequence[float]) -> PredicateAnswer | ChosenAnswer | ScaleAnswer:
    name = question.name
    if question.kind == "noul":
        return PredicateAnswer(name, each[0])
    if question.kind == "choice":
        options = [ValueProbability(*pair) for pair in zip(question.values, each, strict=True)]
        return ChosenAnswer(name, _best(question, each), options, confidence(each))
    levels = [
        LevelProbability(at, str(label), one)
        for at, (label, one) in enumerate(zip(question.values, each, strict=True))
    ]
    return ScaleAnswer(name, expected(each), levels, confidence(each))


# --------------------------------------------------------------------------- all of them


def _best(question: Question, each: Sequence[float]) -> str | bool:
    return question.values[max(range(len(each)), key=each.__getitem__)]


def _by_value(question: Question, each: Sequence[float]) -> dict[str, float]:
    return {str(value): one for value, one in zip(question.values, each, strict=True)}


def _by_level(each: Sequence[float]) -> dict[str, float]:
    return {str(level): one for level, one in enumerate(each)}


def _legend(question: Question) -> dict[str, str]:
    return {str(level): str(told) for level, told in enumerate(question.values)}


class DecisionsCollector:
    """`sse.Collector` of decisions. A question that can't be asked refuses the request."""

    def __init__(self, parsed: DecisionsRequest):
        self._parsed, self._scores = parsed, Scores(parsed.labels)

    def event(self, event: chat.Event) -> None:
        self._scores.event(event)

    def response(self) -> bytes:
        asked = self._parsed
        told: list[tuple[Question, tuple[float, ...]]] = []
        for question, scores in zip(asked.questions, self._scores, strict=True):
            if isinstance(scores, OmlxdError):
                raise scores
            told.append((question, question.probabilities(scores)))
        made: Any = SystemOneAnswer if asked.shape == "systemone" else Decision
        write: Any = {"systemone": _systemone, "mlx-vlm": _mlx_vlm, "openai": _openai}[asked.shape]
        answers = [(question.name, write(question, each)) for question, each in told]
        listed: Any = [each for _, each in answers] if asked.shape == "openai" else dict(answers)
        return msgspec.json.encode(made(asked.model, listed, usage_body(self._scores.usage)))
