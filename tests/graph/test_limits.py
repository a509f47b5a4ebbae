"""Limits: one value with every bound, on the Store."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import pytest

from treadle import AsyncStore, Count, Document, Id, Limits, Outlier, Store, UsageError
from treadle.graph.graph import Graph

ROOT = Path(__file__).parent.parent.parent
NAMES = [field.name for field in fields(Limits)]


class Note(Document, collection="notes"):
    text: str
    likes: Annotated[int, Count("Like", by="note_id")] = 0
    tags: Annotated[list[str], Outlier(limit=10, overflow="note_tags")] = []


class Like(Document, collection="likes"):
    note_id: Id


@pytest.mark.parametrize("value", [0, -1, 2.5, math.nan, math.inf, True, None, "1"])
def test_a_bound_is_a_whole_number_above_0(value: Any) -> None:
    with pytest.raises(UsageError, match="insert_max") as caught:
        Limits(insert_max=value)
    assert "limits-invalid" == caught.value.code


@pytest.mark.parametrize("value", [0, -0.1, math.nan, math.inf, True, None, "1"])
def test_a_wait_is_a_number_above_0(value: Any) -> None:
    with pytest.raises(UsageError, match="worker_lease_seconds"):
        Limits(worker_lease_seconds=value)
    assert (1, 0.5) == (
        Limits(worker_lease_seconds=1).worker_lease_seconds,
        Limits(worker_lease_seconds=0.5).worker_lease_seconds,
    )


def test_limits_are_reached_from_every_model_and_rule() -> None:
    """Also from those of the collections that a pattern keeps beside the models' own."""
    limits = Limits(insert_max=7)
    graph = Graph([Note, Like], limits=limits)
    assert limits is graph.limits
    assert all(entry.limits is limits for entry in [*graph.entries.values(), *graph.sides.values()])
    assert graph.rules
    assert all(rule.target.limits is limits for rule in graph.rules)
    assert Limits() == Graph([Note, Like]).limits


def test_what_is_no_limits_is_refused(database: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Store(database, [Note, Like], limits={"insert_max": 7})
    assert "limits-invalid" == caught.value.code


def test_every_way_to_make_a_store_takes_limits(server: Any, database: Any) -> None:
    base, _, options = server.uri.partition("?")
    uri = f"{base}{database.name}?{options}"
    limits = Limits(find_page=3)
    with Store.open(uri, [Note, Like], limits=limits) as store:
        assert limits is store.graph.limits
    assert limits is AsyncStore.open(uri, [Note, Like], limits=limits).graph.limits
    with Store.local([Note, Like], limits=limits) as store:
        assert limits is store.graph.limits


def test_a_bound_is_the_one_of_its_store(heard: Any) -> None:
    """Two stores of one process may have different ones."""
    database, listener = heard
    small, large = Store(database, [Note, Like], limits=Limits(insert_max=2)), Store(database, [Note, Like])
    small.setup()
    for store, commands in ((small, 3), (large, 1)):
        store.recover()
        listener.clear()
        store.insert_many([Note(text=str(number)) for number in range(5)])
        assert commands == listener.names.count("insert")


def test_limits_can_be_sent_to_another_process() -> None:
    limits = Limits(find_page=3)
    assert limits == pickle.loads(pickle.dumps(limits))


def test_every_limit_is_applied_somewhere() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert [] == [name for name in NAMES if not re.search(rf"(limits|bounds)\.{name}\b", source)]


def test_the_page_names_every_limit_with_its_default() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ([\d.,]+) \| .+ \|$", (ROOT / "docs" / "limits.md").read_text(), re.MULTILINE
    )
    shown = {
        field.name: f"{field.default:,}" if field.type == "int" else f"{field.default:,g}"
        for field in fields(Limits)
    }
    assert list(shown.items()) == rows
