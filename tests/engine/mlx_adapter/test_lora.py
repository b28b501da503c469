"""LoRA adapters: what they change, what is not shared with their base, and which are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import mlx.core as mx
import pytest
from adapters import make_adapter
from daemon import Daemon, family_model
from mlx_lm.utils import load as mlx_load

from omlxd.cli.models.command import installed
from omlxd.config import load_settings
from omlxd.engine import mlx_adapter
from omlxd.engine.kvio.fingerprint import adapter_fingerprint, file_identities
from omlxd.errors import AdapterError
from omlxd.kv.files.namespace import Installed, NamespaceInfo, describe_namespace
from omlxd.models import demo


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.build_demo(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("adapters") / "style")


def logits(model) -> mx.array:
    return model(mx.array([[5, 6, 7, 8]]))[:, -1]


def test_a_model_with_its_adapter_computes_what_mlx_lm_does(base: Path, adapter: Path):
    tuned = mlx_adapter.load(base, adapter=str(adapter))
    assert tuned.layout is not None and tuned.batchable
    expected = logits(mlx_load(str(base), adapter_path=str(adapter))[0])
    assert mx.array_equal(logits(tuned.model), expected)
    assert not mx.allclose(expected, logits(mlx_adapter.load(base).model), atol=0.1)


def test_another_file_is_another_adapter(base: Path, adapter: Path, tmp_path: Path):
    before, files = adapter_fingerprint(str(adapter), None), file_identities(base, str(adapter))
    other = make_adapter(base, tmp_path / "other", seed=1)
    assert adapter_fingerprint(str(other), None) != before
    shutil.copytree(adapter, tmp_path / "copy")
    assert adapter_fingerprint(str(tmp_path / "copy"), None) == before
    assert file_identities(base, str(other)) != files != file_identities(base)


def keep(folder: Path, wanted: Callable[[str], bool]) -> None:
    """Leave only these tensors in the adapter's file."""
    file = folder / "adapters.safetensors"
    kept = {name: mx.array(tensor) for name, tensor in mx.load(str(file)).items() if wanted(name)}
    mx.eval(kept)
    mx.save_safetensors(str(file), kept)


def tell(folder: Path, **told: object) -> None:
    """Have its configuration say so."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | told))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "adapters.safetensors").unlink(), "can't be read: No such file"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "can't be read: No such file"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "Input data was truncated"),
        (lambda folder: (folder / "adapter_config.json").write_text("[1]"), "Expected `object`"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "num_layers"),
        (lambda folder: (folder / "adapters.safetensors").write_bytes(b"x" * 99), "is truncated"),
        (lambda folder: keep(folder, lambda name: False), "holds no tensors"),
        (lambda folder: keep(folder, lambda name: name.endswith("lora_a")), "14 of 28 tensors that its "),
        (lambda folder: keep(folder, lambda name: "q_proj" in name), "are missing, as model.layers."),
        (lambda folder: tell(folder, fine_tune_type="dora"), "are missing, as model.layers."),
        (lambda folder: tell(folder, fine_tune_type="other"), "Invalid enum value 'other'"),
        (lambda folder: keep(folder, lambda name: ".1." in name), "are missing, as model.layers.0."),
        (lambda folder: tell(folder, num_layers=None), "has no num_layers"),
        (
            lambda folder: tell(folder, lora_parameters={"rank": "eight"}),
            "Expected `int`, got `str`",
        ),
        (lambda folder: tell(folder, lora_parameters={"rank": 4}), "missing required field `scale`"),
        (lambda folder: shutil.rmtree(folder), "can't be read: "),
    ],
)
def test_a_broken_adapter_is_refused_with_a_sentence(base, adapter, tmp_path, harm, words):
    folder = shutil.copytree(adapter, tmp_path / "broken")
    harm(folder)
    with pytest.raises(AdapterError) as caught:
        mlx_adapter.load(base, adapter=str(folder))
    assert words in caught.value.message and str(folder) in caught.value.message


def test_an_adapter_of_another_base_is_refused_and_names_a_tensor(adapter: Path):
    with pytest.raises(AdapterError, match=r"is no adapter of this model: model\.layers.*lora_"):
        mlx_adapter.load(family_model("qwen3"), adapter=str(adapter))


def test_an_adapters_blocks_do_not_make_its_bases_blocks_orphans(tmp_path: Path):
    from omlxd.kv.files.fs import FileSystem

    model, adapter, root = tmp_path / "model", tmp_path / "adapter", tmp_path / "cache"
    fields = {
        "model_id": "m",
        "model_type": "x",
        "block_size": 64,
        "block_bytes": 1,
        "model_path": str(model),
    }
    names = {"": "a" * 64, str(adapter): "b" * 64}
    for folder, digest in names.items():
        (root / digest[:32]).mkdir(parents=True)
        info = NamespaceInfo(**fields, facts_digest=digest, adapter=folder)
        describe_namespace(root, info, FileSystem())
    model.mkdir()
    adapter.mkdir()
    installed = Installed(root)
    for folder, digest in names.items():
        installed.loaded(digest[:32], folder or str(model))
        installed.left(digest[:32])
    spaces = [digest[:32] for digest in names.values()]
    assert installed.orphans(spaces) == set()
    adapter.rmdir()
    assert installed.orphans(spaces) == {"b" * 32}


@pytest.mark.slow
def test_adapters_are_models_of_their_own(base: Path, adapter: Path, tmp_path: Path):
    """Those in a model's folder and those that were tuned here, with the base's KV left alone."""
    folder = shutil.copytree(base, tmp_path / "tiny")
    (folder / "omlxd_demo.json").unlink()  # Or it would be built anew.
    shutil.copytree(adapter, folder / "style")
    (folder / "empty").mkdir()
    make_adapter(base, tmp_path / "omlxd" / "adapters" / "tiny" / "tone", seed=1)
    with Daemon(tmp_path, "--no-hf-cache", model=folder) as daemon:
        url = daemon.url
        listed = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        assert [model["id"] for model in listed] == ["tiny", "tiny:style", "tiny:tone"]

        def ask(model: str) -> dict:
            body = {"model": model, "prompt": demo.PROSE, "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
            assert answer.status_code == 200, answer.text
            return answer.json()

        answers = {name: ask(name) for name in ("tiny", "tiny:style", "tiny:tone")}
        assert len({answer["choices"][0]["text"] for answer in answers.values()}) == 3
        assert all(a["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 for a in answers.values())
        again = ask("tiny:style")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert again["choices"][0]["text"] == answers["tiny:style"]["choices"][0]["text"]
        shown = httpx.get(f"{url}/omlxd/models/tiny:style", trust_env=False).json()
        assert shown["adapter"] == str(folder / "style")
        nbytes = (adapter / "adapters.safetensors").stat().st_size
        assert shown["disk_bytes"] == nbytes
    settings = load_settings(
        {"base_path": str(tmp_path / "omlxd"), "model": str(folder), "no_hf_cache": "true"}, {}
    )
    models = {model.id: model.disk_bytes for model in installed(settings)}
    weights = (folder / "model.safetensors").stat().st_size
    assert models == {"tiny": weights, "tiny:style": nbytes, "tiny:tone": nbytes}


@pytest.mark.slow
def test_a_models_setting_names_its_adapter_and_a_wrong_one_is_said(base: Path, tmp_path: Path):
    folder = shutil.copytree(base, tmp_path / "tiny")
    (folder / "omlxd_demo.json").unlink()
    (tmp_path / "omlxd").mkdir()
    (tmp_path / "omlxd" / "omlxd.toml").write_text(f'[models.tiny]\nadapter = "{tmp_path}/nowhere"\n')
    with Daemon(tmp_path, "--no-hf-cache", model=folder, wait=False) as daemon:
        body = {"prompt": "Hi", "max_tokens": 1}
        answer = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 400 and "nowhere/adapter_config.json" in answer.text
        make_adapter(base, tmp_path / "nowhere")
        answer = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
    assert json.loads((tmp_path / "nowhere" / "adapter_config.json").read_text())["num_layers"] == 2
