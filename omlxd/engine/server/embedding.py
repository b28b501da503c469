"""What `host.EngineHost` is for a model that embeds: texts in, vectors or scores out, in batches of tokens.

Requests take turns, a batch each, so that a long list of texts holds no short one up.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from ... import wire
from ...chat import Conversation, EmbedRequest, RawPrompt, Vectors
from ...errors import InvalidRequest, bad_field
from .. import mlx_adapter
from ..mlx_adapter.model.embedder import Embedder

BATCH_ROWS = 64
CPU_TOKENS, GPU_TOKENS = 2048, 16_384
"""Of a batch, padding counted."""


class _Job:
    """A request's texts, and what they gave so far. `wanted()`: its client waits. `end()`: it is over."""

    def __init__(
        self,
        message: wire.Embed,
        rows: list[Any],
        wanted: Callable[[], bool],
        end: Callable[[], None],
        most: int,
    ):
        self.end = end
        self.id = message.id
        self._width = message.request.dimensions
        self.wanted = wanted
        self._rows = rows
        self._values: list[np.ndarray | None] = [None] * len(rows)
        self._batches = list(_batches([len(ids) for ids, _ in rows], most))

    @property
    def next_tokens(self) -> int:
        """Tokens of the next batch, padding counted."""
        batch = self._batches[-1]
        return len(batch) * max(len(self._rows[at][0]) for at in batch)

    def step(self, embedder: Embedder) -> bool:
        """Compute a batch. False: that was the last one."""
        batch = self._batches.pop()
        ids, types = zip(*(self._rows[at] for at in batch), strict=True)
        for at, values in zip(batch, embedder.compute(ids, types), strict=True):
            self._values[at] = values
        return bool(self._batches)

    def answer(self) -> wire.Embedded:
        values = np.stack([row for row in self._values if row is not None])
        if width := self._width:
            if width > values.shape[1]:
                raise bad_field("dimensions", f"this model's vectors have {values.shape[1]} numbers")
            values = values[:, :width]
            values = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
        tokens = sum(len(ids) for ids, _ in self._rows)
        data = np.ascontiguousarray(values, dtype="<f4").tobytes()
        return wire.Embedded(self.id, Vectors(data, values.shape[1], tokens))


def _batches(lengths: list[int], most: int) -> Iterator[list[int]]:
    """Indexes of texts, those of like length together: at most `most` tokens a batch, padding counted."""
    batch: list[int] = []
    for at in sorted(range(len(lengths)), key=lambda at: lengths[at]):
        if batch and (len(batch) == BATCH_ROWS or (len(batch) + 1) * lengths[at] > most):
            yield batch
            batch = []
        batch.append(at)
    if batch:
        yield batch


class EmbedderHost:
    """Made on the engine thread, which then calls `run`.

    send        sends a frame
    fail(id, e) tells the client of request `id` what went wrong
    steps       batches computed
    pass_tokens of the newest batch, padding counted
    """

    def __init__(
        self, load: wire.Load, send: Callable[[Any], None], fail: Callable[[int, BaseException], None]
    ):
        self._embedder = Embedder(Path(load.model_path), load.budget.float32)
        self._send = send
        self._fail = fail
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.set_pass_limit(load.pass_limit)
        self.steps = self.pass_tokens = 0
        self.scheduler = self
        embedder = self._embedder
        mlx_adapter.set_limits(embedder.weight_bytes, load.budget)
        self.info = wire.ModelInfo(
            model_id=load.model_id,
            model_type=embedder.model_type,
            context_length=embedder.limit,
            vocab_size=len(embedder.tokenizer),
            weight_bytes=embedder.weight_bytes,
            kv_bytes_per_token=0,
            kv_reuse="a model that embeds keeps no KV",
            namespace="",
            block_size=load.cache.block_size,
            backend=mlx_adapter.backend(),
        )

    # ----------------------------------------------------------------- request threads

    def embed(self, message: wire.Embed, wanted: Callable[[], bool], end: Callable[[], None]) -> None:
        """Tokenise and queue `message`; its answer is sent later, then `end()`. Raises InvalidRequest."""
        request = message.request
        if (request.query is not None) != (self._embedder.kind == "rerank"):
            does = "scores texts: send them to /v1/rerank"
            makes = "makes vectors: send texts to /v1/embeddings"
            raise bad_field("model", f"this model {does if self._embedder.kind == 'rerank' else makes}")
        rows = [self._row(at, text, request) for at, text in enumerate(request.texts)]
        rows += [self._ids(at, ids) for at, ids in enumerate(request.tokens)]
        self._jobs.put(_Job(message, rows, wanted, end, self._most))

    def _row(self, at: int, text: str, request: EmbedRequest) -> tuple[list[int], list[int]]:
        query = request.query
        ids, types = self._embedder.tokens(text) if query is None else self._embedder.tokens(query, text)
        if len(ids) > (limit := self._embedder.limit):
            if not request.truncate:
                where = "input" if query is None else "documents"
                raise bad_field(f"{where}.{at}", f"{len(ids)} tokens, and {limit} are the most")
            ids, types = [*ids[: limit - 1], ids[-1]], [*types[: limit - 1], types[-1]]
        if not ids:
            raise bad_field(f"input.{at}", "a text must not be empty")
        return ids, types

    def _ids(self, at: int, ids: tuple[int, ...]) -> tuple[list[int], list[int]]:
        if not 0 < len(ids) <= self._embedder.limit:
            raise bad_field(f"input.{at}", f"1 to {self._embedder.limit} tokens are needed")
        if not all(0 <= id < self.info.vocab_size for id in ids):
            raise bad_field(f"input.{at}", "a token id is not in this model's vocabulary")
        return list(ids), [0] * len(ids)

    def count(self, prompt: Conversation | RawPrompt, session: str = "", id: int = 0) -> int:
        if isinstance(prompt, Conversation):
            self._refuse()
        return len(prompt.tokens or self._embedder.tokens(prompt.text)[0])

    def start(self, *args: Any) -> NoReturn:
        self._refuse()

    explain = cached_files = cancel = start

    def _refuse(self) -> NoReturn:
        raise InvalidRequest("This model answers no prompts: it embeds or scores texts.", param="model")

    # ----------------------------------------------------------------- the engine thread

    def run(self) -> None:
        """Compute until `stop`."""
        while (job := self._jobs.get()) is not None:
            if not job.wanted():
                continue
            try:
                self.pass_tokens = job.next_tokens
                more = job.step(self._embedder)
                self.steps += 1
                if more:
                    self._jobs.put(job)
                    continue
                self._send(job.answer())
            except Exception as error:
                self._fail(job.id, error)
            job.end()

    def stop(self) -> None:
        self._jobs.put(None)

    # ----------------------------------------------------------------- the service

    def set_pass_limit(self, tokens: int) -> None:
        """Bound the batches of later requests; a longer text has one of its own. Any thread."""
        most = CPU_TOKENS if mlx_adapter.backend() == "cpu" else GPU_TOKENS
        self._most = min(most, tokens or most)

    def set_budget(self, budget: wire.Budget) -> None:
        mlx_adapter.set_limits(self._embedder.weight_bytes, budget)

    def tidy_memory(self, trim: bool, reset_peak: bool) -> None:
        """As `EngineHost` does. Any thread."""
        if trim:
            mlx_adapter.give_memory_back()
        if reset_peak:
            mx.reset_peak_memory()

    @property
    def progress(self) -> int:
        """As the scheduler's. Any thread."""
        return self.steps

    channels = ()
    """It has no counters to tell at its end."""

    def engine_stats(self, id: int = 0) -> dict[str, float]:
        return {}

    def close(self, deadline_s: float) -> None:
        """It has nothing to flush."""
