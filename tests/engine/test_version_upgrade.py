"""Outdated documents where a call meets them: formulas are those of the upgraded document."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import pytest

from treadle import Document, ExtendedReference, Formula, Store, Sum, migration


def started(database: Any, *models: type[Any]) -> Any:
    store = Store(database, models)
    store.setup()
    return store


class Play(Document, collection="plays", version=2):
    id: int
    team_id: int = 1
    points: int
    score: Annotated[int | None, Formula({"$multiply": ["$points", 2]})] = None


@migration(Play, from_version=1)
def rename_points(document: dict[str, Any]) -> dict[str, Any]:
    document["points"] = document.pop("pts")
    return document


@rename_points.down
def rename_back(document: dict[str, Any]) -> dict[str, Any]:
    document["pts"] = document.pop("points")
    return document


class Team(Document, collection="teams"):
    id: int
    scores: Annotated[int, Sum(Play, "score", by="team_id")] = 0


def test_a_formula_is_computed_from_the_upgraded_document(database):
    store = started(database, Play, Team)
    store.insert(Team(id=1))
    database["plays"].insert_one({"_id": 1, "team_id": 1, "pts": 3, "score": 99})
    assert 6 == store.get(Play, 1).score
    assert [6] == [each.score for each in store.find(Play)]
    # The stored formula is the older release's; only what follows from it is a finding.
    assert [("Team", "scores", 6)] == [(each.model, each.path, each.expected) for each in store.verify()]
    store.repair()
    assert 6 == store.get(Team, 1).scores
    store.migrate(Play)
    assert 6 == database["plays"].find_one()["score"]
    store.migrate(Play, to=1)
    assert [] == store.verify()
    assert 6 == store.get(Team, 1).scores


def test_a_formula_that_cannot_be_computed_does_not_keep_its_document_from_readers(database):
    store = started(database, Play)
    database["plays"].insert_one({"_id": 1, "pts": "many", "score": 4})
    # Any value, so that the model itself takes the text.
    entry = store.graph.entry(Play)
    (raw,) = database["plays"].find()
    upgraded = store.runner.run(entry.versions.upgrade([raw]))
    assert [("many", 4)] == [(each["points"], each["score"]) for each in upgraded.documents]


class Author(Document, collection="authors"):
    id: int
    name: str


class Score(Document, collection="scores", version=2, soft_delete="deleted_at"):
    id: int
    author_id: int = 1
    points: int
    deleted_at: datetime | None = None
    author: Annotated[str | None, ExtendedReference(Author, by="author_id", field="name")] = None


migration(Score, from_version=1, up=[{"$set": {"points": {"$toInt": "$pts"}}}, {"$unset": ["pts"]}])


def test_restore_returns_the_current_version(database):
    store = started(database, Author, Score)
    store.insert(Author(id=1, name="Ada"))
    database["scores"].insert_one({"_id": 1, "author_id": 1, "pts": "3"})
    store.repair()
    store.delete(Score, 1)
    assert 3 == store.restore(Score, 1).points


@pytest.mark.parametrize("call", ["repair", "rebuild"])
def test_an_outdated_document_that_is_right_stays_as_it_is_stored(database, call):
    store = started(database, Author, Score)
    store.insert(Author(id=1, name="Ada"))
    rows = [{"_id": 1, "author_id": 1, "pts": "3", "author": "Ada"}, {"_id": 2, "author_id": 1, "pts": "4"}]
    database["scores"].insert_many(rows)
    getattr(store, call)()
    right, wrong = database["scores"].find(sort=[("_id", 1)])
    assert ("3", None) == (right["pts"], right.get("schema_version"))
    assert ("Ada", 4, 2) == (wrong["author"], wrong["points"], wrong["schema_version"])
    assert [] == store.verify()


class Asset(Document, collection="assets", version=2, discriminator="type"):
    id: int


class Car(Asset, kind="car"):
    owner_id: int
    owner: Annotated[str | None, ExtendedReference(Author, by="owner_id", field="name")] = None


@migration(Asset, from_version=1)
def rename_the_kind(document: dict[str, Any]) -> dict[str, Any]:
    document["type"] = document.pop("sort")
    document["owner_id"] = document.pop("holder")
    return document


def test_a_document_whose_kind_has_another_name_is_verified_and_repaired(database):
    store = started(database, Author, Asset, Car)
    store.insert(Author(id=1, name="Ada"))
    database["assets"].insert_one({"_id": 1, "sort": "car", "holder": 1})
    assert [("Car", "owner", None, "Ada")] == [
        (each.model, each.path, each.stored, each.expected) for each in store.verify()
    ]
    assert 1 == store.repair()
    assert ("Ada", "car") == tuple(database["assets"].find_one()[name] for name in ("owner", "type"))
    assert [] == store.verify()


def test_a_changed_source_reaches_outdated_documents(database):
    store = started(database, Author, Asset, Car)
    store.insert(Author(id=1, name="Ada"))
    database["assets"].insert_many([{"_id": key, "sort": "car", "holder": key} for key in (1, 2)])
    store.update(Author, 1, {"$set": {"name": "Eve"}})
    assert "Eve" == database["assets"].find_one({"_id": 1})["owner"]
    assert {"_id": 2, "sort": "car", "holder": 2} == database["assets"].find_one({"_id": 2})


def test_a_source_that_cannot_be_upgraded_leaves_its_copies(database):
    store = started(database, Play, Team)

    class Caption(Document, collection="captions"):
        id: int
        play_id: int
        points: Annotated[int | None, ExtendedReference(Play, by="play_id", field="points")] = None

    store = started(database, Play, Caption)
    store.insert(Play(id=1, points=3))
    store.insert(Caption(id=1, play_id=1))
    database["plays"].replace_one({"_id": 1}, {"_id": 1, "score": 6})
    store.repair()
    assert 3 == store.get(Caption, 1).points
    assert 1 == database["treadle.set_aside"].count_documents({"_id.key": 1, "_id.collection": "plays"})
