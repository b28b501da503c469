"""The log: forms, rotation, and what never stands in it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from app_client import body, client
from fake_engine import EVERYTHING, FakeEngine, app_of

from omlxd.chat import Failed
from omlxd.common.private_trace import LineFormatter, private_trace
from omlxd.config import load_settings
from omlxd.config.keys import add_key, keys_path
from omlxd.config.settings import BY_SERVICE
from omlxd.errors import ConfigError
from omlxd.front.engines.link import EngineLines
from omlxd.front.http.observe.trace import RequestTrace
from omlxd.front.process.logs import JsonFormatter, Logs, Redactor, TextFormatter
from tests.front.process.test_serve import start  # noqa: F401 (a fixture)

KEY = "s3cret-key-of-mine"
PROMPT = "my private prompt"
CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("omlxd")
    before = root.handlers[:], root.level, own.level
    yield
    root.handlers[:], level, own_level = before
    root.setLevel(level)
    own.setLevel(own_level)


def settings(tmp_path: Path, **flags: str):
    return load_settings({"base_path": str(tmp_path), **flags}, {})


def record(message: str, *args: object, exc: BaseException | None = None, fields: object = None):
    made = logging.LogRecord(
        "omlxd.x", logging.INFO, "", 0, message, args, (type(exc), exc, exc.__traceback__) if exc else None
    )
    made.fields = fields
    return made


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


# --------------------------------------------------------------------------- forms


def test_json_is_one_object_a_line_with_the_fields_of_a_request(tmp_path: Path):
    path = tmp_path / "omlxd.log"
    Logs(settings(tmp_path, log_file=str(path), log_format="json"))
    RequestTrace("POST", "/v1/messages\n", model="tiny", status=200, key="laptop").write()
    logging.getLogger("omlxd.other").info("loaded %s", "two\nlines")
    lines = map(json.loads, path.read_text().splitlines())
    first, second = (line for line in lines if line["logger"] in ("omlxd.access", "omlxd.other"))
    assert first["message"] == "request" and first["logger"] == "omlxd.access" and first["level"] == "info"
    assert {
        "id",
        "method",
        "path",
        "status",
        "prompt_tokens",
        "cached_tokens",
        "ttft_s",
        "duration_s",
    } <= set(first)
    assert (first["model"], first["status"], first["key"]) == ("tiny", 200, "laptop")
    assert second["message"] == "loaded two\nlines" and second["time"].endswith("Z")


def test_a_file_is_private_rotated_and_bounded(tmp_path: Path):
    path = tmp_path / "omlxd.log"
    before = os.umask(0)
    try:
        made = settings(tmp_path, log_file=str(path), log_file_count="2")
        Logs(msgspec.structs.replace(made, log_file_size=2000))
        for number in range(200):
            logging.getLogger("omlxd.x").info("line %d with some words that take room", number)
    finally:
        os.umask(before)
    files = sorted(tmp_path.glob("omlxd.log*"))
    assert [file.name for file in files] == ["omlxd.log", "omlxd.log.1", "omlxd.log.2"]
    assert all(file.stat().st_size <= 2000 for file in files)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert "line 199" in path.read_text()


def test_a_file_that_cannot_be_put_aside_is_told_once(tmp_path: Path, capsys):
    """As where its folder is another user's."""
    path = tmp_path / "omlxd.log"
    (tmp_path / "omlxd.log.1" / "x").mkdir(parents=True)
    made = settings(tmp_path, log_file=str(path), log_file_count="1")
    Logs(msgspec.structs.replace(made, log_file_size=2000))
    for number in range(200):
        logging.getLogger("omlxd.x").info("line %d with some words that take room", number)
    assert capsys.readouterr().err.count("log lines are lost") == 1
    (tmp_path / "omlxd.log.1").rename(tmp_path / "away")
    logging.getLogger("omlxd.x").info("after")
    assert "after" in path.read_text()


def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path):
    path = tmp_path / "omlxd.log"
    logs = Logs(settings(tmp_path, log_file=str(path)))
    logging.getLogger("omlxd.x").info("before")
    path.rename(tmp_path / "old.log")
    logs.reopen()
    logging.getLogger("omlxd.x").info("after")
    assert "before" in (tmp_path / "old.log").read_text() and "after" in path.read_text()


def test_a_file_that_is_gone_with_its_folder_is_made_again(tmp_path: Path, capsys):
    path = tmp_path / "kept" / "logs" / "omlxd.log"
    path.parent.mkdir(parents=True)
    Logs(settings(tmp_path, log_file=str(path)))
    for line in ("one", "two"):
        shutil.rmtree(path.parent)
        logging.getLogger("omlxd.x").info(line)
        assert line in path.read_text() and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    shutil.rmtree(tmp_path / "kept")
    for line in ("three", "four"):
        logging.getLogger("omlxd.x").info(line)
    assert capsys.readouterr().err == f"omlxd: log lines are lost: {path}: No such file or directory\n"
    path.parent.parent.mkdir()
    logging.getLogger("omlxd.x").info("five")
    assert "five" in path.read_text()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "a file").write_text("")
    with pytest.raises(ConfigError, match=r"--log-file: .* can't be written"):
        Logs(settings(tmp_path, log_file=str(tmp_path / "a file" / "omlxd.log")))


def test_no_folder_is_made_for_a_file_but_omlxds_own(tmp_path: Path, monkeypatch):
    own, other = tmp_path / "base" / "omlxd.log", tmp_path / "logs" / "omlxd.log"
    Logs(settings(tmp_path / "base", log_file=str(own)))
    assert own.is_file() and stat.S_IMODE(own.parent.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match=rf"--log-file: {other} can't be written: No such file"):
        Logs(settings(tmp_path / "base", log_file=str(other)))
    assert not other.parent.exists()
    monkeypatch.setenv(BY_SERVICE, "1")
    Logs(settings(tmp_path / "base", log_file=str(other)))
    assert other.is_file()


def test_what_an_engine_prints_keeps_its_level_and_name(caplog):
    caplog.set_level(logging.INFO)
    line = EngineLines()
    for text in (
        "mlx said something",
        "INFO omlxd.engine.server.host: fine",
        "ERROR omlxd.engine.schedule.scheduler: decode failed",
        "Traceback (most recent call last):",
    ):
        line(text)
    own = [r for r in caplog.records if r.name.startswith("omlxd.engine")]
    assert [(r.levelname, r.name, r.getMessage()) for r in own] == [
        ("WARNING", "omlxd.engine", "mlx said something"),
        ("INFO", "omlxd.engine.server.host", "fine"),
        ("ERROR", "omlxd.engine.schedule.scheduler", "decode failed"),
        ("ERROR", "omlxd.engine.schedule.scheduler", "Traceback (most recent call last):"),
    ]


def test_what_an_engine_prints_below_the_level_is_left_out(caplog):
    """The level may have changed while the line was on its way."""
    logging.getLogger("omlxd").setLevel(logging.INFO)
    line = EngineLines()
    line("DEBUG omlxd.engine.x: " + PROMPT)
    line("terminating due to an uncaught exception")
    logging.getLogger("omlxd").setLevel(logging.ERROR)
    line("WARNING omlxd.engine.x: hm")
    line("ERROR omlxd.engine.x: oh")
    logging.getLogger("omlxd").setLevel(logging.DEBUG)
    line("DEBUG omlxd.engine.x: so that is why")
    assert [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("omlxd.engine")] == [
        ("WARNING", "terminating due to an uncaught exception"),
        ("ERROR", "oh"),
        ("DEBUG", "so that is why"),
    ]


# --------------------------------------------------------------------------- what never stands in it


@pytest.mark.parametrize(
    "text",
    [
        f"the key is {KEY}",
        f"headers: {{'Authorization': 'Bearer {KEY}x'}}",
        "Authorization: Bearer abcdefgh",
        "{'x-api-key': 'abcdefgh'}",
        "(b'x-api-key', b'abcdefgh')",
        "api_key='abcdefgh'",
        "GET /?api-key=abcdefgh",
        "omlxd-" + "abcdefgh" * 5 + "abc",
    ],
)
@pytest.mark.parametrize("made", [TextFormatter, JsonFormatter])
def test_keys_are_taken_out_of_lines_and_tracebacks(made, text: str):
    redact = Redactor()
    redact.hide(KEY)
    formatter = made(redact)
    for line in (record("%s", text), record("failed", exc=raised(OSError(text)))):
        said = formatter.format(line)
        assert KEY not in said and "abcdefgh" not in said and "***" in said


@pytest.mark.parametrize("key", ['quo"ted', "back\\slash\\", "both'quotes\"", "tab\tclé"])
@pytest.mark.parametrize("made", [TextFormatter, JsonFormatter])
def test_a_key_is_found_however_a_line_writes_it(made, key: str, caplog):
    caplog.set_level(logging.INFO, "omlxd.access")
    redact = Redactor()
    redact.hide(key)
    formatter = made(redact)
    RequestTrace("GET", f"/v1/models/{key}", model=key).write()
    access = caplog.records[-1]
    assert access.name == "omlxd.access"
    lines = (
        (access, 2),
        (record("%s", key), 1),
        (record("headers: %r", {"x": key}), 1),
        (record("headers: %r", (b"x", key.encode())), 1),
        (record("failed", exc=raised(FileNotFoundError(2, "No such file", key))), 1),
    )
    for line, times in lines:
        assert formatter.format(line).count("***") == times


def test_ordinary_words_stay():
    text = "the bearer of news: api keys read again, token=5 model=omlxd-demo path=/omlxd-x/y"
    assert Redactor()(text) == text.replace("bearer of", "bearer of")


def test_tracebacks_tell_where_and_what_kind_but_not_what_was_said():
    try:
        try:
            raise KeyError(PROMPT)
        except KeyError as cause:
            raise ValueError(f"bad: {PROMPT}") from cause
    except ValueError as error:
        said = private_trace(error)
    assert PROMPT not in said
    assert "KeyError" in said and "ValueError" in said and "direct cause" in said and "test_logs.py" in said
    assert "No such file" in private_trace(raised(FileNotFoundError(2, "No such file")))
    assert "out of memory" in private_trace(raised(RuntimeError("out of memory")))


def test_at_debug_tracebacks_are_whole(tmp_path: Path):
    Logs(settings(tmp_path, log_level="debug", log_file=str(tmp_path / "x.log")))
    logging.getLogger("omlxd.x").error("failed", exc_info=raised(ValueError(PROMPT)))
    assert PROMPT in (tmp_path / "x.log").read_text()


def test_what_an_engine_printed_at_debug_is_private_to_a_log_that_has_left_it(caplog):
    """A whole traceback may be in the pipe, or be written before the engine hears of the new level."""
    logging.getLogger("omlxd").setLevel(logging.DEBUG)
    text = f"{PROMPT}\nERROR omlxd.x: {PROMPT}\n" + "long " * 20_000 + PROMPT
    printed = LineFormatter().format(record("failed\nbadly", exc=raised(ValueError(text)))).split("\n")
    assert max(map(len, printed)) < 2**15
    line = EngineLines()
    for level, seen in (("INFO", False), ("DEBUG", True)):
        logging.getLogger("omlxd").setLevel(level)
        caplog.clear()
        for one in printed:
            line(one)
        assert [r.getMessage() for r in caplog.records][:2] == ["failed", "badly"]
        assert (PROMPT in caplog.text) == seen and "ValueError" in caplog.text
        assert all(r.levelname == "DEBUG" for r in caplog.records if PROMPT in r.getMessage())


def grep(text: str, *secrets: str) -> list[str]:
    return [line for line in text.splitlines() if any(secret in line for secret in secrets)]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_access_log_says_why_a_request_was_refused_and_whose_it_was(stream: bool, caplog):
    caplog.set_level("INFO", "omlxd.access")
    refused = Failed("invalid_request", f"tools: can't enforce the text '{PROMPT}' of 'f'", param="tools")
    agent = {"user-agent": "some-client/1.2"}
    bad_role = {"model": "tiny", "messages": [{"role": PROMPT, "content": PROMPT}]}
    async with client(app_of(FakeEngine([refused])), headers=agent) as http:
        for given in (
            bad_role,
            body(CHAT, stream=stream),
            body(CHAT, model=PROMPT),
            body(CHAT, model="gpt-4"),
        ):
            await http.post(CHAT, json=given)
        await http.post(CHAT, content=b"{" + PROMPT.encode())
    role, failed, unnamed, named, broken = (r.getMessage() for r in caplog.records)
    assert all("client=some-client/1.2 param=" in line for line in (role, failed, unnamed, named, broken))
    assert "status=400" in role and "param=messages.0.role problem: messages.0.role: " in role
    assert "outcome=invalid_request" in failed
    assert failed.endswith(r"param=tools problem: tools: can't enforce the text '...' of '...'")
    assert "param=model problem: There is no model '" in unnamed and "model=gpt-4 " in named
    assert "not valid JSON" in broken
    assert PROMPT not in caplog.text.replace(f"model={PROMPT}", "")


async def test_bodies_are_logged_at_debug_alone(caplog):
    async with client(app_of(FakeEngine(EVERYTHING))) as http:
        for level, lines in (("INFO", 1), ("DEBUG", 2)):
            caplog.clear()
            caplog.set_level(level, "omlxd.access")
            await http.post(CHAT, json={"messages": [{"role": "user", "content": PROMPT}]})
            assert len(caplog.records) == lines
            assert (PROMPT in caplog.text) == (level == "DEBUG")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["json", pytest.param("text", marks=pytest.mark.slow)])
def test_a_session_with_all_that_goes_wrong_leaves_no_key_and_no_prompt_in_the_log(
    form: str,
    start,  # noqa: F811
    tmp_path: Path,
):
    path = tmp_path / "omlxd.log"
    key = add_key(keys_path(tmp_path), "laptop")
    daemon = start("--log-file", str(path), "--log-format", form, env={"OMLXD_API_KEY": KEY})
    url = daemon.url + "/v1/completions"

    def ask(prompt: object, **headers: str) -> int:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
        return httpx.post(url, json=body, headers=headers, trust_env=False).status_code

    words = PROMPT.replace(" ", "-")
    assert ask(words, authorization=f"Bearer {KEY}") == 200
    assert ask(words, **{"x-api-key": key}) == 200
    assert ask(words, authorization=f"Bearer {KEY}wrong") == 401
    assert ask({words: [words]}, authorization=f"Bearer {KEY}") == 400
    assert ask(f"{words} fail", authorization=f"Bearer {KEY}") == 500
    assert ask(f"{words} nonsense", authorization=f"Bearer {KEY}") == 503
    assert ask(f"{words} die", authorization=f"Bearer {KEY}") == 503
    path_with_key = f"{daemon.url}/v1/{words}?key={KEY}"
    assert httpx.get(path_with_key, headers={"x-api-key": key}, trust_env=False).status_code == 404
    broken = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    assert httpx.post(url, content=b"{" + words.encode(), headers=broken, trust_env=False).status_code == 400
    assert daemon.stop() == 0
    log = path.read_text()
    assert log.count("/v1/completions") >= 7 and "laptop" in log and "401" in log
    assert grep(log + daemon.logged(), KEY, key) == []
    assert [line for line in grep(log + daemon.logged(), words) if "/v1/" + words not in line] == []
    assert key not in "".join(file.read_text() for file in tmp_path.glob("keys.json"))
    if form == "json":
        assert all(isinstance(json.loads(line), dict) for line in log.splitlines())
