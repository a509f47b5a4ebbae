"""Corners of computed values: dates of single values, and what no field could hold."""

from __future__ import annotations

import datetime as dt
from datetime import timedelta
from decimal import Decimal
from typing import Annotated, Any

import pytest
from bson import Decimal128, ObjectId
from pydantic import BaseModel

from treadle import Average, Count, DataError, Document, Max, Min, Rollup, Subset, Sum


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


class Share(Document, collection="shares", validation="off"):
    fund_id: str
    n: Decimal


class Fund(Document, collection="funds", validation="off"):
    id: str
    total: Annotated[Decimal, Sum(Share, "n", by="fund_id")] = Decimal(0)
    average: Annotated[Decimal | None, Average(Share, "n", by="fund_id")] = None
    largest: Annotated[Decimal | None, Max(Share, "n", by="fund_id")] = None
    smallest: Annotated[Decimal | None, Min(Share, "n", by="fund_id")] = None


def test_a_sum_beyond_the_largest_decimal_is_refused(run):
    """Infinity could be stored, and not be read by the model that it is stored for."""
    store = run.store([Share, Fund])
    store.insert_many([Fund(id="a"), Fund(id="b")])
    huge = Decimal("9E6144")
    store.insert(Share(fund_id="a", n=huge))
    for number in (huge, Decimal("1E6144")):
        for shares in ([Share(fund_id="a", n=number)], [Share(fund_id="b", n=-huge)] * 2):
            with pytest.raises(DataError) as caught:
                store.insert_many([each.model_copy(update={"id": ObjectId()}) for each in shares])
            assert "sum-too-large" == caught.value.code
    assert (huge, huge) == (store.get(Fund, "a").total, store.get(Fund, "a").average)
    assert 1 == store.count(Share, {})
    # What is rounded away goes on being taken.
    store.insert(Share(fund_id="a", n=Decimal(1)))
    assert huge == store.get(Fund, "a").total
    assert [] == store.verify()


@pytest.mark.parametrize("maintain", ["write", "stream"])
def test_no_number_of_another_writer_is_stored_where_it_could_not_be_read(run, database, maintain):
    """Not by a repair, not by the worker, and not by a write beside it, which is not refused either."""
    how = {"by": "fund_id", "maintain": maintain}

    class Held(Document, collection="held", validation="off"):
        id: str
        total: Annotated[Decimal, Sum(Share, "n", **how)] = Decimal(0)
        largest: Annotated[Decimal | None, Max(Share, "n", **how)] = None
        smallest: Annotated[Decimal | None, Min(Share, "n", **how)] = None

    store = run.store([Share, Held])
    store.setup()
    store.insert_many([Held(id="a"), Held(id="b")])
    follow = store.worker().run_until_idle if maintain == "stream" else store.repair
    follow()
    for number in ("NaN", "sNaN", "Infinity"):
        database["shares"].insert_one({"fund_id": "a", "n": Decimal128(number)})
    database["shares"].insert_one({"fund_id": "b", "n": Decimal128("2")})
    follow()
    assert 2 == store.get(Held, "b").total
    assert (0, None) == (store.get(Held, "a").total, store.get(Held, "a").largest)
    # Once for each of the three values.
    assert ["a", "a", "a"] == [each.document_id for each in store.status().aside]
    mine = store.insert(Share(fund_id="a", n=Decimal(3)))
    store.delete(Share, mine.id)
    for each in database["shares"].find({"fund_id": "a"}, {"_id": 1}).to_list():
        assert store.get(Held, "a") is not None
        assert {"a"} == {each.document_id for each in store.status().aside}
        store.delete_many(Share, {"_id": each["_id"]})
    follow()
    store.repair()
    assert [] == store.verify()
    assert (0, Held(id="a")) == (store.status().set_aside, store.get(Held, "a"))


def test_a_fraction_is_not_added_to_an_integer(run):
    """Where the source takes anything, the sum that could not be read is refused."""

    class Loose(Document, collection="loose", validation="off"):
        whole_id: str
        n: Any = None

    class Counted(Document, collection="counted", validation="off"):
        id: str
        total: Annotated[int, Sum(Loose, "n", by="whole_id")] = 0

    store = run.store([Loose, Counted])
    store.insert(Counted(id="a"))
    store.insert(Loose(whole_id="a", n=2.0))
    for odd in (0.5, Decimal("1.5"), float("nan"), float("inf")):
        with pytest.raises(DataError, match=r"Counted\.total"):
            store.insert(Loose(whole_id="a", n=odd))
    assert 2 == store.get(Counted, "a").total


class Vote(Document, collection="votes"):
    poll: str
    worth: Any = None


class Poll(Document, collection="polls"):
    id: str
    total: Annotated[int, Sum(Vote, "worth", by="poll")] = 0
    mean: Annotated[float | None, Average(Vote, "worth", by="poll")] = None


@pytest.mark.parametrize(
    ("worth", "total", "mean"),
    [
        (0, 0, 0.0),
        (7, 7, 7.0),
        (2**62, 2**62, float(2**62)),
        (True, 0, None),
        (None, 0, None),
        ("7", 0, None),
    ],
)
def test_a_first_value_is_added_as_the_server_would_sum_it(run, worth, total, mean):
    """One number alone is added in short; a zero counts for an average, what is no number does not."""
    store = run.store([Vote, Poll])
    store.insert(Poll(id="p"))
    store.insert(Vote(poll="p", worth=worth))
    poll = store.get(Poll, "p")
    assert (total, mean) == (poll.total, poll.mean)
    assert [] == store.verify()


# -- what Python takes for equal and the server does not ----------------------------------------------


class Mark(BaseModel):
    said: Any = None


class Opinion(Document, collection="opinions"):
    about: Any = None
    said: Any = None


class Topic(Document, collection="topics"):
    id: Any
    votes: Annotated[int, Count(Opinion, by="about")] = 0
    total: Annotated[int, Sum(Opinion, "said", by="about")] = 0
    last: Annotated[list[Mark], Subset(Opinion, by="about", sort="-said", size=2)] = []


class Tally(Document, collection="tallies", rollup=Rollup(Opinion, keys={"about": "about"})):
    about: Any = None
    votes: Annotated[int, Count()] = 0


@pytest.mark.parametrize(
    ("former", "later"),
    [(True, 1), (0.0, False), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({"a": 1}, {"a": True})],
)
@pytest.mark.parametrize("maintain", ["update", "replace"])
def test_a_source_that_moves_to_a_key_that_python_takes_for_the_same_is_followed(
    run, former, later, maintain
):
    store = run.store([Opinion, Topic, Tally])
    store.setup()
    store.insert_many([Topic(id=former), Topic(id=later)])
    opinion = store.insert(Opinion(about=former, said=1))
    if maintain == "update":
        store.update(Opinion, opinion.id, {"$set": {"about": later}})
    else:
        store.replace(Opinion(id=opinion.id, about=later, said=1))
    assert {0: 0, 1: 1} == {
        number: store.get(Topic, each).votes for number, each in enumerate((former, later))
    }
    (tally,) = store.find(Tally)
    assert (repr(later), 1) == (repr(tally.about), tally.votes)
    assert [] == store.verify()


def test_a_value_that_python_takes_for_the_same_is_copied(run):
    store = run.store([Opinion, Topic])
    store.setup()
    store.insert(Topic(id=1))
    opinion = store.insert(Opinion(about=1, said=1))
    store.update(Opinion, opinion.id, {"$set": {"said": True}})
    topic = store.get(Topic, 1)
    assert [True] == [each.said for each in topic.last if each.said is True]
    assert 0 == topic.total
    assert [] == store.verify()
