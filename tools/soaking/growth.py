"""Figures of a daemon over time, and how they grew."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

from .leaks import shared_memory_of, sockets_of
from .own_daemon import Daemon


class Sampler:
    """`shared_memory`: what any of its processes was seen to use."""

    def __init__(self, daemon: Daemon):
        self._daemon = daemon
        self.shared_memory: set[str] = set()
        self._rows: list[tuple[float, dict[str, float]]] = []

    def take(self) -> None:
        front = self._daemon.front
        with contextlib.suppress(psutil.Error):
            children = front.children(recursive=True)
            row = {
                "front MB": front.memory_info().rss / 1e6,
                "front descriptors": float(front.num_fds()),
                "front sockets": float(sum(sockets_of(front).values())),
                "processes": float(len(children)),
                "engines MB": sum(_rss(child) for child in children) / 1e6,
                "cache files": float(sum(len(files) for _, _, files in os.walk(self._daemon.cache))),
            }
            self.shared_memory |= shared_memory_of([front, *children])
            self._rows.append((time.monotonic(), row))

    def slopes(self) -> dict[str, float]:
        """Growth a minute of each figure, over the last two thirds; a least-squares line."""
        rows = self._rows[len(self._rows) // 3 :]
        if len(rows) < 3:
            return {}
        return {name: _slope([(at / 60, row[name]) for at, row in rows]) for name in rows[0][1]}

    def last(self) -> dict[str, str]:
        return {name: f"{value:.0f}" for name, value in self._rows[-1][1].items()} if self._rows else {}


def _rss(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.memory_info().rss
    return 0


def _slope(points: list[tuple[float, float]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    width = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / width if width else 0.0
