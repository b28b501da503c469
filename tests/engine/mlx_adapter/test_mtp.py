"""What mlx_adapter/mtp.py relies on in mlx-vlm's drafters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from families import build_family
from mtp_heads import HEADS, add_heads

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.model.positions import forget_hidden, keeps_hidden
from omlxd.engine.mlx_adapter.model.vlm.vision import import_vlm

TOKENS = [5, 9, 200, 31, 77, 12, 9, 300]


@pytest.mark.parametrize("family", HEADS)
def test_guesses_are_those_of_mlx_vlms_own_drafter(family: str, tmp_path: Path):
    folder = build_family(family, tmp_path / "model", changes=HEADS[family])
    add_heads(folder)
    loaded = mlx_adapter.load(folder)
    heads = mlx_adapter.load_mtp(folder, loaded)
    try:
        assert heads is not None
        logits = loaded.model(mx.array([TOKENS]), cache=mlx_adapter.new_cache(loaded.model, 1))
        hidden: Any = mlx_adapter.take_hidden()
        wide = 128 if family == "qwen4_exp" else 64  # Its two streams.
        assert hidden.shape == (1, len(TOKENS), wide) and mlx_adapter.take_hidden() is None
        bonus = int(mx.argmax(logits[0, -1]).item())

        drafter: Any = heads._module
        drafter._cache, drafter._next_position = drafter.make_cache(), 0
        drafter.prefill_from_target_hidden(mx.array([TOKENS]), hidden, bonus, None, greedy=True)
        theirs = drafter.draft_block(bonus, hidden, None, 4, None, greedy=True)[0].tolist()

        state, following = heads.new_state(0), [*TOKENS[1:], bonus]
        heads.draft(state, following[:3], hidden[:, :3], 3, greedy)
        ours = heads.draft(state, following[3:], hidden[:, 3:], 3, greedy)
        assert [int(token.item()) for token in ours] == theirs
        assert state.position == len(TOKENS) and heads.token_bytes > 0
    finally:
        forget_hidden()


def test_heads_in_a_folder_of_their_own_guess_as_in_the_models(tmp_path: Path):
    folder = build_family("qwen3_5", tmp_path / "model")
    add_heads(folder)
    loaded = mlx_adapter.load(folder)
    hidden = mx.random.normal((1, 4, 64))
    config = json.loads((folder / "config.json").read_text())
    splitter = import_vlm("speculative.drafters.mtp_split").get_mtp_splitter(source_config=config)
    splitter.split(str(folder), str(tmp_path / "heads"))
    drawn = []
    try:
        for heads in (
            mlx_adapter.load_mtp(folder, loaded),
            mlx_adapter.load_drafter(tmp_path / "heads", loaded),
        ):
            assert heads is not None
            drawn.append(heads.draft(heads.new_state(0), TOKENS[:4], hidden, 4, greedy))
        assert mx.array(drawn[0]).tolist() == mx.array(drawn[1]).tolist()
        other = mlx_adapter.load(build_family("qwen3", tmp_path / "other"))
        with pytest.raises(ValueError, match="guesses for a qwen3_5"):
            mlx_adapter.load_drafter(tmp_path / "heads", other)
    finally:
        forget_hidden()


def test_heads_that_do_not_guess_say_why(tmp_path: Path):
    folder = build_family("qwen3", tmp_path / "model")
    loaded = mlx_adapter.load(folder)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    weights["model.layers.3.enorm.weight"] = mx.ones((64,))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "glm4_moe_lite"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has no class for them"):
        mlx_adapter.load_mtp(folder, loaded)


def greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def test_a_model_without_heads_has_none(tmp_path: Path):
    folder = build_family("qwen3_5", tmp_path / "model")
    assert mlx_adapter.load_mtp(folder, mlx_adapter.load(folder)) is None
    folder = build_family("qwen3", tmp_path / "other")
    assert mlx_adapter.load_mtp(folder, mlx_adapter.load(folder)) is None
    assert not keeps_hidden()
