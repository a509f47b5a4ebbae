"""How many items fit into a document: the bound is never too low, and every item is in one list."""

from __future__ import annotations

import datetime as dt

import bson
from bson import Decimal128, ObjectId
from hypothesis import given
from hypothesis import strategies as st

from treadle.engine.sizes import bson_size_bound, count_fitting, cut

ITEMS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=400),
    st.binary(max_size=400),
    st.just(ObjectId()),
    st.just(Decimal128("1.5")),
    st.just(dt.datetime(2026, 1, 1, tzinfo=dt.UTC)),
    st.dictionaries(st.text("abc", max_size=5), st.integers(0, 9), max_size=5),
)


@given(st.lists(ITEMS, max_size=20))
def test_no_array_is_larger_than_the_bounds_of_its_items(items):
    empty = len(bson.encode({"": []}))
    assert len(bson.encode({"": items})) - empty <= sum(map(bson_size_bound, items))


@given(st.lists(ITEMS, max_size=20), st.integers(1, 5), st.integers(1, 500))
def test_items_are_cut_by_number_and_bytes(items, items_max, bytes_max):
    parts = list(cut(items, items_max, bytes_max))
    assert [repr(item) for item in items] == [repr(item) for part in parts for item in part]
    for part in parts:
        assert len(part) <= items_max
        assert len(part) == 1 or sum(map(bson_size_bound, part)) <= bytes_max
        assert len(part) == max(1, count_fitting(part, items_max, bytes_max))
