"""Looks at a database and measures it: the only module of the advisor that reads data.

In this order: the collections and their statistics; each collection's sizes,
fields and arrays; what only some collections call for (kinds, series, trees,
large values); then relations between collections; then the workload. Sizes,
array lengths and children per parent come from full passes on the server,
because the one document that matters is easily missed by a sample. The fields
of a large collection come from a uniform sample, and the facts say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from pymongo.database import Database

from treadle.advisor import inner, relations, statistics, structure, workload
from treadle.advisor.facts import (
    CollectionFacts,
    Distribution,
    Growth,
    Limits,
    Relation,
    Scan,
    Shape,
    TreeFacts,
    Workload,
)
from treadle.advisor.reading import (
    NO_RIGHTS,
    TOO_LARGE,
    Lost,
    Reader,
    Refused,
)
from treadle.advisor.relations import Candidate

ARRAYS_MAX = 12
VALUES_MEASURED_MAX = 20
# Documents smaller than this hold no large value worth measuring.
LARGE_DOCUMENT_BYTES = 16 * 1024
TREE_NODES_MAX = 200_000
# Values kept of samples until relations are looked for; some 40 MB at most.
KEPT_VALUES_MAX = 500_000
KEYS_BROUGHT_MAX = 6
GUESSED_DOCUMENTS = 50
DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Step:
    """How far a scan is."""

    what: str
    done: int
    total: int


Reporter = Callable[[Step], None]


@dataclass(slots=True)
class Profiler:
    """One scan in progress; `found` holds what is known so far, for whoever interrupts it."""

    reader: Reader
    limits: Limits
    values_shown: bool = False
    report: Reporter = lambda step: None
    found: dict[str, CollectionFacts] = field(default_factory=dict)
    relations: list[Relation] = field(default_factory=list)
    workload: Workload | None = None
    notes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    # Values of possible keys, per collection and field; never part of the facts.
    samples: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    version: tuple[int, ...] = (0,)
    complete: bool = False
    lost: bool = False

    def run(self, recorded: Workload | None) -> None:
        """Measure everything; raises `Lost` or KeyboardInterrupt with `found` as far as it came."""
        self.workload = recorded
        self.version = self._version()
        chosen = self._choose()
        for number, (name, listed) in enumerate(chosen):
            self.report(Step(name, number, len(chosen) + 1))
            self.found[name] = self._collection(name, listed)
        self.report(Step("relations", len(chosen), len(chosen) + 1))
        if self.workload is None:
            self.workload = self._recorded()
        self._relations()
        self.report(Step("done", len(chosen) + 1, len(chosen) + 1))
        self.complete = True

    def scan(self) -> Scan:
        """What is known, as facts."""
        return Scan(
            self.reader.database.name,
            self.version,
            dict(sorted(self.found.items())),
            tuple(self.relations),
            self.workload,
            self.limits,
            tuple(self.notes),
            self.complete,
            self.lost,
            self.values_shown,
            tuple(sorted(self.names)),
        )

    # -- which collections -----------------------------------------------------------

    def _version(self) -> tuple[int, ...]:
        try:
            told = self.reader.command({"buildInfo": 1}, of_admin=True)["versionArray"]
        except Refused:
            return (4, 4)
        return tuple(told[:3])

    def _choose(self) -> list[tuple[str, dict[str, Any]]]:
        """The collections to look into: all, or the largest where there are too many."""
        listed = {
            each["name"]: each
            for each in self.reader.collections()
            if not each["name"].startswith(("system.", "treadle."))
        }
        self.names = list(listed)
        if not listed:
            self.notes.append("The database has no collections, or the login may see none.")
        kept = sorted(listed)
        if len(kept) > self.limits.collections:
            counts = {name: self._documents(name, listed[name]) for name in kept}
            kept = sorted(sorted(kept, key=lambda name: (-counts[name], name))[: self.limits.collections])
            self.notes.append(
                f"The database has {len(listed):,} collections; the {len(kept)} largest were looked into."
            )
        return [(name, listed[name]) for name in kept]

    def _documents(self, name: str, listed: Mapping[str, Any]) -> int:
        """How many documents, as the server's catalogue says; a view would have to be computed."""
        if listed.get("type", "collection") != "collection":
            return 0
        try:
            return int(self.reader.command({"count": name})["n"])
        except Refused:
            return 0

    def _statistics(self, name: str) -> list[dict[str, Any]]:
        return self.reader.aggregate(name, [{"$collStats": {"storageStats": {}}}])

    # -- one collection ----------------------------------------------------------------

    def _collection(self, name: str, listed: Mapping[str, Any]) -> CollectionFacts:
        options = listed.get("options", {})
        kind = {"view": "view", "timeseries": "time series"}.get(listed.get("type", ""), "collection")
        facts = CollectionFacts(name, kind, validated=bool(options.get("validator")))
        if kind == "view":
            return replace(facts, skipped=f"a view on {options.get('viewOn', 'another collection')}")
        try:
            facts = statistics.counted(facts, [row["storageStats"] for row in self._statistics(name)])
        except Refused as refused:
            if kind == "collection":
                return replace(facts, skipped=refused.reason)
        if kind == "time series":
            told = options.get("timeseries", {})
            note = f"a time series collection by {told.get('timeField', 'its time field')}; not looked into"
            return replace(facts, notes=(note,))
        if not facts.count:
            return replace(self._indexed(facts), notes=(*facts.notes, "empty"))
        try:
            return self._measured(facts)
        except Refused as refused:
            return replace(facts, skipped=refused.reason)
        except Lost:
            raise
        except Exception as error:
            # Data that this module does not understand is said, and the others go on.
            return replace(facts, skipped=f"it was not understood ({type(error).__name__})")

    def _measured(self, facts: CollectionFacts) -> CollectionFacts:
        facts = self._indexed(facts)
        facts = self._sized(facts)
        facts = self._shaped(facts)
        facts = self._nested(facts)
        facts = self._array_lengths(facts)
        facts = self._large_values(facts)
        facts = self._grown(facts)
        for what, probe in (("kinds", self._kinds), ("series", self._series), ("versions", self._versions)):
            try:
                facts = probe(facts)
            except Refused as refused:
                facts = _noted(facts, f"{what} were not measured: {refused.reason}")
        return facts

    def _share(self, facts: CollectionFacts, documents: int) -> float:
        return 1.0 if facts.count <= documents else documents / facts.count

    def _pass_share(self, facts: CollectionFacts) -> float:
        """All of it, up to the budget; beyond, a uniform sample."""
        if facts.count <= self.limits.full_pass_documents:
            return 1.0
        return self.limits.sample_documents / facts.count

    def _indexed(self, facts: CollectionFacts) -> CollectionFacts:
        sizes = {index.name: index.bytes for index in facts.indexes}
        try:
            reply = self.reader.command({"listIndexes": facts.name, "cursor": {"batchSize": 1000}})
        except Refused as refused:
            return _noted(replace(facts, indexes=()), f"indexes were not seen: {refused.reason}")
        used: dict[str, tuple[int, datetime]] = {}
        try:
            for row in self.reader.aggregate(facts.name, [{"$indexStats": {}}]):
                before = used.get(row["name"], (0, row["accesses"]["since"]))
                used[row["name"]] = (before[0] + int(row["accesses"]["ops"]), row["accesses"]["since"])
        except Refused as refused:
            facts = _noted(facts, f"the use of indexes was not seen: {refused.reason}")
        now = datetime.now(UTC)
        return replace(
            facts,
            indexes=tuple(
                statistics.index(each, sizes.get(each["name"]), used.get(each["name"]), now)
                for each in reply["cursor"]["firstBatch"]
            ),
        )

    def _sized(self, facts: CollectionFacts) -> CollectionFacts:
        share = self._pass_share(facts)
        try:
            rows = self.reader.aggregate(facts.name, structure.sizes(share))
        except Refused as refused:
            if refused.reason == NO_RIGHTS:
                raise
            return _noted(facts, f"document sizes were not measured: {refused.reason}")
        sizes = structure.read_sizes(rows, facts.count if share < 1 else None)
        if share < 1:
            facts = _noted(facts, f"sizes are of a uniform sample of {sizes.count:,} documents")
        return replace(facts, sizes=sizes)

    def _shaped(self, facts: CollectionFacts) -> CollectionFacts:
        """The top-level fields and which occur together; of a sample where that was too much."""
        share = 1.0 if facts.count <= self.limits.structure_documents else 0.0
        share = share or self._share(facts, self.limits.sample_documents)
        keys = self._likely_keys(facts) if share < 1 else []
        for smaller in (1.0, 0.1, 0.01):
            try:
                rows = self.reader.aggregate(
                    facts.name, structure.shapes(min(1.0, share * smaller), self.limits.shapes, keys)
                )
            except Refused as refused:
                if refused.reason == TOO_LARGE:
                    continue
                raise
            if len(rows) <= self.limits.shapes:
                if keys:
                    self.samples[facts.name] = structure.read_values(rows, keys)
                return self._with_shapes(facts, structure.read_shapes(rows), share * smaller)
            break
        return self._with_paths_only(facts)

    def _likely_keys(self, facts: CollectionFacts) -> list[str]:
        """Fields whose values are worth bringing along; a guess, which a few documents are enough for."""
        kept = sum(len(values) for sample in self.samples.values() for values in sample.values())
        if kept > KEPT_VALUES_MAX:
            return []
        # The first documents will do: a field that is missed here is asked for by itself later.
        few = [{"$limit": GUESSED_DOCUMENTS}, *structure.shapes(1.0, self.limits.shapes)]
        return structure.likely_keys(self.reader.aggregate(facts.name, few), KEYS_BROUGHT_MAX)

    def _with_shapes(self, facts: CollectionFacts, found: list[Shape], share: float) -> CollectionFacts:
        shapes, had_map = structure.collapse_shapes(found)
        looked_at = sum(shape.count for shape in shapes)
        if share < 1:
            facts = _noted(facts, f"fields are of a uniform sample of {looked_at:,} documents")
        if had_map:
            facts = _noted(facts, "its documents use data as field names; those are shown as *")
        return replace(
            facts,
            looked_at=facts.count if share >= 1 else looked_at,
            fields=structure.fields_of_shapes(shapes),
            shapes=tuple(shapes),
        )

    def _with_paths_only(self, facts: CollectionFacts) -> CollectionFacts:
        """For collections with more shapes than fit: each field by itself, of a sample."""
        share = self._share(facts, max(1, self.limits.sample_documents // 2))
        rows = self.reader.aggregate(facts.name, structure.paths(share, self.limits.paths, False))
        looked_at = max((row["n"] for row in rows), default=0)
        cut = len(rows) > self.limits.paths
        facts = _noted(facts, f"fields are of a uniform sample of {looked_at:,} documents")
        facts = _noted(
            facts, "it has too many different shapes to list" + (", and too many fields" if cut else "")
        )
        fields = structure.fields_of_paths(rows, looked_at)
        return replace(
            facts, looked_at=looked_at, fields=fields, shapes_complete=False, nested_looked_at=looked_at
        )

    def _nested(self, facts: CollectionFacts) -> CollectionFacts:
        """The fields inside objects and arrays, of a uniform sample, each with its own count."""
        if facts.nested_looked_at:
            return replace(facts, depth=max((each.depth for each in facts.fields.values()), default=0))
        nested = {"object", "array"}
        if not any(nested & set(each.types) for each in facts.fields.values()):
            return replace(facts, depth=1)
        share = self._share(facts, max(1, self.limits.sample_documents // 2))
        try:
            rows = self.reader.aggregate(facts.name, structure.paths(share, self.limits.paths, True))
        except Refused as refused:
            return _noted(replace(facts, depth=1), f"nested fields were not seen: {refused.reason}")
        looked_at = facts.count if share >= 1 else round(facts.count * share)
        if share < 1:
            facts = _noted(facts, f"nested fields are of a uniform sample of about {looked_at:,} documents")
        found = structure.fields_of_paths(rows, looked_at)
        fields = dict(facts.fields)
        fields.update({path: each for path, each in found.items() if len(each.steps) > 1})
        for path, each in found.items():
            if each.is_map and path in fields:
                fields[path] = replace(fields[path], is_map=True)
        depth = max(each.depth for each in fields.values())
        return replace(facts, fields=fields, nested_looked_at=looked_at, depth=depth)

    def _array_lengths(self, facts: CollectionFacts) -> CollectionFacts:
        arrays = [
            each
            for each in facts.fields.values()
            if "array" in each.types and not each.in_array and "*" not in each.steps
        ]
        share = self._pass_share(facts)
        fields = dict(facts.fields)
        for each in arrays[:ARRAYS_MAX]:
            if self.version < (5,) and not all(map(structure.is_plain_name, each.steps)):
                facts = _noted(facts, "arrays with odd names were not measured; that needs MongoDB 5.0")
                continue
            try:
                rows = self.reader.aggregate(facts.name, structure.lengths(each.steps, share))
            except Refused as refused:
                facts = _noted(facts, f"array lengths were not measured: {refused.reason}")
                break
            lengths = structure.read_lengths(rows, facts.count if share < 1 else None)
            fields[each.path] = replace(each, lengths=lengths)
        if len(arrays) > ARRAYS_MAX:
            facts = _noted(facts, f"of {len(arrays)} arrays, {ARRAYS_MAX} were measured")
        if arrays and share < 1:
            facts = _noted(
                facts, f"array lengths are of a uniform sample of about {round(facts.count * share):,}"
            )
        return replace(facts, fields=fields)

    def _large_values(self, facts: CollectionFacts) -> CollectionFacts:
        """How large text and binary values are, where documents are large."""
        if facts.sizes is None or facts.sizes.maximum < LARGE_DOCUMENT_BYTES:
            return facts
        chosen = [
            each
            for each in facts.fields.values()
            if {"binData", "string"} & set(each.types)
            and not each.in_array
            and "*" not in each.steps
            and all(map(structure.is_plain_name, each.steps))
        ][:VALUES_MEASURED_MAX]
        if not chosen:
            return facts
        share = self._share(facts, self.limits.structure_documents)
        try:
            rows = self.reader.aggregate(facts.name, structure.value_bytes(chosen, share))
        except Refused as refused:
            return _noted(facts, f"large values were not measured: {refused.reason}")
        fields = dict(facts.fields)
        for number, each in enumerate(chosen):
            if rows and rows[0][f"m{number}"] is not None:
                fields[each.path] = replace(
                    each, bytes_max=int(rows[0][f"m{number}"]), bytes_mean=float(rows[0][f"a{number}"])
                )
        return replace(facts, fields=fields)

    def _grown(self, facts: CollectionFacts) -> CollectionFacts:
        """When documents came, where their ids tell."""
        identity = facts.fields.get("_id")
        if identity is None or set(identity.types) != {"objectId"}:
            return facts
        ends = []
        for way in (1, -1):
            try:
                rows = self.reader.find(facts.name, {}, {"_id": 1}, [("_id", way)], 1)
            except Refused:
                return facts
            ends += [row["_id"].generation_time for row in rows]
        if len(ends) < 2:
            return facts
        days = max((ends[1] - ends[0]).total_seconds() / DAY_SECONDS, 1.0)
        return replace(facts, growth=Growth(ends[0], ends[1], facts.count / days))

    def _kinds(self, facts: CollectionFacts) -> CollectionFacts:
        share = self._share(facts, self.limits.sample_documents)
        for name in inner.kind_candidates(facts):
            rows = self.reader.aggregate(facts.name, inner.kinds_pipeline(name, facts, share))
            kinds = inner.read_kinds(name, facts, rows, self.values_shown)
            if kinds is not None:
                return replace(facts, kinds=kinds)
        return facts

    def _series(self, facts: CollectionFacts) -> CollectionFacts:
        fields = inner.series_fields(facts)
        if fields is None:
            return facts
        time, keys, measures = fields
        share = self._share(facts, self.limits.sample_documents)
        if inner.is_unlike_series(keys, self.samples.get(facts.name, {})):
            return facts
        row = self.reader.aggregate(facts.name, inner.distinct_pipeline(keys, share))[0]
        key = inner.choose_key(keys, row, facts)
        if key is None:
            return facts
        others = [each.name for each in facts.top() if each.name not in (key, time, *measures)]
        share = self._pass_share(facts)
        rows = self.reader.aggregate(facts.name, inner.series_pipeline(key, time, others, share))
        return replace(facts, series=inner.read_series(key, time, measures, others, rows, share))

    def _versions(self, facts: CollectionFacts) -> CollectionFacts:
        name = inner.version_field(facts)
        if name is None:
            return facts
        rows = self.reader.aggregate(facts.name, inner.versions_pipeline(name, self._pass_share(facts)))
        return replace(facts, versions=inner.read_versions(name, rows, self.values_shown))

    # -- relations ----------------------------------------------------------------------

    def _relations(self) -> None:
        by_field: dict[tuple[str, str], list[Candidate]] = {}
        for candidate in relations.candidates(self.found):
            by_field.setdefault((candidate.child, candidate.field.path), []).append(candidate)
        for number, ((child, path), found) in enumerate(by_field.items()):
            self.report(Step(f"relations: {child}.{path}", number, len(by_field)))
            try:
                best = self._best(found)
                relation = None if best is None else self._proven(best)
            except Refused as refused:
                self.found[child] = _noted(
                    self.found[child], f"whether {path} is a reference was not seen: {refused.reason}"
                )
                continue
            if relation is not None:
                self.relations.append(relation)
                if relation.child == relation.parent and not relation.many:
                    self._tree(relation)

    def _best(self, found: list[Candidate]) -> Candidate | None:
        """The target that holds most of the values; by name where several hold them."""
        brought = [value for value in self._sample_of(found[0]) if not isinstance(value, (dict, list))]
        values = relations.thinned(list(dict.fromkeys(brought)), relations.PROBED_VALUES)
        for anywhere in (True, False):
            if not values:
                rows = self.reader.aggregate(found[0].child, relations.probe(found[0], anywhere))
                values = [row["_id"] for row in rows]
        if not values:
            return None
        best: tuple[float, int] | None = None
        chosen: Candidate | None = None
        for candidate in found:
            held = len(self._held(candidate.parent, candidate.key, values))
            share = held / len(values)
            rank = (round(share, 1), candidate.score)
            if relations.contained_enough(candidate, share, len(values)) and (best is None or rank > best):
                best, chosen = rank, candidate
        return chosen

    def _held(self, parent: str, key: str, values: list[Any]) -> set[Any]:
        projection = {"_id": 1} if key == "_id" else {"_id": 0, key: 1}
        rows = self.reader.find(parent, {key: {"$in": values}}, projection)
        return {relations.hashable(row[key]) for row in rows if key in row}

    def _sample_of(self, candidate: Candidate) -> list[Any]:
        """Values of the field that an earlier pass brought along."""
        return self.samples.get(candidate.child, {}).get(candidate.field.path, [])

    def _proven(self, candidate: Candidate) -> Relation | None:
        """Children per parent and orphans; from a full pass, or where that costs too much, a sample."""
        child, parent = self.found[candidate.child], self.found[candidate.parent]
        exact = child.count <= self.limits.structure_documents
        found = self._counted_all(candidate) if exact else self._counted_sample(candidate, child)
        if found is None:
            return None
        if candidate.key != "_id" and not self._is_unique(parent, candidate.key):
            return None
        children, references, checked, orphans, held_share = found
        return Relation(
            candidate.child,
            candidate.field.path,
            candidate.parent,
            candidate.key,
            candidate.field.in_array,
            references,
            children,
            parent.count,
            max(0, parent.count - round(children.count * held_share)),
            orphans,
            checked,
            "name" if candidate.named else "type",
            *self._reads(candidate),
        )

    def _counted_all(self, candidate: Candidate) -> tuple[Distribution, int, int, int, float] | None:
        """Every reference is counted; up to a limit of different ones are looked up."""
        rows = self.reader.aggregate(
            candidate.child,
            relations.grouped(candidate.field, candidate.path, self.limits.references_checked),
        )
        counts, values = rows[0]["counts"], rows[0]["values"]
        if not counts:
            return None
        held = self._held(candidate.parent, candidate.key, [row["_id"] for row in values])
        share = len(held) / len(values)
        if not relations.contained_enough(candidate, share, sum(row["values"] for row in counts)):
            return None
        children = Distribution.of(
            (row["_id"], row["_id"], row["values"], row["_id"] * row["values"]) for row in counts
        )
        references = sum(row["_id"] * row["values"] for row in counts)
        checked = sum(row["n"] for row in values)
        orphans = sum(row["n"] for row in values if relations.hashable(row["_id"]) not in held)
        return children, references, checked, orphans, share

    def _counted_sample(
        self, candidate: Candidate, child: CollectionFacts
    ) -> tuple[Distribution, int, int, int, float] | None:
        """References of a uniform sample are looked up; of some and of the heaviest, children are counted."""
        share = self._share(child, self.limits.sample_documents)
        values = self._sample_of(candidate)
        if not values:
            rows = self.reader.aggregate(candidate.child, relations.sampled_values(candidate, share))
            values = [row["v"] for row in rows]
        # A field may hold other types too, and the values were brought along before that was known.
        values = [value for value in values if not isinstance(value, (dict, list))]
        if not values:
            return None
        values = relations.thinned(values, relations.SAMPLED_VALUES_MAX)
        held = self._held(candidate.parent, candidate.key, list(dict.fromkeys(values)))
        orphans = sum(relations.hashable(value) not in held for value in values)
        distinct = len(set(values))
        contained = len(held) / distinct
        if not relations.contained_enough(candidate, contained, distinct):
            return None
        drawn, heavy = relations.thinned(values, relations.DRAWN_VALUES), relations.heaviest(values)
        rows = self.reader.aggregate(
            candidate.child, relations.counted(candidate, list(dict.fromkeys([*drawn, *heavy])))
        )
        numbers = {row["_id"]: int(row["n"]) for row in rows}
        references = self._references(candidate, child)
        children = relations.per_parent(
            [numbers[value] for value in drawn if value in numbers] or [1],
            max(numbers.values(), default=1),
            references,
        )
        return children, references, len(values), orphans, contained

    def _references(self, candidate: Candidate, child: CollectionFacts) -> int:
        """About how many references a large collection holds."""
        field = candidate.field
        if not field.in_array:
            return round(child.count * field.filled.get(field.type, 0) / max(1, field.looked_at))
        place = field.steps.index("[]")
        array = child.fields.get(structure.label(field.steps[:place]))
        mean = array.lengths.mean if array is not None and array.lengths is not None else 1.0
        return round(child.count * mean)

    def _reads(self, candidate: Candidate) -> tuple[int, int]:
        if self.workload is None:
            return 0, 0
        together = workload.read_together(
            self.workload, candidate.child, candidate.parent, candidate.path, candidate.key
        )
        return together, self.workload.of(candidate.child, ("find", "aggregate"))

    def _is_unique(self, parent: CollectionFacts, key: str) -> bool:
        if any(index.unique and index.fields == (key,) for index in parent.indexes):
            return True
        rows = self.reader.aggregate(
            parent.name,
            [
                {"$group": {"_id": f"${key}", "n": {"$sum": 1}}},
                {"$match": {"n": {"$gt": 1}, "_id": {"$ne": None}}},
                {"$limit": 1},
                {"$project": {"_id": 0, "n": 1}},
            ],
        )
        return not rows

    def _tree(self, relation: Relation) -> None:
        facts = self.found[relation.child]
        if facts.count > TREE_NODES_MAX or "." in relation.path:
            self.found[facts.name] = replace(
                facts, tree=TreeFacts(relation.path, facts.count - relation.references, 0, 0, 0)
            )
            return
        try:
            rows = self.reader.find(facts.name, {}, {relation.key: 1, relation.path: 1})
        except Refused as refused:
            self.found[facts.name] = _noted(facts, f"its depth was not measured: {refused.reason}")
            return
        self.found[facts.name] = replace(facts, tree=inner.tree(rows, relation.key, relation.path))

    # -- workload -------------------------------------------------------------------------

    def _recorded(self) -> Workload | None:
        """What `system.profile` holds, if profiling is or was on."""
        try:
            rows = self.reader.find("system.profile", {}, PROFILE_PROJECTION, [("ts", -1)], PROFILED_MAX)
        except Refused:
            return None
        if not rows:
            return None
        found = workload.read(
            rows, self.reader.database.name, "system.profile", self.limits.workload_operations
        )
        return found if found.queries else None


# Neither the plans nor the locks are needed, and they are most of it.
PROFILE_PROJECTION = dict.fromkeys(
    (
        "op",
        "ns",
        "command",
        "docsExamined",
        "nreturned",
        "nMatched",
        "ndeleted",
        "planSummary",
        "millis",
        "ts",
    ),
    1,
)
PROFILED_MAX = 100_000


def profile(
    database: Database[dict[str, Any]],
    limits: Limits,
    recorded: Iterable[Mapping[str, Any]] | None = None,
    secondary: bool = False,
    values_shown: bool = False,
    report: Reporter | None = None,
) -> Scan:
    """Measure a database. Ctrl-C and a lost connection give what is known by then, marked incomplete."""
    reader = Reader.on(database, limits.operation_seconds, secondary)
    profiler = Profiler(reader, limits, values_shown, report or (lambda step: None))
    given = None
    if recorded is not None:
        given = workload.read(recorded, database.name, "file", limits.workload_operations)
        if not given.queries:
            profiler.notes.append("The workload file holds no operation on this database.")
    try:
        profiler.run(given)
    except KeyboardInterrupt:
        profiler.notes.append("Interrupted; this is what was known by then.")
    except Lost as lost:
        if not profiler.found:
            raise
        profiler.lost = True
        profiler.notes.append(f"The connection was lost ({lost}); this is what was known by then.")
    return profiler.scan()


def _noted(facts: CollectionFacts, note: str) -> CollectionFacts:
    return facts if note in facts.notes else replace(facts, notes=(*facts.notes, note))
