"""Tensors of a token block, and the order of their bytes.

A payload is a list of *groups*: tensors of one (heads, dim, dtype) packed into one array of shape
(tensors, heads, block_size, dim). An ordinary model has one group; MLA has two, its keys and its
values being of unequal width. Grouping makes a block one allocation in RAM and one joint copy,
while a file still names every tensor, because the tensors of a group lie one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1}
"""Bytes of an element, by safetensors' name of the type."""


@dataclass(slots=True, frozen=True)
class Group:
    """Tensors `names`, each of shape (heads, block_size, dim) and type `dtype`."""

    names: tuple[str, ...]
    heads: int
    dim: int
    dtype: str

    def shape(self, block_size: int) -> tuple[int, int, int, int]:
        return (len(self.names), self.heads, block_size, self.dim)

    def nbytes(self, block_size: int) -> int:
        return prod(self.shape(block_size)) * ITEM_BYTES[self.dtype]


@dataclass(slots=True, frozen=True)
class KVLayout:
    """Groups in file order."""

    groups: tuple[Group, ...]

    def nbytes(self, tokens: int) -> int:
        """Return the payload bytes of `tokens` tokens."""
        return sum(group.nbytes(tokens) for group in self.groups)

    def facts(self) -> list[list[object]]:
        """Return plain JSON for the namespace."""
        return [[list(g.names), g.heads, g.dim, g.dtype] for g in self.groups]
