"""The models of these tests, and a plain reading of their rows."""

from __future__ import annotations

import datetime as dt
import itertools
from typing import Annotated, Any

from pydantic import BaseModel

from treadle import AncestorArray, Count, Document, ExtendedReference, History, Limits, Outlier, migration

UTC = dt.UTC

SMALL = Limits(write_chunk=3, insert_max=3, find_page=2, history_trim_page=2)


class Policy(Document, collection="policies", history=History()):
    id: int
    holder: str = "Ada"
    premium: int = 0
    notes: list[str] = []


class Claim(Document, collection="claims"):
    contract_id: int


class Contract(Document, collection="contracts", history=History()):
    id: int
    name: str = ""
    claims: Annotated[int, Count(Claim, by="contract_id")] = 0


class Insurer(Document, collection="insurers"):
    id: int
    name: str = ""


class Part(BaseModel):
    insurer_id: int
    name: Annotated[str | None, ExtendedReference(Insurer, by="insurer_id", field="name")] = None


class Bundle(Document, collection="bundles", history=History()):
    id: int
    insurer_id: int = 1
    insurer: Annotated[str | None, ExtendedReference(Insurer, by="insurer_id", field="name")] = None
    parts: list[Part] = []


class Fan(Document, collection="fans", history=History()):
    id: int
    idols: Annotated[list[str], Outlier(limit=3, overflow="idol_overflow", page_size=2)] = []
    idol_count: int = 0
    has_overflow: bool = False


class Node(
    Document, collection="nodes", history=History(), tree=AncestorArray(parent="up", ancestors="above")
):
    id: int
    up: int | None = None
    above: list[int] = []


class Vehicle(Document, collection="vehicles", discriminator="kind"):
    id: int
    wheels: int = 4


class Car(Vehicle, kind="car", history=History(collection="cars_history")):
    seats: int = 5


class Truck(Vehicle, kind="truck"):
    load: int = 1


class Followed(Document, collection="followed", history=History(maintain="stream")):
    id: int
    name: str = ""


class PolicyV1(Document, collection="versioned", version=1, history=History()):
    id: int
    name: str


class PolicyV2(Document, collection="versioned", version=2, history=History()):
    id: int
    holder: str


@migration(PolicyV2, from_version=1)
def rename(raw: dict[str, Any]) -> dict[str, Any]:
    raw["holder"] = raw.pop("name")
    return raw


def rows(database: Any, key: Any, collection: str = "policies_history") -> list[dict[str, Any]]:
    return list(database[collection].find({"document_id": key}).sort("valid_from", 1))


def disorder(database: Any, model: type[Document]) -> list[str]:
    """What is wrong with the rows of a model, in plain Python; nothing where all is well."""
    settings = model.__treadle__
    declared = settings.patterns["history"][0]
    living = {each["_id"] for each in database[settings.collection].find({}, {"_id": 1})}
    by_key: dict[Any, list[dict[str, Any]]] = {key: [] for key in living}
    for row in database[declared.collection or f"{settings.collection}_history"].find().sort("valid_from", 1):
        by_key.setdefault(row["document_id"], []).append(row)
    wrong = []
    for key, kept in by_key.items():
        numbers = [row["revision"] for row in kept]
        if numbers != list(range(1, len(kept) + 1)):
            wrong.append(f"{key}: revisions {numbers}")
        for one, other in itertools.pairwise(kept):
            if one["valid_to"] is None or one["valid_to"] > other["valid_from"]:
                wrong.append(f"{key}: overlap")
            if one["valid_to"] != other["valid_from"] and not one.get("deleted"):
                wrong.append(f"{key}: gap")
        if any(row["valid_to"] is not None and row["valid_to"] <= row["valid_from"] for row in kept):
            wrong.append(f"{key}: no time")
        if sum(row["valid_to"] is None for row in kept) != (key in living):
            wrong.append(f"{key}: open rows")
    return wrong


def states(store: Any, model: type[Document], key: Any) -> list[dict[str, Any]]:
    """The states of a document, the oldest first, without their times."""
    return [state.document.model_dump() for state in store.history(model, key)][::-1]
