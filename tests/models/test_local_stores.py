"""Models of Ollama, LM Studio and llama.cpp are listed and imported by name; broken stores become lines."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf

from omlxd.models.local_stores import check_models, local_models, model_called
from tests.models.test_gguf import small
from tests.models.test_resolve import REPO, make


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(small("llama", folder / "model", {}), folder / "tiny.gguf", "llama", Type.Q8_0)
    return folder / "tiny.gguf"


def manifest(home: Path, name: str, **layer: object) -> Path:
    path = home / ".ollama/models/manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"layers": [{"mediaType": "application/vnd.ollama.image.model"} | layer]}))
    return path


def in_ollama(home: Path, name: str, data: bytes) -> None:
    digest = hashlib.sha256(data).hexdigest()
    manifest(home, name, digest=f"sha256:{digest}", size=len(data))
    blob = home / f".ollama/models/blobs/sha256-{digest}"
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(data)


def run(home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "omlxd", "models", *argv]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_each_store_is_listed_and_imported_by_name(tmp_path: Path, gguf_file: Path):
    in_ollama(tmp_path, "registry.ollama.ai/library/tiny/latest", gguf_file.read_bytes())
    in_ollama(tmp_path, "hf.co/org/other/Q8_0", gguf_file.read_bytes())
    lmstudio = tmp_path / ".lmstudio/models/org"
    (lmstudio / "tiny-gguf").mkdir(parents=True)
    shutil.copy(gguf_file, lmstudio / "tiny-gguf/tiny-Q8_0.gguf")
    make(lmstudio / "tiny-mlx")
    llama_cpp = tmp_path / ".cache/llama.cpp"
    llama_cpp.mkdir(parents=True)
    shutil.copy(gguf_file, llama_cpp / "org_tiny.gguf")

    listed = run(tmp_path, "list", "--found")
    print(listed.stdout)
    assert listed.returncode == 0 and not listed.stderr
    rows = {line.split()[0]: line for line in listed.stdout.splitlines()[1:]}
    assert rows.keys() == {
        "tiny:latest",
        "hf.co/org/other:Q8_0",
        "org/tiny-gguf/tiny-Q8_0",
        "org/tiny-mlx",
        "org_tiny",
    }
    assert "llama Q8_0" in rows["tiny:latest"]
    assert all(row.endswith(f"omlxd models import {name}") for name, row in rows.items())

    imported = run(tmp_path, "import", "tiny")
    folder = tmp_path / ".omlxd/models/tiny"
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout == f"{folder}\n\nomlxd serve --model {folder}\n"
    assert (folder / "model.safetensors").is_file()
    assert run(tmp_path, "import", "org/tiny-mlx").stdout.startswith(f"{lmstudio / 'tiny-mlx'}\n")
    unknown = run(tmp_path, "import", "llama9")
    assert unknown.returncode == 1 and "omlxd models list --found" in unknown.stderr


def test_a_name_of_two_stores_needs_its_store(tmp_path: Path, gguf_file: Path):
    for place in (".lmstudio/models", ".cache/llama.cpp"):
        (tmp_path / place).mkdir(parents=True)
        shutil.copy(gguf_file, tmp_path / place)
    environ = {"HOME": str(tmp_path)}
    commands = [model.command for model in local_models(environ)]
    assert commands == ["omlxd models import llama.cpp/tiny", "omlxd models import lmstudio/tiny"]
    with pytest.raises(Exception, match=r"write llama\.cpp/tiny or lmstudio/tiny"):
        model_called("tiny", environ)
    assert model_called("lmstudio/tiny", environ).store == "lmstudio"


def test_split_files_are_one_model(tmp_path: Path):
    for n in (1, 2):
        (tmp_path / f"big-0000{n}-of-00002.gguf").write_bytes(bytes(50))
    (tmp_path / "mmproj-big.gguf").write_bytes(b"")
    (model,) = local_models({"HOME": str(tmp_path / "home"), "LLAMA_CACHE": str(tmp_path)})
    assert (model.name, model.disk_bytes) == ("big", 100)


def test_a_split_model_has_no_parts_of_another_folders(tmp_path: Path):
    for publisher, size in (("one", 10), ("two", 1000)):
        folder = tmp_path / f".lmstudio/models/{publisher}/big"
        folder.mkdir(parents=True)
        for part in ("00001", "00002"):
            (folder / f"big-{part}-of-00002.gguf").write_bytes(bytes(size))
        (folder / "big.json").write_bytes(bytes(size))
    listed = local_models({"HOME": str(tmp_path)})
    assert {m.name: m.disk_bytes for m in listed} == {"one/big/big": 20, "two/big/big": 2000}


@pytest.mark.parametrize("pointer", [b"", bytes(20), b"here"])
def test_files_in_no_place_are_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pointer: bytes):
    manifest(tmp_path, "stray")
    (tmp_path / ".lmstudio-home-pointer").write_bytes(pointer)
    for folder in ("models", "here/models"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert local_models({"HOME": str(tmp_path)}) == []


def test_hostile_stores_are_lines(tmp_path: Path):
    library = "registry.ollama.ai/library"
    manifest(tmp_path, f"{library}/list/latest").write_text("[" * 100_000)
    manifest(tmp_path, f"{library}/huge/latest").write_bytes(b" " * (2 << 20))
    manifest(tmp_path, f"{library}/out/latest", digest="sha256:../../../../etc/passwd", size=-7)
    manifest(tmp_path, f"{library}/gone/latest", digest="sha256:" + "0" * 64, size=1 << 62)
    manifest(tmp_path, f"{library}/esc\x1b[31m/latest", digest="sha256:" + "0" * 64, size=1)
    loop = manifest(tmp_path, f"{library}/loop/latest")
    loop.unlink()
    loop.symlink_to(loop)
    os.mkfifo(tmp_path / ".ollama/models/manifests" / library / "loop/fifo")
    in_ollama(tmp_path, f"{library}/noise/latest", b"GGUF" + bytes(60))
    lmstudio = tmp_path / ".lmstudio/models/org"
    lmstudio.mkdir(parents=True)
    (lmstudio / "again").symlink_to(lmstudio)
    (lmstudio / "self.gguf").symlink_to(lmstudio / "self.gguf")
    make(lmstudio / "damaged")
    (lmstudio / "damaged/config.json").write_text('{"model_type": ' + "[" * 100_000)

    models = local_models({"HOME": str(tmp_path)})
    check_models(models)
    troubles = {model.full_name: model.trouble for model in models}
    print(json.dumps(troubles, indent=1))
    assert len(troubles) == 10 and all(troubles.values()) and not any(m.command for m in models)
    assert troubles["ollama/list:latest"] == "its manifest is damaged"
    assert troubles["ollama/huge:latest"] == "its manifest can't be read: it is larger than 1 MiB"
    assert "digest" in troubles["ollama/out:latest"]
    assert troubles["ollama/gone:latest"] == "its file is missing or can't be read"
    assert "symbolic links" in troubles["ollama/loop:latest"]
    assert "not a regular file" in troubles["ollama/loop:fifo"]
    assert troubles["ollama/noise:latest"] == "its GGUF version is 0; 2 and 3 can be read"
    assert "ollama/esc?[31m:latest" in troubles
    listed = run(tmp_path, "list", "--found")
    assert listed.returncode == 0 and not listed.stderr and len(listed.stdout.splitlines()) == 11
