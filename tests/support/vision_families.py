"""Tiny random vision models of mlx-vlm's families, with image processors that need no download.

Built as families.py builds text models; a picture is cut into few patches: an image has tens of tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from families import _weight, make_model
from family_configs import _LINEAR_ATTENTION, _MOE, COMMON, VOCAB, WINDOW
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer

from omlxd.models import demo

IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, IMAGE, VIDEO = range(VOCAB, VOCAB + 4)


@dataclass(slots=True, frozen=True)
class VisionFamily:
    """config: of config.json. processor: of preprocessor_config.json. shown: how a template shows an image.

    tokens     added to the tokenizer, from `VOCAB` on
    extra_tokens  their names, where the processor asks the tokenizer for them
    per_token  every layer keeps one entry a token
    exact      a hit's logits are the cold run's to the last bit
    """

    config: dict[str, Any]
    processor: dict[str, Any]
    shown: str = "<|vision_start|><|image_pad|><|vision_end|>"
    tokens: tuple[str, ...] = IMAGE_TOKENS
    files: dict[str, Any] = field(default_factory=dict)
    extra_tokens: dict[str, str] = field(default_factory=dict)
    per_token: bool = True
    exact: bool = True


TEXT: dict[str, Any] = {**COMMON, "vocab_size": VOCAB + 64, "num_hidden_layers": 2}

_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 14,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_PROCESSOR: dict[str, Any] = {
    "min_pixels": 56 * 56,
    "max_pixels": 224 * 224,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_processor_type": "Qwen2VLImageProcessor",
}

_QWEN3_VISION: dict[str, Any] = {
    **_QWEN_VISION,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
_MROPE = {"type": "default", "mrope_section": [2, 3, 3]}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
    "num_channels": 3,
}
_NORMALISED = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

VISION_FAMILIES: dict[str, VisionFamily] = {
    # ------------------------------------------------------------- positions in three dimensions
    "qwen2_vl": VisionFamily(
        {
            **TEXT,
            **_QWEN_IDS,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "vision_config": {**_QWEN_VISION, "model_type": "qwen2_vl", "embed_dim": 32, "hidden_size": 64},
        },
        {**_QWEN_PROCESSOR, "processor_class": "Qwen2VLProcessor"},
    ),
    "qwen2_5_vl": VisionFamily(
        {
            **TEXT,
            **_QWEN_IDS,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "vision_config": {
                **_QWEN_VISION,
                "model_type": "qwen2_5_vl",
                "intermediate_size": 64,
                "out_hidden_size": 64,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
        },
        {**_QWEN_PROCESSOR, "processor_class": "Qwen2_5_VLProcessor"},
    ),
    "qwen3_vl": VisionFamily(
        {
            **_QWEN_IDS,
            "text_config": {**TEXT, "model_type": "qwen3_vl_text", "rope_scaling": _MROPE},
            "vision_config": {
                **_QWEN3_VISION,
                "model_type": "qwen3_vl",
                "deepstack_visual_indexes": [0, 1],
            },
        },
        {**_QWEN_PROCESSOR, "processor_class": "Qwen3VLProcessor"},
    ),
    "qwen3_vl_moe": VisionFamily(
        {
            **_QWEN_IDS,
            "text_config": {**TEXT, **_MOE, "model_type": "qwen3_vl_moe_text", "rope_scaling": _MROPE},
            "vision_config": {
                **_QWEN3_VISION,
                "model_type": "qwen3_vl_moe",
                "deepstack_visual_indexes": [0, 1],
            },
        },
        {**_QWEN_PROCESSOR, "processor_class": "Qwen3VLProcessor"},
    ),
    "qwen3_5": VisionFamily(
        {
            **_QWEN_IDS,
            "text_config": {
                **TEXT,
                **_LINEAR_ATTENTION,
                "model_type": "qwen3_5_text",
                "rope_parameters": {
                    "type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [1, 1, 2],
                },
            },
            "vision_config": {**_QWEN3_VISION, "model_type": "qwen3_5", "deepstack_visual_indexes": []},
        },
        {**_QWEN_PROCESSOR, "processor_class": "Qwen3VLProcessor"},
        per_token=False,
        exact=False,
    ),
    "qwen3_5_moe": VisionFamily(
        {
            **_QWEN_IDS,
            "text_config": {
                **TEXT,
                **_LINEAR_ATTENTION,
                **_MOE,
                "shared_expert_intermediate_size": 32,
                "model_type": "qwen3_5_moe_text",
                "rope_parameters": {
                    "type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [1, 1, 2],
                },
            },
            "vision_config": {**_QWEN3_VISION, "model_type": "qwen3_5_moe", "deepstack_visual_indexes": []},
        },
        {**_QWEN_PROCESSOR, "processor_class": "Qwen3VLProcessor"},
        per_token=False,
        exact=False,
    ),
    "glm4v": VisionFamily(
        {
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
            "video_token_index": VIDEO,
            "video_token_id": VIDEO,
            "vision_start_token_id": START,
            "vision_end_token_id": END,
            "text_config": {
                **TEXT,
                "model_type": "glm4v_text",
                "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
                "partial_rotary_factor": 0.5,
                "pad_token_id": 0,
                "eos_token_id": [VOCAB + 60],
            },
            "vision_config": {
                **_QWEN_VISION,
                "model_type": "glm4v",
                "intermediate_size": 64,
                "out_hidden_size": 64,
                "image_size": 112,
            },
        },
        {
            **_QWEN_PROCESSOR,
            "processor_class": "Glm4vProcessor",
            "image_processor_type": "Glm4vImageProcessor",
            "size": {"shortest_edge": 56 * 56, "longest_edge": 2 * 224 * 224},
        },
        shown="<|begin_of_image|><|image|><|end_of_image|>",
        tokens=("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"),
    ),
    # ------------------------------------------------------------- windows, recurrent layers
    "gemma3": VisionFamily(
        {
            "image_token_index": IMAGE,
            "hidden_size": 64,
            "text_config": {
                **TEXT,
                "model_type": "gemma3_text",
                "num_hidden_layers": 4,
                "sliding_window": WINDOW,
                "sliding_window_pattern": 2,
                "query_pre_attn_scalar": 16,
                "mm_tokens_per_image": 16,
            },
            "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model", "image_size": 112},
        },
        {
            **_NORMALISED,
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": 112, "width": 112},
            "do_convert_rgb": True,
        },
        shown="<start_of_image>",
        tokens=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        files={"processor_config.json": {"image_seq_length": 16, "processor_class": "Gemma3Processor"}},
        extra_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        per_token=False,
        exact=False,
    ),
    "gemma4": VisionFamily(
        {
            "image_token_id": IMAGE,
            "audio_token_id": VOCAB + 61,
            "boi_token_id": START,
            "eoi_token_id": END,
            "hidden_size": 64,
            "text_config": {
                **TEXT,
                "model_type": "gemma4_text",
                "num_hidden_layers": 6,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCAB + 64,
                "hidden_size_per_layer_input": 16,
                "sliding_window": WINDOW,
                "sliding_window_pattern": 2,
                "global_head_dim": 32,
                "num_global_key_value_heads": 1,
                "tie_word_embeddings": True,
                "use_bidirectional_attention": "vision",
            },
            # mlx-vlm makes one before it drops it for having no weights.
            "audio_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
            "vision_config": {
                "model_type": "gemma4_vision",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "global_head_dim": 16,
                "default_output_length": 16,
                "patch_size": 16,
                "position_embedding_size": 64,
                "pooling_kernel_size": 3,
            },
        },
        {
            "processor_class": "Gemma4Processor",
            "patch_size": 16,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 3,
        },
        shown="<|image|>",
        tokens=("<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio|>"),
        extra_tokens={"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
        per_token=False,
        exact=False,
    ),
    "lfm2_vl": VisionFamily(
        {
            "image_token_id": IMAGE,
            "downsample_factor": 2,
            "projector_hidden_size": 64,
            "text_config": {
                "model_type": "lfm2",
                "hidden_size": 64,
                "num_hidden_layers": 4,
                "intermediate_size": 128,
                "block_ff_dim": 128,
                "block_auto_adjust_ff_dim": False,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": VOCAB + 64,
                "block_dim": 64,
                "conv_dim": 64,
                "conv_dim_out": 64,
                "num_heads": 4,
                "layer_types": ["conv", "full_attention", "conv", "full_attention"],
                "full_attn_idxs": [1, 3],
            },
            "vision_config": {
                **_SIGLIP,
                "model_type": "siglip2_vision_model",
                "patch_size": 16,
                "num_patches": 64,
            },
        },
        {"processor_class": "Lfm2VlProcessor", "image_processor_type": "Lfm2VlImageProcessor"},
        shown="<image>",
        tokens=("<|image_start|>", "<|image_end|>", "<image>", "<|img_thumbnail|>"),
        per_token=False,
    ),
    # ------------------------------------------------------------- one entry a token, plain positions
    "mistral3": VisionFamily(
        {
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            "text_config": {**TEXT, "model_type": "mistral", "head_dim": 16},
            "vision_config": {**_SIGLIP, "model_type": "pixtral", "image_size": 224, "head_dim": 16},
        },
        {
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "size": {"longest_edge": 224},
        },
        shown="[IMG]",
        tokens=("[IMG_BREAK]", "[IMG_END]", "[IMG]"),
        files={"processor_config.json": {"patch_size": 14, "spatial_merge_size": 2}},
    ),
    "pixtral": VisionFamily(
        {
            "image_token_index": IMAGE,
            "text_config": {**TEXT, "model_type": "mistral", "head_dim": 16},
            "vision_config": {**_SIGLIP, "model_type": "pixtral", "image_size": 224, "head_dim": 16},
        },
        {
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "size": {"longest_edge": 224},
        },
        shown="[IMG]",
        tokens=("[IMG_BREAK]", "[IMG_END]", "[IMG]"),
        files={"processor_config.json": {"patch_size": 14}},
    ),
    "idefics3": VisionFamily(
        {
            "image_token_id": IMAGE,
            "scale_factor": 2,
            "vocab_size": VOCAB + 64,
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**_SIGLIP, "model_type": "idefics3_vision", "image_size": 112},
        },
        {
            **_NORMALISED,
            "image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "Idefics3Processor",
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 112},
            "do_image_splitting": False,
        },
        shown="<image>",
        tokens=("<fake_token_around_image>", "<end_of_utterance>", "<image>", "<global-img>"),
        files={"processor_config.json": {"image_seq_len": 16, "processor_class": "Idefics3Processor"}},
    ),
    "smolvlm": VisionFamily(
        {
            "image_token_id": IMAGE,
            "scale_factor": 2,
            "vocab_size": VOCAB + 64,
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**_SIGLIP, "model_type": "smolvlm_vision", "image_size": 112},
        },
        {
            **_NORMALISED,
            "image_processor_type": "SmolVLMImageProcessor",
            "processor_class": "SmolVLMProcessor",
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 112},
            "do_image_splitting": False,
        },
        shown="<image>",
        tokens=("<fake_token_around_image>", "<end_of_utterance>", "<image>", "<global-img>"),
        files={"processor_config.json": {"image_seq_len": 16, "processor_class": "SmolVLMProcessor"}},
    ),
    "internvl": VisionFamily(
        {
            "image_token_id": IMAGE,
            "downsample_ratio": 0.5,
            "text_config": {**TEXT, "model_type": "qwen3"},
            "vision_config": {**_SIGLIP, "model_type": "internvl_vision", "image_size": 112},
        },
        {"image_processor_type": "GotOcr2ImageProcessorFast", "processor_class": "InternVLProcessor"},
        shown="<IMG_CONTEXT>",
        tokens=("<img>", "</img>", "<IMG_CONTEXT>"),
        files={"processor_config.json": {"image_seq_length": 16, "processor_class": "InternVLProcessor"}},
    ),
    "internvl_chat": VisionFamily(
        {
            "image_token_index": IMAGE,
            "downsample_ratio": 0.5,
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**_SIGLIP, "model_type": "intern_vit_6b", "image_size": 112},
        },
        {"image_processor_type": "InternVLImageProcessor", "processor_class": "InternVLChatProcessor"},
        shown="<image>",
        tokens=("<img>", "</img>", "<IMG_CONTEXT>", "<image>"),
    ),
}


def build_vision_family(name: str, folder: Path | str, seed: int = 1) -> Path:
    """A model of `name` in `folder`; returns `folder`. The same arguments give the same weights."""
    folder = Path(folder)
    tokenizer, config = describe_vision_family(name, VISION_FAMILIES[name], folder)
    model = make_model(config)
    bits = np.random.PCG64(seed)
    weights = {
        path: mx.array(_vision_weight(path, tuple(array.shape), bits, tokenizer, name))
        for path, array in sorted(tree_flatten(model.parameters()))
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def describe_vision_family(name: str, family: VisionFamily, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Write all files of a model but its weights into `folder`; returns its tokenizer and its config."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _write_tokenizer(folder, family)
    config = {"model_type": name, "eos_token_id": tokenizer.token_to_id("<|im_end|>"), **family.config}
    demo.write_json(folder / "config.json", config)
    demo.write_json(folder / "preprocessor_config.json", family.processor)
    for file, value in family.files.items():
        demo.write_json(folder / file, value)
    return tokenizer, config


def _write_tokenizer(folder: Path, family: VisionFamily) -> Any:
    demo.write_tokenizer(folder, VOCAB)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family.tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    part = "{{ part.text if part.text is defined else '' }}"
    assert part in demo.TEMPLATE
    shown = "{%- if part.type == 'image' -%}" + json.dumps(family.shown).join(("{{ ", " }}"))
    config["extra_special_tokens"] = family.extra_tokens
    config["chat_template"] = demo.TEMPLATE.replace(part, f"{shown}{{%- else -%}}{part}{{%- endif -%}}")
    demo.write_json(path, config)
    return tokenizer


def _vision_weight(
    path: str, shape: tuple[int, ...], bits: np.random.PCG64, tokenizer: Any, family: str
) -> np.ndarray:
    if "lm_head" not in path:
        return _weight(path, shape, bits, tokenizer, family)
    fan_in = shape[-1]
    weight = demo.unit_noise(bits, *shape) * np.float32(1.5 / fan_in**0.5)
    scale = np.full((shape[0], 1), 0.0, np.float32)
    own = demo.embedding_scale(tokenizer, {})
    scale[: len(own)] = own
    return weight * scale


def picture(seed: int, width: int = 112, height: int = 112) -> np.ndarray:
    """An RGB image (height, width, 3) of few large patches, another for each seed."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 14, width // 14, 3), dtype=np.uint8)
    return np.ascontiguousarray(coarse.repeat(14, axis=0).repeat(14, axis=1))
