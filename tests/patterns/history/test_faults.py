"""A history with a fault at each command of a write: a state is recorded with its write, or neither is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.fault_sweep import Write
from tests.patterns.history.models import Policy, disorder, rows
from treadle import Store

pytestmark = [pytest.mark.heavy, pytest.mark.server]


def in_a_transaction(store: Store) -> None:
    with store.transaction():
        store.update(Policy, 1, {"$set": {"premium": 7}})
        store.update(Policy, 1, {"$set": {"premium": 8}})
        store.delete(Policy, 2)


WRITES = {
    "insert": lambda store: store.insert(Policy(id=9)),
    "insert_many": lambda store: store.insert_many([Policy(id=key) for key in (8, 9)]),
    "update": lambda store: store.update(Policy, 1, {"$inc": {"premium": 1}}),
    "update_many": lambda store: store.update_many(Policy, {}, {"$inc": {"premium": 1}}),
    "replace": lambda store: store.replace(Policy(id=1, holder="Ben")),
    "delete": lambda store: store.delete(Policy, 1),
    "delete_many": lambda store: store.delete_many(Policy, {}),
    "revert": lambda store: store.revert(Policy, 1, 1),
    "transaction": in_a_transaction,
}


@pytest.mark.parametrize("write", WRITES)
def test_a_state_goes_with_its_write(write, fault_sweep, record_points):
    stores = fault_sweep.stores("history", [Policy])
    store, database = stores.sound, stores.database

    def reset() -> None:
        for name in ("policies", "policies_history"):
            database[name].delete_many({})
        store.insert_many([Policy(id=key, premium=1) for key in (1, 2)])
        store.update(Policy, 1, {"$set": {"premium": 2}})

    def state() -> dict[Any, Any]:
        return {each["_id"]: each for each in database["policies"].find({}, {"_treadle": 0})}

    def check(acknowledged: bool) -> None:
        assert [] == disorder(database, Policy)
        for key, document in state().items():
            assert document == rows(database, key)[-1]["document"]
        assert [] == store.verify()

    record_points(fault_sweep.strike(stores, Write(write, WRITES[write], reset, check, read=state)))
