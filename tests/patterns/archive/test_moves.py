"""Documents that are old move, whole, and stay part of what is counted.

Covers: patterns/archive/rule, patterns/archive/layout
"""

from __future__ import annotations

import datetime as dt
import threading
from typing import Annotated, Any

import pytest
from pydantic import BaseModel
from pymongo import MongoClient
from pymongo.monitoring import CommandListener

from tests.patterns.archive.models import (
    COUNTED,
    NOW,
    OLD,
    SMALL,
    YEAR,
    Contract,
    Deed,
    Letter,
    Sale,
    SaleDay,
    Shop,
    places,
)
from tests.support import race
from treadle import (
    Archive,
    Attributes,
    Bucket,
    Bulk,
    Delete,
    Document,
    DuplicateKey,
    ExtendedReference,
    History,
    Insert,
    Limits,
    Progress,
    Replace,
    Store,
    Update,
    UsageError,
    migration,
)
from treadle.engine.document_layout import layout_of
from treadle.graph.write import Selector
from treadle.patterns.archive import moves


def sell(store, count=8):
    store.insert(Shop(id=1))
    dates = [OLD + dt.timedelta(days=number) if number % 2 else NOW for number in range(count)]
    store.insert_many([Sale(id=key, amount=key + 1, date=date) for key, date in enumerate(dates)])


def derived(store):
    return store.get(Shop, 1).model_dump(), [day.model_dump() for day in store.find(SaleDay, sort="day")]


@pytest.mark.quick
def test_old_documents_move_and_derived_values_go_on_counting_them(run, database):
    store = run.store(COUNTED, limits=SMALL)
    store.setup()
    sell(store)
    before = derived(store)
    assert 4 == store.archive(Sale, now=NOW)
    assert [0, 2, 4, 6] == [each["_id"] for each in database["sales"].find().sort("_id")]
    assert [1, 3, 5, 7] == [each["_id"] for each in database["sales_archive"].find().sort("_id")]
    assert before == derived(store)
    assert [] == store.verify()
    store.rebuild()
    assert before == derived(store)
    assert 0 == store.archive(Sale, now=NOW)


def test_what_has_no_date_is_never_archived(run, database):
    store = run.store([Sale])
    store.setup()
    store.insert(Sale(id=1))
    odd = [{"_id": 2, "date": "1999"}, {"_id": 3, "date": 7}, {"_id": 4}]
    database.get_collection("sales").insert_many(odd, bypass_document_validation=True)
    assert 0 == store.archive(Sale, now=NOW)
    assert 4 == database["sales"].count_documents({})


def test_the_age_is_that_of_the_moment_in_any_time_zone(run, database):
    store = run.store([Sale])
    store.setup()
    store.insert(Sale(id=1, date=NOW - YEAR))
    store.insert(Sale(id=2, date=NOW - YEAR + dt.timedelta(milliseconds=1)))
    tokyo = NOW.astimezone(dt.timezone(dt.timedelta(hours=9)))
    assert 1 == store.archive(Sale, now=tokyo, dry_run=True)
    assert 1 == store.archive(Sale, now=tokyo)
    assert ["sales_archive"] == places(database, 1)
    assert 0 == store.archive(Sale, now=NOW.replace(tzinfo=None))


def test_run_due_archives_and_progress_and_throttle_are_heeded(run, database):
    store = run.store([Sale], limits=SMALL)
    store.setup()
    store.insert_many([Sale(id=key, date=OLD) for key in range(7)])
    assert ["archive"] == [each.pattern for each in store.run_due(now=NOW, dry_run=True)]
    (ran,) = store.run_due(now=NOW)
    assert 7 == ran.written
    store.insert_many([Sale(id=key, date=OLD) for key in range(10, 17)])
    told: list[Progress] = []
    assert 7 == store.archive(Sale, now=NOW, throttle=1000, progress=told.append)
    assert [3, 6, 7] == [each.done for each in told]
    assert {7} == {each.total for each in told}
    with pytest.raises(UsageError) as raised:
        store.archive(Sale, throttle=0)
    assert "throttle-invalid" == raised.value.code


# -- reading ---------------------------------------------------------------------------------------


def test_find_merges_both_collections_in_order(run):
    store = run.store([Sale], limits=SMALL)
    store.setup()
    sales = [
        Sale(id=key, amount=key * 7 % 13, date=OLD if key % 3 else NOW, note="ab"[key % 2])
        for key in range(13)
    ]
    store.insert_many(sales)
    store.archive(Sale, now=NOW)
    chosen = [each for each in sales if each.amount >= 1]
    orders = {
        "amount": lambda each: each.amount,
        "-amount": lambda each: -each.amount,
        "-date": lambda each: -each.date.timestamp(),
        ("note", "-amount"): lambda each: (each.note, -each.amount),
    }
    for sort, key in orders.items():
        expected = [each.id for each in sorted(chosen, key=key)]
        for skip, limit in ((0, None), (0, 5), (3, 4)):
            words = {"sort": sort if isinstance(sort, str) else list(sort), "skip": skip, "limit": limit}
            found = store.find(Sale, {"amount": {"$gte": 1}}, archived=True, **words)
            end = None if limit is None else skip + limit
            assert expected[skip:end] == [each.id for each in found], words
    assert len(chosen) == len(list(store.find(Sale, {"amount": {"$gte": 1}}, archived=True)))


def test_the_limit_is_pushed_down(heard):
    database, listener = heard
    store = Store(database, [Sale])
    store.setup()
    store.insert_many([Sale(id=key, date=OLD if key % 2 else NOW) for key in range(20)])
    store.archive(Sale, now=NOW)
    listener.clear()
    assert 3 == len(list(store.find(Sale, sort="-date", limit=3, archived=True)))
    assert [3, 3] == [command["limit"] for name, command in listener.commands if name == "find"]


def test_a_reader_sees_each_document_once_while_documents_move(database):
    store, other = Store(database, [Sale], limits=SMALL), Store(database, [Sale], limits=SMALL)
    store.setup()
    store.insert_many([Sale(id=key, date=OLD) for key in range(40)])
    stop = threading.Event()

    def move() -> None:
        for _ in range(3):
            store.archive(Sale, now=NOW)
            for key in range(0, 40, 5):
                store.restore(Sale, key)
        stop.set()

    def read() -> None:
        while not stop.is_set():
            found = [each.id for each in other.find(Sale, sort="_id", archived=True)]
            assert list(range(40)) == found
            assert other.get(Sale, 5) is not None

    race(move, read)


# -- writing ---------------------------------------------------------------------------------------


def test_writes_of_what_is_archived_are_refused(run, database):
    store = run.store([Sale])
    store.setup()
    store.insert(Sale(id=1, date=OLD))
    store.archive(Sale, now=NOW)
    for write in (
        lambda: store.update(Sale, 1, {"$set": {"amount": 2}}),
        lambda: store.update(Sale, {"note": ""}, {"$set": {"amount": 2}}),
        lambda: store.replace(Sale(id=1, amount=2)),
        lambda: store.delete(Sale, 1),
        lambda: store.change(store.get(Sale, 1), amount=2),
        lambda: store.bulk([Insert(Sale(id=5)), Update(Sale, 1, {"$set": {"amount": 2}})]),
        lambda: store.bulk([Delete(Sale, 1), Delete(Sale, 2)]),
    ):
        with pytest.raises(UsageError) as raised:
            write()
        assert "document-archived" == raised.value.code
    assert store.update(Sale, 2, {"$set": {"amount": 2}}) is None
    assert ["sales_archive"] == places(database, 1)
    back = store.restore(Sale, 1)
    assert (1, ["sales"]) == (back.id, places(database, 1))
    assert 2 == store.update(Sale, 1, {"$set": {"amount": 2}}).amount
    assert store.restore(Sale, 1) is None


def test_writes_bring_back_what_is_archived_where_that_is_declared(run, database):
    store = run.store([Letter])
    store.setup()
    store.insert_many([Letter(id=key, number=str(key), date=dt.date(2020, 1, 1)) for key in range(8)])
    assert 8 == store.archive(Letter, now=NOW)
    assert "x" == store.update(Letter, 0, {"$set": {"text": "x"}}).text
    assert "y" == store.replace(Letter(id=1, number="1", date=dt.date(2020, 1, 1), text="y")).text
    assert 2 == store.delete(Letter, 2).id
    text = {"$set": {"text": "b"}}
    sixth = Letter(id=6, number="6", date=dt.date(2020, 1, 1), text="b")
    assert Bulk(updated=2) == store.bulk([Update(Letter, 4, text), Replace(sixth)])
    assert ["b", "b"] == [store.get(Letter, key).text for key in (4, 6)]
    assert [["letters"], ["letters"], [], ["old_letters"]] == [
        places(database, key, Letter) for key in range(4)
    ]
    assert [] == store.verify()


def test_the_id_alone_is_unique_across_both_collections(run, database):
    """A value of an archived document is free again, also when the new document is archived in turn."""
    store = run.store([Letter])
    store.setup()
    store.insert(Letter(id=1, number="1", date=dt.date(2020, 1, 1)))
    store.archive(Letter, now=NOW)
    again = Letter(id=1, number="new", date=dt.date(2026, 1, 1))
    for write in (
        lambda: store.insert(again),
        lambda: store.upsert(Letter, 1, {"$set": {"text": "x"}}, insert=again),
    ):
        with pytest.raises(DuplicateKey) as raised:
            write()
        assert (["_id"], "_id_") == (list(raised.value.fields), raised.value.index)
        assert "restore that one" in str(raised.value)
    second = Letter(id=2, number="1", date=dt.date(2021, 1, 1))
    upserted = store.upsert(Letter, {"number": "1"}, {"$set": {"text": "x"}}, insert=second)
    assert (2, True) == (upserted.document.id, upserted.created)
    with pytest.raises(DuplicateKey) as raised:
        store.restore(Letter, 1)
    assert ["number"] == list(raised.value.fields)
    assert 1 == store.archive(Letter, now=NOW)
    assert [["old_letters"], ["old_letters"]] == [places(database, key, Letter) for key in (1, 2)]
    assert [] == store.verify()


def test_a_revert_of_an_archived_document_is_refused_or_brings_it_back(run, database):
    store = run.store([Deed, Contract, Sale])
    store.setup()
    store.insert(Deed(id=1, owner="Ada", date=OLD))
    store.update(Deed, 1, {"$set": {"owner": "Ben"}})
    store.insert(Contract(id=1, date=OLD))
    assert (1, 1) == (store.archive(Deed, now=NOW), store.archive(Contract, now=NOW))
    assert "Ada" == store.revert(Deed, 1, 1).owner
    assert ["deeds"] == places(database, 1, Deed)
    with pytest.raises(UsageError) as raised:
        store.revert(Contract, 1, 1)
    assert "document-archived" == raised.value.code
    assert [] == store.verify()


def test_an_update_that_races_with_the_move_is_kept(database):
    store, other = Store(database, COUNTED, limits=SMALL), Store(database, COUNTED)
    store.setup()
    store.insert(Shop(id=1))
    store.insert_many([Sale(id=key, date=OLD, amount=0) for key in range(30)])
    added = [0] * 30
    stop = threading.Event()

    def move() -> None:
        for _ in range(4):
            store.archive(Sale, now=NOW)
            for key in range(30):
                store.restore(Sale, key)
        store.archive(Sale, now=NOW)
        stop.set()

    def write() -> None:
        key = 0
        while not stop.is_set():
            try:
                if other.update(Sale, key % 30, {"$inc": {"amount": 1}}) is not None:
                    added[key % 30] += 1
            except UsageError as error:
                assert "document-archived" == error.code
            key += 1

    race(move, write)
    assert 30 == database["sales_archive"].count_documents({})
    assert added == [store.get(Sale, key).amount for key in range(30)]
    assert sum(added) == store.get(Shop, 1).total
    assert 30 == store.get(Shop, 1).sales
    assert [] == store.verify()


# -- proof, repair and declarations ------------------------------------------------------------------


def test_a_document_in_both_places_is_found_and_mended(run, database):
    store = run.store(COUNTED, limits=SMALL)
    store.setup()
    sell(store)
    store.archive(Sale, now=NOW)
    before = derived(store)
    copy = database["sales_archive"].find_one({"_id": 3})
    database["sales"].insert_one({**copy, "amount": 99})
    assert {"archive"} <= {each.pattern for each in store.verify()}
    store.repair()
    assert [] == store.verify()
    assert ["sales"] == places(database, 3)
    assert before[0]["sales"] == store.get(Shop, 1).sales


def test_a_document_that_cannot_be_stored_there_is_set_aside(run, database):
    store = run.store([Sale], limits=SMALL)
    store.setup()
    store.insert_many([Sale(id=key, date=OLD) for key in range(8)])
    database["sales_archive"].insert_one({"_id": 4, "other": True})
    assert 7 == store.archive(Sale, now=NOW)
    assert 1 == database["treadle.set_aside"].count_documents({"_id.key": 4})
    assert 1 == database["sales"].count_documents({})


def test_documents_that_cannot_move_are_passed_by_and_not_listed_in_each_search(heard, database):
    other, listener = heard
    store = Store(other, [Sale], limits=SMALL)
    store.setup()
    dates = [OLD + dt.timedelta(days=key // 4) for key in range(24)]
    store.insert_many([Sale(id=key, date=date) for key, date in enumerate(dates)])
    database["sales_archive"].insert_many([{"_id": key} for key in range(0, 24, 2)])
    listener.clear()
    assert 12 == store.archive(Sale, now=NOW)
    assert 12 == len(store.set_aside())
    finds = [command for name, command in listener.commands if command.get(name) == "sales"]
    searches = [each["filter"]["$and"][-1] for each in finds if "sort" in each and "$and" in each["filter"]]
    assert {0, 1, 2} >= {len(each["_id"]["$nin"]) for each in searches}
    assert 0 == store.archive(Sale, now=NOW)


# -- buckets ---------------------------------------------------------------------------------------


class Reading(
    Document,
    collection="readings",
    bucket=Bucket(key="sensor", time="ts", limit=3, stats="value"),
    archive=Archive(by="ts", after=YEAR, into="old_readings"),
):
    sensor: str
    ts: dt.datetime
    value: int


def test_a_bucketed_model_moves_whole_buckets(run, database):
    store = run.store([Reading], limits=SMALL)
    store.setup()
    times = [OLD + dt.timedelta(hours=number) for number in range(7)] + [NOW]
    store.insert_many([Reading(sensor="a", ts=ts, value=number) for number, ts in enumerate(times)])
    buckets = database["readings"].count_documents({})
    assert 2 == store.archive(Reading, now=NOW)
    # The last bucket holds a reading that is not old.
    assert buckets - 2 == database["readings"].count_documents({})
    assert [6, 7] == [each.value for each in store.find(Reading, sort="ts")]
    assert list(range(8)) == [each.value for each in store.find(Reading, sort="ts", archived=True)]
    assert [7, 6, 5] == [each.value for each in store.find(Reading, sort="-ts", limit=3, archived=True)]
    assert [4, 5] == [each.value for each in store.find(Reading, {"value": {"$in": [4, 5]}}, archived=True)]
    store.insert(Reading(sensor="a", ts=OLD, value=9))
    assert 9 == len(list(store.find(Reading, archived=True)))
    assert [] == store.verify()
    # It arrived in a bucket that holds a reading which is not old.
    assert 0 == store.archive(Reading, now=NOW)


@pytest.mark.parametrize("write", ["update", "replace", "delete"])
def test_a_document_that_somebody_else_brings_back_meanwhile_is_written(server, database, write):
    other = Store(database, [Sale])
    other.setup()
    other.insert(Sale(id=1, date=OLD))
    other.archive(Sale, NOW)

    class BringBack(CommandListener):
        """Restores the document when the writer, who did not find it here, is about to look there."""

        restored = False

        def started(self, event):
            if "sales_archive" == event.command.get("find") and not self.restored:
                self.restored = True
                other.restore(Sale, 1)

        def succeeded(self, event): ...

        def failed(self, event): ...

    listener = BringBack()
    with MongoClient(server.uri, event_listeners=[listener]) as client:
        store = Store(client[database.name], [Sale])
        if write == "update":
            assert "late" == store.update(Sale, 1, {"$set": {"note": "late"}}).note
        elif write == "replace":
            assert "late" == store.replace(Sale(id=1, note="late", date=OLD)).note
        else:
            assert store.delete(Sale, 1) is not None
    assert listener.restored
    assert ([] if write == "delete" else ["late"]) == [each.note for each in other.find(Sale, archived=True)]


class Maker(
    Document,
    collection="makers",
    archive=Archive(by="at", after=dt.timedelta(days=1), into="makers_archive", counted=False),
):
    id: int
    name: str
    at: dt.datetime = OLD


class MakerCard(BaseModel):
    name: str


class MakerSummary(BaseModel):
    id: int | None = None
    name: str | None = None


class Part(BaseModel):
    maker_id: int | None = None
    name: Annotated[str | None, ExtendedReference(Maker, by="maker_id", field="name", on_delete="clear")] = (
        None
    )


class Kit(Document, collection="kits"):
    id: int
    maker_id: int | None = None
    maker: Annotated[MakerCard | None, ExtendedReference(Maker, by="maker_id", on_delete="clear")] = None
    summary: Annotated[MakerSummary | None, ExtendedReference(Maker, by="summary.id", on_delete="clear")] = (
        None
    )
    kept: Annotated[str | None, ExtendedReference(Maker, by="maker_id", field="name")] = None
    parts: list[Part] = []


@pytest.mark.parametrize("fan_out_max", [2_000, 1])
def test_copies_leave_and_return_with_a_source_that_is_not_counted_in_the_archive(database, fan_out_max):
    """The references stay, so that the copies can return; with on_delete="keep" the copies stay too."""
    store = Store(database, [Maker, Kit], limits=Limits(fan_out_max=fan_out_max))
    store.setup()
    store.insert(Maker(id=1, name="Ada"))
    for key in range(3):
        store.insert(Kit(id=key, maker_id=1, summary=MakerSummary(id=1), parts=[Part(maker_id=1)]))
    whole = {"maker": {"name": "Ada"}, "summary": {"id": 1, "name": "Ada"}, "kept": "Ada"}
    shown = {"_id": 0, "maker": 1, "summary": 1, "kept": 1, "parts": 1}
    parts = {"parts": [{"maker_id": 1, "name": "Ada"}]}
    assert [{**whole, **parts}] * 3 == list(database["kits"].find({}, shown))

    store.archive(Maker, now=OLD + dt.timedelta(days=3))
    gone = {"maker": None, "summary": {"id": 1}, "kept": "Ada", "parts": [{"maker_id": 1, "name": None}]}
    assert [gone] * 3 == list(database["kits"].find({}, shown))
    assert [] == store.verify()

    store.restore(Maker, 1)
    assert [{**whole, **parts}] * 3 == list(database["kits"].find({}, shown))
    assert [] == store.verify()


DATED = Archive(by="date", after=dt.timedelta(days=1), into="dated_archive")


class Dated(Document, collection="dated", version=2, archive=DATED):
    id: int
    date: dt.datetime


@migration(Dated, from_version=1, fields=("date", "at"))
def rename_date(document: dict[str, object]) -> dict[str, object]:
    document["date"] = document.pop("at")
    return document


def test_outdated_documents_are_archived_by_their_date_in_the_current_version(run, database):
    store = run.store([Dated])
    database["dated"].insert_many([{"_id": 1, "at": OLD}, {"_id": 2, "at": OLD + dt.timedelta(days=9)}])
    store.insert(Dated(id=3, date=OLD))
    now = OLD + dt.timedelta(days=2)
    assert (2, 2) == (store.archive(Dated, now=now, dry_run=True), store.archive(Dated, now=now))
    assert [2] == database["dated"].distinct("_id")
    assert {"_id", "at"} == set(database["dated_archive"].find_one(1))


# -- beside other patterns ----------------------------------------------------------------------------


class Tool(
    Document,
    collection="tools",
    archive=Archive(by="date", after=YEAR, into="old_tools"),
    soft_delete="deleted_at",
):
    id: int
    weight: int = 1
    specs: Annotated[dict[str, int], Attributes()] = {}
    date: dt.datetime
    deleted_at: dt.datetime | None = None


def test_what_is_archived_is_found_by_the_indexes_of_its_patterns(run, database):
    store = run.store([Tool])
    store.setup()
    store.insert_many([Tool(id=key, specs={"size": key}, date=OLD) for key in range(20)])
    assert 20 == store.archive(Tool, now=NOW)
    assert [7] == [each.id for each in store.find(Tool, {"specs.size": 7}, archived=True)]
    sent = {"specs": {"$elemMatch": {"k": "size", "v": 7}}}
    assert "COLLSCAN" not in str(database["old_tools"].find(sent).explain()["queryPlanner"]["winningPlan"])
    assert [] == store.setup()


def test_find_in_both_places_takes_the_other_words_of_find(run, database):
    """Deleted documents are not archived; documents that do not fit are passed over."""
    store = run.store([Tool])
    store.setup()
    store.insert_many([Tool(id=key, date=OLD) for key in range(3)])
    store.delete(Tool, 2)
    store.archive(Tool, now=NOW)
    with pytest.raises(UsageError, match="not both") as refused:
        store.find(Tool, archived=True, deleted=True)
    assert "filter-invalid" == refused.value.code
    assert [2] == [each.id for each in store.find(Tool, deleted=True)]
    database["old_tools"].update_one({"_id": 0}, {"$set": {"weight": "heavy"}})
    found = store.find(Tool, archived=True, sort="_id", invalid="skip")
    assert ([1], 1) == ([each.id for each in found], len(found.invalid))


def test_archived_documents_do_not_hide_rows_whose_document_is_gone(database, constants):
    body = {"__annotations__": {"id": int, "date": dt.datetime}, "__module__": __name__}
    words = {"collection": "papers", "history": History()}
    archive = Archive(by="date", after=YEAR, into="old_papers")
    paper: Any = type(Document)("Paper", (Document,), body, archive=archive, **words)
    constants(history_disorder_max=2)
    store = Store(database, [paper], limits=Limits(verify_page=2))
    store.setup()
    store.insert_many([paper(id=key, date=OLD) for key in range(6)])
    store.insert(paper(id=9, date=NOW))
    store.archive(paper, now=NOW)
    assert [] == store.verify()
    database["papers"].delete_one({"_id": 9})
    assert [9] == [each.document_id for each in store.verify()]
    store.repair()
    assert [] == store.verify()


def test_large_documents_move_in_smaller_chunks(heard, database):
    other, listener = heard
    store = Store(other, [Tool], limits=Limits(archive_chunk=10, archive_chunk_bytes=3_000))
    store.setup()
    large = {f"name{number}": number for number in range(40)}
    store.insert_many([Tool(id=key, specs=large, date=OLD) for key in range(4)])
    listener.clear()
    assert 4 == store.archive(Tool, now=NOW)
    sizes = [len(command["documents"]) for name, command in listener.commands if name == "insert"]
    assert [2, 2] == sizes
    # It does not look at all of them again for the two that move.
    finds = [command for name, command in listener.commands if name == "find" and "sort" in command]
    assert [10, 4, 8] == [each["limit"] for each in finds if each["find"] == "tools"]
    store.insert(Tool(id=9, specs={f"{name}{name}{name}": 1 for name in large} | large, date=OLD))
    assert 1 == store.archive(Tool, now=NOW)


def test_a_write_finds_a_document_that_moves_while_it_looks_for_it(database, monkeypatch):
    store, other = Store(database, [Letter]), Store(database, [Letter])
    store.setup()
    store.insert(Letter(id=1, number="1", date=OLD.date()))
    other.recover()
    racing, find_one = [lambda: other.archive(Letter, now=NOW)], moves.find_one

    def look(collection, *rest):
        # Between the look into the archive and the one into the collection itself.
        while collection == "letters" and racing:
            assert 1 == racing.pop()()
        return find_one(collection, *rest)

    monkeypatch.setattr(moves, "find_one", look)
    layout = layout_of(store.graph.entry(Letter), store.write_path)
    assert store.runner.run(layout.bring_back(Selector(layout.entry, {"_id": 1})))
    assert [] == racing
    assert "read" == store.update(Letter, 1, {"$set": {"text": "read"}}).text
