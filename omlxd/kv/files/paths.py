"""Paths of block files: `<namespace>/<hh>/<hash>.safetensors`, relative to the cache dir.

The path is the index: given a hash, nothing must be scanned to know whether the block is there.
Records (record_file.py) lie among the blocks, under a suffix of their own.
"""

from __future__ import annotations

import re

from ..hashing import BlockHash

SUFFIX = ".safetensors"
RECORD_SUFFIX = ".record"
TEMP_SUFFIX = ".tmp"
LOCK_NAME = ".lock"
WRITES_NAME = "writes.json"
KERNELS_NAME = "kernels"
"""A folder for what engines know of omlxd's kernels (mlx_adapter/metal/rule.py, cuda/compile)."""
JUDGING = f"{KERNELS_NAME}/judging-*"
"""Matches notes of kernels that were judged as their process ended."""
NAMESPACE_HEX = 32
"""Hex digits of the namespace in a path: 128 bits tell models apart; hashes carry all 256."""

PAGE = 4096
"""Bytes that a file system allocates at once."""

_NAMESPACE = re.compile(rf"[0-9a-f]{{{NAMESPACE_HEX}}}")
_FAN = re.compile(r"[0-9a-f]{2}")
_FILE = re.compile(
    rf"[0-9a-f]{{64}}(?P<suffix>{re.escape(SUFFIX)}|{re.escape(RECORD_SUFFIX)})"
    rf"(?P<temp>\.(?P<owner>[0-9]+)-[0-9]+{re.escape(TEMP_SUFFIX)})?"
)


def namespace_dir(namespace: BlockHash) -> str:
    return namespace.hex()[:NAMESPACE_HEX]


def block_path(namespace: BlockHash, block_hash: BlockHash) -> str:
    return _path(namespace, block_hash, SUFFIX)


def record_path(namespace: BlockHash, name: BlockHash) -> str:
    return _path(namespace, name, RECORD_SUFFIX)


def _path(namespace: BlockHash, digest: BlockHash, suffix: str) -> str:
    name = digest.hex()
    return f"{namespace_dir(namespace)}/{name[:2]}/{name}{suffix}"


def is_namespace_dir(name: str) -> bool:
    """Return whether a folder's name is a namespace's: other things in a cache dir are not ours."""
    return _NAMESPACE.fullmatch(name) is not None


def is_fan_dir(name: str) -> bool:
    return _FAN.fullmatch(name) is not None


def file_kind(name: str) -> str:
    """Return `block`, `record`, `temp`, or "" for a file that omlxd never wrote and must leave alone."""
    match = _FILE.fullmatch(name)
    if match is None:
        return ""
    return "temp" if match["temp"] else "block" if match["suffix"] == SUFFIX else "record"


def temp_owner(name: str) -> int | None:
    """Return the process that writes a temporary file; None for another name."""
    match = _FILE.fullmatch(name)
    return int(match["owner"]) if match is not None and match["temp"] else None


def is_stored_path(path: str) -> bool:
    """Return whether `path`, relative to the cache dir, is a block file's or a record's."""
    parts = path.split("/")
    return (
        len(parts) == 3
        and is_namespace_dir(parts[0])
        and is_fan_dir(parts[1])
        and file_kind(parts[2]) in ("block", "record")
        and parts[2].startswith(parts[1])
    )


def disk_bytes(size: int) -> int:
    """Return the bytes that a file of `size` bytes takes, in pages of 4 KiB."""
    return -(-size // PAGE) * PAGE
