"""`omlxd serve` as a real process, before a stub engine: start, stop, refusals, no orphans."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from daemon import PATIENCE_S, free_port, wait_until

from omlxd.cli.daemon.client import find_daemon
from omlxd.config import load_settings
from omlxd.config.address import FILE_NAME
from omlxd.errors import ConfigError
from omlxd.front.process import serve
from omlxd.front.process.own_process import make_base
from tests.models.test_resolve import make

REPO = Path(__file__).resolve().parents[3]
STUB = Path(__file__).parents[2] / "support" / "stub_engine.py"


class Daemon:
    """A running `omlxd serve` on a free port, and where it listens."""

    def __init__(
        self, home: Path, *flags: str, stub: str = "", model: bool = True, env: dict[str, str] | None = None
    ):
        self.home = home
        folder = home / "tiny"
        if model and not folder.exists():
            make(folder)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
        engine = shlex.join([sys.executable, str(STUB), "--notes", str(home)])
        environ |= {
            "PYTHONPATH": str(REPO),
            "OMLXD_ENGINE_COMMAND": f"{engine} {stub}",
            "HF_HUB_CACHE": str(home / "no-hub"),
            "OMLXD_KEEP_AWAKE": "off",  # Else a program more may run.
            **(env or {}),
        }
        command = [sys.executable, "-m", "omlxd", "serve", "--port", "0", "--base-path", str(home)]
        command += ["--model", str(folder)] if model else []
        self.log = (home / "log.txt").open("w")
        self.process = subprocess.Popen(
            [*command, *flags],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        found = re.search(r"listening on (http://\S+) \(model (.*)\)", self.first_line)
        self.url = found[1] if found else ""
        self.model = found[2] if found else ""

    def logged(self) -> str:
        return (self.home / "log.txt").read_text()

    def notes(self) -> str:
        path = self.home / "notes.txt"
        return path.read_text() if path.exists() else ""

    def complete(self, prompt: str, **more: object) -> httpx.Response:
        body = {"model": self.model, "prompt": prompt, **more}
        return httpx.post(self.url + "/v1/completions", json=body, timeout=120, trust_env=False)

    def engine_pid(self) -> int:
        """Of the one engine that there is, once one that died before it has been reaped."""
        found: list[int] = []

        def is_alone() -> bool:
            found[:] = [child.pid for child in psutil.Process(self.process.pid).children()]
            return len(found) == 1

        wait_until(is_alone, why=lambda: f"children: {found}")
        return found[0]

    def stop(self, number: int = signal.SIGTERM, timeout: float = PATIENCE_S) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    started: list[Daemon] = []

    def go(*flags: str, home: Path = tmp_path, **options) -> Daemon:
        started.append(Daemon(home, *flags, **options))
        return started[-1]

    yield go
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.wait()
        daemon.process.stdout.close()  # type: ignore
        daemon.log.close()


def gone(pid: int, seconds: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_it_answers_before_the_model_has_loaded_and_stops_in_order(start):
    daemon = start(stub="--load-gate may-load")
    assert re.fullmatch(r"omlxd \S+ listening on http://127\.0\.0\.1:\d+ \(model tiny\)\n", daemon.first_line)
    health = httpx.get(daemon.url + "/health", trust_env=False)
    assert health.status_code == 200 and health.json()["models"][0]["state"] == "loading"
    (daemon.home / "may-load").touch()
    answer = daemon.complete("hello there")
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"].split() == ["hellothere"]
    assert daemon.stop() == 0
    assert "quit" in daemon.notes() and "a stub" in daemon.logged()


@pytest.mark.parametrize(("size", "says"), [("0", True), ("8GB", False)])
def test_no_ram_cache_beside_an_ssd_cache_is_said_at_the_start(start, size: str, says: bool):
    daemon = start("--hot-cache-max-size", size)
    page = []
    while not page or " curl " not in page[-1]:
        page.append(daemon.process.stdout.readline())
        assert page[-1], "the page has ended"
    assert says == any("--hot-cache-max-size 0 means no RAM cache" in line for line in page)


def test_interrupt_stops_it_too(start):
    daemon = start()
    daemon.complete("x")
    assert daemon.stop(signal.SIGINT) == 0
    assert "quit" in daemon.notes()


def test_stopping_while_loading_is_quick(start):
    daemon = start(stub="--load-s 600")
    assert daemon.stop() == 0


def test_an_answer_under_way_ends_before_the_daemon_does(start):
    daemon = start()
    daemon.complete("up")
    with httpx.stream(
        "POST",
        daemon.url + "/v1/completions",
        json={"model": "tiny", "prompt": "one gate two", "stream": True},
        timeout=120,
        trust_env=False,
    ) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if '"text":"one"' in line)
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: ": stopping" in daemon.logged())
        (daemon.home / "gate").touch()
        rest = list(lines)
    assert any("two" in line for line in rest) and "data: [DONE]" in rest
    assert daemon.process.wait(PATIENCE_S) == 0
    with pytest.raises(httpx.ConnectError):
        daemon.complete("too late")


def test_an_idle_connection_does_not_hold_up_the_end(start):
    daemon = start()
    with httpx.Client(trust_env=False) as client:
        assert client.get(daemon.url + "/health").status_code == 200
        assert daemon.stop() == 0  # Long before its keep-alive time ends.
        assert serve.KEEP_ALIVE_S > PATIENCE_S


@linux
def test_a_second_signal_ends_it_at_once(start):
    daemon = start()
    daemon.complete("up")
    engine = daemon.engine_pid()
    body = json.dumps({"model": "tiny", "prompt": "one sleep:600", "stream": True}).encode()
    with contextlib.closing(
        socket.create_connection(("127.0.0.1", int(daemon.url.rpartition(":")[2])))
    ) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        raw.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert raw.recv(100)
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "up to 10 s for 1 request to end" in daemon.logged())
        assert daemon.stop() == 1  # Not 0, which comes when the answer has had its time.
    assert gone(engine)


@linux
def test_a_killed_daemon_leaves_no_orphan_and_its_cache_is_free_again(start):
    daemon = start()
    daemon.complete("up")
    engine = daemon.engine_pid()
    daemon.stop(signal.SIGKILL)
    assert gone(engine)
    again = start()
    assert again.complete("up").status_code == 200
    assert "can't be used" not in again.logged()
    assert f"cold={again.home / 'cache'}" in again.notes()


@linux
def test_a_killed_engine_costs_one_request_and_comes_back(start):
    daemon = start()
    daemon.complete("up")
    engine = daemon.engine_pid()
    answer = daemon.complete("one sleep:0.3 die sleep:600")
    assert answer.status_code == 503
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert daemon.complete("again").status_code == 200
    assert daemon.engine_pid() != engine


@linux
def test_the_front_stays_small_and_loads_nothing_heavy(start):
    daemon = start()
    daemon.complete("up " * 50)
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])  # type: ignore
    assert resident * 1024 < 60e6
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert not re.search("libmlx|numpy|tokenizers", maps)


def test_a_port_in_use_is_told_with_what_to_do(start):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        daemon = start("--port", str(port))
        assert daemon.process.wait(PATIENCE_S) == 1
        assert f"port {port} on 127.0.0.1 is in use" in daemon.logged() and "--port" in daemon.logged()
        assert daemon.logged().count("\n") == 1


def test_a_port_that_omlxd_holds_is_told_as_such(start, tmp_path: Path):
    held = start(env={"OMLXD_API_KEY": "k"})
    second = start("--port", held.url.rpartition(":")[2], home=tmp_path / "second")
    assert second.process.wait(PATIENCE_S) == 1
    assert "already runs on 127.0.0.1 port" in second.logged()
    assert f"`omlxd status --url {held.url}`" in second.logged()


def test_commands_find_it_by_its_base_folder_on_any_port(start, tmp_path: Path):
    daemon, base = start("--no-cache"), tmp_path
    settings = load_settings({}, {"OMLXD_BASE_PATH": str(base)})
    assert find_daemon(None, settings).url == daemon.url
    port = str(free_port())
    named = load_settings({}, {"OMLXD_BASE_PATH": str(base), "OMLXD_PORT": port})
    assert find_daemon(None, named).url == f"http://127.0.0.1:{port}", "an address that is named counts"
    assert daemon.stop() == 0
    assert not (base / FILE_NAME).exists()


def test_an_address_of_another_machine_is_told(start):
    daemon = start("--host", "203.0.113.7", "--api-key", "k")
    assert daemon.process.wait(PATIENCE_S) == 1
    assert "203.0.113.7 is no address of this machine" in daemon.logged()


def test_a_folder_that_is_no_model_ends_it_with_2(start, tmp_path: Path):
    daemon = start("--model", str(tmp_path), model=False)
    assert daemon.process.wait(PATIENCE_S) == 2
    assert daemon.logged() == f"omlxd: --model: {tmp_path} is no model folder: config.json is missing.\n"
    by_variable = start(model=False, env={"OMLXD_MODEL": "./nowhere"})
    assert by_variable.process.wait(PATIENCE_S) == 2
    assert by_variable.logged().startswith("omlxd: OMLXD_MODEL: there is no folder")


@pytest.mark.parametrize("broken", ["model-00001-of-00002.safetensors", "tokenizer.json", "config.json"])
def test_broken_files_of_the_model_end_it_with_2_and_nothing_listens(start, tmp_path: Path, broken: str):
    file = make(tmp_path / "broken") / broken
    file.write_bytes(file.read_bytes()[:-1]) if broken != "tokenizer.json" else file.unlink()
    daemon = start("--model", str(file.parent), model=False)
    assert daemon.process.wait(PATIENCE_S) == 2 and not daemon.first_line
    assert daemon.logged().startswith(f"omlxd: --model: {file.parent}")


def test_a_base_folder_that_cannot_be_made_ends_it_with_2(start, tmp_path: Path):
    (tmp_path / "file").write_text("")
    daemon = start("--base-path", str(tmp_path / "file" / "x"))
    assert daemon.process.wait(PATIENCE_S) == 2 and not daemon.first_line
    assert daemon.logged() == f"omlxd: --base-path: {tmp_path}/file/x can't be made: Not a directory.\n"
    (file := tmp_path / "default.toml").write_text(f'[serve]\nbase-path = "{tmp_path}/file/x"\n')
    with pytest.raises(ConfigError, match=r"default\.toml line 2 .*: .*/file/x can't be made"):
        make_base(load_settings({"config": str(file)}, {}))


def test_a_model_that_cannot_be_loaded_is_told_to_clients(start):
    daemon = start(stub="--load-fails 'unsupported model'")
    answer = daemon.complete("x")
    assert answer.status_code == 503 and "unsupported model" in answer.text
    assert httpx.get(daemon.url + "/health", trust_env=False).status_code == 200
    assert daemon.stop() == 0


def test_a_broken_gguf_file_is_refused_once_and_before_anything_listens(start, tmp_path: Path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(64))
    daemon = start("--model", str(file), model=False)
    assert daemon.process.wait(PATIENCE_S) == 2 and not daemon.first_line
    why = "its GGUF version is 0; 2 and 3 can be read"
    assert daemon.logged() == f"omlxd: --model: {file} can't be imported: {why}.\n"
    file.unlink()
    gone = start("--model", str(file), model=False)
    assert gone.process.wait(PATIENCE_S) == 2
    assert gone.logged() == f"omlxd: --model: there is no file {file}.\n"


def test_a_broken_folder_is_told_to_clients(start, tmp_path: Path):
    broken = make(tmp_path / "models" / "other")
    (left := tmp_path / "models" / ".killed-1234.importing").mkdir()
    (broken / "tokenizer.json").unlink()
    daemon = start()
    ask = {"model": "other", "prompt": "x"}
    other = httpx.post(daemon.url + "/v1/completions", json=ask, timeout=60, trust_env=False)
    assert other.status_code == 400 and "tokenizer.json" in other.text
    assert other.headers["x-should-retry"] == "false" and "retry-after" not in other.headers
    assert not left.exists()
    assert daemon.complete("x").status_code == 200
    assert daemon.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a file", "locked"])
def test_a_cache_dir_that_cannot_be_used_costs_only_the_cache(kind: str, start, tmp_path: Path):
    cache = tmp_path / "c"
    holder = None
    if kind == "a file":
        cache.write_text("")
    else:
        from omlxd.kv.ledger.ledger import Ledger

        holder = Ledger(cache, 10**9)
        holder.open()
    daemon = start("--paged-ssd-cache-dir", str(cache), "--if-cache-busy", "no-ssd")
    assert daemon.complete("x").status_code == 200
    assert daemon.logged().count("serving without the SSD cache") == 1
    assert "cold=\n" in daemon.notes()
    if holder:
        holder.close()


@pytest.mark.slow
@linux
def test_a_second_daemon_on_one_cache_dir_says_so_and_stops(start, tmp_path: Path):
    first = start("--paged-ssd-cache-dir", str(tmp_path / "c"))
    first.complete("up")
    (tmp_path / "second").mkdir()
    second = start("--paged-ssd-cache-dir", str(tmp_path / "c"), home=tmp_path / "second")
    assert second.process.wait(PATIENCE_S) == 1 and second.url == ""
    (line,) = second.logged().splitlines()
    assert line.startswith(f"omlxd: the SSD cache {tmp_path}/c is in use by another omlxd")
    assert f"(process {first.process.pid})" in line and "--if-cache-busy no-ssd" in line
    assert first.complete("still up").status_code == 200


@pytest.mark.slow
@linux
def test_a_daemon_started_right_after_a_kill_gets_the_cache(start):
    """The lock dies with the daemon: its engine, which lives a moment longer, must not have inherited it."""
    daemon = start()
    daemon.complete("up")
    for _ in range(3):
        engine = daemon.engine_pid()
        held: list[str] = []
        for fd in Path(f"/proc/{engine}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # Closed meanwhile.
                held.append(os.readlink(fd))
        assert held and not any(target.endswith(".lock") for target in held)
        os.kill(engine, signal.SIGSTOP)  # The worst case: it can't even notice that its front is gone.
        daemon.process.kill()
        daemon.process.wait()
        again = start()
        os.kill(engine, signal.SIGKILL)
        assert again.url and again.complete("up").status_code == 200
        assert "can't be used" not in again.logged()
        daemon = again


async def test_a_lock_that_is_given_up_soon_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from omlxd.front.engines.ledger import cold_ledger
    from omlxd.kv.ledger.ledger import Ledger

    monkeypatch.setattr(cold_ledger, "PATIENCE_S", PATIENCE_S)
    holder = Ledger(tmp_path, 10**9)
    holder.lock()
    made = cold_ledger.ColdLedger(tmp_path, 10**9)
    assert made._ledger is not None
    lock, tried = made._ledger.lock, 0

    def counted() -> None:
        nonlocal tried
        tried += 1
        lock()

    monkeypatch.setattr(made._ledger, "lock", counted)
    claiming = asyncio.create_task(made.claim())
    while tried < 3:
        await asyncio.sleep(0.01)
    assert not claiming.done()
    holder.close()
    assert await claiming is None
    await made.close()


def test_no_cache_means_no_cache(start, tmp_path: Path):
    daemon = start("--no-cache")
    assert daemon.complete("x").status_code == 200
    assert "cold=\n" in daemon.notes() and not (tmp_path / "cache").exists()
    assert "SSD cache" not in daemon.logged()


def test_the_key_is_asked_for_and_never_logged(start):
    daemon = start("--log-level", "debug", env={"OMLXD_API_KEY": "s3cret-key"})
    assert daemon.complete("x").status_code == 401
    headers = {"Authorization": "Bearer s3cret-key"}
    body = {"model": "tiny", "prompt": "a prompt with s3cret-key"}
    answer = httpx.post(
        daemon.url + "/v1/completions", json=body, headers=headers, timeout=120, trust_env=False
    )
    assert answer.status_code == 200
    assert daemon.stop() == 0
    assert "s3cret" not in daemon.logged() and "a prompt with ***" in daemon.logged()


def test_the_front_imports_nothing_heavy():
    code = (
        "import sys, omlxd.front.process.serve, omlxd.front.app, omlxd.front.engines.pool\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)


def test_the_rooms_import_one_way():
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([str(linter), "--no-cache"], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stdout
