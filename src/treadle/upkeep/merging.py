"""Recomputation on the server: `$group` over the sources, `$merge` into the targets.

Rules with conditions of their own are branches: each is grouped by itself, and
the branches are joined by key before anything is written, so that a target is
written once and never seen half done. What a merge cannot do is mended in
transactions, group by group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import bson
from pymongo.errors import OperationFailure

from treadle.engine.groups import group_keys, key_stages
from treadle.engine.lease import Lease
from treadle.engine.pipelines import BUMP, formula_stages, stamps_of
from treadle.engine.version_upgrade import has_outdated
from treadle.graph.derived import DerivedRule, GroupRule, aggregates_in, copies_in
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.quarantine import readable
from treadle.graph.rule import REVISION
from treadle.graph.stored_pages import chunks
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED
from treadle.plan import Plan, Raw, aggregate, delete_many, find, find_one
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import DUPLICATE_KEY, is_about_one_document
from treadle.query.keys import KEY, Key, distinct
from treadle.upkeep.closed import Bounds, closed_match
from treadle.upkeep.rebuild import mend
from treadle.upkeep.verify import GROUP_PAGE

# Which run has written a document; a number that only grows, and that of its lease.
RUN = f"{RESERVED}.run"
LEASE = "schedule"
HELD = "treadle_held"

# A filter for groups, whose key stands at these paths.
GroupFilter = Callable[[Sequence[str]], Raw]
# The values that some parts of a key have, by the number of the part.
Scope = dict[int, Any]


def perform(collection: str, stages: Sequence[Raw]) -> Plan[None]:
    """Run a pipeline that ends in `$merge`."""
    yield from aggregate(collection, stages, allowDiskUse=True)


# -- what is computed ---------------------------------------------------------------------------


def _branches(rules: Sequence[DerivedRule]) -> list[list[DerivedRule]]:
    """Rules that one `$group` computes, those with the fewest conditions first."""
    branches: dict[Any, list[DerivedRule]] = {}
    for rule in rules:
        branches.setdefault(rule.group_key, []).append(rule)
    return list(branches.values())


class Accumulators:
    """The accumulators of several rules, equal ones once."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self.of_rule: dict[DerivedRule, dict[str, str]] = {}

    def of(self, branch: int, rules: Sequence[DerivedRule]) -> Raw:
        """The accumulators of a branch; notes by which path each rule finds its own."""
        stage: Raw = {}
        for rule in rules:
            paths = self.of_rule.setdefault(rule, {})
            for name, accumulator in rule.aggregate.accumulators().items():
                same = branch, bson.encode(accumulator.expression, codec_options=CODEC_OPTIONS)
                field = self._names.setdefault(same, f"a{len(self._names)}")
                stage[field] = accumulator.expression
                paths[name] = f"${field}"
        return stage

    @property
    def names(self) -> list[str]:
        return list(self._names.values())


def can_merge(rule: DerivedRule) -> bool:
    """Return whether the server can compute the values of a rule by itself."""
    paths = {name: f"${name}" for name in rule.aggregate.accumulators()}
    return bool(paths) and rule.aggregate.finish_expressions(paths) is not None


def _finish(rule: DerivedRule, accumulators: Accumulators) -> Raw:
    """Return the values of a rule, as expressions over the accumulators that a stage computed."""
    return rule.aggregate.finish_expressions(accumulators.of_rule[rule]) or {}


def _joined(first: list[Raw], others: Sequence[tuple[str, list[Raw]]], names: Sequence[str]) -> list[Raw]:
    """The rows of several branches, one per key."""
    stages = [*first]
    for collection, branch in others:
        stages.append({"$unionWith": {"coll": collection, "pipeline": branch}})
    # Only one branch has a value, so that the largest is that one.
    return [*stages, {"$group": {"_id": "$_id", **{name: {"$max": f"${name}"} for name in names}}}]


# -- rollups ----------------------------------------------------------------------------------------


def key_paths(key: Key) -> list[str]:
    """Where the parts of a group's key stand after `$group`."""
    return [f"_id.k{number}" for number in range(len(key.group))]


def group_stages(entry: ModelEntry[Any], before: Raw, after: Raw) -> list[Raw]:
    """The documents of a rollup as they should be, of sources and groups that match."""
    group = entry.rules.group
    accumulators = Accumulators()
    pipelines: list[list[Raw]] = []
    identity = {f"k{number}": part.expression() for number, part in enumerate(group.match.group)}
    required = [
        {path: {"$ne": None}}
        for path, part in zip(key_paths(group.match), group.match.group, strict=True)
        # A join on plain fields takes no null; such groups are computed in another way.
        if not part.optional or not group.identity
    ]
    kept = {"$and": [*required, *([after] if after else [])]}
    for number, rules in enumerate(_branches([group, *(r for r in aggregates_in(entry) if r is not group)])):
        chosen = [each for each in (before, rules[0].where) if each]
        stages: list[Raw] = [{"$match": {"$and": chosen}}] if chosen else []
        stages.append({"$group": {"_id": identity, **accumulators.of(number, rules)}})
        pipelines.append([*stages, {"$match": kept}])
    stages = pipelines[0]
    if len(pipelines) > 1:
        source = group.source.collection
        others = [(source, branch) for branch in pipelines[1:]]
        stages = _joined(stages, others, accumulators.names)
    projection: Raw = {"_id": "$_id.k0"} if group.identity else {"_id": 0}
    if not group.identity:
        for number, part in enumerate(group.match.group):
            projection[part.target] = f"$_id.k{number}"
    for rule in aggregates_in(entry):
        projection.update(_finish(rule, accumulators))
    return [*stages, {"$project": projection}]


def merge_groups(
    entry: ModelEntry[Any], before: Raw, after: Raw, lease: Lease, *, empty: bool = False
) -> list[Raw]:
    """The whole recomputation of groups, ending in `$merge`; each document is stamped with the run.

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


def merge_fields(entry: ModelEntry[Any], rules: Sequence[DerivedRule], lease: Lease) -> list[Raw]:
    """The recomputation of fields in all targets, from the targets' collection.

    Begins with every target, so that one whose last source has left is set
    back too. A target that is right already is not written.
    """
    accumulators = Accumulators()
    others = []
    for number, together in enumerate(_branches(rules)):
        rule = together[0]
        stages: list[Raw] = [{"$match": rule.where}] if rule.where else []
        stages += rule.match.stages(None, rule.unit)
        grouped = {"$group": {"_id": f"${KEY}", **accumulators.of(number, together)}}
        others.append((rule.source.collection, [*stages, grouped]))
    projection: Raw = {}
    for rule in rules:
        projection.update(_finish(rule, accumulators))
    paths = sorted(projection)
    # Sources may name documents of another kind, or none.
    targets: list[Raw] = [{"$match": entry.targets.exact.filter()}] if entry.targets.exact.filter() else []
    targets.append({"$project": {"_id": 1, "is_target": {"$literal": 1}}})
    stages = _joined(targets, others, [*accumulators.names, "is_target"])
    stages.append({"$match": {"is_target": 1}})
    by_stamp: dict[str, list[str]] = {}
    for rule in rules:
        for stamp in rule.stamps():
            by_stamp.setdefault(stamp, []).extend(_finish(rule, accumulators))
    stamps = {stamp: {"$cond": [_changes(own), "$$NOW", f"${stamp}"]} for stamp, own in by_stamp.items()}
    sets = {**stamps, REVISION: {"$cond": [_changes(paths), BUMP[REVISION], f"${REVISION}"]}}
    # What depends on the change is set while the old values are still there.
    matched: list[Raw] = [
        {"$set": sets},
        {"$set": {path: f"$$new.{path}" for path in paths}},
        *formula_stages(entry),
    ]
    into = {"into": entry.collection, "whenMatched": matched, "whenNotMatched": "discard"}
    return [*stages, {"$project": {"_id": 1, **projection}}, *lease.held_stages(HELD), {"$merge": into}]


def _changes(paths: Sequence[str]) -> Raw:
    """Whether a merge changes one of these values."""
    return {"$or": [{"$ne": [{"$ifNull": [f"${path}", None]}, f"$$new.{path}"]} for path in paths]}


# -- the groups of one run ------------------------------------------------------------------------------


class GroupWork:
    """The recomputation of groups in one run, and how many documents it wrote and removed."""

    def __init__(self, graph: Graph, server: Capabilities, entry: ModelEntry[Any], lease: Lease) -> None:
        self.graph = graph
        self.server = server
        self.entry = entry
        self.lease = lease
        self.group: GroupRule = entry.rules.group
        self.key = self.group.match
        self.written = 0
        self.removed = 0

    def everything(self, bounds: Bounds) -> Plan[None]:
        """All closed groups."""
        sources = self._sources_between([None] * len(bounds), bounds)
        yield from self._compute(sources, lambda paths: closed_match(paths, bounds))

    def some(self, scopes: Sequence[Scope], known: Bounds, bounds: Bounds) -> Plan[None]:
        """The groups that closed since, and those that changed."""

        def closing(paths: Sequence[str]) -> Raw:
            pairs = zip(paths, known, strict=True)
            newly = [{path: {"$gte": old}} for path, old in pairs if old is not None]
            return {"$and": [closed_match(paths, bounds), {"$or": newly}]}

        if known != bounds:
            yield from self._compute(self._sources_between(known, bounds), closing)
        for chunk in chunks(scopes, GROUP_PAGE):
            yield from self.lease.check()

            def within(paths: Sequence[str], chunk: Sequence[Scope] = chunk) -> Raw:
                return {
                    "$or": [
                        {paths[number]: {"$eq": value} for number, value in each.items()} for each in chunk
                    ]
                }

            yield from self._compute({"$or": [self._sources_in(scope) for scope in chunk]}, within)

    # -- which groups -----------------------------------------------------------------------

    def scopes(self, keys: Sequence[list[Any]]) -> list[Scope]:
        """Whole windows where there are windows, else single groups."""
        windows = [number for number, part in enumerate(self.key.group) if part.window is not None]
        numbers = windows or range(len(self.key.group))
        return distinct({number: key[number] for number in numbers} for key in keys)

    def _sources_in(self, scope: Scope) -> Raw:
        return {"$and": [self.key.group[number].match([value]) for number, value in scope.items()]}

    def _sources_between(self, first: Bounds, last: Bounds) -> Raw:
        """A filter by dates that lets at least the sources of these windows through."""
        windows = [
            (part, part.window, start, end)
            for part, start, end in zip(self.key.group, first, last, strict=True)
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
        entry, key = self.entry, self.key
        has_archive = self.group.source.sources.archive is not None
        mergeable = all(map(can_merge, aggregates_in(entry)))
        if (
            entry.effects.on_write
            or has_archive
            or not mergeable
            or (yield from has_outdated(self.group.source))
        ):
            # What others are fed by must be followed, and older sources converted: a merge does neither.
            yield from self._mend(within)
            return
        try:
            yield from self._merge(sources, within(key_paths(key)))
        except Exception as error:
            if not is_about_one_document(error):
                raise
            # One document cannot be written: all but that one.
            yield from self._mend(within)
            return
        yield from self.lease.check()
        optional = [] if self.group.identity else [part.target for part in key.group if part.optional]
        # Groups without a value were left out of the merge.
        conditions = [within(self.group.on.fields), *({path: {"$ne": None}} for path in optional)]
        chosen = [each for each in conditions if each]
        mine = {"$and": [*chosen, {RUN: self.lease.token}]}
        unstamped = {"$or": [{RUN: {"$lt": self.lease.token}}, {RUN: None}]}
        # One look for both: no index begins with a window alone.
        stamps = {"_id": {"$eq": [f"${RUN}", self.lease.token]}, "n": {"$sum": 1}}
        older = {"$or": [{RUN: self.lease.token}, unstamped]}
        looking: list[Raw] = [{"$match": {"$and": [*chosen, older]}}, {"$group": stamps}]
        found = {row["_id"]: row["n"] for row in (yield from aggregate(entry.collection, looking))}
        self.written += found.get(True, 0)
        if found.get(False):
            self.removed += (
                yield from delete_many(entry.collection, {"$and": [*chosen, unstamped]})
            ).deleted_count
        if optional:
            nulls = [{f"{KEY}.{number}": None} for number, part in enumerate(key.group) if part.optional]
            yield from self._mend(within, {"$or": nulls})
        if copies_in(entry):
            reading = find(entry.collection, mine, entry.key_projection())
            rows = yield from readable(entry.model.__name__, reading)
            yield from self._mend_keys([entry.key_of(each) for each in rows])

    def _merge(self, sources: Raw, after: Raw) -> Plan[None]:
        entry, source = self.entry, self.group.source.collection
        if (yield from find_one(entry.collection, {}, {"_id": 1})) is None:
            try:
                yield from perform(source, merge_groups(entry, sources, after, self.lease, empty=True))
                return
            except OperationFailure as error:
                if error.code != DUPLICATE_KEY:
                    raise
                # Somebody repaired a group meanwhile.
        yield from perform(source, merge_groups(entry, sources, after, self.lease))

    def _mend(self, within: GroupFilter, besides: Raw | None = None) -> Plan[None]:
        """The same in transactions, group by group, with all that follows."""
        paths = [f"{KEY}.{number}" for number in range(len(self.key.group))]
        chosen = [each for each in (within(paths), besides) if each]
        only: list[Raw] = [{"$match": {"$and": chosen}}] if chosen else []
        stages = key_stages(self.group, only)
        present = yield from group_keys(self.entry, stages, stages)
        documents = [{"$project": {KEY: self.group.on.expression()}}, *only, stages[-1]]
        reading = aggregate(self.entry.collection, documents)
        rows = yield from readable(self.entry.model.__name__, reading)
        present = distinct(present)
        keys = distinct([*present, *(row["_id"] for row in rows)])
        yield from self._mend_keys(keys)
        self.written += len(present)
        self.removed += len(keys) - len(present)

    def _mend_keys(self, keys: Sequence[Any]) -> Plan[None]:
        yield from mend(self.graph, self.server, self.entry, keys, before=self.lease.check)
