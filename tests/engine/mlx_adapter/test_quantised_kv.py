"""KV in 8 and 4 bits: less of everything, the same bytes in any batch, and a refusal by name."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from cold_run import prompt
from families import build_family
from rig import BLOCK, Rig

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter import Quantisation
from omlxd.engine.mlx_adapter.cache import packed as quantised
from omlxd.engine.mlx_adapter.cache.batch import EvenBatchKVCache
from omlxd.engine.mlx_adapter.cache.segments import SequenceKVCache
from omlxd.errors import ModelError

WIDE = {"head_dim": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("families")
    return lambda name, **options: build_family(name, root / name / str(options), **options)


def served(model: Path, bits: int, group: int = 64) -> mlx_adapter.LoadedModel:
    return mlx_adapter.load(model, Quantisation(bits, group))


# --------------------------------------------------------------------------- what it saves


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [8, 4])
def test_unpacked_numbers_have_the_bits_of_mlx_own(bits: int, group: int, dtype: mx.Dtype):
    how = Quantisation(bits, group)
    parts = how.pack(mx.random.normal((2, 3, 5, 256), key=mx.random.key(0)).astype(dtype))
    want = mx.dequantize(*parts, group_size=group, bits=bits)
    got = how.unpack([part[:, :, 1:] for part in parts])
    assert got.dtype == dtype and mx.array_equal(got, want[:, :, 1:])


@pytest.mark.parametrize(("bits", "ratio"), [(8, 8.5 / 16), (4, 4.5 / 16)])
def test_blocks_in_ram_and_on_disk_shrink(bits: int, ratio: float, folders, tmp_path: Path):
    model = folders("qwen3", dtype="bf16", changes=WIDE)
    sizes = {}
    for width in (0, bits):
        root = tmp_path / str(width)
        with Rig(model, root, kv_bits=width) as rig:
            rig.run(prompt(300), 3)
            files = sorted(root.glob("*/*/*.safetensors"))
            assert len(files) == 4
            # A group of 64 adds a scale and a bias of 16 bits each: half a bit a number.
            live = mlx_adapter.new_cache(rig.loaded.model, 512)
            rig.on_engine(
                lambda model=rig.loaded.model, cache=live: model(mx.array([prompt(9)]), cache=cache)
            )
            live_bytes = sum(array.nbytes for array in mlx_adapter.tensors(live).values())
            sizes[width] = (rig.pool.hot_bytes, rig.loaded.layout.nbytes(BLOCK), live_bytes)
            header = 32 << 10
            assert sum(f.stat().st_size for f in files) <= 4 * (rig.loaded.layout.nbytes(BLOCK) + header)
    print(
        f"{bits} bits: blocks, layout and live cache take",
        [b / a for a, b in zip(*sizes.values(), strict=True)],
    )
    for full, small in zip(sizes[0], sizes[bits], strict=True):
        assert small / full == pytest.approx(ratio, rel=0.01)


def test_files_name_the_packed_tensors(folders, tmp_path: Path):
    from safetensors import safe_open

    with Rig(folders("qwen3", changes=WIDE), tmp_path, kv_bits=8) as rig:
        rig.run(prompt(100), 3)
    (file,) = tmp_path.glob("*/*/*.safetensors")
    with safe_open(file, "np") as opened:
        names = [name for name in opened.keys() if "layers.0." in name]  # noqa: SIM118
        found = {name: opened.get_slice(name) for name in names}
        shapes = {name: (piece.get_dtype(), piece.get_shape()[-1]) for name, piece in found.items()}
    half = {"weight": ("U32", 64 * 8 // 32), "scales": ("F32", 1), "biases": ("F32", 1)}
    assert shapes == {
        f"layers.0.{kv}.{part}": what for kv in ("keys", "values") for part, what in half.items()
    }


# --------------------------------------------------------------------------- what it keeps


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_a_batch_answer_and_are_stored_as_alone(bits: int, folders):
    model = folders("qwen3", changes=WIDE)
    prompts = [prompt(70 + 45 * i, seed=i) for i in range(4)]

    def blocks(rig: Rig) -> dict[bytes, list[bytes]]:
        cached = rig.on_engine(
            lambda: {h: b.payload for h, b in rig.pool._by_hash.items() if b.payload is not None}
        )
        return {h: [bytes(view) for view in payload.buffers()] for h, payload in cached.items()}

    with Rig(model, kv_bits=bits) as rig:
        alone = [rig.run(p, 70).got for p in prompts]
        stored_alone = blocks(rig)
    with Rig(model, kv_bits=bits) as rig:
        running = [rig.start(p, 70) for p in prompts]
        assert [output.tokens() for output in running] == alone
        rig.settle()
        stored = blocks(rig)
    assert stored == stored_alone


def test_a_batch_cache_is_the_single_ones_side_by_side():
    how = Quantisation(8, 32)
    mx.random.seed(1)
    lengths = (5, 300, 17)
    arrays = [mx.random.normal((1, 2, n, 32)) for n in lengths]
    singles = []
    for array in arrays:
        cache = SequenceKVCache(how=how)
        cache.update_and_fetch(array, array + 1)
        singles.append([cache])
    batch = mlx_adapter.merge(singles[:2])
    mlx_adapter.extend(batch, singles[2])
    new = mx.random.normal((3, 2, 1, 32))
    keys, _ = batch[0].update_and_fetch(new, new)
    assert batch[0].bits == 8 and len(keys) == 3

    def row(index: int, length: int) -> np.ndarray:
        got = mlx_adapter.row_tensors(batch, index, 0, length)
        parts = [got[f"layers.0.keys.{part}"] for part in quantised.PARTS]
        return np.array(how.unpack(parts))

    for index, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        want = how.unpack(how.pack(mx.concatenate([array, new[index : index + 1]], axis=2)))
        assert np.array_equal(row(index, length + 1), np.array(want))
    mlx_adapter.keep_rows(batch, [0, 2])
    assert batch[0]._idx == 18
    want = how.unpack(how.pack(mx.concatenate([arrays[2], new[2:]], axis=2)))
    assert np.array_equal(row(1, 18), np.array(want))


def test_a_row_that_joins_has_room_for_the_next_tokens():
    """Growing copies all: it comes after many tokens, as for 16 bits."""
    how, array = Quantisation(8, 32), mx.random.normal((1, 2, 300, 32))
    singles = []
    for length in (300, 20):
        singles.append(cache := SequenceKVCache(how=how))
        cache.update_and_fetch(array[:, :, :length], array[:, :, :length])
    batch = EvenBatchKVCache.merge(singles)
    capacity = batch.keys[0].shape[2]
    assert capacity >= 300 * 5 // 4
    new = mx.ones((2, 2, 1, 32))
    for _ in range(capacity - 300):
        batch.update_and_fetch(new, new)
    assert batch.keys[0].shape[2] == capacity
    batch.update_and_fetch(new, new)
    assert batch.keys[0].shape[2] >= capacity * 5 // 4


def test_attention_gets_packed_parts_for_one_token_and_plain_ones_for_more():
    cache = SequenceKVCache(how=Quantisation(4, 32))
    array = mx.random.normal((1, 2, 5, 32))
    keys, _ = cache.update_and_fetch(array, array)
    assert keys.shape == array.shape and not hasattr(cache, "bits")
    keys, _ = cache.update_and_fetch(array[:, :, :1], array[:, :, :1])
    assert [k.shape[2] for k in keys] == [6, 6, 6] and cache.bits == 4
    keys, _ = cache.update_and_fetch(array, array)
    assert keys.shape[2] == 11 and not hasattr(cache, "bits")


def test_eight_bits_stay_near_the_full_ones(folders):
    model = folders("qwen3", changes=WIDE)
    tokens = mx.array([prompt(200)])

    def logits(loaded: mlx_adapter.LoadedModel) -> np.ndarray:
        cache = mlx_adapter.new_cache(loaded.model, 256)
        loaded.model(tokens[:, :150], cache=cache)
        return np.array(loaded.model(tokens[:, 150:], cache=cache)[0, -1])

    full, eight, four = (
        logits(mlx_adapter.load(model)),
        logits(served(model, 8)),
        logits(served(model, 4)),
    )
    far = [float(np.linalg.norm(near - full) / np.linalg.norm(full)) for near in (eight, four)]
    assert 0 < far[0] < 0.1 and far[0] < far[1]


# --------------------------------------------------------------------------- where it can't


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("deepseek_v3", {}, "deepseek_v3 can't have --kv-bits 8: its KVCache holds the latent of MLA"),
        ("gpt_oss", WIDE, "can't read a packed KVCache: Quantized SDPA does not support attention sinks"),
        ("mamba2", {}, "its layers keep ArraysCache alone"),
        ("qwen3", {}, "its KVCache has heads 16 wide, which groups of 64 don't divide;"),
        (
            "qwen3",
            {"head_dim": 96},
            "heads 96 wide, which groups of 64 don't divide (--kv-group-size 32 would);",
        ),
    ],
)
def test_a_model_that_can_not_is_refused_by_name(family: str, changes: dict, words: str, folders):
    with pytest.raises(ModelError) as caught:
        served(folders(family, changes=changes), 8)
    assert words in caught.value.message
    assert caught.value.message.endswith("serve it with --kv-bits 0")


def test_windows_and_recurrent_state_stay_as_they_are(folders):
    for family in ("gemma3_text", "qwen3_5"):
        plain = mlx_adapter.load(folders(family, changes=WIDE))
        packed = served(folders(family, changes=WIDE), 4)
        assert packed.states == plain.states
        assert packed.layout.nbytes(1) < plain.layout.nbytes(1) / 5
