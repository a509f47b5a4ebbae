"""What a model of a Store knows of itself: its ids, kinds, rules, owned paths and the effects of its writes.

Covers: graph/kinds, graph/levels, graph/owned
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pymongo import MongoClient

from treadle import Count, Day, Document, Formula, Rollup, Store, UsageError
from treadle.graph.model_entry import RuleSet


class Line(Document, collection="lines"):
    order_id: int
    at: datetime


class Order(Document, collection="orders", discriminator="type", revision="revision"):
    id: int
    revision: int = 0
    lines: Annotated[int, Count(Line, by="order_id")] = 0


class Gift(Order, kind="gift"):
    text: str = ""
    shout: Annotated[str | None, Formula({"$toUpper": "$text"})] = None


class Daily(Document, collection="dailies", rollup=Rollup(Line, keys={"day": Day("at")})):
    day: datetime
    count: Annotated[int, Count()] = 0


class Note(Document, collection="notes"):
    text: str = ""


@pytest.fixture(scope="module")
def entry() -> Any:
    with MongoClient("localhost:1", connect=False) as client:
        yield Store(client["entries"], [Line, Order, Gift, Daily, Note]).graph.entry


def test_ids_are_checked_and_stored_as_the_model_declares_them(entry: Any) -> None:
    identity = ObjectId()
    assert identity == entry(Note).ids.encode(str(identity))
    assert 3 == entry(Order).ids.encode(3)
    with pytest.raises(UsageError, match="is not an id of Order"):
        entry(Order).ids.encode({"$gt": 0})


def test_a_kind_has_the_rules_above_it_and_the_base_does_not_have_its_own(entry: Any) -> None:
    order, gift = entry(Order), entry(Gift)
    assert [order] == gift.kinds.above
    assert [gift] == order.kinds.below
    assert gift is order.kinds.of({"type": "gift"}) is gift.kinds.of({"type": "gift"})
    assert order is gift.kinds.of({"type": "unknown"})
    assert [(gift, [{"type": "gift"}]), (order, [{}])] == list(order.kinds.split([{"type": "gift"}, {}]))
    assert ["revision", "computed", "computed"] == [rule.pattern for rule in gift.rules]
    assert ["revision", "computed"] == [rule.pattern for rule in order.rules]
    assert {"revision", "lines"} == set(order.paths.owned)
    assert {"revision", "lines", "shout"} == set(order.paths.owned_in_collection)
    assert {"revision", "lines", "shout"} == gift.maintained_fields()


def test_documents_of_a_group_are_found_by_its_values(entry: Any) -> None:
    daily, day = entry(Daily), datetime(2026, 1, 1)
    assert [day] == daily.key_of({"_id": 1, "day": day, "count": 2})
    assert {"_id": 1, "day": 1} == daily.key_projection()
    assert {"day": {"$eq": day}} == daily.filter_for_key([day]) == daily.filter_for_keys([[day]])
    assert {"day": {"$in": [day, day]}} == daily.filter_for_keys([[day], [day]])


def test_effects_say_what_a_write_entails(entry: Any) -> None:
    assert entry(Note).effects.is_plain
    line = entry(Line)
    assert not line.effects.is_plain
    assert {"order_id", "at"} == line.effects.followed
    assert 3 == len(line.effects.on_write) == len(line.effects.of_type(object, "write"))
    assert [] == line.effects.of_type(object, "stream")


def test_lookups_are_made_again_after_a_rule_was_added(entry: Any) -> None:
    rules = RuleSet(entry(Order).rules)
    revision, count = rules
    assert [count] == rules.of_type(type(count)) == rules.implementing("storage")
    assert [] == rules.implementing("record")
    rules.add(count)
    assert [count, count] == rules.of_type(type(count)) == rules.implementing("storage")
    assert [revision] == rules.of_type(type(revision))
