"""Digests of weight files: a changed file under the same name must be another namespace.

A digest is of the whole file (xxh3-128). Files of a hub snapshot are links to blobs that the hub
named by their SHA-256, which is taken as it is. Others are read once and remembered by device,
inode, size and both times, so a second load of the same files costs a stat each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_CHUNK = 8 * 1024 * 1024
_MEMO = "fingerprints.json"
TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer*",
    "vocab.*",
    "*.tiktoken",
)


def weight_fingerprints(model: Path, memo_dir: Path | None) -> dict[str, str]:
    """File name → digest, of every file that decides what the model computes.

    memo_dir  where digests are remembered; None: not remembered. Raises OSError as reads do.
    """
    files = sorted({*model.glob("*.safetensors"), model / "config.json"})
    memo = _read_memo(memo_dir)
    with ThreadPoolExecutor(4, thread_name_prefix="fingerprint") as pool:
        digests = dict(zip(files, pool.map(lambda file: _digest(file, memo), files), strict=True))
    _write_memo(memo_dir, memo, [(_identity(file), digest) for file, digest in digests.items()])
    return {file.name: digest for file, digest in digests.items()}


def tokenizer_fingerprint(model: Path) -> bytes:
    """16 bytes, of every file that decides what a token id means. Raises OSError as reads do."""
    state = xxhash.xxh3_128()
    files = {file for pattern in TOKENIZER_FILES for file in model.glob(pattern) if file.is_file()}
    for file in sorted(files):
        data = file.read_bytes()
        state.update(f"{file.name} {len(data)}\n".encode())
        state.update(data)
    return state.digest()


def _identity(file: Path) -> str:
    stat = file.stat()
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _digest(file: Path, memo: dict[str, str]) -> str:
    if file.is_symlink():
        blob = os.path.basename(os.readlink(file))
        if _SHA256.match(blob):
            return blob
    if known := memo.get(_identity(file)):
        return known
    state = xxhash.xxh3_128()
    with open(file, "rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def _read_memo(folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    with contextlib.suppress(OSError, ValueError):
        memo = json.loads((folder / _MEMO).read_text())
        if isinstance(memo, dict):
            return {str(k): str(v) for k, v in memo.items()}
    return {}


def _write_memo(folder: Path | None, memo: dict[str, str], found: Iterable[tuple[str, str]]) -> None:
    fresh = dict(found)
    if folder is None or fresh.items() <= memo.items():
        return
    temp = folder / f"{_MEMO}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        temp.write_text(json.dumps({**memo, **fresh}))
        temp.replace(folder / _MEMO)
