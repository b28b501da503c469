"""The parts of a measurement, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ....wire import SAMPLE_KERNELS
from . import attention, device, model, reuse
from .engine import Engine, Job
from .timing import Measured


@cache
def _engine(job: Job) -> Engine:
    """Return the engine of this process, whose load no part pays twice."""
    return Engine(job)


PARTS: dict[str, Callable[[Job], Measured]] = {
    "device": lambda job: device.facts(),
    "eval": lambda job: device.evals(),
    "bandwidth": lambda job: device.bandwidth(),
    "room": lambda job: device.room(),
    "decode bandwidth": lambda job: device.decode_bandwidth(),
    "model": lambda job: model.load(_engine(job), job),
    "pass": lambda job: _engine(job).call(lambda: model.passes(_engine(job))),
    "hits": lambda job: reuse.hits(_engine(job)),
    **{f"sdpa {n:,}": lambda job, n=n: attention.decode(n) for n in attention.LENGTHS},
    **{name: lambda job, name=name: attention.kernel(name) for name in SAMPLE_KERNELS},
    "longest kernel": lambda job: attention.longest_kernel(),
}


def run(name: str, job: Job) -> dict[str, Any]:
    """Return what part `name` measured, or how it failed, as JSON has it."""
    try:
        return PARTS[name](job)._asdict()
    except Exception as error:
        return {"error": f"failed: {type(error).__name__}: {error}"}
