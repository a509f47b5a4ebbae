"""What the worker watches, and which documents an event makes dirty.

An event never says what a value should become. It only marks documents whose
maintained values have to be recomputed, so that seeing an event twice is
harmless, and a thousand events on one key cost one recomputation.

The server sends no more of a document than the keys in it: a large document
with its state before and after would not fit into one event.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from treadle.graph.derived import DerivedRule, FormulaRule, LocalRule, aggregates_in
from treadle.graph.events import AFTER, BEFORE, Event
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry, implements
from treadle.graph.rule import Rule
from treadle.model.bson_types import RESERVED
from treadle.plan import Raw
from treadle.query.paths import outermost, overlap, plain, top, tops
from treadle.upkeep.change_stream import (
    BEATS,
    CONTROLS,
    CUT,
    REMOVED,
    UPDATED,
    UPHEAVALS,
    first_stages,
    is_reserved,
    key_of,
    touched,
    touched_projection,
)
from treadle.upkeep.dirty import Dirty
from treadle.upkeep.totals import countable


class Watch:
    """The stream rules of a Store, by the collection whose events concern them."""

    def __init__(
        self,
        graph: Graph,
        pre_images: bool = False,
        *,
        without: Collection[Rule] = (),
        only: Collection[Rule] | None = None,
    ) -> None:
        self.pre_images = pre_images
        self.rules = [rule for rule in graph.rules if rule.maintain == "stream" and rule not in without]
        if only is not None:
            self.rules = [rule for rule in graph.rules if rule in only]
        self.watchers: dict[str, list[_Watcher]] = {}
        own: dict[ModelEntry, _Own] = {}
        alike: dict[Any, _Gathered] = {}
        for rule in self.rules:
            if implements(rule, "replay"):
                self._add(_Replayed(rule))
                continue
            if isinstance(rule, DerivedRule) and not rule.is_copy:
                # Rules that mark the same targets by the same keys look at each event once.
                together: Any = rule.target, rule.source, rule.match, rule.on
                if together in alike:
                    alike[together].add(rule)
                else:
                    alike[together] = _Gathered(rule)
                    self._add(alike[together])
            elif isinstance(rule, DerivedRule) and rule.is_copy:
                self._add(_Copied(rule))
            if rule.target not in own:
                own[rule.target] = _Own(rule.target)
                self._add(own[rule.target])
            own[rule.target].add(rule)
        if only is None and not without and not graph.shards.keys:
            for gathered in alike.values():
                gathered.count()

    def _add(self, watcher: _Watcher) -> None:
        self.watchers.setdefault(watcher.collection, []).append(watcher)

    @property
    def _whole(self) -> bool:
        """Whether a rule must see whole documents."""
        return any(each.whole for several in self.watchers.values() for each in several)

    def needs_before(self) -> list[str]:
        """The collections whose former states say which keys they fed."""
        return sorted(
            name
            for name, watchers in self.watchers.items()
            if any(each.shown or each.whole for each in watchers)
        )

    # -- the pipeline ---------------------------------------------------------------------

    def stages(self, position: Raw, *, before: bool = False) -> list[Raw]:
        """The change stream from a position, with all events that concern anybody, and beats."""
        after = before and self._whole
        first = first_stages(position, [*sorted(self.watchers), BEATS, CONTROLS], before=before, after=after)
        return [*first, {"$match": self._matters()}]

    def pipeline(self, position: Raw, *, lean: bool = False, apart: bool = False) -> list[Raw]:
        """The stages by which the worker reads; `lean` leaves documents out altogether.

        With `apart`, an id that cannot be decoded leaves the rest of its event readable.
        """
        # Flat, and of what is not an update no more than it says: a client takes longer to read a nested
        # event than the server to send it.
        projection: Raw = {
            **dict.fromkeys(("operationType", "clusterTime"), 1),
            "coll": "$ns.coll",
            "to": "$to.coll",
            **({"documentKey": 1} if apart else {"id": "$documentKey._id"}),
            **{name: _of_update(value) for name, value in touched_projection().items()},
        }
        if not lean:
            paths = set().union(*(each.shown for several in self.watchers.values() for each in several))
            if self._whole:
                projection |= dict.fromkeys((AFTER, BEFORE, "wallTime"), 1)
            else:
                # The id tells whether there was such a former state at all.
                projection |= {f"{AFTER}.{path}": 1 for path in outermost(paths or {"_id"})}
                projection |= {f"{BEFORE}.{path}": 1 for path in outermost({"_id", *paths})}
        before = self.pre_images and not lean
        return [*self.stages(position, before=before), {"$project": projection}]

    def _matters(self) -> Raw:
        """Which events are sent at all: updates only where they change a field that a rule watches.

        Documents whose views are counted all day would else come by at every
        view. Names are compared up to their first dot; `note` looks closer.
        """
        concerned: list[Any] = [{"$and": [_in(CONTROLS), _touching({"paused"})]}]
        for collection, watchers in sorted(self.watchers.items()):
            paths = [each.paths for each in watchers if each.paths is not None]
            if len(paths) < len(watchers):
                concerned.append(_in(collection))
                continue
            concerns = [_touching(tops(watched))] if (watched := set().union(*paths)) else []
            if maintained := set().union(*(each.maintained for each in watchers)):
                # Treadle's own writes count a revision; another writer's hand in such a field does not.
                foreign = [_touching(tops(maintained)), {"$not": [_touching({RESERVED})]}]
                concerns.append({"$and": foreign})
            concerned.append({"$and": [_in(collection), {"$or": concerns}]})
        # One expression for all: a condition for each would be tried on the server's log as well, for
        # every entry, which costs as much as half of reading it.
        return {"$or": [{"operationType": {"$ne": "update"}}, {"$expr": {"$or": concerned}}]}

    # -- marking ---------------------------------------------------------------------------

    def note(self, raw: Mapping[str, Any], dirty: Dirty) -> None:
        """Mark what an event makes dirty."""
        kind = raw["operationType"]
        if kind in UPHEAVALS:
            dirty.upset |= self._upset(raw)
            return
        event = Event(kind, key_of(raw), touched(raw) if kind == "update" else None, raw)
        for watcher in self.watchers.get(raw["coll"], ()):
            if watcher.concerned(event):
                watcher.note(event, dirty)

    def _upset(self, raw: Mapping[str, Any]) -> set[Rule]:
        """The rules that read or maintain a collection which was dropped or renamed."""
        named = {raw.get(end) for end in ("coll", "to")}
        whole = raw["operationType"] in ("dropDatabase", "invalidate")
        return {rule for rule in self.rules if whole or {rule.target.collection, *rule.reads()} & named}


class _Watcher:
    """Who looks at the events of a collection."""

    def __init__(self, entry: ModelEntry) -> None:
        self.collection = entry.collection
        # The fields that it watches there, without positions; None for all. A document that becomes another
        # kind, or is deleted softly or restored, has other values to hold, and to give.
        self.paths: set[str] | None = set()
        if entry.kinds.family is not None:
            self.paths.add(entry.kinds.family.discriminator)
        if entry.paths.deletion is not None:
            self.paths.add(entry.paths.deletion)
        # Those that Treadle maintains for it.
        self.maintained: set[str] = set()
        # What it must see of documents, also of their former states; all of it if `whole`.
        self.shown: set[str] = set()
        self.whole = False

    def watch(self, paths: Iterable[str] | None) -> None:
        """Watch further fields."""
        self.paths = None if paths is None or self.paths is None else self.paths.union(map(plain, paths))

    def concerned(self, event: Event) -> bool:
        """Whether an event may change anything for it."""
        if event.touched is None:
            return True
        if self.paths is None:
            return not all(map(is_reserved, event.touched))
        return event.touches(self.paths)

    def note(self, event: Event, dirty: Dirty) -> None:
        """Mark what an event makes dirty."""
        raise NotImplementedError  # pragma: no cover


class _Gathered(_Watcher):
    """Values that one target gathers from the collection by one key."""

    def __init__(self, rule: DerivedRule) -> None:
        super().__init__(rule.source)
        self.rules: list[DerivedRule] = []
        # A document of an older version is converted before its keys are read off; for that any field counts.
        self.whole = rule.source.versions.may_change
        self.shown = set(rule.match.fields)
        # Whether inserted sources are added to totals.
        self.counted = False
        self.add(rule)

    def add(self, rule: DerivedRule) -> None:
        self.rules.append(rule)
        self.watch(None if self.whole else rule.reads().get(self.collection, ()))

    def count(self) -> None:
        """See of inserted sources what they add, where that can be added to a total."""
        self.counted = set(self.rules) == set(countable(self.rules[0].target))
        if self.counted:
            self.shown.update(*(rule.aggregate.reads or () for rule in self.rules))

    def note(self, event: Event, dirty: Dirty) -> None:
        """Note the source before and after, whose targets are to be marked."""
        rule, raw = self.rules[0], event.raw
        if self.counted and event.kind == "insert" and AFTER in raw:
            dirty.inserted.setdefault(rule, []).append(raw)
            return
        written = event.kind in ("insert", "replace")
        if written and AFTER in raw:
            dirty.sources.setdefault(rule, []).append(raw[AFTER])
        moved = event.kind != "insert" and (self.whole or event.touches(rule.match.fields))
        before = raw.get(BEFORE)
        if before:
            dirty.sources.setdefault(rule, []).append(before)
        elif moved:
            dirty.blind.update(dict.fromkeys(self.rules, self.collection))
        if (written and AFTER not in raw) or (event.kind == "update" and (moved or not before)):
            dirty.lookups.setdefault(rule, []).append(event.key)


class _Replayed(_Watcher):
    """A rule that takes each change of its documents by itself."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule.target)
        self.rule = rule
        self.paths = None
        self.whole = True

    def concerned(self, event: Event) -> bool:
        return True

    def note(self, event: Event, dirty: Dirty) -> None:
        dirty.events.setdefault(self.rule, []).append(event)


class _Copied(_Watcher):
    """A copy of documents of the collection."""

    def __init__(self, rule: DerivedRule) -> None:
        super().__init__(rule.source)
        self.rule = rule
        older = rule.source.versions.may_change
        self.watch(None if older else rule.reads().get(self.collection, ()))
        self.shown = {rule.match.path} if rule.alternate_key else set()

    def note(self, event: Event, dirty: Dirty) -> None:
        """Note a source whose copies must follow, or that is gone."""
        if self.rule.alternate_key:
            self._note_named(event, dirty)
        elif event.kind == "delete":
            if self.rule.on_delete != "keep":
                dirty.gone.setdefault(self.rule, []).append(event.key)
        elif event.kind == "insert" or self.rule.copied.synced or self.rule.on_delete != "keep":
            dirty.copies.setdefault(self.rule, []).append(event.key)

    def _note_named(self, event: Event, dirty: Dirty) -> None:
        """The same where targets name it by a field, which it may have lost."""
        rule, before = self.rule, event.raw.get(BEFORE)
        if event.kind != "insert" and event.touches({rule.match.path}):
            if before and rule.on_delete != "keep":
                followed = event.kind == "delete" or rule.on_delete == "clear"
                names = dirty.gone if followed else dirty.lost
                names.setdefault(rule, []).extend(rule.unique_keys([before]))
            elif not before:
                # The event does not have the alternate key from before.
                dirty.blind[rule] = self.collection
        if event.kind != "delete":
            dirty.unnamed.setdefault(rule, []).append(event.key)


class _Own(_Watcher):
    """What Treadle maintains in documents of the collection itself."""

    def __init__(self, entry: ModelEntry) -> None:
        super().__init__(entry)
        self.entry = entry
        # The fields that it is known to follow from, also where any other may matter.
        self.inputs: set[str] = set(self.paths or ())
        # Cards with values of a moment, and their references, as they were before a change.
        self.keeping: list[DerivedRule] = []
        # Where a rollup's document holds its group's values.
        self.shown = set(entry.rules.group.on.fields) if entry.rules.group is not None else set()

    def add(self, rule: Rule) -> None:
        self.maintained.update(owned.path for owned in rule.owns())
        inputs = rule.reads()[self.collection] if isinstance(rule, (FormulaRule, LocalRule)) else set()
        if isinstance(rule, DerivedRule) and not rule.is_copy and rule.alternate_key:
            inputs = {rule.alternate_key}
        if isinstance(rule, DerivedRule) and rule.is_copy:
            inputs = {rule.on.path}
            if rule.copied.snapshots:
                self.keeping.append(rule)
                self.shown |= {top(rule.on.path), rule.copied.top}
        self.watch(inputs)
        self.inputs |= inputs or set()

    def concerned(self, event: Event) -> bool:
        """Whether a change of the document itself calls for a look at it.

        Of which kind the document is will be seen when it is read.
        """
        if event.touches(self.inputs):
            return True
        # Treadle's own writes count a revision; another writer's hand in a maintained field does not.
        if any(map(is_reserved, event.touched or ())):
            return False
        return self.paths is None or event.touches(self.maintained)

    def note(self, event: Event, dirty: Dirty) -> None:
        """Mark a document that was itself written."""
        if self.entry.rules.group is not None:
            self._note_group(event, dirty)
        elif event.kind != "delete":
            cards, renewed = None, frozenset[str]()
            if self.keeping and event.kind != "insert":
                before = event.raw.get(BEFORE) or {}
                cards = {name: value for name, value in before.items() if name != "_id"} or None
                if event.kind == "update" and cards is None:
                    renewed = self._renewed(event)
            dirty.mark(self.entry, event.key, cards=cards, renewed=renewed)

    def _note_group(self, event: Event, dirty: Dirty) -> None:
        """Mark the groups that a rollup's document stood for and stands for."""
        states = [event.raw[end] for end in (BEFORE, AFTER) if event.raw.get(end)]
        for state in states:
            dirty.mark(self.entry, self.entry.key_of(state))
        if event.kind != "delete" or self.entry.rules.group.identity:
            dirty.documents.setdefault(self.entry, []).append(event.key)
        elif not states:
            dirty.blind.update(dict.fromkeys(aggregates_in(self.entry), self.collection))

    def _renewed(self, event: Event) -> frozenset[str]:
        """The references that changed, and not their cards too, where cards keep values of a moment."""
        names = [*(event.raw.get("touched") or ()), *(event.raw.get("removed") or ())]
        return frozenset(name for name in names if any(_renews(rule, plain(name)) for rule in self.keeping))


def _renews(rule: DerivedRule, path: str) -> bool:
    if not overlap(path, rule.on.path):
        return False
    return path == rule.on.path or not overlap(path, rule.path)


def _of_update(value: Any) -> Raw:
    """A value of an event that only updates have."""
    return {"$cond": [{"$eq": ["$operationType", "update"]}, value, "$$REMOVE"]}


def _in(collection: str) -> Raw:
    """The expression that an event is of a collection."""
    return {"$eq": ["$ns.coll", {"$literal": collection}]}


def _touching(fields: set[str]) -> Raw:
    """Whether an update touched one of these fields, or something inside."""
    updated = {"$map": {"input": UPDATED, "in": "$$this.k"}}
    others = [{"$ifNull": [f"${path}", []]} for path in (REMOVED, CUT)]
    first = {"$arrayElemAt": [{"$split": ["$$this", "."]}, 0]}
    touched = {"$map": {"input": {"$concatArrays": [updated, *others]}, "in": first}}
    return {"$gt": [{"$size": {"$setIntersection": [touched, {"$literal": sorted(fields)}]}}, 0]}
