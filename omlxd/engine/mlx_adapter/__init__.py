"""The one package that touches mlx-lm's and mlx-vlm's (model/vision.py) internals. Pinned to mlx-lm 0.32.2.

What it relies on, each assumption tested in tests/engine/mlx_adapter/test_mlx_adapter.py:
- `KVCache` keeps `keys` and `values` of shape (1, heads, capacity, dim) and `offset`; it grows by
  `step` tokens, an attribute that only growing reads (`GrowingStep` of cache/batch.py is put in its place);
- a cache class that can be batched has `merge`; its batch class has `extend`, `filter`, `_idx`;
- a batch cache is padded on the left, so row r of length n lies in columns `_idx - n` to `_idx`;
- state that exists only at a position is a `RotatingKVCache`'s last `max_size` tokens in temporal
  order, or an `ArraysCache`'s arrays; `extract(row)` takes either out of a batch;
- `mx.load` of a file-like object allocates each array and has the object fill it
  (engine/mlx_adapter/runtime/arrays.py);
- `nn.Linear` and `nn.Embedding.as_linear` multiply by their `weight` as it is, and may be replaced in their
  classes (cuda/products.py; tests/engine/cuda/test_products.py);
- a CUDA kernel may write into an array that it was given (cuda/attention_kernel.py, cuda/fused_attention.py);
- layers of llama, qwen2 and qwen3 keep their weights under the names of cuda/fused_step.py, which checks the
  rest;
- `mlx::core::clear_cache` and `set_cache_limit` are symbols of its library
  (engine/mlx_adapter/runtime/arrays.py);
- `model(tokens, cache=cache)` gives logits of shape (batch, tokens, vocabulary), by an `lm_head` or by
  `as_linear` of its embedding;
- `model.layers` are the modules that a pass calls one after the other (model/layer_hook.py);
- transformers finds its models' names by `define_import_structure` and keeps them in `_LazyModule`
  (runtime/lean_imports.py; tests/engine/mlx_adapter/test_lean_imports.py).
"""

from .runtime import lean_imports  # Before whatever imports transformers.

# isort: split
from .attention.backend import AttentionBackend, DecodeStep, register
from .attention.backend import current as attention_backend
from .attention.by_rows import pays as rows_attend_alone
from .attention.by_rows import ratio as rows_alone_ratio
from .cache.batch import EvenBatchKVCache, round_up
from .cache.kinds import (
    Cache,
    RowTail,
    StateLayout,
    append_tokens,
    can_take_back,
    copied,
    extend,
    extend_batch,
    filled_cache,
    keep_rows,
    keeps_latents_of_own,
    layout_of,
    let_go,
    merge,
    new_cache,
    open_tails,
    put_back,
    put_states,
    recurrent_states,
    reuse_obstacle,
    row_states,
    row_tensors,
    state_arrays,
    state_tensors,
    states_of,
    tensors,
    token_range,
    trim,
)
from .cache.live_segments import LiveSegments
from .cache.packed import Quantisation
from .cache.segments import SEGMENT, Segment, add_segment, segmented_layers
from .model.inspection import attention_from, write_keys
from .model.layer_hook import LayerHook
from .model.load import (
    LoadedModel,
    has_own_rows,
    load,
    load_tokenizer,
    share_prefixes,
    tree_bytes,
    use_own_rows,
)
from .model.lora import Adapter, may_share_pass, row_adapters
from .model.mtp import MtpHeads, MtpState, load_mtp
from .model.positions import keeps_hidden, last_position_only, last_positions, logits_at, take_hidden
from .model.prompt_cache_file import (
    PromptCacheFile,
    checked_kv,
    open_prompt_cache,
    unwritable,
    write_prompt_cache,
)
from .model.vision import VLM_VERSION, blindness
from .runtime.arrays import blank_arrays, give_memory_back, give_outgrown_back, limits, rows_at, set_limits
from .runtime.device import backend, compute_dtype, storage_dtype, versions


def _cuda() -> AttentionBackend:
    """Imported on CUDA alone."""
    from .cuda.backend import CudaBackend

    return CudaBackend()


register("cuda", _cuda)
