"""Writes a model's card in five dialects: OpenAI's and Anthropic's with llama.cpp's, Ollama's, LM Studio's,
Gemini's.

Clients that discover a server read from it which models there are, what they can do, and their context. A row
of the table is a field of `Card`.

| of the card | OpenAI, llama.cpp           | Ollama                    | LM Studio                      |
|-------------|-----------------------------|---------------------------|--------------------------------|
| context     | `meta.n_ctx`                | `model_info`, `ps`        | `max_context_length`           |
| tools       | `/props`                    | `capabilities`            | `capabilities`                 |
| images      | `architecture`              | `capabilities`            | `capabilities`, type `vlm`     |
| thinking    | `chat_template` of `/props` | `capabilities`            | -                              |
| state       | `status.value`              | `ps` lists what is loaded | `loaded_instances`, `state`    |
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from .... import __version__
from ...engines.model import Card
from ...engines.names.names import basename


def iso_time(seconds: float) -> str:
    """Format `seconds` since 1970 as Ollama and Anthropic do."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _inputs(card: Card) -> list[str]:
    return ["text", "image"] if card.images else ["text"]


def _publisher(card: Card) -> str:
    return card.id.rpartition("/")[0] or "omlxd"


def _quantization(card: Card) -> str:
    return f"{card.bits}bit" if card.bits else ""


# --------------------------------------------------------------------------- OpenAI, Anthropic, llama.cpp


class ModelExtension(msgspec.Struct):
    """Facts that neither protocol has a field for. `kv_reuse` empty: prefixes are reused; else why not.
    `context_length` and `block_size` in tokens, null while nobody knows, before the first load. `note`: also
    why a vision model takes no images, or why its load failed. `input_modalities`: what a prompt may hold.
    `kind`: `chat`, `embedding` or `rerank`.
    """

    state: str
    context_length: int | None
    kv_reuse: str
    block_size: int | None
    note: str
    input_modalities: list[str]
    kind: str


class RouterStatus(msgspec.Struct, omit_defaults=True):
    """A model's status. `value`: `loaded`, `loading` or `unloaded`. `failed`: its last load did."""

    value: str
    failed: bool = False


class RouterMeta(msgspec.Struct):
    n_ctx: int
    n_ctx_train: int
    size: int


class Architecture(msgspec.Struct):
    input_modalities: list[str]
    output_modalities: tuple[str, ...] = ("text",)


class ModelEntry(msgspec.Struct):
    """`source` "preset": llama.cpp's clients offer such a model before it is loaded."""

    id: str
    created: int
    created_at: str
    display_name: str
    max_input_tokens: int | None
    omlxd: ModelExtension
    status: RouterStatus
    meta: RouterMeta | None
    architecture: Architecture
    object: str = "model"
    type: str = "model"
    owned_by: str = "omlxd"
    lifecycle: str = "active"
    source: str = "preset"


class ModelList(msgspec.Struct):
    data: list[ModelEntry]
    first_id: str | None
    last_id: str | None
    object: str = "list"
    has_more: bool = False


_OUTPUTS = {"chat": "text", "embedding": "embeddings", "rerank": "scores"}
_ROUTER_STATES = {"ready": "loaded", "unloading": "loaded", "loading": "loading", "restarting": "loading"}
"""State of an engine → status of llama.cpp's router; others are `unloaded`."""


def router_status(state: str) -> str:
    """Return the llama.cpp router's word for an engine in `state`."""
    return _ROUTER_STATES.get(state, "unloaded")


def model_entry(card: Card) -> ModelEntry:
    info, context = card.info, card.context_length
    return ModelEntry(
        id=card.id,
        created=int(card.changed),
        created_at=iso_time(card.changed),
        display_name=basename(card.id),
        max_input_tokens=context,
        omlxd=ModelExtension(
            state=card.state,
            context_length=context,
            kv_reuse=info.kv_reuse if info else "",
            block_size=info.block_size if info else None,
            note=card.trouble or (info.note if info else "") or (card.blind and f"no images: {card.blind}"),
            input_modalities=_inputs(card),
            kind=card.kind,
        ),
        status=RouterStatus(router_status(card.state), failed=card.state == "failed"),
        meta=RouterMeta(context, context, card.nbytes) if context else None,
        architecture=Architecture(_inputs(card), (_OUTPUTS[card.kind],)),
    )


def model_list(cards: Sequence[Card]) -> ModelList:
    entries = [model_entry(card) for card in cards]
    return ModelList(
        data=entries,
        first_id=entries[0].id if entries else None,
        last_id=entries[-1].id if entries else None,
    )


class GenerationSettings(msgspec.Struct):
    n_ctx: int


class Modalities(msgspec.Struct):
    vision: bool
    audio: bool = False


class TemplateCaps(msgspec.Struct):
    supports_tools: bool
    supports_tool_calls: bool


class Props(msgspec.Struct):
    """llama.cpp's `GET /props`. `models_autoload`: a request loads the model that it names."""

    default_generation_settings: GenerationSettings
    modalities: Modalities
    chat_template: str
    chat_template_caps: TemplateCaps
    model_alias: str
    models_autoload: bool
    is_sleeping: bool
    build_info: str = f"omlxd {__version__}"


def props(card: Card, autoload: bool) -> Props:
    return Props(
        default_generation_settings=GenerationSettings(card.context_length or 0),
        modalities=Modalities(card.images),
        chat_template=card.template,
        chat_template_caps=TemplateCaps(card.tools, card.tools),
        model_alias=card.id,
        models_autoload=autoload,
        is_sleeping=card.state == "unloaded",
    )


# --------------------------------------------------------------------------- Ollama


class OllamaDetails(msgspec.Struct):
    family: str
    families: list[str]
    quantization_level: str
    parameter_size: str = ""
    parent_model: str = ""
    format: str = "safetensors"


class OllamaModel(msgspec.Struct):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(msgspec.Struct):
    models: list[OllamaModel]


class OllamaRunning(OllamaModel):
    """A loaded model. `size`: its bytes of memory; `size_vram`: those on a GPU."""

    expires_at: str
    size_vram: int
    context_length: int


class OllamaProcesses(msgspec.Struct):
    models: list[OllamaRunning]


class OllamaShow(msgspec.Struct):
    capabilities: list[str]
    details: OllamaDetails
    model_info: dict[str, Any]
    template: str
    modified_at: str
    modelfile: str = ""
    parameters: str = ""


_FOR_GOOD_S = 100 * 365 * 86_400.0


def ollama_tags(cards: Sequence[Card]) -> OllamaTags:
    return OllamaTags([OllamaModel(**_ollama(card)) for card in cards])


def ollama_processes(held: Sequence[tuple[Card, int]]) -> OllamaProcesses:
    """List the loaded models of the cards. With each, the bytes of its engine's arrays; 0: nobody knows."""
    return OllamaProcesses([_ollama_running(card, nbytes) for card, nbytes in held if card.state == "ready"])


def _ollama_running(card: Card, held: int) -> OllamaRunning:
    # Weights that are views of files are none of MLX's arrays.
    size = max(held, card.info.weight_bytes if card.info else card.nbytes)
    stays_s = _FOR_GOOD_S if card.expires_in_s is None else card.expires_in_s
    fields: dict[str, Any] = {**_ollama(card), "size": size}
    return OllamaRunning(
        **fields,
        expires_at=iso_time(time.time() + stays_s),
        size_vram=size if card.info and card.info.backend != "cpu" else 0,
        context_length=card.context_length or 0,
    )


def ollama_show(card: Card) -> OllamaShow:
    info: dict[str, Any] = {"general.architecture": card.family, "general.basename": basename(card.id)}
    if card.context_length:
        info[f"{card.family}.context_length"] = card.context_length
    flags = {"completion": True, "tools": card.tools, "vision": card.images, "thinking": card.thinking}
    able = [name for name, has in flags.items() if has]
    return OllamaShow(
        capabilities=able if card.kind == "chat" else [card.kind],
        details=_details(card),
        model_info=info,
        template=card.template,
        modified_at=iso_time(card.changed),
    )


def _details(card: Card) -> OllamaDetails:
    return OllamaDetails(card.family, [card.family], _quantization(card))


def _ollama(card: Card) -> dict[str, Any]:
    """Return fields of an OllamaModel. Its digest is of the files' size and age: nobody reads them all."""
    name = card.id if ":" in card.id else f"{card.id}:latest"
    return {
        "name": name,
        "model": name,
        "modified_at": iso_time(card.changed),
        "size": card.nbytes,
        "digest": hashlib.sha256(f"{card.id} {card.nbytes} {card.changed}".encode()).hexdigest(),
        "details": _details(card),
    }


# --------------------------------------------------------------------------- LM Studio


class LMStudioQuantization(msgspec.Struct):
    name: str
    bits_per_weight: int


class LMStudioConfig(msgspec.Struct):
    context_length: int


class LMStudioInstance(msgspec.Struct):
    id: str
    config: LMStudioConfig


class LMStudioCapabilities(msgspec.Struct):
    vision: bool
    trained_for_tool_use: bool


class LMStudioModel(msgspec.Struct):
    """A row of `GET /api/v1/models`."""

    key: str
    display_name: str
    publisher: str
    architecture: str
    quantization: LMStudioQuantization | None
    size_bytes: int
    loaded_instances: list[LMStudioInstance]
    max_context_length: int
    capabilities: LMStudioCapabilities
    type: str = "llm"
    format: str = "mlx"
    params_string: None = None
    description: None = None


class LMStudioModels(msgspec.Struct):
    models: list[LMStudioModel]


class LMStudioV0Model(msgspec.Struct):
    """A row of `GET /api/v0/models`."""

    id: str
    type: str
    publisher: str
    arch: str
    quantization: str
    state: str
    max_context_length: int
    loaded_context_length: int | UnsetType
    compatibility_type: str = "mlx"
    object: str = "model"


class LMStudioV0Models(msgspec.Struct):
    data: list[LMStudioV0Model]
    object: str = "list"


def lmstudio_models(cards: Sequence[Card]) -> LMStudioModels:
    return LMStudioModels([_lmstudio(card) for card in cards if card.kind in _LMSTUDIO_KINDS])


def _lmstudio(card: Card) -> LMStudioModel:
    context = card.context_length or 0
    instance = LMStudioInstance(card.id, LMStudioConfig(context))
    return LMStudioModel(
        key=card.id,
        display_name=basename(card.id),
        publisher=_publisher(card),
        architecture=card.family,
        quantization=LMStudioQuantization(_quantization(card), card.bits) if card.bits else None,
        size_bytes=card.nbytes,
        loaded_instances=[instance] if card.state == "ready" else [],
        max_context_length=context,
        capabilities=LMStudioCapabilities(card.images, card.tools),
        type=lmstudio_type(card),
    )


_LMSTUDIO_KINDS = ("chat", "embedding")
"""LM Studio's types of models: it has none for a reranker, which its clients would chat with."""


def lmstudio_type(card: Card) -> str:
    return "llm" if card.kind == "chat" else card.kind


def _lmstudio_v0(card: Card) -> LMStudioV0Model:
    context, loaded = card.context_length or 0, card.state == "ready"
    return LMStudioV0Model(
        id=card.id,
        type="embeddings" if card.kind == "embedding" else "vlm" if card.images else "llm",
        publisher=_publisher(card),
        arch=card.family,
        quantization=_quantization(card),
        state="loaded" if loaded else "not-loaded",
        max_context_length=context,
        loaded_context_length=context if loaded else UNSET,
    )


def lmstudio_v0_models(cards: Sequence[Card]) -> LMStudioV0Models:
    return LMStudioV0Models([_lmstudio_v0(card) for card in cards if card.kind in _LMSTUDIO_KINDS])


# --------------------------------------------------------------------------- Gemini


class GeminiModel(msgspec.Struct, rename="camel"):
    """A model. `name`: `models/` and the id. Limits in tokens; 0 while nobody knows."""

    name: str
    base_model_id: str
    display_name: str
    description: str
    input_token_limit: int
    output_token_limit: int
    supported_generation_methods: list[str]
    thinking: bool
    version: str = "1"


class GeminiModels(msgspec.Struct):
    models: list[GeminiModel]


def gemini_models(cards: Sequence[Card]) -> GeminiModels:
    return GeminiModels([gemini_model(card) for card in cards if card.kind == "chat"])


def gemini_model(card: Card) -> GeminiModel:
    context = card.context_length or 0
    return GeminiModel(
        name=f"models/{card.id}",
        base_model_id=card.id,
        display_name=basename(card.id),
        description=f"{card.family or 'A model'} on this machine",
        input_token_limit=context,
        output_token_limit=context,
        supported_generation_methods=["generateContent", "countTokens"] if card.kind == "chat" else [],
        thinking=card.thinking,
    )
