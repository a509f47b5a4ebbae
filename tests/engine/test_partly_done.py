"""A write of many documents of which one is refused: what is left of it, and what the error says about it."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field
from pymongo.errors import DuplicateKeyError

from tests.engine.test_refused_updates import Even
from treadle import (
    Count,
    Document,
    DuplicateKey,
    ExtendedReference,
    Indexed,
    Limits,
    PartlyDone,
    Unchecked,
    UsageError,
)
from treadle.errors import InvalidValue


class Step(Document, collection="steps", validation="off"):
    id: int
    group: int = 0
    n: Annotated[int, Field(le=10)] = 0
    even: Even = 0
    tag: Annotated[str, Indexed(unique=True)] = ""


class Group(Document, collection="groups"):
    id: int
    high: Annotated[int, Count(Step, by="group", where={"n": {"$gte": 5}})] = 0


class Kept(Document, collection="kept"):
    id: int
    step_id: int
    step: Annotated[int | None, ExtendedReference(Step, by="step_id", field="n", on_delete="restrict")] = None


@pytest.fixture
def store(run):
    store = run.store([Step, Group, Kept], limits=Limits(write_chunk=3))
    store.setup()
    store.insert(Group(id=0))
    store.insert_many([Step(id=number, n=number, tag=str(number)) for number in range(9)])
    return store


def test_the_error_says_how_many_were_changed(store):
    with pytest.raises(PartlyDone) as caught:
        store.update_many(Step, {}, {"$inc": {"n": 3}})
    assert ("partly-done", 6) == (caught.value.code, caught.value.done)
    assert "6 were" in str(caught.value)
    assert "nothing was changed" not in str(caught.value)
    assert isinstance(caught.value.__cause__, InvalidValue)
    assert [3, 4, 5, 6, 7, 8, 6, 7, 8] == [each.n for each in store.find(Step, sort="_id")]
    assert 7 == store.get(Group, 0).high
    assert [] == store.verify()


def test_what_goes_in_one_commit_is_all_or_nothing(store):
    """The first chunk is; then the error is the refusal itself."""
    for chosen in ({"_id": {"$gte": 6}}, {}):
        with pytest.raises(InvalidValue):
            store.update_many(Step, chosen, {"$inc": {"even": 1}})
    assert {0} == {each.even for each in store.find(Step)}


def test_a_duplicate_leaves_no_first_document_behind(store, database):
    """One command of the server would have changed the first, and then refused the second."""
    with pytest.raises(DuplicateKey):
        store.update_many(Step, {}, {"$set": {"tag": "same"}})
    assert 0 == database["steps"].count_documents({"tag": "same"})


def test_a_deletion_says_how_many_are_gone(store):
    store.insert(Kept(id=1, step_id=7))
    with pytest.raises(PartlyDone) as caught:
        store.delete_many(Step, {})
    assert 6 == caught.value.done
    assert [6, 7, 8] == [each.id for each in store.find(Step, sort="_id")]


class Open(Document, collection="opens", validation="off"):
    id: int
    name: str = ""


def test_one_command_of_which_the_server_tells_nothing(run, database):
    """An index that no model declares refuses the second document; the error does not claim a number."""
    store = run.store([Open])
    store.insert_many([Open(id=1, name="a"), Open(id=2, name="b")])
    database["opens"].create_index("name", unique=True)
    with pytest.raises(PartlyDone) as caught:
        store.update_many(Open, {}, {"$set": {"name": "same"}})
    assert caught.value.done is None
    assert isinstance(caught.value.__cause__, DuplicateKeyError)
    assert 1 == database["opens"].count_documents({"name": "same"})


def test_a_value_that_the_update_does_not_fit_is_met_half_way(run, database):
    """The server has changed the document before it; an update that makes no sense changes none."""
    store = run.store([Open])
    database["opens"].insert_many([{"_id": 1, "n": 1}, {"_id": 2, "n": "text"}, {"_id": 3, "n": 1}])
    with pytest.raises(PartlyDone) as caught:
        store.update_many(Open, {}, Unchecked({"$inc": {"n": 1}}))
    assert caught.value.done is None
    assert [2, "text", 1] == [each["n"] for each in database["opens"].find().sort("_id")]
    with pytest.raises(UsageError) as refused:
        store.update_many(Open, {}, Unchecked({"$push": {"n": {"$each": 5}}}))
    assert "update-invalid" == refused.value.code
    with pytest.raises(UsageError) as refused, store.transaction() as session:
        store.update_many(Open, {}, Unchecked({"$inc": {"n": 1}}), session=session)
    assert "update-invalid" == refused.value.code
