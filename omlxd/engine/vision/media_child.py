"""Decodes images and PDFs in a process of its own (common/child_loop.py): hostile bytes cost one request.

Of an image: the first frame, turned as its EXIF says, 8 bits a channel, transparency over white.
"""

from __future__ import annotations

import functools
import io
import math
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_DECODED = 8000 * 8000
"""Pixels of an image at most: Anthropic's limit, as an area."""
MOST_PIXELS = 4096 * 4096
"""Pixels that a picture keeps; a larger one is scaled down. Qwen3-VL's processor keeps as many, and no
other of the field more."""
MOST_RATIO = 200
"""Ratio of the longer side to the shorter at most. Qwen's processors refuse more."""
PAGE_PIXELS = 1_150_000
"""Pixels of a PDF's page: 1,500 tokens of Qwen2.5-VL, about as many as Anthropic's scaling gives."""
PAGE_SCALE = 2.0
"""Pixels a point at most: a page of stamp size is not blown up."""
MOST_PAGES = 600
"""Pages of a PDF: Anthropic's limit for contexts of a million tokens."""
MOST_TEXT = 4 << 20
"""Characters of a PDF: some million tokens, as many as the longest contexts."""


class _Refused(Exception):
    """Bytes that are refused; the words go to the client."""


def answer(kind: str, data: bytes, page: int = 0, side: int = 0) -> tuple[Any, str]:
    """Return (result, "") or (None, why the bytes can't be read: what follows "the image").

    kind  `picture`: an image, or page `page` of a PDF, from 1: (width, height, RGB bytes, row-major);
          neither longer than `side`, unless that is 0
          `texts`: of a PDF's pages; `pages`: their sizes in points
    """
    try:
        if kind == "picture":
            return _picture(_page(data, page) if page else _image(data), side), ""
        return (_texts(data) if kind == "texts" else _sizes(data)), ""
    except _Refused as refused:
        return None, str(refused)
    except MemoryError:
        return None, "takes more memory to read than it may"
    except Exception as error:
        return None, f"can't be read, it may be damaged ({str(error) or type(error).__name__})"


# --------------------------------------------------------------------------- images


def _image(data: bytes) -> Any:
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # Checked here, before anything is decoded.
    _skip_large_texts()
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise _Refused("is no PNG, JPEG, WebP or GIF, or it is damaged; send one of these") from None
    _check_size(*image.size)
    deep, clear = any("RGB;16B" in tile for tile in image.tile), image.info.get("transparency")
    image.load()
    if deep and isinstance(clear, tuple):  # Of 16 bits, and the pixels have 8 now.
        image.info["transparency"] = tuple(value >> 8 for value in clear)
    return _turned(_rgb(image), _orientation(image))


@functools.cache
def _skip_large_texts() -> None:
    """Leave out a PNG's texts and colour profile where Pillow takes them for a bomb."""
    from PIL import ImageFile, PngImagePlugin

    stream: Any = PngImagePlugin.PngStream
    read = stream.call

    def call(self: Any, kind: bytes, position: int, length: int) -> bytes:
        try:
            return read(self, kind, position, length)
        except ValueError:
            if kind not in (b"iCCP", b"iTXt", b"tEXt", b"zTXt"):
                raise
            self.fp.seek(position)
            return ImageFile._safe_read(self.fp, length)

    stream.call = call


def _check_size(width: int, height: int) -> None:
    if width * height > MOST_DECODED:
        raise _Refused(f"has {width} x {height} pixels, and {MOST_DECODED:,} are the most")
    if max(width, height) > MOST_RATIO * min(width, height):
        raise _Refused(
            f"has {width} x {height} pixels, and one side may be at most {MOST_RATIO} times as long "
            "as the other"
        )


def _orientation(image: Any) -> int:
    try:
        return image.getexif().get(0x0112, 1)
    except Exception:  # Broken EXIF spoils no image.
        return 1


def _turned(image: Any, orientation: int) -> Any:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


def _rgb(image: Any) -> Any:
    from PIL import Image, ImageMath

    if image.mode.startswith("I"):  # 16 bits of grey, which `convert` would clip.
        deep, clear = image.convert("I"), image.info.get("transparency")
        image = deep.point(lambda value: value / 257).convert("L")
        image.info.pop("transparency", None)
        if clear is not None:
            hidden = ImageMath.lambda_eval(
                lambda by: by["convert"]((by["deep"] == clear) * 255, "L"), deep=deep
            )
            image.paste(255, mask=hidden)
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        ground = Image.new("RGB", image.size, "white")
        ground.paste(image, mask=image.getchannel("A"))
        return ground
    return image if image.mode == "RGB" else image.convert("RGB")


def _picture(image: Any, side: int) -> tuple[int, int, bytes]:
    width, height = image.size
    scale = min(1.0, (MOST_PIXELS / (width * height)) ** 0.5, (side or math.inf) / max(width, height))
    if scale < 1:
        width, height = max(1, int(width * scale)), max(1, int(height * scale))
        image = image.resize((width, height), reducing_gap=2.0)
    return width, height, image.tobytes()


# --------------------------------------------------------------------------- PDFs


def _pdf(data: bytes) -> Any:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise _Refused("is locked with a password; send it without one") from None
        raise _Refused("is damaged, or it is no PDF") from None
    if len(document) > MOST_PAGES:
        raise _Refused(f"has {len(document)} pages, and {MOST_PAGES} are the most; send a part of it")
    return document


def _page(data: bytes, number: int) -> Any:
    document = _pdf(data)
    document.init_forms()  # What somebody filled in is drawn.
    page = document[number - 1]
    width, height = page.get_size()
    scale = min(PAGE_SCALE, (PAGE_PIXELS / max(1.0, width * height)) ** 0.5)
    _check_size(max(1, int(width * scale)), max(1, int(height * scale)))
    return page.render(scale=scale).to_pil().convert("RGB")


def _sizes(data: bytes) -> list[tuple[float, float]]:
    document = _pdf(data)
    return [document.get_page_size(number) for number in range(len(document))]


def _texts(data: bytes) -> list[str]:
    document = _pdf(data)
    texts: list[str] = []
    for number in range(len(document)):
        page = document[number]
        texts.append(page.get_textpage().get_text_bounded().replace("\r\n", "\n"))
        page.close()
        if sum(map(len, texts)) > MOST_TEXT:
            raise _Refused(f"has more than {MOST_TEXT:,} characters of text; send a part of it")
    return texts
