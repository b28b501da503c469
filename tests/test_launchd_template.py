"""The LaunchAgent template: well formed, of documented keys and types, slower to kill than we are to stop."""

from __future__ import annotations

import plistlib
from pathlib import Path

from omlxd.front import pool, serve

TEMPLATE = Path(__file__).resolve().parents[1] / "launchd" / "dev.omlxd.serve.plist"

DOCUMENTED = {  # launchd.plist(5)
    "Label": str,
    "ProgramArguments": list,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "SoftResourceLimits": dict,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}


def test_keys_and_types_are_launchds():
    agent = plistlib.loads(TEMPLATE.read_bytes())
    assert {key: type(value) for key, value in agent.items()} == DOCUMENTED
    assert agent["Label"] == TEMPLATE.stem
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ProcessType"] == "Interactive"


def test_launchd_waits_longer_than_we_take_to_stop():
    agent = plistlib.loads(TEMPLATE.read_bytes())
    ours = pool.DRAIN_S + pool.FLUSH_S + 2 * serve.END_S
    assert ours < agent["ExitTimeOut"]
