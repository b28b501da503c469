"""What mlx_adapter/model/drafters/drafter_folder.py relies on in mlx-vlm's drafters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from drafters import KINDS, OTHERS, build_drafter, config_of
from families import build_family

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.model.positions import forget_hidden, keeps_hidden
from omlxd.engine.server.model_load import load_drafter
from omlxd.errors import ModelError
from omlxd.models.config.drafters import drafter_kind
from omlxd.models.resolve import check_folder

TOKENS = [105, 109, 200, 131, 177, 112, 109, 300]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    forget_hidden()


def greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_guesses_are_those_of_mlx_vlms_own_loop(kind: str, tmp_path: Path):
    """It reads all of the prompt at once; here it is read in two parts, with guesses in between."""
    model = build_family("qwen3", tmp_path / "model")
    build_drafter(kind, tmp_path / kind, model)
    loaded = mlx_adapter.load(model)
    drafter = mlx_adapter.load_drafter(tmp_path / kind, loaded)
    logits = loaded.model(mx.array([TOKENS]), cache=mlx_adapter.new_cache(loaded.model, 1))
    hidden: Any = mlx_adapter.take_hidden()
    assert hidden.shape == (1, len(TOKENS), 64 * (3 if kind.startswith("eagle3") else 2))
    bonus = int(mx.argmax(logits[0, -1]).item())

    module: Any = drafter._module
    if kind.startswith("eagle3"):
        module.reset(drafter._target)  # type: ignore[attr-defined]
        module.prefill_from_target_hidden(mx.array([TOKENS]), hidden, bonus, greedy, greedy=True)
        theirs = module.draft_block(bonus, hidden, None, 4, greedy, greedy=True)[0].tolist()
    else:
        with mlx_adapter.last_positions(4):
            theirs = module.draft_block(bonus, hidden, module.make_cache(), 4, greedy)[0].tolist()

    state, following = drafter.new_state(0), [*TOKENS[1:], bonus]
    drafter.draft(state, following[:3], hidden[:, :3], 3, greedy)
    ours = drafter.draft(state, following[3:], hidden[:, 3:], 3, greedy)
    assert [int(token.item()) for token in ours] == theirs
    assert state.position == len(TOKENS)
    assert kind in OTHERS or drafter.token_bytes == (1 if kind.startswith("eagle3") else 2) * 2 * 2 * 16 * 4


def test_which_folders_hold_a_drafter(tmp_path: Path):
    model = build_family("qwen3", tmp_path / "model")
    assert drafter_kind(json.loads((model / "config.json").read_text())) is None
    for kind in (*KINDS, *OTHERS):
        found = drafter_kind(config_of(kind, model))
        assert found == ("eagle3" if kind.startswith("eagle3") else "dflash", "")
    refused = ({"model_type": "gemma4_assistant"}, {"architectures": ["LlamaForCausalLMEagle"]})
    assert all((drafter_kind(config) or ("",))[0] == "refused" for config in refused)

    build_drafter("eagle3", tmp_path / "eagle3", model)
    check_folder(tmp_path / "eagle3", draft=True)
    with pytest.raises(ModelError, match="name it as that one's draft-model"):
        check_folder(tmp_path / "eagle3")


def test_what_cannot_guess_says_why(tmp_path: Path):
    model = build_family("qwen3", tmp_path / "model")
    folder = tmp_path / "gemma4_assistant"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant"}))
    with pytest.raises(ValueError, match="reads its target's KV"):
        mlx_adapter.load_drafter(folder, mlx_adapter.load(model))
    model = build_family("deepseek_v4", tmp_path / "deepseek_v4")
    build_drafter("eagle3", tmp_path / "eagle3", model)
    with pytest.raises(ModelError, match=r"can't take back tokens, .*; remove draft-model$"):
        load_drafter(tmp_path / "eagle3", mlx_adapter.load(model), "m")
    (folder / "config.json").write_text(json.dumps({"model_type": "glm9_mtp"}))
    mx.save_safetensors(str(folder / "model.safetensors"), {"a": mx.zeros(1)})
    with pytest.raises(ModelError, match=r"mlx-vlm \S+ has no drafter of type 'glm9_mtp', a newer omlxd may"):
        load_drafter(folder, mlx_adapter.load(model), "m")
    assert not keeps_hidden()
