"""The four tree representations beside each other, and beside the same queries written by hand.

One forest per representation: 56,000 nodes, eight levels, with subtrees of
10, 1,000 and 50,000 nodes. "By hand" is the same query with PyMongo, and
Pydantic for the models, because Treadle gives models too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from bson import ObjectId
from pymongo import MongoClient
from pymongo.database import Database

from benchmarks.harness import Contender, Context, Goal, Group
from treadle import (
    AncestorArray,
    ChildReferences,
    Document,
    Id,
    MaterializedPath,
    ParentReference,
    Store,
)

DATABASE = "treadle_benchmarks_trees"
BRANCHES = 5
SIZES = (10, 1_000, 50_000)
SIZES_QUICK = (10, 100, 1_000)
# What is beside them, and so many nodes are loaded at once.
REST, REST_QUICK = 5_000, 800
LOADED, LOADED_QUICK = 20_000, 800
# One whole tree by hand takes seven seconds where nodes list their children.
SLOW_ROUNDS_MAX = 1


class Array(Document, collection="arrays", tree=AncestorArray(parent="parent_id", ancestors="ancestors")):
    name: str
    parent_id: Id | None = None
    ancestors: list[Id] = []


class Pathed(Document, collection="paths", tree=MaterializedPath(path="path", segment="name")):
    name: str
    path: str = ""


class Parented(Document, collection="parents", tree=ParentReference(parent="parent_id")):
    name: str
    parent_id: Id | None = None


class Listed(Document, collection="lists", tree=ChildReferences(children="children")):
    name: str
    children: list[Id] = []


MODELS: list[Any] = [Array, Pathed, Parented, Listed]
TITLES = {
    Array: "ancestor array",
    Pathed: "materialized path",
    Parented: "parent reference",
    Listed: "child references",
}


def groups() -> list[Group]:
    """Reads, inserts, moves and bulk loads; the names are the rows of the table in the documentation."""
    rounds = (15, 9, 3)
    reads = [
        Group("trees", f"descendants, {_name(n)} subtree", _descendants(n), rounds=rounds[n])
        for n in range(3)
    ]
    moves = [Group("trees", f"move, {_name(n)} subtree", _move(n), rounds=(15, 9, 2)[n]) for n in range(3)]
    return [
        Group("trees", "ancestors of a node at depth 8", _ancestors),
        *reads,
        Group("trees", "insert of a node, small and large tree", _insert, rounds=9),
        *moves,
        Group("trees", "bulk load, time per node", _bulk, rounds=1),
    ]


def _name(number: int) -> str:
    return ("small", "medium", "large")[number]


class Forest:
    """One tree per representation, the same in all, with nodes whose subtrees have known sizes."""

    def __init__(self, context: Context) -> None:
        self.client: MongoClient[Any] = MongoClient(context.uri)
        self.client.drop_database(DATABASE)
        self.database: Database[Any] = self.client[DATABASE]
        self.store = Store(self.database, MODELS)
        self.store.setup()
        self.sizes = SIZES_QUICK if context.quick else SIZES
        self.shape = shape([*self.sizes, context.scale(REST, REST_QUICK)])
        for model in MODELS:
            self.store.insert_many(nodes(model, self.shape))
        # The last node of the largest subtree is one of the deepest.
        self.tops = [ObjectId(f"{number + 2:024x}") for number in range(len(self.sizes))]
        self.deepest = self.shape[-1][0] if context.quick else self._deepest()
        self.other = ObjectId(f"{len(self.sizes) + 2:024x}")

    def close(self) -> None:
        self.client.drop_database(DATABASE)
        self.client.close()

    def _deepest(self) -> ObjectId:
        parents = dict(self.shape)
        depths: dict[Any, int] = {None: -1}
        for key, parent in self.shape:
            depths[key] = depths[parent] + 1
        return max(parents, key=lambda key: depths[key])


_PLANTED: dict[tuple[str, bool], Forest] = {}


def planted(context: Context) -> Forest:
    """The forest of this run: planting it takes longer than measuring, so the groups share it."""
    key = (context.uri, context.quick)
    if key not in _PLANTED:
        _PLANTED[key] = Forest(context)
    return _PLANTED[key]


def shape(sizes: Sequence[int]) -> list[tuple[ObjectId, ObjectId | None]]:
    """(id, parent) of a root, one node per size below it, and so many nodes below each of these."""
    numbers = count(1)

    def new() -> ObjectId:
        return ObjectId(f"{next(numbers):024x}")

    root = new()
    made: list[tuple[ObjectId, ObjectId | None]] = [(root, None)]
    tops = [new() for _ in sizes]
    made += [(top, root) for top in tops]
    for top, size in zip(tops, sizes, strict=True):
        level, left = [top], size
        while left:
            below = []
            for parent in level:
                for _ in range(min(BRANCHES, left)):
                    below.append(new())
                    made.append((below[-1], parent))
                left -= min(BRANCHES, left)
            level = below
    return made


def nodes(model: Any, made: Sequence[tuple[ObjectId, ObjectId | None]]) -> list[Any]:
    """Documents that say their places in the way of their representation."""
    if model is Pathed:
        paths: dict[Any, str] = {None: ","}
        documents = []
        for key, parent in made:
            name = f"n{int(str(key), 16)}"
            paths[key] = f"{paths[parent]}{name},"
            documents.append(Pathed(id=key, name=name, path=paths[key]))
        return documents
    if model is Listed:
        below: dict[Any, list[ObjectId]] = {}
        for key, parent in made:
            below.setdefault(parent, []).append(key)
        return [Listed(id=key, name=f"n{key}", children=below.get(key, [])) for key, _ in made]
    return [model(id=key, name=f"n{key}", parent_id=parent) for key, parent in made]


# -- by hand ---------------------------------------------------------------------------------


def _graph(collection: str, start: str, come: str, go: str, depth: bool = False) -> dict[str, Any]:
    stage = {
        "from": collection,
        "startWith": start,
        "connectFromField": come,
        "connectToField": go,
        "as": "n",
    }
    return {"$graphLookup": {**stage, **({"depthField": "d"} if depth else {})}}


def ancestors_by_hand(database: Database[Any], model: Any, key: Any) -> list[Any]:
    collection = database[model.__treadle__.collection]
    if model is Array:
        above = collection.find_one({"_id": key})["ancestors"]
        found = {each["_id"]: each for each in collection.find({"_id": {"$in": above}})}
        return [model.model_validate(found[each]) for each in above]
    if model is Pathed:
        segments = collection.find_one({"_id": key})["path"][1:-1].split(",")
        above = ["," + ",".join(segments[:n]) + "," for n in range(1, len(segments))]
        return [
            model.model_validate(each) for each in collection.find({"path": {"$in": above}}).sort("path", 1)
        ]
    if model is Parented:
        graph = _graph("parents", "$parent_id", "parent_id", "_id", depth=True)
    else:
        graph = _graph("lists", "$_id", "_id", "children", depth=True)
    (node,) = collection.aggregate([{"$match": {"_id": key}}, graph])
    return [model.model_validate(each) for each in sorted(node["n"], key=lambda each: -each["d"])]


def descendants_by_hand(database: Database[Any], model: Any, key: Any) -> list[Any]:
    collection = database[model.__treadle__.collection]
    cursor: Any
    if model is Array:
        cursor = collection.find({"ancestors": key})
    elif model is Pathed:
        path = collection.find_one({"_id": key})["path"]
        cursor = collection.find({"path": {"$gt": path, "$lt": path[:-1] + "-"}})
    else:
        if model is Parented:
            graph = _graph("parents", "$_id", "_id", "parent_id")
        else:
            graph = _graph("lists", "$children", "children", "_id")
        unwound = [{"$unwind": "$n"}, {"$replaceRoot": {"newRoot": "$n"}}]
        cursor = collection.aggregate([{"$match": {"_id": key}}, graph, *unwound])
    return [model.model_validate(each) for each in cursor]


# -- groups ------------------------------------------------------------------------------------


def _pairs(
    forest: Forest, by_hand: Callable[..., list[Any]], call: str, key: Any, expected: int, times: int
) -> list[Contender]:
    contenders = []
    for model in MODELS:
        tree = forest.store.tree(model)

        def hand(_: Any, model: Any = model) -> Any:
            for _ in range(times):
                found = by_hand(forest.database, model, key)
            return found

        def treadle(_: Any, tree: Any = tree) -> Any:
            for _ in range(times):
                found = list(getattr(tree, call)(key))
            return found

        def check(found: Any) -> None:
            assert expected == len(found), f"{expected} expected, {len(found)} found"

        name = f"{TITLES[model]}, by hand"
        slow = SLOW_ROUNDS_MAX if model is Listed and expected >= SIZES[-1] else None
        contenders.append(Contender(name, lambda: None, hand, times, check=check, rounds_max=slow))
        contenders.append(
            Contender(
                f"{TITLES[model]}, Treadle",
                lambda: None,
                treadle,
                times,
                baseline=name,
                goal=Goal(1.1),
                check=check,
            )
        )
    return contenders


def _ancestors(context: Context) -> list[Contender]:
    forest = planted(context)
    above = len(forest.store.tree(Array).ancestors(forest.deepest))
    return _pairs(forest, ancestors_by_hand, "ancestors", forest.deepest, above, context.scale(30, 10))


def _descendants(number: int) -> Callable[[Context], list[Contender]]:
    def make(context: Context) -> list[Contender]:
        forest = planted(context)
        times = (context.scale(40, 5), context.scale(5, 2), 1)[number]
        size = forest.sizes[number]
        return _pairs(forest, descendants_by_hand, "descendants", forest.tops[number], size, times)

    return make


def _insert(context: Context) -> list[Contender]:
    """Below a node of a small tree, and below one of the large tree, which must cost the same."""
    forest = planted(context)
    small = Store(forest.client[DATABASE + "_small"], MODELS)
    context.stack.callback(lambda: forest.client.drop_database(DATABASE + "_small"))
    small.setup()
    times = context.scale(50, 10)
    numbers = count()
    contenders = []
    for model in MODELS:
        small.insert_many(nodes(model, shape([10, 10, 10, 10])))
        first = f"{TITLES[model]}, 45 nodes"
        for name, store in ((first, small), (f"{TITLES[model]}, large tree", forest.store)):

            def work(parent: Any, store: Store = store, model: Any = model) -> None:
                tree = store.tree(model)
                for _ in range(times):
                    tree.insert(model(name=f"x{next(numbers)}"), parent)

            def prepare(store: Store = store, model: Any = model) -> Any:
                # A new parent each time, so that no list grows long.
                return store.tree(model).insert(model(name=f"p{next(numbers)}"), forest.other).id

            goal = Goal(1.2) if store is forest.store else None
            contenders.append(Contender(name, prepare, work, times, baseline=first, goal=goal))
    return contenders


def _move(number: int) -> Callable[[Context], list[Contender]]:
    def make(context: Context) -> list[Contender]:
        forest = planted(context)
        top, root = forest.tops[number], forest.shape[0][0]
        contenders = []
        for model in MODELS:
            places = iter([forest.other, root] * 1000)

            def work(parent: Any, model: Any = model) -> Any:
                return forest.store.tree(model).move(top, parent)

            contenders.append(Contender(TITLES[model], lambda places=places: next(places), work))
        return contenders

    return make


def _bulk(context: Context) -> list[Contender]:
    forest = planted(context)
    # The last group: it takes the forest down.
    context.stack.callback(lambda: _PLANTED.pop((context.uri, context.quick)).close())
    few = context.scale(300, 40)
    made = shape([context.scale(LOADED, LOADED_QUICK)])
    contenders = []
    for model in MODELS:
        collection = forest.database[model.__treadle__.collection]

        def load(documents: Any) -> Any:
            return forest.store.insert_many(documents)

        def prepare(model: Any = model, collection: Any = collection) -> Any:
            collection.delete_many({})
            return nodes(model, made)

        def one_by_one(some: Any, model: Any = model) -> None:
            tree = forest.store.tree(model)
            for key, parent in some:
                tree.insert(model(id=key, name=f"n{key}"), parent)

        def some(collection: Any = collection) -> Any:
            collection.delete_many({})
            return made[:1] + [(key, made[0][0]) for key, _ in made[1:few]]

        first = f"{TITLES[model]}, one by one"
        contenders.append(Contender(first, some, one_by_one, few))
        contenders.append(
            Contender(
                f"{TITLES[model]}, insert_many",
                prepare,
                load,
                len(made),
                baseline=first,
                goal=Goal(1 / 20),
            )
        )
    return contenders


# -- the table of the documentation -----------------------------------------------------------

PAGE = Path(__file__).parent.parent / "docs" / "trees.md"
HEAD = f"| milliseconds | {' | '.join(TITLES.values())} |"
ADVICE = "- **Ancestor Array** unless"
# The row's title, the group that it comes from, and what follows the representation in a contender's name.
ROWS = (
    ("ancestors of a node at depth 8", "ancestors of a node at depth 8", ", Treadle"),
    ("descendants, 10", "descendants, small subtree", ", Treadle"),
    ("descendants, 1,000", "descendants, medium subtree", ", Treadle"),
    ("descendants, 50,000", "descendants, large subtree", ", Treadle"),
    ("insert of a node", "insert of a node, small and large tree", ", large tree"),
    ("move of 10", "move, small subtree", ""),
    ("move of 1,000", "move, medium subtree", ""),
    ("move of 50,000", "move, large subtree", ""),
    ("bulk load, per node", "bulk load, time per node", ", insert_many"),
)


def page_table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of the table in docs/trees.md, from the results of a run as JSON has them."""
    medians = {
        (each["work"], each["contender"]): each["microseconds"]["median"] / 1000
        for each in results
        if each["group"] == "trees"
    }
    lines = [HEAD, f"|{' --- |' * (len(TITLES) + 1)}"]
    for title, work, suffix in ROWS:
        shown = [_milliseconds(medians[work, name + suffix]) for name in TITLES.values()]
        lines.append(f"| {title} | {' | '.join(shown)} |")
    return lines


def _milliseconds(value: float) -> str:
    digits = 2 if value < 1 else 1 if value < 10 else 0
    return f"{float(f'{value:.2g}'):,.{digits}f}"


def write_page(results: Path, page: Path = PAGE) -> None:
    """Put the figures of a run into the documentation: before the advice, or in the place of older ones."""
    lines = page.read_text(encoding="utf-8").split("\n")
    entries = json.loads(results.read_text(encoding="utf-8"))["entries"]
    table = [*page_table([each for entry in entries for each in entry["results"]]), ""]
    if HEAD in lines:
        start = lines.index(HEAD)
        end = start + lines[start:].index("") + 1
    else:
        start = end = next(number for number, line in enumerate(lines) if line.startswith(ADVICE))
    page.write_text("\n".join([*lines[:start], *table, *lines[end:]]), encoding="utf-8")


if __name__ == "__main__":
    # python -m benchmarks.trees RESULTS.json
    write_page(Path(sys.argv[1]))
