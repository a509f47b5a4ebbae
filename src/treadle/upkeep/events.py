"""What the worker watches, and which documents an event makes doubtful.

An event never says what a value should become. It only marks documents whose
maintained values have to be recomputed, so that seeing an event twice is
harmless, and a thousand events on one key cost one recomputation.

The server sends no more of a document than the keys in it: a large document
with its state before and after would not fit into one event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle.graph.derived import CopyRule, FormulaRule
from treadle.graph.gather import GatherRule
from treadle.graph.graph import Graph
from treadle.graph.pattern import Entry, Rule
from treadle.model.bson_types import RESERVED
from treadle.plan import Raw
from treadle.query.keys import GroupKey, freeze, may_be_id
from treadle.query.paths import outermost, overlap, plain, put, top, value_at

PRE_IMAGES_SINCE = (6, 0)
# What the worker writes to see it come round; its events lie in the stream as well.
BEATS = "treadle.beats"
BEFORE = "fullDocumentBeforeChange"
AFTER = "fullDocument"
# Whole collections, or the database, were dropped or renamed.
UPHEAVALS = frozenset({"drop", "rename", "dropDatabase", "invalidate"})
_UPDATED = {"$ifNull": ["$updateDescription.updatedFields", {}]}
_CUT = "truncatedArrays.field"


@dataclass(slots=True)
class Mark:
    """One document whose maintained values are doubtful."""

    key: Any
    # Whether a source changed, or only the document itself.
    sourced: bool = False
    # The fields with references and cards as they were before, where a reference changed;
    # `renewed`, the paths with positions, where it changed and nobody sent what was before.
    cards: Raw | None = None
    renewed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Fed:
    """What an event says about the targets of a source from now on.

    The keys of the targets it names: exactly these, or these besides those
    before. Of a source that belongs to a group, the fields that decide which:
    all of them if `exact`, else those that changed.
    """

    keys: tuple[Any, ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()
    exact: bool = False


@dataclass(slots=True)
class Doubt:
    """What a batch of events leaves to be recomputed."""

    targets: dict[Entry[Any], dict[Any, Mark]] = field(default_factory=dict)
    # Sources whose copies must follow, and sources that are gone.
    copies: dict[CopyRule, dict[Any, Any]] = field(default_factory=dict)
    gone: dict[CopyRule, dict[Any, Any]] = field(default_factory=dict)
    # Sources whose present keys must be looked up, and rollups' documents whose groups must.
    lookups: dict[GatherRule, dict[Any, Any]] = field(default_factory=dict)
    documents: dict[Entry[Any], dict[Any, Any]] = field(default_factory=dict)
    # What changed sources fed, in order, where the ledger of contributions is kept.
    entries: list[tuple[GatherRule, Any, Fed]] = field(default_factory=list)
    # Rules that have to be gone over from the beginning, because collections were dropped
    # or renamed, or because nobody sent the former state of a source.
    upset: set[Rule] = field(default_factory=set)
    blind: dict[Rule, str] = field(default_factory=dict)
    # How many documents could not be brought right, and were set aside.
    aside: int = 0

    def __bool__(self) -> bool:
        return bool(
            self.targets
            or self.copies
            or self.gone
            or self.lookups
            or self.documents
            or self.entries
            or self.upset
            or self.blind
        )

    def mark(
        self,
        target: Entry[Any],
        key: Any,
        *,
        sourced: bool,
        cards: Raw | None = None,
        renewed: frozenset[str] = frozenset(),
    ) -> None:
        if target.group is None and not may_be_id(key):
            return
        marks = self.targets.setdefault(target, {})
        mark = marks.setdefault(freeze(key), Mark(key))
        mark.sourced = mark.sourced or sourced
        mark.renewed |= renewed
        if cards is not None and mark.cards is None:
            # The earliest is what was there before all of them.
            mark.cards = cards


class Watch:
    """The stream rules of a Store, by the collection whose events concern them."""

    def __init__(self, graph: Graph, pre_images: Iterable[str] = ()) -> None:
        self.graph = graph
        self.pre_images = frozenset(pre_images)
        self.rules = [rule for rule in graph.rules if rule.maintain == "stream"]
        self.gathers: dict[str, list[GatherRule]] = {}
        self.copies: dict[str, list[CopyRule]] = {}
        self.own: dict[str, dict[Entry[Any], _Own]] = {}
        for rule in self.rules:
            if isinstance(rule, GatherRule):
                self.gathers.setdefault(rule.source.collection, []).append(rule)
            elif isinstance(rule, CopyRule):
                self.copies.setdefault(rule.source.collection, []).append(rule)
            of_collection = self.own.setdefault(rule.target.collection, {})
            of_collection.setdefault(rule.target, _Own(rule.target)).add(rule)
        self._watched = {
            rule: {name: self._with_kind(name, paths) for name, paths in rule.watches().items()}
            for rule in self.rules
        }
        # Windows in a time zone are the server's to tell; it does so in the stream itself.
        self._asked: dict[str, GroupKey] = {}
        self._names: dict[GatherRule, str] = {}
        for number, rule in enumerate(rule for rules in self.gathers.values() for rule in rules):
            if isinstance(rule.key, GroupKey) and not rule.key.local:
                self._names[rule] = f"key{number}"
                self._asked[f"key{number}"] = rule.key
        # Where the server keeps no former states, a ledger of contributions does.
        self.ledgered = [
            rule
            for rules in self.gathers.values()
            for rule in rules
            if rule.source.collection not in self.pre_images
        ]

    def _with_kind(self, collection: str, paths: set[str] | None) -> set[str] | None:
        """What a rule watches in a collection, without positions; also what tells the kind of a document."""
        if paths is None:
            return None
        entry = self.graph.by_collection.get(collection)
        kind = {entry.family.discriminator} if entry is not None and entry.family is not None else set()
        return {plain(path) for path in paths} | kind

    @property
    def collections(self) -> list[str]:
        return sorted({*self.gathers, *self.copies, *self.own})

    @property
    def targets(self) -> list[Entry[Any]]:
        """The models that hold stream-maintained values, each once."""
        return list(dict.fromkeys(rule.target for rule in self.rules))

    def needs_before(self) -> list[str]:
        """The collections whose former states say which keys they fed."""
        own = (
            name
            for name, several in self.own.items()
            if any(each.snapshots or each.keys for each in several.values())
        )
        return sorted({*self.gathers, *own})

    # -- the pipeline ---------------------------------------------------------------------

    def pipeline(self, options: Raw, besides: Iterable[str] = (), *, lean: bool = False) -> list[Raw]:
        """The change stream's stages; `lean` leaves documents out altogether."""
        stream = dict(options)
        if self.pre_images and not lean:
            stream["fullDocumentBeforeChange"] = "whenAvailable"
        names = {"$in": [*self.collections, *besides]}
        concerns = {
            "$or": [
                {"ns.coll": names},
                {"to.coll": names},
                {"operationType": {"$in": ["dropDatabase", "invalidate"]}},
            ]
        }
        return [
            {"$changeStream": stream},
            {"$match": concerns},
            {"$match": self._matters()},
            {"$project": self._projection(lean)},
        ]

    def _matters(self) -> Raw:
        """Which events are sent at all: updates only where they touch a field that somebody watches.

        Documents whose views are counted all day would else come by at every
        view. Names are compared up to their first dot; `note` looks closer.
        """
        branches: list[Raw] = [{"operationType": {"$ne": "update"}}]
        for collection in self.collections:
            fields = self._fields(collection)
            if fields is None:
                branches.append({"ns.coll": collection})
                continue
            watched, maintained = fields
            # Treadle's own writes count a revision; another writer's hand in a maintained field does not.
            foreign = {"$and": [_touching(maintained), {"$not": [_touching({RESERVED})]}]}
            branches.append({"ns.coll": collection, "$expr": {"$or": [_touching(watched), foreign]}})
        return {"$or": branches}

    def _fields(self, collection: str) -> tuple[set[str], set[str]] | None:
        """The fields of a collection that somebody watches, and those that are maintained in it.

        None where any field may matter.
        """
        paths: set[str] = set()
        maintained: set[str] = set()
        for rule in [*self.gathers.get(collection, ()), *self.copies.get(collection, ())]:
            watched = self._watched[rule].get(collection, set())
            if watched is None:
                return None
            paths |= watched
        for own in self.own.get(collection, {}).values():
            if own.all_matters:
                return None
            paths |= own.inputs | own.keys
            maintained |= own.maintained
        return {top(path) for path in paths}, {top(path) for path in maintained}

    def _projection(self, lean: bool) -> Raw:
        touched = {"$objectToArray": _UPDATED}
        projection: Raw = {
            "operationType": 1,
            "clusterTime": 1,
            "ns": 1,
            "to": 1,
            "documentKey": 1,
            "touched": {"$map": {"input": touched, "in": "$$this.k"}},
            "removed": "$updateDescription.removedFields",
            "cut": f"$updateDescription.{_CUT}",
        }
        if not lean:
            for path in outermost(self._paths()):
                projection[f"{AFTER}.{path}"] = 1
                projection[f"{BEFORE}.{path}"] = 1
            # Without a path of its own, whether there was such a state could not be told.
            projection[f"{AFTER}._id"] = projection[f"{BEFORE}._id"] = 1
            for name, key in self._asked.items():
                projection[f"{name}{AFTER}"] = [part.expression(f"{AFTER}.") for part in key.parts]
                projection[f"{name}{BEFORE}"] = [part.expression(f"{BEFORE}.") for part in key.parts]
        if self.ledgered and not lean:
            names = sorted({top(path) for rule in self.ledgered for path in rule.key.paths})
            paths = {"$in": [{"$arrayElemAt": [{"$split": ["$$this.k", "."]}, 0]}, names]}
            projection["values"] = {"$filter": {"input": touched, "cond": paths}}
        return projection

    def _paths(self) -> set[str]:
        paths = {path for rules in self.gathers.values() for rule in rules for path in rule.key.paths}
        for several in self.own.values():
            for own in several.values():
                paths |= own.snapshots | own.keys
        return {path for path in paths if path != "_id"}

    # -- marking ---------------------------------------------------------------------------

    def note(self, event: Mapping[str, Any], doubt: Doubt) -> None:
        """Mark what an event makes doubtful."""
        kind = event["operationType"]
        if kind in UPHEAVALS:
            doubt.upset |= self._upset(event)
            return
        collection = event["ns"]["coll"]
        key = event["documentKey"]["_id"]
        touched = _touched(event) if kind == "update" else None
        for gather in self.gathers.get(collection, ()):
            if self._feeds(gather, collection, touched):
                self._note_source(gather, kind, event, key, touched, doubt)
        for reference in self.copies.get(collection, ()):
            if kind == "delete":
                if reference.on_delete != "keep":
                    doubt.gone.setdefault(reference, {})[freeze(key)] = key
            elif kind == "insert" or (reference.synced and self._feeds(reference, collection, touched)):
                doubt.copies.setdefault(reference, {})[freeze(key)] = key
        for own in self.own.get(collection, {}).values():
            # Of which kind the document is will be seen when it is read.
            if own.concerned(touched):
                self._note_own(own, kind, event, key, doubt)

    def _note_own(self, own: _Own, kind: str, event: Mapping[str, Any], key: Any, doubt: Doubt) -> None:
        """Mark a target that was itself written."""
        if own.entry.group is not None:
            self._note_group(own, kind, event, key, doubt)
        elif kind != "delete":
            cards = self._former_cards(own, kind, event)
            renewed = own.renewed(event) if kind == "update" and cards is None else frozenset()
            doubt.mark(own.entry, key, sourced=False, cards=cards, renewed=renewed)

    def _note_group(self, own: _Own, kind: str, event: Mapping[str, Any], key: Any, doubt: Doubt) -> None:
        """Mark the groups that a rollup's document stood for and stands for."""
        known = [event[end] for end in (BEFORE, AFTER) if event.get(end)]
        for raw in known:
            doubt.mark(own.entry, own.entry.key_of({**raw, "_id": key}), sourced=False)
        if kind == "delete" and not known and not self._is_identity(own):
            doubt.blind.update(dict.fromkeys(own.entry.having(GatherRule), own.entry.collection))
        elif kind != "delete" or self._is_identity(own):
            doubt.documents.setdefault(own.entry, {})[freeze(key)] = key

    def _is_identity(self, own: _Own) -> bool:
        return own.entry.group is not None and own.entry.group.key.identity

    def _feeds(self, rule: Rule, collection: str, touched: set[str] | None) -> bool:
        if touched is None:
            return True
        watched = self._watched[rule].get(collection, set())
        if watched is None:
            # Any field may matter, except for Treadle's own.
            return any(not _reserved(path) for path in touched)
        return any(overlap(path, each) for path in touched for each in watched)

    def _note_source(
        self,
        rule: GatherRule,
        kind: str,
        event: Mapping[str, Any],
        key: Any,
        touched: set[str] | None,
        doubt: Doubt,
    ) -> None:
        """Mark the targets that a changed source fed before, and those that it feeds now."""
        if rule in self.ledgered:
            if kind in ("insert", "replace") and AFTER not in event:
                doubt.blind[rule] = rule.source.collection
            doubt.entries.append((rule, key, _fed(rule, kind, event, key)))
            return
        before = event.get(BEFORE)
        moved = touched is None or any(overlap(path, each) for path in touched for each in rule.key.paths)
        if kind in ("insert", "replace"):
            if AFTER in event:
                self._mark_fed(rule, AFTER, event, key, doubt)
            else:
                doubt.lookups.setdefault(rule, {})[freeze(key)] = key
        if kind == "insert":
            return
        if before:
            self._mark_fed(rule, BEFORE, event, key, doubt)
        elif moved:
            doubt.blind[rule] = rule.source.collection
        if kind == "update" and (moved or not before):
            doubt.lookups.setdefault(rule, {})[freeze(key)] = key

    def _mark_fed(self, rule: GatherRule, end: str, event: Mapping[str, Any], key: Any, doubt: Doubt) -> None:
        for target in self.keys(rule, end, event, key):
            doubt.mark(rule.target, target, sourced=True)

    def keys(self, rule: GatherRule, end: str, event: Mapping[str, Any], key: Any) -> list[Any]:
        """The targets that a source fed at one end of an event."""
        name = self._names.get(rule)
        if name is None:
            return rule.keys_of({**event[end], "_id": key})
        assert isinstance(rule.key, GroupKey)
        found = rule.key.checked(event[f"{name}{end}"])
        return [] if found is None else [found]

    def _former_cards(self, own: _Own, kind: str, event: Mapping[str, Any]) -> Raw | None:
        if kind == "insert" or not own.snapshots:
            return None
        return {name: value for name, value in (event.get(BEFORE) or {}).items() if name != "_id"} or None

    def _upset(self, event: Mapping[str, Any]) -> set[Rule]:
        """The rules that read or maintain a collection which was dropped or renamed."""
        named = {(event.get(end) or {}).get("coll") for end in ("ns", "to")} - {None}
        if event["operationType"] in ("dropDatabase", "invalidate"):
            named = set(self.collections)
        return {rule for rule in self.rules if {rule.target.collection, *self._watched[rule]} & named}


class _Own:
    """What of a target's own fields the worker looks after."""

    def __init__(self, entry: Entry[Any]) -> None:
        self.entry = entry
        self.maintained: set[str] = set()
        # A document that becomes another kind has other values to hold.
        self.inputs: set[str] = set() if entry.family is None else {entry.family.discriminator}
        self.all_matters = False
        # Cards with values of a moment, and their references, as they were before a change.
        self.snapshots: set[str] = set()
        self.keeping: list[CopyRule] = []
        # Where a rollup's document holds its group's values.
        self.keys: set[str] = set(entry.group.key.targets) if entry.group is not None else set()

    def add(self, rule: Rule) -> None:
        self.maintained |= rule.maintained()
        if isinstance(rule, FormulaRule):
            watched = rule.watches()[self.entry.collection]
            self.all_matters = self.all_matters or watched is None
            self.inputs |= watched or set()
        if isinstance(rule, CopyRule):
            self.inputs.add(rule.reference_path)
            if rule.snapshots:
                self.keeping.append(rule)
                tops = {top(rule.reference_path), top(rule.path)}
                self.snapshots |= tops

    def renewed(self, event: Mapping[str, Any]) -> frozenset[str]:
        """The references that changed, and not their cards too, where cards keep values of a moment."""
        names = [*(event.get("touched") or ()), *(event.get("removed") or ())]
        return frozenset(name for name in names if any(_renews(rule, plain(name)) for rule in self.keeping))

    def concerned(self, touched: set[str] | None) -> bool:
        """Whether a change of the target itself calls for a look at it."""
        if touched is None:
            return True
        if any(overlap(path, each) for path in touched for each in self.inputs):
            return True
        # Treadle's own writes count a revision; another writer's hand in a maintained field does not.
        if any(_reserved(path) for path in touched):
            return False
        return self.all_matters or any(overlap(path, each) for path in touched for each in self.maintained)


def _touching(fields: set[str]) -> Raw:
    """Whether an update touched one of these fields, or something inside."""
    updated = {"$map": {"input": {"$objectToArray": _UPDATED}, "in": "$$this.k"}}
    others = [{"$ifNull": [f"$updateDescription.{path}", []]} for path in ("removedFields", _CUT)]
    top = {"$arrayElemAt": [{"$split": ["$$this", "."]}, 0]}
    touched = {"$map": {"input": {"$concatArrays": [updated, *others]}, "in": top}}
    return {"$gt": [{"$size": {"$setIntersection": [touched, {"$literal": sorted(fields)}]}}, 0]}


def _fed(rule: GatherRule, kind: str, event: Mapping[str, Any], key: Any) -> Fed:
    """The keys that an event says a source feeds, from the event alone.

    The document as it is now would not do: it may have moved on, and a target
    that counted it in between would never be told.
    """
    if kind == "delete":
        return Fed(exact=True)
    if isinstance(rule.key, GroupKey):
        return _fields(rule.key, kind, event)
    if AFTER in event and kind in ("insert", "replace"):
        return Fed(_keys(rule, {**event[AFTER], "_id": key}), exact=True)
    (path,) = rule.key.paths
    found: list[Any] = []
    exact = False
    for each in event.get("values") or ():
        name = plain(each["k"])
        if not overlap(name, path):
            continue
        inside: Raw = {}
        put(inside, name, each["v"])
        found.extend(_keys(rule, inside))
        exact = exact or (name == each["k"] and path.startswith(name))
    if any(overlap(plain(name), path) and plain(name) == name for name in event.get("removed") or ()):
        exact = True
    return Fed(tuple(found), exact=exact)


def _fields(key: GroupKey, kind: str, event: Mapping[str, Any]) -> Fed:
    """The values that decide a source's group, as far as an event tells them."""
    paths = sorted(key.paths)
    if kind in ("insert", "replace"):
        raw = event.get(AFTER) or {}
        return Fed(fields=tuple((path, value_at(raw, path)) for path in paths), exact=True)
    changed: list[tuple[str, Any]] = []
    for each in event.get("values") or ():
        for path in paths:
            if path == each["k"] or path.startswith(each["k"] + "."):
                rest = path[len(each["k"]) + 1 :]
                changed.append((path, value_at(each["v"], rest) if rest else each["v"]))
    for name in event.get("removed") or ():
        changed.extend((path, None) for path in paths if path == name or path.startswith(name + "."))
    return Fed(fields=tuple(changed))


def _keys(rule: GatherRule, raw: Raw) -> tuple[Any, ...]:
    return tuple(rule.keys_of(raw))


def _renews(rule: CopyRule, path: str) -> bool:
    if not overlap(path, rule.reference_path):
        return False
    return path == rule.reference_path or not overlap(path, rule.path)


def _reserved(path: str) -> bool:
    return path == RESERVED or path.startswith(RESERVED + ".")


def _touched(event: Mapping[str, Any]) -> set[str]:
    names = [*(event.get("touched") or ()), *(event.get("removed") or ()), *(event.get("cut") or ())]
    return {plain(name) for name in names}
