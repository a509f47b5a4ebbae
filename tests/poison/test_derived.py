"""Derived values with poison among their sources: the neighbours are right, and whatever is not is listed."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError
from pymongo.errors import PyMongoError

from tests.poison.scenarios import FEW, GOOD, SCENARIOS, Scenario
from tests.poison.values import VALUES
from treadle import Store
from treadle.errors import TreadleError

EVERY = sorted(SCENARIOS)
LATER = datetime(2026, 6, 1, tzinfo=UTC)


def settled(store: Any, scenario: Scenario, database: Any) -> None:
    """The neighbours are right, and every finding is about a document that `status` lists with its reason."""
    stored = [scenario.stored(database, number) for number in range(len(GOOD))]
    assert [scenario.expected(number) for number in range(len(GOOD))] == stored
    findings = store.verify()
    listed = store.status()
    assert listed.set_aside == len(listed.aside)
    assert all(each.reason and each.code and each.attempts >= 1 for each in listed.aside)
    named = {repr(each.document_id) for each in listed.aside} | {
        repr([each.document_id]) for each in listed.aside
    }
    missing = [
        each for each in findings if each.pattern != "set-aside" and repr(each.document_id) not in named
    ]
    assert [] == missing


def mended(store: Any, scenario: Scenario, database: Any) -> None:
    """Nothing is wrong any more, and nothing is listed."""
    assert [] == store.verify()
    assert [] == [(each.rule, each.document_id, each.reason) for each in store.status().aside]
    stored = [scenario.stored(database, number) for number in range(len(GOOD))]
    assert [scenario.expected(number) for number in range(len(GOOD))] == stored


@pytest.fixture
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "treadle")


def test_the_table_is_long_enough():
    assert 40 <= len(VALUES)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("way", ["rebuild", "repair"])
def test_a_sweep_goes_on(database, quiet, name, way):
    scenario = SCENARIOS[name]
    store = Store(database, scenario.models("write"))
    store.setup()
    scenario.fill(database)
    getattr(store, way)()
    settled(store, scenario, database)
    scenario.mend(database)
    store.repair()
    mended(store, scenario, database)


@pytest.mark.parametrize("name", EVERY)
def test_the_worker_goes_on(database, quiet, name):
    scenario = SCENARIOS[name]
    store = Store(database, scenario.models("stream"))
    store.setup()
    worker = store.worker()
    worker.run_until_idle()
    scenario.fill(database)
    worker.run_until_idle()
    settled(store, scenario, database)
    scenario.mend(database)
    worker.run_until_idle()
    assert [] == store.verify()
    # What has no name of its own, only a look at everything can let go of.
    store.repair()
    mended(store, scenario, database)


@pytest.mark.parametrize("name", ["computed", "rollup", "subset"])
def test_a_scheduled_run_goes_on(database, quiet, name):
    scenario = SCENARIOS[name]
    store = Store(database, scenario.models("schedule"))
    store.setup()
    scenario.fill(database)
    assert [None] == [each.error for each in store.run_due(LATER)]
    settled(store, scenario, database)
    scenario.mend(database)
    assert [None] == [each.error for each in store.run_due(LATER + timedelta(hours=2))]
    assert [] == store.verify()
    store.repair()
    mended(store, scenario, database)


def made(model: Any, fields: dict[str, Any]) -> Any:
    return model(id=fields["_id"], **{name: value for name, value in fields.items() if name != "_id"})


@pytest.mark.parametrize("name", EVERY)
def test_writes_go_on(database, quiet, name):
    """What Treadle itself is given is refused, or it is stored and listed; writes beside it are right."""
    scenario = SCENARIOS[name]
    store = Store(database, scenario.models("write"))
    store.setup()
    models = {each.__treadle__.collection: each for each in store.graph.entries}
    source, target = models[scenario.sources], models[scenario.targets]
    scenario.fill(database)
    store.rebuild()
    refused = 0
    for number, value in enumerate(FEW.values()):
        for place, fields in enumerate(scenario.poisoned(value)):
            key = f"written {number} {place}"
            try:
                store.insert(made(source, scenario.source(key, fields)))
                if scenario.stores_targets():
                    store.insert(made(target, scenario.target(key)))
            except (TreadleError, PyMongoError, ValidationError):
                refused += 1
    assert refused < len(FEW) * 3
    for number, key in enumerate(GOOD):
        store.delete(source, key)
        store.insert(made(source, scenario.source(key, scenario.good(number))))
    settled(store, scenario, database)


def recovered(store: Any, scenario: Scenario, database: Any) -> None:
    """A new Store does what was left, and goes on without what it cannot do."""
    with Store(database, list(store.graph.entries)) as started:
        assert 0 == database["treadle.intents"].count_documents({})
        settled(started, scenario, database)
        scenario.mend(database)
        started.recover()
        started.repair()
        mended(started, scenario, database)


def test_a_store_starts_whatever_a_crash_left(database, quiet):
    """Fan-outs of every poison, as a process leaves them that was killed before its copies followed."""
    scenario = SCENARIOS["extended-reference"]
    store = Store(database, scenario.models("write"))
    store.setup()
    scenario.fill(database)
    keys = [*(key for key, _ in scenario.poison()), *GOOD]
    database["treadle.intents"].insert_many(
        {"_id": {"kind": "fan-out", "rule": label, "key": key}, "n": 1, "after": None}
        for key in keys
        for label in ("Order.customer", "Order.customer_name")
    )
    recovered(store, scenario, database)
