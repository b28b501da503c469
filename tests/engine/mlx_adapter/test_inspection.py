"""`POST /omlxd/inspect`: the keys of a prompt as attention reads them, cached or not."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from daemon import Daemon, family_model, prose
from mlx_lm.utils import load as mlx_load

from omlxd.engine import mlx_adapter
from tools.heat_map import rows_of, svg


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v3", "qwen3_next"])
def test_layers_of_each_sort(family: str, tmp_path: Path):
    loaded = mlx_adapter.load(family_model(family))
    tokens = mx.arange(1, 90)[None]
    cache = mlx_adapter.new_cache(loaded.model, 100)
    mx.eval(loaded.model(tokens, cache=cache))
    file = tmp_path / "keys.safetensors"
    mlx_adapter.write_keys(file, cache, 89, values=True)
    arrays, metadata = mx.load(str(file), return_metadata=True)
    layers = json.loads(metadata["omlxd"])
    assert len(layers) >= len(cache)
    for layer in layers:
        if layer["keys"] is None:
            assert layer["cache"] == "ArraysCache" and f"{layer['layer']}.keys" not in arrays
            continue
        keys = arrays[layer["layer"] + ".keys"]
        assert keys.dtype == mx.float32 and keys.shape[0] == layer["keys"]["kv_heads"]
        assert keys.shape[1] == 89 - layer["keys"]["first_token"] and keys.shape[2] == layer["keys"]["dim"]
        assert arrays[layer["layer"] + ".values"].shape[:2] == keys.shape[:2]
        norms = np.linalg.norm(np.array(keys), axis=-1).mean(axis=-1)
        assert layer["keys"]["norms"] == pytest.approx(norms.tolist(), rel=1e-4)


@pytest.mark.parametrize("at", [0, 40, 88])
def test_attention_of_a_token_is_what_the_whole_pass_gives_it(tmp_path: Path, monkeypatch, at: int):
    loaded = mlx_adapter.load(family_model("qwen3"))
    tokens = list(range(1, 90))
    cache = mlx_adapter.new_cache(loaded.model, 100)
    outputs: list[mx.array] = []
    real = mx.fast.scaled_dot_product_attention

    def noting(*args, **kwargs):
        outputs.append(real(*args, **kwargs))
        return outputs[-1]

    with monkeypatch.context() as patched:
        patched.setattr(mx.fast, "scaled_dot_product_attention", noting)
        mx.eval(loaded.model(mx.array([tokens]), cache=cache))
    attention = mlx_adapter.attention_from(loaded.model, cache, tokens[at], at)
    assert mx.fast.scaled_dot_product_attention is real and attention is not None
    file = tmp_path / "keys.safetensors"
    mlx_adapter.write_keys(file, cache, 89, values=True, attention=attention)
    arrays, metadata = mx.load(str(file), return_metadata=True)
    for output, layer in zip(outputs, json.loads(metadata["omlxd"]), strict=True):
        weights, values = (arrays[f"{layer['layer']}.{part}"] for part in ("attention", "values"))
        heads = weights.shape[0]
        assert weights.shape == (heads, at + 1) and mx.allclose(
            weights.sum(axis=-1), mx.ones(heads), atol=1e-5
        )
        seen = mx.repeat(values, heads // values.shape[0], axis=0)[:, : at + 1]
        assert mx.allclose((weights[:, None] @ seen)[:, 0], output[0, :, at], atol=1e-3)
        entropy = -(np.array(weights) * np.log(np.maximum(np.array(weights), 1e-30))).sum(axis=-1)
        assert layer["entropy"] == pytest.approx(entropy.tolist(), abs=1e-4)
        assert not np.signbit(layer["entropy"]).any() and max(layer["entropy"]) <= np.log(at + 1) + 1e-4
    picture = svg(rows_of(file, None))
    assert picture.count("<rect") == len(outputs) * (at + 1) and picture.endswith("</svg>")
    assert len(rows_of(file, 0)) == heads
    with pytest.raises(ValueError, match="--layer: there are"):
        rows_of(file, 99)


def test_a_token_that_sees_itself_alone_has_no_entropy_and_no_minus(tmp_path: Path):
    loaded = mlx_adapter.load(family_model("qwen3"))
    cache = mlx_adapter.new_cache(loaded.model, 100)
    mx.eval(loaded.model(mx.arange(1, 9)[None], cache=cache))
    attention = mlx_adapter.attention_from(loaded.model, cache, 1, 0)
    mlx_adapter.write_keys(file := tmp_path / "keys.safetensors", cache, 8, False, attention)
    layers = json.loads(mx.load(str(file), return_metadata=True)[1]["omlxd"])
    assert "-0.0" not in json.dumps([layer["entropy"] for layer in layers])


def test_a_picture_of_what_is_no_such_file_says_so(tmp_path: Path):
    text, empty = tmp_path / "notes.txt", tmp_path / "keys.safetensors"
    text.write_text("hello")
    mx.save_safetensors(str(empty), {"layers.0.keys": mx.zeros((1, 2))})
    array = tmp_path / "array.npy"
    mx.save(str(array), mx.zeros((2,)))
    for file, why in (
        (tmp_path / "none.safetensors", "there is no file"),
        (tmp_path, "is a folder"),
        (text, "is no file of /omlxd/inspect"),
        (array, "is no file of /omlxd/inspect"),
        (empty, "holds no attention"),
    ):
        with pytest.raises(ValueError, match=why):
            rows_of(file, None)


def test_attention_is_told_of_plain_kv_alone(tmp_path: Path):
    for family in ("gemma3_text", "deepseek_v3", "qwen3_next"):
        loaded = mlx_adapter.load(family_model(family))
        cache = mlx_adapter.new_cache(loaded.model, 100)
        mx.eval(loaded.model(mx.arange(1, 9)[None], cache=cache))
        attention = mlx_adapter.attention_from(loaded.model, cache, 8, 7)
        assert attention is None or family == "deepseek_v3"
    file = tmp_path / "keys.safetensors"
    mlx_adapter.write_keys(file, cache, 8, values=False)
    with pytest.raises(ValueError, match="holds no attention"):
        rows_of(file, None)


@pytest.mark.slow
def test_a_daemon_writes_what_the_model_computes_and_refuses_what_it_can_not(tmp_path: Path):
    text = prose(60)
    with Daemon(tmp_path) as daemon:
        http = daemon.http
        first, again = (http.post("/omlxd/inspect", json={"prompt": text}).json() for _ in range(2))
        chat = http.post(
            "/omlxd/inspect", json={"messages": [{"role": "user", "content": "Hi"}], "values": True}
        )
        assert chat.status_code == 200, chat.text
        for wrong, status in (
            ({"prompt": ""}, 400),
            ({"prompt": text, "model": "nobody"}, 404),
            ({"prompt": [1] * 9000}, 400),
            ({"prompt": text, "values": 5}, 400),
            ({}, 400),
        ):
            answer = http.post("/omlxd/inspect", json=wrong)
            assert answer.status_code == status, answer.text
        queried = http.post("/omlxd/inspect", json={"prompt": text, "query": -1}).json()
        entropies = [layer["entropy"] for layer in queried["layers"]]
        assert all(entropies) and first["layers"][0]["entropy"] is None
        Path(queried["file"]).unlink()
        for at in (-9000, 9000):
            answer = http.post("/omlxd/inspect", json={"prompt": text, "query": at})
            assert answer.status_code == 400 and "query: the prompt has" in answer.text
        assert len(list((tmp_path / "omlxd" / "inspect").iterdir())) == 3
        # A model that is installed and not loaded is loaded for it.
        assert http.post("/omlxd/models/unload", json={"model": daemon.model}).status_code == 200
        loaded = http.post("/omlxd/inspect", json={"prompt": text, "model": daemon.model}).json()
        assert loaded["layers"] == again["layers"]
        Path(loaded["file"]).unlink()
        model, tokenizer = mlx_load(str(daemon.model_folder))[:2]
    cache = mlx_adapter.new_cache(model, 1000)
    ids = tokenizer.encode(text)
    model(mx.array([ids]), cache=cache)
    expected = mlx_adapter.tensors(cache)
    for told in (first, again):
        assert told["tokens"] == len(ids)
        assert stat.S_IMODE(Path(told["file"]).stat().st_mode) == 0o600
        arrays = mx.load(told["file"])
        assert sorted(arrays) == sorted(f"{layer['layer']}.keys" for layer in told["layers"])
        for name, keys in arrays.items():
            assert mx.allclose(keys, expected[name][0, :, : len(ids)].astype(mx.float32), atol=1e-2)
