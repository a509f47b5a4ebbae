"""Outlier arrays under faults: lost replies, refusals and kill -9, at every command.

Whatever happened, after `recover` what was acknowledged is there once, what
raised is there once or not at all, and every invariant holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from pymongo import MongoClient

from tests.kit.fault_sweep import FaultSweep, Stores, Write
from tests.kit.faults import LOST_REPLIES
from tests.members import LIMIT, MODELS, items, wrong
from treadle import Store

pytestmark = pytest.mark.heavy

KEYS = (1, 2)


class Case(NamedTuple):
    """A write, and how many items there are before it."""

    name: str
    begin: int
    act: Callable[[Store, Any], Any]


def array(store: Store, model: Any) -> Any:
    return store.array(model, "members", 1)


CASES = [
    Case("append-ordinary", LIMIT - 1, lambda store, model: array(store, model).append(100)),
    Case("append-spills", LIMIT, lambda store, model: array(store, model).append(100)),
    Case("append-to-page", LIMIT + 1, lambda store, model: array(store, model).append(100)),
    Case("append-new-page", LIMIT + 3, lambda store, model: array(store, model).append(100)),
    Case("extend", LIMIT + 1, lambda store, model: array(store, model).extend(range(100, 110))),
    Case("remove-embedded", LIMIT + 2, lambda store, model: array(store, model).remove(0)),
    Case("remove-from-page", LIMIT + 3, lambda store, model: array(store, model).remove(LIMIT + 1)),
    Case("remove-last-overflow", LIMIT + 1, lambda store, model: array(store, model).remove(LIMIT)),
    Case("insert-long", -1, lambda store, model: store.insert(model(id=1, members=range(100, 110)))),
    Case("delete", LIMIT + 4, lambda store, model: store.delete(model, 1)),
    Case("replace", LIMIT + 2, lambda store, model: store.replace(model(id=1, members=[7]))),
    Case("repack", LIMIT + 9, lambda store, model: store.rebuild(model)),
    Case("adopt", -20, lambda store, model: store.rebuild(model)),
]
BY_NAME = {case.name: case for case in CASES}


def reset(database: Any, store: Store, case: Case, model: Any) -> None:
    """The beginning of a case."""
    name = model.__treadle__.collection
    for each in (name, f"{name}_overflow", "treadle.intents"):
        database[each].delete_many({})
    store.insert(model(id=2, members=range(6)))
    if case.begin < -1:
        database[name].insert_one({"_id": 1, "members": list(range(-case.begin))})
    elif case.begin >= 0:
        store.insert(model(id=1, members=range(case.begin)))
    if case.name == "repack":
        for number in range(LIMIT):
            store.array(model, "members", 1).remove(number)


@pytest.fixture(scope="module")
def stores(fault_sweep: FaultSweep) -> Stores:
    return fault_sweep.stores("outliers", MODELS)


def write_of(case: Case, model: Any, stores: Stores) -> Write:
    database = stores.database

    def check(acknowledged: bool) -> None:
        assert [] == [each for key in KEYS for each in wrong(database, model, key)]

    return Write(
        f"{case.name} {model.__name__}",
        lambda store: case.act(store, model),
        reset=lambda: reset(database, stores.sound, case, model),
        check=check,
        read=lambda: items(database, model, 1),
        # What a rebuild did not reach is reached by the next run.
        settle=lambda: stores.sound.rebuild(model) if case.name in ("adopt", "repack") else None,
    )


# All models with all cases would take long; each case meets the faults with one of them.
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_fault_at_any_command_leaves_nothing_wrong(fault_sweep, stores, case, record_points):
    write = write_of(case, MODELS[CASES.index(case) % len(MODELS)], stores)
    record_points(fault_sweep.strike(stores, write, LOST_REPLIES))


# -- kill -9 -----------------------------------------------------------------------------------------


def killed(client: MongoClient[Any], database: str, case: str, number: int) -> Callable[[], Any]:
    """In a process of its own: one case."""
    store = Store(client[database], MODELS)
    store.recover()
    return lambda: BY_NAME[case].act(store, MODELS[number])


KILLED = ["append-spills", "repack", "insert-long"]


@pytest.mark.parametrize("number", range(len(KILLED)), ids=KILLED)
def test_kill_9_between_any_two_commands(fault_sweep, stores, number, record_points):
    """The next Store, in another process, owes nothing and finds nothing wrong."""
    write = write_of(BY_NAME[KILLED[number]], MODELS[number], stores)
    record_points(fault_sweep.kill(stores, write, killed, "outliers", KILLED[number], number))
