"""The model list, in a shape that both OpenAI's and Anthropic's clients read."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from ..engines.protocol import Engine, basename


class ModelExtension(msgspec.Struct):
    """What neither protocol has a field for. `kv_reuse` empty: prefixes are reused; else why not.
    `context_length` and `block_size` in tokens, null while nobody knows, before the first load.
    `input_modalities`: what a prompt may hold."""

    state: str
    context_length: int | None
    kv_reuse: str
    block_size: int | None
    note: str
    input_modalities: list[str]


class ModelEntry(msgspec.Struct):
    id: str
    created: int
    created_at: str
    display_name: str
    max_input_tokens: int | None
    omlxd: ModelExtension
    object: str = "model"
    type: str = "model"
    owned_by: str = "omlxd"
    lifecycle: str = "active"


class ModelList(msgspec.Struct):
    data: list[ModelEntry]
    first_id: str | None
    last_id: str | None
    object: str = "list"
    has_more: bool = False


def model_entry(engine: Engine, created: int) -> ModelEntry:
    """`created`: Unix seconds."""
    info = engine.info
    context = engine.context_length
    return ModelEntry(
        id=engine.model_id,
        created=created,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
        display_name=basename(engine.model_id),
        max_input_tokens=context,
        omlxd=ModelExtension(
            state=engine.state,
            context_length=context,
            kv_reuse=info.kv_reuse if info else "",
            block_size=info.block_size if info else None,
            note=info.note if info else "",
            input_modalities=["text", "image"] if engine.images else ["text"],
        ),
    )


def model_list(engines: Sequence[Engine], created: int) -> ModelList:
    entries = [model_entry(engine, created) for engine in engines]
    return ModelList(
        data=entries,
        first_id=entries[0].id if entries else None,
        last_id=entries[-1].id if entries else None,
    )
