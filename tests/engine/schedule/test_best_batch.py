"""Which batch a prefilled sequence joins: the one whose step then reads least more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from backends import use_backend

from omlxd.engine.schedule.decode_batch import DecodeBatch, best_batch
from omlxd.engine.sequence.sequence import SequenceKV
from omlxd.kv.layout import Group, KVLayout

PER_TOKEN = 4096
LAYOUT = KVLayout((Group(("layers.0.keys", "layers.0.values"), 2, 256, "F32"),))
WEIGHTS = 1000 * PER_TOKEN
"""As much as 1,000 tokens of KV."""


def batch(*lengths: int) -> DecodeBatch:
    made = DecodeBatch(None)
    made.rows = cast(Any, [SimpleNamespace(kv=SequenceKV(length=length), adapter=None) for length in lengths])
    return made


def chosen(
    length: int, *batches: DecodeBatch, batchable: bool = True, own_rows: bool = False
) -> DecodeBatch | None:
    model = SimpleNamespace(omlxd_own_rows=own_rows)
    loaded = SimpleNamespace(model=model, batchable=batchable, layout=LAYOUT, weight_bytes=WEIGHTS)
    return best_batch(
        batches, cast(Any, SimpleNamespace(kv=SequenceKV(length=length), adapter=None)), cast(Any, loaded)
    )


def test_the_layout_is_as_the_figures_here_take_it():
    assert LAYOUT.nbytes(1) == PER_TOKEN


def test_a_row_joins_the_batch_that_pads_least():
    short, long = batch(100, 90), batch(5000)
    assert chosen(110, short, long) is short
    assert chosen(4900, short, long) is long


def test_padding_that_costs_more_than_the_weights_is_worth_a_pass_of_its_own():
    assert chosen(1001, batch(10)) is not None, "10 padded to 1,001: less than weights and 1,001"
    assert chosen(3000, batch(10, 10)) is None, "6,000 more by padding two rows, 4,000 in a pass of its own"
    assert chosen(10, batch(3000)) is None, "3,000 more, against 1,010"


def test_rows_with_arrays_of_their_own_pad_nothing():
    assert chosen(3000, batch(10, 10), own_rows=True) is not None
    assert chosen(10, batch(3000), own_rows=True) is not None


def test_on_cuda_unequal_rows_cost_more(monkeypatch: pytest.MonkeyPatch):
    assert chosen(700, batch(800)) is not None
    use_backend(monkeypatch, "cuda")
    assert chosen(700, batch(800)) is None, "both would leave the fused kernel"
    assert chosen(800, batch(800)) is not None, "equal rows stay in it"
    assert chosen(10, batch(20)) is not None, "so little KV that a pass of its own costs more"


def test_a_model_that_can_not_batch_decodes_alone():
    assert chosen(10, batch(10), batchable=False) is None
    assert chosen(10) is None
