"""What the HTTP app asks of engines, and how a model name finds one.

The app knows only these two protocols; a scripted engine stands behind them in tests.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from ...chat import (
    Conversation,
    EmbedRequest,
    Event,
    GenerateRequest,
    RawPrompt,
    Struct,
    Vectors,
    first_image,
)
from ...errors import NotFound, bad_field
from ...wire import Explanation, ModelInfo, Stats
from .cold_ledger import ColdLedger


class Card(Struct, frozen=True, kw_only=True):
    """What clients may know of a model; `front/http/discovery.py` writes it in four dialects.

    state         as of `Engine`
    images        it takes images; tools: its template has a place for them; thinking: likewise
    blind         why a vision model takes no images; "": it takes them, or it is a text model
    bits          of a quantised weight; 0: not quantised
    nbytes        of its weight files
    changed       seconds since 1970; 0: nobody knows
    template      its chat template
    kind          `chat`, `embedding` or `rerank`: what it answers to
    expires_in_s  seconds until it goes for being idle; None: it does not
    info          what it said when it was loaded; None before its first load
    """

    id: str
    state: str
    context_length: int | None = None
    images: bool = False
    blind: str = ""
    tools: bool = False
    thinking: bool = False
    family: str = ""
    bits: int = 0
    nbytes: int = 0
    changed: float = 0.0
    template: str = ""
    kind: str = "chat"
    expires_in_s: float | None = None
    info: ModelInfo | None = None


class Engine(Protocol):
    """One model, whatever becomes of the process behind it. Requests wait while it loads.

    state           `unloaded`, `loading`, `ready`, `unloading`, `restarting` or `failed`
    info            None until the model has been loaded once
    context_length  tokens of prompt and answer at most; None while nobody knows
    images          it takes images; None while nobody knows; blind: as of `Card`
    starts          engine processes started so far
    deaths          of these, ended by themselves
    pid             of the engine process; None without one
    in_flight       requests running or waiting
    trouble         a sentence on why it can't serve; "" if it can, or nobody knows why
    shares          the model whose engine it is in, if it is an adapter; "": it has its own, or none
    is_refused      a request for it would be refused, since it is not loaded and none loads it
    """

    @property
    def model_id(self) -> str: ...
    @property
    def card(self) -> Card: ...
    @property
    def info(self) -> ModelInfo | None: ...
    @property
    def state(self) -> str: ...
    @property
    def starts(self) -> int: ...
    @property
    def deaths(self) -> int: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def trouble(self) -> str: ...
    @property
    def shares(self) -> str: ...
    @property
    def is_refused(self) -> bool: ...
    @property
    def context_length(self) -> int | None: ...
    @property
    def images(self) -> bool | None: ...
    @property
    def blind(self) -> str: ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """The events of one request, the last one Finished or Failed; or it raises OmlxdError.

        Closing it (`aclose`), at any time, cancels the request in the engine.
        """
        ...

    async def count_tokens(self, prompt: Conversation | RawPrompt, session: str = "") -> int:
        """Prompt tokens, rendered just as `generate` would. Raises OmlxdError."""
        ...

    async def embed(self, request: EmbedRequest) -> Vectors:
        """Vectors or scores of texts. Raises OmlxdError."""
        ...

    async def explain(self, request: GenerateRequest, reached: int) -> Explanation:
        """Why `request` misses; `reached`: tokens of it that were restored when it ran, -1: as of now."""
        ...

    async def cached_files(self, request: GenerateRequest) -> Explanation:
        """Which files of the SSD cache `request` is restored from now. Raises OmlxdError."""
        ...

    async def stats(self, trim: bool = False, reset_peak: bool = False) -> Stats | None:
        """The engine's own counters; None unless it is ready and answers soon. As `wire.GetStats`."""
        ...


class Engines(Protocol):
    """The engines that this daemon serves, and the SSD cache that they share."""

    @property
    def cold(self) -> ColdLedger: ...

    async def find_engine(self, model_name: str) -> Engine:
        """The engine that a client's model name means (`resolve_name`). Raises OmlxdError."""
        ...

    async def look_for_models(self) -> None:
        """Take up models that have come or gone, before they are listed."""
        ...

    def models(self) -> Sequence[Engine]: ...

    async def load(self, model_name: str, keep_alive: float | None = None) -> Engine:
        """Load a model; returns once it is ready. It stays `keep_alive` seconds, or for good (None)."""
        ...

    async def unload(self, model_name: str) -> bool:
        """Unload a model. True: it is gone; False: it goes once its requests have ended."""
        ...

    def keep_alive(self, engine: Any, seconds: float) -> None:
        """`engine`, one that `resolve` gave, stays loaded for so long after its requests have ended."""
        ...


def check_images(engine: Engine, engines: Sequence[Engine], prompt: Conversation | RawPrompt) -> None:
    """Raises InvalidRequest for images that `engine` can't read; names one of `engines` that can."""
    if engine.images is not False or (image := first_image(prompt)) is None:
        return
    why = f" ({engine.blind})" if engine.blind else ""
    seeing = next((other.model_id for other in engines if other.images), None)
    others = f"{seeing} does: ask for that model" if seeing else "no installed model does"
    raise bad_field(image.param, f"{engine.model_id} reads no images{why}, and {others}")


def check_chats(engine: Engine) -> None:
    """Raises InvalidRequest for a model that embeds or scores."""
    doors = {"embedding": "/v1/embeddings", "rerank": "/v1/rerank"}
    if door := doors.get(engine.card.kind):
        raise bad_field("model", f"{engine.model_id} answers no prompts; send texts to {door}")


def basename(model_id: str) -> str:
    """The last part of a hub id or a path."""
    return model_id.replace("\\", "/").rstrip("/").rpartition("/")[2]


PLACEHOLDERS = re.compile(
    "any|auto|current|custom|dummy|llm|model|omlxd|placeholder|string|test|unused"
    "|(default|local)([-_ ](llm|model))?"
)
"""Names that clients and their examples send where a server has one model."""


def resolve_name(
    name: str, model_ids: Sequence[str], default: str | None = None, aliases: Mapping[str, str] | None = None
) -> str:
    """Which of the `model_ids` model ids `name` means.

    An exact id, else an alias, else a basename, else the same in another case or with Ollama's `:latest`.
    No name, a placeholder, and any name that begins with `claude-` (Claude Code and its sub-agents ask for
    several) mean `default`. Raises NotFound, which lists what there is.
    """
    spellings = {basename(model_id): model_id for model_id in reversed(model_ids)} | dict(aliases or {})
    spellings |= {model_id: model_id for model_id in model_ids}
    if name in spellings:
        return spellings[name]
    plain = name.strip().lower().removesuffix(":latest")
    for spelling, model_id in spellings.items():
        if spelling.lower() == plain:
            return model_id
    if default is not None and (not plain or PLACEHOLDERS.fullmatch(plain) or plain.startswith("claude-")):
        return default
    there_are = ", ".join(model_ids) if model_ids else "none"
    raise NotFound(f"There is no model {name[:200]!r} here; the models are: {there_are}.", param="model")
