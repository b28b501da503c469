"""Checks names, draft models and adapters of the settings, failed models, and how others decode."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator

from ...config import Settings
from ...errors import ConfigError
from ...models.catalog import Catalog, files_state
from ..daemon.client import DaemonError, daemon_of
from ..daemon.owner_api import InstalledStatuses, ModelStatus, RankStatus
from ..watch.status import link_text
from .finding import Finding, bad, ok, warn

_SECONDS = 3.0
_NO_MODEL = "`omlxd models pull ORG/NAME` downloads a real model; `omlxd models list` says what is here."
LOG = "its standard error, the file of --log-file, or `omlxd service logs`"


def check_names(settings: Settings) -> list[Finding]:
    """Check that each `[models."NAME"]` of the file is a model here, or one of the daemon on the port."""
    mend = "Correct the name to one of `omlxd models list`, or download the model."
    catalog, served = Catalog(settings), []
    if catalog.unknown_names():
        with contextlib.suppress(ConfigError, DaemonError):
            answer = daemon_of(settings).fetch("/omlxd/models", InstalledStatuses, seconds=_SECONDS)
            served = [model.id for model in answer.models]
    return [warn("settings", text.rstrip("."), mend) for text in catalog.unknown_names(served)]


def check_parts(settings: Settings) -> list[Finding]:
    """Check that each `draft-model` and `adapter` exists, as far as is known without the network."""
    mend = "Correct the settings file, which SIGHUP reads again; is --model-dir the daemon's?"
    catalog, found = Catalog(settings), list[Finding]()
    parts = [*catalog.parts()]
    troubles = [each.trouble for each in _served(settings) if each.state == "failed"] if parts else []
    for setting, model, value, why in parts:
        check, told = setting.replace("-", " "), f"{setting} of {model}: {value}"
        if why:
            found.append(bad(check, f"{told}: {why}", mend))
        elif setting == "draft-model" and not files_state(catalog.spec_of(value), settings.base_path):
            later = f"It is downloaded when {model} is loaded; `omlxd models pull {value}` does it now."
            found.append(warn(check, f"{told}: it is not on this machine yet", later))
        elif not any(setting in each and value.rpartition("/")[2] in each for each in troubles):
            found.append(ok(check, told))  # Else what the daemon says of the model tells it.
    return found


def _served(settings: Settings) -> list[ModelStatus]:
    """Return the models of the daemon on the port; none without one."""
    with contextlib.suppress(ConfigError, DaemonError):  # As `--port 0`, by which no daemon is found.
        return daemon_of(settings).status(_SECONDS).models
    return []


def check_models(settings: Settings) -> list[Finding]:
    """Check models by the daemon on the port; nothing without one."""
    return [*_of(_served(settings), settings)]


def _of(models: list[ModelStatus], settings: Settings) -> Iterator[Finding]:
    """Check each model; an adapter decodes in its base's engine, but with draft tokens of its own."""
    by_id = {model.id: model for model in models}
    for model in models:
        if model.state == "failed":
            load = f"`omlxd models load {model.id}`"
            mend = f"Mend what it says, then {load}." if load not in model.trouble else "Mend what it says."
            yield bad("model", model.trouble or f"{model.id} can't be loaded", mend)
        elif model.state == "ready" and model.backend:
            base = by_id.get(model.shares, model)
            own = settings.models.get(base.id)
            draft = own.draft_model if own is not None else None
            values = {**base.values, **model.values}
            how = [*_decoding(values, draft or "", model.backend)]
            if model.backend == "metal" and model.speed:
                how.append(model.speed)
            yield ok("model", f"{model.id} decodes {', '.join(how)}")
            yield from map(_of_rank, model.ranks)
            if link := link_text(model):
                yield ok("rank", f"{model.id}: {link}")
            yield from _kernels(model)
            if model.note:
                yield warn("model", f"{model.id}: {model.note.rstrip('.')}", _NO_MODEL)


def _of_rank(rank: RankStatus) -> Finding:
    if not rank.disk:
        return ok("rank", f"{rank}")
    return warn(
        "rank", f"{rank}", "Make room on its disk, or see the log: until then no rank stores anything."
    )


def _kernels(model: ModelStatus) -> Iterator[Finding]:
    """Name the kernels that its load judged, and why some are not used."""
    if not model.kernels or model.shares:
        return
    used = [f"{each.name} ({each.shape})" for each in model.kernels if not each.why]
    told = f"{model.id} computes with {', '.join(used) or 'no Metal kernel'}"
    yield ok("kernels", f"{told} (each verdict stands in the daemon's log: {LOG})")
    for each in model.kernels:
        text = f"{model.id} does without {each.name}{f' ({each.shape})' * bool(each.shape)}: {each.why}"
        if each.note:
            mend = f"Run `rm {shlex.quote(each.note)}` and `omlxd models unload {model.id}`: its next load "
            mend += "judges it again. If that ends the engine once more, leave it, and please report it."
            yield warn("kernels", text.partition("; remove ")[0], mend)
        elif each.why:
            yield ok("kernels", text)


def _decoding(values: dict[str, float], draft: str, backend: str) -> Iterator[str]:
    """Report a model's decoding, as chosen when it was loaded, and its draft tokens."""
    if ranks := values.get("ranks"):
        yield f"on {ranks:.0f} ranks"
    own = values.get("attention_reads_own_rows")
    by_kernel = backend.startswith("cuda") or values.get("metal_attention_kernel")
    ours = "by omlxd's attention kernel" if by_kernel else "with attention row by row"
    ratio = None if by_kernel else values.get("attention_rows_alone_ratio")
    measured = "in {:.2f} of the time of MLX's own" if own else "row by row takes {:.2f} of its time"
    why = "; rows join without copies" if own and (ratio or 0) > 1 else ""
    choice = ours if own else "by MLX's own attention"
    if not by_kernel and (long := values.get("attention_long_rows_alone_ratio")) is not None:
        choice, why = f"{choice} where that is faster" if own else choice, ""
        measured += f" at 512 tokens a row, {long:.2f} at 8,192"
    yield choice if ratio is None else f"{choice} ({measured.format(ratio)}, as measured at load{why})"
    if (used := values.get("metal_kernels_used")) is not None:
        all_of_them = used + values.get("metal_kernels_refused", 0)
        yield f"with {used:.0f} of {all_of_them:.0f} Metal kernels" if all_of_them else "with no Metal kernel"
    tokens = int(values.get("kv_shared_segment_tokens", 0))
    yield f"with prefixes shared in segments of {tokens:,} tokens" if tokens else "with prefixes not shared"
    if "spec_decode_draft_model" not in values:  # Counters of an earlier process stay.
        yield "without guesses"
        return
    yield "with guesses"
    drafted = values.get("spec_decode_num_draft_tokens_total", 0)
    if values["spec_decode_draft_model"]:
        yield f"also of its draft model {draft}".rstrip()
    if drafted:
        held = int(values.get("spec_decode_num_accepted_tokens_total", 0))
        yield f"of which {held:,} of {int(drafted):,} held"
        if values.get("spec_decode_credit_steps", 1.0) <= 0:
            yield "few of which are made now, since they took longer than they saved"
    else:
        yield "none of which was made yet"
