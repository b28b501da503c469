"""Two cold runs of one prompt, a hit from RAM and a hit from SSD: are they the same?"""

from __future__ import annotations

from ....chat import Event, Finished, GenerateRequest, Sampling, TextDelta
from .engine import Engine, prompt
from .timing import Measured, short

PROMPT, ANSWER, TOP = 600, 16, 20


class Answer:
    """Tokens of an answer, and at each the log-softmax of the likeliest tokens' logits."""

    def __init__(self, events: list[Event]):
        last = events[-1]
        assert isinstance(last, Finished)
        self.usage = last.usage
        drawn = [each for event in events if isinstance(event, TextDelta) for each in event.logprobs]
        self.tokens = [each.raw or each.token for each in drawn]
        self.tops = [[value for _, value in each.top] for each in drawn]

    def beside(self, other: Answer) -> str:
        """Say how near this answer is to `other`, up to the first token that differs."""
        far, equal = 0.0, 0
        for ours, theirs, a, b in zip(self.tops, other.tops, self.tokens, other.tokens, strict=False):
            far = max([far, *(abs(x - y) for x, y in zip(ours, theirs, strict=True))])
            if a != b:
                break
            equal += 1
        count = len(other.tokens)
        tokens = f"the same {count} tokens" if equal == count else f"OTHER TOKENS behind {equal} of {count}"
        return f"{tokens}, {f'logits within {far:.2g}' if far else 'the same logits'}"

    def source(self) -> str:
        """Say where its prompt's KV came from."""
        usage, computed = self.usage, f"{PROMPT} tokens computed in {short(self.usage.prefill_s)}"
        parts = [f"{usage.cached_hot} tokens from RAM"] if usage.cached_hot else []
        parts += [f"{usage.cached_cold} tokens from SSD"] if usage.cached_cold else []
        return f"{' and '.join(parts)} in {short(usage.restore_s)}" if parts else computed


def hits(engine: Engine) -> Measured:
    """Logits are compared by their log-softmax; a hit computes the prompt's last tokens in another chunk."""

    def ask(salt: str) -> Answer:  # KV of another salt is none of its own.
        sampling = Sampling(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=TOP)
        return Answer(engine.ask(GenerateRequest(prompt(engine, PROMPT), sampling, cache_salt=salt)))

    cold, again, hot = ask("one"), ask("two"), ask("one")
    engine.leave_ram()
    answers = (("second cold run", again), ("hot hit", hot), ("cold-tier hit", ask("one")))
    lines = [(name, f"{answer.beside(cold)} ({answer.source()})") for name, answer in answers]
    return Measured([("cold run", f"{cold.source()}, {len(cold.tokens)} tokens of answer"), *lines])
