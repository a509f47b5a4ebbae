"""Kinds that carry other patterns, at the write and by the worker."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import BaseModel

from treadle import (
    Approximate,
    DataError,
    Document,
    ExtendedReference,
    Formula,
    Id,
    Outlier,
    Sum,
    Unchecked,
)

# -- kinds that carry other patterns -----------------------------------------------------------------


def test_two_kinds_may_maintain_the_same_field_in_their_own_ways(run):
    class Node(Document, collection="nodes", discriminator="is"):
        parent_id: Id | None = None

    class File(Node, kind="file"):
        size: int = 0

    class Folder(Node, kind="folder"):
        size: Annotated[int, Sum(File, "size", by="parent_id")] = 0

    class Link(Node, kind="link"):
        size: Annotated[int | None, Formula({"$literal": 1})] = None

    store = run.store([Node, File, Folder, Link])
    store.setup()
    folder = store.insert(Folder())
    files = store.insert_many([File(parent_id=folder.id, size=size) for size in (3, 4)])
    link = store.insert(Link(parent_id=folder.id))
    assert (7, 1) == (store.get(Node, folder.id).size, store.get(Node, link.id).size)
    store.update(Node, files[0].id, Unchecked({"$inc": {"parent": 0}}))
    store.replace(File(id=files[0].id, parent_id=folder.id, size=10))
    assert 14 == store.get(Node, folder.id).size
    assert [] == store.verify()


def test_a_reference_may_not_block_a_deletion_of_another_kind(run):
    class Part(Document, collection="parts", discriminator="t"): ...

    class Wheel(Part, kind="wheel"):
        name: str = "w"

    class Bolt(Part, kind="bolt"): ...

    class Card(BaseModel):
        name: str

    class Cart(Document, collection="carts"):
        wheel_id: Id | None = None
        wheel: Annotated[Card | None, ExtendedReference(Wheel, by="wheel_id", on_delete="restrict")] = None

    store = run.store([Part, Wheel, Bolt, Cart])
    wheel, bolt = store.insert_many([Wheel(), Bolt()])
    store.insert(Cart(wheel_id=wheel.id))
    store.insert(Cart(wheel_id=bolt.id))
    with pytest.raises(DataError, match="restrict"):
        store.delete(Part, wheel.id)
    with pytest.raises(DataError, match="restrict"):
        store.change_kind(Bolt(id=wheel.id), was=Wheel)
    assert store.delete(Part, bolt.id) is not None


# -- kinds whose arrays continue elsewhere ------------------------------------------------------------


class Medium(Document, collection="tagged", discriminator="kind"):
    name: str


class Plain(Medium, kind="plain"):
    tags: list[str] = []
    views: int = 0


class Film(Medium, kind="film"):
    tags: Annotated[list[str], Outlier(limit=3, overflow="film_tags")] = []
    views: Annotated[int, Approximate(every=1)] = 0


class Show(Medium, kind="show"):
    tags: Annotated[list[str], Outlier(limit=5, overflow="show_tags")] = []


@pytest.mark.parametrize("was", [Plain, Film])
@pytest.mark.parametrize("becomes", [Film, Show])
def test_a_document_that_becomes_a_kind_with_an_outlier_array_keeps_its_items(run, database, was, becomes):
    if was is becomes:
        return
    store = run.store([Medium, Plain, Film, Show])
    store.setup()
    old = store.insert(was(name="x", tags=list("abcdefgh")))
    store.change_kind(becomes(id=old.id, name="x", tags=list("ABCDEFGH")), was=was)
    assert list("ABCDEFGH") == list(store.array(becomes, "tags", old.id))
    assert [] == store.verify()
