"""What CUDA kernels leave on disk: machine code, and which checks passed, so that only a machine's first load
compiles and checks.

| below the folder | is                                         | belongs to                               |
|------------------|--------------------------------------------|------------------------------------------|
| `mlx-DIGEST/`    | what MLX compiles at a kernel's first use  | MLX's version, driver, GPU               |
| `code/`          | machine code of our kernels                | the source, NVRTC's version, the GPU     |
| `checks.json`    | results of checks that passed              | all of these, this package's own files,  |
|                  |                                            | and what each check names                |

MLX takes 3 to 4 seconds for a kernel on an H100's host, in whichever request meets it first. Its own folder
is one of the temporary ones, which a restart of the machine empties. It reads what it finds there unchecked,
so a file that a killed process left half-written is removed before MLX looks. Without a folder, or where it
can't be written, everything is compiled and checked anew. Nothing here runs on Metal or a CPU.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from .....common.files import read_small, write_atomic
from . import driver as cuda_driver
from . import nvrtc

log = logging.getLogger(__name__)
T = TypeVar("T")

VARIABLE = "MLX_PTX_CACHE_DIR"
"""MLX reads it when it first compiles a kernel. A user's own value stays."""

_folder: Path | None = None
_passed: dict[str, Any] = {}
_made: dict[str, Future[bytes]] = {}
"""By its source, of this process."""
_lock = threading.Lock()


def use_folder(folder: Path) -> None:
    """Keep kernels and checks in `folder`, whose parent must exist, from now on. Call before MLX computes."""
    global _folder
    try:
        own = folder / f"mlx-{_digest(_machine())}"
        for each in (folder, folder / "code", own):
            each.mkdir(mode=0o700, exist_ok=True)
        remove_broken(own)
    except Exception as error:  # A driver or an NVRTC of another kind, too: `load` says more of those.
        log.info("kernels are compiled anew at each start: %s", error)
        return
    os.environ.setdefault(VARIABLE, str(own))
    _folder = folder
    _passed.update(_read(folder / "checks.json"))


def machine_code(source: str) -> bytes:
    """A cubin for this machine's GPU. Raises CompileError, DriverError."""
    return code(source, lambda: nvrtc.compiled(source, f"sm_{cuda_driver.architecture()}"))


def code(source: str, compile: Callable[[], bytes]) -> bytes:
    """The machine code of `source`: kept, or what `compile` makes. Raises what that raises.

    Any thread. Whoever asks for what another compiles waits for that.
    """
    with _lock:
        made = _made.get(source)
        if is_first := made is None:
            made = _made[source] = Future[bytes]()
    if is_first:
        try:
            made.set_result(_kept_or(source, compile))
        except BaseException as error:
            made.set_exception(error)
    return made.result()


def _kept_or(source: str, compile: Callable[[], bytes]) -> bytes:
    folder = _folder
    if folder is None:
        return compile()
    file = folder / "code" / _digest(source, _gpu())
    with contextlib.suppress(OSError):
        kept = file.read_bytes()
        if xxhash.xxh3_128_digest(kept[16:]) == kept[:16]:
            return kept[16:]
    made = compile()
    with contextlib.suppress(OSError):
        write_atomic(file, xxhash.xxh3_128_digest(made) + made)
    return made


def remembered(what: str, depends: object, check: Callable[[], T], passed: Callable[[T], bool] = bool) -> T:
    """What `check` gave when it passed on this machine, or gives now.

    depends  what the result depends on beside this package, MLX, driver and GPU; its repr tells
    check    gives what JSON holds. Raises what that raises
    """
    if _folder is None:
        return check()
    key = f"{what} {_digest(repr(depends), _machine(), _sources())}"
    if key in _passed:
        return _passed[key]
    result = check()
    if passed(result):
        _keep(_folder / "checks.json", key, result)
    return result


def knows(what: str, depends: object) -> bool:
    """Whether `remembered` has a result, and checks nothing."""
    return _folder is not None and f"{what} {_digest(repr(depends), _machine(), _sources())}" in _passed


def _keep(file: Path, key: str, result: object) -> None:
    """Write that a check passed, beside what other engines have written meanwhile."""
    with _lock:
        _passed[key] = result
        with contextlib.suppress(OSError):
            write_atomic(file, json.dumps(_read(file) | {key: result}).encode())


def _read(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if isinstance(held := json.loads(read_small(file)), dict):
            return held
    return {}


def remove_broken(folder: Path) -> None:
    """Remove what MLX did not write to its end: it would load it at each start, and fail. Raises OSError."""
    for file in folder.glob("*.ptx"):
        names = file.with_suffix(".txt")
        if not is_whole_elf(file.read_bytes()) or not names.is_file() or not names.stat().st_size:
            file.unlink(missing_ok=True)


def is_whole_elf(data: bytes) -> bool:
    """Whether all tables and sections of a 64-bit ELF file, as machine code is, lie within `data`."""
    if len(data) < 64 or data[:5] != b"\x7fELF\x02":
        return False
    programs, sections = struct.unpack_from("<QQ", data, 32)
    program_bytes, program_count, section_bytes, section_count = struct.unpack_from("<4H", data, 54)
    tables = (programs, program_bytes * program_count), (sections, section_bytes * section_count)
    if any(start + size > len(data) for start, size in tables) or section_bytes < 64:
        return False
    for index in range(section_count):
        (kind,) = struct.unpack_from("<I", data, sections + index * section_bytes + 4)
        start, size = struct.unpack_from("<QQ", data, sections + index * section_bytes + 24)
        if kind != 8 and start + size > len(data):  # SHT_NOBITS has no bytes.
            return False
    return True


def _digest(*parts: str) -> str:
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode())


@cache
def _gpu() -> str:
    return f"{cuda_driver.architecture()} {nvrtc.release()}"


@cache
def _machine() -> str:
    return f"{version('mlx')} {version('mlx-lm')} {cuda_driver.name()} {cuda_driver.release()} {_gpu()}"


@cache
def _sources() -> str:
    """A digest of mlx_adapter's own files: kernels, and what checks them."""
    state = xxhash.xxh3_128()
    for file in sorted(Path(__file__).parents[2].rglob("*")):
        if file.suffix in (".py", ".cu"):
            state.update(file.read_bytes())
    return state.hexdigest()
