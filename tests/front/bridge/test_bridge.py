"""`omlxd engine` as a real process, before a stub engine: its lines, its errors, its end."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import PATIENCE_S, wait_until
from engine_lines import EngineLines

from omlxd import chat
from omlxd.front.bridge.bridge import LINE_BYTES
from omlxd.front.bridge.messages import Lines
from tests.models.test_resolve import make


@pytest.fixture
def model(tmp_path: Path) -> str:
    make(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    started: list[EngineLines] = []

    def go(*flags: str, **options) -> EngineLines:
        started.append(EngineLines(tmp_path, *flags, **options))
        return started[-1]

    yield go
    for one in started:
        one.__exit__()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLines]:
    """One for all tests that leave it as it was."""
    home = tmp_path_factory.mktemp("shared")
    make(home / "tiny")
    with EngineLines(home, "--model", str(home / "tiny")) as lines:
        yield lines


@pytest.fixture
def lines(shared: EngineLines) -> EngineLines:
    shared.gate(open=False)
    assert shared.ask("generate", prompt="up")["type"] == "done"
    shared.heard.clear()
    return shared


def types(lines: EngineLines, id: object) -> list[str]:
    return [line["type"] for line in lines.heard if line["id"] == id]


def held_at_the_gate(lines: EngineLines, **fields: object) -> object:
    """A request that has said "one", and says "two" once the gate is open."""
    id = lines.send("generate", prompt="one gate two", **fields)
    lines.until(lambda line: line["id"] == id and line.get("text") == "one")
    return id


# --------------------------------------------------------------------------- requests


def test_it_loads_answers_and_tells_of_itself(start, model):
    lines = start()
    assert lines.until(lambda line: True).items() >= {"type": "ready", "id": None, "protocol": 1}.items()
    assert lines.ask("info")["state"] == "none"
    for op, more in (("generate", {"prompt": "one"}), ("classify", {"prompt": "one", "labels": ["a"]})):
        error = lines.ask(op, **more)
        assert error["code"] == "unavailable" and '"op": "load"' in error["message"]
    loaded = lines.ask("load", path=model)
    assert loaded["type"] == "loaded" and loaded["model"]["model_id"] == "tiny"
    id = lines.send("generate", prompt="hello there")
    done = lines.last(id)
    assert types(lines, id) == ["progress", "delta", "delta", "done"] and lines.text(id) == "hellothere"
    assert done["reason"] == "stop"
    usage = done["usage"]
    assert usage["prompt_tokens"] == 2 == usage["cached_hot"] + usage["cached_cold"] + usage["computed"]
    chat = lines.ask("chat", messages=[{"role": "user", "content": "two\nlines \u2028 and é"}])
    assert chat["type"] == "done" and lines.text(chat["id"]) == "hellothere"
    info = lines.ask("info")
    assert info["state"] == "ready" and info["model"]["context_length"] == 1000
    metrics = lines.ask("metrics")
    assert metrics["model"]["id"] == "tiny" and metrics["cold"]["cap"] > 0
    assert lines.ask("generate", prompt="one", model="tiny")["type"] == "done"
    other = lines.ask("generate", prompt="one", model="large")
    assert other["code"] == "not_found" and "large" in other["message"] and other["param"] == "model"
    for line in lines.heard:
        assert {"type", "id"} <= line.keys()


def test_what_is_asked_before_the_model_is_loaded_waits_for_it(start, model):
    lines = start("--model", model, stub="--load-s 0.5")
    first = lines.send("generate", prompt="hello")
    lines.write(
        b'{"op": "generate", "id": 1, "prompt": "one gate"}\n{"op": "cancel", "id": 2, "target": 1}\n'
    )
    assert lines.last(2)["found"] is True and lines.last(1)["reason"] == "cancelled"
    assert lines.last(first)["type"] == "done"
    kinds = [line["type"] for line in lines.heard if line["id"] in (None, first)]
    assert kinds == ["ready", "loaded", "progress", "delta", "done"]


def test_two_answers_at_once_are_told_apart_by_their_ids(lines):
    held_at_the_gate(lines, id=7)
    lines.last(lines.send("generate", id="quick", prompt="three four"))
    lines.gate(open=True)
    lines.last(7)
    told = [line["id"] for line in lines.heard if line["type"] in ("delta", "done")]
    assert told == [7, "quick", "quick", "quick", 7, 7]
    assert lines.text(7) == "onetwo" and lines.text("quick") == "threefour"


def test_a_request_that_is_cancelled_ends_and_the_engine_hears_of_it(lines):
    held = held_at_the_gate(lines)
    again = lines.send("cancel", target=held)
    assert lines.last(held)["reason"] == "cancelled" and lines.last(again)["found"] is True
    assert "usage" not in lines.last(held)
    wait_until(lambda: "cancel" in lines.notes(), why=lines.notes)
    assert lines.ask("cancel", target=held)["found"] is False
    lines.heard.clear()
    assert lines.last(lines.send("generate", prompt="three", id=held))["reason"] == "stop"


BAD = {
    b"hello": (None, "not valid JSON"),
    b"[1, 2]": (None, "must be a JSON object"),
    b'{"op": "dance", "id": 1}': (1, "op: it must be one of load, generate"),
    b'{"id": "x"}': ("x", "op: it must be one of"),
    b'{"op": "info"}': (None, "id: this field is required"),
    b'{"op": "info", "id": 1.5}': (None, "id"),
    b'{"op": "info", "id": ""}': (None, "id"),
    b'{"op": "generate", "id": 2}': (2, "prompt: this field is required"),
    b'{"op": "generate", "id": 3, "prompt": "one", "max_tokens": "many"}': (3, "max_tokens"),
    b'{"op": "generate", "id": 4, "prompt": "one", "n": 2}': (4, "n: a line has one answer"),
    b'{"op": "generate", "id": 13, "prompt": ["one", "two"]}': (13, "prompt: a line has one answer"),
    b'{"op": "chat", "id": 5, "messages": []}': (5, "at least one message"),
    b'{"op": "chat", "id": 6, "messages": [{"role": "king", "content": ""}]}': (6, "messages.0.role"),
    b'{"op": "classify", "id": 7, "prompt": "one"}': (7, "labels: this field is required"),
    b'{"op": "classify", "id": 8, "prompt": "one", "labels": []}': (8, "labels"),
    b'{"op": "classify", "id": 9, "prompt": "one", "labels": ["a", "a"]}': (9, "each may stand there once"),
    b'{"op": "load", "id": 10, "model": "/nowhere/at/all"}': (10, "there is no folder /nowhere/at/all"),
    b'{"op": "cancel", "id": 11}': (11, "target"),
    b'{"op": "load", "id": 14, "paht": "/models/tiny"}': (14, "paht: there is no such field"),
    b'{"op": "load", "id": 15, "model": "tiny", "path": "other"}': (15, "path: it is another name"),
    b"\xff\xfe": (None, "not valid JSON"),
    b'{"op": "info", "id": 12, "x": ' + b"[" * 100_000: (None, "nested too deeply"),
}


def test_a_line_that_makes_no_sense_is_an_error_and_nothing_else(lines):
    for bad, (id, message) in BAD.items():
        count = len(lines.heard)
        lines.write(bad + b"\n")
        error = lines.until(lambda line: line["type"] == "error", since=count)
        assert error["id"] == id and error["code"] == "invalid_request", error
        assert message in error["message"], error
    lines.write(b"\n   \n\r\n")
    assert lines.ask("generate", prompt="still here")["type"] == "done"


IGNORED: dict[str, tuple[dict[str, object], list[str]]] = {
    "load": ({"model": None, "path": None}, []),
    "generate": ({"prompt": "one", "max_tokns": 4, "max_tokens": 4}, ["max_tokns"]),
    "chat": (
        {"messages": [{"role": "user", "content": "script:one", "nam": "x"}], "top_k": 1, "topk": 1},
        ["messages.*.nam", "topk"],
    ),
    "classify": ({"prompt": "one", "labels": ["a"], "top_logprobs": 1, "lables": []}, ["lables"]),
    "inspect": ({"prompt": "one", "query": 0, "layer": 3}, ["layer"]),
    "info": ({"more": True}, ["more"]),
    "metrics": ({"more": True}, ["more"]),
    "cancel": ({"target": "none", "id_of": "x"}, ["id_of"]),
}


@pytest.mark.parametrize("op", IGNORED)
def test_a_field_that_nobody_reads_is_told(lines, op):
    fields, names = IGNORED[op]
    assert sorted(lines.ask(op, **fields).get("ignored", [])) == names


def test_the_last_line_of_all_tells_of_quit_s_fields(start):
    lines = start()
    assert lines.ask("quit", id=1, at_once=True) == {"type": "bye", "id": 1, "ignored": ["at_once"]}


def test_ids_of_tokens_come_with_their_text():
    answer = [
        chat.Progress(0, 3),
        chat.TokenIds((5,), (1, 2, 3)),
        chat.ReasoningDelta("so"),
        chat.TokenIds((6,), ()),
        chat.TokenIds((7,), ()),
        chat.TextDelta("yes"),
        chat.TokenIds((8,), ()),
        chat.Finished("stop", chat.Usage()),
    ]
    of = Lines(1).of
    lines = [line for event in answer if (line := of(event)) is not None]
    assert [line["type"] for line in lines] == ["progress", "delta", "delta", "done"]
    told = [(line.get("reasoning") or line.get("text"), line.get("token_ids")) for line in lines]
    assert told == [(None, None), ("so", [5]), ("yes", [6, 7]), (None, [8])]
    assert [line.get("prompt_token_ids") for line in lines] == [None, [1, 2, 3], None, None]


def test_a_line_that_is_too_long_is_passed_over(lines):
    lines.write(b'{"op": "info", "id": 1, "x": "' + b"x" * LINE_BYTES + b'"}\n')
    error = lines.until(lambda line: line["type"] == "error")
    assert error["id"] is None and error["code"] == "request_too_large"
    assert str(LINE_BYTES) in error["message"]
    assert lines.ask("generate", prompt="still here")["type"] == "done"


def test_an_id_in_use_is_refused_without_ending_whose_it_is(lines):
    held_at_the_gate(lines, id=1)
    lines.send("generate", id=1, prompt="three")
    error = lines.until(lambda line: line["type"] == "error")
    assert error["id"] is None and error["param"] == "id" and "1 is in use" in error["message"]
    lines.gate(open=True)
    assert lines.last(1)["type"] == "done" and lines.text(1) == "onetwo"


def test_an_engine_that_dies_costs_its_requests_alone(lines):
    died = lines.ask("generate", prompt="one die")
    assert died["code"] == "unavailable" and died["retry_after"] and "Retry" in died["message"]
    assert lines.ask("generate", prompt="again")["type"] == "done"


# --------------------------------------------------------------------------- models


def test_another_model_takes_the_place_of_the_first(start, model, tmp_path):
    make(tmp_path / "else" / "other")
    make(tmp_path / "else" / "tiny")
    lines = start("--model", model)
    held = held_at_the_gate(lines)
    load = lines.send("load", model=str(tmp_path / "else" / "other"))
    after = lines.send("generate", prompt="three")
    lines.gate(open=True)
    assert lines.last(after)["type"] == "done"
    assert lines.last(load)["model"]["model_id"] == "other"
    last_lines = [line["id"] for line in lines.heard if line["type"] in ("done", "loaded") and line["id"]]
    assert last_lines == [held, load, after]
    # Another folder of the name of the first one.
    assert lines.ask("load", model=str(tmp_path / "else" / "tiny"))["model"]["model_id"] == "tiny"
    assert seen(lines) == [
        f"load {model}",
        "quit",
        f"load {tmp_path}/else/other",
        "quit",
        f"load {tmp_path}/else/tiny",
    ]
    # The same once more is no work, and one that isn't there changes nothing.
    assert lines.ask("load", model=str(tmp_path / "else" / "tiny"))["type"] == "loaded"
    assert lines.ask("load", model=str(tmp_path / "none"))["code"] == "invalid_request"
    assert lines.ask("generate", prompt="four")["type"] == "done"
    assert len(seen(lines)) == 5
    # And back to what `--model` says.
    assert lines.ask("load")["type"] == "loaded"
    assert seen(lines)[5:] == ["quit", f"load {model}"]


def seen(lines: EngineLines) -> list[str]:
    """What stub engines were told to load, and to quit."""
    told = [line for line in lines.notes().splitlines() if line.startswith(("load", "quit"))]
    return [line.split(" cold=")[0] for line in told]


def test_a_load_that_fails_is_told_to_whoever_asks(start, model):
    lines = start(stub="--load-fails 'it has no weights'")
    load = lines.send("load", model=model)
    asked = lines.send("generate", prompt="one")
    assert lines.last(load)["code"] == "unavailable" and "it has no weights" in lines.last(load)["message"]
    message = lines.last(asked)["message"]
    assert "it has no weights" in message and "`load` again" in message
    assert lines.ask("info")["state"] == "none"


# --------------------------------------------------------------------------- the end


def test_quit_ends_in_order(start, model):
    lines = start("--model", model)
    lines.ask("generate", prompt="up")
    id = lines.send("quit")
    assert lines.ended() == 0
    assert lines.heard[-1] == {"type": "bye", "id": id}
    assert "quit" in seen(lines)


def test_a_load_and_what_follows_it_are_answered_before_a_quit(start, model):
    lines = start(stub="--load-s 0.3")
    lines.write(
        json.dumps({"op": "load", "id": 1, "model": model}).encode()
        + b'\n{"op": "generate", "id": 2, "prompt": "one two"}\n'
        + b'{"op": "classify", "id": 4, "prompt": "one", "labels": ["a", "b"]}\n{"op": "quit", "id": 3}\n'
    )
    assert lines.ended() == 0
    assert types(lines, 1) == ["loaded"] and lines.text(2) == "onetwo"
    assert "shutting down" not in json.dumps(lines.heard), "all labels are still asked for"
    assert lines.heard[-1] == {"type": "bye", "id": 3}


def test_at_the_end_of_its_input_it_answers_what_was_asked(start, model):
    lines = start(stub="--load-s 0.3")
    lines.send("load", id=1, model=model)
    lines.write(b'{"op": "generate", "id": 2, "prompt": "one two"}')  # and no end of the line
    lines.stdin.close()
    assert lines.ended() == 0
    assert types(lines, 2)[-1] == "done" and lines.text(2) == "onetwo"
    assert lines.heard[-1] == {"type": "bye", "id": None}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(start, model, number):
    lines = start("--model", model)
    held = held_at_the_gate(lines)
    lines.process.send_signal(number)
    lines.gate(open=True)
    assert lines.ended() == 0
    last = lines.last(held)
    # It had ten seconds to end.
    assert last.get("code") == "unavailable" or (last["type"], lines.text(held)) == ("done", "onetwo")
    assert lines.heard[-1] == {"type": "bye", "id": None} and "quit" in seen(lines)


def test_a_second_signal_ends_it_at_once(start, model):
    lines = start("--model", model)
    held_at_the_gate(lines)

    def over() -> bool:
        lines.process.send_signal(signal.SIGTERM)
        return lines.process.poll() is not None

    wait_until(over)
    assert lines.process.returncode == 1


def test_it_ends_while_it_loads(start, model):
    lines = start("--model", model, stub="--load-s 600")
    held = lines.send("generate", prompt="one")
    wait_until(lambda: "load " in lines.notes())
    assert lines.stop() == 0
    assert lines.last(held)["code"] == "unavailable" and lines.heard[-1]["type"] == "bye"


def test_a_client_that_reads_no_more_ends_it(start, model):
    lines = start("--model", model, read=False)
    lines.send("generate", prompt="one gate " + "x " * 1000 + "hang")
    while json.loads(lines.stdout.readline()).get("text") != "one":
        pass
    lines.stdout.close()
    lines.gate(open=True)
    assert lines.process.wait(2 * PATIENCE_S) == 0
    assert "cancel" in lines.notes() and "quit" in seen(lines)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_an_output_that_can_not_be_written(start, model):
    for redirected, status, told in (
        ("> /dev/full", 1, "Standard output can't be written: No space left on device."),
        (">&-", 2, "Standard input and output must be open"),
        ("<&-", 2, "Standard input and output must be open"),
    ):
        shell = ("/bin/sh", "-c", f'exec {shlex.quote(sys.executable)} -m omlxd "$@" {redirected}', "sh")
        lines = start("--model", model, program=shell)
        assert lines.ended() == status and not lines.heard
        assert told in lines.logged()


# --------------------------------------------------------------------------- its surroundings


@pytest.mark.slow
def test_another_that_holds_the_cache_folder(start, model):
    first = start("--model", model)
    first.ask("generate", prompt="up")
    second = start("--model", model)
    error = second.until(lambda line: True)
    assert error["type"] == "error" and error["id"] is None and error["code"] == "unavailable"
    assert f"process {first.process.pid}" in error["message"] and "--if-cache-busy no-ssd" in error["message"]
    assert second.ended() == 1 and [line["type"] for line in second.heard] == ["error"]
    assert error["message"] in second.logged()
    third = start("--model", model, "--if-cache-busy", "no-ssd")
    assert third.ask("generate", prompt="one")["type"] == "done"
    assert "cold" not in third.ask("metrics")


NOISE = """
import os, sys
import omlxd.front.bridge.command as command
from omlxd.cli.main import main

before = command.make_base
def noisy(settings):
    print("noise of a print", flush=True)
    os.write(1, b"noise of a library\\n")
    os.system("echo noise of a program")
    before(settings)
command.make_base = noisy
sys.exit(main(sys.argv[1:]))
"""


def test_nothing_but_lines_stands_on_its_output(start, model):
    lines = start("--model", model, program=(sys.executable, "-c", NOISE))
    assert lines.ask("generate", prompt="one")["type"] == "done"
    lines.send("quit")
    assert lines.ended() == 0  # Every line was read as JSON.
    assert lines.logged().count("noise of") == 3


@pytest.mark.parametrize("flags", [["--port", "8000"], ["--block-size", "7"]])
def test_settings_that_make_no_sense(start, flags):
    lines = start(*flags)
    assert lines.ended() == 2 and not lines.heard
    assert lines.logged().startswith("omlxd: ") and flags[0] in lines.logged()


def test_settings_of_the_daemon_in_the_file_are_no_trouble(start, model, tmp_path):
    (tmp_path / "omlxd").mkdir()
    (tmp_path / "omlxd" / "omlxd.toml").write_text(
        '[serve]\nhost = "0.0.0.0"\nmax-loaded-models = 1\nno-jit-load = true\nlog-file = "x.log"\n'
    )
    lines = start("--model", model)
    assert lines.ask("generate", prompt="one")["type"] == "done"
    assert "loaded tiny" in lines.logged()
