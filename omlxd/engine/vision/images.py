"""The images of a prompt: their tokens, their part of the block hashes, and their features in a pass.

| thread  | does                                                                                       |
|---------|--------------------------------------------------------------------------------------------|
| request | decodes (media.py), runs the model's image processor, puts an image's tokens into a prompt |
| engine  | runs the vision tower for images that no cached block covers; embeds a pass                |

An image's tokens and digest are remembered by the picture: an image that a client sends again with every
turn is decoded once, and its pixels are not asked for where its KV is cached. Both outlive the process, and
so do its features (image_files.py).
"""

from __future__ import annotations

import logging
import sys
import time
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
from ..mlx_adapter import end_if_fault
from ..mlx_adapter.model.vlm.vision import (
    Features,
    ImageProcessor,
    Piece,
    Pixels,
    VisionModel,
    pack_features,
    unpack_features,
)
from ..prompt.pipeline import RenderedPrompt
from .image import Image, bytes_of, image_of
from .image_files import ImageFiles
from .media import Identity, Key, Keyed, Media, Size, keyed

log = logging.getLogger(__name__)

REMEMBERED_BYTES = 16 << 20
"""Bytes of remembered tokens of images, 2,500 screenshots of 1,500; and of their positions, 900 of these."""
FEATURE_BYTES = 256 << 20
"""Bytes of kept features: a screenshot of 1,500 tokens has 12 MB in a model of 8B."""

PIXEL_BYTES = 512 << 20
"""Bytes of processed pixels that wait for the tower, over all requests: 18 screenshots of 1,500 tokens in
Qwen2.5-VL. Others are processed when their pass is computed.
"""
PIXELS_S = 60.0
"""Seconds without another image after which the prompts of waiting pixels are over."""
MOST_KEYS = 8
"""Images in a block's file; the room for their keys is bounded."""


@dataclass(slots=True, frozen=True)
class Span:
    """Tokens `start` to `stop` of a prompt, those of an image."""

    start: int
    stop: int
    image: Image
    part: ImagePart


class Images:
    """The images of one model. Thread-safe, but for `places_of` and `features_of`."""

    def __init__(
        self, model: VisionModel, processor: ImageProcessor, media: Media, files: ImageFiles | None = None
    ):
        self.model = model
        self.processor = processor
        self.files = files
        self._media = media
        self._by_digest: BoundedMap[bytes, Image] = BoundedMap(REMEMBERED_BYTES, lambda each: each.nbytes)
        self._places: BoundedMap[str, np.ndarray] = BoundedMap(REMEMBERED_BYTES, lambda each: each.nbytes)
        self._features: BoundedMap[str, Features] = BoundedMap(FEATURE_BYTES, lambda each: each.nbytes)
        self._pixels: BoundedMap[str, Pixels] = BoundedMap(PIXEL_BYTES, bytes_of)
        self._read: BoundedMap[str, bytes] = BoundedMap(FEATURE_BYTES, len)
        self._processed = 0.0
        self.towers = 0  # Images that the tower was run for.
        if files is not None:
            files.processor = processor.digest
            media.recall = self._recall

    def place(
        self,
        tokens: list[int],
        parts: Sequence[ImagePart],
        generated: Sequence[tuple[int, int]] = (),
        most: int = sys.maxsize,
    ) -> tuple[list[int], PromptImages | None]:
        """Put each image's tokens in place of its placeholder in `tokens`. Raises InvalidRequest, and
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
        own = keyed(parts)
        sizes = list(self._media.sizes(own))
        firsts: dict[Size, Keyed] = {}
        for size, each in zip(sizes, own, strict=True):
            if size is not None:
                firsts.setdefault(size, each)
        identities = self._media.identities([*firsts.values(), *own])
        counts: dict[Size | None, int] = {None: 1}
        for (size, each), identity in zip(firsts.items(), identities, strict=False):
            counts[size] = len(self._image(each, identity).tokens)
            least += sizes.count(size) * (counts[size] - 1)
            _check_length(least, most)
        for size, each, identity in zip(sizes, own, identities, strict=True):
            image = self._image(each, identity)
            least += len(image.tokens) - counts[size]
            _check_length(least, most)
            yield image
        if self.files is not None:
            self.files.used([key for _, key in own])

    def _recall(self, key: Key) -> Identity | None:
        """Read a picture's record, which saves decoding and processing."""
        found = self.files.load_picture(key) if self.files is not None else None
        if found is None:
            return None
        identity, image = found
        self._by_digest.put(identity.digest, image)
        return identity

    def _image(self, each: Keyed, identity: Identity) -> Image:
        part, key = each
        image = self._by_digest.get(identity.digest)
        if image is None:
            image, pixels = self._process(part)
            if self.files is not None:
                self.files.save_picture(key, identity, image)
            self._by_digest.put(identity.digest, image)
            if self._pixels.cost + bytes_of(pixels) <= PIXEL_BYTES:
                self._pixels.put(image.digest, pixels)
        return image

    def give_memory_back(self) -> bool:
        """Drop features, which the KV of what was answered does without, and pixels that no prompt can wait
        for any more; whether there were any. Engine thread, when nothing runs.
        """
        dropped = self._features.clear()
        if time.monotonic() - self._processed > PIXELS_S:
            dropped += self._pixels.clear()
            dropped += self._media.drop_pictures()
        return dropped > 0

    def figures(self) -> dict[str, float]:
        counts = self.files.counts if self.files is not None else {}
        figures: dict[str, float] = {"image_towers_total": self.towers}
        for name in ("remembered", "restored", "written"):
            figures[f"images_{name}_total"] = counts.get(name, 0)
        return figures

    def warm_up(self) -> None:
        """Load what images need before the first one comes. Any thread but the engine's."""
        try:
            self._media.warm_up()
            self.processor.process_image(np.zeros((64, 64, 3), np.uint8))
        except Exception as error:  # The first image will say it.
            end_if_fault(error)
            log.info("no image could be tried: %s", error)

    def fetch(self, spans: Iterable[Span]) -> None:
        """Prepare the pixels of images for the tower: of many, the first ones. Request thread."""
        room = PIXEL_BYTES
        for span in spans:
            digest = span.image.digest
            if self._features.peek(digest) is not None:
                continue
            pixels, read = self._pixels.get(digest), self._read.get(digest)
            if read is None and self.files is not None:
                read = self.files.load_features(digest)
            if read is not None:
                self._read.put(digest, read)
                continue
            if pixels is None:
                _, pixels = self._process(span.part)
            room -= bytes_of(pixels)
            if room < 0:
                return
            self._pixels.put(digest, pixels)

    def take_pixels(self, span: Span) -> Pixels:
        """Take an image's pixels and drop them: its features are kept from now on. Engine thread."""
        pixels = self._pixels.pop(span.image.digest)
        return pixels if pixels is not None else self._process(span.part)[1]

    def _process(self, part: ImagePart) -> tuple[Image, Pixels]:
        self._processed = time.monotonic()
        [picture] = self._media.pictures([part])
        rgb = np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)
        try:
            tokens, pixels = self.processor.process_image(rgb)
        except Exception as error:  # A family's processor raises what it likes.
            end_if_fault(error)
            size = f"{picture.width} x {picture.height}"
            why = f"the model's image processor can't take an image of {size} pixels: {error}"
            raise bad_field(part.param or "messages", why) from error
        return image_of(tokens, pixels, self.processor.digest), pixels

    def places_of(self, image: Image) -> np.ndarray:
        """Return `image_places`, remembered. Engine thread."""
        places = self._places.get(image.digest)
        if places is None:
            assert image.grid is not None
            places = self.model.image_places(image.tokens.tolist(), image.grid)
            self._places.put(image.digest, places)
        return places

    def features_of(self, image: Image, pixels: Callable[[], Pixels]) -> Features:
        """Return the tower's features of `image`; runs it unless they are kept. Engine thread."""
        features = self._features.get(image.digest)
        if features is None:
            features = self._restored(image)
        if features is None:
            features = self.model.see_image(image.tokens.tolist(), pixels())
            self.towers += 1
            if not features.finite:
                return features  # Something failed: it is of no use to others.
        self._features.put(image.digest, features)
        return features

    def write_features(self, image: Image, prompt_tokens: int) -> None:
        """Write the features of `image`, which a prompt of so many tokens uses, unless that was done."""
        features = self._features.peek(image.digest)
        if self.files is not None and features is not None and self.files.wants(image.digest, prompt_tokens):
            self.files.save_features(image.digest, pack_features(features))

    def has_features(self, digest: str) -> bool:
        return self._features.peek(digest) is not None or self._read.peek(digest) is not None

    def _restored(self, image: Image) -> Features | None:
        data = self._read.pop(image.digest)
        try:
            return unpack_features(data, len(image.tokens)) if data is not None else None
        except ValueError as error:
            log.warning("the features of an image: %s", error)
            return None


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
        """Return keys of the blocks that hold an image's tokens: its digest, and its place in the block."""
        keys: dict[int, list[ExtraKey]] = {}
        for span in self.spans:
            for block in range(span.start // block_size, (span.stop - 1) // block_size + 1):
                offset = span.start - block * block_size
                keys.setdefault(block, []).append(("image", f"{span.image.digest}@{offset}"))
        return {block: own if len(own) <= MOST_KEYS else _one_key(own) for block, own in keys.items()}

    def seen_from(self, start: int) -> Iterator[Image]:
        """Yield the images that end behind token `start` and need the tower."""
        images = (span.image for span in self.spans if span.stop > start)
        return (image for image in images if not self._images.has_features(image.digest))

    def names(self) -> Iterator[tuple[int, int, str]]:
        """Yield start, stop and name of each image: its number, and its place in the request."""
        for number, span in enumerate(self.spans, 1):
            page = f", page {span.part.page}" if span.part.page else ""
            place = f" ({span.part.param}{page})" if span.part.param else ""
            yield span.start, span.stop, f"image {number} of {len(self.spans)}{place}"

    def beginnings(self, block_size: int) -> list[int]:
        """Return the blocks before each run of images: between two of one run is less text than a block."""
        before = [0, *(span.stop for span in self.spans)]
        return [
            span.start // block_size
            for span, stop in zip(self.spans, before, strict=False)
            if span.start - stop >= block_size
        ]

    def fetch(self, start: int) -> None:
        """Prepare the pixels of images that end behind token `start`. Request thread."""
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
        """Return the model's further inputs for tokens `start` to `stop`. Engine thread."""
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
        """Return the features of an image, kept until the pass that ends it."""
        name = span.image.digest
        if name not in self._features:
            self._features[name] = self._images.features_of(
                span.image, lambda: self._images.take_pixels(span)
            )
            self._images.write_features(span.image, len(self._tokens))
        return self._features[name]

    def _positions(self, start: int, stop: int) -> np.ndarray:
        """Return positions (3, tokens) of tokens `start` to `stop`; sets `delta`."""
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
        """Return whether a pass may end at `position`: not in an image whose tokens see each other."""
        undivided = self._images.model.whole_images
        return not (undivided and any(start < position < stop for start, stop in self._bounds))

    def _between(self, start: int, stop: int) -> Iterator[Span]:
        return (span for span in self.spans if span.start < stop and span.stop > start)


def make_images(
    folder: Path, shown: str, model: Any, media: Media, files: ImageFiles | None = None
) -> Images:
    """Make the model's Images. `shown`: the chat template's text for an image. Raises ModelError."""
    return Images(model, ImageProcessor(folder, shown), media, files)


def place_images(
    rendered: RenderedPrompt, images: Images | None, most: int = sys.maxsize
) -> tuple[list[int], PromptImages | None]:
    """Return the prompt's tokens, with its images'. Raises InvalidRequest and PromptTooLong."""
    if images is None:
        return rendered.tokens, None
    return images.place(rendered.tokens, rendered.images, rendered.generated, most)


def prompt_with_images(
    rendered: RenderedPrompt, images: Images | None, block_size: int
) -> tuple[list[int], dict[int, list[ExtraKey]], list[tuple[int, int, str]]]:
    """Return a rendered prompt's tokens, the extra keys of its blocks, and (start, stop, name) of each image.

    Raises InvalidRequest.
    """
    tokens, placed = place_images(rendered, images)
    if placed is None:
        return tokens, {}, []
    return tokens, placed.extra_keys(block_size), [*placed.names()]


def _check_length(least: int, most: int) -> None:
    if least > most:
        raise PromptTooLong(least, most, least=True)


def _one_key(keys: list[ExtraKey]) -> list[ExtraKey]:
    return [("images", sha256(repr(keys).encode()).hexdigest())]
