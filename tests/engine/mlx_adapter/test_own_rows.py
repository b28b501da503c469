"""Batches whose rows keep arrays of their own: the answers of joint arrays, and no row is ever copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from backends import let_rows_pay, use_backend
from families import FAMILIES, build_family
from family_configs import WINDOW
from fast_or_slow import rest_slow
from mlx_lm.models.cache import ArraysCache
from vision_families import build_vision_family

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter import Quantisation
from omlxd.engine.mlx_adapter.attention import row_costs
from omlxd.engine.mlx_adapter.cache import segments as segments_module
from omlxd.engine.mlx_adapter.cache.batch import WindowBatchKVCache
from omlxd.engine.mlx_adapter.cache.kinds import arrays_of, leaves
from omlxd.engine.mlx_adapter.cache.rows import OwnRowsKVCache
from omlxd.engine.mlx_adapter.cache.segments import Segment, SequenceKVCache
from omlxd.engine.mlx_adapter.runtime.device import compute_dtype

PACKED = ("qwen3 8", "qwen3 4", "gemma3_text 8", "qwen3_next 4")
"""Families, and bits of their per-token KV."""
WINDOWS = ("gemma3_text", "gemma4_text", "gemma4", "gpt_oss", "olmo3")
"""The third is mlx-vlm's, and masks its windows itself."""
LATENTS = ("deepseek_v3", "deepseek_v32", "kimi_linear")
"""MLA, alone, with an index that chooses among the latents, and beside recurrent layers."""
OWN = ("llama", "qwen3", "qwen3_next", "falcon_h1", "recurrent_gemma", "gemma3n", *WINDOWS, *PACKED, *LATENTS)
JOINT = ("mamba2",)
"""It keeps no such KV."""
CHOSEN = 25
"""Tokens that an index chooses: fewer than most rows have."""


@pytest.fixture(autouse=True)
def mlx_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a pretended Mac: its kernels have batches of their own (tests/metal)."""
    use_backend(monkeypatch, "mlx")


@pytest.fixture(params=[True, False], ids=["pays", "does not pay"])
def pays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    let_rows_pay(monkeypatch, request.param)
    return request.param


def rows_of(cache: Any) -> Iterator[OwnRowsKVCache]:
    return (leaf for _, leaf in leaves(cache) if isinstance(leaf, OwnRowsKVCache))


def load(name: str, root: Path, changes: Mapping[str, Any] | None = None) -> mlx_adapter.LoadedModel:
    """Of a family, and with KV in so many bits: `qwen3 8`."""
    family, _, bits = name.partition(" ")
    changes = {"head_dim": 64} | dict(changes or {}) if bits else changes
    if family == "deepseek_v32":
        changes = {"index_topk": CHOSEN} | dict(changes or {})
    build = build_family if family in FAMILIES else build_vision_family
    folder = build(family, root / family, **({"changes": changes} if changes else {}))
    return mlx_adapter.load(folder, Quantisation(int(bits)) if bits else None)


def prefilled(loaded: mlx_adapter.LoadedModel, length: int, seed: int) -> mlx_adapter.Cache:
    cache = mlx_adapter.new_cache(loaded.model, 128)
    mx.eval(loaded.model(mx.random.randint(5, 200, (1, length), key=mx.random.key(seed)), cache=cache))
    return cache


@pytest.mark.parametrize(
    "family", rest_slow([*OWN, *JOINT], "qwen3", "gemma3_text", "falcon_h1", "qwen3 8", "deepseek_v3", *JOINT)
)
def test_which_models_use_them(family: str, pays: bool, tmp_path):
    loaded = load(family, tmp_path)
    batch = mlx_adapter.merge([prefilled(loaded, 9, 0), prefilled(loaded, 9, 1)])
    assert bool(list(rows_of(batch))) == (pays and family in OWN)
    joint = [leaf for _, leaf in leaves(batch) if not isinstance(leaf, OwnRowsKVCache)]
    assert not (pays and family in OWN) or {type(leaf) for leaf in joint} <= {ArraysCache}


def test_windows_that_are_masked_otherwise_stay_joint(tmp_path, monkeypatch: pytest.MonkeyPatch):
    let_rows_pay(monkeypatch, True)
    loaded = load("gemma3_text", tmp_path)
    batch = mlx_adapter.merge([prefilled(loaded, 9, 0)])
    assert len(list(rows_of(batch))) == 4
    loaded.model.model.window_size += 1
    del loaded.model.make_cache
    assert mlx_adapter.use_own_rows(loaded.model)
    batch = mlx_adapter.merge([prefilled(loaded, 9, 0)])
    assert [type(leaf) for leaf in batch] == [WindowBatchKVCache, OwnRowsKVCache] * 2


@pytest.mark.parametrize("family", rest_slow(OWN, "qwen3", "gemma3_text", "qwen3_next 4"))
def test_a_model_decodes_as_with_joint_arrays(family: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Also where rows keep arrays of their own, and come to one array, as others join; or the other way."""
    out = list[list[np.ndarray]]()
    for own, form_of_two in ((False, False), (True, True), (False, True), (True, False)):
        let_rows_pay(monkeypatch, own or form_of_two)
        if own != form_of_two:
            forms = [False, True, form_of_two, own]
            monkeypatch.setattr(row_costs, "pays_for", lambda lengths, now, forms=forms: forms[len(lengths)])
        loaded = load(family, tmp_path)
        rows = [prefilled(loaded, length, seed) for seed, length in enumerate((70, 9, 33))]
        batch = mlx_adapter.merge([rows[0]])
        for cache in rows[1:]:
            mlx_adapter.extend(batch, cache)
        assert bool(list(rows_of(batch))) == (own or (form_of_two and family in LATENTS))
        found: list[mx.array] = []
        lengths = [70, 9, 33]
        if mlx_adapter.can_take_back(batch, 3):
            tokens = mx.array([[step + row for row in range(3)] for step in range(1, 6)]).T
            found.append(loaded.model(tokens, cache=batch)[:, -1])
            mlx_adapter.trim(batch, [2, 0, 3])
            lengths = [73, 14, 35]
        for step in range(3):
            found.append(loaded.model(mx.array([[step + 7]] * 3), cache=batch)[:, -1])
        tensors = mlx_adapter.row_tensors(batch, 2, 5, lengths[2] + 3)
        states = mlx_adapter.row_states(batch, 2)
        assert loaded.layout is not None and loaded.states is not None
        assert set(tensors) == {name for group in loaded.layout.groups for name in group.names}
        assert {name: array.shape for name, array in states.items()} == loaded.states.shapes(lengths[2] + 3)
        kept = [array for array in (*tensors.values(), *states.values()) if array.dtype != mx.uint32]
        mlx_adapter.keep_rows(batch, [0, 2])
        found.append(loaded.model(mx.array([[11], [12]]), cache=batch)[:, -1])
        joined = prefilled(loaded, 20, 9)
        mlx_adapter.extend_batch(batch, mlx_adapter.merge([joined]))
        found.append(loaded.model(mx.array([[11], [12], [13]]), cache=batch)[:, -1])
        out.append([np.array(array.astype(mx.float32)) for array in (*found, *kept)])
    for got, want in ((got, want) for arrays in out[1:] for got, want in zip(arrays, out[0], strict=True)):
        # A last bit may take a number to the next one that packed KV has; and this Gemma 4 makes much of one.
        loose = family in (*PACKED, "gemma4_text", "gemma4")
        np.testing.assert_allclose(got, want, atol=3e-3 if loose else 3e-4)


@pytest.mark.parametrize(
    "family", rest_slow(["gemma3n", *WINDOWS, *PACKED[:3], *LATENTS], "gpt_oss", "qwen3 8")
)
def test_a_row_has_the_bits_that_it_has_alone(family: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """As others join and leave, in passes of one token and of several, until windows come round."""
    let_rows_pay(monkeypatch, True)
    monkeypatch.setattr(row_costs.Costs, "pays_alone", lambda *_: True)
    loaded = load(family, tmp_path)
    lengths = (2 * WINDOW + 6, 9, WINDOW + 1)
    alone = [prefilled(loaded, length, seed) for seed, length in enumerate(lengths)]
    batch = mlx_adapter.merge([mlx_adapter.copied(alone[0])])
    mlx_adapter.extend_batch(batch, mlx_adapter.merge([mlx_adapter.copied(cache) for cache in alone[1:]]))
    if family in LATENTS:  # Passes of one sequence's cache make keys and values of each head.
        alone = [mlx_adapter.merge([cache]) for cache in alone]

    def check(new: int, seed: int, forget: list[int]) -> None:
        tokens = mx.random.randint(5, 200, (len(alone), new), key=mx.random.key(seed))
        got = loaded.model(tokens, cache=batch)
        mlx_adapter.trim(batch, forget)
        for row, cache in enumerate(alone):
            want = loaded.model(tokens[row : row + 1], cache=cache)
            mlx_adapter.trim(cache, [forget[row]])
            assert mx.array_equal(got[row : row + 1], want), (new, seed, row)

    for step in range(WINDOW + 3):
        check(*(5, step, [2, 0, 4]) if step % 8 == 1 else (1, step, [0] * 3))
    batch = mlx_adapter.copied(batch)
    mlx_adapter.keep_rows(batch, [2, 0])
    last = prefilled(loaded, 20, 9)
    mlx_adapter.extend(batch, mlx_adapter.copied(last))
    alone = [alone[2], alone[0], mlx_adapter.merge([last]) if family in LATENTS else last]
    for step in range(4):
        check(3 - 2 * (step % 2), 100 + step, [0] * 3)
    for row, cache in enumerate(alone):
        if family in LATENTS:
            cache = [leaf.extract(0) for leaf in cache]
        length = next(leaf.offset for _, leaf in leaves(cache) if hasattr(leaf, "offset"))
        want = {**mlx_adapter.token_range(cache, 3, length), **mlx_adapter.state_tensors(cache)}
        got = {**mlx_adapter.row_tensors(batch, row, 3, length), **mlx_adapter.row_states(batch, row)}
        assert set(got) == set(want) and all(mx.array_equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("family", ["qwen3", "qwen3 8", "gemma3_text", "deepseek_v3"])
def test_joins_and_leaves_copy_nothing(family: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    let_rows_pay(monkeypatch, True)
    tokens = 1 << 15
    loaded = load(family, tmp_path, {"sliding_window": tokens - 100} if family in WINDOWS else None)

    def held(length: int) -> mlx_adapter.Cache:
        cache, kept = mlx_adapter.new_cache(loaded.model, length), length - 100
        assert loaded.layout is not None and loaded.states is not None
        arrays = {
            name: mx.zeros((1, group.heads, kept, group.dim), compute_dtype(group.dtype))
            for group in loaded.layout.groups
            for name in group.names
        }
        mlx_adapter.append_tokens(cache, arrays, 0, kept, length)
        states = {name: mx.zeros(shape) for name, shape in loaded.states.shapes(kept).items()}
        mlx_adapter.put_states(cache, states, kept)
        mx.eval(mlx_adapter.state_arrays(cache))
        return cache

    size = sum(array.nbytes for array in mlx_adapter.state_arrays(held(tokens)))
    batch, before, work = mlx_adapter.merge([held(tokens)]), 0, 0

    def peak(tokens: list[int]) -> int:
        """Beside what is held `before`, and what attention of each row takes in any case."""
        mx.reset_peak_memory()
        mx.eval(loaded.model(mx.array(tokens)[:, None], cache=batch), mlx_adapter.state_arrays(batch))
        return mx.get_peak_memory() - before - work * len(tokens)

    work = peak([1]) - mx.get_active_memory()
    assert work < size, "MLX copies packed KV that has room behind it, of a layer at a time"
    for _ in range(3):
        mlx_adapter.extend(batch, held(tokens))
    before = mx.get_active_memory()
    assert before >= 4 * size
    assert peak([1, 2, 3, 4]) < size // 4, "a step after joining"
    mlx_adapter.extend(batch, held(1024))
    assert peak([1, 2, 3, 4, 5]) < size // 2
    mlx_adapter.keep_rows(batch, [0, 3, 4])
    assert mx.get_active_memory() < before - 2 * size + size // 2
    assert peak([1, 2, 3]) < 0
    for leaf in rows_of(batch):
        room = [arrays_of(row.keys)[0].shape[2] for row in leaf.rows]
        full = getattr(leaf.rows[0], "max_size", tokens)
        assert room[:2] == [full, full] and room[2] <= 924 + 256, "none has grown"


@pytest.mark.parametrize("new", [1, 3])
def test_what_rows_share_is_read_once_for_all_of_them(new: int):
    """Two rows behind two segments, one behind the first of them, one behind its own, one behind none."""
    segments = [
        Segment(
            {f"l.{name}": normal(2 * at + kv, (1, 2, 32, 16)) for kv, name in enumerate(("keys", "values"))}
        )
        for at in range(3)
    ]
    held, lengths = [[0, 1], [0, 1], [0], [2], []], [17, 20, 11, 19, 20]
    rows: list[SequenceKVCache] = []
    for seed, (own, length) in enumerate(zip(held, lengths, strict=True)):
        rows.append(row := SequenceKVCache("l"))
        for index in own:
            row.add_segment(segments[index])
        row.update_and_fetch(*(normal(50 + 2 * seed + kv, (1, 2, length, 16)) for kv in (0, 1)))
        row.unread = None
    cache = OwnRowsKVCache(rows)
    fresh = [normal(90 + kv, (5, 2, new, 16)) for kv in (0, 1)]
    keys, values = cache.update_and_fetch(*fresh)
    with pytest.raises(RuntimeError, match="does not read the rows"):
        cache.update_and_fetch(*fresh)
    queries = normal(92, (5, 6, new, 16))
    got = cache.attend(queries, keys, values, 0.25, cache.make_mask(new), None)
    assert cache.offset.tolist() == [64 + 17 + new, 64 + 20 + new, 32 + 11 + new, 32 + 19 + new, 20 + new]
    for at, row in enumerate(rows):
        pair = row.all_kv() if row.segments else row.keys_and_values()
        want = mx.fast.scaled_dot_product_attention(queries[at : at + 1], *pair, scale=0.25, mask="causal")
        np.testing.assert_allclose(got[at : at + 1], want, atol=1e-5)
    groups = segments_module._sharing([row.segments for row in rows])
    assert [(rows, len(shared)) for rows, shared in groups] == [([0, 1, 2], 1), ([3], 1), ([4], 0)]


def test_a_layer_that_masks_otherwise_is_an_error():
    cache = OwnRowsKVCache([SequenceKVCache("l")])
    with pytest.raises(RuntimeError, match="mask of its own"):
        cache.make_mask(1, window_size=8)
    with pytest.raises(RuntimeError, match="mask of its own"):
        cache.make_mask(1, return_array=True)
    new = normal(0, (1, 2, 1, 16))
    with pytest.raises(RuntimeError, match="masks more"):
        cache.attend(new, *cache.update_and_fetch(new, new), 1.0, mx.zeros((1, 1)), None)


def normal(seed: int, shape: tuple[int, ...]) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))
