"""The plain calls, which every pattern stands on: insert, get, insert_many, find.

The collection has no validator and no index but that on `_id`, whichever
library writes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bson import ObjectId
from pymongo import AsyncMongoClient, MongoClient

from benchmarks.harness import Contender, Context, Goal, Group
from benchmarks.libraries import (
    COLLECTION,
    DATABASE,
    AsyncLibrary,
    AsyncPyMongo,
    AsyncPyMongoAllOrNone,
    AsyncPyMongoByHand,
    AsyncTreadle,
    Library,
    PyMongoAllOrNone,
    PyMongoBoundPydantic,
    PyMongoByHand,
    PyMongoToList,
    Treadle,
    asynchronous,
    blocking,
)
from benchmarks.people import people, person

OPERATIONS = 250
OPERATIONS_QUICK = 100
DOCUMENTS = 10_000
DOCUMENTS_QUICK = 2_000
STORED_FOR_GET = 1_000
# ODMantic writes one by one, so its 10,000 take longer than all others together.
SLOW_ROUNDS_MAX = 1
ROUNDS_SINGLE = 31

AnyLibrary = Library | AsyncLibrary


def groups() -> list[Group]:
    """The four works that the goals speak of."""
    return [
        Group("foundation", "insert one", _insert_one, ROUNDS_SINGLE),
        Group("foundation", "get by id", _get, ROUNDS_SINGLE),
        Group("foundation", "insert_many of existing models", _insert_many),
        Group("foundation", "find all as models", _find),
    ]


def _libraries(context: Context) -> list[AnyLibrary]:
    return [*blocking(context), *asynchronous(context)]


def _contender(
    library: AnyLibrary,
    goals: tuple[float, float],
    prepare: Callable[[], Any],
    work: Any,
    limit: str = "",
    **options: Any,
) -> Contender:
    goal = None
    if isinstance(library, Treadle):
        goal = Goal(goals[0], limit=limit)
    elif isinstance(library, AsyncTreadle):
        goal = Goal(goals[1], limit=limit)
    baseline = None
    if isinstance(library, AsyncLibrary) and not isinstance(library, AsyncPyMongo):
        baseline = AsyncPyMongo.name
    return Contender(library.name, prepare, work, baseline=baseline, goal=goal, **options)


def _insert_one(context: Context) -> list[Contender]:
    count = context.scale(OPERATIONS, OPERATIONS_QUICK)

    def contender(library: AnyLibrary) -> Contender:
        def prepare() -> list[Any]:
            return [library.build(person(number)) for number in range(count)]

        if isinstance(library, AsyncLibrary):
            work: Any = _each_async(library.insert)
        else:
            work = _each(library.insert)
        check = _check_stored(library, context, count)
        return _contender(library, (1.10, 1.10), prepare, work, operations=count, check=check)

    return [contender(library) for library in _libraries(context)]


def _get(context: Context) -> list[Contender]:
    count = context.scale(OPERATIONS, OPERATIONS_QUICK)
    libraries = _libraries(context)
    stored = _fill(context, STORED_FOR_GET)
    identities = [raw["_id"] for raw in stored[:: STORED_FOR_GET // count][:count]]

    def prepare() -> list[ObjectId]:
        # New objects with equal values, as a request would bring them.
        return [ObjectId(identity.binary) for identity in identities]

    def contender(library: AnyLibrary) -> Contender:
        if isinstance(library, AsyncLibrary):
            work: Any = _each_async(library.get)
        else:
            work = _each(library.get)

        def check(document: Any) -> None:
            _same(next(raw for raw in stored if raw["_id"] == identities[-1]), library.plain(document))

        return _contender(library, (1.08, 1.10), prepare, work, operations=count, check=check)

    return [contender(library) for library in libraries]


def _insert_many(context: Context) -> list[Contender]:
    count = context.scale(DOCUMENTS, DOCUMENTS_QUICK)
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
    asynchronous_client: AsyncMongoClient[Any] = AsyncMongoClient(context.uri)
    context.stack.callback(lambda: context.wait(asynchronous_client.close()))
    # Treadle's stores all documents or none, which takes a transaction; so it is compared with that.
    whole, whole_async = PyMongoAllOrNone(client), AsyncPyMongoAllOrNone(asynchronous_client)
    by_hand, by_hand_async = PyMongoByHand(client), AsyncPyMongoByHand(asynchronous_client)
    libraries = [*_libraries(context), whole, whole_async, by_hand, by_hand_async]

    def contender(library: AnyLibrary) -> Contender:
        def prepare() -> list[Any]:
            client[DATABASE].drop_collection(COLLECTION)
            client[DATABASE].create_collection(COLLECTION)
            return [library.build(raw) for raw in people(count)]

        slow = SLOW_ROUNDS_MAX if library.name == "ODMantic" else None
        check = _check_stored(library, context, count)
        options = {"operations": count, "rounds_max": slow, "check": check}
        limit = by_hand_async.name if isinstance(library, AsyncLibrary) else by_hand.name
        made = _contender(library, (1.10, 1.10), prepare, library.insert_many, limit, **options)
        if isinstance(library, Treadle | PyMongoByHand):
            return replace(made, baseline=whole.name)
        if isinstance(library, AsyncTreadle | AsyncPyMongoByHand):
            return replace(made, baseline=whole_async.name)
        return made

    return [contender(library) for library in libraries]


def _find(context: Context) -> list[Contender]:
    count = context.scale(DOCUMENTS, DOCUMENTS_QUICK)
    first, *rest = blocking(context)
    client: MongoClient[Any] = context.stack.enter_context(MongoClient(context.uri))
    by_hand = [PyMongoToList(client), PyMongoBoundPydantic(client)]
    libraries: list[AnyLibrary] = [first, *by_hand, *rest, *asynchronous(context)]
    stored = _fill(context, count)

    def contender(library: AnyLibrary) -> Contender:
        if isinstance(library, AsyncLibrary):
            work: Any = _find_async(library)
        else:
            work = _find_blocking(library)

        def check(documents: list[Any]) -> None:
            assert count == len(documents), f"{library.name} found {len(documents)} of {count}"
            _same(stored[-1], library.plain(documents[-1]))

        # Validating takes as long as decoding; what is not validated is no model.
        limit = PyMongoBoundPydantic.name
        return _contender(library, (1.8, 1.8), lambda: None, work, limit, operations=count, check=check)

    return [contender(library) for library in libraries]


# -- works -------------------------------------------------------------------


def _each(call: Callable[[Any], Any]) -> Callable[[Sequence[Any]], Any]:
    def work(arguments: Sequence[Any]) -> Any:
        result = None
        for argument in arguments:
            result = call(argument)
        return result

    return work


def _each_async(call: Callable[[Any], Any]) -> Callable[[Sequence[Any]], Any]:
    async def work(arguments: Sequence[Any]) -> Any:
        result = None
        for argument in arguments:
            result = await call(argument)
        return result

    return work


def _find_blocking(library: Library) -> Callable[[None], list[Any]]:
    return lambda _: library.find()


def _find_async(library: AsyncLibrary) -> Callable[[None], Any]:
    async def work(_: None) -> list[Any]:
        return await library.find()

    return work


# -- the stored documents ----------------------------------------------------


def _fill(context: Context, count: int) -> list[dict[str, Any]]:
    """Store documents for reads; what was stored."""
    stored = people(count)
    with MongoClient[Any](context.uri) as client:
        client[DATABASE][COLLECTION].insert_many(stored)
    return stored


def _check_stored(library: AnyLibrary, context: Context, count: int) -> Callable[[Any], None]:
    def check(_: Any) -> None:
        with MongoClient[Any](context.uri) as client:
            last = client[DATABASE][COLLECTION].find_one(sort=[("_id", -1)])
        assert last is not None, f"{library.name} stored nothing"
        expected = person(count - 1)
        expected["_id"] = last["_id"]
        # ODMs may add fields of their own, but may not leave any out.
        _same(expected, {key: last.get(key) for key in expected})

    return check


def _same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    if expected != actual:
        raise AssertionError(f"expected the document {expected}, got {actual}")
