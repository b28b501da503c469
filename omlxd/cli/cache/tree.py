"""`python -m omlxd.cli.cache.tree DIR`: the prefixes of a cache dir as trees, by the heads of its files.

Prints JSON (`Trees`). With `NAMESPACE ID` behind it: the files below a node, a line each; ID "" means all of
the namespace. It is a program of its own because a hundred thousand files take seconds of a processor.

A node is a run of blocks that nothing branches off. Nothing is verified: this is for people to look at.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import msgspec

from . import inventory

HEAD = 2048
"""Bytes of a file that hold its parent and the first of its tokens."""
SHOWN, COMMON = 24, 4
"""Tokens of a node's text; of these, tokens that it has in common with the nodes beside it."""
LABELLED = 4000
"""Nodes that get a text, the last used ones first: a tokeniser takes some 20 microseconds for each."""


class Node(msgspec.Struct, array_like=True):
    """`id`: the beginning of its first block's name. `used`: seconds since 1970, the newest of its own."""

    depth: int
    id: str
    blocks: int
    bytes: int
    used: float
    text: str


class Tree(msgspec.Struct):
    """`nodes`: each before its children, the last used ones first. `other_files`: records of answers."""

    namespace: str
    model: str
    block_size: int
    nodes: list[Node]
    other_files: int = 0
    other_bytes: int = 0


class Trees(msgspec.Struct):
    trees: list[Tree]


@dataclass(slots=True)
class _Block:
    path: str
    parent: str
    nbytes: int
    used: float
    tokens: bytes
    children: list[str] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    newest: float = 0.0


ID = 20
"""Hex digits of an id: enough to tell a namespace's blocks apart."""


def read_blocks(root: Path, namespace: str) -> tuple[dict[str, _Block], list[inventory.Found]]:
    """Blocks by name, each with its children; and records, with whatever has no readable head."""
    blocks: dict[str, _Block] = {}
    checkpoints: list[tuple[str, inventory.Found]] = []
    others: list[inventory.Found] = []
    for found in inventory.walk(root, [namespace]):
        if found.kind not in ("block", "record"):
            continue
        head = b""
        if found.kind == "block":
            with contextlib.suppress(OSError):
                head = read_head(f"{root}/{found.path}")
        parent = head.partition(b'"parent":"')[2][:64].decode("ascii", "replace")
        if b'"kind":"tokens"' in head:
            tokens = head.partition(b'"tokens":"')[2].partition(b'"')[0]
            blocks[found.name] = _Block(found.path, parent, found.disk, found.used, tokens)
        elif parent:
            checkpoints.append((parent, found))
        else:
            others.append(found)
    for parent, found in checkpoints:
        if block := blocks.get(parent):
            block.checkpoints.append(found.path)
            block.nbytes += found.disk
        else:
            others.append(found)
    for name, block in blocks.items():
        if above := blocks.get(block.parent):
            above.children.append(name)
    return blocks, others


def read_head(path: str) -> bytes:
    """The beginning of a block's file, as much as says what it is. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(fd, HEAD)
    finally:
        os.close(fd)


def tree_of(root: Path, namespace: str, info: Any) -> Tree:
    blocks, others = read_blocks(root, namespace)
    roots = [name for name, block in blocks.items() if block.parent not in blocks]
    _note_newest(blocks, roots)
    nodes: list[Node] = []
    decode = _decoder(info.model_path if info else "")
    waiting = [(0, name, skip) for name, skip in _beside(blocks, roots)]
    while waiting:
        depth, name, skip = waiting.pop()
        first = last = blocks[name]
        count, nbytes, used = 1, first.nbytes, first.used
        while len(last.children) == 1:
            last = blocks[last.children[0]]
            count, nbytes, used = count + 1, nbytes + last.nbytes, max(used, last.used)
        text = ""
        if len(nodes) < LABELLED and first.tokens:
            tokens = first.tokens.split(b",")
            start = max(0, min(skip - COMMON, len(tokens) - SHOWN))
            ids = [int(token) for token in tokens[start : start + SHOWN] if token.isdigit()]
            text = ("…" if start else "") + decode(ids)
        nodes.append(Node(depth, name[:ID], count, nbytes, round(used, 1), text))
        waiting += [(depth + 1, child, skip) for child, skip in _beside(blocks, last.children)]
    return Tree(
        namespace,
        info.model_id if info else "",
        info.block_size if info else 0,
        nodes,
        len(others),
        sum(other.disk for other in others),
    )


def _note_newest(blocks: dict[str, _Block], roots: list[str]) -> None:
    """In `newest` when anything from a block on was last used."""
    for name in _upwards(blocks, roots):
        block = blocks[name]
        block.newest = max([block.used, *(blocks[child].newest for child in block.children)])


def _upwards(blocks: dict[str, _Block], roots: list[str]) -> Iterator[str]:
    """Blocks from `roots` on, children before parents."""
    order: list[str] = []
    waiting = [*roots]
    while waiting:
        order.append(name := waiting.pop())
        waiting += blocks[name].children
    return reversed(order)


def _beside(blocks: dict[str, _Block], names: list[str]) -> Iterator[tuple[str, int]]:
    """Nodes beside each other, the last used one at the end, each with the tokens it shares with its like."""
    ordered = sorted(names, key=lambda name: blocks[name].newest)
    texts = sorted((blocks[name].tokens.split(b","), name) for name in ordered)
    shared = dict.fromkeys(names, 0)
    for (first, one), (second, other) in pairwise(texts):
        pairs = zip(first, second, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        shared[one], shared[other] = max(shared[one], same), max(shared[other], same)
    return ((name, shared[name]) for name in ordered)


def _decoder(model_path: str) -> Any:
    """Token ids → text, by the model's own tokeniser; "" where it has none."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(f"{model_path}/tokenizer.json")
    except Exception:  # It raises plain Exceptions.
        return lambda ids: ""
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def files_below(root: Path, namespace: str, id: str) -> Iterator[str]:
    """Files of the node `id` and of all below it, children before parents; "": all of the namespace."""
    blocks, others = read_blocks(root, namespace)
    roots = [name for name in blocks if name.startswith(id) and (id or blocks[name].parent not in blocks)]
    for name in _upwards(blocks, roots):
        yield from blocks[name].checkpoints
        yield blocks[name].path
    if not id:
        yield from (other.path for other in others)


def main(argv: list[str]) -> int:
    root = Path(argv[0])
    if len(argv) == 3:
        for path in files_below(root, argv[1], argv[2]):
            print(path)
        return 0
    try:
        infos = inventory.namespaces(root)
    except FileNotFoundError:
        infos = {}
    trees = [tree_of(root, namespace, info) for namespace, info in infos.items()]
    sys.stdout.buffer.write(msgspec.json.encode(Trees([tree for tree in trees if tree.nodes])))
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 4):
        sys.exit("usage: python -m omlxd.cli.cache.tree DIR [NAMESPACE ID]")
    sys.exit(main(sys.argv[1:]))
