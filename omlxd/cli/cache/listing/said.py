"""Reads a person's view of a cached prefix: the program that made it, the user's first words, the number of
turns.

All of it is read from the tokens of the blocks: it survives a restart, and nothing else of a prompt is kept.
A chat template marks where the user speaks; the mark's tokens are looked for in the tokens as text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....common.clients import client_of_prompt, own_words

MARKS = (
    ("<|im_start|>", "<|im_start|>user\n"),
    ("<|start_header_id|>", "<|start_header_id|>user<|end_header_id|>"),
    ("<start_of_turn>", "<start_of_turn>user\n"),
    ("<|turn>", "<|turn>user\n"),
    ("<|message|>", "<|start|>user<|message|>"),
    ("<｜User｜>", "<｜User｜>"),
    ("<|im_user|>", "<|im_user|>user<|im_middle|>"),
    ("<|user|>", "<|user|>"),
    ("<|START_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>"),
    ("[INST]", "[INST]"),
)
"""Control token → text by which a template with that token begins the user's turn."""
RESULT = "<tool_response>"
"""Text behind the user's mark where a template writes the results of calls as the user's."""

BEGINNING = 512
"""Tokens of a prompt in which a program introduces itself."""
FIRST, LONG = 32, 6000
"""Tokens that hold a user's first words; the second where a client's notes precede them."""
MOST_WORDS = 120
_CONTROL = re.compile(r"<\|[^|<>]{1,40}\|>|<\|?turn\|?>|<(?:end|start)_of_turn>|\[/?INST\]|</?s>")


@dataclass(slots=True, frozen=True)
class Said:
    """Facts of a chain of blocks up to a place. `tokens`: how many those are."""

    client: str = ""
    words: str = ""
    turns: int = 0
    tokens: int = 0


class Reader:
    """Reads the tokens of a model, by the tokeniser in its folder; without one it reads nothing."""

    def __init__(self, model_path: str):
        self._tokenizer = _tokenizer(model_path)
        self._mark, self._result = self._marks()

    def text_of(self, ids: Sequence[int], control: bool = True) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=not control)

    def go_on(self, said: Said, blocks: Sequence[bytes]) -> Said:
        """Add to `said` the facts of the `blocks` that follow, each its tokens as `1,2,3`."""
        text = b"," + b",".join(blocks) + b","
        count = text.count(b",") - 1
        if self._tokenizer is None or not self._mark:
            return replace(said, tokens=said.tokens + count)
        client = said.client
        if not client and said.tokens < BEGINNING:
            beginning = self.text_of(_ids(text, 0, BEGINNING))
            client = client_of_prompt(beginning)
        turns = text.count(self._mark) - (text.count(self._result) if self._result else 0)
        words = said.words
        if not words and turns > 0:
            words = self._words(text, text.index(self._mark) + len(self._mark) - 1)
        return Said(client, words, said.turns + max(0, turns), said.tokens + count)

    def _words(self, text: bytes, at: int) -> str:
        """Return the user's own words behind the mark that ends at `at`."""
        words = self.text_of(_ids(text, at, FIRST))
        if words.lstrip().startswith("<"):
            words = own_words(self.text_of(_ids(text, at, LONG)))
        words = _CONTROL.split(words.lstrip(), maxsplit=1)[0]
        return " ".join(words.split())[:MOST_WORDS]

    def _marks(self) -> tuple[bytes, bytes]:
        """Return the tokens of the user's mark, and of a call result's; empty: none."""
        if self._tokenizer is None:
            return b"", b""
        for control, mark in MARKS:
            if self._tokenizer.token_to_id(control) is None:
                continue
            result = self._tokens(mark + RESULT + "\n")
            mine = self._tokens(mark)
            return mine, result if result.startswith(mine) and result != mine else b""
        return b"", b""

    def _tokens(self, text: str) -> bytes:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return b"," + b",".join(b"%d" % id for id in ids) + b","


def _ids(text: bytes, start: int, most: int) -> list[int]:
    """Return at most `most` tokens behind `start`, the place of a comma."""
    found = text[start + 1 : start + 1 + 8 * most].split(b",")[:most]
    return [int(token) for token in found if token.isdigit()]


@functools.lru_cache(maxsize=4)
def _tokenizer(model_path: str) -> Any:
    """Load the model's tokeniser; None if there is none that can be read."""
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(f"{model_path}/tokenizer.json")
    except Exception:  # It raises plain Exceptions.
        return None
