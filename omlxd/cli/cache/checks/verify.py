"""Verifies block files as the store does, without the model.

A store compares a file with the header that it expects. Here that header is made from the file's own claims,
and the store's own code (`BlockFormat.read`) compares it and digests the payload.

Only the model knows the right names and types of tensors, but all files of a namespace have the same:
`Verdict.tensors` shows the odd ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import msgspec

from ....common.files import safetensors_header
from ....kv.checkpoint import KIND as CHECKPOINT
from ....kv.checkpoint import checkpoint_name
from ....kv.files.block_file import EXTRA_ROOM, FORMAT, BlockFileError, BlockFormat, BlockKey, keys_of_text
from ....kv.files.fs import FileSystem
from ....kv.files.record_file import RecordError, checked
from ....kv.hashing import hash_blocks
from ....kv.layout import ITEM_BYTES, Group, KVLayout

TOKENS, RECORD = "tokens", "record"
MOST_HEADER = 4 << 20
"""Bytes of a header at most; it has some 100 bytes a tensor, and 11 a token."""

_TOKEN_LIST = re.compile(r"\d{1,10}(,\d{1,10})*")
_EXTRA = re.compile(r"(\w+=[^,=\"]+(,\w+=[^,=\"]+)*)?")
_Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class _Claims(msgspec.Struct, forbid_unknown_fields=True):
    digest: str
    format: str
    kind: str
    namespace: str
    hash: _Hex
    parent: _Hex
    tokens: str
    extra: str = ""


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Positive, _Positive, _Positive]
    data_offsets: tuple[int, int]


@dataclass(slots=True, frozen=True)
class Verdict:
    """The result of a check. `fault`: why a file is bad, or "". Good files of one namespace and kind agree in
    `tensors`.
    """

    fault: str
    kind: str = ""
    tensors: int = 0


class Verifier:
    """Checks files one after another, with one buffer. Not thread-safe."""

    def __init__(self) -> None:
        self._fs = FileSystem()
        self._buffer = bytearray()

    def verify(self, path: str, namespace: str, name: str, *, is_record: bool = False) -> Verdict:
        """Verify all of a file. `namespace`, `name`: what its path says, in hex. Raises OSError."""
        fd = self._fs.open_read(path)
        try:
            if not is_record:
                return self._check(fd, namespace, name)
            checked(self._fs, fd, bytes.fromhex(name))
            return Verdict("", RECORD)
        except (BlockFileError, RecordError) as error:
            return Verdict(str(error))
        finally:
            self._fs.close(fd)

    def _header(self, fd: int) -> bytes:
        """Return the JSON and its padding."""
        size = self._fs.size(fd)
        with open(fd, "rb", buffering=0, closefd=False) as file:
            header = safetensors_header(file, size, MOST_HEADER) if size else None
        if header is None:
            raise BlockFileError(f"its header is cut off, or its length makes no sense ({size} bytes)")
        return header

    def _check(self, fd: int, namespace: str, name: str) -> Verdict:
        claims, layout, width = _claims(self._header(fd))
        if claims.namespace != namespace:
            raise BlockFileError(f"belongs to namespace {claims.namespace[:32]}")
        if claims.hash != name:
            raise BlockFileError(f"is the file of {claims.hash[:16]}…")
        key = BlockKey(
            bytes.fromhex(claims.hash),
            bytes.fromhex(claims.parent),
            [*map(int, claims.tokens.split(","))],
            keys_of_text(claims.extra),
        )
        _check_name(key, claims.kind, width)
        # Names of the same prefix stand for one namespace in a path, and a header gives no more of it.
        root, size = bytes.fromhex(namespace.ljust(64, "0")), self._fs.size(fd)
        format = BlockFormat(root, layout, width, claims.kind)
        if size != format.file_bytes:
            format = BlockFormat(root, layout, width, claims.kind, extra_room=EXTRA_ROOM)
        if size != format.file_bytes:
            raise BlockFileError(f"{size} bytes instead of {format.file_bytes}")
        if len(self._buffer) < format.data_bytes:
            self._buffer = bytearray(format.data_bytes)
        format.read(self._fs, fd, key, [memoryview(self._buffer)[: format.data_bytes]])
        # A checkpoint's shapes follow from its position.
        by_kind = tuple((g.names, g.dtype) if claims.kind == CHECKPOINT else g for g in layout.groups)
        return Verdict("", claims.kind, hash(by_kind))


def _claims(header: bytes) -> tuple[_Claims, KVLayout, int]:
    """Return (metadata, the tensors as a layout, tokens a block). Raises BlockFileError."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        claims = msgspec.json.decode(entries.pop("__metadata__", b"null"), type=_Claims)
        tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in entries.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise BlockFileError("its header can't be read") from None
    if claims.format != FORMAT:
        raise BlockFileError(f"has format {claims.format[:32]!r}, not {FORMAT!r}")
    if claims.kind not in (TOKENS, CHECKPOINT):
        raise BlockFileError(f"is of unknown kind {claims.kind[:32]!r}")
    if not _TOKEN_LIST.fullmatch(claims.tokens) or not _EXTRA.fullmatch(claims.extra):
        raise BlockFileError("its tokens can't be read")
    width = 1 if claims.kind == CHECKPOINT else claims.tokens.count(",") + 1
    for name, tensor in tensors.items():
        if tensor.dtype not in ITEM_BYTES or tensor.shape[1] != width:
            raise BlockFileError(f"its tensor {name[:64]!r} is none of a block's")
    groups = [Group((name,), t.shape[0], t.shape[2], t.dtype) for name, t in tensors.items()]
    return claims, KVLayout(tuple(groups)), width


def _check_name(key: BlockKey, kind: str, width: int) -> None:
    if kind == CHECKPOINT:
        if checkpoint_name(key.parent) != key.block_hash or len(key.tokens) != 1:
            raise BlockFileError("its parent doesn't give its name")
        return
    extra = {0: key.extra_keys}
    if max(key.tokens) >= 1 << 32 or hash_blocks(key.parent, key.tokens, width, extra) != [key.block_hash]:
        raise BlockFileError("its parent and tokens don't give its name")
