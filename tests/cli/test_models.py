"""`omlxd models` against a running daemon with stub engines, and without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from omlxd.cli.daemon import client as client
from omlxd.cli.daemon.owner_api import InstalledStatus
from omlxd.cli.models.command import as_listed, as_page
from omlxd.config import load_settings
from tests.front.process.test_serve import REPO, Daemon, start  # noqa: F401
from tests.models.test_resolve import make


def run(*argv: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
    environ |= {"PYTHONPATH": str(REPO), **(env or {})}
    done = subprocess.run(
        [sys.executable, "-m", "omlxd", "models", *argv],
        capture_output=True,
        text=True,
        env=environ,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_every_verb_against_a_daemon(start, tmp_path: Path):  # noqa: F811
    for name in ("org/big", "small"):
        make(tmp_path / "models" / name)
    daemon: Daemon = start("--model-dir", str(tmp_path / "models"), "--model", "small", model=False)
    url = ("--url", daemon.url)

    def said(*argv: str) -> str:
        status, out, problem = run(*argv, *url)
        assert status == 0, problem
        return out

    assert "org/big is loaded (process " in said("load", "big")
    shorter = said("load", "big", "--keep-alive", "1h")
    assert shorter.endswith("); it stays for 1 h without a request now, and stayed for good before\n")
    assert said("load", "big", "--keep-alive", "2h").endswith(")\n")
    listed = said("list").splitlines()
    assert listed[0].split()[:2] == ["MODEL", "STATE"]
    assert listed[1].startswith("* small") and "ready" in listed[2]
    assert said("pin", "big") == "org/big is pinned\n"
    assert said("alias", "huge", "big") == "huge means org/big\n"
    shown = json.loads(said("show", "huge", "--json"))
    assert shown["id"] == "org/big" and shown["pinned"] and shown["aliases"] == ["huge"]
    assert "pinned" in said("show", "huge")
    for verb in (("list",), ("show", "big")):  # It is found by its base folder, too.
        assert "ready" in run(*verb, "--base-path", str(daemon.home))[1]
    assert said("pin", "big", "--off") == "org/big is no longer pinned\n"
    assert said("alias", "huge", "--off") == "huge means nothing now\n"
    assert said("unload", "org/big") == "org/big is unloaded\n"
    states = {model["id"]: model["state"] for model in json.loads(said("list", "--json"))["models"]}
    assert states["org/big"] == "unloaded"
    assert "org/big" not in said("list", "--loaded") and "small" in said("list", "--loaded")
    # The daemon's own folders count, not those of whoever asks.
    assert said("rm", "big", "org/big") == "org/big is deleted\n"
    assert not (tmp_path / "models" / "org" / "big").exists()
    assert "org/big" not in said("list")
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    status, _, problem = run("show", "org/smal", *url, env=nowhere)
    assert (
        status == 1 and "'org/smal' on this machine (did you mean small?), and org/smal can't be" in problem
    )
    status, _, problem = run("show", "nobody", *url)
    assert status == 1 and "`omlxd models pull ORG/NAME` downloads one" in problem
    status, _, problem = run("load", "nobody", *url)
    assert status == 1 and "There is no model 'nobody' here" in problem


@pytest.mark.slow
def test_without_a_daemon(tmp_path: Path):
    make(tmp_path / "models" / "org" / "big")
    flags = (
        "--model-dir",
        str(tmp_path / "models"),
        "--base-path",
        str(tmp_path),
        "--url",
        "http://127.0.0.1:9",
    )
    env = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    status, out, problem = run("list", *flags, env=env)
    assert status == 0 and "org/big" in out and "installed" in out and "no daemon" in problem
    status, out, problem = run("list", *flags[:-2], env={**env, "OMLXD_PORT": "9"})
    assert status == 0 and "org/big" in out and problem == ""
    status, out, _ = run("show", "big", "--json", *flags, env=env)
    assert status == 0 and json.loads(out)["source"] == "model-dir"
    (tmp_path / "models" / "org" / "big" / "tokenizer.json").unlink()
    status, out, _ = run("show", "big", *flags, env=env)
    assert status == 0 and "tokenizer.json or tokenizer.model is missing" in out and "--model:" not in out
    status, _, problem = run("show", "other", *flags, env=env)
    assert status == 1 and "no model 'other'" in problem
    status, _, problem = run("load", "big", "--url", "http://127.0.0.1:9", env=env)
    assert status == 1 and "Nothing answers" in problem
    status, _, problem = run("pull", "../etc")
    assert status == 1 and "no hub id" in problem


def test_the_demo_model_is_here_once_it_is_built(tmp_path: Path):
    flags = ("--base-path", str(tmp_path), "--url", "http://127.0.0.1:9")
    env = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    assert "not here yet" in run("show", "omlxd-demo", *flags, env=env)[1]
    folder = tmp_path / "models" / "omlxd-demo"
    make(folder)
    page = run("show", "omlxd-demo", *flags, env=env)[1]
    assert str(folder) in page and "not here yet" not in page


def test_a_page_says_whether_the_template_takes_tools(tmp_path: Path):
    """And an imported model is found by its name."""
    flags = ("--base-path", str(tmp_path), "--url", "http://127.0.0.1:9")
    folder = make(tmp_path / "models" / "tiny")
    for template, words in (("{{ messages }}", "no: its chat template has none"), ("{{ tools }}", "yes")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        page = run("show", "tiny", *flags)[1]
        assert re.search(rf"^  tools +{words}", page, re.M), page
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert re.search(r"^  tools +no:", run("show", "tiny", *flags)[1], re.M)
    assert re.search(r"^  tiny +installed", run("list", *flags)[1], re.M)


def test_a_name_of_the_list_is_what_the_daemon_serves(start, tmp_path: Path):  # noqa: F811
    for name in ("org/big", "small"):
        make(tmp_path / "models" / name)
    daemon: Daemon = start("--model-dir", str(tmp_path / "models"), model=False)
    flags = {"base_path": str(tmp_path / "none"), "port": daemon.url.rpartition(":")[2]}
    settings = load_settings(flags, {})
    for name in ("org/big", "big"):
        assert as_listed(name, settings) == ("org/big", tmp_path / "models")
    assert as_listed("small", settings) == ("small", tmp_path / "models")
    assert as_listed("nobody", settings) == ("nobody", None)
    assert as_listed("small", load_settings(flags | {"port": "9"}, {})) == ("small", None)


@pytest.mark.parametrize(
    ("id", "source", "named"), [("a", "folder", "/x/a"), ("o/a", "hub", "o/a"), ("a:b", "folder", "a:b")]
)
def test_a_model_of_no_model_dir_is_named_so_that_it_loads(
    id: str, source: str, named: str, tmp_path: Path, monkeypatch
):
    shown = InstalledStatus(id=id, state="ready", source=source, folder="/x/a")
    monkeypatch.setattr(client.Daemon, "fetch", lambda *_: shown)
    settings = load_settings({"base_path": str(tmp_path)}, {})  # No daemon of the user's own is asked.
    assert as_listed(id, settings) == (named, None)


def test_a_file_that_is_no_gguf_is_called_so(tmp_path: Path):
    (tmp_path / "notes").write_text("hello, this is a note")
    status, _, problem = run("import", str(tmp_path / "notes"), "--base-path", str(tmp_path))
    assert status == 1 and "notes can't be imported: it is no GGUF file" in problem


def test_one_request_is_in_flight():
    for reuse, line in (
        ("", "yes: a p"),
        ("its cache is odd", "no: its cache is odd"),
        (None, "known once it is loaded"),
    ):
        page = as_page(InstalledStatus(id="a", state="ready", source="hub", kv_reuse=reuse, blind="no tower"))
        assert re.search(rf"^  reuse +{line}", page, re.M) and re.search(
            "^  images +no: no tower$", page, re.M
        )
    pages = [as_page(InstalledStatus(id="a", state="ready", source="hub", in_flight=n)) for n in (1, 2)]
    assert "ready (1 request in flight)" in pages[0] and "ready (2 requests in flight)" in pages[1]


@pytest.mark.parametrize("argv", [["alias", "x"], ["alias", "x", "y", "--off"], ["fly"], []])
def test_arguments_that_make_no_sense(argv: list[str]):
    status, _, problem = run(*argv)
    assert status == 2 and problem.startswith("omlxd: ") and problem.count("\n") == 1
