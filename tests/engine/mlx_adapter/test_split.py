"""A model that several processes share: who can, and that its logits are the whole model's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import pytest
from daemon import REPO, family_model
from family_configs import COMMON

from omlxd.common.ports import free_addresses
from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.model.split import read_share
from omlxd.errors import ModelError

SCRIPT = REPO / "tests" / "support" / "split_ranks.py"


def test_who_can_be_shared():
    mlx_adapter.check_split({**COMMON, "model_type": "llama"}, 2)
    mlx_adapter.check_split({**COMMON, "model_type": "mistral"}, 2)  # mlx-lm serves it by llama's file.
    mlx_adapter.check_split({**COMMON, "model_type": "qwen3_next"}, 3)  # Layers need no heads that divide.
    with pytest.raises(ModelError, match=r"heads of .*llama.*layers of .*qwen3_next.*--ranks 1"):
        mlx_adapter.check_split({**COMMON, "model_type": "gemma3_text"}, 2)
    with pytest.raises(
        ModelError, match="num_attention_heads is 4, which 3 does not divide; 2 of up to 8 ranks can"
    ):
        mlx_adapter.check_split({**COMMON, "model_type": "llama"}, 3)
    three = {"num_attention_heads": 12, "num_key_value_heads": 6}
    with pytest.raises(ModelError, match="; 2, 3 or 6 of up to 8 ranks can"):
        mlx_adapter.check_split({**COMMON, **three, "model_type": "llama"}, 4)
    with pytest.raises(ModelError, match="; no other number of up to 8 ranks can"):
        mlx_adapter.check_split({**COMMON, **three, "num_key_value_heads": 1, "model_type": "llama"}, 2)
    with pytest.raises(ModelError, match="num_key_value_heads is 2, which 4 does not divide"):
        mlx_adapter.check_split({"model_type": "qwen3_5", "text_config": COMMON}, 4)
    with pytest.raises(ModelError, match="mlx-lm does not have this model"):
        mlx_adapter.check_split({"model_type": "no_such_model"}, 2)


@pytest.mark.slow
def test_shares_give_the_logits_of_the_whole():
    families = {"llama": "tp:2/0", "qwen3_moe": "tp:2/0", "qwen3_5": "tp:2/0", "qwen3_next": "pp:2-3"}
    folders = [str(family_model(name)) for name in families]
    hosts = ",".join(free_addresses("127.0.0.1", 2))
    command, environ = [sys.executable, str(SCRIPT)], {**os.environ, "PYTHONPATH": str(REPO)}
    other = subprocess.Popen([*command, "1", hosts, *folders], env=environ, stderr=subprocess.DEVNULL)
    try:
        told = subprocess.run(
            [*command, "0", hosts, *folders], env=environ, stdout=subprocess.PIPE, text=True, timeout=300
        )
        assert other.wait(60) == told.returncode == 0
    finally:
        other.kill()
    lines = [line.split() for line in told.stdout.splitlines()]
    assert [(name, split, batches) for name, split, batches, _ in lines] == [
        (Path(folder).name, split, "True") for folder, split in zip(folders, families.values(), strict=True)
    ]
    assert all(float(far) < 1e-4 for *_, far in lines), lines


def test_a_share_is_read_some_weights_at_a_time(tmp_path: Path):
    """The whole model need not fit: of what is cut, no more than asked lies in memory."""
    file, each = str(tmp_path / "model.safetensors"), 1 << 20
    mx.save_safetensors(file, {f"w{number}": mx.ones((each // 4,)) for number in range(32)})
    model = nn.Module()
    for name, whole in cast(dict[str, mx.array], mx.load(file)).items():
        setattr(model, name, mx.contiguous(whole[: each // 8]))
    del whole
    mlx_adapter.give_memory_back()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    read_share(model, at_once=2 * each)
    share = mx.get_active_memory() - before
    assert share == pytest.approx(16 * each, rel=0.01)
    assert mx.get_peak_memory() - before <= share + 6 * each
