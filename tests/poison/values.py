"""Values and documents that other clients store, and that a naive program falls over."""

from __future__ import annotations

import struct
from typing import Any

import bson
from bson import Binary, Code, DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument
from pymongo.database import Database


class Element:
    """A value that the driver cannot encode, as its type and its bytes."""

    def __init__(self, kind: int, value: bytes) -> None:
        self.kind = kind
        self.value = value


def text(value: bytes) -> Element:
    return Element(0x02, struct.pack("<i", len(value) + 1) + value + b"\0")


def uuid(value: bytes, subtype: int = 4) -> Element:
    return Element(0x05, struct.pack("<iB", len(value), subtype) + value)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


VALUES: dict[str, Any] = {
    # What the driver cannot decode.
    "bytes that are no UTF-8": text(b"\xff\xfe\xfd"),
    "half a character": text(b"caf\xc3"),
    "an overlong slash": text(b"\xc0\xaf"),
    "a surrogate in UTF-8": text(b"\xed\xa0\x80"),
    "a UUID of three bytes": uuid(b"abc"),
    "an empty UUID": uuid(b""),
    "a UUID of seventeen bytes": uuid(b"a" * 17),
    # Dates that Python does not have.
    "the year 10,000": DatetimeMS(253402300800000),
    "the year 292 million": DatetimeMS(2**63 - 1),
    "before the year 1": DatetimeMS(-(2**55)),
    # Numbers.
    "not a number": float("nan"),
    "infinite": float("inf"),
    "minus infinite": float("-inf"),
    "minus zero": -0.0,
    "a decimal that is no number": Decimal128("NaN"),
    "a signalling decimal": Decimal128("sNaN"),
    "an infinite decimal": Decimal128("Infinity"),
    "the largest decimal": Decimal128("9.999999999999999999999999999999999E+6144"),
    "the smallest decimal": Decimal128("1E-6176"),
    "the largest integer": Int64(2**63 - 1),
    "the smallest integer": Int64(-(2**63)),
    # Text.
    "empty text": "",
    "text with NUL": "a\0b",
    "control characters": "\x1b[31m\r\n\x07",
    "text that runs backwards": "\u202egold\u2066",
    "text that looks like a path": "$name",
    "text that looks like a variable": "$$ROOT",
    "long text": "x" * 20_000,
    # Documents and arrays.
    "an operator": {"$x": 1},
    "an operator of the server": {"$function": {"body": "1", "args": [], "lang": "js"}},
    "a name with a dot": {"a.b": 1},
    "an empty name": {"": 1},
    "an empty document": {},
    "a deep document": nested(90),
    "an empty array": [],
    "an array": [1, "two"],
    "an array of arrays": [[1], [2, [3]]],
    # Kinds that nobody expects.
    "null": None,
    "a truth": True,
    "the least": MinKey(),
    "the greatest": MaxKey(),
    "a pattern": Regex("^a", "i"),
    "code": Code("1"),
    "code with a scope": Code("1", {"a": 1}),
    "a timestamp": Timestamp(1, 1),
    "a reference": DBRef("customers", ObjectId("0" * 24)),
    "an old UUID": Binary(b"a" * 16, 3),
    "bytes of a subtype of one's own": Binary(b"a", 128),
    "a symbol": Element(0x0E, struct.pack("<i", 2) + b"a\0"),
    "undefined": Element(0x06, b""),
    "a database pointer": Element(0x0C, struct.pack("<i", 2) + b"a\0" + b"1" * 12),
}


def document(fields: dict[str, Any]) -> RawBSONDocument:
    """A document as bytes, whatever its values are."""
    elements = b""
    for name, value in fields.items():
        if isinstance(value, Element):
            elements += bytes([value.kind]) + name.encode() + b"\0" + value.value
        elif isinstance(value, dict) and any(isinstance(each, Element) for each in value.values()):
            elements += b"\x03" + name.encode() + b"\0" + bytes(document(value).raw)
        else:
            elements += bson.encode({name: value})[4:-1]
    return RawBSONDocument(struct.pack("<i", len(elements) + 5) + elements + b"\0")


def insert(database: Database[Any], collection: str, *documents: dict[str, Any]) -> None:
    """Store documents as another client would, without a look at them."""
    for each in documents:
        reply = database.command(
            "insert", collection, documents=[document(each)], codec_options=bson.DEFAULT_CODEC_OPTIONS
        )
        assert "writeErrors" not in reply, (collection, reply["writeErrors"])


def replace(database: Database[Any], collection: str, key: Any, fields: dict[str, Any]) -> None:
    """Store another document in the place of one."""
    update = {"q": {"_id": key}, "u": document({"_id": key, **fields})}
    reply = database.command("update", collection, updates=[update])
    assert 1 == reply["n"], (collection, reply)
