"""What mlx_adapter/mtp.py relies on in mlx-vlm's drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from families import build_family
from mtp_heads import HEADS, add_heads

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.model.positions import forget_hidden, keeps_hidden

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


def greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def test_a_model_without_heads_has_none(tmp_path: Path):
    folder = build_family("qwen3_5", tmp_path / "model")
    assert mlx_adapter.load_mtp(folder, mlx_adapter.load(folder)) is None
    folder = build_family("qwen3", tmp_path / "other")
    assert mlx_adapter.load_mtp(folder, mlx_adapter.load(folder)) is None
    assert not keeps_hidden()
