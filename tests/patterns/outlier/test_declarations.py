"""Outlier declarations that cannot work are refused by name; what set-up makes."""

from __future__ import annotations

import pytest
from pymongo.errors import OperationFailure

from tests.members import Plain, Unique, UniqueRows, overflow_of


def test_setup_makes_the_overflow_with_its_unique_indexes(run, database, model):
    store = run.store([model])
    told = [str(action) for action in store.setup()]
    assert f"create collection {overflow_of(model)}" in told
    keys = [list(index["key"]) for index in database[overflow_of(model)].index_information().values()]
    assert [] == store.setup()
    unique = [
        list(index["key"]) for index in database[overflow_of(model)].list_indexes() if index.get("unique")
    ]
    assert len(unique) == (2 if model in (Unique, UniqueRows) else 1)
    assert len(keys) == len(unique) + 1


def test_the_validator_of_the_overflow_refuses_other_things(run, database):
    store = run.store([Plain])
    store.setup()
    with pytest.raises(OperationFailure):
        database["plain_overflow"].insert_one({"plain_id": 1, "page": 2, "members": ["x"], "count": 1})
