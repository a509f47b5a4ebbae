"""What several test files share: a listener that counts commands, races, and model strategies."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import threading
import time
import uuid
from collections.abc import Callable, Generator
from typing import Any

import pytest
from bson import ObjectId
from hypothesis import strategies as st
from pydantic import BaseModel, create_model
from pymongo import MongoClient

from tests.kit.command_log import CommandLog
from tests.kit.standalone import StandaloneServer
from treadle import Document, Id
from treadle.server.local import LocalServer, start

UTC = dt.UTC


@pytest.fixture
def heard(server: LocalServer, database: Any) -> Any:
    """A database like `database`, whose client notes each command in `.heard`."""
    listener = CommandLog()
    with MongoClient(server.uri, event_listeners=[listener]) as client:
        client.admin.command("hello")
        yield client[database.name], listener


def lacking(store: Any, **missing: Any) -> Any:
    """The store, as if its server lacked some capabilities; told before it looks by itself."""
    inner = getattr(store, "_inner", store)
    store._capabilities()
    inner._known = dataclasses.replace(inner._known, **missing)
    return store


def race(*bodies: Callable[[], Any]) -> None:
    """Run all at once; the first error of any of them is raised here."""
    errors: list[BaseException] = []
    line = threading.Barrier(len(bodies))

    def run(body: Callable[[], Any]) -> None:
        line.wait()
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(BaseModel):
    x: float
    label: str | None = None


class Leaf(BaseModel):
    name: str
    children: list[Leaf] = []


dates = st.datetimes(
    min_value=dt.datetime(1, 1, 2), max_value=dt.datetime(9999, 12, 30), timezones=st.just(UTC)
).map(lambda value: value.replace(microsecond=value.microsecond // 1000 * 1000))
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
decimals = st.decimals(allow_nan=False, allow_infinity=False).filter(
    lambda value: len(value.as_tuple().digits) <= 34 and -6000 < value.as_tuple().exponent < 6000
)
scalars: list[tuple[Any, Any]] = [
    (str, texts),
    (int, st.integers(-(2**63), 2**63 - 1)),
    (float, st.floats(allow_nan=False)),
    (bool, st.booleans()),
    (bytes, st.binary(max_size=12)),
    (decimal.Decimal, decimals),
    (dt.datetime, dates),
    (dt.date, st.dates()),
    (dt.timedelta, st.timedeltas(dt.timedelta(days=-9000), dt.timedelta(days=9000))),
    (dt.time, st.times()),
    (uuid.UUID, st.uuids()),
    (Id, st.binary(min_size=12, max_size=12).map(ObjectId)),
    (Colour, st.sampled_from(Colour)),
    (Level, st.sampled_from(Level)),
    (Point, st.builds(Point, x=st.floats(allow_nan=False), label=st.none() | texts)),
]
hashable = [pair for pair in scalars if pair[0] not in (Point,)]
# Members that BSON tells apart; the rest is refused, see test_shape.
unions = [int | str, decimal.Decimal | int, dt.datetime | bytes | None, uuid.UUID | float, Point | str]
by_type = dict(scalars)


def union_values(annotation: Any) -> Any:
    import typing

    members = [st.none() if each is type(None) else by_type[each] for each in typing.get_args(annotation)]
    return st.one_of(members)


@st.composite
def annotated_values(draw: Any, depth: int = 2) -> tuple[Any, Any]:
    """An annotation, and a strategy for values that it allows."""
    kind = draw(
        st.sampled_from(
            ["scalar"] * 4
            + ["union"]
            + (["list", "set", "dict", "optional", "tuple", "model"] if depth else [])
        )
    )
    if kind == "scalar":
        return draw(st.sampled_from(scalars))
    if kind == "union":
        annotation = draw(st.sampled_from(unions))
        return annotation, union_values(annotation)
    if kind == "set":
        inner, values = draw(st.sampled_from(hashable))
        return set[inner], st.sets(values, max_size=3)
    inner, values = draw(annotated_values(depth - 1))
    if kind == "list":
        return list[inner], st.lists(values, max_size=3)
    if kind == "dict":
        keys = texts.filter(lambda key: "\0" not in key)
        return dict[str, inner], st.dictionaries(keys, values, max_size=3)
    if kind == "optional":
        return inner | None, st.none() | values
    if kind == "tuple":
        return tuple[inner, int], st.tuples(values, st.integers(0, 9))
    model = create_model(f"Inner{depth}", value=(inner, ...))
    return model, values.map(lambda value: model(value=value))


@st.composite
def models_with_documents(draw: Any, collection: str = "things") -> tuple[type[Document], list[Document]]:
    """A Document class of random fields, and a few documents of it."""
    fields = draw(st.lists(annotated_values(), min_size=1, max_size=5))
    naming = draw(st.sampled_from(["snake", "camel"]))
    annotations = {f"field_{number}": annotation for number, (annotation, _) in enumerate(fields)}
    model = type(Document)(
        "Thing",
        (Document,),
        {"__annotations__": annotations, "__module__": __name__},
        collection=collection,
        naming=naming,
    )
    count = draw(st.integers(1, 3))
    documents = [
        model(**{f"field_{number}": draw(values) for number, (_, values) in enumerate(fields)})
        for _ in range(count)
    ]
    return model, documents


PATIENCE_SECONDS = 60
LIFETIME = "transactionLifetimeLimitSeconds"


def until(what: str, done: Any) -> Any:
    """The first true answer; fails when it takes too long."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        if answer := done():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {PATIENCE_SECONDS} seconds")


@contextlib.contextmanager
def transaction_lifetime(client: Any, seconds: int) -> Generator[None]:
    """Let the server keep transactions that begin now for this long."""
    before = client.admin.command("getParameter", **{LIFETIME: 1})[LIFETIME]
    client.admin.command("setParameter", **{LIFETIME: seconds})
    try:
        yield
    finally:
        client.admin.command("setParameter", **{LIFETIME: before})


def long_transactions(client: Any) -> contextlib.AbstractContextManager[None]:
    """Let the server keep transactions that begin now for longer than any test waits."""
    return transaction_lifetime(client, 600)


_SHARED: dict[str, LocalServer] = {}
_STANDALONE: list[StandaloneServer] = []


@contextlib.contextmanager
def shared_server(**parameters: Any) -> Generator[LocalServer]:
    """A server with these parameters, emptied: one of a kind for all tests of a process, one test or file at a time."""
    options = {"enableTestCommands": 1, **parameters}
    key = str(options)
    if key not in _SHARED:
        # It ends with this process.
        _SHARED[key] = start(parameters=options)
    empty(_SHARED[key].uri)
    yield _SHARED[key]


@contextlib.contextmanager
def shared_standalone() -> Generator[StandaloneServer]:
    """A server that is no replica set, emptied: one for all tests of a process, one test or file at a time."""
    if not _STANDALONE:
        _STANDALONE.append(StandaloneServer({"enableTestCommands": 1}))
        atexit.register(_STANDALONE[0].stop)
    empty(_STANDALONE[0].uri)
    yield _STANDALONE[0]


def empty(uri: str) -> None:
    """Drop all databases but the server's own."""
    with MongoClient[Any](uri) as client:
        for name in {*client.list_database_names()} - {"admin", "config", "local"}:
            client.drop_database(name)
