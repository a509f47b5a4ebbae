"""Writes of models that feed others or maintain something themselves.

Each write is a `Work`: a body that runs inside a transaction, changes
documents and notes the changes in a ledger, and a result for its caller that
is made after the commit. Several works can share one transaction
(`maintenance/commit.py`), because what their changes do to other documents is
done once, at the end, for all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from pymongo import UpdateOne

from treadle.engine import crud, lazy
from treadle.engine.fill import compute_formulas, fill_references
from treadle.engine.guards import guard
from treadle.engine.kept import insert_overflow, replace_keeping, split_arrays
from treadle.engine.ledger import Ledger
from treadle.engine.react import formula_stages
from treadle.engine.recompute import recompute
from treadle.errors import UsageError
from treadle.graph.change import Change
from treadle.graph.graph import Entry, Graph
from treadle.model.bson_types import RESERVED
from treadle.model.document import Document
from treadle.model.lazy_id import is_unknown
from treadle.model.storable import check_batch
from treadle.patterns.extended_reference import ReferenceRule
from treadle.patterns.tree import placing
from treadle.plan import (
    Plan,
    Raw,
    Update,
    bulk_write,
    by_id,
    find,
    find_one,
    find_one_and_update,
    insert_many,
    insert_one,
    replace_one,
    update_many,
)
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze
from treadle.query.paths import has, overlap, plain, put, value_at
from treadle.query.safety import clean_filter, clean_update, touched_paths

D = TypeVar("D", bound=Document)
R = TypeVar("R")

# More documents than this are inserted in several transactions.
INSERT_MAX = 10_000
CHUNK = 1000


class Work(Generic[R]):
    """One write: what happens in the transaction, and what the caller gets."""

    entry: Entry[Any]
    # Whether the outcome is the document (or documents) as stored.
    shows_document = True

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[Any]:
        """Change documents and note the changes; may run again from the start."""
        raise NotImplementedError  # pragma: no cover

    @property
    def alone(self) -> bool:
        """Whether nothing else follows from it, so that `direct` will do."""
        return False

    def direct(self, graph: Graph, server: Capabilities) -> Plan[Any]:
        """The write as one plain command."""
        raise NotImplementedError  # pragma: no cover

    def result(self, outcome: Any) -> R:
        """What the caller gets, from what the body returned."""
        raise NotImplementedError  # pragma: no cover

    def joins(self, other: Work[Any]) -> bool:
        """Whether `joined` can make one work of this one and another; then `size` is its share."""
        return False


class ChunkedWork(Work[int]):
    """A bulk write that can be confined to some documents."""

    shows_document = False
    filter: Raw
    # Whether it makes sense only for all documents together.
    together = False

    def within(self, keys: list[Any]) -> ChunkedWork:
        """The same write, of these documents only."""
        raise NotImplementedError  # pragma: no cover


def refuse_rollup(entry: Entry[Any], done: str) -> None:
    """Refuse what would make, replace or remove the document of a group."""
    if entry.group is not None:
        source = entry.group.source
        raise UsageError(
            f"{entry.model.__name__} documents cannot be {done}, because Treadle makes and removes them as "
            f"their groups of {source.model.__name__} come and go; write the {source.model.__name__} "
            "documents instead",
            code="rollup-maintained",
        )


# -- insert -------------------------------------------------------------------------


class Insert(Work[list[D]]):
    """New documents of one model."""

    entry: Entry[D]

    def __init__(self, entry: Entry[D], documents: Sequence[D], parents: Sequence[Any] | None = None) -> None:
        refuse_rollup(entry, "inserted")
        self.entry = entry
        self.documents = list(documents)
        # Of a tree: where each goes, if that is not for its own fields to say.
        self.parents = list(parents) if parents is not None else [placing.UNSTATED] * len(self.documents)
        # Nobody refers to an id that nobody can know, unless the documents refer to each other.
        among_themselves = any(rule.target.collection == entry.collection for rule in entry.feeds_references)
        self.fresh = [is_unknown(document) and not among_themselves for document in self.documents]
        self.altered: list[list[Any]] = [[] for _ in self.documents]
        self.raws = [
            crud.dump(entry, document, altered)
            for document, altered in zip(self.documents, self.altered, strict=True)
        ]
        for document, raw, altered in zip(self.documents, self.raws, self.altered, strict=True):
            crud.as_stored(entry, document, raw, altered)
        if len(self.raws) > 1:
            check_batch(self.raws, entry.model.__name__)
        for raw in self.raws:
            raw.pop(RESERVED, None)
            for rule in entry.gathers:
                for path, value in rule.empty().items():
                    put(raw, path.split("."), copy.deepcopy(value))
                for stamp in rule.stamps():
                    put(raw, stamp.split("."), None)
            for formula in entry.formulas:
                put(raw, formula.path.split("."), None)
        self.overflow = split_arrays(entry, self.raws)

    @property
    def alone(self) -> bool:
        """Whether one plain command will do."""
        entry = self.entry
        all_fresh = all(self.fresh)
        return not (
            entry.feeds_gathers
            or entry.formulas
            or self.overflow
            or any(rule.guards_source for rule in entry.references)
            or (not all_fresh and (entry.inline_gathers or entry.feeds_references))
            or (entry.tree and not placing.stands_alone(entry.tree, self.raws, self.parents))
        )

    @property
    def size(self) -> int:
        return len(self.raws)

    def joins(self, other: Work[Any]) -> bool:
        return isinstance(other, Insert) and other.entry is self.entry

    def joined(self, other: Insert[D]) -> Insert[D]:
        """This insert and another of the same model, as one."""
        both = copy.copy(self)
        both.documents = [*self.documents, *other.documents]
        both.fresh = [*self.fresh, *other.fresh]
        both.altered = [*self.altered, *other.altered]
        both.raws = [*self.raws, *other.raws]
        both.overflow = [*self.overflow, *other.overflow]
        both.parents = [*self.parents, *other.parents]
        return both

    def direct(self, graph: Graph, server: Capabilities) -> Plan[list[Raw]]:
        return (yield from self.body(graph, server, Ledger()))

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[list[Raw]]:
        entry = self.entry
        yield from ledger.note_new(entry, [raw["_id"] for raw in self.raws])
        yield from self._gather_existing(server)
        placed = (
            (yield from placing.place(entry.tree, self.raws, self.parents, ledger)) if entry.tree else None
        )
        yield from fill_references(entry, [(None, raw) for raw in self.raws])
        after_it = yield from insert_overflow(server, self.overflow)
        in_order = placed.order if placed is not None else self.raws
        with placing.segment_errors(entry.tree), crud.translated(entry.model.__name__, self.raws):
            if len(self.raws) == 1:
                yield from insert_one(entry.collection, self.raws[0])
            else:
                yield from insert_many(entry.collection, in_order)
        yield from after_it()
        if entry.tree is not None and placed is not None:
            yield from placing.list_children(entry.tree, placed, ledger)
        raws = self.raws
        yield from self._stamp()
        if entry.formulas:
            raws = yield from compute_formulas(entry, [raw["_id"] for raw in raws])
        for raw, fresh in zip(raws, self.fresh, strict=True):
            ledger.add(Change(entry.collection, raw["_id"], None, raw, fresh))
        return raws

    def _known(self) -> list[Raw]:
        """The documents whose ids others may know already."""
        return [raw for raw, fresh in zip(self.raws, self.fresh, strict=True) if not fresh]

    def _stamp(self) -> Plan[None]:
        """Date the values of targets that were filled from their sources."""
        stamps = {stamp: "$$NOW" for rule in self.entry.inline_gathers for stamp in rule.stamps()}
        known = {freeze(raw["_id"]): raw for raw in self._known()}
        if not stamps or not known:
            return
        condition = {"_id": {"$in": [raw["_id"] for raw in known.values()]}}
        yield from update_many(self.entry.collection, condition, [{"$set": stamps}])
        dated = yield from find(self.entry.collection, condition, dict.fromkeys(stamps, 1))
        for found in dated:
            for stamp in stamps:
                put(known[freeze(found["_id"])], stamp.split("."), value_at(found, stamp.split(".")))

    def _gather_existing(self, server: Capabilities) -> Plan[None]:
        """Fill a target that is inserted after its sources."""
        entry = self.entry
        known = self._known()
        if not known or not entry.inline_gathers:
            return
        keys = [raw["_id"] for raw in known]
        yield from guard(entry.collection, keys)
        values = yield from recompute(entry.inline_gathers, keys, server.version)
        for raw in known:
            for path, value in values[freeze(raw["_id"])].items():
                put(raw, path.split("."), value)

    def result(self, outcome: list[Raw]) -> list[D]:
        return [
            self._as_stored(document, raw, altered)
            for document, raw, altered in zip(self.documents, outcome, self.altered, strict=True)
        ]

    def _as_stored(self, document: D, raw: Raw, altered: list[Any]) -> D:
        document.__pydantic_fields_set__.add("id")
        if not altered and not self.entry.protected:
            return document
        return self.entry.codec.load(copy.deepcopy(raw))


# -- update ---------------------------------------------------------------------------


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
            inside_array = isinstance(rule, ReferenceRule) and maintained.startswith(path + ".")
            if overlap(path, maintained) and not inside_array:
                raise UsageError(_refusal(entry, path, maintained, rule), code="field-maintained")
    return paths


def _refusal(entry: Entry[Any], path: str, maintained: str, rule: Any) -> str:
    name = f"{entry.model.__name__}.{maintained}"
    begin = f"{path!r} cannot be updated, because Treadle maintains {name}"
    if (advice := rule.instead(maintained)) is not None:
        return f"{begin}; {advice}"
    if isinstance(rule, ReferenceRule):
        return f"{begin}; write {rule.reference_path!r}, or the {rule.source.model.__name__} that it names"
    source = getattr(rule, "source", None)
    if source is not None:
        return f"{begin} from {source.collection}; write the {source.model.__name__} documents instead"
    return f"{begin} from the document's other fields; write those instead"


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


def may_raise(entry: Entry[Any]) -> bool:
    """Whether bringing a document to the current version may change what others follow from."""
    return speaks_of_current(entry) and not entry.plain and (entry.watched is None or bool(entry.watched))


def _raised(entry: Entry[Any], befores: Sequence[Raw], server: Capabilities) -> Plan[list[Raw]]:
    """The documents in the version of which an update speaks."""
    if writes_older(entry):
        lazy.check_lowering(entry, server)
    return (yield from lazy.raised(entry, befores))


class UpdateOneDocument(Work[D | None]):
    """An update of one document, which somebody may have to follow."""

    def __init__(self, entry: Entry[D], id_or_filter: Any, update: Any) -> None:
        self.entry = entry
        self.filter = crud.which(entry, id_or_filter)
        self.update = clean_update(entry.codec, update)
        self.touched = check_update(entry, self.update)

    @property
    def alone(self) -> bool:
        followed = concerns(self.entry, self.touched) or may_raise(self.entry)
        return not followed and not writes_older(self.entry)

    def direct(self, graph: Graph, server: Capabilities) -> Plan[Raw | None]:
        with crud.translated(self.entry.model.__name__, [{"update": self.update}]):
            return (yield from crud.update_one_raw(self.entry, self.filter, self.update))

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[Raw | None]:
        entry = self.entry
        maintains = any(each.rules for each in entry.related)
        if server.transactions and not (maintains or entry.feeds_gathers or entry.versioned):
            return (yield from self._only_copied(ledger))
        before = yield from find_one(entry.collection, self.filter)
        if before is None:
            return None
        # What others follow from is what was stored, in whichever version.
        stored = before
        if not writes_older(entry):
            yield from ledger.note_before(entry, [before["_id"]])
        if entry.versioned:
            (before,) = yield from _raised(entry, [before], server)
        if writes_older(entry):
            stored = before
            yield from ledger.note_before(entry, [before["_id"]])
        only = {"$and": [by_id(before["_id"]), self.filter]}
        with crud.translated(entry.model.__name__, [{"update": self.update}]):
            after = yield from find_one_and_update(entry.collection, only, self.update)
        if after is None:
            return None
        (after,) = yield from follow_own(entry, [(before, after)])
        if entry.versioned:
            yield from lazy.lowered(entry, [after])
        ledger.add(Change(entry.collection, before["_id"], stored, after))
        return after

    def _only_copied(self, ledger: Ledger) -> Plan[Raw | None]:
        """An update of a source that has nothing but copies: what it was does not matter."""
        with crud.translated(self.entry.model.__name__, [{"update": self.update}]):
            after = yield from find_one_and_update(self.entry.collection, self.filter, self.update)
        if after is not None:
            ledger.add(Change(self.entry.collection, after["_id"], {}, after))
        return after

    def result(self, outcome: Raw | None) -> D | None:
        return None if outcome is None else self.entry.codec.load(copy.deepcopy(outcome))


def follow_own(entry: Entry[Any], pairs: Sequence[tuple[Raw, Raw]]) -> Plan[list[Raw]]:
    """Refill changed references and recompute formulas of documents just written."""
    if entry.family is not None:
        return (yield from _follow_kinds(entry, pairs))
    return (yield from _follow_class(entry, pairs))


def _follow_kinds(entry: Entry[Any], pairs: Sequence[tuple[Raw, Raw]]) -> Plan[list[Raw]]:
    """The same for documents of several kinds, each by the rules of its own."""
    followed: dict[Any, Raw] = {}
    for exact, group in entry.by_class(pairs):
        for after in (yield from _follow_class(exact, group)):
            followed[freeze(after["_id"])] = after
    return [followed[freeze(after["_id"])] for _, after in pairs]


def _follow_class(entry: Entry[Any], pairs: Sequence[tuple[Raw, Raw]]) -> Plan[list[Raw]]:
    filled = (
        [copy.deepcopy(after) for _, after in pairs] if entry.references else [after for _, after in pairs]
    )
    if entry.references:
        yield from fill_references(
            entry, [(before, after) for (before, _), after in zip(pairs, filled, strict=True)]
        )
    updates = []
    stages = formula_stages(entry)
    for (_, written), after in zip(pairs, filled, strict=True):
        sets = {name: {"$literal": value} for name, value in after.items() if written.get(name) != value}
        if sets or stages:
            pipeline = [*([{"$set": sets}] if sets else []), *stages]
            updates.append((by_id(after["_id"]), pipeline))
    if not updates:
        return filled
    if len(filled) == 1:
        again = yield from find_one_and_update(entry.collection, *updates[0])
        return [again] if again is not None else filled
    yield from bulk_write(entry.collection, [UpdateOne(*each) for each in updates], ordered=False)
    if not stages:
        return filled
    found = yield from find(entry.collection, {"_id": {"$in": [each["_id"] for each in filled]}})
    by_key = {freeze(each["_id"]): each for each in found}
    return [by_key[freeze(each["_id"])] for each in filled]


class UpdateManyDocuments(ChunkedWork):
    """An update of the documents of one chunk."""

    def __init__(self, entry: Entry[Any], filter: Any, update: Any) -> None:
        self.entry = entry
        crud.require_filter(entry, filter)
        self.filter = clean_filter(entry.codec, filter)
        self.update = clean_update(entry.codec, update)
        self.touched = check_update(entry, self.update)
        self.keys: list[Any] | None = None

    @property
    def alone(self) -> bool:
        followed = concerns(self.entry, self.touched) or may_raise(self.entry)
        return not followed and not writes_older(self.entry)

    def direct(self, graph: Graph, server: Capabilities) -> Plan[int]:
        with crud.translated(self.entry.model.__name__, [{"update": self.update}]):
            return (yield from crud.update_many_raw(self.entry, self.filter, self.update))

    def within(self, keys: list[Any]) -> UpdateManyDocuments:
        """The same update, of these documents only."""
        chunk = copy.copy(self)
        chunk.keys = keys
        return chunk

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[int]:
        entry = self.entry
        condition = only(self.filter, self.keys)
        befores = yield from find(entry.collection, condition)
        if not befores:
            return 0
        keys = [each["_id"] for each in befores]
        stored = befores
        if not writes_older(entry):
            yield from ledger.note_before(entry, keys)
        if entry.versioned:
            befores = yield from _raised(entry, befores, server)
        if writes_older(entry):
            stored = befores
            yield from ledger.note_before(entry, keys)
        with crud.translated(entry.model.__name__, [{"update": self.update}]):
            yield from update_many(entry.collection, only(self.filter, keys), self.update)
        found = yield from find(entry.collection, {"_id": {"$in": keys}})
        afters = {freeze(each["_id"]): each for each in found}
        pairs = [(before, afters[freeze(before["_id"])]) for before in befores]
        final = yield from follow_own(entry, pairs)
        if entry.versioned:
            yield from lazy.lowered(entry, final)
        for before, after in zip(stored, final, strict=True):
            ledger.add(Change(entry.collection, before["_id"], before, after))
        return len(befores)

    def result(self, outcome: int) -> int:
        return outcome


def only(filter: Raw, keys: list[Any] | None) -> Raw:
    """A filter within some documents."""
    if keys is None:
        return filter
    return {"$and": [{"_id": {"$in": keys}}, filter]} if filter else {"_id": {"$in": keys}}


def next_keys(work: Any, last: Any) -> Plan[list[Any]]:
    """The ids of the next chunk of a bulk write, after the last one."""
    condition = work.filter
    if last is not None:
        condition = {"$and": [{"_id": {"$gt": last}}, condition]} if condition else {"_id": {"$gt": last}}
    found = yield from find(work.entry.collection, condition, {"_id": 1}, sort=[("_id", 1)], limit=CHUNK)
    if not found and last is not None and work.entry.identity_shape.kind != "scalar":
        # A range ends where the type of the ids changes; an expression compares across types.
        further = {"$expr": {"$gt": ["$_id", {"$literal": last}]}}
        condition = {"$and": [further, work.filter]}
        found = yield from find(work.entry.collection, condition, {"_id": 1}, sort=[("_id", 1)], limit=CHUNK)
    return [each["_id"] for each in found]


# -- replace ------------------------------------------------------------------------------


class Replace(Work[D]):
    """A whole document, except for what Treadle maintains in it."""

    entry: Entry[D]

    def __init__(self, entry: Entry[D], document: D) -> None:
        refuse_rollup(entry, "replaced")
        self.entry = entry
        self.document = document
        self.raw = crud.dump(entry, document, [])
        # The class that the stored document must have.
        self.replaces: Entry[Any] = entry

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[Raw]:
        entry = self.entry
        identity = self.raw["_id"]
        before = yield from find_one(entry.collection, {**by_id(identity), **self.replaces.exactly})
        if before is None:
            raise crud.gone(entry, identity)
        yield from ledger.note_before(entry, [identity])
        if entry.tree is not None:
            placing.check_replacement(entry.tree, before, self.raw)
        after = copy.deepcopy(self.raw)
        for path, rule in entry.protected.items():
            if not isinstance(rule, ReferenceRule):
                segments = path.split(".")
                if has(before, segments):
                    put(after, segments, value_at(before, segments))
        if RESERVED in before:
            after[RESERVED] = before[RESERVED]
        yield from fill_references(entry, [(before, after)])
        with crud.translated(entry.model.__name__, [after]):
            if entry.kept:
                after = yield from replace_keeping(entry, after)
            else:
                yield from replace_one(entry.collection, by_id(identity), after)
        if entry.formulas:
            (after,) = yield from compute_formulas(entry, [identity])
        ledger.add(Change(entry.collection, identity, before, after))
        return after

    def result(self, outcome: Raw) -> D:
        return self.entry.codec.load(copy.deepcopy(outcome))
