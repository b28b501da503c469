"""Chain hashes: a block's name is the digest of its parent's name, its tokens and its extra keys.

    hash(block) = SHA-256(hash(parent) ‖ token ids as little-endian u32 ‖ extra keys)

The parent's digest and the tokens have a fixed length, so the three can't run into each other.
The chain's root is the namespace (what makes KV valid: weights, configuration, layout, …), salted
when the request carries a cache salt. A hash names *tokens*, not bytes: files carry a digest of
their payload besides. Source of the scheme: vLLM's `hash_block_tokens` (v1/core/kv_cache_utils.py).

SHA-256 because names are shared over restarts and, one day, machines: a fast hash with a known
seed would let a client craft two prompts of one name. Its cost: tools/bench/pool.py.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256
from sys import byteorder
from typing import Any

BlockHash = bytes
"""32 bytes."""

ExtraKey = tuple[str, str]
"""(kind, value), such as ("image", its digest and the place in the block where it begins)."""


def namespace_of(facts: Mapping[str, Any]) -> BlockHash:
    """Digest everything that makes KV valid. `facts` must be plain JSON values."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return sha256(text.encode()).digest()


def chain_root(namespace: BlockHash, cache_salt: str = "") -> BlockHash:
    """Return the parent of a first block. A salt gives its holder a chain of his own."""
    if not cache_salt:
        return namespace
    return sha256(namespace + b"salt" + cache_salt.encode("utf-8", "surrogatepass")).digest()


def hash_blocks(
    root: BlockHash,
    tokens: Sequence[int],
    block_size: int,
    extra_keys: Mapping[int, Sequence[ExtraKey]] | None = None,
) -> list[BlockHash]:
    """Return the hashes of the full blocks of `tokens`, in order; a last partial block has none.

    extra_keys  block index → keys of that block; the chain carries them onward
    """
    packed = array("I", tokens)
    if byteorder == "big":
        packed.byteswap()
    data = memoryview(packed).cast("B")
    width = 4 * block_size
    parent = root
    hashes: list[BlockHash] = []
    for index in range(len(packed) // block_size):
        digest = sha256(parent)
        digest.update(data[index * width : (index + 1) * width])
        if extra_keys and (keys := extra_keys.get(index)):
            digest.update(json.dumps(list(keys), separators=(",", ":")).encode())
        parent = digest.digest()
        hashes.append(parent)
    return hashes
