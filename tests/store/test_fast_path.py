"""A call that goes without a plan comes to the same as one that goes by its plan, whatever the model."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import Field

from treadle import Archive, Attributes, Document, History, Indexed, Limits, Store, UpdatedAt, migration

KEY, OTHER, NEW, ARCHIVED = (ObjectId(digit * 24) for digit in "6789")


class Plain(Document, collection="plain"):
    size: int = 0
    name: Annotated[str, Indexed(unique=True)] = Field(default="", alias="Name")


class Versioned(Document, collection="versioned", version=2):
    size: int = 0


@migration(Versioned, from_version=1)
def grown(raw: dict[str, Any]) -> dict[str, Any]:
    return raw | {"size": raw["size"] + 100}


class Buried(Document, collection="buried", soft_delete="deleted_at"):
    size: int = 0
    deleted_at: datetime | None = None


class Revised(Document, collection="revised", revision="written"):
    size: int = 0
    written: int = 0


class Told(Document, collection="told", history=History()):
    size: int = 0


class Kept(Document, collection="kept", archive=Archive(by="at", after=timedelta(days=1), into="old")):
    size: int = 0
    at: datetime | None = None


class Described(Document, collection="described"):
    size: int = 0
    specs: Annotated[dict[str, int], Attributes()] = {}


class Dated(Document, collection="dated"):
    size: int = 0
    touched: Annotated[datetime | None, UpdatedAt()] = None


class Thing(Document, collection="things", discriminator="kind", kind="thing"):
    size: int = 0


class Box(Thing, kind="box"):
    lid: bool = False


MODELS = [Plain, Versioned, Buried, Revised, Told, Kept, Described, Dated, Thing, Box]
STORED: list[dict[str, Any]] = [
    {}, {"size": 1}, {"size": "odd"}, {"size": None}, {"size": 2**63 - 1}, {"size": 1, "_version": 1},
    {"size": 1, "deleted_at": datetime(2026, 1, 1)}, {"size": 1, "written": 3}, {"size": 1, "kind": "box"},
    {"size": 1, "kind": "else"}, {"specs": [{"k": "a", "v": 1}]},
]  # fmt: skip


def told(call: Callable[[], Any]) -> str:
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'code', None)} {error}"


def undated(raw: Any) -> Any:
    if isinstance(raw, dict):
        return {name: undated(value) for name, value in raw.items()}
    return "a date" if isinstance(raw, datetime) else raw


@pytest.fixture
def stores(database: Any) -> list[Store]:
    """One whose calls may go without a plan, and one whose calls never do."""
    quick, slow = Store(database, MODELS), Store(database, MODELS, limits=Limits(together_max=1))
    slow.setup()
    database["old"].insert_one({"_id": ARCHIVED, "size": 5}, bypass_document_validation=True)
    for store in (quick, slow):
        store.insert(Described())
        store.get(Described, KEY)
    assert quick._may_share(None)
    assert not slow._may_share(None)
    return [quick, slow]


def test_without_a_plan_a_call_comes_to_the_same(stores: list[Store]) -> None:
    for model in MODELS:
        names = {"size", "_version", *(info.alias or name for name, info in model.model_fields.items())}
        names |= {"kind"} if issubclass(model, Thing) else set()
        found = [each for each in STORED if each.keys() <= names]
        calls: list[Callable[[Store], Any]] = [
            lambda store, model=model: store.get(model, KEY),
            lambda store, model=model: store.get(model, ARCHIVED),
            lambda store, model=model: store.insert(model(id=KEY)),
            lambda store, model=model: store.insert(model.model_validate({"id": NEW, "size": 3})),
        ]
        for stored in found:
            for number, call in enumerate(calls):
                one, other = (_outcome(store, model, stored, call) for store in stores)
                assert one == other, (model, stored, number)


def _outcome(store: Store, model: type[Document], stored: Any, call: Callable[[Store], Any]) -> Any:
    """What a call answers, and what it leaves stored."""
    rows = store.database[store.graph.entry(model).collection]
    rows.delete_many({})
    before = [{"_id": OTHER, "Name": "taken"}, {"_id": KEY, "Name": "own", **stored}]
    rows.insert_many(before, bypass_document_validation=True)
    answer = told(lambda: call(store))
    after = [undated(raw) for raw in rows.find(sort=[("_id", 1)])]
    return ["a date" if "touched=datetime" in answer else answer, after]
