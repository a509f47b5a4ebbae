"""Trees to test with: one model per representation, and a dict of parents that says what is right."""

from __future__ import annotations

from typing import Annotated, Any

from bson import ObjectId
from pydantic import BaseModel

from treadle import (
    AncestorArray,
    ChildReferences,
    Count,
    Document,
    ExtendedReference,
    Formula,
    Id,
    MaterializedPath,
    ParentReference,
)
from treadle.graph.calls import HierarchyRule, rule_of
from treadle.patterns.tree.rule import TreeRule
from treadle.patterns.tree.tree import Tree


class Array(Document, collection="arrays", tree=AncestorArray(parent="parent_id", ancestors="ancestors")):
    name: str
    parent_id: Id | None = None
    ancestors: list[Id] = []


class Pathed(Document, collection="paths", tree=MaterializedPath(path="path", segment="name")):
    name: str
    path: str = ""


class PathedUp(
    Document,
    collection="paths_up",
    tree=MaterializedPath(path="path", segment="name", parent="parent_id"),
):
    name: str
    parent_id: Id | None = None
    path: str = ""


class Parented(Document, collection="parents", tree=ParentReference(parent="parent_id")):
    name: str
    parent_id: Id | None = None


class Listed(Document, collection="lists", tree=ChildReferences(children="children")):
    name: str
    children: list[Id] = []


class Place(BaseModel):
    parent: int | None = None
    above: list[int] = []


class Deep(
    Document,
    collection="deep",
    naming="camel",
    tree=AncestorArray(parent="where_it_is.parent", ancestors="where_it_is.above"),
):
    """Fields in a nested model, stored under other names, and ids of another type."""

    id: int
    name: str
    where_it_is: Place = Place()


class Counted(Document, collection="counted", tree=AncestorArray(parent="parent_id", ancestors="ancestors")):
    """A tree whose own fields feed other patterns."""

    name: str
    parent_id: Id | None = None
    ancestors: list[Id] = []
    children: Annotated[int, Count("Counted", by="parent_id")] = 0
    below: Annotated[int, Count("Counted", by="ancestors")] = 0
    parent_name: Annotated[str | None, ExtendedReference("Counted", by="parent_id", field="name")] = None
    depth: Annotated[int | None, Formula({"$size": "$ancestors"})] = None


FOUR = [Array, Pathed, Parented, Listed]
ALL = [Array, Pathed, PathedUp, Parented, Listed, Deep, Counted]


def make(model: type[Document], number: int, name: str) -> Any:
    """A new node; its id goes up with its number."""
    return model(id=key(model, number), name=name)


def key(model: type[Document], number: int) -> Any:
    return number if model is Deep else ObjectId(f"{number:024x}")


def state_parent(model: type[Document], document: Any, parent: Any) -> bool:
    """Let a node's own fields say where it goes; False where they cannot."""
    if hasattr(document, "parent_id"):
        document.parent_id = parent
        return True
    if model is Deep:
        document.where_it_is = Place(parent=parent)
        return True
    return parent is None


class Oracle:
    """What a forest should be: who is whose parent, and in which order children came."""

    def __init__(self) -> None:
        self.parents: dict[Any, Any] = {}
        self.names: dict[Any, str] = {}
        self.order: dict[Any, list[Any]] = {None: []}

    def add(self, node: Any, name: str, parent: Any = None) -> None:
        self.parents[node], self.names[node] = parent, name
        self.order[node] = []
        self.order[parent].append(node)

    def move(self, node: Any, parent: Any) -> None:
        if self.parents[node] != parent:
            self.order[self.parents[node]].remove(node)
            self.order[parent].append(node)
            self.parents[node] = parent

    def drop(self, node: Any) -> None:
        self.order[self.parents[node]].remove(node)
        del self.parents[node], self.names[node], self.order[node]

    def lift(self, node: Any) -> None:
        siblings = self.order[self.parents[node]]
        at = siblings.index(node)
        siblings[at:at] = self.order[node]
        for child in self.order[node]:
            self.parents[child] = self.parents[node]
        self.order[node] = []
        self.drop(node)

    def above(self, node: Any) -> list[Any]:
        """Root first."""
        chain: list[Any] = []
        while (node := self.parents[node]) is not None:
            assert node not in chain
            chain.append(node)
        return chain[::-1]

    def below(self, node: Any) -> set[Any]:
        found: set[Any] = set()
        for child in self.order[node]:
            found |= {child} | self.below(child)
        return found

    def path(self, node: Any) -> str:
        return "," + "".join(self.names[each] + "," for each in [*self.above(node), node])

    def taken(self, parent: Any, name: str, but: Any = None) -> bool:
        """Whether a sibling has this name."""
        return any(self.names[each] == name for each in self.order[parent] if each != but)


def shown(model: type[Document], documents: list[dict[str, Any]]) -> dict[Any, Any]:
    """The tree's fields of stored documents, by id."""
    fields = {
        Array: ["parent_id", "ancestors"], Pathed: ["path"], PathedUp: ["parent_id", "path"],
        Parented: ["parent_id"], Listed: ["children"], Deep: ["whereItIs"],
        Counted: ["parent_id", "ancestors", "children", "below", "parent_name", "depth"],
    }[model]  # fmt: skip
    return {each["_id"]: {field: each.get(field) for field in fields} for each in documents}


def right(model: type[Document], oracle: Oracle) -> dict[Any, Any]:
    """What `shown` should show."""
    found: dict[Any, Any] = {}
    for node, parent in oracle.parents.items():
        above, own = oracle.above(node), oracle.order[node]
        found[node] = {
            Array: {"parent_id": parent, "ancestors": above},
            Pathed: {"path": oracle.path(node)},
            PathedUp: {"parent_id": parent, "path": oracle.path(node)},
            Parented: {"parent_id": parent},
            Listed: {"children": own},
            Deep: {"whereItIs": {"parent": parent, "above": above}},
            Counted: {
                "parent_id": parent,
                "ancestors": above,
                "children": len(own),
                "below": len(oracle.below(node)),
                "parent_name": None if parent is None else oracle.names[parent],
                "depth": len(above),
            },
        }[model]
    return found


def tree_of(entry: Any) -> Tree:
    """What the plans of a model's tree take."""
    rule = rule_of(entry, HierarchyRule)
    assert isinstance(rule, TreeRule)
    return rule.tree


def plant(store: Any, model: type[Document], shape: dict[str, Any], parent: Any = None) -> dict[str, Any]:
    """Insert a tree that is written as nested dicts of names; the ids by name."""
    tree = store.tree(model)
    ids: dict[str, Any] = {}
    for name, below in shape.items():
        node = model(name=name) if model is not Deep else Deep(id=store.count(Deep) + 1, name=name)
        ids[name] = tree.insert(node, parent).id
        ids |= plant(store, model, below, ids[name])
    return ids


def names(nodes: Any) -> list[str]:
    return [each.name for each in nodes]
