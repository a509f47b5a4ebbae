"""Random names of fields, in documents that other clients store: whatever they are, the neighbours are right."""

from __future__ import annotations

import random
from typing import Annotated, Any

from bson import ObjectId
from pymongo.errors import OperationFailure

from tests.fuzz import rounds
from tests.poison.values import VALUES, document
from treadle import Count, Document, Id, Store
from treadle.errors import TreadleError

PIECES = ["$", ".", "a", "_id", "_treadle", "\u202e", "\x1b[2J", "0", " ", "$where", "count", "é", "x" * 300]


class Note(Document, collection="notes", validation="off"):
    page_id: Id
    text: str = ""


class Page(Document, collection="pages", validation="off"):
    title: str = ""
    count: Annotated[int, Count(Note, by="page_id")] = 0


def hostile(chance: random.Random) -> dict[str, Any]:
    """A document whose fields may be called anything, inside of other fields too."""
    names = [
        "".join(chance.choices(PIECES, k=1 + chance.randrange(3))) for _ in range(1 + chance.randrange(3))
    ]
    values = list(VALUES.values())
    fields = {name: chance.choice(values) for name in names if name != "_id"}
    return {"inner": fields} if chance.random() < 0.3 else fields


def test_names_are_only_names(database):
    store = Store(database, [Note, Page])
    store.setup()
    good = store.insert(Page(title="good"))
    taken = 0
    for number, chance in enumerate(rounds(90)):
        key = ObjectId()
        for collection, own in (("pages", {"title": "bad"}), ("notes", {"page_id": key, "text": "bad"})):
            stored = document({"_id": key, **own, **hostile(chance)})
            try:
                taken += "writeErrors" not in database.command("insert", collection, documents=[stored])
            except OperationFailure:
                continue
        if number % 30:
            continue
        for call in (
            store.verify,
            store.repair,
            lambda: list(store.find(Page)),
            lambda: list(store.find(Note)),
        ):
            try:
                call()
            except TreadleError as error:
                assert error.code in ("document-invalid", "document-unreadable"), error
        store.insert(Note(page_id=good.id))
    assert taken
    assert database["notes"].count_documents({"page_id": good.id}) == store.require(Page, good.id).count
    store.status()
