"""Blocks of models that are not installed go first; the cap holds over model switches and restarts."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from fast_or_slow import rest_slow
from hypothesis import given
from hypothesis import strategies as st
from kv_fakes import bytes_on_disk

from omlxd.kv.files.fs import FileSystem
from omlxd.kv.files.namespace import (
    FILE_NAME,
    MOST_COPIES,
    NamespaceInfo,
    describe_namespace,
    read_namespace,
)
from omlxd.kv.ledger import ledger as ledger_module
from omlxd.kv.ledger.eviction_order import FileOrder
from omlxd.kv.ledger.ledger import Ledger

PAGE = 4096


class House:
    """A cache dir, models beside it, and a ledger over both. Namespace `letter` is that letter 32 times."""

    def __init__(self, root: Path, cap: int = 10):
        self.root = root
        self.cache = root / "cache"
        self.cap = cap * PAGE
        self.count = 0
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.cache, self.cap)
        self.ledger.open()

    def reopen(self) -> None:
        self.ledger.close()
        self.open()

    def model(self, name: str) -> str:
        path = self.root / "models" / name
        if not path.exists():
            path.mkdir(parents=True)
            (path / "config.json").write_text(name)
        return str(path)

    def describe(self, letter: str, model: str, lead: str = "") -> None:
        describe_namespace(
            self.cache,
            NamespaceInfo(
                model_id=model,
                model_path=self.model(model),
                model_type="tiny",
                block_size=4,
                block_bytes=PAGE,
                facts_digest=letter * 64,
                lead=lead * 32,
            ),
            FileSystem(),
        )

    def load(self, letter: str, model: str) -> None:
        """As an engine does: describe, then say that it is loaded."""
        self.describe(letter, model)
        self.ledger.engine_loaded(letter * 32, self.model(model))

    def store(self, letter: str, count: int = 1) -> None:
        for _ in range(count):
            assert self.ledger.reserve(PAGE) == PAGE
            self.check(slack=PAGE)
            self.count += 1
            path = f"{letter * 32}/{self.count % 256:02x}/{self.count:064x}.safetensors"
            (self.cache / path).parent.mkdir(parents=True, exist_ok=True)
            (self.cache / path).write_bytes(bytes(PAGE))
            self.ledger.stored([(path, PAGE)])
            self.check()

    def check(self, slack: int = 0) -> None:
        blocks = [p for p in self.cache.rglob("*.safetensors") if p.is_file()]
        assert len(blocks) * PAGE + slack <= self.cap
        stats = self.ledger.stats()
        assert (stats.files, stats.bytes_used) == (len(blocks), len(blocks) * PAGE)

    def files(self) -> str:
        """The namespaces of all files, oldest first, as letters."""
        blocks = [p for p in self.cache.rglob("*.safetensors") if p.is_file()]
        return "".join(p.parts[-3][0] for p in sorted(blocks, key=lambda p: p.name))


@pytest.fixture
def house(tmp_path: Path):
    house = House(tmp_path)
    yield house
    house.ledger.close()


def test_an_undescribed_namespace_goes_before_older_files_of_a_model(house):
    house.load("a", "one")
    house.store("a", 5)
    house.store("b", 5)
    house.reopen()
    house.store("a", 3)
    assert house.files() == "aaaaabb" + "aaa"
    assert house.ledger.stats().orphans_evicted_total == 3


def test_a_removed_model_goes_first_and_oldest_first_among_orphans(house):
    for letter, model in (("a", "kept"), ("b", "gone"), ("c", "gone too")):
        house.load(letter, model)
        house.store(letter, 3)
        house.ledger.engine_gone(0, 1, letter * 32)
    house.store("b")
    shutil.rmtree(house.model("gone"))
    shutil.rmtree(house.model("gone too"))
    house.load("d", "new")
    house.store("d", 4)
    assert house.files() == "aaa" + "cc" + "b" + "dddd"
    house.store("d", 4)
    assert house.files() == "aa" + "d" * 8


def test_the_description_of_a_model_that_is_being_loaded_again_stays(house):
    """Its settings were changed, and changed back: until it is loaded its namespace is an orphan."""
    house.load("a", "one")
    house.store("a")
    house.ledger.engine_gone(0, 1, "a" * 32)
    house.load("b", "one")
    house.store("b", 9)
    house.describe("a", "one")
    house.store("b", 1)
    assert "a" not in house.files()
    house.ledger.engine_loaded("a" * 32, house.model("one"))
    assert read_namespace(house.cache, "a" * 32) is not None


def test_a_model_in_use_is_no_orphan_whatever_becomes_of_its_folder(house):
    house.load("a", "one")
    house.store("a", 5)
    house.load("b", "two")
    house.store("b", 5)
    shutil.rmtree(house.model("one"))
    (house.cache / ("a" * 32) / FILE_NAME).unlink()
    house.store("b")
    assert house.files() == "aaaabbbbb" + "b"
    house.ledger.engine_gone(0, 1, "b" * 32)
    house.ledger.engine_gone(0, 1, "a" * 32)
    house.load("b", "two")
    house.store("b", 3)
    assert house.files() == "a" + "b" * 9


def test_a_ranks_share_is_an_orphan_when_rank_0s_is(house):
    """Both are of one folder, of which one namespace alone is loaded: rank 0's."""
    house.load("a", "one")
    house.describe("b", "one", lead="a")
    house.store("c", 2)
    for letter in "bab":
        house.store(letter, 2)
    house.store("a", 4)
    assert house.files() == "bbaabb" + "aaaa"
    house.ledger.engine_gone(0, 1, "a" * 32)
    house.store("a", 2)
    assert house.files() == "aabb" + "aaaaaa"
    house.load("d", "one")  # With other settings.
    house.store("d", 6)
    assert house.files() == "aaaa" + "d" * 6


@pytest.mark.parametrize("restarted", [False, True])
def test_the_shares_of_a_block_go_together(house, restarted):
    """Whichever rank's file is the oldest, since a block is a hit where all ranks have it."""
    house.describe("a", "one")
    house.ledger.engine_loaded("a" * 32, house.model("one"), ["b" * 32])

    def store(letter: str, *numbers: int) -> None:
        for number in numbers:
            house.count = number - 1
            house.store(letter)

    def kept(letter: str) -> list[int]:
        return sorted(int(file.stem, 16) for file in house.cache.glob(f"{letter * 32}/*/*.safetensors"))

    for letter in "ab":  # Rank 1 is behind.
        store(letter, 5, 4, 3, 2, 1)
    if restarted:
        house.describe("b", "one", lead="a")
        for at, file in enumerate(sorted(house.cache.rglob("*.safetensors"))):
            os.utime(file, (at, at))  # All of rank 0's first.
        house.ledger.close()
        house.ledger = Ledger(house.cache, house.cap)
        house.ledger.open()
        store("a", 6, 7)
        assert (kept("a"), kept("b")) == ([2, 3, 4, 5, 6, 7], [2, 3, 4, 5])
        return
    store("b", 6, 7)
    assert (kept("a"), kept("b")) == ([1, 2, 3, 4], [1, 2, 3, 4, 6, 7])


def test_a_namespace_that_was_superseded_goes_first_until_it_is_loaded_again(house):
    house.load("a", "one")
    house.store("a", 4)
    house.ledger.engine_gone(0, 1, "a" * 32)
    house.load("b", "other")
    house.store("b", 2)
    house.load("c", "one")  # the same folder, with other weights
    house.store("c", 4)
    house.store("b", 2)
    assert house.files() == "aa" + "bb" + "cccc" + "bb"
    house.ledger.engine_gone(0, 1, "c" * 32)
    house.load("a", "one")
    house.store("b", 2)
    assert house.files() == "aa" + "bb" + "cc" + "bb" + "bb"


@pytest.fixture
def copies(house):
    """Blocks of another model, and newer ones that two copies of a model with equal files have stored."""
    house.load("b", "other")
    house.store("b", 6)
    house.ledger.engine_gone(0, 1, "b" * 32)
    for model in ("one", "two"):
        house.load("a", model)
        house.store("a", 2)
        house.ledger.engine_gone(0, 1, "a" * 32)
    return house


@pytest.mark.parametrize("gone", ["one", "two"])
def test_a_copy_that_is_removed_leaves_the_others_their_blocks(copies, gone):
    """Each of them hits what any of them has stored."""
    shutil.rmtree(copies.model(gone))
    copies.load("c", "new")
    copies.store("c", 6)
    assert copies.files() == "aaaa" + "c" * 6, "the least recently used went"
    shutil.rmtree(copies.model("one" if gone == "two" else "two"))
    copies.load("c", "new")
    copies.store("c", 1)
    assert copies.files() == "aaa" + "c" * 7 and copies.ledger.stats().orphans_evicted_total == 1


def test_a_copy_with_other_weights_leaves_the_others_their_blocks(copies):
    copies.load("c", "two")
    copies.store("c", 2)
    assert copies.files() == "bbbbaaaa" + "cc"
    copies.ledger.engine_gone(0, 1, "c" * 32)
    copies.load("c", "one")
    copies.store("c", 1)
    assert copies.files() == "bbbbaaa" + "ccc", "superseded in both"


def test_a_folder_that_was_renamed_is_still_there(copies):
    """Until it is loaded by its new name nothing says so but the files in it."""
    models = copies.root / "models"
    shutil.rmtree(models / "one")
    (models / "two").rename(models / "three")
    copies.load("c", "new")
    copies.store("c", 2)
    assert copies.files() == "bbbbaaaa" + "cc"
    copies.load("a", "three")
    copies.ledger.engine_gone(0, 1, "a" * 32)
    (models / "three").rename(copies.root / "moved")
    copies.load("c", "new")
    copies.store("c", 1)
    assert copies.files() == "bbbbaaa" + "ccc", "one that left its place is gone"


def test_a_description_has_an_end(house):
    for number in range(MOST_COPIES + 5):
        house.describe("a", f"copy {number}")
    info = read_namespace(house.cache, "a" * 32)
    assert info is not None and info.names == [f"copy {number}" for number in range(20, 4, -1)]
    shutil.rmtree(house.model("copy 20"))
    info = read_namespace(house.cache, "a" * 32)
    assert info is not None and info.model_id == "copy 19" and info.is_called("copy 20")


def test_a_description_of_an_earlier_version_has_one_model(house):
    house.describe("a", "one")
    path = house.cache / ("a" * 32) / FILE_NAME
    fields = json.loads(path.read_text())
    del fields["copies"]
    path.write_text(json.dumps(fields))
    info = read_namespace(house.cache, "a" * 32)
    assert info is not None and info.names == ["one"] and info.copies[0].is_here()
    shutil.rmtree(house.model("one"))
    assert not info.copies[0].is_here()


def test_two_engines_of_one_folder_are_both_in_use(house):
    for letter in "ab":
        house.load(letter, "one")
        house.store(letter, 5)
    house.store("b", 2)
    assert house.files() == "aaa" + "b" * 7 and house.ledger.stats().orphans_evicted_total == 0


def test_a_folder_that_goes_while_nobody_loads_is_noticed_in_time(house, monkeypatch):
    for letter, model in (("a", "one"), ("b", "two")):
        house.load(letter, model)
        house.store(letter, 5)
    house.ledger.engine_gone(0, 1, "b" * 32)
    shutil.rmtree(house.model("two"))
    monkeypatch.setattr(ledger_module, "JUDGE_S", 0.0)
    house.store("a", 2)
    assert house.files() == "aaaaabbb" + "aa"


def test_an_orphans_folder_goes_with_its_last_file_and_strangers_stay(house):
    house.describe("a", "one")
    house.store("a", 3)
    house.describe("b", "two")
    house.store("b", 3)
    (house.cache / ("b" * 32) / "mine.txt").write_text("")
    for model in ("one", "two"):
        shutil.rmtree(house.model(model))
    house.load("c", "three")
    house.store("c", 10)
    assert not (house.cache / ("a" * 32)).exists()
    assert sorted(p.name for p in (house.cache / ("b" * 32)).iterdir()) == ["mine.txt", FILE_NAME]
    house.store("a")


def test_an_orphans_folder_goes_too_where_the_owner_removes_its_files(house):
    for letter, model in (("a", "one"), ("b", "two")):
        house.load(letter, model)
        house.store(letter, 3)
        house.ledger.engine_gone(0, 1, letter * 32)
    shutil.rmtree(house.model("one"))
    paths = [str(p.relative_to(house.cache)) for p in sorted(house.cache.rglob("*.safetensors"))]
    assert house.ledger.forget(paths, remove=True)[0] == 6
    assert [p.name[0] for p in house.cache.iterdir() if p.is_dir()] == ["b"]


def test_a_dead_engines_temporary_files_go_and_a_living_ones_stay(house):
    house.load("a", "one")
    house.load("b", "two")
    assert house.ledger.reserve(4 * PAGE)
    temps = {}
    for letter, pid in (("a", 77), ("a", 78), ("b", 78), ("b", 77)):
        temp = house.cache / (letter * 32) / "00" / f"{0:064x}.safetensors.{pid}-1.tmp"
        temp.parent.mkdir(parents=True, exist_ok=True)
        temp.write_bytes(bytes(PAGE))
        temps[letter, pid] = temp
    house.ledger.engine_gone(PAGE, 77, "a" * 32)
    assert [key for key, temp in temps.items() if not temp.exists()] == [("a", 77)]
    assert house.ledger.stats().reserved == 3 * PAGE and house.ledger.stats().files == 0
    house.ledger.engine_gone(2 * PAGE, 78)
    assert [key for key, temp in temps.items() if temp.exists()] == [("b", 77)]
    house.reopen()
    assert not temps["b", 77].exists()


@pytest.mark.parametrize("seed", rest_slow(range(8), 0, 1))
def test_the_cap_holds_over_model_switches_restarts_and_removals(tmp_path, seed):
    dice = random.Random(seed)
    house = House(tmp_path, cap=12)
    loaded: list[str] = []
    for _ in range(250):
        step = dice.randrange(12)
        letter = dice.choice("abcd")
        if step == 0:
            house.cap = dice.randrange(4, 14) * PAGE
            house.reopen()
            loaded.clear()
        elif step == 1:
            house.load(letter, dice.choice(("one", "two", "three")))
            loaded.append(letter)
        elif step == 2 and loaded:
            gone = loaded.pop()
            assert house.ledger.reserve(2 * PAGE)
            house.ledger.engine_gone(2 * PAGE, 1, gone * 32)
        elif step == 3:
            shutil.rmtree(house.model(dice.choice(("one", "two", "three"))))
        else:
            house.store(dice.choice(loaded) if loaded else letter)
        house.check()
        assert bytes_on_disk(house.cache) <= house.cap + 4 * PAGE, "what is not counted is small"
    assert house.ledger.stats().reserved == 0
    house.ledger.close()


# --------------------------------------------------------------------- the order itself

STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "touch", "remove", "pop", "orphan", "stuck"]), st.integers(0, 11)),
    max_size=60,
)


@given(STEPS)
def test_the_order_is_that_of_a_sorted_list(steps):
    """Against the plain way: sort by (orphan or not, age) at every removal."""
    order, model, orphans = FileOrder(), {}, set()
    for clock, (what, number) in enumerate(steps):
        namespace = f"n{number % 3}"
        path = f"{namespace}/{number}"
        if what == "add":
            order.add(path, number)
            model[path] = (namespace, clock, number)
        elif what == "touch":
            order.touch(path)
            if path in model:
                model[path] = (model[path][0], clock, model[path][2])
        elif what == "remove":
            order.remove(path)
            model.pop(path, None)
        elif what == "orphan":
            orphans ^= {namespace}
            order.set_orphans(orphans)
        else:
            first = min(model, key=lambda p: (model[p][0] not in orphans, model[p][1]), default=None)
            expected = None if first is None else (first, model[first][2])
            assert order.pop_oldest() == expected
            if first is not None:
                _, _, size = model.pop(first)
                if what == "stuck":
                    order.add_stuck(first, size)
                    model[first] = ("", clock, size)
        assert len(order) == len(model) and order.nbytes == sum(size for _, _, size in model.values())
        assert set(order.namespaces) == {p.partition("/")[0] for p, (ns, _, _) in model.items() if ns}
