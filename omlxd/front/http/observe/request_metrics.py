"""Requests as their clients see them: latencies and outcomes, for `/metrics`.

Times are taken where events arrive from the engine, so a client that reads slowly is not measured.
Labels are model ids, never a client's own words: a series a misspelt name would grow without bound. A request
that is refused before its model was found has "".
"""

from __future__ import annotations

import time
from types import TracebackType

from prometheus_client.core import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics import disable_created_metrics

from ....chat import Event, Failed, Finished, Progress, ReasoningDelta, TextDelta, ToolCallDelta, Usage
from ....errors import OmlxdError
from .last_hour import LastHour

# The three lists are vLLM's (v1/metrics/loggers.py), so that its dashboards' quantiles mean the same.
TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
SAME_STEP_S = 0.0002
"""Seconds between events of one decode step: a tag that ended releases held text, say."""

_REASONS = {"stop": "stop", "stop_sequence": "stop", "tool_calls": "stop", "length": "length"}
"""Our outcome → vLLM's; a client that goes away is its `abort`, everything else its `error`."""

MODEL = "model_name"


class Requests:
    """The instruments, in `registry`."""

    def __init__(self, registry: CollectorRegistry):
        disable_created_metrics()

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help, [MODEL], registry=registry, buckets=buckets)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "From request to first token.", TTFT_S)
        self._gap = histogram("vllm:inter_token_latency_seconds", "Between two pieces of text.", TOKEN_S)
        self._pace = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time a token after the first.", TOKEN_S
        )
        self._duration = histogram(
            "vllm:e2e_request_latency_seconds", "From request to end, of those that ended well.", REQUEST_S
        )
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._output = histogram("vllm:request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._success = Counter(
            "vllm:request_success",
            "Requests handed to a model that ended, by reason; abort: the client went away.",
            [MODEL, "finished_reason"],
            registry=registry,
        )
        self._outcomes = Counter(
            "omlxd_requests",
            "Requests that ended: ok, disconnected, or the error's code. No model_name: refused before its "
            "model was found. Those with a wrong key are not counted.",
            [MODEL, "outcome"],
            registry=registry,
        )
        self._models: set[str] = set()
        self.last_hour = LastHour()

    def show_model(self, model_id: str) -> None:
        """Show the series of a model from its start, so that a first request counts as a rise."""
        if model_id in self._models:
            return
        self._models.add(model_id)
        for each in (self._ttft, self._gap, self._pace, self._duration, self._prompt, self._output):
            each.labels(model_id)
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model_id, reason)
        for outcome in ("ok", "disconnected"):
            self._outcomes.labels(model_id, outcome)

    def refused(self, model_id: str, error: OmlxdError) -> None:
        """Count a request without a model; `model_id` "": unknown."""
        self._outcomes.labels(model_id, error.code).inc()

    def watch(self, model_id: str, began: float) -> RequestWatch:
        """Watch one request; `began` is monotonic time."""
        return RequestWatch(self, model_id, began)

    def _finished(self, watch: RequestWatch, event: Finished, now: float) -> None:
        model, usage = watch.model_id, event.usage
        first = watch.first
        if first is None and usage.completion_tokens:
            # A call comes at its end: only the engine saw its first token.
            first = min(now, watch.began + usage.ttft_s)
            self._ttft.labels(model).observe(first - watch.began)
        if first is not None and usage.completion_tokens > 1:
            self._pace.labels(model).observe((now - first) / (usage.completion_tokens - 1))
        self._duration.labels(model).observe(now - watch.began)
        self._prompt.labels(model).observe(usage.prompt_tokens)
        self._output.labels(model).observe(usage.completion_tokens)
        self.last_hour.add(usage, None if first is None else first - watch.began)

    def _ended(self, model_id: str, outcome: str, reason: str) -> None:
        self._outcomes.labels(model_id, outcome).inc()
        self._success.labels(model_id, reason).inc()


class RequestWatch:
    """Times one request: a context around it, and `event` for each event as it arrives."""

    __slots__ = (
        "_gap",
        "_last",
        "_outcome",
        "_owner",
        "_prompt",
        "_reason",
        "_ttft",
        "began",
        "first",
        "model_id",
    )

    def __init__(self, owner: Requests, model_id: str, began: float):
        self._owner = owner
        self.model_id = model_id
        self.began = began
        self.first: float | None = None
        self._prompt: Progress | None = None
        self._last = 0.0
        self._outcome, self._reason = "disconnected", "abort"
        self._gap = owner._gap.labels(model_id)
        self._ttft = owner._ttft.labels(model_id)

    def event(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, (TextDelta, ReasoningDelta, ToolCallDelta)):
            if self.first is None:
                self.first = now
                self._ttft.observe(now - self.began)
            elif now - self._last > SAME_STEP_S:
                self._gap.observe(now - self._last)
            self._last = now
        elif isinstance(event, Progress):
            if self._prompt is None:
                self._prompt = event  # It says what was restored.
        elif isinstance(event, Finished):
            self._outcome, self._reason = "ok", _REASONS[event.reason]
            self._owner._finished(self, event, now)
        elif isinstance(event, Failed):
            self._outcome, self._reason = event.code, "error"

    def __enter__(self) -> RequestWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OmlxdError):
            self._outcome, self._reason = error.code, "error"
        elif isinstance(error, Exception) and self._outcome == "disconnected":
            self._outcome, self._reason = "internal", "error"
        if self._outcome == "disconnected":
            usage = Usage()
            if (known := self._prompt) is not None:
                usage = Usage(known.total, known.done - known.cold, known.cold)
            self._owner.last_hour.add(usage, None if self.first is None else self.first - self.began)
        self._owner._ended(self.model_id, self._outcome, self._reason)
