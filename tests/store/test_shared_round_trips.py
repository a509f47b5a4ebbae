"""Concurrent calls that share round trips: each caller gets what its own call would have given it.

`Crowd` holds the lane of a kind of calls as if the first were under way,
until all callers queue behind it; so that who goes with whom is no accident.

Covers: store/shared_commands
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Annotated, Any

import pymongo
import pytest
from bson import ObjectId
from pydantic import BaseModel
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from tests.kit.command_log import CommandLog
from tests.kit.fault_sweep import FaultSweep
from tests.kit.faults import CLOSED, LOST_REPLIES, Fault
from treadle import (
    AsyncStore,
    DataError,
    Document,
    DuplicateKey,
    Indexed,
    Limits,
    Store,
    UsageError,
)

WAIT_SECONDS_MAX = 50
AGE_MAX = 100
UNAUTHORIZED = 13
# However slow the machine is, those who are to go together do.
PATIENT = Limits(together_wait_seconds=3600)


class Person(Document, collection="people"):
    name: str
    age: int = 0
    slot: Annotated[int | None, Indexed(unique=True)] = None


class Card(BaseModel):
    name: str


class Vehicle(Document, collection="vehicles", discriminator="kind"):
    wheels: int = 4


class Car(Vehicle, kind="car"): ...


class Bike(Vehicle, kind="bike"):
    wheels: int = 2


MODELS = [Person, Vehicle, Car, Bike]
# Stands for a group under way.
HELD = object()
Job = Callable[[Any], Any]


class Crowd:
    """Several callers of one Store at once, threads or tasks."""

    def __init__(
        self, uri: str, database: str, tasks: bool, limits: Limits = PATIENT, heard: Any = None
    ) -> None:
        self.heard = heard or CommandLog()
        self.tasks = tasks
        self.runner = asyncio.Runner() if tasks else None
        kind: Any = AsyncMongoClient if tasks else MongoClient
        # By its name, faults strike no other client.
        name = "together" if heard is None else "struck"
        self.client: Any = kind(uri, event_listeners=[self.heard], appname=name)
        store: Any = AsyncStore if tasks else Store
        self.store = store(self.client[database], MODELS, limits=limits)

    def close(self) -> None:
        self.wait(self.client.close)
        if self.runner is not None:
            self.runner.close()

    def wait(self, call: Callable[[], Any], seconds: float | None = None) -> Any:
        """The result of one call, with a deadline or without one."""
        if self.runner is None:
            with pymongo.timeout(seconds):
                return call()

        async def awaited() -> Any:
            with pymongo.timeout(seconds):
                return await call()

        return self.runner.run(awaited())

    def lane(self, kind: str, collection: str = "people") -> Any:
        return self.store.runner._lanes[collection, kind]

    def together(self, kind: str, jobs: Sequence[Job], collection: str = "people") -> list[Any]:
        """The results or errors of calls that queue behind one that is under way, then go together."""
        lane = self.lane(kind, collection)
        self.heard.commands.clear()
        return self._tasks(lane, jobs) if self.runner is not None else self._threads(lane, jobs)

    def all_at_once(self, jobs: Sequence[Job]) -> list[Any]:
        """The results or errors of tasks that begin together."""

        async def all_of_them() -> list[Any]:
            calls = [job(self.store) for job in jobs]
            return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), WAIT_SECONDS_MAX)

        assert self.runner is not None
        return self.runner.run(all_of_them())

    def _tasks(self, lane: Any, jobs: Sequence[Job]) -> list[Any]:
        async def all_of_them() -> list[Any]:
            lane._running.add(HELD)
            tasks = [asyncio.ensure_future(job(self.store)) for job in jobs]
            while len(lane._queue) < len(jobs):
                await asyncio.sleep(0)
            lane._finish(HELD)
            return await asyncio.gather(*tasks, return_exceptions=True)

        assert self.runner is not None
        return self.runner.run(all_of_them())

    def _threads(self, lane: Any, jobs: Sequence[Job]) -> list[Any]:
        results: list[Any] = [None] * len(jobs)

        def perform(number: int) -> None:
            try:
                results[number] = jobs[number](self.store)
            except Exception as error:
                results[number] = error

        lane._running.add(HELD)
        threads = [threading.Thread(target=perform, args=(at,), daemon=True) for at in range(len(jobs))]
        for number, thread in enumerate(threads):
            thread.start()
            until = time.monotonic() + WAIT_SECONDS_MAX
            while len(lane._queue) <= number and time.monotonic() < until:
                time.sleep(0.0005)
        lane._finish(HELD)
        for thread in threads:
            thread.join(WAIT_SECONDS_MAX)
        assert not any(thread.is_alive() for thread in threads)
        return results


@pytest.fixture(params=[False, True], ids=["threads", "tasks"])
def crowd(request: pytest.FixtureRequest, server: Any, database: Any) -> Iterator[Crowd]:
    Store(database, MODELS).setup(validation="enforce")
    made = Crowd(server.uri, database.name, request.param)
    first = made.wait(lambda: made.store.insert(Person(name="first")))
    for call in (
        lambda: made.store.get(Person, first.id),
        lambda: made.store.delete(Person, first.id),
        lambda: made.store.get(Car, ObjectId()),
    ):
        made.wait(call)
    yield made
    made.close()


def stored(database: Any, count: int) -> list[ObjectId]:
    """So many people, whose names are their numbers."""
    ids = [ObjectId() for _ in range(count)]
    database.people.insert_many([{"_id": each, "name": str(n), "age": n} for n, each in enumerate(ids)])
    return ids


# -- reads ----------------------------------------------------------------------------------------


def test_reads_by_id_are_one_query_and_each_gets_its_own(crowd: Crowd, database: Any) -> None:
    ids = stored(database, 4)
    missing = ObjectId()
    results = crowd.together(
        "find",
        [
            lambda store: store.get(Person, ids[0]),
            lambda store: store.require(Person, ids[1]),
            lambda store: store.find_one(Person, {"_id": ids[2]}),
            lambda store: store.get_many(Person, [ids[3], missing, ids[0]]),
            lambda store: store.get(Person, missing),
            lambda store: store.get(Person, ids[0]),
        ],
    )
    assert ["find"] == crowd.heard.names
    first, second, third, many, none, again = results
    assert ["0", "1", "2", "0"] == [first.name, second.name, third.name, again.name]
    assert ["3", None, "0"] == [each and each.name for each in many]
    assert none is None
    assert again is not first
    again.name = "changed"
    assert "0" == first.name == many[2].name


def test_cards_and_kinds_are_not_mixed_up(crowd: Crowd, database: Any) -> None:
    ids = stored(database, 2)
    results = crowd.together(
        "find",
        [lambda store: store.get(Person, ids[0], into=Card), lambda store: store.get(Person, ids[1])],
    )
    assert [Card(name="0"), 1] == [results[0], results[1].age]
    car, bike = ObjectId(), ObjectId()
    database.vehicles.insert_many(
        [{"_id": car, "kind": "car", "wheels": 4}, {"_id": bike, "kind": "bike", "wheels": 2}]
    )
    jobs: list[Job] = [
        lambda store: store.get(Car, car),
        lambda store: store.get(Car, bike),
        lambda store: store.get(Vehicle, bike),
    ]
    found = crowd.together("find", jobs, "vehicles")
    assert [Car, type(None), Bike] == [type(each) for each in found]


def test_a_document_that_cannot_be_read_is_nobody_elses_error(crowd: Crowd, database: Any) -> None:
    ids = stored(database, 2)
    bad = ObjectId()
    database.people.insert_one(
        {"_id": bad, "name": "bad", "age": {"no": "number"}}, bypass_document_validation=True
    )
    jobs: list[Job] = [lambda store, each=each: store.get(Person, each) for each in (ids[0], bad, ids[1])]
    fine, refused, other = crowd.together("find", jobs)
    assert ["0", "1"] == [fine.name, other.name]
    assert isinstance(refused, DataError)


@pytest.mark.parametrize("kind", ["find", "insert_one"])
def test_callers_who_fail_together_have_an_error_each(crowd: Crowd, database: Any, kind: str) -> None:
    """Raised by all of them, one error would show the frames of all, and the notes of any."""
    ids = stored(database, 3)
    jobs: dict[str, list[Job]] = {
        "find": [lambda store, each=each: store.get(Person, each) for each in ids],
        "insert_one": [lambda store, each=each: store.insert(Person(name=each)) for each in "abc"],
    }
    data = {"failCommands": ["find", "insert"], "appName": "together", "errorCode": UNAUTHORIZED}
    on = {"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": data}
    database.client.admin.command(on)
    try:
        errors = crowd.together(kind, jobs[kind])
    finally:
        database.client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
    assert 1 == len({(type(each), each.code, str(each), str(each.details)) for each in errors})
    assert UNAUTHORIZED == errors[0].code
    errors[0].add_note("seen by the first")
    assert ["seen by the first"] == [note for each in errors for note in getattr(each, "__notes__", ())]
    for each in errors:
        calls = [frame.f_code.co_name for frame, _ in traceback.walk_tb(each.__traceback__)]
        # The frame of its own call, of no other caller's.
        assert 1 == len([name for name in calls if name in ("get", "insert")])


def test_no_answer_is_older_than_its_question(crowd: Crowd, database: Any) -> None:
    """What is written while a reader queues is what it reads."""
    ids = stored(database, 2)
    lane = crowd.lane("find")
    perform = lane._perform
    if crowd.tasks:

        async def late(commands: Any, attempts_max: Any) -> Any:
            database.people.update_many({}, {"$set": {"age": 77}})
            return await perform(commands, None)

    else:

        def late(commands: Any, attempts_max: Any) -> Any:
            database.people.update_many({}, {"$set": {"age": 77}})
            return perform(commands, None)

    lane._perform = late
    results = crowd.together("find", [lambda store, each=each: store.get(Person, each) for each in ids])
    assert [77, 77] == [each.age for each in results]
    lane._perform = perform
    # And one caller's own: nothing is remembered from one read to the next.
    database.people.update_many({}, {"$set": {"age": 78}})
    assert 78 == crowd.wait(lambda: crowd.store.get(Person, ids[0])).age


# -- inserts --------------------------------------------------------------------------------------


def test_inserts_are_one_command_and_each_gets_its_own_error(crowd: Crowd, database: Any) -> None:
    database.people.insert_one({"_id": ObjectId(), "name": "there", "age": 1, "slot": 7})
    database.command(
        {
            "collMod": "people",
            "validator": {"$expr": {"$lte": ["$age", AGE_MAX]}},
            "validationLevel": "strict",
        }
    )
    people = [
        Person(name="a"),
        Person(name="taken", slot=7),
        Person(name="old", age=AGE_MAX + 1),
        Person(name="b"),
        Person(name="huge", age=2**70),
        Person(name="\ud800"),
        Person(name="x" * 2_000_000),
        Person(name="c", slot=8),
    ]
    jobs: list[Job] = [lambda store, each=each: store.insert(each) for each in people]
    results = crowd.together("insert_one", jobs)
    # One for all, one for the large document by itself.
    assert ["insert", "insert"] == crowd.heard.names
    assert {"w": "majority"} == crowd.heard.commands[0][1]["writeConcern"]
    kept = [people[at] for at in (0, 3, 6, 7)]
    assert kept == [results[at] for at in (0, 3, 6, 7)]
    assert sorted(each.name for each in kept) == sorted(
        each["name"] for each in database.people.find({"name": {"$ne": "there"}})
    )
    taken, old = results[1], results[2]
    assert isinstance(taken, DuplicateKey)
    assert {"slot": 7} == taken.details["keyValue"]
    assert ("validator-refused", "value-not-storable", "value-not-storable") == (
        old.code,
        results[4].code,
        results[5].code,
    )
    # The same as each gets by itself.
    for at in (1, 2, 4, 5):
        with pytest.raises(type(results[at])) as alone:
            crowd.wait(lambda at=at: crowd.store.insert(people[at]))
        assert str(alone.value) == str(results[at])
        assert getattr(alone.value, "details", None) == getattr(results[at], "details", None)


# -- who goes alone -------------------------------------------------------------------------------


def test_a_caller_with_a_session_or_transaction_waits_for_nobody(crowd: Crowd, database: Any) -> None:
    ids = stored(database, 1)
    for kind in ("find", "insert_one"):
        crowd.lane(kind)._running.add(HELD)
    store = crowd.store
    if crowd.tasks:

        async def calls() -> tuple[Any, Any, Any]:
            async with crowd.client.start_session() as session:
                one = await store.get(Person, ids[0], session=session)
            async with store.transaction():
                two = await store.insert(Person(name="new"))
            if hasattr(crowd.client.start_session(), "bind"):
                async with crowd.client.start_session() as session, session.bind():
                    three = await store.get(Person, two.id)
            else:
                three = two
            return one, two, three

        one, two, three = crowd.wait(calls)
    else:
        with crowd.client.start_session() as session:
            one = store.get(Person, ids[0], session=session)
        with store.transaction():
            two = store.insert(Person(name="new"))
        three = two
        if hasattr(crowd.client.start_session(), "bind"):
            with crowd.client.start_session() as session, session.bind():
                three = store.get(Person, two.id)
    assert ("0", "new", "new") == (one.name, two.name, three.name)


def test_ids_that_a_collation_takes_for_equal_are_found(server: Any, database: Any) -> None:
    class Word(Document, collection="words"):
        id: str
        n: int = 0

    database.create_collection("words", collation={"locale": "en", "strength": 2})
    database.words.insert_many([{"_id": "abc", "n": 1}, {"_id": "def", "n": 2}])

    async def main() -> list[Any]:
        async with AsyncMongoClient(server.uri) as client:
            store = AsyncStore(client[database.name], [Word])
            await store.get(Word, "x")
            gets = await asyncio.gather(*(store.get(Word, each) for each in ("x", "ABC", "abc", "DEF", "no")))
            return [each and each.n for each in gets]

    assert [None, 1, 1, 2, None] == asyncio.run(main())


# -- random histories -----------------------------------------------------------------------------


class History:
    """One caller's own documents, and the states that each may be in after its calls."""

    def __init__(self, number: int, seed: int) -> None:
        self.chance = random.Random(seed * 1000 + number)
        self.number = number
        self.possible: dict[ObjectId, set[int | None]] = {}
        # A write whose caller was cancelled may be done at any later time, so nobody asks for these again.
        self.left: set[ObjectId] = set()
        self.slots: set[int] = set()
        self.doubtful_slots: set[int] = set()

    def step(self, store: Any) -> tuple[str, Any, Callable[[Any], None], Callable[[], None]]:
        """A call, a check of its result, and what to note where its outcome is not known."""
        known = [key for key in self.possible if key not in self.left]
        kinds = ["insert", "insert", "get", "get", "update", "delete", "take"]
        kind = self.chance.choice(kinds)
        if kind in ("get", "update", "delete") and not known:
            kind = "insert"
        if kind == "insert":
            return self._insert(store)
        if kind == "take":
            return self._take(store)
        key = self.chance.choice(known)
        return getattr(self, f"_{kind}")(store, key)

    def _insert(self, store: Any) -> Any:
        age = self.chance.choice([0, 1, 2, AGE_MAX + 1])
        person = Person(name=str(self.number), age=age)
        key = person.id

        def check(result: Any) -> None:
            if age > AGE_MAX:
                assert "validator-refused" == getattr(result, "code", None), result
                self.possible[key] = {None}
            else:
                assert (key, age) == (result.id, result.age), result
                self.possible[key] = {age}

        def doubt() -> None:
            self.left.add(key)
            self.possible[key] = {None} if age > AGE_MAX else {None, age}

        return "insert", lambda: store.insert(person), check, doubt

    def _take(self, store: Any) -> Any:
        slot = self.chance.randrange(60)

        def check(result: Any) -> None:
            if isinstance(result, DuplicateKey):
                assert {"slot": slot} == result.details["keyValue"]
            else:
                assert slot == result.slot, result
                assert slot not in self.slots
                self.slots.add(slot)

        def doubt() -> None:
            self.doubtful_slots.add(slot)

        return "take", lambda: store.insert(Person(name=str(self.number), slot=slot)), check, doubt

    def _get(self, store: Any, key: ObjectId) -> Any:
        def check(result: Any) -> None:
            age = None if result is None else result.age
            assert age in self.possible[key], (age, self.possible[key])
            assert result is None or (key, str(self.number)) == (result.id, result.name)
            self.possible[key] = {age}

        return "get", lambda: store.get(Person, key), check, lambda: None

    def _update(self, store: Any, key: ObjectId) -> Any:
        amount = self.chance.choice([1, 2, AGE_MAX + 1])

        def check(result: Any) -> None:
            before = self.possible[key]
            if isinstance(result, Exception):
                assert "validator-refused" == getattr(result, "code", None), result
                assert amount > AGE_MAX
                self.possible[key] = before - {None}
            elif result is None:
                assert None in before
                self.possible[key] = {None}
            else:
                assert result.age - amount in before, (result.age, amount, before)
                assert (key, str(self.number)) == (result.id, result.name)
                self.possible[key] = {result.age}

        def doubt() -> None:
            self.left.add(key)
            grown = {age + amount for age in self.possible[key] if age is not None and amount <= AGE_MAX}
            self.possible[key] |= grown

        return "update", lambda: store.update(Person, key, {"$inc": {"age": amount}}), check, doubt

    def _delete(self, store: Any, key: ObjectId) -> Any:
        def check(result: Any) -> None:
            age = None if result is None else result.age
            assert age in self.possible[key]
            assert result is None or key == result.id
            self.possible[key] = {None}

        def doubt() -> None:
            self.left.add(key)
            self.possible[key].add(None)

        return "delete", lambda: store.delete(Person, key), check, doubt


def check_stored(database: Any, histories: Sequence[History]) -> None:
    """Each document is in a state that its one writer allows; nothing is there that nobody wrote."""
    people = {each["_id"]: each for each in database.people.find({"slot": None})}
    for history in histories:
        for key, possible in history.possible.items():
            stored = people.pop(key, None)
            assert (None if stored is None else stored["age"]) in possible
    assert {} == people
    slots = [each["slot"] for each in database.people.find({"slot": {"$ne": None}})]
    assert len(slots) == len(set(slots))
    acknowledged = [slot for history in histories for slot in history.slots]
    assert len(acknowledged) == len(set(acknowledged))
    doubtful = {slot for history in histories for slot in history.doubtful_slots}
    assert set(acknowledged) <= set(slots) <= set(acknowledged) | doubtful


def limited(database: Any) -> None:
    """A validator that Python does not know of, so that the server refuses what the model takes."""
    Store(database, MODELS).setup()
    validator = {"$expr": {"$lte": ["$age", AGE_MAX]}}
    database.command({"collMod": "people", "validator": validator, "validationLevel": "strict"})


# TREADLE_TOGETHER=all takes 10,000 steps of each.
ALL = os.environ.get("TREADLE_TOGETHER") == "all"
SEED = int(os.environ.get("TREADLE_TOGETHER_SEED", "20"))
TASKS, TASK_STEPS = 50, 200 if ALL else 40
THREADS, THREAD_STEPS = 8, 1_250 if ALL else 60


@pytest.mark.heavy
@pytest.mark.parametrize("most", [Limits().together_max, 7], ids=["one-group", "several-groups"])
def test_steps_of_tasks_with_cancellations_and_deadlines(server: Any, database: Any, most: int) -> None:
    limited(database)
    histories = [History(number, SEED) for number in range(TASKS)]
    counted = {"done": 0, "cancelled": 0, "late": 0}
    store: Any = None

    async def live(history: History, store: AsyncStore) -> None:
        for _ in range(TASK_STEPS):
            _, call, check, doubt = history.step(store)
            hurried = history.chance.random() < 0.05
            with pymongo.timeout(history.chance.uniform(0.0005, 0.02) if hurried else None):
                task = asyncio.ensure_future(call())
            if history.chance.random() < 0.1:
                for _ in range(history.chance.randrange(1, 12)):
                    await asyncio.sleep(0)
                task.cancel()
            try:
                result = await task
            except asyncio.CancelledError:
                doubt()
                counted["cancelled"] += 1
                continue
            except (PyMongoError, DataError, UsageError) as error:
                if hurried and isinstance(error, PyMongoError) and error.timeout:
                    doubt()
                    counted["late"] += 1
                    continue
                result = error
            check(result)
            counted["done"] += 1

    async def main() -> None:
        nonlocal store
        async with AsyncMongoClient(server.uri) as client:
            store = AsyncStore(client[database.name], MODELS, limits=Limits(together_max=most))
            await asyncio.gather(*(live(history, store) for history in histories))

    asyncio.run(main())
    assert TASKS * TASK_STEPS == sum(counted.values())
    assert counted["cancelled"] > TASK_STEPS
    lanes = store.runner._lanes.values()
    assert not any(lane._running or lane._passed or lane._queue for lane in lanes)
    check_stored(database, histories)


@pytest.mark.heavy
def test_steps_of_threads_with_deadlines(server: Any, database: Any) -> None:
    """A caller whose time is over does not know what became of its write; nobody else is told so."""
    limited(database)
    histories = [History(number, SEED + 1) for number in range(THREADS)]
    errors: list[BaseException] = []

    def live(history: History, store: Store) -> None:
        try:
            for _ in range(THREAD_STEPS):
                _, call, check, doubt = history.step(store)
                hurried = history.chance.random() < 0.1
                try:
                    with pymongo.timeout(history.chance.uniform(0.0005, 0.01) if hurried else None):
                        result = call()
                except (PyMongoError, DataError, UsageError) as error:
                    if hurried and isinstance(error, PyMongoError) and error.timeout:
                        doubt()
                        continue
                    result = error
                check(result)
        except BaseException as error:
            errors.append(error)

    with MongoClient[Any](server.uri) as client:
        store = Store(client[database.name], MODELS)
        threads = [threading.Thread(target=live, args=(each, store), daemon=True) for each in histories]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS_MAX * (10 if ALL else 1))
    assert [] == errors
    assert not any(thread.is_alive() for thread in threads)
    check_stored(database, histories)


# -- crash points ---------------------------------------------------------------------------------


FAULTS = [
    Fault("closed", CLOSED),
    Fault("closed-twice", CLOSED, times=2),
    Fault("shutting-down", {"errorCode": 91, "errorLabels": ["RetryableWriteError"]}, times=2),
    Fault("conflict", {"errorCode": 112, "errorLabels": ["TransientTransactionError"]}),
    Fault("concern", {"writeConcernError": {"code": 64, "errmsg": "waiting timed out"}}),
    *LOST_REPLIES,
]
KINDS = ["insert_one", "find"]
CALLERS = 4


@pytest.mark.heavy
@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_each_command_of_a_group(
    fault_sweep: FaultSweep, kind: str, tasks: bool, record_points: Any
) -> None:
    """Who was answered has what it was told, once; who was not has it once or not at all.

    Of tasks one goes first, and two full groups beside it.
    """
    callers = 7 if tasks else CALLERS
    limits = Limits(together_wait_seconds=3600, together_max=3 if tasks else 100)
    database = fault_sweep.stores("struck", MODELS).database
    log = CommandLog()
    uris = {"": f"{fault_sweep.server.uri}&serverMonitoringMode=poll", "proxy": fault_sweep.proxy.uri}

    with ExitStack() as stack:
        crowds = {
            way: stack.enter_context(closing(Crowd(uri, "struck", tasks, limits, log)))
            for way, uri in uris.items()
        }
        for crowd in crowds.values():
            _warm_up(crowd)

        def attempt(fault: Fault, skip: int) -> bool:
            crowd = crowds["proxy" if fault.proxy else ""]
            database.people.delete_many({})
            ids = stored(database, callers)
            new = [Person(name=str(number)) for number in range(callers)]
            jobs = _jobs(kind, ids, new)
            with fault_sweep.arm(fault, skip, log=log, app="struck") as is_met:
                results = crowd.all_at_once(jobs) if tasks else crowd.together(kind, jobs)
                met = is_met()
            fault_sweep.end_sessions()
            there = {each["_id"]: each for each in database.people.find()}
            for number, (key, result) in enumerate(zip(ids, results, strict=True)):
                _check_struck(kind, number, new[number].id if kind == "insert_one" else key, result, there)
            if not met:
                assert not any(isinstance(each, Exception) for each in results)
            return met

        points = fault_sweep.at_each_command(f"{kind} {tasks}", FAULTS, attempt)
    assert points >= 1
    record_points(points)


def _warm_up(crowd: Crowd) -> None:
    """Send what only the first call of each kind sends."""
    one = crowd.wait(lambda: crowd.store.insert(Person(name="first")))
    crowd.wait(lambda: crowd.store.get(Person, one.id))
    crowd.wait(lambda: crowd.store.update(Person, one.id, {"$inc": {"age": 1}}))
    crowd.wait(lambda: crowd.store.delete(Person, one.id))


def _jobs(kind: str, ids: list[Any], new: list[Person]) -> list[Job]:
    jobs: dict[str, list[Job]] = {
        "insert_one": [lambda store, each=each: store.insert(each) for each in new],
        "find": [lambda store, each=each: store.get(Person, each) for each in ids],
    }
    return jobs[kind]


def _check_struck(kind: str, number: int, key: Any, result: Any, there: dict[Any, Any]) -> None:
    failed = isinstance(result, Exception)
    if failed:
        assert isinstance(result, (PyMongoError, DataError)), result
    else:
        assert (key, str(number)) == (result.id, result.name)
    if kind == "insert_one":
        assert key in there or failed
    else:
        assert failed or number == there[key]["age"] == result.age


def test_a_limit_of_one_turns_it_off(server: Any, database: Any) -> None:
    Store(database, MODELS).setup()
    ids = stored(database, 5)

    async def main() -> list[Any]:
        async with AsyncMongoClient(server.uri) as client:
            store = AsyncStore(client[database.name], MODELS, limits=Limits(together_max=1))
            found = await asyncio.gather(*(store.get(Person, each) for each in ids))
            assert {} == store.runner._lanes
            return list(found)

    assert ["0", "1", "2", "3", "4"] == [each.name for each in asyncio.run(main())]


def test_linearizable_reads_go_alone(database: Any) -> None:
    """The server promises that only of a query for one document."""
    key = stored(database, 1)[0]
    exact = Store(database.with_options(read_concern=ReadConcern("linearizable")), [Person])
    assert "0" == exact.require(Person, key).name
    assert {} == exact.runner._lanes
