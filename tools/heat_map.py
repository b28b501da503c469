"""A picture of what `POST /omlxd/inspect` wrote: how one token attends, by layer, or by head of one layer.

    python -m tools.heat_map FILE.safetensors PICTURE.svg [--layer N]

A row is a layer (mean of its heads), or a head; a column a token, or several. Dark: much attention.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

MOST_COLUMNS = 256
CELL, EDGE = 6, 60


def rows_of(file: Path, layer: int | None) -> list[tuple[str, list[float]]]:
    """(name, attention by token) of each row. Raises ValueError where the file has no attention."""
    if not file.is_file():
        raise ValueError(f"{file} is a folder" if file.is_dir() else f"there is no file {file}")
    try:
        loaded = mx.load(str(file), format="safetensors")
    except RuntimeError:
        raise ValueError(f"{file} is no file of /omlxd/inspect: those are safetensors files") from None
    assert isinstance(loaded, dict)
    named = {name.removesuffix(".attention"): a for name, a in loaded.items() if name.endswith(".attention")}
    if not named:
        raise ValueError(f"{file} holds no attention; ask /omlxd/inspect with a query")
    order = sorted(named, key=lambda name: int(name.split(".")[1]))
    if layer is None:
        return [(name, cast(Any, named[name].mean(axis=0).tolist())) for name in order]
    if not 0 <= layer < len(order):
        raise ValueError(f"--layer: there are {len(order)} layers, from 0 on")
    return [(f"head {head}", row) for head, row in enumerate(cast(Any, named[order[layer]].tolist()))]


def svg(rows: Sequence[tuple[str, list[float]]]) -> str:
    tokens = len(rows[0][1])
    each = -(-tokens // MOST_COLUMNS)
    width, height = EDGE + -(-tokens // each) * CELL, len(rows) * CELL + 20
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="6">']
    for down, (name, values) in enumerate(rows):
        sums = [sum(values[at : at + each]) for at in range(0, tokens, each)]
        parts.append(f'<text x="0" y="{down * CELL + 5}">{name}</text>')
        for across, value in enumerate(sums):
            shade = 255 - round(255 * (value / (max(sums) or 1)) ** 0.5)
            place = f'x="{EDGE + across * CELL}" y="{down * CELL}" width="{CELL}" height="{CELL}"'
            parts.append(f'<rect {place} fill="rgb({shade},{shade},255)"/>')
    parts.append(f'<text x="{EDGE}" y="{height - 6}">tokens 0 to {tokens - 1}, {each} a column</text></svg>')
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.heat_map")
    parser.add_argument("file", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--layer", type=int)
    args = parser.parse_args()
    try:
        args.picture.write_text(svg(rows_of(args.file, args.layer)))
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
