"""Documents that the driver cannot decode: they are identified, and hide no others."""

from __future__ import annotations

import struct
from typing import Any

import bson
import pytest
from bson import ObjectId
from bson.errors import InvalidBSON
from bson.raw_bson import RawBSONDocument

from treadle import Document
from treadle.plan import Call, Read
from treadle.plan.decoding import (
    PagedRead,
    UndecodableId,
    Unreadable,
    codec_options,
    decode_documents,
    unreadable_result,
)

TEXT, DAMAGED = b"\x02text\0" + struct.pack("<i", 5) + b"four\0", b"\x02text\0" + struct.pack("<i", 5)
DAMAGED += b"\xff\xfe\xfd\xfc\0"

CODEC_OPTIONS = codec_options(Read("numbers", "find", ()))


def raw(identity: Any, elements: bytes = TEXT) -> RawBSONDocument:
    body = bson.encode({"_id": identity})[4:-1] + elements
    return RawBSONDocument(struct.pack("<i", len(body) + 5) + body + b"\0")


@pytest.mark.parametrize(
    "identity",
    [1, 2**40, 1.5, True, None, ObjectId(), "text", b"bytes", {"a": {"b": [1]}}, bson.Decimal128("1.5")],
    ids=lambda value: type(value).__name__,
)
def test_a_damaged_document_is_identified_by_its_id(identity):
    with pytest.raises(Unreadable) as caught:
        decode_documents("numbers", [raw(0), raw(identity, DAMAGED), raw(2)], CODEC_OPTIONS)
    ((key, _),) = caught.value.failed
    assert identity == key
    assert caught.value.holds("numbers", key)
    assert [0, 2] == [each["_id"] for each in caught.value.documents]
    assert 2 == caught.value.last


def test_an_id_that_cannot_be_decoded_is_kept_as_bytes_and_sorts():
    element = b"\x02_id\0" + struct.pack("<i", 3) + b"\xff\xfe\0"
    document = RawBSONDocument(struct.pack("<i", len(element) + 5) + element + b"\0")
    with pytest.raises(Unreadable) as caught:
        decode_documents("numbers", [document], CODEC_OPTIONS)
    key = caught.value.last
    assert isinstance(key, UndecodableId)
    assert b"$literal\0" + element[5:] in key.greater().raw


@pytest.mark.parametrize("condition", [{"_id": 7}, {"_id": {"$eq": 7}}])
def test_the_one_result_of_a_command_is_identified_by_its_filter(condition):
    error = unreadable_result(Call("numbers", "find_one_and_update", (condition, {})), InvalidBSON("x"))
    assert [(7, "x")] == error.failed


def test_the_rest_of_a_read_is_decoded_document_by_document():
    reading = PagedRead(Read("numbers", "find", ({}, None), {"skip": 2, "limit": 10}))
    assert (["a", "b", "c"], None) == reading.take(["a", "b", "c"], skip=False)
    reading.decode_singly(InvalidBSON("x"))
    assert (5, 7) == (reading.command.options["skip"], reading.command.options["limit"])
    documents, error = reading.take([raw(1), raw(2, DAMAGED), raw(3)], skip=False)
    assert ([1], [2]) == ([each["_id"] for each in documents], [key for key, _ in error.failed])
    with pytest.raises(InvalidBSON):
        reading.decode_singly(InvalidBSON("x"))


def test_an_aggregation_continues_by_a_stage():
    reading = PagedRead(Read("numbers", "aggregate", ([{"$match": {}}],)))
    reading.take([1, 2], skip=False)
    reading.decode_singly(InvalidBSON("x"))
    assert [{"$match": {}}, {"$skip": 2}] == reading.command.arguments[0]


class Number(Document, collection="numbers"):
    id: int
    text: str


def test_documents_after_a_damaged_one_in_its_page_are_not_lost(run, database):
    store = run.store([Number])
    for number in (1, 2, 3, 4, 5):
        database["numbers"].insert_one(raw(number, DAMAGED if number in (2, 4) else TEXT))
    found = store.find(Number, sort="_id", invalid="skip")
    assert [1, 3, 5] == [each.id for each in found]
    assert ["2", "4"] == [str(each).split()[1] for each in found.invalid]
