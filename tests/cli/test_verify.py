"""`treadle setup|teardown|verify|repair|rebuild --app …` on an application's own Store.

Covers: cli/teardown
"""

from __future__ import annotations

import json
import re

import pytest

from treadle import Finding
from treadle.cli.verify import show

APPLICATION = """
from typing import Annotated
from pymongo import AsyncMongoClient, MongoClient
from treadle import AsyncStore, Count, Document, Id, Store

class Review(Document, collection="reviews"):
    product_id: Id

class Product(Document, collection="products"):
    count: Annotated[int, Count(Review, by="product_id")] = 0

models = [Review, Product]
store = Store(MongoClient({uri!r})[{name!r}], models)

def asynchronous():
    return AsyncStore(AsyncMongoClient({uri!r})[{name!r}], models)
"""


@pytest.mark.parametrize("app", ["shop:store", "shop:asynchronous"])
def test_what_a_raw_write_broke_is_found_and_mended(application, database, app):
    done = application("setup", "--app", app, "--dry-run")
    assert "would create collection products" in done.stdout
    assert [] == database.list_collection_names()
    assert 0 == application("setup", "--app", app).returncode
    assert "Everything is as declared." in application("setup", "--app", app).stdout
    product = database["products"].insert_one({"count": 0}).inserted_id
    database["reviews"].insert_many([{"product_id": product}] * 1 + [{"product_id": product}])
    found = application("verify", "--app", app)
    assert 1 == found.returncode
    assert "1 finding." in found.stdout
    listed = json.loads(application("verify", "--app", app, "--json").stdout)
    assert [("computed", "Product", {"$oid": str(product)}, "count", 0, 2)] == [
        tuple(each.values()) for each in listed
    ]
    assert 1 == application("repair", "--app", app, "--dry-run").returncode
    assert "Repaired 1 document." in application("repair", "--app", app, "Product").stdout
    clean = application("verify", "--app", app)
    assert (0, "Every maintained value is right.\n") == (clean.returncode, clean.stdout)
    assert {"rebuilt": 1} == json.loads(application("rebuild", "--app", app, "--json").stdout)


def test_what_looks_like_markup_is_shown_as_it_is(capsys, monkeypatch):
    """The console would swallow "[red]", and fail at "[/x]"."""
    monkeypatch.setenv("COLUMNS", "200")
    show([Finding("subset", "Product", "[/x]", "newest", "[red]", ["[/bold]"])])
    output = capsys.readouterr().out
    assert all(text in output for text in ("[/x]", "[red]", "['[/bold]']"))


LONG = [
    Finding("subset", "Product", f"{number:024}", "newest.0.text", "word " * 9, "b" * 50)
    for number in range(60)
]


def test_many_findings_are_counted_per_rule_first(capsys):
    show([*LONG, Finding("computed", "Product", "1", "count", 0, 1)], limit=3)
    summary, table = capsys.readouterr().out.split("┘", 1)
    assert re.search(r"Product\.newest\.text +│ subset +│ 60 ", summary)
    assert re.search(r"Product\.count +│ computed +│ 1 ", summary)
    assert 3 == len(re.findall("Product 0{23}[012]", table))
    assert "61 findings, 58 of them not shown; see --limit." in table


def test_without_a_terminal_each_row_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    show(LONG[:2])
    rows = [line for line in capsys.readouterr().out.splitlines() if "subset" in line]
    assert 2 == len(rows)
    assert all("newest.0.text" in row and "b" * 50 in row for row in rows)


@pytest.mark.parametrize("columns", ["20", "90"])
def test_on_a_terminal_no_id_is_cut_or_broken(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    show(LONG[:2])
    output = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert all(f"Product {number:024}" in output for number in range(2))
    assert "…" not in output
    assert "Product.newest" not in output


def test_what_documents_hold_steers_no_terminal(application, database):
    application("setup", "--app", "shop:store")
    hostile = {"_id": "\x1b[2J\u202e", "count": "\x07\u2066"}
    database["products"].insert_one(hostile, bypass_document_validation=True)
    for arguments in (("verify",), ("verify", "--json"), ("repair", "--dry-run"), ("status",)):
        done = application(*arguments, "--app", "shop:store")
        assert not {"\x1b", "\x07", "\u202e", "\u2066"} & set(done.stdout + done.stderr), arguments
    application("repair", "--app", "shop:store")


def test_teardown_takes_back_what_setup_and_rebuild_made(application, database) -> None:
    key = database["products"].insert_one({}).inserted_id
    database["reviews"].insert_one({"product_id": key})
    before = database["reviews"].index_information()
    for verb in ("setup", "rebuild"):
        application(verb, "--app", "shop:store")
    assert 1 == database["products"].find_one({})["count"]
    listed = application("teardown", "--app", "shop:asynchronous", "--fields", "--dry-run")
    assert "would drop index reviews: product_id_1" in listed.stdout
    assert {"_id": key, "count": 1} == database["products"].find_one({}, {"_treadle": 0})
    application("teardown", "--app", "shop:store", "--fields")
    assert {"_id": key} == database["products"].find_one({})
    assert before == database["reviews"].index_information()
    assert {"products", "reviews"} == set(database.list_collection_names())
    again = application("teardown", "--app", "shop:store")
    assert "There is nothing to take back." in again.stdout
