"""Why a prompt missed: where its chain ends, and what is stored where it would have gone on.

    tokens → block hashes → the first one that neither tier has → what the folder says of that place

Runs in an engine, on a thread of its own, or without one (`python -m omlxd.engine.server.explain`), where
tokenizer and template are all that is loaded, only the SSD tier can be asked, and turns of which the
engine remembered how they were generated are rendered anew. No KV is restored or touched by asking.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ...chat import GenerateRequest
from ...errors import OmlxdError
from ...kv.checkpoint import checkpoint_name
from ...kv.files.namespace import NamespaceInfo, differences, read_namespace
from ...kv.files.paths import block_path, is_namespace_dir, namespace_dir
from ...kv.hashing import BlockHash, ExtraKey, chain_root, hash_blocks
from ...wire.explanation import Explanation, OtherNamespace
from ..process.children import Child, children

SEARCH_S = 5.0
"""How long headers are read, for the block that stands where the prompt's would: some 100,000 files."""
BEFORE, AFTER = 24, 16
"""Tokens of text that are shown on either side of the difference."""
MOST_NAMESPACES = 64
_RUN = re.compile(r"(<[^<>\s]{1,60}>)\1{3,}")
"""Of one control token, as an image is written in a prompt."""

ExtraKeys = Mapping[int, Sequence[ExtraKey]]

Placed = tuple[int, int, str]
"""(first token, end, name) of an image."""

Where = Callable[[BlockHash], str]
"""Which tier has a block: `hot`, `cold`, or "" for neither."""


@dataclass(slots=True)
class Explainer:
    """What is asked of a model. `where` and `stands`: of its tiers, callable from any thread.

    prompt_of  the prompt as the model gets it, the extra keys of its blocks, and its images
    text_of    token ids as text
    stands     whether a checkpoint stands after that block; None: the model needs none
    root       the cache dir; None without a cold tier
    """

    prompt_of: Callable[[GenerateRequest], tuple[list[int], ExtraKeys, Sequence[Placed]]]
    text_of: Callable[[Sequence[int]], str]
    namespace: BlockHash
    block_size: int
    where: Where
    stands: Callable[[BlockHash], bool] | None
    root: Path | None
    model_id: str
    model_path: str
    reuse_off: str = ""

    def explain_request(self, request: GenerateRequest, reached: int = -1) -> Explanation:
        """`reached`: tokens that were cached when the request ran; -1: look at what is stored now.

        Raises OmlxdError for a prompt that can't be rendered.
        """
        tokens, keys, images = self.prompt_of(request)
        size = self.block_size
        root = chain_root(self.namespace, request.cache_salt)
        # A hit always leaves a token to compute.
        hashes = hash_blocks(root, tokens, size, keys)[: max(0, len(tokens) - 1) // size]
        tiers = self._chain(hashes) if reached < 0 else ["hot"] * min(len(hashes), reached // size)
        chain = len(tiers)
        usable = self._usable(hashes, chain) if reached < 0 else chain
        cause = "none" if usable == len(hashes) else "never_stored"
        explanation = Explanation(
            cause=cause,
            prompt_tokens=len(tokens),
            block_size=size,
            namespace=namespace_dir(self.namespace),
            hot_tokens=reached if reached >= 0 else tiers[:usable].count("hot") * size,
            cold_tokens=tiers[:usable].count("cold") * size,
            chain_tokens=chain * size,
            position=chain * size,
        )
        if self.reuse_off:
            return replace(explanation, cause="reuse_off", reason=self.reuse_off)
        if cause == "none":
            return explanation
        explanation = replace(explanation, **self._texts(tokens, chain * size))
        if usable < chain:
            explanation = replace(explanation, cause="no_checkpoint")
        elif elsewhere := self._elsewhere(tokens, keys, request, chain):
            explanation = replace(explanation, cause="other_namespace", elsewhere=elsewhere)
        # All that is left of the past is what was restored; where checkpoints are needed, the chain of blocks
        # may have reached further than it.
        further = reached >= 0 and self.stands is not None
        explanation = self._beside(
            explanation, tokens, keys, [root, *hashes], chain, len(hashes) if further else chain + 1
        )
        if not explanation.other_image:
            return explanation
        which = (name for start, stop, name in images if start <= explanation.position < stop)
        return replace(explanation, image=next(which, ""))

    def _chain(self, hashes: Sequence[BlockHash]) -> list[str]:
        return [*takewhile(bool, map(self.where, hashes))]

    def files_of(self, request: GenerateRequest) -> Explanation:
        """The files that `request` is restored from now; nothing of why it misses. Raises OmlxdError."""
        tokens, keys, _ = self.prompt_of(request)
        hashes = hash_blocks(chain_root(self.namespace, request.cache_salt), tokens, self.block_size, keys)
        chain = hashes[: len(self._chain(hashes))]
        stands = self.stands
        names = chain if stands is None else [*chain, *map(checkpoint_name, filter(stands, chain))]
        files = tuple(block_path(self.namespace, name) for name in names)
        return Explanation(
            "none",
            len(tokens),
            self.block_size,
            chain_tokens=len(chain) * self.block_size,
            files=files,
        )

    def _usable(self, hashes: Sequence[BlockHash], chain: int) -> int:
        """Blocks that a request could begin from: up to the deepest checkpoint, where one is needed."""
        if self.stands is None:
            return chain
        return next((length for length in range(chain, 0, -1) if self.stands(hashes[length - 1])), 0)

    def _texts(self, tokens: Sequence[int], position: int) -> dict[str, str]:
        return {
            "before": self._text(tokens[max(0, position - BEFORE) : position]),
            "prompt": self._text(tokens[position : position + AFTER]),
        }

    def _text(self, tokens: Sequence[int]) -> str:
        """An image's token is written once, with how many there are."""
        return _RUN.sub(lambda run: f"{run[1]} x {len(run[0]) // len(run[1])}", self.text_of(tokens))

    # ----------------------------------------------------------------- what stands there instead

    def _beside(
        self,
        explanation: Explanation,
        tokens: Sequence[int],
        keys: ExtraKeys,
        chain: Sequence[BlockHash],
        first: int,
        end: int,
    ) -> Explanation:
        """The stored block that has most in common with the prompt's own of the same parent.

        chain       the root, then the prompt's blocks
        first, end  of the blocks that are looked at; the first one that has another beside it counts
        """
        end = min(end, len(chain) - 1)
        if first < end:
            explanation = replace(explanation, missing=block_path(self.namespace, chain[first + 1]))
        if self.root is None or first >= end:
            return explanation
        search = children(self.root / namespace_dir(self.namespace), chain[first:end], SEARCH_S)
        explanation = replace(explanation, looked=search.looked, complete=search.complete)
        beside = (
            (at, [child for child in search.children.get(chain[at], []) if child.block_hash != chain[at + 1]])
            for at in range(first, end)
        )
        at, others = next(((at, others) for at, others in beside if others), (first, []))
        if not others:
            return explanation
        if at > first:
            explanation = replace(
                explanation, cause="no_checkpoint", chain_tokens=at * self.block_size, missing=""
            )
        own = list(tokens[at * self.block_size : (at + 1) * self.block_size])

        def nearness(child: Child) -> tuple[int, float]:
            return _shared(child.tokens, own), child.used

        nearest = max(others, key=nearness)
        common = _shared(nearest.tokens, own)
        image = _other_image(tuple(keys.get(at, ())), nearest.extra_keys)
        is_image = False
        if image is not None and image <= common:
            common, is_image = image, True
        cause = "other_image" if is_image else "differs"
        position = at * self.block_size + common
        return replace(
            explanation,
            cause=cause if explanation.cause == "never_stored" else explanation.cause,
            other_image=is_image,
            position=position,
            stored="" if is_image else self._text(nearest.tokens[common : common + AFTER]),
            stored_used=nearest.used,
            **self._texts(tokens, position),
        )

    def _elsewhere(
        self, tokens: Sequence[int], keys: ExtraKeys, request: GenerateRequest, chain: int
    ) -> tuple[OtherNamespace, ...]:
        """Namespaces of the same model that reach further than ours, and in what they differ."""
        if self.root is None:
            return ()
        own = read_namespace(self.root, namespace_dir(self.namespace))
        others: list[OtherNamespace] = []
        for info in _namespaces(self.root):
            if info.facts_digest == self.namespace.hex() or not self._same_model(info):
                continue
            other, size = bytes.fromhex(info.facts_digest), info.block_size
            root, limit = chain_root(other, request.cache_salt), max(0, len(tokens) - 1) // size
            # Keys are of blocks of our size; a prompt with images is not looked for in others.
            hashes = hash_blocks(root, tokens, size, keys) if size == self.block_size or not keys else []
            paths = (self.root / block_path(other, block_hash) for block_hash in hashes[:limit])
            held = size * sum(1 for _ in takewhile(Path.is_file, paths))
            if held > chain * self.block_size:
                differs = differences(own.facts if own else {}, info.facts)
                whose = _whose(info, own) if own and "adapter" in differs else ""
                differs.pop("adapter", None)
                others.append(
                    OtherNamespace(namespace_dir(other), held, tuple(differs.values()), adapter=whose)
                )
        return tuple(sorted(others, key=lambda other: -other.tokens))

    def _same_model(self, info: NamespaceInfo) -> bool:
        return info.is_called(self.model_id) or info.is_called(self.model_path)


def _namespaces(root: Path) -> list[NamespaceInfo]:
    """Described namespaces, whose description fits their folder; of several ranks, rank 0's."""
    try:
        folders = [entry.name for entry in root.iterdir() if is_namespace_dir(entry.name)]
    except OSError:
        return []
    infos = [(folder, read_namespace(root, folder)) for folder in sorted(folders)[:MOST_NAMESPACES]]
    return [info for folder, info in infos if info is not None and not info.lead and _fits(folder, info)]


def _fits(folder: str, info: NamespaceInfo) -> bool:
    digest = info.facts_digest
    return len(digest) == 64 and digest.startswith(folder) and info.block_size > 0


def _whose(other: NamespaceInfo, own: NamespaceInfo) -> str:
    """In words, of KV of another adapter than ours, or of none."""
    name = Path(other.adapter).name
    if not other.facts.get("adapter"):
        return "the model itself"
    if not name:
        return "another adapter"
    if other.adapter == own.adapter:
        return f"the adapter {name} with other files"
    return f"the adapter {other.adapter if name == Path(own.adapter).name else name}"


# --------------------------------------------------------------------------- without an engine


class Offline(msgspec.Struct):
    """What `python -m omlxd.engine.server.explain` reads from stdin, as JSON.

    model  its id or the end of it, as the descriptions in the cache dir have it; "": the newest
    """

    root: str
    request: GenerateRequest
    model: str = ""


def offline(asked: Offline) -> Explanation:
    """As an engine of that model would explain it, knowing only what lies on disk. Raises OmlxdError."""
    root = Path(asked.root)
    infos = [info for info in _namespaces(root) if Path(info.model_path).is_dir()]
    if name := asked.model:
        infos = [info for info in infos if info.is_called(name) or info.has_short_name(name)]
    if not infos:
        what = f"of {asked.model!r} " if asked.model else ""
        raise OmlxdError(f"nothing {what}lies in {root} whose model's folder is still there")
    info = max(infos, key=lambda each: _used(root / each.facts_digest[:32]))
    from .. import mlx_adapter
    from ..prompt.pipeline import PromptPipeline
    from ..vision.documents import read_documents
    from ..vision.images import make_images, prompt_with_images
    from ..vision.media import Media

    folder = Path(info.model_path)
    tokenizer = mlx_adapter.load_tokenizer(folder)
    sees = mlx_adapter.blindness(folder) == ""
    media = Media()
    prompts = PromptPipeline(
        tokenizer, read_documents=lambda prompt: read_documents(prompt, media, sees=sees), images=sees
    )
    images = make_images(folder, prompts.traits.image, None, media) if sees else None
    namespace = bytes.fromhex(info.facts_digest)

    def has(block_hash: BlockHash) -> bool:
        return (root / block_path(namespace, block_hash)).is_file()

    return Explainer(
        prompt_of=lambda request: prompt_with_images(prompts.render(request.prompt), images, info.block_size),
        text_of=lambda tokens: tokenizer.decode(list(tokens)),
        namespace=namespace,
        block_size=info.block_size,
        where=lambda block_hash: "cold" if has(block_hash) else "",
        stands=(lambda block_hash: has(checkpoint_name(block_hash))) if info.facts.get("states") else None,
        root=root,
        model_id=info.model_id,
        model_path=info.model_path,
    ).explain_request(asked.request)


def _used(folder: Path) -> float:
    """When something was last stored in a namespace, roughly: its folders' times."""
    try:
        return max((entry.stat().st_mtime for entry in folder.iterdir()), default=0.0)
    except OSError:
        return 0.0


def main() -> int:
    """JSON on stdin → an Explanation on stdout, or a sentence on stderr and status 1."""
    try:
        asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Offline)
        sys.stdout.buffer.write(msgspec.json.encode(offline(asked)))
    except (OmlxdError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _other_image(own: tuple[ExtraKey, ...], stored: tuple[ExtraKey, ...]) -> int | None:
    """Where in its block the first image begins that is another one in a stored block; None: none is."""
    differing = [value for _, value in {*own} ^ {*stored}]
    starts = [max(0, int(value.rpartition("@")[2] or 0)) for value in differing if "@" in value]
    return min(starts) if stored and starts else None


def _shared(one: list[int], other: list[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


if __name__ == "__main__":
    sys.exit(main())
