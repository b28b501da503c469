"""What the READMEs name exists: paths, links, commands, flags, environment variables, HTTP paths."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from omlxd.cli.main import main

REPO = Path(__file__).resolve().parents[2]
READMES = (
    "README.md",
    "config/README.md",
    "launchd/README.md",
    "omlxd/README.md",
    "omlxd/api/README.md",
    "omlxd/engine/mlx_adapter/README.md",
    "tools/bench/README.md",
)
LONGEST = 140
"""Lines of the top README."""

VERBS = (
    "serve",
    "chat",
    "engine",
    "launch",
    "mcp",
    "models",
    "status",
    "top",
    "memory",
    "tune",
    "cache",
    "doctor",
    "bench",
    "key",
    "join",
    "peer",
    "service",
    "config",
)
OTHERS_FLAGS = {
    "--permission-mode": "Claude Code's",
    "--user": "systemd's",
    "--collect-only": "pytest's",
    "--pretend-metal": "pytest's, of tests/conftest.py",
    "--cuda": "tools/bootstrap.py's",
    "--no-deps": "pip's",
    "--pre-allocate-kv": "a seed document's",
    "--svg": "tools/bench/session_ttft.py's",
    "--synthetic": "tools/replay.py's",
    **dict.fromkeys(
        (
            "--bound",
            "--contexts",
            "--restarts",
            "--grow",
            "--only",
            "--output",
            "--rounds",
            "--server",
            "--shape",
            "--size",
            "--passes",
            "--rows",
            "--run",
            "--steps",
            "--disk",
            "--trace",
            "--work",
            "--chunk",
            "--first",
            "--fresh",
            "--parts",
            "--streams",
            "--talks",
            "--tokens",
            "--turns",
            "--warm-up",
        ),
        "tools/bench's",
    ),
    **dict.fromkeys(
        (
            "--backend",
            "--concurrency",
            "--constraint",
            "--data",
            "--endpoint-type",
            "--extra-inputs",
            "--output-tokens-mean",
            "--profile",
            "--request-count",
            "--streaming",
            "--synthetic-input-tokens-mean",
            "--tokenizer",
            "--use-server-token-count",
        ),
        "aiperf's or guidellm's",
    ),
}


@pytest.fixture(params=READMES)
def readme(request: pytest.FixtureRequest) -> Path:
    return REPO / request.param


def code_of(path: Path) -> list[str]:
    """Text between backticks, and the lines of fenced blocks but diagrams."""
    text = path.read_text()
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return inline + [line for kind, body in fences if kind != "mermaid" for line in body.splitlines()]


def has(name: str) -> bool:
    return (REPO / name).exists()


# --------------------------------------------------------------------------- paths


def test_the_top_readme_stays_short():
    assert len((REPO / "README.md").read_text().splitlines()) <= LONGEST


def test_links_lead_to_files_and_headings(readme: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", readme.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (readme.parent / name).resolve() if name else readme
        assert has(str(file.relative_to(REPO))), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, target


def test_named_paths_exist(readme: Path):
    """Below the repository or, in omlxd/README.md, below omlxd/."""
    checked = 0
    for code in code_of(readme):
        for word in re.findall(
            r"(?<![\w/~.$<-])(?:[\w.-]+/)+[\w.-]*|(?<![\w/~.$<*-])[\w-]+\.(?:py|toml)\b", code
        ):
            first = word.split("/")[0]
            if first in (
                "tests",
                "tools",
                "omlxd",
                "config",
                "launchd",
                ".ci",
                "front",
                "engine",
                "kv",
                "api",
                "common",
            ):
                name = word.rstrip(".,:")
                near = readme.parent.relative_to(REPO) / name
                assert has(name) or has(f"omlxd/{name}") or has(str(near)), word
                checked += 1
    assert checked or readme.name == "README.md"


def test_python_modules_exist(readme: Path):
    for code in code_of(readme):
        for module in re.findall(r"python3? -m (tools[\w.]+)", code):
            assert has(module.replace(".", "/") + ".py"), module


def test_the_rooms_of_the_picture_exist():
    """Every `room/` and `file.py` at the head of a box in omlxd/README.md."""
    picture = re.findall(r"^```mermaid\n(.*?)^```", (REPO / "omlxd/README.md").read_text(), re.M | re.S)[0]
    labels = re.findall(r'"([\w.]+(?:/|\.py)(?:, [\w.]+\.py)*)', picture)
    assert len(labels) >= 20
    every = {path.name for path in (REPO / "omlxd").rglob("*")}
    for label in labels:
        for name in label.split(", "):
            assert name.rstrip("/") in every, name


def test_every_room_is_on_the_page():
    text = (REPO / "omlxd/README.md").read_text()
    rooms = {file.parent for file in (REPO / "omlxd").rglob("__init__.py")} - {REPO / "omlxd"}
    assert len(rooms) >= 25
    assert [str(room.relative_to(REPO)) for room in rooms if not re.search(rf"\b{room.name}\b", text)] == []


def test_each_common_change_names_four_files_at_most_and_they_exist():
    text = (REPO / "omlxd/README.md").read_text()
    changes = text.split("## Common changes")[1].split("\n## ")[0].split("\n**")[1:]
    assert len(changes) >= 6
    for change in changes:
        steps = [line for line in change.splitlines() if re.match(r"\d\. ", line)]
        assert 1 <= len(steps) <= 4
        for step in steps:
            assert re.search(r"`[\w/]+\.py`", step), step
        assert len(set(re.findall(r"`(\w+/[\w/]+\.py)`", change))) <= 4


def test_names_of_the_common_changes_stand_in_the_files_beside_them():
    text = (REPO / "omlxd/README.md").read_text().split("## Common changes")[1].split("\n## ")[0]
    for step in re.findall(r"^\d\. .*$", text, re.MULTILINE):
        sources = "".join((REPO / name).read_text() for name in re.findall(r"`(\w+/[\w/]+\.py)`", step))
        for name in re.findall(r"`([A-Za-z_.]+)`", step):
            if name.endswith((".py", ".toml")) or name.startswith("omlxd/"):
                continue
            owner, _, method = name.rpartition(".")
            if owner:  # a method stands in the class that the page names
                assert re.search(
                    rf"^class {owner}\b(?:(?!^class )[\s\S])*?^    def {method}\(", sources, re.M
                ), name
            else:
                assert re.search(rf"\b{name}\b", sources), name


def test_the_glossary_has_25_words_at_most():
    text = (REPO / "omlxd/README.md").read_text().split("## Glossary")[1].split("\n## ")[0]
    assert len(re.findall(r"^\| [a-z]", text, re.MULTILINE)) - 1 <= 25


# --------------------------------------------------------------------------- commands and flags


@cache
def help_of(*words: str) -> str:
    """The help of `omlxd …`; "" where there is no such command."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
    # Wide enough that no flag is broken at its hyphen.
    env["COLUMNS"] = "200"
    said = io.StringIO()
    with mock.patch.dict(os.environ, env, clear=True), redirect_stdout(said), redirect_stderr(io.StringIO()):
        try:
            status = main([*words, "--help"])
        except SystemExit as ended:
            status = ended.code
    return said.getvalue() if not status else ""


@cache
def subverbs(verb: str) -> tuple[str, ...]:
    """`stats`, `check`, … of `cache`: what stands below VERB in its help."""
    return tuple(
        re.findall(r"^    ([a-z][\w-]+)(?:\s|$)", help_of(verb).partition("VERB\n")[2], re.MULTILINE)
    )


def test_commands_exist(readme: Path):
    for code in code_of(readme):
        for verb, sub in re.findall(r"(?:^|\s|\()omlxd (?!/)([a-z][\w-]*)(?: ([a-z][\w-]+))?", code):
            assert verb in VERBS and help_of(verb), code
            if sub and subverbs(verb):
                assert sub in subverbs(verb), code


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Every flag of every verb."""
    commands = [(verb,) for verb in VERBS] + [(verb, sub) for verb in VERBS for sub in subverbs(verb)]
    return set(re.findall(r"--[a-z][\w-]+", "\n".join(help_of(*words) for words in commands)))


def test_flags_exist(readme: Path, flags: set[str]):
    for code in code_of(readme):
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", code):
            assert flag in flags | OTHERS_FLAGS.keys(), flag


def test_config_readme_has_every_flag_of_serve(flags: set[str]):
    text = (REPO / "config/README.md").read_text()
    for flag in set(re.findall(r"--[a-z][\w-]+", help_of("serve"))) - {"--help"}:
        assert f"`{flag}`" in text, flag


# --------------------------------------------------------------------------- environment and HTTP


def source() -> str:
    return "\n".join(path.read_text() for path in (REPO / "omlxd").rglob("*.py"))


def test_variables_exist(readme: Path, flags: set[str]):
    ours = {"OMLXD_" + flag[2:].upper().replace("-", "_") for flag in flags}
    text = source()
    for code in code_of(readme):
        for name in re.findall(r"\b(?:OMLXD|ANTHROPIC|CLAUDE|HF|MLX)_[A-Z_]*[A-Z]\b", code):
            assert name in ours or name in text, name


def test_http_paths_are_served(readme: Path):
    """Each is a route of the front, up to its first parameter."""
    text = source()
    for code in code_of(readme):
        for path in re.findall(r"(?:GET|POST|DELETE) (/[\w/.{}]+)", code):
            assert f'"{path.partition("}")[0]}' in text, path
