"""Rows with arrays of their own on CUDA, with kernels of MLX's ops that write where they are told to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from families import build_family
from family_configs import WINDOW
from fast_or_slow import rest_slow
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from vision_families import build_vision_family

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter import Quantisation
from omlxd.engine.mlx_adapter.cache.kinds import leaves
from omlxd.engine.mlx_adapter.cache.packed import PARTS
from omlxd.engine.mlx_adapter.cache.segments import Segment, SequenceKVCache
from omlxd.engine.mlx_adapter.cache.tails import MOST_TAKEN_BACK
from omlxd.engine.mlx_adapter.cuda.attention import attention_packed
from omlxd.engine.mlx_adapter.cuda.rows import addressed_rows
from omlxd.engine.mlx_adapter.cuda.rows.addressed_rows import AddressedKVCache
from omlxd.engine.mlx_adapter.cuda.rows.tail import Tail
from omlxd.engine.mlx_adapter.cuda.step import compiled_step
from omlxd.engine.mlx_adapter.cuda.step.compiled_step import CompiledStep
from omlxd.engine.mlx_adapter.model import checks

from ..mlx_adapter.test_own_rows import PACKED, WINDOWS, load, prefilled
from .conftest import Reference

HYBRIDS = ("qwen3_next", "falcon_h1")
LATENTS = ("deepseek_v3", "kimi_linear")


@pytest.fixture(autouse=True)
def on_cuda(reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' stand-ins look their addresses up, which no trace can."""
    monkeypatch.setattr(mx, "compile", lambda function, **how: function)
    reference()


def addressed(cache: Any) -> list[AddressedKVCache]:
    return [leaf for _, leaf in leaves(cache) if isinstance(leaf, AddressedKVCache)]


def normal(seed: int, shape: tuple[int, ...]) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize(
    "family",
    rest_slow(
        ["gemma3n", *WINDOWS[:4], *HYBRIDS, *PACKED[1:], *LATENTS],
        "gemma3_text",
    ),
)
def test_a_row_has_the_logits_that_it_has_alone(family: str, tmp_path, vlm_anew):
    """As others join and leave, in steps, compiled steps and passes of several, until windows come round."""
    loaded = load(family, tmp_path)
    lengths = (2 * WINDOW + 6, 9, WINDOW + 1)
    alone = [prefilled(loaded, length, seed) for seed, length in enumerate(lengths)]
    batch = mlx_adapter.merge([mlx_adapter.copied(alone[0])])
    mlx_adapter.extend_batch(batch, mlx_adapter.merge([mlx_adapter.copied(cache) for cache in alone[1:]]))
    assert addressed(batch)
    left = [leaf for _, leaf in leaves(batch) if not isinstance(leaf, AddressedKVCache)]
    assert {type(leaf) for leaf in left} <= {ArraysCache}
    step, steps, done = CompiledStep(loaded.model), 0, 0
    several = mlx_adapter.can_take_back(batch, 3)

    def check(new: int, seed: int, forget: list[int]) -> None:
        nonlocal steps, done
        tokens = mx.random.randint(5, 200, (len(alone), new), key=mx.random.key(seed))
        with mlx_adapter.last_positions(new):
            got = step(tokens, batch, steps)
            done, steps = done + (got is not None), steps + 1
            got = loaded.model(tokens, cache=batch) if got is None else got
            mx.eval(got)
            if any(forget):
                mlx_adapter.trim(batch, forget)
            for row, cache in enumerate(alone):
                want = loaded.model(tokens[row : row + 1], cache=cache)
                if any(forget):
                    mlx_adapter.trim(cache, [forget[row]])
                np.testing.assert_allclose(got[row : row + 1], want, atol=2e-3)

    for turn in range(WINDOW + 9):
        check(*(5, turn, [2, 0, 4]) if several and turn % 8 == 5 else (1, turn, [0] * 3))
    assert done > WINDOW // 2
    mlx_adapter.let_go(mlx_adapter.keep_rows(batch, [2, 0]))
    alone, steps = [alone[2], alone[0], prefilled(loaded, 20, 9)], 0
    mlx_adapter.extend(batch, mlx_adapter.copied(alone[2]))
    for turn in range(8):
        check(1, 100 + turn, [0] * 3)
    for row, cache in enumerate(alone):
        length = next(leaf.offset for _, leaf in leaves(cache) if hasattr(leaf, "offset"))
        want = {**mlx_adapter.token_range(cache, 3, length), **mlx_adapter.state_tensors(cache)}
        got = {**mlx_adapter.row_tensors(batch, row, 3, length), **mlx_adapter.row_states(batch, row)}
        assert set(got) == set(want)
        for name, array in want.items():
            if array.dtype != mx.uint32:
                np.testing.assert_allclose(got[name], array, atol=2e-3)


@pytest.mark.parametrize("family", rest_slow(["qwen3", "gemma3_text", "qwen3 8", "deepseek_v3"]))
def test_joining_and_leaving_copy_nothing_and_a_row_grows_alone(family: str, tmp_path):
    loaded = load(family, tmp_path)
    batch = mlx_adapter.merge([prefilled(loaded, 9, 0)])
    mlx_adapter.extend(batch, prefilled(loaded, 120, 1))
    step = CompiledStep(loaded.model)
    step(mx.array([[1], [2]]), batch, 0)
    held = [(tail, tail.parts) for leaf in addressed(batch) for tail in leaf.tails[:1]]
    mlx_adapter.extend(batch, prefilled(loaded, 33, 2))
    capacity = addressed(batch)[0].tails[1].capacity
    for turn in range(2 * 256 - 120):
        logits = step(mx.array([[1]] * len(addressed(batch)[0].tails)), batch, turn)
        if logits is None:
            loaded.model(mx.array([[1]] * len(addressed(batch)[0].tails)), cache=batch)
        if turn == 100:
            mlx_adapter.let_go(mlx_adapter.keep_rows(batch, [0, 1]))
    full = [leaf for leaf in addressed(batch) if not leaf.window]
    assert full[0].tails[1].capacity > capacity
    kept = [parts for tail, parts in held if tail in [leaf.tails[0] for leaf in full]]
    for leaf, parts in zip(full, kept, strict=True):
        grown = leaf.ends[0] > parts[0].shape[2]
        assert all((a is b) != grown for a, b in zip(leaf.tails[0].parts, parts, strict=True))
        assert leaf.tails[0].is_known
    rings = [leaf for leaf in addressed(batch) if leaf.window]
    assert all(t.capacity == WINDOW + MOST_TAKEN_BACK for leaf in rings for t in leaf.tails)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3 8"])
def test_a_copy_of_a_batch_goes_on_by_itself(family: str, tmp_path):
    loaded = load(family, tmp_path)
    first = mlx_adapter.merge([prefilled(loaded, 9, 0), prefilled(loaded, 30, 1)])
    step = CompiledStep(loaded.model)
    step(mx.array([[1], [2]]), first, 9)
    second, out = mlx_adapter.copied(first), list[list[np.ndarray]]()
    for cache, other in ((first, 5), (second, 6), (first, 5)):
        loaded.model(mx.array([[other], [other]]), cache=cache)
        mlx_adapter.trim(cache, [1, 1])
        logits = loaded.model(mx.array([[7], [8]]), cache=cache)
        mlx_adapter.trim(cache, [1, 1])
        kept = mlx_adapter.row_tensors(cache, 1, 0, 31)
        out.append([np.array(array) for array in (logits, *kept.values())])
    for got, want in zip(out[1], out[0], strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(out[2], out[0], strict=True):
        np.testing.assert_array_equal(got, want)
    addresses = [
        {number for leaf in addressed(c) for tail in leaf.tails for number in tail.address[:-1]}
        for c in (first, second)
    ]
    assert addresses[0] and addresses[1] and not addresses[0] & addresses[1]


@pytest.mark.parametrize("new", [3, 70])
@pytest.mark.parametrize(
    "kind", ["plain", "window", "sinks", "packed", "segments", "packed segments", "empty"]
)
def test_more_tokens_than_the_kernels_take_are_read_by_mlx(
    kind: str, new: int, monkeypatch: pytest.MonkeyPatch
):
    """Both ways give the same."""
    how = Quantisation(8, 64)
    plain = {f"l.{name}": normal(80 + at, (1, 2, 32, 64)) for at, name in enumerate(("keys", "values"))}
    packed = {
        f"{name}.{part}": array
        for name, whole in plain.items()
        for part, array in zip(PARTS, how.pack(whole), strict=True)
    }
    held = {"segments": Segment(plain), "packed segments": Segment(packed, how)}

    def row(length: int, seed: int) -> Any:
        makers: dict[str, Any] = {
            "window": lambda: RotatingKVCache(48),
            "packed": lambda: SequenceKVCache(how=how),
            "segments": lambda: SequenceKVCache("l"),
            "packed segments": lambda: SequenceKVCache("l", how),
        }
        cache = makers.get(kind, KVCache)()
        if kind in held and seed:
            cache.add_segment(held[kind])
        if kind != "empty":
            cache.update_and_fetch(*(normal(2 * seed + at, (1, 2, length, 64)) for at in (0, 1)))
            cache.unread = None
        return cache

    queries = normal(92, (3, 6, new, 64))
    fresh = [normal(90 + at, (3, 2, new, 64)) for at in (0, 1)]
    sinks = normal(93, (6,)) if kind == "sinks" else None
    out = []
    for most in (64, 2):
        cache = AddressedKVCache([row(length, seed) for seed, length in enumerate((9, 70, 33))])
        kernel, _ = cache._kernel, None
        monkeypatch.setattr(
            cache, "_kernel", lambda *given, kernel=kernel, most=most: (kernel(*given)[0], most)
        )
        keys, values = cache.update_and_fetch(*fresh)
        out.append(np.array(cache.attend(queries, keys, values, 0.2, cache.make_mask(new), sinks)))
        again = cache.keys_and_values()
        assert again[0] is keys and not cache.pending
        assert cache.offset.tolist() == [
            (0 if kind == "empty" else length) + new + 32 * (kind in held and seed > 0)
            for seed, length in enumerate((9, 70, 33))
        ]
    np.testing.assert_allclose(*out, atol=2e-2 if kind == "packed" else 1e-5)


def test_rows_with_an_index_are_copied(tmp_path):
    loaded = load("deepseek_v32", tmp_path)
    assert loaded.batchable and not mlx_adapter.has_own_rows(loaded.model)


@pytest.mark.parametrize(
    "family",
    rest_slow(["qwen3 8", *LATENTS, "gpt_oss", "gemma3n", *HYBRIDS], "qwen3 8"),
)
def test_rows_share_segments(family: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Of packed KV, of latents, of layers beside windows and recurrent state: steps and passes give what a
    row has alone, as rows with other segments join and leave."""
    monkeypatch.setattr(attention_packed, "SPAN", 32)
    monkeypatch.setattr(attention_packed, "in_use", lambda: True)
    name, _, bits = family.partition(" ")
    folder = build_family(name, tmp_path / name, changes={"head_dim": 64} if bits else None)
    loaded = mlx_adapter.load(folder, Quantisation(8) if bits else None, segment=32)
    assert loaded.segments.tokens == 32

    def prefilled(length: int, seed: int) -> mlx_adapter.Cache:
        tokens = [*range(9, 209), *range(300, 400)][:length]
        tokens[-5:] = [seed + 5] * 5
        names = [bytes([block]) for block in range((length - 5) // 16)]
        cache = mlx_adapter.new_cache(loaded.model, length + 30)
        for start in range(0, length, 16):
            loaded.segments.cut(cache, names, 16, length, length + 30, last=False)
            loaded.model(mx.array([tokens[start : start + 16]]), cache=cache)
        loaded.segments.cut(cache, names, 16, length, length + 30, last=True)
        return cache

    lengths = [100, 20, 133, 290]
    alone = [prefilled(length, seed) for seed, length in enumerate(lengths)]
    batch = mlx_adapter.merge([mlx_adapter.copied(alone[0])])
    for cache in alone[1:3]:
        mlx_adapter.extend(batch, mlx_adapter.copied(cache))
    leaf = next(leaf for leaf in addressed(batch) if any(leaf.segments))
    tells = bool(bits) or family in LATENTS
    assert [len(own) for own in leaf.segments] == [3, 0, 4] and (leaf.shared is None) == tells
    assert {type(leaf) for _, leaf in leaves(batch) if leaf not in addressed(batch)} <= {ArraysCache}
    assert leaf.segments[0][:2] == leaf.segments[2][:2], "one copy"
    step, turn = CompiledStep(loaded.model), 0

    def check(rows: list[int], new: int, forget: int = 0) -> None:
        nonlocal turn
        tokens = mx.random.randint(5, 200, (len(rows), new), key=mx.random.key(turn))
        with mlx_adapter.last_positions(new):
            got = step(tokens, batch, turn + 9)
            assert (got is not None) == (new == 1)
            got = loaded.model(tokens, cache=batch) if got is None else got
            mx.eval(got)
            forget = forget if mlx_adapter.can_take_back(batch, len(rows)) else 0
            if forget:
                mlx_adapter.trim(batch, [forget] * len(rows))
            turn += 1
            for at, row in enumerate(rows):
                want = loaded.model(tokens[at : at + 1], cache=alone[row])
                if forget:
                    mlx_adapter.trim(alone[row], [forget])
                np.testing.assert_allclose(got[at : at + 1], want, atol=2e-3)

    for new, forget in ((1, 0), (5, 2), (1, 0), (1, 0)):
        check([0, 1, 2], new, forget)
    mlx_adapter.extend(batch, mlx_adapter.copied(alone[3]))
    parts = 6 if bits else 2
    if tells:
        assert leaf.addresses()[1][parts + 1 :] == [0] * (12 * parts + 1), "room for 12 segments"
    for new, forget in ((1, 0), (3, 1), (1, 0)):
        check([0, 1, 2, 3], new, forget)
    mlx_adapter.let_go(mlx_adapter.keep_rows(batch, [2, 1]))
    for _ in range(3):
        check([2, 1], 1)
    got, want = mlx_adapter.row_tensors(batch, 0, 20, 130), mlx_adapter.token_range(alone[2], 20, 130)
    assert all(mx.array_equal(got[name], want[name]) for name in want)
    forgot = 3 if mlx_adapter.can_take_back(batch, 2) else 0
    assert leaf.offset.tolist()[0] == 133 + 3 + 5 + 3 + 2 + 3 - forgot


def test_attention_of_another_kind_is_an_error():
    cache = AddressedKVCache([KVCache(), KVCache()])
    fresh = [normal(at, (2, 2, 1, 16)) for at in (0, 1)]
    with pytest.raises(RuntimeError, match="mask of its own"):
        cache.make_mask(1, window_size=8)
    with pytest.raises(RuntimeError, match="mask of its own"):
        cache.make_mask(1, return_array=True)
    keys, values = cache.update_and_fetch(*fresh)
    with pytest.raises(RuntimeError, match="does not read the rows"):
        cache.update_and_fetch(*fresh)
    for given in ((keys, values, mx.zeros((1, 1))), (keys + 0, values, addressed_rows.OWN_MASK)):
        with pytest.raises(RuntimeError, match="or reads other KV"):
            cache.attend(keys, *given[:2], 1.0, given[2], None)
    with pytest.raises(RuntimeError, match="another type"):
        cache.pending = False
        cache.update_and_fetch(*(array.astype(mx.bfloat16) for array in fresh))
    filled = KVCache()
    filled.update_and_fetch(*(array[:1] for array in fresh))
    with pytest.raises(RuntimeError, match="don't mix"):
        AddressedKVCache([filled, KVCache()])
    with pytest.raises(RuntimeError, match="don't mix"):
        AddressedKVCache([filled]).extend(AddressedKVCache([KVCache()]))


@pytest.fixture
def vlm_anew() -> Iterator[None]:
    """mlx-vlm's modules take the function that attends as they are imported, once a process."""

    def taken_out() -> dict[str, Any]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "mlx_vlm"}

    before = taken_out()
    yield
    taken_out()
    sys.modules.update(before)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "pixtral", "gemma4"])
def test_models_that_take_images_have_them_too(family: str, tmp_path, vlm_anew):
    loaded = mlx_adapter.load(build_vision_family(family, tmp_path / family))
    alone = [prefilled(loaded, 9, 0), prefilled(loaded, 30, 1)]
    batch = mlx_adapter.merge([mlx_adapter.copied(cache) for cache in alone])
    assert loaded.blind == "" and len(addressed(batch)) == len(batch)
    for turn in range(compiled_step.AFTER + 2):
        tokens = mx.array([[turn + 7], [turn + 8]])
        got = loaded.model(tokens, cache=batch)
        for row, cache in enumerate(alone):
            np.testing.assert_allclose(
                got[row : row + 1], loaded.model(tokens[row : row + 1], cache=cache), atol=2e-3
            )


def test_windows_that_are_masked_otherwise_stay_joint_beside_rows_by_address(tmp_path):
    loaded = load("gemma3_text", tmp_path)
    loaded.model.model.window_size += 1
    del loaded.model.make_cache
    assert mlx_adapter.use_own_rows(loaded.model)
    alone = [prefilled(loaded, 9, 0), prefilled(loaded, WINDOW + 5, 1)]
    batch = mlx_adapter.merge([mlx_adapter.copied(cache) for cache in alone])
    assert len(addressed(batch)) == len(batch) // 2
    for turn in range(compiled_step.AFTER + 2):
        tokens = mx.array([[turn + 7], [turn + 8]])
        assert CompiledStep(loaded.model)(tokens, batch, turn) is None
        got = loaded.model(tokens, cache=batch)
        for row, cache in enumerate(alone):
            want = loaded.model(tokens[row : row + 1], cache=cache)
            np.testing.assert_allclose(got[row : row + 1], want, atol=2e-3)


def test_a_model_that_reads_its_kv_otherwise_is_copied(tmp_path, caplog):
    with caplog.at_level("INFO"):
        loaded = load("mamba2", tmp_path)
    assert "rows of a batch are copied as others join and leave" in caplog.text
    batch = mlx_adapter.merge([prefilled(loaded, 9, 0), prefilled(loaded, 9, 1)])
    assert not addressed(batch) and not mlx_adapter.has_own_rows(loaded.model)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3 8"])
def test_rows_that_attend_otherwise_are_copied(
    family: str, tmp_path, monkeypatch: pytest.MonkeyPatch, caplog
):
    own = Reference.over_tails
    monkeypatch.setattr(Reference, "over_tails", lambda *given, **how: own(*given, **how)[::-1])
    with caplog.at_level("INFO"):
        loaded = load(family, tmp_path)
    assert "from MLX's own" in caplog.text and not mlx_adapter.has_own_rows(loaded.model)


def test_rows_at_other_positions_are_copied(tmp_path, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(AddressedKVCache, "offset", property(lambda layer: mx.array(layer.ends) + 40))
    with caplog.at_level("INFO"):
        loaded = load("qwen3", tmp_path)
    assert "layers.0.keys of a row differs by" in caplog.text and not mlx_adapter.has_own_rows(loaded.model)


def test_a_model_without_shared_prefixes_has_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_step, "fused_step", lambda model: None)
    assert mlx_adapter.has_own_rows(load("qwen3", tmp_path).model)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_what_is_left_of_a_window_is_in_one_piece(family: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """A compiled step writes the next token into the arrays, and would write into a copy of a slice."""
    monkeypatch.setattr(checks, "use_own_rows", lambda model: False)
    loaded = load(family, tmp_path)
    batch = mlx_adapter.merge([prefilled(loaded, WINDOW + 9, 1), prefilled(loaded, WINDOW + 3, 2)])
    for cache, rows in ((prefilled(loaded, WINDOW + 9, 0), 1), (batch, 2)):
        loaded.model(mx.array([[7] * 5] * rows), cache=cache)
        mlx_adapter.trim(cache, [4] * rows)
        mx.eval(mlx_adapter.state_arrays(cache))
        for leaf in cache:
            if getattr(leaf, "max_size", 0):
                assert leaf.keys.shape[2] == WINDOW
                assert memoryview(leaf.keys).c_contiguous and memoryview(leaf.values).c_contiguous


def test_a_ring_that_grows_keeps_its_tokens():
    arrays = [mx.arange(40).reshape(1, 2, 20, 1) for _ in range(2)]
    tail = Tail(*arrays)
    tail.grow(7, 27, 32)  # Tokens 20 to 26 lie in columns 0 to 6.
    assert tail.capacity == 32
    want = [token % 20 for token in range(7, 27)]
    assert tail.in_order(7, 27)[0][0, 0, :, 0].tolist() == want
    assert [tail.keys[0, 0, token % 32, 0].item() for token in range(7, 27)] == want
