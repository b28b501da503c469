"""Pairing by a code, the channel behind it, and what somebody without either gets: nothing."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlxd.cli.main import main
from omlxd.kv.files.fs import FileSystem
from omlxd.kv.files.namespace import NamespaceInfo, describe_namespace
from omlxd.kv.files.paths import block_path
from omlxd.kv.hashing import namespace_of
from omlxd.kv.peer.client import connected, pair
from omlxd.kv.peer.frames import Channel, Hello, Look, PairedWith, Read, Refused, ToClient
from omlxd.kv.peer.identity import CODE_S, TRIES, Identity, PeerError, proof
from omlxd.kv.peer.server import Given, PeerServer

FACTS = {"weights": {"a": "1"}, "block_size": 64, "kv_bits": 0, "versions": {"mlx": "1"}}
NAMESPACE = namespace_of(FACTS)
NAME, ABSENT = bytes(range(32)), bytes(32)


class Host:
    """A machine that shares a cache with one file in it."""

    def __init__(self, folder: Path):
        self.identity, self.cache = Identity(folder / "base"), folder / "cache"
        file = self.cache / block_path(NAMESPACE, NAME)
        file.parent.mkdir(parents=True)
        file.write_bytes(b"block" * 1000)
        info = NamespaceInfo(
            model_id="org/tiny",
            model_path="/m",
            model_type="t",
            block_size=64,
            block_bytes=1,
            facts_digest=NAMESPACE.hex(),
            facts=FACTS,
        )
        describe_namespace(self.cache, info, FileSystem())
        listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listening.getsockname()
        self.server = PeerServer(self.identity, self.cache, listening)
        self.server.start()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path / "there")
    yield made
    made.server.close()


@pytest.fixture
def here(tmp_path: Path) -> Identity:
    return Identity(tmp_path / "here")


def ask(identity: Identity, host: Host, facts: dict = FACTS, model: str = "org/tiny"):
    namespace = namespace_of(facts)
    with connected(identity, host.address, namespace, time.monotonic() + 60) as connection:
        there, differs = connection.look([NAME, ABSENT], model, facts)
        data = list(connection.read([NAME, ABSENT], [5000, 5000]))
    return there, differs, [bytes(each) for each in data]


def test_paired_machines_read_and_only_until_one_is_removed(host: Host, here: Identity, tmp_path: Path):
    code = host.identity.new_code()
    assert pair(here, host.address, code.lower().replace("-", " ")) == socket.gethostname()[:64]
    assert ask(here, host) == ([True, False], "", [b"block" * 1000, b""])
    assert here.paired()[0].address == f"127.0.0.1:{host.address[1]}"
    assert host.identity.paired()[0].address == "127.0.0.1"
    assert host.server.given == Given(1, 5000)
    with pytest.raises(PeerError, match="no code"):  # It was for one pairing.
        pair(Identity(tmp_path / "third"), host.address, code)
    for file in (*here.folder.iterdir(), *host.identity.folder.iterdir()):
        assert file.stat().st_mode & 0o077 == 0, file
    assert host.identity.remove(here.paired()[0].name) == 1
    with pytest.raises(PeerError, match="do not trust"):
        ask(here, host)


def test_without_the_code_nothing_is_paired(host: Host, here: Identity):
    with pytest.raises(PeerError, match="it shows no code now"):
        pair(here, host.address, "AAAA-AAAA-AAAA-AAAA")
    code = host.identity.new_code()
    for _ in range(TRIES):
        with pytest.raises(PeerError, match="the code is wrong"):
            pair(here, host.address, "AAAA-AAAA-AAAA-AAAA")
    with pytest.raises(PeerError, match="it shows no code now"):  # Nor by the right one, after those.
        pair(here, host.address, code)
    assert not here.paired() and not host.identity.paired()
    with pytest.raises(PeerError, match="do not trust"):
        ask(here, host)


def test_a_code_is_over_after_its_time(host: Host):
    host.identity.new_code(now=1000.0)
    assert host.identity.take_code(now=1000.0 + CODE_S - 1)
    assert not host.identity.take_code(now=1000.0 + CODE_S)
    assert not host.identity.take_code(now=1000.0)  # It is forgotten.


def test_who_shows_no_certificate_may_pair_and_nothing_else(host: Host, here: Identity):
    for asked in (Look(NAMESPACE, (NAME,)), Read(NAMESPACE, (NAME,))):
        plain = socket.create_connection(host.address)
        with here.for_client(pairing=True).wrap_socket(plain) as tls:
            channel = Channel(tls, 30.0)
            channel.expect(Hello)
            channel.send(asked)
            assert isinstance(channel.receive(ToClient), Refused)
            with pytest.raises((PeerError, OSError)):
                channel.read(1)


def test_somebody_in_between_is_told_from_the_host(host: Host, here: Identity, tmp_path: Path):
    """It has the code typed to it, but not the code: its own certificate is in what the client proves."""
    between = Host(tmp_path / "between")
    code = host.identity.new_code()
    between.identity.new_code()
    try:
        with pytest.raises(PeerError, match="the code is wrong"):
            pair(here, between.address, code)
        assert not here.paired()
    finally:
        between.server.close()
    plain = code.replace("-", "")
    assert proof(plain, "client", b"host", b"c") != proof(plain, "client", b"between", b"c")
    assert proof(plain, "client", b"h", b"c") != proof(plain, "server", b"h", b"c")


def test_a_host_that_does_not_know_the_code_is_not_trusted(
    host: Host, here: Identity, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host.server, "_pair", lambda *_: PairedWith("x", b"x" * 32))
    with pytest.raises(PeerError, match="does not know the code"):
        pair(here, host.address, host.identity.new_code())
    assert not here.paired()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"block_size": 16}, "block_size (64, now 16) does not agree"),
        ({"kv_bits": [8, 64]}, "kv_bits does not agree"),
        ({"versions": {"mlx": "2"}}, "versions (mlx) does not agree"),
        ({"weights": {"a": "2"}, "block_size": 16}, "block_size (64, now 16) and weights (a) do not agree"),
    ],
)
def test_what_does_not_agree_is_said(host: Host, here: Identity, changed: dict, said: str):
    pair(here, host.address, host.identity.new_code())
    assert ask(here, host, FACTS | changed) == ([False, False], said, [b"", b""])
    assert ask(here, host, FACTS | {"weights": {"b": "1"}}, "org/other")[1] == ""


def test_another_server_and_silence_are_said(here: Identity):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            made, _ = listening.accept()
            with made:
                made.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                made.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PeerError, match="no omlxd that shares"):
            pair(here, listening.getsockname(), "A")
        thread.join()
        address = listening.getsockname()
    with pytest.raises(PeerError, match="refused"):
        pair(here, address, "A")


def test_a_host_that_is_stopped_costs_no_more_than_was_allowed(here: Identity):
    """Its kernel takes connections, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = Identity(here.folder / "there")
        here.add("there", there.own_certificate())
        asked = connected(here, silent.getsockname(), NAMESPACE, time.monotonic() + 0.05)
        with pytest.raises(PeerError, match="does not answer in time"), asked:
            pass


def test_what_is_no_certificate_is_not_kept(here: Identity):
    with pytest.raises(PeerError, match="no certificate"):
        here.add("x", b"nonsense")
    assert here.own_certificate() == here.own_certificate()
    here.add("a\nb" + "x" * 100, Identity(here.folder / "other").own_certificate())
    assert here.paired()[0].name == "ab" + "x" * 61
    assert here.for_client().verify_mode is ssl.CERT_REQUIRED


def test_the_command_shows_a_code_where_somebody_listens_and_tells_machines_apart(
    host: Host, here: Identity, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    own, there = (["--base-path", str(each.folder.parent)] for each in (here, host.identity))
    assert main(["peer", "code", *own]) == 1
    assert "no omlxd of this base path listens" in capsys.readouterr().err
    assert main(["peer", "code", *there]) == 0
    host.server.close()
    assert main(["peer", "code", *there]) == 1

    for name in ("x", "y"):
        here.add("mini", Identity(tmp_path / name).own_certificate(), "192.0.2.1:8077" if name == "x" else "")
    capsys.readouterr()
    assert main(["peer", "list", *own]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ID", "NAME", "ADDRESS", "PAIRED"]
    assert [line.split()[1:3] for line in lines[1:]] == [["mini", "192.0.2.1:8077"], ["mini", "-"]]
    assert main(["peer", "remove", "mini", *own]) == 2
    assert lines[2].split()[0] in capsys.readouterr().err
    assert main(["peer", "remove", lines[1].split()[0], *own]) == 0
    assert [each.address for each in here.paired()] == [""]
