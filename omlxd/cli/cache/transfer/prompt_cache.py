"""`omlxd cache export` and `import` of mlx-lm's prompt-cache files: the KV of one prompt.

`mlx_lm.cache_prompt` writes such files, and `mlx_lm.generate --prompt-cache-file` goes on from one. They hold
no tokens, but for those that omlxd writes: the owner says of which prompt one is, and the daemon's model
computes enough of it again to believe that (engine/mlx_adapter/model/prompt_cache_file.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from ....common.files import new_file, safetensors_header
from ....common.units import human
from ....config import Settings
from ....errors import ConfigError, OmlxdError
from ...daemon.client import STREAM_S, DaemonError, NoDaemon, find_daemon, pieces
from ...daemon.owner_api import ImportedPrompt, WhyMissBody
from ..asked import NO_JSON, named_request, read_data, read_request, text_of

_PATH = "/omlxd/cache/prompt-cache"


class _Metadata(msgspec.Struct):
    """Metadata under the keys of `save_prompt_cache`."""

    model: str = msgspec.field(default="", name="0.model")
    adapter: str = msgspec.field(default="", name="0.adapter")
    tokens: str = msgspec.field(default="", name="0.tokens")


class _Header(msgspec.Struct):
    metadata: _Metadata = msgspec.field(name="__metadata__", default_factory=_Metadata)


def export_file(args: argparse.Namespace, settings: Settings) -> int:
    """Write the KV of a session's last prompt, which the daemon has. Raises OmlxdError, OSError."""
    if not args.session:
        raise ConfigError("--format mlx-lm: say with --session whose prompt it is to hold.")
    asked = named_request(args.session)
    with new_file(args.archive) as target:
        target.writelines(find_daemon(args.url, settings).download(f"{_PATH}/export", asked))
        size = target.tell()
    with args.archive.open("rb") as file:
        told = _metadata(safetensors_header(file, size) or b"")
    print(f"{args.archive}: {told.tokens.count(',') + 1} tokens, {human(size)}")
    adapter = f" --adapter-path {told.adapter}" if told.adapter else ""
    print(f"go on with: mlx_lm.generate --prompt-cache-file {args.archive}{adapter} --prompt '…'")
    return 0


def import_file(args: argparse.Namespace, settings: Settings, source: IO[bytes], header: bytes) -> int:
    told = _metadata(header)
    if args.prompt:
        asked = _prompt(args.prompt)
    elif told.tokens:
        asked = WhyMissBody(path="/v1/completions", body={"prompt": _tokens(told.tokens)})
    else:
        raise ConfigError(
            f"{args.archive}: mlx-lm's file doesn't say of which prompt it is; give that with --prompt."
        )
    if args.model:
        asked.body["model"] = args.model
    body = msgspec.json.encode(asked)

    def sent() -> Iterator[bytes]:
        yield len(body).to_bytes(8, "little") + body
        yield from pieces(source)

    try:
        daemon = find_daemon(args.url, settings)
        done = daemon.fetch(f"{_PATH}/import", ImportedPrompt, sent(), STREAM_S)
    except NoDaemon as error:
        raise OmlxdError(f"{args.archive}: a daemon's model must verify it. {error.message}") from None
    except DaemonError as error:
        raise OmlxdError(f"{args.archive}: {error.message}") from None
    kept = done.tokens // (done.block_size or 1) * done.block_size
    print(f"{args.archive}: of {done.tokens} tokens {kept} are cached for {done.model}")
    return 0


def _metadata(header: bytes) -> _Metadata:
    try:
        return msgspec.json.decode(header, type=_Header).metadata
    except NO_JSON:
        raise OmlxdError("its header makes no sense: it is damaged, or no prompt cache of mlx-lm") from None


def _tokens(text: str) -> list[int]:
    try:
        return [int(token) for token in text.split(",")]
    except ValueError:
        raise OmlxdError("the tokens in its header make no sense: it is damaged") from None


def _prompt(name: str) -> WhyMissBody:
    """Read a text, as `mlx_lm.cache_prompt` takes it, JSON token ids, or a request. Raises ConfigError."""
    if Path(name).suffix == ".jsonl":
        return read_request(name, None)
    data = read_data(name)
    if Path(name).suffix != ".json":
        message = {"role": "user", "content": text_of(name, data)}
        return WhyMissBody(path="/v1/chat/completions", body={"messages": [message]})
    try:
        return WhyMissBody(path="/v1/completions", body={"prompt": msgspec.json.decode(data, type=list[int])})
    except NO_JSON:
        return read_request(name, None)
