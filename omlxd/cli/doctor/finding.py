"""The result of a check."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["ok", "warn", "bad"]


class Finding(msgspec.Struct, kw_only=True, omit_defaults=True, rename={"text": "told"}):
    """A result. `text`: the fact. `mend`: one sentence on what to do; "" where nothing need be done.

    warn  it works, less well than it could
    bad   it does not work
    """

    check: str
    verdict: Verdict
    text: str
    mend: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check=check, verdict="ok", text=text)


def warn(check: str, text: str, mend: str) -> Finding:
    return Finding(check=check, verdict="warn", text=text, mend=mend)


def bad(check: str, text: str, mend: str) -> Finding:
    return Finding(check=check, verdict="bad", text=text, mend=mend)
