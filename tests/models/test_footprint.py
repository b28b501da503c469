"""The estimate of a model's memory from its files, against what the loaded model says of itself."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
from pathlib import Path

import pytest
from daemon import demo_model, family_model
from families import FAMILIES
from fast_or_slow import SOME_FAMILIES, rest_slow

from omlxd.cli.daemon.owner_api import InstalledStatus
from omlxd.cli.models import command as models
from omlxd.common.files import SMALL
from omlxd.config import load_settings
from omlxd.models.catalog import describe
from omlxd.models.footprint import PROCESS_BYTES, PROCESSOR_FILES, footprint, weight_files
from omlxd.models.resolve import read_tensors
from tests.models.test_resolve import make


@pytest.mark.parametrize("name", rest_slow(FAMILIES, *SOME_FAMILIES))
def test_the_estimate_is_what_the_loaded_model_says(name: str):
    from omlxd.engine import mlx_adapter

    folder = family_model(name)
    guess, loaded = footprint(folder), mlx_adapter.load(folder)
    assert loaded.layout is not None and loaded.states is not None
    assert guess.kv_per_token == loaded.layout.nbytes(1)
    assert guess.kv_fixed == pytest.approx(loaded.states.nbytes(10**6), rel=0.1)
    assert guess.weights == pytest.approx(loaded.weight_bytes, rel=0.05)
    assert guess.context_length == loaded.context_length
    assert guess.experts == pytest.approx(stacked_experts(folder), rel=0.1)
    assert guess.loading() > PROCESS_BYTES + guess.weights
    # A pass of a CPU computes 64 tokens, one of a GPU 2,048.
    assert guess.loading() - guess.loading("cpu") == guess.working - guess.working * 64 // 2048


def stacked_experts(folder: Path) -> int:
    """Count the parameters of routed experts, which stand in arrays of three dimensions."""
    tensors = {name: one for file in weight_files(folder) for name, one in read_tensors(file).items()}
    routed = [name for name in tensors if "expert" in name or "switch_mlp" in name]
    return sum(math.prod(tensors[name].shape) for name in routed if len(tensors[name].shape) == 3)


def test_the_estimate_of_the_command_is_what_a_cpu_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    config = {"model_type": "llama", "torch_dtype": "bfloat16", **sizes}
    (make(tmp_path / "models" / "small") / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(models, "likely_backend", lambda: "cpu")

    def shown(**variables: str) -> InstalledStatus:
        settings = load_settings({}, {"OMLXD_BASE_PATH": str(tmp_path), "HF_HUB_CACHE": "", **variables})
        return next(model for model in models.installed(settings) if model.id == "small")

    stored, large = (footprint(tmp_path / "models" / "small", float32) for float32 in (False, True))
    assert large.kv_per_token > stored.kv_per_token
    for status, prints in ((shown(), large), (shown(OMLXD_CPU_WEIGHTS="as-stored"), stored)):
        assert status.load_bytes == prints.loading("cpu") and status.disk_bytes == stored.weights
        assert status.kv_bytes_per_token == prints.kv_per_token


def test_known_models(tmp_path: Path):
    """Llama 3.1 8B: 128 KiB a token. DeepSeek V3: 61 layers of 576 numbers. V4: 512 numbers each 128 tokens,
    or 640 each 4.
    """
    llama = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072,
    }
    deepseek = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16"}
    v4 = {"head_dim": 512, "index_head_dim": 128, "sliding_window": 128, "num_key_value_heads": 1}
    v4 |= {"compress_ratios": [0, 128, 4, 128, 4, 0], "num_hidden_layers": 6, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(v4))
    assert footprint(tmp_path).kv_fixed == 6 * 128 * 512 * 2
    for config, per_token in (
        *((llama, 131072), (deepseek, 61 * 576 * 2), (v4, 2 * (512 // 128 + 640 // 4) * 2)),
        ({"text_config": llama}, 131072),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert footprint(tmp_path).kv_per_token == per_token
    assert footprint(tmp_path).context_length == 131072 and footprint(tmp_path).pair == 32 * 2
    (tmp_path / "config.json").write_text(json.dumps({**llama, "model_type": "mamba"}))
    assert footprint(tmp_path).pair == 0


def test_what_gemma_3s_config_leaves_out_is_counted_as_mlx_lm_has_it(tmp_path: Path):
    """Google's config of its 4B: of 34 layers each sixth attends to all, with 4 heads of 256."""
    from mlx_lm.models import gemma3

    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    args = gemma3.gemma3_text.ModelArgs.from_dict(gemma3.ModelArgs("gemma3", {**text}).text_config)
    token = 2 * args.num_key_value_heads * args.head_dim * 2
    full = args.num_hidden_layers // args.sliding_window_pattern
    assert (token, full) == (4096, 5)
    assert footprint(tmp_path).kv_per_token == full * token
    assert footprint(tmp_path).kv_fixed == (34 - full) * 1024 * token


def test_weights_that_lie_there_twice_are_counted_once(tmp_path: Path):
    """Mistral's folders hold them in its own layout too, which neither mlx-lm nor mlx-vlm loads."""
    from mlx_lm.utils import load_model

    folder = tmp_path / "m"
    shutil.copytree(demo_model(), folder)
    before = [footprint(folder, float32) for float32 in (False, True)]
    (folder / "consolidated.safetensors").write_bytes(b"not looked at")
    load_model(folder)
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert [footprint(folder, float32) for float32 in (False, True)] == before


def test_nonsense_is_counted_as_nothing(tmp_path: Path):
    assert footprint(tmp_path).weights == 0
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    nonsense = '{"num_hidden_layers": "x", "text_config": 3, "hidden_size": -1, "model_type": [1]}'
    for text in ("[1]", "{", nonsense):
        (tmp_path / "config.json").write_text(text)
        assert footprint(tmp_path).kv_per_token == 0 and footprint(tmp_path).context_length is None
        assert describe(tmp_path).kind == "chat"
    for name in ("1_Pooling", *PROCESSOR_FILES):
        (tmp_path / name).symlink_to("x" * 300)
    tensor = b'{"vision.w": {"dtype": "F16", "shape": [], "data_offsets": [0, 2]}}'
    (tmp_path / "model.safetensors").write_bytes(len(tensor).to_bytes(8, "little") + tensor + bytes(2))
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "vision_config": {}}')
    assert describe(tmp_path).kind == "chat"
    assert footprint(tmp_path).blind == "its folder has no preprocessor_config.json"


def test_a_config_of_endless_layers_costs_the_front_nothing(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 10**9, "hidden_size": 64}))
    tracemalloc.start()
    try:
        footprint(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2 * SMALL
    finally:
        tracemalloc.stop()
