"""Counts of how easy a checkout of omlxd is to read; two checkouts print side by side.

    python tools/house_counts.py [CHECKOUT ...] [--beside COMMIT] [--no-request] [--most-lines N]

    lines          of all Python files below omlxd/, and of those in omlxd/kv/
    small files    of at most 60 lines
    one importer   files that exactly one other file of omlxd/ imports
    shared names   names of methods, `__x__` aside, that more than four classes define
    way            functions and classes of omlxd/ that hold the prompt of one chat request; their files
    names          distinct names of those variables and of the objects' fields that hold it

The last two come from a run: the checkout's daemon serves its demo model with a profiler in every process
and answers one streamed chat completion. A variable (a parameter or a local at the function's return) holds
the prompt if its value is text or bytes with the prompt's marker, a sequence of at least 200 integers, or an
object or container that holds one of these at most three levels down.
`--most-lines` fails where omlxd/ has more lines. `--beside` counts a commit of this repository too.

Behind the counts stand the lines of each room (a checkout's own folders), and those of `ADDED`: whole files
that came since 2744a18 for what it could not do. What is left is what that commit could do, in this tree, and
more: lines that an addition put into files of both trees (image fields of an API, guesses in a decode step)
stay counted.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections import defaultdict
from pathlib import Path

from daemon_process import end_daemon, start_daemon

SMALL = 60
SHARED = 4
LINES = "lines of omlxd/"

ADDED = {
    "images and PDFs": (
        "engine/vision/*",
        "engine/mlx_adapter/model/vlm/vision.py",
        "engine/mlx_adapter/model/vlm/tower.py",
    ),
    "Ollama's API": ("api/ollama/*",),
    "discovery by clients": (
        *(
            "front/http/listing/discovery.py",
            "front/http/listing/model_list.py",
            "front/http/listing/router_events.py",
        ),
    ),
    "message threads": ("api/anthropic/threads.py", "front/http/stores/thread_store.py"),
    "the page": (
        *(
            "front/owner/page.py",
            "front/owner/live.py",
            "front/owner/pull.py",
            "front/owner/cache/tree.py",
            "front/owner/cache/index.py",
        ),
        *("front/http/observe/last_hour.py", "cli/cache/listing/tree.py", "cli/cache/listing/said.py"),
    ),
    "pinned prefixes": ("cli/cache/pin.py", "front/engines/ledger/pins.py", "front/owner/cache/pins.py"),
    "weights by mmap": ("engine/mlx_adapter/runtime/mapped.py",),
    "embeddings, rerank, scores": (
        *("api/embeddings.py", "front/http/embeddings.py", "engine/server/embedding.py"),
        *("engine/mlx_adapter/model/embedder.py", "api/openai/scores.py"),
    ),
    "GGUF files": ("models/gguf/*",),
    "models of other programs": ("models/local_stores.py",),
    "a default model that answers": ("models/fetch/smollm.py", "models/fetch/offer.py", "models/builder.py"),
    "omlxd chat": ("cli/chat/command.py", "cli/daemon/own.py", "front/process/start_page.py"),
    "omlxd bench, perplexity": (
        "cli/bench.py",
        "engine/server/measure/perplexity.py",
        "engine/mlx_adapter/model/perplexity.py",
    ),
    "omlxd doctor --report": ("cli/doctor/report/*", "engine/server/measure/*"),
    "LoRA training": (
        "cli/models/tune.py",
        "engine/server/tune.py",
        "engine/mlx_adapter/model/adapters/tuning.py",
        "models/tuning.py",
    ),
    "cache export, import, warm": (
        *(
            "cli/cache/transfer/carry.py",
            "cli/cache/warm.py",
            "cli/cache/transfer/archive.py",
            "cli/cache/transfer/prompt_cache.py",
        ),
        *("engine/mlx_adapter/model/prompt_cache_file.py", "front/owner/cache/carry.py"),
    ),
    "LoRA adapters, served": (
        *(
            "engine/server/adapters.py",
            "engine/mlx_adapter/model/adapters/lora.py",
            "front/engines/adapters.py",
        ),
        *("front/engines/guest.py", "models/adapters.py"),
    ),
    "load or compute": tuple(f"engine/kvio/reads/{name}.py" for name in ("rates", "restore", "tail_read")),
    "memory and key inspection": ("cli/watch/memory.py", "engine/mlx_adapter/model/inspection.py"),
    "guessed tokens": (
        *("engine/speculate/controller.py", "engine/speculate/draft_model.py", "engine/speculate/drafter.py"),
        "engine/mlx_adapter/model/drafters/mtp.py",
    ),
    "labels in shared passes": ("engine/schedule/scoring.py",),
    "attention kernels, compiled steps": (
        *("engine/mlx_adapter/cuda/attention/attention*.py", "engine/mlx_adapter/cuda/step/compiled_step.py"),
        *("engine/mlx_adapter/cuda/compile/nvrtc.py", "engine/mlx_adapter/cuda/*/fused_*.py"),
        "engine/mlx_adapter/cuda/products/products*.py",
    ),
    "OpenBLAS on CPUs": ("engine/process/blas.py",),
    "hostile model folders": (
        *("common/child_process.py", "common/child_loop.py", "engine/prompt/template/process.py"),
        *("engine/prompt/template/child.py", "engine/prompt/token_bound.py"),
    ),
}
"""What 2744a18 could not do → files below omlxd/ that came for it alone."""
REPLACED = {"front/http/listing/model_list.py": 71, "api/openai/scores.py": 89}
"""Lines of 2744a18 for what such a file did there: these stay counted."""

HERE = Path(__file__).resolve().parents[1]
MARKER = "zebrafinch"
PROMPT = " ".join(f"{MARKER} {number}" for number in range(150))

PROFILER = """
import os, sys, threading

OUT = os.environ.get("HOUSE_COUNTS_OUT")
ROOT = os.environ.get("HOUSE_COUNTS_ROOT", "") + os.sep
MARKER = "zebrafinch"
seen = set()


def holds(value, depth):
    if isinstance(value, str):
        return MARKER in value
    if isinstance(value, (bytes, bytearray)):
        return MARKER.encode() in value
    if isinstance(value, (list, tuple)):
        if len(value) >= 200 and type(value[0]) is int and type(value[-1]) is int:
            return True
        return depth > 0 and any(holds(item, depth - 1) for item in value[-20:])
    if depth <= 0:
        return False
    if isinstance(value, dict):
        return any(holds(item, depth - 1) for item in list(value.values())[-20:])
    kind = type(value)
    if not (kind.__module__ or "").startswith("omlxd"):
        return False
    fields = getattr(kind, "__struct_fields__", None) or getattr(kind, "__slots__", None) or ()
    if isinstance(fields, str):
        fields = (fields,)
    names = [*fields, *getattr(value, "__dict__", {})]
    names = [name for name in names[:60] if isinstance(name, str)]
    found = [name for name in names if holds(getattr(value, name, None), depth - 1)]
    for name in found:
        note(sys.modules[kind.__module__].__file__, kind.__qualname__, name)
    return bool(found)


def note(file, place, name):
    if (file, place, name) in seen or not file.startswith(ROOT):
        return
    seen.add((file, place, name))
    line = "\\t".join((file[len(ROOT):], place, name)) + "\\n"
    out = os.open(OUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(out, line.encode())
    os.close(out)


def profile(frame, event, argument):
    if event != "return":
        return
    code = frame.f_code
    if not code.co_filename.startswith(ROOT) or code.co_name == "<module>":
        return
    for name, value in list(frame.f_locals.items()):
        key = (code.co_filename, code.co_qualname, name)
        if name.startswith(".") or key in seen:
            continue
        try:
            if not holds(value, 3):
                continue
        except Exception:
            continue
        if name not in ("self", "cls"):
            note(*key)


if OUT:
    threading.setprofile(profile)
    sys.setprofile(profile)
"""


def modules_of(root: Path) -> dict[str, Path]:
    """Dotted name → file, for every Python file below omlxd/."""
    out = {}
    for path in sorted((root / "omlxd").rglob("*.py")):
        bits = list(path.relative_to(root).with_suffix("").parts)
        out[".".join(bits[:-1] if bits[-1] == "__init__" else bits)] = path
    return out


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of omlxd that the file imports, at top level or inside a function."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            bits = package.split(".")
            base = bits[: len(bits) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                out.add(inner if inner in modules else source)
    return (out & modules.keys()) - {name}


def method_names(paths: list[Path]) -> list[str]:
    """Names that more than SHARED classes define."""
    classes: dict[str, int] = defaultdict(int)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
                for name in {m for m in methods if not (m.startswith("__") and m.endswith("__"))}:
                    classes[name] += 1
    return sorted(name for name, count in classes.items() if count > SHARED)


def request_way(root: Path) -> list[tuple[str, str, str]]:
    """(file, function, variable) of all that held the prompt of one chat request."""
    with tempfile.TemporaryDirectory(prefix="house-counts-") as folder:
        home = Path(folder)
        (home / "sitecustomize.py").write_text(PROFILER)
        out = home / "seen.tsv"
        out.touch()
        variables = {
            "PYTHONPATH": os.pathsep.join([str(home), str(root)]),
            "PYTHONSAFEPATH": "1",
            "HOME": str(home),
            "HOUSE_COUNTS_OUT": str(out),
            "HOUSE_COUNTS_ROOT": str(root / "omlxd"),
            "OMLXD_SEED": "0",
        }
        flags = ("--port", "0", "--base-path", str(home / "base"))
        daemon, base = start_daemon(home / "log", *flags, **variables)
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(base + "/v1/models", timeout=300) as answer:
                model = json.load(answer)["data"][0]["id"]
            messages = [{"role": "user", "content": PROMPT}]
            body = {"model": model, "messages": messages, "max_tokens": 4, "stream": True}
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(
                base + "/v1/chat/completions", json.dumps(body).encode(), headers
            )
            with opener.open(request, timeout=300) as answer:
                text = answer.read().decode()
            assert "[DONE]" in text, text
        finally:
            daemon.terminate()
            daemon.wait(timeout=120)
            end_daemon(daemon)
        rows = {tuple(line.split("\t")) for line in out.read_text().splitlines()}
    return sorted((row[0], row[1], row[2]) for row in rows)


def added_lines(root: Path) -> dict[str, int]:
    """Lines of this checkout's files for each line of `ADDED`."""
    package = root / "omlxd"
    out = {}
    for what, patterns in ADDED.items():
        files = {file for pattern in patterns for file in package.glob(pattern) if file.suffix == ".py"}
        names = {str(file.relative_to(package)): len(file.read_text().splitlines()) for file in files}
        out[what] = sum(lines - REPLACED.get(name, 0) for name, lines in names.items())
    return out


def room_lines(root: Path) -> dict[str, int]:
    """Lines of each folder directly below omlxd/, and of the files there."""
    out: dict[str, int] = defaultdict(int)
    for path in modules_of(root).values():
        bits = path.relative_to(root / "omlxd").parts
        out[bits[0] + "/" if len(bits) > 1 else "(files)"] += len(path.read_text().splitlines())
    return dict(out)


def checkout_of(commit: str, folder: Path) -> Path:
    """The files of `commit` in a folder below `folder`. Exits where there is no such commit."""
    target = folder / commit.replace("/", "-")
    target.mkdir()
    archive = subprocess.Popen(["git", "archive", commit, "omlxd", "tests"], cwd=HERE, stdout=subprocess.PIPE)
    subprocess.run(["tar", "x"], cwd=target, stdin=archive.stdout, check=True)
    if archive.wait():
        sys.exit(f"git has no commit {commit}")
    return target


def counts_of(root: Path, *, request: bool, details: bool) -> dict[str, int]:
    modules = modules_of(root)
    lines = {path: len(path.read_text().splitlines()) for path in modules.values()}
    importers: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        for target in imports_of(name, path, modules):
            importers[target].add(name)
    once = [n for n, path in modules.items() if path.name != "__init__.py" and len(importers[n]) == 1]
    small = [p for p, count in lines.items() if count <= SMALL]
    shared = method_names(list(modules.values()))
    out = {
        "files": len(lines),
        LINES: sum(lines.values()),
        "lines of omlxd/kv/": sum(n for path, n in lines.items() if (root / "omlxd/kv") in path.parents),
        f"files of at most {SMALL} lines": len(small),
        "of them, no __init__.py": sum(path.name != "__init__.py" for path in small),
        "files with one importer": len(once),
        "of them, of at most 100 lines": sum(lines[modules[name]] <= 100 for name in once),
        f"method names of more than {SHARED} classes": len(shared),
    }
    way = request_way(root) if request else []
    if request:
        out["functions and classes on a request's way"] = len({row[:2] for row in way})
        out["files on a request's way"] = len({row[0] for row in way})
        out["names of the prompt"] = len({row[2] for row in way})
    if details:
        print(f"{root}\n  shared method names: {', '.join(shared)}\n  one importer: {', '.join(once)}")
        print(f"  small: {', '.join(str(path.relative_to(root)) for path in small)}")
        print(f"  names of the prompt: {', '.join(sorted({row[2] for row in way}))}")
        for row in way:
            print("   ", *row)
    return out


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, nargs="*", default=[HERE])
    parser.add_argument("--beside", metavar="COMMIT", action="append", default=[], help="count it as well")
    parser.add_argument("--no-request", action="store_true", help="leave out what needs a daemon")
    parser.add_argument("--details", action="store_true", help="print what was counted")
    parser.add_argument("--most-lines", type=int, help="fail if omlxd/ has more")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="house-counts-") as folder:
        roots = [root.resolve() for root in args.checkout]
        roots += [checkout_of(commit, Path(folder)) for commit in args.beside]
        columns = [counts_of(root, request=not args.no_request, details=args.details) for root in roots]
        show(columns)
        print("\nlines of each room")
        show([room_lines(root) for root in roots])
        print("\nlines of whole files for what 2744a18 could not do")
        added = [added_lines(root) for root in roots]
        show(added)
        rest = [column[LINES] - sum(own.values()) for column, own in zip(columns, added, strict=True)]
        show([{LINES + " without these": lines} for lines in rest])
    if args.most_lines and any(column[LINES] > args.most_lines for column in columns):
        print(f"omlxd/ has more than {args.most_lines:,} lines", file=sys.stderr)
        return 1
    return 0


def show(columns: list[dict[str, int]]) -> None:
    """A line a name, a column a checkout."""
    for key in dict.fromkeys(key for column in columns for key in column):
        print(f"{key:40}", *(f"{column.get(key, 0):>8,}" for column in columns))


if __name__ == "__main__":
    sys.exit(main())
