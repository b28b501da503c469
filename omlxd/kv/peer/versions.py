"""Versions of what computes: two machines that share a model have the same."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

AT = "on the machine that joins"
"""A refusal is read on both machines, and by clients of the lead: it names the machine it is about."""
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
    """Say which versions of the lead are not this machine's, which joins; "": none."""
    differs = [
        f"{name} is {theirs.get(name) or 'missing'} on the lead and {own or 'missing'} {AT}"
        for name, own in computing().items()
        if theirs.get(name) != own
    ]
    return ", ".join(differs)
