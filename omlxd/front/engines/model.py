"""An installed model as the HTTP app sees it: an engine whose process comes and goes, and its settings."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from ... import wire
from ...chat import Conversation, EmbedRequest, GenerateRequest, RawPrompt, Struct, Vectors
from ...common.units import MOST_CACHE
from ...config import FOR_ALL, NEXT_LOAD, SAMPLING, ModelSettings, Settings
from ...errors import NotFound, PromptTooLong
from ...models.adapters import adapter_bytes
from ...models.catalog import Description, InstalledModel, describe
from ...models.footprint import Footprint, footprint
from ...wire.explanation import Explanation
from ...wire.token_bytes import COUNTED_CONTEXTS
from .client import EngineProcess
from .in_flight import EngineStream
from .names.names import basename
from .supervisor import State
from .watch import resident

NOTHING = ModelSettings()


def settings_of(model_id: str, settings: Settings) -> ModelSettings:
    """Return the settings of `model_id`: under its full id, else its last part, else the defaults."""
    tables = settings.models
    own = tables.get(model_id) or tables.get(basename(model_id)) or settings.defaults
    for_all = {name: getattr(settings, name) for name in FOR_ALL if getattr(own, name) is None}
    return msgspec.structs.replace(own, **for_all)


class KvKept(NamedTuple):
    """Whether and how a model's KV is kept: tokens of a block; bits of a number, and numbers of a group."""

    is_on: bool
    block_size: int
    bits: int
    group_size: int


def kv_kept(own: ModelSettings, settings: Settings) -> KvKept:
    """Return what a model's own settings say, else those of all models."""
    return KvKept(
        not (settings.no_cache if own.no_cache is None else own.no_cache),
        own.block_size or settings.block_size,
        settings.kv_bits if own.kv_bits is None else own.kv_bits,
        own.kv_group_size or settings.kv_group_size,
    )


def with_settings(request: GenerateRequest, settings: ModelSettings) -> GenerateRequest:
    """Return `request` with its open fields filled from `settings`."""
    if settings == NOTHING:
        return request
    own = request.sampling
    values = {name: value for name in SAMPLING if (value := getattr(settings, name)) is not None}
    sampling = {name: value for name, value in values.items() if getattr(own, name) is None}
    return msgspec.structs.replace(
        request,
        prompt=prompt_with_settings(request.prompt, settings),
        sampling=msgspec.structs.replace(own, **sampling),
        loop_stop=settings.loop_stop != "off",
        context_limit=settings.context_limit or request.context_limit,
    )


def prompt_with_settings(
    prompt: Conversation | RawPrompt, settings: ModelSettings
) -> Conversation | RawPrompt:
    """Return `prompt` with the template's arguments from `settings`; the request's own go first."""
    if not isinstance(prompt, Conversation):
        return prompt
    limits = (prompt.thinking_budget, settings.max_thinking_tokens)
    return msgspec.structs.replace(
        prompt,
        template_args={**settings.template_args, **prompt.template_args},
        thinking=settings.thinking if prompt.thinking is None else prompt.thinking,
        thinking_budget=min(budgets) if (budgets := [each for each in limits if each is not None]) else None,
    )


def for_next_load(old: ModelSettings, new: ModelSettings) -> list[str]:
    """Return the names, as the file spells them, of changed settings that need a new load."""
    return [name.replace("_", "-") for name in NEXT_LOAD if getattr(old, name) != getattr(new, name)]


class Card(Struct, frozen=True, kw_only=True):
    """A model's facts for clients; `front/http/listing/discovery.py` writes them in four dialects.

    images        it takes images; tools: its template has a place for them; thinking: likewise
    blind         why a vision model takes no images; "": it takes them, or it is a text model
    bits          of a quantised weight; 0: not quantised
    nbytes        of its weight files
    changed       seconds since 1970; 0: nobody knows
    template      its chat template
    kind          `chat`, `embedding` or `rerank`: what it answers to
    expires_in_s  seconds until it goes for being idle; None: it does not
    info          what it said when it was loaded; None before its first load
    trouble       why it is `failed`, a sentence
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
    info: wire.ModelInfo | None = None
    trouble: str = ""


@dataclass(slots=True)
class Stay:
    """How long a model stays loaded, as the owner and its last request said.

    pinned      the owner pinned it; the settings' `pin` is another
    by_name     the owner has it loaded until the owner unloads it, also when it was away meanwhile
    owner_s     seconds that the owner, who had it loaded, said; None: none, or somebody else had
    asked_s     seconds that its last request asked for (`keep_alive`); None: nothing
    leaving     the owner said that it goes once its requests have ended, pinned or not
    default_s   seconds without a request, if nobody said any
    """

    pinned: bool = False
    by_name: bool = False
    owner_s: float | None = None
    asked_s: float | None = None
    leaving: bool = False
    default_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Measured:
    """What a model's files say, by the last look at them.

    footprints     with weights as stored, and in float32; None: not read yet
    drafts         likewise, of its draft model; None: it has none
    adapter_bytes  of the adapter's weights; None: it is none
    """

    description: Description
    footprints: tuple[Footprint, Footprint] | None = None
    drafts: tuple[Footprint, Footprint] | None = None
    adapter_bytes: int | None = None


class ModelEngine:
    """One model, with or without a process behind it. Requests wait while it loads.

    process     what runs it
    settings    what the configuration file says of it; replaced when the file is read again
    removing    its files are being deleted: nobody loads it again
    admitted    it may load, or is loaded: it counts against what may be loaded at once
    broken      its own files are why it can't be loaded
    cpu_weights `auto`, or `as-stored`: never made float32
    measured    what its files say
    draft_folder  of its draft model; None: it has none, or was never loaded
    float32     its weights are made float32, where MLX computes on a CPU
    host        the base in whose engine this adapter is, or was; None: it has an engine of its own
    guests      the adapters that are in its engine
    why_never   why it can't be loaded until settings change; "": it may be
    loaded_state  of its adapter's files when it was loaded
    look        the last one at its files; None: there was none
    """

    def __init__(self, installed: InstalledModel, process: EngineProcess, *, may_load: Callable[[], bool]):
        self.installed = installed
        self.process = process
        self.settings: ModelSettings = NOTHING
        self.loaded_with: ModelSettings = NOTHING
        self.folder: Path | None = installed.folder
        self.stay = Stay()
        self.measured = Measured(Description())
        self.removing = False
        self.admitted = False
        self.broken = False
        self._may_load = may_load
        self._context: int | None = None
        self.cpu_weights = "auto"
        self.float32 = False
        self.draft_folder: Path | None = None
        self.host: ModelEngine | None = None
        self.guests: Callable[[], Sequence[ModelEngine]] = lambda: ()
        self.why_never: Callable[[], str] = lambda: ""
        self.loaded_state: tuple[int, ...] = ()
        self.look: asyncio.Task[tuple[int, ...]] | None = None

    @property
    def model_id(self) -> str:
        return self.process.supervisor.model_id

    @property
    def info(self) -> wire.ModelInfo | None:
        return self.process.supervisor.info

    @property
    def state(self) -> State:
        return self.process.state

    @property
    def starts(self) -> int:
        return self.process.supervisor.starts

    @property
    def trouble(self) -> str:
        return self.process.supervisor.trouble

    @property
    def slowed(self) -> str:
        return self.process.supervisor.slowed

    @property
    def in_flight(self) -> int:
        return self.process.in_flight

    @property
    def by_priority(self) -> dict[int, int]:
        return self.process.by_priority

    @property
    def pid(self) -> int | None:
        """Process id of its own process; None in another's."""
        return self.process.supervisor.pid if self.host is None else None

    @property
    def adapter(self) -> Path | None:
        return self.settings.adapter or self.installed.adapter

    @property
    def shares(self) -> str:
        """The model whose engine an adapter shares; "": it has one of its own, or none."""
        return self.host.model_id if self.host is not None and self.state != "unloaded" else ""

    @property
    def used_at(self) -> float:
        """When the model or a guest was last used, on the monotonic clock."""
        return max(each.process.used_at for each in (self, *self.guests()))

    @property
    def is_busy(self) -> bool:
        """Whether a request or a load waits for the model or a guest."""
        return any(each.process.is_awaited for each in (self, *self.guests()))

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer at most; None: unknown."""
        if self.process.supervisor.info is not None:
            self._context = self.process.supervisor.info.context_length
        elif self._context is None and self.footprint is not None:
            self._context = self.footprint.context_length
        limit = self.settings.context_limit
        return min(self._context, limit) if self._context and limit else self._context or limit

    @property
    def images(self) -> bool | None:
        """Whether the model takes images; None: unknown."""
        if self.process.supervisor.info is not None:
            return self.process.supervisor.info.images
        return self.footprint.blind == "" if self.footprint is not None else None

    @property
    def blind(self) -> str:
        """Why a vision model takes no images; "": it takes them, is a text model, or is unknown."""
        said = self.info or self.footprint
        return (said.blind or "") if said is not None else ""

    @property
    def card(self) -> Card:
        """The model's facts for clients."""
        info, described = self.info, self.measured.description
        return Card(
            id=self.model_id,
            state=self.state,
            context_length=self.context_length,
            images=bool(self.images),
            blind=self.blind,
            tools=bool(described.tools),
            thinking=info.supports_thinking if info else described.thinking,
            family=info.model_type if info else described.family,
            bits=described.bits,
            nbytes=self.disk_bytes or 0,
            changed=described.changed,
            template=described.template or "",
            kind=described.kind,
            expires_in_s=self.expires_in_s,
            info=info,
            trouble=self.trouble if self.state == "failed" else "",
        )

    @property
    def footprint(self) -> Footprint | None:
        """Memory that the model's files need; None while they are missing or unread."""
        return self._footprint(self.float32)

    def _footprint(self, float32: bool) -> Footprint | None:
        """Add the draft model's footprint, whose process is the same."""
        model, drafts = self.measured.footprints, self.measured.drafts
        if model is None:
            return None
        here, join = self.settings.ranks or 1, len(self.settings.join or ())
        own = model[float32].part(here, here + join)
        return own.with_draft(drafts[float32]) if drafts is not None else own

    @property
    def disk_bytes(self) -> int | None:
        """Bytes of the weight files, or of the adapter."""
        if self.installed.adapter is not None:
            return self.measured.adapter_bytes
        return self.measured.footprints[False].weights if self.measured.footprints else None

    @property
    def float32_footprint(self) -> Footprint | None:
        """The `footprint` with float32 weights; None also where the owner wants them as stored."""
        return self._footprint(True) if self.cpu_weights == "auto" else None

    def measure(self) -> None:
        """Read the `footprint`. Blocks for as long as the disk does."""
        adapter, folder, draft = self.installed.adapter, self.folder, self.draft_folder
        self.measured = Measured(
            description=describe(folder) if folder else self.measured.description,
            footprints=_both(folder) if folder else self.measured.footprints,
            drafts=_both(draft) if folder and draft else None,
            adapter_bytes=adapter_bytes(adapter) if adapter else None,
        )

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of RAM of the process (on a GPU with memory of its own, that is not all)."""
        return resident(self.pid)

    def take_last_stats(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (number among `starts`, counters) of each process that ended in order."""
        while self.process.last_stats:
            yield self.process.last_stats.popleft()

    async def stats(self, trim: bool = False, reset_peak: bool = False) -> wire.Stats | None:
        """Return the engine's own counters; None unless it is ready and answers soon. As `wire.GetStats`."""
        return await self.process.stats(trim, reset_peak)

    def generate(self, request: GenerateRequest) -> EngineStream:
        """Return the events of one request; closing them cancels it. Raises OmlxdError before any event."""
        self._check()
        request = with_settings(request, self.settings)
        if self.info is not None:
            most = min(request.context_limit or self.info.context_length, self.info.context_length) - 1
            self.info.token_bytes.check(request.prompt, most)
        return self.process.generate(request)

    async def count_tokens(
        self, prompt: Conversation | RawPrompt, session: str = "", client: str = ""
    ) -> int:
        self._check()
        if self.info is not None:
            most = self.info.context_length - 1
            try:
                self.info.token_bytes.check(prompt, COUNTED_CONTEXTS * most)
            except PromptTooLong as error:
                raise PromptTooLong(error.tokens, most, least=True) from None
        prompt = prompt_with_settings(prompt, self.settings)
        return await self.process.count_tokens(prompt, session, client)

    async def explain(self, request: GenerateRequest, reached: int = -1, files: bool = False) -> Explanation:
        """Ask the engine for a `wire.Explain`. Raises OmlxdError."""
        self._check()
        return await self.process.explain(with_settings(request, self.settings), reached, files)

    async def embed(self, request: EmbedRequest) -> Vectors:
        self._check()
        return await self.process.embed(request)

    @property
    def deaths(self) -> int:
        """Processes that died or hung. One whose load fails has not died."""
        return self.process.supervisor.deaths

    @property
    def is_refused(self) -> bool:
        """Whether a request would be refused, since the model is not loaded and may not load."""
        return self.state == "unloaded" and not self._may_load()

    def check_stays(self) -> None:
        """Raise NotFound while the model's files are being deleted."""
        if self.removing:
            raise NotFound(f"{self.model_id} is being deleted.", param="model")

    def _check(self) -> None:
        self.check_stays()
        if self.is_refused:
            raise NotFound(
                f"{self.model_id} is not loaded, and this daemon loads no model because a request names it; "
                f"load it with `omlxd models load {self.model_id}`.",
                param="model",
            )

    # ----------------------------------------------------------------- how long it stays

    @property
    def is_pinned(self) -> bool:
        return self.stay.pinned or self.settings.pin

    @property
    def idle_s(self) -> float:
        """Seconds without a request until an unload; infinite: never.

        A request's `keep_alive` of 0 lets it go; another never shortens what the owner said.
        """
        if self.stay.leaving or self.stay.asked_s == 0:
            return 0.0
        said = self.settings.ttl if self.stay.owner_s is None else self.stay.owner_s
        if said is None and self.stay.by_name:
            return math.inf
        if self.stay.asked_s is None:
            return self.stay.default_s if said is None else said
        return max(self.stay.asked_s, said or 0.0)

    @property
    def expires_at(self) -> float:
        """Monotonic time of the unload; infinite while the model is in use, pinned or not loaded."""
        if self.stay.leaving and self.state == "loading" and not self.process.is_awaited:
            return self.process.used_at  # Whoever waited for it went away.
        if self.state != "ready" or self.is_busy or (self.is_pinned and not self.stay.leaving):
            return math.inf
        own = self.process.used_at + self.idle_s
        return own if self.stay.leaving else max([own, *(guest.expires_at for guest in self.guests())])

    @property
    def is_nothing(self) -> bool:
        """Whether the model has no process, and nobody who waits for one."""
        return self.state in ("unloaded", "failed") and not self.is_busy and not self.guests()

    @property
    def evictable(self) -> bool:
        """Whether the model may be unloaded for another's sake."""
        free = self.state == "ready" and not self.in_flight and not self.is_pinned
        return free and all(guest.evictable for guest in self.guests())

    @property
    def expires_in_s(self) -> float | None:
        """Seconds until an idle unload; None: never."""
        left = self.expires_at - time.monotonic()
        return None if math.isinf(left) else max(0.0, left)


def _both(folder: Path) -> tuple[Footprint, Footprint]:
    return footprint(folder), footprint(folder, float32=True)


def load_message(engine: ModelEngine, settings: Settings, folder: Path, cold_dir: str) -> wire.Load:
    """Build the message that loads the model in `folder`: its own settings, else the defaults."""
    own = engine.settings
    kept = kv_kept(own, settings)
    return wire.Load(
        model_path=str(folder),
        model_id=engine.model_id,
        cache=wire.CacheSettings(
            enabled=kept.is_on,
            block_size=kept.block_size,
            initial_blocks=settings.initial_cache_blocks,
            hot_cache_bytes=settings.hot_cache_bytes if kept.is_on else 0,
            cold_dir=cold_dir if kept.is_on else "",
            cold_cache_bytes=MOST_CACHE if settings.cold_cache_bytes is None else settings.cold_cache_bytes,
            admission=settings.ssd_cache_admission,
            write_back=settings.hot_cache_write == "back",
            peer=settings.peer,
            peer_base=str(settings.base_path),
            kv_bits=kept.bits,
            kv_group_size=kept.group_size,
        ),
        max_concurrent=own.max_concurrent_requests or settings.max_concurrent_requests,
        log_level=settings.log_level,
        seed=settings.seed,
        kv_reserve=settings.kv_reserve if own.kv_reserve is None else own.kv_reserve,
        adapter=str(engine.adapter or ""),
        channel=engine.process.channel,
        weights_mmap=own.weights_mmap or settings.weights_mmap,
        draft_path=str(engine.draft_folder or ""),
        speculate=(own.speculation or settings.speculation) == "auto",
        share_prefix=own.share_prefix or settings.share_prefix,
        ranks=(own.ranks or 1) + len(own.join or ()),
        join=own.join or (),
        link=own.link or "ring",
        metal_kernels=own.metal_kernels or settings.metal_kernels,
        prompts=wire.PromptSettings(
            healing=not settings.no_healing if own.healing is None else own.healing,
            hoist_system=own.hoist_system or settings.hoist_system,
            starts_in_thinking=bool(own.starts_in_thinking),
            max_images=own.max_images or settings.max_images,
            request_timeout_s=settings.request_timeout
            if own.request_timeout is None
            else own.request_timeout,
        ),
    )
