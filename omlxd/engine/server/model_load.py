"""Loads the model that a `wire.Load` names and what guesses for it, and tells the front what was loaded.

On the engine thread.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from ... import wire
from ...common.files import read_small
from ...errors import ModelError
from ...kv.files.paths import KERNELS_NAME, namespace_dir
from ...kv.hashing import BlockHash
from ...models.config.drafters import drafter_kind
from ...models.footprint import Footprint, read_config
from ...wire.plan import Ready
from .. import mlx_adapter
from ..mlx_adapter import Group, LoadedModel, Quantisation
from ..process import blas
from ..prompt.pipeline import PromptPipeline
from ..speculate.controller import Speculation
from ..speculate.draft_model import DraftModel, check_tokenizer
from ..speculate.drafter import DrafterModel
from ..speculate.times import PassTimes

log = logging.getLogger(__name__)

KERNELS_OFF = "Metal kernels off (--metal-kernels)"


def load_model(load: wire.Load, group: Group | None = None) -> LoadedModel:
    """`group`: of ranks that load it together. Raises ModelError."""
    backend, cache = mlx_adapter.backend(), load.cache
    if _has_kernels_off(load):
        mlx_adapter.use_mlx_alone()
    attention = mlx_adapter.attention_backend()
    attention.use_kernel_folder(Path(cache.cold_dir or tempfile.gettempdir()) / KERNELS_NAME)
    if load.speculate and load.draft_path and not is_drafter(Path(load.draft_path)):
        check_tokenizer(Path(load.draft_path), Path(load.model_path), load.model_id)
    shares = load.share_prefix == "on" or (load.share_prefix == "auto" and attention.shares_prefixes)
    loaded = mlx_adapter.load(
        Path(load.model_path),
        Quantisation(cache.kv_bits, cache.kv_group_size) if cache.kv_bits else None,
        load.budget.float32 and backend == "cpu",
        load.adapter,
        load.weights_mmap,
        mlx_adapter.SEGMENT if shares and mlx_adapter.SEGMENT % cache.block_size == 0 else 0,
        load.share_prefix == "auto",
        group,
    )
    if why := _why_not_shared(load, loaded, shares):
        level = logging.WARNING if load.share_prefix == "on" else logging.INFO
        log.log(
            level, "--share-prefix %s: %s: prefixes are not shared: %s", load.share_prefix, load.model_id, why
        )
    return loaded


def _has_kernels_off(load: wire.Load) -> bool:
    return mlx_adapter.backend() == "metal" and load.metal_kernels == "off"


def _why_not_shared(load: wire.Load, loaded: LoadedModel, shares: bool) -> str:
    if not shares and load.share_prefix == "auto" and _has_kernels_off(load):
        return f"{KERNELS_OFF}, by which they are shared"
    if not shares or loaded.segments.tokens:
        return ""
    why = mlx_adapter.attention_backend().why_not_shared() if load.share_prefix == "auto" else ""
    return why or "what this model keeps is not held in segments"


def load_speculation(load: wire.Load, loaded: LoadedModel) -> Speculation | None:
    """With a draft model, a drafter, or the model's own heads; their weights count as the model's.

    Raises ModelError.
    """
    if not load.speculate:
        return None
    times = PassTimes(first_tells=mlx_adapter.backend() == "cpu")
    speculation = Speculation(repeatable=load.seed is not None, times=times)
    if load.draft_path and is_drafter(Path(load.draft_path)):
        drafter = load_drafter(Path(load.draft_path), loaded, load.model_id)
        return _with_drafter(speculation, DrafterModel(drafter), loaded)
    if load.draft_path:
        folder, float32 = Path(load.draft_path), load.budget.float32 and mlx_adapter.backend() == "cpu"
        draft = DraftModel(mlx_adapter.load(folder, None, float32), folder.name, loaded, load.model_id)
        loaded.weight_bytes += draft.loaded.weight_bytes
        speculation.draft_model = draft
        return speculation
    try:
        heads = mlx_adapter.load_mtp(Path(load.model_path), loaded)
    except Exception as error:
        mlx_adapter.end_if_fault(error)
        log.warning("%s: its MTP heads are not used: %s", load.model_id, error)
        return speculation
    if heads is not None:
        log.info("%s: its MTP heads guess for it", load.model_id)
        _with_drafter(speculation, DrafterModel(heads, is_named=False), loaded)
    return speculation


def is_drafter(folder: Path) -> bool:
    """Whether a folder holds a drafter, and no model of its own."""
    return drafter_kind(read_config(folder)) is not None


def load_drafter(folder: Path, loaded: LoadedModel, model_id: str) -> mlx_adapter.Drafter:
    """Raises ModelError where it doesn't guess for this model."""
    try:
        return mlx_adapter.load_drafter(folder, loaded)
    except Exception as error:
        mlx_adapter.end_if_fault(error)
        why = shorten(str(error), 300, placeholder=" …")
        nothing = isinstance(error, mlx_adapter.NothingGuessesError)
        mend = "remove draft-model" if nothing else "name a drafter that was made for this model"
        raise ModelError(f"draft-model: {folder.name} can't guess for {model_id}: {why}; {mend}") from error


def _with_drafter(speculation: Speculation, model: DrafterModel, loaded: LoadedModel) -> Speculation:
    loaded.weight_bytes += model.drafter.weight_bytes
    speculation.draft_model = model
    return speculation


def model_info(
    load: wire.Load,
    loaded: LoadedModel,
    namespace: BlockHash,
    prints: Footprint,
    prompts: PromptPipeline,
    images: bool,
    others: Sequence[Ready] = (),
) -> wire.ModelInfo:
    """`images`: whether the model takes them. `others`: ranks that hold the rest of it."""
    reason = loaded.kv_reuse if load.cache.enabled else "--no-cache"
    if reason:
        log.warning("%s: prefixes are not reused: %s", load.model_id, reason)
    return wire.ModelInfo(
        model_id=load.model_id,
        model_type=loaded.model_type,
        context_length=loaded.context_length,
        vocab_size=loaded.vocab_size,
        weight_bytes=loaded.weight_bytes + sum(other.weight_bytes for other in others),
        kv_bytes_per_token=(loaded.layout.nbytes(1) if loaded.layout else 0)
        + sum(other.kv_bytes_per_token for other in others),
        kv_reuse=reason,
        namespace=namespace_dir(namespace) if loaded.layout else "",
        block_size=load.cache.block_size,
        backend=mlx_adapter.backend(),
        speed=cpu_speed(loaded.float32, load.budget.slow)
        if mlx_adapter.backend() == "cpu"
        else KERNELS_OFF * _has_kernels_off(load),
        supports_tools=bool(loaded.tokenizer.has_tool_calling),
        supports_thinking=bool(loaded.tokenizer.has_thinking),
        note=_note(Path(load.model_path)),
        images=images,
        blind=loaded.blind or "",
        token_bytes=prompts.tokens.bound.token_bytes,
        shares=tuple(other.namespace for other in others),
        layers=prints.layers,
        hidden_size=prints.hidden_size,
        kernels=mlx_adapter.attention_backend().kernels(),
    )


def cpu_speed(float32: bool, slow: str) -> str:
    """What computes matrix products on a CPU, and how fast; `slow` as wire.Budget has it."""
    weights = ", weights made float32" if float32 else f", weights as stored: {slow}" if slow else ""
    return f"{blas.name() or 'reference BLAS'}, {blas.gflops():.0f} GFLOP/s{weights}"


def _note(model: Path) -> str:
    """The demo model's own warning."""
    try:
        return str(json.loads(read_small(model / "omlxd_demo.json")).get("note", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
