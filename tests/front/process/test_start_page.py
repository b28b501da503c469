"""The lines that `omlxd serve` prints once its model is loaded, or can't be."""

from __future__ import annotations

import logging
import os
import pty
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

from omlxd.config import load_settings
from omlxd.front.process import start_page
from omlxd.kv.ledger.ledger import LedgerStats
from tests.front.process.test_serve import REPO, STUB, Daemon, start  # noqa: F401
from tests.models.test_resolve import make


def page(daemon: Daemon) -> str:
    """The page to its last line, which is curl's."""
    text = ""
    while "curl" not in text:
        text += daemon.process.stdout.readline() or "curl did not come"  # type: ignore[union-attr]
    print(daemon.first_line + text)
    return text


def test_the_page_says_what_runs_and_what_to_type(start, tmp_path: Path):  # noqa: F811
    daemon = start("--paged-ssd-cache-max-size", "1GB", stub="--context 32768")
    port = daemon.url.rpartition(":")[2]
    text = page(daemon)
    assert re.search(r"^  model    tiny \(.+\)$", text, re.M)
    assert re.search(r"^  context  \d+ tokens$", text, re.M)
    assert re.search(r"^  backend  \S+", text, re.M)
    assert f"  cache    {tmp_path / 'cache'}: 0 files, 0 bytes of 1 GB\n" in text
    assert re.search(rf"^  try      (\S*/)?omlxd chat --url http://127\.0\.0\.1:{port}$", text, re.M)
    assert re.search(r"^  memory   .+ for weights \(.+ on disk\), .+ a token of KV$", text, re.M)
    assert f"omlxd launch claude --url http://127.0.0.1:{port}\n" in text
    assert text.endswith('"messages": [{"role": "user", "content": "Hello"}]}\'\n')
    assert "Authorization" not in text
    assert "listening" not in daemon.logged() and "SSD cache" not in daemon.logged()
    if shutil.which("curl") is None:
        return
    curl = text.splitlines()[-1].strip()
    said = subprocess.run(["sh", "-c", curl + " -s"], capture_output=True, text=True, timeout=60).stdout
    assert '"choices"' in said


def test_a_command_is_named_as_a_shell_finds_it(tmp_path: Path, monkeypatch):
    own = tmp_path / ".venv" / "bin" / "omlxd"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(own.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert start_page.command() == ".venv/bin/omlxd"
    monkeypatch.chdir("/")
    assert start_page.command() == str(own).removeprefix("/")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "omlxd").symlink_to(own)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert start_page.command() == "omlxd"
    own.unlink()
    assert start_page.command() == "omlxd"


def test_what_a_load_says_comes_after_the_page(capsys):
    from omlxd.config import load_settings
    from omlxd.front.process.logs import JUDGED, Logs

    root = logging.getLogger()
    before = root.handlers[:], root.level, logging.getLogger("omlxd").level
    told = {
        "omlxd.front.engines.supervisor": "m: loading",
        "omlxd.engine.mlx_adapter.attention.hooks.by_rows": "takes 0.49 times as long",
        "omlxd.engine.server.host": "its chat template has no tools",
    }

    def say() -> str:
        for name, text in told.items():
            logging.getLogger(name).info(text)
            logging.getLogger(name).warning("warned: %s", name)
        logging.getLogger("omlxd.access").info("GET /health")
        return capsys.readouterr().err

    try:
        logs = Logs(load_settings({}, {}), has_page=True)
        said = say()
        assert not any(text in said for text in told.values()) and "GET /health" in said
        assert all(f"warned: {name}" in said for name in told)
        logs.page_is_printed()
        said = capsys.readouterr().err
        assert [text for line in said.splitlines() for text in told.values() if text in line] == [
            *told.values()
        ]
        assert all(text in say() for text in told.values())
        Logs(load_settings({}, {}), has_page=True)
        judge, front = (logging.getLogger(name) for name in (JUDGED, "omlxd.front.engines.supervisor"))
        front.info("m: loading")
        assert "loading" not in capsys.readouterr().err
        judge.info("judging")
        judge.warning("not used")
        front.info("m: more")
        said = capsys.readouterr().err
        assert re.findall("loading|judging|not used|more", said) == ["loading", "judging", "not used"]
        Logs(load_settings({}, {}))
        assert all(text in say() for text in told.values())
        Logs(load_settings({"log_level": "debug"}, {}), has_page=True)
        assert all(text in say() for text in told.values())
    finally:
        root.handlers[:], level, own = before
        root.setLevel(level)
        logging.getLogger("omlxd").setLevel(own)


def test_no_agent_is_offered_where_the_context_is_too_short_for_it(start):  # noqa: F811
    text = page(start())
    assert "  context  1000 tokens\n  backend" in text
    assert "omlxd chat" in text and "launch" not in text


def test_a_daemon_with_a_key_says_so_in_its_command(start):  # noqa: F811
    text = page(start(env={"OMLXD_API_KEY": "secret-key-of-mine"}))
    assert 'Authorization: Bearer $OMLXD_API_KEY"' in text and "secret" not in text


def test_a_model_that_cannot_be_loaded_is_named(start):  # noqa: F811
    daemon = start("--no-cache", stub="--load-fails nonsense")
    lines = [daemon.process.stdout.readline() for _ in range(2)]
    assert lines[0] == "  model    tiny can't be loaded: nonsense\n"
    assert lines[1] == "  cache    off: --no-cache\n"


def test_the_cache_is_counted_although_no_model_is_loaded(start, tmp_path: Path):  # noqa: F811
    name = f"{7:064x}"
    file = tmp_path / "cache" / ("a" * 32) / name[:2] / f"{name}.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(1_000_000))
    for model in ("one", "two"):
        make(tmp_path / "models" / model)
    flags = ("--model-dir", str(tmp_path / "models"), "--paged-ssd-cache-max-size", "1GB")
    daemon = start(*flags, model=False)
    lines = [daemon.process.stdout.readline() for _ in range(3)]
    assert "none is loaded" in lines[0]
    assert lines[1] == f"  cache    {tmp_path / 'cache'}: 1 file, 1 MB of 1 GB\n"
    assert lines[2] == "           it takes 1 GB at most\n"


def test_a_cache_smaller_than_its_limit_says_why():
    stats = LedgerStats(
        bytes_used=0,
        reserved=0,
        files=0,
        cold_cache_bytes=100 * 10**9,
        evicted_files=0,
        evicted_bytes=0,
        capacity=66 * 10**9,
    )
    why = " (what its disk has room for; the limit is 100 GB)"
    assert start_page._cache("/c", stats, True) == f"/c: 0 files, 0 bytes of 66 GB{why}"


def test_a_limit_that_nobody_set_says_why_it_is_small(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(start_page, "disk_free", lambda folder: 39 * 10**9)
    zeros = dict.fromkeys((field.name for field in fields(LedgerStats)), 0)
    stats = LedgerStats(**zeros | {"cold_cache_bytes": 15 * 10**9, "bytes_used": 10**9})
    auto = load_settings({"base_path": str(tmp_path)}, {})
    told = "it takes 15 GB at most: 40 GB are free or its own, and 25 GB of them are left to others; it moves"
    assert start_page._cap(auto, stats, True).startswith(told)
    assert "once it is counted" in start_page._cap(auto, stats, False)
    most = replace(stats, cold_cache_bytes=100 * 10**9)
    assert start_page._cap(auto, most, True) == "it takes 100 GB at most"
    own = load_settings({"base_path": str(tmp_path), "paged_ssd_cache_max_size": "15GB"}, {})
    assert start_page._cap(own, stats, False) == "it takes 15 GB at most"


def test_a_terminal_gets_the_same_with_colours(tmp_path: Path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "omlxd", "serve", "--port", "0", "--base-path", str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
    environ |= {"PYTHONPATH": str(REPO), "TERM": "xterm-256color", "COLUMNS": "100"}
    environ["OMLXD_ENGINE_COMMAND"] = f"{sys.executable} {STUB} --notes {tmp_path} --context 32768"
    environ.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [*command, "--model", str(make(tmp_path / "tiny"))],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    try:
        text = b""
        while b"^C ends" not in text:
            text += os.read(ours, 4096)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    print(text.decode())
    assert b"\x1b[36mmodel" in text and b"omlxd launch claude" in text
