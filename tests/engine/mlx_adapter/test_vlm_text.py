"""Language models of mlx-vlm alone, for text: tiny models of families that mlx-lm does not have.

Those whose caches omlxd knows are in the family matrix as well (test_family_matrix.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from cold_run import prompt
from families import build_family
from family_configs import NOT_REUSED, VLM_TEXT
from fast_or_slow import rest_slow
from mlx_lm.utils import quantize_model, save_model
from rig import Rig

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.model.vlm import vision, vlm_text
from omlxd.engine.mlx_adapter.runtime.arrays import distance
from omlxd.errors import ModelError

FAMILIES = rest_slow(VLM_TEXT, "k2_horizon")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family(request.param, tmp_path_factory.mktemp("model") / request.param)


def test_tokens_are_those_of_mlx_vlm(model: Path):
    """One after another by omlxd, and at once by mlx-vlm's whole model, without a cache."""
    asked = prompt(150, seed=1)
    with Rig(model, reuse=False) as rig:
        got = rig.run(asked, 12).got
    vision.take_attention()
    whole = vision.import_vlm("utils").load_model(model)
    tokens = [*asked, *got]
    caches = vision.import_vlm("models.cache").make_prompt_cache(whole.language_model)
    logits = whole(mx.array([tokens]), cache=caches).logits
    assert got == logits[0, len(asked) - 1 : -1].argmax(-1).tolist()
    assert len(set(got)) > 6


def test_nothing_is_written_beside_an_array(model: Path):
    """MLX keeps an array's size in front of it. A load has passes of 1 and 2 tokens."""
    mlx_adapter.load(model)
    assert mx.get_active_memory() < 2**40


def test_in_company_as_alone(model: Path):
    """Rows of unequal length, that join while others decode and leave before them."""
    asked = [prompt(30 + 50 * at, seed=at) for at in range(3)]
    with Rig(model, reuse=False, slots=3) as rig:
        alone = [rig.run(tokens, 15 - 4 * at).got for at, tokens in enumerate(asked)]
        running = [rig.start(tokens, 15 - 4 * at) for at, tokens in enumerate(asked)]
        assert [output.tokens() for output in running] == alone


def test_what_is_not_reused_is_said(model: Path):
    loaded = mlx_adapter.load(model)
    if model.name not in NOT_REUSED:
        assert not loaded.kv_reuse and loaded.layout is not None
        return
    assert loaded.kv_reuse == "layers of this model keep PoolingCache: state that omlxd can't store yet"
    assert loaded.layout is None and loaded.batchable


def test_weights_are_read_as_published_and_quantised(small: Path):
    """Those of the first authors have other names."""
    want = mlx_adapter.load(small).model(mx.array([[5, 6]]))
    weights = mx.load(str(small / "model.safetensors"))
    names = {name.removeprefix("language_model."): array for name, array in weights.items()}
    mx.save_safetensors(str(small / "model.safetensors"), names)
    (small / "model.safetensors.index.json").unlink()
    assert mx.array_equal(mlx_adapter.load(small).model(mx.array([[5, 6]])), want)
    whole = vision.import_vlm("utils").load_model(small)
    whole, config = quantize_model(whole, json.loads((small / "config.json").read_text()), 32, 8)
    save_model(small, whole)
    (small / "config.json").write_text(json.dumps(config))
    loaded = mlx_adapter.load(small)
    assert loaded.weight_bytes < 0.4 * sum(array.nbytes for array in weights.values())
    assert distance(loaded.model(mx.array([[5, 6]])), want) < 0.05


# --------------------------------------------------------------------------- which it does not take


def with_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return build_family("k2_horizon", tmp_path / "model")


def test_a_type_that_nobody_has_is_named(small: Path):
    for name in ("mamba9", "cache", "qwen4_exp.language", ".."):  # `models.cache` is a module, and no family.
        with pytest.raises(ModelError, match=rf"^{small}: neither mlx-lm .* nor mlx-vlm .* of type '{name}'"):
            mlx_adapter.load(with_config(small, model_type=name))


def test_without_mlx_vlm_it_says_how_to_install_it(small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("omlxd.models.footprint.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"no model of type 'k2_horizon'.*pip install --no-deps mlx-vlm==0"):
        mlx_adapter.load(small)


def test_code_of_a_model_is_never_run(small: Path):
    (small / "evil.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ModelError, match="custom"):
        mlx_adapter.load(with_config(small, model_file="evil.py"))


def test_weights_of_another_model_are_told(small: Path):
    with pytest.raises(ModelError, match=r"mlx-vlm can't load .* as 'k2_horizon'"):
        mlx_adapter.load(with_config(small, hidden_size=32))


class _Odd(nn.Module):
    """A model of mlx-vlm and its language model. `logits` of (tokens, tokens before), one-hot."""

    def __init__(self, logits: Callable[[mx.array, int], mx.array]):
        super().__init__()
        self.language_model, self._logits, self.layers = self, logits, [nn.Module()]

    def make_cache(self) -> list[Any]:
        return [vision.import_vlm("models.cache").KVCache()]

    def __call__(self, tokens: mx.array, cache: Any) -> Any:
        kept = tokens[:, None, :, None].astype(mx.float32)
        held, _ = cache[0].update_and_fetch(kept, kept)
        return SimpleNamespace(logits=self._logits(tokens, held[0, 0, :, 0]))


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (lambda tokens, held: mx.cumsum(held)[-tokens.shape[1] :], ""),
        (lambda tokens, held: mx.broadcast_to(tokens.sum(), tokens.shape)[0], "looks ahead"),
        (lambda tokens, held: mx.cumsum(tokens[0]), "does not go on from its cache"),
        (lambda tokens, held: tokens.pixels, "does not compute a text by itself: .*pixels"),
    ],
)
def test_what_is_no_language_model_is_refused(seen: Any, why: str):
    odd = _Odd(lambda tokens, held: mx.eye(9)[seen(tokens, held).astype(mx.int32)][None])
    model = vlm_text.TextModel(odd)
    if not why:
        model.check()
        return
    with pytest.raises(ModelError, match=why):
        model.check()
