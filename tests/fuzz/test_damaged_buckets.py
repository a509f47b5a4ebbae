"""Buckets with random damage: nothing but an error of our own, and the other series are right."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.fuzz import rounds
from treadle import Bucket, Document, Store
from treadle.errors import TreadleError

START = datetime(2026, 1, 1, tzinfo=UTC)
DECLARED = Bucket(key="sensor", time="ts", span=timedelta(hours=1), limit=50, stats=("temp",))


class Reading(Document, collection="readings", bucket=DECLARED):
    sensor: str
    ts: datetime
    temp: float


def damaged(chance: random.Random, value: Any) -> Any:
    """The same with one value changed, at any depth."""
    if isinstance(value, dict):
        if not value:
            return value
        name = chance.choice(list(value))
        return {**value, name: damaged(chance, value[name])}
    if isinstance(value, list) and value:
        at = chance.randrange(len(value))
        return [*value[:at], damaged(chance, value[at]), *value[at + 1 :]]
    return chance.choice([None, -1, 2**62, "x", [], {}, float("nan"), 1e300, b"\xff" * 21])


def test_damage_stays_where_it_is(database):
    store = Store(database, [Reading])
    store.setup()
    for sensor in ("whole", "broken"):
        at = [START + timedelta(minutes=number) for number in range(40)]
        store.insert_many([Reading(sensor=sensor, ts=each, temp=number) for number, each in enumerate(at)])
    whole = [each.temp for each in store.find(Reading, {"sensor": "whole"})]
    good = database["readings"].find_one({"sensor": "broken"})
    for chance in rounds(50):
        bad = damaged(chance, good)
        bad |= {"_id": good["_id"], "sensor": "broken"}
        database["readings"].replace_one({"_id": good["_id"]}, bad, bypass_document_validation=True)
        for call in (
            lambda: list(store.find(Reading, {"sensor": "broken"})),
            lambda: store.summary(Reading, "broken"),
            store.verify,
        ):
            try:
                call()
            except TreadleError:
                continue
        assert whole == [each.temp for each in store.find(Reading, {"sensor": "whole"})]
    store.repair()
    assert whole == [each.temp for each in store.find(Reading, {"sensor": "whole"})]
