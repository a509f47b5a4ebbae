"""`treadle archive` on an application's own Store."""

from __future__ import annotations

import json

from tests.cli.invoke import invoke

APPLICATION = """
from datetime import datetime, timedelta
from pymongo import MongoClient
from treadle import Archive, Document, Store

class Sale(Document, collection="sales", archive=Archive(by="date", after=timedelta(days=365), into="old_sales")):
    date: datetime | None = None

class Shop(Document, collection="shops"):
    name: str

store = Store(MongoClient({uri!r})[{name!r}], [Sale, Shop])
"""


def test_old_documents_move(folder, database):
    import datetime as dt

    database.sales.insert_many([{"date": dt.datetime(2001, 1, 1)}, {"date": dt.datetime(2901, 1, 1)}, {}])
    asked = ("archive", "--app", "shop:store")
    assert "Sale: 1 would move." == invoke(folder, *asked, "--dry-run").stdout.strip()
    assert 3 == database.sales.count_documents({})
    assert {"Sale": 1} == json.loads(invoke(folder, *asked, "--json", "--throttle", "1000").stdout)
    assert (2, 1) == (database.sales.count_documents({}), database.old_sales.count_documents({}))
    done = invoke(folder, *asked, "Shop")
    assert 2 == done.returncode
    assert "Sale" in done.stderr
