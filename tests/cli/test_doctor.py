"""omlxd doctor: each check both ways, and the command."""

import http.server
import json
import os
import resource
import shutil
import socketserver
import sys
import threading
from pathlib import Path

import msgspec
import psutil
import pytest
from daemon import Daemon, free_port, wait_until

from omlxd.cli import main
from omlxd.cli.daemon.client import Daemon as DaemonClient
from omlxd.cli.daemon.owner_api import InstalledStatus, InstalledStatuses, ModelStatus
from omlxd.cli.doctor import command, disk, machine, models, network
from omlxd.cli.doctor.finding import Finding
from omlxd.common.units import LEFT_FREE
from omlxd.config import Settings, load_settings
from omlxd.kv.files.paths import LOCK_NAME
from omlxd.kv.ledger.write_budget import WriteBudget
from omlxd.wire import Kernel
from tests.models.test_resolve import make


def settings(tmp_path: Path, **flags: str) -> Settings:
    return load_settings({"base_path": str(tmp_path / "omlxd"), **flags}, {})


# --------------------------------------------------------------------------- the machine


def test_platforms():
    assert machine.check_platform("linux", "x86_64").verdict == "ok"
    assert machine.check_platform("darwin", "arm64", "15.1").verdict == "ok"
    for found in (
        machine.check_platform("darwin", "x86_64", "15.1"),
        machine.check_platform("darwin", "arm64", "13.6"),
        machine.check_platform("win32", "AMD64"),
    ):
        assert found.verdict == "bad" and found.mend
    assert machine.check_python().verdict == "ok"


@pytest.mark.slow
def test_the_backend_is_asked_in_a_process_of_its_own(monkeypatch):
    found = machine.check_backend()
    assert found.verdict in ("ok", "warn") and "MLX 0." in found.text

    def of(code: str) -> Finding:
        return machine.check_backend((sys.executable, "-c", code))

    broken = of("import sys; sys.exit('libmlx.so: no such file')")
    assert broken.verdict == "bad" and "libmlx.so" in broken.text and broken.mend
    assert of("import os; os.abort()").verdict == "bad"
    assert of("print('hello')").verdict == "bad"
    monkeypatch.setattr(machine, "BACKEND_S", 0.05)
    assert of("import time; time.sleep(300)").verdict == "bad"
    told = {"device": "gpu", "cuda": False, "metal": True, "mlx": "1", "mlx_lm": "0.0.1"}
    monkeypatch.setattr(machine, "BACKEND_S", 120)
    monkeypatch.setattr(machine, "_pinned", lambda name: "0.32.2")
    assert "pip install mlx-lm==0.32.2" in of(f"print({json.dumps(told)!r})").mend
    told["mlx_lm"], told["metal"] = "0.32.2", False
    monkeypatch.setattr(machine, "_has_nvidia", lambda: True)
    assert "--cuda" in of(f"print({json.dumps(told)!r})").mend


def test_memory_and_files(monkeypatch):
    assert machine.check_memory().verdict in ("ok", "warn")
    monkeypatch.setattr(machine, "total_ram", lambda: 4 * 10**9)
    assert machine.check_memory().verdict == "warn"
    assert machine.check_files((256, 65536)).verdict == "ok"
    assert machine.check_files((256, resource.RLIM_INFINITY)).verdict == "ok"
    assert machine.check_files((256, 512)).verdict == "bad"


# --------------------------------------------------------------------------- folders and disk


def test_folders(tmp_path: Path, monkeypatch):
    new = tmp_path / "a" / "b"
    assert disk.check_folder("x", new).verdict == "ok" and not new.exists()
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    assert disk.check_folder("x", own).verdict == "ok"
    own.chmod(0o755)
    assert f"chmod 700 {own}" in disk.check_folder("x", own).mend
    (tmp_path / "file").write_text("")
    assert disk.check_folder("x", tmp_path / "file").verdict == "bad"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert disk.check_folder("x", own).verdict == "bad"
    assert disk.check_folder("x", new).verdict == "bad"


def test_space(tmp_path: Path, monkeypatch):
    few = settings(tmp_path, paged_ssd_cache_max_size="2GB")
    few.paged_ssd_cache_dir.mkdir(parents=True)
    room = "Make room."
    clear = f"omlxd cache clear --paged-ssd-cache-dir {few.paged_ssd_cache_dir}"
    empty = f"Make room, or empty the cache: `{clear}`."

    def told(free: int, left: int, used: int) -> Finding:
        monkeypatch.setattr(disk, "_free", lambda folder: free)
        monkeypatch.setattr(disk, "disk_room", lambda folder: free - left)
        found = disk.inventory.CacheFile("block", "x", used, 0.0)
        monkeypatch.setattr(disk.inventory, "walk", lambda *_: [found])
        return disk.check_space(few)

    large, small = LEFT_FREE, 400_000  # What disks of 1 TB and of 8 MB keep.
    for free, left, used, verdict, end, mend in (
        (10 * 10**9, large, 0, "ok", "of at most 2 GB", ""),
        (6 * 10**9, large, 0, "ok", "5 GB to others: 1 GB at most", ""),
        (15 * 10**8, large, 0, "warn", "5 GB to others: 0 bytes at most", room),
        (10**8, large, 0, "bad", "5 GB to others: 0 bytes at most", room),
        # It has grown up to there, and gives way.
        (5 * 10**9, large, 10**9, "ok", "5 GB to others: 1 GB at most", ""),
        (49 * 10**8, large, 10**9, "ok", "5 GB to others: 900 MB at most", ""),
        (42 * 10**8, large, 10**9, "warn", "5 GB to others: 200 MB at most", empty),
        (10**8, large, 10**9, "bad", "5 GB to others: 0 bytes at most", empty),
        (10**8, large, 10**7, "bad", "5 GB to others: 0 bytes at most", room),
        (3_000_000, small, 0, "warn", "400 kB to others: 2.6 MB at most", room),
        (7_600_000, small, 4096, "ok", "400 kB to others: 7.2 MB at most", ""),
        (390_000, small, 7_000_000, "ok", "400 kB to others: 7 MB at most", ""),
        (100_000, small, 7_000_000, "warn", "400 kB to others: 6.7 MB at most", empty),
        (100_000, small, 0, "bad", "400 kB to others: 0 bytes at most", room),
    ):
        found = told(free, left, used)
        assert (found.verdict, found.mend) == (verdict, mend) and found.text.endswith(end)
    assert disk.check_space(settings(tmp_path, no_cache="true")).verdict == "ok"


def test_what_was_written(tmp_path: Path):
    told = settings(tmp_path)
    assert disk.check_written(told).text == "to the SSD cache: 0 bytes today, 0 bytes in all"
    account = WriteBudget(told.paged_ssd_cache_dir)
    told.paged_ssd_cache_dir.mkdir(parents=True)
    account.open()
    account.wrote(3 * 10**9)
    account.close()
    assert disk.check_written(told).text == "to the SSD cache: 3 GB today, 3 GB in all"


def test_the_disk_is_timed_and_nothing_stays(tmp_path: Path, monkeypatch):
    given = settings(tmp_path)
    found = disk.check_speed(given, nbytes=2_000_000, seconds=5)
    assert "writes" in found.text and "reads" in found.text and found.verdict in ("ok", "warn")
    assert list(tmp_path.iterdir()) == []
    given.paged_ssd_cache_dir.mkdir(parents=True)
    disk.check_speed(given, nbytes=100_000, seconds=5)
    assert list(given.paged_ssd_cache_dir.iterdir()) == []
    assert list(given.base_path.iterdir()) == [given.paged_ssd_cache_dir]
    monkeypatch.setattr(disk, "SLOW_WRITE", 1e15)
    assert disk.check_speed(given, nbytes=100_000, seconds=5).verdict == "warn"
    monkeypatch.setattr(disk, "_write", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert disk.check_speed(given, nbytes=100_000).verdict == "bad"
    monkeypatch.setattr(disk, "_free", lambda folder: 10)
    untimed = disk.check_speed(given)
    assert untimed.verdict == "ok" and untimed.text.startswith("not timed: 10 bytes free on")


def test_on_macos_the_disk_is_timed_past_the_page_cache(tmp_path: Path, monkeypatch):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(disk.sys, "platform", "darwin")
    monkeypatch.setattr(disk.fcntl, "F_NOCACHE", 48, raising=False)
    monkeypatch.setattr(
        disk.fcntl, "fcntl", lambda fd, command, on: asked.append((os.fstat(fd).st_size, command))
    )
    assert "reads" in disk.check_speed(settings(tmp_path), nbytes=2_000_000, seconds=5).text
    # What the write leaves in the cache would be read from there.
    assert asked == [(0, 48), (2_000_000, 48)]


# --------------------------------------------------------------------------- the network


def test_a_port_free_held_by_another_and_by_a_daemon(tmp_path: Path, monkeypatch):
    def all_at_once(kind: str):
        raise psutil.AccessDenied  # As macOS does to all but root.

    monkeypatch.setattr(network.psutil, "net_connections", all_at_once)
    port = free_port()
    assert network.check_port(settings(tmp_path, port=str(port))).verdict == "ok"
    assert network.check_port(settings(tmp_path, port="0")).verdict == "ok"
    server = socketserver.TCPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    server.RequestHandlerClass.log_message = lambda *args: None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        held = network.check_port(settings(tmp_path, port=str(server.server_address[1])))
        assert held.verdict == "bad" and f"(process {os.getpid()})" in held.text and "--port" in held.mend
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with Daemon(tmp_path, env={"OMLXD_API_KEY": "k"}, wait=False) as daemon:
        port = daemon.url.rpartition(":")[2]
        ours = network.check_port(settings(tmp_path, port=port, api_key="k"))
        assert ours.verdict == "ok" and f"(process {daemon.process.pid})" in ours.text
        keyless = network.check_port(settings(tmp_path, port=port))
        assert keyless.verdict == "warn" and "its status can't be read" in keyless.text
        assert "set OMLXD_API_KEY" in keyless.mend and "OMLXD_API_KEY" not in keyless.text
        cache = settings(tmp_path, port=port).paged_ssd_cache_dir
        wait_until((cache / LOCK_NAME).exists)
        cache.rename(aside := cache.with_name("aside"))
        away = network.check_port(settings(tmp_path, port=port, api_key="k"))
        assert away.verdict == "bad" and f"its folder {cache} is away" in away.text
        aside.rename(cache)
        assert network.check_port(settings(tmp_path, port=port, api_key="k")).verdict == "ok"


def test_a_peer_that_gives_nothing(tmp_path: Path):
    assert network.check_peer(settings(tmp_path, port="0")) == []
    [found] = network.check_peer(settings(tmp_path, port="0", peer="192.0.2.1"))
    assert (found.verdict, "not paired: `omlxd peer pair 192.0.2.1`" in found.text) == ("warn", True)


def test_the_cache_of_the_daemon_that_answers_is_looked_at(tmp_path: Path, quick, capsys):
    """A shell with other settings looks at a daemon by its address."""
    with Daemon(tmp_path) as daemon:
        asked = ["doctor", "--base-path", str(tmp_path / "other"), "--url", daemon.url, "--no-disk-test"]
        main.main([*asked, "--json"])
        told = msgspec.json.decode(capsys.readouterr().out, type=command.Report)
        texts = {finding.check: finding.text for finding in told.findings}
        dir = daemon.http.get("/omlxd/status").json()["cold"]["dir"]
        assert texts["cache folder"] == f"{dir}, private"
        assert str(tmp_path / "other") in texts["base folder"]
        assert texts["base folder"].endswith(f"({network.SHELLS} has its cache in {dir})")
        assert network.SHELLS not in texts["space"] + texts["cache folder"]
        assert texts["address"].endswith(f"({command.ADDRESS_NOTE})")
        own = settings(tmp_path, port=daemon.url.rpartition(":")[2])
        assert own.paged_ssd_cache_dir == Path(dir)
        assert network.with_daemons_cache(own)[1] == {}
    assert network.with_daemons_cache(own) == (own, {})


def test_a_note_stands_only_where_the_daemon_may_differ(tmp_path: Path, quick, capsys, monkeypatch):
    base, cache = tmp_path / "omlxd", tmp_path / "c"
    monkeypatch.setenv("HOME", str(tmp_path))
    with Daemon(tmp_path, "--paged-ssd-cache-dir", str(cache), wait=False):
        wait_until((cache / LOCK_NAME).exists)
        main.main(["doctor", "--base-path", str(base), "--no-disk-test"])
        out = capsys.readouterr().out
        assert f"{base}, private" in out and f"{cache}, private" in out
        assert network.SHELLS not in out and command.ADDRESS_NOTE not in out
        cache.rename(tmp_path / "aside")
        main.main(["doctor", "--base-path", str(base), "--no-disk-test"])
        told = [line for line in capsys.readouterr().out.splitlines() if "cache folder" in line]
        assert told[0].endswith(f"({network.SHELLS} has its cache in {cache}, which is not here)")
        assert told[1].startswith("BAD ") and told[1].endswith(f"its folder {cache} is away")


def test_a_daemon_without_an_ssd_cache_is_said_to_have_none(tmp_path: Path, quick, capsys, monkeypatch):
    monkeypatch.setattr(disk, "check_speed", lambda kept: 1 / 0)
    off = ("--paged-ssd-cache-max-size", "0")

    def told(*flags: str) -> dict[str, Finding]:
        main.main(["doctor", "--base-path", str(tmp_path / "other"), *flags, "--json"])
        report = msgspec.json.decode(capsys.readouterr().out, type=command.Report)
        return {finding.check: finding for finding in report.findings}

    with Daemon(tmp_path, *off, wait=False) as daemon:
        found = told("--url", daemon.url)
        assert found["cache folder"].verdict == "warn" and "could be used" in found["cache folder"].text
        assert found["space"].text.endswith(" free; the SSD cache is off") and "disk" not in found
        # The daemon may have none because its folder can't be used.
        (tmp_path / "other").write_text("")
        away = told("--url", daemon.url)["cache folder"]
        assert away.verdict == "bad" and away.text.startswith("the daemon has no SSD cache; here ")
    found = told(*off, "--port", str(free_port()))
    assert found["cache folder"].text == "none: the SSD cache is off" and "disk" not in found


def test_draft_models_and_models_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "omlxd"
    text = '[models.a]\ndraft-model = "{}"\n[models.b]\ndraft-model = "org/on-a-hub"\n'
    home.mkdir()
    (home / "omlxd.toml").write_text(text.format("/nonexistent/folder"))
    missing, hub = models.check_parts(settings(tmp_path))
    assert missing.verdict == "bad" and "draft-model of a: /nonexistent/folder" in missing.text
    assert hub.verdict == "warn" and "pull org/on-a-hub" in hub.mend and "SIGHUP" in missing.mend
    assert models.check_parts(settings(tmp_path, speculation="off")) == []
    make(home / "models" / "small")
    (home / "omlxd.toml").write_text(text.format("small"))
    assert [each.verdict for each in models.check_parts(settings(tmp_path))] == ["ok", "warn"]
    trouble = "a can't be loaded: draft-model: small can't guess for a"
    with monkeypatch.context() as patch:
        patch.setattr(models, "_served", lambda _: [ModelStatus(id="a", state="failed", trouble=trouble)])
        assert [each.verdict for each in models.check_parts(settings(tmp_path))] == ["warn"]
    (home / "models" / "small").rename(tmp_path / "small")
    assert models.check_parts(settings(tmp_path))[0].verdict == "bad"
    assert models.check_parts(settings(tmp_path, model_dir=str(tmp_path)))[0].verdict == "ok"
    (home / "omlxd.toml").write_text('[models.a]\nadapter = "/nonexistent/folder"\n')
    (adapter,) = models.check_parts(settings(tmp_path))
    assert adapter.verdict == "bad" and "adapter of a: /nonexistent/folder: " in adapter.text
    assert models.check_models(settings(tmp_path, port=str(free_port()))) == []
    ready = ModelStatus(id="m", state="ready", backend="cpu", values={"kv_shared_segment_tokens": 2048.0})
    failed = ModelStatus(id="n", state="failed", trouble="n can't be loaded: why")
    given = settings(tmp_path)
    decodes, broken = models._of([ready, failed, ModelStatus(id="o", state="unloaded")], given)
    assert "segments of 2,048 tokens, without guesses" in decodes.text and decodes.verdict == "ok"
    assert broken.verdict == "bad" and broken.text == failed.trouble and "models load n" in broken.mend
    demo = msgspec.structs.replace(ready, note="random weights.")
    assert [each.verdict for each in models._of([demo], given)] == ["ok", "warn"]
    guesses = {"spec_decode_num_draft_tokens_total": 12.0, "spec_decode_num_accepted_tokens_total": 9.0}

    def told(backend: str, **values: float) -> str:
        (decodes,) = models._of([msgspec.structs.replace(ready, backend=backend, values=values)], given)
        return decodes.text

    now = {**guesses, "spec_decode_draft_model": 0.0}
    by_kernel = told("cuda", attention_reads_own_rows=1.0, **now)
    assert "omlxd's attention kernel, with prefixes not shared, with guesses, of which 9 of 12" in by_kernel
    assert told("cpu", **guesses).endswith("without guesses"), "an earlier process counted them"
    lost = told("cpu", spec_decode_credit_steps=-0.2, **now)
    assert lost.endswith("9 of 12 held, few of which are made now, since they took longer than they saved")
    assert told("metal", metal_kernels_used=0.0).count("with no Metal kernel,") == 1
    assert "decodes on 2 ranks, by MLX's" in told("cpu", ranks=2.0)
    judged = (
        Kernel("attend_rows", "64 wide"),
        Kernel(
            "few_row_product",
            "8 bits",
            "not judged: why; remove /a b/judging-0 to judge it again",
            "/a b/judging-0",
        ),
        Kernel("step", "", "no Metal kernel fits this model: heads 40 wide"),
    )
    off = "Metal kernels off (--metal-kernels)"
    model, used, blocked, unfit = models._of(
        [msgspec.structs.replace(ready, backend="metal", speed=off, kernels=judged)], given
    )
    assert model.text.endswith(off) and used.text.startswith("m computes with attend_rows (64 wide) (")
    assert blocked.verdict == "warn" and "rm '/a b/judging-0'" in blocked.mend
    assert blocked.text == "m does without few_row_product (8 bits): not judged: why"
    assert unfit.verdict == "ok" and "without step: no Metal kernel fits this model: heads 40" in unfit.text
    assert "omlxd service logs" in used.text
    measured = told("cpu", attention_reads_own_rows=1.0, attention_rows_alone_ratio=0.421)
    assert "row by row (in 0.42 of the time of MLX's own, as measured at load), with prefixes" in measured
    slower = told("cpu", attention_reads_own_rows=1.0, attention_rows_alone_ratio=1.06)
    assert "(in 1.06 of the time of MLX's own, as measured at load; rows join without copies)" in slower
    measured = told("cpu", attention_rows_alone_ratio=1.4)
    assert "MLX's own attention (row by row takes 1.40 of its time, as measured at load), with" in measured
    ratios = {"attention_rows_alone_ratio": 1.4, "attention_long_rows_alone_ratio": 0.7}
    by_length = told("metal", attention_reads_own_rows=1.0, **ratios)
    assert "where that is faster (in 1.40 of the time of MLX's own at 512 tokens a row, 0.70 at" in by_length
    kernels = {"metal_kernels_used": 3.0, "metal_kernels_refused": 1.0, "metal_attention_kernel": 1.0}
    by_kernel = told("metal", attention_reads_own_rows=1.0, **ratios, **kernels)
    assert "by omlxd's attention kernel, with 3 of 4 Metal kernels, with" in by_kernel


def test_settings_of_a_model_that_is_not_there(tmp_path: Path, monkeypatch):
    home = tmp_path / "omlxd"
    make(home / "models" / "Qwen3-8B")
    make(tmp_path / "models" / "org" / "small")
    text = "".join(f"[models.{name}]\n" for name in ("qwen3-8b", "Qwen3-8B", "small", "smal", "other"))
    (home / "omlxd.toml").write_text(text)
    given = settings(tmp_path, model_dir=str(tmp_path / "models"), port=str(free_port()))
    assert [(each.verdict, each.text.partition(";")[0]) for each in models.check_names(given)] == [
        ("warn", '[models."qwen3-8b"] is the name of no model here (did you mean Qwen3-8B?)'),
        ("warn", '[models."smal"] is the name of no model here (did you mean small?)'),
        ("warn", '[models."other"] is the name of no model here'),
    ]
    served = InstalledStatuses([InstalledStatus(id="elsewhere/other", state="ready", source="folder")])
    monkeypatch.setattr(DaemonClient, "fetch", lambda *_, **options: served)
    assert [each.text[:20] for each in models.check_names(given)] == [
        '[models."qwen3-8b"] ',
        '[models."smal"] is t',
    ]


def test_an_adapter_decodes_as_its_base_and_has_its_own_guesses(tmp_path: Path):
    guesses = "spec_decode_num_draft_tokens_total"
    of_base = {"kv_shared_segment_tokens": 2048.0, "spec_decode_draft_model": 1.0, guesses: 12.0}
    base = ModelStatus(id="a", state="ready", backend="cpu", values=of_base)
    adapter = ModelStatus(id="a:style", state="ready", backend="cpu", shares="a", values={guesses: 0.0})
    text = '[models.a]\ndraft-model = "org/small"\n'
    (home := tmp_path / "omlxd").mkdir()
    (home / "omlxd.toml").write_text(text)
    told = [each.text for each in models._of([base, adapter], settings(tmp_path))]
    alike = "by MLX's own attention, with prefixes shared in segments of 2,048 tokens, with guesses"
    draft = "also of its draft model org/small"
    assert told == [
        f"a decodes {alike}, {draft}, of which 0 of 12 held",
        f"a:style decodes {alike}, {draft}, none of which was made yet",
    ]


def test_addresses(tmp_path: Path):
    assert network.check_exposure(settings(tmp_path)).verdict == "ok"
    assert network.check_exposure(settings(tmp_path, host="0.0.0.0", api_key="k")).verdict == "warn"


def test_clients_and_where_they_point(tmp_path: Path):
    given = settings(tmp_path)
    programs, home = tmp_path / "bin", tmp_path / "home"
    programs.mkdir()
    (home / ".claude").mkdir(parents=True)
    (home / ".codex").mkdir()
    (home / ".config" / "opencode").mkdir(parents=True)
    environ = {"PATH": str(programs)}

    def told() -> dict[str, Finding]:
        return {each.check: each for each in network.check_clients(given, environ, home)}

    assert {each.text for each in told().values()} == {"not on the PATH"}
    for name in ("claude", "codex", "opencode"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    assert all("omlxd launch" in each.text and each.verdict == "ok" for each in told().values())
    here = "http://127.0.0.1:8000"
    (home / ".claude" / "settings.json").write_text(json.dumps({"env": {"ANTHROPIC_BASE_URL": here}}))
    (home / ".codex" / "config.toml").write_text(
        f'model_provider = "o"\n[model_providers.o]\nbase_url = "{here}/v1"\n'
    )
    config = {"model": "o/m", "provider": {"o": {"options": {"baseURL": "http://localhost:8000/v1"}}}}
    (home / ".config" / "opencode" / "opencode.json").write_text(json.dumps(config))
    assert all("set to this daemon" in each.text for each in told().values())
    environ["ANTHROPIC_API_KEY"] = "secret"
    assert told()["claude"].verdict == "warn" and "secret" not in told()["claude"].text
    environ["ANTHROPIC_BASE_URL"] = "https://api.example.com"
    assert "https://api.example.com" in told()["claude"].text
    for path in ((home / ".codex" / "config.toml"), (home / ".config" / "opencode" / "opencode.json")):
        path.write_bytes(b"\xff[[nonsense")
    assert "not set to any daemon" in told()["codex"].text + told()["opencode"].text


# --------------------------------------------------------------------------- the command


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(machine, "check_backend", lambda: machine.ok("backend", "told"))


def test_the_command(tmp_path: Path, capsys, quick, monkeypatch):
    monkeypatch.setattr(disk, "_free", lambda folder: 10**12)
    port = free_port()
    argv = ["doctor", "--base-path", str(tmp_path / "o"), "--port", str(port), "--no-disk-test"]
    assert main.main([*argv, "--json"]) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=command.Report)
    assert report.healthy and "disk" not in {each.check for each in report.findings}
    assert {"platform", "python", "backend", "space", "port", "claude"} <= {f.check for f in report.findings}
    assert all(each.mend for each in report.findings if each.verdict != "ok")
    other = free_port()
    assert main.main([*argv, "--url", f"http://127.0.0.1:{other}/v1"]) == 0
    assert f"{other} on 127.0.0.1 is free" in capsys.readouterr().out
    assert main.main([*argv, "--url", "localhost"]) == 2
    monkeypatch.setattr(command, "find_daemon", lambda *_: DaemonClient(f"http://127.0.0.1:{other}"))
    assert main.main([*argv[:3], "--no-disk-test"]) == 0
    out = capsys.readouterr().out
    assert f"port          {other} on 127.0.0.1 is free" in out
    assert f"only this machine reaches the daemon ({command.ADDRESS_NOTE})" in out
    assert main.main(argv) == 0
    assert f"port          {port} on 127.0.0.1 is free" in capsys.readouterr().out
    main.main([*argv, "--port", "0"])
    assert "can't be checked" not in capsys.readouterr().out
    (tmp_path / "o").mkdir(mode=0o700)
    (tmp_path / "o" / "omlxd.toml").write_text("[serve]\nport = -1\n")
    assert main.main(argv) == 0
    assert "(port): -1 is no whole number from 0 to 65535; --port overrides it" in capsys.readouterr().out
    (tmp_path / "o" / "omlxd.toml").write_text("[serve]\nblock-size = 3\nnonesuch = 1\n")
    monkeypatch.setenv("OMLXD_KV_BITS", "5")
    assert main.main(argv) == 1
    out = capsys.readouterr().out
    assert "BAD   settings      OMLXD_KV_BITS: '5' is none of" in out and "line 2 (block-size): 3 is" in out
    assert "line 3 (nonesuch)" in out and "3 to mend" in out and f"{port} on 127.0.0.1 is free" in out
    (tmp_path / "o" / "omlxd.toml").write_text("[serve\n")
    assert main.main(argv) == 1
    assert "omlxd.toml line 1: " in capsys.readouterr().out
    monkeypatch.delenv("OMLXD_KV_BITS")
    shutil.rmtree(tmp_path / "o")
    (tmp_path / "o").write_text("")
    assert main.main(argv) == 1
    out = capsys.readouterr().out
    assert "BAD   base folder" in out and "to mend" in out
    monkeypatch.setattr(machine, "check_memory", lambda: 1 / 0)
    assert main.main(argv) == 1
    assert "can't be checked: ZeroDivisionError" in capsys.readouterr().out
    assert main.main(["doctor", "--port", "banana"]) == 2


def test_a_key_of_the_settings_goes_to_no_other_address(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("OMLXD_API_KEY", raising=False)
    own = settings(tmp_path, api_key="secret")
    assert command._at_daemon(own, "http://127.0.0.1:1", {}).api_key == ""
    assert command._at_daemon(own, f"http://127.0.0.1:{own.port}", {}).api_key == "secret"
