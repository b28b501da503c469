"""Requests over one prefix hold its KV once, and answer as if each were alone.

Segments of 256 tokens here. The cold run does not cut: with the wheel's BLAS even bits are the same.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from backends import let_rows_pay
from cold_run import Reference, assert_same, prompt
from daemon import wait_until
from families import build_family
from fast_or_slow import diagonal, rest_slow
from guesses import guess_by, half_right
from kv_fakes import check_pool
from mlx_lm.models.cache import KVCache
from rig import BLOCK, Output, Rig

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter import Segment
from omlxd.engine.mlx_adapter.cache import segments
from omlxd.engine.mlx_adapter.cache.kinds import arrays_of, leaves
from omlxd.engine.mlx_adapter.cache.packed import Quantisation
from omlxd.engine.schedule.memory_admission import MemoryAdmission
from omlxd.errors import OmlxdError
from omlxd.wire import Budget
from tests.engine.schedule.test_spoiled_answers import MARK, Spoiled, marked

SEGMENT = 256
SEGMENTS = [pytest.param(SEGMENT, id="full"), pytest.param(mlx_adapter.SEGMENT, id="short")]
"""Of the second length no prompt here fills one: all that is shared is a short segment, of 768 tokens."""
PREFIX = 3 * SEGMENT + 100
"""Tokens that requests share: three segments and a part."""
MIXED = ("gemma3_text", "gpt_oss", "gemma4_text", "gemma3n", "qwen3_5", "falcon_h1")
LATENTS = ("deepseek_v3", "deepseek_v32", "kimi_linear")
"""MLA, alone, with an index that chooses among the latents, and beside recurrent layers."""
N = 24
LONG = 120
"""Tokens of an answer; of one beside which others surely come to decode."""


MODELS = ("qwen3", "qwen3 8", "llama", "glm4_moe")
"""Families, and in how many bits their KV is."""
WHOLE = MODELS[:2]
"""Of KV as it is and of packed KV, in each way; those whose caches are the first's, in one."""
MODELS_AND_SEGMENTS = pytest.mark.parametrize(
    ("model", "segment"),
    diagonal(MODELS, (SEGMENT, mlx_adapter.SEGMENT), WHOLE),
    indirect=["model"],
    scope="module",
)


@pytest.fixture(scope="module", params=WHOLE)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a family, and with KV in so many bits."""
    family, _, bits = request.param.partition(" ")
    changes = {"head_dim": 64} if bits else None
    folder = build_family(family, tmp_path_factory.mktemp("model") / family, changes=changes)
    BITS[folder] = int(bits or 0)
    return folder


BITS: dict[Path, int] = {}
"""Of the KV of these models."""


@pytest.fixture(scope="module")
def uncached(model: Path):
    # Packed KV is unpacked where it is cut, which other products read than MLX's own.
    how = {"kv_bits": BITS[model], "segment": SEGMENT} if BITS[model] else {}
    with Reference(model, **how) as reference:
        yield reference


def sharing(model: Path, root: Path | None = None, **options: Any) -> Rig:
    return Rig(model, root, **{"segment": SEGMENT, "kv_bits": BITS[model]} | options)


PROMPTS = [prompt(PREFIX) + prompt(30 + 25 * i, seed=i + 1) for i in range(4)]


def assert_nothing_is_left(rig: Rig) -> None:
    rig.settle()
    gc.collect()
    assert rig.on_engine(lambda: len(rig.loaded.segments)) == 0
    if rig.scheduler.bridge is not None:
        rig.on_engine(lambda: check_pool(rig.pool, {}))


class Watching(Output):
    """Notes with each of its tokens what the engine holds."""

    def __init__(self, rig: Rig):
        super().__init__()
        self._rig = rig
        self.bytes: dict[int, tuple[int, int]] = {}
        """By how many rows decode: (bytes of segments, bytes of tails)."""

    def token(self, token: int, likelihood: Any = None) -> None:
        batches = self._rig.scheduler._batches
        rows = sum(len(batch.rows) for batch in batches)
        self.bytes[rows] = held_bytes(caches_of(self._rig))
        super().token(token, likelihood)


def caches_of(rig: Rig) -> list[Any]:
    caches: list[Any] = [batch._cache for batch in rig.scheduler._batches]
    return caches + [s.kv.cache for s in rig.scheduler.running if s.kv.cache is not None]


def held_bytes(caches: Iterable[Any]) -> tuple[int, int]:
    """(bytes of segments, each counted once; bytes of tails)."""
    found: dict[int, Segment] = {}
    tails = 0
    layers = [layer for cache in caches for _, layer in leaves(cache)]
    for leaf in [row for layer in layers for row in getattr(layer, "rows", [layer])]:
        if hasattr(leaf, "keys"):
            tails += sum(array.nbytes for array in arrays_of([leaf.keys, leaf.values]))
        found |= {id(segment): segment for segment in getattr(leaf, "segments", ())}
    return sum(array.nbytes for segment in found.values() for array in segment.tensors.values()), tails


# --------------------------------------------------------------------------- exactness


@pytest.mark.parametrize(
    ("model", "segment"),
    rest_slow(
        [(model, segment) for model in WHOLE for segment in (SEGMENT, mlx_adapter.SEGMENT)],
        ("qwen3", SEGMENT),
        ("qwen3 8", mlx_adapter.SEGMENT),
    ),
    indirect=["model"],
    scope="module",
)
def test_a_hit_has_the_bits_of_a_cold_run(model: Path, uncached: Reference, tmp_path: Path, segment: int):
    tokens = prompt(900)
    with sharing(model, tmp_path, record=True, segment=segment) as rig:
        assert_same(rig, tokens, uncached, hot=0, cold=0)
        assert_same(rig, tokens, uncached, hot=896, cold=0)
        assert_same(rig, tokens[:600] + prompt(57, seed=9), uncached, hot=576, cold=0)
        for length in (2 * SEGMENT - 1, 2 * SEGMENT, 2 * SEGMENT + 1, 2 * SEGMENT + 20):
            output = rig.run(tokens[:length], 3)
            assert output.got == uncached(tokens[:length], 3)[0]
        assert_nothing_is_left(rig)
    with sharing(model, tmp_path, record=True, segment=segment) as rig:
        assert_same(rig, tokens, uncached, hot=0, cold=896)
        assert_same(rig, tokens, uncached, hot=896, cold=0)
    with sharing(model, tmp_path, record=True, hot=0, segment=segment) as rig:
        assert_same(rig, tokens[:700] + prompt(99, seed=9), uncached, hot=0, cold=640)
        assert_same(rig, tokens, uncached, hot=0, cold=896)
        assert_nothing_is_left(rig)


@MODELS_AND_SEGMENTS
def test_turns_that_append_have_the_bits_of_a_cold_run(model: Path, uncached: Reference, segment: int):
    """KV of answers too, which is computed a token at a time."""
    with sharing(model, record=True, segment=segment) as rig:
        tokens = prompt(2 * SEGMENT - 20)
        for turn in range(3):
            assert rig.run(tokens, 70).got == uncached(tokens, 70)[0]
            known = (len(tokens) + 69) // BLOCK * BLOCK
            tokens = tokens + uncached(tokens, 70)[0] + prompt(40, seed=turn)
            assert_same(rig, tokens, uncached, hot=known, cold=0, n=3)


@MODELS_AND_SEGMENTS
def test_a_rows_logits_do_not_depend_on_who_shares(model: Path, segment: int):
    """The same bits alone and in batches of any others, also of rows without a segment."""
    with sharing(model, segment=segment) as rig:

        def compare() -> None:
            loaded = rig.loaded
            names = [bytes([i]) for i in range(64)]

            def row(length: int) -> Any:
                cache = mlx_adapter.new_cache(loaded.model, length + N)
                tokens = [*PROMPTS[0][:length]]
                for start in range(0, length, BLOCK):
                    loaded.segments.cut(cache, names, BLOCK, length, length + N, last=False)
                    loaded.model(mx.array([tokens[start : start + BLOCK]]), cache=cache)
                    mx.eval(mlx_adapter.state_arrays(cache))
                loaded.segments.cut(cache, names, BLOCK, length, length + N, last=True)
                return cache

            lengths = (PREFIX, 100, 2 * SEGMENT + 7, PREFIX)
            alone = []
            for length in lengths:
                cache = row(length)
                alone.append([loaded.model(mx.array([[token]]), cache=cache)[0] for token in (5, 6)])
            for order in ([0, 1, 2, 3], [2, 0], [3, 2, 1], [1, 3]):
                batch = mlx_adapter.merge([row(lengths[i]) for i in order])
                for step, token in enumerate((5, 6)):
                    logits = loaded.model(mx.array([[token]] * len(order)), cache=batch)
                    for place, i in enumerate(order):
                        assert mx.array_equal(logits[place], alone[i][step]).item(), (order, i, step)

        rig.on_engine(compare)


# --------------------------------------------------------------------------- once in live memory


# Of the fast ones test_segment_attention.py's requests share by the scheduler too.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "origin", "speculate", "segment"),
    [
        *(
            (model, origin, speculate, (SEGMENT, mlx_adapter.SEGMENT)[(at + speculate + number) % 2])
            for number, model in enumerate(WHOLE)
            for at, origin in enumerate(("cold", "ram", "ssd"))
            for speculate in (True, False)
        ),
        ("llama", "ssd", True, SEGMENT),
        ("glm4_moe", "ram", True, SEGMENT),
    ],
    indirect=["model"],
    scope="module",
)
def test_four_requests_hold_their_prefix_once(
    model: Path, uncached: Reference, tmp_path: Path, origin: str, speculate: bool, segment: int, monkeypatch
):
    """Together, from nothing, from RAM, from SSD with no RAM tier at all."""
    want = [uncached.once(tokens, LONG)[0] for tokens in PROMPTS]
    hot = 0 if origin == "ssd" else 1 << 30
    if origin == "ssd":
        with sharing(model, tmp_path, segment=segment) as rig:
            rig.run(PROMPTS[0], 2)
    if speculate:
        guess_by(monkeypatch, half_right([p + w for p, w in zip(PROMPTS, want, strict=True)], 1))
    with sharing(model, tmp_path, hot=hot, speculate=speculate, segment=segment) as rig:
        if origin == "ram":
            rig.run(PROMPTS[0], 2)
            assert_nothing_is_left(rig)
        watching = [Watching(rig) for _ in PROMPTS]
        running = [
            rig.start(tokens, LONG, output=output) for tokens, output in zip(PROMPTS, watching, strict=True)
        ]
        assert [output.tokens() for output in running] == want
        layout = rig.loaded.layout
        assert layout is not None
        prefix = layout.nbytes(3 * SEGMENT)
        seen = [held[rows] for output in watching for held in [output.bytes] for rows in held if rows == 4]
        assert seen, "four rows decoded at once"
        for shared, tails in seen:
            assert shared == prefix, "one copy of three full segments, or of a short one"
            assert tails <= 4 * layout.nbytes(2 * SEGMENT)
        if origin == "ssd":
            # The part behind the segments is read by each, since there is no RAM tier.
            assert rig.store.stats.restored <= PREFIX // BLOCK + 1 + 3 * (SEGMENT // BLOCK)
        assert_nothing_is_left(rig)


@pytest.mark.parametrize("family", rest_slow((*MIXED, *LATENTS), "deepseek_v3"))
def test_layers_of_all_tokens_share_beside_others(family: str, tmp_path: Path):
    """Windows and recurrent state beside them are each request's own. Latents of MLA are shared, too."""
    folder = build_family(family, tmp_path / family)
    with Rig(folder, segment=SEGMENT) as rig:
        alone = [rig.run(tokens, N).got for tokens in PROMPTS]
    with Rig(folder, segment=SEGMENT) as rig:
        rig.run(PROMPTS[0][:PREFIX], 2)
        watching = [Watching(rig) for _ in PROMPTS]
        running = rig.on_engine(
            lambda: [rig.start(t, N, output=o) for t, o in zip(PROMPTS, watching, strict=True)]
        )
        assert [output.tokens() for output in running] == alone
        layout = rig.loaded.layout
        assert layout is not None
        shared = {held[4][0] for output in watching for held in [output.bytes] if 4 in held}
        assert shared == {layout.nbytes(3 * SEGMENT)}
        assert_nothing_is_left(rig)


@pytest.mark.parametrize("family", rest_slow(("qwen3", *LATENTS), "deepseek_v3"))
def test_short_rests_behind_a_prefix_that_is_all_in_segments(family: str, tmp_path: Path):
    """Their ends are computed together, over rows without a tail."""
    folder = build_family(family, tmp_path / family)
    prefix = prompt(2 * SEGMENT)
    prompts = [prefix + prompt(40, seed=seed) for seed in range(3)]
    with Rig(folder, segment=SEGMENT) as rig:
        alone = [rig.run(tokens, 8).got for tokens in prompts]
    for hot in (True, False):
        with Rig(folder, segment=SEGMENT) as rig:
            if hot:
                rig.run(prefix + prompt(20, seed=9), 2)
            running = rig.on_engine(lambda rig=rig: [rig.start(tokens, 8) for tokens in prompts])
            assert [output.tokens() for output in running] == alone
            assert_nothing_is_left(rig)


@pytest.mark.parametrize("family", rest_slow(("qwen3", *LATENTS), "deepseek_v3"))
def test_a_row_of_latents_is_a_batch_alone_too(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its passes read latents as they are; those over one sequence's cache make keys and values of all."""
    let_rows_pay(monkeypatch, True)  # Else a measurement decides.
    folder = build_family(family, tmp_path / family)
    with Rig(folder) as rig:
        output = rig.start(PROMPTS[0][:100], LONG)
        output.first.wait(60)
        merged = rig.on_engine(lambda: rig.scheduler._batches[0]._merged)
        assert merged == (family in LATENTS)
        output.tokens()


@MODELS_AND_SEGMENTS
def test_those_who_join_later_share_and_those_who_leave_take_nothing_away(
    model: Path, uncached: Reference, segment: int
):
    want = [uncached.once(tokens, 3 * N)[0] for tokens in PROMPTS]
    with sharing(model, segment=segment) as rig:
        first = rig.start(PROMPTS[0], 3 * N)
        first.first.wait(60)
        short = rig.start(PROMPTS[1], 3)
        assert short.tokens() == want[1][:3]
        gone = rig.start(PROMPTS[2], 3 * N)
        gone.first.wait(60)
        rig.scheduler.cancel(gone.sequence)
        late = rig.start(PROMPTS[3], 3 * N)
        assert first.tokens() == want[0]
        assert late.tokens() == want[3]
        assert_nothing_is_left(rig)


@pytest.mark.parametrize("reuse", [True, False])
def test_answers_of_a_prompt_share_it(model: Path, uncached: Reference, reuse: bool):
    """n > 1: the same prompt, all of it but less than a short segment and what each has its own room for."""
    tokens = prompt(995)
    want = uncached.once(tokens, N)[0]
    with sharing(model, reuse=reuse, segment=mlx_adapter.SEGMENT) as rig:
        watching = [Watching(rig) for _ in range(8)]
        running = rig.on_engine(lambda: [rig.start(tokens, N, output=output) for output in watching])
        assert [output.tokens() for output in running] == [want] * 8
        layout = rig.loaded.layout
        assert layout is not None
        seen = {held[8] for output in watching for held in [output.bytes] if 8 in held}
        assert seen == {(layout.nbytes(768), 8 * layout.nbytes(256))}
        assert_nothing_is_left(rig)


@pytest.mark.parametrize("segment", SEGMENTS)
def test_a_spoiled_prompt_leaves_no_segment_to_others(model: Path, segment: int):
    tokens = prompt(2 * SEGMENT + 90, seed=5)
    with sharing(model, segment=segment) as rig:
        good = rig.run(tokens, 5).got
        whole = rig.loaded.model
        rig.loaded.model = Spoiled(whole, marked)
        with pytest.raises(OmlxdError, match="not numbers"):
            rig.start([*tokens, MARK], 5).tokens()
        assert_nothing_is_left(rig)
        rig.loaded.model = whole
        assert rig.run(tokens, 5).got == good


def test_what_a_restore_held_is_free_without_the_collector(model: Path, tmp_path: Path):
    """It looks rarely, and where memory is short prompts were refused for segments that nobody ran with."""
    with sharing(model, tmp_path) as rig:
        rig.run(PROMPTS[0], 2)
        rig.run(PROMPTS[1], 2)
    with sharing(model, tmp_path, hot=0) as rig:
        gc.collect()
        gc.disable()
        try:
            first = rig.start(PROMPTS[0], LONG)
            assert first.first.wait(60)
            assert rig.run(PROMPTS[1], 2).cold, "it restores beside segments that the first one holds"
            assert first.tokens()
            wait_until(lambda: not rig.on_engine(lambda: len(rig.loaded.segments)), 30)
        finally:
            gc.enable()


# --------------------------------------------------------------------------- admission


@pytest.mark.slow
def test_memory_for_a_prefix_that_somebody_holds_is_asked_for_once(model: Path, uncached: Reference):
    """Room for two prompts: with segments four run side by side, without never more than two."""
    most: dict[int, int] = {}
    for segment in (0, SEGMENT, mlx_adapter.SEGMENT):
        with sharing(model, segment=segment) as rig:
            layout = rig.loaded.layout
            assert layout is not None
            one = layout.nbytes(mlx_adapter.round_up(PREFIX + 200))

            def free(rig: Rig = rig, one: int = one) -> tuple[int, int]:
                return 10 * one, int(2.2 * one) - sum(held_bytes(caches_of(rig))) - rig.pool.hot_bytes

            admission = MemoryAdmission(rig.loaded, 0, lambda wants: None, measure=free)
            admission.take_budget(Budget())
            admission.begin_chunk = lambda: None  # type: ignore[method-assign]
            admission.end_chunk = lambda start, stop: None  # type: ignore[method-assign]
            admission.store = rig.store
            rig.scheduler.memory = admission
            watching = [Watching(rig) for _ in PROMPTS]
            running = [rig.start(t, LONG, output=o) for t, o in zip(PROMPTS, watching, strict=True)]
            assert [o.tokens() for o in running] == [uncached.once(t, LONG)[0] for t in PROMPTS]
            most[segment] = max(rows for output in watching for rows in output.bytes)
    assert most[0] <= 2
    assert most[SEGMENT] == most[mlx_adapter.SEGMENT] == 4


# --------------------------------------------------------------------------- which models


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        *(("qwen3", True), ("llama", True), ("phi3", True), ("qwen3_moe", True), ("glm4_moe", True)),
        *(
            ("gemma3_text", True),
            ("qwen3_5", True),
            ("gpt_oss", True),
            ("gemma4_text", True),
            ("gemma3n", True),
        ),
        *(
            ("falcon_h1", True),
            ("deepseek_v3", True),
            ("deepseek_v32", True),
            ("mamba2", False),
            ("recurrent_gemma", False),
        ),
    ],
)
def test_models_that_attend_otherwise_stay_as_they_are(name: str, shares: bool, tmp_path: Path):
    folder = build_family(name, tmp_path / name)
    loaded = mlx_adapter.load(folder, segment=SEGMENT)
    assert loaded.segments.tokens == (SEGMENT if shares else 0)
    kinds = {type(leaf) for _, leaf in leaves(mlx_adapter.new_cache(loaded.model, 10))}
    assert (segments.SequenceKVCache in kinds) == shares and not (shares and KVCache in kinds)
    if name == "qwen3":
        packed = build_family(name, tmp_path / "packed", changes={"head_dim": 64})
        assert mlx_adapter.load(packed, Quantisation(8), segment=SEGMENT).segments.how == Quantisation(8)
        rounds = build_family(name, tmp_path / "bf16", dtype="bf16")
        joins = mlx_adapter.backend() != "cpu"  # Whose products would round where segments meet.
        assert bool(mlx_adapter.load(rounds, segment=SEGMENT).segments.tokens) == joins


def test_the_inspector_sees_the_same_behind_segments(model: Path):
    tokens, seen = PROMPTS[0][: SEGMENT + 90], []
    if BITS[model]:
        pytest.skip("packed keys are not looked at")
    for segment in (0, SEGMENT):
        loaded = mlx_adapter.load(model, segment=segment)
        cache = mlx_adapter.new_cache(loaded.model, len(tokens))
        loaded.model(mx.array([tokens]), cache=cache)
        loaded.segments.cut(cache, [], BLOCK, len(tokens), len(tokens), last=True)
        assert bool(getattr(cache[0], "segments", [])) == bool(segment)
        attention = mlx_adapter.attention_from(loaded.model, cache, tokens[-1], len(tokens) - 1)
        assert attention is not None
        held = mlx_adapter.token_range(cache, SEGMENT - 30, SEGMENT + 30)
        seen.append([*attention, *held.values()])
    assert all(mx.array_equal(a, b).item() for a, b in zip(*seen, strict=True))


def test_attention_that_misses_segments_is_an_error(model: Path):
    """Not a wrong answer: what the cache gave out must come to `attend` before the next pass."""
    how = Quantisation(BITS[model]) if BITS[model] else None
    loaded = mlx_adapter.load(model, how, segment=SEGMENT)
    leaf = segments._behind_a_segment(loaded.model, mlx_adapter.new_cache(loaded.model, 10))[0]
    heads, dim = leaf.segments[0].pair(leaf.layer)[0].shape[1::2]
    new = mx.zeros((1, heads, 1, dim))
    leaf.update_and_fetch(new, new)
    with pytest.raises(RuntimeError, match="--share-prefix off"):
        leaf.update_and_fetch(new, new)
    keys, values = leaf.unread
    with pytest.raises(RuntimeError, match="--share-prefix off"):
        leaf.attend(new, [*keys] if how else keys + 1, values, 1.0, None, None)
