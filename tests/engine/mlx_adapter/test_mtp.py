"""What mlx_adapter/mtp.py relies on in mlx-vlm's drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from families import build_family
from mtp_heads import add_heads

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.model.positions import passes as _passes

TOKENS = [5, 9, 200, 31, 77, 12, 9, 300]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_guesses_are_those_of_mlx_vlms_own_drafter(family: str, tmp_path: Path):
    folder = build_family(family, tmp_path / "model")
    add_heads(folder)
    loaded = mlx_adapter.load(folder)
    heads = mlx_adapter.load_mtp(folder, loaded)
    try:
        assert heads is not None
        logits = loaded.model(mx.array([TOKENS]), cache=loaded.model.make_cache())
        hidden: Any = mlx_adapter.take_hidden()
        assert hidden.shape == (1, len(TOKENS), 64) and mlx_adapter.take_hidden() is None
        bonus = int(mx.argmax(logits[0, -1]).item())

        drafter: Any = heads._drafter
        drafter.reset(getattr(loaded.model, "vlm", loaded.model))
        drafter.prefill_from_target_hidden(mx.array([TOKENS]), hidden, bonus, None, greedy=True)
        theirs = drafter.draft_block(bonus, hidden, None, 4, None, greedy=True)[0].tolist()

        state, following, ours = heads.new_state(0), [*TOKENS[1:], bonus], []
        for start in (0, 3):
            stop = start + 3 if not start else len(following)
            guess, own = heads.forward(state, following[start:stop], hidden[:, start:stop])
        while len(ours) < 3:
            ours.append(int(mx.argmax(guess).item()))
            guess, own = heads.forward(state, ours[-1:], own)
        assert ours == theirs
        heads.take_back(state, 3)
        assert state.position == state.cache[0].offset == len(TOKENS)
        assert heads.token_bytes == 2 * 2 * 16 * 4
    finally:
        _passes.keeps = False


def test_a_model_without_heads_has_none(tmp_path: Path):
    folder = build_family("qwen3_5", tmp_path / "model")
    assert mlx_adapter.load_mtp(folder, mlx_adapter.load(folder)) is None
    folder = build_family("qwen3", tmp_path / "other")
    assert mlx_adapter.load_mtp(folder, mlx_adapter.load(folder)) is None
    assert not _passes.keeps
