"""--peer-listen and --peer: refused in words where they can't be."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from omlxd.config import Settings, load_settings
from omlxd.errors import ConfigError
from omlxd.front.process.peers import open_peer_socket, peer_rows
from omlxd.front.process.sockets import CannotListen


def settings(tmp_path: Path, **flags: str) -> Settings:
    return load_settings({"base_path": str(tmp_path), **flags}, {})


@pytest.mark.parametrize("every", ["0.0.0.0", "::", "[::]:8077", "0", "*"])
def test_not_every_network_at_once(tmp_path: Path, every: str):
    with pytest.raises(ConfigError, match="every network of this machine"):
        settings(tmp_path, peer_listen=every)


def test_no_address_and_no_cache_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no address"):
        settings(tmp_path, peer="192.168.1.5:port")
    for name in ("peer", "peer_listen"):
        without = settings(tmp_path, no_cache="true", **{name: "127.0.0.1:1"})
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: it is about the SSD cache"):
            open_peer_socket(without)


def test_it_listens_at_the_address_alone(tmp_path: Path):
    assert open_peer_socket(settings(tmp_path)) is None
    made = open_peer_socket(settings(tmp_path, peer_listen="127.0.0.1:0"))
    assert made is not None
    with made:
        host, port = made.getsockname()
        assert host == "127.0.0.1"
        rows = peer_rows(settings(tmp_path, peer="192.0.2.1"), made)
        assert rows[0] == ("peers", f"shares its cache with paired machines at 127.0.0.1:{port}")
        assert rows[1] == ("peer", "192.0.2.1: not paired: `omlxd peer pair 192.0.2.1`")
        with pytest.raises(CannotListen, match=f"in use; give another one, as 127.0.0.1:{port + 1}"):
            open_peer_socket(settings(tmp_path, peer_listen=f"127.0.0.1:{port}"))
        with socket.create_connection((host, port), 5):
            pass
    with pytest.raises(
        CannotListen, match=r"192\.0\.2\.1 is no address of this machine; give one .*127\.0\.0\.1"
    ):
        open_peer_socket(settings(tmp_path, peer_listen="192.0.2.1"))
