"""revision=, soft_delete=, CreatedAt and UpdatedAt, on models of every kind.

Covers: graph/lifecycle, engine/replaces, engine/deletes
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel

from tests.support import race
from treadle import (
    AncestorArray,
    Approximate,
    ChildReferences,
    Conflict,
    Count,
    CreatedAt,
    DataError,
    Day,
    Document,
    DuplicateKey,
    ExtendedReference,
    Formula,
    Id,
    Indexed,
    Insert,
    MaterializedPath,
    Outlier,
    ParentReference,
    Rollup,
    Store,
    Subset,
    Sum,
    Update,
    UpdatedAt,
    UsageError,
    migration,
)

UTC = dt.UTC


class Person(Document, collection="people", revision="revision", soft_delete="deleted_at"):
    name: str
    email: Annotated[str | None, Indexed(unique=True)] = None
    code: Annotated[str | None, Indexed(unique=True, deleted=True)] = None
    posts: Annotated[int, Count("Post", by="author_id")] = 0
    made: Annotated[dt.datetime | None, CreatedAt()] = None
    written: Annotated[dt.datetime | None, UpdatedAt()] = None
    revision: int = 0
    deleted_at: dt.datetime | None = None


class PersonCard(BaseModel):
    name: str


class PostCard(BaseModel):
    title: str


class Post(Document, collection="posts", soft_delete="gone", naming="camel"):
    author_id: Id
    author: Annotated[PersonCard | None, ExtendedReference(Person, by="author_id")] = None
    blog_id: Id
    title: str
    words: int = 0
    day: dt.datetime = dt.datetime(2024, 5, 1, tzinfo=UTC)
    gone: dt.datetime | None = None


class Blog(Document, collection="blogs"):
    posts: Annotated[int, Count(Post, by="blog_id")] = 0
    words: Annotated[int, Sum(Post, "words", by="blog_id", where={"words": {"$gt": 0}})] = 0
    latest: Annotated[list[PostCard], Subset(Post, by="blog_id", sort="-words", size=2)] = []
    double: Annotated[int | None, Formula({"$multiply": ["$posts", 2]})] = None


class Daily(Document, collection="daily", rollup=Rollup(Post, keys={"day": Day("day", timezone="UTC")})):
    day: dt.datetime
    number: Annotated[int, Count()]
    words: Annotated[int, Sum("words")]


class Plain(Document, collection="plain", revision="version"):
    text: str = ""
    version: int = 0


class Vehicle(Document, collection="vehicles", discriminator="type", revision="rev", soft_delete="deleted"):
    name: str
    rev: int = 0
    deleted: dt.datetime | None = None
    seen: Annotated[dt.datetime | None, UpdatedAt()] = None


class Car(Vehicle, kind="car"):
    doors: int = 4


class Boat(Vehicle, kind="boat"):
    masts: int = 1


class Note(Document, collection="notes", version=2, soft_delete="deleted_at", revision="revision"):
    body: str = ""
    revision: int = 0
    deleted_at: dt.datetime | None = None


@migration(Note, from_version=1)
def rename(document: dict[str, Any]) -> dict[str, Any]:
    document["body"] = document.pop("text", "")
    return document


MODELS = [Person, Post, Blog, Daily, Plain, Vehicle, Car, Boat, Note]


@pytest.fixture
def store(run):
    store = run.store(MODELS)
    store.setup()
    return store


def server_time(database: Any) -> dt.datetime:
    return database.client.admin.command("hello")["localTime"].replace(tzinfo=UTC)


# -- dates ----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_dates_are_the_servers(store, database):
    start = server_time(database)
    ann = store.insert(Person(name="Ann", made=dt.datetime(1990, 1, 1, tzinfo=UTC)))
    assert start <= ann.made <= server_time(database)
    assert ann.made == ann.written
    assert ann == store.get(Person, ann.id)
    later = store.update(Person, ann.id, {"$set": {"name": "A"}})
    assert ann.made == later.made
    assert ann.written <= later.written <= server_time(database)
    pipeline = store.update(Person, ann.id, [{"$set": {"name": "B"}}])
    assert later.written <= pipeline.written
    pipeline.name = "C"
    replaced = store.replace(pipeline)
    assert (ann.made, True) == (replaced.made, pipeline.written <= replaced.written)
    with pytest.raises(UsageError) as caught:
        store.update(Person, ann.id, {"$set": {"written": None}})
    assert "field-maintained" == caught.value.code


def test_maintained_values_alone_are_nobodys_write(store):
    ann = store.insert(Person(name="Ann"))
    blog = store.insert(Blog())
    for n in range(3):
        store.insert(Post(author_id=ann.id, blog_id=blog.id, title=str(n)))
    now = store.get(Person, ann.id)
    assert (3, ann.written, ann.revision) == (now.posts, now.written, now.revision)
    now.name = "Ann B."
    assert 2 == store.replace(ann).revision


def test_bulk_writes_are_stamped(store, database):
    start = server_time(database)
    store.bulk([Insert(Person(name="a")), Insert(Person(name="b"))])
    people = store.insert_many([Person(name="c"), Person(name="d")])
    store.bulk([Update(Person, each.id, {"$set": {"name": "x"}}) for each in people])
    store.update_many(Person, {"name": "x"}, {"$set": {"name": "y"}})
    assert all(start <= each.made <= each.written for each in store.find(Person))
    assert [1, 1, 3, 3] == [each.revision for each in store.find(Person, sort="_id")]
    assert [] == store.verify()


# -- revision -------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("model", [Plain, Person, Car, Note])
def test_whoever_writes_over_an_older_document_is_told(store, model):
    make = {
        Plain: Plain,
        Person: lambda: Person(name="x"),
        Car: lambda: Car(name="x"),
        Note: Note,
    }[model]
    field = {Plain: "text", Person: "name", Car: "name", Note: "body"}[model]
    number = {Plain: "version", Car: "rev"}.get(model, "revision")
    mine = store.insert(make())
    assert 1 == getattr(mine, number)
    theirs = store.get(model, mine.id)
    assert 2 == getattr(store.change(theirs, **{field: "theirs"}), number)
    for write in (lambda: store.replace(mine), lambda: store.change(mine, **{field: "mine"})):
        with pytest.raises(Conflict) as caught:
            write()
        assert "document-changed" == caught.value.code
    assert "theirs" == getattr(store.get(model, mine.id), field)
    fresh = store.get(model, mine.id)
    setattr(fresh, field, "mine")
    assert 3 == getattr(store.replace(fresh), number)
    store.collection(model)
    store.delete(model, mine.id)
    with pytest.raises(DataError) as gone:
        store.replace(fresh)
    assert "document-gone" == gone.value.code


def test_a_document_from_before_the_declaration_can_be_written(store, database):
    key = database["plain"].insert_one({"text": "old"}).inserted_id
    old = store.get(Plain, key)
    assert 1 == store.change(old, text="new").version
    with pytest.raises(Conflict):
        store.change(old, text="newer")


def test_of_racing_replacements_one_wins(database):
    store = Store(database, MODELS)
    store.setup()
    ann = store.insert(Person(name="Ann"))
    won: list[int] = []

    def write(number: int) -> None:
        mine = ann.model_copy(update={"name": str(number)})
        try:
            store.replace(mine) if number % 2 else store.change(ann, name=str(number))
            won.append(number)
        except Conflict:
            pass

    race(*[lambda number=number: write(number) for number in range(8)])
    assert 1 == len(won)
    assert (str(won[0]), 2) == (store.get(Person, ann.id).name, store.get(Person, ann.id).revision)


# -- soft delete -------------------------------------------------------------------------------------


@pytest.fixture
def written(store):
    ann = store.insert(Person(name="Ann", email="a", code="1"))
    blog = store.insert(Blog())
    posts = store.insert_many(
        [Post(author_id=ann.id, blog_id=blog.id, title=str(n), words=n) for n in range(1, 5)]
    )
    return ann, blog, posts


@pytest.mark.quick
def test_a_deleted_document_is_gone_for_everybody_and_comes_back(store, written):
    ann, blog, posts = written
    deleted = store.delete(Post, posts[3].id)
    assert deleted.gone is not None
    assert store.get(Post, posts[3].id) is None
    assert [None] == store.get_many(Post, [posts[3].id])
    assert 3 == store.count(Post)
    assert not store.exists(Post, {"title": "4"})
    assert ["1", "2", "3"] == store.distinct(Post, "title")
    assert [{"n": 3}] == store.aggregate(Post, [{"$count": "n"}]).to_list()
    assert 3 == len(store.page(Post, sort="title").items)
    assert store.update(Post, posts[3].id, {"$set": {"words": 9}}) is None
    assert 3 == store.update_many(Post, {}, {"$inc": {"words": 1}})
    assert store.delete(Post, posts[3].id) is None
    assert [deleted] == store.find(Post, deleted=True).to_list()
    assert [] == store.find(Post, {"title": "1"}, deleted=True).to_list()
    now = store.get(Blog, blog.id)
    assert (3, 9, ["3", "2"], 6) == (now.posts, now.words, [each.title for each in now.latest], now.double)
    assert 3 == store.get(Person, ann.id).posts
    assert (3, 9) == (store.find_one(Daily).number, store.find_one(Daily).words)
    assert [] == store.verify()

    back = store.restore(Post, posts[3].id)
    assert (None, "4") == (back.gone, back.title)
    now = store.get(Blog, blog.id)
    assert (4, 13, ["3", "4"]) == (now.posts, now.words, [each.title for each in now.latest])
    assert 4 == store.find_one(Daily).number
    assert store.restore(Post, posts[3].id) is None
    assert store.restore(Post, ObjectId()) is None
    assert [] == store.verify()


def test_delete_many_stamps_and_purge_removes(store, written, database):
    _, blog, posts = written
    assert 4 == store.delete_many(Post, {})
    assert store.find_one(Daily) is None
    assert 0 == store.get(Blog, blog.id).posts
    assert 4 == database["posts"].count_documents({})
    assert 0 == store.purge(Post, before=dt.datetime(2000, 1, 1, tzinfo=UTC))
    store.restore(Post, posts[0].id)
    assert 3 == store.purge(Post, before=dt.datetime(2100, 1, 1, tzinfo=UTC))
    assert 1 == database["posts"].count_documents({})
    assert 0 == store.purge(Post)
    assert [] == store.verify()


def test_unique_indexes_leave_deleted_documents_out_unless_asked(store, written):
    ann, _, _ = written
    store.delete(Person, ann.id)
    with pytest.raises(DuplicateKey):
        store.insert(Person(name="Other", code="1"))
    other = store.insert(Person(name="Other", email="a"))
    with pytest.raises(DuplicateKey):
        store.restore(Person, ann.id)
    assert (None, other) == (store.get(Person, ann.id), store.find_one(Person, {"email": "a"}))
    upserted = store.upsert(
        Person, {"email": "a"}, {"$set": {"name": "U"}}, insert=Person(name="", email="a")
    )
    assert (False, other.id) == (upserted.created, upserted.document.id)
    assert [] == store.setup()


def test_deletions_and_sources_that_race_agree(database):
    store = Store(database, MODELS)
    store.setup()
    ann, blog = store.insert(Person(name="Ann")), store.insert(Blog())
    posts = store.insert_many([Post(author_id=ann.id, blog_id=blog.id, title=str(n)) for n in range(6)])

    def delete_and_restore(number: int) -> None:
        for _ in range(3):
            store.delete(Post, posts[number].id)
            store.restore(Post, posts[number].id)
        store.delete(Post, posts[number].id)

    def bury_the_author() -> None:
        for _ in range(3):
            store.delete(Person, ann.id)
            store.restore(Person, ann.id)

    race(*[lambda number=number: delete_and_restore(number) for number in range(4)], bury_the_author)
    assert (2, 2) == (store.get(Blog, blog.id).posts, store.get(Person, ann.id).posts)
    assert [] == store.verify()


@pytest.mark.parametrize("deletion", ["soft", "hard"])
def test_on_delete_follows_a_soft_deletion(run, deletion):
    class Owner(Document, collection="owners", soft_delete="gone"):
        name: str = ""
        gone: dt.datetime | None = None

    class Kept(Document, collection="kept"):
        owner_id: Id | None = None
        owner: Annotated[PersonCard | None, ExtendedReference(Owner, by="owner_id", on_delete="restrict")] = (
            None
        )

    class Cleared(Document, collection="cleared"):
        owner_id: Id | None = None
        owner: Annotated[PersonCard | None, ExtendedReference(Owner, by="owner_id", on_delete="clear")] = None

    class Falling(Document, collection="falling", soft_delete="gone"):
        owner_id: Id
        owner: Annotated[PersonCard | None, ExtendedReference(Owner, by="owner_id", on_delete="cascade")] = (
            None
        )
        gone: dt.datetime | None = None

    store = run.store([Owner, Kept, Cleared, Falling])
    store.setup()
    owner = store.insert(Owner())
    kept = store.insert(Kept(owner_id=owner.id))
    cleared, falling = store.insert(Cleared(owner_id=owner.id)), store.insert(Falling(owner_id=owner.id))
    delete = (
        (lambda: store.delete(Owner, owner.id))
        if deletion == "soft"
        else (lambda: store.delete_many(Owner, {"_id": owner.id}))
    )
    with pytest.raises(DataError) as caught:
        delete()
    assert "reference-restricted" == caught.value.code
    store.delete(Kept, kept.id)
    delete()
    assert store.get(Cleared, cleared.id).owner_id is None
    assert store.get(Falling, falling.id) is None
    assert [falling.id] == [each.id for each in store.find(Falling, deleted=True)]


# -- beside other patterns ------------------------------------------------------------------------------


class Craft(Document, collection="crafts", discriminator="type", soft_delete="deleted_at"):
    id: int
    deleted_at: dt.datetime | None = None


class Ship(Craft, kind="ship"):
    pass


class Plane(Craft, kind="plane"):
    pass


def test_a_deleted_document_cannot_change_its_kind(run, database):
    store = run.store([Craft, Ship, Plane])
    store.setup()
    store.insert(Ship(id=1))
    store.delete(Craft, 1)
    with pytest.raises(DataError) as raised:
        store.change_kind(Plane(id=1), was=Ship)
    assert "document-gone" == raised.value.code
    assert isinstance(store.restore(Craft, 1), Ship)
    assert isinstance(store.change_kind(Plane(id=1), was=Ship), Plane)


class Room(Document, collection="rooms", revision="revision", tree=AncestorArray("parent_id", "above")):
    parent_id: Id | None = None
    above: list[Id] = []
    guests: Annotated[list[int], Outlier(limit=3, overflow="more_guests", page_size=2)] = []
    guest_count: int = 0
    has_overflow: bool = False
    views: Annotated[int, Approximate(every=1000, within=None)] = 0
    sampled: Annotated[int, Approximate(buffer="sampled", every=2)] = 0
    written: Annotated[dt.datetime | None, UpdatedAt()] = None
    revision: int = 0


def test_arrays_counters_and_moves_raise_the_revision(run):
    store = run.store([Room])
    store.setup()
    hall, room, below = store.insert(Room()), store.insert(Room()), None
    below = store.insert(Room(parent_id=room.id))
    array = store.array(Room, "guests", room.id)
    counter, sampled = store.counter(Room, "views"), store.counter(Room, "sampled", random=lambda: 0.0)

    def count() -> None:
        counter.add(room.id, 3)
        counter.flush()

    dates = [store.require(Room, room.id).written]
    for number, write in enumerate(
        [
            lambda: array.append(1),
            lambda: array.extend([2, 3, 4, 5]),
            lambda: array.append(6),
            lambda: array.remove(1),
            lambda: store.tree(Room).move(room.id, hall.id),
            count,
            lambda: sampled.add(room.id),
        ],
        start=2,
    ):
        write()
        stored = store.require(Room, room.id)
        assert number == stored.revision
        dates.append(stored.written)
    # What Treadle maintains is no write of the document: neither counters, nor the place of what is below.
    assert (dates[5], 1) == (dates[-1], store.require(Room, below.id).revision)
    assert sorted(dates) == dates
    with pytest.raises(Conflict):
        store.replace(room)
    assert [] == store.verify()


# -- trees -----------------------------------------------------------------------------------


class ByAncestors(Document, collection="nodes", soft_delete="gone", tree=AncestorArray("parent_id", "above")):
    name: str
    parent_id: Id | None = None
    above: list[Id] = []
    gone: dt.datetime | None = None


class ByParent(Document, collection="nodes", soft_delete="gone", tree=ParentReference("parent_id")):
    name: str
    parent_id: Id | None = None
    gone: dt.datetime | None = None


class ByPath(Document, collection="nodes", soft_delete="gone", tree=MaterializedPath("path", "name")):
    name: str
    path: str = ""
    gone: dt.datetime | None = None


class ByChildren(Document, collection="nodes", soft_delete="gone", tree=ChildReferences("children")):
    name: str
    children: list[Id] = []
    gone: dt.datetime | None = None


@pytest.mark.parametrize("model", [ByAncestors, ByParent, ByPath, ByChildren])
def test_a_tree_sees_deleted_nodes_as_gone_and_restored_ones_as_back(run, model):
    store = run.store([model])
    store.setup()
    tree = store.tree(model)

    def names(nodes: Any) -> list[str]:
        return sorted(node.name for node in nodes)

    root, other = tree.insert(model(name="root")), tree.insert(model(name="other"))
    inner = tree.insert(model(name="inner"), root.id)
    leaf = tree.insert(model(name="leaf"), inner.id)
    # A node with children is not deleted by itself, whether it is kept or not.
    with pytest.raises(DataError) as raised:
        store.delete(model, inner.id)
    assert "tree-has-children" == raised.value.code
    store.delete(model, leaf.id)
    assert ([], ["inner"]) == (names(tree.children(inner.id)), names(tree.descendants(root.id)))
    assert 3 == tree.count()
    for gone in (
        lambda: tree.path(leaf.id),
        lambda: tree.move(leaf.id, other.id),
        lambda: tree.insert(model(name="new"), leaf.id),
        lambda: tree.remove(leaf.id),
    ):
        with pytest.raises(DataError) as raised:
            gone()
        assert raised.value.code in ("tree-node-missing", "tree-parent-missing")
    # Its name is free, and it can be deleted and come back while its parent moves.
    twin = tree.insert(model(name="leaf"), inner.id)
    tree.remove(twin.id)
    tree.move(inner.id, other.id)
    assert [] == store.verify()
    back = store.restore(model, leaf.id)
    assert ["other", "inner", "leaf"] == [node.name for node in tree.path(back.id)]
    assert ["leaf"] == names(tree.children(inner.id))
    assert (["inner", "leaf"], ["other", "root"]) == (names(tree.descendants(other.id)), names(tree.roots()))
    # A whole subtree goes, and comes back from its top.
    tree.remove(inner.id, children="subtree")
    assert (["inner", "leaf", "leaf"], []) == (
        names(store.find(model, deleted=True)),
        names(tree.descendants(other.id)),
    )
    with pytest.raises(DataError, match="or restore it") as raised:
        store.restore(model, leaf.id)
    assert "tree-parent-missing" == raised.value.code
    store.restore(model, inner.id)
    store.restore(model, leaf.id)
    assert ["other", "inner", "leaf"] == [node.name for node in tree.path(leaf.id)]
    tree.remove(inner.id, children="lift")
    assert ["leaf"] == names(tree.children(other.id))
    assert 2 == store.purge(model)
    assert ([], 0, 3) == (store.verify(), store.repair(), tree.count())
