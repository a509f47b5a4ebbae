"""Values that the driver cannot encode, or the server does not take: our errors, with a code, for every call."""

from __future__ import annotations

from typing import Annotated, Any

import pytest

from treadle import Count, Document, UsageError

ODD: list[Any] = [2**70, "\ud800", object(), {"$in": [2**70]}, {1, 2**64}, {"a\0b": 1}, [["\udfff"]]]


class Owner(Document, collection="owners"):
    id: str
    number: Annotated[int, Count("Thing", by="owner_id")] = 0


class Thing(Document, collection="things"):
    owner_id: str = ""
    anything: Any = None


class Alone(Document, collection="alone"):
    anything: Any = None


@pytest.mark.parametrize("model", [Thing, Alone])
def test_odd_values_are_refused_by_every_call(run, model):
    store = run.store([Owner, Thing, Alone])
    made = store.insert(model(anything=1))
    for odd in ODD:
        calls: dict[str, Any] = {
            "insert": lambda odd=odd: store.insert(model(anything=odd)),
            "insert_many": lambda odd=odd: store.insert_many([model(), model(anything=odd)]),
            "find": lambda odd=odd: list(store.find(model, {"anything": odd})),
            "find_one": lambda odd=odd: store.find_one(model, {"anything": odd}),
            "count": lambda odd=odd: store.count(model, {"anything": odd}),
            "exists": lambda odd=odd: store.exists(model, {"anything": odd}),
            "distinct": lambda odd=odd: store.distinct(model, "anything", {"anything": odd}),
            "aggregate": lambda odd=odd: list(store.aggregate(model, [{"$match": {"anything": odd}}])),
            "page": lambda odd=odd: store.page(model, {"anything": odd}, sort="_id"),
            "update": lambda odd=odd: store.update(model, made.id, {"$set": {"anything": odd}}),
            "update by": lambda odd=odd: store.update(model, {"anything": odd}, {"$set": {"anything": 1}}),
            "update_many": lambda odd=odd: store.update_many(model, {}, {"$push": {"anything": odd}}),
            "replace": lambda odd=odd: store.replace(model(id=made.id, anything=odd)),
            "delete": lambda odd=odd: store.delete(model, {"anything": odd}),
            "delete_many": lambda odd=odd: store.delete_many(model, {"anything": odd}),
        }
        for name, call in calls.items():
            if (
                isinstance(odd, dict)
                and "$in" in odd
                and name in ("insert", "insert_many", "update", "replace")
            ):
                continue
            try:
                call()
            except UsageError as error:
                assert error.code
            except Exception as error:
                pytest.fail(f"{name} of {odd!r:.40}: {type(error).__name__}: {error}")
    assert made == store.get(model, made.id)
    for odd in (2**70, "\ud800", "\0"):
        for call in (
            lambda odd=odd: store.get(Owner, odd),
            lambda odd=odd: store.get_many(Owner, [odd]),
            lambda odd=odd: store.update(Owner, odd, {"$set": {"x": 1}}),
        ):
            try:
                call()
            except UsageError as error:
                assert error.code


def test_a_limit_of_none_at_all_is_refused(run):
    store = run.store([Alone])
    for limit in (0, -1, True, 1.5, 2**64):
        with pytest.raises(UsageError):
            list(store.find(Alone, limit=limit))
    for skip in (-1, 2**64):
        with pytest.raises(UsageError):
            list(store.find(Alone, skip=skip))


def test_treadles_own_and_names_with_a_dollar_are_refused_in_plain_models(run, database):
    store = run.store([Alone])
    made = store.insert(Alone())
    raw = database["alone"].find_one({})
    for update in (
        {"$set": {"_treadle": 1}},
        {"$set": {"_treadle.n": 1}},
        {"$unset": {"_treadle": ""}},
        {"$rename": {"anything": "_treadle"}},
        {"$set": {"$x": 1}},
        {"$set": {"anything.$x": 1}},
        [{"$set": {"_treadle.n": 1}}],
    ):
        with pytest.raises(UsageError):
            store.update(Alone, made.id, update)
        with pytest.raises(UsageError):
            store.update_many(Alone, {}, update)
    assert raw == database["alone"].find_one({})
