"""Images and PDFs of any kind become bounded pictures or an error that names the field."""

from __future__ import annotations

import io
import itertools
import signal
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import locked_pdf, pdf, png

from omlxd.chat import DocumentPart, ImagePart
from omlxd.engine.vision import media as media_room
from omlxd.engine.vision import media_child
from omlxd.engine.vision.media import Media, Picture, keyed
from omlxd.errors import InvalidRequest

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed")

FIELD = "messages.3.content.1"


@pytest.fixture(scope="module")
def media():
    made = Media()
    yield made
    made.close()


def encoded(image, format: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def part(data: bytes, page: int = 0) -> ImagePart:
    return ImagePart(data, "image/png", FIELD, page, name="kettles.pdf" if page else "")


def picture(media: Media, data: bytes, page: int = 0) -> Picture:
    [made] = media.pictures([part(data, page)])
    assert len(made.rgb) == made.width * made.height * 3
    return made


def refusal(media: Media, data: bytes, page: int = 0) -> str:
    with pytest.raises(InvalidRequest) as caught:
        list(media.pictures([part(data, page)]))
    assert caught.value.param == FIELD and caught.value.message.startswith(f"{FIELD}: ")
    return caught.value.message


def pixel(made: Picture, x: int = 0, y: int = 0) -> tuple[int, ...]:
    at = (y * made.width + x) * 3
    return tuple(made.rgb[at : at + 3])


def gradient(width: int = 40, height: int = 30):
    image = Image.linear_gradient("L").resize((width, height))
    return Image.merge("RGB", (image, image.rotate(180), image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)))


def near(one: tuple[int, ...], other: tuple[int, ...], by: int = 6) -> bool:
    return all(abs(a - b) <= by for a, b in zip(one, other, strict=True))


# --------------------------------------------------------------------------- formats


def test_lossless_encodings_of_a_picture_are_one_picture(media):
    image = gradient()
    files = [
        encoded(image),
        encoded(image, compress_level=1),
        encoded(image, "WEBP", lossless=True),
        encoded(image.convert("RGBA")),
    ]
    made = [picture(media, data) for data in files]
    assert len({each.digest for each in made}) == 1
    assert made[0].rgb == image.tobytes()
    other = image.copy()
    other.putpixel((0, 0), (1, 2, 3))
    assert picture(media, encoded(other)).digest != made[0].digest
    # As many bytes, in another shape.
    assert (
        picture(media, encoded(Image.new("RGB", (2, 3)))).digest
        != picture(media, encoded(Image.new("RGB", (3, 2)))).digest
    )


@pytest.mark.parametrize("format", ["JPEG", "WEBP"])
def test_lossy_formats_are_read(media, format):
    made = picture(media, encoded(Image.new("RGB", (33, 17), (200, 100, 50)), format))
    assert (made.width, made.height) == (33, 17) and near(pixel(made), (200, 100, 50))


def test_an_animation_gives_its_first_frame(media):
    frames = [Image.new("RGB", (9, 9), color) for color in ("red", "lime", "blue")]
    for format, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
        assert pixel(picture(media, data)) == (255, 0, 0), format


def test_a_photo_is_turned_as_its_exif_says(media):
    upright = Image.new("RGB", (20, 10), "white")
    upright.paste((255, 0, 0), (0, 0, 5, 5))
    wanted = picture(media, encoded(upright))
    back = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    for orientation, turn in back.items():
        stored = upright if turn is None else upright.transpose(Image.Transpose(turn))
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert picture(media, encoded(stored, exif=exif)) == wanted, orientation
    exif[0x0112] = 77
    assert picture(media, encoded(upright, exif=exif)) == wanted
    assert picture(media, encoded(upright, exif=b"Exif\0\0garbage")) == wanted


def test_transparency_is_over_white(media):
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    assert pixel(picture(media, encoded(clear))) == (255, 255, 255)
    assert near(pixel(picture(media, encoded(half))), (255, 127, 127), 1)
    assert pixel(picture(media, encoded(Image.new("LA", (4, 4), (0, 0))))) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert pixel(picture(media, encoded(palette))) == (10, 20, 30)
    assert pixel(picture(media, encoded(palette, transparency=1))) == (255, 255, 255)
    assert pixel(picture(media, encoded(palette, "GIF", transparency=1))) == (255, 255, 255)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_transparent_value_of_16_bits_is_that_value_alone(media, channels):
    values = (0, 100, 0x1200, 0x6464, 0xFFFF)
    row = b"\0" + b"".join(struct.pack(">H", value) * channels for value in values)
    data = png(len(values), 1, zlib.compress(row), {1: 0, 3: 2}[channels], depth=16)
    plain = picture(media, data)
    for hidden in values:
        clear = b"tRNS" + struct.pack(">H", hidden) * channels
        chunk = struct.pack(">I", len(clear) - 4) + clear + struct.pack(">I", zlib.crc32(clear))
        made = picture(media, data[:33] + chunk + data[33:])
        for x, value in enumerate(values):
            # Of colours, eight bits are what is told apart.
            same = value == hidden if channels == 1 else value >> 8 == hidden >> 8
            assert pixel(made, x) == ((255, 255, 255) if same else pixel(plain, x)), (hidden, value)


def test_other_depths_and_colours_are_read(media):
    assert pixel(picture(media, encoded(Image.new("1", (4, 4), 1)))) == (255, 255, 255)
    assert pixel(picture(media, encoded(Image.new("L", (4, 4), 77)))) == (77, 77, 77)
    for value, wanted in ((0, 0), (65535, 255), (25700, 100)):
        assert pixel(picture(media, encoded(Image.new("I;16", (4, 4), value)))) == (wanted,) * 3
    assert near(
        pixel(picture(media, encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))), (255, 0, 0)
    )


# --------------------------------------------------------------------------- limits


@pytest.mark.slow
def test_sizes_at_and_past_the_limits(media):
    assert picture(media, encoded(Image.new("RGB", (1, 1), "red"))).rgb == b"\xff\0\0"
    assert picture(media, encoded(Image.new("1", (20_000, 100)))).width == 20_000
    assert "20000 x 99 pixels, and one side" in refusal(media, encoded(Image.new("1", (20_000, 99))))
    assert "20000 x 20000 pixels, and 64,000,000" in refusal(media, encoded(Image.new("1", (20_000, 20_000))))
    wide = picture(media, encoded(Image.new("1", (16_000, 4000))))
    assert (wide.width, wide.height) == (8192, 2048)


def test_a_picture_may_be_bounded_by_its_longer_side(media):
    data = encoded(gradient(800, 300))
    whole, low, low_again = (
        picture(media, data),
        *media.pictures(
            [ImagePart(data, side=512), ImagePart(encoded(gradient(800, 300), compress_level=1), side=512)]
        ),
    )
    assert (whole.width, low.width, low.height) == (800, 512, 192) and low == low_again
    [small] = media.pictures([ImagePart(encoded(gradient(40, 30)), side=512)])
    assert (small.width, small.height) == (40, 30)


def test_a_bomb_is_refused_before_it_is_decoded(media):
    began = time.monotonic()
    assert "pixels" in refusal(media, png(2**31 - 1, 2**31 - 1, b"", 6))
    assert "pixels" in refusal(media, png(50_000, 50_000, zlib.compress(b"\0" * 10_000_000), 6))
    frames = [Image.new("RGB", (9, 9), color) for color in ("red", "lime")]
    webp = bytearray(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]))
    at = webp.index(b"VP8X") + 12
    webp[at : at + 6] = (49_999).to_bytes(3, "little") * 2
    assert "image" in refusal(media, bytes(webp))
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("head", [b"zTXtx\0\0", b"iCCPx\0\0", b"iTXtx\0\1\0\0\0"])
def test_large_texts_and_profiles_of_a_png_are_not_read(media, head):
    data = encoded(Image.new("RGB", (2, 2), "red"))
    for size in (2_000_000, 100_000_000):
        chunk = head + zlib.compress(b"a" * size)
        bomb = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for at in (33, len(data) - 12):  # Before the pixels, and behind them.
            assert pixel(picture(media, data[:at] + bomb + data[at:])) == (255, 0, 0)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_truncated_file_is_refused(media, format):
    data = encoded(Image.effect_noise((300, 300), 50).convert("RGB"), format)
    for length in (0, 1, 20, len(data) // 2, len(data) * 9 // 10):
        assert "the image" in refusal(media, data[:length])


def test_wrong_types_are_refused(media):
    for format in ("BMP", "TIFF", "PPM", "ICO"):
        assert "no PNG, JPEG, WebP or GIF" in refusal(media, encoded(gradient(), format))
    for data in (b"", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", pdf(["a page"])):
        assert "no PNG, JPEG, WebP or GIF" in refusal(media, data)


@pytest.mark.parametrize("trailing", [0, 1 << 20])
def test_an_image_that_kills_its_child_costs_its_own_request(media, monkeypatch, trailing):
    good = encoded(gradient())
    picture(media, good + bytes(trailing))
    [child] = media._children._idle
    child.process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(media_room, "DEADLINE_S", 0.2)
    assert "did not end within" in refusal(media, encoded(Image.new("RGB", (5, 5))) + bytes(trailing))
    assert child.process.returncode is not None
    monkeypatch.undo()
    assert picture(media, encoded(Image.new("RGB", (6, 5)))).width == 6


def test_all_images_of_a_request_share_a_deadline_and_the_next_request_goes_on(media, monkeypatch):
    clock = itertools.count(step=40)
    monkeypatch.setattr(media_room, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    parts = keyed([part(encoded(Image.new("RGB", (7, 7 + n)))) for n in range(3)])
    with pytest.raises(InvalidRequest, match="took 60 s to read; send it again, which goes on here, or"):
        list(media.identities(parts))
    assert len(list(media.identities(parts))) == 3


def test_too_little_memory_is_an_error_of_the_image(monkeypatch):
    monkeypatch.setattr(media_room, "MEMORY_BYTES", 200 << 20)
    small = Media()
    try:
        assert "memory" in refusal(small, encoded(Image.new("1", (8000, 8000))))
        assert picture(small, encoded(Image.new("RGB", (5, 5)))).width == 5
    finally:
        small.close()


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "PDF"]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8),
    st.integers(0, 10_000),
)
def test_damaged_bytes_give_a_picture_or_an_error(media, format, changes, cut):
    data = bytearray(pdf(["one", "two"]) if format == "PDF" else encoded(gradient(), format))
    for at, value in changes:
        data[at % len(data)] = value
    if cut < 2000:
        del data[cut:]
    try:
        [made] = media.pictures([part(bytes(data), int(format == "PDF"))])
        assert len(made.rgb) == made.width * made.height * 3 <= 3 * media_child.MOST_PIXELS
    except InvalidRequest as error:
        assert error.param == FIELD
    if format == "PDF":
        try:
            assert len(media.texts(document(bytes(data)))) == len(media.pages(document(bytes(data))))
        except InvalidRequest as error:
            assert error.param == FIELD


# --------------------------------------------------------------------------- what is kept


def test_an_image_seen_lately_is_not_decoded_again(monkeypatch):
    media = Media()
    files = [encoded(Image.new("RGB", (60, 60 + n))) for n in range(100)]
    try:
        first = list(media.identities(keyed([part(data) for data in files])))
        monkeypatch.setattr(Media, "_decode", None)
        assert list(media.identities(keyed([part(data) for data in files]))) == first
        assert next(media.pictures([part(data) for data in files[-5:]])).identity == first[-5]
    finally:
        media.close()


def test_recent_pictures_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(media_room, "RECENT_BYTES", 3 * 100 * 100 * 3)
    media = Media()
    try:
        for n in range(8):
            picture(media, encoded(Image.new("RGB", (100, 100), (n, n, n))))
        assert len(media._recent) == 3 and len(media._identities) == 8
    finally:
        media.close()


def test_threads_share_it(media):
    files = [encoded(Image.new("RGB", (30, 30), (n, 0, 0))) for n in range(24)]
    with ThreadPoolExecutor(6) as threads:
        made = list(threads.map(lambda data: picture(media, data), files * 2))
    assert [pixel(each)[0] for each in made] == [*range(24), *range(24)]


# --------------------------------------------------------------------------- PDFs


def document(data: bytes, name: str = "kettles.pdf") -> DocumentPart:
    return DocumentPart(data, "application/pdf", name, "", FIELD)


def test_a_pdf_has_texts_and_pictures(media):
    data = pdf(["A kettle boils.\nIt sings.", "", "The end."])
    assert media.pages(document(data)) == [(612.0, 792.0)] * 3
    assert [*media.sizes(keyed([part(data, 2), part(b"an image"), part(b"another PDF", 1)]))] == [
        (612, 792),
        None,
        None,
    ]
    assert [text.strip() for text in media.texts(document(data))] == [
        "A kettle boils.\nIt sings.",
        "",
        "The end.",
    ]
    pages = [picture(media, data, page) for page in (1, 2, 3)]
    assert len({page.digest for page in pages}) == 3
    assert set(pages[1].rgb) == {255}
    assert 1_000_000 < pages[0].width * pages[0].height <= media_child.PAGE_PIXELS * 1.01
    assert picture(media, data, 1) == pages[0]


def test_pages_of_any_size_are_bounded(media):
    tiny = picture(media, pdf(["a"], (10, 20)), 1)
    assert (tiny.width, tiny.height) == (20, 40)
    huge = picture(media, pdf(["a"], (14_400, 14_400)), 1)
    assert huge.width * huge.height <= media_child.PAGE_PIXELS * 1.01
    assert "page 1 of the PDF 'kettles.pdf' has 28800 x 4" in refusal(media, pdf(["a"], (14_400, 2)), 1)


@pytest.mark.parametrize("ask", [Media.texts, Media.pages])
def test_a_pdf_that_cannot_be_read_is_an_error_with_its_name(media, ask):
    for data, why in (
        (locked_pdf(), "locked with a password"),
        (pdf(["a", "b"])[:200], "is damaged, or it is no PDF"),
        (b"%PDF-1.7 nonsense", "is damaged, or it is no PDF"),
        (pdf([]), "is damaged, or it is no PDF"),
        (pdf(["x"] * 601), "has 601 pages, and 600 are the most"),
    ):
        with pytest.raises(InvalidRequest, match=rf"{FIELD}: the PDF 'kettles.pdf' .*{why}") as caught:
            ask(media, document(data))
        assert caught.value.param == FIELD


@pytest.mark.slow
def test_the_text_of_a_pdf_is_bounded(media):
    page = "\n".join(["x" * 1500] * 950)
    with pytest.raises(InvalidRequest, match="characters of text"):
        media.texts(document(pdf([page] * 3, (14_000, 14_000))))
