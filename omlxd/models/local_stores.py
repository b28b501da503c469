"""Models that other programs downloaded to this machine: Ollama, LM Studio, llama.cpp.

A scan reads names, sizes and small files alone, and raises nothing: what can't be read becomes a model with
`trouble`. Layouts: Ollama keeps a manifest a name and blobs by digest, the others keep plain files.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from ..common.files import read_small
from ..config import Settings
from ..errors import ConfigError, ModelError
from .catalog import default_model, describe
from .config.json_files import BrokenJSON, read_json
from .resolve import check_folder, is_gguf, local_path

Store = Literal["ollama", "lmstudio", "llama.cpp"]

MOST_ENTRIES = 20_000
"""Files and folders of one store that are searched."""
MANIFEST_BYTES = 1 << 20
CHECK_S = 60.0
_DEPTH = 5
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_OLLAMA_MODEL = "application/vnd.ollama.image.model"


class LocalModel(msgspec.Struct, kw_only=True):
    """A model in another program's store.

    path     its first GGUF file, or its MLX folder
    format   `gguf` or `mlx`
    type     architecture and most frequent tensor type, as `llama Q4_K`; "" where nobody looked
    trouble  why it can't be used, a sentence; "" if nothing is known against it
    command  what makes it a model of omlxd; "" with a trouble
    """

    name: str
    store: Store
    format: str
    path: str
    disk_bytes: int = 0
    type: str = ""
    trouble: str = ""
    command: str = ""

    @property
    def full_name(self) -> str:
        """Name behind the store's: names of two stores may be equal."""
        return f"{self.store}/{self.name}"


class LocalModels(msgspec.Struct):
    models: list[LocalModel]


class Check(msgspec.Struct):
    """Result of `python -m omlxd.models.gguf.importing --check` for one file."""

    type: str = ""
    trouble: str = ""


def local_models(environ: Mapping[str, str] = os.environ) -> list[LocalModel]:
    """List every model of every store, by store and name. Unchecked: GGUF headers are not read."""
    home = Path(environ.get("HOME") or "~").expanduser()
    models: list[LocalModel] = []
    for root in _ollama_roots(environ, home):
        models += _in_ollama(root)
    for root in _lmstudio_roots(home):
        models += _in_files("lmstudio", root)
    for root in _llama_cpp_roots(environ, home):
        models += _in_files("llama.cpp", root)
    models.sort(key=lambda model: (model.store, model.name))
    unique = list({(model.store, model.name): model for model in reversed(models)}.values())[::-1]
    names = Counter(model.name for model in unique)
    for model in unique:
        if not model.trouble:
            name = model.full_name if names[model.name] > 1 else model.name
            model.command = f"omlxd models import {shlex.quote(name)}"
    return unique


def model_called(name: str, environ: Mapping[str, str] = os.environ) -> LocalModel:
    """Return the model that `name` means: as listed, or behind its store's name. Raises ModelError."""
    models = local_models(environ)
    matching = [
        model for model in models if name in (model.name, model.full_name, model.name.removesuffix(":latest"))
    ]
    if not matching:
        raise ModelError(
            f"There is no GGUF file {name!r}, and no model of that name in the stores of Ollama, LM Studio "
            "and llama.cpp; `omlxd models list --found` lists those that are there."
        )
    if len(matching) > 1:
        names = " or ".join(model.full_name for model in matching)
        raise ModelError(f"More than one model is called {name!r}; write {names}.")
    if matching[0].trouble:
        raise ModelError(f"{name} can't be used: {matching[0].trouble}.")
    return matching[0]


def check_models(models: Sequence[LocalModel]) -> None:
    """Set `type`, and `trouble` where a model would be refused, by reading configs and headers."""
    for model in models:
        if model.format == "mlx" and not model.trouble:
            model.type, model.trouble = _check_folder(Path(model.path))
    files = [model for model in models if model.format == "gguf" and not model.trouble]
    for model, check in zip(files, _read_headers([model.path for model in files]), strict=False):
        model.type, model.trouble = _printable(check.type), _printable(check.trouble)
    for model in models:
        if model.trouble:
            model.command = ""


def _check_folder(folder: Path) -> tuple[str, str]:
    """Return (type, trouble) of an MLX folder."""
    try:
        check_folder(folder)
    except ModelError as error:
        return "", error.message.removesuffix(".")
    described = describe(folder)
    bits = f" {described.bits}-bit" if described.bits else ""
    return _printable(described.family[:40]) + bits, ""


def check_gguf(file: Path) -> None:
    """Raise ModelError unless GGUF file `file` can be imported, as far as its header says."""
    if not file.is_file():
        raise ModelError(f"there is no file {file}.")
    for check in _read_headers([str(file)]):
        if check.trouble:
            raise ModelError(f"{file} can't be imported: {_printable(check.trouble)}.")


def check_default_model(settings: Settings) -> None:
    """Raise ConfigError where the files of `--model` are no model. Uses no network."""
    default = default_model(settings)
    if default is None or default.source not in ("folder", "model-dir"):
        return
    try:
        if is_gguf(default.spec):
            check_gguf(local_path(default.spec))
        elif default.folder is not None:
            check_folder(default.folder)
    except ModelError as error:
        source = settings.sources.get("model", "--model")
        raise ConfigError(f"{source}: {error.message}") from error


def _read_headers(files: Sequence[str]) -> list[Check]:
    """Check each of `files`; [] if that fails: the import itself says what is wrong.

    A program of its own reads them: it needs NumPy, and no file may take this process along.
    """
    if not files:
        return []
    command = [sys.executable, "-m", "omlxd.models.gguf.importing", "--check", *files]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CHECK_S)
        return msgspec.json.decode(done.stdout, type=list[Check])
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError):
        return []


# --------------------------------------------------------------------------- Ollama


class _Layer(msgspec.Struct):
    mediaType: str = ""
    digest: str = ""
    size: int = 0


class _Manifest(msgspec.Struct):
    layers: list[_Layer]


def _ollama_roots(environ: Mapping[str, str], home: Path) -> list[Path]:
    if chosen := environ.get("OLLAMA_MODELS"):
        return [Path(chosen)]
    # The second is the home of Linux's ollama service.
    return [home / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]


def _in_ollama(root: Path) -> Iterator[LocalModel]:
    manifests = root / "manifests"
    for path in _walk(manifests):
        host, *names = path.relative_to(manifests).parts
        if len(names) < 2:
            continue
        tag = names.pop()
        if host != "registry.ollama.ai":
            names.insert(0, host)
        elif names[0] == "library":
            del names[0]
        model = LocalModel(
            name=_printable(f"{'/'.join(names)}:{tag}"), store="ollama", format="gguf", path=""
        )
        try:
            layers = read_json(path, _Manifest, MANIFEST_BYTES).layers
        except OSError as error:
            model.trouble = f"its manifest can't be read: {error.strerror or error}"
        except BrokenJSON:
            model.trouble = "its manifest is damaged"
        else:
            _take_layers(model, root / "blobs", layers)
        yield model


def _take_layers(model: LocalModel, blobs: Path, layers: Sequence[_Layer]) -> None:
    weights = [layer for layer in layers if layer.mediaType == _OLLAMA_MODEL]
    model.disk_bytes = max(0, sum(layer.size for layer in layers))
    digest = _DIGEST.fullmatch(weights[0].digest) if len(weights) == 1 else None
    if not weights:
        # Models of Ollama's cloud have no weights here; those of its MLX engine have a blob a tensor.
        model.trouble = "its weights are not here, or not in one GGUF file"
    elif digest is None:
        model.trouble = "its manifest names no single GGUF file by a sha256 digest"
    else:
        blob = blobs / f"sha256-{digest[1]}"
        model.path, model.trouble = str(blob), _why_no_file(blob)


# --------------------------------------------------------------------------- LM Studio, llama.cpp


def _lmstudio_roots(home: Path) -> list[Path]:
    roots = [home / ".lmstudio", home / ".cache/lm-studio"]
    with contextlib.suppress(OSError, ValueError):
        chosen = Path(read_small(home / ".lmstudio-home-pointer", 4096).decode().strip())
        if chosen.is_absolute():
            roots.insert(0, chosen)
    return list(dict.fromkeys(root / "models" for root in roots))


def _llama_cpp_roots(environ: Mapping[str, str], home: Path) -> list[Path]:
    if chosen := environ.get("LLAMA_CACHE"):
        return [Path(chosen)]
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    return [cache / "llama.cpp", home / "Library/Caches/llama.cpp"]


def _in_files(store: Store, root: Path) -> Iterator[LocalModel]:
    """List a model a GGUF file, the first of a split one, and a model a safetensors folder."""
    files = sorted(_walk(root))
    for path in files:
        if path.suffix.lower() == ".gguf":
            part = _PART.search(path.stem)
            if (part is None or part[1] == "00001") and not path.name.startswith("mmproj"):
                name = path.relative_to(root).with_name(_PART.sub("", path.stem))
                parts = [path] if part is None else [p for p in files if _split(p) == _split(path)]
                yield _of_path(store, name, "gguf", path, parts)
        elif path.name == "config.json":
            weights = [p for p in files if p.parent == path.parent and p.suffix == ".safetensors"]
            if weights and path.parent != root:
                yield _of_path(store, path.parent.relative_to(root), "mlx", path.parent, weights)


def _split(part: Path) -> tuple[Path, str, str]:
    """Return a value that all parts of a split file share, and no other file."""
    return part.parent, _PART.sub("/", part.stem), part.suffix


def _of_path(store: Store, name: Path, format: str, path: Path, files: Sequence[Path]) -> LocalModel:
    model = LocalModel(name=_printable(str(name)), store=store, format=format, path=_printable(str(path)))
    model.trouble = next(filter(None, map(_why_no_file, files)), "")
    if model.path != str(path):
        model.trouble = "its path has characters that can't be printed"
    if not model.trouble:
        model.disk_bytes = sum(os.stat(file).st_size for file in files)
    return model


def _why_no_file(path: Path) -> str:
    try:
        return "" if path.is_file() and os.access(path, os.R_OK) else "its file is missing or can't be read"
    except OSError as error:
        return f"its file can't be read: {error.strerror or error}"


def _walk(root: Path) -> Iterator[Path]:
    """Walk files below `root`, links followed, no folder twice; no more than MOST_ENTRIES."""
    return islice(_files_below(root, _DEPTH, set()), MOST_ENTRIES)


def _files_below(folder: Path, depth: int, seen: set[tuple[int, int]]) -> Iterator[Path]:
    try:
        facts = os.stat(folder)
        entries = sorted(islice(os.scandir(folder), MOST_ENTRIES), key=lambda entry: entry.name)
    except OSError:
        return
    if (facts.st_dev, facts.st_ino) in seen:
        return
    seen.add((facts.st_dev, facts.st_ino))
    for entry in entries:
        if entry.name.startswith("."):
            continue
        try:
            is_folder = entry.is_dir()
        except OSError:  # A link to itself: a file that can't be read.
            is_folder = False
        if not is_folder:
            yield folder / entry.name
        elif depth:
            yield from _files_below(folder / entry.name, depth - 1, seen)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
