"""Fixtures of tests of Metal kernels (tests/support/metal).

    def test_it(on_cpu):                     # omlxd's kernels run on this machine's processor
        got, = KERNEL([x], grid=…, …)        # a call of omlxd's own code, or of a kernel itself
        on_cpu(orders=(0,), all_written=False)   # changes how: harness.run says what there is

    @settings(max_examples=draws(10))        # hypothesis; $METAL_DRAWS=5 looks at five times as many

    assert survivors(KERNEL, [("threadgroup_barrier(mem_flags::mem_threadgroup);", ""), …], check) == []

A test is skipped where there is no C++ compiler. On a Mac the kernels run on its GPU, and are compiled by
`xcrun metal` as well if it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from metal import apple, build, harness
from metal.source import printed


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Have kernels run as C++, in all orders. Call it to change how."""
    from omlxd.engine.mlx_adapter.metal import kernel as module  # Not before --pretend-metal is installed.

    how = dict[str, Any]()
    on_device, on_a_mac = module.run, mx.metal.is_available()
    if not on_a_mac and (why := build.missing()):
        pytest.skip(why)

    def run(some: Any, arrays: Any, template: Any = (), **call: Any) -> list[mx.array]:
        if not on_a_mac:
            return harness.run(some, arrays, template, **call, **how)
        if wrong := apple.refused(printed(some, arrays, template, **call)):
            raise harness.MetalError(f"{some.name}: {wrong}")
        return on_device(some, arrays, template, **call)

    monkeypatch.setattr(module, "run", run)
    yield how.update
