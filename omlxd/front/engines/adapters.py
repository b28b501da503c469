"""Adapters share the engine of their base, unless something of theirs is in the way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from ...config import ModelSettings
from ...errors import AdapterError, InvalidRequest, NotNow, OmlxdError
from ...models.adapters import adapter_state, check_adapter
from ...wire import CacheSettings, Load, LoadAdapter
from .guest import GuestLink
from .model import ModelEngine, for_next_load
from .supervisor import Link

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds that a request waits for a look at its adapter's files."""


async def find_host(
    engine: ModelEngine, base: ModelEngine | None, defaults: ModelSettings
) -> ModelEngine | None:
    """Find the model whose engine `engine` shares; None: it gets one of its own, and the log says so.

    base      of which it is an adapter; None: of none
    defaults  settings of a model that has none of its own
    Raises AdapterError for an adapter that can't be used at all.
    """
    if engine.adapter is None:
        return None
    engine.loaded_state = await asyncio.to_thread(adapter_state, engine.adapter)
    try:
        reason = await asyncio.to_thread(check_adapter, engine.adapter)
    except AdapterError as error:
        raise unusable(engine, error.message) from error
    if base is None:
        return None
    differ = for_next_load(base.settings, replace(engine.settings, adapter=base.settings.adapter))
    if base.adapter is not None:
        reason = "its base is set to have another adapter"
    elif base.measured.description.kind != "chat":
        reason = "its base answers no prompts"
    elif differ and engine.settings is not defaults:
        reason = f"its settings differ from its base's: {', '.join(differ)}"
    if reason:
        log.info("%s gets an engine of its own: %s", engine.model_id, reason)
    return None if reason else base


def unusable(engine: ModelEngine, reason: str) -> AdapterError:
    """Make the error of an unusable adapter: an owner's settings are no request's fault."""
    if engine.settings.adapter is None:
        return AdapterError(reason, param="model")
    return AdapterError(f"adapter of {engine.model_id}: {reason}", code="model_unusable")


async def join(engine: ModelEngine, host: ModelEngine) -> tuple[Link, Load]:
    """Link an adapter to the engine of `host`, which loads it. Raises OmlxdError."""
    engine.host, engine.loaded_with = host, engine.settings
    try:
        await host.process.load()
    except OmlxdError as error:
        if host.state in ("failed", "restarting"):
            raise
        kind = InvalidRequest if error.code == "invalid_request" else NotNow
        raise kind(error.message, param=error.param, retry_after=error.retry_after) from error
    if host.state != "ready":
        raise NotNow(f"The engine of {host.model_id} ended; retry.", retry_after=1)
    folder, channel = str(engine.adapter), engine.process.channel
    link = GuestLink(host.process.supervisor, channel)
    link.send(LoadAdapter(channel=channel, folder=folder, model_id=engine.model_id))
    load = Load(model_path=str(host.folder), model_id=engine.model_id, cache=CacheSettings(), adapter=folder)
    return link, load


async def look_at(engine: ModelEngine, state: Callable[[], tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the `state` of an engine's files; None: the disk is slow to say.

    There is one look at a time: a disk that hangs holds one thread.
    """
    before = engine.look
    if before is not None and not (await asyncio.wait({before}, timeout=LOOK_S))[0]:
        return None
    if (look := engine.look) is before or look is None:  # Else another request began it, and it is new.
        look = engine.look = asyncio.create_task(asyncio.to_thread(state))
    await asyncio.wait({look}, timeout=LOOK_S)
    return look.result() if look.done() else None


async def take_up_changes(engine: ModelEngine) -> None:
    """Let go of an adapter whose files have changed since it was loaded: the next request loads it again.

    Answers in flight end first, with the weights that they began with; requests that come meanwhile wait.
    """
    if engine.adapter is None or engine.state != "ready":
        return
    state, running = await look_at(engine, partial(adapter_state, engine.adapter)), engine.in_flight
    if state and state != engine.loaded_state and engine.state == "ready" and engine.process.begin_turn():
        when = f" once {running} running requests have ended" if running else ""
        log.info("%s is loaded again%s: its files have changed", engine.model_id, when)
