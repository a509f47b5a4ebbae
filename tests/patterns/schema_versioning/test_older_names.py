"""Writes that find their documents by what an older version calls them."""

from __future__ import annotations

from typing import Annotated, Any

import pytest

from treadle import AncestorArray, Count, DataError, Document, Limits, ParentReference, Store, migration


class Ticket(Document, collection="tickets", version=2):
    id: int
    list_id: str
    state: str
    note: str = ""


@migration(Ticket, from_version=1)
def _state(document: dict[str, Any]) -> dict[str, Any]:
    document["state"] = "closed" if document.pop("closed") else "open"
    return document


class Listed(Document, collection="lists"):
    id: str
    open: Annotated[int, Count(Ticket, by="list_id", where={"state": "open"})] = 0


@pytest.mark.parametrize("models", [[Ticket], [Ticket, Listed]], ids=["plain", "counted"])
def test_an_update_by_an_older_name_is_applied(run, database, models):
    """Once, to each document that matched as it was stored, and what it feeds follows."""
    store = run.store(models)
    if Listed in models:
        store.insert(Listed(id="a"))
    old = [{"_id": number, "list_id": "a", "closed": number < 4} for number in range(5)]
    database["tickets"].insert_many(old)
    store.rebuild()
    after = store.update(Ticket, {"closed": True, "_id": {"$lt": 2}}, {"$set": {"state": "open"}})
    assert "open" == after.state
    assert 3 == store.update_many(Ticket, {"closed": True}, {"$set": {"state": "open", "note": "again"}})
    states = [
        (row["state"], row.get("note", "")) for row in database["tickets"].find({"state": {"$exists": True}})
    ]
    assert [("open", "")] + [("open", "again")] * 3 == sorted(states)
    assert 0 == store.update_many(Ticket, {"closed": True}, {"$set": {"note": "gone"}})
    assert store.update(Ticket, {"closed": True}, {"$set": {"note": "gone"}}) is None
    if Listed in models:
        assert 5 == store.get(Listed, "a").open
        assert [] == store.verify()


def test_what_matches_in_both_versions_is_updated_once(run, database):
    store = run.store([Ticket])
    database["tickets"].insert_many(
        [
            {"_id": 1, "list_id": "a", "note": "", "closed": True},
            {"_id": 2, "list_id": "a", "note": "", "state": "open", "schema_version": 2},
        ]
    )
    assert 2 == store.update_many(Ticket, {"list_id": "a"}, [{"$set": {"note": {"$concat": ["$note", "x"]}}}])
    assert ["x", "x"] == [row["note"] for row in database["tickets"].find()]


TREES = {
    "parent": {"tree": ParentReference(parent="parent_id")},
    "ancestors": {"tree": AncestorArray(parent="parent_id", ancestors="ancestors")},
}


@pytest.mark.parametrize("kind", TREES)
def test_a_node_whose_parent_was_renamed_is_moved(run, database, kind):
    class Node(Document, collection="nodes", version=2, **TREES[kind]):
        id: int
        parent_id: int | None = None
        ancestors: list[int] = []

    @migration(Node, from_version=1)
    def _parent(document: dict[str, Any]) -> dict[str, Any]:
        document["parent_id"] = document.pop("up")
        document["ancestors"] = document.pop("line")
        return document

    store = run.store([Node])
    store.setup()
    database["nodes"].insert_many(
        [
            {"_id": 1, "up": None, "line": []},
            {"_id": 2, "up": 1, "line": [1]},
            {"_id": 3, "up": 2, "line": [1, 2]},
            {"_id": 4, "up": None, "line": []},
        ]
    )
    tree = store.tree(Node)
    with pytest.raises(DataError):
        tree.remove(1)
    assert 4 == tree.move(2, 4).parent_id
    row = database["nodes"].find_one({"_id": 2})
    assert (4, False) == (row["parent_id"], "up" in row)
    assert [4, 2, 3] == [each.id for each in tree.path(3)]
    made = tree.insert(Node(id=5), parent=3)
    assert 3 == made.parent_id
    assert [4, 2, 3, 5] == [each.id for each in tree.path(5)]
    assert [] == store.verify()


def test_a_tree_of_many_older_nodes_is_to_be_migrated_first(run, database):
    class Node(Document, collection="many", version=2, tree=ParentReference(parent="parent_id")):
        id: int
        parent_id: int | None = None

    @migration(Node, from_version=1)
    def _parent(document: dict[str, Any]) -> dict[str, Any]:
        document["parent_id"] = document.pop("up")
        return document

    store = run.store([Node], limits=Limits(upgrade_chunk=2))
    store.setup()
    database["many"].insert_many([{"_id": number, "up": None} for number in range(4)])
    with pytest.raises(DataError) as caught:
        store.tree(Node).move(1, 2)
    assert "tree-outdated" == caught.value.code
    store.migrate(Node)
    assert 2 == store.tree(Node).move(1, 2).parent_id


class Case(Document, collection="cases", version=2):
    id: int
    state: str
    note: str = ""


@migration(Case, from_version=1, fields=("closed", "state"))
def _case_state(document: dict[str, Any]) -> dict[str, Any]:
    document["state"] = "closed" if document.pop("closed") else "open"
    return document


WRITES = {
    "update": lambda store: store.update(Case, 1, {"$set": {"note": "x"}}),
    "delete": lambda store: store.delete(Case, {"_id": 1, "state": "closed"}),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_document_that_is_migrated_between_two_looks_is_written(database, write):
    """The first look is at current documents; the second one must see it in either form."""
    store = Store(database, [Case])
    store.setup()
    database["cases"].insert_one({"_id": 1, "closed": True})
    real, looked = store.runner._perform, []

    def perform(command: Any, *rest: Any) -> Any:
        answer = real(command, *rest)
        if getattr(command, "method", "").startswith("find_one_and") and not looked:
            looked.append(answer)
            current = {"state": "closed", "schema_version": 2}
            database["cases"].update_one({"_id": 1}, {"$set": current, "$unset": {"closed": 1}})
        return answer

    store.runner._perform = perform  # type: ignore[method-assign]
    assert WRITES[write](store) is not None
    assert [None] == looked
    assert ["x"] * (write == "update") == [each["note"] for each in database["cases"].find()]
