"""Frames between the front and one engine process, over a Unix socketpair.

A frame is a little-endian u32 length and that many bytes of msgpack, one tagged struct each.
Sans-I/O: `FrameDecoder` takes bytes and gives messages; either side is tested without a socket.

Life of an engine, as the front sees it:

| from front       | from engine                     |
|------------------|---------------------------------|
|                  | `Device`, once, first of all    |
| `Load`           | `LoadProgress`* then `Loaded` or `LoadFailed` (and exit) |
| `Generate(id)`   | `Events` holding `(id, Event)`; exactly one last event, `Finished` or `Failed` |
| `Cancel(id)`     | nothing more for `id`            |
| `Count(id)`      | `Counted(id)` or `Events` with `Failed` |
| `GetStats(id)`   | `Stats(id)`                      |
| `Explain(id)`    | `Explained(id)` or `Events` with `Failed` |
| `Embed(id)`      | `Embedded(id)` or `Events` with `Failed` |
| `Grant`          | answers `Reserve`                |
| `Budget`         | answers `Wants`, and comes unasked when the shares change |
| `LogLevel`       | nothing; at any time             |
| `LoadAdapter`    | `Loaded` or `LoadFailed` |
| `DropAdapter`    | `AdapterDropped`, once its requests have ended |
| `Quit`           | flushes stores, then exits 0     |

The engine also says what its cold tier does: `Reserve` asks for space before a byte is written,
`Stored` and `Dropped` settle the account, `Touched` keeps recency (kv/ledger/ledger.py). `Alive` says that
work gets done, for as long as it does. `GpuFault` is the last that it says, before it exits by itself.
"""

from __future__ import annotations

from typing import Any, Literal, Union

import msgspec

from ..chat import (
    Conversation,
    EmbedRequest,
    Event,
    GenerateRequest,
    RawPrompt,
    Struct,
    Vectors,
)
from .explanation import Explanation
from .token_bytes import TokenBytes

MAX_FRAME = 256 * 1024 * 1024
"""Bytes. A request body is at most 32 MiB (the front's limit), so this only stops nonsense."""


CHANNEL = 1 << 32
"""An engine may serve adapters beside its model. Each has a channel, a number from 1; the ids of its requests
and questions begin at that times this, those of the model at 0, or at `Load.channel` times this."""


# --------------------------------------------------------------------------- to the engine


class CacheSettings(Struct, frozen=True):
    """KV store settings of one engine. Sizes in bytes; `cold_dir` empty: no cold tier.

    hot_parts   ranks on this machine, which have `hot_cache_bytes` None in common
    cold_cache_bytes  limit of the cold tier, over all engines; 0: not known
    admission   which blocks are written (kv/cold/flusher.py). write_back: not before they leave RAM or idle
    peer        another omlxd, `HOST[:PORT]`, that is asked for blocks; "": none
    peer_base   the base path, where this one's key is
    kv_bits     8 or 4: per-token KV is quantised, in groups of `kv_group_size`; 0: it is not
    """

    enabled: bool = True
    block_size: int = 64
    initial_blocks: int = 256
    hot_cache_bytes: int | None = None
    hot_parts: int = 1
    cold_dir: str = ""
    cold_cache_bytes: int = 0
    admission: str = "always"
    write_back: bool = False
    peer: str = ""
    peer_base: str = ""
    kv_bits: int = 0
    kv_group_size: int = 64


def kv_words(bits: int, group: int) -> str:
    """Say how KV is kept."""
    return f"{bits} bits in groups of {group}" if bits else "not quantised"


class PromptSettings(Struct, frozen=True):
    """How one engine makes prompts, and how long a request may take.

    healing            earlier turns are put back as they were generated
    hoist_system       `auto`, `always`, `never`: system messages before the first assistant's turn
    request_timeout_s  0: no limit
    starts_in_thinking the answer begins inside a thinking block that the template does not open
    max_images         that a request may hold, the pages of PDFs among them
    """

    healing: bool = True
    hoist_system: str = "auto"
    request_timeout_s: float = 0.0
    starts_in_thinking: bool = False
    max_images: int = 600


class Budget(Struct, frozen=True, tag="budget"):
    """What this engine may hold from now on, in bytes; None: what its own machine safely allows.

    hot     of the hot tier
    live    of weights and live KV together
    most    as `live`, if no other engine were there
    freed   of freed arrays that MLX keeps for reuse
    ticket  of the `Wants` that it answers; 0: none
    float32 at its load: on a CPU, weights may be made float32
    slow    at its load: why they may not, with figures; "": they may, need not or must not
    """

    hot: int | None = None
    live: int | None = None
    most: int | None = None
    freed: int | None = None
    ticket: int = 0
    float32: bool = False
    slow: str = ""


KV_RESERVE = 1024
"""Tokens."""


class Load(Struct, frozen=True, tag="load"):
    """`model_path`: a local folder. `model_id`: the name that clients use.

    guard   prompts wait for memory, and are refused where there will be none
    budget  what it may hold at first
    seed    where its random numbers begin; None: anywhere
    speculate  passes may check guessed tokens
    max_concurrent  requests that decode at once; None: as many as suit the device
    share_prefix  running requests hold what they share once: auto: where that pays; on; off
    metal_kernels  auto: omlxd's own on Metal, where its rule lets them; off: MLX's alone
    adapter  folder of a LoRA adapter of the model; "": none; `channel`: that of its requests
    draft_path  folder of a draft model, which guesses tokens; "": none
    kv_reserve  tokens of an answer that its KV has room for at once; None: as memory allows. A longer one is
                copied as it grows
    weights_mmap  whether weights are views of their files (engine/mlx_adapter/runtime/mapped.py)
    pass_limit  tokens of a prompt that a pass computes, at most; 0: as suits the device
    ranks   processes that share the model (wire/plan.py), `join` included
    join    hosts, `HOST[:PORT]`, that run `omlxd join`; a rank on each, the last ones
    link    what carries their sums: ring, jaccl or nccl
    """

    model_path: str
    model_id: str
    cache: CacheSettings
    max_concurrent: int | None = None
    log_level: str = "info"
    guard: bool = True
    budget: Budget = Budget()
    prompts: PromptSettings = PromptSettings()
    seed: int | None = None
    speculate: bool = True
    share_prefix: str = "auto"
    metal_kernels: str = "auto"
    adapter: str = ""
    channel: int = 0
    draft_path: str = ""
    kv_reserve: int | None = None
    weights_mmap: str = "off"
    pass_limit: int = 0
    ranks: int = 1
    join: tuple[str, ...] = ()
    link: str = "ring"

    @property
    def ranks_here(self) -> int:
        """Ranks on this machine."""
        return self.ranks - len(self.join)


SAMPLE_KERNELS = (
    *("attend_rows", "attend_rows 8bit"),
    *("few rows 4 bits", "few rows 8 bits", "few rows experts"),
    *("delta prompts", "delta steps"),
)
"""Metal kernels that a report measures, each at a shape of common models: a part of its own, as one may end
its process."""


class MeasureJob(Struct, frozen=True):
    """What engine/server/measure measures. No frame: it stands in a file.

    model   folder of the model; where there is none, one of random weights is built there
    folder  for the SSD tier, and for notes of kernels
    metal_kernels  as in `Load`
    """

    model: str
    folder: str
    metal_kernels: str


class LoadAdapter(Struct, frozen=True, tag="load_adapter"):
    """Serve the model with the LoRA adapter in `folder` as well, under that channel. After `Loaded`."""

    channel: int
    folder: str
    model_id: str


class DropAdapter(Struct, frozen=True, tag="drop_adapter"):
    channel: int


class Generate(Struct, frozen=True, tag="generate"):
    id: int
    request: GenerateRequest


class Cancel(Struct, frozen=True, tag="cancel"):
    id: int


class Count(Struct, frozen=True, tag="count"):
    """Count the prompt tokens of `prompt`, rendered just as `Generate` would for `session` of `client`."""

    id: int
    prompt: Union[Conversation, RawPrompt]
    session: str = ""
    client: str = ""


class Home(Struct, frozen=True, tag="home"):
    """Folders and limits on the machine of a joined rank (front/join/). They replace those of its `Load`.

    address  of that machine, as rank 0 reaches it
    """

    model_path: str
    address: str
    cold_dir: str = ""
    cold_cache_bytes: int = 0
    hot_cache_bytes: int | None = None


class ColdBytes(Struct, frozen=True, tag="cold_bytes"):
    """Bytes of such a rank's files on its own machine's SSD."""

    nbytes: int


class GetStats(Struct, frozen=True, tag="get_stats"):
    """`trim`, `reset_peak`: before it answers, give memory back, count MLX's peak anew."""

    id: int
    trim: bool = False
    reset_peak: bool = False


class Explain(Struct, frozen=True, tag="explain"):
    """Say why `request` would miss, or why it did: `reached` tokens of it were cached (-1: as of now).

    files  and which files it is restored from
    """

    id: int
    request: GenerateRequest
    reached: int = -1
    files: bool = False


class Embed(Struct, frozen=True, tag="embed"):
    id: int
    request: EmbedRequest


class Grant(Struct, frozen=True, tag="grant"):
    """`nbytes` more may be written to the cold tier; 0: refused (full, dead or no such tier).

    capacity  bytes that its files can come to now; 0: not known
    """

    ticket: int
    nbytes: int
    capacity: int = 0


class PassLimit(Struct, frozen=True, tag="pass_limit"):
    """The `pass_limit` from now on, as in `Load`."""

    tokens: int


class LogLevel(Struct, frozen=True, tag="log_level"):
    """The level of the engine's own log lines from now on, as in `Load`."""

    level: str


class Quit(Struct, frozen=True, tag="quit"):
    """Flush stores for at most `deadline_s` seconds, then exit."""

    deadline_s: float = 5.0


ToEngine = Union[
    Load,
    LoadAdapter,
    DropAdapter,
    Generate,
    Cancel,
    Count,
    GetStats,
    Explain,
    Embed,
    Grant,
    Budget,
    PassLimit,
    LogLevel,
    Quit,
]


# --------------------------------------------------------------------------- to the front


class Device(Struct, frozen=True, tag="device"):
    """Where arrays will live, as the engine finds it before it loads anything. Bytes.

    total      of the GPU's own memory (what Metal recommends at most), or of the machine's
    available  of these, free now
    free_from  who sees what is free later: `host`, the front itself, since arrays live in the machine's
               memory; `engine` alone; `report`: nobody, `available` stays
    """

    backend: str
    total: int
    available: int
    free_from: Literal["host", "engine", "report"] = "report"


class Alive(Struct, frozen=True, tag="alive"):
    """Work done so far, in steps of whatever kind; sent now and then while there is some, if it grew."""

    steps: int


class Wants(Struct, frozen=True, tag="wants"):
    """A prompt that waits needs `nbytes` more than this engine may have. Answered by `Budget`."""

    ticket: int
    nbytes: int


class LoadProgress(Struct, frozen=True, tag="load_progress"):
    stage: str


class Kernel(Struct, frozen=True):
    """A kernel of omlxd's own that a load judged at one shape of the model.

    why   it is not used; "": it is
    note  file that keeps it from being judged
    """

    name: str
    shape: str
    why: str = ""
    note: str = ""


class ModelInfo(Struct, frozen=True):
    """What a loaded model is. `kv_reuse` empty: prefixes are reused; else the reason why not.

    images  it takes images; `blind`: why a vision model takes none
    shares  folders of the KV of its other ranks, beside `namespace`; weights and KV are those of all
    """

    model_id: str
    model_type: str
    context_length: int
    vocab_size: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_reuse: str
    namespace: str
    block_size: int
    backend: str
    supports_tools: bool = False
    supports_thinking: bool = False
    note: str = ""
    token_bytes: TokenBytes = TokenBytes()
    speed: str = ""
    images: bool = False
    blind: str = ""
    shares: tuple[str, ...] = ()
    layers: int = 0
    hidden_size: int = 0
    kernels: tuple[Kernel, ...] = ()


class Loaded(Struct, frozen=True, tag="loaded"):
    """`channel`: of a `LoadAdapter`, whose adapter's the `weight_bytes` are; 0: of the `Load`."""

    info: ModelInfo
    channel: int = 0


class LoadFailed(Struct, frozen=True, tag="load_failed"):
    """`channel`: as of `Loaded`. `adapter`: for its files. `now`: for lack of memory, or of
    a host that is away.

    lasting  the model's files or settings are why: loaded again as they are it fails again
    """

    message: str
    channel: int = 0
    adapter: bool = False
    now: bool = False
    lasting: bool = False


GPU_FAULT_STATUS = 7
"""With which an engine exits after a `GpuFault`."""


class GpuFault(Struct, frozen=True, tag="gpu_fault"):
    """The GPU failed, and this process can compute nothing more.

    message      what MLX said; `help`: a sentence about what helps
    pass_tokens  of the pass over a prompt that may have failed; 0: a smaller one would not go better
    """

    message: str
    help: str = ""
    pass_tokens: int = 0


class AdapterDropped(Struct, frozen=True, tag="adapter_dropped"):
    channel: int


class Events(Struct, frozen=True, tag="events"):
    """Events in order, of any number of requests: one frame a step, not one a token."""

    events: tuple[tuple[int, Event], ...]


class Answer(Struct, frozen=True):
    id: int
    result: Any


class Counted(Answer, frozen=True, tag="counted"):
    result: int


class Explained(Answer, frozen=True, tag="explained"):
    result: Explanation


class Embedded(Answer, frozen=True, tag="embedded"):
    result: Vectors


class Stats(Struct, frozen=True, tag="stats"):
    """Counters and gauges by name; names are listed in engine/server/metrics.py.

    id    of the question; a channel's first id: unasked, as an engine or an adapter ends in order
    peer  why nothing comes from --peer, a clause; "": it may
    """

    id: int
    values: dict[str, float]
    peer: str = ""


class Reserve(Struct, frozen=True, tag="reserve"):
    """Ask for `nbytes` of cold-tier space. One ticket outstanding at a time.

    least  bytes of the file that waits: as little as that may be granted; 0: all of `nbytes` or none
    """

    ticket: int
    nbytes: int
    least: int = 0


class Stored(Struct, frozen=True, tag="stored"):
    """Files now in place: (namespace/hash path relative to the cache dir, bytes on disk).

    Their bytes leave the grant and become files on the account.
    """

    files: tuple[tuple[str, int], ...]


class Released(Struct, frozen=True, tag="released"):
    """`nbytes` of a grant will not be used after all."""

    nbytes: int


class Dropped(Struct, frozen=True, tag="dropped"):
    """Files that the engine removed (failed their digest)."""

    files: tuple[str, ...]


class Touched(Struct, frozen=True, tag="touched"):
    """Files that a request used, leaf first: a parent ends up more recent than its child."""

    files: tuple[str, ...]


ToFront = Union[
    Device,
    Alive,
    Wants,
    LoadProgress,
    Loaded,
    LoadFailed,
    GpuFault,
    AdapterDropped,
    Events,
    Counted,
    Stats,
    Explained,
    Embedded,
    Reserve,
    Stored,
    Released,
    Dropped,
    Touched,
]

_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """One frame."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"frame of {len(body)} bytes")
    return len(body).to_bytes(4, "little") + body


class FrameDecoder:
    """Bytes in, messages out. `type` is `ToEngine` or `ToFront`."""

    def __init__(self, type: Any):
        self._decoder = msgspec.msgpack.Decoder(type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Messages completed by `data`. Raises ValueError (msgspec's included) on nonsense."""
        self._buffer += data
        out: list[Any] = []
        at = 0
        while len(self._buffer) - at >= 4:
            length = int.from_bytes(self._buffer[at : at + 4], "little")
            if length > MAX_FRAME:
                raise ValueError(f"frame of {length} bytes")
            if len(self._buffer) - at - 4 < length:
                break
            out.append(self._decoder.decode(memoryview(self._buffer)[at + 4 : at + 4 + length]))
            at += 4 + length
        if at:
            del self._buffer[:at]
        return out
