"""Counts of how easy a checkout of omlxd is to read; two checkouts print side by side.

    python tools/house_counts.py [CHECKOUT ...] [--no-request] [--most-lines N]

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
`--most-lines` fails where omlxd/ has more lines.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections import defaultdict
from pathlib import Path

SMALL = 60
SHARED = 4
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
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
        environ |= {
            "PYTHONPATH": os.pathsep.join([str(home), str(root)]),
            "HOME": str(home),
            "HOUSE_COUNTS_OUT": str(out),
            "HOUSE_COUNTS_ROOT": str(root / "omlxd"),
            "OMLXD_SEED": "0",
        }
        serve = [sys.executable, "-m", "omlxd", "serve", "--port", "0", "--base-path", str(home / "base")]
        with (home / "log").open("w") as log:
            daemon = subprocess.Popen(
                serve,
                env=environ,
                cwd=home,
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                text=True,
            )
        assert daemon.stdout is not None
        try:
            line = daemon.stdout.readline()
            if not (url := re.search(r"http://\S+", line)):
                sys.exit(f"{root}: the daemon did not start: {(home / 'log').read_text()[-2000:]}")
            base = url[0].rstrip("/")
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
            daemon.communicate(timeout=120)
        rows = {tuple(line.split("\t")) for line in out.read_text().splitlines()}
    return sorted((row[0], row[1], row[2]) for row in rows)


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
        "lines of omlxd/": sum(lines.values()),
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
    parser.add_argument("checkout", type=Path, nargs="*", default=[Path(__file__).resolve().parents[1]])
    parser.add_argument("--no-request", action="store_true", help="leave out what needs a daemon")
    parser.add_argument("--details", action="store_true", help="print what was counted")
    parser.add_argument("--most-lines", type=int, help="fail if omlxd/ has more")
    args = parser.parse_args()
    roots = [root.resolve() for root in args.checkout]
    columns = [counts_of(root, request=not args.no_request, details=args.details) for root in roots]
    for key in columns[0]:
        print(f"{key:40}", *(f"{column[key]:>8,}" for column in columns))
    if args.most_lines and any(column["lines of omlxd/"] > args.most_lines for column in columns):
        print(f"omlxd/ has more than {args.most_lines:,} lines", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
