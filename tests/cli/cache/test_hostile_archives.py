"""`omlxd cache import` of archives made to harm: they end, take no memory, and pass no limit."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_folder import Cache
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_fakes import NAMESPACE

from omlxd.cli.cache import command
from omlxd.cli.cache.transfer.archive import MOST_BAD, MOST_BYTES, MOST_NAMESPACES, take_archive
from omlxd.cli.daemon.owner_api import Imported
from omlxd.errors import InvalidRequest
from omlxd.kv.files.paths import LOCK_NAME, PAGE, disk_bytes

DESCRIPTION = f"{NAMESPACE.hex()[:32]}/namespace.json"
BLOCK = f"{NAMESPACE.hex()[:32]}/00/{0:064x}.safetensors"
HUGE = 10**15


class Reads(io.RawIOBase):
    """`data` as a pipe gives it. Counts reads behind its end: a loop over a claimed size makes as many."""

    def __init__(self, data: bytes):
        self._data, self.empty = io.BytesIO(data), 0

    def read(self, size: int = -1) -> bytes:
        piece = self._data.read(size)
        self.empty += not piece
        assert self.empty <= MOST_BYTES / 10_240 + 10, "it reads on and on"
        return piece


class Account:
    """Room for `most` bytes. `peak`: the most that were taken at once."""

    def __init__(self, most: int = 60 << 20):
        self.left = self.most = most
        self.peak = 0
        self.files: dict[str, int] = {}

    def reserve(self, nbytes: int) -> bool:
        if nbytes > self.left:
            return False
        self.left -= nbytes
        self.peak = max(self.peak, self.most - self.left)
        return True

    def stored(self, path: str, nbytes: int) -> None:
        self.files[path] = nbytes

    def released(self, nbytes: int) -> None:
        self.left += nbytes


def take(data: bytes, root: Path, account: Account | None = None) -> Imported:
    root.mkdir(exist_ok=True)
    (root / LOCK_NAME).touch()
    return take_archive(Reads(data), root, account or Account())  # type: ignore[arg-type]


def on_disk(root: Path) -> int:
    return sum(disk_bytes(path.stat().st_size) for path in root.rglob("*") if path.is_file())


def tar(*members: tuple[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


def header(kind: bytes, size: int, name: str = "x") -> bytes:
    """A header alone. Sizes that do not fit into octal digits are base-256, as GNU tar has them."""
    member = tarfile.TarInfo(name)
    made = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    made[156:157] = kind
    made[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    made[148:156] = b" " * 8
    made[148:156] = f"{sum(made[:512]):06o}\0 ".encode()
    return bytes(made[:512])


def pax(fields: dict[str, str], kind: bytes = tarfile.XHDTYPE) -> bytes:
    text = b""
    for name, value in fields.items():
        body = f" {name}={value}\n".encode()
        length = len(body)
        while len(f"{length}".encode()) + len(body) != length:
            length = len(f"{length}".encode()) + len(body)
        text += f"{length}".encode() + body
    return header(kind, len(text)) + text + bytes(-len(text) % 512)


KINDS = [
    *(tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE),
    *(tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, tarfile.XHDTYPE, tarfile.XGLTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.GNUTYPE_SPARSE, tarfile.SOLARIS_XHDTYPE),
    b"Z",
]


@pytest.mark.parametrize("size", [HUGE, 1 << 62, MOST_BYTES + 1, -512, -(1 << 40)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_size_that_no_file_has_ends_the_import(tmp_path: Path, kind: bytes, size: int):
    for before in (b"", tar((DESCRIPTION, b"{}"))[:1024]):
        with pytest.raises(InvalidRequest, match=r"no export of omlxd|cut off or damaged"):
            take(before + header(kind, size, BLOCK) + bytes(4096), tmp_path)
    assert not on_disk(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"size": str(HUGE)},
        {"size": "-1024"},
        {"size": str(MOST_BYTES + 1)},
        {"GNU.sparse.map": "0,1" * 20, "GNU.sparse.size": str(HUGE)},
        {"GNU.sparse.size": str(HUGE), "GNU.sparse.numblocks": "3"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(HUGE)},
    ],
    ids=lambda fields: "-".join(fields),
)
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE])
def test_a_size_of_a_pax_header_is_one_too(tmp_path: Path, fields: dict[str, str], kind: bytes):
    with pytest.raises(InvalidRequest):
        take(pax({"path": BLOCK, **fields}, kind) + header(tarfile.REGTYPE, 512) + bytes(8192), tmp_path)
    assert not on_disk(tmp_path)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_headers_end(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    """In any order, with any claims. `Reads` ends what goes on for ever."""
    sizes = st.one_of(st.integers(-(1 << 60), 1 << 60), st.integers(0, 5000))
    kinds, names = st.sampled_from(KINDS), st.sampled_from([BLOCK, DESCRIPTION, "x"])
    keys = st.sampled_from(["size", "path", "mtime", "GNU.sparse.map", "GNU.sparse.size", "hdrcharset"])
    values = st.one_of(sizes.map(str), st.sampled_from(["nan", "1e999", "x", "BINARY"]))
    part = st.one_of(
        st.builds(header, kinds, sizes, names),
        st.builds(pax, st.dictionaries(keys, values, max_size=3), kinds),
        st.binary(max_size=600),
        st.just(bytes(512)),
    )
    root = tmp_path_factory.mktemp("import")
    with contextlib.suppress(InvalidRequest):
        take(b"".join(data.draw(st.lists(part, max_size=8))), root)
    assert not on_disk(root)


def archive_of(tmp_path: Path) -> tuple[dict[str, bytes], bytes]:
    """(the files of an export, the archive)."""
    cache, file = Cache(tmp_path / "made", tmp_path / "model"), tmp_path / "kv.tar"
    words = ["export", str(file), "--model", "org/tiny", "--paged-ssd-cache-dir", str(cache.root)]
    assert command.main(words, argparse.ArgumentParser()) == 0
    with tarfile.open(file) as archive:
        files = {each.name: archive.extractfile(each).read() for each in archive}  # type: ignore[union-attr]
    return files, file.read_bytes()


def test_every_byte_is_reserved_and_the_limit_holds(tmp_path: Path):
    _, data = archive_of(tmp_path)
    whole = Account()
    assert take(data, tmp_path / "a", whole).taken == len(whole.files) > 3
    assert on_disk(tmp_path / "a") == sum(whole.files.values()) + PAGE  # The description's.
    assert whole.peak >= sum(whole.files.values()) == whole.most - whole.left
    small = Account(3 * PAGE + sum(whole.files.values()) // 2)
    done = take(data, tmp_path / "b", small)
    assert done.full and done.taken and on_disk(tmp_path / "b") <= small.most + PAGE


def test_descriptions_take_a_page_each_and_come_with_a_file(tmp_path: Path):
    files, _ = archive_of(tmp_path)
    name = next(name for name in files if name.endswith("namespace.json"))
    blocks = [(path, data) for path, data in files.items() if path != name]
    text = files[name].decode()
    copies = '{"model_id": "m", "model_path": "/%d", "adapter": ""}'
    many = text.replace(
        '"copies": [', '"copies": [' + ", ".join(copies % each for each in range(200)) + ", "
    ).encode()
    assert many != files[name] and len(many) > PAGE
    assert take(tar((name, many), *blocks), tmp_path / "a").taken == len(blocks)
    assert (tmp_path / "a" / name).stat().st_size <= PAGE
    # Of 1 MB, of namespaces without a file, and too many.
    names = [f"{number:032x}/namespace.json" for number in range(MOST_NAMESPACES + 50)]
    for others, padding in ((names[:20], 1 << 20), (names, 0)):
        described = [
            (
                other,
                text.replace('"facts_digest": "', f'"facts_digest": "{other[:32]}').encode() + b" " * padding,
            )
            for other in others
        ]
        done = take(tar(*described), tmp_path / "b")
        assert not done.taken and len(done.bad) == (len(others) if padding else 50)
    assert not on_disk(tmp_path / "b")


def test_bad_files_without_end_end_the_import(tmp_path: Path):
    names = (f"nobody/{number}" for number in itertools.count())
    with pytest.raises(InvalidRequest, match=f"{MOST_BAD} of its files are bad"):
        take(tar(*((next(names), b"") for _ in range(MOST_BAD + 5))), tmp_path)


@pytest.mark.parametrize("make", [lambda n: pax({"path": "x"}) * n, lambda n: header(b"L", 65_536) * n])
def test_headers_of_headers_end(tmp_path: Path, make: Callable[[int], bytes]):
    with pytest.raises(InvalidRequest):
        take(make(3000) + header(tarfile.REGTYPE, 512) + bytes(8192), tmp_path)
