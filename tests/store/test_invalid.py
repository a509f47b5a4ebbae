"""One document that others have spoilt does not fail a whole find."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from treadle import DataError, Document, UsageError, migration


class Note(Document, collection="notes"):
    id: int
    n: int


class Card(BaseModel):
    n: int


class Thing(Document, collection="things", discriminator="kind"):
    n: int = 0


class Book(Thing, kind="book"):
    pages: int = 0


class Versioned(Document, collection="versioned", version=2):
    n: int


@migration(Versioned, from_version=1)
def up(document: dict[str, Any]) -> dict[str, Any]:
    document["n"] = 10 // document["n"]
    return document


@pytest.fixture
def store(run):
    return run.store([Note, Thing, Book, Versioned])


@pytest.mark.quick
def test_a_spoilt_document_is_named_or_passed_over(store, database):
    database["notes"].insert_many([{"_id": i, "n": n} for i, n in enumerate([1, "two", 3, None, 5])])
    database["notes"].delete_many({"_id": 3})
    for into in (None, Card):
        with pytest.raises(DataError, match="_id 1"):
            store.find(Note, sort="_id", into=into).to_list()
        results = store.find(Note, sort="_id", invalid="skip", into=into)
        assert [1, 3, 5] == [each.n for each in results]
        (error,) = results.invalid
        assert ("document-invalid", True) == (error.code, "_id 1" in str(error))
    with pytest.raises(UsageError):
        store.find(Note, invalid="ignore")


def test_unknown_kinds_and_failed_migrations_are_passed_over(store, database):
    database["things"].insert_many([{"kind": "book", "n": 1}, {"kind": "film", "n": 2}, {"kind": "book"}])
    results = store.find(Thing, invalid="skip")
    assert 2 == len(results.to_list())
    assert 1 == len(results.invalid)
    database["versioned"].insert_many([{"n": 5}, {"n": 0}, {"n": 2, "schema_version": 2}])
    results = store.find(Versioned, invalid="skip")
    assert [2, 2] == sorted(each.n for each in results)
    assert 1 == len(results.invalid)
