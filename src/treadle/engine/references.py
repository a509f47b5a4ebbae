"""What a document maintains in itself: copies of its sources, and values of its own fields."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from pymongo import UpdateOne

from treadle.engine.guards import guard
from treadle.engine.pages import by_ids
from treadle.engine.pipelines import changed_fields, derivation, formula_stages
from treadle.errors import DataError, InvalidValue
from treadle.graph.derived import DerivedRule
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import REVISION, Rule
from treadle.graph.scope import Failed, Image, Scope
from treadle.plan import Plan, Raw, bulk_write, by_id, find_one_and_update, update_many
from treadle.query.comparison import same
from treadle.query.keys import Key, distinct, freeze
from treadle.query.paths import put, value_at


def fill_copies(
    entry: ModelEntry,
    pairs: Sequence[tuple[Raw | None, Raw]],
    rules: Sequence[DerivedRule] | None = None,
    *,
    guarded: bool | None = None,
    lenient: bool = False,
) -> Plan[None]:
    """Set every copy of the new documents from its source, as of now.

    Really writes each source that a synced copy is made of, so that a
    concurrent change of it conflicts with this transaction; `guarded` says
    whether to do so, however the copies are maintained. A source that is
    missing or cannot be read is an error unless the copy may be None, or
    `lenient`. `rules` restricts it to some of the copies.
    """
    by_source: dict[tuple[ModelEntry, Key], list[DerivedRule]] = {}
    for rule in derivation(entry).copies if rules is None else rules:
        by_source.setdefault((rule.source, rule.match), []).append(rule)
    for (source, match), own in by_source.items():
        keys = _keys(own, pairs)
        writes = any(rule.guards_source for rule in own) if guarded is None else guarded
        failed: Failed = []
        sources = yield from read_sources(source, keys, writes, match.path, failed)
        if failed and not lenient:
            raise _unreadable(entry, source, *failed[0])
        unread = _unread(match, keys, sources, failed) if failed else set()
        for rule in own:
            _fill(rule, pairs, sources, unread, lenient)


def _keys(rules: Sequence[DerivedRule], pairs: Sequence[tuple[Raw | None, Raw]]) -> list[Any]:
    """Return the keys of the sources to which the new documents refer."""
    return distinct(key for rule in rules for _, raw in pairs for key in rule.keys(raw))


def _fill(
    rule: DerivedRule,
    pairs: Sequence[tuple[Raw | None, Raw]],
    sources: dict[Any, Raw],
    unread: set[Any],
    lenient: bool,
) -> None:
    cards = {frozen: rule.aggregate.contribution(each) for frozen, each in sources.items()}
    for before, raw in pairs:
        # What cannot be read is neither correct nor wrong: its copies stay as they are.
        if not unread or unread.isdisjoint(map(freeze, rule.keys(raw))):
            rule.copied.fill(raw, cards, before, lenient=lenient)


def _unread(match: Key, keys: Sequence[Any], sources: dict[Any, Raw], failed: Failed) -> set[Any]:
    """Return the frozen keys of sources that could not be read."""
    if match.path != "_id":
        # The alternate keys of documents that cannot be read are unknown.
        return {freeze(key) for key in keys} - sources.keys()
    return {freeze(key) for key, _ in failed}


def _unreadable(entry: ModelEntry, source: ModelEntry, key: Any, reason: str) -> DataError:
    return DataError(
        f"{source.collection} {key!r} cannot be decoded or upgraded ({reason}), and this "
        f"{entry.model.__name__} refers to it; repair that document in mongosh, or delete it",
        code="document-unreadable",
    )


def fill_own(entry: ModelEntry, pairs: Sequence[tuple[Raw | None, Raw]]) -> Plan[None]:
    """Set what the new documents take from others and from themselves, formulas apart."""
    derived = derivation(entry)
    if derived.copies:
        yield from fill_copies(entry, pairs)
    for local in derived.locals:
        values = yield from local.values([raw for _, raw in pairs])
        for (_, raw), value in zip(pairs, values, strict=True):
            put(raw, local.path, value)
    require_filled(entry, pairs, [*derived.copies, *derived.locals])


def require_filled(entry: ModelEntry, pairs: Sequence[tuple[Raw | None, Raw]], rules: Sequence[Rule]) -> None:
    """Refuse documents in which a value that they were just given could not be read.

    Where a source became invalid to which a document referred before, its copy stays as it was.
    """
    for rule in rules:
        copied = rule.copied if isinstance(rule, DerivedRule) and rule.is_copy else None
        path = rule.path if copied is None else copied.top
        for before, raw in pairs:
            if _is_accepted(entry, path, before, raw):
                continue
            if before is not None and copied is not None:
                copied.keep_copies(before, raw)
                if _is_accepted(entry, path, None, raw):
                    continue
            raise InvalidValue(
                f"{entry.model.__name__} {raw['_id']!r} would get a {path!r} that its model refuses, "
                "from a document that it refers to or by its own declaration; correct that first: nothing "
                "was changed",
                code="document-invalid",
            )


def _is_accepted(entry: ModelEntry, path: str, before: Raw | None, raw: Raw) -> bool:
    """Whether the model can read a value, or the document had it before."""
    value = value_at(raw, path)
    if value is None or (before is not None and same(value_at(before, path), value)):
        return True
    return bool(entry.paths.fields[path].type.accepts(value))


def read_sources(
    source: ModelEntry,
    keys: Sequence[Any],
    guarded: bool,
    to: str = "_id",
    failed: Failed | None = None,
) -> Plan[dict[Any, Raw]]:
    """Read sources by the frozen keys at `to`; writes them as well, if they must not change concurrently.

    Those that cannot be read are quarantined, and added to `failed`.
    """
    if not keys:
        return {}
    own = {to: {"$eq": keys[0]} if len(keys) == 1 else {"$in": list(keys)}}
    images = yield from _active_sources(source.targets, own, guarded, failed)
    sources = _by_key(images, to)
    missing = [key for key in keys if freeze(key) not in sources]
    if not missing:
        return sources
    if source.sources.archive is not None:
        archive = source.sources.within(source.sources.archive)
        archived = yield from archive.find({to: {"$in": missing}}, failed=failed)
        sources |= _by_key(archived, to)
        if guarded:
            yield from _bump(source.sources.archive, archived)
    if guarded:
        yield from guard(source.collection, missing)
    return sources


def _by_key(images: Sequence[Image], to: str) -> dict[Any, Raw]:
    return {freeze(value_at(each.document, to)): each.document for each in images}


def _active_sources(scope: Scope, own: Raw, guarded: bool, failed: Failed | None) -> Plan[list[Image]]:
    """Return the sources in the model's own collection, written if `guarded`."""
    (collection,) = scope.collections
    if not guarded:
        return (yield from scope.find(own, failed=failed))
    (match,) = own.values()
    if "$eq" in match and not scope.splits(own):
        # One command reads and writes: most documents refer to one source.
        reading = find_one_and_update(collection, scope.filter(own), {"$inc": {REVISION: 1}})
        one = yield from scope.readable(_listed(reading), failed)
        return (yield from scope.load(one, collection, failed))
    images = yield from scope.find(own, failed=failed)
    yield from _bump(collection, images)
    return images


def _bump(collection: str, images: Sequence[Image]) -> Plan[None]:
    """Write documents, so that a concurrent writer of one conflicts."""
    if images:
        written = {"_id": {"$in": [each.document["_id"] for each in images]}}
        yield from update_many(collection, written, {"$inc": {REVISION: 1}})


def _listed(reading: Plan[Raw | None]) -> Plan[list[Raw]]:
    one = yield from reading
    return [] if one is None else [one]


def compute_formulas(entry: ModelEntry, keys: Sequence[Any]) -> Plan[list[Raw]]:
    """Let the server evaluate the formulas of these documents. Returns the documents after."""
    stages = formula_stages(entry)
    if len(keys) == 1:
        after = yield from find_one_and_update(entry.collection, by_id(keys[0]), stages)
        return [after] if after is not None else []
    yield from update_many(entry.collection, {"_id": {"$in": list(keys)}}, stages)
    afters = yield from by_ids(entry.collection, keys)
    return [afters[freeze(key)] for key in keys]


# -- after an update ------------------------------------------------------------------------------


def follow_own(entry: ModelEntry, pairs: Sequence[tuple[Raw, Raw]]) -> Plan[list[Raw]]:
    """Refill changed references and evaluate formulas of documents just written. Returns these.

    Each by the rules of its kind after the write.
    """
    final: dict[Any, Raw] = {}
    for exact, group in entry.kinds.split([(after, before) for before, after in pairs]):
        for after in (yield from _follow_class(exact, group)):
            final[freeze(after["_id"])] = after
    return [final[freeze(after["_id"])] for _, after in pairs]


def _follow_class(entry: ModelEntry, pairs: Sequence[tuple[Raw, Raw]]) -> Plan[list[Raw]]:
    """Do so for documents of one class, each after and before the write."""
    derived = derivation(entry)
    afters = [after for after, _ in pairs]
    if not (derived.fills or derived.formula_stages):
        return afters
    filled = copy.deepcopy(afters)
    if derived.fills:
        yield from fill_own(entry, list(zip([before for _, before in pairs], filled, strict=True)))
    return (yield from _store_filled(entry, afters, filled))


def _store_filled(entry: ModelEntry, written: Sequence[Raw], filled: list[Raw]) -> Plan[list[Raw]]:
    """Store what was filled in after a write, and evaluate formulas. Returns the documents."""
    stages = derivation(entry).formula_stages
    pairs = zip(written, filled, strict=True)
    updates = [(by_id(after["_id"]), _filling(before, after, stages)) for before, after in pairs]
    updates = [(chosen, pipeline) for chosen, pipeline in updates if pipeline]
    if len(filled) == 1 and updates:
        again = yield from find_one_and_update(entry.collection, *updates[0])
        return filled if again is None else [again]
    if updates:
        yield from bulk_write(entry.collection, [UpdateOne(*each) for each in updates], ordered=False)
    if not stages:
        return filled
    now = yield from by_ids(entry.collection, [each["_id"] for each in filled])
    return [now.get(freeze(each["_id"]), each) for each in filled]


def _filling(written: Raw, filled: Raw, stages: Sequence[Raw]) -> list[Raw]:
    """Return the update that makes a written document the filled one, and evaluates what follows."""
    sets = changed_fields(written, filled)
    return [{"$set": sets}, *stages] if sets else list(stages)
