"""Documents that two transactions both write when they could otherwise miss each other.

A source may name a target that does not exist yet, and a copy may name a
source that does not. Whoever then inserts the missing one cannot conflict
with whoever looked for it in vain, because neither wrote what the other
read. So both write the same guard. Guards are a fixed number of counters;
two keys that share one only wait for each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import bson
from pymongo import UpdateOne

from treadle.model.bson_types import CODEC_OPTIONS
from treadle.plan import Plan, bulk_write

COLLECTION = "treadle.guards"
SLOTS = 256


def slot(collection: str, key: Any) -> str:
    """The guard of one document, the same in every process."""
    return f"{collection}:{zlib.crc32(bson.encode({'': key}, codec_options=CODEC_OPTIONS)) % SLOTS}"


def guard(collection: str, keys: Iterable[Any]) -> Plan[None]:
    """Conflict with everybody else who guards one of these keys."""
    # Sorted, so that two transactions meet at the first they share.
    slots = sorted({slot(collection, key) for key in keys})
    if slots:
        yield from bulk_write(
            COLLECTION, [UpdateOne({"_id": each}, {"$inc": {"n": 1}}, upsert=True) for each in slots]
        )
