"""Findings while others write: what is late is waited for, what is wrong stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from treadle import Count, Document, Store, migration
from treadle.advisor.plans.settle import verified


class Item(Document, collection="items"):
    id: int
    owner: int | None = None


class Owner(Document, collection="owners", version=2):
    id: int
    items: Annotated[int, Count(Item, by="owner")] = 0


@migration(Owner, from_version=1)
def _renamed(document: dict[str, Any]) -> dict[str, Any]:
    document["items"] = document.pop("item_count")
    return document


def test_outdated_documents_are_looked_at_as_they_read(database: Any) -> None:
    store = Store(database, [Item, Owner])
    store.setup()
    database["items"].insert_one({"_id": 1, "owner": 1})
    database["owners"].insert_one({"_id": 1, "item_count": 1})
    # What is stored under the present name is what the migration overwrites.
    database["owners"].insert_one({"_id": 2, "item_count": 2, "items": 0})
    (finding,) = verified(store)
    assert ("items", 2, 0) == (finding.path, finding.stored, finding.expected)
    # As if the worker had repaired it since.
    assert [] == verified(store, verify=lambda: [replace(finding, document_id=1)])
