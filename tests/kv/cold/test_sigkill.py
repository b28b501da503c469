"""kill -9 in the middle of storing, round after round on one folder, with the oracle outside the store.

Contents follow from the key, so the parent knows what each file must hold without having seen it
written. A round kills the child at a random moment, checks the folder as it lies (the cap holds at
that very instant), reopens it and reads every file of it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kv_fakes import FILE_DISK_BYTES, Rig, bytes_of, bytes_on_disk, chain, files_in, temps_in
from safetensors.numpy import load_file

CAP = 60
CHILD = Path(__file__).parents[2] / "support" / "kv_store_loop.py"
KNOWN = {key.block_hash: key for first in range(40) for key in chain([first, *range(1, 24)])}


def killed_run(root: Path, seed: int, requests: int, seconds: float) -> int:
    """Run the child and kill it `seconds` after its first `requests`. Requests that it finished."""
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(root), str(CAP), str(seed)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CHILD.parent), str(CHILD.parents[2])])},
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        assert child.stdout.read(requests) == b"." * requests
        time.sleep(seconds)
        assert child.poll() is None, "the child ended by itself"
    finally:
        child.send_signal(signal.SIGKILL)
        output = child.stdout.read()
        child.wait()
        child.stdout.close()
    return requests + output.count(b".")


def verify(root: Path) -> int:
    """Check the folder as the kill has left it, then reopened. Files that were whole."""
    assert bytes_on_disk(root) <= CAP * FILE_DISK_BYTES, "over the cap at the moment of the kill"
    whole = [path for path in files_in(root) if path.suffix == ".safetensors"]
    rig = Rig(root, hot=0, cap=CAP)
    assert temps_in(root) == []
    assert {path.name for path in files_in(root)} == {path.name for path in whole}
    for path in whole:
        # Renamed into place, so whole; the store's own check must agree, and so must another reader.
        key = KNOWN[bytes.fromhex(path.stem)]
        assert rig.restore_one(key) == bytes_of(key.block_hash)
        assert len(load_file(path)) == 5
    assert rig.store.stats.corrupt == rig.store.stats.lost == 0
    stats = rig.ledger.stats()
    assert (stats.bytes_used, stats.files) == (bytes_on_disk(root), len(whole))
    rig.drop()
    return len(whole)


def rounds(root: Path, count: int) -> None:
    """`count` rounds, and on a slow disk as many more as it takes that they prove anything."""
    dice = random.Random(count)
    requests = found = number = 0
    while number < count or requests <= count or found <= CAP // 3:
        assert number < 10 * count, "the rounds did too little to prove anything"
        requests += killed_run(root, number, dice.randrange(6), dice.uniform(0, 0.05))
        found = verify(root)
        number += 1


def test_five_kills(tmp_path):
    rounds(tmp_path, 5)


@pytest.mark.slow
def test_a_hundred_kills(tmp_path):
    """Each operation's crash is test_faults.py's."""
    rounds(tmp_path, 100)
