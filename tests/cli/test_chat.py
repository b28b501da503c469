"""`omlxd chat` on a terminal (tmux's, and a plain pty), in pipes, and with a daemon of its own."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import io
import json
import os
import pty
import re
import select
import shlex
import shutil
import socketserver
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from daemon import PATIENCE_S, alive, free_port, wait_until
from fast_or_slow import rest_slow
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from terminal_screen import shown

from omlxd.cli import main as command
from omlxd.cli.chat import command as chat
from omlxd.cli.chat import conversation
from omlxd.cli.chat.terminal import Terminal, in_words
from omlxd.cli.chat.writer import split_done
from omlxd.cli.daemon.client import DaemonError, Usage
from omlxd.cli.launch import Target
from omlxd.config.keys import add_key, keys_path
from omlxd.errors import ConfigError, OmlxdError
from tests.front.process.test_serve import REPO, STUB, Daemon, start  # noqa: F401
from tests.models.test_resolve import make

CHAT = (sys.executable, "-m", "omlxd", "chat")


def variables(home: Path, **more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(REPO), "LANG": "C.UTF-8", **more}


class Tmux:
    """A command in a tmux window of 80 by 24."""

    def __init__(self, folder: Path, command: tuple[str, ...], environ: Mapping[str, str]):
        self._tmux = ("tmux", "-S", str(folder / "tmux.sock"), "-f", "/dev/null")
        line = shlex.join(["env", "-i", "TERM=screen", *(f"{k}={v}" for k, v in environ.items()), *command])
        self._run("new-session", "-d", "-x", "80", "-y", "24", f"{line}; echo status=$?; sleep 600")

    def _run(self, *words: str) -> str:
        return subprocess.run([*self._tmux, *words], check=True, capture_output=True, text=True).stdout

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", text)

    def press(self, key: str) -> None:
        self._run("send-keys", key)

    def screen(self) -> str:
        return self._run("capture-pane", "-p").rstrip()

    def close(self) -> None:
        self._run("kill-server")


class Pty:
    """The same on a pty alone: what was written, without colours."""

    def __init__(self, folder: Path, command: tuple[str, ...], environ: Mapping[str, str]):
        self._pid, self.fd = pty.fork()
        if self._pid == 0:
            os.execvpe(
                "sh",
                ["sh", "-c", f"trap : INT; {shlex.join(command)}; echo status=$?"],
                {**environ, "TERM": "vt100"},
            )
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.written = b""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def press(self, key: str) -> None:
        self.type({"Enter": "\r", "C-c": "\x03", "C-d": "\x04"}[key])

    def screen(self) -> str:
        with contextlib.suppress(OSError):  # The terminal is closed.
            while select.select([self.fd], [], [], 0)[0]:
                self.written += os.read(self.fd, 4096)
        return shown(self.written.decode(errors="replace"))

    def close(self) -> None:
        os.close(self.fd)
        os.waitpid(self._pid, 0)


@pytest.fixture(params=rest_slow([Tmux, Pty], Pty))
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator:
    if request.param is Tmux and shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    opened: list[Tmux | Pty] = []

    def open_one(*command: str, **environ: str) -> Tmux | Pty:
        opened.append(request.param(tmp_path, command, variables(tmp_path, **environ)))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def wait_for(terminal: Tmux | Pty, pattern: str) -> str:
    wait_until(lambda: bool(re.search(pattern, terminal.screen())), why=lambda: terminal.screen())
    return terminal.screen()


def say(terminal: Tmux | Pty, line: str, pattern: str) -> str:
    terminal.type(line)
    terminal.press("Enter")
    return wait_for(terminal, pattern)


def test_a_session(terminal, start, capsys: pytest.CaptureFixture[str]):  # noqa: F811
    daemon: Daemon = start()
    screen = terminal(*CHAT, "--url", daemon.url)
    wait_for(screen, r"tiny, context 1000 tokens\. /help lists commands; Ctrl-D leaves\.\n>$")
    say(screen, "script:think:hm think:hmm first answer", r"\nhmhmm\n\nfirstanswer\n>$")
    say(screen, "script:begun gate never", r"\nbegun$")
    screen.press("C-c")
    wait_for(screen, r"begun(\^C)?\n\(stopped\)\n>$")
    wait_until(lambda: "cancel" in daemon.notes())
    say(
        screen,
        "script:long cut",
        r"\nlong\n\(cut: the limit of tokens \(--max-tokens\) or the context (.|\n)*\n>$",
    )
    say(screen, "script:half die", r"The engine of tiny stopped: (.|\n)*\n>$")
    say(screen, "/stats", r"1 +4 +0 +0 +4 +\d+\.\d\d s +4 .*\n2 +- +- +- +- +\d+\.\d\d s +1\+ +-\n(.|\n)*>$")
    say(screen, "/model", r"\* tiny +\w+\n>$")
    say(screen, "/model other", r"There is no model 'other' there; the models are: tiny\.\n>$")
    say(screen, "/nonsense", r"There is no /nonsense; /help lists commands\.\n>$")
    say(screen, "/help", r"/clear +begins a new conversation(.|\n)*Ctrl-D +leaves, as /quit does\n>$")
    shown = say(screen, "/clear", r"A new conversation begins\.\n>$")
    say(screen, "/stats", r"There is no answer yet\.\n>$")
    screen.press("C-d")
    ended = wait_for(screen, r"status=0")
    with capsys.disabled():
        print(f"\n{type(screen).__name__}:\n{shown}\n{'-' * 80}\n{ended[-60:]}")
    if isinstance(screen, Pty):
        assert b"\x1b[2;3mhm\x1b[0m" in screen.written  # Thinking is dim.


def test_what_is_typed_in_an_answer_waits_for_the_next_prompt(terminal, start, tmp_path: Path):  # noqa: F811
    daemon: Daemon = start()
    screen = terminal(*CHAT, "--url", daemon.url)
    wait_for(screen, r"Ctrl-D leaves\.\n>$")
    say(screen, "script:begun gate more", r"\nbegun$")
    for line in ("script:second hang", "script:third"):
        screen.type(line)
        screen.press("Enter")
    screen.type("unfinished")
    (tmp_path / "gate").touch()
    wait_for(screen, r"begunmore\n> script:second hang\n(.*\n)?second$")
    screen.press("C-c")
    wait_for(screen, r"second\n\(stopped\)\n> script:third\n(.*\n)?third\n> unfinished$")
    if isinstance(screen, Pty):
        assert termios.tcgetattr(screen.fd)[3] & termios.NOFLSH == 0


def test_a_session_without_a_daemon_starts_one_and_ends_it(terminal, tmp_path: Path):
    port = str(free_port())
    engine = shlex.join([sys.executable, str(STUB), "--notes", str(tmp_path)])
    model = str(make(tmp_path / "tiny"))
    add_key(keys_path(tmp_path / ".omlxd"), "laptop")  # Which the command does not know.
    screen = terminal(*CHAT, OMLXD_PORT=port, OMLXD_MODEL=model, OMLXD_ENGINE_COMMAND=engine)
    wait_for(screen, r"no daemon runs; starting one for this chat\s*\n(.|\n)*context 1000 tokens")
    say(screen, "hi", r"hellothere\n>$")
    serves = daemons_of(tmp_path)
    assert len(serves) == 1
    say(screen, "/quit", "status=0")
    assert not any(map(alive, serves))
    assert "quit" in (tmp_path / "notes.txt").read_text()


def daemons_of(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "serve" in process.cmdline() and process.environ().get("HOME") == str(home):
                found.append(process)
    return found


@pytest.mark.parametrize("how", ["terminal", "kill"])
def test_who_goes_away_takes_the_daemon_along(tmp_path: Path, how: str):
    engine = shlex.join([sys.executable, str(STUB), "--notes", str(tmp_path)])
    more = {"OMLXD_PORT": str(free_port()), "OMLXD_MODEL": str(make(tmp_path / "tiny"))}
    screen = Pty(tmp_path, CHAT, variables(tmp_path, OMLXD_ENGINE_COMMAND=engine, **more))
    wait_for(screen, "context 1000 tokens")
    (serve,) = daemons_of(tmp_path)
    if how == "kill":
        serve.parent().kill()
    screen.close()
    wait_until(lambda: not alive(serve))  # Its parent is gone: who inherits it may never ask how it ended.


def run(url: str, *argv: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    command = [*CHAT, *(["--url", url] if url else []), *argv]
    environ = variables(Path("/nonexistent"), **more)
    done = subprocess.run(command, env=environ, input=stdin, capture_output=True, text=True, timeout=120)
    done.stderr = once_loaded(done.stderr)
    return done


def once_loaded(stderr: str) -> str:
    """What a command says beside `waiting for … to load`, which depends on the machine's speed."""
    return re.sub(r"^omlxd: waiting for .* to load\n", "", stderr)


def test_questions_from_arguments_and_pipes(start):  # noqa: F811
    url = start().url
    done = run(url, "what", "is", "this?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hellothere\n", "")
    assert (
        run(url, stdin="script:think:hm \x1b[31mred").stdout == "\x1b[31mred\n"
    )  # As it is, without thoughts.
    assert run(url, "read this:", stdin="script:from the pipe").stdout == "fromthepipe\n"
    assert "standard input is empty" in run(url).stderr


@pytest.mark.parametrize("lang", rest_slow(["C.UTF-8", "C"], "C"))
def test_a_question_in_another_encoding_is_asked_all_the_same(start, tmp_path: Path, lang: str):  # noqa: F811
    daemon = start()
    told = variables(tmp_path, LANG=lang)
    asked = [os.fsencode(word) for word in CHAT]
    for word, piped in ((b"script:caf\xe9", b""), (b"", b"script:caf\xe9")):
        command = [*asked, b"--url", daemon.url.encode(), b"--system", b"caf\xe9", word]
        done = subprocess.run(command, input=piped, env=told, capture_output=True, timeout=PATIENCE_S)
        assert (done.returncode, done.stdout) == (0, "caf\ufffd\n".encode()), done.stderr


def test_a_question_is_asked_without_a_standard_input(start, tmp_path: Path):  # noqa: F811
    line = f"{shlex.join([*CHAT, '--url', start().url])} hello <&-"
    done = subprocess.run(["sh", "-c", line], env=variables(tmp_path), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "hellothere\n"), done.stderr


def test_pictures_and_pdfs_go_with_one_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bodies: list[dict[str, Any]] = []

    def answered(self: Target, path: str, body: bytes, kind: type) -> Iterator[conversation.Chunk]:
        bodies.append(json.loads(body))
        yield conversation.Chunk([conversation._Choice(conversation.Delta("seen"), "stop")])

    monkeypatch.setattr(Target, "stream", answered)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.png").write_bytes(b"png")
    (tmp_path / "k").write_bytes(b"%PDF-1.4")
    talk = conversation.Conversation(Target("http://x", model="m", context=None))
    terminal = Terminal(talk, Console(file=io.StringIO()))
    for name in ("'a b.png'", "a\\ b.png", "~/k"):
        monkeypatch.setenv("HOME", str(tmp_path))
        terminal._take(f"/image {name}")
    for question in ("what is it?", "and now?"):
        terminal._take(question)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}
    file = {
        "type": "file",
        "file": {"filename": "k", "file_data": "data:application/pdf;base64,JVBERi0xLjQ="},
    }
    first, second = (body["messages"] for body in bodies)
    assert first[0]["content"] == [image, image, file, {"type": "text", "text": "what is it?"}]
    assert second[:1] == first and second[-1]["content"] == "and now?"
    with open("large.png", "wb") as large:
        large.truncate(conversation.MOST_FILE_BYTES + 1)
    (tmp_path / "a.txt").write_text("text")
    for name, words in (
        ("none.png", "none.png: No such file or directory."),
        ("a.txt", "a.txt: send a PNG, JPEG, WebP or GIF, or a PDF."),
        ("large.png", "large.png: it is larger than 20 MiB."),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            conversation.image_part(name)


def test_a_paste_is_one_question_and_so_is_what_stands_in_quotes(terminal, start, tmp_path: Path):  # noqa: F811
    daemon: Daemon = start()
    screen = terminal(*CHAT, "--url", daemon.url)
    wait_for(screen, r"leaves\.\n>$")
    screen.type("\x1b[200~script:a b\rc d\x1b[201~")
    wait_for(screen, r"> script:a b\n  c d$")
    screen.press("Enter")
    wait_for(screen, r"\nab\nc?d?d?\n?>$|\nabcd\n>$")
    screen.type('"""script:e')
    screen.press("Enter")
    say(screen, 'f"""', r"\nef\n>$")
    screen.press("C-d")
    wait_for(screen, r"status=0$")
    history = tmp_path / ".omlxd" / "chat_history"
    assert history.stat().st_mode & 0o077 == 0
    assert "+script:a b\n+c d\n" in history.read_text()


class Model:
    """Answers each question with the next of `answers`, and keeps the bodies."""

    def __init__(self, *answers: str):
        self.answers, self.bodies = [*answers], []

    def stream(self, target: Target, path: str, body: bytes, kind: type) -> Iterator[conversation.Chunk]:
        self.bodies.append(json.loads(body))
        answer = self.answers.pop(0)
        if answer.startswith("error "):
            raise DaemonError(answer.removeprefix("error "))
        for piece in re.findall(r"(?s).{1,3}", answer):
            yield conversation.Chunk([conversation._Choice(conversation.Delta(piece))])
        yield conversation.Chunk([conversation._Choice(conversation.Delta(), "stop")])


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch):
    """A terminal, the model behind it, and what it shows."""

    def begin(*answers: str, **options: Any):
        model, out = Model(*answers), io.StringIO()
        monkeypatch.setattr(Target, "stream", lambda *words: model.stream(*words))
        talk = conversation.Conversation(Target("http://x", model="m", context=None))
        console = Console(file=out, force_terminal=True, width=60, height=30, _environ={"TERM": "xterm"})
        terminal = Terminal(talk, console, **options)

        def take(line: str) -> str:
            before = out.tell()
            try:
                terminal._take(line)
            except OmlxdError as error:
                return in_words(error)
            return shown(out.getvalue()[before:].replace("\n", "\r\n"), 60)

        return take, model

    return begin


def test_commands_change_what_is_asked(talking, tmp_path: Path):
    take, model = talking("one", "two", "three", "error messages.0.content: the model stumbles", "five")
    assert take("hello") == "one"
    assert take("/set temperature 0.5") == "temperature is 0.5."
    assert take("/set parameter num_predict 20") == "max_tokens is 20."
    assert take("/set think") == "think is on." and take("/set stop END") == "stop is 'END'."
    assert take("/system") == "There is no system message."
    assert take('/system """be\nshort"""') == "be\nshort"
    assert take("again") == "two"
    body = model.bodies[-1]
    assert (body["temperature"], body["max_tokens"], body["stop"], body["enable_thinking"]) == (
        0.5,
        20,
        ["END"],
        True,
    )
    roles = [(message["role"], message["content"]) for message in body["messages"]]
    assert roles == [("system", "be\nshort"), ("user", "hello"), ("assistant", "one"), ("user", "again")]
    assert take("/retry 1.5") == "three"
    again = model.bodies[-1]
    assert again["temperature"] == 1.5 and again["messages"] == body["messages"]
    assert take("/set temperature default") == "temperature is default."
    assert take("more") == "the model stumbles"
    assert take("/retry") == "five" and "temperature" not in model.bodies[-1]
    told = [message["content"] for message in model.bodies[-1]["messages"]]
    assert told == ["be\nshort", "hello", "one", "again", "three", "more"]
    assert "talk.md" in take(f"/save {tmp_path}/talk.md") and "talk.json" in take(
        f"/save {tmp_path}/talk.json"
    )
    assert "**user**\n\nmore\n\n**assistant**\n\nfive\n" in (tmp_path / "talk.md").read_text()
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["model"] == "m" and [each["content"] for each in saved["messages"]] == [*told, "five"]
    assert "is there already" in take(f"/save {tmp_path}/talk.md")
    assert take("/clear") == "A new conversation begins." and take("/retry") == "There is no question yet."


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("--format json", {"response_format": {"type": "json_object"}}),
        ("--format TEXT", {"response_format": AS_SCHEMA}),
        ("--format FILE", {"response_format": AS_SCHEMA}),
        ("--keepalive 5m", {"keep_alive": "5m"}),
        ("--keepalive 0", {"keep_alive": "0"}),
        ("--keepalive=-1", {"keep_alive": "-1"}),
        ("--hidethinking --temperature 0.5", {"temperature": 0.5}),
    ],
)
@pytest.mark.parametrize("order", ["what is {}", "{} what is", "what {} is"])
def test_flags_as_ollama_has_them_before_and_behind_the_question(
    words, fields, order, tmp_path: Path, monkeypatch, capsys
):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    texts = {"TEXT": json.dumps(SCHEMA), "FILE": str(tmp_path / "schema.json")}
    model = Model("an answer")
    monkeypatch.setattr(Target, "stream", lambda *asked: model.stream(*asked))
    monkeypatch.setattr(
        chat, "daemon", lambda *_: contextlib.nullcontext(Target("http://x", model="m", context=None))
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    argv = [texts.get(word, word) for word in order.format(words).split()]
    for verb in (["chat"], ["run", "--url", "http://x", "m"]):
        model.answers = ["an answer"]
        assert command.main([*verb, *argv]) == 0
        assert capsys.readouterr().out == "an answer\n"
        body = model.bodies.pop()
        assert body["messages"] == [{"role": "user", "content": "what is"}]
        own = ("response_format", "keep_alive", "temperature")
        assert {name: body[name] for name in own if name in body} == fields


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("chat", "--format", "nofile", "hi"), "--format: 'nofile' is neither `json`, nor a JSON Schema"),
        (("chat", "--format", "[1]", "hi"), "--format: '[1]' is neither"),
        (("chat", "--format", '{"a"', "hi"), "--format: The schema is no JSON object"),
        (("run", "m", "--keepalive", "never"), "--keepalive: 'never' is no length of time: write 30m"),
        (("run", "--keepalive", "5m"), "Model is missing"),
        (("chat", "hi", "--nix", "there"), "--nix is not a flag of `omlxd chat`"),
    ],
)
def test_a_flag_that_makes_no_sense_is_a_sentence(argv, words, capsys):
    assert command.main(argv) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_another_model_is_loaded_and_shown(talking, monkeypatch):
    take, model = talking("one", "two")
    asked: list[tuple[str, Any]] = []
    there = {"id": "org/big", "max_input_tokens": 4096, "omlxd": {"state": "ready", "kind": "chat"}}

    def fetch(target: Target, path: str, kind: type, body: Any = None, *more: Any) -> Any:
        asked.append((path, body and json.loads(body)))
        answers = {
            "/v1/models": {"data": [there]},
            "/api/generate": {"done": True},
            "/omlxd/models/org/big": {"id": "org/big", "state": "ready", "source": "hub"},
        }
        if path not in answers:
            raise DaemonError("no such model")
        return msgspec.convert(answers[path], kind)

    monkeypatch.setattr(Target, "fetch", fetch)
    assert take("hello") == "one"
    assert take("/load big").endswith("org/big, context 4096 tokens. A new conversation begins.")
    assert ("/api/generate", {"model": "org/big", "stream": False}) in asked
    assert take("again") == "two"
    assert (model.bodies[-1]["model"], len(model.bodies[-1]["messages"])) == ("org/big", 1)
    assert "There is no model 'nix' there" in take("/load nix")
    assert take("/show").startswith("org/big\n  state       ready\n")
    assert take("/set format json") == "format is json."
    assert "format              json\n" in take("/show parameters")
    assert take("/set noformat") == "format is text." and take("/show system") == take("/system")


def test_json_keeps_its_indentation(talking):
    answer = '{\n    "a": [\n        1,\n        2\n    ]\n}'
    take, _ = talking(answer, answer)
    take("/set format json")
    assert [line.rstrip() for line in take("list").splitlines() if line.strip()] == [
        f" {line}" for line in answer.splitlines()
    ]
    take("/set format none")
    assert "        1," not in take("list"), "Markdown has no indentation"


def test_what_is_mistyped_names_the_nearest(talking):
    take, _ = talking()
    for line, words in {
        "/retyr": "There is no /retyr (did you mean /retry?); /help lists commands.",
        "/set temprature 1": "There is no setting 'temprature' (did you mean temperature?); /set shows them.",
        "/set temperature": "/set temperature: say what it shall be, or `default`.",
        "/set temperature hot": "temperature: 'hot' is no number from 0 to 2.",
        "/set top_k 1.5": "top_k: '1.5' is no whole number from 0 to 1,000,000,000.",
        "/set think perhaps": "/set think: 'perhaps' is neither on nor off.",
        "/retry nan": "temperature: 'nan' is no number from 0 to 2.",
        "/load": "/load: name a model; /model shows them.",
        "/show licence": "/show: 'licence' is none of info, parameters and system.",
        "/set format": "/set format: say json, a JSON Schema, or a file that holds one; or `text`.",
        "/set format xml": "/set format: 'xml' is neither `json`, nor a JSON Schema, nor a file that "
        "holds one. Say json, a JSON Schema, or a file that holds one; or `text`.",
        "/set format text": "format is text.",
        "/set format none": "format is text.",
        "/retry": "There is no question yet.",
        "/load talk.json": "/load: it takes a model; a saved conversation is a file, and isn't loaded again.",
        "/save": "/save: name a file, as talk.md or talk.json.",
        "/save /tmp/x.md": "There is no answer yet.",
    }.items():
        assert " ".join(take(line).split()) == words
    long = DaemonError("prompt is too long: 9000 tokens > 8191 maximum. Shorten the prompt.")
    assert (
        in_words(long)
        == "The conversation has 9,000 tokens, and the model reads 8,191: /clear begins a new one."
    )


MARKDOWN = """# Fruit

Some are **red**,
some are `green`:

1. apples

   of all kinds

2. pears

```python
def f():

    return 1
```

| a | b |
|---|---|
| 1 | 2 |

The end."""


def test_markdown_is_drawn_the_same_in_pieces_and_at_once(talking):
    take, _ = talking(MARKDOWN)
    lines = take("go").splitlines()
    for line in ("Fruit", "Some are red,", "some are green:", " 1 apples", " 2 pears", "The end."):
        assert line in [each.rstrip() for each in lines], lines
    assert any("return 1" in line for line in lines)
    assert not any("**" in line or "```" in line for line in lines)
    take, _ = talking(MARKDOWN, markdown=False)
    assert take("go") == MARKDOWN


@given(
    st.lists(st.sampled_from(["a\n", "\n", "```\n", "- b\n", "    c\n", "1. d\n", "~~~\n", "e"]), max_size=14)
)
def test_blocks_that_are_done_stay_as_they_are(parts):
    text, done = "", ""
    for part in parts:
        text += part
        head, rest = split_done(text)
        assert head + rest == text and head.startswith(done)
        done = head
        assert not head or head.endswith("\n\n") or head.strip() == ""


def test_a_block_that_is_higher_than_the_screen_is_drawn_once(talking):
    answer = "\n".join(f"- {number}" for number in range(100))
    take, _ = talking(answer)
    lines = take("go").splitlines()
    assert [line.split()[-1] for line in lines if line.strip()] == [str(number) for number in range(100)]


def test_a_picture_that_the_model_cannot_see_is_a_sentence(start, tmp_path: Path):  # noqa: F811
    url, file = start().url, tmp_path / "a.png"
    file.write_bytes(b"png")
    done = run(url, "what is it?", "--image", str(file))
    assert done.returncode == 1 and "tiny reads no images" in done.stderr
    assert run(url, "what?", "--image", "none.png").stderr == "omlxd: none.png: No such file or directory.\n"


@pytest.mark.slow
def test_an_answer_has_a_limit_of_tokens(start, tmp_path: Path):  # noqa: F811
    url = start().url
    assert run(url, "script:limit").stdout == "4096\n"
    cut = run(url, "script:limit cut", "--max-tokens", "7")
    assert cut.stdout == "7\n" and cut.stderr.startswith("omlxd: cut: the limit of tokens (--max-tokens)")
    argv = [*CHAT, "--url", url, "--max-tokens", "7", "script:limit cut"]
    both = subprocess.run(
        argv, env=variables(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
    )
    assert both.stdout.startswith(b"7\nomlxd: cut: ")
    assert "--max-tokens" in run(url, "hello", "--max-tokens", "0").stderr
    assert run(url, "hello", "--max-tokens", "many").returncode == 2


@pytest.mark.slow
def test_errors_are_sentences(start, tmp_path: Path):  # noqa: F811
    daemon: Daemon = start(env={"OMLXD_API_KEY": "key-of-this-test"})
    refused = run(daemon.url, "hello")
    assert refused.returncode == 1
    assert refused.stderr == f"omlxd: The daemon at {daemon.url} wants its key: set OMLXD_API_KEY.\n"
    key = {"OMLXD_API_KEY": "key-of-this-test"}
    assert run(daemon.url, "hello", **key).stdout == "hellothere\n"
    unknown = run(daemon.url, "hello", "--model", "other", **key)
    assert unknown.stderr == "omlxd: There is no model 'other' there; the models are: tiny.\n"
    died = run(daemon.url, "script:half die", **key)
    assert (died.returncode, died.stdout) == (1, "half")
    assert died.stderr.startswith("omlxd: The engine of tiny stopped: ")
    nobody = run("http://127.0.0.1:1", "hello")
    assert nobody.stderr.startswith("omlxd: Nothing answers at http://127.0.0.1:1; ")
    none = run("", "hello", OMLXD_PORT=str(free_port()), OMLXD_MODEL=str(tmp_path / "no-model"))
    assert none.returncode == 1 and none.stderr.endswith("hub id as ORG/NAME.\n")
    assert "omlxd: no daemon runs; starting one for this chat\nomlxd: OMLXD_MODEL: there is no" in none.stderr
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"")
    none = run("", "hello", OMLXD_PORT=str(free_port()), OMLXD_MODEL=str(broken), HOME=str(tmp_path))
    assert none.returncode == 1 and none.stderr.endswith("it is empty; copy or download it again.\n")


@pytest.mark.slow
def test_a_daemon_on_another_port_is_the_one_that_holds_the_cache(start, tmp_path: Path):  # noqa: F811
    daemon: Daemon = start()
    with socketserver.TCPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as other_program:
        threading.Thread(target=other_program.serve_forever, daemon=True).start()
        for port in (free_port(), 0, other_program.server_address[1]):
            done = run("", "hello", OMLXD_BASE_PATH=str(tmp_path), OMLXD_PORT=str(port))
            assert (done.stdout, once_loaded(done.stderr)) == ("hellothere\n", "")
        other_program.shutdown()
    assert daemon.stop() == 0


def test_a_daemon_that_is_killed_in_an_answer(start):  # noqa: F811
    daemon: Daemon = start()
    asking = subprocess.Popen(
        [*CHAT, "--url", daemon.url, "script:half gate never"],
        env=variables(Path("/nonexistent")),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert asking.stdout is not None and asking.stdout.read(4) == "half"
    daemon.process.kill()
    _, said = asking.communicate(timeout=PATIENCE_S)
    assert asking.returncode == 1
    assert (
        once_loaded(said)
        == f"omlxd: The daemon at {daemon.url} ended in the middle of its answer; see its log.\n"
    )


def test_without_the_default_model_it_is_offered(tmp_path: Path):
    engine = shlex.join([sys.executable, str(STUB), "--notes", str(tmp_path)])
    more = {"OMLXD_PORT": str(free_port()), "OMLXD_ENGINE_COMMAND": engine}
    screen = Pty(tmp_path, CHAT, variables(tmp_path, **more))
    wait_for(screen, r"omlxd: fetch \S+ \(.*\)\s+as the default model\? \[Y/n\]$")
    say(screen, "n", r"serving omlxd-demo, whose words are random; (.|\n)*context 1000 tokens(.|\n)*\n>$")
    screen.press("C-d")
    wait_for(screen, "status=0")
    print(screen.screen())
    screen.close()


def test_a_rate_is_the_engines_where_it_tells_one():
    """Pieces that come at once, as from a fast small model, say nothing of time."""
    answer = conversation.Answer()
    answer.pieces, answer.first_s, answer.last_s = 3, 1.0, 1.0 + 1e-6
    answer.usage = Usage(completion_tokens=32)
    assert answer.tokens_per_s == pytest.approx(31e6)
    answer.usage.omlxd.tokens_per_s = 1200.0
    assert answer.tokens_per_s == 1200.0
