"""Compares what is stored twice: copies with their sources, tallies with what they count, former states.

Small collections are compared in full, large ones by a uniform sample, and
the facts say which. Values stay in this process; the facts hold numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from treadle.advisor import copies, former_states, structure
from treadle.advisor.copies import Comparison, CopyCandidate, TallyCandidate
from treadle.advisor.facts import CollectionFacts, Copy, FieldFacts, Limits, Past, Relation, Tally
from treadle.advisor.measure import with_note
from treadle.advisor.reading import Reader, Refused, Row
from treadle.advisor.relations import usable_keys, values_at
from treadle.advisor.structure import Stage, query_path
from treadle.query.keys import freeze

BATCH = 1_000
# Beyond so many parents, or children to count, a sample of the parents is enough.
TALLIED_PARENTS_MAX = 50_000
TALLIED_CHILDREN_MAX = 2_000_000
SAMPLED_PARENTS = 500
SAMPLED_IDS = 64


@dataclass(slots=True)
class Comparer:
    """Compares along the relations; notes go to the facts in `collections`."""

    reader: Reader
    limits: Limits
    collections: dict[str, CollectionFacts]
    # What Treadle itself maintains, by the places of its rules in lower case without underscores.
    declared: frozenset[str]
    copies: list[Copy] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    pasts: list[Past] = field(default_factory=list)

    def run(self, relations: Iterable[Relation]) -> None:
        relations = list(relations)
        self._along(relations)
        for past, of in former_states.candidates(self.collections):
            find = partial(self._past, past, of, relations)
            self._attempt(past.name, "whether it holds former states", find)

    def _attempt(self, name: str, what: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Refused as refused:
            note = f"{what} was not determined: {refused.reason}"
            self.collections[name] = with_note(self.collections[name], note)

    def _along(self, relations: Iterable[Relation]) -> None:
        for relation in relations:
            try:
                self.copies += self._copies(relation)
                if relation.child != relation.parent:
                    self.tallies += self._tallies(relation)
            except Refused as refused:
                note = f"what repeats values along {relation.path} was not compared: {refused.reason}"
                self.collections[relation.child] = with_note(self.collections[relation.child], note)

    def is_declared(self, each: FieldFacts) -> bool:
        """Whether a field, or what is around it, is maintained by Treadle."""
        parts = [step for step in each.steps if step != "[]"]
        names = {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
        return bool({name.replace("_", "").lower() for name in names} & self.declared)

    # -- copies ----------------------------------------------------------------------------

    def _copies(self, relation: Relation) -> list[Copy]:
        child, parent = self.collections[relation.child], self.collections[relation.parent]
        found = copies.copy_candidates(child, relation, parent)
        found = [each for each in found if not self.is_declared(each.field)]
        if not found:
            return []
        comparisons = [Comparison() for _ in found]
        share = self._share(child)
        for keys_and_copies in self._batches(child, relation, found, share):
            sources = self._sources(parent, relation.key, found, keys_and_copies)
            for key, values in keys_and_copies:
                source = sources.get(freeze(key))
                if source is None:
                    continue
                for comparison, value, original in zip(comparisons, values, source, strict=True):
                    comparison.add(value, original)
        return [
            Copy(
                child.name,
                each.field.path,
                parent.name,
                each.source.path,
                relation.path,
                relation.key,
                comparison.compared,
                comparison.stale,
                comparison.absent,
                child.count if share < 1 or child.slow else None,
                each.named,
            )
            for each, comparison in zip(found, comparisons, strict=True)
            if comparison.is_copy(each.named)
        ]

    def _share(self, facts: CollectionFacts) -> float:
        whole = facts.count <= self.limits.structure_documents and not facts.slow
        return 1.0 if whole else structure.share_of(facts, self.limits.sample_documents)

    def _batches(
        self, child: CollectionFacts, relation: Relation, found: list[CopyCandidate], share: float
    ) -> Iterator[list[tuple[Any, list[Any]]]]:
        """The references of the documents with the values beside them, some at a time."""
        reference = child.fields[relation.path].steps
        around = reference[:-1]
        inside = [each.field.steps[len(around) :] for each in found]
        paths = {query_path(steps) for steps in (reference, *(each.field.steps for each in found))}
        project: Stage = {"$project": {"_id": int("_id" in paths), **dict.fromkeys(paths - {"_id"}, 1)}}
        batch: list[tuple[Any, list[Any]]] = []
        stages = [*structure.sample_stages(child, share), project]
        for row in self.reader.stream_aggregate(child.name, stages):
            batch += copies.pairs(row, around, reference[len(around) :], inside)
            if len(batch) >= BATCH:
                yield batch
                batch = []
        yield batch

    def _sources(
        self,
        parent: CollectionFacts,
        key: str,
        found: list[CopyCandidate],
        keys_and_copies: list[tuple[Any, list[Any]]],
    ) -> dict[Any, list[Any]]:
        """The source values of the documents that a batch refers to, by their frozen keys."""
        keys = usable_keys({freeze(value): value for value, _ in keys_and_copies}.values())
        projection = {"_id": int(key == "_id"), key: 1, **{each.source.path: 1 for each in found}}
        rows = self.reader.find(parent.name, {key: {"$in": keys}}, projection)
        return {
            freeze(value): [copies.inside(row, each.source.steps) for each in found]
            for row in rows
            for value in values_at(row, key)
        }

    # -- tallies ----------------------------------------------------------------------------

    def _tallies(self, relation: Relation) -> list[Tally]:
        child, parent = self.collections[relation.child], self.collections[relation.parent]
        candidates = [
            each
            for each in copies.tally_candidates(parent, relation, child)
            if not self.is_declared(each.field)
        ]
        if not candidates:
            return []
        exact = parent.count <= TALLIED_PARENTS_MAX and child.count <= TALLIED_CHILDREN_MAX and not child.slow
        parents = self._parents(parent, relation.key, [each.field for each in candidates], exact)
        if not exact and not parents:
            return []
        own = tuple(relation.key.split("."))
        keys = None if exact else usable_keys(filter(None, (copies.inside(row, own) for row in parents)))
        actual = self._actual(child, relation, candidates, keys)
        found = []
        for each in candidates:
            numbers = [
                (row[each.field.path], actual.get(freeze(copies.inside(row, own)), {}).get(each.name))
                for row in parents
                if row.get(each.field.path) is not None
            ]
            compared, drifted = _drift(each, numbers)
            plain = each.part is not None or copies.is_plainly_named(each.field, relation)
            if copies.is_tally(compared, drifted, plain):
                found.append(
                    Tally(
                        parent.name,
                        each.field.path,
                        child.name,
                        relation.path,
                        relation.key,
                        None if each.part is None else each.part.path,
                        compared,
                        drifted,
                        None if exact else parent.count,
                        each.operator == "average",
                    )
                )
        return _closest(found)

    def _parents(self, parent: CollectionFacts, key: str, fields: list[FieldFacts], exact: bool) -> list[Row]:
        share = 1.0 if exact else structure.share_of(parent, SAMPLED_PARENTS)
        project = {"_id": int(key == "_id"), key: 1, **{each.path: 1 for each in fields}}
        return self.reader.aggregate(
            parent.name, [*structure.sample_stages(parent, share), {"$project": project}]
        )

    def _actual(
        self, child: CollectionFacts, relation: Relation, found: list[TallyCandidate], keys: list[Any] | None
    ) -> dict[Any, Row]:
        """What the numbers should be, by the key of the parent."""
        path = query_path(child.fields[relation.path].steps)
        among: list[Stage] = [] if keys is None else [{"$match": {path: {"$in": keys}}}]
        steps = child.fields[relation.path].steps
        unwind: list[Stage] = [
            {"$unwind": f"${query_path(steps[:place])}"} for place, step in enumerate(steps) if step == "[]"
        ]
        numbers = list({each.name: each.accumulator for each in found}.items())
        # Paths have dots, which names of accumulators cannot have.
        accumulators = {f"n{place}": accumulator for place, (_, accumulator) in enumerate(numbers)}
        group: Stage = {"$group": {"_id": f"${path}", **accumulators}}
        if unwind:
            # A document that refers twice is one child.
            unwind.append({"$group": {"_id": {"d": "$_id", "k": f"${path}"}}})
            group = {"$group": {"_id": "$_id.k", **accumulators}}
        rows = self.reader.aggregate(child.name, [*among, *unwind, group])
        return {
            freeze(row["_id"]): {name: row[f"n{place}"] for place, (name, _) in enumerate(numbers)}
            for row in rows
        }

    def _past(self, past: CollectionFacts, of: CollectionFacts, relations: Iterable[Relation]) -> None:
        shared = former_states.shared_fields(past, of)
        if not shared:
            return
        by = next(
            (each.path for each in relations if (each.child, each.parent) == (past.name, of.name)), None
        )
        if by is None:
            rows = self.reader.aggregate(
                past.name, [{"$sample": {"size": SAMPLED_IDS}}, {"$project": {"_id": 1}}]
            )
            ids = usable_keys(row["_id"] for row in rows)
            there = self.reader.find(of.name, {"_id": {"$in": ids}}, {"_id": 1})
            if not ids or len(there) < len(ids) / 2:
                return
            by = "_id"
        self.pasts.append(Past(past.name, of.name, shared, by, past.count))


def _drift(candidate: TallyCandidate, numbers: list[tuple[Any, Any]]) -> tuple[int, int]:
    """How many stored numbers were compared with the actual ones, and how many differ."""
    if candidate.operator == "average":
        # Of no children there is no average, and what is stored then is a matter of taste.
        numbers = [pair for pair in numbers if pair[1] is not None]
        rounded = copies.decimals(stored for stored, _ in numbers)
        return len(numbers), sum(not copies.same_average(*pair, rounded) for pair in numbers)
    # Where both are none, that proves nothing.
    pairs = [(stored, actual or 0) for stored, actual in numbers]
    pairs = [(stored, actual) for stored, actual in pairs if actual or not copies.same_number(stored, 0)]
    return len(pairs), sum(not copies.same_number(*pair) for pair in pairs)


def _closest(found: list[Tally]) -> list[Tally]:
    """Of several sums that a field may be, the one that fits best."""
    best: dict[str, Tally] = {}
    for each in found:
        if each.path not in best or each.drifted < best[each.path].drifted:
            best[each.path] = each
    return list(best.values())
