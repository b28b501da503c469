"""The KV bridges of one scheduler."""

from __future__ import annotations

from ..kvio.bridge import KVBridge
from ..kvio.copier import Rows
from ..mlx_adapter import Adapter
from ..sequence.sequence import Sequence


class Bridges(dict[Adapter | None, KVBridge]):
    """Maps an adapter, or None for the model, to its bridge: each has its own KV. Without one: no reuse."""

    def of(self, sequence: Sequence) -> KVBridge | None:
        return self.get(sequence.adapter)

    def offer(self, sequence: Sequence, batch: Rows | None = None) -> None:
        if (bridge := self.of(sequence)) is not None:
            bridge.offer(sequence, batch)
            if len(self) > 1:  # They divide one RAM tier, and another one's share may have shrunk.
                for other in self.values():
                    other.store.trim_hot()

    def finish(self, sequence: Sequence, batch: Rows | None = None, *, spoiled: bool = False) -> None:
        if (bridge := self.of(sequence)) is not None:
            bridge.finish(sequence, batch, spoiled=spoiled)
