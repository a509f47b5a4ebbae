"""Updates of models that feed others or maintain something themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import bson
from bson import ObjectId
from pymongo import UpdateOne
from pymongo.errors import WriteError

from treadle.engine import crud
from treadle.engine.auto_fields import touches_of, touching
from treadle.engine.indexes import declared_indexes
from treadle.engine.pages import by_ids
from treadle.engine.pipelines import changed_fields, derivation
from treadle.engine.references import fill_own
from treadle.engine.validation import as_written, require_valid
from treadle.engine.version_upgrade import upgrade_stored, upgraded
from treadle.errors import PartlyDone
from treadle.graph.changes import NOT_READ, Changes
from treadle.graph.derived import aggregates_of
from treadle.graph.model_entry import ModelEntry
from treadle.graph.operations import Returns
from treadle.graph.write import ChunkedWrite, Write, confined
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.model.document import Document
from treadle.plan import (
    Plan,
    Raw,
    aggregate,
    bulk_write,
    by_id,
    find,
    find_one,
    find_one_and_update,
    is_inside,
    server_facts,
    update_many,
)
from treadle.plan.server_errors import translate_update
from treadle.query.attributes import sorting_stages, sorts_by_attribute
from treadle.query.filters import Sort, parse_filter, sort_keys
from treadle.query.keys import distinct, freeze
from treadle.query.paths import overlap
from treadle.query.updates import parse_update

D = TypeVar("D", bound=Document)


def concerns(entry: ModelEntry[Any], touched: set[str] | None) -> bool:
    """Whether an update of these paths must be followed."""
    return not entry.effects.is_plain and entry.paths.fields.are_followed(touched)


def may_upgrade(entry: ModelEntry[Any]) -> bool:
    """Whether bringing a document to the current version may change what others follow from."""
    chain = entry.versions
    watched = entry.effects.followed is None or bool(entry.effects.followed)
    return chain.writes_older or (chain.is_versioned and not entry.effects.is_plain and watched)


class _Update:
    """What updates of one document and of many have in common."""

    entry: ModelEntry[Any]
    filter: Raw
    update: Any

    def _prepare(
        self, entry: ModelEntry[Any], update: Any, array_filters: Sequence[Any] | None = None
    ) -> None:
        self.entry = entry
        self.parsed = parse_update(entry.paths.fields, update, array_filters)
        self.sure = self.parsed.is_exact
        self.update = touching(entry, self.parsed.update)
        stamped = touches_of(entry, new=False).keys()
        self.followed = not entry.effects.is_plain and (
            self.parsed.is_followed or entry.paths.fields.are_followed(stamped)
        )

    @property
    def _is_plain(self) -> bool:
        """Whether nothing follows from it."""
        followed = self.followed or may_upgrade(self.entry)
        return self.sure and not followed

    def _translated(self) -> AbstractContextManager[None]:
        sent = [self.filter, {"update": self.update}]
        return crud.translated(self.entry.model.__name__, sent, translate=translate_update)

    def _apply(
        self,
        befores: Sequence[Raw],
        write: Callable[[list[Any], list[Any]], Plan[dict[Any, Raw]]],
        changes: Changes,
    ) -> Plan[list[Raw]]:
        """Update documents that were just read, and note the changes; the documents after."""
        entry, keys = self.entry, [each["_id"] for each in befores]
        stale: list[Any] = []
        if entry.versions.is_versioned:
            # These met the filter as they were stored, whether or not they do in the current version.
            stale = [each["_id"] for each in befores if entry.versions.is_outdated(each)]
            if stale:
                server = yield from server_facts()
                server.require_transactions(f"an update of an outdated {entry.model.__name__}")
            befores = yield from upgrade_stored(entry, befores, changes)
        with self._translated():
            afters = yield from write(keys, stale)
        pairs = [(each, afters.get(freeze(each["_id"]), each)) for each in befores]
        final = yield from follow_own(entry, pairs)
        if not self.sure or any(derivation(each).formulas for each in entry.kinds.related):
            yield from require_valid(entry, befores, final, changes)
        yield from changes.add(entry, zip(befores, final, strict=True))
        return [each for each in final if freeze(each["_id"]) in afters]


class UpdateOneDocument(_Update, Write[D | None]):
    """An update of one document, which somebody may have to follow."""

    def __init__(
        self,
        entry: ModelEntry[D],
        id_or_filter: Any,
        update: Any,
        sort: Sort | None = None,
        returns: Returns = "after",
        array_filters: Sequence[Any] | None = None,
    ) -> None:
        self._prepare(entry, update, array_filters)
        self.filter = crud.which(entry, id_or_filter)
        self.sort = sort_keys(sort, entry.paths.fields)
        # By an attribute only a pipeline sorts, so that the document is found first.
        self._by_attribute = sorts_by_attribute(entry.codec, self.sort)
        crud.check_returns(returns)
        self.returns = returns
        self.shows_document = returns == "after"
        self.options: Raw = {}
        if self.parsed.array_filters is not None:
            self.options["array_filters"] = self.parsed.array_filters

    def command(self) -> Plan[Raw | None] | None:
        return self._update_alone() if self._is_plain and not self._by_attribute else None

    def _update_alone(self) -> Plan[Raw | None]:
        with self._translated():
            raw = yield from crud.update_one_raw(
                self.entry, self.filter, self.update, self.sort, after=self.returns == "after", **self.options
            )
        return raw

    def apply(self, changes: Changes) -> Plan[Raw | None]:
        entry = self.entry
        maintains = any(
            rule.needs_before or changes.joined for each in entry.kinds.related for rule in each.rules
        )
        followed = (
            maintains or aggregates_of(entry) or entry.versions.is_versioned or self.returns == "before"
        )
        # Whoever refers to it by a name that it had must be found by that.
        followed = (
            followed or self._by_attribute or any(each.paths.alternate_keys for each in entry.kinds.related)
        )
        followed = followed or not self.sure
        if not followed:
            return (yield from self._without_before(changes))
        before = yield from self._first()
        if before is None:
            return None
        return (yield from self.update_found(before, changes))

    def _first(self) -> Plan[Raw | None]:
        """The document that matches first."""
        if not self._by_attribute:
            return (yield from find_one(self.entry.collection, self.filter, sort=self.sort))
        sorting, tidying = sorting_stages(self.entry.codec, self.sort or ())
        stages: list[Raw] = [{"$match": self.filter}, *sorting, {"$limit": 1}, tidying]
        rows = yield from aggregate(self.entry.collection, stages)
        return rows[0] if rows else None

    def update_found(self, before: Raw, changes: Changes) -> Plan[Raw | None]:
        """Update the document that was just read."""
        afters = yield from self._apply([before], self._write, changes)
        if not afters or self.returns == "after":
            return afters[0] if afters else None
        return (yield from upgraded(self.entry, [before]))[0]

    def _write(self, keys: list[Any], stale: list[Any]) -> Plan[dict[Any, Raw]]:
        only_it = by_id(keys[0]) if stale else {"$and": [by_id(keys[0]), self.filter]}
        after = yield from find_one_and_update(self.entry.collection, only_it, self.update, **self.options)
        return {} if after is None else {freeze(keys[0]): after}

    @property
    def key(self) -> list[Any]:
        """The id of the one document that it means; nothing where another may be meant."""
        simple = not self.options and self.sort is None and self.returns == "after"
        named = self.filter.get("_id")
        if not simple or type(named) is not ObjectId or self.filter != self.entry.filter_for_id(named):
            return []
        return [named]

    def _without_before(self, changes: Changes) -> Plan[Raw | None]:
        """An update that nobody has to know the former state of: there are copies at most, which may stay."""
        with self._translated():
            recorded = any(each.rules for each in self.entry.kinds.related)
            sets = None if recorded else _plain_sets(self.update)
            raw = yield from find_one_and_update(
                self.entry.collection,
                self.filter,
                self.update,
                sort=self.sort,
                after=sets is None,
                **self.options,
            )
        if raw is None:
            return None
        if sets is None:
            yield from changes.add(self.entry, [(NOT_READ, raw)])
            return raw
        after = {**raw, **sets}
        yield from changes.add(self.entry, [(raw, after)])
        return after

    def result(self, outcome: Raw | None) -> D | None:
        return None if outcome is None else as_written(self.entry, outcome)


def _plain_sets(update: Any) -> Raw | None:
    """What an update sets, as it will be read, where it does nothing but set whole fields; else None.

    Then the document before it tells what the document after it is, and no second look is needed.
    """
    if not isinstance(update, Mapping) or update.keys() != {"$set"}:
        return None
    sets = update["$set"]
    if not isinstance(sets, Mapping) or any("." in name or name.startswith("$") for name in sets):
        return None
    return bson.decode(bson.encode(sets, codec_options=CODEC_OPTIONS), CODEC_OPTIONS)


class UpdateEach(_Update, Write[list[Raw | None]]):
    """Updates of single documents by their ids, in one round of commands."""

    def __init__(self, updates: Sequence[UpdateOneDocument[Any]]) -> None:
        self.updates = list(updates)
        self.entry = updates[0].entry
        self.filter, self.update = {}, [each.update for each in updates]
        self.sure = all(each.sure for each in updates)

    def apply(self, changes: Changes) -> Plan[list[Raw | None]]:
        keys = distinct(key for each in self.updates for key in each.key)
        befores = list((yield from by_ids(self.entry.collection, keys)).values())
        found = [each for each in befores if self.entry.targets.admits(each)]
        afters = (yield from self._apply(found, self._write, changes)) if found else []
        by_key = {freeze(each["_id"]): each for each in afters}
        return [by_key.get(freeze(each.key[0])) for each in self.updates]

    def _write(self, keys: list[Any], stale: list[Any]) -> Plan[dict[Any, Raw]]:
        operations = [UpdateOne(each.filter, each.update) for each in self.updates]
        yield from bulk_write(self.entry.collection, operations)
        return (yield from by_ids(self.entry.collection, keys))


class UpdateManyDocuments(_Update, ChunkedWrite):
    """An update of the documents of one chunk."""

    def __init__(self, entry: ModelEntry[Any], filter: Any, update: Any) -> None:
        crud.require_filter(entry, filter)
        self._prepare(entry, update)
        self.filter = parse_filter(entry.paths.fields, filter)

    def command(self) -> Plan[int] | None:
        return self._update_alone() if self._is_plain and self.keys is None and not self._collides else None

    @property
    def _collides(self) -> bool:
        """Whether documents may be refused for a value that another has: then a chunk is done as a whole."""
        touched = self.parsed.touched
        unique = self.entry.rules.memo("unique paths", lambda: _unique_paths(self.entry))
        return bool(unique) and (
            touched is None or any(overlap(each, path) for each in touched for path in unique)
        )

    def _update_alone(self) -> Plan[int]:
        whole = yield from is_inside()
        with self._translated():
            try:
                return (yield from crud.update_many_raw(self.entry, self.filter, self.update))
            except WriteError as error:
                # The server has written the documents before the refused one, and does not say how many.
                clear = translate_update(error, self.entry.model.__name__, [])
                if not whole:
                    yield from self._refused_of_none()
                    raise PartlyDone(self.entry.model.__name__, None, clear) from error
                raise

    def _refused_of_none(self) -> Plan[None]:
        """Raises where the server refuses the update for what it is, whatever it would be done to."""
        yield from update_many(self.entry.collection, {"_id": {"$in": []}}, self.update)

    def apply(self, changes: Changes) -> Plan[int]:
        befores = yield from find(self.entry.collection, confined(self.filter, self.keys))
        if befores:
            yield from self._apply(befores, self._write, changes)
        return len(befores)

    def _write(self, keys: list[Any], stale: list[Any]) -> Plan[dict[Any, Raw]]:
        as_found = {freeze(key) for key in stale}
        others = [key for key in keys if freeze(key) not in as_found]
        if others:
            yield from update_many(self.entry.collection, confined(self.filter, others), self.update)
        if stale:
            yield from update_many(self.entry.collection, {"_id": {"$in": stale}}, self.update)
        return (yield from by_ids(self.entry.collection, keys))


def _unique_paths(entry: ModelEntry[Any]) -> list[str]:
    unique = [index.document for index in declared_indexes(entry.kinds.root) if index.document.get("unique")]
    return [path for document in unique for path in dict(document["key"])]


def follow_own(entry: ModelEntry[Any], pairs: Sequence[tuple[Raw, Raw]]) -> Plan[list[Raw]]:
    """Refill changed references and recompute formulas of documents just written; the documents after.

    Each by the rules of its kind after the write.
    """
    if entry.kinds.family is None:
        return (yield from _follow_class(entry, pairs))
    followed: dict[Any, Raw] = {}
    for exact, group in entry.kinds.split([(after, before) for before, after in pairs]):
        for after in (yield from _follow_class(exact, [(before, after) for after, before in group])):
            followed[freeze(after["_id"])] = after
    return [followed[freeze(after["_id"])] for _, after in pairs]


def _follow_class(entry: ModelEntry[Any], pairs: Sequence[tuple[Raw, Raw]]) -> Plan[list[Raw]]:
    derived = derivation(entry)
    stages, afters = derived.formula_stages, [after for _, after in pairs]
    filled = afters
    if derived.fills:
        filled = copy.deepcopy(afters)
        yield from fill_own(entry, list(zip([before for before, _ in pairs], filled, strict=True)))
    updates = []
    for written, after in zip(afters, filled, strict=True):
        sets = changed_fields(written, after)
        if sets or stages:
            updates.append((by_id(after["_id"]), [*([{"$set": sets}] if sets else []), *stages]))
    if not updates:
        return filled
    if len(filled) == 1:
        again = yield from find_one_and_update(entry.collection, *updates[0])
        return [again] if again is not None else filled
    yield from bulk_write(entry.collection, [UpdateOne(*each) for each in updates], ordered=False)
    if not stages:
        return filled
    now = yield from by_ids(entry.collection, [each["_id"] for each in filled])
    return [now[freeze(each["_id"])] for each in filled]
