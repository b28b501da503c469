"""A GGUF file's header: metadata and where each tensor lies. Every count and offset is checked.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ...errors import ModelError

MAX_METADATA_BYTES = 256 << 20
"""Bytes of metadata at most; Gemma 3's vocabulary of 262,144 tokens takes 6 MB."""
MAX_TENSORS = 100_000
MAX_ITEMS = 4_000_000
"""Items of all lists of a file: Gemma 3's vocabulary makes 0.8 million, some 50 MB of objects."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Unfit(ModelError):
    """A GGUF file can't be imported: the message is a clause about it, without its name."""


@dataclass(frozen=True)
class GGMLType:
    """A ggml type: `nbytes` hold `elements` values."""

    name: str
    elements: int
    nbytes: int


TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    30: GGMLType("BF16", 1, 2),
}
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Names of refused types."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file. shape: as NumPy has it, the last axis is contiguous. start: byte in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    start: int
    nbytes: int
    file: Path


@dataclass(frozen=True)
class Header:
    """A file's header. metadata: as the file has it; arrays are lists. tensors: by name, of all files of a
    split model.
    """

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_header(path: Path) -> Header:
    """Read the header of `path`, and of the other files of a split model. Raises ModelError."""
    first = _read_file(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return first
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Any] = {}
    for part in _split_files(path, count):
        header = first if part == path else _read_file(part)
        if header.metadata.get("split.count") != count or tensors.keys() & header.tensors.keys():
            raise ModelError(f"{part} does not belong to the split model of {path.name}.")
        tensors |= header.tensors
        metadata = header.metadata | metadata
    return Header(metadata, tensors)


def _split_files(path: Path, count: int) -> list[Path]:
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if not match or int(match[3]) != count:
        raise ModelError(
            f"{path.name} is a part of a split model, but is not named NAME-00001-of-{count:05}.gguf; "
            "give the parts their names back."
        )
    parts = [path.with_name(f"{match[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelError(
                f"{part.name} is missing: the model is split into {count} files; copy all of them."
            )
    return parts


def _read_file(path: Path) -> Header:
    try:
        if not path.is_file():
            raise ModelError(f"{path} is {'not a regular file' if path.exists() else 'not there'}.")
        if not path.stat().st_size:
            raise ModelError(f"{path.name} can't be imported: it is empty; copy or download it again.")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror or error}.") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap):
        self._path = path
        self._data = data
        self._at = self._items = 0
        self._end = min(len(data), MAX_METADATA_BYTES)

    def header(self) -> Header:
        if self._data[:4] != b"GGUF":
            raise self._bad("it is no GGUF file, as it does not begin with the magic bytes of one")
        self._at = 4
        version, tensor_count, key_count = self._unpack("IQQ")
        if version not in (2, 3):
            raise self._bad(f"its GGUF version is {version}; 2 and 3 can be read")
        if tensor_count > MAX_TENSORS or key_count > MAX_TENSORS:
            raise self._bad(f"it claims {tensor_count} tensors and {key_count} keys")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            metadata[key] = self._value(self._unpack("I")[0])
        entries = [self._entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or alignment < 1
            or alignment & (alignment - 1)
            or alignment > 1 << 20
        ):
            raise self._bad(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return Header(metadata, self._tensors(entries, start))

    def _tensors(self, entries: list[tuple[str, tuple[int, ...], int, int]], start: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, shape, number, offset in entries:
            if number not in TYPES:
                other = _OTHER_TYPES.get(number, str(number))
                raise self._bad(
                    f"{name} is of type {other}, which omlxd does not import; "
                    f"it imports {', '.join(kind.name for kind in TYPES.values())}"
                )
            kind = TYPES[number]
            if not shape or 0 in shape or shape[-1] % kind.elements or name in tensors:
                raise self._bad(f"its tensor {name} has the shape {shape}")
            nbytes = prod(shape) // kind.elements * kind.nbytes
            tensors[name] = Tensor(name, shape, kind, start + offset, nbytes, self._path)
        end = start
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if tensor.start < end:
                raise self._bad(f"its tensor {tensor.name} lies over another one")
            end = tensor.start + tensor.nbytes
            if end > len(self._data):
                raise self._bad(
                    f"it is truncated: {tensor.name} ends at byte {end}, the file has {len(self._data)}; "
                    "copy or download it again"
                )
        return tensors

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._unpack("I")
        if dimensions > 4:
            raise self._bad(f"its tensor {name} has {dimensions} dimensions")
        shape = self._unpack(f"{dimensions}Q")
        number, offset = self._unpack("IQ")
        return name, tuple(reversed(shape)), number, offset

    def _value(self, number: int) -> Any:
        if number in _SCALARS:
            return self._unpack(_SCALARS[number])[0]
        if number == _STRING:
            return self._string()
        if number == _ARRAY:
            of, count = self._unpack("IQ")
            self._items += count
            if self._items > MAX_ITEMS:
                raise self._bad(
                    f"its lists claim {self._items} items, more than the {MAX_ITEMS} that are read"
                )
            if of == _STRING:
                if count * 8 > self._end - self._at:
                    raise self._bad(f"it is truncated or damaged: it claims a list of {count} strings")
                return [self._string() for _ in range(count)]
            if of in _SCALARS:
                return list(self._unpack(f"{count}{_SCALARS[of]}"))
        raise self._bad(f"its metadata hold a value of type {number}")

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        return self._take(length).decode("utf-8", "replace")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        try:
            size = struct.calcsize("<" + form)
        except struct.error as error:
            raise self._bad("it claims a list that no file can hold") from error
        return struct.unpack("<" + form, self._take(size))

    def _take(self, size: int) -> bytes:
        if size > self._end - self._at:
            raise self._bad("its header is truncated or claims more than the file holds")
        self._at += size
        return self._data[self._at - size : self._at]

    def _bad(self, reason: str) -> ModelError:
        return ModelError(f"{self._path.name} can't be imported: {reason}.")
