"""Kernels with one fault each, which a kernel's check must find."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import mlx.core as mx

from .harness import MetalError
from .source import Kernel

K = TypeVar("K", bound=Kernel)


def mutant(kernel: K, old: str, new: str) -> K:
    """Return `kernel` with one text for another at the first place in its source, or else in its header."""
    places = kernel.source.count(old), kernel.header.count(old)
    if not any(places):
        raise LookupError(f"{kernel.name} has no {old!r}")
    source, header = kernel.source, kernel.header
    if places[0]:
        source = source.replace(old, new, 1)
    else:
        header = header.replace(old, new, 1)
    return type(kernel)(kernel.name, kernel.inputs, kernel.outputs, source, header, kernel.writes)  # type: ignore[call-arg]


def survivors(kernel: K, edits: Iterable[tuple[str, str]], check: Callable[[K], object]) -> list[str]:
    """Return the edits whose mutants pass `check`. An AssertionError or a `MetalError` finds one.

    check  called with a mutant; called with `kernel` itself, it passes

    On a Mac no mutant runs: its GPU has no fences.
    """
    check(kernel)
    if mx.metal.is_available():
        return []
    return [f"{old!r} -> {new!r}" for old, new in edits if not _is_found(mutant(kernel, old, new), check)]


def _is_found(some: K, check: Callable[[K], object]) -> bool:
    try:
        check(some)
    except MetalError as error:
        if "does not compile" in str(error):
            raise
        return True
    except AssertionError:
        return True
    return False
