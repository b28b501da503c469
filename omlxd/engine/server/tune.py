"""`python -m omlxd.engine.server.tune`: trains as a line of its input says (models/tuning.py).

A program of its own, never a part of a serving engine. Draws its losses into the adapter's folder. It stops,
and saves, when its standard input ends: then whoever started it is gone.
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

from ...common.files import read_small, write_atomic
from ...errors import ModelError
from ...models.tuning import Job
from ..process.prepare import prepare_mlx

WIDTH, HEIGHT, EDGE = 640, 320, 40


class _Record(msgspec.Struct):
    training: list[tuple[int, float]] = []
    validation: list[tuple[int, float]] = []
    steps: int | None = None


class LossCurve:
    """mlx-lm's TrainingCallback: draws losses into the SVG `file` as they come. A NaN is a ModelError.

    resume  go on with the losses and steps that the JSON file beside it has
    before  steps of earlier trainings that are saved
    """

    def __init__(self, file: Path, resume: bool = False):
        self._file, self._record = file, file.with_suffix(".json")
        earlier = _Record()
        if resume:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                earlier = msgspec.json.decode(read_small(self._record), type=_Record)
        reported = max((at for at, _ in earlier.training), default=0)
        self.before = self._saved = reported if earlier.steps is None else earlier.steps
        self.losses: dict[str, list[tuple[int, float]]] = {
            "training": [point for point in earlier.training if point[0] <= self.before],
            "validation": [point for point in earlier.validation if point[0] <= self.before],
        }

    def on_save(self, steps: int) -> None:
        """The adapter of so many steps of this training is saved."""
        self._saved = self.before + steps
        self._write()

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
        self._write()
        write_atomic(self._file, draw(self.losses).encode())

    def _write(self) -> None:
        write_atomic(self._record, msgspec.json.encode({**self.losses, "steps": self._saved}))


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
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    prepare_mlx()
    from ..mlx_adapter import release_memory  # It imports MLX.
    from ..mlx_adapter.model.adapters.tuning import Stopped, train_adapter

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
    finally:
        release_memory(idle=True)  # mlx-lm's trainer wires all that Metal recommends.
    return 0


def _stop_with_parent() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _signals() -> threading.Event:
    """Set by the first SIGINT or SIGTERM; the next one raises KeyboardInterrupt."""
    stop = threading.Event()

    def on_signal(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        with contextlib.suppress(OSError):  # Who reads it may be gone.
            os.write(2, b"omlxd: stops after this step, and saves; once more: stops at once.\n")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stop


if __name__ == "__main__":
    sys.exit(main())
