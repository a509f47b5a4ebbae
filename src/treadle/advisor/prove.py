"""Proves which field holds which collection's keys, by looking its values up in the database.

A candidate (see `relations.py`) becomes a relation when enough of its values
are found. Children per parent come from a full pass, or of a large collection
from references drawn uniformly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from treadle.advisor import inner, relations, structure, workload
from treadle.advisor.facts import (
    NUMBERS,
    CollectionFacts,
    Distribution,
    Limits,
    Relation,
    TreeFacts,
    Workload,
)
from treadle.advisor.measure import noted
from treadle.advisor.reading import Lost, Reader, Refused
from treadle.advisor.relations import Candidate

TREE_NODES_MAX = 200_000


@dataclass(frozen=True, slots=True)
class Proof:
    """What looking up a candidate's values gave."""

    children: Distribution
    references: int
    checked: int
    orphans: int
    # The share of the different values that were found.
    held: float


@dataclass(slots=True)
class Prover:
    """Looks for the relations between collections; `found` is theirs to be noted in."""

    reader: Reader
    limits: Limits
    found: dict[str, CollectionFacts]
    samples: dict[str, dict[str, list[Any]]]
    workload: Workload | None
    relations: list[Relation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self, report: Callable[[str, int, int], None]) -> None:
        """Add every relation that is proven; what cannot be seen is noted at its collection."""
        by_field = list(relations.candidates(self.found).items())
        if len(by_field) > relations.FIELDS_MAX:
            self.notes.append(
                f"{len(by_field):,} fields may be references; {relations.FIELDS_MAX} were looked into."
            )
            del by_field[relations.FIELDS_MAX :]
        for number, ((child, path), found) in enumerate(by_field):
            report(f"relations: {child}.{path}", number, len(by_field))
            try:
                best = self._best(found)
                relation = None if best is None else self._proven(best)
            except Refused as refused:
                self._note(child, f"whether {path} is a reference was not seen: {refused.reason}")
                continue
            except Lost:
                raise
            except Exception as error:
                # Values that this module does not understand are said, and the others go on.
                self._note(
                    child, f"whether {path} is a reference was not understood ({type(error).__name__})"
                )
                continue
            if relation is not None:
                self.relations.append(relation)
                self.relations.sort(key=lambda each: (each.child, each.path))
                if relation.child == relation.parent and not relation.many:
                    self._depth(relation)

    def _depth(self, relation: Relation) -> None:
        """How deep a tree is, or that it was not understood; either way the scan goes on."""
        try:
            self._tree(relation)
        except Lost:
            raise
        except Exception as error:
            self._note(relation.child, f"its depth was not understood ({type(error).__name__})")

    def _note(self, name: str, note: str) -> None:
        self.found[name] = noted(self.found[name], note)

    # -- which target ---------------------------------------------------------------------

    def _best(self, found: list[Candidate]) -> Candidate | None:
        """The target that holds most of the values; by name where several hold them."""
        values = relations.thinned(list(dict.fromkeys(self._sample_of(found[0]))), relations.PROBED_VALUES)
        for anywhere in (True, False):
            if not values:
                rows = self.reader.aggregate(found[0].child, relations.probe(found[0], anywhere))
                values = relations.usable(row["_id"] for row in rows)
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
                if share == 1:
                    # The others' names fit no better.
                    break
        return chosen

    def _held(self, parent: str, key: str, values: list[Any]) -> set[Any]:
        """Those of the values that are keys of the parent, each as `hashable` makes it."""
        projection = {"_id": 1} if key == "_id" else {"_id": 0, key: 1}
        rows = self.reader.find(parent, {key: {"$in": values}}, projection)
        wanted = {relations.hashable(value) for value in values}
        return wanted & {relations.hashable(value) for row in rows for value in relations.at(row, key)}

    def _sample_of(self, candidate: Candidate) -> list[Any]:
        """Values of the field that an earlier pass brought along."""
        # It may hold other types too, and the values were brought along before that was known.
        return relations.usable(self.samples.get(candidate.child, {}).get(candidate.field.path, []))

    # -- how many ---------------------------------------------------------------------------

    def _proven(self, candidate: Candidate) -> Relation | None:
        """Children per parent and orphans; from a full pass, or where that costs too much, a sample."""
        child, parent = self.found[candidate.child], self.found[candidate.parent]
        exact = child.count <= self.limits.structure_documents and not child.slow
        proof = self._counted_all(candidate) if exact else self._counted_sample(candidate, child)
        if proof is None:
            return None
        if candidate.key != "_id" and not self._is_unique(parent, candidate.key):
            return None
        return Relation(
            candidate.child,
            candidate.field.path,
            candidate.parent,
            candidate.key,
            candidate.field.in_array,
            proof.references,
            proof.children,
            parent.count,
            max(0, parent.count - round(proof.children.count * proof.held)),
            proof.orphans,
            proof.checked,
            "name" if candidate.named else "type",
            *self._reads(candidate),
        )

    def _counted_all(self, candidate: Candidate) -> Proof | None:
        """Every reference is counted; up to a limit of different ones are looked up."""
        rows = self.reader.aggregate(
            candidate.child,
            relations.grouped(candidate.field, candidate.path, self.limits.references_checked),
        )
        counts, values = rows[0]["counts"], rows[0]["values"]
        if not counts:
            return None
        wanted = relations.usable(row["_id"] for row in values)
        held = self._held(candidate.parent, candidate.key, wanted)
        share = len(held) / len(values)
        if not relations.contained_enough(candidate, share, sum(row["values"] for row in counts)):
            return None
        children = Distribution.of(
            (row["_id"], row["_id"], row["values"], row["_id"] * row["values"]) for row in counts
        )
        references = sum(row["_id"] * row["values"] for row in counts)
        checked = sum(row["n"] for row in values)
        orphans = sum(row["n"] for row in values if relations.hashable(row["_id"]) not in held)
        return Proof(children, references, checked, orphans, share)

    def _counted_sample(self, candidate: Candidate, child: CollectionFacts) -> Proof | None:
        """References of a uniform sample are looked up; of some and of the heaviest, children are counted."""
        values = self._sample_of(candidate)
        if not values:
            share = structure.share_of(child, self.limits.sample_documents)
            pipeline = relations.sampled_values(candidate, structure.chosen(child, share))
            values = relations.usable(row["v"] for row in self.reader.aggregate(candidate.child, pipeline))
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
        return Proof(children, references, len(values), orphans, contained)

    def _references(self, candidate: Candidate, child: CollectionFacts) -> int:
        """About how many references a large collection holds."""
        field = candidate.field
        if not field.in_array:
            alike = NUMBERS if field.type in NUMBERS else {field.type}
            number = sum(count for kind, count in field.filled.items() if kind in alike)
            return round(child.count * number / max(1, field.looked_at))
        place = field.steps.index("[]")
        array = child.fields.get(structure.label(field.steps[:place]))
        mean = array.lengths.mean if array is not None and array.lengths is not None else 1.0
        # Documents without the array were not measured.
        having = array.share if array is not None else 1.0
        return round(child.count * having * mean)

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

    # -- what follows ---------------------------------------------------------------------------

    def _reads(self, candidate: Candidate) -> tuple[int, int]:
        if self.workload is None:
            return 0, 0
        return workload.read_together(
            self.workload, candidate.child, candidate.parent, candidate.path, candidate.key
        )

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
            self._note(facts.name, f"its depth was not measured: {refused.reason}")
            return
        self.found[facts.name] = replace(facts, tree=inner.tree(rows, relation.key, relation.path))
