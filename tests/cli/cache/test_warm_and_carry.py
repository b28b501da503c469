"""`omlxd cache warm`, `export` and `import`: what is carried is a hit, what is damaged is not taken."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from cache_folder import Cache, flip
from daemon import REPO, Daemon, own_usage, prose, restored, wait_until
from kv_fakes import NAMESPACE

from omlxd.cli.cache import command
from omlxd.cli.cache.asked import read_request
from omlxd.cli.cache.transfer import archive as archiving
from omlxd.cli.cache.transfer import carry
from omlxd.cli.cache.warm import read_requests
from omlxd.errors import ConfigError, OmlxdError
from omlxd.kv.files.fs import FileSystem
from omlxd.kv.files.paths import PAGE, disk_bytes
from omlxd.kv.ledger.ledger import Ledger


def cache(*words: object) -> int:
    return command.main([str(word) for word in words], argparse.ArgumentParser())


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", "", "it is empty"),
        ("a.jsonl", '{"path": "/v1/messages", "body": {}}\n{', "line 2: "),
        ("a.jsonl", '{"body": 5}', "line 1: Expected `object`"),
        ("a.txt", b"\xff\x00".decode("latin-1"), "no text in UTF-8"),
        ("a.json", '{"path": "/v1/embeddings", "body": {}}', "'/v1/embeddings' is none of /v1/messages"),
        ("a.json", "[]", "Expected `object`"),
        ("missing.txt", None, "No such file"),
    ],
)
def test_requests_that_make_no_sense_are_refused_before_one_is_sent(tmp_path: Path, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text, "latin-1")
    with pytest.raises(ConfigError) as caught:
        cache("warm", tmp_path / name, "--url", "http://127.0.0.1:9")
    assert words in caught.value.message and name in caught.value.message


def test_recorded_requests_ask_for_one_token(tmp_path: Path):
    body = {"input": "hi", "stream": True, "max_output_tokens": 900}
    line = json.dumps({"path": "/v1/responses?x=1", "body": body, "headers": {"a": "b"}})
    (tmp_path / "a.jsonl").write_text(f"{line}\n\n{line}\n")
    one, two = read_requests(tmp_path / "a.jsonl")
    assert one[1] == two[1] and two[0].endswith("line 3") and one[1].headers == {"a": "b"}
    assert one[1].body == {"input": "hi", "stream": False, "max_output_tokens": 1}


def test_a_body_alone_and_a_text_are_taken_by_all_who_read_requests(tmp_path: Path):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    (tmp_path / "a.json").write_text(json.dumps(body))
    [(_, request)] = read_requests(tmp_path / "a.json")
    assert request.path == "/v1/chat/completions" == read_request(str(tmp_path / "a.json"), None).path
    (tmp_path / "a.txt").write_text("a text")
    [(_, request)] = read_requests(tmp_path / "a.txt")
    asked = read_request(str(tmp_path / "a.txt"), None)
    assert asked.path == request.path == "/v1/completions"
    assert asked.body["prompt"] == request.body["prompt"] == "a text"


@pytest.mark.slow
def test_a_request_that_is_refused_keeps_no_other_from_being_warmed(tmp_path: Path, capsys):
    asked = {"prompt": prose(60)}
    lines = [asked, {**asked, "temperature": "hot"}, {"prompt": f"Again: {prose(60)}"}]
    file = tmp_path / "asked.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    with Daemon(tmp_path / "home") as daemon:
        assert cache("warm", file, "--url", daemon.url) == 1
    told = capsys.readouterr()
    assert [line.partition(":")[0] for line in told.out.splitlines()] == [f"{file} line 1", f"{file} line 3"]
    (error,) = told.err.splitlines()
    assert error.startswith(f"omlxd: {file} line 2: ") and "temperature" in error


def test_an_export_is_its_owners_alone_and_says_what_has_no_file(tmp_path: Path, monkeypatch, capsys):
    path = f"{'ab' * 16}/cd/{'cd' * 32}.safetensors"
    monkeypatch.setattr(carry, "_of_session", lambda args, settings, root: [path])
    root = tmp_path / "cache"
    root.mkdir()
    words = ("export", tmp_path / "a.tar", "--session", "s", "--paged-ssd-cache-dir", root)
    assert cache(*words) == 1
    assert "in RAM alone: 1 more file;" in capsys.readouterr().err
    assert (tmp_path / "a.tar").stat().st_mode & 0o777 == 0o600
    with pytest.raises(OmlxdError, match=r"^/.*a\.tar: File exists"):
        cache(*words)
    with pytest.raises(OmlxdError, match=rf"^{tmp_path}/new: there is no such folder; create it first$"):
        cache("export", tmp_path / "new" / "a.tar", *words[2:])
    with pytest.raises(OmlxdError, match=r"^/.*a\.tar: it is no folder$"):
        cache("export", tmp_path / "a.tar" / "b.tar", *words[2:])
    (root / path).parent.mkdir(parents=True)
    (root / path).write_bytes(b"x")
    assert cache("export", tmp_path / "b.tar", *words[2:]) == 0


def test_an_export_leaves_out_what_is_evicted_at_any_moment(tmp_path: Path, monkeypatch, capsys):
    root, archive = tmp_path / "cache", tmp_path / "kv.tar"
    Cache(root, tmp_path / "model")
    blocks = list((root / NAMESPACE.hex()[:32]).rglob("*.safetensors"))
    write = tarfile.TarFile.addfile

    def evicted_behind(tar: tarfile.TarFile, member: tarfile.TarInfo, source: object = None) -> None:
        write(tar, member, source)  # type: ignore[arg-type]
        if member.name.endswith(".safetensors"):
            (root / member.name).unlink()

    monkeypatch.setattr(tarfile.TarFile, "addfile", evicted_behind)
    assert cache("export", archive, "--model", "org/tiny", "--paged-ssd-cache-dir", root) == 0
    assert f": {len(blocks)} files, " in capsys.readouterr().out


@pytest.mark.slow
def test_a_session_that_was_sent_several_times_is_exported_whole(tmp_path: Path, capsys):
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps({"messages": [{"role": "user", "content": prose(60)}]}))
    numbers = itertools.count()
    with Daemon(tmp_path / "home") as daemon:

        def is_whole() -> bool:
            tar, base = tmp_path / f"{next(numbers)}.tar", tmp_path / "home" / "omlxd"
            return not cache("export", tar, "--session", asked, "--url", daemon.url, "--base-path", base)

        for _ in range(2):
            assert cache("warm", asked, "--url", daemon.url) == 0
            wait_until(is_whole)
    assert ".tar: " in capsys.readouterr().out


def test_a_warm_cache_is_carried_to_another_machine(tmp_path: Path, capsys):
    here, there, archive = tmp_path / "here", tmp_path / "there", tmp_path / "kv.tar"
    text = prose(300)
    (tmp_path / "prompt.txt").write_text(text)
    with Daemon(here) as daemon:
        for computed in (True, False):
            assert cache("warm", tmp_path / "prompt.txt", "--url", daemon.url) == 0
            row = capsys.readouterr().out
            assert (" 0 cached" in row) == computed and "prompt.txt" in row
        model = daemon.model
        with pytest.raises(ConfigError, match="--newer-than: 'soon' is no age"):
            cache("export", archive, "--model", "x", "--newer-than", "soon")
        with pytest.raises(ConfigError, match="Nothing of 'nobody' is cached"):
            cache("export", archive, "--model", "nobody", "--url", daemon.url)
        wait_until(lambda: any((here / "omlxd" / "cache").rglob("*.safetensors")))
    with pytest.raises(ConfigError, match="--newer-than: nothing of"):
        cache("export", archive, "--model", model, "--newer-than", "0s", "--base-path", here / "omlxd")
    assert cache("export", archive, "--model", model, "--base-path", here / "omlxd") == 0
    kept = sum(path.suffix != ".json" for path in (here / "omlxd" / "cache").glob("*/*/*"))
    assert kept and f"kv.tar: {kept} files, " in capsys.readouterr().out
    with pytest.raises(OmlxdError, match="File exists"):
        cache("export", archive, "--model", model, "--base-path", here / "omlxd")
    assert cache("import", archive, "--base-path", there / "omlxd") == 0
    assert f"{kept} files imported, 0 were there, 0 bad" in capsys.readouterr().out
    assert cache("import", archive, "--base-path", there / "omlxd") == 0
    assert f"0 files imported, {kept} were there, 0 bad" in capsys.readouterr().out
    with Daemon(there) as daemon:
        answer = daemon.http.post("/v1/completions", json={"prompt": text, "max_tokens": 1}).json()
        assert restored(own_usage(answer)) >= 64

    damaged, other = tmp_path / "damaged.tar", tmp_path / "other"
    with tarfile.open(archive) as source, tarfile.open(damaged, "w") as target:
        for member in source:
            data = bytearray(source.extractfile(member).read())  # type: ignore[union-attr]
            if member.name.endswith(".safetensors"):
                data[-1] ^= 1
            target.addfile(member, io.BytesIO(data))
        for name in ("../../outside", "a" * 32 + "/00/../../../outside", "/etc/outside", "model.safetensors"):
            target.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
        link = tarfile.TarInfo("a" * 32 + f"/00/{0:064x}.safetensors")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        target.addfile(link)
    assert cache("import", damaged, "--base-path", other / "omlxd") == 1
    said = capsys.readouterr().out
    assert said.count("no block, record or description") == 5 and "digest" in said
    assert not list((other / "omlxd" / "cache").rglob("*.safetensors")) and not list(
        tmp_path.rglob("outside")
    )
    for bad, words in RUINED:
        (tmp_path / "bad.tar").write_bytes(bad(archive.read_bytes()))
        with pytest.raises(OmlxdError, match=rf"bad\.tar: .*({words})"):
            cache("import", tmp_path / "bad.tar", "--base-path", tmp_path / "third" / "omlxd")
    with pytest.raises(OmlxdError, match=r"nothing\.tar: there is no such file"):
        cache("import", tmp_path / "nothing.tar", "--base-path", tmp_path / "third" / "omlxd")


def test_a_file_that_stays_keeps_its_grant(tmp_path: Path, monkeypatch, capsys):
    source = Cache(tmp_path / "cache", tmp_path / "model")
    goal, archive = tmp_path / "goal", tmp_path / "kv.tar"
    flip(source.path(2), 300)
    words = ["--model", "org/tiny", "--paged-ssd-cache-dir", str(source.root)]
    assert cache("export", archive, *words) == 0
    released: list[int] = []
    monkeypatch.setattr(carry._Room, "released", lambda self, nbytes: released.append(nbytes))
    monkeypatch.setattr(FileSystem, "unlink", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no")))
    capsys.readouterr()
    assert cache("import", archive, "--paged-ssd-cache-dir", goal) == 1
    said = capsys.readouterr().out
    assert "8 files imported, 0 were there, 1 bad" in said and ".tmp stays" in said
    assert released == [PAGE]  # Of the description, which the account leaves out.
    assert len(list(goal.rglob("*.tmp"))) == 1

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archiving, "write_all", full)
    with pytest.raises(OmlxdError, match="stays"):
        cache("import", archive, "--paged-ssd-cache-dir", tmp_path / "full")
    assert released == [PAGE]


def long_name(data: bytes) -> bytes:
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    return member.tobuf(tarfile.GNU_FORMAT) + data


RUINED = [
    (lambda data: b"no tar at all", "no export of omlxd"),
    (lambda data: b"", "no export of omlxd"),
    (long_name, "a header is too large"),
    (lambda data: data[:2000], "no export of omlxd|cut off or damaged"),
    (lambda data: data[: len(data) // 2], "cut off or damaged"),
    # Where one member ends and the next would begin.
    (lambda data: data[:1024] + b"\xff" * 512 + data[1536:], "cut off or damaged|no export"),
    (lambda data: data.rstrip(b"\0") + bytes(-len(data.rstrip(b"\0")) % 512), "cut off or damaged"),
]


@pytest.mark.slow
def test_a_running_daemon_takes_files_in_and_keeps_its_account(tmp_path: Path, capsys):
    here, archive = tmp_path / "here", tmp_path / "kv.tar"
    text = prose(300)
    (tmp_path / "prompt.txt").write_text(text)
    with Daemon(here) as daemon:
        assert cache("warm", tmp_path / "prompt.txt", "--url", daemon.url) == 0
        daemon.settled()  # It is killed, and what it has not written is lost.
        model = daemon.model
    assert cache("export", archive, "--model", model, "--base-path", here / "omlxd") == 0
    body = archive.read_bytes()

    def held(root: Path) -> int:
        return sum(disk_bytes(file.stat().st_size) for file in root.rglob("*.[sr]*"))

    with Daemon(tmp_path / "there", "--hot-cache-max-size", "0") as daemon:
        http, root = daemon.http, tmp_path / "there" / "omlxd" / "cache"

        def account() -> int:
            return http.get("/omlxd/status").json()["cold"]["bytes"]

        # Broken off: what was whole is there, and nothing else.
        def half():
            yield body[: len(body) // 2]
            raise ConnectionError

        with pytest.raises(ConnectionError):
            http.post("/omlxd/cache/import", content=half())
        # One at a time: this one is refused once the other is over.
        assert http.post("/omlxd/cache/import", content=b"no tar at all").status_code == 400
        assert account() == held(root) > 0
        assert not list(root.rglob("*.tmp"))
        for ruin, words in RUINED:
            (tmp_path / "bad.tar").write_bytes(ruin(body))
            with pytest.raises(OmlxdError, match=rf"bad\.tar: .*({words})"):
                cache("import", tmp_path / "bad.tar", "--url", daemon.url)
        capsys.readouterr()
        assert cache("import", archive, "--url", daemon.url) == 0
        said = capsys.readouterr().out
        assert " were there, 0 bad" in said and account() == held(root)
        assert cache("import", archive, "--url", daemon.url) == 0
        assert "0 files imported" in capsys.readouterr().out
        answer = http.post("/v1/completions", json={"prompt": text, "max_tokens": 1}).json()
        assert answer["usage"]["omlxd"]["cached_cold"] >= 640
        assert (
            http.post("/omlxd/cache/import", content=b"", headers={"origin": "http://x"}).status_code == 400
        )
    with Daemon(tmp_path / "small", "--paged-ssd-cache-max-size", "1MB") as daemon:
        assert cache("import", archive, "--url", daemon.url) == 1
        assert "files left out: the SSD cache may take 1 MB" in capsys.readouterr().out
        assert 0 < held(tmp_path / "small" / "omlxd" / "cache") <= 1_000_000
    with Daemon(tmp_path / "none", "--paged-ssd-cache-max-size", "0") as daemon:
        answer = daemon.http.post("/omlxd/cache/import", content=body)
        assert answer.status_code == 503 and "no SSD cache" in answer.text


@pytest.mark.parametrize("verb", ["import", "export"])
def test_kill_9_leaves_nothing_damaged(tmp_path: Path, verb: str):
    """The process ends itself in the middle of a file, as SIGKILL would."""
    root, archive = tmp_path / "cache", tmp_path / "kv.tar"
    Cache(root, tmp_path / "model")
    mine = root / NAMESPACE.hex()[:32]
    files = {file.relative_to(root): file.read_bytes() for file in mine.rglob("*.safetensors")}
    words = ["--model", "org/tiny", "--paged-ssd-cache-dir", str(root)]
    assert cache("export", archive, *words) == 0
    goal = tmp_path / ("goal" if verb == "import" else "goal.tar")
    code = (
        "import os, sys, argparse, tarfile\n"
        "from omlxd.cli.cache import command\nfrom omlxd.cli.cache.transfer import archive\n"
        "from omlxd.kv.files import fs\n"
        "count = 0\n"
        "def dies(real):\n"
        "    def call(*a, **k):\n"
        "        global count\n"
        "        count += 1\n"
        "        if count == 4: os.kill(os.getpid(), 9)\n"
        "        return real(*a, **k)\n"
        "    return call\n"
        "archive.write_all = dies(archive.write_all)\n"
        "tarfile.TarFile.addfile = dies(tarfile.TarFile.addfile)\n"
        "command.main(sys.argv[1:], argparse.ArgumentParser())\n"
    )
    if verb == "import":
        argv = ["import", str(archive), "--paged-ssd-cache-dir", str(goal)]
    else:
        argv = ["export", str(goal), *words]
    done = subprocess.run([sys.executable, "-c", code, *argv], check=False, cwd=REPO)
    assert done.returncode == -9
    if verb == "export":
        assert not goal.exists()
        assert cache(*argv) == 0 and goal.stat().st_size == archive.stat().st_size
        return
    whole = {file.relative_to(goal): file.read_bytes() for file in goal.rglob("*.safetensors")}
    assert 0 < len(whole) < len(files) and all(files[path] == data for path, data in whole.items())
    assert cache(*argv) == 0
    ledger = Ledger(goal, 10**9)
    ledger.open()
    assert not list(goal.rglob("*.tmp")) and ledger.stats().files == len(files)
    ledger.close()
