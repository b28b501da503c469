"""Says before a download what fits this machine, by arithmetic: of a model on the hub, or of usual sizes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...common.units import counted, disk_room, human
from ...config import ModelSettings, Settings
from ...errors import AGENT_CONTEXT, ModelError
from ...models.catalog import hub_cache_dir
from ...models.config.json_files import BrokenJSON, read_json
from ...models.fetch.offer import DOWNLOAD_BYTES
from ...models.fetch.quantised import bits_of, load_of, parameters_of, weights_in
from ...models.footprint import read_config
from ...models.resolve import DEFAULT_ID, default_folder, look_up_on_hub
from ..watch.status import table
from .machine import Machine, this_machine

BITS = (8, 6, 5, 4, 3)
"""Bits that are usual, fewer of them less exact; 3 are for what fits in no more."""
USABLE = 10.0
"""Tokens a second that one would wait for."""
ESTIMATE = "tokens a second are an estimate, at most: bandwidth over the bytes that a token reads"
_MODEL = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960, "vocab_size": 151936}


class Size(msgspec.Struct, frozen=True):
    """A usual size: its name, a model of that shape, its parameters and the config that they are of."""

    name: str
    like: str
    parameters: int
    config: dict[str, Any]


def _size(
    name: str, like: str, billions: float, layers: int, hidden: int, heads: int, inner: int, **more: Any
):
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    config = {**_MODEL, **shape, "intermediate_size": inner, "tie_word_embeddings": False, **more}
    return Size(name, like, int(billions * 1e9), config)


_LLAMA = {"max_position_embeddings": 131072, "vocab_size": 128256}
_A3B = {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
SIZES = (
    _size("1B", "Llama 3.2", 1.24, 16, 2048, 32, 8192, **_LLAMA, head_dim=64, tie_word_embeddings=True),
    _size("4B", "Qwen3", 4.02, 36, 2560, 32, 9728, tie_word_embeddings=True),
    _size("8B", "Qwen3", 8.19, 36, 4096, 32, 12288),
    _size("14B", "Qwen3", 14.77, 40, 5120, 40, 17408),
    _size("30B-A3B", "Qwen3", 30.53, 48, 2048, 32, 6144, **_A3B),
    _size("32B", "Qwen3", 32.76, 64, 5120, 64, 25600),
    _size("70B", "Llama 3.3", 70.55, 80, 8192, 64, 28672, **_LLAMA),
)
DEFAULT = _size(
    *("SmolLM2", "SmolLM2", 0.135, 30, 576, 9, 1536),
    **{"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152},
    **{"max_position_embeddings": 8192, "tie_word_embeddings": True},
)
"""The default model."""


class Fit(msgspec.Struct, frozen=True):
    """How a model in so many bits fits this machine. Bytes; tokens.

    weights       of the files; `memory`: of the weights once they are loaded
    context       tokens that one conversation may have; 0: it does not fit
    crowded       it takes more than is free now, so that others have to close before
    enough        that is what an agent needs, or all that the model takes
    read          bytes of weights that a token reads
    tokens_per_s  estimated, with a short context; `tokens_per_s_long`: with `AGENT_CONTEXT` tokens of it
    """

    bits: int
    weights: int
    memory: int
    load_bytes: int
    kv_bytes_per_token: int
    context_length: int | None
    context: int
    enough: bool
    crowded: bool
    read: int
    tokens_per_s: float | None
    tokens_per_s_long: float | None = None


def fit(
    config: dict[str, Any], weights: int, parameters: int, bits: int, on: Machine, as_stored: bool
) -> Fit:
    """Estimate how a model of that config fits machine `on`. `as_stored`: what --cpu-weights says."""
    load = load_of(config, weights, parameters, on.backend, 0 if as_stored else on.room)
    prints, read = load.prints, max(1, load.read)
    context = prints.context_in(on.room, on.backend)
    rate = on.bandwidth
    long = read + prints.sequence(AGENT_CONTEXT)
    return Fit(
        bits=bits,
        weights=weights,
        memory=prints.weights,
        load_bytes=(load_bytes := prints.loading(on.backend)),
        kv_bytes_per_token=prints.kv_per_token,
        context_length=prints.context_length,
        context=context,
        enough=context >= min(AGENT_CONTEXT, prints.context_length or AGENT_CONTEXT),
        crowded=on.is_short_of(load_bytes),
        read=read,
        tokens_per_s=rate and rate / read,
        tokens_per_s_long=rate / long if rate and context >= AGENT_CONTEXT else None,
    )


def in_bits(config: dict[str, Any], parameters: int, bits: int, on: Machine, as_stored: bool) -> Fit:
    """Estimate how the model fits once it is quantised to so many bits."""
    own = {**config, "quantization": {"bits": bits, "group_size": 64}}
    return fit(own, weights_in(parameters, bits), parameters, bits, on, as_stored)


def best(fits: Sequence[Fit]) -> Fit | None:
    """Return the one with most bits that leaves enough context, else with most context; None: none fits."""
    fine = [each for each in fits if each.enough]
    if fine:
        return max(fine, key=lambda each: each.bits)
    return max((each for each in fits if each.context), key=lambda each: each.context, default=None)


# --------------------------------------------------------------------------- usual sizes


class SizeFit(msgspec.Struct, frozen=True):
    """A row of the table: a usual size in so many bits."""

    size: str
    like: str
    parameters: int
    fit: Fit


class WhatFits(msgspec.Struct, frozen=True):
    """What fits this machine.

    choice  the largest that leaves an agent's context and is not slow
    now     likewise, of those that fit beside what runs now
    """

    machine: Machine
    sizes: list[SizeFit]
    choice: SizeFit | None
    now: SizeFit | None


def what_fits(settings: Settings) -> WhatFits:
    """Compute the table of usual sizes, without a network."""
    on, as_stored = this_machine(settings), settings.cpu_weights == "as-stored"
    rows = [
        SizeFit(
            size.name, size.like, size.parameters, in_bits(size.config, size.parameters, bits, on, as_stored)
        )
        for size in SIZES
        for bits in (4, 8)
    ]
    return WhatFits(on, rows, _choice(rows), _choice([row for row in rows if not row.fit.crowded]))


def _choice(rows: Sequence[SizeFit]) -> SizeFit | None:
    fitting = [row for row in rows if row.fit.context]
    fine = [row for row in fitting if row.fit.enough] or fitting
    usable = [row for row in fine if (row.fit.tokens_per_s or USABLE) >= USABLE]
    if not usable:  # The fastest, where all are slow.
        return max(fine, key=lambda row: row.fit.tokens_per_s or 0.0, default=None)
    return max(usable, key=lambda row: (row.parameters, row.fit.bits))


_HEAD = ("SIZE", "LIKE", "BITS", "IN MEMORY", "KV A TOKEN", "FITS", "CONTEXT", "TOKENS/S")


def as_size_table(what: WhatFits) -> str:
    """Format the machine, a line a size, the choice, and how to go on."""
    rows = [(row.size, row.like, *_cells(row.fit)) for row in what.sizes]
    lines = [what.machine.headline(), "", *table([_HEAD, *rows]), ""]
    if what.choice is None:
        lines.append("none of these fits; `omlxd models pull SmolLM2-135M-Instruct` downloads a small model")
    else:
        why = f"leaves {what.choice.fit.context:,} tokens of context"
        closed = ", once others have closed" if what.choice.fit.crowded else ""
        lines.append(f"to choose: {what.choice.size} in {what.choice.fit.bits} bits, which {why}{closed}")
        if closed:
            now = what.now and f"{what.now.size} in {what.now.fit.bits} bits"
            lines.append(f"beside what runs now: {now or 'none of these'}")
    lines += [
        f"context is what one conversation may have; {ESTIMATE}",
        "",
        "omlxd models show ORG/NAME   says the same of a model on the hub, before a download",
        "omlxd models pull ORG/NAME   downloads it, for example mlx-community/Qwen3-8B-4bit",
    ]
    return "\n".join(lines)


def _cells(one: Fit) -> tuple[str, ...]:
    return (
        str(one.bits),
        human(one.memory),
        human(one.kv_bytes_per_token),
        ("yes" if one.enough else "short" if one.context else "no") + _closing(one),
        f"{one.context:,}" if one.context else "-",
        _rate(one.tokens_per_s) if one.context else "-",
    )


def _closing(one: Fit) -> str:
    return ", if others close" if one.context and one.crowded else ""


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


# --------------------------------------------------------------------------- a model on the hub


class HubModel(msgspec.Struct, frozen=True):
    """A model that is not on this machine.

    place    where it is
    fit      as it is there; `choices`: in fewer bits, by arithmetic
    choice   bits to choose: its own, or those of one of `choices`; None: it fits in none
    copies   ids of quantised copies that the hub lists
    folder   where a download goes; `disk`: bytes that its disk has room for
    """

    id: str
    revision: str
    download_bytes: int
    files: int
    disk: int
    parameters: int
    fit: Fit
    choices: list[Fit]
    choice: int | None
    copies: list[str]
    machine: Machine
    folder: str
    place: str = "on the hub"


class _Index(msgspec.Struct):
    metadata: dict[str, Any] = {}


def look_up(repo: str, settings: Settings) -> HubModel:
    """Ask the hub, or for the default model nobody, and this machine about `repo`. Raises ModelError."""
    if repo == DEFAULT_ID:
        return _default_model(settings)
    with tempfile.TemporaryDirectory(prefix="omlxd-") as name:
        folder = Path(name)
        hub = asyncio.run(look_up_on_hub(repo, folder))
        config, told = read_config(folder), _metadata(folder)
    sizes = {name: size or 0 for name, size in hub.sizes.items()}
    weights = sum(size for name, size in sizes.items() if name.endswith(".safetensors") and "/" not in name)
    weights = weights or _number(told, "total_size")
    if not weights or "model_type" not in config:
        lacks = "weights as *.safetensors" if not weights else "config.json that names its model_type"
        raise ModelError(f"{repo} can't be served: it has no {lacks}; look for an MLX copy of it on the hub.")
    bits = bits_of(config)
    parameters = _number(told, "total_parameters") or parameters_of(config, weights)
    own = settings.models.get(repo, ModelSettings())
    on, as_stored = this_machine(settings), (own.cpu_weights or settings.cpu_weights) == "as-stored"
    here = fit(config, weights, parameters, bits, on, as_stored)
    choices = [in_bits(config, parameters, fewer, on, as_stored) for fewer in BITS if fewer < bits]
    chosen = best([here, *choices] if bits <= BITS[0] else choices) or (here if here.context else None)
    return HubModel(
        id=repo,
        revision=hub.revision,
        download_bytes=sum(sizes.values()) or weights,
        files=len(sizes),
        disk=max(0, disk_room(hub_cache_dir())),
        parameters=parameters,
        fit=here,
        choices=choices,
        choice=chosen.bits if chosen else None,
        copies=hub.copies,
        machine=on,
        folder=str(hub_cache_dir()),
    )


def _default_model(settings: Settings) -> HubModel:
    on, folder = this_machine(settings), default_folder(settings.base_path)
    disk = max(0, disk_room(folder))
    config = {**DEFAULT.config, "quantization": {"bits": 4, "group_size": 32}}
    here = fit(config, DOWNLOAD_BYTES, DEFAULT.parameters, 4, on, settings.cpu_weights == "as-stored")
    return HubModel(
        id=DEFAULT_ID,
        revision="",
        download_bytes=DOWNLOAD_BYTES,
        files=1,
        disk=disk,
        parameters=DEFAULT.parameters,
        fit=here,
        choices=[],
        choice=here.bits if here.context else None,
        copies=[],
        machine=on,
        folder=str(folder),
        place="in the package index, from which pip takes it",
    )


def _metadata(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / "model.safetensors.index.json", _Index).metadata
    except (OSError, BrokenJSON):
        return {}


def _number(told: dict[str, Any], name: str) -> int:
    value = told.get(name)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else 0


def hub_page(model: HubModel) -> tuple[str, dict[str, str], list[str]]:
    """Return a title, facts by name, and the lines behind them."""
    here = model.fit
    billions = f"{model.parameters / 1e9:.3g} billion parameters"
    loaded = f", {human(here.memory)} in memory" if here.memory != here.weights else ""
    takes = f"{human(model.download_bytes)} in {counted(model.files, 'file')}"
    if model.download_bytes > model.disk:
        takes += f"; its disk has room for {human(model.disk)} alone: {model.folder}"
    facts = {
        "state": f"{model.place}; not downloaded",
        "download": takes,
        "weights": f"{human(here.weights)}: {billions} in {here.bits} bits{loaded}",
        "to load it": f"about {human(here.load_bytes)}",
        "KV": f"{human(here.kv_bytes_per_token)} a token" if here.kv_bytes_per_token else "-",
        "context": f"{here.context_length:,} tokens" if here.context_length else "-",
        "fits": _fits(here, model.machine),
        "speed": _speed(here, model.machine),
        "choose": _advice(model),
    }
    lines: list[str] = []
    if model.choices:
        head = ("  BITS", *_HEAD[3:])
        rows = [("  " + bits, *rest) for bits, *rest in map(_cells, model.choices)]
        lines += ["", "  in fewer bits, by arithmetic:", *table([head, *rows])]
    if model.copies:
        lines += ["", "  copies that the hub lists: " + ", ".join(model.copies)]
    return model.id, facts, [*lines, "", f"  {model.machine.headline()}"]


def _fits(one: Fit, on: Machine) -> str:
    if not one.context:
        return f"no: models may take {human(on.room)} here ({on.limit})"
    short = "" if one.enough else f"; an agent needs {AGENT_CONTEXT:,}"
    return f"yes{_closing(one)}, with {one.context:,} tokens of context{short}"


def _speed(one: Fit, on: Machine) -> str:
    if on.bandwidth is None:
        return f"- ({on.source})"
    if not one.context:
        return "-"
    long = (
        f", {_rate(one.tokens_per_s_long)} behind {AGENT_CONTEXT:,} tokens" if one.tokens_per_s_long else ""
    )
    how = f"an estimate: {on.bandwidth / 1e9:,.3g} GB/s over {human(one.read)} that a token reads"
    return f"at most about {_rate(one.tokens_per_s)} tokens a second{long} ({how})"


def _advice(model: HubModel) -> str:
    if model.choice is None:
        return (
            "a smaller model: this one fits in no usual number of bits; `omlxd models pull` lists what fits"
        )
    if model.choice == model.fit.bits:
        return f"this one: `omlxd models pull {model.id}`"
    chosen = next(each for each in model.choices if each.bits == model.choice)
    named = [copy for copy in model.copies if copy.lower().endswith(f"-{chosen.bits}bit")]
    get = f": `omlxd models pull {named[0]}`" if named else "; look for such a copy on the hub"
    with_context = f"with {chosen.context:,} tokens of context{_closing(chosen)}"
    return f"{chosen.bits} bits, about {human(chosen.weights)} {with_context}{get}"
