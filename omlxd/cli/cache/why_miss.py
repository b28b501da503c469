"""`omlxd cache why-miss`: where a prompt's cached prefix ends, and why.

The running daemon knows what lies in RAM and what it evicted. Without one, a request from a file is explained
by what lies on disk; another program loads tokenizer and template.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from ...common.units import counted
from ...config import Settings
from ...errors import ConfigError, OmlxdError
from ...wire.explanation import Explanation, OtherNamespace
from ..daemon.client import NoDaemon, find_daemon
from ..daemon.owner_api import RecentList, RequestLine, WhyMiss, WhyMissBody
from ..watch.status import as_json, table
from . import inventory
from .asked import NAMED, named_request
from .listing.stats import ago

ANSWER_S = 120.0
"""Seconds for an answer: an engine may have to load first, and search through headers."""
_PARSERS = {
    "/v1/messages": "anthropic.request",
    "/v1/chat/completions": "openai.chat_request",
    "/v1/completions": "openai.completions",
    "/v1/responses": "responses.request",
}
"""Path → the module of `omlxd.api` whose `parse` reads a body."""
_OFFLINE = (sys.executable, "-m", "omlxd.engine.server.explain")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request",
        nargs="?",
        metavar="SESSION|FILE",
        help=f"{NAMED}; without one the last requests are listed",
    )
    parser.add_argument("--session", metavar="ID", help="the last request of this session")
    parser.add_argument("--path", metavar="PATH", help="where the body goes, as /v1/messages")
    parser.add_argument("--offline", action="store_true", help="ask no daemon: only what lies on SSD counts")
    parser.add_argument("--model", metavar="NAME", help="whose KV to look at, with --offline")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace, settings: Settings, root: Path) -> int:
    """Explain a request; returns exit status 0, hit or miss."""
    result = _explained(args, settings, root)
    if args.json:
        print(as_json(result))
    elif isinstance(result, RecentList):
        print("\n".join(as_list(result.requests)))
    else:
        print(as_text(result))
    return 0


def _explained(args: argparse.Namespace, settings: Settings, root: Path) -> WhyMiss | RecentList:
    request: str = args.request or ""
    asked: WhyMissBody | None = None
    if not request and not args.session:
        if args.offline:
            raise ConfigError("--offline: give a file that holds the request.")
    elif args.session:
        asked = WhyMissBody(session=args.session)
    else:
        asked = named_request(request, path=args.path)
    from_file = asked is not None and bool(asked.path)
    if args.offline and not from_file:
        raise ConfigError(f"--offline: of {request or args.session} only a daemon knows.")
    if not args.offline:
        try:
            daemon = find_daemon(args.url, settings)
            if asked is None:
                return daemon.fetch("/omlxd/requests", RecentList)
            return daemon.fetch("/omlxd/why-miss", WhyMiss, asked, ANSWER_S)
        except NoDaemon:
            if not from_file or args.url:
                raise
            print("omlxd: no daemon answers; what lies on SSD is looked at", file=sys.stderr)
    assert asked is not None
    return offline(asked, root, args.model)


# --------------------------------------------------------------------------- without a daemon


class _Offline(msgspec.Struct):
    """Input of `python -m omlxd.engine.server.explain`."""

    root: str
    request: Any
    model: str


def offline(asked: WhyMissBody, root: Path, model: str | None) -> WhyMiss:
    """Explain without a daemon. Raises OmlxdError."""
    from urllib.parse import urlsplit

    path = urlsplit(asked.path).path
    if path not in _PARSERS:
        raise ConfigError(f"--path: {path} takes no prompt; use one of {', '.join(_PARSERS)}.")
    parse = importlib.import_module(f"omlxd.api.{_PARSERS[path]}").parse
    headers = {name.lower(): value for name, value in asked.headers.items()}
    parsed = parse(msgspec.json.encode(asked.body), headers)
    name = model or _name_with_kv(root, parsed.model)
    question = msgspec.json.encode(_Offline(str(root), parsed.generate, name))
    done = subprocess.run(_OFFLINE, input=question, capture_output=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise OmlxdError(lines[-1] if lines else f"the explaining program ended with {done.returncode}")
    return WhyMiss(name or "(newest)", msgspec.json.decode(done.stdout, type=Explanation))


def _name_with_kv(root: Path, name: str) -> str:
    """Return `name` if some KV is of a model so called, else "": clients may call any model `claude-…`."""
    infos = [info for info in inventory.namespaces(root).values() if info is not None]
    ids = {info.model_id for info in infos}
    return name if name in ids | {id.rpartition("/")[2] for id in ids} else ""


# --------------------------------------------------------------------------- as text


def as_text(miss: WhyMiss) -> str:
    why = miss.explanation
    then = f" when it ran ({miss.request_id})" if miss.reached >= 0 else ""
    restored = why.hot_tokens + why.cold_tokens
    tiers = "" if miss.reached >= 0 or not restored else f" ({why.hot_tokens} RAM, {why.cold_tokens} SSD)"
    lines = [
        f"{miss.model}: prompt of {counted(why.prompt_tokens, 'token')}, blocks of {why.block_size}, "
        f"namespace {why.namespace[:8] or '-'}",
        f"restored{then or ', were it sent now'}: {restored} tokens{tiers}",
    ]
    if miss.recomputed:
        lines.append(
            f"{miss.recomputed} more lay on SSD, and were computed as that was faster or a file damaged"
        )
    lines.append(_because(why))
    lines += [f"  {other}" for other in map(_other, why.elsewhere)]
    if why.prompt or why.before:
        lines += ["", f"text around token {why.position}:", f"  before  …{why.before!r}"]
        if why.stored:
            lines.append(f"  stored  {why.stored!r}…")
        lines.append(f"  prompt  {why.prompt!r}…")
    if why.cause in ("never_stored", "evicted") and not why.complete:
        lines.append(f"(after {counted(why.looked, 'file')} the search for another text there was ended)")
    if miss.logged:
        lines.append("(from the log of cache misses, which holds no texts)")
    return "\n".join(lines)


def _because(why: Explanation) -> str:
    block = why.position // why.block_size if why.block_size else 0
    here = f"first miss: block {block}, from token {block * (why.block_size or 1)}"
    if why.cause == "none" and why.prompt_tokens <= why.block_size:
        return f"nothing missed: the prompt is no longer than one block of {why.block_size} tokens"
    if why.cause == "none":
        return "nothing missed: every full block before the prompt's last token is there"
    if why.cause == "reuse_off":
        return f"prefixes are not reused: {why.reason}"
    if why.cause == "no_checkpoint":
        stood = why.hot_tokens + why.cold_tokens
        return (
            f"the blocks reach token {why.chain_tokens}, but the model's state can be restored only where "
            f"a checkpoint of it stands, and the last one before stands at token {stood}"
            + (f"; {_image(why)} is stored from token {why.position} on" if why.other_image else "")
        )
    if why.elsewhere and all(other.adapter and not other.differs for other in why.elsewhere):
        whose = ", ".join(dict.fromkeys(other.adapter for other in why.elsewhere))
        return f"{here}: it is stored, but for {whose}; adapters share no KV with the model or each other:"
    return f"{here}: " + {
        "other_image": f"{_image(why)} is stored there, from token {why.position} on "
        f"(last used {ago(why.stored_used)})",
        "differs": f"another text is stored there (last used {ago(why.stored_used)})",
        "never_stored": "never stored, or removed longer ago than a daemon remembers; nothing else is there",
        "other_namespace": "it is stored, but as made with another model file or setting:",
        "evicted": f"it was stored, and evicted {ago(why.gone_at)}",
        "cleared": f"it was stored, and cleared {ago(why.gone_at)}",
        "damaged": f"its file was damaged, and removed {ago(why.gone_at)}",
    }.get(why.cause, why.cause)


def _image(why: Explanation) -> str:
    return f"another image than {why.image}" if why.image else "another image"


def _other(other: OtherNamespace) -> str:
    whose = f", for {other.adapter}" if other.adapter else ""
    differs = f"; differs in {', '.join(other.differs)}" if other.differs else ""
    return f"namespace {other.name[:8]} holds {other.tokens} tokens of it{whose}{differs}"


def as_list(requests: list[RequestLine]) -> list[str]:
    if not requests:
        return ["no request has been made yet"]
    head = ("REQUEST", "WHEN", "MODEL", "PROMPT", "RESTORED", "OUTCOME", "SESSION")
    return table([head, *map(_listed_row, requests)])


def _listed_row(each: RequestLine) -> tuple[str, ...]:
    known = each.cached_tokens >= 0
    return (
        each.id,
        ago(each.began),
        each.model,
        str(each.prompt_tokens) if known else "-",
        str(each.cached_tokens) if known else "-",
        each.outcome + (f", priority {each.priority}" if each.priority else ""),
        (each.session if each.session.isprintable() else repr(each.session)) or "-",
    )
