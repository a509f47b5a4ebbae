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
from treadle.errors import DataError, InvalidValue
from treadle.graph.derived import DerivedRule
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import REVISION, Rule
from treadle.graph.scope import Failed, Image, Scope
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.plan import Plan, Raw, bulk_write, by_id, find_one_and_update, update_many
from treadle.query.comparison import same
from treadle.query.keys import Key, distinct, freeze
from treadle.query.paths import put, value_at

GUARDS = "treadle.guards"
GUARD_SLOTS = 256


def fill_copies(
    entry: ModelEntry[Any],
    pairs: Sequence[tuple[Raw | None, Raw]],
    rules: Sequence[DerivedRule] | None = None,
    *,
    look_only: bool = False,
    lenient: bool = False,
    guard_all: bool = False,
) -> Plan[None]:
    """Set every copy of the new documents from its source, as of now.

    Really writes each source that a synced copy is made of, so that a
    concurrent change of it conflicts with this transaction; not so with
    `look_only`. A missing source is an error unless the copy may be None, or
    `lenient`. With `guard_all` sources are written however their copies are
    maintained. `rules` restricts it to some of the copies.
    """
    by_source: dict[tuple[ModelEntry[Any], Key], list[DerivedRule]] = {}
    for rule in derivation(entry).copies if rules is None else rules:
        by_source.setdefault((rule.source, rule.match), []).append(rule)
    lenient = lenient or look_only or guard_all
    for (source, match), of_source in by_source.items():
        keys = distinct(key for rule in of_source for _, raw in pairs for key in rule.keys(raw))
        guarded = not look_only and (guard_all or any(rule.guards_source for rule in of_source))
        failed: Failed = []
        sources = yield from read_sources(source, keys, guarded, match.path, failed)
        if failed and not lenient:
            key, reason = failed[0]
            raise DataError(
                f"{source.collection} {key!r} cannot be decoded or upgraded ({reason}), and this "
                f"{entry.model.__name__} refers to it; repair that document in mongosh, or delete it",
                code="document-unreadable",
            )
        # What cannot be read is neither right nor wrong: its copies stay as they are.
        unread = {freeze(key) for key, _ in failed}
        if failed and match.path != "_id":
            # The alternate keys of documents that cannot be read are unknown.
            unread = {freeze(key) for key in keys} - sources.keys()
        for rule in of_source:
            cards = {frozen: rule.aggregate.contribution(each) for frozen, each in sources.items()}
            for before, raw in pairs:
                if not unread or unread.isdisjoint(map(freeze, rule.keys(raw))):
                    rule.copied.fill(raw, cards, before, lenient=lenient)


def fill_own(entry: ModelEntry[Any], pairs: Sequence[tuple[Raw | None, Raw]]) -> Plan[None]:
    """Set what the new documents take from others and from themselves, formulas apart."""
    derived = derivation(entry)
    if derived.copies:
        yield from fill_copies(entry, pairs)
    for local in derived.locals:
        values = yield from local.values([raw for _, raw in pairs])
        for (_, raw), value in zip(pairs, values, strict=True):
            put(raw, local.path, value)
    require_filled(entry, pairs, [*derived.copies, *derived.locals])


def require_filled(
    entry: ModelEntry[Any], pairs: Sequence[tuple[Raw | None, Raw]], rules: Sequence[Rule]
) -> None:
    """Refuse documents in which a value that they were just given could not be read.

    Where a source was spoilt to which a document referred before, its copy stays as it was.
    """
    for rule in rules:
        copied = rule.copied if isinstance(rule, DerivedRule) and rule.is_copy else None
        path = rule.path if copied is None else copied.top
        accepts = entry.paths.fields[path].type.accepts
        for before, raw in pairs:
            value = value_at(raw, path)
            is_old = before is not None and same(value_at(before, path), value)
            if is_old or value is None or accepts(value):
                continue
            if before is not None and copied is not None:
                copied.keep_copies(before, raw)
                if accepts(value_at(raw, path)):
                    continue
            raise InvalidValue(
                f"{entry.model.__name__} {raw['_id']!r} would get a {path!r} that its model refuses, "
                "from a document that it refers to or by its own declaration; mend that first: nothing "
                "was changed",
                code="document-invalid",
            )


def read_sources(
    source: ModelEntry[Any],
    keys: Sequence[Any],
    guarded: bool,
    to: str = "_id",
    failed: Failed | None = None,
) -> Plan[dict[Any, Raw]]:
    """Source documents by what names them, frozen; written as well where they must not change concurrently.

    Those that cannot be read are quarantined, and added to `failed`.
    """
    if not keys:
        return {}
    own = {to: {"$eq": keys[0]} if len(keys) == 1 else {"$in": list(keys)}}
    images = yield from _live_sources(source.targets, own, guarded, failed)
    sources = {freeze(value_at(each.document, to)): each.document for each in images}
    missing = [key for key in keys if freeze(key) not in sources]
    if missing and source.sources.archive is not None:
        archive = source.sources.within(source.sources.archive)
        for image in (yield from archive.find({to: {"$in": missing}}, failed=failed)):
            sources[freeze(value_at(image.document, to))] = image.document
    if guarded and missing:
        yield from guard(source.collection, missing)
    return sources


def _live_sources(scope: Scope, own: Raw, guarded: bool, failed: Failed | None) -> Plan[list[Image]]:
    """The sources in the model's own collection, written if `guarded`."""
    (collection,) = scope.collections
    if not guarded:
        return (yield from scope.find(own, failed=failed))
    bump = {"$inc": {REVISION: 1}}
    (match,) = own.values()
    if "$eq" in match and not scope.splits(own):
        # One command: most documents refer to one source.
        reading = find_one_and_update(collection, scope.filter(own), bump)
        one = yield from scope.readable(_listed(reading), failed)
        return (yield from scope.load(one, collection, failed))
    images = yield from scope.find(own, failed=failed)
    if images:
        written = {"_id": {"$in": [each.document["_id"] for each in images]}}
        yield from update_many(collection, written, bump)
    return images


def _listed(reading: Plan[Raw | None]) -> Plan[list[Raw]]:
    one = yield from reading
    return [] if one is None else [one]


def compute_formulas(entry: ModelEntry[Any], keys: Sequence[Any]) -> Plan[list[Raw]]:
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
