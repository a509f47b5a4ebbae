"""`treadle tree` and `treadle rebuild --to` on an application's own Store."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.invoke import invoke
from treadle import AncestorArray, ChildReferences, Document, Id, Store

APPLICATION = """
from pymongo import AsyncMongoClient, MongoClient
from treadle import AncestorArray, AsyncStore, ChildReferences, Document, Id, Store

class Plain(Document, collection="plain"):
    title: str

class Category(Document, collection="categories", tree={tree}):
    name: str
    children: list[Id] = []
    parent_id: Id | None = None
    ancestors: list[Id] = []

store = Store(MongoClient({uri!r})[{name!r}], [Category, Plain])

def asynchronous():
    return AsyncStore(AsyncMongoClient({uri!r})[{name!r}], [Category, Plain])
"""
OLD = 'ChildReferences(children="children")'
NEW = 'AncestorArray(parent="parent_id", ancestors="ancestors")'


class Category(Document, collection="categories", tree=ChildReferences(children="children")):
    name: str
    children: list[Id] = []


class NewCategory(
    Document, collection="categories", tree=AncestorArray(parent="parent_id", ancestors="ancestors")
):
    name: str
    parent_id: Id | None = None
    ancestors: list[Id] = []


@pytest.fixture
def application(server, database, tmp_path: Path):
    """Writes the application with one declaration or another, and runs the command on it."""

    def treadle(*arguments: str, tree: str = OLD) -> subprocess.CompletedProcess[str]:
        (tmp_path / "shop.py").write_text(APPLICATION.format(uri=server.uri, name=database.name, tree=tree))
        return invoke(tmp_path, *arguments, columns=80)

    return treadle


@pytest.fixture
def categories(database):
    store = Store(database, [Category])
    store.setup()
    tree = store.tree(Category)
    top = tree.insert(Category(name="goods"))
    for number in range(12):
        child = tree.insert(Category(name=f"kind {number}"), top.id)
        if number == 1:
            deep = tree.insert(Category(name="[bold]sub\x1b[31m"), child.id)
            tree.insert(Category(name="deepest"), deep.id)
    tree.insert(Category(name="other"))
    return tree


@pytest.mark.parametrize("app", ["shop:store", "shop:asynchronous"])
def test_the_tree_is_drawn_folded_with_counts(application, categories, app):
    done = application("tree", "--app", app, "Category", "--depth", "2", "--width", "3")
    assert (0, "") == (done.returncode, done.stderr)
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert [
        "Category",
        "├── goods (14)",
        "│   ├── kind 0",
        "│   ├── kind 1 (2)",
        "│   │   └── [bold]sub\\x1b[31m (1)",
        "│   │       └── … 1 more",
        "│   ├── kind 2",
        "│   └── … 9 more",
        "└── other",
    ] == lines


def test_the_tree_as_json_and_below_one_node(application, categories):
    (goods, *_) = categories.roots()
    done = application(
        "tree", "--app", "shop:store", "Category", "--root", str(goods.id), "--depth", "0", "--json"
    )
    assert [{"id": {"$oid": str(goods.id)}, "label": "goods", "below": 14, "folded": 14, "children": []}] == (
        json.loads(done.stdout)
    )
    narrow = application("tree", "--app", "shop:store", "Category", "--width", "1", "--depth", "0").stdout
    assert "… more roots, with 1 nodes" in narrow


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Plain"], "declare it with tree="),
        (["Nope"], "no model 'Nope'"),
        (["Category", "--depth", "-1"], "--depth"),
        (["Category", "--label", "nope"], "no field 'nope'"),
        (["Category", "--root", "nope"], "not an id"),
        (["Category", "--root", "0" * 24], "not in the tree"),
    ],
)
def test_bad_arguments_are_told_in_a_sentence(application, arguments, words):
    done = application("tree", "--app", "shop:store", *arguments)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_one_representation_becomes_another_while_writers_go_on(application, categories, database):
    """Declare both, rebuild, drop the old one."""
    refused = application("rebuild", "--app", "shop:store", "Category", "--to", "ancestor-array")
    assert 2 == refused.returncode
    assert "declare the present pattern first" in refused.stderr
    both = f"[{OLD}, {NEW}]"
    listed = application("rebuild", "--app", "shop:store", "--to", "ancestor-array", "--dry-run", tree=both)
    assert 1 == listed.returncode
    done = application("rebuild", "--app", "shop:store", "--to", "ancestor-array", tree=both)
    assert (0, "Rebuilt 16 documents.\n") == (done.returncode, done.stdout)
    assert 0 == application("verify", "--app", "shop:store", tree=both).returncode
    assert 0 == application("verify", "--app", "shop:store", tree=NEW).returncode
    new = Store(database, [NewCategory]).tree(NewCategory)
    for node in database["categories"].find({}, {"_id": 1}):
        assert [each.id for each in categories.ancestors(node["_id"])] == [
            each.id for each in new.ancestors(node["_id"])
        ]
