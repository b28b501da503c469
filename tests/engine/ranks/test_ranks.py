"""A daemon whose model several processes of this machine share, by MLX's ring over loopback.

Tokens are those of a cold run of the same split, whatever of the prompt comes from where, and whichever rank
was killed or stopped before.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pretend_metal
import psutil
import pytest
from cold_files import shares_on_disk, wait_for_shares
from daemon import Daemon, alive, body, family_model, own_usage, prose, restored, wait_until

from omlxd.cli.cache.listing.tree import Heads, files_below, pieces
from omlxd.cli.daemon.owner_api import DaemonStatus
from omlxd.cli.main import main
from omlxd.cli.watch.status import as_text

pytestmark = pytest.mark.slow

PROMPT, LONGER = prose(60, seed=3), prose(60, seed=3) + prose(40, seed=9)
COMPANY = [prose(20 + 20 * number, seed=number + 40) for number in range(4)]
CAP = 2_000_000


class Ranks(Daemon):
    by_heads: int = 0
    """Ranks that have the same names of files: of a split by layers, some have no KV."""

    def settled(self) -> None:
        Daemon.settled(self)
        if self.by_heads:
            wait_for_shares(self.by_heads, self.cache)

    def pids(self) -> list[int]:
        """Of rank 0 and the others, in no order of these."""
        lead = psutil.Process(self.engine_pid())
        return [lead.pid, *(each.pid for each in lead.children() if "--follow" in each.cmdline())]

    def text(self, prompt: str, max_tokens: int = 12, **more: object) -> tuple[str, int]:
        """(a greedy answer, tokens of its prompt that were restored)."""
        answer = self.chat(prompt, max_tokens=max_tokens, ignore_eos=True, **more)
        message = answer["choices"][0]["message"]
        return f"{message.get('reasoning_content')}{message['content']}", restored(own_usage(answer))

    def told(self) -> str:
        """What `omlxd status` prints."""
        return as_text(
            msgspec.json.decode(self.http.get("/omlxd/status").content, type=DaemonStatus), self.url
        )

    def company(self) -> list[tuple[str, int]]:
        """`text` of COMPANY, asked at once beside one that is broken off, each of other length."""
        asked = body(self.model, "Go on.", max_tokens=400, ignore_eos=True)
        with ThreadPoolExecutor(len(COMPANY)) as threads:
            with self.stream("/v1/chat/completions", asked) as first:
                lines = first.iter_lines()
                next(lines)
                answers = [
                    threads.submit(self.text, prompt, 40 + 12 * number, cache_salt="company")
                    for number, prompt in enumerate(COMPANY)
                ]
                for _ in zip(range(30), lines, strict=False):
                    pass
            return [answer.result() for answer in answers]

    def lose(self, number: int, how: signal.Signals) -> None:
        """End or stop a rank; wait until all have ended. The next request starts them again."""
        before = [psutil.Process(pid) for pid in self.pids()]
        os.kill(before[number].pid, how)
        wait_until(lambda: not any(map(alive, before)), why=self.logged)


@contextlib.contextmanager
def serving(
    home: Path, family: str, ranks: int = 2, cap: int = CAP, env: dict[str, str] | None = None
) -> Iterator[Ranks]:
    flags = ("--ranks", str(ranks), "--paged-ssd-cache-max-size", str(cap))
    with Ranks(home, *flags, model=family_model(family), env=env) as daemon:
        daemon.by_heads = ranks if family != "qwen3_next" else 0
        yield daemon


def cache_files(daemon: Ranks) -> list[Path]:
    return [*daemon.cache.rglob("*.safetensors")]


@pytest.mark.parametrize(("family", "killed"), [("llama", (1, 0)), ("qwen3_5", (1,)), ("qwen3_moe", (0,))])
def test_hits_give_the_tokens_of_a_cold_run(family: str, killed: tuple[int, ...], tmp_path: Path):
    with serving(tmp_path, family, cap=5 * CAP) as daemon:
        first, hit = daemon.text(PROMPT)
        assert hit == 0
        longer, hit = daemon.text(LONGER, cache_salt="another's")
        assert hit == 0
        again, hit = daemon.text(PROMPT)
        assert (again, hit > 0) == (first, True)  # From RAM.
        again, hit = daemon.text(LONGER)
        assert (again, hit > 0) == (longer, True)  # What both begin with.
        alone = [daemon.text(prompt, 40 + 12 * number)[0] for number, prompt in enumerate(COMPANY)]
        assert [text for text, _ in daemon.company()] == alone
        before = daemon.figures()
        again = daemon.company()
        after = daemon.figures()
        tokens, steps = (
            after[name] - before[name] for name in ("generation_tokens_total", "decode_steps_total")
        )
        assert steps < 0.8 * tokens, "rows have a pass each"
        assert [text for text, _ in again] == alone and all(hit for _, hit in again)
        for number in killed:
            daemon.settled()
            daemon.lose(number, signal.SIGKILL)
            again, hit = daemon.text(LONGER)
            assert (again, hit > 0) == (longer, True)  # From each rank's files.
            again, hit = daemon.text(PROMPT)
            assert (again, hit > 0) == (first, True)
        again = daemon.company()
        assert [text for text, _ in again] == alone and all(hit for _, hit in again)
        daemon.settled()
        assert sum(file.stat().st_size for file in cache_files(daemon)) <= 5 * CAP
        figures = daemon.figures()
        assert figures["ranks"] == 2 and figures["kv_hot_bytes"] > 0
        assert daemon.post("/omlxd/memory", {"trim": True}).status_code == 200
        wait_until(lambda: daemon.figure("kv_hot_bytes") == 0, why=daemon.logged)  # Of both.
        labels = {"model": daemon.model, "input": "Is it so?", "labels": ["yes", "no"]}
        assert "Several ranks share this model" in daemon.post("/v1/classify", labels).text


def test_a_rank_without_its_files_makes_a_miss(tmp_path: Path):
    """Three ranks with some layers each; their folders have nothing in common but names of blocks."""
    with serving(tmp_path, "qwen3_next", ranks=3) as daemon:
        first, _ = daemon.text(PROMPT)
        assert daemon.text(PROMPT)[1] > 0
        daemon.settled()
        folders = {file.parents[1] for file in cache_files(daemon)}
        assert len(folders) == 3
        # A stopped rank ends all: others by rank 0's watch, rank 0 by another's.
        daemon.lose(2, signal.SIGSTOP)
        shutil.rmtree(sorted(folders)[1])
        assert daemon.text(PROMPT) == (first, 0)
        again, hit = daemon.text(PROMPT)
        assert (again, hit > 0) == (first, True)
        daemon.lose(0, signal.SIGSTOP)


def test_under_a_small_cap_ranks_keep_the_same(tmp_path: Path):
    """Far more is written than the cap; what was used last is a hit on all of them after a restart."""
    with serving(tmp_path, "llama", cap=1_000_000) as daemon:
        first, _ = daemon.text(PROMPT)
        for seed in range(9):
            daemon.text(prose(60, seed=seed + 20))
            daemon.settled()
            assert sum(file.stat().st_size for file in cache_files(daemon)) <= 1_000_000
            if seed % 3 == 2:
                assert daemon.text(PROMPT)[0] == first
        daemon.settled()
        assert daemon.http.get("/omlxd/status").json()["cold"]["evicted_files"] > 10
        one, other = shares_on_disk(daemon.cache)
        assert one == other
        daemon.lose(1, signal.SIGKILL)
        again, hit = daemon.text(PROMPT)
        assert (again, hit > 100) == (first, True)


FULL_DISK = """
import errno, os, sys

if "omlxd.engine" in sys.orig_argv:
    import omlxd.kv.cold.health

    omlxd.kv.cold.health.PAUSE_S = 0.5
if "--follow" in sys.orig_argv:
    def writev(fd, buffers, write=os.writev):
        if os.path.exists({full!r}):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, buffers)

    os.writev = writev
"""


def test_the_disk_of_one_rank_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It keeps what its RAM holds, and no rank stores what is a hit on none; then all store it."""
    full = tmp_path / "full"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(FULL_DISK.format(full=f"{full}"))
    path = f"{tmp_path / 'code'}:{pretend_metal.code_path()}"
    with serving(tmp_path, "llama", env={"PYTHONPATH": path}) as daemon:
        first, _ = daemon.text(PROMPT)
        daemon.settled()
        before, _ = shares_on_disk(daemon.cache)
        full.touch()
        texts = [daemon.text(prose(60, seed=seed))[0] for seed in (5, 6)]
        wait_until(lambda: "the disk of rank 1 of " in daemon.told(), why=daemon.logged)
        assert (
            len(
                re.findall(
                    r": rank [01] is process \d+: .* SSD .* [kM]B(; its disk is FULL)?\n", daemon.told()
                )
            )
            == 2
        )
        assert re.search(
            r": between ranks: the \d+ exchanges of a step take \S+ ms alone, \d+% of its time; "
            r"one takes [\d,]+ µs, and a large one [\d.]+ [kMG]B/s\n",
            daemon.told(),
        )
        held = re.findall(r'omlxd_rank_(\w+){\S+rank="([01])"} ([\d.e+]+)', daemon.metrics())
        assert {rank: float(value) for name, rank, value in held if name == "kv_cold_disk_full"} == {
            "0": 0,
            "1": 1,
        }
        assert all(
            float(value) > 0 for name, _, value in held if name in ("pid", "resident_bytes", "cold_bytes")
        )
        again, hit = daemon.text(PROMPT)
        assert (again, hit > 0) == (first, True)
        again, hit = daemon.text(prose(60, seed=6))
        assert (again, hit > 0) == (texts[1], True)  # From RAM.
        full.unlink()
        daemon.settled()
        one, other = shares_on_disk(daemon.cache)
        assert one == other > before
        daemon.lose(0, signal.SIGKILL)
        again, hit = daemon.text(prose(60, seed=5))
        assert (again, hit > 0) == (texts[0], True)
        daemon.settled()
    check_the_cache(tmp_path, len(one), capsys)


def check_the_cache(home: Path, blocks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A prefix is listed once, whatever the ranks; an export carries the shares of all."""
    root = home / "omlxd" / "cache"
    (listed,) = msgspec.json.decode(told("stats", "--json", root=root, capsys=capsys))["namespaces"]
    assert (listed["ranks"], listed["token_blocks"]) == (2, blocks)
    assert " on 2 ranks " in told("stats", root=root, capsys=capsys)
    assert " bad" not in told("check", root=root, capsys=capsys)
    heads = Heads(root)
    (tree,) = [each for piece in pieces(heads) for each in piece.trees]
    assert sum(node.blocks for node in tree.nodes) == blocks
    assert sum(node.bytes for node in tree.nodes) + tree.other_bytes == listed["bytes"]
    below = [*files_below(heads, tree.namespace, tree.nodes[0].id)]
    assert len({path.partition("/")[0] for path in below}) == 2
    told("export", tree.model, str(home / "all.tar"), root=root, capsys=capsys)
    told("import", str(home / "all.tar"), root=home / "other", capsys=capsys)
    files = [{*(path.relative_to(at) for path in at.rglob("*.safetensors"))} for at in (root, home / "other")]
    assert files[0] == files[1]


def told(*words: str, root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `omlxd cache …` prints."""
    capsys.readouterr()
    assert main(["cache", *words, "--paged-ssd-cache-dir", str(root)]) == 0
    return capsys.readouterr().out
