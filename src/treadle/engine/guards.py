"""Guards: documents that two transactions both write where they could otherwise miss each other.

A source may refer to a target that does not exist yet, and a copy to a source
that does not. A transaction that then inserts the missing document cannot
conflict with one that looked for it, because neither wrote what the other
read. So both write the same guard. Guards are a fixed number of counters; two
keys that share one only wait for each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import bson
from pymongo import UpdateOne

from treadle.graph.derived import DerivedRule
from treadle.graph.model_entry import ModelEntry
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.plan import Plan, Raw, bulk_write

GUARDS = "treadle.guards"
GUARD_SLOTS = 256


def guard(collection: str, keys: Iterable[Any]) -> Plan[None]:
    """Bump the guards of these keys, so that concurrent transactions that do the same conflict."""
    # Sorted, so that two transactions meet at the first they share.
    slots = sorted({_slot(collection, key) for key in keys})
    if slots:
        yield from bulk_write(
            GUARDS, [UpdateOne({"_id": each}, {"$inc": {"n": 1}}, upsert=True) for each in slots]
        )


def guard_arrivals(entry: ModelEntry, rules: Iterable[DerivedRule], documents: Sequence[Raw]) -> Plan[None]:
    """Bump the guards of these documents, so that writers that found them missing conflict."""
    ids = [each["_id"] for each in documents]
    yield from guard(entry.collection, [*ids, *alternate_keys_of(rules, documents)])


def alternate_keys_of(rules: Iterable[DerivedRule], documents: Sequence[Raw]) -> list[Any]:
    """Return the alternate keys by which sources may refer to documents."""
    by_path = {rule.alternate_key: rule for rule in rules if rule.alternate_key}
    return [key for rule in by_path.values() for key in rule.unique_keys(documents)]


def _slot(collection: str, key: Any) -> str:
    """Return the guard of one document, the same in every process."""
    return f"{collection}:{zlib.crc32(bson.encode({'': key}, codec_options=CODEC_OPTIONS)) % GUARD_SLOTS}"
