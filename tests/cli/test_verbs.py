"""Verbs as people type them: Ollama's, mistyped ones, and what a verb does without further words."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from omlxd.cli import main as command
from omlxd.cli.cache import command as cache
from omlxd.cli.cache.warm import read_requests
from omlxd.cli.chat import run
from omlxd.cli.daemon.client import Daemon, DaemonError, NoDaemon
from omlxd.cli.daemon.owner_api import InstalledStatus, InstalledStatuses
from omlxd.cli.models import command as models
from omlxd.config import OPTIONS
from omlxd.config.settings import groups
from omlxd.errors import ConfigError, NotFound
from omlxd.front.engines.names.names import resolve_name
from omlxd.models.remove import removable, remove_folder
from tests.models.test_resolve import make


@pytest.fixture
def omlxd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs the command without a daemon; returns its status and what it wrote."""
    for name in [name for name in os.environ if name.startswith("OMLXD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OMLXD_BASE_PATH", str(tmp_path / "base"))

    def none(*_: object, **__: object) -> Any:
        raise NoDaemon("nothing answers")

    monkeypatch.setattr(Daemon, "fetch", none)

    def go(*words: str) -> tuple[int, str]:
        status = command.main(words)
        said = capsys.readouterr()
        return status, said.out + said.err

    return go


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("sever", "serve"),
        ("lst", "list"),
        ("chta", "chat"),
        ("modles", "models"),
        ("pul", "pull"),
        ("rn", "run"),
    ],
)
def test_a_mistyped_verb_names_the_nearest(omlxd, word, near):
    assert omlxd(word) == (
        2,
        f"omlxd: There is no verb {word!r} (did you mean {near}?); `omlxd --help` lists them.\n",
    )


def test_a_mistyped_verb_of_a_verb_does_too(omlxd):
    status, said = omlxd("models", "unlaod", "x")
    assert status == 2 and "'unlaod' (did you mean unload?) is not one of list, show" in said


@pytest.mark.parametrize("name", ["smollm", "SmolLM2-135M-Instuct", "org/qwen", "qwen3-8b"])
def test_a_mistyped_model_names_the_nearest(name):
    with pytest.raises(NotFound) as caught:
        resolve_name(name, ["SmolLM2-135M-Instruct", "org/Qwen3-8B-4bit"])
    near = "SmolLM2-135M-Instruct" if "m" in name else "Qwen3-8B-4bit"
    assert "(did you mean " in caught.value.message and near in caught.value.message.partition(";")[0]


def test_ollama_s_verbs_do_what_they_do_there(omlxd, tmp_path: Path, monkeypatch):
    folder = make(tmp_path / "base" / "models" / "tiny")
    for verb in ("list", "ls"):
        status, said = omlxd(verb)
        assert status == 0 and "tiny" in said and "installed" in said
    assert omlxd("ps") == (0, "no model is loaded\n")
    status, said = omlxd("show", "tiny")
    assert status == 0 and said.startswith("tiny\n") and str(folder) in said
    status, said = omlxd("show", "tinny")
    assert status == 1 and "There is no model 'tinny' on this machine (did you mean tiny?)" in said
    assert omlxd("stop", "tiny")[0] == 1, "there is no daemon"
    monkeypatch.setattr(models, "fetch_from_hub", pulled := Pulled())
    assert omlxd("pull", "org/new")[0] == 0 and pulled.names == ["org/new"]
    status, said = omlxd("rm", "tiny", "tinny")
    assert status == 1 and "tinny" in said and folder.exists(), "nothing is deleted where a name is wrong"
    assert omlxd("rm", "tiny") == (0, "tiny is deleted\n") and not folder.exists()


@pytest.mark.parametrize("verb", ["list", "ls", "pull", "show", "rm", "stop", "ps"])
def test_a_verb_speaks_of_itself_as_it_was_typed(omlxd, capsys, verb):
    status, said = omlxd(verb, "--nonsense", *(["x"] if verb not in ("list", "ls", "ps") else []))
    assert status == 2 and f"`omlxd {verb}`" in said and "omlxd models" not in said
    with pytest.raises(SystemExit):
        command.main([verb, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: omlxd {verb} ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("pull", "smoll"), "did you mean SmolLM2-135M-Instruct?"),
        (("cache", "pin", "a text of mine"), "give a session, `last`, or a file"),
        (("launch", "claude", "--print"), "did you mean --print-env?"),
    ],
)
def test_a_near_miss_names_what_is_taken(omlxd, argv, words):
    status, said = omlxd(*argv)
    assert status and words in said


class Pulled:
    def __init__(self) -> None:
        self.names: list[str] = []

    async def __call__(self, name: str) -> Path:
        self.names.append(name)
        return Path("/models") / name


@pytest.mark.parametrize(("name", "pulls"), [("org/new", True), ("tiny", False), ("/a/folder", False)])
def test_run_downloads_what_is_not_here_and_talks(omlxd, tmp_path: Path, monkeypatch, name, pulls):
    make(tmp_path / "base" / "models" / "tiny")
    talked: list[argparse.Namespace] = []

    def talk(argv, parser, before):
        talked.append(parser.parse_args([*argv, "--url", ""]))
        before(talked[0])
        return 0

    monkeypatch.setattr(run, "talk", talk)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", with_url)
    monkeypatch.setattr(run, "fetch_from_hub", pulled := Pulled())
    assert run.main([name, "hello", "there"], argparse.ArgumentParser()) == 0
    assert (talked[0].model, talked[0].question) == (name, ["hello", "there"])
    assert bool(pulled.names) is pulls


def with_url(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    parser.add_argument("--url")
    return parser.parse_known_args(argv)[0]


def test_only_folders_that_omlxd_or_the_hub_made_are_deleted(tmp_path: Path):
    own = tmp_path / "mine" / "tiny"
    revision = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    for folder in (own, revision):
        folder.mkdir(parents=True)
    hub = InstalledStatus(id="org/tiny", state="installed", source="hub", folder=str(revision))
    assert removable(hub, tmp_path / "base") == revision.parent.parent
    mine = InstalledStatus(id="tiny", state="installed", source="folder", folder=str(own))
    with pytest.raises(ConfigError, match="a folder of your own; delete it there"):
        removable(mine, tmp_path / "base")
    for nothing in (None, str(tmp_path / "base" / "models")):
        model = InstalledStatus(id="tiny", state="installed", source="folder", folder=nothing)
        with pytest.raises(ConfigError):
            removable(model, tmp_path / "base")
    remove_folder(revision.parent.parent)
    assert [each.name for each in (tmp_path / "hub").iterdir()] == []


def test_config_alone_shows(omlxd):
    status, said = omlxd("config")
    assert status == 0 and said.startswith("SETTING") and said == omlxd("config", "show")[1]
    assert omlxd("config", "--json")[1].startswith("[")


def test_the_help_of_serve_is_in_groups(omlxd, capsys):
    assert [option for options in groups().values() for option in options] != []
    assert sorted(o.name for options in groups().values() for o in options) == sorted(o.name for o in OPTIONS)
    with pytest.raises(SystemExit):
        command.main(["serve", "--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: omlxd serve [flags]\n") and all(
        f"\n{title}:\n" in said for title in groups()
    )
    assert (
        said.index("--host") < said.index("the cache on SSD and in RAM:") < said.index("--hot-cache-max-size")
    )


def test_an_alias_in_the_wrong_order_is_explained(monkeypatch):
    def fetch(self: Daemon, path: str, kind: Any, body: Any = None, *_: Any) -> Any:
        if path.endswith(("/org/tiny",)):
            return InstalledStatus(id="org/tiny", state="ready", source="folder")
        if body is not None and body.model == "org/tiny":
            return InstalledStatuses(
                [InstalledStatus(id="org/tiny", state="ready", source="folder", aliases=["fast"])]
            )
        raise DaemonError("There is no model 'fast' here.")

    monkeypatch.setattr(Daemon, "fetch", fetch)
    url = ("--url", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="new name comes first: `omlxd models alias fast org/tiny`"):
        models.main(["alias", "org/tiny", "fast", *url], argparse.ArgumentParser())
    assert models.main(["alias", "fast", "org/tiny", *url], argparse.ArgumentParser()) == 0
    with pytest.raises(ConfigError, match="new name comes first"):
        models.main(["alias", "fast", *url], argparse.ArgumentParser())


def test_what_is_exported_is_said_once(tmp_path: Path):
    root = ("--paged-ssd-cache-dir", str(tmp_path), "--base-path", str(tmp_path))
    for words in (["file"], ["tiny", "file", "--model", "tiny"], ["tiny", "file", "--session", "last"]):
        with pytest.raises(ConfigError, match="`omlxd cache export MODEL FILE`"):
            cache.main(["export", *words, *root], argparse.ArgumentParser())
    with pytest.raises(ConfigError, match="Nothing of 'tiny' is cached"):
        cache.main(["export", "tiny", "file", *root], argparse.ArgumentParser())


@pytest.mark.parametrize("text", ["Once upon a time", "hello", "a\nb", "x" * 5000, "See notes.txt for more."])
def test_a_prompt_is_warmed_as_it_is_typed(text, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((place, request),) = read_requests(text)
    assert request.path == "/v1/completions" and request.body == {"prompt": text, "max_tokens": 1}
    assert len(place) < 50


@pytest.mark.parametrize("name", ["notes.txt", "./notes", "folder/notes.jsonl"])
def test_a_file_that_is_not_there_is_no_prompt(name, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        list(read_requests(name))
