"""Backends of attention: one interface for MLX's own, and for kernels that stand beside it (cuda/).

The road of a Mac (`runtime`, `attention`, `cache`, `model`) asks `current()` and imports no backend but MLX's
own, whose answers are the defaults of `AttentionBackend`. A package that has another registers it, by the
name of the device that it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from ....wire import Kernel
from ..runtime.device import backend as device
from . import by_rows, row_costs
from .kv_spec import KVSpec


class AttentionCall(NamedTuple):
    """One call of attention by a model. Its result is (rows, heads, new tokens, width).

    queries       (rows, heads, new tokens, width)
    keys, values  (rows, KV heads, tokens, width) that a cache gave out; packed: lists of parts
    cache         None: the layer reads what another one's cache gave out
    sinks         (heads,)
    """

    queries: mx.array
    keys: Any
    values: Any
    cache: Any
    scale: float
    mask: Any
    sinks: mx.array | None = None


class DecodeStep(Protocol):
    """Computes decode steps of one model in another way than its own forward.

    compiles  whether the newest call was the first of its shape
    most_new  tokens of a row in a call, at most
    """

    compiles: bool
    most_new: int

    def __call__(
        self, tokens: mx.array, cache: Any, steps: int, counts: Sequence[int] = ()
    ) -> mx.array | None:
        """Return the logits of `tokens` (rows, n); None: the model's own forward must compute them.

        steps   that the batch has done since its rows changed
        counts  tokens of each row, where `tokens` is (any,): those of the first row, of the second, and so
                on, then what has no meaning
        """

    def most_tokens(self, cache: Any) -> int:
        """Return the most tokens, of all rows, of a call with the bits of steps; 0: none has them."""
        return 0


class OwnForward(DecodeStep):
    """Leaves every step to the model's own forward."""

    compiles = False
    most_new = 1

    def __call__(
        self, tokens: mx.array, cache: Any, steps: int, counts: Sequence[int] = ()
    ) -> mx.array | None:
        return None


class AttentionBackend(Protocol):
    """Attention kernels, and the facts of their device that the engine needs. Subclass it: the defaults are
    those of MLX's own attention; `MlxBackend` measures beside whether rows by themselves pay.

    pads_last_chunks  last chunks of several prompts may share a forward, padded to the longest
    compiles_late     MLX compiles kernels in the requests that need them first: a load rehearses some
    views_in_place    Python's view of an array is the array; else the array moves to where Python reads it
    memory_reserve    share of the memory that stays free
    uneven_up_to      tokens up to which a batch's arrays are no multiple of `GROW_STEP`; 0: all are one
    gathered_multiple  of which each side of a matrix in a gathered product must be one
    equal_segments    segments that rows share are of equal length
    compares_rows     a load compares rows of a batch with what each has alone
    writes_rows       kernels put new tokens into rows' arrays, which MLX does not see
    loads_beside_cpu  a load leaves cores of the processor idle
    own_memory        arrays live in the device's own memory, whose free bytes other programs do not see
    gpu_faults        what an error says after which its process must compute nothing more: Metal's
    """

    name: str
    pads_last_chunks: bool = True
    compiles_late: bool = False
    views_in_place: bool = True
    memory_reserve: float = 0.02
    uneven_up_to: int = 0
    gathered_multiple: int = 1
    equal_segments: bool = False
    compares_rows: bool = False
    writes_rows: bool = False
    loads_beside_cpu: bool = False
    own_memory: bool = False
    gpu_faults: Sequence[str] = ("[METAL] Command buffer execution failed", "SubmissionsIgnored")

    def install(self) -> None:
        """Patch mlx-lm as the kernels need it. Called at each load, before the model is read."""

    def forward(self, call: AttentionCall) -> mx.array | None:
        """Attend to KV of a cache that does not attend by itself; None: MLX's own attention must."""
        return None

    def forward_row(self, call: AttentionCall) -> mx.array | None:
        """Attend with one row of a batch whose rows keep arrays of their own (`OwnRowsKVCache`); None: MLX's
        own must. A kernel that reads all rows in one launch has a `row_batch` instead."""
        return self.forward(call)

    def over_segments(self, call: AttentionCall) -> mx.array | None:
        """Attend with one row to its segments, and to its tail, which `keys` and `values` are; None: MLX's
        own products must. `cache` is a `SequenceKVCache`, and the mask hides what comes after a token."""
        return None

    def before_weights(self, model: Any) -> None:
        """Prepare the process before MLX computes, or reads the weights of `model`."""

    def beside_weights(self, model: Any) -> None:
        """Prepare kernels for `model` on another thread while its weights are read."""

    def prepare(self, model: Any) -> None:
        """Check and install what replaces modules of `model`, whose weights are read."""

    def warm_up(self, model: Any) -> None:
        """Compile and check, in no request, what a batch needs. Called last, for models that batch."""

    def kernel_metrics(self) -> dict[str, float]:
        """Return what loads chose among the kernels, by names of engine/server/metrics.py."""
        return {}

    def kernels(self) -> tuple[Kernel, ...]:
        """Return what loads judged."""
        return ()

    def why_not_shared(self) -> str:
        """Return why steps of the newest load do not read segments; "": they do, or nothing is known."""
        return ""

    def judge_sample(self, name: str) -> list[str]:
        """Judge a kernel at a shape of common models, and return a line for each verdict. `name`: one of
        engine/server/measure/attention.py."""
        return []

    def decode_step(self, model: Any) -> DecodeStep:
        """Return the `DecodeStep` of `model`, which keeps what it compiles."""
        return OwnForward()

    def remembered(
        self, what: str, model: Any, depends: tuple[object, ...], check: Callable[[], bool]
    ) -> bool:
        """Return the result of `check`, or that of an earlier load of `model` on this machine with the same
        `what` and `depends`. Raises what `check` raises."""
        return check()

    def rows_pay(self) -> bool:
        """Whether a batch is better off with rows that keep arrays of their own."""
        return True

    def rows_pay_for(self, lengths: Sequence[int], are_apart: bool) -> bool:
        """Whether such rows are better off by themselves with these lengths. `are_apart`: they keep arrays of
        their own now."""
        return True

    def reads_rows(self, model: Any, shares: bool) -> bool:
        """Whether steps of `model` read such rows; `shares`: behind segments, too."""
        return True

    def shares_prefix(self, model: Any, tokens: int, how: Any) -> bool:
        """Whether rows of `model` may share KV in segments of so many tokens, packed as `how` says, or not
        (None)."""
        return True

    def steps_read_segments(self, model: Any) -> bool:
        """Whether steps of `model` read segments faster than MLX's own products do."""
        return False

    def row_batch(self, rows: Sequence[Any], spec: KVSpec) -> Any | None:
        """Return a layer of a batch, a `RowBatch`, of `rows`, the caches of one sequence each; None: that of
        cache/rows.py serves. `spec` says what each keeps. Raises RuntimeError for rows that the
        backend can't read."""
        return None

    def joins_alone(self, row: Any) -> bool:
        """Whether a row alone is better off in a batch. `row`: a layer of its cache."""
        return False

    @property
    def shares_prefixes(self) -> bool:
        """Whether sequences share prefixes unless the owner says otherwise."""
        return device() == "cpu"

    @property
    def masked_cost(self) -> float:
        """How many times the KV bytes a batch of unequal rows costs."""
        return 1.0

    def reads_own_rows(self) -> bool:
        """Whether attention reads no padding of a joint batch."""
        return False

    def use_kernel_folder(self, folder: Path, tries: int = 2) -> None:
        """Keep kernels and passed checks in `folder`, whose parent exists. Call before MLX computes.

        tries  processes that may end as they judge a kernel, before it is left out
        """

    def stop_judging(self) -> None:
        """Note that somebody ends this process, should it be judging a kernel. In a signal's handler, too."""

    def chunk(self, *, final: bool) -> AbstractContextManager[None]:
        """Surround a forward: `final` for a prompt's last chunk or a decode step, else a chunk before."""
        return nullcontext()

    def trim_memory(self) -> None:
        """Give back what was freed, where memory is short."""

    def free_memory(self) -> int | None:
        """Return the free bytes of the device's memory; None: MLX's figures tell them."""
        return None

    def keep_on_host(self, view: memoryview) -> str:
        """Keep the memory of `view` with the host, mapped by the device. Returns why not; "": it is."""
        return ""

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""

    def check_work(self) -> None:
        """Raise the GPU fault that this thread's work met and of which MLX has not told yet. Call it before
        results are kept where they outlive the process.

        Metal: evaluated arrays may be those of a command buffer that failed, until its handler has run.
        """
        if device() == "metal":
            mx.synchronize()

    def fault_help(self, fault: str) -> str:
        """Return a sentence about what helps against GPU faults such as `fault`."""
        if "Insufficient Memory" in fault:
            return "The GPU's memory ran out: a smaller model, or a shorter context, takes less."
        return (
            "macOS's GPU watchdog ends work that holds up an active display. It helps to let the display "
            "sleep, to end other programs that compute on the GPU, or to start omlxd with "
            "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 in its environment (as a service: in that of `omlxd service "
            "install`)."
        )


class MlxBackend(AttentionBackend):
    """MLX's own attention, on a CPU and on Metal."""

    name = "mlx"

    def forward(self, call: AttentionCall) -> mx.array | None:
        return by_rows.attend(*call)

    def forward_row(self, call: AttentionCall) -> mx.array | None:
        return None  # cache/rows.py knows which way pays.

    def rows_pay(self) -> bool:
        return row_costs.pays()

    def rows_pay_for(self, lengths: Sequence[int], are_apart: bool) -> bool:
        return row_costs.pays_for(lengths, are_apart)


_made: dict[str, Callable[[], AttentionBackend]] = {}
_current: AttentionBackend | None = None


def register(of_device: str, make: Callable[[], AttentionBackend]) -> None:
    """Have `make` give the backend of a device, named as `device.backend` names it."""
    _made[of_device] = make


def current() -> AttentionBackend:
    """Return the backend of MLX's default device, for which MLX is asked once."""
    global _current
    if _current is None:
        _current = _made.get(device(), MlxBackend)()
    return _current


def use_mlx_alone() -> None:
    """Have `current()` give MLX's own attention from now on, on a CPU or on Metal. Call before a load."""
    global _current
    _current = MlxBackend()
