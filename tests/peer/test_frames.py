"""Frames arrive in pieces, cut off or as nonsense: a message or a PeerError, never more than allowed."""

from __future__ import annotations

import contextlib
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.kv.peer.frames import (
    Channel,
    Found,
    Look,
    Piece,
    Read,
    Refused,
    ToClient,
    ToServer,
    encode,
    read_frame,
)
from omlxd.kv.peer.identity import PeerError

names = st.binary(min_size=32, max_size=32)
asked = st.one_of(
    st.builds(Read, names, st.tuples(names)),
    st.builds(Look, names, st.lists(names, max_size=5).map(tuple), st.text(max_size=9)),
)
answers = st.one_of(
    st.builds(Found, st.binary(max_size=9), st.text(max_size=9)),
    st.builds(Piece, st.integers(0, 2**40)),
    st.builds(Refused, st.text(max_size=9)),
)


class Source:
    def __init__(self, data: bytes):
        self.left = data

    def __call__(self, nbytes: int) -> bytes:
        if nbytes > len(self.left):
            raise PeerError("it ended the connection")
        data, self.left = self.left[:nbytes], self.left[nbytes:]
        return data


@given(st.lists(asked, max_size=4), st.lists(answers, max_size=4))
def test_what_was_sent_is_read(questions: list, replies: list):
    for messages, type in ((questions, ToServer), (replies, ToClient)):
        source = Source(b"".join(map(encode, messages)))
        assert [read_frame(source, type) for _ in messages] == messages and not source.left


@given(asked, st.data())
def test_nonsense_and_half_frames_are_an_error_and_no_crash(message, data: st.DataObject):
    frame = encode(message)
    cut = frame[: data.draw(st.integers(0, len(frame) - 1))]
    with pytest.raises(PeerError):
        read_frame(Source(cut), ToServer)
    at, flip = data.draw(st.integers(0, len(frame) - 1)), data.draw(st.integers(1, 255))
    bad = frame[:at] + bytes([frame[at] ^ flip]) + frame[at + 1 :]
    for wrong in (bad, data.draw(st.binary(max_size=64))):
        with contextlib.suppress(PeerError):
            read_frame(Source(wrong), ToServer, most=len(frame))


def test_a_long_frame_is_refused_before_it_is_read():
    source = Source((1 << 31).to_bytes(4, "little"))
    with pytest.raises(PeerError, match="frame of 2147483648 bytes"):
        read_frame(source, ToServer, most=100)


def test_a_channel_ends_at_its_deadline_and_at_the_end():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours, 60.0)
        theirs.sendall(encode(Piece(1))[:5])
        channel.deadline = 0.0
        with pytest.raises(TimeoutError):
            channel.receive(ToClient)
        channel.deadline = float("inf")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerError, match="ended"):
            channel.receive(ToClient)
