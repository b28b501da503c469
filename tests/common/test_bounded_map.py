"""common/bounded_map.py: what stays, and what the costs sum up to."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from omlxd.common.bounded_map import BoundedMap

_STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "peek", "pop"]), st.integers(0, 5), st.binary(max_size=6))
)


@given(_STEPS, st.integers(0, 12), st.integers(1, 4), st.integers(0, 1))
def test_it_is_an_ordered_dict_that_drops_its_oldest_entries(steps, max_cost, max_items, least):
    bounded = BoundedMap[int, bytes](max_cost, len, max_items=max_items, least=least)
    model: OrderedDict[int, bytes] = OrderedDict()
    for verb, key, value in steps:
        if verb == "put":
            bounded.put(key, value)
            model.pop(key, None)
            model[key] = value
            while len(model) > least and (sum(map(len, model.values())) > max_cost or len(model) > max_items):
                model.popitem(last=False)
        elif verb == "pop":
            assert bounded.pop(key) == model.pop(key, None)
        else:
            assert getattr(bounded, verb)(key) == model.get(key)
            if verb == "get" and key in model:
                model.move_to_end(key)
        assert [*bounded.values()] == [*reversed(model.values())]
        assert bounded.cost == sum(map(len, model.values())) and len(bounded) == len(model)
