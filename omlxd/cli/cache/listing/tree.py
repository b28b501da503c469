"""`python -m omlxd.cli.cache.listing.tree DIR`: prefixes of a cache dir as trees, by its files' heads.

Reads orders from standard input, a line each, and ends with it. `tree` prints lines of JSON (`Trees`, each
with `PIECE` nodes at most), `below NAMESPACE ID` the files below a node, children first; ID `-` means all of
the namespace. An empty line ends each answer. A head is read once: a later order reads those of new files
alone. It is a program of its own because a hundred thousand files take seconds of a processor.

A node is a run of blocks that nothing branches off. Nothing is verified: this is for people to look at.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import msgspec

from .. import inventory
from .said import Reader, Said

HEAD = 8192
"""Bytes of a file that hold its parent and its tokens; of blocks above 1,024 tokens the first ones."""
SHOWN, COMMON = 24, 4
"""Tokens of a node's text; of these, tokens that it has in common with its siblings."""
LABELLED = 4000
"""Nodes that get a text, the last used ones first: a tokeniser takes some 20 microseconds for each."""
PIECE, MOST_NODES = 250, 20_000
"""Nodes of a line, and of all lines of an order: of a larger tree the last used ones."""
MOST_TEXT = 160


class Node(msgspec.Struct, array_like=True):
    """A node of a tree. `id`: the beginning of its first block's name. `used`: seconds since 1970, the newest
    of its own.

    client  the program whose system prompt it begins with; "": unknown
    said    the first words of the user up to its end; "": it ends before them, or nobody knows
    turns   of the user, up to its end
    """

    depth: int
    id: str
    blocks: int
    bytes: int
    used: float
    text: str
    client: str = ""
    said: str = ""
    turns: int = 0


class Tree(msgspec.Struct):
    """A namespace's tree. `nodes`: each before its children, the last used ones first. `other_files`: records
    of answers.
    """

    namespace: str
    model: str
    block_size: int
    nodes: list[Node]
    other_files: int = 0
    other_bytes: int = 0


class Trees(msgspec.Struct):
    """Trees of a cache dir. `left_out`: nodes beyond the limit."""

    trees: list[Tree]
    left_out: int = 0


@dataclass(slots=True)
class _Block:
    path: str
    parent: str
    nbytes: int
    used: float
    tokens: bytes
    children: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    newest: float = 0.0


ID = 20
"""Hex digits of an id: enough to tell a namespace's blocks apart."""


class Heads:
    """The file heads of a cache dir's blocks. `read`: heads that were read."""

    def __init__(self, root: Path):
        self.root = root
        self.read = 0
        self._heads: dict[str, tuple[str, bytes]] = {}
        self._asked: dict[str, tuple[str, bytes]] = {}

    def forget_others(self) -> None:
        """Forget files that were not used since the last call."""
        self._heads, self._asked = self._asked, {}

    def of(self, found: inventory.CacheFile) -> tuple[str, bytes]:
        """Return a file's parent, "" where its head is unreadable, and its tokens; a checkpoint has none."""
        key = f"{found.namespace}{found.name}"
        known = self._heads.get(key)
        if known is None:
            self.read += 1
            head = b""
            with contextlib.suppress(OSError):
                head = read_head(f"{self.root}/{found.path}")
            parent = head.partition(b'"parent":"')[2][:64].decode("ascii", "replace")
            tokens, ended, _ = head.partition(b'"tokens":"')[2].partition(b'"')
            if b'"kind":"tokens"' not in head:
                tokens = b""
            known = parent, tokens if ended else tokens.rpartition(b",")[0]
        if known[0]:  # Else it is unreadable now, and may be whole the next time.
            self._asked[key] = known
        return known


def read_blocks(
    heads: Heads, namespace: str, shares: Sequence[str] = ()
) -> tuple[dict[str, _Block], list[inventory.CacheFile]]:
    """Return blocks by name, each with its children, its checkpoints, and what other ranks have of it in the
    folders `shares`; and records, with unreadable files.
    """
    blocks: dict[str, _Block] = {}
    owners: dict[str, _Block] = {}
    checkpoints: list[tuple[str, inventory.CacheFile]] = []
    others: list[inventory.CacheFile] = []
    for found in inventory.walk(heads.root, [namespace]):
        if found.kind not in ("block", "record"):
            continue
        parent, tokens = heads.of(found) if found.kind == "block" else ("", b"")
        if tokens:
            blocks[found.name] = _Block(found.path, parent, found.disk, found.used, tokens)
        elif parent:
            checkpoints.append((parent, found))
        else:
            others.append(found)
    for parent, found in checkpoints:
        if block := blocks.get(parent):
            block.beside.append(found.path)
            block.nbytes += found.disk
            owners[found.name] = block
        else:
            others.append(found)
    for found in inventory.walk(heads.root, [*shares]):
        if block := owners.get(found.name) or blocks.get(found.name):
            block.beside.append(found.path)
            block.nbytes += found.disk
        elif found.kind in ("block", "record"):
            others.append(found)
    for name, block in blocks.items():
        if above := blocks.get(block.parent):
            above.children.append(name)
    return blocks, others


def read_head(path: str) -> bytes:
    """Read the beginning of a block's file, up to its tokens. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(fd, HEAD)
    finally:
        os.close(fd)


def tree_of(heads: Heads, namespace: str, info: Any, shares: Sequence[str] = ()) -> Tree:
    blocks, others = read_blocks(heads, namespace, shares)
    roots = [name for name, block in blocks.items() if block.parent not in blocks]
    _note_newest(blocks, roots)
    nodes: list[Node] = []
    reader = Reader(info.model_path if info else "")
    waiting = [(0, name, skip, Said()) for name, skip in _siblings(blocks, roots)]
    while waiting:
        depth, name, skip, said = waiting.pop()
        first = last = blocks[name]
        count, nbytes, used, tokens = 1, first.nbytes, first.used, [first.tokens]
        while len(last.children) == 1:
            last = blocks[last.children[0]]
            count, nbytes, used = count + 1, nbytes + last.nbytes, max(used, last.used)
            tokens.append(last.tokens)
        said = reader.go_on(said, tokens)
        text = ""
        if len(nodes) < LABELLED:
            ids = first.tokens.split(b",")
            start = max(0, min(skip - COMMON, len(ids) - SHOWN))
            shown = [int(token) for token in ids[start : start + SHOWN] if token.isdigit()]
            text = (("…" if start else "") + reader.text_of(shown))[:MOST_TEXT]
        nodes.append(
            Node(
                *(depth, name[:ID], count, nbytes, round(used, 1), text),
                *(said.client, said.words, said.turns),
            )
        )
        waiting += [(depth + 1, child, skip, said) for child, skip in _siblings(blocks, last.children)]
    return Tree(
        namespace,
        info.model_id if info else "",
        info.block_size if info else 0,
        nodes,
        len(others),
        sum(other.disk for other in others),
    )


def _note_newest(blocks: dict[str, _Block], roots: list[str]) -> None:
    """Note in `newest` the last use of each block or one behind it."""
    for name in _upwards(blocks, roots):
        block = blocks[name]
        block.newest = max([block.used, *(blocks[child].newest for child in block.children)])


def _upwards(blocks: dict[str, _Block], roots: list[str]) -> Iterator[str]:
    """Yield blocks from `roots` on, children before parents."""
    order: list[str] = []
    waiting = [*roots]
    while waiting:
        order.append(name := waiting.pop())
        waiting += blocks[name].children
    return reversed(order)


def _siblings(blocks: dict[str, _Block], names: list[str]) -> Iterator[tuple[str, int]]:
    """Yield siblings, the last used one last, each with the tokens that it shares with the others."""
    ordered = sorted(names, key=lambda name: blocks[name].newest)
    texts = sorted((blocks[name].tokens.split(b","), name) for name in ordered)
    shared = dict.fromkeys(names, 0)
    for (first, one), (second, other) in pairwise(texts):
        pairs = zip(first, second, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        shared[one], shared[other] = max(shared[one], same), max(shared[other], same)
    return ((name, shared[name]) for name in ordered)


def files_below(heads: Heads, namespace: str, id: str) -> Iterator[str]:
    """Yield the files of node `id` and below, on all ranks, children first; "": all of the namespace."""
    shares = inventory.by_lead(inventory.namespaces(heads.root)).get(namespace, [])
    blocks, others = read_blocks(heads, namespace, shares)
    roots = [name for name in blocks if name.startswith(id) and (id or blocks[name].parent not in blocks)]
    for name in _upwards(blocks, roots):
        yield from blocks[name].beside
        yield blocks[name].path
    if not id:
        yield from (other.path for other in others)


def pieces(heads: Heads) -> Iterator[Trees]:
    """Yield all trees, at most `PIECE` nodes at once; a tree that goes on is named again."""
    try:
        infos = inventory.namespaces(heads.root)
    except FileNotFoundError:
        infos = {}
    room = MOST_NODES
    for namespace, shares in inventory.by_lead(infos).items():
        tree = tree_of(heads, namespace, infos[namespace], shares)
        left_out = max(0, len(tree.nodes) - room)
        nodes = tree.nodes[:room]
        room -= len(nodes)
        for at in range(0, len(nodes), PIECE):
            yield Trees([msgspec.structs.replace(tree, nodes=nodes[at : at + PIECE])])
        if left_out:
            yield Trees([], left_out)
    heads.forget_others()


def main(root: Path) -> int:
    heads = Heads(root)
    for line in sys.stdin:
        verb, *rest = line.split()
        if verb == "tree":
            for piece in pieces(heads):
                sys.stdout.buffer.write(msgspec.json.encode(piece) + b"\n")
        else:
            for path in files_below(heads, rest[0], rest[1].strip("-")):
                sys.stdout.buffer.write(path.encode() + b"\n")
        sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m omlxd.cli.cache.listing.tree DIR")
    sys.exit(main(Path(sys.argv[1])))
