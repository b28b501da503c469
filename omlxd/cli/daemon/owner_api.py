"""Messages between a daemon and `omlxd models`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ...common.units import human, written_text
from ...wire import Kernel
from ...wire.explanation import Explanation

Name = Annotated[str, msgspec.Meta(min_length=1)]
"""A model's name. An owner names the model; a client may leave it out."""


class ModelSetting(msgspec.Struct):
    """One line of the file that sets how a model is served, and its place."""

    name: str
    value: str
    source: str


class InstalledStatus(msgspec.Struct, kw_only=True):
    """A model's status. Bytes; seconds; `context_length` in tokens. Null: not known, or does not apply.

    state         `unloaded`, `loading`, `ready`, `unloading`, `restarting`, `failed`; `installed`
                  without a daemon
    source        `folder` (of --model, or imported), `model-dir`, `hub` or `demo`
    disk_bytes    of its weight files, or of its adapter's
    load_bytes    what loading it may need
    idle_s        how long it stays without a request; null: for good
    expires_in_s  until it goes for being idle; null: it does not
    trouble       why it can't serve, a sentence
    never         why it can never be loaded on this machine, a sentence; "": nothing is known against it
    images        it takes images; `blind`: why a vision model takes none
    kv_reuse      why prefixes are not reused; "": they are; null: nobody knows before the first load
    origin        what it was imported from, by whom it is, and its license
    tools         its chat template takes tools
    adapter       folder of the LoRA adapter that it is loaded with; `shares`: the model whose engine it is in
    leaving       it is to be unloaded once its requests have ended
    config        the file of settings, which need not be there; `settings`: what it says of this model;
                  `table`: name of the model's own table in it, "" without one
    """

    id: str
    state: str
    source: str
    default: bool = False
    folder: str | None = None
    aliases: list[str] = []
    pinned: bool = False
    in_flight: int = 0
    leaving: bool = False
    pid: int | None = None
    disk_bytes: int | None = None
    load_bytes: int | None = None
    memory_bytes: int | None = None
    context_length: int | None = None
    kv_bytes_per_token: int | None = None
    images: bool | None = None
    blind: str = ""
    kv_reuse: str | None = None
    idle_s: float | None = None
    expires_in_s: float | None = None
    loads: int = 0
    trouble: str = ""
    never: str = ""
    origin: str = ""
    tools: bool | None = None
    layers: int | None = None
    hidden_size: int | None = None
    adapter: str = ""
    shares: str = ""
    config: str = ""
    settings: list[ModelSetting] = []
    table: str = ""


class InstalledStatuses(msgspec.Struct):
    models: list[InstalledStatus]


class Unloaded(msgspec.Struct):
    """The answer to an unload. `gone` false: the model goes when the requests in flight have ended."""

    id: str
    gone: bool
    in_flight: int


class LoadModel(msgspec.Struct):
    model: Name
    keep_alive: str | float | int | None = None


class UnloadModel(msgspec.Struct):
    model: Name


class RemoveModel(msgspec.Struct):
    model: Name


class Removed(msgspec.Struct):
    """A removal. `folder`, with all of the model's files, is deleted; `bytes`: of its weights."""

    id: str
    folder: str
    bytes: int


class PullModel(msgspec.Struct):
    model: Name


class PinModel(msgspec.Struct):
    model: Name
    pinned: bool = True


class NameModel(msgspec.Struct):
    """An alias. `model` null removes it."""

    alias: str
    model: Name | None


class RankStatus(msgspec.Struct, kw_only=True):
    """One of several ranks that share a model. Bytes of its process, of MLX's arrays, of its RAM tier, and of
    its files on SSD.

    host  that joined; "": the daemon's own
    cold  None: not known
    disk  `full` or `off` while its disk takes nothing; "": it works
    """

    rank: int
    host: str = ""
    pid: int
    resident: int
    mlx: int
    hot: int
    cold: int | None
    disk: str = ""

    def __str__(self) -> str:
        disk = {"full": "; its disk is FULL", "off": "; its disk FAILS"}.get(self.disk, "")
        held = f"{human(self.resident)}, MLX {human(self.mlx)}, RAM tier {human(self.hot)}"
        cold = "" if self.cold is None else f", SSD {human(self.cold)}"
        at = f" on {self.host}" * bool(self.host)
        return f"rank {self.rank}{at} is process {self.pid}: {held}{cold}{disk}"


class ModelStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A loaded model's status. Bytes, tokens and seconds; 0: nothing to say.

    trouble   why it can't serve, a sentence
    slowed    that its passes are small since a GPU fault, and what lifts that
    peer      why nothing comes from --peer, a clause
    shares    the model whose engine it is in, which has the other figures of both; "": it has its own
    resident  bytes of the engine process, and of its other ranks
    ranks     where several share the model
    kernels   of omlxd's own, as its load judged them
    by_priority  requests that run or wait, by their priority
    values    the engine's counters and gauges, counters over all its processes
    values_age_s  how old they are
    """

    id: str
    state: str
    trouble: str = ""
    slowed: str = ""
    peer: str = ""
    shares: str = ""
    pid: int = 0
    starts: int = 0
    resident: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    context_length: int = 0
    backend: str = ""
    speed: str = ""
    kv_reuse: str = ""
    note: str = ""
    kernels: tuple[Kernel, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    running: int = 0
    waiting: int = 0
    by_priority: dict[int, int] = {}
    values: dict[str, float] = {}
    values_age_s: float = 0.0


class ColdStatus(msgspec.Struct, kw_only=True):
    """The SSD cache: its folder and its account. `capacity`: its most bytes, by `cap` and its disk.

    written_today, written_ever  bytes written to it today and in all, over restarts
    daily_write_budget           most of a day, 0: no limit; `write_budget_used_up`: today it stops writing
    """

    dir: str
    bytes: int
    cap: int
    reserved: int
    files: int
    evicted_files: int
    evicted_bytes: int
    capacity: int
    folder_away: bool = False
    written_today: int = 0
    written_ever: int = 0
    daily_write_budget: int = 0
    write_budget_used_up: bool = False

    @property
    def written(self) -> str:
        return written_text(
            self.written_today, self.written_ever, self.daily_write_budget, self.write_budget_used_up
        )


class AwakeStatus(msgspec.Struct, kw_only=True):
    """Whether the daemon keeps the machine awake while requests run (`on`), does so now (`held`), and did so
    at least once (`was_held`).

    trouble  why it can't, in words
    """

    on: bool
    held: bool
    was_held: bool = False
    trouble: str = ""


class DaemonStatus(msgspec.Struct, kw_only=True):
    """The daemon. `cold` None: no usable SSD cache. `resident`: bytes of the front process. `memory_limit`:
    bytes that all models together may take; null: what the machine has; 0: no limit. `given`: files that
    paired machines have read, and their bytes; null: they can't.
    """

    version: str
    pid: int
    started: float
    uptime_s: float
    resident: int
    models: list[ModelStatus]
    cold: ColdStatus | None
    awake: AwakeStatus | None = None
    memory_limit: int | None = None
    given: tuple[int, int] | None = None


class InspectedKeys(msgspec.Struct):
    """A layer's keys. `first_token`: later than 0 in a window's layer. `norms`: mean norm of each head's
    keys.
    """

    kv_heads: int
    dim: int
    first_token: int
    norms: list[float]


class InspectedLayer(msgspec.Struct):
    """A layer. `cache`: its class; `keys` null: it keeps none that can be read.

    entropy  in nats, of each query head's attention at the `query` asked for; null: not asked, no plain KV
    """

    layer: str
    cache: str
    keys: InspectedKeys | None
    entropy: list[float] | None = None


class Inspected(msgspec.Struct):
    """The result. `file`: a safetensors file of `<layer>.keys` (KV heads, tokens, dim), float32, after
    RoPE.
    """

    file: str
    tokens: int
    layers: list[InspectedLayer]


class TidyMemory(msgspec.Struct, kw_only=True):
    """An order to all loaded models, or one: `trim` frees memory, `reset_peak` counts MLX's peak anew."""

    model: str = ""
    trim: bool = False
    reset_peak: bool = False


class Readiness(msgspec.Struct, kw_only=True):
    """Whether the daemon is ready. `reasons`: a sentence for each model that can't serve now."""

    ready: bool
    reasons: list[str]


class Forget(msgspec.Struct):
    """Files, relative to the cache dir, that leave the account. `remove`: the daemon removes them; else the
    owner has removed them, because they were bad.
    """

    paths: list[str]
    remove: bool = False


class Forgotten(msgspec.Struct):
    """The result of a removal. `files`, `bytes`: gone from the account. `troubles`: why some stay.

    pinned  files that stay, as they are pinned by the names `pins`; of `/omlxd/cache/clear` alone
    """

    files: int = 0
    bytes: int = 0
    troubles: list[str] = []
    pinned: int = 0
    pins: list[str] = []


class ClearCache(msgspec.Struct):
    """Remove from SSD the node `id` of `/omlxd/cache/tree` and all below it; "": all of the namespace.

    What is pinned stays.
    """

    namespace: str
    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{0,64}$")] = ""


LAST = "last"


class WhyMissBody(msgspec.Struct):
    """A request to explain: one that was made, by its `request_id` (`last`: the newest of all) or as the
    newest of a `session`, or one as it would be sent: `path`, `body` and `headers`."""

    request_id: str = ""
    session: str = ""
    path: str = ""
    body: dict[str, Any] = {}
    headers: dict[str, str] = {}


class PinBlocks(WhyMissBody):
    """Pins the cached files of a request, as `name` (else its session's, or its id); or unpins `name`."""

    name: str = ""
    pinned: bool = True


class PinnedBlocks(msgspec.Struct):
    """A pin of `files`, on SSD or to be written; `bytes`: of those on SSD. `at`: seconds since 1970."""

    name: str
    model: str
    files: int
    bytes: int
    at: float


class PinList(msgspec.Struct):
    """Pins, newest last. `bytes` counts each file once; `most_bytes` is half of the SSD cache's limit."""

    pins: list[PinnedBlocks]
    bytes: int
    most_bytes: int


class CachedFiles(msgspec.Struct):
    """Files that a request's prompt is restored from, relative to the cache dir; `tokens` of it."""

    model: str
    files: list[str]
    tokens: int


class Imported(msgspec.Struct):
    """Blocks and records of an archive: `taken`, `there` before, without room (`full`).

    bad  a line for each file that is
    """

    taken: int = 0
    there: int = 0
    full: int = 0
    bad: list[str] = []


class ImportedPrompt(msgspec.Struct):
    """A prompt whose KV came from a file, and the tokens that were computed of it."""

    model: str
    tokens: int
    block_size: int


class WhyMiss(msgspec.Struct):
    """An explanation. `request_id`: of an earlier request. `reached`: tokens restored then; -1: as of now.

    recomputed  tokens that lay on SSD then and were computed
    logged      it is as `--log-cache-misses` wrote it down, without texts
    """

    model: str
    explanation: Explanation
    request_id: str = ""
    reached: int = -1
    recomputed: int = 0
    logged: bool = False


class RequestLine(msgspec.Struct):
    """A recent request. `began`: seconds since 1970; `cached_tokens` -1: not known (yet).

    opening  the first words that its user said, cut
    client   the program that sent it
    turns    of the user
    priority a lower one goes first
    logged   all that is left of it is a line of `--log-cache-misses`: its `session` may be a digest
    """

    id: str
    model: str
    session: str
    path: str
    began: float
    prompt_tokens: int
    cached_tokens: int
    outcome: str
    opening: str = ""
    client: str = ""
    turns: int = 0
    priority: int = 0
    logged: bool = False


class RecentList(msgspec.Struct):
    requests: list[RequestLine]
