"""Rows over segments, by MLX's ops in place of CUDA's kernel: where it takes over, and what it is given."""

from __future__ import annotations

import copy
import gc
from functools import partial
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np
import pytest
from cold_run import Reference as ColdRun
from cold_run import prompt
from families import build_family
from fast_or_slow import rest_slow
from guesses import guess_by, half_right
from rig import Rig

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.cuda.attention import (
    attend,
    attention_kernel,
    segment_attention,
    segment_kernel,
)
from omlxd.engine.mlx_adapter.cuda.attention.attention_kernel import Tails
from omlxd.engine.mlx_adapter.cuda.attention.fused_attention import FusedAttention, Heads
from omlxd.engine.mlx_adapter.cuda.attention.segments import places_of, shared_in
from omlxd.engine.mlx_adapter.cuda.compile import driver, kernel_store, launch, source
from omlxd.engine.mlx_adapter.cuda.rows import addressed_rows, tail
from omlxd.engine.mlx_adapter.cuda.rows.addressed_rows import AddressedKVCache
from omlxd.engine.mlx_adapter.cuda.step import compiled_step, model_checks
from omlxd.engine.mlx_adapter.cuda.step.compiled_step import CompiledStep
from omlxd.engine.schedule import decode_batch, end_steps
from omlxd.engine.schedule.decode_batch import DecodeBatch

from .conftest import Reference, SegmentReference
from .test_compiled_step import STEPS, Steps
from .test_fused_step import Attend, fuse, fuse_passes

BLOCK, SEGMENT = 16, 32
PREFIX = 3 * SEGMENT
LENGTHS = (PREFIX + 5, PREFIX + 40, 20, SEGMENT + 3)
"""Of prompts that begin alike: with four, three, no and one segment of theirs; the first two share three."""


def row(loaded: mlx_adapter.LoadedModel, seed: int, length: int) -> mlx_adapter.Cache:
    """A cache behind a prompt, in segments where the model shares any."""
    common = [int(token) for token in np.random.default_rng(99).integers(5, 200, PREFIX)]
    own = [int(token) for token in np.random.default_rng(seed).integers(5, 200, length)]
    tokens = [*common, *own][:length]
    names = [bytes([seed if (i + 1) * BLOCK > PREFIX else 255, i]) for i in range(length // BLOCK)]
    cache = mlx_adapter.new_cache(loaded.model, length + STEPS)
    boundary = (length - 1) // BLOCK * BLOCK
    mx.eval(loaded.model(mx.array([tokens[:boundary]]), cache=cache))
    loaded.segments.cut(cache, names, BLOCK, length, length + 2, last=True)
    mx.eval(loaded.model(mx.array([tokens[boundary:]]), cache=cache))
    return cache


def batch(loaded: mlx_adapter.LoadedModel, lengths: tuple[int, ...]) -> mlx_adapter.Cache:
    caches = [row(loaded, seed, length) for seed, length in enumerate(lengths)]
    if len(caches) == 1:
        return caches[0]
    joined = mlx_adapter.merge(caches[:1])
    for cache in caches[1:]:
        mlx_adapter.extend(joined, cache)
    return joined


def load(folder: Path, segment: int = 0) -> mlx_adapter.LoadedModel:
    return mlx_adapter.load(folder, segment=segment, segments_pay=True)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's stand-in looks its addresses up."""
    monkeypatch.setattr(mx, "compile", lambda function, **how: function)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return build_family(getattr(request, "param", "qwen3"), tmp_path / "model")


@pytest.fixture
def want(folder: Path, reference):
    """Logits of MLX's own over KV that is not cut."""
    loaded = load(folder)
    return lambda *lengths: Steps(loaded, batch(loaded, lengths), None).run(len(lengths))


@pytest.mark.parametrize("steps", ["each", "compiled", "fused"])
@pytest.mark.parametrize(
    ("folder", "lengths"),
    rest_slow(
        [
            (family, lengths)
            for family in ("llama", "qwen3")
            for lengths in (LENGTHS, LENGTHS[:2], LENGTHS[1:2])
        ],
        *[("qwen3", LENGTHS), ("llama", LENGTHS[1:2])],
    ),
    indirect=["folder"],
)
def test_it_computes_what_the_model_does(
    folder: Path, lengths: tuple[int, ...], steps: str, want, reference, monkeypatch
):
    if steps == "fused":
        monkeypatch.setattr(compiled_step, "fused_step", fuse)
    expected = want(*lengths)
    reference()
    loaded = load(folder, SEGMENT)
    cache = batch(loaded, lengths)
    ran = Steps(loaded, cache, None if steps == "each" else CompiledStep(loaded.model))
    SegmentReference.calls = 0
    for got, own in zip(ran.run(len(lengths)), expected, strict=True):
        np.testing.assert_allclose(got, own, atol=2e-4)
    layers = len(loaded.model.layers)
    assert ran.done == {"each": 0, "compiled": STEPS - compiled_step.AFTER, "fused": STEPS}[steps]
    assert SegmentReference.calls == layers * STEPS
    held = [one for rows in (cache[0].segments if len(lengths) > 1 else [cache[0].segments]) for one in rows]
    assert len(held) > len({id(one) for one in held}) or len(lengths) == 1


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[1:2]], ids=["all", "alone"])
def test_a_fused_pass_of_several_tokens_is_that_of_steps(folder: Path, lengths, reference, monkeypatch):
    monkeypatch.setattr(compiled_step, "fused_step", fuse)
    reference()
    loaded, rows = load(folder, SEGMENT), len(lengths)
    tokens = mx.random.randint(5, 200, (rows, 4), key=mx.random.key(3))

    def run(*counts: int) -> list[np.ndarray]:
        compiled, cache = CompiledStep(loaded.model), batch(loaded, lengths)
        assert compiled._fused is not None
        compiled._fused.is_repeatable = True
        out, at, several = [], 0, SegmentReference.several
        for steps, count in enumerate(counts):
            logits = compiled(tokens[:, at : at + count], cache, steps)
            assert logits is not None and logits.shape[:2] == (rows, count)
            out.append(np.array(logits))
            at += count
        assert SegmentReference.several == several, "each token is a row"
        return [np.concatenate(out, axis=1), *(np.array(a) for a in mlx_adapter.state_arrays(cache))]

    for got, want in zip(run(1, 3), run(1, 1, 1, 1), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)


def test_the_check_of_passes_reads_segments(folder: Path, reference):
    reference()
    step = fuse(mlx_adapter.load(folder).model)
    example = partial(segment_attention.example, step.heads)
    assert step.repeats(compiled_step.StepKV, example)
    attend = step.attend
    step.attend = lambda *given: attend(*given[:-1], None if len(given[4]) > 3 else given[-1])  # type: ignore[method-assign]
    assert not step.repeats(compiled_step.StepKV, example) and not step.is_repeatable


def test_rows_join_and_leave_between_compiled_steps(folder: Path, want, reference, monkeypatch):
    monkeypatch.setattr(compiled_step, "fused_step", fuse)
    expected = want(*LENGTHS)
    reference()
    loaded = load(folder, SEGMENT)
    cache = batch(loaded, LENGTHS)
    steps = Steps(loaded, cache, CompiledStep(loaded.model))
    got = steps.run(4, 2)
    mlx_adapter.keep_rows(cache, [0, 2, 3])
    steps.count = 0
    tokens = mx.array([[10 + 7 * 2 + row] for row in (0, 2, 3)])
    assert steps.compiled is not None
    logits = steps.compiled(tokens, cache, 0)
    assert logits is not None
    for ours, own in zip(
        [*got, np.array(logits[:, -1])], [*expected[:2], expected[2][[0, 2, 3]]], strict=True
    ):
        np.testing.assert_allclose(ours, own, atol=2e-4)
    mlx_adapter.keep_rows(cache, [1])
    assert shared_in(cache[0]) is None, "who is left holds no segment"
    again = row(loaded, 7, PREFIX + 2)
    mlx_adapter.extend(cache, again)
    assert shared_in(cache[0]) is not None and cache[0].bases == [0, PREFIX]


@pytest.mark.slow
def test_rows_keep_their_own_tails(folder: Path, want, reference, monkeypatch):
    """As others join and leave, one grows alone, and a pass that wants them in one array has them so."""
    monkeypatch.setattr(compiled_step, "fused_step", fuse)
    waits: list[int] = []
    monkeypatch.setattr(driver, "wait", lambda: waits.append(1))
    expected = want(*LENGTHS)
    reference()
    loaded = load(folder, SEGMENT)
    single = row(loaded, 0, LENGTHS[0])
    cache = mlx_adapter.merge([single])
    mlx_adapter.extend(cache, row(loaded, 1, LENGTHS[1]))
    steps = Steps(loaded, cache, CompiledStep(loaded.model))
    assert steps.compiled is not None and steps.compiled._fused is not None
    attend, layers = cast(Attend, steps.compiled._fused.attend), len(loaded.model.layers)
    first, second = cache[0].tails
    for _ in range(2):
        logits = steps.compiled(mx.array([[10 + 7 * steps.at], [11 + 7 * steps.at]]), cache, steps.at)
        assert logits is not None
        np.testing.assert_allclose(np.array(logits[:, -1]), expected[steps.at][:2], atol=2e-4)
        steps.at += 1
    assert attend.by_address >= 2 * layers
    held, addresses = first.keys, list(first.address)
    for _ in range(second.capacity - cache[0].ends[1] + 1):  # Until the second must grow.
        steps.compiled(mx.array([[1], [1]]), cache, 9)
    assert cache[0].tails == [first, second] and second.capacity > addresses[2] and second.is_known
    assert first.keys is held and first.address == addresses, "nobody copied it"
    mlx_adapter.trim(cache, [cache[0].ends[0] - (LENGTHS[0] - PREFIX) - 2] * 2)
    for seed in (2, 3):
        mlx_adapter.extend(cache, row(loaded, seed, LENGTHS[seed]))
    assert cache[0].tails[:2] == [first, second]
    tokens = mx.array([[10 + 7 * 2 + row] for row in range(2)])
    pair = mlx_adapter.row_tensors(cache, 1, 0, LENGTHS[1] + 2)
    assert {array.shape[2] for array in pair.values()} == {LENGTHS[1] + 2}
    mlx_adapter.keep_rows(cache, [0, 1])
    assert cache[0].tails == [first, second]
    gc.collect()
    waits.clear()  # For segments that went.
    before = Reference.by_address
    loaded.model(tokens, cache=cache)  # Of another kind.
    assert Reference.by_address == before + layers and cache[0].tails == [first, second]
    mlx_adapter.trim(cache, [1, 1])
    logits = steps.compiled(tokens, cache, 0)
    assert logits is not None
    np.testing.assert_allclose(np.array(logits[:, -1]), expected[2][:2], atol=2e-4)
    mlx_adapter.keep_rows(cache, [1])
    assert len(waits) == layers - 1, "nobody frees what a kernel may read"
    del first, second, held
    assert len(waits) == layers


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False])
def test_ends_of_prompts_are_computed_as_answers_are(at_once: bool, folder: Path, reference, monkeypatch):
    """Several in one pass, of one prompt once; also where all before the end is in segments."""
    monkeypatch.setattr(compiled_step, "fused_step", partial(fuse_passes, most=32))
    lengths = (2 * 256 + 9, 2 * 256 + 64 + 30, 2 * 256 + 64 + 30, 64 + 1, 3 * 64, 30, 64 + 34)
    prompts = [prompt(length - length % 64) + prompt(length % 64, seed=length) for length in lengths]
    with ColdRun(folder) as cold:
        expected = [cold.once(tokens, 6)[0] for tokens in prompts]
    reference()
    passes: list[list[int]] = []
    own = end_steps.EndSteps._tokens
    monkeypatch.setattr(
        end_steps.EndSteps, "_tokens", lambda *given: passes.append([*given[2]]) or own(*given)
    )
    with Rig(folder, segment=256) as rig:
        for tokens in prompts if at_once else ():
            rig.run(tokens, 1)
        passes.clear()
        asked = prompts if at_once else prompts[:1] + prompts[1:2] * 2 + prompts[3:]
        if at_once:
            outputs = rig.on_engine(lambda: [rig.start(tokens, 6) for tokens in asked])
        else:
            outputs = [rig.run(tokens, 6) for tokens in asked]
        assert [output.tokens() for output in outputs] == expected
        assert sum(map(sum, passes)) >= 8 + 29 and all(sum(counts) <= 32 for counts in passes)
        assert max(map(max, passes)) >= 15
        assert (max(map(len, passes)) > 1) == at_once
        rig.settle()


def test_tokens_of_a_pass_are_shared_out():
    assert end_steps.pass_counts([63], 32, 16) == [16]
    assert end_steps.pass_counts([63, 0, 2, 40], 32, 16) == [15, 1, 1, 15]
    assert end_steps.pass_counts([3, 0, 2, 4], 32, 16) == [3, 1, 2, 4]
    assert end_steps.pass_counts([1, 0], 32, 16) == [1, 1]
    assert end_steps.pass_counts([9] * 32, 32, 16) == [1] * 32


def test_rows_that_begin_as_copies_write_to_arrays_of_their_own(folder: Path, reference, monkeypatch):
    """MLX's copies share an array until one is written to, and it knows nothing of the kernel's writing."""
    monkeypatch.setattr(compiled_step, "fused_step", fuse)
    reference()
    loaded = load(folder, SEGMENT)
    own, asked = launch.addresses_of, list[int]()
    single = row(loaded, 0, LENGTHS[0])
    copied = mlx_adapter.copied(single)
    cache = mlx_adapter.merge([single])
    mlx_adapter.extend(cache, copied)

    def equal_at_first(arrays: list[mx.array]) -> mx.array:
        """Both rows' of a layer, one behind the other: at first at the same places."""
        numbers = own(arrays)
        asked.append(len(arrays))
        return numbers if asked[1:] else mx.repeat(numbers.reshape(-1, 2, 2)[:, :1], 2, axis=1).reshape(-1)

    monkeypatch.setattr(launch, "addresses_of", equal_at_first)
    tables = addressed_rows.tails_of(cache, 1, 1)
    assert asked == [4 * len(cache), 2 * len(cache)], "those of the second row are copied"
    for table in tables:
        first, second = np.array(table.table)[:, 0].tolist()
        assert first != second


def test_rows_whose_tails_the_kernel_does_not_read_are_copied(folder: Path, reference, monkeypatch, caplog):
    class Wrong(Attend):
        def __call__(self, *given):
            out = super().__call__(*given)
            return out * 1.01 if isinstance(given[3], Tails) else out

    def fuse_wrongly(model):
        step = fuse(model)
        step.attend = Wrong(step.heads)
        return step

    monkeypatch.setattr(compiled_step, "fused_step", fuse_wrongly)
    reference()
    with caplog.at_level("INFO"):
        loaded = load(folder, SEGMENT)
    assert not loaded.segments.tokens, "nothing reads them"
    assert not isinstance(batch(loaded, LENGTHS)[0], AddressedKVCache)
    assert "copied as others join and leave: fused steps have other bits" in caplog.text


def test_guesses_and_ends_of_prompts_are_read_by_it_too(folder: Path, reference):
    def passes(loaded: mlx_adapter.LoadedModel) -> np.ndarray:
        cache = batch(loaded, LENGTHS)
        tokens = mx.random.randint(5, 200, (len(LENGTHS), 5), key=mx.random.key(3))
        with mlx_adapter.last_positions(5):
            first = loaded.model(tokens, cache=cache)
            mlx_adapter.trim(cache, [0, 4, 2, 1])
            second = loaded.model(tokens[:, :3], cache=cache)
        return np.concatenate([np.array(first), np.array(second)], axis=1)

    expected = passes(load(folder))
    reference()
    loaded = load(folder, SEGMENT)
    SegmentReference.several = 0
    np.testing.assert_allclose(passes(loaded), expected, atol=2e-4)
    with_segments = sum(length - 1 > SEGMENT for length in LENGTHS)
    assert SegmentReference.several == len(loaded.model.layers) * (2 + with_segments)


@pytest.mark.parametrize("speculate", rest_slow([False, True, "packed", "many rows"], True))
def test_requests_at_once_read_one_copy_by_it(folder: Path, speculate: bool | str, reference, monkeypatch):
    """Through the scheduler: from nothing, a hit, and who joins later."""

    flat_passes: list[list[int]] = []

    def forward_packed(batch: DecodeBatch, guesses: list[list[int]], counts: list[int]) -> mx.array | None:
        logits = own_forward(batch, guesses, counts)
        flat_passes.append([len(own) for own in guesses] if logits is not None else [])
        return logits

    if speculate == "many rows":
        monkeypatch.setattr(decode_batch, "MOST_TOKENS", 2 * 16)
    if speculate in ("packed", "many rows"):
        own_forward = DecodeBatch._forward_packed
        monkeypatch.setattr(compiled_step, "fused_step", partial(fuse_passes, most=128))
        monkeypatch.setattr(DecodeBatch, "_forward_packed", forward_packed)
    prompts = [prompt(3 * 256 + 50) + prompt(20 + 9 * i, seed=i + 1) for i in range(4)]
    with ColdRun(folder) as cold:
        expected = [cold.once(tokens, 24)[0] for tokens in prompts]
    if speculate:
        guess_by(monkeypatch, half_right([p + w for p, w in zip(prompts, expected, strict=True)], 1))
    reference()
    with Rig(folder, segment=256, speculate=bool(speculate)) as rig:
        SegmentReference.calls = SegmentReference.several = 0
        running = [rig.start(tokens, 24) for tokens in prompts[:3]]
        running[0].first.wait(60)
        running.append(rig.start(prompts[3], 24))
        assert [output.tokens() for output in running] == expected
        assert rig.run(prompts[0], 24).got == expected[0]
        ends = 5 * len(rig.loaded.model.layers)  # Of the prompts, which have several tokens as well.
        assert SegmentReference.calls > ends and (SegmentReference.several > ends) == (speculate is True)
        unequal = any(len(set(guesses)) > 1 for guesses in flat_passes)
        assert unequal or speculate != "packed", "rows with unequal guesses in one pass"
        most = max(map(len, flat_passes), default=0)
        assert most == {"packed": 4, "many rows": 2}.get(str(speculate), 0), "rows of a packed verify step"
        rig.settle()
        gc.collect()
        assert rig.on_engine(lambda: len(rig.loaded.segments)) == 0


def test_nobody_gets_a_view_of_a_segment(folder: Path):
    """Its address must stay: an array that Python reads moves on CUDA, and so does what its views share."""
    loaded = load(folder, SEGMENT)
    for cache, read in (
        (batch(loaded, LENGTHS[1:2]), mlx_adapter.token_range),
        (batch(loaded, LENGTHS), None),
    ):
        segment = (cache[0] if read else cache[0].rows[1]).segments[0]
        for start, stop in ((0, SEGMENT), (3, 9), (SEGMENT - 4, SEGMENT + 4)):
            held = read(cache, start, stop) if read else mlx_adapter.row_tensors(cache, 1, start, stop)
            mx.eval(held)
            for name, array in held.items():
                own = np.asarray(memoryview(segment.tensors[name]))
                assert not np.shares_memory(np.asarray(memoryview(array)), own)
    assert copy.deepcopy(cache)[0].rows[1].segments[0] is segment


@pytest.mark.parametrize("computed", rest_slow([True, False], True))
def test_tails_of_a_row_that_leaves_wait_for_the_step_on_its_way(
    computed: bool, folder: Path, reference, monkeypatch
):
    monkeypatch.setattr(compiled_step, "fused_step", fuse)
    reference()
    loaded = load(folder, SEGMENT)
    cache = mlx_adapter.merge([row(loaded, seed, LENGTHS[seed]) for seed in range(3)])
    assert CompiledStep(loaded.model)(mx.array([[1], [2], [3]]), cache, 0) is not None
    first, second, third = cache[0].tails
    gone, held = second.address[0], list(cache[0].segments)  # A segment that goes waits, too.
    gc.collect()
    waits: list[bool] = []
    monkeypatch.setattr(driver, "wait", lambda: waits.append(gone in tail.written))
    left = mlx_adapter.keep_rows(cache, [0, 2])
    assert second in left and len(left) == len(cache) and tail.written[gone] is second and not waits
    assert cache[0].tails == [first, third] and first.is_known and third.is_known
    if computed:
        mlx_adapter.let_go(left)
        assert second.address == [] and gone not in tail.written
    del second, left
    gc.collect()
    assert len(waits) == (0 if computed else len(cache)) and held and gone not in tail.written


def test_a_segment_that_goes_waits_for_what_reads_it(folder: Path, reference, monkeypatch):
    reference()
    waits: list[int] = []
    monkeypatch.setattr(driver, "wait", lambda: waits.append(1))
    loaded = load(folder, SEGMENT)
    cache = batch(loaded, LENGTHS[1:2])
    assert shared_in(cache[0]).addresses.shape == (4, 2)
    gc.collect()
    waits.clear()
    cache.clear()
    gc.collect()
    assert len(waits) == 4
    mlx_adapter.Segment({})
    assert len(waits) == 4, "nobody was told where it lies"


def test_short_requests_go_as_if_nothing_were_shared(folder: Path, reference):
    reference()
    loaded = load(folder, SEGMENT)
    Reference.calls = SegmentReference.calls = 0
    steps = Steps(loaded, batch(loaded, (20, 18)), CompiledStep(loaded.model))
    steps.run(2)
    assert steps.done == STEPS - compiled_step.AFTER
    assert Reference.calls > 0 and SegmentReference.calls == 0


def test_without_a_kernel_a_gpu_shares_nothing(folder: Path, reference, monkeypatch):
    reference()
    monkeypatch.setattr(attend, "segment_kernel_for", lambda *_: None)
    monkeypatch.setattr(segment_attention, "in_use", lambda: False)
    model = mlx_adapter.load(folder).model
    for by_kernel in (True, False):
        assert mlx_adapter.share_prefixes(model, SEGMENT, by_kernel=by_kernel).tokens == 0


@pytest.mark.parametrize("steps", ["fused", "compiled", "each"])
def test_a_gpu_shares_where_steps_are_fused_or_compiled(steps: str, folder: Path, reference):
    reference()
    model = mlx_adapter.load(folder).model
    object.__setattr__(model, "omlxd_fused", fuse(model) if steps == "fused" else None)
    object.__setattr__(model, "omlxd_compiles", steps == "compiled")
    shares = mlx_adapter.share_prefixes(model, SEGMENT, by_kernel=True).tokens
    assert shares == (0 if steps == "each" else SEGMENT)
    batch = mlx_adapter.merge([mlx_adapter.new_cache(model, 64)])
    done = CompiledStep(model)(mx.array([[1]]), batch, 0)
    assert mlx_adapter.has_own_rows(model) == (steps != "each") and done is None


def test_fused_steps_that_read_segments_wrongly_keep_prefixes_apart(
    folder: Path, reference, monkeypatch, caplog
):
    reference()
    model = mlx_adapter.load(folder).model
    step = fuse(model)
    object.__setattr__(model, "omlxd_fused", step)
    assert model_checks.steps_share(model)
    attend = step.attend
    step.attend = lambda *given, **_: attend(*given[:6])  # type: ignore[method-assign]  It misses the segments.
    with caplog.at_level("WARNING"):
        assert not model_checks.steps_share(model)
    assert "prefixes are not shared" in caplog.text


def test_tables_say_who_holds_what():
    one, two, three = object(), object(), object()
    places = places_of([[one, two], [], [one], [one, two, three]])
    assert places.holders == [(0, 0), (0, 1), (3, 2)]
    assert places.table.tolist() == [
        [3, 0, 0, 2, 0, 3, 0, 0, 0],
        [2, 0, 1, 3, 1, 0, 0, 0, 0],
        [1, 3, 2, 0, 0, 0, 0, 0, 0],
    ]
    assert (places.counts.tolist(), places.most) == ([2, 0, 1, 3], 3)


class Watched:
    """In place of MLX's launches: what each was given, and zeros."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, int, tuple[int, ...]]] = []

    def __call__(
        self, *, name: str, inputs: list[mx.array], grid: tuple[int, ...], **how: object
    ) -> list[mx.array]:
        self.launches.append((name, len(inputs), grid))
        shapes, dtypes = how["output_shapes"], how["output_dtypes"]
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]  # type: ignore[call-overload]


def test_a_launch_reads_all_segments(monkeypatch):
    watched = Watched()
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", watched, raising=False)
    monkeypatch.setattr(kernel_store, "machine_code", lambda source: b"")
    kernel = segment_attention.SegmentKernel(attention_kernel.Kernel(64, 4, mx.float16))
    held = [(mx.zeros((1, 2, 1024, 64)), mx.zeros((1, 2, 1024, 64))) for _ in range(19)]
    shared = segment_attention._shared_of(held, [list(range(19)), [0], []])
    assert shared.addresses.shape == (19, 2)
    asked, tails = len(watched.launches), mx.zeros((3, 2, 256, 64))
    out = kernel(mx.zeros((3, 8, 1, 64)), shared, tails, tails, ([0] * 3, [9] * 3), 0.1)
    assert out.shape == (3, 8, 1, 64)
    assert [name for name, _, _ in watched.launches[:asked]] == ["omlxd_addresses_24"] * asked
    assert asked == -(-2 * 19 // launch.AT_ONCE)
    names, counts, grids = zip(*watched.launches[asked:], strict=True)
    kinds = ["omlxd_decode_spans", "omlxd_segments", "omlxd_segments_merge"]
    assert [name.split("_float16")[0] for name in names] == kinds, "one launch for any number of segments"
    assert counts == (6, 4, 7)
    assert grids[1][1:] == (2, 19 * 1024 // segment_kernel.SPAN)


def test_a_fused_launch_reads_tails_and_segments(monkeypatch):
    watched = Watched()
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", watched, raising=False)
    monkeypatch.setattr(kernel_store, "machine_code", lambda source: b"")
    heads = Heads(128, 8, 2, 128, False, False, 0.1, 0.0, mx.bfloat16)
    attend = FusedAttention(heads)
    held = [(mx.zeros((1, 2, 2048, 128)), mx.zeros((1, 2, 2048, 128))) for _ in range(3)]
    q, k, turns = mx.zeros((3, 1024)), mx.zeros((3, 256)), mx.zeros((3, 128))
    tails, places = mx.zeros((3, 2, 1280, 128)), (mx.zeros((3,), mx.int32), mx.full((3,), 9, mx.int32))
    for shared in (None, segment_attention._shared_of(held, [[0, 1, 2], [0], []])):
        for own in ((tails, tails), Tails(mx.zeros((3, 3), mx.uint64), 1280)):
            watched.launches.clear()
            out = attend((q, k, k), None, turns, own, *places, None, shared)
            (launch,) = watched.launches
            assert out.shape == q.shape and launch[0].startswith("omlxd_fused_attention") and launch[1] == 16
            # Three segments of two parts each, and two parts of each tail, in blocks of 4 warps.
            assert launch[2] == (128 * ((3 * 2 if shared else 0) + 3 * 2), 2, 1)


def test_a_source_for_each_kind_of_heads():
    kinds = [
        (width, group, dtype) for width in (64, 128, 256) for group in (1, 3, 16) for dtype in source.TYPES
    ]
    sources = [segment_kernel.segments_source(*kind) for kind in kinds]
    sources += [
        segment_kernel.merge_source(width, mx.bfloat16, tail, sinks)
        for width in (64, 128)
        for tail in (128, 512)
        for sinks in (False, True)
    ]
    assert len({name for name, _ in sources}) == len(sources)
    assert all(name.isidentifier() for name, _ in sources)
    assert all(source.count("{") == source.count("}") for _, source in sources)
