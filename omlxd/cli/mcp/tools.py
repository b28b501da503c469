"""The tools of `omlxd mcp`: what an agent may ask of a daemon and have it do. None deletes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from msgspec import Meta

from ...common.units import human, spoken
from ...config import closest, load_settings
from ...errors import ConfigError, ModelError, OmlxdError
from ...models.resolve import DEFAULT_ID, is_hub_id, no_hub_id
from ..cache import why_miss
from ..daemon.client import Daemon, NoDaemon, NotThere, StreamError
from ..daemon.owner_api import (
    LAST,
    InstalledStatus,
    InstalledStatuses,
    LoadModel,
    PinList,
    PullModel,
    RecentList,
    Unloaded,
    UnloadModel,
    WhyMiss,
    WhyMissBody,
)
from ..models.command import LOAD_S, as_page, as_table, facts_page, here
from ..models.fit import as_size_table, hub_page, look_up, what_fits
from ..models.machine import under_daemon
from ..watch.status import RESTORED, as_text, cold_line, hit_rate, percent, table, written_lines
from .protocol import Call, CallError, Tool, with_beats

INSTRUCTIONS = (
    "omlxd serves local language models on this machine and keeps their KV cache in RAM and on SSD. These "
    "tools tell its state and manage its models. Loading a model may unload others for their memory. "
    "Download or unload nothing that the user has not asked for."
)
_READS = {"readOnlyHint": True, "openWorldHint": False}
_READS_HUB = _READS | {"openWorldHint": True}
_CHANGES = {"readOnlyHint": False, "destructiveHint": False, "idempotentHint": True, "openWorldHint": False}
_KINDS = (
    (NoDaemon, "no_daemon"),
    (NotThere, "not_found"),
    (ConfigError, "settings"),
    (ModelError, "model"),
    (CallError, "arguments"),
)
_Name = Annotated[str, Meta(description="a model's id, its last part, or an alias", min_length=1)]
_HubId = Annotated[str, Meta(description=f"a hub id, as ORG/NAME, or {DEFAULT_ID}", min_length=1)]


def kind_of(error: OmlxdError) -> str:
    return next((kind for type, kind in _KINDS if isinstance(error, type)), "daemon")


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class OneModel(msgspec.Struct, forbid_unknown_fields=True):
    model: _Name


class Load(msgspec.Struct, forbid_unknown_fields=True):
    model: _Name
    keep_alive: Annotated[
        str | None, Meta(description='go after that long without a request, as "30m"; else it stays')
    ] = None


class Pull(msgspec.Struct, forbid_unknown_fields=True):
    model: _HubId
    confirmed: Annotated[
        bool, Meta(description="true once the user has agreed to the download's size; false tells it alone")
    ] = False


class Fits(msgspec.Struct, forbid_unknown_fields=True):
    model: Annotated[
        str, Meta(description=f"ORG/NAME on the hub, or {DEFAULT_ID}; left out, usual sizes are compared")
    ] = ""


class Miss(msgspec.Struct, forbid_unknown_fields=True):
    request: Annotated[
        str,
        Meta(description="a request id (req_…), a session, or `last`; left out, the last are listed"),
    ] = ""


def tools_of(find: Callable[[], Daemon]) -> list[Tool]:
    """Return the tools, over the daemon that `find` finds at each call. Raises OmlxdError."""
    asked = _Asked(find)
    return [
        Tool(
            "status",
            "Models in memory, requests, RAM and SSD cache of the daemon.",
            Nothing,
            _READS,
            asked.status,
        ),
        Tool(
            "list_models",
            "Every installed model: its state, size, context and aliases; * is the default.",
            *(Nothing, _READS, asked.list_models),
        ),
        Tool("show_model", "All details of one installed model.", OneModel, _READS, asked.show_model),
        Tool(
            "what_fits",
            "What fits this machine, before a download: weights, context that is left, tokens a second.",
            *(Fits, _READS_HUB, asked.what_fits),
        ),
        Tool(
            "load_model",
            "Load an installed model now. It stays until it is unloaded; others may go for its memory.",
            *(Load, _CHANGES, asked.load_model),
        ),
        Tool(
            "unload_model",
            "Write a model's cache to SSD and end its engine, once its answers have ended. Its next request "
            "loads it again. It may be the model that you run on.",
            *(OneModel, _CHANGES | {"destructiveHint": True}, asked.unload_model),
        ),
        Tool(
            "pull_model",
            "Download a model from the hub. Call it first without `confirmed`: it tells the size and whether "
            "the model fits. Ask the user, then call it with `confirmed`. An interrupted download goes "
            "on where it ended.",
            *(Pull, _CHANGES | {"openWorldHint": True}, asked.pull_model),
        ),
        Tool(
            "cache_stats",
            "How much of the prompts came from RAM and from SSD, bytes on SSD and written to it, and pins.",
            *(Nothing, _READS, asked.cache_stats),
        ),
        Tool(
            "why_miss",
            "Where a request's cached prefix ended, and why; or a list of the last requests.",
            *(Miss, _READS, asked.why_miss),
        ),
    ]


def _check_hub_id(name: str) -> None:
    if name != DEFAULT_ID and not is_hub_id(name):
        raise CallError(no_hub_id(name, closest(name, [DEFAULT_ID])))


SILENT = 5
"""Events of a download, a second apart, without news of it, after which there is a sign of life."""


class _Event(msgspec.Struct):
    """An event of a download."""

    done: int = 0
    total: int = 0
    folder: str = ""


class _Asked:
    """The tools' work."""

    def __init__(self, find: Callable[[], Daemon]):
        self._find = find

    def status(self, asked: Nothing, call: Call) -> str:
        daemon = self._find()
        return as_text(daemon.status(), daemon.url)

    def list_models(self, asked: Nothing, call: Call) -> str:
        return as_table(self._find().fetch("/omlxd/models", InstalledStatuses).models)

    def show_model(self, asked: OneModel, call: Call) -> str:
        return as_page(self._find().fetch("/omlxd/models/" + quote(asked.model), InstalledStatus))

    def what_fits(self, asked: Fits, call: Call) -> str:
        if asked.model:
            return self._before_download(asked.model, call)[0]
        settings = under_daemon(self._find, load_settings({}))
        return with_beats(call, "this machine is measured", lambda: as_size_table(what_fits(settings)))

    def _before_download(self, name: str, call: Call) -> tuple[str, bool]:
        """Return what `name` would take, and whether it is here. Raises OmlxdError."""
        settings = load_settings({})
        if (found := here(name, self._find(), settings)) is not None:
            return f"{found.id} is here already, in {found.folder}; load_model loads it", True
        _check_hub_id(name)
        settings = under_daemon(self._find, settings)
        page = with_beats(
            call, f"{name} is looked up", lambda: facts_page(*hub_page(look_up(name, settings)))
        )
        return page, False

    def load_model(self, asked: Load, call: Call) -> str:
        daemon, body = self._find(), LoadModel(asked.model, asked.keep_alive)

        def load() -> str:
            loaded = daemon.fetch("/omlxd/models/load", InstalledStatus, body, LOAD_S)
            stays = "until it is unloaded" if loaded.idle_s is None else f"for {spoken(loaded.idle_s)} unused"
            return f"{loaded.id} is loaded, and stays {stays}"

        return with_beats(call, f"{asked.model} loads", load)

    def unload_model(self, asked: OneModel, call: Call) -> str:
        done = self._find().fetch("/omlxd/models/unload", Unloaded, UnloadModel(asked.model), 120.0)
        if done.gone:
            return f"{done.id} is unloaded"
        return f"{done.id} goes once its answers have ended; {done.in_flight} in flight"

    def pull_model(self, asked: Pull, call: Call) -> str:
        daemon = self._find()
        if not asked.confirmed:
            page, is_here = self._before_download(asked.model, call)
            ask = "\n\nNothing is downloaded yet. Ask the user, then call it with `confirmed`."
            return page + ask * (not is_here)
        _check_hub_id(asked.model)
        body = msgspec.json.encode(PullModel(asked.model))
        events, told, silent = daemon.stream("/omlxd/models/pull", body, _Event), 0, 0
        try:
            for event in events:
                if event.folder:
                    return f"{asked.model} is in {event.folder}; load_model loads it"
                if call.cancelled.is_set():
                    break
                silent += 1
                if event.done > told:
                    told, silent = event.done, 0
                    call.tell(told, event.total or None, f"{human(told)} of {asked.model}")
                elif silent % SILENT == 0:  # The size may be unknown, and a number has to grow.
                    told += 1
                    call.tell(told, event.total or None, f"{asked.model} is being downloaded")
        except StreamError as error:
            raise ModelError(error.message) from error
        finally:
            events.close()
        raise CallError("The download was cancelled; the next one goes on where it stopped.")

    def cache_stats(self, asked: Nothing, call: Call) -> str:
        daemon = self._find()
        status, pins = daemon.status(), daemon.fetch("/omlxd/cache/pins", PinList)
        rows = [("MODEL", "PROMPT TOKENS", "FROM RAM", "FROM SSD", "RESTORED")]
        names = ("prefix_cache_queries_total", *RESTORED)
        for model in status.models:
            counts = (str(int(model.values.get(name, 0))) for name in names)
            rows.append((model.id, *counts, percent(hit_rate(model))))  # type: ignore[arg-type]
        pinned = f"pinned: {human(pins.bytes)} of {human(pins.most_bytes)} in {len(pins.pins)} pins"
        return "\n".join([*table(rows), cold_line(status), *written_lines(status), pinned])

    def why_miss(self, asked: Miss, call: Call) -> str:
        daemon = self._find()
        if not asked.request:
            return "\n".join(why_miss.as_list(daemon.fetch("/omlxd/requests", RecentList).requests))
        by_id = asked.request == LAST or asked.request.startswith("req_")
        body: Any = WhyMissBody(request_id=asked.request) if by_id else WhyMissBody(session=asked.request)
        return why_miss.as_text(daemon.fetch("/omlxd/why-miss", WhyMiss, body, why_miss.ANSWER_S))
