"""The demo does what it says, and leaves nothing behind."""

from __future__ import annotations

import io
import re
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from rich.console import Console

from treadle.commands import demo
from treadle.commands.demo import MODELS, STEPS, Customer, Order, Product, Shop
from treadle.sync_api import Store

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def shop(database: Any) -> Shop:
    return Shop(Store(database, MODELS), NOW)


def test_demo_numbers_its_steps_and_removes_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shown = io.StringIO()
    stored: list[Any] = []

    def wait() -> None:
        uri = re.findall(r'mongosh "(.*)"', shown.getvalue())[0]
        with MongoClient[dict[str, Any]](uri) as client:
            stored.extend(client.get_default_database().orders.find())

    steps = demo.demo(Console(file=shown, width=80), wait=wait, now=lambda: NOW)
    assert len(STEPS) + 2 == len(steps)
    for number, step in enumerate(steps, 1):
        assert f"{number}. {step.title}\n" in shown.getvalue()
        assert step.told
    assert ["paid"] == [order["status"] for order in stored]
    assert [] == list(tmp_path.iterdir())


def test_the_steps_write_what_they_tell(shop: Shop) -> None:
    told = {step.__name__: "\n".join(step(shop)) for _, step in STEPS}
    assert "finds 0 things" in told["set_up"]
    assert ["email_1"] == [
        name for name in shop.store.collection(Customer).index_information() if name != "_id_"
    ]
    assert "Yarn 90, orders 1" in told["order_too_much"]
    assert {"Shuttle": 3, "Yarn": 90} == {each.name: each.stock for each in shop.store.find(Product)}
    assert 2 == len(told["refuse_bad_documents"].splitlines())
    assert "2026-01-02: paid" in told["read_back"]
    assert "'Ada Byron'" in told["copy_and_rename"]
    assert "5 reviews, 3.0 on average; newest: 'lovely' (5), 'too red' (4)" in told["review"]
    assert "Product review_count: 99, expected 5" in told["verify_and_repair"]
    assert "mended 2 documents; verify() now finds 0" in told["verify_and_repair"]


def test_placing_an_order_is_all_or_nothing(shop: Shop) -> None:
    demo.set_up(shop)
    demo.insert(shop)
    with pytest.raises(demo.OutOfStock):
        demo.place(shop, "Ben", {"Yarn": 1, "Shuttle": 6})
    assert (100, 0) == (demo.stock(shop, "Yarn"), shop.store.count(Order))
