"""Digests of weight files: a changed file under the same name must be another namespace.

A digest is of the whole file: SHA-256 for a blob of a hub snapshot, which the hub named so, and xxh3-128
otherwise. A blob's name is no proof: the file may be damaged, or written anew in place. Each file is read
once and remembered by device, inode, size and both times, so a second load of the same files costs a stat
each. A digest counts only if the file's identity is the same before and after it, and the same as before
the load.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import msgspec
import xxhash

from ...common.files import read_small, write_atomic
from ...kv.peer.versions import AT
from ...models.adapters import ADAPTER_FILES
from ...models.footprint import weight_files

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_CHUNK = 8 * 1024 * 1024
_MEMO = "fingerprints.json"
_SETTLED_S = 2.0
"""A file changed more recently is not remembered: another change within the clock's tick (exFAT: 2 s) has its
times."""
TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer*",
    "vocab.*",
    "*.tiktoken",
)


def file_identities(model: Path, adapter: str = "") -> dict[Path, str]:
    """Identity of every file that decides what the model computes or what a token id means.

    Equal before a load and after the digests: the digests are of what was loaded. Raises OSError.
    """
    files = (*_weight_files(model), *_tokenizer_files(model))
    return {file: _identity(file.stat()) for file in files} | (adapter_identities(adapter) if adapter else {})


def adapter_identities(adapter: str) -> dict[Path, str]:
    """As `file_identities`, of the adapter in folder `adapter` alone."""
    return {file: _identity(file.stat()) for file in _adapter_files(adapter)}


def adapter_fingerprint(adapter: str, memo_dir: Path | None) -> str:
    """Of the adapter in folder `adapter`. Raises OSError as reads do."""
    digests = _fingerprints(_adapter_files(adapter), memo_dir)
    return xxhash.xxh3_128(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def weight_fingerprints(model: Path, memo_dir: Path | None) -> dict[str, str]:
    """File name → digest, of every file that decides what the model computes.

    memo_dir  where digests are remembered, if it is there; None: not remembered. Raises OSError as reads do.
    """
    return _fingerprints(_weight_files(model), memo_dir)


def differing(model: Path, digests: Mapping[str, str], memo_dir: Path | None) -> str:
    """Say which of the model's files have other digests than those, of the lead; "": none.

    Raises OSError as reads do.
    """
    there = {file.name: file for file in _weight_files(model)}
    for name in sorted(digests.keys() ^ there.keys()):
        return f"{name} is {AT if name in there else 'on the lead'} alone"
    # A blob of the hub has a digest of its own kind: theirs say which is asked for.
    blobs = {name for name, digest in digests.items() if _SHA256.fullmatch(digest)}
    own = _fingerprints([*there.values()], memo_dir, blobs)
    for name, digest in sorted(digests.items()):
        if own[name] != digest:
            return f"the digest of {name} is {digest[:16]} on the lead and {own[name][:16]} {AT}"
    return ""


def _fingerprints(
    files: list[Path], memo_dir: Path | None, blobs: Collection[str] | None = None
) -> dict[str, str]:
    """`blobs`: names of those whose digest is a blob's; None: of what are links to one."""
    memo = _read_memo(memo_dir)

    def of(file: Path) -> tuple[str, str]:
        return _digest(file, memo, _is_blob(file) if blobs is None else file.name in blobs)

    with ThreadPoolExecutor(4, thread_name_prefix="fingerprint") as pool:
        results = list(pool.map(of, files))
    _write_memo(memo_dir, memo, {identity: digest for digest, identity in results if identity})
    return {file.name: digest for file, (digest, _) in zip(files, results, strict=True)}


def tokenizer_fingerprint(model: Path) -> bytes:
    """16 bytes, of every file that decides what a token id means. Raises OSError as reads do."""
    state = xxhash.xxh3_128()
    for file in _tokenizer_files(model):
        data = file.read_bytes()
        state.update(f"{file.name} {len(data)}\n".encode())
        state.update(data)
    return state.digest()


def _weight_files(model: Path) -> list[Path]:
    return sorted({*weight_files(model), model / "config.json"})


def _adapter_files(adapter: str) -> list[Path]:
    return [Path(adapter, name) for name in ADAPTER_FILES]


def _tokenizer_files(model: Path) -> list[Path]:
    return sorted({file for pattern in TOKENIZER_FILES for file in model.glob(pattern) if file.is_file()})


def _identity(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _is_blob(file: Path) -> bool:
    return file.is_symlink() and bool(_SHA256.match(os.path.basename(os.readlink(file))))


def _digest(file: Path, memo: dict[str, str], is_blob: bool) -> tuple[str, str]:
    """(digest, key to remember it by; "": not to be remembered)."""
    prefix = "sha256:" if is_blob else ""
    if remembered := memo.get(prefix + _identity(file.stat())):
        return remembered, ""
    state = sha256() if is_blob else xxhash.xxh3_128()
    with open(file, "rb", buffering=0) as stream:
        before = os.fstat(stream.fileno())
        while chunk := stream.read(_CHUNK):
            state.update(chunk)
        after = os.fstat(stream.fileno())
    now = time.time()  # Times may be ahead of it: another machine's, or the clock was put back.
    settled = all(abs(now - changed) > _SETTLED_S for changed in (before.st_mtime, before.st_ctime))
    same = _identity(before) == _identity(after)
    return state.hexdigest(), prefix + _identity(before) if settled and same else ""


def _read_memo(folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    with contextlib.suppress(OSError, ValueError):
        return msgspec.json.decode(read_small(folder / _MEMO), type=dict[str, str])
    return {}


def _write_memo(folder: Path | None, memo: dict[str, str], fresh: dict[str, str]) -> None:
    if folder is None or not fresh:
        return
    with contextlib.suppress(OSError):  # A folder that has gone is not made anew.
        write_atomic(folder / _MEMO, json.dumps({**memo, **fresh}).encode())
