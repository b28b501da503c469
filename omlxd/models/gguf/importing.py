"""`python -m omlxd.models.gguf.importing FILE FOLDER`: make a model folder of ours out of a GGUF file.

Prints the folder; progress goes to standard error. Ends with status 1 and one sentence on standard
output when it can't. The folder appears whole or not at all. `--check FILE …` prints a JSON list instead:
what each file holds, and why it can't be imported.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from ...errors import ModelError
from ..builder import end_with_parent, make_private, part_folder, run_builder
from ..config.json_files import BrokenJSON, read_json
from ..local_stores import Check
from ..resolve import IMPORTED
from . import weights
from .architectures import NOT_WEIGHTS, Architecture, architecture_of, config_of, eos_ids, mlx_name
from .header import Header, Tensor, Unfit, read_header
from .tokenizer import write_tokenizer

VERSION = 1
CHUNK_BYTES = 32 << 20
"""Bytes of a file converted at once: about ten times as much memory."""

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes to do."""

_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""llama.cpp's names below `general.sampling`, and those of generation_config.json."""


def import_gguf(
    file: Path,
    folder: Path,
    progress: Progress = lambda done, total: None,
    sampling: Mapping[str, Any] | None = None,
) -> Path:
    """Make `folder` from `file`, unless it was made from this very file. Raises ModelError.

    sampling  for generation_config.json, where the file says nothing else of it
    """
    header = read_header(file)
    facts = {name: str(header.metadata.get(f"general.{name}", "")) for name in ("license", "organization")}
    source = {"version": VERSION, "file": file.name, "identity": _identity(header), **facts}
    if _made_from(folder) == source:
        return folder
    if folder.exists() and _made_from(folder) is None:
        raise ModelError(
            f"{folder} exists and was not made by an import; give the file another name, or move it."
        )
    try:
        architecture, _ = architecture_of(header)
        config = config_of(header)
        with part_folder(folder) as part:
            _check_room(header, part)
            write_tokenizer(header.metadata, header.metadata["general.architecture"], part)
            config["quantization"] = _write_weights(header, architecture, config, part, progress)
            if not config["quantization"]:
                del config["quantization"]
            _write_json(part / "config.json", config)
            _write_json(part / "generation_config.json", _generation(header.metadata, sampling or {}))
            _write_json(part / IMPORTED, source)
            if _made_from(folder) != source:  # Another import may have been faster.
                if folder.exists():
                    shutil.rmtree(folder)
                make_private(part)
                part.rename(folder)
    except OSError as error:
        raise ModelError(f"{folder} can't be written: {error.strerror or error}.") from error
    except Unfit as error:
        raise ModelError(f"{file.name} can't be imported: {error.message}") from error
    return folder


def _generation(metadata: dict[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    own = {new: metadata.get(f"general.sampling.{old}") for old, new in _SAMPLING.items()}
    numbers = {name: value for name, value in own.items() if isinstance(value, int | float)}
    return {"eos_token_id": eos_ids(metadata), **sampling, **numbers}


def check(file: Path) -> Check:
    """Return the kind of `file`, and why it can't be imported, as far as its header says."""
    try:
        header = read_header(file)
        result = Check(_type_of(header))
        architecture, _ = architecture_of(header)
        config_of(header)
        for tensor in header.tensors.values():
            if tensor.name not in NOT_WEIGHTS:
                _name_of(tensor, architecture)
        return result
    except ModelError as error:
        return Check("", error.message.removeprefix(f"{file.name} can't be imported: ").removesuffix("."))
    except Exception:  # Of what it is made of, nothing is certain.
        return Check("", "its header makes no sense")


def _type_of(header: Header) -> str:
    nbytes = Counter[str]()
    for tensor in header.tensors.values():
        nbytes[tensor.type.name] += tensor.nbytes
    types = [name for name, _ in nbytes.most_common(1)]
    return " ".join([str(header.metadata.get("general.architecture"))[:40], *types])


def _name_of(tensor: Tensor, architecture: Architecture) -> str:
    """Return mlx-lm's name of `tensor`. Raises ModelError."""
    name = mlx_name(tensor.name, architecture)
    if name is None:
        raise Unfit(f"its tensor {tensor.name[:80]} is none that a {architecture.model_type} model has.")
    return name


def _identity(header: Header) -> list[list[Any]]:
    files = sorted({tensor.file for tensor in header.tensors.values()})
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _made_from(folder: Path) -> Any:
    try:
        return read_json(folder / IMPORTED, Any)
    except (OSError, BrokenJSON):
        return None


def _check_room(header: Header, folder: Path) -> None:
    # Q4_0 grows most: 18 bytes a group become 20; Q6_K's 26 become 36.
    need = sum(tensor.nbytes for tensor in header.tensors.values()) * 7 // 5
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ModelError(
            f"the import needs {need >> 20} MiB at {folder.parent}, where {free >> 20} MiB are free."
        )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False))


# --------------------------------------------------------------------------- weights


@dataclass
class _Output:
    """A tensor of the safetensors file: `chunks()` gives its bytes in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * {"U32": 4, "F32": 4, "F16": 2, "BF16": 2}[self.dtype]


def _write_weights(
    header: Header, architecture: Architecture, config: dict[str, Any], folder: Path, progress: Progress
) -> dict[str, Any]:
    """Write model.safetensors; returns the config's `quantization`."""
    quantization = _common_quantisation(header)
    outputs: list[_Output] = []
    for tensor in header.tensors.values():
        if tensor.name in NOT_WEIGHTS:
            continue
        outputs += _outputs(tensor, _name_of(tensor, architecture), architecture, config, quantization)
    total = sum(output.nbytes for output in outputs)
    done = 0
    with (folder / "model.safetensors").open("wb") as file:
        _write_header(file, outputs)
        for output in outputs:
            written = 0
            for chunk in output.chunks():
                file.write(chunk.tobytes())
                written += chunk.nbytes
                progress(done + written, total)
            assert written == output.nbytes, output.name
            done += written
        file.flush()
        os.fsync(file.fileno())
    return quantization


def _common_quantisation(header: Header) -> dict[str, Any]:
    """Return the bits that most quantised tensors get; {} if none is quantised."""
    bits = Counter(weights.BITS.get(tensor.type.name) for tensor in header.tensors.values())
    bits.pop(None, None)
    return {"group_size": weights.GROUP, "bits": bits.most_common(1)[0][0]} if bits else {}


def _write_header(file: BinaryIO, outputs: list[_Output]) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for output in outputs:
        entries[output.name] = {
            "dtype": output.dtype,
            "shape": output.shape,
            "data_offsets": [at, at + output.nbytes],
        }
        at += output.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _outputs(
    tensor: Tensor,
    name: str,
    architecture: Architecture,
    config: dict[str, Any],
    quantization: dict[str, Any],
) -> list[_Output]:
    dtype = "BF16" if architecture.dtype == "bfloat16" else "F16"
    order = _row_order(tensor, config) if architecture.permuted else None
    if tensor.type.name not in weights.BITS:
        offset = architecture.norm_offset if name.endswith("norm.weight") else 0.0
        return [_Output(name, dtype, tensor.shape, lambda: _plain(tensor, dtype, order, offset))]
    if not name.endswith(".weight"):
        raise Unfit(f"its tensor {tensor.name} is quantised, which no model's bias or norm is.")
    bits = weights.BITS[tensor.type.name]
    path = name.removesuffix(".weight")
    if bits != quantization["bits"]:
        quantization[path] = {"group_size": weights.GROUP, "bits": bits}
    *rows, columns = tensor.shape
    groups = (*rows, columns // weights.GROUP)

    def part(which: str) -> Callable[[], Iterator[np.ndarray]]:
        return lambda: _quantised(tensor, bits, dtype, order, which)

    return [
        _Output(name, "U32", (*rows, columns * bits // 32), part("weight")),
        _Output(path + ".scales", dtype, groups, part("scales")),
        _Output(path + ".biases", dtype, groups, part("biases")),
    ]


def _row_order(tensor: Tensor, config: dict[str, Any]) -> np.ndarray | None:
    """Return the rows of q and k in mlx-lm's order: llama.cpp's pairs of a head are neighbours."""
    heads = {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}
    for part, key in heads.items():
        if part in tensor.name:
            rows = tensor.shape[0]
            if rows % (2 * config[key]):
                raise Unfit(f"its tensor {tensor.name} has {rows} rows for {config[key]} heads.")
            return np.arange(rows).reshape(config[key], -1, 2).swapaxes(1, 2).reshape(-1)
    return None


def _rows(tensor: Tensor, order: np.ndarray | None) -> Iterator[np.ndarray]:
    """Yield rows of `tensor` as uint8 (rows, bytes of a row), some megabytes at a time."""
    row_bytes = tensor.shape[-1] // tensor.type.elements * tensor.type.nbytes
    rows = np.memmap(tensor.file, np.uint8, "r", tensor.start, (tensor.nbytes // row_bytes, row_bytes))
    if order is not None:
        rows = rows[order]
    step = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        yield np.ascontiguousarray(rows[start : start + step])


def _plain(tensor: Tensor, dtype: str, order: np.ndarray | None, offset: float) -> Iterator[np.ndarray]:
    column = len(tensor.shape) == 1  # A bias: its rows are its elements.
    if column and order is not None:
        (raw,) = _rows(tensor, None)
        yield _cast(_floats(raw.reshape(-1), tensor)[order], dtype, tensor)
        return
    for raw in _rows(tensor, order):
        yield _cast(_floats(raw.reshape(-1), tensor) - np.float32(offset), dtype, tensor)


def _floats(raw: np.ndarray, tensor: Tensor) -> np.ndarray:
    if tensor.type.name == "BF16":
        return (raw.view("<u2").astype("<u4") << 16).view("<f4")
    return raw.view("<f4" if tensor.type.name == "F32" else "<f2").astype(np.float32)


def _quantised(
    tensor: Tensor, bits: int, dtype: str, order: np.ndarray | None, which: str
) -> Iterator[np.ndarray]:
    for raw in _rows(tensor, order):
        groups = weights.unpack(tensor.type.name, raw.reshape(-1, tensor.type.nbytes))
        if which == "weight":
            yield weights.pack(groups.q.reshape(len(raw), -1), bits)
        else:
            yield _cast(groups.scale if which == "scales" else groups.bias, dtype, tensor)


def _cast(values: np.ndarray, dtype: str, tensor: Tensor) -> np.ndarray:
    """Cast float32 to float16, or bfloat16 as its uint16. Raises ModelError where a value is not finite."""
    with np.errstate(over="ignore"):
        half = values.astype("<f2")
    if not np.isfinite(half if dtype == "F16" else values).all():
        raise Unfit(f"its tensor {tensor.name} holds numbers that are infinite or do not fit into {dtype}.")
    if dtype == "F16":
        return half
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")  # Rounded to nearest, ties to even.


def main(argv: list[str]) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    if argv[0] == "--check":
        print(msgspec.json.encode([check(Path(file)) for file in argv[1:]]).decode())
        return 0
    end_with_parent()
    file, folder = Path(argv[0]), Path(argv[1])
    columns = (TextColumn("importing {task.description}"), BarColumn(), DownloadColumn())

    def make() -> Path:
        with ExitStack() as shown:
            bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            task = bar.add_task(file.name)

            def progress(done: int, total: int) -> None:
                if not bar.live.is_started:
                    shown.enter_context(bar)
                bar.update(task, completed=done, total=total)

            return import_gguf(file, folder, progress)

    return run_builder(make)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python -m omlxd.models.gguf.importing FILE FOLDER")
    sys.exit(main(sys.argv[1:]))
