"""Updates and replacements of models that feed others or maintain something themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from pymongo import UpdateOne

from treadle.engine import crud, lazy
from treadle.engine.fill import compute_formulas, fill_own
from treadle.engine.inserts import refuse_group
from treadle.engine.ledger import Ledger
from treadle.engine.pages import by_ids
from treadle.engine.pipelines import changed_fields, derivation
from treadle.engine.work import ChunkedWork, Work, only
from treadle.errors import DataError, UsageError
from treadle.graph.change import Change
from treadle.graph.gather import GatherRule
from treadle.graph.graph import Graph
from treadle.graph.pattern import Entry
from treadle.model.bson_types import RESERVED
from treadle.model.document import Document
from treadle.plan import (
    Plan,
    Raw,
    Update,
    bulk_write,
    by_id,
    find,
    find_one,
    find_one_and_update,
    replace_one,
    update_many,
)
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze
from treadle.query.paths import has, overlap, plain, put, value_at
from treadle.query.safety import clean_filter, clean_update, touched_paths

D = TypeVar("D", bound=Document)


def check_update(entry: Entry[Any], update: Update) -> set[str] | None:
    """Refuse an update of maintained fields; the plain paths that it touches, None for any."""
    touched = touched_paths(update)
    if touched is None:
        if entry.shielded:
            raise UsageError(
                f"this pipeline rewrites the whole {entry.model.__name__}, maintained fields included; "
                "set the fields that change with $set",
                code="field-maintained",
            )
        return None
    paths = {plain(path) for path in touched}
    for path in paths:
        if path == RESERVED or path.startswith(RESERVED + "."):
            raise UsageError(f"{RESERVED} is Treadle's own and cannot be updated", code="field-maintained")
        for maintained, rule in entry.shielded.items():
            around = rule.refills and maintained.startswith(path + ".")
            if overlap(path, maintained) and not around:
                name = f"{entry.model.__name__}.{maintained}"
                raise UsageError(
                    f"{path!r} cannot be updated, because Treadle maintains {name}{rule.advice(maintained)}",
                    code="field-maintained",
                )
    return paths


def concerns(entry: Entry[Any], touched: set[str] | None) -> bool:
    """Whether an update of these paths must be followed."""
    if entry.plain:
        return False
    if touched is None or entry.watched is None:
        return True
    return any(overlap(path, watched) for path in touched for watched in entry.watched)


def writes_older(entry: Entry[Any]) -> bool:
    """Whether this Store stores some of a model's documents in an older version than the current one."""
    lineages = [each.lineage for each in [entry, *entry.below]]
    return any(lineage is not None and lineage.written < lineage.current for lineage in lineages)


def speaks_of_current(entry: Entry[Any]) -> bool:
    """Whether a write must find its document in the current version, whose names it uses."""
    return entry.versioned and not writes_older(entry)


def may_upgrade(entry: Entry[Any]) -> bool:
    """Whether bringing a document to the current version may change what others follow from."""
    return speaks_of_current(entry) and not entry.plain and (entry.watched is None or bool(entry.watched))


class _Update:
    """What updates of one document and of many have in common."""

    entry: Entry[Any]
    filter: Raw
    update: Any

    def _prepare(self, entry: Entry[Any], update: Any) -> None:
        self.entry = entry
        self.update = clean_update(entry.codec, update)
        self.touched = set() if entry.plain else check_update(entry, self.update)

    @property
    def alone(self) -> bool:
        followed = concerns(self.entry, self.touched) or may_upgrade(self.entry)
        return not followed and not writes_older(self.entry)

    def _translated(self) -> AbstractContextManager[None]:
        return crud.translated(self.entry.model.__name__, [self.filter, {"update": self.update}])

    def _apply(
        self,
        befores: Sequence[Raw],
        write: Callable[[list[Any]], Plan[dict[Any, Raw]]],
        server: Capabilities,
        ledger: Ledger,
    ) -> Plan[list[Raw]]:
        """Update documents that were just read, and note the changes; the documents after."""
        entry, keys, older = self.entry, [each["_id"] for each in befores], writes_older(self.entry)
        # What others follow from is what was stored, in whichever version.
        stored = befores
        if older:
            lazy.check_lowering(entry, server)
        else:
            yield from ledger.note_before(entry, keys)
        if entry.versioned:
            befores = yield from lazy.upgraded(entry, befores)
        if older:
            stored = befores
            yield from ledger.note_before(entry, keys)
        with self._translated():
            afters = yield from write(keys)
        # One that the filter no longer finds in the current version was brought up all the same.
        pairs = [(each, afters.get(freeze(each["_id"]), each)) for each in befores]
        final = yield from follow_own(entry, pairs)
        if entry.versioned:
            yield from lazy.downgraded(entry, final)
        by_key = {freeze(each["_id"]): each for each in stored}
        for after in final:
            ledger.add(Change(entry.collection, after["_id"], by_key[freeze(after["_id"])], after))
        return [each for each in final if freeze(each["_id"]) in afters]


class UpdateOneDocument(_Update, Work[D | None]):
    """An update of one document, which somebody may have to follow."""

    def __init__(self, entry: Entry[D], id_or_filter: Any, update: Any) -> None:
        self._prepare(entry, update)
        self.filter = crud.which(entry, id_or_filter)

    def direct(self) -> Plan[Raw | None]:
        with self._translated():
            return (yield from crud.update_one_raw(self.entry, self.filter, self.update))

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[Raw | None]:
        entry = self.entry
        maintains = any(each.rules for each in entry.related)
        # Without a transaction an intent must name the document before it is written.
        if ledger.transactional and not (maintains or entry.feeding(GatherRule) or entry.versioned):
            return (yield from self._only_copied(ledger))
        before = yield from find_one(entry.collection, self.filter)
        if before is None:
            return None
        afters = yield from self._apply([before], self._write, server, ledger)
        return afters[0] if afters else None

    def _write(self, keys: list[Any]) -> Plan[dict[Any, Raw]]:
        only_it = {"$and": [by_id(keys[0]), self.filter]}
        after = yield from find_one_and_update(self.entry.collection, only_it, self.update)
        return {} if after is None else {freeze(keys[0]): after}

    def _only_copied(self, ledger: Ledger) -> Plan[Raw | None]:
        """An update of a source that has nothing but copies: what it was does not matter."""
        with self._translated():
            after = yield from find_one_and_update(self.entry.collection, self.filter, self.update)
        if after is not None:
            ledger.add(Change(self.entry.collection, after["_id"], {}, after))
        return after

    def result(self, outcome: Raw | None) -> D | None:
        return None if outcome is None else self.entry.codec.load(outcome)


class UpdateManyDocuments(_Update, ChunkedWork):
    """An update of the documents of one chunk."""

    def __init__(self, entry: Entry[Any], filter: Any, update: Any) -> None:
        crud.require_filter(entry, filter)
        self._prepare(entry, update)
        self.filter = clean_filter(entry.codec, filter)

    def direct(self) -> Plan[int]:
        with self._translated():
            return (yield from crud.update_many_raw(self.entry, self.filter, self.update))

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[int]:
        befores = yield from find(self.entry.collection, only(self.filter, self.keys))
        if befores:
            yield from self._apply(befores, self._write, server, ledger)
        return len(befores)

    def _write(self, keys: list[Any]) -> Plan[dict[Any, Raw]]:
        yield from update_many(self.entry.collection, only(self.filter, keys), self.update)
        return (yield from by_ids(self.entry.collection, keys))


def follow_own(entry: Entry[Any], pairs: Sequence[tuple[Raw, Raw]]) -> Plan[list[Raw]]:
    """Refill changed references and recompute formulas of documents just written; the documents after.

    Each by the rules of its kind after the write.
    """
    if entry.family is None:
        return (yield from _follow_class(entry, pairs))
    followed: dict[Any, Raw] = {}
    for exact, group in entry.by_class([(after, before) for before, after in pairs]):
        for after in (yield from _follow_class(exact, [(before, after) for after, before in group])):
            followed[freeze(after["_id"])] = after
    return [followed[freeze(after["_id"])] for _, after in pairs]


def _follow_class(entry: Entry[Any], pairs: Sequence[tuple[Raw, Raw]]) -> Plan[list[Raw]]:
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


class Replace(Work[D]):
    """A whole document, except for what Treadle maintains in it."""

    entry: Entry[D]
    # Whether rules have put something of their own into the new document's reserved state.
    prepared = False

    def __init__(self, entry: Entry[D], document: D, was: Entry[Any] | None = None) -> None:
        refuse_group(entry, "replaced")
        self.entry = entry
        # The class that the stored document must have.
        self.was: Entry[Any] = was or entry
        altered: list[Any] = []
        self.raw = crud.dump(entry, document, altered)
        self._result = crud.as_stored(entry, document, self.raw, altered) if self.alone else document

    @property
    def alone(self) -> bool:
        return self.entry.plain and self.was.plain

    def _filter(self) -> Raw:
        """The filter for the document as it is said to be stored."""
        return {**by_id(self.raw["_id"]), **self.was.exactly}

    def _refusal(self) -> Plan[DataError]:
        """The error where there is no such document."""
        return crud.gone(self.entry, self.raw["_id"])
        yield  # pragma: no cover

    def direct(self) -> Plan[Raw]:
        entry = self.entry
        with crud.translated(entry.model.__name__, [self.raw], entry):
            result = yield from replace_one(entry.collection, self._filter(), self.raw)
        if not result.matched_count:
            raise (yield from self._refusal())
        return self.raw

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[Raw]:
        entry, identity = self.entry, self.raw["_id"]
        before = yield from find_one(entry.collection, self._filter())
        if before is None:
            raise (yield from self._refusal())
        yield from self._note(before, ledger)
        after = yield from self._after(before, server)
        if derivation(entry).fills:
            yield from fill_own(entry, [(before, after)])
        with crud.translated(entry.model.__name__, [after], entry):
            kept = self._kept()
            if kept:
                after = yield from _replace_keeping(entry, kept, after, self.prepared)
            else:
                yield from replace_one(entry.collection, by_id(identity), after)
        if derivation(entry).formulas:
            (after,) = yield from compute_formulas(entry, [identity])
        ledger.add(Change(entry.collection, identity, before, after))
        return after

    def _kept(self) -> dict[str, Any]:
        """What is left as it is stored, with a first value."""
        return self.entry.kept

    def _note(self, before: Raw, ledger: Ledger) -> Plan[None]:
        """Refuse what must not be replaced, and note what was."""
        yield from ledger.note_before(self.entry, [before["_id"]])
        for rule in self.entry.answering("before_replace"):
            rule.before_replace(before, self.raw)

    def _after(self, before: Raw, server: Capabilities) -> Plan[Raw]:
        """The new document, with what is maintained in the stored one kept."""
        after = copy.deepcopy(self.raw)
        for path, rule in self.entry.protected.items():
            if self.was.protected.get(path) is rule and not rule.refills and has(before, path):
                put(after, path, value_at(before, path))
        if RESERVED in before:
            after[RESERVED] = copy.deepcopy(before[RESERVED])
        return after
        yield  # pragma: no cover

    def result(self, outcome: Raw) -> D:
        return self._result if self.alone else self.entry.codec.load(outcome)


def _replace_keeping(entry: Entry[Any], stored: dict[str, Any], document: Raw, prepared: bool) -> Plan[Raw]:
    """Write a whole document, except for what others write all the time; the document after.

    One update that takes those values from the stored document itself: what
    was read a moment ago may be stale, and must not be written back.
    """
    kept: Raw = {
        f"new.{path}": {"$ifNull": [f"$old.{path}", {"$literal": value}]} for path, value in stored.items()
    }
    rest = {name: value for name, value in document.items() if name != RESERVED}
    state: Any = {"$literal": document.get(RESERVED, {})} if prepared else f"$old.{RESERVED}"
    pipeline: list[Raw] = [
        {"$replaceWith": {"new": {"$literal": rest}, "old": "$$ROOT"}},
        {"$set": {**kept, f"new.{RESERVED}": state}},
        {"$replaceWith": "$new"},
    ]
    after = yield from find_one_and_update(entry.collection, by_id(document["_id"]), pipeline)
    return document if after is None else after
