"""The file of one block: plain safetensors, made so that every byte of it can be checked.

    8 bytes   length of the header, little-endian
    header    JSON, padded with spaces so that the data starts on a 16 KiB boundary
    data      the payload's groups, tensor after tensor, in the layout's order

Everything in the header is a function of the block's key and the layout, except for the digest of
the payload. So a reader builds the header that it expects and compares bytes: a flip anywhere in
it, another namespace, other tokens or another format version is a mismatch, with no JSON parsed.
The digest (xxh3-128) then vouches for the data. The 16 KiB boundary keeps a zero-copy import into
Metal open, whose buffers must be page aligned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from ..hashing import BlockHash, ExtraKey
from ..layout import KVLayout
from .fs import IOV_MAX, FileSystem, read_all, write_all
from .paths import namespace_dir

FORMAT = "omlxd-kv-1"
ALIGNMENT = 16384
READ_BYTES = 1 << 20
"""A payload is read this much at a time and digested while it is still in the processor's cache.

Each read lets go of the interpreter, and other readers may have it when it comes back; and a digest of a
piece under 128 KB holds it. As a share of plain reads of the same files, scattered into final arrays, page
cache warm, on 2 busy virtual CPUs, an 8B shape, by what is read at a time:

    block of            256 KiB  512 KiB  1 MiB  2 MiB
    64 tokens 1 thread   .91      .95      .92    .91     2 threads  .40  .51  .58  .59
    128 tokens           .96      .98      .95    .90                .55  .64  .70  .67
    256 tokens          1.05     1.07     1.04   1.01                .98 1.01  .97  .94

Tried: neighbouring blocks read side by side, so that a page is filled soon after it was first touched:
1.08 to 1.16 times as fast on a machine with little else to do, no faster on a busy one; through a buffer
that is digested as a whole and copied by numpy: no faster; one digest over a mapping: engine/kvio/bridge.py.
"""
DIGEST_HEX = 32
EXTRA_ROOM = 1024
"""Bytes of a header for the extra keys of a block, in a namespace whose blocks may have some."""
_TOKEN_DIGITS = 10


class BlockFileError(Exception):
    """The file is not what its name says: a miss; the file is removed and counted."""


@dataclass(slots=True, frozen=True)
class BlockKey:
    """The identity of a block in its file: its name, its parent's, its token ids and its extra keys."""

    block_hash: BlockHash
    parent: BlockHash
    tokens: Sequence[int]
    extra_keys: tuple[ExtraKey, ...] = ()


class BlockFormat:
    """Writes and checks the block files of one namespace.

    namespace   digest of all that makes the KV valid
    layout      the tensors of a block
    block_size  tokens a block
    kind        of payload: `tokens`, or `checkpoint` (kv/checkpoint.py)
    read_bytes  what is read and digested at a time
    extra_room  bytes of a header for extra keys: 0 or `EXTRA_ROOM`
    """

    def __init__(
        self,
        namespace: BlockHash,
        layout: KVLayout,
        block_size: int,
        kind: str = "tokens",
        read_bytes: int = READ_BYTES,
        extra_room: int = 0,
    ):
        self.kind = kind
        self._read_bytes = read_bytes
        self.namespace = namespace
        self.layout = layout
        self.block_size = block_size
        self.data_bytes = layout.nbytes(block_size)
        self._tensors = _tensor_section(layout, block_size)
        longest = len(self._json(BlockKey(namespace, namespace, [10**_TOKEN_DIGITS - 1] * block_size), b""))
        self.header_bytes = -(-(8 + longest + extra_room + DIGEST_HEX) // ALIGNMENT) * ALIGNMENT
        """Length word and header; the data starts here."""

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.data_bytes

    def _json(self, key: BlockKey, digest: bytes) -> bytes:
        # The digest stands first, so that its place is the same in every file.
        return b'{"__metadata__":{"digest":"%b","format":"%b","kind":"%b","namespace":"%b",' % (
            digest,
            FORMAT.encode(),
            self.kind.encode(),
            namespace_dir(self.namespace).encode(),
        ) + b'"hash":"%b","parent":"%b","tokens":"%b"%b},%b}' % (
            key.block_hash.hex().encode(),
            key.parent.hex().encode(),
            ",".join(map(str, key.tokens)).encode(),
            b',"extra":"%b"' % text_of_keys(key.extra_keys).encode() if key.extra_keys else b"",
            self._tensors,
        )

    _DIGEST_AT = 8 + len(b'{"__metadata__":{"digest":"')

    def header(self, key: BlockKey, digest: bytes) -> bytes:
        """Return the first `header_bytes` bytes of the file. `digest`: 32 hex digits."""
        length = self.header_bytes - 8
        return length.to_bytes(8, "little") + self._json(key, digest).ljust(length)

    # ----------------------------------------------------------------- writing and reading

    def write(self, fs: FileSystem, fd: int, key: BlockKey, buffers: Sequence[memoryview]) -> None:
        """Write header and payload. Raises OSError, for a payload of another size too."""
        header = memoryview(self.header(key, digest_of(buffers)))
        if write_all(fs, fd, [header, *buffers]) != self.file_bytes:
            raise OSError("the payload has another size")

    def is_file_of(self, key: BlockKey, data: memoryview) -> bool:
        """Return whether `data` is all of the block's file, header and payload."""
        digest = bytes(data[self._DIGEST_AT : self._DIGEST_AT + DIGEST_HEX])
        head, payload = data[: self.header_bytes], data[self.header_bytes :]
        return (
            len(data) == self.file_bytes
            and bytes(head) == self.header(key, digest)
            and digest_of([payload]) == digest
        )

    def read(self, fs: FileSystem, fd: int, key: BlockKey, buffers: Sequence[memoryview]) -> None:
        """Read the payload into `buffers` (byte views, in file order) and check all of it.

        Raises BlockFileError when the file is not exactly this block's; OSError as reads do.
        The buffers hold garbage after an error.
        """
        sizes = list(map(len, buffers))
        if sum(sizes) != self.data_bytes:
            raise ValueError("the buffers are not byte views of one payload")  # and not the file's fault
        size = fs.size(fd)
        if size != self.file_bytes:
            raise BlockFileError(f"{size} bytes instead of {self.file_bytes}")
        header = bytearray(self.header_bytes)
        batches = _batches(buffers, sizes, self._read_bytes)
        first, nbytes = next(batches, ((), 0))
        # In one call with the first part of the payload: each lets go of the interpreter.
        _fill(fs, fd, [memoryview(header), *first], 0, self.header_bytes + nbytes)
        at = self._DIGEST_AT
        digest = bytes(header[at : at + DIGEST_HEX])
        if bytes(header) != self.header(key, digest):
            raise BlockFileError("its header is not this block's")
        state = xxhash.xxh3_128()
        update = state.update
        for buffer in first:
            update(buffer)
        offset = self.header_bytes + nbytes
        for batch, nbytes in batches:
            _fill(fs, fd, batch, offset, nbytes)
            offset += nbytes
            for buffer in batch:
                update(buffer)
        if state.hexdigest().encode() != digest:
            raise BlockFileError("its payload fails its digest")


def text_of_keys(keys: Iterable[ExtraKey]) -> str:
    """Format extra keys for a header: `image=…,image=…`. Kinds and values hold no `"`, `=` or `,`."""
    return ",".join(f"{kind}={value}" for kind, value in keys)


def keys_of_text(text: str) -> tuple[ExtraKey, ...]:
    """Parse the text of `text_of_keys`. Raises ValueError."""
    pairs = [part.split("=") for part in text.split(",")] if text else []
    return tuple((kind, value) for kind, value in pairs)


def digest_of(buffers: Iterable[memoryview]) -> bytes:
    """Return xxh3-128 of the buffers' bytes one after another, as 32 hex digits."""
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.hexdigest().encode()


def _fill(fs: FileSystem, fd: int, buffers: Sequence[memoryview], offset: int, nbytes: int) -> None:
    """Fill `buffers`, of `nbytes` in all. Raises BlockFileError where the file ends before that."""
    # Nearly always one call does it; `read_all` begins again where it doesn't.
    if fs.readv(fd, buffers, offset) != nbytes and read_all(fs, fd, buffers, offset) != nbytes:
        raise BlockFileError("ends early")


def _batches(
    buffers: Sequence[memoryview], sizes: Sequence[int], most: int
) -> Iterator[tuple[Sequence[memoryview], int]]:
    """Yield lists of buffers of at most `most` bytes, and their bytes, in the same order.

    Each leaves room for one more buffer beside it in a call. Longer buffers are cut. Python's own time
    counts here: a block has hundreds of buffers, nearly always of one size.
    """
    size = sizes[0] if sizes else 0
    if 0 < size <= most and sizes.count(size) == len(sizes):
        step = min(most // size, IOV_MAX - 1)
        for at in range(0, len(buffers), step):
            run = buffers[at : at + step]
            yield run, len(run) * size
        return
    batch: list[memoryview] = []
    held = 0
    for buffer in buffers:
        while held + len(buffer) > most:
            yield [*batch, buffer[: most - held]], most
            buffer = buffer[most - held :]
            batch, held = [], 0
        batch.append(buffer)
        held += len(buffer)
        if len(batch) == IOV_MAX - 1:
            yield batch, held
            batch, held = [], 0
    if batch:
        yield batch, held


def _tensor_section(layout: KVLayout, block_size: int) -> bytes:
    entries: dict[str, object] = {}
    offset = 0
    for group in layout.groups:
        each = group.nbytes(block_size) // len(group.names)
        for name in group.names:
            entries[name] = {
                "dtype": group.dtype,
                "shape": [group.heads, block_size, group.dim],
                "data_offsets": [offset, offset + each],
            }
            offset += each
    return json.dumps(entries, separators=(",", ":"))[1:-1].encode()
