"""Corners of computed values: dates of single values, and sums beyond 64 bits."""

from __future__ import annotations

import datetime as dt
from datetime import timedelta
from typing import Annotated, Any

import pytest

from treadle import Count, DataError, Document, Rollup, Sum


class Like(Document, collection="likes"):
    post_id: int


class Reply(Document, collection="replies"):
    post_id: int


def models(maintain: str) -> list[type[Document]]:
    every: dict[str, Any] = {"maintain": maintain}
    if maintain == "schedule":
        every["every"] = timedelta(minutes=1)

    class Post(Document, collection="posts"):
        id: int
        likes: Annotated[int, Count(Like, by="post_id", computed_at="liked", **every)] = 0
        replies: Annotated[int, Count(Reply, by="post_id", computed_at="replied", **every)] = 0
        liked: dt.datetime | None = None
        replied: dt.datetime | None = None

    return [Like, Reply, Post]


@pytest.mark.parametrize("maintain", ["write", "stream", "schedule"])
def test_a_date_of_computation_is_of_its_own_value(run, maintain):
    """Each moves when its value does, and stays when another one changes."""
    used = models(maintain)
    Post = used[2]
    store = run.store(used)
    store.setup()
    at = [dt.datetime.now(dt.UTC)]

    def follow() -> Any:
        if maintain == "stream":
            store.worker().run_until_idle()
        if maintain == "schedule":
            at[0] += timedelta(hours=1)
            store.run_due(now=at[0])
        return store.get(Post, 1)

    store.insert(Post(id=1))
    new = follow()
    store.insert(Like(post_id=1))
    first = follow()
    assert (1, new.replied) == (first.likes, first.replied)
    assert first.liked not in (None, new.liked)
    store.insert(Reply(post_id=1))
    second = follow()
    assert (1, 1, first.liked) == (second.likes, second.replies, second.liked)
    assert second.replied not in (None, new.replied)
    store.rebuild()
    assert second == store.get(Post, 1)
    store.delete_many(Like, {})
    third = follow()
    assert third.liked > first.liked
    assert third.replied == second.replied


class Part(Document, collection="parts", validation="off"):
    whole_id: str
    n: int


class Whole(Document, collection="wholes", validation="off"):
    id: str
    total: Annotated[int, Sum(Part, "n", by="whole_id")] = 0


class PerWhole(
    Document, collection="per_whole", rollup=Rollup(Part, keys={"id": "whole_id"}), validation="off"
):
    id: str
    total: Annotated[int, Sum("n")]


LARGE = 2**62


def test_a_sum_beyond_64_bits_is_refused(run, database):
    """By a difference, by a recomputation, and for a target that comes later; what was right stays right."""
    store = run.store([Part, Whole, PerWhole])
    store.insert_many([Whole(id="a"), Whole(id="b")])
    first = store.insert(Part(whole_id="a", n=LARGE))
    for call in (
        lambda: store.insert(Part(whole_id="a", n=LARGE)),
        lambda: store.insert_many([Part(whole_id="a", n=LARGE), Part(whole_id="b", n=1)]),
        lambda: (
            store.update(Part, first.id, {"$set": {"n": LARGE, "whole_id": "b"}})
            and store.insert(Part(whole_id="b", n=LARGE))
        ),
    ):
        with pytest.raises(DataError) as caught:
            call()
        assert "sum-too-large" == caught.value.code
        assert LARGE == store.get(Whole, "a").total + store.get(Whole, "b").total
        assert [] == store.verify()
    store.update(Part, first.id, {"$set": {"n": LARGE - 1 + LARGE}})
    assert 2**63 - 1 == store.get(Whole, "b").total
    # Another writer goes beyond: named, set aside, and no stop for its neighbours.
    database["parts"].insert_one({"whole_id": "b", "n": 5})
    database["parts"].insert_one({"whole_id": "a", "n": 7})
    assert {("Whole", "b"), ("Whole", "a")} <= {(each.model, each.document_id) for each in store.verify()}
    store.repair()
    assert 7 == store.get(Whole, "a").total
    assert {"b"} == {each.document_id for each in store.verify()}
    with pytest.raises(DataError):
        database["wholes"].delete_one({"_id": "b"})
        store.insert(Whole(id="b"))
