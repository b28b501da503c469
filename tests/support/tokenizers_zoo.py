"""Tokenizers of every kind that tests can train: byte-level, sentencepiece-like, with odd added tokens."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from omlxd.models.demo import PROSE, SPECIALS, train_tokenizer

PLAIN = [AddedToken(s, special=i < 3, normalized=False) for i, s in enumerate(SPECIALS)]
ODD = [
    *PLAIN,
    AddedToken("<|im_end|>\n<", special=True, normalized=False),  # longer than one that cuts
    AddedToken("x<|im", special=False, normalized=False),  # overlaps one that cuts
    AddedToken("<left>", special=True, normalized=False, lstrip=True),
    AddedToken("<right>", special=True, normalized=False, rstrip=True),
    AddedToken("<word>", special=True, normalized=False, single_word=True),
    AddedToken("<normal>", special=False, normalized=True),
    AddedToken("  ", special=False, normalized=False),
    AddedToken("[AB", special=True, normalized=False),
]


def _trained(model: Any, trainer: Any, pre: Any, normalizer: Any = None, added: Any = PLAIN) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([PROSE], trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def _bytes(prefix_space: bool, added: Any = PLAIN, normalizer: Any = None) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    pre = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer = _trained(models.BPE(), trainer, pre, normalizer, added)
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer


def _unigram(scheme: str, added: Any = PLAIN) -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    pre = pre_tokenizers.Metaspace(prepend_scheme=scheme)  # type: ignore[arg-type]
    tokenizer = _trained(models.Unigram(), trainer, pre, normalizers.NFKC(), added)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)  # type: ignore[assignment,arg-type]
    return tokenizer


def _llama() -> Tokenizer:
    """As Llama 2's: spaces are letters, merges run over the whole piece, one is put before each."""
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], show_progress=False)
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _trained(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, None, normalizer)


def zoo() -> dict[str, Tokenizer]:
    """Name → tokenizer. Each call trains anew: some tests change what they get."""
    return {
        "demo": train_tokenizer(4096),
        "bytes": _bytes(False),
        "bytes-prefix": _bytes(True),
        "bytes-nfc": _bytes(False, normalizer=normalizers.NFC()),
        "bytes-odd": _bytes(False, added=ODD),
        "unigram-first": _unigram("first"),
        "unigram-always": _unigram("always"),
        "unigram-never": _unigram("never"),
        "unigram-odd": _unigram("first", added=ODD),
        "llama": _llama(),
    }


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """As transformers holds it."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
