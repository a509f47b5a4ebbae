"""Recomputation on the server: `$group` over the sources, `$merge` into the targets.

Rules with conditions of their own are branches: each is grouped by itself, and
the branches are joined by key before anything is written, so that a target is
written once and never seen half done. What a merge cannot do is recomputed in
transactions, group by group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pymongo.errors import OperationFailure

from treadle.engine.aggregation import Fold, folds_of
from treadle.engine.lease import Lease
from treadle.engine.pipelines import BUMP, formula_stages, stamps_of
from treadle.engine.version_upgrade import has_outdated
from treadle.graph.derived import DerivedRule, GroupRule, aggregates_in, copies_in
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.quarantine import readable
from treadle.graph.rule import REVISION
from treadle.graph.stored_pages import chunks
from treadle.model.bson_types import RESERVED
from treadle.plan import Plan, Raw, aggregate, delete_many, find, find_one
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import DUPLICATE_KEY, is_about_one_document
from treadle.query.keys import KEY, Key, distinct
from treadle.upkeep.closed_windows import Bounds, closed_match
from treadle.upkeep.groups import group_keys, key_stages
from treadle.upkeep.rebuild import repair_documents
from treadle.upkeep.verify import GROUP_PAGE

# Which run has written a document; a number that only grows, and that of its lease.
RUN = f"{RESERVED}.run"
LEASE = "schedule"
HELD = "treadle_held"

# A filter for groups, whose key stands at these paths.
GroupFilter = Callable[[Sequence[str]], Raw]
# The values that some parts of a key have, by the number of the part.
KeyParts = dict[int, Any]


def run_merge(collection: str, stages: Sequence[Raw]) -> Plan[None]:
    """Run a pipeline that ends in `$merge`."""
    yield from aggregate(collection, stages, allowDiskUse=True)


# -- what is computed ---------------------------------------------------------------------------


def can_merge(rule: DerivedRule) -> bool:
    """Return whether the server can compute the values of a rule by itself."""
    return bool(_merged_paths(rule))


def _merged_paths(rule: DerivedRule) -> list[str]:
    """Return the stored paths that a merge sets; none where the server cannot compute them."""
    state = dict.fromkeys(rule.aggregate.accumulators(), "")
    return list(rule.aggregate.finish_expressions(state) or ()) if state else []


def _joined(first: list[Raw], others: Sequence[tuple[str, list[Raw]]], names: Iterable[str]) -> list[Raw]:
    """Return the stages that give the rows of several branches, one per key."""
    stages = [*first]
    for collection, branch in others:
        stages.append({"$unionWith": {"coll": collection, "pipeline": branch}})
    # Only one branch has a value, so that the largest is that one.
    return [*stages, {"$group": {"_id": "$_id", **{name: {"$max": f"${name}"} for name in names}}}]


def _values(folds: Sequence[Fold]) -> Raw:
    """Return the values of all rules, as expressions over the rows that their branches give."""
    return {path: value for fold in folds for path, value in fold.finish_expressions().items()}


# -- rollups ----------------------------------------------------------------------------------------


def key_paths(key: Key) -> list[str]:
    """Where the parts of a group's key stand after `$group`."""
    return [f"_id.k{number}" for number in range(len(key.group))]


def group_stages(entry: ModelEntry, before: Raw, after: Raw) -> list[Raw]:
    """Return the stages that give the documents of a rollup, of sources and groups that match."""
    group: GroupRule = entry.rules.group
    folds = folds_of([group, *(rule for rule in aggregates_in(entry) if rule is not group)])
    first, *others = (_branch(group, fold, before, after) for fold in folds)
    stages = first
    if others:
        source = group.source.collection
        names = [name for fold in folds for name in fold.accumulators]
        stages = _joined(first, [(source, branch) for branch in others], names)
    identity: Raw = {"_id": "$_id.k0"}
    if not group.identity:
        paths = zip(group.on.fields, key_paths(group.match), strict=True)
        identity = {"_id": 0, **{path: f"${key_path}" for path, key_path in paths}}
    return [*stages, {"$project": {**identity, **_values(folds)}}]


def _branch(group: GroupRule, fold: Fold, before: Raw, after: Raw) -> list[Raw]:
    """Return the stages that give the accumulators of one fold, by the parts of a group's key."""
    parts = group.match.group
    chosen = [each for each in (before, fold.rules[0].where) if each]
    identity = {f"k{number}": part.expression() for number, part in enumerate(parts)}
    required = [
        {path: {"$ne": None}}
        for path, part in zip(key_paths(group.match), parts, strict=True)
        # A join on plain fields takes no null; such groups are computed in another way.
        if not part.optional or not group.identity
    ]
    return [
        *([{"$match": {"$and": chosen}}] if chosen else []),
        {"$group": {"_id": identity, **fold.accumulators}},
        {"$match": {"$and": [*required, *([after] if after else [])]}},
    ]


def merge_groups(
    entry: ModelEntry, before: Raw, after: Raw, lease: Lease, *, empty: bool = False
) -> list[Raw]:
    """Return the whole recomputation of groups, ending in `$merge`; each document is stamped with the run.

    Into an empty collection they are only inserted, which is quicker.
    """
    group = entry.rules.group
    stamps = stamps_of(aggregates_in(entry))
    formulas = formula_stages(entry)
    taken = {path: f"$$new.{path}" for rule in aggregates_in(entry) for path in rule.empty()}
    matched: list[Raw] = [{"$set": {**taken, **stamps, RUN: lease.token, **BUMP}}, *formulas]
    into: Raw = {
        "into": entry.collection,
        "whenMatched": "fail" if empty else matched,
        "whenNotMatched": "insert",
    }
    if not group.identity:
        into["on"] = group.on.fields
    new: list[Raw] = [{"$set": {**stamps, RUN: lease.token, REVISION: 1}}, *formulas]
    return [*group_stages(entry, before, after), *lease.held_stages(HELD), *new, {"$merge": into}]


# -- fields of targets that exist ---------------------------------------------------------------------


def merge_fields(entry: ModelEntry, rules: Sequence[DerivedRule], lease: Lease) -> list[Raw]:
    """Return the recomputation of fields in all targets, from the targets' collection.

    Begins with every target, so that one whose last source has left is set
    back too. A target that is correct already is not written.
    """
    folds = folds_of(rules)
    values = _values(folds)
    own = entry.targets.exact.filter()
    # Sources may refer to documents of another kind, or to none.
    targets = [*([{"$match": own}] if own else []), {"$project": {"_id": 1, "is_target": {"$literal": 1}}}]
    names = [name for fold in folds for name in fold.accumulators]
    return [
        *_joined(targets, [_source_branch(fold) for fold in folds], [*names, "is_target"]),
        {"$match": {"is_target": 1}},
        {"$project": {"_id": 1, **values}},
        *lease.held_stages(HELD),
        {"$merge": _into(entry, rules, sorted(values))},
    ]


def _source_branch(fold: Fold) -> tuple[str, list[Raw]]:
    """Return the collection and the stages that give the accumulators of one fold, by target."""
    rule = fold.rules[0]
    chosen: list[Raw] = [{"$match": rule.where}] if rule.where else []
    grouped = {"$group": {"_id": f"${KEY}", **fold.accumulators}}
    return rule.source.collection, [*chosen, *rule.match.stages(unwound=rule.unit), grouped]


def _into(entry: ModelEntry, rules: Sequence[DerivedRule], paths: Sequence[str]) -> Raw:
    """Return the `$merge` that stores values in targets which exist, where they differ."""
    by_stamp: dict[str, list[str]] = {}
    for rule in rules:
        if rule.stamp:
            by_stamp.setdefault(rule.stamp, []).extend(_merged_paths(rule))
    stamps = {stamp: {"$cond": [_changes(own), "$$NOW", f"${stamp}"]} for stamp, own in by_stamp.items()}
    sets = {**stamps, REVISION: {"$cond": [_changes(paths), BUMP[REVISION], f"${REVISION}"]}}
    matched = [
        # What depends on the change is set while the old values are still there.
        {"$set": sets},
        {"$set": {path: f"$$new.{path}" for path in paths}},
        *formula_stages(entry),
    ]
    return {"into": entry.collection, "whenMatched": matched, "whenNotMatched": "discard"}


def _changes(paths: Sequence[str]) -> Raw:
    """Whether a merge changes one of these values."""
    return {"$or": [{"$ne": [{"$ifNull": [f"${path}", None]}, f"$$new.{path}"]} for path in paths]}


# -- the groups of one run ------------------------------------------------------------------------------


class GroupRun:
    """The recomputation of groups in one run, and how many documents it wrote and removed."""

    def __init__(self, graph: Graph, server: Capabilities, entry: ModelEntry, lease: Lease) -> None:
        self.graph = graph
        self.server = server
        self.entry = entry
        self.lease = lease
        self.group: GroupRule = entry.rules.group
        self.parts = self.group.match.group
        self.written = 0
        self.removed = 0

    def everything(self, bounds: Bounds) -> Plan[None]:
        """Compute all closed groups."""
        sources = self._sources_between([None] * len(bounds), bounds)
        yield from self._compute(sources, lambda paths: closed_match(paths, bounds))

    def some(self, windows: Sequence[KeyParts], known: Bounds, bounds: Bounds) -> Plan[None]:
        """Compute the groups that closed since, and those that changed."""

        def closing(paths: Sequence[str]) -> Raw:
            pairs = zip(paths, known, strict=True)
            newly = [{path: {"$gte": old}} for path, old in pairs if old is not None]
            return {"$and": [closed_match(paths, bounds), {"$or": newly}]}

        if known != bounds:
            yield from self._compute(self._sources_between(known, bounds), closing)
        for chunk in chunks(windows, GROUP_PAGE):
            yield from self.lease.check()

            def within(paths: Sequence[str], chunk: Sequence[KeyParts] = chunk) -> Raw:
                return {
                    "$or": [
                        {paths[number]: {"$eq": value} for number, value in each.items()} for each in chunk
                    ]
                }

            yield from self._compute({"$or": [self._sources_in(each) for each in chunk]}, within)

    # -- which groups -----------------------------------------------------------------------

    def windows(self, keys: Sequence[list[Any]]) -> list[KeyParts]:
        """Return the windows of some groups, where there are windows, else the groups."""
        windows = [number for number, part in enumerate(self.parts) if part.window is not None]
        numbers = windows or range(len(self.parts))
        return distinct({number: key[number] for number in numbers} for key in keys)

    def _sources_in(self, key: KeyParts) -> Raw:
        return {"$and": [self.parts[number].match([value]) for number, value in key.items()]}

    def _sources_between(self, first: Bounds, last: Bounds) -> Raw:
        """Return a filter by dates that lets at least the sources of these windows through."""
        windows = [
            (part, part.window, start, end)
            for part, start, end in zip(self.parts, first, last, strict=True)
            if part.window is not None and end is not None
        ]
        if len(windows) != 1 or windows[0][0].optional:
            return {}
        ((part, window, start, end),) = windows
        condition: Raw = {"$lt": window.span(end)[1] if not window.utc else end}
        if start is not None:
            condition["$gte"] = window.span(start)[0]
        return {part.source: condition}

    # -- how ----------------------------------------------------------------------------------

    def _compute(self, sources: Raw, within: GroupFilter) -> Plan[None]:
        """Compute groups from sources that match; remove the documents of those that are gone."""
        if (yield from self._may_merge()):
            try:
                yield from self._merge(sources, within(key_paths(self.group.match)))
            except Exception as error:
                if not is_about_one_document(error):
                    raise
                # One document cannot be written: all but that one.
            else:
                yield from self._finish_merge(within)
                return
        yield from self._recompute(within)

    def _may_merge(self) -> Plan[bool]:
        """Whether a merge will do: others that follow, archives and outdated sources need more than that."""
        entry, source = self.entry, self.group.source
        if entry.effects.on_write or source.sources.archive is not None:
            return False
        return all(map(can_merge, aggregates_in(entry))) and not (yield from has_outdated(source))

    def _merge(self, sources: Raw, after: Raw) -> Plan[None]:
        entry, source = self.entry, self.group.source.collection
        if (yield from find_one(entry.collection, {}, {"_id": 1})) is None:
            try:
                yield from run_merge(source, merge_groups(entry, sources, after, self.lease, empty=True))
                return
            except OperationFailure as error:
                if error.code != DUPLICATE_KEY:
                    raise
                # A concurrent repair has made a group.
        yield from run_merge(source, merge_groups(entry, sources, after, self.lease))

    def _finish_merge(self, within: GroupFilter) -> Plan[None]:
        """Remove the documents of groups that are gone, and do what a merge does not."""
        entry, collection = self.entry, self.entry.collection
        yield from self.lease.check()
        optional = [] if self.group.identity else [part.target for part in self.parts if part.optional]
        # Groups without a value were left out of the merge.
        conditions = [within(self.group.on.fields), *({path: {"$ne": None}} for path in optional)]
        chosen = [each for each in conditions if each]
        mine = {RUN: self.lease.token}
        yield from self._remove_unstamped(chosen, mine)
        if optional:
            nulls = [{f"{KEY}.{number}": None} for number, part in enumerate(self.parts) if part.optional]
            yield from self._recompute(within, {"$or": nulls})
        if copies_in(entry):
            reading = find(collection, {"$and": [*chosen, mine]}, entry.key_projection())
            rows = yield from readable(entry.model.__name__, reading)
            yield from self._recompute_keys([entry.key_of(each) for each in rows])

    def _remove_unstamped(self, chosen: Sequence[Raw], mine: Raw) -> Plan[None]:
        """Remove what this run has not written, and count what it has."""
        collection, token = self.entry.collection, self.lease.token
        unstamped = {"$or": [{RUN: {"$lt": token}}, {RUN: None}]}
        # One look for both: no index begins with a window alone.
        stamps = {"_id": {"$eq": [f"${RUN}", token]}, "n": {"$sum": 1}}
        looking: list[Raw] = [{"$match": {"$and": [*chosen, {"$or": [mine, unstamped]}]}}, {"$group": stamps}]
        numbers = {row["_id"]: row["n"] for row in (yield from aggregate(collection, looking))}
        self.written += numbers.get(True, 0)
        if numbers.get(False):
            gone = yield from delete_many(collection, {"$and": [*chosen, unstamped]})
            self.removed += gone.deleted_count

    def _recompute(self, within: GroupFilter, besides: Raw | None = None) -> Plan[None]:
        """Compute groups in transactions, one by one, with all that follows."""
        paths = [f"{KEY}.{number}" for number in range(len(self.parts))]
        chosen = [each for each in (within(paths), besides) if each]
        only: list[Raw] = [{"$match": {"$and": chosen}}] if chosen else []
        stages = key_stages(self.group, only)
        present = distinct((yield from group_keys(self.entry, stages, stages)))
        documents = [{"$project": {KEY: self.group.on.expression()}}, *only, stages[-1]]
        reading = aggregate(self.entry.collection, documents)
        rows = yield from readable(self.entry.model.__name__, reading)
        keys = distinct([*present, *(row["_id"] for row in rows)])
        yield from self._recompute_keys(keys)
        self.written += len(present)
        self.removed += len(keys) - len(present)

    def _recompute_keys(self, keys: Sequence[Any]) -> Plan[None]:
        yield from repair_documents(self.graph, self.server, self.entry, keys, before=self.lease.check)
