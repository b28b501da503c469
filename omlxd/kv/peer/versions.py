"""Versions of what computes: two machines that share a model have the same."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

NAMES = {"omlxd": "omlxd", "MLX": "mlx", "mlx-lm": "mlx-lm"}


def computing() -> dict[str, str]:
    """Return name → version; "": not installed."""
    found: dict[str, str] = {}
    for name, package in NAMES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = ""
    return found


def disagreement(theirs: dict[str, str]) -> str:
    """Say which versions of another machine are not this one's; "": none."""
    differs = [
        f"{name} is {theirs.get(name) or 'missing'} there and {own or 'missing'} here"
        for name, own in computing().items()
        if theirs.get(name) != own
    ]
    return ", ".join(differs)
