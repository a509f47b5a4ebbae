"""`migrate(…, strategy="swap")`: a new collection takes the place of the old one, and no write is lost."""

from __future__ import annotations

import contextlib
import threading
from typing import Annotated, Any

import pytest
from bson import Decimal128, ObjectId
from pymongo import IndexModel, MongoClient
from pymongo.errors import WriteError

from tests import faults
from treadle import Count, DataError, Document, Id, Indexed, Store, UsageError, migration
from treadle.graph.limits import Limits
from treadle.plan.server_errors import SWAPPING
from treadle.upkeep.change_stream import present_place
from treadle.upkeep.migrations import changed, closing, swap
from treadle.upkeep.migrations.run import lease_of

NUMBER = 300


class Reader(Document, collection="readers", version=3, indexes=[IndexModel([("visits", -1)], name="often")]):
    full_name: str
    visits: int = 0
    email: Annotated[str | None, Indexed(unique=True)] = None
    checked: bool = False


migration(
    Reader,
    from_version=1,
    up=[{"$set": {"full_name": "$name"}}, {"$unset": "name"}],
    down=[{"$set": {"name": "$full_name"}}, {"$unset": "full_name"}],
)
migration(Reader, from_version=2, up=[{"$set": {"checked": True}}], down=[{"$unset": "checked"}])


def old(number: int, **fields: Any) -> dict[str, Any]:
    return {"_id": ObjectId(), "name": f"reader {number}", "visits": 0, "email": f"{number}@x", **fields}


@pytest.fixture
def readers(database: Any) -> list[dict[str, Any]]:
    """Of version 1, a few of 2 and 3."""
    Store(database, [Reader]).setup()
    documents = [old(number) for number in range(NUMBER)]
    for number, version in ((0, 2), (1, 2), (2, 3)):
        documents[number]["full_name"] = documents[number].pop("name")
        documents[number]["schema_version"] = version
    documents[2]["checked"] = True
    database.readers.insert_many(documents)
    return documents


def held_up(store: Any, kept: dict[str, Any], token: int = 0) -> Any:
    place = yield from present_place(store.graph.limits)
    yield from closing.close("readers", closing.Closing(token, kept, place))


def described(database: Any) -> tuple[Any, Any]:
    (listed,) = database.list_collections(filter={"name": "readers"})
    indexes = {each["name"]: each for each in database.readers.list_indexes()}
    return listed["options"], indexes


@pytest.mark.usefixtures("readers")
def test_all_documents_change_and_the_collection_stays_what_it_was(run: Any, database: Any) -> None:
    before = described(database)
    store = run.store([Reader])
    result = store.migrate(Reader, strategy="swap")
    assert (NUMBER - 1, 0, True) == (result.migrated, result.remaining, result.finished)
    assert {3: NUMBER} == store.migration_status(Reader)
    assert {1: NUMBER - 3, 2: 2} == store.migration_log(Reader)[0].found
    assert before == described(database)
    assert {f"reader {number}" for number in range(NUMBER)} == {each.full_name for each in store.find(Reader)}
    assert 0 == database.readers.count_documents({"name": {"$exists": True}})
    assert [] == [name for name in database.list_collection_names() if name.startswith("treadle.swap.")]
    # And down again.
    assert store.migrate(Reader, to=1, strategy="swap").finished
    assert {1: NUMBER} == store.migration_status(Reader)
    assert NUMBER == database.readers.count_documents(
        {"name": {"$exists": True}, "checked": {"$exists": False}}
    )


def test_no_write_is_lost(readers: list[dict[str, Any]], database: Any) -> None:
    """Inserts, updates and deletions go on all the time; what was acknowledged is there afterwards, once."""
    writers = Store(database, [Reader])
    over = threading.Event()
    began = threading.Barrier(4)
    added: list[Any] = []
    deleted: list[Any] = []
    visits: dict[Any, int] = {}
    errors: list[BaseException] = []

    def until_over(step: Any) -> None:
        try:
            began.wait(30)
            number = 0
            while not over.is_set() or number < 5:
                step(number)
                number += 1
        except BaseException as error:
            errors.append(error)

    def insert(number: int) -> None:
        added.append(writers.insert(Reader(full_name=f"new {number}")).id)

    def update(number: int) -> None:
        key = readers[number % 50]["_id"]
        after = writers.update(Reader, key, {"$inc": {"visits": 1}})
        assert after is not None
        visits[key] = visits.get(key, 0) + 1
        assert visits[key] == after.visits

    def delete(number: int) -> None:
        if number < 200:
            key = readers[60 + number]["_id"]
            assert writers.delete(Reader, key) is not None
            deleted.append(key)

    threads = [threading.Thread(target=until_over, args=(each,)) for each in (insert, update, delete)]
    for thread in threads:
        thread.start()
    began.wait(30)
    migrator = Store(database, [Reader])
    for _ in range(3):
        assert migrator.migrate(Reader, strategy="swap").finished
        assert migrator.migrate(Reader, to=1, strategy="swap").finished
    assert migrator.migrate(Reader, strategy="swap").finished
    over.set()
    for thread in threads:
        thread.join(60)
    assert [] == errors
    there = {each["_id"]: each for each in database.readers.find()}
    assert set(added) <= there.keys()
    assert there.keys().isdisjoint(deleted)
    assert NUMBER - len(deleted) + len(added) == len(there)
    assert visits == {key: there[key]["visits"] for key in visits}
    assert [] == list(migrator.find(Reader, {"visits": {"$lt": 0}}))


def test_versions_that_nobody_had_when_they_were_counted_are_followed(server: Any, database: Any) -> None:
    """Their documents are not copied with the others; the stream tells of them."""
    Store(database, [Reader]).setup()
    database.readers.insert_many([old(number) for number in range(20)])
    new = {"_id": ObjectId(), "full_name": "new", "visits": 0, "schema_version": 3}
    newer = {**new, "_id": ObjectId(), "full_name": "newer", "schema_version": 2}
    listener = faults.Heard()

    def write() -> None:
        database.readers.insert_many([new, newer])

    with MongoClient[Any](server.uri, event_listeners=[listener]) as client:
        store = Store(client[database.name], [Reader])
        store.migration_status(Reader)
        # Of the aggregations of a swap, the third is the one that copies.
        listener.before(["aggregate"], 2, write)
        assert store.migrate(Reader, strategy="swap").finished
    assert {3: 22} == Store(database, [Reader]).migration_status(Reader)
    assert {"new", "newer"} < {each["full_name"] for each in database.readers.find()}


def test_the_stream_is_read_while_the_documents_are_copied(
    readers: list[dict[str, Any]], server: Any, database: Any
) -> None:
    """A copy writes more than the server keeps of its history: a stream that is read afterwards is lost."""
    listener = faults.Heard()
    looks: list[int] = []

    def look() -> None:
        database.readers.update_one({"_id": readers[5]["_id"]}, {"$set": {"visits": 5}})
        before = listener.names.count("getMore")
        for _ in range(3_000):
            looks.append(listener.names.count("getMore") - before)
            if looks[-1] > 1:
                return
            threading.Event().wait(0.01)

    with MongoClient[Any](server.uri, event_listeners=[listener]) as client:
        store = Store(client[database.name], [Reader])
        store.migration_status(Reader)
        listener.before(["aggregate"], 2, look)
        assert store.migrate(Reader, strategy="swap").finished
    assert looks[-1] > 1
    after = database.readers.find_one({"_id": readers[5]["_id"]})
    assert (5, "reader 5") == (after["visits"], after["full_name"])


@pytest.mark.usefixtures("readers")
def test_a_stream_whose_token_tells_no_time_is_followed_to_a_marker(
    database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed, "time_of", lambda place: None)
    store, build = Store(database, [Reader]), swap._build

    def written_meanwhile(run: Any, shadow: str) -> Any:
        yield from build(run, shadow)
        database.readers.insert_one(old(1_000))

    monkeypatch.setattr(swap, "_build", written_meanwhile)
    assert store.migrate(Reader, strategy="swap").finished
    assert {3: NUMBER + 1} == store.migration_status(Reader)
    assert [] == list(database["treadle.beats"].find())


def test_all_of_a_transaction_is_followed_however_little_is_read_at_a_time(
    server: Any, database: Any
) -> None:
    """Its events all have one time: the token of the first of them tells that of the last."""
    limits = Limits(schedule_events_page=1)
    database.create_collection("readers")
    store = Store(database, [Reader], limits=limits)
    following = changed.Changed("readers", limits)
    documents = [old(number) for number in range(5)]

    def follow() -> Any:
        place = yield from present_place(limits)
        yield from following.open(place)
        with database.client.start_session() as session, session.start_transaction():
            database.readers.insert_many(documents, session=session)
        return (yield from following.until_now()), (yield from following.until_now())

    with database.client.start_session() as session:
        assert ([each["_id"] for each in documents], []) == store.runner.run(follow(), session)


@pytest.mark.parametrize("version", [True, Decimal128("2"), [2], "2"], ids=str)
def test_a_document_of_an_odd_version_is_copied_too(database: Any, version: Any) -> None:
    """What is equal to a version in Python is not always so for the server, nor the other way round."""
    Store(database, [Reader]).setup()
    odd = {**old(20), "schema_version": version}
    database.readers.insert_many(
        [*(old(number) for number in range(20)), odd], bypass_document_validation=True
    )
    before = {each["_id"] for each in database.readers.find()}
    assert Store(database, [Reader]).migrate(Reader, strategy="swap").finished
    assert before == {each["_id"] for each in database.readers.find()}
    assert 20 <= database.readers.count_documents({"schema_version": 3})


def test_a_document_that_cannot_be_migrated_changes_nothing(
    readers: list[dict[str, Any]], database: Any
) -> None:
    class Strict(Document, collection="readers", version=2):
        name: str

    migration(Strict, from_version=1, up=[{"$set": {"length": {"$strLenCP": "$name"}}}])
    database.readers.drop()
    database.readers.insert_many([{"_id": 1, "name": "fine"}, {"_id": 2, "name": 5}])
    store = Store(database, [Strict])
    before = list(database.readers.find())
    with pytest.raises(DataError) as refused:
        store.migrate(Strict, strategy="swap")
    assert "migration-failed" == refused.value.code
    assert before == list(database.readers.find())
    database.readers.insert_one({"_id": 3, "name": "more"})


def test_a_swap_that_was_killed_holds_nobody_up(readers: list[dict[str, Any]], database: Any) -> None:
    """The collection refuses writes, and nobody is left to end that: whoever comes next does."""
    store = Store(database, [Reader])
    before = described(database)
    kept = closing.kept(before[0])
    for mend in (
        store.recover,
        store.setup,
        lambda: store.migrate(Reader),
        lambda: store.migrate(Reader, strategy="swap"),
    ):
        store.runner.run(held_up(store, kept))
        with pytest.raises(Exception, match=r"121|validat"):
            database.readers.insert_one(old(9_999))
        mend()
        assert before == described(database)
        store.insert(Reader(full_name="new"))


@pytest.mark.parametrize("killed", [False, True])
def test_deletions_just_before_the_rename_hold(
    killed: bool,
    readers: list[dict[str, Any]],
    server: Any,
    database: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing can be stored in their place before they are done again, and a kill does not undo them."""
    before, deleted, listener = described(database), readers[5]["_id"], faults.Heard()
    let_through = swap._let_through

    def meanwhile(*arguments: Any) -> Any:
        if database.readers.count_documents({"_id": deleted, "full_name": {"$exists": True}}):
            refused.append(database.readers)
            with pytest.raises(WriteError):
                database.readers.update_one({"_id": deleted}, {"$set": {"visits": 5}}, upsert=True)
            if killed:
                raise RuntimeError("killed")
        return let_through(*arguments)

    refused: list[Any] = []
    monkeypatch.setattr(swap, "_let_through", meanwhile)
    with MongoClient[Any](server.uri, event_listeners=[listener]) as client:
        store = Store(client[database.name], [Reader])
        listener.before(["renameCollection"], 0, lambda: database.readers.delete_one({"_id": deleted}))
        with contextlib.suppress(RuntimeError):
            store.migrate(Reader, strategy="swap")
    assert [database.readers] == refused
    monkeypatch.undo()
    Store(database, [Reader]).recover()
    assert before == described(database)
    assert 0 == database.readers.count_documents({"_id": deleted})
    assert NUMBER - 1 == database.readers.count_documents({"schema_version": 3})


def test_what_is_inserted_again_before_the_hold_is_not_deleted(database: Any) -> None:
    store = Store(database, [Reader])
    store.setup()
    database.readers.insert_one(again := old(1))
    place = store.runner.run(present_place(store.graph.limits))
    database.readers.delete_one({"_id": again["_id"]})
    database.readers.insert_one(again)
    store.runner.run(closing.close("readers", closing.Closing(0, {}, place)))
    store.recover()
    assert [again] == list(database.readers.find())


@pytest.mark.usefixtures("readers")
def test_nobody_lets_writes_through_while_a_swap_is_under_way(database: Any) -> None:
    """Else they would go to the collection that is about to be replaced, and be lost."""
    store = Store(database, [Reader])
    before = described(database)
    kept = closing.kept(before[0])
    lease = lease_of("readers", store.graph.limits, "another host:1:1/swap", lambda owner: False)
    assert store.runner.run(lease.take())
    store.runner.run(held_up(store, kept))
    assert [] == store.setup()
    store.recover()
    with pytest.raises(DataError) as refused:
        store.migrate(Reader)
    assert "migration-running" == refused.value.code
    with pytest.raises(WriteError):
        database.readers.insert_one(old(9_999))
    store.runner.run(lease.release())
    store.recover()
    assert before == described(database)


@pytest.mark.usefixtures("readers")
@pytest.mark.parametrize("hindrance", ["lease", "validator"])
def test_what_is_no_longer_held_up_is_not_renamed(
    hindrance: str, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, close = Store(database, [Reader]), swap.close

    def hindered(collection: str, noted: Any) -> Any:
        yield from close(collection, noted)
        if hindrance == "validator":
            yield from swap.database_command({"collMod": collection, **noted.former})
        else:
            database["treadle.leases"].update_one({"_id": "migrate:readers"}, {"$inc": {"n": 1}})

    monkeypatch.setattr(swap, "close", hindered)
    before = described(database)
    with pytest.raises(DataError) as refused:
        store.migrate(Reader, strategy="swap")
    assert {"lease": "migration-running", "validator": "migration-failed"}[hindrance] == refused.value.code
    assert NUMBER - 3 == database.readers.count_documents({"name": {"$exists": True}})
    assert [] == [name for name in database.list_collection_names() if name.startswith("treadle.swap.")]
    assert before == described(database)


def test_what_cannot_be_swapped_is_refused_by_name(database: Any) -> None:
    class Book(Document, collection="books", version=2):
        reader_id: Id | None = None

    migration(Book, from_version=1, up=[{"$set": {"x": 1}}])

    class Shelf(Document, collection="shelves"):
        books: Annotated[int, Count(Book, by="reader_id")] = 0

    class Note(Document, collection="notes", version=2):
        text: str = ""

    @migration(Note, from_version=1)
    def change(document: dict[str, Any]) -> dict[str, Any]:
        return document

    store = Store(database, [Book, Shelf, Note])
    for model, words in ((Book, "follow"), (Note, "function")):
        with pytest.raises(UsageError, match=words) as refused:
            store.migrate(model, strategy="swap")
        assert "migration-option" == refused.value.code
    with pytest.raises(UsageError, match="'update' or 'swap'"):
        store.migrate(Note, strategy="other")  # type: ignore[arg-type]
    assert SWAPPING in str(closing.REFUSING)
