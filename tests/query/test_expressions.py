"""Names in the expressions of declarations: those that they read, and those that are refused.

The table at the end is the same rule seen by a user, when the Store is made.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict
from pymongo import MongoClient

from treadle import (
    Attributes,
    Average,
    Count,
    DeclarationError,
    Document,
    Formula,
    Id,
    Max,
    Min,
    Rollup,
    Store,
    Sum,
    migration,
)
from treadle.query.expressions import paths_named

READ: list[tuple[Any, list[str]]] = [
    ("$price", ["price"]),
    ("$address.city", ["address.city"]),
    ("price", []),
    ("", []),
    (3, []),
    (None, []),
    ({"$add": ["$a", {"$multiply": ("$b", 2)}]}, ["a", "b"]),
    ({"total": "$a", "more": {"deep": "$b"}}, ["a", "b"]),
    # Variables of the server, and those that stand for the document.
    ("$$ROOT", [""]),
    ("$$CURRENT", [""]),
    ("$$NOW", []),
    ("$$REMOVE", []),
    ("$$ROOT.a", ["a"]),
    ("$$CURRENT.a.b", ["a.b"]),
    # Variables of an expression: what they hold is not looked into, what they are made from is.
    ({"$let": {"vars": {"x": "$a"}, "in": {"$add": ["$$x", "$b", "$$x.y"]}}}, ["a", "b"]),
    ({"$let": {"vars": {"CURRENT": "$a"}, "in": "$inner"}}, [""]),
    ({"$map": {"input": "$lines", "as": "line", "in": "$$line.price"}}, ["lines"]),
    ({"$map": {"input": "$lines", "in": {"$add": ["$$this.price", "$fee"]}}}, ["lines", "fee"]),
    ({"$filter": {"input": "$lines", "cond": {"$gt": ["$$this.price", "$least"]}}}, ["lines", "least"]),
    (
        {"$reduce": {"input": "$lines", "initialValue": "$a", "in": {"$add": ["$$value", "$$this"]}}},
        ["lines", "a"],
    ),
    ({"$switch": {"branches": [{"case": "$a", "then": "$b"}], "default": "$c"}}, ["a", "b", "c"]),
    ({"$dateToString": {"date": "$at", "format": "%Y", "timezone": "$zone"}}, ["at", "zone"]),
    # Constants.
    ({"$literal": "$a"}, []),
    ({"$const": ["$a"]}, []),
    ({"$concat": [{"$literal": "$"}, "$a"]}, ["a"]),
    # Fields by $getField.
    ({"$getField": "a"}, ["a"]),
    ({"$getField": {"$literal": "$a"}}, ["$a"]),
    ({"$getField": {"field": "a"}}, ["a"]),
    ({"$getField": {"field": "a", "input": "$$ROOT"}}, ["a"]),
    ({"$getField": {"field": "city", "input": "$address"}}, ["address.city"]),
    ({"$getField": {"field": {"$literal": "$id"}, "input": "$owner"}}, ["owner.$id"]),
    ({"$getField": {"field": "x", "input": "$$this"}}, []),
    ({"$getField": {"field": "x", "input": {"$first": "$lines"}}}, ["lines"]),
    ({"$getField": {"$concat": ["a", "$b"]}}, ["", "b"]),
    ({"$setField": {"field": "new", "input": "$$ROOT", "value": "$a"}}, ["", "a"]),
]


@pytest.mark.parametrize(("expression", "paths"), READ, ids=[str(each) for each, _ in READ])
def test_the_paths_that_an_expression_names(expression, paths):
    assert paths == paths_named(expression)


class Address(BaseModel):
    city: str = ""


class Line(BaseModel):
    price: int = 0


class Source(Document, collection="sources", discriminator="type", naming="camel"):
    owner_id: Id
    unit_price: int = 0
    address: Address = Address()
    lines: list[Line] = []
    prices: dict[str, int] = {}
    cards: dict[str, Address] = {}
    either: Address | Line | None = None
    odd: Any = None
    previous: Id | None = None
    specs: Annotated[dict[str, str], Attributes()] = {}


class Special(Source, kind="special"):
    discount: int = 0


class Open(Document, collection="opens"):
    model_config = ConfigDict(extra="allow")
    owner_id: Id


class Numbered(Document, collection="numbered", version=2, version_field="v"):
    owner_id: Id
    now: int = 0


@migration(Numbered, from_version=1)
def renamed(document: dict[str, Any]) -> dict[str, Any]:
    return document


def formula(expression: Any, **keywords: Any) -> list[Any]:
    """A model with a Formula, and with fields that it may name."""
    fields = {"value": Annotated[Any, Formula(expression)], "price": int, "product_count": int}
    body = {"__annotations__": fields, "__module__": __name__, "value": None, "price": 0, "product_count": 0}
    return [type(Document)("Wrong", (Document,), body, **{"collection": "wrong", **keywords})]


def gathered(declared: Any, *sources: Any) -> list[Any]:
    body = {"__annotations__": {"value": Annotated[Decimal | None, declared]}, "__module__": __name__}
    return [*sources, type(Document)("Wrong", (Document,), {**body, "value": None}, collection="wrong")]


def sources(path: Any, source: Any = Source) -> list[Any]:
    """A model with a maximum over an expression that reads a path of a source."""
    also = [Special] if source is Source else []
    return gathered(Max(source, {"$add": [path, 1]}, by="owner_id"), source, *also)


class Days(Document, collection="days", rollup=Rollup(Source, keys={"owner_id": "owner_id"})):
    owner_id: Id
    total: Annotated[int, Sum({"$add": ["$unitPrice", "$discount"]})] = 0
    count: Annotated[int, Count()] = 0
    mean: Annotated[float | None, Formula({"$divide": ["$total", "$count"]})] = None


class Wrong(Document, collection="wrong", rollup=Rollup(Source, keys={"owner_id": "owner_id"})):
    owner_id: Id
    total: Annotated[int, Sum("unit_price")] = 0
    mean: Annotated[float | None, Formula({"$divide": ["$total", "$unitPrice"]})] = None


ACCEPTED: dict[str, list[Any]] = {
    "its own fields": formula({"$add": ["$price", "$$ROOT.price"]}),
    "its id, and Treadle's state": formula({"$concat": ["$_id", "$_treadle.n"]}),
    "stored names": formula("$productCount", naming="camel"),
    "a nested path": sources("$address.city"),
    "into an array": sources("$lines.price"),
    "into a dict": sources("$prices.anything"),
    "below a dict": sources("$cards.anything.misspelt"),
    "into a union": sources("$either.price"),
    "the names of attributes": sources({"$size": "$specs.k"}),
    "below anything": sources("$odd.deep.down"),
    "a field of a kind": sources("$discount"),
    "the discriminator": sources("$type"),
    "a model that allows more": sources("$misspelt", Open),
    "the version": sources("$v", Numbered),
    "a rollup": [Source, Special, Days],
}
REFUSED: dict[str, tuple[list[Any], str, str]] = {
    "formula": (formula("$prise"), "Wrong.value", "did you mean 'price'"),
    "below an operator": (formula({"$add": [1, {"$abs": "$$ROOT.prise"}]}), "'prise'", "'price'"),
    "by $getField": (formula({"$getField": "prise"}), "'prise'", "'price'"),
    "a Python name": (formula("$product_count", naming="camel"), "'product_count'", "'productCount'"),
    "nested": (sources("$address.citi"), "Address has no field", "'city'"),
    "in an array": (sources("$lines.prise"), "Line has no field", "'price'"),
    "in a union": (sources("$either.prise"), "'either.prise'", "field"),
    "below a scalar": (sources("$unitPrice.amount"), "'unitPrice.amount'", "nothing in"),
    "an attribute": (sources("$specs.color"), "'specs.color'", "a field of its own"),
    "of no kind": (sources("$discont"), "Wrong.value", "'discount'"),
    "of a version before": (sources("$past", Numbered), "Numbered", "'past'"),
    "a rollup's source": ([Source, Special, Wrong], "Wrong.mean", "'unitPrice'"),
}
for each in (Sum, Average, Min, Max):
    declared: Any = each(Numbered, {"$add": ["$nwo", 1]}, by="owner_id")
    REFUSED[each.__name__] = gathered(declared, Numbered), "Wrong.value", "did you mean 'now'"


def make(models: list[Any]) -> None:
    """Make a Store of these models; no server is asked."""
    with MongoClient[dict[str, Any]]("mongodb://127.0.0.1:1", connect=False) as client:
        Store(client["shop"], models)


@pytest.mark.parametrize("models", ACCEPTED.values(), ids=ACCEPTED)
def test_names_that_a_model_has(models):
    make(models)


@pytest.mark.parametrize(("models", "place", "hint"), REFUSED.values(), ids=REFUSED)
def test_names_that_a_model_does_not_have(models, place, hint):
    with pytest.raises(DeclarationError) as raised:
        make(models)
    assert raised.value.code in ("field-unknown", "python-name", "attributes-path")
    assert place in str(raised.value)
    assert hint in str(raised.value)
    assert "Unchecked" not in str(raised.value)
