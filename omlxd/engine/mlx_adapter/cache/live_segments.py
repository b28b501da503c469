"""Which segments (segments.py) the running sequences of a model have, and where their prompts are cut."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from .growth import GROW_STEP, round_up
from .packed import Quantisation
from .segments import Segment, add_segment, segmented_layers


class LiveSegments:
    """The segments of running sequences, by the name of their last block. They go with the last holder.

    tokens  of a full segment; 0: this model's KV is not cut
    short   a prompt's last segment is shorter, of a multiple of so many tokens or of a block; 0: all are full
    how     they are packed so
    """

    def __init__(self, tokens: int = 0, short: int = 0, how: Quantisation | None = None):
        self.tokens, self.short, self.how = tokens, short, how
        self._by_name: weakref.WeakValueDictionary[bytes, Segment] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._by_name)

    def names(self, hashes: Sequence[bytes], block: int, length: int) -> dict[bytes, int]:
        """Where the segments of a prompt of `length` tokens end, by name, as far as blocks with these hashes
        fill them. `block`: tokens, a divisor of a segment's."""
        ends = self._ends(length, block)
        return {hashes[end // block - 1]: end for end in ends if end <= len(hashes) * block}

    def _ends(self, length: int, block: int) -> list[int]:
        """Where the segments of a prompt of `length` tokens end: no later than its last pass begins."""
        if not self.tokens:
            return []
        ends, multiple = [*range(self.tokens, length, self.tokens)], max(self.short, block)
        if self.short and (end := (length - 1) // multiple * multiple) > max(ends, default=0):
            ends.append(end)
        return ends

    def find(self, names: Iterable[bytes]) -> list[Segment]:
        """Of these names' segments the first ones, as far as they live."""
        found: list[Segment] = []
        for name in names:
            if (segment := self._by_name.get(name)) is None:
                break
            found.append(segment)
        return found

    def hold(self, segment: Segment, name: bytes) -> Segment:
        """The one that is known by `name`: `segment`, unless there was one."""
        return self._by_name.setdefault(name, segment)

    def forget(self, names: Iterable[bytes]) -> None:
        """Nobody gets these any more; who has them keeps them."""
        for name in names:
            self._by_name.pop(name, None)

    def cut(
        self,
        cache: Sequence[Any],
        hashes: Sequence[bytes],
        block: int,
        length: int,
        capacity: int,
        *,
        last: bool,
    ) -> None:
        """Cut the segments of a prompt of `length` tokens off the tails, as far as these go. Copies one
        layer's at a time.

        hashes    of the blocks, as far as known
        capacity  tokens to have room for in the end
        last      the prompt's last pass comes next
        """
        if not self.tokens or not cache:
            return
        layers = segmented_layers(cache)
        base, offset = layers[0].base, layers[0].offset
        if ends := [end for end in self._ends(length, block) if base < end <= offset]:
            held: list[dict[str, mx.array]] = [{} for _ in ends]
            room = round_up(capacity - ends[-1], block if self.short else GROW_STEP)
            for leaf in layers:
                for tensors, own in zip(held, leaf.cut(ends, room), strict=True):
                    tensors |= own
            for end, tensors in zip(ends, held, strict=True):
                segment = Segment(tensors, self.how)
                if end <= len(hashes) * block:
                    segment = self.hold(segment, hashes[end // block - 1])
                add_segment(cache, segment)
        for leaf in layers:
            leaf.joint = not last
            if leaf.keys is None:
                leaf.step = round_up(max(1, capacity - leaf.base))
