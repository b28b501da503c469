"""Small PNGs and PDFs, written by hand."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence


def png(
    width: int, height: int, rows: bytes | None = None, colour: int = 2, green: int = 0, depth: int = 8
) -> bytes:
    """A PNG. `rows`: its data, compressed; None: a gradient from red to blue. `colour`: PNG's colour type."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    if rows is None:
        line = b"".join(bytes((255 * x // width, green, 255 - 255 * x // width)) for x in range(width))
        rows = zlib.compress((b"\0" + line) * height)
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def pdf(pages: Sequence[str], size: tuple[float, float] = (612, 792)) -> bytes:
    """A PDF whose pages show these lines of text, in Helvetica. `size`: points."""
    font = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
    objects: list[bytes] = [b"", b"", font]
    kids: list[bytes] = []
    for text in pages:
        lines = " ".join(f"({line}) Tj T*" for line in text.split("\n"))
        content = f"BT /F1 12 Tf 14 TL 50 {size[1] - 60} Td {lines} ET".encode("latin-1")
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(content), content))
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 %g %g]/Contents %d 0 R/Resources<</Font<</F1 3 0 R>>>>>>"
            % (*size, len(objects))
        )
        kids.append(b"%d 0 R" % len(objects))
    objects[0] = b"<</Type/Catalog/Pages 2 0 R>>"
    objects[1] = b"<</Type/Pages/Count %d/Kids[%s]>>" % (len(kids), b" ".join(kids))
    data, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(b"%010d 00000 n \n" % len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, b"".join(offsets))
    end = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(data))
    return data + table + end


def locked_pdf() -> bytes:
    """A PDF that asks for a password."""
    secret = b"/Encrypt<</Filter/Standard/V 1/R 2/P -4/O<%s>/U<%s>>>/ID[<00><00>]" % (b"11" * 32, b"22" * 32)
    return pdf(["secret"]).replace(b"/Root 1 0 R", b"/Root 1 0 R" + secret)
