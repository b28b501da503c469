"""`omlxd models`: installed and loaded models, and orders about them. Imports neither MLX nor the hub."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from ...common.units import counted, human, spoken
from ...config import ModelSettings, Settings, add_flags, closest, settings_of
from ...errors import ConfigError, ModelError, OmlxdError
from ...models.adapters import adapter_bytes
from ...models.catalog import Catalog, InstalledModel, default_model, describe
from ...models.footprint import Footprint, expected, footprint, likely_backend, weight_bytes
from ...models.local_stores import LocalModel, LocalModels, check_models, local_models, model_called
from ...models.remove import removable, remove_folder
from ...models.resolve import (
    DEFAULT_ID,
    check_folder,
    fetch_default_model,
    fetch_from_hub,
    is_hub_id,
    is_local,
    local_path,
    no_hub_id,
)
from ..daemon.client import Daemon, DaemonError, NoDaemon, NotThere, add_url, find_daemon
from ..daemon.owner_api import (
    InstalledStatus,
    InstalledStatuses,
    LoadModel,
    NameModel,
    PinModel,
    Removed,
    RemoveModel,
    Unloaded,
    UnloadModel,
)
from ..watch.status import as_json, table
from .fit import as_size_table, hub_page, look_up, what_fits
from .machine import under_daemon


def why_broken(model: InstalledStatus) -> str:
    """Say why a folder can't be loaded, as far as its files tell; "" otherwise."""
    if model.folder is None:
        return ""
    try:
        check_folder(Path(model.folder))
    except ModelError as error:
        return error.message
    return ""


def installed(settings: Settings) -> list[InstalledStatus]:
    """List every model that a daemon of these settings would offer."""
    default, backend = default_model(settings), likely_backend()
    result: list[InstalledStatus] = []
    for model in Catalog(settings).models().values():
        own = settings.models.get(model.id, ModelSettings())
        status = InstalledStatus(
            id=model.id,
            state="installed",
            source=model.source,
            default=default is not None and model.id == default.id,
            aliases=list(own.aliases),
            pinned=own.pin,
            disk_bytes=_disk_bytes(model),
            adapter=str(own.adapter or model.adapter or ""),
        )
        if (folder := model.folder) is not None:
            prints, described = _prints(folder, own, settings), describe(folder)
            status.folder, status.origin, status.tools = str(folder), described.origin, described.tools
            status.load_bytes, status.context_length = prints.loading(backend), prints.context_length
            status.kv_bytes_per_token = prints.kv_per_token
            status.images, status.blind = prints.blind == "", prints.blind or ""
            status.layers, status.hidden_size = prints.layers, prints.hidden_size
        result.append(status)
    return result


def as_listed(name: str, settings: Settings) -> tuple[str, Path | None]:
    """Return --model and --model-dir for the model that `omlxd models list` calls `name`.

    A running daemon knows; without one, or for a name that it does not know, those of `settings` hold.
    """
    try:
        shown = find_daemon(None, settings).fetch("/omlxd/models/" + quote(name), InstalledStatus)
    except OmlxdError:
        return name, settings.model_dir
    if shown.folder is None or ":" in shown.id:  # An adapter has its base's folder.
        return shown.id, settings.model_dir
    if shown.source == "model-dir":
        return shown.id, Path(shown.folder).parents[shown.id.count("/")]
    return shown.folder if shown.source == "folder" else shown.id, settings.model_dir


def _disk_bytes(model: InstalledModel) -> int | None:
    if model.adapter is not None:
        return adapter_bytes(model.adapter)
    return weight_bytes(model.folder) if model.folder is not None else None


def _prints(folder: Path, own: ModelSettings, settings: Settings) -> Footprint:
    as_stored = (own.cpu_weights or settings.cpu_weights) == "as-stored"
    float32 = None if as_stored else footprint(folder, float32=True)
    return expected(footprint(folder), float32, likely_backend())


_HEAD = ("MODEL", "STATE", "ON DISK", "IN RAM", "CONTEXT", "STAYS", "ALIASES")


def as_table(models: Sequence[InstalledStatus]) -> str:
    """Format a line a model, `*` before the default one."""
    if not models:
        return "no model is installed; `omlxd models pull` says what fits, and with ORG/NAME downloads it"
    return "\n".join(table([("  " + _HEAD[0], *_HEAD[1:]), *map(_row, models)]))


def as_local_table(models: Sequence[LocalModel]) -> str:
    """Format a line a model of another program, with the command that imports it or why none does."""
    if not models:
        return "no model of Ollama, LM Studio or llama.cpp is on this machine"
    rows = [
        (m.name, m.store, _bytes(m.disk_bytes), m.type or m.format, m.command or f"no: {m.trouble}")
        for m in models
    ]
    return "\n".join(table([("MODEL", "STORE", "SIZE", "TYPE", "IMPORT"), *rows]))


def _row(model: InstalledStatus) -> tuple[str, ...]:
    return (
        ("* " if model.default else "  ") + model.id,
        model.state + (f" ({model.in_flight} in flight)" if model.in_flight else ""),
        _bytes(model.disk_bytes),
        _bytes(model.memory_bytes),
        str(model.context_length or "-"),
        _stays(model),
        ", ".join(model.aliases) or "-",
    )


def _stays(model: InstalledStatus) -> str:
    if model.pinned:
        return "pinned"
    if model.expires_in_s is not None:
        return spoken(model.expires_in_s)
    return spoken(model.idle_s) if model.state == "ready" else "-"


def _bytes(nbytes: int | None) -> str:
    return human(nbytes) if nbytes else "-"


def _where(model: InstalledStatus) -> str:
    return f"in the engine of {model.shares}" if model.shares else f"process {model.pid}"


_REUSE = {
    None: "known once it is loaded",
    "": "yes: a prompt's cached prefix is not computed again",
}
_TOOLS = {
    True: "yes",
    False: "no: its chat template has none, so it may never call one",
    None: "-",
}


def as_page(model: InstalledStatus) -> str:
    """Format a line a fact."""
    facts = {
        "state": model.state
        + (f" ({counted(model.in_flight, 'request')} in flight)" if model.in_flight else ""),
        "default": "yes" if model.default else "no",
        "folder": model.folder or "not here yet",
        "source": model.source,
        "adapter": model.adapter or "-",
        "origin": model.origin or "-",
        "on disk": _bytes(model.disk_bytes),
        "to load it": f"about {_bytes(model.load_bytes)}",
        "in RAM": _bytes(model.memory_bytes),
        "layers": f"{model.layers}, hidden size {model.hidden_size}" if model.layers else "-",
        "context": f"{model.context_length} tokens" if model.context_length else "-",
        "images": "yes" if model.images else f"no: {model.blind}" if model.blind else "no",
        "reuse": _REUSE.get(model.kv_reuse) or f"no: {model.kv_reuse}",
        "KV": f"{human(model.kv_bytes_per_token)} a token" if model.kv_bytes_per_token else "-",
        "tools": _TOOLS[model.tools],
        "stays": _stays(model),
        "aliases": ", ".join(model.aliases) or "-",
        "process": f"that of {model.shares}" if model.shares else str(model.pid or "-"),
        "trouble": model.trouble or "none",
    }
    return facts_page(model.id, facts)


def facts_page(title: str, facts: Mapping[str, str], more: Sequence[str] = ()) -> str:
    width = max(map(len, facts))
    return "\n".join([title, *(f"  {name.ljust(width)}  {value}" for name, value in facts.items()), *more])


LOAD_S = 3600.0
"""Seconds of a load, which may download the model first."""
REMOVE_S = 120.0
"""Seconds of a removal, before which the engine writes its cache."""

IN_MEMORY = ("loading", "ready", "restarting", "unloading")
"""States of a model that is loaded, on the way there, or not yet gone."""

_FOLDER_OPTIONS = ("base_path", "model_dir")


def main(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run `omlxd models` with `argv`, the words after it. Raises ConfigError."""
    _add_verbs(parser)
    args = parser.parse_args(argv)
    return args.run(args)


def _add_verbs(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, run: Callable[[argparse.Namespace], int], text: str, *, asks: bool = True):
        made = verbs.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        made.add_argument("--json", action="store_true", help="one JSON object")
        if asks:
            add_url(made)
        return made

    listed = verb("list", _list, "every installed model, also without a daemon")
    listed.add_argument("--loaded", action="store_true", help="those alone that are in memory or on the way")
    listed.add_argument(
        "--found",
        dest="local",
        action="store_true",
        help="list the models of Ollama, LM Studio and llama.cpp on this machine instead",
    )
    shown = verb("show", _show, "all details of one model; of one on the hub, whether it fits this machine")
    shown.add_argument("model", help="an installed model, or a hub id as ORG/NAME")
    for made in (listed, shown):
        add_flags(made, *_FOLDER_OPTIONS)
    pulled = verb("pull", _pull, "download a model from the hub; goes on where it stopped", asks=False)
    pulled.add_argument(
        "model",
        metavar="ORG/NAME",
        nargs="?",
        help=f"a hub id, or {DEFAULT_ID}; without one: what sizes of models fit this machine",
    )
    pulled.add_argument("--url", help="without ORG/NAME: the daemon whose --memory-limit holds")
    add_flags(pulled, "base_path")
    made = verb("import", _import, "make a model folder of a GGUF file", asks=False)
    made.add_argument("file", metavar="FILE.gguf", help="or a name of `omlxd models list --found`")
    add_flags(made, "base_path")
    loaded = verb("load", _load, "load a model now; it stays until it is unloaded")
    loaded.add_argument("model")
    loaded.add_argument("--keep-alive", metavar="TIME", help="go after that long without a request, as 30m")
    verb("unload", _unload, "write its cache, then end its engine").add_argument("model")
    removed = verb("rm", _rm, "unload a model and delete its files; its cached KV leaves by itself")
    removed.add_argument("model", nargs="+")
    add_flags(removed, *_FOLDER_OPTIONS)
    pinned = verb("pin", _pin, "never unload a model for others, nor for being idle")
    pinned.add_argument("model")
    pinned.add_argument("--off", action="store_true", help="take the pin away")
    named = verb("alias", _alias, "give a model another name")
    named.add_argument("alias")
    named.add_argument("model", nargs="?")
    named.add_argument("--off", action="store_true", help="take the name away")
    if typed := getattr(parser, "typed", None):
        for each in verbs.choices.values():
            each.prog = typed.get(each.prog, each.prog)
        parser.prog = next(iter(typed.values()))  # It is who finds a flag that none of them has.


# --------------------------------------------------------------------------- verbs


def _list(args: argparse.Namespace) -> int:
    if args.local:
        models = local_models()
        check_models(models)
        _say(args, LocalModels(models), lambda: as_local_table(models))
        return 0
    settings = settings_of(args, *_FOLDER_OPTIONS)
    try:
        result = find_daemon(args.url, settings).fetch("/omlxd/models", InstalledStatuses)
    except NoDaemon as error:
        result = InstalledStatuses(installed(settings))
        _say_absence(args, error)
    if args.loaded:
        result.models = [model for model in result.models if model.state in IN_MEMORY]
    if args.loaded and not result.models and not args.json:
        print("no model is loaded")
        return 0
    _say(args, result, lambda: as_table(result.models))
    return 0


def _show(args: argparse.Namespace) -> int:
    settings = settings_of(args, *_FOLDER_OPTIONS)
    daemon = find_daemon(args.url, settings)
    try:
        result = daemon.fetch("/omlxd/models/" + quote(args.model), InstalledStatus)
    except NotThere:
        return _show_absent(args, daemon, settings, daemon.fetch("/omlxd/models", InstalledStatuses).models)
    except NoDaemon as error:
        result = _called(args.model, models := installed(settings))
        if result is None:
            return _show_absent(args, daemon, settings, models)
        result.trouble = why_broken(result)
        _say_absence(args, error)
    _say(args, result, lambda: as_page(result))
    return 0


def here(name: str, daemon: Daemon, settings: Settings) -> InstalledStatus | None:
    """Return the status of a model whose files are here; None: they are not. Raises DaemonError."""
    try:
        found = daemon.fetch("/omlxd/models/" + quote(name), InstalledStatus)
    except NotThere:
        return None
    except NoDaemon:
        found = _called(name, installed(settings))
    return found if found is not None and found.folder else None


def _called(name: str, models: Sequence[InstalledStatus]) -> InstalledStatus | None:
    return next((model for model in models if name in (model.id, model.id.rpartition("/")[2])), None)


def _show_absent(
    args: argparse.Namespace, daemon: Daemon, settings: Settings, installed: Sequence[InstalledStatus]
) -> int:
    """Show a model that can be downloaded. Raises OmlxdError."""
    names = [each.id for each in installed]
    absent = f"There is no model {args.model!r} on this machine{_near(args.model, names)}"
    if args.model != DEFAULT_ID and is_local(args.model):
        raise DaemonError(
            f"{absent}; there are: {', '.join(names) or 'none'}. "
            f"`omlxd models pull ORG/NAME` downloads one, also {DEFAULT_ID}."
        )
    try:
        model = look_up(args.model, under_daemon(lambda: daemon, settings))
    except ModelError as error:
        raise ModelError(f"{absent}, and {error.message}") from error
    _say(args, model, lambda: facts_page(*hub_page(model)))
    return 0


def _near(name: str, names: Sequence[str]) -> str:
    return closest(name, [spelt for each in names for spelt in (each.rpartition("/")[2], each)])


def _say_absence(args: argparse.Namespace, error: NoDaemon) -> None:
    """Report a missing daemon to a user who names one; without it the disk's models suffice."""
    if args.url and not args.json:
        print(f"no daemon: {error.message}", file=sys.stderr)


def _pull(args: argparse.Namespace) -> int:
    if args.model is None:
        settings = settings_of(args, *_FOLDER_OPTIONS)
        what = what_fits(under_daemon(lambda: find_daemon(args.url, settings), settings))
        _say(args, what, lambda: as_size_table(what))
        return 0
    if args.model == DEFAULT_ID:
        folder = asyncio.run(fetch_default_model(settings_of(args, *_FOLDER_OPTIONS).base_path))
    elif not is_hub_id(args.model):
        raise ModelError(no_hub_id(args.model, closest(args.model, [DEFAULT_ID])))
    else:
        folder = asyncio.run(fetch_from_hub(args.model))
    _say(args, {"id": args.model, "folder": str(folder)}, lambda: str(folder))
    return 0


def _import(args: argparse.Namespace) -> int:
    from ...models.resolve import import_gguf

    base_path = settings_of(args, *_FOLDER_OPTIONS).base_path
    if os.path.isfile(local_path(args.file)):
        folder = asyncio.run(import_gguf(args.file, base_path))
    else:
        model = model_called(args.file)
        if model.format == "mlx":  # MLX reads it where it is.
            folder = Path(model.path)
        else:
            last = model.name.rpartition("/")[2].removesuffix(":latest")
            name = re.sub(r"[^\w.-]+", "-", last).lstrip(".-")
            folder = asyncio.run(import_gguf(model.path, base_path, name or "imported"))
    serve = f"omlxd serve --model {shlex.quote(str(folder))}"
    _say(args, {"id": folder.name, "folder": str(folder)}, lambda: f"{folder}\n\n{serve}")
    return 0


def _load(args: argparse.Namespace) -> int:
    daemon, body = find_daemon(args.url), LoadModel(args.model, args.keep_alive)
    before = daemon.fetch("/omlxd/models/" + quote(args.model), InstalledStatus)
    result = daemon.fetch("/omlxd/models/load", InstalledStatus, body, LOAD_S)
    stays = ""
    if before.state == "ready" and before.idle_s is None and result.idle_s is not None:
        stays = f"; it stays for {spoken(result.idle_s)} without a request now, and stayed for good before"
    _say(args, result, lambda: f"{result.id} is loaded ({_where(result)}){stays}")
    return 0


def _unload(args: argparse.Namespace) -> int:
    result = find_daemon(args.url).fetch("/omlxd/models/unload", Unloaded, UnloadModel(args.model), 120.0)
    waits = f"{result.id} goes once its answers end ({counted(result.in_flight, 'request')} in flight)"
    _say(args, result, lambda: f"{result.id} is unloaded" if result.gone else waits)
    return 0


def _pin(args: argparse.Namespace) -> int:
    result = find_daemon(args.url).fetch(
        "/omlxd/models/pin", InstalledStatus, PinModel(args.model, not args.off)
    )
    _say(args, result, lambda: f"{result.id} is {'pinned' if result.pinned else 'no longer pinned'}")
    return 0


def _alias(args: argparse.Namespace) -> int:
    if bool(args.model) == args.off:
        raise ConfigError(
            "The new name comes first: `omlxd models alias NAME MODEL` gives it, `omlxd models alias NAME "
            "--off` ends it."
        )
    daemon = find_daemon(args.url)
    try:
        result = daemon.fetch("/omlxd/models/alias", InstalledStatuses, NameModel(args.alias, args.model))
    except NoDaemon:
        raise
    except DaemonError as error:
        if args.model and _is_model(daemon, args.alias) and not _is_model(daemon, args.model):
            raise ConfigError(
                f"The new name comes first: `omlxd models alias {args.model} {args.alias}`."
            ) from error
        raise
    owner = next((model.id for model in result.models if args.alias in model.aliases), None)
    _say(args, result, lambda: f"{args.alias} means {owner}" if owner else f"{args.alias} means nothing now")
    return 0


def _is_model(daemon: Daemon, name: str) -> bool:
    with contextlib.suppress(DaemonError):
        return bool(daemon.fetch("/omlxd/models/" + quote(name), InstalledStatus).id)
    return False


def _rm(args: argparse.Namespace) -> int:
    """Look up every name, then delete. A running daemon deletes itself what it serves."""
    settings = settings_of(args, *_FOLDER_OPTIONS)
    try:
        daemon = find_daemon(args.url, settings)
        ids = [daemon.fetch("/omlxd/models/" + quote(name), InstalledStatus).id for name in args.model]
    except NoDaemon:
        if args.url:
            raise
        here = installed(settings)
        models = [_installed_as(name, here) for name in args.model]
        places = [removable(model, settings.base_path) for model in models]
        for model, place in zip(models, places, strict=True):
            remove_folder(place)
            _say_removed(args, model.id, str(place))
        return 0
    for id in dict.fromkeys(ids):
        removed = daemon.fetch("/omlxd/models/remove", Removed, RemoveModel(id), REMOVE_S)
        _say_removed(args, removed.id, removed.folder)
    return 0


def _say_removed(args: argparse.Namespace, id: str, folder: str) -> None:
    _say(args, {"id": id, "folder": folder}, lambda: f"{id} is deleted")


def _installed_as(name: str, models: Sequence[InstalledStatus]) -> InstalledStatus:
    if (model := _called(name, models)) is not None:
        return model
    near = _near(name, [model.id for model in models])
    raise DaemonError(f"There is no model {name!r} on this machine{near}; `omlxd models list` lists them.")


def _say(args: argparse.Namespace, answer: object, text: Callable[[], str]) -> None:
    print(as_json(answer) if args.json else text())
