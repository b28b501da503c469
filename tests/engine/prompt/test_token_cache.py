"""Tokens by segment are the tokens of the whole, whatever the tokenizer; and they are remembered."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fast_or_slow import rest_slow
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers_zoo import ODD, fast, zoo

from omlxd.engine.prompt.token_cache import TokenCache
from omlxd.models.demo import PROSE

NAMES = [
    *("demo", "bytes", "bytes-prefix", "bytes-nfc", "bytes-odd"),
    *("unigram-first", "unigram-always", "unigram-never", "unigram-odd", "llama"),
]
FRAGMENTS = [
    *(token.content for token in ODD),
    *(
        "<",
        "|",
        "im_end",
        "|>",
        " ",
        "  ",
        "\n",
        "\n\n",
        "x",
        "word",
        " word",
        "AB]",
        "é",
        "e\u0301",
        "\u0301",
    ),
    *("▁", "1", "123", ".", "\ufb01", "😀", "\u200d", "<|im_", "</", "think>", "The user", "\t", "\u00a0"),
]
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=14).map("".join)


@functools.cache
def cache_of(name: str) -> TokenCache:
    return TokenCache(fast(_zoo()[name]))


@functools.cache
def _zoo():
    return zoo()


@pytest.mark.parametrize("name", rest_slow(NAMES, "demo", "bytes-nfc", "unigram-always"))
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
@settings(max_examples=120, deadline=None)
def test_segments_give_the_ids_of_the_whole(name, texts):
    cache = cache_of(name)
    assert cache.cuts
    grown = ""
    for text in texts:
        grown += text
        whole = cache._tokenizer.encode(grown, add_special_tokens=False)
        assert cache.encode(grown) == whole  # first time, partly known
        assert cache.encode(grown) == whole  # all known


def test_only_the_new_part_is_tokenised():
    cache = TokenCache(fast(_zoo()["demo"]))
    turns = [f"<|im_start|>user\n{PROSE[i : i + 500]}<|im_end|>\n" for i in range(6)]
    cache.encode("".join(turns[:5]))
    before = cache.misses
    tokens = cache.encode("".join(turns))
    assert cache.misses - before == len(cache._tokenizer.encode(turns[5].removesuffix("<|im_end|>\n")))
    assert tokens == cache._tokenizer.encode("".join(turns), add_special_tokens=False)
    assert cache.hits > 5 * 100


def test_the_oldest_segments_go_first():
    cache = TokenCache(fast(_zoo()["demo"]), max_bytes=4000)
    for i in range(50):
        cache.encode(f"<|im_start|>{i} {PROSE[:300]}")
        cache.encode("<|im_start|>kept")
        assert cache._segments.cost <= 4000
    before = cache.misses
    cache.encode("<|im_start|>kept")
    assert cache.misses == before
    cache.encode(f"<|im_start|>0 {PROSE[:300]}")
    assert cache.misses > before


def test_a_text_larger_than_the_cache_is_no_trouble():
    cache = TokenCache(fast(_zoo()["demo"]), max_bytes=100)
    assert cache.encode(PROSE) == cache._tokenizer.encode(PROSE)
    assert cache._segments.cost == 0


def test_a_tokenizer_that_leaves_specials_alone_is_not_cut():
    tokenizer = fast(zoo()["bytes"])
    tokenizer.backend_tokenizer.encode_special_tokens = True
    tokenizer.split_special_tokens = True
    cache = TokenCache(tokenizer)
    assert not cache.cuts
    text = "a<|im_end|>b"
    assert cache.encode(text) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "added",
    [
        AddedToken("<end>", normalized=False, lstrip=True),
        AddedToken("<end>", normalized=False, rstrip=True),
        AddedToken("<end>", normalized=False, single_word=True),
        AddedToken("<end>", normalized=True),
        AddedToken("end", normalized=False),
        AddedToken(" <end>", normalized=False),
        AddedToken("<end> ", normalized=False),
    ],
)
def test_tokens_with_neighbours_do_not_cut(added):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_tokens([added])
    cache = TokenCache(fast(tokenizer))
    assert cache._split(f"a{added.content}b") in ([f"a{added.content}b"], ["a" + added.content + "b"])
    assert added.content not in cache._cutting


class Slow:
    """A tokenizer that is no fast one."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + list(text.encode())


def test_a_slow_tokenizer_is_asked_for_the_whole():
    cache = TokenCache(Slow())
    assert not cache.cuts
    assert cache.encode("ab") == [97, 98]
    assert cache.encode("ab", special=True) == [1, 97, 98]


def test_a_text_in_one_piece_and_others_in_pieces_at_once():
    """A tokenizer around whose texts stands what can't be told apart gives those in one piece."""
    cache = TokenCache(fast(_zoo()["demo"]), max_bytes=20_000)
    cache._around = None
    wanted = cache._tokenizer.encode(PROSE, add_special_tokens=True)
    with ThreadPoolExecutor(8) as pool:
        whole = [pool.submit(cache.encode, PROSE, special=True) for _ in range(50)]
        cut = [pool.submit(cache.encode, f"<|im_start|>{PROSE}{number}") for number in range(50)]
        assert all(each.result() == wanted for each in whole)
        assert all(len(each.result()) > len(wanted) for each in cut)


def test_many_threads_at_once():
    cache = TokenCache(fast(_zoo()["demo"]), max_bytes=20_000)
    texts = [
        "".join(f"<|im_start|>{PROSE[i * j : i * j + 99]}<|im_end|>" for j in range(20)) for i in range(8)
    ]
    wanted = [cache._tokenizer.encode(text, add_special_tokens=False) for text in texts]
    failures: list[object] = []

    def work():
        for _ in range(10):
            for text, tokens in zip(texts, wanted, strict=True):
                try:
                    if cache.encode(text) != tokens:
                        failures.append("other tokens")
                except Exception as error:
                    failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cache._segments.cost == sum(4 * len(ids) + 200 for ids in cache._segments.values())
