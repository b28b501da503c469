"""`python -m omlxd.engine.tune`: trains what the Job (models/tuning.py) on its standard input says.

A program of its own, never a part of a serving engine. Draws its losses into the adapter's folder.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from ..errors import ModelError
from ..models.tuning import Job
from . import blas
from .__main__ import set_backend_defaults, use_own_temporary_folder

WIDTH, HEIGHT, EDGE = 640, 320, 40


class LossCurve:
    """mlx-lm's TrainingCallback: draws losses into the SVG `file` as they come. A NaN is a ModelError.

    resume  go on with the losses that the JSON file beside it has
    before  steps of those
    """

    def __init__(self, file: Path, resume: bool = False):
        self._file, self._record = file, file.with_suffix(".json")
        self.losses: dict[str, list[tuple[int, float]]] = {"training": [], "validation": []}
        if resume:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                earlier = msgspec.json.decode(
                    self._record.read_bytes(), type=dict[str, list[tuple[int, float]]]
                )
                self.losses |= earlier
        self.before = max((at for at, _ in self.losses["training"]), default=0)

    def on_train_loss_report(self, info: dict[str, float]) -> None:
        self._add("training", int(info["iteration"]), info["train_loss"])

    def on_val_loss_report(self, info: dict[str, float]) -> None:
        self._add("validation", int(info["iteration"]), info["val_loss"])

    def _add(self, name: str, iteration: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise ModelError(
                "the loss is no number: try a lower --learning-rate, or a --max-length that answers fit in"
            )
        self.losses[name].append((self.before + iteration, loss))
        self._record.write_bytes(msgspec.json.encode(self.losses))
        self._file.write_text(draw(self.losses))


def draw(losses: dict[str, list[tuple[int, float]]]) -> str:
    """An SVG of `training` and `validation` losses by iteration."""
    points = [point for line in losses.values() for point in line]
    last, most = max(1, *(at for at, _ in points)), max(loss for _, loss in points) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"',
        f' font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<path d="M{EDGE} {EDGE}V{HEIGHT - EDGE}H{WIDTH - EDGE}" fill="none" stroke="gray"/>',
        f'<text x="4" y="{EDGE}">{most:.2f}</text><text x="4" y="{HEIGHT - EDGE}">0</text>',
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - EDGE + 16}" text-anchor="end">iteration {last}</text>',
    ]
    wide, high = (WIDTH - 2 * EDGE) / last, (HEIGHT - 2 * EDGE) / most
    for row, (name, color) in enumerate((("training", "steelblue"), ("validation", "darkorange"))):
        places = (f"{EDGE + wide * at:.1f},{HEIGHT - EDGE - high * loss:.1f}" for at, loss in losses[name])
        parts.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - 2 * EDGE}" y="{EDGE + 16 * row}" fill="{color}">{name}</text>')
    return "".join([*parts, "</svg>\n"])


def main() -> int:
    stop = _signals()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    use_own_temporary_folder()
    set_backend_defaults()
    blas.put_first()
    from .mlx_adapter.tuning import Stopped, train_adapter  # It imports MLX.

    try:
        curve = LossCurve(Path(job.adapter_path, "loss.svg"), job.resume)
        train_adapter(job, curve, curve.before, stop.is_set)
    except ModelError as error:
        print(f"omlxd: {error.message}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        what = f"{stopped.steps} steps, which are saved; --resume goes on" if stopped.steps else "no step"
        print(f"omlxd: stopped after {what}.", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("omlxd: stopped; steps since the last save are lost.", file=sys.stderr)
        return 130
    return 0


def _signals() -> threading.Event:
    """Set by the first SIGINT or SIGTERM; the next one raises KeyboardInterrupt."""
    stop = threading.Event()

    def on_signal(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        os.write(2, b"omlxd: stops after this step, and saves; once more: stops at once.\n")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stop


if __name__ == "__main__":
    sys.exit(main())
