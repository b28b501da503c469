"""Make the sequence of a checked request: what the engine thread computes an answer from."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from ... import wire
from ...chat import GenerateRequest
from ...kv.hashing import chain_root, hash_blocks
from .. import mlx_adapter
from ..mlx_adapter import Adapter, Cache, LoadedModel
from ..output.sink import RequestSink
from ..sequence.sampling import RowSampling, SamplingDefaults
from ..sequence.sequence import Prompt, SamplerRow, Sequence, SequenceKV, SequenceStats
from .adapters import Served
from .request import CheckedRequest


class SequenceMaker:
    """Makes the sequences of one model and its adapters. Any thread."""

    def __init__(self, load: wire.Load, loaded: LoadedModel):
        self._load, self._loaded = load, loaded
        self._defaults = SamplingDefaults.of_model(Path(load.model_path))
        self._timeout_s = load.prompts.request_timeout_s or math.inf

    def make(
        self,
        id: int,
        request: GenerateRequest,
        checked: CheckedRequest,
        served: Served,
        sink: RequestSink,
        *,
        has_store: bool,
    ) -> Sequence:
        """Return the sequence of request `id`. `has_store`: blocks are stored, so its prompt is hashed."""
        tokens, images, block = checked.tokens, checked.images, self._load.cache.block_size
        root = chain_root(served.namespace, request.cache_salt)
        extra_keys = images.extra_keys(block) if images is not None else {}
        sequence = Sequence(
            id=id,
            tokens=tokens,
            prompt=Prompt(
                len(tokens),
                root,
                images,
                extra_keys,
                labels=checked.labels,
                prediction=checked.prediction,
                keys_file=request.keys_file,
                query=request.query,
                values=request.values,
                write_kv=self._writes_kv(request, tokens, served.adapter),
                import_file=checked.file,
                client=request.client,
                session=request.session,
                priority=request.priority,
            ),
            sampling=self._sampler(request, checked),
            kv=SequenceKV(hash_blocks(root, tokens, block, extra_keys) if has_store else []),
            stats=SequenceStats(asked=request.asked),
            adapter=served.adapter,
            sink=sink,
            name=request.name,
            again=request.again,
            wait_logged=request.again,  # Another answer of its request has begun.
            carried=bool(request.import_file or request.export_to),
        )
        sequence.deadline = sequence.stats.received + min(self._timeout_s, request.timeout_s or math.inf)
        return sequence

    def _writes_kv(
        self, request: GenerateRequest, tokens: list[int], adapter: Adapter | None
    ) -> Callable[[Cache], None] | None:
        """Writes a cache that holds `tokens` as the request wants it; None: it wants no file."""
        if not request.export_to:
            return None
        source = {
            "model": self._load.model_path,
            "adapter": adapter.folder if adapter else self._load.adapter,
        }
        file = Path(request.export_to)
        return lambda cache: mlx_adapter.write_prompt_cache(file, self._loaded, cache, [*tokens], source)

    def _sampler(self, request: GenerateRequest, checked: CheckedRequest) -> SamplerRow:
        params = RowSampling.of(request.sampling, self._defaults, checked.eos)
        return SamplerRow(
            params,
            prompt=checked.tokens if params.penalised else (),
            constraint=checked.constraint,
            top_logprobs=request.sampling.logprobs,
            max_new=checked.max_new,
            reserve=self._load.kv_reserve,
            eos=checked.eos,
        )
