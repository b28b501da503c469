"""Checks who may ask: the Host check, the Origin check and the API key. Pure ASGI.

Hosts: a page on the web can point its own name at 127.0.0.1 and so read this server's answers
(DNS rebinding). Bound to loopback, only names that mean loopback are served.
Origins: unless --cors-origin opens it (Starlette's CORSMiddleware, in app.py), no CORS header is ever
sent, so a browser shows no page our answers; but it would still *send* a POST whose content type needs
no preflight. Those are refused. The owner's paths refuse whatever a browser sends for another site's page.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address

from starlette.datastructures import Headers, QueryParams
from starlette.types import ASGIApp, Receive, Scope, Send

from ...api.errors import protocol_of
from ...config.keys import NONE_LEFT
from ...errors import InvalidRequest, Unauthorized
from .observe.trace import trace_of
from .settings import HttpSettings, KeyRing

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
CONTAINER_NAMES = ("host.docker.internal", "host.containers.internal")
"""Names by which containers call the machine they run on. No page of the web can have such a name."""
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/api/hello", "/lmstudio-greeting"})
"""Paths answered without a key, like the page's code (`PAGE_FILES`)."""
PAGE_FILES = "/web/"
OWNER_PATHS = ("/omlxd/", "/models/", "/api/")
"""Paths of the owner, or with orders that load, unload or download a model."""


class Guard:
    """Raises OmlxdError for a request that may not pass; front/http/shell.py turns it into an answer."""

    def __init__(self, app: ASGIApp, settings: HttpSettings):
        self._app = app
        self._keys = settings.keys or KeyRing(settings.api_key)
        self._hosts = allowed_hosts(settings)
        self._origins = settings.cors_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            self._check_host(headers)
            self._check_origin(scope["method"], headers)
            path: str = scope["path"]
            if path.startswith(OWNER_PATHS):
                self._check_site(headers)
            if path not in OPEN_PATHS and not path.startswith(PAGE_FILES) and self._keys.required:
                trace_of(scope).key = self._check_key(headers, _key_in_query(scope))
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        try:
            name = host_name(headers.get("host", ""))
        except ValueError:
            shown = headers["host"][:200]
            raise InvalidRequest(f"The Host header is no name and port: {shown!r}.", param="host") from None
        if self._hosts is not None and name not in self._hosts:
            raise InvalidRequest(
                f"The Host header names {name[:200]!r}, and this server answers to localhost; if both "
                f"are one, start it with `--allowed-host {name[:200] or 'NAME'}`.",
                param="host",
            )

    def _check_origin(self, method: str, headers: Headers) -> None:
        if method != "POST" or "origin" not in headers:
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise InvalidRequest("A request from a browser needs content type application/json.")

    def _check_site(self, headers: Headers) -> None:
        """Refuse the owner's paths to a page of another site, though it could not read the answer."""
        if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            return
        if "*" not in self._origins and headers.get("origin") not in self._origins:
            raise InvalidRequest(
                "This path is not for pages of other sites; `--cors-origin` lets one of them in."
            )

    def _check_key(self, headers: Headers, more: bytes) -> str:
        """Return the name of the key that the request carries."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        # Claude Code sends both headers when both are set; either may be the right one.
        keys = (bearer, headers.get("x-api-key", ""), headers.get("x-goog-api-key", ""))
        if name := self._keys.name_of(
            [key for key in (*(key.encode("latin-1") for key in keys), more) if key]
        ):
            return name
        if self._keys.is_empty:
            raise Unauthorized(NONE_LEFT)
        raise Unauthorized(
            "The API key is missing or wrong; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
        )


def _key_in_query(scope: Scope) -> bytes:
    """Return the `?key=` of a Gemini client. No log line has a query."""
    if protocol_of(scope["path"]) != "gemini":
        return b""
    return QueryParams(scope["query_string"]).get("key", "").encode()


def is_loopback(host: str) -> bool:
    return host in LOOPBACK_NAMES or host.startswith("127.")


def allowed_hosts(settings: HttpSettings) -> frozenset[str] | None:
    """Return the names that a Host header may hold, or None for any."""
    if not is_loopback(settings.host):
        return None
    return frozenset(
        name.lower() for name in (*LOOPBACK_NAMES, *CONTAINER_NAMES, settings.host, *settings.allowed_hosts)
    )


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.~!$&'()*+;=%-]*))(?::(\d{0,5}))?", re.IGNORECASE | re.ASCII)


def host_name(header: str) -> str:
    """Return a Host header's name: no port, no brackets, lower case, IPv6 in its short form; "" of none.

    Raises ValueError for what is none (RFC 9112, 3.2).
    """
    found = _HOST.fullmatch(header)
    if found is None or int(found[3] or 0) > 65535:
        raise ValueError("no host")
    if found[1] is not None:
        return str(IPv6Address(found[1]))
    name = found[2].lower()
    if "" in name.removesuffix(".").split(".") and name:
        raise ValueError("a label is empty")
    return name.removesuffix(".")
