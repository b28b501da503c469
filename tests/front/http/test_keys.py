"""API keys in a file: made, listed, revoked, never kept in the clear, heard of by a running daemon."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import threading
from pathlib import Path

import httpx
import pytest
from app_client import client
from fake_engine import FakeEngine, app_of

from omlxd.cli import main
from omlxd.cli.daemon.client import Daemon as DaemonClient
from omlxd.cli.daemon.client import DaemonError
from omlxd.config.keys import KEY_PATTERN, NONE_LEFT, add_key, keys_path, open_to_all, read_keys, revoke_key
from omlxd.errors import ConfigError
from omlxd.front.http import settings
from omlxd.front.http.settings import KeyRing
from tests.front.process.test_serve import start  # noqa: F401 (a fixture)


def run(home: Path, *argv: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of `omlxd key argv`."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = main.main(["key", *argv, "--base-path", str(home)])
    return status, out.getvalue(), err.getvalue()


def test_the_command(tmp_path: Path):
    home = tmp_path / "new" / "home"
    status, out, _ = run(home, "add", "laptop")
    key = out.strip()
    assert status == 0 and KEY_PATTERN.fullmatch(key)
    assert run(tmp_path, "list") == (0, "", "There is no key; `omlxd key add NAME` makes one.\n")
    assert run(home, "add", "laptop")[0] == 2
    assert run(home, "add", "no spaces")[0] == 2
    second = run(home, "add", "phone")[1].strip()
    listed = run(home, "list")[1]
    assert re.fullmatch(r"(\S+T\S+\+00:00  (laptop|phone)  interactive\n){2}", listed)
    assert "priority" not in keys_path(home).read_text(), "an older daemon reads it, too"
    assert run(home, "add", "batch", "--priority", "background")[0] == 0
    assert re.search(r"laptop  interactive\n.*phone  i.*\n.*batch  background\n$", run(home, "list")[1])
    assert run(home, "revoke", "batch")[0] == 0
    text = keys_path(home).read_text()
    assert key not in text and second not in text and key not in listed
    assert run(home, "revoke", "laptop")[:2] == (0, "laptop is revoked; 1 key is left.\n")
    status, _, said = run(home, "revoke", "laptop")
    assert status == 2 and "the keys are: phone" in said
    assert "no keys are left" in run(home, "revoke", "phone")[1]


def test_the_file_and_its_folder_are_private_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        add_key(keys_path(tmp_path / "home"), "a")
    finally:
        os.umask(before)
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
    assert keys_path(tmp_path / "home").stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in (tmp_path / "home").iterdir()] == ["keys.json"]


@pytest.mark.parametrize("mode", [0o640, 0o606, 0o666])
def test_a_file_that_others_can_use_is_refused(mode: int, tmp_path: Path):
    path = keys_path(tmp_path)
    add_key(path, "a")
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(path)


@pytest.mark.parametrize("text", [b"", b"{", b'{"keys": [{"name": 1}]}', b"\xff"])
def test_a_file_that_is_none_is_refused(text: bytes, tmp_path: Path):
    path = keys_path(tmp_path)
    path.touch(0o600)
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="is no file of keys"):
        read_keys(path)


def test_keys_made_at_once_are_all_kept(tmp_path: Path):
    path = keys_path(tmp_path)
    threads = [threading.Thread(target=add_key, args=(path, f"k{at}")) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_keys(path)} == {f"k{at}" for at in range(8)}


def test_another_address_is_served_with_a_key_in_the_file(tmp_path: Path):
    from omlxd.config import load_settings

    flags = {"host": "0.0.0.0", "base_path": str(tmp_path)}
    with pytest.raises(ConfigError, match="omlxd key add"):
        load_settings(flags, {})
    add_key(keys_path(tmp_path), "a")
    assert load_settings(flags, {}).host == "0.0.0.0"
    revoke_key(keys_path(tmp_path), "a")
    with pytest.raises(ConfigError):
        load_settings(flags, {})


# --------------------------------------------------------------------------- fairness


async def test_a_request_is_of_its_key_or_else_of_its_address(tmp_path: Path):
    """Whatever sessions it names. `--api-key` may be everybody's."""
    file = keys_path(tmp_path)
    names = {"own": "own", "a": add_key(file, "a"), "b": add_key(file, "b")}
    engine = FakeEngine()

    async def ask(ring: KeyRing, key: str, address: str) -> str:
        transport = httpx.ASGITransport(app_of(engine, keys=ring), client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            sent = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "session_id": address}
            answer = await http.post(
                "/v1/chat/completions", json=sent, headers={"authorization": f"Bearer {key}"}
            )
        assert answer.status_code == 200
        return engine.clients[-1]

    ring = KeyRing("own", file)
    asked = [(key, f"10.0.0.{n}") for key in names for n in (1, 2)]
    assert [await ask(ring, names[key], address) for key, address in asked] == [
        "10.0.0.1",
        "10.0.0.2",
        "a",
        "a",
        "b",
        "b",
    ]
    assert await ask(KeyRing(), "", "10.0.0.3") == "10.0.0.3"


# --------------------------------------------------------------------------- the ring


def test_a_ring_hears_of_new_and_revoked_keys(tmp_path: Path):
    path = keys_path(tmp_path)
    ring = KeyRing("own", path)
    assert ring.required and ring.name_of([b"own"]) == "--api-key"
    key = add_key(path, "laptop").encode()
    assert ring.name_of([key]) == "laptop" and ring.name_of([b"nonsense", key]) == "laptop"
    assert ring.name_of([key[:-1]]) is None and ring.name_of([b""]) is None and ring.name_of([]) is None
    revoke_key(path, "laptop")
    assert ring.name_of([key]) is None and ring.name_of([b"own"]) == "--api-key"
    ring.replace_own("other")
    assert ring.name_of([b"own"]) is None and ring.name_of([b"other"]) == "--api-key"


def test_revoking_the_last_key_opens_nothing(tmp_path: Path):
    path = keys_path(tmp_path)
    ring = KeyRing("", path)
    assert not ring.required
    add_key(path, "only")
    assert ring.required
    revoke_key(path, "only")
    assert ring.required
    path.unlink()
    assert ring.required


@pytest.mark.parametrize("may_open", [True, False])
def test_key_off_opens_a_running_daemon_that_only_this_machine_reaches(tmp_path: Path, may_open, caplog):
    path = keys_path(tmp_path)
    add_key(path, "one"), add_key(path, "two")
    ring = KeyRing("", path)
    ring.may_open = may_open
    assert open_to_all(path) == 2 and read_keys(path) == ()
    assert ring.required is not may_open
    assert ("other machines reach this daemon" in caplog.text) is not may_open
    key = add_key(path, "again")
    assert ring.required and ring.name_of([key.encode()]) == "again", "a new key ends it"
    own = KeyRing("own", path)
    own.may_open = True
    open_to_all(path)
    assert own.required, "the settings' own key is asked for all the same"


def test_a_broken_file_leaves_the_keys_as_they_were_and_says_so_once(tmp_path: Path, caplog):
    path = keys_path(tmp_path)
    key = add_key(path, "laptop").encode()
    ring = KeyRing("", path)
    path.write_text("{")
    for _ in range(3):
        assert ring.name_of([key]) == "laptop"
    path.chmod(0o644)
    assert ring.name_of([key]) == "laptop"
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert caplog.text.count("The keys stay as they were") == 2


def test_every_key_is_compared_whole_and_none_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In constant time: digests of one length, no stop at the first that matches."""
    path = keys_path(tmp_path)
    key = add_key(path, "first").encode()
    add_key(path, "second")
    ring = KeyRing("own", path)
    compared = []

    def compare(a: str, b: str) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(settings, "compare_digest", compare)
    for given in ([key], [b"x"], [b"own"], [b"x" * 1000]):
        compared.clear()
        ring.name_of(given)
        assert compared == [(64, 64)] * 3


async def test_both_headers_and_the_name_in_the_log(tmp_path: Path, caplog):
    path = keys_path(tmp_path)
    key = add_key(path, "laptop")
    caplog.set_level("INFO", "omlxd.access")
    async with client(app_of(FakeEngine(), keys=KeyRing("", path))) as http:
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
            assert (await http.get("/v1/models", headers=headers)).status_code == 200
        wrong = await http.get("/v1/models", headers={"x-api-key": key + "x"})
        assert wrong.status_code == 401 and "missing or wrong" in wrong.text
        revoke_key(path, "laptop")
        none_left = await http.get("/v1/models", headers={"x-api-key": key})
        assert none_left.status_code == 401 and NONE_LEFT in none_left.json()["error"]["message"]
    assert caplog.text.count("key=laptop") == 2 and key not in caplog.text


def test_a_running_daemon_hears_of_it_without_a_restart(start, tmp_path: Path):  # noqa: F811
    daemon = start()
    url = daemon.url + "/v1/models"
    assert httpx.get(url, trust_env=False).status_code == 200
    key = run(tmp_path, "add", "laptop")[1].strip()
    assert httpx.get(url, trust_env=False).status_code == 401
    assert httpx.get(url, headers={"x-api-key": key}, trust_env=False).status_code == 200
    assert run(tmp_path, "revoke", "laptop")[0] == 0
    assert httpx.get(url, headers={"x-api-key": key}, trust_env=False).status_code == 401
    for sent in ("", key):
        with pytest.raises(DaemonError, match="none is left: make one with `omlxd key add NAME`"):
            DaemonClient(daemon.url, sent).status()
    assert key not in daemon.logged() and json.loads(keys_path(tmp_path).read_text()) == {"keys": []}
    assert run(tmp_path, "off")[0] == 0
    assert httpx.get(url, trust_env=False).status_code == 200
