"""A ledger over a temporary folder, and files as engines write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kv_fakes import bytes_on_disk, files_in

from omlxd.kv.ledger.ledger import Ledger

REPO = Path(__file__).resolve().parents[2]
PAGE = 4096


def put(root: Path, path: str, pages: int = 1, mtime: int | None = None) -> tuple[str, int]:
    """Write a file as an engine would; what to tell the ledger."""
    full = root / path
    full.parent.mkdir(parents=True, exist_ok=True)
    full.write_bytes(b"x" * (pages * PAGE))
    if mtime is not None:
        os.utime(full, ns=(mtime, mtime))
    return path, pages * PAGE


NS = "a" * 32


def file_name(number: int) -> str:
    return f"{number:064x}.safetensors"


def name(number: int, namespace: str = NS) -> str:
    return f"{namespace}/{number % 256:02x}/{file_name(number)}"


@pytest.fixture
def ledger(tmp_path: Path):
    ledger = Ledger(tmp_path, 10 * PAGE)
    ledger.open()
    yield ledger
    ledger.close()


def store(ledger: Ledger, number: int, pages: int = 1) -> bool:
    """Reserve, write and settle one file, checking the cap on the way."""
    if not ledger.reserve(pages * PAGE):
        return False
    account(ledger, slack=pages * PAGE)
    ledger.stored([put(ledger.root, name(number), pages)])
    account(ledger)
    return True


def account(ledger: Ledger, slack: int = 0) -> None:
    """The account is what is on disk, and all of it under the cap. `slack`: granted, not written."""
    stats = ledger.stats()
    real = bytes_on_disk(ledger.root)
    assert stats.bytes_used == real and stats.files == len(files_in(ledger.root))
    assert (
        stats.reserved >= slack
        and real + slack <= stats.bytes_used + stats.reserved <= stats.cold_cache_bytes
    )


def numbers(root: Path) -> list[int]:
    return sorted(int(path.stem, 16) for path in files_in(root))
