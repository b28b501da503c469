"""Why a prompt's cached prefix ends where it does: an engine says it, the front adds to it, verbs show it."""

from __future__ import annotations

from ..chat import Struct


class OtherNamespace(Struct, frozen=True):
    """KV of the same model that was made otherwise: it holds `tokens` of the prompt.

    differs  what else is not the same: weights, block size, versions, …; empty where nobody knows
    adapter  whose it is, in words, where it is not of the adapter that was asked; "": of that one, or unknown
    """

    name: str
    tokens: int
    differs: tuple[str, ...] = ()
    adapter: str = ""


class Explanation(Struct, frozen=True, rename={"prompt": "given"}):
    """Why a prompt's cached prefix ends where it does. Counts and positions in tokens.

    cause         none             nothing missed
                  reuse_off        prefixes are not reused: `reason`
                  differs          another text is stored there: `stored`
                  other_image      another image is stored there
                  never_stored     no other text stands there either
                  other_namespace  it is there, but made otherwise: `elsewhere`
                  no_checkpoint    the blocks are there, the state that stands only at a position is not
                  evicted, damaged, cleared  the file was there and is gone (the front fills this in)
    chain_tokens  what the chain of blocks reaches; a model with checkpoints may use less
    position      of the first token that differs, else of the first missing block
    missing       path of that block's file, relative to the cache dir
    other_image   at `position` another image is stored than the prompt's, which `image` names. It may be
                  true with any cause
    before, prompt  text around `position`; `stored`: what is stored instead of `prompt`
    stored_used, gone_at  seconds since 1970
    looked, complete  files whose headers were read for `stored`, and whether these were all
    files         that it is restored from, root first: blocks, checkpoints, records of turns; if asked for
    """

    cause: str
    prompt_tokens: int = 0
    block_size: int = 0
    namespace: str = ""
    hot_tokens: int = 0
    cold_tokens: int = 0
    chain_tokens: int = 0
    position: int = 0
    reason: str = ""
    missing: str = ""
    before: str = ""
    prompt: str = ""
    stored: str = ""
    stored_used: float = 0.0
    gone_at: float = 0.0
    elsewhere: tuple[OtherNamespace, ...] = ()
    looked: int = 0
    complete: bool = True
    other_image: bool = False
    image: str = ""
    files: tuple[str, ...] = ()
