"""Frames between rank 0 of an engine and each of its other ranks, framed as those of the front are.

Rank 0 decides, the others follow: they make these calls in this order, each on KV of its own.

| from rank 0      | from the other                                                              |
|------------------|-----------------------------------------------------------------------------|
| `Follow`         | `Here`, once MLX is there; `Broken` and exit at any time                    |
| `Join`           | `Here`, then `Ready`, once its share is loaded                              |
| `Begin`          | nothing: its store opens                                                    |
| `Open(row)`      | nothing                                                                     |
| `Match(row)`     | `Matched(row)`, once what it has of the prefix is in the row's cache        |
| `Pass(row)`      | nothing: it computes, and takes part in the sums                            |
| `Enter(batch)`   | nothing: a row whose prompt is computed decodes with others                 |
| `Step(batch)`    | nothing: a token a row; a sum brings those that rank 0 draws                |
| `Leave(batch)`   | nothing: rows have left                                                     |
| `Offer(row)`     | nothing: full blocks are stored                                             |
| `Finish(row)`    | nothing: the row is gone                                                    |
| `Ping`           | `Pong`, by a thread that does nothing else                                  |
| `Grant`          | answers `Reserve`: space on SSD comes from rank 0, which has it of the front |
| `TimeLink`       | nothing: it takes part                                                      |
| `Budget`, `Trim` | nothing                                                                     |
| `Quit`           | `Closed`, once its store is flushed, and exit                               |
"""

from __future__ import annotations

from typing import Union

from . import Budget, Dropped, Grant, Load, Quit, Released, Reserve, Stored, Struct, Touched


class Follow(Struct, frozen=True, tag="follow"):
    """Be rank `rank` of those that `load` names; budgets and caps in it are a rank's share.

    weights  digests of the model's files, which another machine's must equal; {}: it is this machine
    """

    rank: int
    load: Load
    weights: dict[str, str]


class Join(Struct, frozen=True, tag="join"):
    """Meet at `hosts`, `IP:PORT` of each rank, and load."""

    hosts: tuple[str, ...]


class Begin(Struct, frozen=True, tag="begin"):
    """Open the store. `lead`: folder of rank 0's namespace, whose fate is that of all shares."""

    lead: str


class Open(Struct, frozen=True, tag="open"):
    """A row begins.

    root      parent of its first block, the same on all ranks
    tokens    of its prompt
    room      tokens of its answer that its cache has room for at once
    pins      names of blocks to pin while it runs
    """

    row: int
    root: bytes
    tokens: tuple[int, ...]
    room: int
    pins: tuple[bytes, ...] = ()


class Match(Struct, frozen=True, tag="match"):
    """Make the longest cached prefix of at most `limit` blocks the row's KV."""

    row: int
    limit: int


class Pass(Struct, frozen=True, tag="pass"):
    """Compute `tokens` of a row, behind the `start` ones that its cache holds."""

    row: int
    start: int
    tokens: tuple[int, ...]


class Enter(Struct, frozen=True, tag="enter"):
    """Let a row decode in `batch`, a new one if there is none of that number. `tokens`: drawn since."""

    batch: int
    row: int
    tokens: tuple[int, ...]


class Step(Struct, frozen=True, tag="step"):
    """Start a step of `batch`.

    lengths  of the KV of its rows, in their order
    offers   before it, `Offer` of rows that decode, with `tokens` each
    """

    batch: int
    lengths: tuple[int, ...]
    offers: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Leave(Struct, frozen=True, tag="leave"):
    """Take `rows` out of `batch`."""

    batch: int
    rows: tuple[int, ...]


class Offer(Struct, frozen=True, tag="offer"):
    """Store what is full of a prompt. `tokens`: those that were drawn since."""

    row: int
    tokens: tuple[int, ...] = ()


class Finish(Struct, frozen=True, tag="finish"):
    """A row ends. As `Offer`, and

    length     tokens of its KV that count
    cancelled  it was broken off
    spoiled    its logits are not finite: what it stored is withdrawn
    kept       its KV is good: the rest of it is stored
    """

    row: int
    length: int
    tokens: tuple[int, ...] = ()
    cancelled: bool = False
    spoiled: bool = False
    kept: bool = True


class TimeLink(Struct, frozen=True, tag="time_link"):
    """Take part in what times the link."""


class Trim(Struct, frozen=True, tag="trim"):
    """Give back freed arrays, and RAM blocks that no row uses."""


class Ping(Struct, frozen=True, tag="ping"):
    """Rank 0 lives."""


ToRank = Union[
    Follow,
    Join,
    Begin,
    Open,
    Match,
    Pass,
    Enter,
    Step,
    Leave,
    Offer,
    Finish,
    TimeLink,
    Trim,
    Ping,
    Grant,
    Budget,
    Quit,
]


class Here(Struct, frozen=True, tag="here"):
    """Ready to meet the others. `address`: `IP:PORT` where, of another machine; "": rank 0 chooses."""

    address: str = ""


class Ready(Struct, frozen=True, tag="ready"):
    """Its share is loaded. namespace: the folder of its KV; bytes of its weights, and of a token's KV."""

    namespace: str
    weight_bytes: int
    kv_bytes_per_token: int


class Broken(Struct, frozen=True, tag="broken"):
    """Why it ends, which ends the engine. `lasting`: as of `LoadFailed`."""

    message: str
    lasting: bool = False


class Matched(Struct, frozen=True, tag="matched"):
    """The row's cache holds so many `tokens`, all verified."""

    row: int
    tokens: int


class Pong(Struct, frozen=True, tag="pong"):
    """It lives, and holds so much; by names of `Stats`.

    pid, resident_bytes  of its process, on whatever host
    kv_cold_tier_on      its disk works; kv_cold_disk_full: it does not, as it is full
    kv_cold_bytes        of its files, on another machine; -1: not known, or rank 0's machine knows
    """

    pid: int = 0
    resident_bytes: int = 0
    mlx_active_bytes: int = 0
    mlx_peak_bytes: int = 0
    mlx_cache_bytes: int = 0
    kv_hot_bytes: int = 0
    kv_unwritten_blocks: int = 0
    kv_store_queue_bytes: int = 0
    kv_cold_tier_on: bool = True
    kv_cold_disk_full: bool = False
    kv_cold_bytes: int = -1


class Closed(Struct, frozen=True, tag="closed"):
    """Its store is flushed."""


FromRank = Union[Here, Ready, Broken, Matched, Pong, Closed, Reserve, Stored, Released, Dropped, Touched]
