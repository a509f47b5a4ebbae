"""Random writes against a plain Python list of states."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import pytest

from tests.kit.tiers import IS_FULL
from tests.patterns.history.models import SMALL, Policy, disorder
from treadle import Document, Store

# Few by default; TREADLE_STEPS=all plays as many as a release should have seen.
STEPS = 5_000 if os.environ.get("TREADLE_STEPS") == "all" else 250 if IS_FULL else 100
KEYS = range(4)


class Oracle:
    """Documents, and the states that each had, kept in the simplest way."""

    def __init__(self) -> None:
        self.documents: dict[int, dict[str, Any]] = {}
        self.states: dict[int, list[dict[str, Any]]] = {key: [] for key in KEYS}

    def commit(self, documents: dict[int, dict[str, Any]]) -> None:
        for key in KEYS:
            if key in documents and documents[key] != self.documents.get(key):
                self.states[key].append(documents[key])
        self.documents = documents


def write(store: Store, model: type[Document], documents: dict[int, Any], chance: random.Random) -> None:
    """One random write, of the store and of the plain documents."""
    key, number = chance.choice(KEYS), chance.randrange(3)
    what = chance.choice(
        ["put", "put", "update", "update", "update", "many", "unset", "delete", "push", "none"]
    )
    if what == "put" and key not in documents:
        store.insert(model(id=key, premium=number))
        documents[key] = {"id": key, "holder": "Ada", "premium": number, "notes": model(id=0).notes}
    elif what == "put":
        store.replace(model(id=key, holder="Ben", premium=number))
        documents[key] = {"id": key, "holder": "Ben", "premium": number, "notes": model(id=0).notes}
    elif what == "many":
        store.update_many(model, {"premium": {"$lte": number}}, {"$inc": {"premium": 1}})
        for document in documents.values():
            document["premium"] += document["premium"] <= number
    elif what == "delete":
        store.delete(model, key)
        documents.pop(key, None)
    elif what == "update":
        store.update(model, key, {"$set": {"premium": number}})
        if key in documents:
            documents[key]["premium"] = number
    elif what == "push":
        store.update(model, key, {"$set": {"notes": [str(number)]}})
        if key in documents:
            documents[key]["notes"] = [str(number)]
    elif what == "unset":
        store.update(model, key, {"$set": {"holder": "", "premium": number}})
        if key in documents:
            documents[key] |= {"holder": "", "premium": number}
    else:
        store.update_many(model, {}, {"$inc": {"premium": 0}})


@pytest.mark.heavy
def test_the_history_is_what_a_list_of_states_says(database):
    chance = random.Random(7)
    store, oracle = Store(database, [Policy], limits=SMALL), Oracle()
    store.setup()
    for step in range(STEPS):
        documents = copy.deepcopy(oracle.documents)
        if chance.random() < 0.2:
            with store.transaction():
                for _ in range(chance.randrange(1, 4)):
                    write(store, Policy, documents, chance)
        else:
            write(store, Policy, documents, chance)
        oracle.commit(documents)
        key = chance.choice(KEYS)
        found = [state.document.model_dump() for state in store.history(Policy, key)]
        assert oracle.states[key][::-1] == found
        if step % 50 == 49:
            assert [] == disorder(database, Policy)
            assert [] == store.verify()
            for each in KEYS:
                for state, known in zip(store.history(Policy, each), oracle.states[each][::-1], strict=True):
                    at = store.at(Policy, each, state.valid_from)
                    assert at is not None
                    assert known == at.model_dump()
        if len(oracle.states[key]) > 30:
            # So that a step costs the same at the end as at the beginning.
            database["policies_history"].delete_many({"document_id": key})
            database["policies"].delete_one({"_id": key})
            oracle.documents.pop(key, None)
            oracle.states[key] = []
