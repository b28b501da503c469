"""What a check found."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["ok", "warn", "bad"]


class Finding(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`told`: what is so. `mend`: one sentence on what to do; "" where nothing need be done.

    warn  it works, less well than it could
    bad   it does not work
    """

    check: str
    verdict: Verdict
    told: str
    mend: str = ""


def ok(check: str, told: str) -> Finding:
    return Finding(check=check, verdict="ok", told=told)


def warn(check: str, told: str, mend: str) -> Finding:
    return Finding(check=check, verdict="warn", told=told, mend=mend)


def bad(check: str, told: str, mend: str) -> Finding:
    return Finding(check=check, verdict="bad", told=told, mend=mend)
