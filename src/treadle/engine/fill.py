"""What a document maintains in itself: cards from their sources, formulas from its own fields.

Guards are documents that two transactions both write when they could
otherwise miss each other. A source may name a target that does not exist yet,
and a copy may name a source that does not. Whoever then inserts the missing
one cannot conflict with whoever looked for it in vain, because neither wrote
what the other read. So both write the same guard. Guards are a fixed number
of counters; two keys that share one only wait for each other.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import bson
from pymongo import UpdateOne

from treadle.engine.older import as_current
from treadle.engine.pages import by_ids
from treadle.engine.pipelines import derivation, formula_stages
from treadle.engine.set_aside import set_aside_unreadable
from treadle.errors import InvalidValue
from treadle.graph.derived import CopyRule
from treadle.graph.pattern import REVISION, Entry, Rule
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.plan import Plan, Raw, bulk_write, by_id, find, find_one_and_update, outside, update_many
from treadle.plan.decoding import Unreadable
from treadle.query.comparison import same
from treadle.query.keys import freeze, may_be_id
from treadle.query.paths import put, value_at

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
    by_source: dict[tuple[Entry[Any], str], list[CopyRule]] = {}
    for rule in derivation(entry).copies if rules is None else rules:
        by_source.setdefault((rule.source, rule.to), []).append(rule)
    for (source, to), of_source in by_source.items():
        identities: dict[Any, Any] = {}
        for rule in of_source:
            for _, raw in pairs:
                for _, reference in rule.references(raw):
                    if may_be_id(reference):
                        identities[freeze(reference)] = reference
        guarded = not look_only and (guard_all or any(rule.guards_source for rule in of_source))
        forgiving = lenient or look_only or guard_all
        unread: set[Any] = set()
        try:
            sources = yield from read_sources(source, list(identities.values()), guarded, to)
        except Unreadable as error:
            if not forgiving:
                raise
            # What cannot be read is neither right nor wrong: its copies stay as they are.
            yield from outside(partial(set_aside_unreadable, source.model.__name__, error))
            failed = [key for key, _ in error.failed]
            unread = {freeze(key) for key in failed}
            readable = [key for frozen, key in identities.items() if frozen not in unread]
            sources = yield from read_sources(source, readable, guarded, to, failed if to != "_id" else ())
            if to != "_id":
                # Nobody can tell which names those have that cannot be read.
                unread = {frozen for frozen in identities if frozen not in sources}
        for rule in of_source:
            for before, raw in pairs:
                if not any(freeze(reference) in unread for _, reference in rule.references(raw)):
                    rule.fill(raw, sources, before, lenient=forgiving)


def fill_own(entry: Entry[Any], pairs: Sequence[tuple[Raw | None, Raw]]) -> Plan[None]:
    """Set what the new documents take from others and from themselves, formulas apart."""
    derived = derivation(entry)
    if derived.copies:
        yield from fill_copies(entry, pairs)
    for local in derived.locals:
        values = yield from local.values([raw for _, raw in pairs])
        for (_, raw), value in zip(pairs, values, strict=True):
            put(raw, local.path, value)
    require_filled(entry, pairs, [*derived.copies, *derived.locals])


def require_filled(entry: Entry[Any], pairs: Sequence[tuple[Raw | None, Raw]], rules: Sequence[Rule]) -> None:
    """Refuse documents in which a value that they were just given could not be read.

    Where a source was spoilt to which a document referred before, its copy stays as it was.
    """
    for rule in rules:
        path = rule.top if isinstance(rule, CopyRule) else rule.path
        for before, raw in pairs:
            value = value_at(raw, path)
            if before is not None and same(value_at(before, path), value):
                continue
            if value is not None and not entry.field_paths[path].type.accepts(value):
                if before is not None and isinstance(rule, CopyRule):
                    _keep_copies(rule, before, raw)
                    if entry.field_paths[path].type.accepts(value_at(raw, path)):
                        continue
                raise InvalidValue(
                    f"{entry.model.__name__} {raw['_id']!r} would get a {path!r} that its model refuses, "
                    "from a document that it refers to or by its own declaration; mend that first: nothing "
                    "was changed",
                    code="document-invalid",
                )


def _keep_copies(rule: CopyRule, before: Raw, raw: Raw) -> None:
    """Put back the copies that a document had of the sources to which it still refers, in their order."""
    places = zip(rule.references(before), rule.references(raw), strict=False)
    for (old, reference), (new, now) in places:
        if freeze(reference) == freeze(now) and rule.name in old and not rule.holds_reference:
            new[rule.name] = copy.deepcopy(old[rule.name])


def read_sources(
    source: Entry[Any], keys: Sequence[Any], guarded: bool, to: str = "_id", without: Sequence[Any] = ()
) -> Plan[dict[Any, Raw]]:
    """Source documents by what names them, frozen; written as well where they must not change concurrently.

    Those `without`, by their ids, are left out.
    """
    if not keys:
        return {}
    bump = {"$inc": {REVISION: 1}}
    within = {**source.scope, **({"_id": {"$nin": list(without)}} if without else {})}
    condition = {to: {"$in": list(keys)}, **within}
    if guarded and len(keys) == 1:
        own = {to: {"$eq": keys[0]}, **within}
        one = yield from find_one_and_update(source.collection, own, bump)
        documents = [one] if one is not None else []
    else:
        if guarded:
            yield from update_many(source.collection, condition, bump)
        documents = yield from find(source.collection, condition)
    documents = yield from as_current(source, documents)
    sources = {freeze(value_at(each, to)): each for each in documents}
    missing = [key for key in keys if freeze(key) not in sources]
    if missing and source.elsewhere is not None:
        others = yield from find(source.elsewhere.collection, {to: {"$in": missing}, **source.scope})
        sources |= {freeze(value_at(each, to)): each for each in others}
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
