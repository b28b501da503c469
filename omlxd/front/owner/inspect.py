"""A prompt's keys as a file: the answer of `POST /omlxd/inspect` and op `inspect` of `omlxd engine`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import msgspec

from ...api.fields.body import ParsedRequest, decode
from ...api.openai import chat_request, completions
from ...chat import Failed, Finished, GenerateRequest, Usage
from ...cli.daemon.owner_api import Inspected, InspectedLayer
from ...common.files import safetensors_header
from ...errors import InvalidRequest, OmlxdError, Unavailable
from ..engines.model import ModelEngine
from ..engines.pool import EnginePool

KEPT = 32
"""Newest files that stay in the folder."""


class _Inspect(msgspec.Struct):
    """The fields beside those of /v1/completions, or of /v1/chat/completions with `messages`."""

    values: bool = False
    query: int | None = None
    messages: list[msgspec.Raw] | None = None


class _Metadata(msgspec.Struct):
    omlxd: str


class _Header(msgspec.Struct):
    metadata: _Metadata = msgspec.field(name="__metadata__")


def parse_inspect(body: bytes) -> ParsedRequest:
    """Read the body. Raises InvalidRequest."""
    asked = decode(_INSPECT, body)
    parsed = (completions if asked.messages is None else chat_request).parse(body)
    if parsed.answers != 1:
        raise InvalidRequest(
            "prompt: an inspection has one answer; send a request for each prompt", param="prompt"
        )
    generate = msgspec.structs.replace(
        parsed.generate,
        sampling=msgspec.structs.replace(parsed.generate.sampling, max_tokens=0),
        values=asked.values,
        collected=True,
        query=asked.query,
    )
    return msgspec.structs.replace(parsed, generate=generate)


async def inspect_prompt(pool: EnginePool, engine: ModelEngine, parsed: ParsedRequest) -> Inspected:
    """Compute the prompt, from cached blocks where possible, and write its keys. Raises OmlxdError."""
    folder = pool.catalog.settings.base_path / "inspect"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in sorted(folder.glob("*.safetensors"))[: -KEPT + 1]:
        old.unlink(missing_ok=True)
    file = folder / f"{time.time_ns()}.safetensors"
    file.touch(mode=0o600)
    generate = msgspec.structs.replace(parsed.generate, keys_file=str(file))
    try:
        usage = await computed(engine, generate)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    return await asyncio.to_thread(_inspected, file, usage.prompt_tokens)


async def computed(engine: ModelEngine, generate: GenerateRequest) -> Usage:
    """Compute a prompt whose answer nobody reads. Raises OmlxdError."""
    async with contextlib.aclosing(engine.generate(generate)) as events:
        async for event in events:
            if isinstance(event, Failed):
                raise OmlxdError.from_event(event)
            if isinstance(event, Finished):
                return event.usage
    raise Unavailable("The engine stopped in the middle of it; try again.")


def _inspected(file: Path, tokens: int) -> Inspected:
    with file.open("rb") as opened:
        header = safetensors_header(opened, file.stat().st_size) or b""
    layers = msgspec.json.decode(header, type=_Header).metadata.omlxd
    return Inspected(str(file), tokens, msgspec.json.decode(layers, type=list[InspectedLayer]))


_INSPECT = msgspec.json.Decoder(_Inspect)
