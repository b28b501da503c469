"""Break the code in forty small ways, one at a time, and count how many of them the tests notice.

    python tools/mutants.py [--only ROOM …] [--slow] [--details]

Each mutant changes one place of kv, kvio, schedule, cache or output in a copy of the checkout. The tests of
that room run there up to the first failure: the fast ones, and with `--slow` the slow ones of a mutant that
those let live. A suite that changes is as good as before if as many mutants die.

Exit status: 0, also where some live; 2 where the code has none of a mutant's text, which then wants another.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parents[1]
MOST_S = 1800.0
"""Seconds that a room's tests may take before a mutant counts as one that hangs."""
NONE_COLLECTED = 5
"""pytest's exit status where no test has the mark."""
TESTS = {
    "kv": ("tests/kv",),
    "kvio": (
        "tests/engine/kvio",
        "tests/engine/test_shared_prefix.py",
        "tests/engine/schedule/test_prefill.py",
    ),
    "schedule": ("tests/engine/schedule",),
    "cache": (
        "tests/engine/mlx_adapter/test_mlx_adapter.py",
        "tests/engine/mlx_adapter/test_own_rows.py",
        "tests/engine/schedule/test_speculation.py",
        "tests/engine/test_family_matrix.py",
    ),
    "output": ("tests/engine/output", "tests/engine/test_vllm_limits.py"),
}
"""Room → the tests that should notice."""


class Mutant(NamedTuple):
    """`old`, which stands once in the file below omlxd/, becomes `new`."""

    room: str
    file: str
    old: str
    new: str


_POOL, _STORE, _ORDER = "kv/block_pool.py", "kv/store.py", "kv/ledger/eviction_order.py"
_BUDGET, _FLUSHER, _WRITER = "kv/ledger/write_budget.py", "kv/cold/flusher.py", "kv/cold/writer.py"
_BRIDGE, _STATES = "engine/kvio/bridge.py", "engine/kvio/checkpointer.py"
_SCHEDULER, _PREFILL = "engine/schedule/scheduler.py", "engine/schedule/prefill.py"
_KINDS, _BATCH = "engine/mlx_adapter/cache/kinds.py", "engine/mlx_adapter/cache/batch.py"
_HELD, _PARSER = "engine/output/held_text.py", "engine/output/parser.py"

MUTANTS = (
    Mutant("kv", _POOL, "for block in reversed(blocks):", "for block in blocks:"),
    Mutant("kv", _POOL, "and owner.payload is None:", "and owner is block:"),
    Mutant("kv", _POOL, "if not block.on_disk and block.payload", "if block.payload"),
    Mutant(
        "kv",
        _STORE,
        "self.record_use(hashes[: start + added])",
        "self.record_use(hashes[start : start + added])",
    ),
    Mutant("kv", _STORE, "self.flusher.unwritten.pop(key.block_hash)", "pass"),
    Mutant("kv", _STORE, "None, block.payload.nbytes, due=True)", "None, block.payload.nbytes, due=False)"),
    Mutant("kv", _STORE, "if block.block_hash != block_hash or block.payload", "if block.payload"),
    Mutant("kv", _STORE, "in names.items() if not had_file])", "in names.items()])"),
    Mutant("kv", "kv/hashing.py", "digest = sha256(parent)", "digest = sha256(root)"),
    Mutant("kv", _ORDER, "files.move_to_end(path)", "pass"),
    Mutant("kv", _ORDER, "if head != stamp:", "if head < stamp:"),
    Mutant("kv", _BUDGET, "self._spent + nbytes > self.limit:", "self._spent + nbytes >= self.limit:"),
    Mutant("kv", _BUDGET, "self._spent = max(self._spent, saved.bytes)", "self._spent = saved.bytes"),
    Mutant(
        "kv", "kv/files/block_file.py", "if bytes(header) != self.header(key, digest):", "if not any(header):"
    ),
    Mutant("kv", _FLUSHER, "if noted is None or not noted[1]:", "if noted is None:"),
    Mutant(
        "kv", _FLUSHER, "if owner is not None and in_place:", "if owner is block is not None and in_place:"
    ),
    Mutant("kv", _WRITER, "self._waiting[0][0] < oldest", "self._waiting[0][0] <= oldest"),
    Mutant("kv", _WRITER, "if self.queued_bytes and self.queued_bytes +", "if self.queued_bytes +"),
    Mutant(
        "kv", _WRITER, "is kept with it.\n", "is kept with it.\n            self._lease.give_back(nbytes)\n"
    ),
    Mutant(
        "kvio", _BRIDGE, "len(sequence.tokens) - 1) // self._block", "len(sequence.tokens)) // self._block"
    ),
    Mutant("kvio", _BRIDGE, "[0] * self._block >= len(", "[0] * self._block > len("),
    Mutant(
        "kvio", _BRIDGE, "sequence.kv.restores >= MOST_RESTORES:", "sequence.kv.restores > MOST_RESTORES:"
    ),
    Mutant("kvio", _BRIDGE, "sequence.stats.restored_hot -= cold", "pass"),
    Mutant("kvio", _BRIDGE, "            if not fine\n", "            if fine\n"),
    Mutant("kvio", _STATES, "(held is not None and held[0] == blocks)", "held is not None"),
    Mutant("kvio", _STATES, "self._put(sequence, write=True)", "self._put(sequence, write=False)"),
    Mutant(
        "schedule",
        _SCHEDULER,
        "sequence.generated >= sequence.sampling.max_new",
        "sequence.generated > sequence.sampling.max_new",
    ),
    Mutant("schedule", "engine/schedule/counts.py", "        sequence.kv.stored.clear()\n", ""),
    Mutant(
        "schedule",
        _SCHEDULER,
        "if sequence.state is State.RESTORING or sequence in self",
        "if sequence in self",
    ),
    Mutant("schedule", _PREFILL, "        if start >= last:\n", "        if start > last:\n"),
    Mutant("schedule", _PREFILL, "return (start // size + 1) * size", "return start + size"),
    Mutant("schedule", _PREFILL, "sequence.stats.overtaken += min(less, self.largest)", "pass"),
    Mutant(
        "schedule",
        "engine/schedule/decode_batch.py",
        "drawn[index] != guess or guess in ends:",
        "drawn[index] != guess:",
    ),
    Mutant("cache", _KINDS, "    cache.offset -= tokens\n    cache._idx = left", "    cache._idx = left"),
    Mutant("cache", _KINDS, "length = min(cache.offset, cache.max_size)", "length = cache.max_size"),
    Mutant("cache", _BATCH, "(columns >= self.left_padding", "(columns > self.left_padding"),
    Mutant(
        "cache",
        _BATCH,
        "        self._set_starts(starts)\n        self._set_ends(ends)\n",
        "        self._set_ends(ends)\n",
    ),
    Mutant("output", _HELD, "text[: end if self._shown else at]", "text[:at]"),
    Mutant("output", _HELD, "shown, self._held = self._held + kept,", "shown, self._held = kept,"),
    Mutant(
        "output",
        _PARSER,
        'self._splitter.finish(ended=reason != "length")',
        "self._splitter.finish(ended=True)",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", metavar="ROOM", nargs="+", choices=sorted(TESTS), help="mutants of these rooms"
    )
    parser.add_argument(
        "--slow", action="store_true", help="slow tests, too, where the fast ones notice nothing"
    )
    parser.add_argument("--details", action="store_true", help="print what noticed each mutant")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copy_of(Path(folder))
        if stale := [m for m in MUTANTS if (copy / "omlxd" / m.file).read_text().count(m.old) != 1]:
            print(*(f"stale: {m.file}: {m.old!r}" for m in stale), sep="\n")
            return 2
        dead = tried = 0
        for number, mutant in enumerate(MUTANTS, 1):
            if args.only and mutant.room not in args.only:
                continue
            began = time.monotonic()
            noticed = run(copy, mutant, slow=args.slow)
            tried, dead = tried + 1, dead + bool(noticed)
            what = "dies " if noticed else "LIVES"
            took, change = time.monotonic() - began, mutant.new.strip()[:60]
            print(f"{number:3} {what} {took:5.0f} s  {mutant.file}: {change!r}", flush=True)
            if args.details and noticed:
                print(f"      {noticed}", flush=True)
    print(f"{dead} of {tried} die")
    return 0


def copy_of(folder: Path) -> Path:
    """The checkout's files as git has them, with changes that are not committed."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=HERE, capture_output=True, check=True, text=True
    ).stdout
    for name in names.split("\0"):
        if (HERE / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(HERE / name, folder / name)
    return folder


def run(copy: Path, mutant: Mutant, *, slow: bool) -> str:
    """The first test that notices `mutant`; "" if none does."""
    path = copy / "omlxd" / mutant.file
    source = path.read_text()
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        for marked in ("not slow", "slow") if slow else ("not slow",):
            if noticed := fails(copy, marked, TESTS[mutant.room]):
                return noticed
        return ""
    finally:
        path.write_text(source)


def fails(copy: Path, marked: str, tests: Sequence[str]) -> str:
    """The first test of `tests` that fails in `copy`; "" where none does."""
    variables = {**os.environ, "PYTHONPATH": str(copy)}  # Daemons that tests start import the copy as well.
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-m", marked, *tests]
    try:
        done = subprocess.run(
            command, cwd=copy, env=variables, capture_output=True, text=True, timeout=MOST_S
        )
    except subprocess.TimeoutExpired:
        return "it hangs"
    if done.returncode in (0, NONE_COLLECTED):
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"exit {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
