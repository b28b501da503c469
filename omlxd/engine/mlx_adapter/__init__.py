"""The one package that touches mlx-lm's and mlx-vlm's insides. README.md here lists what it relies on and
what it changes there."""

from .runtime import lean_imports  # Before whatever imports transformers.

# isort: split
from .attention.backend import AttentionBackend, DecodeStep, register, use_mlx_alone
from .attention.backend import current as attention_backend
from .attention.row_costs import pays as rows_attend_alone
from .attention.row_costs import ratios as rows_alone_ratios
from .cache.batch import EvenBatchKVCache
from .cache.growth import round_up
from .cache.joining import RowTail, extend, extend_batch, keep_rows, let_go, merge
from .cache.kinds import (
    Cache,
    StateLayout,
    append_tokens,
    can_take_back,
    copied,
    filled_cache,
    joins_alone,
    layout_of,
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
from .model.adapters.lora import Adapter, may_share_pass, row_adapters
from .model.checks import has_own_rows, share_prefixes, use_own_rows
from .model.drafters.drafter import Drafter, DrafterState, NothingGuessesError
from .model.drafters.drafter_folder import load_drafter
from .model.drafters.mtp import load_mtp
from .model.inspection import attention_from, write_keys
from .model.layer_hook import LayerHook
from .model.load import LoadedModel, load, load_tokenizer, tree_bytes
from .model.positions import keeps_hidden, last_position_only, last_positions, logits_at, take_hidden
from .model.prompt_cache_file import (
    PromptCacheFile,
    checked_kv,
    open_prompt_cache,
    unwritable,
    write_prompt_cache,
)
from .model.split import (
    Group,
    LinkTimes,
    check_link,
    check_split,
    join_group,
    rank_environment,
    split_of,
    time_link,
)
from .model.vlm.vision import VLM_VERSION, blindness
from .runtime.arrays import (
    blank_arrays,
    give_memory_back,
    give_outgrown_back,
    limits,
    release_memory,
    rows_at,
    set_limits,
)
from .runtime.device import backend, compute_dtype, storage_dtype, versions
from .runtime.gpu_faults import end_if_fault
from .runtime.gpu_faults import watch as watch_gpu_faults


def _cuda() -> AttentionBackend:
    """Imported on its device alone."""
    from .cuda.backend import CudaBackend

    return CudaBackend()


def _metal() -> AttentionBackend:
    """Imported on its device alone."""
    from .metal.backend import MetalBackend

    return MetalBackend()


register("cuda", _cuda)
register("metal", _metal)
