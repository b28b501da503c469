"""Measures of the house that have a goal; two commits print side by side.

python tools/house_rules.py [--beside COMMIT ...] [--details]

boxes          modules and packages in one folder, at most
floors         boxes of one folder that import one another in a row, at most (a circle is one floor)
circles        groups of modules that import one another; imports under TYPE_CHECKING and in functions count
cuda asked     conditions that name CUDA outside a `cuda/` folder and the doctor
cuda prose     comment and docstring lines of the engine that name CUDA outside a `cuda/` folder
lines          of omlxd/ outside `cuda/` and `metal/`
long           functions of more than 60 lines
fields         of one class with methods: annotations in its body and `self.x` set in its methods, at most;
               records (fewer than two methods: settings, requests, frames) have as many as their format
constants      of numbers in the modules of speculation, at the top level
match returns  in `KVBridge.match`
request names  that `EngineHost.start` and the methods of its class behind it call, but for Python's own
timed asserts  test files that assert a bound of less than 30 s on a real clock
subjects       of the last 200 commits that are longer than 72 characters or name no room, in percent
"""

from __future__ import annotations

import argparse
import ast
import builtins
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from check import SUBJECT
from house_counts import HERE, checkout_of, imports_of, modules_of, show

MOST_BOXES = 12
MOST_FLOORS = 8
LONG = 60
COMMITS = 200
SPECULATION = (
    "engine/speculate/*.py",
    *(f"engine/schedule/{name}.py" for name in ("speculation", "mtp", "ngram", "draft_model")),
)
"""Patterns below omlxd/, of commits before and after the room was made."""
CLOCKS = re.compile(r"\b(monotonic|perf_counter|time\.time)\(|\b(took|elapsed)\b")
"""What an assert compares that a clock measured; not processor time, which is one's own."""
SURE_S = 30.0
"""A bound of so many seconds breaks on no machine that is merely busy."""


def groups(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected parts of `graph`, each one before those that import it (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    out: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            out.append(stack[at:])
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return out


def floors(graph: dict[str, set[str]]) -> int:
    """The longest row of boxes of which each imports the next."""
    height: dict[str, int] = {}
    for group in groups(graph):
        below = [height[target] for node in group for target in graph[node] if target not in group]
        height.update(dict.fromkeys(group, 1 + max(below, default=0)))
    return max(height.values(), default=0)


def folders(imports: dict[str, set[str]]) -> dict[str, dict[str, set[str]]]:
    """Package → the graph of the boxes in it."""
    out: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in imports:
        package, _, leaf = name.rpartition(".")
        if package:
            out[package][leaf]
    for name, targets in imports.items():
        for target in targets:
            ours, theirs = name.split("."), target.split(".")
            same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            if same:
                out[".".join(ours[:same])][ours[same]].add(theirs[same])
    return out


def beside_cuda(paths: list[Path], package: Path) -> Iterator[Path]:
    """Files that may not name CUDA: those outside its folder and the doctor."""
    for path in paths:
        parts = path.relative_to(package).parts
        if "cuda" not in parts and "metal" not in parts and "doctor" not in "/".join(parts):
            yield path


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Compare):
            yield node


def _names_cuda(test: ast.expr) -> bool:
    return "cuda" in ast.unparse(test).lower()


def prose(path: Path, tree: ast.AST) -> Iterator[str]:
    """Lines of its comments and of the strings that stand alone."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.string
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield from node.value.value.splitlines()


def methods(owner: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in owner.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def fields(owner: ast.ClassDef) -> set[str]:
    """Names of its annotations, and of what it sets on `self`; properties have no place of their own."""
    names = {
        n.target.id for n in owner.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    for node in ast.walk(owner):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.add(node.attr)
    return names - {method.name for method in methods(owner)}


def names_behind(tree: ast.Module, owner: str, method: str) -> set[str]:
    """What `owner.method` calls, and the methods of `owner` that it names; no names of Python's library."""
    standard = {*dir(builtins)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module in sys.stdlib_module_names:
            standard |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            standard |= {alias.name for alias in node.names} & sys.stdlib_module_names
    bodies = {
        each.name: each
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == owner
        for each in methods(node)
    }
    found, seen, todo = set[str](), set[str](), [method] * (method in bodies)
    while todo:
        seen.add(name := todo.pop())
        for node in ast.walk(bodies[name]):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] not in standard | {"log"}:
                found.add(ast.unparse(node.func))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                todo += [node.attr] * (node.attr in bodies and node.attr not in seen)
    return found


def numbers(tree: ast.Module) -> Iterator[str]:
    """Top-level names in capitals whose value is made of numbers."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if value is not None and any(
            isinstance(x, ast.Constant) and isinstance(x.value, int | float) for x in ast.walk(value)
        ):
            yield from (t.id for t in targets if isinstance(t, ast.Name) and t.id.isupper())


def timed(tree: ast.Module) -> bool:
    """Whether an assert says that something took less than `SURE_S` on a real clock."""
    known = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def short(bound: ast.expr) -> bool:
        value = bound.value if isinstance(bound, ast.Constant) else known.get(ast.unparse(bound))
        return isinstance(value, int | float) and value < SURE_S

    real = re.search(r"\b(monotonic|perf_counter|time\.time)\(", ast.unparse(tree))
    return real is not None and any(
        isinstance(x, ast.Compare)
        and isinstance(x.ops[0], ast.Lt | ast.LtE)
        and CLOCKS.search(ast.unparse(x.left))
        and short(x.comparators[-1])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        for x in ast.walk(node.test)
    )


def subjects(commit: str) -> int:
    """Percent of the last commits up to `commit` whose subject breaks the rule."""
    text = subprocess.run(
        ["git", "log", f"-{COMMITS}", "--format=%s", commit],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return round(100 * sum(not SUBJECT.match(line) for line in text) / max(1, len(text)))


def measures(root: Path, commit: str, details: bool) -> dict[str, int]:
    package = root / "omlxd"
    modules = modules_of(root)
    trees = {path: ast.parse(path.read_text()) for path in modules.values()}
    imports = {name: imports_of(name, path, modules) for name, path in modules.items()}
    inner = folders(imports)
    circles = [group for group in groups(imports) if len(group) > 1]
    apart = list(beside_cuda(list(trees), package))
    asked = [
        f"{path.relative_to(root)}:{test.lineno} {ast.unparse(test)[:80]}"
        for path in apart
        for test in {x.lineno: x for x in conditions(trees[path]) if _names_cuda(x)}.values()
    ]
    said = [
        f"{path.relative_to(root)} {line.strip()[:90]}"
        for path in apart
        if "engine" in path.parts
        for line in prose(path, trees[path])
        if re.search(r"\bcuda", line, re.IGNORECASE)
    ]
    functions = [
        (node.end_lineno - node.lineno + 1, f"{path.relative_to(root)} {node.name}")
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
    classes = [
        (len(fields(node)), f"{path.relative_to(root)} {node.name}")
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and len(methods(node)) > 1
    ]
    constants = [
        f"{path.name} {name}"
        for pattern in SPECULATION
        for path in sorted(package.glob(pattern))
        for name in numbers(trees[path])
    ]
    bridge = trees.get(package / "engine/kvio/bridge.py", ast.Module([], []))
    match = [n for n in ast.walk(bridge) if isinstance(n, ast.FunctionDef) and n.name == "match"]
    tests = [path for path in (root / "tests").rglob("*.py") if timed(ast.parse(path.read_text()))]
    if details:
        print(f"{root}\n boxes")
        for name, graph in sorted(inner.items(), key=lambda pair: -len(pair[1])):
            if len(graph) <= MOST_BOXES and floors(graph) <= MOST_FLOORS:
                continue
            print(f"  {len(graph):3} boxes, {floors(graph):2} floors  {name}")
        for title, lines in (
            ("circles", [" ".join(group) for group in circles]),
            ("cuda asked", asked),
            ("cuda prose", said),
            ("long functions", [f"{n} {what}" for n, what in sorted(functions, reverse=True) if n > LONG]),
            ("fields", [f"{n} {what}" for n, what in sorted(classes, reverse=True)[:8]]),
            ("constants", constants),
            ("timed asserts", [str(path.relative_to(root)) for path in tests]),
        ):
            print(f" {title}", *lines, sep="\n  ")
    return {
        "boxes": max(len(graph) for graph in inner.values()),
        "floors": max(floors(graph) for graph in inner.values()),
        "circles": len(circles),
        "cuda asked": len(asked),
        "cuda prose": len(said),
        "lines outside cuda/ and metal/": sum(
            len(path.read_text().splitlines())
            for path in trees
            if not {"cuda", "metal"} & set(path.relative_to(package).parts)
        ),
        f"functions over {LONG} lines": sum(n > LONG for n, _ in functions),
        "fields of one class": max(n for n, _ in classes),
        "constants of speculation": len(constants),
        "returns in KVBridge.match": sum(isinstance(n, ast.Return) for m in match for n in ast.walk(m)),
        "names of a request from EngineHost.start": max(
            (len(names_behind(tree, "EngineHost", "start")) for tree in trees.values()), default=0
        ),
        "test files with timed asserts": len(tests),
        f"bad subjects of {COMMITS}, percent": subjects(commit),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--beside", metavar="COMMIT", action="append", default=[], help="measure it as well")
    parser.add_argument("--details", action="store_true", help="print what was counted")
    args = parser.parse_args()
    sys.setrecursionlimit(10_000)
    with tempfile.TemporaryDirectory(prefix="house-rules-") as folder:
        columns = [measures(HERE, "HEAD", args.details)]
        for commit in args.beside:
            columns.append(measures(checkout_of(commit, Path(folder)), commit, args.details))
    show(columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
