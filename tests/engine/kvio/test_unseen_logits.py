"""KV whose logits nobody has looked at is never stored, whenever and however a sequence ends."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from kv_fakes import BLOCK, LAYOUT, Rig, check_pool, files_in, ram_folder
from kv_machines import QUICK

from omlxd.engine.kvio import bridge
from omlxd.engine.kvio.bridge import KVBridge
from omlxd.engine.mlx_adapter import storage_dtype
from omlxd.engine.sequence.sequence import Prompt, SamplerRow, Sequence
from omlxd.kv.hashing import chain_root


class Row:
    """KV of zeros, but for the token at `spoiled` and those after it: ones."""

    spoiled = 1 << 30

    def row_tensors(self, sequence: Sequence, start: int, stop: int) -> dict[str, mx.array]:
        ones = mx.arange(start, stop)[None, None, :, None] >= self.spoiled
        return {
            name: mx.broadcast_to(ones, (1, group.heads, stop - start, group.dim)).astype(
                mx.bfloat16 if group.dtype == "BF16" else storage_dtype(group.dtype)
            )
            for group in LAYOUT.groups
            for name in group.names
        }

    def row_states(self, sequence: Sequence) -> dict[str, mx.array]:
        return {}


class DecodingMachine(RuleBasedStateMachine):
    """One row after another. A step puts the newest token through; its logits are read a step later."""

    @initialize(hot=st.sampled_from([0, 2, 100]))
    def start(self, hot: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="omlxd-kv-", dir=ram_folder()))
        self.rig = Rig(self.root, hot=hot)
        self.bridge = KVBridge(None, LAYOUT, self.rig.store, self.rig.posted.append, readers=1)
        self.count = 0
        self.join(BLOCK)

    def join(self, length: int) -> None:
        self.count += 1
        root = chain_root(bytes(32), str(self.count))  # No row hits another's blocks.
        self.row, tokens = Row(), [1] * length
        self.sequence = Sequence(0, [*tokens, 1], Prompt(length, root), SamplerRow(None, max_new=1 << 20))
        assert not self.bridge.match(self.sequence, lambda: None)
        self.sequence.kv.length = length

    @rule(count=st.integers(1, 2 * BLOCK))
    def decode(self, count: int) -> None:
        for _ in range(count):
            self.sequence.kv.length = len(self.sequence.tokens)
            self.sequence.kv.stored.clear()
            self.sequence.tokens.append(1)
            self.bridge.offer(self.sequence, self.row)

    @rule(length=st.integers(1, 2 * BLOCK), spoiled=st.booleans(), read=st.booleans())
    def end(self, length: int, spoiled: bool, read: bool) -> None:
        """The row ends with a step in flight; `read`: its logits are looked at before."""
        if spoiled:
            self.row.spoiled = len(self.sequence.tokens) - 1
        self.sequence.kv.length = len(self.sequence.tokens)
        if not read or not spoiled:
            self.bridge.finish(self.sequence, self.row)
        else:
            self.bridge.finish(self.sequence, self.row, spoiled=True)
        self.rig.settle()
        check_pool(self.rig.pool, {})
        self.join(length)

    @invariant()
    def nothing_spoiled_is_kept(self) -> None:
        if not hasattr(self, "rig"):
            return
        for block in self.rig.pool._by_hash.values():
            for array in block.payload.arrays if block.payload is not None else ():
                assert not mx.any(array != 0).item(), "spoiled, in RAM"
        for path in files_in(self.root):
            data = path.read_bytes()[self.rig.cold.format.header_bytes :]
            assert data.count(0) == len(data), "spoiled, on disk"

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.bridge.close(0)
            self.rig.drop()
            shutil.rmtree(self.root, ignore_errors=True)


@pytest.mark.slow
def test_what_nobody_has_looked_at_is_not_stored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bridge, "OFFER_TOKENS", 1)
    run_state_machine_as_test(DecodingMachine, settings=settings(QUICK, max_examples=40))
