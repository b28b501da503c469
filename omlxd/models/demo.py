"""The demo model: Qwen3 architecture, tiny, random weights, built locally with no network.

`python -m omlxd.models.demo PATH` builds it, with the same bytes on every machine: weights come from PCG64's
raw output by exact arithmetic, so a rebuilt demo keeps its KV namespace. Its words mean nothing, but the
thinking block ends after some tens of tokens and the turn after some hundreds (`_ROW_SCALE`), and what it
says depends on the prompt (`_QK_NORM`).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import ModelError
from .builder import make_private, part_folder, run_builder
from .config.json_files import BrokenJSON, read_json

VERSION = 1
MARKER = "omlxd_demo.json"
NOTE = "random weights: its words mean nothing"
VOCAB = 4096
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
"""Added tokens. The first three are `special` (a decoder may skip them), the others are text."""


def _data(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


# What the tokenizer is trained on: an agent's prompt in small, common words, and syllables. It decides which
# byte pairs merge, so that English, code and JSON have three or four characters a token. Changing one
# character changes every token id: raise `VERSION` with it.
PROSE = _data("demo_prose.txt")
WORDS = _data("demo_words.txt").split()
ENDINGS = ("s", "ed", "ing", "er", "ly", "able", "ation")
SYLLABLES = [c + v + end for c in "bcdfghjklmnprstvwz" for v in "aeiou" for end in ("", "n", "r", "s", "t")]
# ChatML as Qwen and Hermes models write it. It is append-only: the rendering of a turn begins with that of
# the turn before, so that no cached prefix is lost. Tools come before every message; a system message stays
# in its place; earlier thinking is kept, and a turn without any holds the empty block of a generation
# prompt. mlx-lm knows its `json_tools` calls by the words `<tool_call>` and `tool_call.name`.
TEMPLATE = _data("demo_template.jinja").removesuffix("\n")

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's pre-tokenizer: a digit is a piece, a word takes one character before it."""

# Two layers of one narrow head, because attention over an agent's prompt is what costs time on a CPU:
# on two cores, 20,480 tokens prefill in 8 s; four layers of four heads took 85 s.
_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float32",
}

_SEED = 1
_EMBED_STD = 0.02
_FINAL_NORM = 18.0
"""Scale of the final norm: times `_EMBED_STD` and sqrt(128), the standard deviation of a logit: about 4."""
_QK_NORM = 2.0
"""Attention scores have a standard deviation of about 4, so a few tokens win, not the mean of all."""
_ROW_SCALE = {"</think>": 2.3, "<|im_end|>": 1.4}
"""Embedding rows longer than the others': their logits vary more, so they win now and then."""
_QUIET = 0.1
"""Scale of rows of other specials and of bytes that are no text by themselves: they never win."""


class Marker(msgspec.Struct):
    """Content of `omlxd_demo.json`."""

    version: int
    note: str


def is_demo(folder: Path) -> bool:
    """Return whether `folder` holds a demo model of this version."""
    try:
        marker = read_json(folder / MARKER, Marker)
    except (OSError, BrokenJSON):
        return False
    return marker.version == VERSION


def build_demo(folder: Path | str) -> Path:
    """Build the demo model in `folder`, unless this version is there already; returns `folder`.

    It is built beside `folder` and renamed. Only an older demo is replaced. Raises ModelError.
    """
    folder = Path(folder).expanduser()
    if is_demo(folder):
        return folder
    if folder.exists() and not (folder / MARKER).exists() and any(folder.iterdir()):
        raise ModelError(f"{folder} is not empty and holds no demo model: choose another folder")
    try:
        with part_folder(folder) as new:
            _write(new)
            make_private(new)
            _put_in_place(new, folder)
    except OSError as error:
        raise ModelError(f"can't build the demo model at {folder}: {error.strerror}") from error
    return folder


def build_random(folder: Path, dtype: str, **sizes: int) -> Path:
    """Build a model with the demo's family and tokenizer in `folder`, which must not exist; returns it.

    dtype  of its weights, as NumPy and MLX call it
    sizes  of config.json, in place of the demo's
    """
    folder.mkdir(mode=0o700, parents=True)
    _write(folder, {**_CONFIG, **sizes, "torch_dtype": dtype})
    return folder


def _put_in_place(new: Path, folder: Path) -> None:
    """Rename a folder over an empty one, or swap an older demo out. Two builders at once are harmless."""
    try:
        os.rename(new, folder)
    except OSError:
        if is_demo(folder):  # another process was faster
            return
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
        os.rename(folder, old)
        os.rename(new, folder)
        shutil.rmtree(old, ignore_errors=True)


def _write(folder: Path, config: dict[str, Any] = _CONFIG) -> None:
    from safetensors.numpy import save_file

    tokenizer = write_tokenizer(folder, VOCAB)
    config = {**config, "vocab_size": tokenizer.get_vocab_size(), **_ids(tokenizer)}
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 20, **_ids(tokenizer)},
    )
    weights = {name: w.astype(config["torch_dtype"]) for name, w in _weights(tokenizer, config).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "model.safetensors").chmod(0o644)  # the library makes it private
    write_json(folder / MARKER, {"version": VERSION, "note": NOTE})


# --------------------------------------------------------------------------- tokenizer


@functools.cache
def train_tokenizer(vocab: int) -> Any:
    """Train a byte-level BPE `tokenizers.Tokenizer` of exactly `vocab` entries, specials included."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIALS),
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS[:3]])
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in SPECIALS[3:]])
    if tokenizer.get_vocab_size() != vocab:
        raise ModelError(f"the demo text gives {tokenizer.get_vocab_size()} tokens, not {vocab}")
    return tokenizer


def _corpus() -> Iterator[str]:
    """Yield training text: each word often enough to be one token, with endings; syllables."""
    yield PROSE
    for rank, word in enumerate(WORDS):
        yield f" {word}" * (6 if rank < 400 else 5) + f"\n{word}"
        if rank < 500:
            yield f" {word.capitalize()}\n{word.capitalize()}"
        if rank > 100:
            yield " ".join(f" {word}{ending}" for ending in ENDINGS)
    for syllable in SYLLABLES:
        yield f" {syllable}" * 4 + f"\n{syllable}" * 4


def write_tokenizer(folder: Path, vocab: int) -> Any:
    """Write tokenizer.json and tokenizer_config.json (chat template inside); returns the tokenizer."""
    tokenizer = train_tokenizer(vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": _CONFIG["max_position_embeddings"],
            "chat_template": TEMPLATE,
        },
    )
    return tokenizer


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _ids(tokenizer: Any) -> dict[str, Any]:
    end, pad = (tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
    return {"eos_token_id": [end, pad], "pad_token_id": pad}


# --------------------------------------------------------------------------- weights


def unit_noise(bits: np.random.PCG64, *shape: int) -> np.ndarray:
    """Return float32 uniform noise of mean 0 and variance 1: the same bits with every NumPy and C library."""
    raw = bits.random_raw(int(np.prod(shape))) >> np.uint64(40)
    return ((raw.astype(np.float32) / np.float32(2**23) - 1) * np.float32(3**0.5)).reshape(shape)


def embedding_scale(tokenizer: Any, loud: dict[str, float]) -> np.ndarray:
    """Return float32 (vocab, 1): 1 for printable text, `loud` for its tokens, `_QUIET` for the rest."""
    scale = np.ones((tokenizer.get_vocab_size(), 1), np.float32)
    for index in range(len(scale)):
        token = tokenizer.id_to_token(index)
        if token in loud:
            scale[index] = loud[token]
        else:
            text = tokenizer.decode([index])
            plain = text.isascii() and (text.isprintable() or text.isspace()) and token not in SPECIALS
            scale[index] = 1.0 if plain else _QUIET
    return scale


def _weights(tokenizer: Any, c: dict[str, Any]) -> dict[str, np.ndarray]:
    bits = np.random.PCG64(_SEED)
    hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q_width, kv_width = c["num_attention_heads"] * head, c["num_key_value_heads"] * head

    def linear(out: int, fan_in: int) -> np.ndarray:
        return unit_noise(bits, out, fan_in) * np.float32(1.5 / fan_in**0.5)

    def norm(width: int, value: float = 1.0) -> np.ndarray:
        return np.full(width, value, np.float32)

    embedding = unit_noise(bits, tokenizer.get_vocab_size(), hidden) * np.float32(_EMBED_STD)
    weights = {
        "model.embed_tokens.weight": embedding * embedding_scale(tokenizer, _ROW_SCALE),
        "model.norm.weight": norm(hidden, _FINAL_NORM),
    }
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights |= {
            at + "self_attn.q_proj.weight": linear(q_width, hidden),
            at + "self_attn.k_proj.weight": linear(kv_width, hidden),
            at + "self_attn.v_proj.weight": linear(kv_width, hidden),
            at + "self_attn.o_proj.weight": linear(hidden, q_width),
            at + "self_attn.q_norm.weight": norm(head, _QK_NORM),
            at + "self_attn.k_norm.weight": norm(head, _QK_NORM),
            at + "mlp.gate_proj.weight": linear(inner, hidden),
            at + "mlp.up_proj.weight": linear(inner, hidden),
            at + "mlp.down_proj.weight": linear(hidden, inner),
            at + "input_layernorm.weight": norm(hidden),
            at + "post_attention_layernorm.weight": norm(hidden),
        }
    return weights


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m omlxd.models.demo PATH")
    sys.exit(run_builder(lambda: build_demo(sys.argv[1])))
