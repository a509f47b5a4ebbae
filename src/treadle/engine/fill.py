"""What a document maintains in itself: cards from their sources, formulas from its own fields.

Guards are documents that two transactions both write when they could
otherwise miss each other. A source may name a target that does not exist yet,
and a copy may name a source that does not. Whoever then inserts the missing
one cannot conflict with whoever looked for it in vain, because neither wrote
what the other read. So both write the same guard. Guards are a fixed number
of counters; two keys that share one only wait for each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import bson
from pymongo import UpdateOne

from treadle.engine.pages import by_ids
from treadle.engine.pipelines import derivation, formula_stages
from treadle.graph.derived import CopyRule
from treadle.graph.pattern import REVISION, Entry
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.plan import Plan, Raw, bulk_write, by_id, find, find_one_and_update, update_many
from treadle.query.keys import freeze, may_be_id
from treadle.query.paths import put

GUARDS = "treadle.guards"
GUARD_SLOTS = 256


def fill_copies(
    entry: Entry[Any],
    pairs: Sequence[tuple[Raw | None, Raw]],
    rules: Sequence[CopyRule] | None = None,
    *,
    look_only: bool = False,
    lenient: bool = False,
    guard_all: bool = False,
) -> Plan[None]:
    """Set every copy of the new documents from its source, as of now.

    Really writes each source that a synced copy is made of, so that a
    concurrent change of it meets this transaction; not so with `look_only`.
    A missing source is an error unless the copy may be None, or `lenient`.
    With `guard_all` sources are written whoever maintains their copies.
    `rules` restricts it to some of the copies.
    """
    by_source: dict[Entry[Any], list[CopyRule]] = {}
    for rule in derivation(entry).copies if rules is None else rules:
        by_source.setdefault(rule.source, []).append(rule)
    for source, of_source in by_source.items():
        identities: dict[Any, Any] = {}
        for rule in of_source:
            for _, raw in pairs:
                for _, reference in rule.references(raw):
                    if may_be_id(reference):
                        identities[freeze(reference)] = reference
        guarded = not look_only and (guard_all or any(rule.guards_source for rule in of_source))
        sources = yield from read_sources(source, list(identities.values()), guarded)
        for rule in of_source:
            for before, raw in pairs:
                rule.fill(raw, sources, before, lenient=lenient or look_only or guard_all)


def fill_own(entry: Entry[Any], pairs: Sequence[tuple[Raw | None, Raw]]) -> Plan[None]:
    """Set what the new documents take from others and from themselves, formulas apart."""
    if derivation(entry).copies:
        yield from fill_copies(entry, pairs)
    for local in derivation(entry).locals:
        values = yield from local.values([raw for _, raw in pairs])
        for (_, raw), value in zip(pairs, values, strict=True):
            put(raw, local.path, value)


def read_sources(source: Entry[Any], keys: Sequence[Any], guarded: bool) -> Plan[dict[Any, Raw]]:
    """Source documents by frozen id; written as well where they must not change meanwhile."""
    if not keys:
        return {}
    bump = {"$inc": {REVISION: 1}}
    condition = {"_id": {"$in": list(keys)}, **source.scope}
    if guarded and len(keys) == 1:
        one = yield from find_one_and_update(source.collection, source.one(keys[0]), bump)
        documents = [one] if one is not None else []
    else:
        if guarded:
            yield from update_many(source.collection, condition, bump)
        documents = yield from find(source.collection, condition)
    sources = {freeze(each["_id"]): each for each in documents}
    missing = [key for key in keys if freeze(key) not in sources]
    if guarded and missing:
        yield from guard(source.collection, missing)
    return sources


def compute_formulas(entry: Entry[Any], keys: Sequence[Any]) -> Plan[list[Raw]]:
    """Let the server compute the formulas of these documents; the documents after."""
    stages = formula_stages(entry)
    if len(keys) == 1:
        after = yield from find_one_and_update(entry.collection, by_id(keys[0]), stages)
        return [after] if after is not None else []
    yield from update_many(entry.collection, {"_id": {"$in": list(keys)}}, stages)
    afters = yield from by_ids(entry.collection, keys)
    return [afters[freeze(key)] for key in keys]


def _slot(collection: str, key: Any) -> str:
    """The guard of one document, the same in every process."""
    return f"{collection}:{zlib.crc32(bson.encode({'': key}, codec_options=CODEC_OPTIONS)) % GUARD_SLOTS}"


def guard(collection: str, keys: Iterable[Any]) -> Plan[None]:
    """Conflict with everybody else who guards one of these keys."""
    # Sorted, so that two transactions meet at the first they share.
    slots = sorted({_slot(collection, key) for key in keys})
    if slots:
        yield from bulk_write(
            GUARDS, [UpdateOne({"_id": each}, {"$inc": {"n": 1}}, upsert=True) for each in slots]
        )
