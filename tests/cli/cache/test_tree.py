"""The SSD cache as trees, by the heads of its files, and what is below a node of one."""

import io
import os
import time
from pathlib import Path

import msgspec
import pytest
from cache_folder import KEYS, Cache, blocks_in
from kv_fakes import BLOCK, chain, payload_of

from omlxd.cli.cache.checks.verify import Verifier
from omlxd.cli.cache.listing import tree as program
from omlxd.cli.cache.listing.tree import Heads, Node, Trees, files_below, main, pieces, tree_of
from omlxd.kv.files.namespace import read_namespace


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", tmp_path / "model")


def tree(cache: Cache):
    namespace = cache.path().parent.parent.name
    return tree_of(Heads(cache.root), namespace, read_namespace(cache.root, namespace))


def branch(cache: Cache, shared: int, *blocks: int) -> None:
    """Store a chain that shares `shared` blocks with `KEYS`, and has others behind them, used that late."""
    tokens = [*range(shared * BLOCK), *(first for block in blocks for first in range(block, block + BLOCK))]
    for key in chain(tokens)[shared:]:
        cache.tier.store(key, payload_of(key.block_hash).buffers())
        used = time.time() + blocks[0]
        os.utime(cache.root / cache.tier.path_of(key.block_hash), (used, used))


def test_a_chain_is_one_node_with_its_checkpoints(cache: Cache):
    found = tree(cache)
    (node,) = found.nodes
    assert (found.model, node.depth, node.blocks) == ("org/tiny", 0, 8)
    assert KEYS[0].block_hash.hex().startswith(node.id)
    own = [file for file in blocks_in(cache.root) if file.is_relative_to(cache.path().parent.parent)]
    assert node.bytes == sum(-(-file.stat().st_size // 4096) * 4096 for file in own), "the checkpoint too"


def test_a_branch_ends_a_node_and_the_last_used_one_comes_first(cache: Cache):
    branch(cache, 4, 7000)
    branch(cache, 4, 8000, 9000)
    nodes = tree(cache).nodes
    assert [(node.depth, node.blocks) for node in nodes] == [(0, 4), (1, 2), (1, 1), (1, 4)]
    below = [*files_below(Heads(cache.root), cache.path().parent.parent.name, nodes[1].id)]
    assert len(below) == 2
    for path in below:
        (cache.root / path).unlink()
    assert [(node.depth, node.blocks) for node in tree(cache).nodes] == [(0, 4), (1, 1), (1, 4)]


def test_children_go_before_their_parents_and_a_whole_namespace_goes(cache: Cache):
    namespace = cache.path().parent.parent.name
    paths = [*files_below(Heads(cache.root), namespace, KEYS[0].block_hash.hex()[:20])]
    order = [path.rpartition("/")[2][:64] for path in paths]
    names = [key.block_hash.hex() for key in KEYS]
    assert [name for name in order if name in names] == names[::-1]
    assert set(paths) == set(files_below(Heads(cache.root), namespace, "")) and len(paths) == 9


def test_what_follows_a_missing_block_is_a_tree_of_its_own(cache: Cache):
    cache.path(3).unlink()
    assert sorted(node.blocks for node in tree(cache).nodes) == [3, 4]


def test_a_file_that_is_nonsense_is_left_out_and_goes_with_the_namespace(cache: Cache):
    cache.path(7).write_bytes(b"\xff" * 5000)
    found = tree(cache)
    assert [node.blocks for node in found.nodes] == [7] and found.other_files == 1
    assert len([*files_below(Heads(cache.root), found.namespace, "")]) == 9


def test_the_heads_say_what_a_check_of_the_whole_file_says(cache: Cache):
    for file in blocks_in(cache.root):
        assert not Verifier().verify(str(file), file.parent.parent.name, file.name[:64]).fault


def test_the_program_tells_all_models_and_an_empty_folder_has_none(
    cache: Cache, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("tree\nbelow " + "0" * 32 + " -\ntree\n"))
    assert main(cache.root) == 0
    *lines, none, _, again, _, _ = capfdbinary.readouterr().out.split(b"\n\n")[0].split(b"\n") + [b""] * 5
    told = [msgspec.json.decode(line, type=Trees) for line in lines]
    assert sorted((each.trees[0].model, len(each.trees[0].nodes)) for each in told) == [
        ("", 1),
        ("org/tiny", 1),
    ]
    assert all(isinstance(node, Node) for each in told for node in each.trees[0].nodes) and not none + again
    monkeypatch.setattr("sys.stdin", io.StringIO("tree\n"))
    assert main(tmp_path / "none") == 0
    assert capfdbinary.readouterr().out == b"\n"


def test_a_second_look_reads_the_heads_of_new_files_alone(cache: Cache):
    heads = Heads(cache.root)
    first = [*pieces(heads)]
    files = len(blocks_in(cache.root))
    assert heads.read == files
    assert [*pieces(heads)] == first and heads.read == files
    branch(cache, 4, 7000)
    cache.path(7).unlink()
    after = [*pieces(heads)]
    assert after != first and heads.read == files + 1
    cache.tier.store(KEYS[7], payload_of(KEYS[7].block_hash).buffers())
    assert [*pieces(heads)] != after and heads.read == files + 2, "what went is not remembered"


def test_many_nodes_come_in_pieces_and_too_many_are_left_out(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    for at in range(9):
        branch(cache, 4, 7000 + 100 * at)
    monkeypatch.setattr(program, "PIECE", 4)
    sizes = [len(tree.nodes) for each in pieces(Heads(cache.root)) for tree in each.trees]
    assert sum(sizes) == 12 and max(sizes) == 4
    monkeypatch.setattr(program, "MOST_NODES", 6)
    few = [*pieces(Heads(cache.root))]
    assert sum(len(tree.nodes) for each in few for tree in each.trees) == 6
    assert sum(each.left_out for each in few) == 6
