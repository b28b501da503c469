"""An engine in this process, without sockets: scheduler, store and one model folder, for tests.

Its model is wrapped so that tests can compare logits bit by bit, and its store lies where the test
says, so that dropping a rig and making another is a restart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from omlxd.chat import Sampling
from omlxd.engine import mlx_adapter
from omlxd.engine.kvio.bridge import KVBridge
from omlxd.engine.kvio.checkpointer import Checkpointer
from omlxd.engine.mlx_adapter.runtime import arrays
from omlxd.engine.schedule.scheduler import Scheduler
from omlxd.engine.sequence.sampling import RowSampling, SamplerRow, SamplingDefaults
from omlxd.engine.sequence.sequence import LabelScores, Prompt, Sequence, SequenceKV
from omlxd.engine.server import model_load
from omlxd.engine.speculate.controller import Speculation
from omlxd.engine.speculate.draft_model import DraftModel
from omlxd.engine.speculate.drafter import DrafterModel
from omlxd.engine.vision.images import PromptImages
from omlxd.kv.block_pool import BlockPool
from omlxd.kv.checkpoint import CheckpointFiles, Checkpoints
from omlxd.kv.cold.flusher import Flusher
from omlxd.kv.cold.tier import ColdTier
from omlxd.kv.cold.writer import StoreWriter
from omlxd.kv.files.block_file import EXTRA_ROOM, BlockFormat
from omlxd.kv.files.fs import FileSystem
from omlxd.kv.hashing import chain_root, hash_blocks, namespace_of
from omlxd.kv.ledger.lease import LedgerLease
from omlxd.kv.ledger.ledger import Ledger
from omlxd.kv.store import KVStore


def _leave_nan(file: Any, buffer: memoryview) -> int:
    """In place of `_Unwritten.readinto`: whoever reads what nobody wrote gets NaN, whatever was there."""
    count = _leave_anything(file, buffer)
    head = max(0, len(file._head) - (file._at - count))
    buffer[head:] = b"\xff" * max(0, count - head)
    return count


_leave_anything = arrays._Unwritten.readinto
arrays._Unwritten.readinto = _leave_nan

BLOCK = 64
GREEDY = Sampling(temperature=0.0)


class Recorder:
    """A model that keeps the last position's logits of every forward pass of one row."""

    def __init__(self, model: Any):
        self._model = model
        self.logits: list[tuple[int, np.ndarray]] = []

    def __call__(self, tokens: mx.array, cache: Any, **inputs: Any) -> mx.array:
        out = self._model(tokens, cache=cache, **inputs)
        if tokens.shape[0] == 1 and tokens.shape[1] <= BLOCK:
            last = out[0, -1].astype(mx.float32)
            mx.eval(last)
            self.logits.append((int(tokens.shape[1]), np.array(last)))
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Output:
    """A request under way. `tokens()` waits for its end."""

    shows_stop = False

    def __init__(self) -> None:
        self.sequence: Sequence
        self.got: list[int] = []
        self.likelihoods: list[Any] = []
        self.progressed: list[tuple[int, int]] = []
        self.reason = ""
        self.scores: LabelScores | None = None
        self.error: Exception | None = None
        self._done = threading.Event()
        self.first = threading.Event()

    def progress(self, event: Any) -> None:
        self.progressed.append((event.done, event.total))

    def token(self, token: int, likelihood: Any = None) -> None:
        self.got.append(token)
        self.likelihoods.append(likelihood)
        self.first.set()

    def take(self, drawn: Any, count: Any) -> None:
        for token, likelihood in drawn:
            count()
            self.token(token, likelihood)

    def count(self, work: Any) -> None:
        work()

    def scored(self, scores: LabelScores) -> None:
        self.scores = scores

    def finished(self, sequence: Sequence, reason: str) -> None:
        self.reason = reason
        self._done.set()

    def failed(self, sequence: Sequence, error: Exception) -> None:
        self.error = error
        self._done.set()

    def tokens(self, timeout: float = 300) -> list[int]:
        assert self._done.wait(timeout), "the request did not end"
        if self.error:
            raise self.error
        return self.got

    @property
    def hot(self) -> int:
        return self.sequence.stats.restored_hot

    @property
    def cold(self) -> int:
        return self.sequence.stats.restored_cold

    @property
    def known(self) -> int:
        """Tokens that were restored, or stored and computed as that was faster."""
        return self.hot + self.cold + self.sequence.stats.recomputed


class Rig:
    """model: folder. root: cache dir, None for no cold tier. hot: bytes of the hot tier. fs: its seam."""

    def __init__(
        self,
        model: Path,
        root: Path | None = None,
        *,
        hot: int = 1 << 30,
        reuse: bool = True,
        slots: int = 8,
        cap: int = 10**10,
        record: bool = False,
        kv_bits: int = 0,
        kv_group: int = 64,
        speculate: bool = False,
        draft: Path | None = None,
        mtp: bool = False,
        segment: int = 0,
        fs: FileSystem | None = None,
    ):
        self._draft, self._mtp, self.segment, self._fs = draft, mtp, segment, fs
        self.kv = mlx_adapter.Quantisation(kv_bits, kv_group) if kv_bits else None
        self.model_path, self.root, self.hot, self.reuse = model, root, hot, reuse
        self._slots, self._cap, self._record, self._speculate = slots, cap, record, speculate
        self.error: Exception | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(120)
        if self.error:
            raise self.error

    def _run(self) -> None:
        try:
            self._build()
        except Exception as error:
            self.error = error
            return
        finally:
            self._ready.set()
        self.scheduler.run()

    def _build(self) -> None:
        mx.random.seed(0)
        self.loaded = loaded = mlx_adapter.load(self.model_path, self.kv, segment=self.segment)
        self.recorder = Recorder(loaded.model)
        if self._record:
            loaded.model = self.recorder
        speculation = Speculation() if self._speculate else None
        if speculation is not None and self._draft is not None and model_load.is_drafter(self._draft):
            drafter = model_load.load_drafter(self._draft, loaded, self.model_path.name)
            speculation.draft_model = DrafterModel(drafter)
        elif speculation is not None and self._draft is not None:
            draft = mlx_adapter.load(self._draft)
            speculation.draft_model = DraftModel(draft, self._draft.name, loaded, self.model_path.name)
        if speculation is not None and self._mtp:
            heads = mlx_adapter.load_mtp(self.model_path, loaded)
            assert heads is not None
            speculation.draft_model = DrafterModel(heads)
        self.scheduler = Scheduler(loaded, None, slots=self._slots, block_size=BLOCK, speculation=speculation)
        self.namespace = namespace_of({"model": str(self.model_path), "kv": repr(self.kv)})
        self.ledger: Ledger | None = None
        if not self.reuse or loaded.layout is None:
            return
        self.pool = BlockPool(16)
        cold = flusher = lease = None
        if self.root is not None:
            self.ledger = Ledger(self.root, self._cap)
            self.ledger.open()
            lease = LedgerLease(self.ledger)
            room = EXTRA_ROOM if loaded.blind == "" else 0
            format = BlockFormat(self.namespace, loaded.layout, BLOCK, extra_room=room)
            cold = ColdTier(self.root, format, self._fs)
            writer = StoreWriter(cold, lease, max_queue_bytes=1 << 30)
            flusher = Flusher(self.pool, writer, self.scheduler.post)
        self.store = KVStore(
            block_size=BLOCK,
            pool=self.pool,
            hot_budget=lambda: self.hot,
            post=self.scheduler.post,
            cold=cold,
            flusher=flusher,
            lease=lease,
        )
        self.checkpointer: Checkpointer | None = None
        if loaded.states is not None and loaded.states.tensors:
            files = None
            if self.root is not None:
                files = CheckpointFiles(self.root, self.namespace, loaded.states.at, self._fs)
            self.checkpointer = Checkpointer(
                loaded.states, loaded.layout, Checkpoints(self.store, files), BLOCK
            )
        self.scheduler.bridge = KVBridge(
            loaded.model,
            loaded.layout,
            self.store,
            self.scheduler.post,
            self.checkpointer,
            segments=loaded.segments,
        )

    def use_grid(self, tokens: int) -> None:
        """Prefill in chunks that end at multiples of `tokens`, each with a checkpoint."""
        self.scheduler.prefill_budget.chunk_end = lambda start: (start // tokens + 1) * tokens
        if self.scheduler.bridge is not None and self.checkpointer is not None:
            self.checkpointer.interval = tokens

    def start(
        self,
        tokens: Seq[int],
        n: int = 8,
        sampling: Sampling = GREEDY,
        eos: Seq[int] = (),
        salt: str = "",
        output: Output | None = None,
        pins: Seq[bytes] = (),
        images: PromptImages | None = None,
        top_logprobs: int | None = None,
        adapter: mlx_adapter.Adapter | None = None,
        labels: Seq[Seq[int]] = (),
        prediction: Seq[int] = (),
        priority: int = 0,
    ) -> Output:
        output = output or Output()
        root = chain_root(self.namespace, salt)
        keys = images.extra_keys(BLOCK) if images is not None else {}
        params = RowSampling.of(sampling, SamplingDefaults())
        output.sequence = Sequence(
            id=0,
            tokens=list(tokens),
            prompt=Prompt(
                *(len(tokens), root, images, keys),
                pins=pins,
                labels=labels,
                prediction=prediction,
                priority=priority,
            ),
            sampling=SamplerRow(
                params,
                prompt=list(tokens) if params.penalised else (),
                top_logprobs=top_logprobs,
                max_new=n,
                eos=frozenset(eos),
            ),
            kv=SequenceKV(hash_blocks(root, tokens, BLOCK, keys) if self.scheduler.bridge else []),
            adapter=adapter,
            sink=output,
        )
        self.scheduler.submit(output.sequence)
        return output

    def run(self, tokens: Seq[int], n: int = 8, **options: Any) -> Output:
        """Start, wait for the end, and for what the engine does after it."""
        output = self.start(tokens, n, **options)
        output.tokens()
        self.settle()
        return output

    def settle(self, seconds: float = 120) -> None:
        """Wait until nothing is active, written or posted."""
        deadline = time.monotonic() + seconds
        while self.scheduler.active_sequences:
            assert time.monotonic() < deadline, "a request did not end"
            time.sleep(0.002)
        if self.scheduler.bridge is not None and self.store.flusher is not None:
            assert self.store.flusher.writer.flush(seconds)
        posted = threading.Event()
        self.scheduler.post(posted.set)
        assert posted.wait(seconds)

    def on_engine(self, call: Any) -> Any:
        """Run `call` on the engine thread and return what it returns."""
        done, box = threading.Event(), []

        def work() -> None:
            try:
                box.append(call())
            finally:
                done.set()

        self.scheduler.post(work)
        assert done.wait(120)
        return box[0]

    def close(self) -> None:
        self.scheduler.stop()
        self._thread.join(120)
        if self.scheduler.bridge is not None:
            assert self.scheduler.bridge.close(60)
        if self.ledger is not None:
            self.ledger.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
