"""Where a block's file lies: `<namespace>/<hh>/<hash>.safetensors`, relative to the cache dir.

The path is the index: given a hash, nothing must be scanned to know whether the block is there.
"""

from __future__ import annotations

from .hashing import BlockHash

SUFFIX = ".safetensors"
TEMP_SUFFIX = ".tmp"
LOCK_NAME = ".lock"
NAMESPACE_HEX = 32
"""Hex digits of the namespace in a path: 128 bits tell models apart; hashes carry all 256."""

_ALLOCATION = 4096


def namespace_dir(namespace: BlockHash) -> str:
    return namespace.hex()[:NAMESPACE_HEX]


def block_path(namespace: BlockHash, block_hash: BlockHash) -> str:
    name = block_hash.hex()
    return f"{namespace_dir(namespace)}/{name[:2]}/{name}{SUFFIX}"


def disk_bytes(size: int) -> int:
    """Bytes that a file of `size` bytes takes, counted in whole 4 KiB pages."""
    return -(-size // _ALLOCATION) * _ALLOCATION
