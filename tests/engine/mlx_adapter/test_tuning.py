"""What a training computes: the same with layers that are computed again and without, in every family."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from families import build_family
from family_configs import CONFIGS
from fast_or_slow import SOME_FAMILIES, rest_slow
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers

from omlxd.engine.mlx_adapter.model.adapters import tuning
from omlxd.engine.mlx_adapter.model.load import read_model
from omlxd.engine.mlx_adapter.model.vlm import vision
from omlxd.errors import ModelError

UNTRAINED = ("gemma3n", "recurrent_gemma")
"""mlx-lm's code reads their matrices by itself, past any adapter."""
LORA = {"rank": 2, "scale": 4.0, "dropout": 0.0}


def read(family: str, folder: Path):
    build_family(family, folder)
    return read_model(folder, True, vision.blindness(folder))[0]


def trained(model, steps: int = 2) -> tuple[list[float], dict[str, mx.array]]:
    """The loss of each step, and the gradients of the last."""
    mx.random.seed(0)
    model.freeze()
    linear_to_lora_layers(model, 2, LORA)
    optimizer = optimizers.AdamW(1e-3)
    batch, lengths = mx.arange(20)[None] % 7 + 3, mx.array([[4, 19]])
    value_and_grad = nn.value_and_grad(model, default_loss)
    model.train()
    losses: list[float] = []
    gradients = {}
    for _ in range(steps):
        (loss, _), gradients = value_and_grad(model, batch, lengths)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state, loss, gradients)
        losses.append(loss.item())
    return losses, tree_flatten(gradients, destination={})


@pytest.mark.parametrize(
    "family", rest_slow([name for name in CONFIGS if name not in UNTRAINED], *SOME_FAMILIES[:2])
)
def test_losses_and_gradients_with_checkpointing_are_those_without(tmp_path: Path, family: str, monkeypatch):
    plain, gradients = trained(read(family, tmp_path / "one"))
    model = read(family, tmp_path / "other")
    for kind in {type(layer) for layer in model.layers}:
        monkeypatch.setattr(kind, "__call__", kind.__call__)  # It is put back afterwards.
    tuning._checkpoint_layers(model)
    losses, again = trained(model)
    assert losses == plain and plain[0] != plain[1], (losses, plain)
    assert gradients.keys() == again.keys()
    for name, gradient in gradients.items():
        assert mx.allclose(gradient, again[name], rtol=1e-5, atol=1e-6), name


def test_keys_are_full_names_or_their_ends(tmp_path: Path):
    model = read("qwen3", tmp_path / "qwen3")
    both = ["self_attn.q_proj", "self_attn.v_proj"]
    assert tuning.full_keys(model, ["v_proj", "q_proj"]) == both
    assert tuning.full_keys(model, both) == both
    for wrong in ("proj", "mlp", "", "attn.q_proj"):
        with pytest.raises(ModelError, match=r"--keys: no layer has .*; there are: .*self_attn\.q_proj"):
            tuning.full_keys(model, ["q_proj", wrong])
