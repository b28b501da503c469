"""A rig (rig.py) whose prompts may hold pictures, each by its number."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cold_run import outputs, prompt
from rig import BLOCK, Output, Rig
from vision_families import VISION_FAMILIES, picture

from omlxd.chat import ImagePart
from omlxd.engine.vision.image_files import ImageFiles
from omlxd.engine.vision.images import make_images
from omlxd.engine.vision.media import Identity, Key, Keyed, Picture
from omlxd.kv.files.record_file import RecordFiles
from omlxd.kv.ledger.lease import LedgerLease

Segments = Sequence[tuple[int, int] | ImagePart | list[int]]
"""(tokens, seed) of a text, an image, or tokens that the model said."""


def image(seed: int, width: int = 112, height: int = 112) -> ImagePart:
    return ImagePart(f"{seed} {width} {height}".encode())


class Album:
    """In place of `Media`: nothing is decoded. decoded: pictures that would have been decoded."""

    def __init__(self) -> None:
        self.decoded = 0
        self._known: dict[Key, Identity] = {}
        self.recall: Callable[[Key], Identity | None] = lambda key: None

    def pictures(self, parts: Sequence[ImagePart], param: str = "") -> list[Picture]:
        shots = [picture(*map(int, part.data.split())) for part in parts]
        return [Picture(s.shape[1], s.shape[0], _digest(s), rgb=s.tobytes()) for s in shots]

    def identities(self, parts: Sequence[Keyed]) -> Iterator[Identity]:
        """As of `Media`: what is known of a picture is asked for before it is decoded."""
        for part, key in parts:
            found = self._known.get(key) or self.recall(key)
            if found is None:
                self.decoded += 1
                found = self.pictures([part])[0].identity
            self._known[key] = found
            yield found

    def sizes(self, parts: Sequence[Keyed]) -> list[None]:
        return [None] * len(parts)


def _digest(pixels: np.ndarray) -> bytes:
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()


class VisionRig(Rig):
    """`family`: one of VISION_FAMILIES, which `model` is of. Requests share prefixes, but without reuse."""

    def __init__(self, family: str, model: Path, root: Path | None = None, **options: Any):
        segment = 2 * BLOCK if options.get("reuse", True) else 0
        super().__init__(model, root, record=True, **{"segment": segment} | options)
        self.family = VISION_FAMILIES[family]
        self.album = Album()
        self.files = self._files()
        self.images: Any = make_images(
            model,
            self.family.shown,
            self.recorder._model,
            self.album,  # type: ignore[arg-type]
            self.files,
        )
        tokenizer = self.images.processor._processor.tokenizer
        self._shown = tokenizer.encode(self.family.shown, add_special_tokens=False)
        if not self.family.per_token:
            self.use_grid(128)

    def _files(self) -> ImageFiles | None:
        if self.root is None or not self.reuse or self.ledger is None:
            return None
        assert self.store.flusher is not None
        records = RecordFiles(self.root, self.namespace)
        lease = LedgerLease(self.ledger)
        return ImageFiles(records, self.store.flusher.writer, lease, lambda digest, tokens: True)

    def place(self, segments: Segments) -> tuple[list[int], Any]:
        """(tokens, images) of a prompt."""
        tokens: list[int] = []
        parts: list[ImagePart] = []
        generated: list[tuple[int, int]] = []
        for segment in segments:
            if isinstance(segment, ImagePart):
                tokens += self._shown
                parts.append(segment)
            else:
                if isinstance(segment, list):
                    generated.append((len(tokens), len(tokens) + len(segment)))
                tokens += segment if isinstance(segment, list) else prompt(*segment)
        return self.images.place(tokens, parts, generated)

    def begin(self, segments: Segments, n: int = 4, **options: Any) -> Output:
        tokens, images = self.place(segments)
        return self.start(tokens, n, images=images, **options)

    def ask(self, segments: Segments, n: int = 4) -> tuple[Output, list[np.ndarray]]:
        """(the output, the logits rows that its tokens were sampled from)."""
        self.recorder.logits.clear()
        tokens, images = self.place(segments)
        output = self.run(tokens, n, images=images)
        return output, outputs(self, n)
