"""Each pattern through each profile: it works as on MongoDB, or is refused by name before anything is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pymongo import MongoClient

from tests.cli.invoke import invoke
from tests.profiles import PROFILES, Profile, ProfileProxy, stream_of
from tests.test_every_pattern import SAMPLES, stored
from treadle import Count, Document, Id, Store, Sum, TreadleError, UsageError, migration
from treadle.server.local import LocalServer
from treadle.upkeep.migrations import swap

SNAPSHOTS = Path(__file__).parent / "snapshots"
TREES = {"ancestor_array", "child_references", "materialized_path", "parent_reference"}
# Which patterns each engine cannot have, and by which code they are refused. All others must work.
REFUSED: dict[str, dict[str, str]] = {
    "azure-documentdb": {"time_series": "capability-missing"},
    "aws-documentdb-5": dict.fromkeys(SAMPLES, "retryable-writes-missing"),
    "ferretdb": {
        **dict.fromkeys(
            [*TREES, "approximation", "archive", "history", "links", "outlier"], "transactions-needed"
        ),
        "time_series": "capability-missing",
    },
    "mongodb-4.4": dict.fromkeys(SAMPLES, "server-too-old"),
}


@pytest.fixture(scope="module", params=PROFILES)
def engine(request: pytest.FixtureRequest, server: LocalServer) -> Iterator[ProfileProxy]:
    with ProfileProxy(server, PROFILES[request.param]) as proxy:
        yield proxy


@pytest.fixture
def remote(engine: ProfileProxy, database: Any) -> Iterator[Any]:
    """The test's database, seen through the profile."""
    with MongoClient[dict[str, Any]](engine.uri) as client:
        yield client[database.name]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_pattern_works_or_is_refused_by_name(name, engine, remote, database):
    models = SAMPLES[name].models
    for collection, documents in SAMPLES[name].documents().items():
        database[collection].insert_many(documents)
    before = {each: list(database[each].find()) for each in sorted(database.list_collection_names())}
    store = Store(remote, models)
    refused = REFUSED[engine.profile.name].get(name)
    if refused is not None:
        for call in (store.setup, store.recover):
            with pytest.raises(TreadleError) as error:
                call()
            assert refused == error.value.code
        assert before == {
            each: list(database[each].find()) for each in sorted(database.list_collection_names())
        }
        return
    store.setup()
    if (engine.profile.name, name) == ("ferretdb", "bucket"):
        # Single documents that stand where buckets should be cannot be moved into them there.
        with pytest.raises(TreadleError, match="declare unique="):
            store.rebuild()
        return
    store.rebuild()
    assert [] == store.verify()
    once = stored(database, models)
    assert 0 == store.repair()
    # What another server makes of the same data is the same.
    assert [] == Store(database, models).verify()
    assert once == stored(database, models)


@pytest.mark.heavy
def test_the_smoke_set_passes_through_azure():
    """One path through each pattern and the worker; what is refused there is refused by name."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "quick",
        "--tb=no",
        "-rfE",
        "tests/patterns",
        "tests/upkeep",
    ]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TREADLE_PROFILE": "azure-documentdb"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    failed = [line for line in lines if "test_time_series" not in line]
    assert ([], 1) == (failed, done.returncode), done.stdout


# -- the worker where the history has no clock -------------------------------------------------------


class Sale(Document, collection="sales"):
    shop_id: Id
    amount: int = 0


class Shop(Document, collection="shops"):
    name: str = ""
    sales: Annotated[int, Count(Sale, by="shop_id", maintain="stream")] = 0
    total: Annotated[int, Sum(Sale, "amount", by="shop_id", maintain="stream")] = 0


@pytest.fixture
def azure(server: LocalServer, database: Any) -> Iterator[tuple[Any, Any]]:
    """A store through the profile, and the database beside it."""
    profile = PROFILES["azure-documentdb"]
    with ProfileProxy(server, profile) as proxy, MongoClient[dict[str, Any]](proxy.uri) as client:
        store = Store(client[database.name], [Sale, Shop])
        store.setup()
        yield store, database


def test_the_worker_follows_a_stream_of_the_whole_cluster(azure, client):
    store, database = azure
    known = store._capabilities()
    assert ("cluster", False, False) == (known.streams, known.cluster_time, known.pre_images)
    one, two = store.insert_many([Shop(name="one"), Shop(name="two")])
    store.worker().run_until_idle()
    elsewhere = client[f"{database.name}_other"]
    try:
        # Another database with the same collection is none of ours.
        elsewhere["sales"].insert_one({"shop_id": one.id, "amount": 99})
        sales = (
            database["sales"].insert_many([{"shop_id": one.id, "amount": n} for n in (1, 2, 3)]).inserted_ids
        )
        assert store.worker().lag().events
        assert store.worker().run_until_idle()
        assert (3, 6) == (store.get(Shop, one.id).sales, store.get(Shop, one.id).total)
        database["sales"].update_one({"_id": sales[0]}, {"$set": {"shop_id": two.id}})
        database["sales"].update_one({"_id": sales[1]}, {"$set": {"amount": 20}})
        database["sales"].delete_one({"_id": sales[2]})
        store.worker().run_until_idle()
    finally:
        client.drop_database(elsewhere.name)
    assert [(1, 20), (1, 1)] == [(each.sales, each.total) for each in store.get_many(Shop, [one.id, two.id])]
    assert [] == store.verify()
    assert 0 == store.worker().lag().events


def test_a_swap_follows_a_stream_of_the_whole_cluster(azure, client):
    """No declaration uses streams there, so it looks for them when it is called."""

    class Shelf(Document, collection="shelves", version=2):
        width: int

    migration(Shelf, from_version=1, up=[{"$set": {"width": "$size"}}, {"$unset": "size"}])
    through, database = azure
    database.shelves.insert_many([{"_id": number, "size": number} for number in range(20)])
    store, build = Store(through.database, [Shelf]), swap._build

    def written_meanwhile(run, shadow):
        yield from build(run, shadow)
        database.shelves.insert_one({"_id": 20, "size": 20})
        database.shelves.delete_one({"_id": 3})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "_build", written_meanwhile)
        assert store.migrate(Shelf, strategy="swap").finished
    there = {each["_id"]: each["width"] for each in database.shelves.find({"schema_version": 2})}
    assert {number: number for number in range(21) if number != 3} == there
    assert 20 == database.shelves.count_documents({})


def test_a_swap_is_refused_where_there_are_no_streams(server, database):
    class Shelf(Document, collection="shelves", version=2):
        width: int

    migration(Shelf, from_version=1, up=[{"$set": {"width": "$size"}}, {"$unset": "size"}])

    def refuse(body):
        return None if stream_of(body) is None else (136, "change streams are not enabled")

    profile = Profile("without streams", refuse)
    with ProfileProxy(server, profile) as proxy, MongoClient(proxy.uri) as client:
        store = Store(client[database.name], [Shelf])
        for dry_run in (True, False):
            with pytest.raises(UsageError, match="this server has no change streams") as refused:
                store.migrate(Shelf, strategy="swap", dry_run=dry_run)
            assert "migration-option" == refused.value.code


def test_a_source_that_moved_twice_is_not_left_where_it_was_in_between(azure):
    """Its events do not say where it went; the ledger does, because it was counted there."""
    store, database = azure
    a, b, c = store.insert_many([Shop(name=name) for name in "abc"])
    sale = database["sales"].insert_one({"shop_id": a.id, "amount": 5}).inserted_id
    store.worker().run_until_idle()
    position = database["treadle.streams"].find_one({"_id": "worker"})
    database["sales"].update_one({"_id": sale}, {"$set": {"shop_id": b.id}})
    database["sales"].insert_one({"shop_id": b.id, "amount": 1})
    # The batch is read and applied but for the move itself, as if that came later.
    store.worker().run_until_idle()
    assert 2 == store.get(Shop, b.id).sales
    database["sales"].update_one({"_id": sale}, {"$set": {"shop_id": c.id}})
    place = {name: position[name] for name in ("token", "start")}
    database["treadle.streams"].update_one({"_id": "worker"}, {"$set": place})
    store.worker().run_until_idle()
    assert [0, 1, 1] == [each.sales for each in store.get_many(Shop, [a.id, b.id, c.id])]
    assert [] == store.verify()


# -- what the doctor says -----------------------------------------------------------------------------


def test_the_doctor_describes_each_engine(engine, tmp_path):
    """The table of capabilities, as it is kept in tests/snapshots; remove a file to have it written anew."""
    done = invoke(tmp_path, "doctor", engine.uri)
    steady = re.sub(r"127\.0\.0\.1:\d+", "HOST", done.stdout)
    steady = re.sub(r"[-+]\d+\.\d{3} s", "+0.000 s", steady)
    # Another mongod behind the proxy has other numbers, and a table fits its widest cell.
    lines = [re.sub(r" {2,}|━+|─+", " ", line).strip() for line in steady.splitlines()]
    text = (
        "\n".join(line for line in lines if "server version" not in line and "compatibility" not in line)
        + "\n"
    )
    kept = SNAPSHOTS / f"doctor-{engine.profile.name}.txt"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text)
    assert kept.read_text() == text
