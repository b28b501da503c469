"""Refuses WebSockets, and says where the same is to be had."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from ....api.errors import http_error
from ....errors import InvalidRequest

LM_STUDIO = frozenset(
    f"/{name}"
    for name in ("llm", "embedding", "system", "files", "repository", "diagnostics", "plugins", "runtime")
)
"""Paths of LM Studio's SDKs (`lmstudio`, `@lmstudio/sdk`)."""
NOT_FOR_SDK = (
    "omlxd does not speak the WebSocket protocol of LM Studio's SDK. Use LM Studio's REST API, POST "
    "/api/v1/chat and GET /api/v1/models, or a client of OpenAI's API (/v1/chat/completions) or "
    "Anthropic's (/v1/messages)."
)
FIRST_WORD_S = 5.0
"""Seconds for the SDK's first message, a greeting, whose answer alone it reads."""
POLICY = 1008
UPGRADE_REQUIRED = 426
"""Status by which Codex goes on by HTTP."""

log = logging.getLogger(__name__)


async def refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a WebSocket in the client's own terms; an ASGI app."""
    path: str = scope["path"][:200]
    log.info("WebSocket %s: refused", ascii(path))
    if path in LM_STUDIO:
        agent = next((value for name, value in scope["headers"] if name == b"user-agent"), b"")
        # The SDK for JavaScript reads a text alone, that for Python an object alone.
        error = {"title": NOT_FOR_SDK} if agent.startswith(b"python") else NOT_FOR_SDK
        await _refuse_sdk({"success": False, "error": error}, receive, send)
    else:
        await _refuse_handshake(path, send)


async def _refuse_handshake(path: str, send: Send) -> None:
    error = InvalidRequest(
        f"WebSocket {path}: WebSockets are not spoken here. Ask over HTTP: streams are server-sent events; "
        "GET /openapi.json describes every path."
    )
    answer = http_error(error, "openai", "", status=UPGRADE_REQUIRED)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer.body)).encode())]
    headers += [(b"upgrade", b"HTTP/1.1"), (b"connection", b"close")]
    await send({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": answer.body})


async def _refuse_sdk(told: dict[str, Any], receive: Receive, send: Send) -> None:
    """Answer the SDK's greeting as LM Studio answers a wrong key, with words that the SDK raises."""
    await send({"type": "websocket.accept"})
    try:
        async with asyncio.timeout(FIRST_WORD_S):
            left = await _is_gone(receive)
    except TimeoutError:
        left = False
    if left:
        return
    await send({"type": "websocket.send", "text": msgspec.json.encode(told).decode()})
    await send({"type": "websocket.close", "code": POLICY, "reason": "use POST /api/v1/chat instead"})


async def _is_gone(receive: Receive) -> bool:
    """Wait for the client's first message; return whether it closed instead."""
    while True:
        message: Message = await receive()
        if message["type"] in ("websocket.receive", "websocket.disconnect"):
            return message["type"] == "websocket.disconnect"
