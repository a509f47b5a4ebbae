"""Trees: one shelf of categories in all four representations, behind one interface.

Parent references, child references, the array of ancestors and materialized
paths store different things and answer the same questions. Most applications
want the array of ancestors.
"""

from __future__ import annotations

from typing import Any

from examples.story import show, step, tell, verified

from treadle import (
    AncestorArray,
    ChildReferences,
    Document,
    MaterializedPath,
    ParentReference,
    Store,
    UsageError,
)


class ByParent(Document, collection="categories_by_parent", tree=ParentReference(parent="parent")):
    id: str
    parent: str | None = None


class ByChildren(Document, collection="categories_by_children", tree=ChildReferences(children="children")):
    id: str
    children: list[str] = []


class ByAncestors(
    Document, collection="categories", tree=AncestorArray(parent="parent", ancestors="ancestors")
):
    id: str
    parent: str | None = None
    ancestors: list[str] = []


class ByPath(Document, collection="categories_by_path", tree=MaterializedPath(path="path", segment="name")):
    id: str
    name: str
    path: str = ""


MODELS: list[type[Any]] = [ByParent, ByChildren, ByAncestors, ByPath]

PARENTS = {
    "Books": None,
    "Programming": "Books",
    "Databases": "Programming",
    "Languages": "Programming",
    "MongoDB": "Databases",
    "dbm": "Databases",
}


def story(store: Store) -> None:
    store.setup()
    for model in MODELS:
        step(f"{model.__name__}: six categories")
        tree = store.tree(model)
        for name, parent in PARENTS.items():
            tree.insert(
                ByPath(id=name, name=name) if model is ByPath else model.model_validate({"_id": name}),
                parent=parent,
            )
        show(store.collection(model).name, store.collection(model).find({}, {"_treadle": 0}))

        assert ["Books", "Programming", "Databases"] == [node.id for node in tree.ancestors("MongoDB")]
        assert ["Databases", "Languages"] == sorted(node.id for node in tree.children("Programming"))
        assert {"Databases", "Languages", "MongoDB", "dbm"} == {
            node.id for node in tree.descendants("Programming")
        }
        assert 3 == tree.depth("dbm")

        # The books about databases become books about languages; what is below goes along.
        tree.move("Databases", "Languages")
        assert ["Books", "Programming", "Languages", "Databases", "dbm"] == [
            node.id for node in tree.path("dbm")
        ]
        try:
            tree.move("Programming", "dbm")
        except UsageError as error:
            print(f"  no circles: {error}")
        else:
            raise AssertionError("Programming is below itself")
        tree.move("Databases", "Programming")

    step("Somebody moves a category by hand, and forgets what is below it")
    store.collection(ByAncestors).update_one({"_id": "Databases"}, {"$set": {"parent": "Books"}})
    assert 3 == verified(store)
    store.repair()
    assert 0 == verified(store)
    assert ["Books", "Databases"] == store.require(ByAncestors, "dbm").ancestors
    store.tree(ByAncestors).move("Databases", "Programming")


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
