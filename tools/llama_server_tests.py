"""Run llama.cpp's own server tests against our daemon, and list each failure with its reason.

    python tools/llama_server_tests.py [--home DIR] [-k EXPRESSION]

The tests are those in llama-cpp-python's source package on PyPI, at a pinned version; they are kept under
--home, run in a virtual environment of their own, and none of their code is in this repository. They talk
HTTP to a server that they believe to be llama.cpp's with a tiny model of stories, so a proxy stands between:
it puts in the name of our model, turns thinking off where a test says nothing of it, and gives the paths
without /v1 that llama.cpp has too.

Reasons are those of clients/llama_reasons.py: an endpoint or a field that only llama.cpp has, the words of
its own model, its flags at start, a download, and what we chose to do otherwise. Any other failure is a
gap of ours. Exit status 0: there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clients.install import InstallError, python_with
from clients.llama_reasons import reason_of
from clients.own_daemon import OwnDaemon, first_model
from clients.recorder import Recorder

SDIST = ("llama-cpp-python", "0.3.36")
NEEDS = {
    **{"pytest": "9.2.0", "requests": "2.34.2", "wget": "3.2", "filelock": "4.2.11"},
    **{"openai": "3.52.0", "prometheus-client": "0.26.0", "numpy": "2.4.6"},
}
FOLDER = "vendor/llama.cpp/tools/server/tests"
FILES = (
    *("test_basic", "test_chat_completion", "test_compat_anthropic", "test_compat_oai_responses"),
    *("test_completion", "test_security", "test_tool_call"),
)
"""Those that need HTTP alone. The rest try flags at start, slots, LoRA, routers, media and MCP."""
LIMIT_S = 500
ALIASES = ("/chat/completions", "/completions", "/responses", "/messages", "/models")


@dataclass(slots=True)
class Outcome:
    name: str
    status: str
    reason: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "omlxd-clients")
    parser.add_argument("-k", default="", help="only tests that pytest's -k selects")
    parser.add_argument("--verbose", action="store_true", help="also what a failing test said")
    options = parser.parse_args()
    try:
        tests = fetched(options.home)
        python = python_with(options.home, NEEDS)
    except InstallError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="omlxd-llama-") as scratch, contextlib.ExitStack() as stack:
        daemon = stack.enter_context(OwnDaemon(Path(scratch) / "daemon", None))
        adapter = Adapter(first_model(daemon.url))
        proxy = stack.enter_context(Recorder(daemon.url, adapter.rewrite))
        report = Path(scratch) / "report.xml"
        run_pytest(python, tests, urlsplit(proxy.url).port or 0, report, options.k)
        if not report.exists():
            print("pytest wrote no report", file=sys.stderr)
            return 2
        outcomes = list(read(report, options.verbose))
    return print_table(outcomes)


def fetched(home: Path) -> Path:
    """The folder of the tests, taken out of the source package. Raises InstallError."""
    name, version = SDIST
    kept = home / f"{name}-{version}-tests"
    if (kept / "utils.py").exists():
        return kept
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name]
        done = subprocess.run(
            [*command, "--dest", folder, f"{name}=={version}"], capture_output=True, text=True, timeout=600
        )
        archives = list(Path(folder).glob("*.tar.gz"))
        if done.returncode or not archives:
            raise InstallError(f"{name} {version} can't be downloaded: {done.stderr.strip()[-300:]}")
        kept.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                _, _, path = member.name.partition(f"/{FOLDER}/")
                if path and member.isfile():
                    member.name = path
                    archive.extract(member, kept, filter="data")
    return kept


class Adapter:
    """Makes of llama.cpp's requests what a server of many models takes."""

    def __init__(self, model: str):
        self._model = model

    def rewrite(self, path: str, body: bytes) -> tuple[str, bytes]:
        if path in ALIASES:
            path = "/v1" + path
        try:
            value = json.loads(body)
        except ValueError:
            return path, body
        if isinstance(value, dict):
            value["model"] = self._model
            if path == "/v1/chat/completions":
                value.setdefault("chat_template_kwargs", {"enable_thinking": False})
            elif path == "/v1/messages":
                value.setdefault("thinking", {"type": "disabled"})
            elif path == "/v1/responses":
                value.setdefault("reasoning", {"effort": "none"})
        return path, json.dumps(value).encode()


def run_pytest(python: Path, tests: Path, port: int, report: Path, only: str) -> None:
    env = {
        "PATH": os.defpath,
        "HOME": str(report.parent),
        "DEBUG_EXTERNAL": "1",
        "PORT": str(port),
        # What the tests would download is not to be had; they find out at once.
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1,localhost",
    }
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    command += ["--tb=short", f"--junitxml={report}", *(["-k", only] if only else [])]
    files = [f"unit/{name}.py" for name in FILES]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([*command, *files], cwd=tests, env=env, capture_output=True, timeout=LIMIT_S)


def read(report: Path, verbose: bool) -> Iterator[Outcome]:
    """The outcome of each test, from pytest's report."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        failure = case.find("failure") if case.find("failure") is not None else case.find("error")
        if failure is not None:
            text = failure.text or failure.get("message") or ""
            if verbose:
                print(f"--- {name}\n{text}")
            yield Outcome(name, "failed", reason_of(name, text))
        elif case.find("skipped") is not None:
            yield Outcome(name, "skipped")
        else:
            yield Outcome(name, "passed")


def print_table(outcomes: list[Outcome]) -> int:
    print("| test | reason |\n|---|---|")
    for outcome in outcomes:
        if outcome.status == "failed":
            print(f"| {outcome.name} | {outcome.reason.replace('|', '/')} |")
    counts = Counter(outcome.status for outcome in outcomes)
    reasons = Counter(o.reason.partition(":")[0] for o in outcomes if o.status == "failed")
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())))
    print("failed for: " + "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common()))
    return 1 if reasons.get("gap") or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
