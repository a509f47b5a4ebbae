"""`treadle rebuild --shadow`, `--undo` and `--finish` on an application's own Store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.invoke import invoke
from tests.upkeep.changed_shop import Before, Review
from treadle import Store

APPLICATION = """
from pymongo import AsyncMongoClient, MongoClient
from tests.upkeep.changed_shop import During, Review
from treadle import AsyncStore, Store
store = Store(MongoClient({uri!r})[{name!r}], [Review, During])

def asynchronous():
    return AsyncStore(AsyncMongoClient({uri!r})[{name!r}], [Review, During])
"""


@pytest.fixture
def folder(server, database, tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APPLICATION.format(uri=server.uri, name=database.name))
    store = Store(database, [Review, Before])
    store.setup()
    one = store.insert(Before())
    store.insert_many([Review(product_id=one.id, rating=rating) for rating in (1, 4)])
    return tmp_path


@pytest.mark.parametrize("app", ["shop:store", "shop:asynchronous"])
def test_a_declaration_is_changed_taken_back_and_ended(folder, database, app):
    def shows() -> int:
        return int(database["products"].find_one()["reviews"])

    assert "rebuild needed: Product.reviews (new)" in invoke(folder, "setup", "--app", app).stdout
    status = invoke(folder, "status", "--app", app).stdout
    assert "run treadle rebuild --shadow" in status
    assert "Product.reviews is building, and shows its old declaration." in status
    built = invoke(folder, "rebuild", "--app", app, "--shadow", "--no-swap", "Product")
    assert (0, "Rebuilt 1 document.\n", 2) == (built.returncode, built.stdout, shows())
    assert 0 == invoke(folder, "rebuild", "--app", app, "--shadow").returncode
    assert 1 == shows()
    assert "--undo until" in invoke(folder, "status", "--app", app).stdout
    undone = invoke(folder, "rebuild", "--app", app, "--undo", "Product.reviews")
    assert ("Product.reviews shows its former values again in 1 document.\n", 2) == (undone.stdout, shows())
    invoke(folder, "rebuild", "--app", app, "--shadow", "--throttle", "100")
    ended = invoke(folder, "rebuild", "--app", app, "--finish", "Product.reviews", "--json")
    assert ({"documents": 1}, 1) == (json.loads(ended.stdout), shows())


def test_what_cannot_be_meant_is_one_sentence(folder):
    twice = invoke(folder, "rebuild", "--app", "shop:store", "--shadow", "--undo", "Product.reviews")
    assert (2, True) == (twice.returncode, "choose one" in twice.stderr)
    unknown = invoke(folder, "rebuild", "--app", "shop:store", "--undo", "Product.nothing")
    assert (2, True) == (unknown.returncode, "no declaration of 'Product.nothing'" in unknown.stderr)
