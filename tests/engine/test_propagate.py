"""What sources contribute where only the server can tell: it is given the documents before and after."""

from __future__ import annotations

from typing import Annotated

import pytest

from treadle import Count, Document, Formula, Store, Sum


class Team(Document, collection="teams"):
    id: int
    won: Annotated[int, Count("Match", by="team_id", where={"score": {"$gte": 10}})] = 0
    spread: Annotated[int, Sum("Match", {"$subtract": ["$score", "$against"]}, by="team_id")] = 0
    paid: Annotated[int, Sum("Match", "fee", by="team_id", where={"$expr": {"$gt": ["$fee", 0]}})] = 0


class Match(Document, collection="matches"):
    id: int
    team_id: int | None = None
    score: int = 0
    against: int = 0
    fee: Annotated[int | None, Formula({"$multiply": ["$score", 2]})] = None


@pytest.fixture
def store(database):
    store = Store(database, [Team, Match])
    store.setup()
    store.insert_many([Team(id=1), Team(id=2)])
    return store


def values(store: Store, id: int) -> tuple[int, int, int]:
    team = store.require(Team, id)
    return team.won, team.spread, team.paid


def test_a_condition_is_evaluated_before_and_after(store):
    store.insert_many([Match(id=1, team_id=1, score=10, against=4), Match(id=2, team_id=1, score=3)])
    assert (1, 9, 26) == values(store, 1)
    store.update(Match, 1, {"$set": {"score": 9}})
    assert (0, 8, 24) == values(store, 1)
    store.update_many(Match, {}, {"$set": {"team_id": 2}, "$inc": {"score": 10}})
    assert [(0, 0, 0), (2, 28, 64)] == [values(store, 1), values(store, 2)]
    store.delete(Match, 2)
    assert (1, 15, 38) == values(store, 2)
    assert [] == store.verify()


def test_two_writes_of_one_transaction_are_one_change(store):
    store.insert(Match(id=1, team_id=1, score=10))
    with store.transaction():
        store.update(Match, 1, {"$set": {"score": 20}})
        store.update(Match, 1, {"$set": {"score": 5, "team_id": 2}})
    assert [(0, 0, 0), (0, 5, 10)] == [values(store, 1), values(store, 2)]
    assert [] == store.verify()
