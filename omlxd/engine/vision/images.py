"""The images of a prompt: their tokens, their part of the block hashes, and their features in a pass.

| thread  | does                                                                                       |
|---------|--------------------------------------------------------------------------------------------|
| request | decodes (media.py), runs the model's image processor, puts an image's tokens into a prompt |
| engine  | runs the vision tower for images that no cached block covers; embeds a pass                |

An image's tokens and digest are remembered by the picture: an image that a client sends again with every
turn is decoded once, and its pixels are not asked for where its KV is cached.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...chat import ImagePart
from ...common.bounded_map import BoundedMap
from ...errors import InvalidRequest, PromptTooLong, bad_field
from ...kv.hashing import ExtraKey
from ..mlx_adapter.vision import Features, ImageProcessor, Piece, Pixels, VisionModel
from ..prompt.pipeline import RenderedPrompt
from .media import Identity, Media, Size

log = logging.getLogger(__name__)

REMEMBERED_BYTES = 16 << 20
"""Of the tokens of images, 2,500 screenshots of 1,500; and of their positions, 900 of these."""
FEATURE_BYTES = 256 << 20
"""Of the features that are kept: a screenshot of 1,500 tokens has 12 MB in a model of 8B."""

PIXEL_BYTES = 512 << 20
"""Of processed pixels that wait for the tower, over all requests: 18 screenshots of 1,500 tokens in
Qwen2.5-VL. Others are processed when their pass is computed."""
PIXELS_S = 60.0
"""Seconds without another image after which pixels that still wait are of prompts that are over."""
MOST_KEYS = 8
"""Images that a block's file names; the room for their keys is bounded."""


@dataclass(slots=True, frozen=True)
class Image:
    """An image as the model gets it.

    digest  of processed pixels, their shape and the processor's settings, in hex
    tokens  that stand for it in a prompt
    grid    (1, 3), its patches in time, height and width; None: its family's positions don't need them
    values  numbers that the tower gets; tiles: parts of it that don't see each other
    """

    digest: str
    tokens: array[int]
    grid: np.ndarray | None
    values: int = 0
    tiles: int = 1

    @property
    def nbytes(self) -> int:
        return 500 + self.tokens.itemsize * len(self.tokens)


@dataclass(slots=True, frozen=True)
class Span:
    """Tokens `start` to `stop` of a prompt, which are an image."""

    start: int
    stop: int
    image: Image
    part: ImagePart


class Images:
    """One model's images. Thread-safe, but for `places_of` and `features_of`."""

    def __init__(self, model: VisionModel, processor: ImageProcessor, media: Media):
        self.model = model
        self.processor = processor
        self._media = media
        self._lock = threading.Lock()
        self._known: BoundedMap[bytes, Image] = BoundedMap(REMEMBERED_BYTES, lambda each: each.nbytes)
        self._places: BoundedMap[str, np.ndarray] = BoundedMap(REMEMBERED_BYTES, lambda each: each.nbytes)
        self._features: BoundedMap[str, Features] = BoundedMap(FEATURE_BYTES, lambda each: each.nbytes)
        self._pixels: BoundedMap[str, Pixels] = BoundedMap(PIXEL_BYTES, _nbytes)
        self._processed = 0.0
        self.towers = 0  # Images that the tower was run for.

    def place(
        self,
        tokens: list[int],
        parts: Sequence[ImagePart],
        generated: Sequence[tuple[int, int]] = (),
        most: int = sys.maxsize,
    ) -> tuple[list[int], PromptImages | None]:
        """`tokens` with each placeholder replaced by its image's tokens. Raises InvalidRequest, and
        PromptTooLong once there are surely more than `most` tokens.

        generated  (start, stop) of tokens that the model said
        """
        if not parts:
            return tokens, None
        shown = np.array(tokens) == self.processor.placeholder_id
        for start, stop in generated:
            shown[start:stop] = False
        placeholders = np.flatnonzero(shown).tolist()
        if len(placeholders) != len(parts):
            raise InvalidRequest(
                f"the prompt holds {len(parts)} images, and the model's chat template shows "
                f"{len(placeholders)}",
                param="messages",
            )
        spans: list[Span] = []
        placed: list[int] = []
        at = 0
        images = self._images(parts, len(tokens), most)
        for end, part, image in zip(placeholders, parts, images, strict=True):
            placed += tokens[at:end]
            spans.append(Span(len(placed), len(placed) + len(image.tokens), image, part))
            placed += image.tokens
            at = end + 1
        placed += tokens[at:]
        return placed, PromptImages(self, placed, tuple(spans))

    def _images(self, parts: Sequence[ImagePart], least: int, most: int) -> Iterator[Image]:
        """Yield the image of each part. A page tells the tokens of all pages of its size: one of each size is
        read first, so that many pages are refused early.

        least, most  tokens of the prompt, an image counted as one, and those that it may have
        """
        _check_length(least, most)
        sizes = list(self._media.sizes(parts))
        firsts: dict[Size, ImagePart] = {}
        for size, part in zip(sizes, parts, strict=True):
            if size is not None:
                firsts.setdefault(size, part)
        identities = self._media.identities([*firsts.values(), *parts])
        counts: dict[Size | None, int] = {None: 1}
        for (size, part), identity in zip(firsts.items(), identities, strict=False):
            counts[size] = len(self._image(part, identity).tokens)
            least += sizes.count(size) * (counts[size] - 1)
            _check_length(least, most)
        for size, part, identity in zip(sizes, parts, identities, strict=True):
            image = self._image(part, identity)
            least += len(image.tokens) - counts[size]
            _check_length(least, most)
            yield image

    def _image(self, part: ImagePart, identity: Identity) -> Image:
        with self._lock:
            image = self._known.get(identity.digest)
        if image is None:
            image, pixels = self._process(part)
            with self._lock:
                self._known.put(identity.digest, image)
                if self._pixels.cost + _nbytes(pixels) <= PIXEL_BYTES:
                    self._pixels.put(image.digest, pixels)
        return image

    def give_memory_back(self) -> bool:
        """Drop features, which the KV of what was answered does without, and pixels that no prompt can wait
        for any more; whether there were any. Engine thread, when nothing runs.
        """
        dropped = self._features.clear()
        if time.monotonic() - self._processed > PIXELS_S:
            with self._lock:
                dropped += self._pixels.clear()
            dropped += self._media.drop_pictures()
        return dropped > 0

    def warm_up(self) -> None:
        """Have the first image find all loaded that images need. Any thread but the engine's."""
        try:
            self._media.warm_up()
            self.processor.process_image(np.zeros((64, 64, 3), np.uint8))
        except Exception as error:  # The first image will say it.
            log.info("no image could be tried: %s", error)

    def fetch(self, spans: Iterable[Span]) -> None:
        """Have the pixels of images that the tower will see: of many, the first ones. Request thread."""
        room = PIXEL_BYTES
        for span in spans:
            digest = span.image.digest
            if self._features.peek(digest) is not None:
                continue
            with self._lock:
                pixels = self._pixels.get(digest)
            if pixels is None:
                _, pixels = self._process(span.part)
            room -= _nbytes(pixels)
            if room < 0:
                return
            with self._lock:
                self._pixels.put(digest, pixels)

    def take_pixels(self, span: Span) -> Pixels:
        """The pixels of an image, which are dropped: its features are kept from now on. Engine thread."""
        with self._lock:
            pixels = self._pixels.pop(span.image.digest)
        return pixels if pixels is not None else self._process(span.part)[1]

    def _process(self, part: ImagePart) -> tuple[Image, Pixels]:
        self._processed = time.monotonic()
        [picture] = self._media.pictures([part])
        rgb = np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)
        try:
            tokens, pixels = self.processor.process_image(rgb)
        except Exception as error:  # A family's processor raises what it likes.
            size = f"{picture.width} x {picture.height}"
            why = f"the model's image processor can't take an image of {size} pixels: {error}"
            raise bad_field(part.param or "messages", why) from error
        state = sha256(self.processor.digest)
        state.update(repr(tokens).encode())
        for name in sorted(pixels):
            for each in _flat(pixels[name]):
                state.update(f"{name} {each.dtype} {each.shape} ".encode())
                state.update(np.ascontiguousarray(each).data)
        grid = pixels.get("image_grid_thw")
        return Image(state.hexdigest(), array("I", tokens), grid, *_extent(pixels["pixel_values"])), pixels

    def places_of(self, image: Image) -> np.ndarray:
        """As `image_places`. Engine thread."""
        places = self._places.get(image.digest)
        if places is None:
            assert image.grid is not None
            places = self.model.image_places(image.tokens.tolist(), image.grid)
            self._places.put(image.digest, places)
        return places

    def features_of(self, image: Image, pixels: Callable[[], Pixels]) -> Features:
        """What the tower makes of `image`; runs it unless that is kept. Engine thread."""
        features = self._features.get(image.digest)
        if features is None:
            features = self.model.see_image(image.tokens.tolist(), pixels())
            self.towers += 1
            self._features.put(image.digest, features)
        return features


class PromptImages:
    """The images of one prompt. Made on a request thread, then the engine thread's.

    spans  in order
    delta  by how much they move the positions behind them, once a pass has been embedded
    """

    def __init__(self, images: Images, tokens: list[int], spans: tuple[Span, ...]):
        self._images = images
        self._tokens = tokens[:]
        self.spans = spans
        self._bounds = [(span.start, span.stop) for span in spans]
        self._features: dict[str, Features] = {}
        self.delta = 0

    def extra_keys(self, block_size: int) -> dict[int, list[ExtraKey]]:
        """Keys of the blocks that hold an image's tokens: its digest, and where in the block it begins."""
        keys: dict[int, list[ExtraKey]] = {}
        for span in self.spans:
            for block in range(span.start // block_size, (span.stop - 1) // block_size + 1):
                offset = span.start - block * block_size
                keys.setdefault(block, []).append(("image", f"{span.image.digest}@{offset}"))
        return {block: own if len(own) <= MOST_KEYS else _one_key(own) for block, own in keys.items()}

    def seen_from(self, start: int) -> Iterator[Image]:
        """Yield the images that end behind token `start`."""
        return (span.image for span in self.spans if span.stop > start)

    def beginnings(self, block_size: int) -> list[int]:
        """Blocks before each run of images: between two of one run is less text than a block."""
        before = [0, *(span.stop for span in self.spans)]
        return [
            span.start // block_size
            for span, stop in zip(self.spans, before, strict=False)
            if span.start - stop >= block_size
        ]

    def fetch(self, start: int) -> None:
        """Have the pixels of images that end behind token `start`. Request thread."""
        self._images.fetch(span for span in self.spans if span.stop > start)

    def see_next(self, start: int, stop: int) -> bool:
        """Run the tower for one image of the pass over tokens `start` to `stop`. False: none is left.

        Engine thread.
        """
        for span in self._between(start, stop):
            if span.image.digest not in self._features:
                self._features_of(span)
                return True
        return False

    def inputs(self, start: int, stop: int) -> dict[str, Any]:
        """What the model gets beside tokens `start` to `stop`. Engine thread."""
        model = self._images.model
        pieces = [
            Piece(
                max(span.start - start, 0),
                self._features_of(span),
                max(start - span.start, 0),
                min(stop, span.stop) - span.start,
            )
            for span in self._between(start, stop)
        ]
        inputs = model.pass_inputs(self._tokens[:stop], start, pieces, self._bounds)
        if model.mrope:
            inputs["position_ids"] = mx.array(self._positions(start, stop)[:, None])
        later = {span.image.digest for span in self._between(stop, stop + 1)}
        self._features = {name: each for name, each in self._features.items() if name in later}
        return inputs

    def _features_of(self, span: Span) -> Features:
        """The features of an image, kept until the pass that ends it."""
        name = span.image.digest
        if name not in self._features:
            self._features[name] = self._images.features_of(
                span.image, lambda: self._images.take_pixels(span)
            )
        return self._features[name]

    def _positions(self, start: int, stop: int) -> np.ndarray:
        """Positions (3, tokens) of tokens `start` to `stop`; sets `delta`."""
        positions = np.broadcast_to(np.arange(start, stop), (3, stop - start)).copy()
        self.delta = 0
        for span in self.spans:
            places = self._images.places_of(span.image)
            first, last = max(span.start, start), min(span.stop, stop)
            if first < last:
                own = span.start + self.delta + places
                positions[:, first - start : last - start] = own[:, first - span.start : last - span.start]
            moved = int(places.max()) + 1 - places.shape[1]
            positions[:, max(span.stop - start, 0) :] += moved
            self.delta += moved
        return positions

    def may_end(self, position: int) -> bool:
        """Whether a pass may end at token `position`: not within an image whose tokens see each other."""
        undivided = self._images.model.whole_images
        return not (undivided and any(start < position < stop for start, stop in self._bounds))

    def _between(self, start: int, stop: int) -> Iterator[Span]:
        return (span for span in self.spans if span.start < stop and span.stop > start)


def make_images(folder: Path, shown: str, model: Any, media: Media) -> Images:
    """`shown`: what the chat template writes for an image. Raises ModelError."""
    return Images(model, ImageProcessor(folder, shown), media)


def prompt_with_images(
    rendered: RenderedPrompt, images: Images | None, block_size: int
) -> tuple[list[int], dict[int, list[ExtraKey]]]:
    """A rendered prompt's tokens, and the extra keys of its blocks. Raises InvalidRequest."""
    if images is None:
        return rendered.tokens, {}
    tokens, placed = images.place(rendered.tokens, rendered.images, rendered.generated)
    return tokens, placed.extra_keys(block_size) if placed is not None else {}


def _check_length(least: int, most: int) -> None:
    if least > most:
        raise PromptTooLong(least, most, least=True)


def _one_key(keys: list[ExtraKey]) -> list[ExtraKey]:
    return [("images", sha256(repr(keys).encode()).hexdigest())]


def _nbytes(pixels: Pixels) -> int:
    return sum(each.nbytes for value in pixels.values() for each in _flat(value))


def _extent(pixels: Any) -> tuple[int, int]:
    """(numbers, tiles) of an image's pixels: (patches, values), (tiles, patches, values), or tiles of
    (channels, height, width).
    """
    arrays = _flat(pixels)
    tiles = [
        math.prod(each.shape[:-3]) if each.ndim > 3 else each.shape[0] if each.ndim == 3 else 1
        for each in arrays
    ]
    # What has three dimensions may be one tile's channels.
    return sum(each.size for each in arrays), max(1, sum(count for count in tiles if count != 3))


def _flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, list):
        return [each for item in value for each in _flat(item)]
    return [np.asarray(value)]
