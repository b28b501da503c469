"""Several adapters in one model: each row has what mlx-lm's single run has, whoever shares the pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from adapters import make_adapter
from backends import use_backend
from daemon import family_model
from mlx_lm.utils import load as mlx_load

from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter import LoadedModel, may_share_pass, row_adapters
from omlxd.engine.mlx_adapter.model.adapters import lora as multi_lora
from omlxd.errors import AdapterError
from omlxd.models import demo

TOKENS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.build_demo(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of three ranks, scales and depths; the last one changes but one kind of layer."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(base, root / "a", 1),
        make_adapter(base, root / "b", 2, rank=8, scale=5.0, num_layers=1),
        make_adapter(base, root / "c", 3, rank=2, num_layers=3, keys=["self_attn.v_proj"]),
    ]


def run(model, rows: int = 1) -> mx.array:
    return model(mx.array([TOKENS] * rows))[:, -1]


def alone(base: Path, folder: Path) -> mx.array:
    return run(mlx_load(str(base), adapter_path=str(folder))[0])[0]


def rows_of(loaded: LoadedModel, *adapters: mlx_adapter.Adapter | None) -> mx.array:
    with row_adapters(adapters):
        return run(loaded.model, len(adapters))


def test_rows_of_one_adapter_have_the_bits_of_mlx_lms_single_run(base: Path, folders: list[Path]):
    loaded = mlx_adapter.load(base)
    plain, weights = run(loaded.model), mlx_adapter.tree_bytes(loaded.model.parameters())
    adapters = [loaded.adapters.add(str(folder)) for folder in folders]
    for folder, adapter in zip(folders, adapters, strict=True):
        assert mx.array_equal(rows_of(loaded, adapter)[0], alone(base, folder))
        assert adapter.mixes and adapter.nbytes
    assert mx.array_equal(run(loaded.model), plain)
    assert mx.array_equal(rows_of(loaded, None), plain)
    assert mlx_adapter.tree_bytes(loaded.model.parameters()) == weights


def test_each_row_of_a_mixed_pass_has_its_own_adapter(base: Path, folders: list[Path]):
    loaded = mlx_adapter.load(base)
    a, b, c = (loaded.adapters.add(str(folder)) for folder in folders)
    expected = [alone(base, folder) for folder in folders]
    plain = run(loaded.model)[0]
    mixed = rows_of(loaded, b, None, c, a, b)
    worst = 0.0
    for row, single in zip(mixed, [expected[1], plain, expected[2], expected[0], expected[1]], strict=True):
        worst = max(worst, float(mx.abs(row - single).max()) / float(mx.abs(single).max()))
        assert row.argmax() == single.argmax()
    print(f"largest difference, as a share of the largest logit: {worst:.1e}")
    assert worst < 1e-4
    assert not mx.allclose(mixed[0], mixed[3], atol=0.1)


def test_a_row_does_not_depend_on_who_shares_the_pass(base: Path, folders: list[Path]):
    loaded = mlx_adapter.load(base)
    a, b, c = (loaded.adapters.add(str(folder)) for folder in folders)
    assert mx.array_equal(rows_of(loaded, a, None, b)[0], rows_of(loaded, a, c, c)[0])
    plain = rows_of(loaded, None, None, None)
    assert mx.array_equal(rows_of(loaded, None, b, c)[0], plain[0])


def test_a_broken_row_leaves_the_others_alone(base: Path, folders: list[Path]):
    loaded = mlx_adapter.load(base)
    good, bad = (loaded.adapters.add(str(folder)) for folder in folders[:2])
    expected = rows_of(loaded, good, bad, None)
    for layer in loaded.adapters._layers():
        if bad in layer.lora_slot.modules:
            layer.lora_slot.a[bad.place] = mx.nan
    spoiled = rows_of(loaded, good, bad, None)
    assert mx.isnan(spoiled[1]).any()
    assert mx.array_equal(spoiled[0], expected[0]) and mx.array_equal(spoiled[2], expected[2])


def test_one_goes_and_the_others_stay(base: Path, folders: list[Path]):
    loaded = mlx_adapter.load(base)
    kinds = [type(module) for _, module in loaded.model.named_modules()]
    a, b, c = (loaded.adapters.add(str(folder)) for folder in folders)
    before = rows_of(loaded, None, c)
    loaded.adapters.remove(a)
    assert mx.allclose(rows_of(loaded, None, c), before, rtol=1e-4, atol=1e-4)
    assert mx.array_equal(rows_of(loaded, b)[0], alone(base, folders[1]))
    loaded.adapters.remove(b)
    loaded.adapters.remove(c)
    assert [type(module) for _, module in loaded.model.named_modules()] == kinds


def test_matrices_are_held_once_and_those_that_went_not_at_all(base: Path, tmp_path: Path):
    """Once a larger rank comes, the smaller ones are no part of the stacks, and hold no earlier ones."""
    small = [str(make_adapter(base, tmp_path / str(seed), seed, rank=32)) for seed in range(4)]
    large = str(make_adapter(base, tmp_path / "large", 9, rank=64))
    loaded = mlx_adapter.load(base)
    before, (first, *others) = mx.get_active_memory(), [loaded.adapters.add(folder) for folder in small]
    assert mx.get_active_memory() - before < 1.1 * loaded.adapters.nbytes
    loaded.adapters.add(large)
    for adapter in others:
        loaded.adapters.remove(adapter)
    assert mx.get_active_memory() - before < 1.1 * loaded.adapters.nbytes
    assert mx.array_equal(rows_of(loaded, first)[0], alone(base, Path(small[0])))


def test_a_broken_adapter_changes_nothing(base: Path, folders: list[Path], tmp_path: Path):
    loaded = mlx_adapter.load(base)
    kept = loaded.adapters.add(str(folders[0]))
    expected, plain = rows_of(loaded, kept), run(loaded.model)
    other = make_adapter(family_model("qwen3"), tmp_path / "other")
    random = mx.random.state[0].tolist()
    with pytest.raises(AdapterError, match=r"is no adapter of this model: model\.layers.*lora_"):
        loaded.adapters.add(str(other))
    assert loaded.adapters.loaded == [kept]
    assert mx.array_equal(rows_of(loaded, kept), expected) and mx.array_equal(run(loaded.model), plain)
    assert mx.random.state[0].tolist() == random


def test_kinds_without_a_gathered_product_share_no_pass(base: Path, folders: list[Path], tmp_path: Path):
    dora = make_adapter(base, tmp_path / "dora", 4, fine_tune_type="dora")
    moe = family_model("qwen3_moe")
    experts = make_adapter(moe, tmp_path / "experts", 5, keys=["mlp.switch_mlp.up_proj"])
    for model, folder in ((base, dora), (moe, experts)):
        loaded = mlx_adapter.load(model)
        adapter = loaded.adapters.add(str(folder))
        assert not adapter.mixes and not may_share_pass([adapter, None]) and may_share_pass([adapter] * 2)
        assert mx.array_equal(rows_of(loaded, adapter)[0], alone(model, folder))
    loaded = mlx_adapter.load(base)
    assert may_share_pass([loaded.adapters.add(str(folders[0])), None])


def test_on_cuda_both_sides_of_a_gathered_matrix_are_multiples_of_eight(
    base: Path, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With others MLX's gathered product ends the process's use of the GPU."""
    use_backend(monkeypatch, "mlx", gathered_multiple=8)
    loaded = mlx_adapter.load(base)
    b, c = (loaded.adapters.add(str(folder)) for folder in folders[1:])
    stacks = [layer.lora_slot.a.shape for layer in loaded.adapters._layers()]
    assert {rank for _, _, rank in stacks} == {8} and b.mixes and c.mixes
    expected = mx.stack([alone(base, folders[1]), run(loaded.model)[0], alone(base, folders[2])])
    assert mx.allclose(rows_of(loaded, b, None, c), expected, rtol=1e-4, atol=1e-4)
    use_backend(monkeypatch, "mlx", gathered_multiple=96)  # The demo's layers are 64 and more wide.
    assert not mlx_adapter.load(base).adapters.add(str(folders[0])).mixes


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v3", "qwen3_next"])
def test_families(family: str, tmp_path: Path):
    model = family_model(family)
    folder = make_adapter(model, tmp_path / "a", 6, scale=2.0, keys=["self_attn.q_proj", "self_attn.o_proj"])
    loaded = mlx_adapter.load(model)
    adapter = loaded.adapters.add(str(folder))
    expected = mx.stack([alone(model, folder), run(loaded.model)[0]])
    assert adapter.mixes
    assert mx.allclose(rows_of(loaded, adapter, None), expected, rtol=1e-3, atol=1e-3)


def test_one_that_memory_runs_out_for_leaves_nothing(base: Path, folders: list[Path], monkeypatch):
    loaded = mlx_adapter.load(base)
    before, evals = run(loaded.model), []

    def evaluated(*arrays: Any, eval: Any = mx.eval) -> None:
        evals.append(1)
        if len(evals) == 3:
            raise RuntimeError("[malloc] Unable to allocate")
        eval(*arrays)

    with monkeypatch.context() as patched:
        patched.setattr(multi_lora.mx, "eval", evaluated)
        with pytest.raises(RuntimeError, match="Unable to allocate"):
            loaded.adapters.add(str(folders[0]))
    assert not loaded.adapters.loaded and loaded.adapters.nbytes == 0 and not loaded.adapters._layers()
    assert mx.array_equal(run(loaded.model), before)
    assert loaded.adapters.add(str(folders[0])) in loaded.adapters.loaded
