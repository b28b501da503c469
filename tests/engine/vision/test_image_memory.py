"""Many large images take bounded memory before the model sees them; none past the context is processed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from omlxd.chat import ImagePart
from omlxd.engine.vision import images as images_room
from omlxd.engine.vision.images import Images
from omlxd.engine.vision.media import Picture
from omlxd.errors import InvalidRequest, PromptTooLong

PAD = 7
TOKENS = 10
KEPT = 4


class FakeMedia:
    """Each part's first byte is its picture; a page's second byte is its size."""

    def sizes(self, parts):
        return ((1.0, float(part.data[1])) if part.page else None for part, _ in parts)

    def pictures(self, parts):
        for part in parts:
            yield Picture(1, 1, part.data[:1], rgb=part.data[:1] * 3)

    def drop_pictures(self):
        return 0

    def identities(self, parts):
        self.decoded = 0
        for picture in self.pictures([part for part, _ in parts]):
            self.decoded += 1
            yield picture.identity


class FakeProcessor:
    placeholder_id = PAD
    digest = b"settings"

    def __init__(self):
        self.processed: list[int] = []

    def process_image(self, rgb):
        self.processed.append(int(rgb[0, 0, 0]))
        return [PAD] * TOKENS, {"pixel_values": np.full(1000, rgb[0, 0, 0], np.float32)}


class FakeModel:
    whole_images = mrope = False

    def see_image(self, tokens, pixels):
        return SimpleNamespace(seen=int(pixels["pixel_values"][0]), nbytes=4000, finite=True)


@pytest.fixture
def images(monkeypatch):
    monkeypatch.setattr(images_room, "PIXEL_BYTES", KEPT * 4000)
    return Images(FakeModel(), FakeProcessor(), FakeMedia())  # type: ignore[arg-type]


def parts(count: int, first: int = 0) -> list[ImagePart]:
    return [ImagePart(bytes([first + n])) for n in range(count)]


def test_the_pixels_of_many_images_are_bounded_and_the_first_are_there(images):
    tokens, prompt = images.place([1, PAD] * 20, parts(20))
    assert len(tokens) == 20 * (1 + TOKENS) and images.processor.processed == [*range(20)]
    prompt.fetch(0)
    assert images._pixels.cost <= images_room.PIXEL_BYTES and len(images._pixels) == KEPT
    images.processor.processed.clear()
    seen = [images.features_of(s.image, lambda s=s: images.take_pixels(s)).seen for s in prompt.spans]
    assert seen == [*range(20)] and images.processor.processed == [*range(KEPT, 20)]
    assert not len(images._pixels)


def test_another_request_with_many_images_takes_no_more(images):
    for first in (0, 100):
        _, prompt = images.place([PAD] * 9, parts(9, first))
        prompt.fetch(0)
        assert images._pixels.cost <= images_room.PIXEL_BYTES
    images.processor.processed.clear()
    span = prompt.spans[0]
    assert images.features_of(span.image, lambda: images.take_pixels(span)).seen == 100
    assert not images.processor.processed


def test_images_that_are_cached_or_whose_features_are_kept_need_no_pixels(images):
    _, prompt = images.place([PAD] * 3, parts(3))
    for span in prompt.spans:
        images.features_of(span.image, lambda span=span: images.take_pixels(span))
    images.processor.processed.clear()
    _, again = images.place([PAD] * 4, parts(4))
    again.fetch(3 * TOKENS)
    again.fetch(0)
    assert images.processor.processed == [3]


def test_images_past_the_context_are_not_processed(images):
    with pytest.raises(PromptTooLong) as caught:
        images.place([1, PAD] * 50, parts(50), most=100 + 4 * (TOKENS - 1))
    assert images.processor.processed == [*range(5)] and images._media.decoded == 5
    assert caught.value.message.startswith("prompt is too long: at least 145 tokens > 136 maximum")
    with pytest.raises(PromptTooLong):
        images.place([1, PAD] * 50, parts(50, 100), most=99)
    assert images.processor.processed == [*range(5)]


def test_pages_past_the_context_are_refused_when_one_of_each_size_is_read(images):
    pages = [ImagePart(bytes([n, n // 40]), page=1) for n in range(80)]
    with pytest.raises(PromptTooLong) as caught:
        images.place([1, PAD] * 80, pages, most=80 * (1 + TOKENS) - 1)
    assert images.processor.processed == [0, 40]
    assert caught.value.tokens == 80 * (1 + TOKENS)
    tokens, _ = images.place([1, PAD] * 80, pages, most=80 * (1 + TOKENS))
    assert len(tokens) == 80 * (1 + TOKENS) and len(images.processor.processed) == 80


def test_an_image_that_the_processor_cannot_take_is_an_error_of_the_image(images):
    def refuse(rgb):
        raise ValueError("absolute aspect ratio must be smaller than 20")

    images.processor.process_image = refuse
    with pytest.raises(InvalidRequest, match="an image of 1 x 1 pixels: absolute aspect") as caught:
        images.place([PAD], [ImagePart(b"a", "", "messages.0.content.1")])
    assert caught.value.param == "messages.0.content.1"


def test_each_image_of_a_pass_is_a_turn_of_its_own_and_is_kept_until_the_pass_ends(images):
    """However little the model's features may take: a pass would never begin if they drove each other out."""
    images._features.max_cost = 0
    _, prompt = images.place([PAD] * 3, parts(3))
    end = 3 * TOKENS
    assert [prompt.see_next(0, end) for _ in range(5)] == [True, True, True, False, False]
    images.model.pass_inputs = lambda tokens, start, pieces, spans: {"pieces": pieces}
    assert [piece.at for piece in prompt.inputs(0, end)["pieces"]] == [0, TOKENS, 2 * TOKENS]
    assert images.towers == 3
    assert prompt.see_next(0, TOKENS)  # They were let go behind the pass.
    prompt.inputs(0, TOKENS + 1)
    assert not prompt.see_next(TOKENS, TOKENS + 1)  # The second goes on in the next pass.


def test_features_are_kept_until_the_engine_rests(images):
    _, prompt = images.place([PAD] * 2, parts(2))
    assert prompt.see_next(0, 2 * TOKENS) and prompt.see_next(0, 2 * TOKENS)
    _, again = images.place([PAD], parts(1))
    again.see_next(0, TOKENS)
    assert images.towers == 2
    images.give_memory_back()
    _, again = images.place([PAD], parts(1))
    again.see_next(0, TOKENS)
    assert images.towers == 3


def test_pixels_of_a_refused_prompt_go_when_the_engine_rests(images, monkeypatch):
    with pytest.raises(PromptTooLong):
        images.place([PAD] * 9, parts(9), most=8 + TOKENS)
    assert images._pixels.cost and not images.give_memory_back()  # Another prompt may be on its way.
    monkeypatch.setattr(images_room, "PIXELS_S", 0.0)
    assert images.give_memory_back() and not images._pixels.cost
    assert not images.give_memory_back()


def test_what_is_remembered_of_an_image_is_small(images):
    """Masks of pixels are as large as pixels, and thousands of images are remembered."""
    process = images.processor.process_image

    def with_mask(rgb):
        tokens, pixels = process(rgb)
        return tokens, pixels | {"pixel_attention_mask": np.ones(1 << 20), "image_grid_thw": np.ones((1, 3))}

    images.processor.process_image = with_mask
    images.place([PAD], parts(1))
    [known] = images._by_digest.values()
    assert images._by_digest.cost == known.nbytes < 1000 and known.grid.size == 3
