"""What restoring, storing, hits and decoding cost on this machine's GPU, with a model of 8B shape.

    python -m tools.bench.gpu [--shape qwen3-8b] [--tokens 16384] [--dir DIR] [--blocks 64,256]
        [--only restore,harvest,hit,decode,uneven,guesses,attention,prompts,capacity,prefill,same]

Weights are random (tools/bench/shapes.py). Files are read with the page cache warm. Every figure is
from one process and one run; medians where a thing is cheap to repeat. GB are 10⁹ bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from omlxd.engine import mlx_adapter
from omlxd.engine.kvio.bridge import KVBridge
from omlxd.engine.kvio.payload import DirectBuffers, MLXPayload, append_blocks, copy_blocks, read_payload
from omlxd.engine.kvio.transport import transport
from omlxd.engine.mlx_adapter.cuda.attention.attention_kernel import Kernel
from omlxd.engine.mlx_adapter.cuda.attention.prompt_attention import PromptKernel
from omlxd.engine.process.prepare import set_backend_defaults
from omlxd.engine.schedule.decode_batch import DecodeBatch, best_batch
from omlxd.engine.speculate.verify import WIDTHS
from omlxd.kv.cold.tier import ColdTier
from omlxd.kv.cold.writer import StoreWriter
from omlxd.kv.files.block_file import BlockKey
from omlxd.kv.files.fs import read_all
from omlxd.kv.ledger.lease import LedgerLease
from omlxd.kv.ledger.ledger import Ledger
from tools.bench.gpu_rig import Bench, first_logits, row, timed
from tools.bench.shapes import SHAPES

THREADS = (1, 4, 8, 16)

AMID = {f"hit of {share:.0%}": share for share in (0.1, 0.45, 0.8, 0.97)}
"""Of a prompt, as another one with the same beginning leaves it."""

BYTES_S = 3.35e12
"""What an H100's memory gives, for the limits."""


def repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


class GPUBench(Bench):
    """A method a section."""

    # ----------------------------------------------------------------- restoring cold blocks

    def restore(self) -> None:
        """Files to the first token that uses them, by both ways the engine knows (kvio/reads/).

        `payloads + join` goes by the device's transport; `buffers` is what a direct one is for.
        """
        tokens = self.prompt(self.tokens)
        cache = self.prefilled(tokens)
        print(f"\n## Restore {self.tokens} tokens, {self.tokens * self.per_token / 1e9:.2f} GB\n")
        row("block", "threads", "way", "read s", "to first token s", "GB/s")
        row(*["---"] * 6)
        resident = statistics.median(timed(self.next_logits, cache) for _ in range(5))
        row("-", "-", "resident: the step alone", 0.0, resident, "-")
        for block in self.blocks:
            cold, keys = self.cold(tokens, block)
            for key, payload in zip(keys, self.payloads(cache, self.tokens, block), strict=True):
                cold.store(key, payload.buffers())
        del cache
        for block in self.blocks:
            cold, keys = self.cold(tokens, block)
            self._plain(cold, keys, block, 8)  # the page cache, warm
            for threads in THREADS:
                self._report(block, threads, "plain reads", self._plain(cold, keys, block, threads), None)
                self._report(block, threads, "landing", *self._buffers(cold, keys, block, threads))
                with ThreadPoolExecutor(threads) as pool:
                    # Twice: the engine's readers keep their threads, and so their staging buffers.
                    self._joined(cold, keys, block, pool)
                    self._report(block, threads, "payloads + join", *self._joined(cold, keys, block, pool))
            shutil.rmtree(cold.root, ignore_errors=True)

    def _report(self, block: int, threads: int, way: str, read: float, whole: float | None) -> None:
        total = self.tokens * self.per_token / 1e9
        row(block, threads, way, read, "-" if whole is None else whole, total / (whole or read))

    def _plain(self, cold: ColdTier, keys: Seq[BlockKey], block: int, threads: int) -> float:
        """Into one reused buffer a thread, unchecked: the bound."""
        buffers: list[memoryview] = [memoryview(bytearray(cold.format.file_bytes)) for _ in range(threads)]

        def read(key: BlockKey) -> None:
            buffer = buffers.pop()
            fd = os.open(f"{cold.root}/{cold.path_of(key.block_hash)}", os.O_RDONLY)
            assert read_all(cold._fs, fd, [buffer]) == len(buffer)
            os.close(fd)
            buffers.append(buffer)

        with ThreadPoolExecutor(threads) as pool:
            return timed(lambda: list(pool.map(read, keys)))

    def _buffers(self, cold: ColdTier, keys: Seq[BlockKey], block: int, threads: int) -> tuple[float, float]:
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            capacity = mlx_adapter.round_up(self.tokens + 1024)
            buffers = pool.submit(DirectBuffers, self.layout, capacity, block).result()
            list(pool.map(lambda i: cold.load(keys[i], buffers.pieces(i)), range(len(keys))))
        read = time.perf_counter() - began
        cache = mlx_adapter.filled_cache(self.model, buffers.take_arrays(), self.tokens)
        self.next_logits(cache)
        return read, time.perf_counter() - began

    def _joined(
        self, cold: ColdTier, keys: Seq[BlockKey], block: int, pool: ThreadPoolExecutor
    ) -> tuple[float, float]:
        def load(key: BlockKey) -> MLXPayload:
            def fill(views: Seq[memoryview]) -> bool:
                cold.load(key, views)
                return True

            payload = read_payload(self.layout, block, fill)
            assert payload is not None
            return payload

        began = time.perf_counter()
        payloads = list(pool.map(load, keys))
        read = time.perf_counter() - began
        cache = mlx_adapter.new_cache(self.model, self.tokens + 1024)
        append_blocks(self.layout, cache, payloads, 0, block, self.tokens + 1024)
        self.next_logits(cache)
        return read, time.perf_counter() - began

    # ----------------------------------------------------------------- storing

    def harvest(self) -> None:
        """Copying a chunk's blocks out, and what writing them costs decoding rows."""
        print("\n## Harvest of a 2048-token chunk, and writing while 8 rows decode\n")
        row("block", "copy ms", "copy GB/s", "steps idle ms", "steps while writing ms", "written GB/s")
        row(*["---"] * 6)
        cache = self.prefilled(self.prompt(4096))
        batch = self._batch(8, 512)
        for block in self.blocks:
            tensors = {n: a[:, :, :2048] for n, a in mlx_adapter.tensors(cache).items()}
            starts = range(0, 2048, block)
            copies = [timed(copy_blocks, self.layout, tensors, starts, block) for _ in range(5)]
            del tensors
            copy = statistics.median(copies)
            idle = self._steps(batch, lambda: False, at_most=30)
            ledger = Ledger(self.folder / f"w{block}", 1 << 40)
            ledger.open()
            cold, keys = self.cold(self.prompt(4096), block)
            cold = ColdTier(self.folder / f"w{block}", cold.format)
            writer = StoreWriter(cold, LedgerLease(ledger), max_queue_bytes=1 << 40)
            payloads = self.payloads(cache, 4096, block)
            ended: list[float] = []
            began = time.perf_counter()
            for key, payload in zip(keys, payloads, strict=True):
                writer.submit(key, payload, lambda ok: ended.append(time.perf_counter()))  # noqa: B023
            busy = self._steps(batch, lambda: len(ended) < len(keys), at_most=2000)  # noqa: B023
            assert writer.flush(60)
            rate = writer.stats.written_bytes / (ended[-1] - began) / 1e9
            writer.close()
            ledger.close()
            row(block, copy * 1e3, 2048 * self.per_token / copy / 1e9, idle, busy, rate)
            shutil.rmtree(cold.root, ignore_errors=True)

    def _steps(self, batch: DecodeBatch, more: Callable[[], bool], at_most: int) -> float:
        """Mean milliseconds of a step while `more()`, or of `at_most` steps."""
        began, count = time.perf_counter(), 0
        while count < 3 or (count < at_most and (more() or at_most < 100)):
            batch.step()
            count += 1
        return (time.perf_counter() - began) / count * 1e3

    # ----------------------------------------------------------------- hot hits

    def hit(self) -> None:
        """A prefix from the hot tier into a sequence's cache, by the engine's own `catch_up`."""
        print("\n## Hot hit: catch_up, ms (fresh: as harvested; written: after its files were written)\n")
        row("block", "tokens", "fresh ms", "again ms", "written ms", "GB/s again")
        row(*["---"] * 6)
        for block in self.blocks:
            for length in (n for n in (1024, 4096, 16384) if n <= self.tokens):
                tokens = self.prompt(length + 64)
                cache = self.prefilled(tokens[:length])
                bridge = self._bridge(block)
                self._put(bridge, tokens, block, self.payloads(cache, length, block))
                del cache
                times = [self._catch_up(bridge, tokens, block) for _ in range(3)]
                for block_ in bridge.store.pool._by_hash.values():
                    assert isinstance(block_.payload, MLXPayload)
                    for buffer in block_.payload.buffers():
                        np.frombuffer(buffer, np.uint64).max()
                written = self._catch_up(bridge, tokens, block)
                again = min(times[1:])
                rate = length * self.per_token / again / 1e9
                row(block, length, times[0] * 1e3, again * 1e3, written * 1e3, rate)
                bridge.close(1)

    def _put(self, bridge: KVBridge, tokens: Seq[int], block: int, payloads: Seq[MLXPayload]) -> None:
        sequence = self._sequence(tokens, block)
        table = bridge.store.new_table()
        table.append(len(payloads))
        for index, payload in enumerate(payloads):
            bridge.store.put(table, index, sequence.key(index, block), payload)
        table.free()

    def _catch_up(self, bridge: KVBridge, tokens: Seq[int], block: int) -> float:
        sequence = self._sequence(tokens, block)
        sequence.kv.table = bridge.store.new_table()
        taken = timed(bridge._catch_up, sequence)
        assert sequence.stats.restored_hot == len(tokens) // block * block - (
            block if len(tokens) % block == 0 else 0
        )
        sequence.kv.table.free()
        return taken

    # ----------------------------------------------------------------- decoding

    def decode(self) -> None:
        """Tokens a second of our batch and of mlx-lm's generator, in turns."""
        print("\n## Decode at 512 tokens of context\n")
        row("rows", "ours tok/s", "BatchGenerator tok/s", "ratio")
        row(*["---"] * 4)
        steps = 100
        for rows in (1, 8, 32):
            ours: list[float] = []
            theirs: list[float] = []
            for _ in range(2):
                batch = self._batch(rows, 512)
                for _ in range(5):
                    batch.step()
                ours.append(timed(repeat, batch.step, steps))
                del batch
                prompts = [self.prompt(512, seed=i) for i in range(rows)]
                theirs.append(self._generator_s(prompts, steps, at_once=rows))
            mine, other = (rows * steps / min(times) for times in (ours, theirs))
            row(rows, mine, other, mine / other)

    def uneven(self) -> None:
        """Rows of unequal length: in the batches that the scheduler chooses, in one, and in mlx-lm's one."""
        print("\n## Decode of unequal contexts\n")
        row("contexts", "batches", "ours tok/s", "in one batch", "BatchGenerator", "ratio")
        row(*["---"] * 6)
        steps = 40
        for lengths in ((32768, 4096), (16000, 8000, 4000, 2000), range(500, 8500, 500)):
            rates: list[float] = []
            count = 0
            for chosen in (True, False):
                batches: list[DecodeBatch] = []
                for length in lengths:
                    sequence = self._decoding(length)
                    best = best_batch(batches, sequence, self.loaded) if chosen else next(iter(batches), None)
                    if best is None:
                        batches.append(best := DecodeBatch(self.model))
                    best.add_row(sequence)
                count = count or len(batches)

                def step(batches: list[DecodeBatch] = batches) -> None:
                    for batch in batches:
                        batch.step()

                repeat(step, 5)
                rates.append(len(lengths) * steps / timed(repeat, step, steps))
                del batches, step
            prompts = [self.prompt(length, seed=length) for length in lengths]
            contexts = ",".join(map(str, lengths))
            try:
                theirs = len(lengths) * steps / self._generator_s(prompts, steps)
            except RuntimeError as error:  # Where it prefills behind rows of other lengths, with a mask.
                row(contexts, count, *rates, str(error).rpartition(": ")[2], "-")
                mx.clear_cache()
            else:
                row(contexts, count, *rates, theirs, rates[0] / theirs)

    def guesses(self) -> None:
        """A pass that checks guesses, by how many; rows of a batch end evenly, or each at its own place."""
        print("\n## Milliseconds of a pass, by guesses a row\n")
        row("rows", "context", "rows end", *(0, *WIDTHS))
        row(*["---"] * (4 + len(WIDTHS)))
        for rows, length in ((1, 512), (4, 512), (16, 512), (1, 16384), (4, 16384)):
            for apart in (0, 1)[: 1 + (rows > 1)]:
                batch = self._batch(rows, length)
                if apart:
                    mx.eval(batch._forward(mx.zeros((rows, 4), mx.int32)))
                    mlx_adapter.trim(batch._cache, [index % 4 for index in range(rows)])
                cells: list[float] = []
                for width in (0, *WIDTHS):

                    def check(width: int = width, batch: DecodeBatch = batch, rows: int = rows) -> None:
                        with mlx_adapter.last_positions(width + 1):
                            mx.eval(mx.argmax(batch._forward(mx.zeros((rows, width + 1), mx.int32)), -1))
                        mlx_adapter.trim(batch._cache, [width + 1] * rows)

                    repeat(check, 3)
                    cells.append(statistics.median(timed(check) for _ in range(15)) * 1e3)
                row(rows, length, "apart" if apart else "together", *cells)

    def attention(self) -> None:
        """One layer's attention of one new token a row: omlxd's kernel, MLX's own, and the bytes read."""
        print("\n## Attention of one token a row, ms\n")
        spans = (128, 256, 512, 1024)
        row(
            "rows",
            "no mask",
            "mask",
            *(f"kernel, span {span}" for span in spans),
            "largest difference",
            "limit",
        )
        row(*["---"] * (len(spans) + 5))
        heads, kv_heads, width = 32, 8, 128
        own, scale = mx.fast.scaled_dot_product_attention, width**-0.5
        for lengths in (
            [16000, 17500, 19000, 20500],
            [2000, 8000, 16000, 32000],
            [32000] * 8,
            [500 + 37 * i for i in range(32)],
            *([n] for n in (16000, 2000, 500, 100)),
        ):
            rows, end = len(lengths), mlx_adapter.round_up(max(lengths))
            shape = (rows, kv_heads, end, width)
            queries, keys, values = (
                mx.random.normal(size, key=mx.random.key(seed)).astype(mx.bfloat16)
                for seed, size in enumerate([(rows, heads, 1, width), shape, shape])
            )
            places = [end - length for length in lengths], [end] * rows
            mask = (mx.arange(end)[None] >= mx.array(places[0])[:, None])[:, None, None]
            want = own(queries, keys, values, scale=scale, mask=mask).astype(mx.float32)
            mx.eval(queries, keys, values, mask, want)

            def ms(attend: Callable[[], mx.array]) -> float:
                repeat(lambda: mx.eval(attend()), 2)
                return timed(lambda: mx.eval([attend() for _ in range(30)])) / 30 * 1e3

            cells = [ms(lambda: own(queries, keys, values, scale=scale))]  # noqa: B023
            cells.append(ms(lambda: own(queries, keys, values, scale=scale, mask=mask)))  # noqa: B023
            far = 0.0
            for span in spans:
                kernel = Kernel(width, heads // kv_heads, mx.bfloat16, span)
                attend = lambda: kernel(queries, keys, values, places, scale)  # noqa: B023, E731
                cells.append(ms(attend))
                far = max(far, cast(float, mx.abs(attend().astype(mx.float32) - want).max().item()))
            at_limit = sum(lengths) * 4 * kv_heads * width / BYTES_S * 1e3
            row(f"{rows}: {lengths[0]} to {lengths[-1]}", *cells, f"{far:.4f}", at_limit)

    def prompts(self) -> None:
        """One layer's attention of many new tokens: MLX's own, which plans a shape at its first, and ours."""
        print("\n## Attention of a prompt's end, ms\n")
        row("new, all tokens", "MLX's first", "then", "kernel", "TFLOP/s", "largest difference")
        row(*["---"] * 6)
        heads, kv_heads, width = 32, 8, 128
        scale, kernel = width**-0.5, PromptKernel(width, heads // kv_heads, mx.bfloat16)
        for new, tokens in (
            (100, 400),
            *((200, 16200), (448, 8640), (600, 17000), (1000, 16900), (1500, 10000), (650, 32650)),
        ):
            shape = (1, kv_heads, mlx_adapter.round_up(tokens + 1), width)
            queries, keys, values = (
                mx.random.normal(size, key=mx.random.key(seed)).astype(mx.bfloat16)
                for seed, size in enumerate([(1, heads, new, width), shape, shape])
            )
            mx.eval(queries, keys, values)

            def own() -> mx.array:
                held = (array[:, :, :tokens] for array in (keys, values))  # noqa: B023
                return mx.fast.scaled_dot_product_attention(queries, *held, scale=scale, mask="causal")  # noqa: B023

            def ours() -> mx.array:
                return kernel(queries, keys, values, (0, tokens), scale)  # noqa: B023

            first = timed(lambda: mx.eval(own())) * 1e3
            far = mx.abs(own().astype(mx.float32) - ours().astype(mx.float32)).max()
            cells = [
                timed(lambda: mx.eval([attend() for _ in range(30)])) / 30 * 1e3  # noqa: B023
                for attend in (own, ours)
            ]
            work = 4 * heads * width * new * (tokens - new / 2)
            row(f"{new}, {tokens}", first, *cells, work / cells[1] / 1e9, f"{far.item():.4f}")

    def capacity(self) -> None:
        """A step where the KV's arrays hold a multiple of 256 tokens, and 64 more (cache/growth.py)."""
        print("\n## Decode by what the arrays hold\n")
        row("rows", "context", "multiple of 256, ms", "64 more, ms")
        row(*["---"] * 4)
        steps = 50
        shapes = ((1, 8192), (1, 16000), (1, 32768), (1, 98304), (8, 512), (8, 4096), (8, 16384), (32, 512))
        for rows, length in (shape for shape in shapes if shape[0] * shape[1] <= self.tokens * 8):
            cells: list[float] = []
            for more in (0, 64):
                batch = self._batch(rows, length)
                room = mlx_adapter.round_up(length + 256) + more - length
                for layer in batch._cache:
                    for name in ("keys", "values"):
                        held = getattr(layer, name)[..., :length, :]
                        setattr(layer, name, mx.pad(held, [(0, 0), (0, 0), (0, room), (0, 0)]))
                        mx.eval(getattr(layer, name))
                repeat(batch.step, 5)
                cells.append(timed(repeat, batch.step, steps) / steps * 1e3)
                del batch, layer, held
            row(rows, length, *cells)

    def _generator_s(self, prompts: Seq[list[int]], steps: int, at_once: int = 1) -> float:
        """Seconds of mlx-lm's generator for `steps` steps while all of `prompts` decode.

        at_once  prompts that it prefills together; long ones, padded, run out of memory
        """
        from mlx_lm.generate import BatchGenerator

        generator = BatchGenerator(self.model, max_tokens=steps * 20, prefill_batch_size=at_once)
        generator.insert(list(prompts))
        while len(generator.next()[1]) < len(prompts):
            pass
        repeat(generator.next, 5)
        taken = timed(repeat, generator.next, steps)
        generator.close()
        return taken

    # ----------------------------------------------------------------- prefilling

    def prefill(self) -> None:
        """The scheduler's loop, with a hot tier to harvest into, against plain chunks."""
        print("\n## Prefill, tok/s\n")
        row("tokens", "plain chunks", "scheduler, no reuse", *[f"scheduler, block {b}" for b in self.blocks])
        row(*["---"] * (3 + len(self.blocks)))
        self.prefilled(self.prompt(2048))
        for length in (n for n in (2048, 8192, 32768) if n <= self.tokens * 2):
            tokens = self.prompt(length, seed=length)
            cells: list[float] = [min(timed(self.prefilled, tokens) for _ in range(2))]
            for block in (0, *self.blocks):
                best = min(self._run(tokens, block, 1).stats.first_token_s for _ in range(2))
                cells.append(best)
            row(length, *(length / seconds for seconds in cells))

    # ----------------------------------------------------------------- equality

    def same(self) -> None:
        """Greedy tokens of a cold run, a hot hit, a cold-tier hit, and a hit beside seven others; time to the
        first token of each."""
        print("\n## Same tokens, and the first token's time\n")
        row(
            "block",
            "tokens",
            "run",
            "first token s",
            "hot",
            "cold",
            "same as computed",
            "first logits differ by",
        )
        row(*["---"] * 8)
        for block in self.blocks:
            for length in (n for n in (4000, 16000) if n <= self.tokens):
                tokens, root = self.prompt(length, seed=length + 1), self.folder / f"s{block}-{length}"
                ledger = Ledger(root, 1 << 40)
                ledger.open()
                cold = ColdTier(root, self.cold(tokens, block)[0].format)
                computed: tuple[list[int], mx.array] | None = None
                bridge = self._bridge(block, cold, ledger)
                for run in ("computed", "computed again", "hot hit", "cold hit", "beside seven", *AMID):
                    if run in AMID:
                        bridge.close(1)
                        bridge = self._bridge(block)
                        self._run([*tokens[: int(length * AMID[run])], 1], block, 1, bridge)
                    if run == "cold hit":
                        assert bridge.store.flusher and bridge.store.flusher.writer.flush(60)
                        bridge = self._bridge(block, cold, ledger)
                    others = [self.prompt(300 * i, seed=i) for i in range(1, 8)] if "beside" in run else []
                    again = run == "computed again"
                    with first_logits() as drawn_by:
                        sequence = self._run(tokens, 0 if again else block, 64, bridge, others)
                    got, first = sequence.tokens[length:], drawn_by[id(sequence.sampling)][1]
                    computed = computed or (got, first)
                    apart = cast(float, mx.abs(first - computed[1]).max().item())
                    hot, colds = sequence.stats.restored_hot, sequence.stats.restored_cold
                    taken = sequence.stats.first_token_s
                    row(
                        block,
                        length,
                        run,
                        taken,
                        hot,
                        colds,
                        got == computed[0],
                        f"{apart:.3g}",
                    )
                bridge.close(1)
                ledger.close()
                shutil.rmtree(root, ignore_errors=True)


def main() -> None:
    set_backend_defaults()
    sections = (
        "restore",
        "harvest",
        "hit",
        "decode",
        "uneven",
        "guesses",
        "attention",
        "prompts",
        "capacity",
        "prefill",
        "same",
    )
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-8b", choices=sorted(SHAPES))
    parser.add_argument("--only", default=",".join(sections))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--blocks", default="64,256")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--share-prefix", action="store_true", help="requests hold what they share once")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="omlxd-bench-", dir=args.dir))
    began = time.perf_counter()
    bench = GPUBench(
        args.shape, folder, args.tokens, [int(b) for b in args.blocks.split(",")], args.share_prefix
    )
    way = type(transport()).__name__
    print(f"{args.shape} on {mlx_adapter.backend()}, {way}: built in {time.perf_counter() - began:.1f} s")
    try:
        for section in args.only.split(","):
            began = time.perf_counter()
            getattr(bench, section)()
            mx.clear_cache()
            print(f"\n({section}: {time.perf_counter() - began:.0f} s)")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
