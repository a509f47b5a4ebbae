"""Buckets, and the native kind, beside a plain list of readings."""

from __future__ import annotations

import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle import Bucket, Document, TimeSeries, Unchecked

START = datetime(2026, 1, 1, tzinfo=UTC)
SERIES = ("a", "b")
HOUR = timedelta(hours=1)


def declared(**options: Any) -> Bucket:
    return Bucket(key="sensor_id", time="ts", stats=("temp", "load"), **options)


WINDOWS = {
    "span and limit": declared(span=HOUR, limit=4),
    "limit": declared(limit=3),
    "span": declared(span=HOUR),
}


def model(name: str) -> type[Document]:
    """A new class each time, because each has a collection of its own."""
    keyword = (
        {"timeseries": TimeSeries(time="ts", key="sensor_id", stats=("temp", "load"))}
        if name == "native"
        else {"bucket": WINDOWS[name]}
    )

    class Reading(Document, collection=f"r_{uuid.uuid4().hex[:8]}", **keyword):
        sensor_id: str
        ts: datetime
        temp: float
        load: int | None = None
        note: str = ""

    return Reading


Row = tuple[str, int, float, int | None, str]
minutes = st.integers(0, 200)
rows = st.tuples(
    st.sampled_from(SERIES),
    minutes,
    st.sampled_from([0.5, 1.0, -2.25, 20.5, float("inf")]),
    st.none() | st.integers(-3, 3),
    st.sampled_from(["", "x", "$ts"]),
)


@st.composite
def filters(draw: Any) -> dict[str, Any]:
    """What can be asked, as our own small language: field, operator, operand."""
    chosen: dict[str, Any] = {}
    if draw(st.booleans()):
        chosen["sensor_id"] = ("$eq", draw(st.sampled_from(SERIES)))
    if draw(st.booleans()):
        low = draw(minutes)
        chosen["ts"] = ("range", low, low + draw(st.integers(0, 120)), draw(st.sampled_from(["$gte", "$gt"])))
    if draw(st.integers(0, 3)) == 0:
        chosen["temp"] = (
            draw(st.sampled_from(["$gt", "$lte", "$eq", "$ne"])),
            draw(st.sampled_from([0.5, 1.0, 20])),
        )
    if draw(st.integers(0, 3)) == 0:
        chosen["load"] = (draw(st.sampled_from(["$eq", "$lt", "$mod"])), draw(st.sampled_from([None, 0, 2])))
    return chosen


def at(minute: int) -> datetime:
    return START + timedelta(minutes=minute)


def mongo(chosen: dict[str, Any]) -> dict[str, Any]:
    filter: dict[str, Any] = {}
    for field, said in chosen.items():
        if said[0] == "range":
            filter[field] = {said[3]: at(said[1]), "$lt": at(said[2])}
        elif said[0] == "$mod":
            filter[field] = {"$mod": [2, 0]}
        elif said[0] == "$lt" and said[1] is None:
            filter[field] = {"$lt": 2}
        else:
            filter[field] = {said[0]: said[1]}
    return filter


def meant(row: Row, chosen: dict[str, Any]) -> bool:
    values = dict(zip(("sensor_id", "ts", "temp", "load", "note"), row, strict=True))
    for field, said in chosen.items():
        value = values[field]
        if said[0] == "range":
            low = value > said[1] if said[3] == "$gt" else value >= said[1]
            good = low and value < said[2]
        elif said[0] == "$mod":
            good = value is not None and value % 2 == 0
        elif said[0] == "$eq":
            good = value == said[1]
        elif said[0] == "$ne":
            good = value != said[1]
        elif said[0] == "$gt":
            good = value > said[1]
        elif said[0] == "$lte":
            good = value <= said[1]
        else:
            good = value is not None and value < (2 if said[1] is None else said[1])
        if not good:
            return False
    return True


operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), rows),
        st.tuples(st.just("insert_many"), st.lists(rows, min_size=1, max_size=12)),
        st.tuples(st.just("update"), filters(), st.sampled_from(["temp", "move", "series"])),
        st.tuples(st.just("update_many"), filters(), st.sampled_from(["temp", "load", "later"])),
        st.tuples(st.just("delete"), filters()),
        st.tuples(st.just("delete_many"), filters()),
        st.tuples(st.just("rebuild")),
        st.tuples(
            st.just("find"), filters(), st.sampled_from([None, "ts", "-ts", "-temp"]), st.integers(0, 3)
        ),
    ),
    min_size=3,
    max_size=12,
)


def document(reading: type[Document], row: Row) -> Document:
    series, minute, temp, load, note = row
    return reading(sensor_id=series, ts=at(minute), temp=temp, load=load, note=note)


def row_of(found: Any) -> Row:
    return (
        found.sensor_id,
        round((found.ts - START) / timedelta(minutes=1)),
        found.temp,
        found.load,
        found.note,
    )


class Machine:
    """A store and a list, which must stay the same."""

    def __init__(self, store: Any, reading: type[Document]) -> None:
        self.store = store
        self.reading = reading
        self.rows: list[Row] = []

    def insert(self, row: Row) -> None:
        stored = self.store.insert(document(self.reading, row))
        assert row == row_of(stored)
        self.rows.append(row)

    def insert_many(self, many: list[Row]) -> None:
        assert many == [
            row_of(each) for each in self.store.insert_many([document(self.reading, row) for row in many])
        ]
        self.rows += many

    def update(self, chosen: dict[str, Any], kind: str) -> None:
        update: Any
        if kind == "temp":
            update = Unchecked({"$set": {"temp": 7.0}, "$inc": {"seen": 1}, "$unset": {"seen": ""}})
        elif kind == "series":
            update = {"$set": {"sensor_id": "b"}}
        else:
            update = {"$set": {"ts": at(77)}}
        after = self.store.update(self.reading, mongo(chosen), update)
        candidates = [row for row in self.rows if meant(row, chosen)]
        if after is None:
            assert [] == candidates
            return
        results = {row: self.after(row, kind) for row in candidates}
        changed = [row for row in candidates if results[row] == row_of(after)]
        assert changed
        self.rows.remove(changed[0])
        self.rows.append(row_of(after))

    def after(self, row: Row, kind: str) -> Row:
        series, minute, temp, load, note = row
        if kind == "series":
            return "b", minute, temp, load, note
        if kind == "move":
            return series, 77, temp, load, note
        return series, minute, 7.0, load, note

    def update_many(self, chosen: dict[str, Any], kind: str) -> None:
        change: Any = {"$set": {"temp": 8.5}}
        if kind == "load":
            change = [{"$set": {"load": {"$add": [{"$ifNull": ["$load", 0]}, 1]}}}]
        elif kind == "later":
            change = [{"$set": {"ts": {"$add": ["$ts", 45 * 60 * 1000]}}}]
        picked = [row for row in self.rows if meant(row, chosen)]
        assert len(picked) == self.store.update_many(self.reading, mongo(chosen), change)
        self.rows = [row for row in self.rows if not meant(row, chosen)]
        for series, minute, temp, load, note in picked:
            if kind == "temp":
                self.rows.append((series, minute, 8.5, load, note))
            elif kind == "load":
                self.rows.append((series, minute, temp, (load or 0) + 1, note))
            else:
                self.rows.append((series, minute + 45, temp, load, note))

    def delete(self, chosen: dict[str, Any]) -> None:
        gone = self.store.delete(self.reading, mongo(chosen))
        candidates = [row for row in self.rows if meant(row, chosen)]
        if gone is None:
            assert [] == candidates
            return
        assert row_of(gone) in candidates
        self.rows.remove(row_of(gone))

    def delete_many(self, chosen: dict[str, Any]) -> None:
        picked = [row for row in self.rows if meant(row, chosen)]
        assert len(picked) == self.store.delete_many(self.reading, mongo(chosen))
        self.rows = [row for row in self.rows if not meant(row, chosen)]

    def rebuild(self) -> None:
        self.store.rebuild(self.reading)

    def find(self, chosen: dict[str, Any], sort: str | None, limit: int) -> None:
        found = [
            row_of(each)
            for each in self.store.find(self.reading, mongo(chosen), sort=sort, limit=limit or None)
        ]
        expected = [row for row in self.rows if meant(row, chosen)]
        assert len(expected) == self.store.count(self.reading, mongo(chosen))
        if sort is not None:
            place = 1 if sort.endswith("ts") else 2
            ordered = sorted((row[place] for row in expected), reverse=sort.startswith("-"))
            assert ordered[: limit or None] == [row[place] for row in found]
        if not limit:
            assert Counter(expected) == Counter(found)
        else:
            assert not Counter(found) - Counter(expected)
            assert min(limit, len(expected)) == len(found)

    def check(self) -> None:
        assert [] == self.store.verify(self.reading)
        assert Counter(self.rows) == Counter(row_of(each) for each in self.store.find(self.reading))
        for series in SERIES:
            own = [row for row in self.rows if row[0] == series]
            tuples = self.store.readings(self.reading, series, fields=["temp", "load"])
            assert sorted(row[1] for row in own) == [
                round((each[0] - START) / timedelta(minutes=1)) for each in tuples
            ]
            assert Counter((row[2], row[3]) for row in own) == Counter((each[1], each[2]) for each in tuples)
            entries = self.store.summary(self.reading, series)
            assert len(own) == sum(each.count for each in entries)
            loads = [row[3] for row in own if row[3] is not None]
            assert sum(loads) == sum(each["load"]["sum"] for each in entries)
            assert min((row[2] for row in own), default=None) == min(
                (each["temp"].min for each in entries), default=None
            )


@pytest.mark.heavy
@pytest.mark.parametrize("name", list(WINDOWS))
def test_a_bucketed_model_is_as_good_as_a_list(name, run):
    @settings(max_examples=settings.default.max_examples // 5)
    @given(operations)
    def play(steps: list[Any]) -> None:
        reading = model(name)
        store = run.store([reading])
        store.setup()
        machine = Machine(store, reading)
        for kind, *arguments in steps:
            getattr(machine, kind)(*arguments)
        machine.check()

    play()


NATIVE = {"insert", "insert_many", "find", "rebuild"}


def test_the_native_kind_is_as_good_as_a_list(run):
    @settings(max_examples=settings.default.max_examples // 8)
    @given(operations)
    def play(steps: list[Any]) -> None:
        reading = model("native")
        store = run.store([reading])
        store.setup()
        machine = Machine(store, reading)
        for kind, *arguments in steps:
            if kind in NATIVE:
                getattr(machine, kind)(*arguments)
        machine.check()

    play()
