"""common/ports.py: a port is taken that nobody serves."""

from __future__ import annotations

import errno
import socket
import sys

import pytest

from omlxd.common import ports

HERE = "127.0.0.1"


def test_a_port_that_another_listens_on_is_in_use():
    with socket.create_server((HERE, 0)) as other, pytest.raises(OSError) as caught:
        ports.bind(socket.AF_INET, other.getsockname())
    assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_free_port_is_bound(platform: str, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    with socket.create_server((HERE, 0)) as former:
        place = former.getsockname()
    with ports.bind(socket.AF_INET, place) as made:
        assert made.getsockname() == place
    with ports.bind(socket.AF_INET, (HERE, 0)) as made:
        assert made.getsockname()[1] > 0


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="stands for macOS's SO_REUSEADDR")
def test_on_macos_one_that_listens_on_all_addresses_is_seen(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(socket, "SO_REUSEADDR", socket.SO_REUSEPORT)
    with socket.create_server(("0.0.0.0", 0), reuse_port=True) as other:
        port = other.getsockname()[1]
        ports._bound(socket.AF_INET, (HERE, port)).close()  # The system lets us.
        with pytest.raises(OSError) as caught:
            ports.bind(socket.AF_INET, (HERE, port))
    assert caught.value.errno == errno.EADDRINUSE
