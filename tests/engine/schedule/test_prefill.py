"""The budget: whose chunk is next."""

from __future__ import annotations

from omlxd.chat import Sampling
from omlxd.engine.schedule.prefill import PATIENCE, PrefillBudget
from omlxd.engine.schedule.sampling import RowSampling, SamplerRow, SamplingDefaults
from omlxd.engine.sequence import Sequence


def waiting(length: int) -> Sequence:
    row = SamplerRow(RowSampling.of(Sampling(), SamplingDefaults()))
    return Sequence(0, [1] * length, length, bytes(32), [], 1, frozenset(), row)


def test_short_prompts_go_first_and_starve_no_long_one():
    budget = PrefillBudget(64)
    long = waiting(9000)
    long.kv_length = 2048
    picked = [budget.pick_sequence([long, waiting(100)]) for _ in range(5 * (PATIENCE + 1))]
    assert picked[0] is not long
    assert sum(sequence is long for sequence in picked) == 5
    assert budget.pick_sequence([long, waiting(5000)]) is long, "one that is not much shorter waits"
