"""The settings of `omlxd serve` and of single models. A field's annotation has its type, limits, help and
default.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from ..common.units import default_cap, disk_room
from .values import Bytes, FileBytes, Limit, Seconds, Stay, expected

BlockSize = Literal[16, 32, 64, 128, 256, 512, 1024]
KvBits = Literal[0, 4, 8]
KvGroup = Literal[32, 64, 128]
CpuWeights = Literal["auto", "as-stored"]
WeightsMmap = Literal["auto", "on", "off"]
Hoist = Literal["auto", "always", "never"]
"""Place of system messages that precede the first assistant's turn."""
Reserve = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Thought = Annotated[int, Meta(ge=0, le=2**31 - 1)]
SharePrefix = Literal["auto", "on", "off"]
Ranks = Annotated[int, Meta(ge=1, le=64)]
Hosts = tuple[Annotated[str, Meta(pattern=r"^[A-Za-z0-9.:_%\[\]-]+\Z")], ...]
LinkKind = Literal["ring", "jaccl", "nccl"]
Slots = Annotated[int, Meta(ge=1, le=1024)]
Images = Annotated[int, Meta(ge=1, le=100_000)]
PREFIX = "OMLXD_"
"""Prefix of settings' variables."""
WITH_STDIN = f"{PREFIX}WITH_STDIN"
"""Variable that has `omlxd serve` stop once its standard input ends."""
BY_SERVICE = f"{PREFIX}SERVICE"
"""Variable that `omlxd service install` gives the daemon; it also marks a launchd file as ours."""
_ORIGIN = r"^(\*|[a-z][a-z0-9+.-]*://[A-Za-z0-9.:_\[\]-]+)\Z"


def _option(usage: str, *, wrong: str = "", none: str | None = None) -> Meta:
    """Describe an option. usage: `METAVAR=default`, "" for a switch. wrong: refused values. none: text of
    None.
    """
    metavar, _, default = usage.partition("=")
    return Meta(
        extra={"metavar": metavar, "default": default if metavar else "false", "wrong": wrong, "none": none}
    )


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one model in the file; None: unset.

    thinking        whether the model thinks, where the request leaves it open
    max_thinking_tokens  tokens of thought at most, of any request
    loop_stop       reasoning and answers that repeat themselves without end are ended
    template_args   arguments of the chat template, below a request's own
    context_limit   tokens of prompt and answer at most
    ttl             seconds that it stays loaded without a request; infinite: for good
    healing         earlier turns are put back as they were generated
    max_images      that a request may hold
    request_timeout seconds that a request may take; 0: no limit
    starts_in_thinking  answers begin inside a thinking block that the template does not open
    adapter         folder of a LoRA adapter that it is loaded with
    draft_model     a small model of the same tokenizer, which guesses what it says next
    kv_reserve      tokens of an answer that its KV has room for at once
    pin             never unloaded to make room, nor for being idle
    """

    # Bounds as of OpenAI's requests; what those say for "off" or "the likeliest token" (top_p 0, top_k -1) is
    # left out here.
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=10**9)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    repetition_context_size: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    thinking: bool | None = None
    max_thinking_tokens: Thought | None = None
    loop_stop: Literal["auto", "off"] | None = None
    template_args: dict[str, Any] = {}
    context_limit: Annotated[int, Meta(ge=16, le=2**31 - 1)] | None = None
    ttl: Stay | None = None
    pin: bool = False
    aliases: tuple[Annotated[str, Meta(pattern=r"\S")], ...] = ()
    block_size: BlockSize | None = None
    kv_bits: KvBits | None = None
    kv_group_size: KvGroup | None = None
    cpu_weights: CpuWeights | None = None
    weights_mmap: WeightsMmap | None = None
    no_cache: bool | None = None
    max_concurrent_requests: Slots | None = None
    healing: bool | None = None
    max_images: Images | None = None
    speculation: Literal["auto", "off"] | None = None
    share_prefix: SharePrefix | None = None
    ranks: Ranks | None = None
    join: Hosts | None = None
    link: LinkKind | None = None
    metal_kernels: Literal["auto", "off"] | None = None
    hoist_system: Hoist | None = None
    request_timeout: Limit | None = None
    starts_in_thinking: bool | None = None
    adapter: Path | None = None
    draft_model: Annotated[str, Meta(pattern=r"\S")] | None = None
    kv_reserve: Reserve | None = None


SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "repetition_context_size"),
    "max_tokens",
)
"""Fields that the file may also set for all models, under `[defaults]`."""
FOR_ALL = ("max_thinking_tokens", "loop_stop", "ranks", "join", "link")
"""Fields that a flag sets for all models without their own."""
NEXT_LOAD = ModelSettings.__struct_fields__[ModelSettings.__struct_fields__.index("block_size") :]
"""Fields that a loaded engine does not take up; every other one is live."""


_HELP = {
    "model": "model to load at start: local folder, hub id as ORG/NAME (downloaded once), or a name under "
    "--model-dir; default: none with --model-dir, else SmolLM2-135M-Instruct, or a demo model of random "
    "weights until it is fetched",
    "model_dir": "folder of models, as DIR/NAME or DIR/ORG/NAME; they are loaded when they are asked for",
    "model_ttl": "how long a model that was loaded on demand stays without a request, as 30m or 2h; 0: until "
    "its memory is needed",
    "max_loaded_models": "models that are loaded at the same time; 0: as many as memory allows",
    "no_jit_load": "load no model because a request names it, only by --model and `omlxd models load`",
    "memory_limit": "most that weights, live KV and RAM caches of all models may take together, as 24GB or "
    "60%% of RAM; auto: what the machine and its GPU have; off: nothing is estimated, refused or divided",
    "stall_timeout": "how long an engine that has work may make no progress before it is ended and started "
    "again; 0: for ever",
    "keep_awake": "true: the machine does not fall asleep while a request runs (its display may), by macOS's "
    "caffeinate or Linux's systemd-inhibit; false: it may",
    "no_hf_cache": "don't offer the models that lie in the Hugging Face cache",
    "host": "address to listen on; any but loopback needs --api-key",
    "port": "port to listen on; 0 takes a free one and prints it",
    "ollama_port": "a second port, as 11434, for programs that look for Ollama; left out if another program "
    "holds it; 0: none",
    "peer_listen": "address, as 192.168.1.5 or 192.168.1.5:8077, at which omlxd of yours that were paired by "
    "`omlxd peer` may read this SSD cache; default: none",
    "peer": "omlxd of yours, as 192.168.1.5 or 192.168.1.5:8077, whose SSD cache is asked for what this one "
    "lacks; `omlxd peer pair` comes first; default: none",
    "join_listen": "address, as 192.168.1.6 or 192.168.1.6:8078, at which `omlxd join` waits for a lead",
    "api_key": "key that every request must carry; better given as OMLXD_API_KEY, which `ps` doesn't show",
    "base_path": "folder of everything that omlxd keeps",
    "paged_ssd_cache_dir": "folder of the SSD cache; default: cache under --base-path",
    "paged_ssd_cache_max_size": "most that the SSD cache may take, as 100GB or 20%% of its disk; 0: no SSD "
    "cache; auto: 100GB, and less on a disk with little room",
    "ssd_cache_admission": "which blocks are written to the SSD cache: always; second-use, when they are "
    "asked for again; min-length:N, of prompts of at least N tokens",
    "ssd_cache_daily_write_budget": "most that is written to the SSD cache in a day, as 200GB; 0: no limit",
    "ssd_cache_ttl": "how long a block stays in the SSD cache without use, as 30d; 0: until its place is "
    "needed",
    "if_cache_busy": "if another omlxd holds the SSD cache's folder: stop, or no-ssd to serve without one",
    "hot_cache_max_size": "most that the RAM cache may take, as 8GB or 20%% of RAM; 0: no RAM cache; auto: "
    "grows up to what memory safely allows",
    "hot_cache_write": "through: blocks go to SSD as they are made; back: as they leave RAM, lie idle, or at "
    "the end",
    "initial_cache_blocks": "cache blocks made ready at start; more are made on demand",
    "block_size": "tokens in a cache block, a power of two from 16 to 1024",
    "kv_bits": "bits of a number of the KV cache: 8 takes about half of the memory and disk that 16 does, 4 "
    "about a quarter, and answers change; 0: as the model computes it",
    "kv_group_size": "numbers that share a scale with --kv-bits; must divide the width of the model's heads",
    "cpu_weights": "on a CPU: auto makes weights float32, which is many times faster, when they take at most "
    "half of the free memory; as-stored: never",
    "weights_mmap": "weights as views of their files, which engines of one model share: auto where it was "
    "tried (Linux, CPU) and weights stay as stored; on: wherever it can be; off: they are read",
    "cpu_blas": "on a Linux CPU: auto has OpenBLAS compute matrix products, if it is installed; off: MLX's "
    "own BLAS, which is slow",
    "no_cache": "compute every prompt from its first token: no RAM cache, no SSD cache",
    "max_concurrent_requests": "requests that decode at the same time; more wait their turn; auto: 32 on a "
    "GPU, 8 on a CPU",
    "request_timeout": "longest that a request may take, as 600 (seconds) or 1h; its answer then ends as one "
    "that is too long; 0: no limit",
    "seed": "where a model's random numbers begin when it is loaded, for requests without a seed of their "
    "own: the same requests in the same order then get the same answers; random: anywhere",
    "speculation": "auto: several guessed tokens of a request are checked in a pass where that is measured "
    "to be faster, in a batch too, and answers stay the same; off: one token a pass",
    "share_prefix": "auto: running requests that begin alike hold the KV of that once, on a CPU and on a GPU "
    "where kernels of omlxd's own read it; on: on any GPU, where steps may be slow; off: each holds its "
    "own",
    "ranks": "processes of this machine that share a model, a GPU each where there are several: room for a "
    "larger one, not speed; 1: one has all of it",
    "join": "hosts that run `omlxd join`, as 192.168.1.6 or 192.168.1.6:8078, with commas between: each "
    "has a share of a model beside the --ranks of this machine; `omlxd peer pair` comes first; default: none",
    "link": "what carries the sums of ranks: ring, over TCP; jaccl, by RDMA over Thunderbolt 5; nccl, which "
    "ranks on CUDA always have",
    "metal_kernels": "auto: on Metal, kernels of omlxd's own compute what a load finds right and not slower "
    "than MLX's own there: the log and `omlxd doctor` say which; off: MLX's alone",
    "max_thinking_tokens": "most tokens that a model may think before it answers, whatever a request says; "
    "0: it does not think; none: as many as it likes",
    "loop_stop": "auto: reasoning, and then an answer, that surely repeats itself without end is ended; "
    "off: it goes on",
    "kv_reserve": "tokens of an answer that its KV has room for at once; auto: as many as max_tokens allows, "
    "up to a part of the free memory; a longer one is copied as it grows",
    "hoist_system": "put system messages that stand before the first answer at the head of the prompt: "
    "always, never, or auto",
    "no_healing": "render earlier answers as the client sends them, not as they were generated",
    "max_images": "images that a request may hold, the pages of PDFs among them where the model sees",
    "log_level": "one of debug, info, warning, error",
    "log_format": "text: a line of words and key=value pairs; json: one object a line",
    "log_file": "file to log to, rotated; default: standard error",
    "log_file_size": "size at which --log-file is put aside and a new one begun",
    "log_file_count": "log files that were put aside and are kept",
    "log_cache_misses": "keep for seven days why each request's cached prefix ended, in cache-misses.jsonl "
    "under --base-path: hashes and counts, no texts",
    "cors_origin": "web pages that may use this daemon from a browser, as https://chat.example, with commas "
    "between; default: none",
    "allowed_host": "further names that a request may call this daemon by, as a proxy before it does; with "
    "commas between; default: localhost alone",
}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `omlxd serve`. Sizes in bytes, times in seconds; an empty `model` is a small one of ours.

    cold_cache_bytes    None: by the room on its disk (`ssd_cap`); 0: no SSD cache
    hot_cache_bytes     None: grows up to what memory safely allows; 0: no hot tier
    memory_limit_bytes  None: what the machine has; 0: nothing is guarded
    models    of single models, by the id or alias in the file; each has `defaults` too
    overridden  a sentence for each value that makes no sense, and that a flag or variable overrides
    sources   option name → `--port`, `OMLXD_PORT`, `…/omlxd.toml line 3` or `default`; settings of models by
              their `full_name`
    """

    model: Annotated[str, _option("MODEL")]
    model_dir: Annotated[Path | None, _option("DIR", none="")]
    model_ttl: Annotated[Stay, _option("TIME=60m")]
    max_loaded_models: Annotated[int, Meta(ge=0, le=1000), _option("N=0")]
    no_jit_load: Annotated[bool, _option("")]
    memory_limit_bytes: Annotated[Bytes | None, _option("SIZE=auto", none="auto")] = field(
        name="memory_limit"
    )
    stall_timeout: Annotated[Seconds, _option("TIME=120s")]
    keep_awake: Annotated[bool, _option("BOOL=true")]
    no_hf_cache: Annotated[bool, _option("")]
    host: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9.:_%-]+\Z"),
        _option("ADDR=127.0.0.1", wrong="no address; 127.0.0.1 is this machine alone"),
    ]
    port: Annotated[int, Meta(ge=0, le=65535), _option("N=8000")]
    ollama_port: Annotated[int, Meta(ge=0, le=65535), _option("N=0")]
    peer_listen: Annotated[str, _option("ADDR")]
    peer: Annotated[str, _option("HOST")]
    join_listen: Annotated[str, _option("ADDR=127.0.0.1")]
    api_key: Annotated[
        str,
        Meta(pattern=r"^[\x21-\x7e]*\Z"),
        _option("KEY", wrong="a key is letters, digits and signs, with no spaces"),
    ]
    base_path: Annotated[Path, _option("DIR=~/.omlxd")]
    paged_ssd_cache_dir: Annotated[Path, _option("DIR")]
    cold_cache_bytes: Annotated[Bytes | None, _option("SIZE=auto", none="auto")] = field(
        name="paged_ssd_cache_max_size"
    )
    ssd_cache_admission: Annotated[
        str,
        Meta(pattern=r"^(always|second-use|min-length:\d{1,9})\Z"),
        _option(
            "POLICY=always",
            wrong="none of always, second-use and min-length:N with N in tokens, as min-length:1000",
        ),
    ]
    ssd_cache_daily_write_budget: Annotated[Bytes, _option("SIZE=0")]
    ssd_cache_ttl: Annotated[Stay, _option("TIME=0")]
    if_cache_busy: Annotated[Literal["stop", "no-ssd"], _option("WHAT=stop")]
    hot_cache_bytes: Annotated[Bytes | None, _option("SIZE=auto", none="auto")] = field(
        name="hot_cache_max_size"
    )
    hot_cache_write: Annotated[Literal["through", "back"], _option("MODE=through")]
    initial_cache_blocks: Annotated[int, Meta(ge=1, le=10_000_000), _option("N=256")]
    # A turn recomputes up to a block, so small is better until files are slow to read. Files to arrays as a
    # share of plain reads in the same round, an 8B shape, 2 virtual CPUs, page cache warm, median of 7 rounds
    # (tools/bench/restore.py, 1.5 GB): of 64, three runs, 2 threads .98, 1.20 and .99, lowest round .54; of
    # 128 and 256, one run, 1.04 and 1.00. With 500 MB of 64 .89; with 3 GB, two runs, .70 and 1.09. Dropped,
    # 1.26 and more. A small model's pieces are half as long: .64 of plain (7.2 GB/s).
    block_size: Annotated[BlockSize, _option("N=64")]
    kv_bits: Annotated[KvBits, _option("N=0")]
    kv_group_size: Annotated[KvGroup, _option("N=64")]
    cpu_weights: Annotated[CpuWeights, _option("WHAT=auto")]
    weights_mmap: Annotated[WeightsMmap, _option("WHAT=auto")]
    cpu_blas: Annotated[Literal["auto", "off"], _option("WHAT=auto")]
    no_cache: Annotated[bool, _option("")]
    max_concurrent_requests: Annotated[Slots | None, _option("N=auto", none="auto")]
    request_timeout: Annotated[Limit, _option("TIME=1h")]
    seed: Annotated[
        Annotated[int, Meta(ge=0, lt=10**18)] | None,
        _option("N=random", wrong="neither a whole number nor `random`", none="random"),
    ]
    speculation: Annotated[Literal["auto", "off"], _option("WHAT=auto")]
    share_prefix: Annotated[SharePrefix, _option("WHAT=auto")]
    ranks: Annotated[Ranks, _option("N=1")]
    join: Annotated[Hosts, _option("HOSTS", wrong="no host; write 192.168.1.6, or 192.168.1.6:8078")]
    link: Annotated[LinkKind, _option("LINK=ring")]
    metal_kernels: Annotated[Literal["auto", "off"], _option("WHAT=auto")]
    max_thinking_tokens: Annotated[Thought | None, _option("N=none", none="none")]
    loop_stop: Annotated[Literal["auto", "off"], _option("WHAT=auto")]
    kv_reserve: Annotated[Reserve | None, _option("N=auto", none="auto")]
    hoist_system: Annotated[Hoist, _option("WHEN=auto")]
    no_healing: Annotated[bool, _option("")]
    # As many as Anthropic takes with a million tokens. Pictures are read one by one (engine/vision/media.py),
    # and what waits for the tower is bounded in bytes: a model's context is full before memory is.
    max_images: Annotated[Images, _option("N=600")]
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _option("LEVEL=info")]
    log_format: Annotated[Literal["text", "json"], _option("FORMAT=text")]
    log_file: Annotated[Path | None, _option("FILE", none="")]
    log_file_size: Annotated[FileBytes, _option("SIZE=10MB")]
    log_file_count: Annotated[int, Meta(ge=1, le=100), _option("N=5")]
    log_cache_misses: Annotated[bool, _option("")]
    cors_origin: Annotated[
        tuple[Annotated[str, Meta(pattern=_ORIGIN)], ...],
        _option(
            "ORIGINS",
            wrong="no origin; one is written https://chat.example, with no path, or *",
        ),
    ]
    allowed_host: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+\Z")], ...],
        _option("NAMES", wrong="no name of a host; give it without a port"),
    ]
    config: Path | None = None
    models: dict[str, ModelSettings] = {}
    defaults: ModelSettings = ModelSettings()
    overridden: tuple[str, ...] = ()
    sources: dict[str, str] = {}

    def __repr__(self) -> str:
        """Format every value but the key: settings end up in logs and bug reports."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "sources"}
        shown["api_key"] = "***" if self.api_key else ""
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def has_ssd_cache(settings: Settings) -> bool:
    return settings.cold_cache_bytes != 0 and not settings.no_cache


def ssd_cap(settings: Settings, held: int) -> int:
    """Return the most bytes that the SSD cache may take, where it holds `held` now."""
    if settings.cold_cache_bytes is not None:
        return settings.cold_cache_bytes
    return default_cap(disk_room(settings.paged_ssd_cache_dir), held)


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as people write it: `name` in snake case, its default as text. `field`: of `Settings`."""

    name: str
    field: str
    type: Any
    help: str
    metavar: str
    default: str
    wrong: str
    none: str | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return not self.metavar

    @property
    def is_path(self) -> bool:
        return self.metavar in ("DIR", "FILE")


def _options() -> Iterable[Option]:
    for each in msgspec.structs.fields(Settings):
        for meta in getattr(each.type, "__metadata__", ()):
            if meta.extra:
                yield Option(
                    name=each.encode_name,
                    field=each.name,
                    type=each.type,
                    help=_HELP[each.encode_name],
                    **{
                        **meta.extra,
                        "wrong": meta.extra["wrong"] or _expected(each.type, meta.extra["none"]),
                    },
                )


def _expected(kind: Any, none: str | None) -> str:
    wrong = expected(kind)
    return f"neither {none} nor a{wrong[2:]}" if none and wrong.startswith("no whole") else wrong


# Read in this order: a value may depend on those before it.
OPTIONS = tuple(_options())
BY_NAME = {option.name: option for option in OPTIONS}


def full_name(field: str, *table: str) -> str:
    """Return the name of a setting in another table of the file, as TOML has it:
    `models."org/name".max-tokens`.
    """
    models = [msgspec.json.encode(name).decode() for name in table[1:]]
    return ".".join([*table[:1], *models, field.replace("_", "-")])


FOR_JOIN = (
    *("base_path", "model_dir", "no_hf_cache", "paged_ssd_cache_dir", "paged_ssd_cache_max_size"),
    *("ssd_cache_daily_write_budget", "ssd_cache_ttl", "if_cache_busy", "hot_cache_max_size"),
    *("block_size", "kv_bits", "kv_group_size", "cpu_blas"),
    *("log_level", "log_format", "log_file", "log_file_size", "log_file_count"),
)
"""Options that `omlxd join` takes, beside --listen and --model."""
_GROUPS = {
    "model": "which models are served",
    "memory_limit": "memory and machine",
    "host": "address, keys and browsers",
    "base_path": "the cache on SSD and in RAM",
    "block_size": "how a model is loaded",
    "max_concurrent_requests": "requests",
    "log_level": "log",
    "stall_timeout": "memory and machine",
    "no_hf_cache": "which models are served",
    "cors_origin": "address, keys and browsers",
}
"""First option of a group of `serve --help` → its title."""


def groups() -> dict[str, list[Option]]:
    """Map title → options, for `serve --help`."""
    result: dict[str, list[Option]] = {}
    title = ""
    for option in OPTIONS:
        title = _GROUPS.get(option.name, title)
        result.setdefault(title, []).append(option)
    return result


def add_grouped_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all options, in groups with titles."""
    _add_flags(parser, ())
    for title, options in groups().items():
        _add_flags(parser.add_argument_group(title), options, with_config=False)


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the flags of the options `names`, or of all. Every value stays text; reading.py converts it."""
    _add_flags(parser, [BY_NAME[name] for name in names] or OPTIONS)


def add_join_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `omlxd join`."""
    parser.add_argument(
        "--listen",
        dest="join_listen",
        metavar="ADDR",
        help="address of this machine, as 192.168.1.6 or 192.168.1.6:8078 (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder of the model, whatever the lead calls it; default: the one of the lead's name",
    )
    add_flags(parser, *FOR_JOIN)


def _add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    options: Iterable[Option],
    *,
    with_config: bool = True,
) -> None:
    if with_config:
        parser.add_argument(
            "--config", metavar="FILE", help="TOML file of settings; default: omlxd.toml under --base-path"
        )
    for option in options:
        if option.is_switch:
            parser.add_argument(
                option.flag, dest=option.name, action="store_const", const="true", help=option.help
            )
            continue
        shown = f" (default: {option.default})" if option.default else ""
        parser.add_argument(option.flag, dest=option.name, metavar=option.metavar, help=option.help + shown)
