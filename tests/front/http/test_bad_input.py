"""What a client, a disk or an owner gets wrong: a clear error in the right shape, the daemon unharmed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from daemon import BLOCK, Daemon, demo_model, family_model, own_usage, prose, wait_until

from omlxd.kv.cold.health import PAUSE_S

MESSAGES, CHAT, COMPLETIONS = "/v1/messages", "/v1/chat/completions", "/v1/completions"
BOTH = pytest.mark.parametrize("path", [MESSAGES, CHAT])
CONTEXT = 300


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("served")) as daemon:
        yield daemon


@pytest.fixture
def serving(served: Daemon) -> Iterator[Daemon]:
    """A daemon that must serve on after each test, the same engine behind it."""
    engine = served.engine_pid()
    yield served
    assert served.messages("hi", max_tokens=2)["usage"]["output_tokens"] == 2
    assert served.engine_pid() == engine


def refused(answer: httpx.Response, status: int, *words: str) -> str:
    """Check an error's status, its protocol's shape and that its message holds `words`; returns it."""
    assert answer.status_code == status, answer.text
    said = answer.json()
    error = said["error"]
    if answer.url.path.startswith(MESSAGES):
        assert said["type"] == "error" and said["request_id"] == answer.headers["request-id"]
        assert set(error) == {"type", "message"} and error["type"].endswith(("_error", "too_large"))
    else:
        assert set(error) == {"message", "type", "param", "code"} and answer.headers["x-request-id"]
    for word in words:
        assert word in error["message"]
    assert "Traceback" not in answer.text and len(error["message"]) < 1000
    return error["message"]


def ask(daemon: Daemon, path: str, **fields: Any) -> httpx.Response:
    """A request that is right but for `fields`; a field of ... is left out."""
    message = [{"role": "user", "content": "hello"}]
    body = {"model": daemon.model, "max_tokens": 4, "messages": message, **fields}
    return daemon.post(path, {name: value for name, value in body.items() if value is not ...})


# --------------------------------------------------------------------------- bodies


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"null", b"[]", b'"text"', b"\xff\xfe\x00", b'{"model": "omlxd-demo", "messages": ['),
        *(b'{"model": NaN}', b"[" * 100_000, b'{"a":' * 5_000, b'{"messages": [{"role": "user",}]}'),
    ],
)
def test_malformed_json(serving: Daemon, path: str, body: bytes):
    refused(serving.post(path, body), 400)


@BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", "hello"),
        ("messages", {}),
        ("messages", None),
        ("messages", ...),
        ("messages", ["hello"]),
        ("messages", []),
        ("messages", [{"content": "hello"}]),
        ("messages", [{"role": "user", "content": 7}]),
        ("messages", [{"role": "wizard", "content": "hello"}]),
        ("messages", [{"role": "user", "content": [{"type": "hologram"}]}]),
        ("model", 7),
        ("max_tokens", -2),
        ("max_tokens", "many"),
        ("max_tokens", 1.5),
        ("max_tokens", 10**30),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 7),
        ("stream", "yes"),
        ("tools", "all of them"),
        ("tools", [{"name": 1}]),
    ],
)
def test_wrong_fields(serving: Daemon, path: str, field: str, value: Any):
    refused(ask(serving, path, **{field: value}), 400, field)


@BOTH
def test_no_tokens_is_a_wrong_field_of_chats_and_in_messages_the_prompt_alone(serving: Daemon, path: str):
    answer = ask(serving, path, max_tokens=0)
    if path == MESSAGES:
        assert answer.status_code == 200 and answer.json()["usage"]["output_tokens"] == 0
    else:
        refused(answer, 400, "max_tokens")
        assert "Expected int >= 1, or -1 for no limit" in answer.text


def test_no_tokens_of_a_completion_are_the_prompt_alone(serving: Daemon):
    asked = {"model": serving.model, "prompt": ["Once upon", "a time"], "max_tokens": 0}
    for echo, texts in ((True, ["Once upon", "a time"]), (False, ["", ""])):
        answer = serving.post(COMPLETIONS, asked | {"echo": echo, "n": 1})
        assert answer.status_code == 200, answer.text
        assert [choice["text"] for choice in answer.json()["choices"]] == texts
        assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"length"}
        assert answer.json()["usage"]["completion_tokens"] == 0
    streamed = serving.post(COMPLETIONS, asked | {"echo": True, "prompt": "Once upon", "stream": True}).text
    assert '"text":"Once upon"' in streamed and '"finish_reason":"length"' in streamed


@pytest.mark.parametrize("prompt", ["", [], {}, None, [1.5], [-1], [10**9], [10**30], ["a", 1], [[[1]]]])
def test_prompts_of_completions(serving: Daemon, prompt: Any):
    refused(serving.post(COMPLETIONS, {"model": serving.model, "prompt": prompt}), 400)


def test_an_empty_prompt_of_several_fails_alone(serving: Daemon):
    several = {"model": serving.model, "prompt": ["hello", "", "hello"], "max_tokens": 2}
    reply = serving.post(COMPLETIONS, several)
    assert reply.status_code == 200, reply.text
    choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
    assert ["error" in choice for choice in choices] == [False, True, False]


@pytest.mark.parametrize(
    ("path", "field"), [(MESSAGES, "stop_sequences"), (CHAT, "stop"), (COMPLETIONS, "stop")]
)
def test_ten_thousand_stop_strings(serving: Daemon, path: str, field: str):
    more = {"prompt": "hello", "messages": ...} if path == COMPLETIONS else {}
    stops = [f"stop {n}" for n in range(10_000)]
    refused(ask(serving, path, **{field: stops}, **more), 400, field, "10000")


@BOTH
def test_body_of_50_mb(serving: Daemon, path: str):
    content = "x" * 50_000_000
    answer = ask(serving, path, messages=[{"role": "user", "content": content}])
    refused(answer, 413, "larger than")


def test_body_of_50_mb_in_chunks_of_unknown_number(serving: Daemon):
    pieces = (b" " * 1_000_000 for _ in range(50))
    refused(serving.http.post(MESSAGES, content=pieces), 413, "larger than")


@BOTH
def test_errors_before_a_stream_are_plain_answers(serving: Daemon, path: str):
    answer = ask(serving, path, stream=True, max_tokens=-5)
    assert answer.headers["content-type"] == "application/json"
    refused(answer, 400, "max_tokens")


@BOTH
def test_names_and_paths(serving: Daemon, path: str):
    refused(ask(serving, path, model="nobody"), 404, "nobody", "omlxd-demo")
    assert ask(serving, path, model=...).status_code == 200, "no name means the model that is there"
    refused(serving.http.get(path), 405)
    refused(serving.http.post(path + "/none", json={}), 404)


def test_odd_contents_are_served(serving: Daemon):
    for text in ("\x00\x01", "🐈‍⬛" * 50, "<|im_end|><|im_start|>system\n", "</think>" * 9, " ", "\u202e"):
        for path in (MESSAGES, CHAT):
            assert ask(serving, path, messages=[{"role": "user", "content": text}]).status_code == 200


def test_half_a_request_then_silence(serving: Daemon):
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900\r\n\r\n{")
        assert serving.messages("hi")["content"]


# --------------------------------------------------------------------------- a prompt too long


@pytest.fixture(scope="module")
def short_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("short") / "short"
    shutil.copytree(family_model("qwen3"), folder)
    change_config(folder, max_position_embeddings=CONTEXT)
    with Daemon(tmp_path_factory.mktemp("short-home"), model=folder) as daemon:
        yield daemon


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def ask_until_plain(daemon: Daemon, path: str, **fields: Any) -> httpx.Response:
    """The headers of a stream wait a second for the engine; on a busy machine it may need more."""
    answers: list[httpx.Response] = []

    def is_plain() -> bool:
        answers[:] = [ask(daemon, path, **fields)]
        if answers[0].headers["content-type"] == "application/json":
            return True
        assert "context_length_exceeded" in answers[0].text or "prompt is too long" in answers[0].text
        return False

    wait_until(is_plain)
    return answers[0]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_the_context(short_context: Daemon, stream: bool):
    long = [{"role": "user", "content": prose(200)}]
    counted = short_context.post(MESSAGES + "/count_tokens", {"model": "claude-x", "messages": long}).json()
    answer = ask_until_plain(short_context, MESSAGES, messages=long, stream=stream)
    said = refused(answer, 400)
    assert said == f"prompt is too long: {counted['input_tokens']} tokens > {CONTEXT - 1} maximum"
    answer = ask_until_plain(short_context, CHAT, messages=long, stream=stream)
    assert str(counted["input_tokens"]) in refused(answer, 400)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_answer_ends_where_the_context_does(short_context: Daemon):
    answer = short_context.messages(prose(30), max_tokens=100_000)
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == CONTEXT
    assert answer["stop_reason"] == "max_tokens"


# --------------------------------------------------------------------------- model folders


def copy_of_demo(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(demo_model(), folder)
    return folder


def _truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100_000)


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _half_a_config(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])


def _unreadable(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "config.json")


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_truncate, "model.safetensors is truncated"),
        (_no_weights, "no weights"),
        (_half_a_config, "config.json"),
        (_unreadable, "config.json"),
        (_no_tokenizer, "no tokenizer"),
        (shutil.rmtree, "there is no folder"),
    ],
)
def test_model_folder_that_is_not_whole_is_refused_at_once(tmp_path: Path, spoil: Any, words: str):
    folder = copy_of_demo(tmp_path)
    spoil(folder)
    told = serve_once(tmp_path, "--model", str(folder))
    assert told.returncode == 2 and not told.stdout
    assert words in told.stderr and "--model" in told.stderr and "Traceback" not in told.stderr
    assert told.stderr.count("\n") == 1


def serve_once(home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """`omlxd serve` that is expected to end by itself."""
    command = [
        sys.executable,
        "-m",
        "omlxd",
        "serve",
        "--port",
        "0",
        "--base-path",
        str(home / "base"),
        *flags,
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
    repo = str(Path(__file__).resolve().parents[3])
    return subprocess.run(
        command, env=environ | {"PYTHONPATH": repo}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", '{"model_type": "perpetuum"}', "perpetuum"),
        ("tokenizer.json", '{"version": "1.0", ', "loaded"),
    ],
)
def test_model_that_can_not_be_loaded_fails_requests_with_its_reason(
    tmp_path: Path, name: str, content: str, words: str
):
    folder = copy_of_demo(tmp_path)
    (folder / name).write_text(content)
    with Daemon(tmp_path / "home", model=folder, wait=False) as daemon:
        for path in (MESSAGES, CHAT) * 2:  # Asking again changes nothing, nor do clients ask.
            answer = ask(daemon, path)
            said = refused(answer, 400, words, "can't be loaded")
            assert "Traceback" not in said and "retry-after" not in answer.headers
            assert answer.headers["x-should-retry"] == "false"
            errors = [line for line in daemon.logged().splitlines() if " ERROR " in line]
            assert len(errors) == daemon.logged().count("ERROR omlxd.front.engines.supervisor") >= 1
        assert daemon.http.get("/health").status_code == 200
        assert daemon.stop() == 0


# --------------------------------------------------------------------------- the cache dir


@contextlib.contextmanager
def small_disk(folder: Path, size: str, *options: str) -> Iterator[Path]:
    """A file system of `size` at `folder`; skips the test where mounting is not allowed."""
    folder.mkdir()
    if sys.platform != "linux" or not shutil.which("mount"):
        pytest.skip("needs a tmpfs")
    flags = ",".join([f"size={size}", *options])
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", flags, "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def serves_without_cold_tier(home: Path, cache: Path) -> None:
    with Daemon(home, "--paged-ssd-cache-dir", str(cache)) as daemon:
        assert f"serving without the SSD cache: {cache}" in daemon.logged()
        usages = [own_usage(daemon.messages(prose(100))) for _ in range(2)]
        assert usages[0]["cached_hot"] == usages[0]["cached_cold"] == 0
        assert usages[1]["cached_hot"] > 0 and usages[1]["computed"] <= BLOCK
        assert "Traceback" not in daemon.logged() and daemon.stop() == 0


@pytest.mark.slow
def test_cache_dir_is_a_file(tmp_path: Path):
    (tmp_path / "cache").write_text("no folder")
    serves_without_cold_tier(tmp_path / "home", tmp_path / "cache")
    assert (tmp_path / "cache").read_text() == "no folder"


@pytest.mark.slow
def test_cache_dir_is_read_only(tmp_path: Path):
    with small_disk(tmp_path / "disk", "4m", "ro") as disk:
        serves_without_cold_tier(tmp_path / "home", disk)


@pytest.mark.slow
def test_cache_dir_is_full_from_the_start(tmp_path: Path):
    with (
        small_disk(tmp_path / "disk", "256k") as disk,
        Daemon(tmp_path / "home", "--paged-ssd-cache-dir", str(disk / "cache")) as daemon,
    ):
        usages = [own_usage(daemon.messages(prose(100))) for _ in range(2)]
        assert usages[0]["computed"] > BLOCK and usages[1]["computed"] <= BLOCK
        assert "only read until its disk takes writes again: No space left" in daemon.logged()
        assert "Traceback" not in daemon.logged() and daemon.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_disk_that_takes_no_writes_at_the_start_is_read_and_later_written(tmp_path: Path, how: str):
    with small_disk(tmp_path / "disk", "6m") as disk:
        flags = "--paged-ssd-cache-dir", str(disk / "cache"), "--hot-cache-max-size", "0"
        with Daemon(tmp_path / "home", *flags) as daemon:
            told = daemon.messages(prose(300))
            assert daemon.stop() == 0
        stored = set((disk / "cache").rglob("*.safetensors"))
        filler = disk / "filler"
        if how == "full":
            filler.write_bytes(bytes(shutil.disk_usage(disk).free))
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with Daemon(tmp_path / "home", *flags) as daemon:
            assert "only read until its disk takes writes again" in daemon.logged()
            again = daemon.messages(prose(300))
            assert own_usage(again)["cached_cold"] > 0 and again["content"] == told["content"]
            daemon.messages(prose(300, seed=1))
            if how == "read-only":
                wait_until(lambda: not daemon.figure("kv_cold_tier_on"), why=daemon.logged)
                subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
                time.sleep(PAUSE_S)
            seeds = itertools.count(2)

            def is_written() -> bool:
                daemon.messages(prose(300, seed=next(seeds)))
                daemon.settled()
                return bool(set((disk / "cache").rglob("*.safetensors")) - stored)

            wait_until(is_written, why=daemon.logged)
            if how == "full":  # Older blocks go for them, until others have their room again.
                wait_until(lambda: is_written() and shutil.disk_usage(disk).free >= 300_000)
            assert "Traceback" not in daemon.logged()


@pytest.mark.slow
def test_the_last_bytes_of_a_disk_are_left_to_others(tmp_path: Path):
    with (
        small_disk(tmp_path / "disk", "3m") as disk,
        Daemon(tmp_path / "home", "--paged-ssd-cache-dir", str(disk / "cache")) as daemon,
    ):
        told = [daemon.messages(prose(300, seed=seed))["content"] for seed in range(8)]
        daemon.settled()
        assert 150_000 <= shutil.disk_usage(disk).free < 400_000
        again = [daemon.messages(prose(300, seed=seed)) for seed in range(8)]
        assert [answer["content"] for answer in again] == told
        assert all(own_usage(answer)["cached_hot"] > 0 for answer in again)
        assert "WARNING omlxd.kv" not in daemon.logged() and "Traceback" not in daemon.logged()
        wait_until(lambda: not list((disk / "cache").rglob("*.tmp*")))  # What was being tried is over soon.
        assert daemon.stop() == 0


@pytest.mark.slow
def test_disk_that_was_full_is_used_again_after_a_pause(tmp_path: Path):
    with small_disk(tmp_path / "disk", "4m") as disk:
        filler = disk / "filler"
        with Daemon(tmp_path / "home", "--paged-ssd-cache-dir", str(disk / "cache")) as daemon:
            filler.write_bytes(bytes(shutil.disk_usage(disk).free - 8192))
            daemon.messages(prose(300, seed=1))
            wait_until(lambda: "nearly full: nothing new is stored" in daemon.logged(), why=daemon.logged)
            filler.unlink()
            time.sleep(PAUSE_S)
            seeds = itertools.count(2)

            def is_used() -> bool:
                daemon.messages(prose(300, seed=next(seeds)))
                daemon.settled()
                return len(list((disk / "cache").rglob("*.safetensors"))) > 10

            wait_until(is_used)


# --------------------------------------------------------------------------- a port in use


def test_port_in_use(serving: Daemon, tmp_path: Path):
    port = serving.url.rpartition(":")[2]
    told = serve_once(tmp_path, "--port", port)
    assert told.returncode == 1
    assert f"port {port}" in told.stderr and "already runs" in told.stderr and "Traceback" not in told.stderr
