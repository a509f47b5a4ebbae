"""Buckets that claim what they cannot hold: refused before memory is taken, and in nobody's way."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import bson
import pytest
from bson.binary import Binary

from tests.patterns.bucket.sensors import START, at, reading_in
from treadle import DataError
from treadle.patterns.bucket import packing
from treadle.patterns.bucket.packing import Damaged, pack, unpack

MEGABYTE = 1024 * 1024
NOTHING = bytes([packing.NOTHING])


def claims(count: int, columns: bytes = b"", width: int = 0) -> bytes:
    """Readings at equal distances, which take no bytes, however many."""
    regular = bytes([1]) + packing._signed(0) + packing._above_smallest([60_000])
    body = packing._varint(count) + packing._varint(width) + regular + columns
    return bytes([packing.VERSION]) + zlib.compress(body)


def column(name: bytes, held: bytes) -> bytes:
    return packing._varint(len(name)) + name + held


def peak_bytes(body: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        body()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_is_claimed_is_compared_with_the_count_before_it_is_unpacked():
    """Sixty million readings in some twenty bytes; the bucket's own count may lie as well."""

    def refused() -> None:
        for count in (60_000_000, 2**40, 2**62):
            for said in (None, 5, count, "many"):
                with pytest.raises(Damaged, match="readings"):
                    unpack(claims(count), said)
        with pytest.raises(Damaged, match="bytes claim 900,000 readings, where the bucket counts 60"):
            unpack(claims(900_000), 60)

    assert 30 > len(claims(60_000_000))
    assert MEGABYTE > peak_bytes(refused)
    assert 900_000 == len(unpack(claims(900_000), 900_000)[0])
    # A count that is merely wrong is for repair to mend.
    assert 9_000 == len(unpack(claims(9_000), 1)[0])


@pytest.mark.parametrize(
    "packed",
    {
        "columns of nothing": claims(
            9_000, b"".join(column(b"%d" % n, NOTHING) for n in range(5_000)), 5_000
        ),
        "a bomb": b"\x01" + zlib.compress(bytes(packing.UNPACKED_BYTES_MAX + 1)),
        "a number of 200 bytes": claims(2, column(b"v", b"\0\0\0\0" + bytes([200]) + b"\x7f" * 200), 1),
        "more than 64 bits": claims(
            9, column(b"v", bytes([0, 0, 1]) + packing._signed(2**62) + packing._above_smallest([2**62])), 1
        ),
        "a name with NUL": claims(1, column(b"a\0b", NOTHING), 1),
        "text where a list belongs": claims(
            3, column(b"v", bytes([packing.OTHER, 0]) + bson.encode({"": "abc"})), 1
        ),
        "a mask of other bytes": claims(
            2, column(b"v", bytes([packing.BOOLS, 1, 2, 0, 2, 1, 1])), 1
        ),
        "too many decimal places": claims(
            2, column(b"v", bytes([packing.SCALED, 0, 200, 0]) + packing._above_smallest([1, 1])), 1
        ),
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_other_false_claims_are_refused(packed):
    def refused() -> None:
        with pytest.raises(Damaged):
            unpack(packed[1], 9_000)

    assert 4 * packing.UNPACKED_BYTES_MAX > peak_bytes(refused)


def test_what_could_not_be_unpacked_is_not_packed():
    columns = {str(number): [None] * 10_000 for number in range(300)}
    with pytest.raises(Damaged, match="more than a document can hold"):
        pack(list(range(10_000)), columns)


def test_one_damaged_bucket_stops_no_other(run, database):
    """`find` names it; verify, repair and rebuild go on with the rest."""
    measured = reading_in("packed", unique="ts")
    store = run.store([measured])
    store.setup()
    store.insert_many([measured(sensor_id="a", ts=at(minute), temp=minute) for minute in range(0, 180, 5)])
    store.rebuild()
    collection = database.measured
    bad = collection.find_one({"start": START, "_treadle.sequence": {"$in": [None, 0]}})
    hostile = {"readings": Binary(claims(60_000_000)), "count": 60_000_000}
    collection.update_one({"_id": bad["_id"]}, {"$set": hostile})
    # Others that are merely wrong, in the same window and in another.
    collection.update_many({"_id": {"$ne": bad["_id"]}}, {"$inc": {"count": 1}})
    others = collection.count_documents({}) - 1

    def all_calls() -> None:
        with pytest.raises(DataError) as caught:
            store.find(measured).to_list()
        assert "bucket-damaged" == caught.value.code
        assert "measured" in str(caught.value)
        assert str(bad["_id"]) in str(caught.value)
        findings = {each.document_id: each.path for each in store.verify()}
        assert (others + 1, "readings") == (len(findings), findings[bad["_id"]])
        assert others == store.repair()
        assert [bad["_id"]] == [each.document_id for each in store.verify()]
        store.rebuild()

    assert 100 * MEGABYTE > peak_bytes(all_calls)
    assert bytes(hostile["readings"]) == collection.find_one({"_id": bad["_id"]})["readings"]
    assert 12 == len(store.find(measured, {"ts": {"$gte": at(120)}}).to_list())


def test_odd_notes_of_a_bucket_are_no_obstacle(run, database):
    """`_treadle` is nobody's to write, but anybody can."""
    measured = reading_in("rows", span=None)
    store = run.store([measured])
    store.setup()
    store.insert_many([measured(sensor_id="a", ts=at(minute)) for minute in range(0, 60, 5)])
    ids = [each["_id"] for each in database.measured.find().sort("start")]
    for odd in ([1], {"next": "tomorrow"}, "x"):
        database.measured.update_one({"_id": ids[0]}, {"$set": {"_treadle": odd}})
        assert {ids[0]} == {each.document_id for each in store.verify()}
        store.repair()
        store.rebuild()
        assert 12 == store.count(measured)
