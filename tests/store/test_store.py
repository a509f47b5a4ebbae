"""The plain calls of the Store, on both shells.

Covers: store/async_store, store/common
"""

from __future__ import annotations

import decimal
from typing import Annotated, Any

import pytest
from pydantic import BaseModel
from pymongo import MongoClient
from pymongo.errors import InvalidOperation, ServerSelectionTimeoutError

from tests.support import Colour
from treadle import AsyncStore, Count, Document, Store, UsageError
from treadle.engine import fan_outs


class Address(BaseModel):
    city: str


class Person(Document, collection="people"):
    name: str
    age: int = 0
    wallet: decimal.Decimal = decimal.Decimal(0)
    colour: Colour = Colour.RED
    address: Address | None = None
    anything: Any = None


@pytest.fixture
def store(run):
    return run.store([Person])


def test_find_filters_sorts_skips_and_limits(store):
    people = store.insert_many(
        [Person(name=name, age=age) for name, age in zip("abcd", (3, 1, 3, 2), strict=True)]
    )
    a, b, c, d = people
    assert [a, c] == list(store.find(Person, {"age": 3}))
    assert [a, c, d, b] == list(store.find(Person, sort="-age"))
    assert [b, d, a, c] == list(store.find(Person, sort=["age", "name"]))
    assert [c, a, d, b] == list(store.find(Person, sort=[("age", -1), ("name", -1)]))
    assert [c, d] == list(store.find(Person, sort="-age", skip=1, limit=2))
    assert [a] == store.find(Person, sort="name", limit=1).to_list()
    assert b == store.find_one(Person, sort="age")
    assert 2 == store.count(Person, {"age": 3})
    assert store.find_one(Person, {"age": 99}) is None


def test_find_streams(heard):
    """The first document arrives before the last batch is fetched."""
    database, listener = heard
    store = Store(database, [Person])
    store.insert_many([Person(name=str(number)) for number in range(1000)])
    listener.clear()
    found = store.find(Person)
    assert [] == listener.names
    next(found)
    assert ["find"] == listener.names
    found.close()
    assert "killCursors" in listener.names


def test_find_reads_every_page(store):
    store.insert_many([Person(name=str(number), age=number) for number in range(350)])
    assert list(range(350)) == [person.age for person in store.find(Person, sort="age")]


def test_a_plain_pymongo_session_is_accepted(database):
    store = Store(database, [Person])
    with database.client.start_session() as session, session.start_transaction():
        store.insert_many([Person(name="a"), Person(name="b")], session=session)
        assert 2 == store.count(Person, session=session)
        session.abort_transaction()
    assert 0 == store.count(Person)


def test_every_plain_call_is_one_command(heard):
    database, listener = heard
    store = Store(database, [Person])
    database.create_collection("people")
    ann = Person(name="Ann")
    for expected, call in [
        ("insert", lambda: store.insert(ann)),
        ("find", lambda: store.get(Person, ann.id)),
        ("find", lambda: store.find_one(Person, {"name": "b"})),
        ("aggregate", lambda: store.count(Person)),
        ("findAndModify", lambda: store.update(Person, ann.id, {"$set": {"age": 1}})),
        ("update", lambda: store.update_many(Person, {}, {"$set": {"age": 2}})),
        ("update", lambda: store.replace(ann)),
        ("findAndModify", lambda: store.delete(Person, ann.id)),
        ("delete", lambda: store.delete_many(Person, {})),
    ]:
        listener.clear()
        call()
        assert [expected] == listener.names
        body = listener.commands[0][1]
        assert "txnNumber" not in body or expected in ("insert", "findAndModify", "update")
        assert "startTransaction" not in body


def test_insert_many_is_one_command_in_a_transaction(heard):
    database, listener = heard
    store = Store(database, [Person])
    store.insert_many([Person(name="a"), Person(name="b")])
    listener.clear()
    store.insert_many([Person(name="b"), Person(name="c")])
    assert ["insert", "commitTransaction"] == listener.names
    listener.clear()
    store.insert_many([Person(name="d")])
    assert ["insert"] == listener.names


# -- what must be refused -----------------------------------------------------


@pytest.mark.parametrize("operator", ["$where", "$function", "$accumulator"])
def test_operators_that_run_code_are_refused_at_any_depth(store, operator):
    code = {operator: "return true"}
    for call in (
        lambda: store.find(Person, code),
        lambda: store.count(Person, {"$or": [{"name": "a"}, {"$expr": code}]}),
        lambda: store.update(Person, {"anything": {"$elemMatch": code}}, {"$set": {"age": 1}}),
        lambda: store.update(Person, {}, [{"$set": {"age": {"$add": [1, code]}}}]),
        lambda: store.update_many(Person, {}, {"$set": {"anything": [code]}}),
        lambda: store.delete_many(Person, code),
    ):
        with pytest.raises(UsageError, match="runs code") as caught:
            call()
        assert "operator-forbidden" == caught.value.code


@pytest.mark.parametrize("attack", [{"$ne": None}, {"$gt": ""}, ["x"], None, "not an id", 5])
def test_an_id_is_never_an_operator(store, attack):
    """A JSON body in place of an id matches nothing and is refused."""
    store.insert(Person(name="Ann"))
    with pytest.raises(UsageError) as caught:
        store.get(Person, attack)
    assert "id-invalid" == caught.value.code


def test_unknown_models_and_mixed_bulk_inserts_are_refused(store):
    class Other(Document, collection="others"):
        pass

    for call in (lambda: store.insert(Other()), lambda: store.insert_many([Person(name="a"), Other()])):
        with pytest.raises(UsageError):
            call()
    assert 0 == store.count(Person)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (2**63, "value-not-storable"),
        ({"a\0b": 1}, "key-not-storable"),
        (object(), "value-not-storable"),
        ("\ud800", "value-not-storable"),
        ("x" * 17_000_000, "document-too-large"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(store, value, code):
    bad = Person(name="bad", anything={"deep": value} if not isinstance(value, dict) else value)
    for call in (lambda: store.insert(bad), lambda: store.insert_many([Person(name="good"), bad])):
        with pytest.raises(UsageError) as caught:
            call()
        assert code == caught.value.code
        assert "Person" in str(caught.value) or code == "key-not-storable"
    assert 0 == store.count(Person)


def test_a_large_bulk_with_one_bad_document_writes_nothing(store):
    """The driver would have sent 48 MB before it met the last one."""
    documents = [Person(name="n", anything="x" * 1_000_000) for _ in range(60)]
    documents.append(Person(name="bad", anything=2**70))
    with pytest.raises(UsageError, match="64 bits"):
        store.insert_many(documents)
    assert 0 == store.count(Person)


@pytest.mark.parametrize("depth", [179, 100_000])
def test_nesting_beyond_the_servers_limit_is_refused(store, depth):
    nested: Any = 1
    for _ in range(depth):
        nested = {"a": nested}
    with pytest.raises(UsageError, match="levels deep"):
        store.insert_many([Person(name="good"), Person(name="bad", anything={"x": {"y": nested}})])
    assert 0 == store.count(Person)


def test_the_deepest_nesting_that_the_server_takes_is_stored(store):
    nested: Any = {}
    for _ in range(178):
        nested = {"a": nested}
    stored = store.insert(Person(name="deep", anything=nested))
    assert stored == store.get(Person, stored.id)


# -- opening ---------------------------------------------------------------------


def test_open_takes_the_database_from_the_uri(server):
    base, _, options = server.uri.partition("?")
    with Store.open(f"{base.rstrip('/')}/opened?{options}", models=[Person]) as store:
        assert "opened" == store.collection(Person).database.name
    with pytest.raises(UsageError, match="names no database"):
        Store.open(server.uri, models=[Person])


@pytest.mark.parametrize("uri", ["nonsense", "mongodb://user:se:cret@h/x", "mongodb://u:secret@h:port/x"])
def test_a_bad_uri_is_refused_without_its_password(uri):
    with pytest.raises(UsageError, match="cannot be parsed") as caught:
        Store.open(uri, models=[Person])
    assert "cret" not in str(caught.value)


def test_a_client_without_retryable_writes_is_refused(server):
    with MongoClient(server.uri, retryWrites=False) as client, pytest.raises(UsageError, match="retryWrites"):
        Store(client["x"], [Person])


class Vote(Document, collection="votes"):
    club_id: int


class Club(Document, collection="clubs"):
    id: int
    votes: Annotated[int, Count(Vote, by="club_id")] = 0


@pytest.mark.parametrize("way", ["recover", "enter", "write"])
def test_a_store_looks_for_what_a_crash_left_once_and_not_when_it_is_made(heard, way):
    database, listener = heard
    store = Store(database, [Vote, Club])
    assert [] == listener.names
    if way == "recover":
        assert 0 == store.recover()
    elif way == "enter":
        store.__enter__()
    else:
        store.insert(Vote(club_id=1))
    assert fan_outs.COLLECTION in [body.get("find") for _, body in listener.commands]
    listener.clear()
    store.insert(Vote(club_id=1))
    assert fan_outs.COLLECTION not in [body.get("find") for _, body in listener.commands]


def test_entering_a_store_that_reaches_no_server_closes_its_client():
    store = Store.open("mongodb://127.0.0.1:1/x?serverSelectionTimeoutMS=100", models=[Vote, Club])
    with pytest.raises(ServerSelectionTimeoutError), store:
        pass
    with pytest.raises(InvalidOperation):
        store.get(Club, 1)


def test_each_store_takes_its_own_kind_of_database(server, database):
    from pymongo import AsyncMongoClient

    for make in (
        lambda: Store(AsyncMongoClient(server.uri)["x"], [Person]),
        lambda: AsyncStore(database, [Person]),
        lambda: Store("mongodb://localhost/x", [Person]),
    ):
        with pytest.raises(UsageError, match="MongoClient") as caught:
            make()
        assert "database-invalid" == caught.value.code
