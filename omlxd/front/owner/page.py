"""`GET /`: the start page in a browser. Its files are those of front/web/.

The page itself holds nothing secret, so that it loads without a key; it asks for one, and all that it shows
comes by the other paths, which need it. Its policy lets it load, run and reach nothing but this server.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from ...errors import NotFound

WEB = Path(__file__).resolve().parents[1] / "web"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # No text becomes HTML, whoever wrote it.
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class Page:
    """Serves the page; `opened` is called when a browser opens it."""

    def __init__(self, opened: Callable[[], None]):
        self._opened = opened

    async def root(self, request: Request) -> Response:
        """Return the page for browsers, else name and version."""
        if "text/html" in request.headers.get("accept", ""):
            self._opened()
            return _answer(request, "index.html")
        return Response(f"omlxd {__version__}\n", media_type="text/plain", headers={"vary": "accept"})

    async def file(self, request: Request) -> Response:
        """Return a file of the page. Raises NotFound."""
        return _answer(request, request.path_params["name"])


def _answer(request: Request, name: str) -> Response:
    if name not in _names():
        raise NotFound(f"The page has no file {name[:100]!r}.")
    data, tag = _read(name)
    headers = HEADERS | {"etag": tag, "vary": "accept"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=TYPES[Path(name).suffix], headers=headers)


@functools.cache
def _names() -> frozenset[str]:
    return frozenset(each.name for each in WEB.iterdir() if each.suffix in TYPES)


@functools.cache
def _read(name: str) -> tuple[bytes, str]:
    """Read a file and its tag. They change with the package alone, and so with a restart."""
    data = (WEB / name).read_bytes()
    return data, f'"{hashlib.sha256(data).hexdigest()[:16]}"'
