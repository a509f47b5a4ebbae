"""Python and the server read the same keys out of any document.

Covers: query/keys.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from bson import DBRef, Decimal128, ObjectId

from tests.query.models import CODEC_OPTIONS
from treadle.query.keys import Key, distinct, freeze, unwind

DOCUMENTS = 600
KEYS = [
    Key("ref"),
    Key("boxes.ref"),
    Key("boxes.ref", ("boxes",)),
    Key("boxes.parts.ref", ("boxes", "boxes.parts")),
    Key("boxes.parts.ref", ("boxes.parts",)),
    Key("boxes.parts.ref", ("boxes",)),
    Key("boxes.parts", ("boxes", "boxes.parts")),
    Key("ref", ("ref",)),
    Key("ref.$id"),
    Key("boxes.ref.$id", ("boxes",)),
]
VALUES = [
    1,
    1.0,
    Decimal128("1"),
    2,
    "a",
    None,
    True,
    {"x": 1},
    ObjectId("0" * 24),
    DBRef("c", 1),
    DBRef("c", "a"),
]


def made(chance: random.Random, depth: int = 0) -> Any:
    """A value of any shape: objects with the names of the paths, arrays, arrays in arrays, scalars."""
    roll = chance.random()
    if depth < 5 and roll < 0.45:
        names = [name for name in ("boxes", "parts", "ref") if chance.random() < 0.6]
        return {name: made(chance, depth + 1) for name in names}
    if depth < 5 and roll < 0.8:
        return [made(chance, depth + 1) for _ in range(chance.randrange(4))]
    return chance.choice(VALUES)


@pytest.fixture(scope="module")
def documents(client):
    chance = random.Random(7)
    collection = client["keys"].get_collection("shapes", codec_options=CODEC_OPTIONS)
    shapes = []
    for number in range(DOCUMENTS):
        fields = {name: made(chance, 1) for name in ("boxes", "ref") if chance.random() < 0.9}
        shapes.append({"_id": number, **fields})
    collection.insert_many(shapes)
    yield collection
    client.drop_database("keys")


def in_order(keys: list[Any]) -> set[Any]:
    return {freeze(key) for key in keys}


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_expressions_give_the_keys_that_python_sees(documents, key):
    seen = 0
    for row in documents.aggregate([{"$project": {"whole": "$$ROOT", "keys": key.expression()}}]):
        found = row.get("keys")
        if not key.arrays:
            # A value of its own: null, missing and lists are no keys.
            found = [] if found is None or isinstance(found, list) else [found]
        assert in_order(found) == in_order(list(key.of(row["whole"]).values())), row["whole"]
        seen += len(found)
    assert seen > 5


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_conditions_find_every_document_with_a_key(documents, key):
    by_key: dict[Any, set[int]] = {}
    every = list(documents.find())
    for document in every:
        for frozen in key.of(document):
            by_key.setdefault(frozen, set()).add(document["_id"])
    for value in distinct(each for document in every for each in key.of(document).values()):
        matched = {each["_id"] for each in documents.find(key.condition([value]))}
        assert by_key[freeze(value)] <= matched


@pytest.mark.parametrize("unwound", [(), ("boxes",), ("boxes", "boxes.parts")])
def test_after_an_unwind_only_the_other_arrays_are_left(documents, unwound):
    key = Key("boxes.parts.ref", ("boxes", "boxes.parts"))
    stages: list[dict[str, Any]] = [{"$unwind": f"${array}"} for array in unwound]
    rows = list(
        documents.aggregate([*stages, {"$project": {"whole": "$$ROOT", "keys": key.expression(unwound)}}])
    )
    # Python's unwind gives the same documents, in the same order.
    expected = [each for document in documents.find() for each in unwind(document, unwound)]
    assert expected == [row["whole"] for row in rows]
    left = key._replace(arrays=tuple(array for array in key.arrays if array not in unwound))
    for row in rows:
        found = row.get("keys")
        if not left.arrays:
            found = [] if found is None or isinstance(found, list) else [found]
        assert in_order(found) == in_order(list(left.of(row["whole"]).values())), row["whole"]


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (Key("boxes.ref", ("boxes",)), "boxes.card"),
        (Key("boxes.parts.ref", ("boxes", "boxes.parts")), "boxes.parts.card"),
    ],
)
def test_array_filters_reach_the_slots_of_a_key(documents, key, path):
    """In documents that have the declared shape; in others the server refuses the update, or finds no array."""
    chance = random.Random(3)
    collection = documents.database["slots"]
    inner = "parts" in path

    def box() -> dict[str, Any]:
        parts = [{"ref": chance.choice([1, 2, None])} for _ in range(chance.randrange(4))]
        return {"parts": parts} if inner and chance.random() < 0.8 else {"ref": chance.choice([1, 2, None])}

    collection.drop()
    collection.insert_many(
        [{"_id": n, "boxes": [box() for _ in range(chance.randrange(4))]} for n in range(200)]
    )
    expected = {}
    for document in collection.find(key.condition([1])):
        expected[document["_id"]] = [slot.path for slot in key.slots(document, path) if slot.key == 1]
    update_path, filters = key.blind(path, 1)
    collection.update_many(key.condition([1]), {"$set": {update_path: "card"}}, array_filters=filters)
    assert expected
    name = path.rpartition(".")[2]
    for document in collection.find():
        written = [slot.path for slot in key.slots(document, path) if _has(document, slot.path, name)]
        assert expected.get(document["_id"], []) == written


def _has(document: Any, path: str, name: str) -> bool:
    for part in path.split(".")[:-1]:
        document = document[int(part)] if part.isdigit() else document[part]
    return name in document
