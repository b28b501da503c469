"""Which errors say that asking again helps, at every door."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from omlxd.api.errors import Protocol, http_error, protocol_of
from omlxd.chat import ErrorCode
from omlxd.errors import MOST_CHARS, ModelError, OmlxdError, bad_field

DOORS = [
    "/v1/messages",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/api/chat",
    "/v1beta/models/m:generateContent",
]
ASKED_AGAIN = {408, 409, 429}
"""By the SDKs of OpenAI and Anthropic, and from 500 on."""


@pytest.mark.parametrize("code", get_args(ErrorCode))
@pytest.mark.parametrize("door", DOORS)
def test_an_error_is_asked_again_after_if_that_helps(door: str, code: Any):
    protocol: Protocol = protocol_of(door)
    answer = http_error(OmlxdError("why", code=code), protocol, "req_1")
    headers = dict(answer.headers)
    helps = code in ("overloaded", "unavailable")
    assert ("retry-after" in headers) == helps
    if code != "internal":
        assert (answer.status >= 500 or answer.status in ASKED_AGAIN) == helps
    assert b"why" in answer.body
    assert not helps or "x-should-retry" not in headers


@pytest.mark.parametrize("door", DOORS)
def test_a_model_that_can_never_load_is_not_asked_for_again(door: str):
    error = ModelError("m can't be loaded: config.json names an unknown model_type", param="model")
    for each in (error, OmlxdError.from_event(error.as_event())):
        answer = http_error(each, protocol_of(door), "req_1")
        headers = dict(answer.headers)
        assert answer.status == 400 and headers["x-should-retry"] == "false" and "retry-after" not in headers
        assert b"unknown model_type" in answer.body


@pytest.mark.parametrize("door", DOORS)
def test_no_error_carries_megabytes(door: str):
    """A template may quote the whole conversation, a library a whole file."""
    for error in (bad_field("messages", "x" * (50 << 20)), ModelError("\x00" * (50 << 20))):
        answer = http_error(error, protocol_of(door), "req_1")
        assert len(answer.body) < 7 * MOST_CHARS
        assert len(error.as_event().message) <= MOST_CHARS and error.message.endswith("…")
        assert msgspec.json.decode(answer.body)["error"]
