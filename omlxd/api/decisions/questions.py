"""A question as the model reads it, and its answer from the scores of labels.

Nothing is generated: of each option a label is scored as the answer's beginning (api/openai/scores.py), and
its share of all labels is the option's probability. The state stands first, so that questions share it.
No label may begin another, or it would have the other's share: names that do are numbered instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from ...chat import Struct
from ...errors import bad_field
from ..openai.scores import Score

Kind = Literal["noul", "choice", "score"]
MOST_OPTIONS = 255
MOST_LABEL_CHARS = 60
"""Characters of a name that is a label itself."""
_YES_AND_NO = (("yes", "Yes"), ("no", "No"))


class Question(Struct, frozen=True):
    """A question about the state.

    name    None: it has none
    text    what the model reads behind the state
    values  of its options, in order: of a noul true and false, of a score its levels' texts
    labels  of each option, the answers that mean it
    """

    name: str | None
    kind: Kind
    text: str
    values: tuple[str | bool, ...]
    labels: tuple[tuple[str, ...], ...]

    @property
    def scored(self) -> tuple[str, ...]:
        return tuple(label for labels in self.labels for label in labels)

    def probabilities(self, scores: Sequence[Score]) -> tuple[float, ...]:
        """Return the probability of each option, from the scores of `scored`."""
        share = {score.label: score.share for score in scores}
        return tuple(sum(share[label] for label in labels) for labels in self.labels)


def noul(name: str | None, asked: str, true: str = "", false: str = "", more: str = "") -> Question:
    """Make a question for yes or no. `true`, `false`: when it is which. `more`: what else is said of it."""
    told = [more, f"yes: {true}" if true else "", f"no: {false}" if false else ""]
    text = _text(asked, told, "Answer yes or no.")
    return Question(name, "noul", text, (True, False), _YES_AND_NO)


def choice(name: str | None, asked: str, options: Sequence[tuple[str | bool, str]], param: str) -> Question:
    """Make a question for one of `options`: their values and descriptions. Raises InvalidRequest."""
    _check_count(len(options), "option", param)
    names = [str(value).lower() if isinstance(value, bool) else value for value, _ in options]
    if "" in names or len({*options_of(options)}) < len(options):
        raise bad_field(param, "each option needs a name of its own")
    told = [f"{each}: {about}" if about else each for each, (_, about) in zip(names, options, strict=True)]
    plain = all(len(each) <= MOST_LABEL_CHARS and each == each.strip() for each in names)
    if plain and not any(after.startswith(each) for each, after in pairwise(sorted(names))):
        lines = [f"- {each}" for each in told]
        text, labels = _text(asked, lines, "Answer with one of these names."), names
    else:
        text, labels = _numbered(asked, told)
    return Question(name, "choice", text, options_of(options), tuple((label,) for label in labels))


def options_of(options: Sequence[tuple[str | bool, str]]) -> tuple[str | bool, ...]:
    return tuple(value for value, _ in options)


def score(name: str | None, asked: str, levels: Sequence[tuple[str, str]], param: str) -> Question:
    """Make a question for a place on a scale: its levels from the lowest, and their descriptions."""
    _check_count(len(levels), "level", param)
    text, labels = _numbered(asked, [f"{level}: {told}" if told else level for level, told in levels])
    return Question(name, "score", text, options_of(levels), tuple((label,) for label in labels))


def confidence(probabilities: Sequence[float]) -> float:
    """Return 1 where one option has all, and 0 where all have the same."""
    count = len(probabilities)
    return (count * max(probabilities) - 1) / (count - 1) if count > 1 else 1.0


def expected(probabilities: Sequence[float]) -> float:
    """Return the expected level, from 0."""
    return sum(level * each for level, each in enumerate(probabilities))


def _check_count(count: int, what: str, param: str) -> None:
    if not 0 < count <= MOST_OPTIONS:
        raise bad_field(param, f"1 to {MOST_OPTIONS} {what}s are needed, not {count}")


def _numbered(asked: str, told: Sequence[str]) -> tuple[str, list[str]]:
    """Return the question's text and its labels: numbers of as many digits each."""
    digits = len(str(len(told) - 1))
    labels = [f"{at:0{digits}}" for at in range(len(told))]
    lines = [f"{label}: {each}" for label, each in zip(labels, told, strict=True)]
    return _text(asked, lines, "Answer with the number."), labels


def _text(asked: str, lines: Sequence[str], how: str) -> str:
    asked = f"Question: {asked}" if asked else ""
    return "\n".join(filter(None, (asked, *lines, how)))
