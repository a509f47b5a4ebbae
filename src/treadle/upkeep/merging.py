"""Recomputation on the server: `$group` over the sources, `$merge` into the targets.

Rules with conditions of their own are branches: each is grouped by itself, and
the branches are joined by key before anything is written, so that a target is
written once and never seen half done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import bson

from treadle.engine import lease
from treadle.engine.pipelines import BUMP, formula_stages, stamps_of
from treadle.graph.gather import GatherRule
from treadle.graph.pattern import REVISION, Entry
from treadle.model.bson_types import CODEC_OPTIONS, RESERVED
from treadle.plan import Plan, Raw, aggregate
from treadle.query.keys import KEY, GroupKey

# Which run has written a document; a number that only grows, and that of its lease.
RUN = f"{RESERVED}.run"
LEASE = "schedule"
HELD = "treadle_held"


def perform(collection: str, stages: Sequence[Raw]) -> Plan[None]:
    """Run a pipeline that ends in `$merge`."""
    yield from aggregate(collection, stages, allowDiskUse=True)


# -- what is computed ---------------------------------------------------------------------------


def _branches(rules: Sequence[GatherRule]) -> list[list[GatherRule]]:
    """Rules that one `$group` computes, those with the fewest conditions first."""
    found: dict[Any, list[GatherRule]] = {}
    for rule in rules:
        where = bson.encode(rule.where, codec_options=CODEC_OPTIONS)
        found.setdefault((rule.key.signature, where, rule.per_element), []).append(rule)
    return list(found.values())


class Accumulators:
    """The accumulators of several rules, equal ones once."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self.of_rule: dict[GatherRule, dict[str, str]] = {}

    def of(self, branch: int, rules: Sequence[GatherRule]) -> Raw:
        """The accumulators of a branch; notes by which path each rule finds its own."""
        stage: Raw = {}
        for rule in rules:
            paths = self.of_rule.setdefault(rule, {})
            for name, accumulator in rule.accumulators().items():
                same = branch, bson.encode(accumulator, codec_options=CODEC_OPTIONS)
                found = self._names.setdefault(same, f"a{len(self._names)}")
                stage[found] = accumulator
                paths[name] = f"${found}"
        return stage

    @property
    def names(self) -> list[str]:
        return list(self._names.values())


def _joined(first: list[Raw], others: Sequence[tuple[str, list[Raw]]], names: Sequence[str]) -> list[Raw]:
    """The rows of several branches, one per key."""
    stages = [*first]
    for collection, branch in others:
        stages.append({"$unionWith": {"coll": collection, "pipeline": branch}})
    # Only one branch has a value, so that the largest is that one.
    return [*stages, {"$group": {"_id": "$_id", **{name: {"$max": f"${name}"} for name in names}}}]


# -- rollups ----------------------------------------------------------------------------------------


def key_paths(key: GroupKey) -> list[str]:
    """Where the parts of a group's key stand after `$group`."""
    return [f"_id.k{number}" for number in range(len(key.parts))]


def group_stages(entry: Entry[Any], before: Raw, after: Raw) -> list[Raw]:
    """The documents of a rollup as they should be, of sources and groups that match."""
    group = entry.group
    assert group is not None
    accumulators = Accumulators()
    pipelines: list[list[Raw]] = []
    identity = {f"k{number}": part.expression() for number, part in enumerate(group.key.parts)}
    required = [
        {path: {"$ne": None}}
        for path, part in zip(key_paths(group.key), group.key.parts, strict=True)
        # A join on plain fields takes no null; such groups are computed in another way.
        if not part.optional or not group.key.identity
    ]
    kept = {"$and": [*required, *([after] if after else [])]}
    for number, rules in enumerate(
        _branches([group, *(r for r in entry.having(GatherRule) if r is not group)])
    ):
        chosen = [each for each in (before, rules[0].where) if each]
        stages: list[Raw] = [{"$match": {"$and": chosen}}] if chosen else []
        stages.append({"$group": {"_id": identity, **accumulators.of(number, rules)}})
        pipelines.append([*stages, {"$match": kept}])
    stages = pipelines[0]
    if len(pipelines) > 1:
        source = group.source.collection
        others = [(source, branch) for branch in pipelines[1:]]
        stages = _joined(stages, others, accumulators.names)
    shown: Raw = {"_id": "$_id.k0"} if group.key.identity else {"_id": 0}
    if not group.key.identity:
        for number, part in enumerate(group.key.parts):
            shown[part.target] = f"$_id.k{number}"
    for rule in entry.having(GatherRule):
        shown.update(rule.finish_expressions(accumulators.of_rule[rule]))
    return [*stages, {"$project": shown}]


def merge_groups(entry: Entry[Any], before: Raw, after: Raw, run: int, *, empty: bool = False) -> list[Raw]:
    """The whole recomputation of groups, ending in `$merge`; each document is stamped with the run.

    Into an empty collection they are only inserted, which is quicker.
    """
    group = entry.group
    assert group is not None
    stamps = stamps_of(entry.having(GatherRule))
    formulas = formula_stages(entry)
    paths = sorted({path for rule in entry.having(GatherRule) for path in _parts(rule)})
    taken: Raw = {path: f"$$new.{path}" for path in paths}
    matched: list[Raw] = [{"$set": {**taken, **stamps, RUN: run, **BUMP}}, *formulas]
    into: Raw = {
        "into": entry.collection,
        "whenMatched": "fail" if empty else matched,
        "whenNotMatched": "insert",
    }
    if not group.key.identity:
        into["on"] = group.key.targets
    new: list[Raw] = [{"$set": {**stamps, RUN: run, REVISION: 1}}, *formulas]
    return [*group_stages(entry, before, after), *lease.held(LEASE, run, HELD), *new, {"$merge": into}]


def _parts(rule: GatherRule) -> Iterator[str]:
    return iter(rule.finish_expressions(_Anything()))


class _Anything(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return f"${name}"


# -- fields of targets that exist ---------------------------------------------------------------------


def merge_fields(entry: Entry[Any], rules: Sequence[GatherRule], run: int) -> list[Raw]:
    """The recomputation of fields in all targets, from the targets' collection.

    Begins with every target, so that one whose last source has left is set
    back too. A target that is right already is not written.
    """
    accumulators = Accumulators()
    others = []
    for number, together in enumerate(_branches(rules)):
        rule = together[0]
        stages: list[Raw] = [{"$match": rule.where}] if rule.where else []
        stages += rule.key.stages(None, rule.per_element)
        grouped = {"$group": {"_id": f"${KEY}", **accumulators.of(number, together)}}
        others.append((rule.source.collection, [*stages, grouped]))
    shown: Raw = {}
    for rule in rules:
        shown.update(rule.finish_expressions(accumulators.of_rule[rule]))
    paths = sorted(shown)
    # Sources may name documents of another kind, or none.
    targets: list[Raw] = [{"$match": entry.exactly}] if entry.exactly else []
    targets.append({"$project": {"_id": 1, "is_target": {"$literal": 1}}})
    stages = _joined(targets, others, [*accumulators.names, "is_target"])
    stages.append({"$match": {"is_target": 1}})
    changed = {"$or": [{"$ne": [{"$ifNull": [f"${path}", None]}, f"$$new.{path}"]} for path in paths]}
    stamps: Mapping[str, Any] = {
        path: {"$cond": ["$$changed", value, f"${path}"]} for path, value in stamps_of(rules).items()
    }
    bump = {REVISION: {"$cond": ["$$changed", BUMP[REVISION], f"${REVISION}"]}}
    sets = {
        path: {"$let": {"vars": {"changed": changed}, "in": value}}
        for path, value in {**stamps, **bump}.items()
    }
    # What depends on the change is set while the old values are still there.
    matched: list[Raw] = [
        {"$set": sets},
        {"$set": {path: f"$$new.{path}" for path in paths}},
        *formula_stages(entry),
    ]
    into = {"into": entry.collection, "whenMatched": matched, "whenNotMatched": "discard"}
    return [*stages, {"$project": {"_id": 1, **shown}}, *lease.held(LEASE, run, HELD), {"$merge": into}]
