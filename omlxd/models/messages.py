"""What a daemon and `omlxd models` say to each other about models."""

from __future__ import annotations

from typing import Annotated

import msgspec

Name = Annotated[str, msgspec.Meta(min_length=1)]
"""Of a model. An owner names the model; a client may leave it out."""


class InstalledStatus(msgspec.Struct, kw_only=True):
    """One model. Bytes; seconds; `context_length` in tokens. Null: not known, or does not apply.

    state         `unloaded`, `loading`, `ready`, `unloading`, `restarting`, `failed`; `installed` when no
                  daemon was asked
    source        `folder` (--model), `model-dir`, `hub` or `demo`
    load_bytes    what loading it is thought to need
    idle_s        how long it stays without a request; null: for good
    expires_in_s  until it goes for being idle; null: it does not
    trouble       why it can't serve, a sentence
    """

    id: str
    state: str
    source: str
    default: bool = False
    folder: str | None = None
    aliases: list[str] = []
    pinned: bool = False
    in_flight: int = 0
    pid: int | None = None
    disk_bytes: int | None = None
    load_bytes: int | None = None
    memory_bytes: int | None = None
    context_length: int | None = None
    kv_bytes_per_token: int | None = None
    idle_s: float | None = None
    expires_in_s: float | None = None
    loads: int = 0
    trouble: str = ""


class InstalledStatuses(msgspec.Struct):
    models: list[InstalledStatus]


class Unloaded(msgspec.Struct):
    """`gone` false: it goes when the requests in flight have ended."""

    id: str
    gone: bool
    in_flight: int


class LoadModel(msgspec.Struct):
    model: Name
    keep_alive: str | float | int | None = None


class UnloadModel(msgspec.Struct):
    model: Name


class PinModel(msgspec.Struct):
    model: Name
    pinned: bool = True


class NameModel(msgspec.Struct):
    """`model` null takes the alias away."""

    alias: str
    model: Name | None
