"""What each admission policy writes to the SSD, and what it costs in hits, on recorded agent traffic.

    python -m tools.bench.wear TRACES [--bytes-per-token N] [--state-bytes N] [--hot-tokens N] [--idle]

TRACES is a folder of JSON Lines, a request to /v1/messages a line. Prompts go through the real
translation and prompt pipeline with the demo model's tokenizer; their KV is not computed: the real
store, flusher, writer, checkpoints and file format work on payloads of the size stated, over a file
system that keeps sizes instead of bytes. Between two sessions of a file everything in RAM is lost, as by
`kill -9` once the queue is empty; with --idle the pause before it is longer than a block lies idle.

amplification  bytes written / payload of the distinct full blocks (and one checkpoint a request)
recomputed     prompt tokens computed, less those that `always` computes
superseded     blocks that no later request of the session has, while one has others in their place: what
               writing tails late would save
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.tokenizer_utils import load as load_tokenizer

from omlxd.api.anthropic import request
from omlxd.engine.kvio.checkpointer import LEAST_INTERVAL, SHARE
from omlxd.engine.prompt.pipeline import PromptPipeline
from omlxd.kv.block_pool import BlockPool
from omlxd.kv.checkpoint import CheckpointFiles, Checkpoints
from omlxd.kv.cold import flusher as flusher_module
from omlxd.kv.cold.flusher import Flusher, write_policy
from omlxd.kv.cold.tier import ColdTier
from omlxd.kv.cold.writer import StoreWriter
from omlxd.kv.files.block_file import BlockFormat, BlockKey
from omlxd.kv.files.fs import Buffer, FileSystem
from omlxd.kv.hashing import hash_blocks, namespace_of
from omlxd.kv.layout import Group, KVLayout
from omlxd.kv.ledger.lease import LedgerLease
from omlxd.kv.ledger.ledger import Ledger
from omlxd.kv.store import KVStore
from omlxd.models.demo import build_demo

BLOCK = 64
NAMESPACE = namespace_of({"bench": "wear"})
UNIT = 4096
"""Bytes of a token's KV come in multiples of this."""

POLICIES = (
    ("always", False),
    ("second-use", False),
    ("min-length:2000", False),
    ("min-length:8000", False),
    ("min-length:16000", False),
    ("always", True),
    ("second-use", True),
)
"""(admission, write-back)."""


class SizesOnly(FileSystem):
    """Files are their sizes."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}
        self._sizes: dict[str, int] = {}

    def open_new(self, path: str) -> int:
        fd = len(self._open) + 1
        self._open[fd], self._sizes[path] = path, 0
        return fd

    def close(self, fd: int) -> None:
        pass

    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        count = sum(memoryview(b).nbytes for b in buffers)
        self._sizes[self._open[fd]] += count
        return count

    def rename(self, source: str, target: str) -> None:
        self._sizes[target] = self._sizes.pop(source)

    def is_file(self, path: str) -> bool:
        return path in self._sizes

    def touch(self, path: str, mtime_ns: int) -> None:
        pass

    def make_folder(self, path: str) -> None:
        pass


class Zeros:
    """A payload of `nbytes`, all alike."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self._view = memoryview(bytes(nbytes))

    def buffers(self) -> list[memoryview]:
        return [self._view]


@dataclass(slots=True)
class Result:
    """Tokens, but for bytes."""

    written: int = 0
    minimal: int = 0
    hot: int = 0
    cold: int = 0
    computed: int = 0


class Simulation:
    """One cache dir through many lives of an engine. `state_bytes` 0: a dense model."""

    def __init__(self, per_token: int, state_bytes: int, hot_tokens: int, admission: str, write_back: bool):
        self._fs = SizesOnly()
        self._layout = _layout(per_token)
        self._state = _layout(state_bytes) if state_bytes else None
        self._hot = hot_tokens * per_token
        self._admission, self._write_back = admission, write_back
        self._payload = Zeros(self._layout.nbytes(BLOCK))
        self._state_payload = Zeros(state_bytes) if state_bytes else None
        self._interval = LEAST_INTERVAL
        while state_bytes > SHARE * self._interval * per_token:
            self._interval *= 2
        self._folder = tempfile.TemporaryDirectory()
        self._distinct: set[bytes] = set()
        self.result = Result()
        self._start()

    def _start(self) -> None:
        root = Path(self._folder.name)
        self._ledger = Ledger(root, 1 << 60)
        self._ledger.open()
        lease = LedgerLease(self._ledger)
        cold = ColdTier(root, BlockFormat(NAMESPACE, self._layout, BLOCK), self._fs)
        self._posted: list[Callable[[], None]] = []
        self._writer = StoreWriter(cold, lease, max_queue_bytes=1 << 60, threads=1)
        pool = BlockPool()
        flusher = Flusher(
            pool, self._writer, self._posted.append, write_policy(self._admission), self._write_back
        )
        self._store = KVStore(
            block_size=BLOCK,
            pool=pool,
            hot_budget=lambda: self._hot,
            post=self._posted.append,
            cold=cold,
            flusher=flusher,
            lease=lease,
        )
        self._checkpoints = None
        if self._state is not None:
            state = self._state
            files = CheckpointFiles(root, NAMESPACE, lambda position: state, self._fs)
            self._checkpoints = Checkpoints(self._store, files)

    def kill(self, idle: bool) -> None:
        """Lose what is in RAM; `idle`: after a pause in which idle blocks were written."""
        if idle and self._write_back:
            assert self._store.flusher is not None
            flusher_module.IDLE_S = 0.0
            self._store.flusher.tick()
            flusher_module.IDLE_S = 30.0
        self._settle()
        self.result.written += self._writer.stats.written_bytes
        self._writer.close()
        self._ledger.close()
        self._start()

    def _settle(self) -> None:
        assert self._writer.flush(600)
        while self._posted:
            self._posted.pop(0)()

    def ask(self, tokens: Sequence[int]) -> None:
        """A request, its answer not counted: traces hold it in the next request's prompt."""
        store, hashes, result = self._store, hash_blocks(NAMESPACE, tokens, BLOCK), self.result
        table = store.new_table()
        reach = store.extend_match(table, hashes, (len(tokens) - 1) // BLOCK)
        if self._checkpoints is not None:
            reach = self._checkpoints.deepest(hashes, reach)
            table.truncate(reach)
        hot = sum(block.payload is not None for block in table.blocks)
        for block, block_hash in zip(table.blocks, hashes, strict=False):
            if block.payload is None:
                store.promote(block, block_hash, self._payload)
        result.hot += hot * BLOCK
        result.cold += (reach - hot) * BLOCK
        result.computed += len(tokens) - reach * BLOCK
        self._compute(table, tokens, hashes, reach)
        table.free()
        store.record_use(hashes)
        self._settle()

    def _compute(self, table: object, tokens: Sequence[int], hashes: list[bytes], done: int) -> None:
        store, parents = self._store, [NAMESPACE, *hashes]
        assert hasattr(table, "append")
        for index in range(done, len(hashes)):
            table.append()  # type: ignore[attr-defined]
            new = hashes[index] not in self._distinct
            self._distinct.add(hashes[index])
            self.result.minimal += new * self._payload.nbytes
            if store.wants(hashes[index], index):
                key = BlockKey(hashes[index], parents[index], tokens[index * BLOCK : (index + 1) * BLOCK])
                store.put(table, index, key, self._payload, len(tokens))  # type: ignore[arg-type]
            position = (index + 1) * BLOCK
            last = index == len(hashes) - 1
            if (
                self._checkpoints is not None
                and self._state_payload
                and (last or not position % self._interval)
            ):
                self.result.minimal += last * self._state_payload.nbytes
                self._checkpoints.put(hashes[index], position, self._state_payload, write=True)


def superseded(session: Sequence[Sequence[int]]) -> int:
    """Tokens of full blocks that a later prompt of the session has others in place of."""
    chains = [hash_blocks(NAMESPACE, tokens, BLOCK) for tokens in session]
    lost: set[bytes] = set()
    for index, chain in enumerate(chains):
        later = {name for other in chains[index + 1 :] for name in other}
        followed = {name for other in chains[index + 1 :] for name in other[:-1]}
        kept = sum(name in later for name in chain)
        if kept and chain[kept - 1] in followed:
            lost.update(chain[kept:])
    return len(lost) * BLOCK


def _layout(nbytes: int) -> KVLayout:
    return KVLayout((Group(("k", "v"), 1, nbytes // 4, "BF16"),))


def sessions(traces: Path, model: Path) -> Iterator[list[list[int]]]:
    """Token ids of each session's prompts, in the order of the files."""
    prompts = PromptPipeline(load_tokenizer(model))
    for file in sorted(traces.glob("*.jsonl")):
        name, session = "", []
        for line in file.read_text().splitlines():
            record = json.loads(line)
            tokens = prompts.render(
                request.parse(json.dumps(record["body"]).encode(), record["headers"]).generate.prompt
            ).tokens
            turn = re.sub(r"_t\d+$", "", record["turn"])
            if turn != name and session:
                yield session
                session = []
            name = turn
            session.append(list(tokens))
        if session:
            yield session


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path)
    parser.add_argument("--bytes-per-token", type=int, default=16384, help="of KV, a multiple of 4,096")
    parser.add_argument("--state-bytes", type=int, default=0, help="of a checkpoint; 0: a dense model")
    parser.add_argument("--hot-tokens", type=int, default=10**9, help="that fit in RAM")
    parser.add_argument("--idle", action="store_true", help="write-back: each kill comes after a long pause")
    args = parser.parse_args()
    assert args.bytes_per_token % UNIT == 0 and args.state_bytes % UNIT == 0
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        recorded = list(sessions(args.traces, build_demo(Path(folder) / "demo")))
    requests = [tokens for session in recorded for tokens in session]
    print(
        f"{len(requests)} requests in {len(recorded)} sessions, {sum(map(len, requests)):,} prompt tokens "
        f"({min(map(len, requests)):,} to {max(map(len, requests)):,}); "
        f"{args.bytes_per_token:,} bytes a token, checkpoints of {args.state_bytes:,}"
    )
    lost = sum(map(superseded, recorded)) * args.bytes_per_token
    print(f"superseded: {lost / 1e6:,.1f} MB")
    print(f"{'policy':<26}{'MB written':>11}{'amplif.':>9}{'hot':>10}{'cold':>10}{'recomputed':>12}")
    always = 0
    for admission, write_back in POLICIES:
        simulation = Simulation(
            args.bytes_per_token, args.state_bytes, args.hot_tokens, admission, write_back
        )
        for session in recorded:
            for tokens in session:
                simulation.ask(tokens)
            simulation.kill(args.idle)
        got = simulation.result
        always = always or got.computed
        name = admission + (", write-back" if write_back else "")
        print(
            f"{name:<26}{got.written / 1e6:>11,.1f}{got.written / got.minimal:>9.3f}{got.hot:>10,}"
            f"{got.cold:>10,}{got.computed - always:>12,}",
            flush=True,
        )


if __name__ == "__main__":
    main()
