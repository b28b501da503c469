"""The settings of `omlxd serve`: one table of `Option`s that drives flags, variables and the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from . import parsers
from .models import HOIST, ModelSettings


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What `omlxd serve` was told. Sizes in bytes; an empty `model` is the embedded demo model.

    hot_cache_max_size  None: grows up to what memory safely allows; 0: no hot tier
    model_dir           None: none
    model_ttl           seconds that a model loaded on demand stays after its last request; None: for good
    memory_limit        None: what the machine has; 0: nothing is guarded
    max_loaded_models   0: as many as memory allows
    models              what the file says under `[models."id"]`, by the id, or alias, as written there
    request_timeout     seconds; 0: no limit
    seed                None: another one at each load
    log_file            None: standard error
    cors_origin         origins of pages that may read answers; "*" is any
    allowed_host        further names that a Host header may hold
    sources             option name → `--port`, `OMLXD_PORT`, `…/omlxd.toml line 3` or `default`;
                        settings of models by their `full_name`
    """

    model: str
    model_dir: Path | None = None
    model_ttl: float | None = None
    max_loaded_models: int = 0
    memory_limit: int | None = None
    stall_timeout: float = 120.0
    no_jit_load: bool = False
    no_hf_cache: bool = False
    host: str
    port: int
    api_key: str
    paged_ssd_cache_dir: Path
    paged_ssd_cache_max_size: int
    ssd_cache_admission: str
    ssd_cache_daily_write_budget: int
    if_cache_busy: str
    hot_cache_max_size: int | None
    hot_cache_write: str
    initial_cache_blocks: int
    block_size: int
    kv_bits: int
    kv_group_size: int
    no_cache: bool
    max_concurrent_requests: int
    request_timeout: float = 0.0
    seed: int | None = None
    hoist_system: str = "auto"
    no_healing: bool = False
    log_level: str
    base_path: Path
    log_format: str = "text"
    log_file: Path | None = None
    log_file_size: int = 10_000_000
    log_file_count: int = 5
    cors_origin: tuple[str, ...] = ()
    allowed_host: tuple[str, ...] = ()
    models: dict[str, ModelSettings] = {}
    sources: dict[str, str] = {}

    def __repr__(self) -> str:
        """Every value but the key's: settings end up in logs and bug reports."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "sources"}
        shown["api_key"] = "***" if self.api_key else ""
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting: `name` in snake case, its default as text ("": none), and how to read it."""

    name: str
    default: str
    metavar: str
    help: str
    parse: Callable[[str, str, Mapping[str, Any]], Any]
    """(text, name of the flag or variable or line, values of the options before this one)."""
    is_switch: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "OMLXD_" + self.name.upper()


# Parsed in this order: a parser may look at the options before its own.
OPTIONS: tuple[Option, ...] = (
    Option(
        name="model",
        default="",
        metavar="MODEL",
        parse=parsers.any_text,
        help="model to load at start: local folder, hub id as ORG/NAME (downloaded once), or a name "
        "under --model-dir; default: none with --model-dir, else the embedded demo model",
    ),
    Option(
        name="model_dir",
        default="",
        metavar="DIR",
        parse=parsers.model_dir,
        help="folder of models, as DIR/NAME or DIR/ORG/NAME; they are loaded when they are asked for",
    ),
    Option(
        name="model_ttl",
        default="60m",
        metavar="TIME",
        parse=parsers.ttl,
        help="how long a model that was loaded on demand stays without a request, as 30m or 2h; "
        "0: until its memory is needed",
    ),
    Option(
        name="max_loaded_models",
        default="0",
        metavar="N",
        parse=parsers.integer(0, 1000),
        help="models that are loaded at the same time; 0: as many as memory allows",
    ),
    Option(
        name="no_jit_load",
        default="false",
        metavar="",
        parse=parsers.switch,
        is_switch=True,
        help="load no model because a request names it, only by --model and `omlxd models load`",
    ),
    Option(
        name="memory_limit",
        default="auto",
        metavar="SIZE",
        parse=parsers.memory_limit,
        help="most that weights, live KV and RAM caches of all models may take together, as 24GB or 60%% "
        "of RAM; auto: what the machine and its GPU have; off: nothing is estimated, refused or divided",
    ),
    Option(
        name="stall_timeout",
        default="120s",
        metavar="TIME",
        parse=parsers.seconds,
        help="how long an engine that has work may make no progress before it is ended and started "
        "again; 0: for ever",
    ),
    Option(
        name="no_hf_cache",
        default="false",
        metavar="",
        parse=parsers.switch,
        is_switch=True,
        help="don't offer the models that lie in the Hugging Face cache",
    ),
    Option(
        name="host",
        default="127.0.0.1",
        metavar="ADDR",
        parse=parsers.host,
        help="address to listen on; any but loopback needs --api-key",
    ),
    Option(
        name="port",
        default="8000",
        metavar="N",
        parse=parsers.integer(0, 65535),
        help="port to listen on; 0 takes a free one and prints it",
    ),
    Option(
        name="api_key",
        default="",
        metavar="KEY",
        parse=parsers.api_key,
        help="key that every request must carry; better given as OMLXD_API_KEY, which `ps` doesn't show",
    ),
    Option(
        name="base_path",
        default="~/.omlxd",
        metavar="DIR",
        parse=parsers.path,
        help="folder of everything that omlxd keeps",
    ),
    Option(
        name="paged_ssd_cache_dir",
        default="",
        metavar="DIR",
        parse=parsers.cold_dir,
        help="folder of the SSD cache; default: cache under --base-path",
    ),
    Option(
        name="paged_ssd_cache_max_size",
        default="100GB",
        metavar="SIZE",
        parse=parsers.cold_size,
        help="most that the SSD cache may take, as 100GB or 20%% of its disk; 0: no SSD cache",
    ),
    Option(
        name="ssd_cache_admission",
        default="always",
        metavar="POLICY",
        parse=parsers.admission,
        help="which blocks are written to the SSD cache: always; second-use, when they are asked for "
        "again; min-length:N, of prompts of at least N tokens",
    ),
    Option(
        name="ssd_cache_daily_write_budget",
        default="0",
        metavar="SIZE",
        parse=parsers.plain_size,
        help="most that is written to the SSD cache in a day, as 200GB; 0: no limit",
    ),
    Option(
        name="if_cache_busy",
        default="stop",
        metavar="WHAT",
        parse=parsers.one_of("stop", "no-ssd"),
        help="if another omlxd holds the SSD cache's folder: stop, or no-ssd to serve without one",
    ),
    Option(
        name="hot_cache_max_size",
        default="auto",
        metavar="SIZE",
        parse=parsers.hot_size,
        help="most that the RAM cache may take, as 8GB or 20%% of RAM; 0: no RAM cache; "
        "auto: grows up to what memory safely allows",
    ),
    Option(
        name="hot_cache_write",
        default="through",
        metavar="MODE",
        parse=parsers.one_of("through", "back"),
        help="through: blocks go to SSD as they are made; back: as they leave RAM, lie idle, or at the end",
    ),
    Option(
        name="initial_cache_blocks",
        default="256",
        metavar="N",
        parse=parsers.integer(1, 10_000_000),
        help="cache blocks made ready at start; more are made on demand",
    ),
    # A turn recomputes up to a block, so small is better until files are slow to read. Files to arrays as a
    # share of plain reads in the same round, an 8B shape, 2 virtual CPUs, page cache warm, median of 7 rounds
    # (tools/bench/restore.py, 1.5 GB): of 64, three runs, 2 threads .98, 1.20 and .99, lowest round .54; of
    # 128 and 256, one run, 1.04 and 1.00. With 500 MB of 64 .89; with 3 GB, two runs, .70 and 1.09. Dropped,
    # 1.26 and more. A small model's pieces are half as long: .64 of plain (7.2 GB/s).
    Option(
        name="block_size",
        default="64",
        metavar="N",
        parse=parsers.block_size,
        help="tokens in a cache block, a power of two from 16 to 1024",
    ),
    Option(
        name="kv_bits",
        default="0",
        metavar="N",
        parse=parsers.whole_of(0, 4, 8),
        help="bits of a number of the KV cache: 8 takes about half of the memory and disk that 16 does, "
        "4 about a quarter, and answers change; 0: as the model computes it",
    ),
    Option(
        name="kv_group_size",
        default="64",
        metavar="N",
        parse=parsers.whole_of(32, 64, 128),
        help="numbers that share a scale with --kv-bits; must divide the width of the model's heads",
    ),
    Option(
        name="no_cache",
        default="false",
        metavar="",
        parse=parsers.switch,
        is_switch=True,
        help="compute every prompt from its first token: no RAM cache, no SSD cache",
    ),
    Option(
        name="max_concurrent_requests",
        default="8",
        metavar="N",
        parse=parsers.integer(1, 1024),
        help="requests that decode at the same time; more wait their turn",
    ),
    Option(
        name="request_timeout",
        default="1h",
        metavar="TIME",
        parse=parsers.limit,
        help="longest that a request may take, as 600 (seconds) or 1h; its answer then ends as one that "
        "is too long; 0: no limit",
    ),
    Option(
        name="seed",
        default="random",
        metavar="N",
        parse=parsers.seed,
        help="where a model's random numbers begin when it is loaded, for requests without a seed of "
        "their own: the same requests in the same order then get the same answers; random: anywhere",
    ),
    Option(
        name="hoist_system",
        default="auto",
        metavar="WHEN",
        parse=parsers.one_of(*HOIST),
        help="put system messages that stand before the first answer at the head of the prompt: always, "
        "never, or auto",
    ),
    Option(
        name="no_healing",
        default="false",
        metavar="",
        parse=parsers.switch,
        is_switch=True,
        help="render earlier answers as the client sends them, not as they were generated",
    ),
    Option(
        name="log_level",
        default="info",
        metavar="LEVEL",
        parse=parsers.log_level,
        help="one of " + ", ".join(parsers.LOG_LEVELS),
    ),
    Option(
        name="log_format",
        default="text",
        metavar="FORMAT",
        parse=parsers.one_of("text", "json"),
        help="text: a line of words and key=value pairs; json: one object a line",
    ),
    Option(
        name="log_file",
        default="",
        metavar="FILE",
        parse=parsers.optional_path,
        help="file to log to, rotated; default: standard error",
    ),
    Option(
        name="log_file_size",
        default="10MB",
        metavar="SIZE",
        parse=parsers.byte_size,
        help="size at which --log-file is put aside and a new one begun",
    ),
    Option(
        name="log_file_count",
        default="5",
        metavar="N",
        parse=parsers.integer(1, 100),
        help="log files that were put aside and are kept",
    ),
    Option(
        name="cors_origin",
        default="",
        metavar="ORIGINS",
        parse=parsers.origins,
        help="web pages that may use this daemon from a browser, as https://chat.example, with commas "
        "between; default: none",
    ),
    Option(
        name="allowed_host",
        default="",
        metavar="NAMES",
        parse=parsers.host_names,
        help="further names that a request may call this daemon by, as a proxy before it does; with commas "
        "between; default: localhost alone",
    ),
)
BY_NAME = {option.name: option for option in OPTIONS}
