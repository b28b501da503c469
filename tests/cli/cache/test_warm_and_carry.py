"""`omlxd cache warm`, `export` and `import`: what is carried is a hit, what is damaged is not taken."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import tarfile
from pathlib import Path

import pytest
from daemon import Daemon, prose, wait_until

from omlxd.cli.cache import carry, command
from omlxd.cli.cache.warm import read_requests
from omlxd.cli.cache.why_miss import read_request
from omlxd.errors import ConfigError, OmlxdError


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


def test_an_export_is_its_owners_alone_and_says_what_has_no_file(tmp_path: Path, monkeypatch, capsys):
    path = f"{'ab' * 16}/cd/{'cd' * 32}.safetensors"
    monkeypatch.setattr(carry, "_of_session", lambda args, settings: [path])
    root = tmp_path / "cache"
    root.mkdir()
    words = ("export", tmp_path / "a.tar", "--session", "s", "--paged-ssd-cache-dir", root)
    assert cache(*words) == 1
    assert "1 more are in RAM alone" in capsys.readouterr().err
    assert (tmp_path / "a.tar").stat().st_mode & 0o777 == 0o600
    with pytest.raises(OmlxdError, match=r"^/.*a\.tar: File exists"):
        cache(*words)
    (root / path).parent.mkdir(parents=True)
    (root / path).write_bytes(b"x")
    assert cache("export", tmp_path / "b.tar", *words[2:]) == 0


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
            assert (" 0 were cached" in row) == computed and "prompt.txt" in row
        model = daemon.model
        with pytest.raises(ConfigError, match="--newer-than: 'soon' is no age"):
            cache("export", archive, "--model", "x", "--newer-than", "soon")
        with pytest.raises(ConfigError, match="nothing of 'nobody' is cached"):
            cache("export", archive, "--model", "nobody", "--url", daemon.url)
        wait_until(lambda: any((here / "omlxd" / "cache").rglob("*.safetensors")))
    with pytest.raises(ConfigError, match="--newer-than: nothing of"):
        cache("export", archive, "--model", model, "--newer-than", "0s", "--base-path", here / "omlxd")
    assert cache("export", archive, "--model", model, "--base-path", here / "omlxd") == 0
    assert "kv.tar: " in capsys.readouterr().out
    with pytest.raises(OmlxdError, match="File exists"):
        cache("export", archive, "--model", model, "--base-path", here / "omlxd")
    assert cache("import", archive, "--base-path", there / "omlxd") == 0
    assert " files imported, 0 were there, 0 bad" in capsys.readouterr().out
    assert cache("import", archive, "--base-path", there / "omlxd") == 0
    assert "0 files imported" in capsys.readouterr().out
    with Daemon(there) as daemon:
        answer = daemon.http.post("/v1/completions", json={"prompt": text, "max_tokens": 1}).json()
        assert answer["usage"]["omlxd"]["cached_cold"] >= 64
        with pytest.raises(OmlxdError, match="stop it first"):
            cache("import", archive, "--base-path", there / "omlxd")

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
    for bad in (b"no tar at all", archive.read_bytes()[:2000]):
        (tmp_path / "bad.tar").write_bytes(bad)
        try:
            assert cache("import", tmp_path / "bad.tar", "--base-path", tmp_path / "third" / "omlxd") == 1
        except OmlxdError as error:
            assert "bad.tar is" in error.message
