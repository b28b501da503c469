"""omlxd status, top and config, over a scripted daemon and a real one."""

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from daemon import REPO, Daemon, prose
from rich.console import Console

from omlxd.cli import main
from omlxd.cli.daemon.client import DaemonError, NoDaemon
from omlxd.cli.daemon.owner_api import AwakeStatus, ColdStatus, DaemonStatus, ModelStatus, RankStatus
from omlxd.cli.watch import top
from omlxd.cli.watch.status import as_text, duration, hit_rate, rate

URL = "http://127.0.0.1:8000"


def model(id: str = "org/tiny", state: str = "ready", **more) -> ModelStatus:
    values = {
        **{
            "prompt_tokens_total": 100.0,
            "generation_tokens_total": 40.0,
            "prefix_cache_queries_total": 400.0,
        },
        **{"prefix_cache_hits_hot_total": 200.0, "prefix_cache_hits_cold_total": 100.0},
        **{"kv_hot_bytes": 5e6, "kv_hot_budget_bytes": 8e9, "mlx_active_bytes": 3e9, "mlx_cache_bytes": 6e7},
        **{"kv_bytes_written_total": 0.0, "kv_bytes_restored_total": 0.0},
    }
    values |= more.pop("values", {})
    return ModelStatus(id=id, state=state, resident=2 * 10**9, context_length=4096, values=values, **more)


def status(*models: ModelStatus, pid: int = 7, cold: bool = True) -> DaemonStatus:
    return DaemonStatus(
        version="1.2",
        pid=pid,
        started=0.0,
        uptime_s=3700.0,
        resident=37 * 10**6,
        models=list(models),
        cold=ColdStatus(
            dir="/cache",
            bytes=10**9,
            cap=10**11,
            reserved=0,
            files=12,
            evicted_files=3,
            evicted_bytes=5,
            capacity=10**11,
            written_today=5 * 10**8,
            written_ever=3 * 10**12,
        )
        if cold
        else None,
    )


def test_durations_and_rates():
    assert [duration(s) for s in (0, 59.9, 60, 62, 3600, 3700, 90000, 86401)] == [
        *("0 s", "59 s", "1 min", "1 min 2 s", "1 h", "1 h 1 min", "1 d 1 h", "1 d")
    ]
    assert hit_rate(model()) == 0.75
    assert hit_rate(ModelStatus(id="m", state="loading")) is None
    now = model(values={"generation_tokens_total": 60.0, "prompt_tokens_total": 0.0})
    assert rate(model(), now, 2.0, "generation_tokens_total") == 10.0
    assert rate(model(), now, 2.0, "prompt_tokens_total") == 0.0
    assert rate(None, model(), 2.0, "generation_tokens_total") == 0.0


def test_status_as_text():
    told = as_text(
        status(
            model(running=2, waiting=1), ModelStatus(id="b", state="failed", trouble="b can't be loaded: why")
        ),
        URL,
    )
    lines = told.splitlines()
    assert lines[0] == f"omlxd 1.2 at {URL}, process 7, up 1 h 1 min, front 37 MB"
    assert lines[3].split() == [
        *(
            "org/tiny",
            "ready",
            "2",
            "1",
            "2",
            "GB",
            "3",
            "GB",
            "+",
            "60",
            "MB",
            "4096",
            "75%",
            "5",
            "MB",
            "of",
            "8",
            "GB",
        )
    ]
    assert "b: b can't be loaded: why" in lines
    assert "org/tiny: passes of 64" in as_text(status(model(slowed="passes of 64")), URL).splitlines()
    assert "by priority" not in as_text(status(model(by_priority={0: 3})), URL)
    told = as_text(status(model(by_priority={0: 2, 1: 4})), URL).splitlines()
    assert "org/tiny: requests by priority: 2 of 0, 4 of 1" in told
    link = {"exchanges_per_step": 48.0, "latency_us": 16_282.0, "bytes_per_s": 21e6, "step_share": 0.22}
    told = as_text(status(model(values={f"link_{name}": value for name, value in link.items()})), URL)
    held = {"pid": 9, "resident": 10**9, "mlx": 10**8, "hot": 0}
    ranks = RankStatus(rank=0, cold=10**6, **held), RankStatus(rank=1, host="10.0.0.2", cold=None, **held)
    shown = as_text(status(model(ranks=ranks)), URL)
    assert "rank 0 is process 9: 1 GB, MLX 100 MB, RAM tier 0 bytes, SSD 1 MB\n" in shown
    assert "rank 1 on 10.0.0.2 is process 9: 1 GB, MLX 100 MB, RAM tier 0 bytes\n" in shown
    assert (
        "org/tiny: between ranks: the 48 exchanges of a step take 782 ms alone, 22% of its time; "
        "one takes 16,282 µs, and a large one 21 MB/s" in told.splitlines()
    )
    assert lines[-2:] == [
        "SSD cache /cache: 1 GB of 100 GB in 12 files, 3 evicted since the start",
        "written to SSD: 500 MB today, 3 TB in all",
    ]
    assert as_text(status(model(), cold=False), URL).endswith("SSD cache: none")
    for awake, words in (
        (AwakeStatus(on=True, held=True, trouble="once"), "yes (now: held)"),
        (AwakeStatus(on=True, held=False), "yes (not tried yet)"),
        (AwakeStatus(on=True, held=False, was_held=True), "yes (now: not held)"),
        (AwakeStatus(on=True, held=False, trouble="caffeinate: gone"), "no (caffeinate: gone)"),
        (AwakeStatus(on=False, held=False), "no (--keep-awake is off)"),
    ):
        told = as_text(msgspec.structs.replace(status(model()), awake=awake), URL)
        assert f"keeps the machine awake while it works: {words}" in told.splitlines()
    small = status(model())
    assert small.cold is not None
    small.cold.capacity = 2 * 10**9
    assert "1 GB of 2 GB (what its disk has room for; the limit is 100 GB) in 12 files" in as_text(small, URL)
    small.cold.daily_write_budget = 5 * 10**8
    assert "written to SSD: 500 MB today, of 500 MB a day, 3 TB in all" in as_text(small, URL)
    small.cold.write_budget_used_up = True
    assert "of 500 MB a day (writing stops until midnight), 3 TB in all" in as_text(small, URL)
    gone = status(model())
    assert gone.cold is not None
    gone.cold.folder_away = True
    assert "OFF, the folder is away" in as_text(gone, URL)
    assert "OFF, its disk fails" in as_text(status(model(values={"kv_cold_tier_on": 0.0})), URL)
    full = as_text(status(model(values={"kv_cold_tier_on": 0.0, "kv_cold_disk_full": 1.0})), URL)
    assert "its disk is FULL: writes wait for room, reads go on\n" in full
    values = {"kv_peer_on": 1.0, "kv_peer_files_total": 18.0, "kv_peer_bytes_total": 3e6}
    told = as_text(status(model(values=values)), URL)
    assert "from the peer: 18 files, 3 MB, since the start" in told.splitlines()
    giving = msgspec.structs.replace(status(model()), given=(2, 3_000_000))
    assert "to paired machines: 2 files, 3 MB, since the start" in as_text(giving, URL).splitlines()
    off = status(model(values=values | {"kv_peer_on": 0.0}, peer="it is off"))
    assert "since the start; LEFT OUT for now: it is off\n" in as_text(off, URL) + "\n"
    assert "since the start; not paired" in as_text(status(model(values=values, peer="not paired")), URL)


def test_top_on_a_fake_console():
    later = model(values={"generation_tokens_total": 90.0, "kv_bytes_written_total": 4e6})
    given = iter([status(model()), status(later)])
    out = io.StringIO()
    console = Console(file=out, width=160, height=20)
    slept: list[tuple[float, str]] = []
    top.watch(
        lambda: next(given), URL, console, 1.0, looks=2, sleep=lambda s: slept.append((s, out.getvalue()))
    )
    # No terminal: each look is written when it is made, under the one before it.
    ((seconds, first),) = slept
    assert seconds == 1.0 and first.count("org/tiny") == 1 and "75%" in first
    assert out.getvalue().startswith(first) and out.getvalue().count("org/tiny") == 2


def test_top_on_a_terminal_has_a_screen_of_its_own():
    out = io.StringIO()
    console = Console(file=out, width=160, height=20, force_terminal=True, legacy_windows=False)
    top.watch(lambda: status(model()), URL, console, 1.0, looks=2, sleep=lambda s: None)
    said = out.getvalue()
    assert said.startswith("\x1b[?1049h") and "org/tiny" in said and "\x1b[?1049l" in said


def shown(now: DaemonStatus, before: DaemonStatus | None, seconds: float) -> str:
    console = Console(file=io.StringIO(), width=160)
    with console.capture() as capture:
        console.print(top.page(now, before, seconds, URL))
    return capture.get()


def test_a_page_of_top_has_rates():
    later = model(values={"generation_tokens_total": 90.0, "kv_bytes_written_total": 4e6})
    text = shown(status(later, model("b", "failed", trouble="no memory")), status(model()), 2.0)
    assert "25.0" in text and "written 2 MB/s" in text and "b: no memory" in text
    assert "0.0" in shown(status(later), None, 0.0)


def test_a_page_of_top_fits_80_columns():
    console = Console(file=io.StringIO(), width=80)
    long = model("some-organisation/A-Model-30B-with-a-long-name-4bit", running=1)
    with console.capture() as capture:
        console.print(top.page(status(long), status(long), 1.0, URL, wide=False))
    (row,) = [line for line in capture.get().splitlines() if line.startswith("A-Model-30B-with-a-long…")]
    assert row.split()[1:] == ["ready", "1", "0", "0", "0", "0.0", "75%", "5", "MB", "2", "GB"]


def test_no_figure_of_top_is_cut_at_80_columns():
    busy = {"kv_hot_bytes": 804.8e6, "prompt_tokens_total": 12_100.0, "generation_tokens_total": 1240.0}
    long = model("o/SmolLM2-135M-Instruct:data", "unloaded", running=12, waiting=3, values=busy)
    long = msgspec.structs.replace(long, resident=1_640_000_000)
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as capture:
        console.print(top.page(status(long), status(model(long.id)), 1.0, URL, wide=False))
    _, _, head, row, *_ = capture.get().splitlines()
    assert head.endswith("PROCESS") and max(len(head), len(row)) <= 80
    assert row.startswith("SmolLM2-135") and row.split()[0].endswith("…:data")
    assert row.split()[1:5] == ["unloaded", "12", "3", "12,000"]
    assert row.split()[-4:] == ["804.8", "MB", "1.6", "GB"] and row.count("…") == 1


def test_top_waits_for_a_daemon_that_went_away():
    answers = iter([status(model()), NoDaemon("gone"), DaemonError("busy"), status(model(), pid=8)])

    def look() -> DaemonStatus:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    pages: list[str] = []
    console = Console(file=io.StringIO(), width=160)
    top.watch(look, URL, console, 0.1, looks=4, sleep=lambda s: pages.append(""))
    assert len(pages) == 3
    with pytest.raises(NoDaemon):
        top.watch(lambda: (_ for _ in ()).throw(NoDaemon("none")), URL, console, looks=1)


@pytest.mark.parametrize("verb", ["status", "top"])
def test_no_daemon_is_one_sentence(verb: str, capsys):
    assert main.main([verb, "--url", "http://127.0.0.1:1"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("omlxd: Nothing answers at http://127.0.0.1:1; start the daemon")


@pytest.mark.parametrize(
    "argv",
    [
        ["status", "--url", "ftp://x"],
        ["status", "--nonsense"],
        ["top", "--interval", "x"],
        ["top", "--looks", "-1"],
    ],
)
def test_nonsense_ends_with_2(argv: list[str], capsys):
    assert main.main(argv) == 2
    assert capsys.readouterr().err.startswith("omlxd: ")


@pytest.mark.slow
def test_a_real_daemon(tmp_path: Path, monkeypatch, capsys):
    with Daemon(tmp_path, env={"OMLXD_API_KEY": "secret"}, wait=False) as daemon:
        daemon.http.headers["x-api-key"] = "secret"
        daemon.wait_ready()
        daemon.chat(prose(40))
        assert main.main(["status", "--url", daemon.url]) == 1
        assert "wants its key" in capsys.readouterr().err
        monkeypatch.setenv("OMLXD_API_KEY", "secret")
        assert main.main(["status", "--url", daemon.url, "--json"]) == 0
        got = msgspec.json.decode(capsys.readouterr().out, type=DaemonStatus)
        assert got.pid == daemon.process.pid and got.models[0].pid == daemon.engine_pid()
        assert got.cold is not None and Path(got.cold.dir) == daemon.cache
        assert main.main(["status", "--url", daemon.url]) == 0
        assert daemon.model in capsys.readouterr().out
        assert main.main(["top", "--url", daemon.url, "--looks", "1"]) == 0
        assert daemon.model in capsys.readouterr().out


# --------------------------------------------------------------------------- config show


def test_config_show_says_where_each_value_stands(tmp_path: Path, monkeypatch, capsys):
    for name in ("OMLXD_PORT", "OMLXD_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "omlxd.toml"
    file.write_text('[serve]\nblock-size = 128\nlog-level = "debug"\n')
    monkeypatch.setenv("OMLXD_LOG_LEVEL", "error")
    monkeypatch.setenv("OMLXD_API_KEY", "very-secret")
    argv = ["config", "show", "--config", str(file), "--port", "9"]
    assert main.main([*argv, "--json"]) == 0
    out = capsys.readouterr().out
    rows = {row["name"]: (row["value"], row["source"]) for row in json.loads(out)}
    assert rows["port"] == (9, "--port")
    assert rows["block_size"] == (128, f"{file} line 2 (block-size)")
    assert rows["log_level"] == ("error", "OMLXD_LOG_LEVEL")
    assert rows["host"] == ("127.0.0.1", "default")
    assert rows["api_key"] == ("(set, not shown)", "OMLXD_API_KEY")
    assert rows["paged_ssd_cache_max_size"] == (None, "default")
    assert main.main(argv) == 0
    text = capsys.readouterr().out
    assert "very-secret" not in out + text
    assert "--block-size" in text and "1 h" in text and "auto" in text
    told = dict(line.split()[:2] for line in text.splitlines())
    assert told["--memory-limit"] == "auto" and told["--log-file-size"] == "10"
    assert told["--max-concurrent-requests"] == "auto" and told["--seed"] == "random"
    assert "--model-ttl" in text and " 1 h " in text and " 2 min " in text
    assert main.main(["config", "show", "--port", "banana"]) == 2
    capsys.readouterr()
    assert main.main(["config"]) == 0 and "--block-size" in capsys.readouterr().out


def test_config_show_tells_what_the_file_says_of_models(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.delenv("OMLXD_CONFIG", raising=False)
    file = tmp_path / "omlxd.toml"
    file.write_text(
        '[serve]\nblock-size = 128\n\n[models."org/a"]\ntemperature = 0.5\nblock_size = 32\nttl = "0"\n'
        '[models.b]\nttl = "5m"\naliases = ["x", "y"]\ntemplate-args = { enable_thinking = false }\n'
    )
    assert main.main(["config", "show", "--config", str(file), "--json"]) == 0
    rows = {row["name"]: (row["value"], row["source"]) for row in json.loads(capsys.readouterr().out)}
    assert rows["block_size"] == (128, f"{file} line 2 (block-size)")
    assert {name: row for name, row in rows.items() if name.startswith("models")} == {
        'models."org/a".temperature': (0.5, f"{file} line 5 (temperature)"),
        'models."org/a".block-size': (32, f"{file} line 6 (block_size)"),
        'models."org/a".ttl': (0.0, f"{file} line 7 (ttl)"),
        'models."b".ttl': (300.0, f"{file} line 9 (ttl)"),
        'models."b".aliases': (["x", "y"], f"{file} line 10 (aliases)"),
        'models."b".template-args': (["enable_thinking=False"], f"{file} line 11 (template-args)"),
    }
    assert main.main(["config", "show", "--config", str(file)]) == 0
    text = capsys.readouterr().out
    told = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines()}
    assert told['models."b".ttl'].startswith("5 min ") and told['models."org/a".ttl'].startswith("0 ")
    assert told['models."org/a".temperature'].startswith("0.5 ")


def test_a_variable_that_nothing_reads_is_a_warning(tmp_path: Path, monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith("OMLXD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMLXD_PRT", "3")
    assert main.main(["config", "show", "--base-path", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == "omlxd: OMLXD_PRT is no variable of omlxd (did you mean OMLXD_PORT?); it is ignored.\n"
    assert out.startswith("SETTING")


def test_a_reader_that_has_enough_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m omlxd config show | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=REPO)
    assert done.stdout.startswith("SETTING") and done.stderr == ""


@pytest.mark.parametrize("argv", ["--help", "serve --help", "config show", "cache stats --json"])
def test_what_cannot_be_written_is_one_line_and_a_closed_pipe_is_none(argv: str, tmp_path: Path):
    def run(target: int) -> tuple[int, str]:
        command = [sys.executable, "-m", "omlxd", *argv.split()]
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(REPO)}
        done = subprocess.run(command, stdout=target, stderr=subprocess.PIPE, env=environ, text=True)
        os.close(target)
        return done.returncode, done.stderr

    reader, writer = os.pipe()
    os.close(reader)
    assert run(writer) == (0, "")
    if os.path.exists("/dev/full"):
        said = "omlxd: can't write: No space left on device.\n"
        assert run(os.open("/dev/full", os.O_WRONLY)) == (1, said)
