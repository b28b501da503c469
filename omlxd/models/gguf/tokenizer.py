"""The tokenizer and the chat template of a GGUF file, by transformers' own converters."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .architectures import eos_ids
from .header import Unfit

_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
"""Pre-tokenizers that part digits, then split as GPT-2 does; transformers knows no split for them."""
_GPT2_SPLITS = ("gpt-2", "gpt2", "default", "mpt", "olmo", "phi-2", "jais", "trillion", "granite-docling")
_IDS = {"bos_token": "bos_token_id", "unk_token": "unknown_token_id", "pad_token": "padding_token_id"}


def write_tokenizer(metadata: dict[str, Any], architecture: str, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`. Raises Unfit."""
    # As mlx-lm does: transformers would warn that there is no PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from tokenizers import pre_tokenizers, processors
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        GGUF_TOKENIZER_MAPPING,
        convert_gguf_tokenizer,
    )

    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise Unfit("it holds no tokenizer (tokenizer.ggml.tokens).")
    groups = {
        group: {
            new: metadata[f"tokenizer.{old}"] for old, new in names.items() if f"tokenizer.{old}" in metadata
        }
        for group, names in GGUF_TOKENIZER_MAPPING.items()
    }
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and pre not in (*_SINGLE_DIGITS, *_GPT2_SPLITS, *GGUF_PRE_TOKENIZER_SPLITS):
        raise Unfit(f"its pre-tokenizer is {str(pre)[:40]!r}, which omlxd does not know.")
    try:
        backend, _ = convert_gguf_tokenizer(architecture, groups["tokenizer"])
    except Exception as error:  # Third-party code over a stranger's file: anything may come.
        raise Unfit(f"its tokenizer can't be converted: {str(error)[:200]}") from error
    if kind == "gpt2" and pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    named = {name: _token(tokens, metadata.get(f"tokenizer.ggml.{key}")) for name, key in _IDS.items()}
    ends = eos_ids(metadata)
    named["eos_token"] = _token(tokens, ends[0]) if ends else None
    if named["bos_token"] and metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
        )
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))


def _token(tokens: list[str], index: Any) -> str | None:
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None
