"""Proves which field holds which collection's keys, by looking its values up in the database.

A candidate (see `relations.py`) becomes a relation when enough of its values
exist in the other collection. Children per parent come from a full pass, or
for a large collection from references drawn uniformly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from treadle.advisor import natural_keys, probes, relations, structure, workload
from treadle.advisor.facts import CollectionFacts, Distribution, Limits, Relation, TreeFacts, Workload
from treadle.advisor.measure import with_note
from treadle.advisor.reading import Lost, Reader, Refused
from treadle.advisor.relations import Candidate
from treadle.query.keys import freeze

R = TypeVar("R")

TREE_NODES_MAX = 200_000
UNIQUE_DOCUMENTS_MAX = 200_000


@dataclass(frozen=True, slots=True)
class Proof:
    """What looking up a candidate's values showed."""

    children: Distribution
    references: int
    checked: int
    orphans: int
    # The share of the distinct values that exist in the parent.
    contained: float


@dataclass(slots=True)
class Prover:
    """Finds the relations between collections; notes go to the facts in `collections`."""

    reader: Reader
    limits: Limits
    collections: dict[str, CollectionFacts]
    samples: dict[str, dict[str, list[Any]]]
    # The same of whatever may refer by another key than an id, where a sample was sent anyway.
    referring: dict[str, dict[str, list[Any]]]
    workload: Workload | None
    relations: list[Relation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Hashes of the values of unique fields, per collection and field; never part of the facts.
    keys: dict[str, dict[str, natural_keys.Key]] = field(default_factory=dict)
    # Large collections, of which only the values are known that others hold.
    partly_known: set[str] = field(default_factory=set)

    def run(self, report: Callable[[str, int, int], None]) -> None:
        """Add every relation that is proven; notes say what could not be read."""
        queries = () if self.workload is None else self.workload.queries
        others = [*relations.joined(self.collections, queries), *self._natural(report)]
        by_field = relations.merged(relations.candidates(self.collections), others)
        if len(by_field) > relations.FIELDS_MAX:
            self.notes.append(
                f"{len(by_field):,} fields may be references; {relations.FIELDS_MAX} were looked into."
            )
            del by_field[relations.FIELDS_MAX :]
        for number, ((child, path), candidates) in enumerate(by_field):
            report(f"relations: {child}.{path}", number, len(by_field))
            find = partial(self._relation, candidates)
            relation = self._attempt(child, f"whether {path} is a reference", find)
            if relation is None:
                continue
            self.relations.append(relation)
            self.relations.sort(key=lambda each: (each.child, each.path))
            if relation.child == relation.parent and not relation.many:
                tree = self._attempt(child, "its depth", partial(self._tree, relation))
                self.collections[child] = replace(self.collections[child], tree=tree)

    def _attempt(self, child: str, what: str, step: Callable[[], R]) -> R | None:
        """The result of a step; None with a note at the collection where it fails."""
        try:
            return step()
        except Refused as refused:
            note = f"{what} was not determined: {refused.reason}"
        except Lost:
            raise
        except Exception as error:
            # Values that this module does not understand are reported, and the scan continues.
            note = f"{what} was not understood ({type(error).__name__})"
        self.collections[child] = with_note(self.collections[child], note)
        return None

    # -- by other keys than ids -------------------------------------------------------------

    def _natural(self, report: Callable[[str, int, int], None]) -> list[Candidate]:
        """References whose values are another collection's unique field, whatever it is called."""
        parents = {each.name: each for each in self.collections.values() if each.plain and each.count}
        for number, parent in enumerate(parents.values()):
            if (
                sum(len(each.hashes) for keys in self.keys.values() for each in keys.values())
                > natural_keys.HASHES_MAX
            ):
                self.notes.append("References by other keys than ids were sought in the first collections.")
                break
            fields = natural_keys.key_fields(parent)
            if not fields:
                continue
            report(f"keys: {parent.name}", number, len(parents))
            pipeline = natural_keys.values_pipeline(fields, [])
            rows = self._attempt(parent.name, "what it is known by", partial(self._rows, parent, pipeline))
            if rows:
                self.keys[parent.name] = natural_keys.unique_keys(fields, rows)
        values: dict[str, dict[str, list[Any]]] = {}
        for child in parents.values():
            fields = natural_keys.referring_fields(child)
            if not fields or len(parents) < 2:
                continue
            if child.name in self.referring:
                values[child.name] = self.referring[child.name]
                continue
            sample: list[structure.Stage] = [{"$sample": {"size": natural_keys.sampled_documents(child)}}]
            pipeline = natural_keys.values_pipeline(fields, sample)
            rows = self._attempt(child.name, "what it refers to", partial(self._rows, child, pipeline))
            values[child.name] = natural_keys.sampled_values(fields, rows or [])
        for parent in parents.values():
            self._find_large_keys(parent, values)
        known = natural_keys.by_kind(parents, self.keys)
        return [
            each
            for name, sampled in values.items()
            for each in natural_keys.candidates(parents[name], sampled, known)
        ]

    def _find_large_keys(
        self, parent: CollectionFacts, values: Mapping[str, Mapping[str, list[Any]]]
    ) -> None:
        """Note the values that a large collection shares with others; if they are unique is asked later."""
        fields = natural_keys.large_key_fields(parent)
        sought = natural_keys.sought(values, parent.name) if fields else []
        if not sought:
            return
        pipeline = natural_keys.found_pipeline(fields, sought)
        rows = self._attempt(parent.name, "what it is known by", partial(self._rows, parent, pipeline))
        if rows and len(rows) < natural_keys.FOUND_ROWS_MAX:
            self.keys[parent.name] = natural_keys.unique_keys(fields, rows)
            self.partly_known.add(parent.name)

    def _rows(self, facts: CollectionFacts, pipeline: list[structure.Stage]) -> list[dict[str, Any]]:
        return self.reader.aggregate(facts.name, pipeline)

    # -- which target ---------------------------------------------------------------------

    def _best(self, candidates: list[Candidate]) -> Candidate | None:
        """The target that holds most of the values; the best name where several hold them."""
        values = list(dict.fromkeys(self._sample(candidates[0])))
        values = relations.thin(values, relations.PROBED_VALUES)
        for anywhere in (True, False):
            if not values:
                pipeline = relations.probe_pipeline(candidates[0], anywhere)
                rows = self.reader.aggregate(candidates[0].child, pipeline)
                values = relations.usable_keys(row["_id"] for row in rows)
        if not values:
            return None
        best: Candidate | None = None
        best_rank = (0.0, 0)
        for candidate in candidates:
            share = len(self._existing(candidate, values)) / len(values)
            rank = (round(share, 1), candidate.score)
            if relations.is_reference(candidate, share, len(values)) and (best is None or rank > best_rank):
                best, best_rank = candidate, rank
                if share == 1:
                    # The names of the others fit no better.
                    break
        return best

    def _existing(self, candidate: Candidate, values: list[Any]) -> set[Any]:
        """Those of the values that are keys of the parent, each frozen."""
        key = candidate.key
        projection = {"_id": 1} if key == "_id" else {"_id": 0, key: 1}
        rows = self.reader.find(candidate.parent, {key: {"$in": values}}, projection)
        keys = {freeze(value) for row in rows for value in relations.values_at(row, key)}
        return keys & {freeze(value) for value in values}

    def _sample(self, candidate: Candidate) -> list[Any]:
        """Values of the field that an earlier pass collected."""
        # They were collected before the types of the field were known.
        return relations.usable_keys(self.samples.get(candidate.child, {}).get(candidate.field.path, []))

    # -- how many ---------------------------------------------------------------------------

    def _relation(self, candidates: list[Candidate]) -> Relation | None:
        """Children per parent and orphans; from a full pass, or where that costs too much, a sample."""
        candidate = self._best(candidates)
        if candidate is None:
            return None
        child, parent = self.collections[candidate.child], self.collections[candidate.parent]
        exact = child.count <= self.limits.structure_documents and not child.slow
        proof = self._count_all(candidate) if exact else self._count_sample(candidate, child)
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
            max(0, parent.count - round(proof.children.count * proof.contained)),
            proof.orphans,
            proof.checked,
            "name" if candidate.score else candidate.otherwise,
            **self._reads(candidate),
            numbered=exact and proof.children.maximum > 1 and self._is_numbered(candidate, child),
        )

    def _count_all(self, candidate: Candidate) -> Proof | None:
        """Count every reference, and look up distinct ones up to a limit."""
        pipeline = relations.all_references_pipeline(candidate, self.limits.references_checked)
        row = self.reader.aggregate(candidate.child, pipeline)[0]
        counts, values = row["counts"], row["values"]
        if not counts:
            return None
        existing = self._existing(candidate, relations.usable_keys(each["_id"] for each in values))
        contained = len(existing) / len(values)
        if not relations.is_reference(candidate, contained, sum(each["values"] for each in counts)):
            return None
        return Proof(
            Distribution.of_counts((each["_id"], each["values"]) for each in counts),
            sum(each["_id"] * each["values"] for each in counts),
            sum(each["n"] for each in values),
            sum(each["n"] for each in values if freeze(each["_id"]) not in existing),
            contained,
        )

    def _count_sample(self, candidate: Candidate, child: CollectionFacts) -> Proof | None:
        """Look up the references of a uniform sample; count the children of some and of the heaviest."""
        values = self._sample(candidate)
        if not values:
            share = structure.share_of(child, self.limits.sample_documents)
            sample = structure.sample_stages(child, share)
            pipeline = relations.sampled_references_pipeline(candidate, sample)
            rows = self.reader.aggregate(candidate.child, pipeline)
            values = relations.usable_keys(row["v"] for row in rows)
        if not values:
            return None
        values = relations.thin(values, relations.SAMPLED_VALUES_MAX)
        distinct = list(dict.fromkeys(values))
        existing = self._existing(candidate, distinct)
        contained = len(existing) / len(distinct)
        if not relations.is_reference(candidate, contained, len(distinct)):
            return None
        drawn = relations.thin(values, relations.DRAWN_VALUES)
        parents = list(dict.fromkeys([*drawn, *relations.heaviest(values)]))
        rows = self.reader.aggregate(candidate.child, relations.count_pipeline(candidate, parents))
        numbers = {row["_id"]: int(row["n"]) for row in rows}
        references = relations.count_references(candidate, child)
        children = relations.children_per_parent(
            [numbers[value] for value in drawn if value in numbers] or [1],
            max(numbers.values(), default=1),
            references,
        )
        orphans = sum(freeze(value) not in existing for value in values)
        return Proof(children, references, len(values), orphans, contained)

    def _is_unique(self, parent: CollectionFacts, key: str) -> bool:
        if key in self.keys.get(parent.name, ()) and parent.name not in self.partly_known:
            return True
        if any(index.unique and index.fields == (key,) for index in parent.indexes):
            return True
        # All keys of a large collection are more than the server may hold; twins show among some of them.
        share = structure.share_of(parent, UNIQUE_DOCUMENTS_MAX)
        some: list[dict[str, Any]] = []
        if share < 1:
            rows = self.reader.aggregate(
                parent.name,
                [*structure.sample_stages(parent, share / 100), {"$project": {"_id": 0, "v": f"${key}"}}],
            )
            some = [{"$match": {key: {"$in": relations.usable_keys(row.get("v") for row in rows)}}}]
        pipeline: list[dict[str, Any]] = [
            *some,
            {"$group": {"_id": f"${key}", "n": {"$sum": 1}}},
            {"$match": {"n": {"$gt": 1}, "_id": {"$ne": None}}},
            {"$limit": 1},
            {"$project": {"_id": 0, "n": 1}},
        ]
        return not self.reader.aggregate(parent.name, pipeline)

    def _is_numbered(self, candidate: Candidate, child: CollectionFacts) -> bool:
        fields = relations.ordinals(child)
        if candidate.field.in_array or len(candidate.field.steps) > 1 or not fields:
            return False
        for row in self.reader.aggregate(child.name, relations.numbered_pipeline(candidate, fields)):
            best = max(row[f"o{number}"] for number in range(len(fields)))
            return bool(best >= relations.NUMBERED_SHARE_MIN * row["n"])
        return False

    # -- what follows ---------------------------------------------------------------------------

    def _reads(self, candidate: Candidate) -> dict[str, int]:
        if self.workload is None:
            return {}
        return workload.read_together(
            self.workload, candidate.child, candidate.parent, candidate.path, candidate.key
        )

    def _tree(self, relation: Relation) -> TreeFacts:
        facts = self.collections[relation.child]
        if facts.count > TREE_NODES_MAX or "." in relation.path:
            return TreeFacts(relation.path, facts.count - relation.references, 0, 0, 0)
        rows = self.reader.find(facts.name, {}, {relation.key: 1, relation.path: 1})
        return probes.tree(rows, relation.key, relation.path)
