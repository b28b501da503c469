"""The lines of `omlxd engine`, of any bytes: cut anywhere, and of any meaning."""

from __future__ import annotations

import contextlib
import json
import os

from hypothesis import given
from hypothesis import strategies as st

from omlxd.api.openai import chat_request, completions
from omlxd.errors import InvalidRequest
from omlxd.front.bridge.messages import OPS, decode_request, id_of
from omlxd.front.bridge.pipes import lines_of


@given(
    st.lists(st.binary(max_size=6).map(lambda data: data.replace(b"\0", b"\n")), max_size=30),
    st.integers(0, 8),
)
def test_lines_are_those_of_the_bytes_however_these_are_cut(pieces, limit):
    left, right = os.pipe()
    with open(left, "rb", buffering=4) as source, open(right, "wb", buffering=0) as sink:
        for piece in pieces:
            sink.write(piece)
        sink.close()
        lines = list(lines_of(source, limit))
    whole = b"".join(pieces).split(b"\n")
    if not whole[-1]:
        whole.pop()
    assert lines == [line if len(line) <= limit else None for line in whole]


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("id", "model", "labels", "messages", "prompt", "target", "max_tokens", "type")


@given(
    st.binary(max_size=40)
    | ANY.map(lambda value: json.dumps(value).encode())
    | st.builds(
        lambda op, fields: json.dumps({"op": op, **fields}).encode(),
        st.sampled_from(OPS) | ANY,
        st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=4),
    )
)
def test_whatever_a_line_is_it_is_a_request_or_told_to_be_none(line):
    told = id_of(line)
    try:
        request = decode_request(line)
    except InvalidRequest:
        return
    assert request.id == told
    with contextlib.suppress(InvalidRequest):
        chat_request.parse(line)
    with contextlib.suppress(InvalidRequest):
        completions.parse(line)
