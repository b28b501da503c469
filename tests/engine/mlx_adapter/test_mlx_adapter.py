"""The assumptions that omlxd makes of the pinned mlx-lm, and the adapter's own functions."""

from __future__ import annotations

import shutil
from functools import partial
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from backends import use_backend
from cold_run import prompt
from families import FAMILIES, TOKEN_KV, build_family
from family_configs import CONFIGS
from fast_or_slow import SOME_FAMILIES, rest_slow
from mlx.utils import tree_flatten
from mlx_lm.models.cache import BatchKVCache, KVCache
from mlx_lm.utils import load as mlx_load

from omlxd.engine import mlx_adapter
from omlxd.engine.kvio.payload import DirectBuffers, copy_blocks, join_blocks, read_payload
from omlxd.engine.mlx_adapter.cache import batch as batch_kv
from omlxd.engine.mlx_adapter.cache import joining
from omlxd.engine.mlx_adapter.cache.packed import Quantisation
from omlxd.engine.mlx_adapter.cache.segments import SequenceKVCache
from omlxd.engine.mlx_adapter.runtime import arrays
from omlxd.kv.layout import Group, KVLayout
from tools.bench.kv_growth import capacities


def test_the_pin():
    assert version("mlx-lm") == "0.32.2"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("families")
    return lambda name: build_family(name, root / name)


@pytest.mark.parametrize("family", rest_slow(FAMILIES, *SOME_FAMILIES))
def test_every_family_is_told_by_its_caches(family: str, folders):
    loaded = mlx_adapter.load(folders(family))
    cache = mlx_adapter.new_cache(loaded.model, 100)
    classes = {type(leaf).__name__ for _, leaf in mlx_adapter.cache.kinds.leaves(cache)}
    assert classes == CONFIGS[family].classes
    assert loaded.layout is not None and loaded.states is not None and loaded.kv_reuse == ""
    assert bool(loaded.states.tensors) == (family not in TOKEN_KV)
    assert bool(loaded.layout.groups) == ("KVCache" in classes)
    assert loaded.weight_bytes > 0 and loaded.context_length > 0


def test_mla_has_a_group_for_each_width(folders):
    layout = mlx_adapter.load(folders("deepseek_v3")).layout
    assert layout is not None and len(layout.groups) == 2
    assert {g.heads for g in layout.groups} == {1}


def test_kv_cache_first_allocates_its_step_whole():
    cache = KVCache()
    cache.step = 1024
    part = mx.ones((1, 2, 10, 4))
    cache.update_and_fetch(part, part)
    assert cache.keys.shape == (1, 2, 1024, 4) and cache.offset == 10
    cache.update_and_fetch(mx.ones((1, 2, 1020, 4)), mx.ones((1, 2, 1020, 4)))
    assert cache.offset == 1030 and cache.keys.shape[2] >= 1030


@pytest.mark.parametrize(
    "make", [KVCache, partial(SequenceKVCache, how=Quantisation(8, 32)), SequenceKVCache]
)
def test_growth_copies_a_row_a_few_times_whatever_its_prompt_was(make):
    """The README's figure; a constant step copied 139,776 tokens, in 28 times."""
    assert capacities(make(), 300, 8192, 1024) == [1536, 2304, 3584, 5376, 8192, 12288]
    for before, answer, reserve in ((1, 30_000, 0), (20, 2000, 10), (300, 8192, 8192), (9000, 50_000, 1024)):
        outgrown = capacities(make(), before, answer, reserve)[:-1]
        assert sum(outgrown) <= 5 * (before + answer), "geometric: each token is copied a few times"
        assert not outgrown or reserve < answer


def test_what_kv_outgrew_is_freed_two_steps_later(monkeypatch):
    freed: list[int] = []
    monkeypatch.setattr(arrays, "give_memory_back", lambda: freed.append(1))
    mlx_adapter.give_outgrown_back()
    monkeypatch.setattr(arrays, "_steps_to_copy", 0)
    cache, one = KVCache(), mx.ones((1, 1, 1, 32))
    cache.update_and_fetch(*[mx.ones((1, 1, 256, 32))] * 2)
    mlx_adapter.give_outgrown_back()
    cache.update_and_fetch(one, one)  # It grows.
    mlx_adapter.give_outgrown_back()
    cache.update_and_fetch(one, one)
    assert freed == []
    for _ in range(3):
        mlx_adapter.give_outgrown_back()
    assert freed == [1]


def test_rows_of_a_batch_lie_at_its_right_edge():
    rows = []
    for length in (5, 9):
        cache = KVCache()
        values = mx.arange(length, dtype=mx.float32).reshape(1, 1, length, 1) + 100 * length
        cache.update_and_fetch(values, values)
        rows.append([cache])
    batch = mlx_adapter.merge(rows[:1])
    mlx_adapter.extend(batch, rows[1])
    assert isinstance(batch[0], BatchKVCache)
    short = mlx_adapter.row_tensors(batch, 0, 2, 5)["layers.0.keys"]
    long = mlx_adapter.row_tensors(batch, 1, 0, 2)["layers.0.keys"]
    assert np.array(short).ravel().tolist() == [502, 503, 504]
    assert np.array(long).ravel().tolist() == [900, 901]
    mlx_adapter.keep_rows(batch, [0])
    assert np.array(mlx_adapter.row_tensors(batch, 0, 0, 5)["layers.0.keys"]).ravel()[0] == 500


def a_row(length: int) -> KVCache:
    """Column i holds `length` + i / 1000."""
    cache = KVCache()
    values = mx.arange(length, dtype=mx.float32).reshape(1, 1, length, 1) / 1000 + length
    cache.update_and_fetch(values, values)
    return cache


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_batch_grows_to_what_the_fast_attention_takes(backend: str, monkeypatch: pytest.MonkeyPatch):
    use_backend(monkeypatch, "mlx" if backend == "cpu" else "cuda")
    token = mx.ones((1, 1, 1, 1))
    batch = mlx_adapter.merge([[a_row(700)]])
    for length in (300, 300):
        mlx_adapter.extend(batch, [a_row(length)])
    (layer,) = batch
    layer.update_and_fetch(*[mx.repeat(token, 3, axis=0)] * 2)
    # 700 and a quarter more, in steps of 256; on CUDA so short a batch is off them.
    assert layer.keys.shape[2] == (1088 if backend == "cuda" else 1024)
    mlx_adapter.keep_rows(batch, [1, 2])
    for _ in range(1000):
        layer.update_and_fetch(*[mx.repeat(token, 2, axis=0)] * 2)
    if backend == "cuda":
        assert layer.keys.shape[2] % 256 == 0, "whose padding was cut off"
    assert layer.size() == 1301 and layer.keys.shape[2] < 2 * 1301
    for row in range(2):
        held = np.array(mlx_adapter.row_tensors(batch, row, 0, 1301)["layers.0.keys"]).ravel()
        assert held[300:].tolist() == [1.0] * 1001
        assert held[:300] == pytest.approx(300 + np.arange(300) / 1000)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_blocks_survive_every_way_in_and_out(dtype: str):
    layout = KVLayout((Group(("layers.0.keys", "layers.0.values"), 2, 8, dtype),))
    compute = mlx_adapter.compute_dtype(dtype)
    tensors = {n: mx.random.normal((1, 2, 48, 8)).astype(compute) for n in layout.groups[0].names}
    blocks = copy_blocks(layout, tensors, [16, 32], 16)
    assert [b.nbytes for b in blocks] == [layout.nbytes(16)] * 2
    joined = join_blocks(layout, blocks)
    buffers = DirectBuffers(layout, 64, 16)
    buffers.put_block(0, blocks[0])
    stored = [bytes(view) for view in blocks[1].buffers()]

    def load(views: list[memoryview]) -> bool:
        for into, out in zip(views, stored, strict=True):
            into[:] = out
        return True

    twin = read_payload(layout, 16, load)
    assert twin is not None and read_payload(layout, 16, lambda views: False) is None
    assert b"".join(buffers.pieces(0)) == b"".join(blocks[0].buffers())
    buffers.put_block(1, twin)
    landed = buffers.take_arrays()
    for name, tensor in tensors.items():
        assert mx.array_equal(joined[name], tensor[:, :, 16:]).item()
        assert landed[name].dtype == compute
        assert mx.array_equal(landed[name][:, :, :32], tensor[:, :, 16:]).item()


def test_appending_grows_a_cache_and_keeps_what_it_holds(folders):
    loaded = mlx_adapter.load(folders("qwen3"))
    tokens = prompt(300)
    cache = mlx_adapter.new_cache(loaded.model, 64)
    loaded.model(mx.array([tokens[:64]]), cache=cache)
    other = mlx_adapter.new_cache(loaded.model, 300)
    loaded.model(mx.array([tokens]), cache=other)
    rest = {n: a[:, :, 64:300] for n, a in mlx_adapter.tensors(other).items()}
    mlx_adapter.append_tokens(cache, rest, 64, 236, 310)
    for name, array in mlx_adapter.tensors(cache).items():
        assert mx.array_equal(array[:, :, :300], mlx_adapter.tensors(other)[name][:, :, :300]).item()
    assert {layer.offset for layer in cache} == {300}


def test_a_stored_block_does_not_pin_the_cache_it_came_from(folders, tmp_path: Path):
    loaded = mlx_adapter.load(folders("qwen3"))
    assert loaded.layout is not None
    cache = mlx_adapter.new_cache(loaded.model, 50_000)
    mx.eval(loaded.model(mx.array([prompt(128)]), cache=cache))
    mx.clear_cache()
    blocks = copy_blocks(loaded.layout, mlx_adapter.tensors(cache), [0, 64], 64)
    before = mx.get_active_memory()
    whole = sum(a.nbytes for a in mlx_adapter.tensors(cache).values())
    del cache
    mx.clear_cache()
    assert before - mx.get_active_memory() >= whole * 0.99
    assert sum(b.nbytes for b in blocks) == loaded.layout.nbytes(128)


@pytest.mark.parametrize("family", rest_slow(FAMILIES, *SOME_FAMILIES))
def test_logits_of_the_last_position_are_those_of_the_whole(family: str, folders):
    from mlx_lm.utils import load

    folder = folders(family)
    tokens = mx.array([prompt(40)])
    whole = load(str(folder))[0](tokens)
    last = mlx_adapter.load(folder).model(tokens)
    assert last.shape == (1, 1, whole.shape[-1])
    assert mx.allclose(last[0, 0], whole[0, -1], rtol=1e-4, atol=1e-4).item()


@pytest.mark.parametrize("family", ["llama", "gemma3n", "qwen3_4bit"])
def test_weights_and_tokenizer_read_side_by_side_are_those_of_mlx_lm(family: str, folders):
    ours = mlx_adapter.load(folders(family))
    model, tokenizer, config = mlx_load(str(folders(family)), return_config=True)  # type: ignore[misc]
    mlx_adapter.last_position_only(model)
    assert ours.config == config
    assert ours.tokenizer.eos_token_ids == tokenizer.eos_token_ids
    assert type(ours.tokenizer._tokenizer) is type(tokenizer._tokenizer)
    assert ours.tokenizer.get_vocab() == tokenizer.get_vocab()
    theirs = dict(tree_flatten(model.parameters()))
    read = dict(tree_flatten(ours.model.parameters()))
    assert read.keys() == theirs.keys()
    assert all(mx.array_equal(read[name], theirs[name]) for name in theirs)


def test_a_tokenizer_that_cannot_be_read_is_told(folders, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(folders("llama"), broken)
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        mlx_adapter.load(broken)


def test_a_row_that_joins_a_large_batch_needs_room_for_one_layer_more(monkeypatch: pytest.MonkeyPatch):
    layers, shape = 24, (1, 2, 1024, 64)

    def single() -> mlx_adapter.Cache:
        made = [KVCache() for _ in range(layers)]
        for cache in made:
            mx.eval(cache.update_and_fetch(mx.ones(shape), mx.ones(shape)))
        return made

    for name in ("LARGE", "COPIED"):
        monkeypatch.setattr(joining, name, 0)
    batch = mlx_adapter.merge([single()])
    for _ in range(3):
        mlx_adapter.extend(batch, single())
    row = single()
    mx.eval(mlx_adapter.state_arrays(batch))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mlx_adapter.extend(batch, row)
    mx.eval(mlx_adapter.state_arrays(batch))
    of_a_row = 2 * 2 * 1024 * 64 * 4
    assert mx.get_peak_memory() - max(before, mx.get_active_memory()) <= 8 * of_a_row
    assert batch[0].keys.shape[0] == 5


def test_rows_join_in_arrays_that_have_room_for_what_follows():
    """Else the next step copies all of them once more; one row's arrays are a batch of one without a copy."""

    def single(length: int, fill: float) -> mlx_adapter.Cache:
        cache = KVCache()
        kv = mx.full((1, 2, length, 8), fill)
        cache.update_and_fetch(kv, -kv)
        mx.eval(cache.keys, cache.values)
        return [cache]

    rows = [single(300, 1.0), single(700, 2.0), single(500, 3.0)]
    batch = mlx_adapter.merge(rows[:1])
    for row in rows[1:]:
        mlx_adapter.extend(batch, row)
    layer = batch[0]
    capacity = layer.keys.shape[2]
    assert (layer.starts, layer.ends) == ([400, 0, 200], [700, 700, 700])
    new = mx.full((3, 2, 1, 8), 9.0)
    layer.update_and_fetch(new, -new)
    assert layer.keys.shape[2] == capacity > 700
    for name, sign in (("keys", 1), ("values", -1)):
        held = np.array(getattr(layer, name)[:, 0, :701, 0])
        for row, (start, fill) in enumerate(zip(layer.starts, (1.0, 2.0, 3.0), strict=True)):
            assert (held[row, start:700] == sign * fill).all() and not held[row, :start].any()
            assert held[row, 700] == sign * 9.0


@pytest.mark.parametrize(("kernel", "starts"), [(True, [10, 5]), (False, [5, 0])])
def test_who_leaves_a_batch_has_the_others_copied_once(kernel: bool, starts: list[int], monkeypatch):
    """Padding stays in front where a kernel skips it: to cut it off is another copy."""
    use_backend(monkeypatch, "mlx", reads_own_rows=lambda: kernel)
    batch = batch_kv.EvenBatchKVCache.merge([a_row(length) for length in (30, 40, 35)])
    batch.filter([0, 2])
    assert (batch.starts, batch.offset.tolist()) == (starts, [30, 35])
    for row, length in enumerate((30, 35)):
        own = np.array(batch.keys[row, 0, batch.starts[row] : batch.ends[row], 0])
        assert own == pytest.approx(length + np.arange(length) / 1000)


def test_a_class_of_caches_without_a_size_is_not_batched():
    """mlx-lm's merge takes `size()` tokens of each: of such a class it would take none, and say nothing."""

    class Sizeless(KVCache):
        def size(self) -> int:
            return 0

    rows = [Sizeless(), Sizeless()]
    for row in rows:
        row.update_and_fetch(mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)))
    with pytest.raises(RuntimeError, match="Sizeless"):
        batch_kv.EvenBatchKVCache.merge(rows)
