"""page: keyset pagination, each document once for any sort values.

Covers: query/keyset.
"""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from typing import Any

import pytest
from bson import MaxKey, MinKey, ObjectId, Timestamp
from bson.datetime_ms import DatetimeMS
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from treadle import Bucket, Document, Store, UsageError
from treadle.query import keyset


class Place(BaseModel):
    city: str | None = None


class Person(Document, collection="people"):
    name: str
    age: int | None = None
    weight: float = 0.0
    place: Place = Place()
    tags: list[str] = []
    anything: Any = None


class Card(BaseModel):
    title: str = Field(alias="name")


def all_pages(store, size, **query) -> list[Any]:
    items, after = [], None
    for _ in range(1000):
        page = store.page(Person, size=size, after=after, **query)
        items += page.items
        after = page.next
        if after is None:
            return items
        assert size == len(page.items)
    raise AssertionError("the pages do not end")


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.5, float("nan"), float("inf"), float("-inf"), Decimal("0.5"), Decimal("NaN")]),
    st.sampled_from(["", "a", "B"]),
    st.sampled_from(
        [b"x", ObjectId("0" * 24), dt.datetime(2026, 1, 1, tzinfo=dt.UTC), {"a": 1}, {"a": None}]
    ),
    # The ends of the order, and a date beyond the years of Python.
    st.sampled_from(
        [MinKey(), MaxKey(), DatetimeMS(10**16), DatetimeMS(-(10**15)), Timestamp(1, 1), b"x" * 3]
    ),
)
sorts = st.sampled_from(
    [
        "anything",
        "-anything",
        ["age", "-anything"],
        ["-age", "anything"],
        "-place.city",
        "weight",
        "-weight",
        None,
    ]
)


@settings(max_examples=40)
@given(st.lists(st.tuples(values, st.none() | st.integers(0, 2)), max_size=12), sorts, st.integers(1, 4))
def test_pages_are_the_whole_query_in_order(run_store, rows, sort, size):
    store, collection = run_store
    collection.delete_many({})
    for anything, age in rows:
        raw = {"name": "x", "anything": anything, "age": age, "weight": float(age or 0)}
        if age == 0:
            # Missing sorts with null.
            del raw["age"], raw["anything"]
        if isinstance(anything, Decimal):
            from bson.decimal128 import Decimal128

            raw["anything"] = Decimal128(anything)
        collection.insert_one({**raw, "place": {"city": "a"} if age else {}})
    expected = [each.id for each in store.find(Person, sort=sort or "_id")]
    assert expected == [each.id for each in all_pages(store, size, sort=sort)]


@pytest.fixture
def run_store(database):
    store = Store(database, [Person])
    return store, store.collection(Person)


def test_others_insert_and_delete_between_pages(run_store):
    """What was there all along comes exactly once."""
    store, _ = run_store
    chance = random.Random(7)
    people = store.insert_many([Person(name=str(n), age=chance.randrange(5)) for n in range(60)])
    staying = {each.id for each in people[:40]}
    seen, after = [], None
    while True:
        page = store.page(Person, sort="-age", size=7, after=after)
        seen += [each.id for each in page.items]
        if (after := page.next) is None:
            break
        store.insert_many([Person(name="new", age=chance.randrange(5)) for _ in range(3)])
        store.delete_many(Person, {"_id": {"$in": [people[40 + len(seen) % 20].id]}})
    assert len(seen) == len(set(seen))
    assert staying <= set(seen)


def test_a_page_as_cards_sorted_by_a_field_that_the_card_lacks(run_store):
    store, _ = run_store
    store.insert_many([Person(name=str(n), age=9 - n) for n in range(5)])
    assert ["4", "3", "2", "1", "0"] == [each.title for each in all_pages(store, 2, sort="age", into=Card)]


def test_a_token_is_text_for_a_url_and_holds_only_the_sort(run_store):
    store, _ = run_store
    store.insert_many([Person(name="secret", age=n) for n in range(3)])
    token = store.page(Person, {"name": "secret"}, sort="age", size=1).next
    assert token.replace("-", "").replace("_", "").isalnum()
    import base64

    assert b"secret" not in base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))


def test_a_token_of_another_query_is_refused(run_store):
    store, _ = run_store
    store.insert_many([Person(name="a", age=n) for n in range(3)])
    token = store.page(Person, {"name": "a"}, sort="age", size=1).next
    for other in (
        {"sort": "-age", "filter": {"name": "a"}},
        {"sort": "age", "filter": {"name": "b"}},
        {"sort": "age", "filter": None},
        {"sort": ["age", "name"], "filter": {"name": "a"}},
    ):
        with pytest.raises(UsageError, match="of another query") as raised:
            store.page(Person, after=token, **other)
        assert "page-token-invalid" == raised.value.code
    for bad in ("", "x", "ü", token[:-3], token + "AAAA", 7, b"x", {"$gt": 1}):
        with pytest.raises(UsageError) as raised:
            store.page(Person, {"name": "a"}, sort="age", after=bad)
        assert "page-token-invalid" == raised.value.code
    assert 1 == len(store.page(Person, {"name": "a"}, sort="age", size=1, after=token).items)


def test_sizes_and_sorts_that_cannot_be_paged_are_refused(run_store):
    store, _ = run_store
    for size in (0, -1, True, 1.5, 10_001, "2"):
        with pytest.raises(UsageError, match="a page has from 1 to 10,000"):
            store.page(Person, size=size)
    with pytest.raises(UsageError, match="several values in one Person"):
        store.page(Person, sort="tags")
    store.insert_many([Person(name="a", anything=[1]), Person(name="b", anything=[2])])
    with pytest.raises(UsageError, match="several values in one Person"):
        store.page(Person, sort="anything", size=1)


def test_readings_are_not_paged(run):
    class Reading(
        Document,
        collection="r",
        bucket=Bucket(key="s", time="ts", span=dt.timedelta(hours=1), limit=3),
    ):
        s: str
        ts: dt.datetime

    with pytest.raises(UsageError, match="use find with sort=") as raised:
        run.store([Reading]).page(Reading)
    assert "layout-missing" == raised.value.code


@pytest.mark.quick
def test_the_condition_after_a_place():
    keys = [("age", -1), ("_id", 1)]
    assert {
        "$or": [{"age": {"$lt": 3}}, {"age": {"$in": [None, pytest.approx(float("nan"), nan_ok=True)]}},
                {"age": {"$eq": 3}, "_id": {"$gt": 7}}]
    } == keyset.after(keys, [3, 7])  # fmt: skip
    assert {"$or": [{"age": {"$eq": None}, "_id": {"$gt": 7}}]} == keyset.after(keys, [None, 7])
