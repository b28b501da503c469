"""mlx-lm's prompt-cache files: what is written is continued as from a cold run, what is read is verified."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from daemon import family_model
from families import build_family
from fast_or_slow import rest_slow
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load as mlx_load

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter import LoadedModel, Quantisation
from omlxd.errors import InvalidRequest

BLOCK = 64


def prompt(tokens: int, seed: int = 3) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(20, 900) for _ in range(tokens)]


def mlx_model(folder: Path) -> Any:
    return mlx_load(str(folder))[0]


def greedy(model: Any, tokens: list[int], cache: Any, **settings: Any) -> list[int]:
    steps = generate_step(mx.array(tokens), model, max_tokens=16, prompt_cache=cache, **settings)
    return [int(token) for token, _ in steps]


def cached(folder: Path, tokens: list[int], file: Path, *, most: int | None = None, **settings: Any) -> Path:
    """As `mlx_lm.cache_prompt` writes it."""
    model = mlx_model(folder)
    cache = make_prompt_cache(model, most)
    for _ in generate_step(mx.array(tokens), model, max_tokens=0, prompt_cache=cache, **settings):
        pass
    save_prompt_cache(str(file), cache, {"model": str(folder), "tokenizer_config": "{}"})
    return file


def take(loaded: LoadedModel, file: Path, tokens: list[int]) -> tuple[Any, int]:
    opened = mlx_adapter.open_prompt_cache(file, loaded, BLOCK)
    *_, cache = mlx_adapter.checked_kv(loaded, opened, tokens, BLOCK)
    return cache, opened.at


def logits(loaded: LoadedModel, tokens: list[int], cache: Any) -> mx.array:
    return loaded.model(mx.array([tokens]), cache=cache)[0, -1]


def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose heads groups of 32 divide."""
    return build_family("qwen3", tmp_path_factory.mktemp("wide") / "qwen3", changes={"head_dim": 32})


@pytest.mark.parametrize("length", rest_slow([20, 100, 300], 100))
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_next", "deepseek_v3", "falcon_h1"])
def test_mlx_lm_goes_on_from_what_is_written_as_from_a_cold_run(family: str, length: int, tmp_path: Path):
    loaded, model = mlx_adapter.load(family_model(family)), mlx_model(family_model(family))
    tokens, more = prompt(length), prompt(9, seed=5)
    cache = mlx_adapter.new_cache(loaded.model, length + 20)
    for start in range(0, length, BLOCK):
        logits(loaded, tokens[start : start + BLOCK], cache)
    file = tmp_path / "cache.safetensors"
    mlx_adapter.write_prompt_cache(file, loaded, cache, tokens, {"model": "here"})
    back, metadata = load_prompt_cache(str(file), return_metadata=True)
    assert metadata["model"] == "here" and metadata["tokens"] == ",".join(map(str, tokens))
    assert json.loads(metadata["tokenizer_config"]) == {}
    assert greedy(model, more, back) == greedy(model, tokens + more, make_prompt_cache(model))


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_kv_goes_both_ways(bits: int, tmp_path: Path, tmp_path_factory):
    folder = wide(tmp_path_factory)
    loaded, model = mlx_adapter.load(folder, Quantisation(bits, 32)), mlx_model(folder)
    tokens, more = prompt(200), prompt(9, seed=5)
    how = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": 0}
    cache = mlx_adapter.new_cache(loaded.model, 200)
    for start in range(0, 200, BLOCK):
        logits(loaded, tokens[start : start + BLOCK], cache)
    mlx_adapter.write_prompt_cache(tmp_path / "out.safetensors", loaded, cache, tokens, {})
    back: Any = load_prompt_cache(str(tmp_path / "out.safetensors"))
    assert (back[0].bits, back[0].group_size, back[0].offset) == (bits, 32, 200)
    # mlx-lm computes a first chunk before it packs it: a run of ours is what it is held against.
    cold = [int(mx.argmax(logits(loaded, more, cache)).item())]
    while len(cold) < 16:
        cold.append(int(mx.argmax(logits(loaded, cold[-1:], cache)).item()))
    assert greedy(model, more, back) == cold
    assert take(loaded, tmp_path / "out.safetensors", tokens)[1] == 192
    file = cached(folder, tokens, tmp_path / "in.safetensors", **how)
    if bits == 8:
        assert take(loaded, file, tokens)[1] == 192
    else:
        with pytest.raises(InvalidRequest, match="is not what this model computes"):
            take(loaded, file, tokens)
    with pytest.raises(InvalidRequest, match="from token 77 on"):
        take(loaded, file, [*tokens[:77], tokens[77] ^ 1, *tokens[78:]])
    for other, words in (
        (Quantisation(12 - bits, 32), f"{bits} bits in groups of 32"),
        (None, "as QuantizedKVCache, and this model is served with KVCache"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            take(mlx_adapter.load(folder, other), file, tokens)


@pytest.mark.parametrize("kv", [None, Quantisation(8, 32)], ids=["plain", "packed"])
def test_kv_of_weights_made_float32_gets_the_type_that_mlx_lm_computes_in(kv: Any, tmp_path: Path):
    changes = {"head_dim": 32, "torch_dtype": "bfloat16"}
    folder, tokens = build_family("qwen3", tmp_path / "qwen3", "bf16", changes=changes), prompt(70)
    loaded, model = mlx_adapter.load(folder, kv, float32=True), mlx_model(folder)
    cache = mlx_adapter.new_cache(loaded.model, 70)
    logits(loaded, tokens, cache)
    mlx_adapter.write_prompt_cache(tmp_path / "out.safetensors", loaded, cache, tokens, {})
    back: Any = load_prompt_cache(str(tmp_path / "out.safetensors"))
    assert model(mx.array([prompt(3)]), cache=back).dtype == mx.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "length", "at"),
    [
        ("qwen3", 65, 64),
        ("qwen3", 1500, 1472),
        ("deepseek_v3", 200, 192),
        ("gemma3_text", 128, 127),
        ("gemma3_text", 1088, 1087),
        ("gpt_oss", 192, 191),
    ],
)
def test_a_file_of_mlx_lm_is_gone_on_from_as_from_a_cold_run(family: str, length: int, at: int, tmp_path):
    loaded, tokens = mlx_adapter.load(family_model(family)), prompt(length)
    file = cached(family_model(family), tokens, tmp_path / "cache.safetensors")
    cache, used = take(loaded, file, tokens)
    assert used == at
    cold = mlx_adapter.new_cache(loaded.model, length)
    for start in range(0, at, BLOCK):
        logits(loaded, tokens[start : min(start + BLOCK, at)], cold)
    assert mx.allclose(logits(loaded, tokens[at:], cache), logits(loaded, tokens[at:], cold), atol=1e-4)
    for wrong in (0, length // 2, length - 1):  # Each of the tokens counts.
        other = [*tokens[:wrong], tokens[wrong] ^ 1, *tokens[wrong + 1 :]]
        with pytest.raises(InvalidRequest, match=f"from token {wrong} on"):
            take(loaded, file, other)


@pytest.mark.parametrize(
    ("family", "length", "words"),
    [
        ("qwen3", 64, "it holds 64 tokens, and a block of the cache 64"),
        ("gemma3_text", 100, "no block of 64 tokens ends; make it of 64 tokens"),
        ("qwen3_next", 128, "recurrent state, which can't be verified"),
    ],
)
def test_what_can_not_be_used_is_refused(family: str, length: int, words: str, tmp_path: Path):
    tokens = prompt(length)
    file = cached(family_model(family), tokens, tmp_path / "cache.safetensors")
    with pytest.raises(InvalidRequest, match=words):
        take(mlx_adapter.load(family_model(family)), file, tokens)


def test_kv_of_other_weights_an_adapter_or_of_another_shape_is_refused(tmp_path: Path):
    tokens = prompt(200)
    file = cached(family_model("qwen3"), tokens, tmp_path / "cache.safetensors")
    others = {
        "seed": (build_family("qwen3", tmp_path / "seed", seed=2), "not of this prompt from token 0 on"),
        "layers": (
            build_family("qwen3", tmp_path / "layers", changes={"num_hidden_layers": 2}),
            "it has 3 layers, and this model 2",
        ),
        "heads": (
            build_family("qwen3", tmp_path / "heads", changes={"head_dim": 32}),
            "it is another model's, or damaged",
        ),
        "dtype": (build_family("qwen3", tmp_path / "dtype", "bf16"), "its KV is F32, and .* with BF16"),
    }
    for folder, words in others.values():
        with pytest.raises(InvalidRequest, match=words):
            take(mlx_adapter.load(folder), file, tokens)
    # As an adapter would: the first layer is the same, those behind it are not.
    loaded = mlx_adapter.load(family_model("qwen3"))
    last = loaded.model.layers[-1].self_attn.v_proj
    last.weight = last.weight * 1.05
    with pytest.raises(InvalidRequest, match=r"layers\.2 is not what this model computes"):
        take(loaded, file, tokens)
    short = cached(family_model("qwen3"), tokens, tmp_path / "window.safetensors", most=100)
    with pytest.raises(InvalidRequest, match="as RotatingKVCache"):
        take(mlx_adapter.load(family_model("qwen3")), short, tokens)


def rewritten(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """With another header over the same data."""

    def write(data: bytes) -> bytes:
        size = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:size])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[size:]

    return write


def of_metadata(**values: str) -> Callable[[bytes], bytes]:
    names = {name.replace("_", "."): value for name, value in values.items()}
    return rewritten(lambda header: header["__metadata__"].update(names))


def without_metadata(header: dict[str, Any]) -> None:
    del header["__metadata__"]


def renamed(header: dict[str, Any]) -> None:
    header["999999999999.0"] = header.pop("0.0")


def reshaped(header: dict[str, Any]) -> None:
    header["0.0"]["shape"][2] //= 2
    header["0.0"]["shape"][3] *= 2


def swapped_offset(header: dict[str, Any]) -> None:
    header["0.2"], header["0.0"] = header["0.0"], header["0.2"]


def beyond(header: dict[str, Any]) -> None:
    header["0.0"]["data_offsets"][1] += 1 << 40


@pytest.mark.parametrize(
    ("ruin", "words"),
    [
        (lambda data: data[:-100], "damaged or no safetensors file"),
        (lambda data: data[:5], "damaged or no safetensors file"),
        (lambda data: b"", "damaged or no safetensors file"),
        (lambda data: b"\xff" * 8 + data[8:], "damaged or no safetensors file"),
        (lambda data: data.replace(b'"F32"', b'"F9 "'), "damaged or no safetensors file"),
        (rewritten(beyond), "damaged or no safetensors file"),
        (rewritten(without_metadata), "not what mlx-lm 0.32 writes"),
        (rewritten(renamed), "it is another model's, or damaged"),
        (rewritten(reshaped), "it is another model's, or damaged"),
        (rewritten(swapped_offset), "is missing or no number"),
        (of_metadata(**{"1_0": "copy"}), "it keeps layers.0 as copy"),
        (of_metadata(**{"1_3": "KVCache"}), "it has 4 layers"),
    ],
)
def test_damaged_and_hostile_files_are_refused_in_a_sentence(tmp_path: Path, ruin, words: str):
    tokens = prompt(100)
    file = cached(family_model("qwen3"), tokens, tmp_path / "cache.safetensors")
    file.write_bytes(ruin(file.read_bytes()))
    with pytest.raises(InvalidRequest, match=words):
        take(mlx_adapter.load(family_model("qwen3")), file, tokens)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, 0.0])
def test_numbers_that_are_none_are_found_in_any_layer(tmp_path: Path, value: float):
    tokens = prompt(100)
    file = cached(family_model("qwen3"), tokens, tmp_path / "cache.safetensors")
    arrays, metadata = mx.load(str(file), return_metadata=True)  # type: ignore[misc]
    arrays["1.1"] = mx.full(arrays["1.1"].shape, value, arrays["1.1"].dtype)
    mx.save_safetensors(str(file), arrays, metadata)
    with pytest.raises(InvalidRequest, match="is not what this model computes"):
        take(mlx_adapter.load(family_model("qwen3")), file, tokens)
