"""Copies what a workload touches into a private server: all of it, or whole families up to a number.

Documents pass through as bytes, in batches, so memory does not depend on how
many there are. Reads of the scanned database go one at a time, each with a
time limit. Indexes are the same, except that nothing expires on the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo.database import Database
from pymongo.errors import BulkWriteError, PyMongoError

from treadle.advisor.facts import Relation, Scan
from treadle.advisor.loop.families import SMALL, Named, Step, named_parents, steps
from treadle.advisor.loop.results import Copied
from treadle.advisor.loop.values import values
from treadle.advisor.loop.workload_file import Request
from treadle.advisor.reading import Reader, Refused

BATCH = 500
BATCH_BYTES_MAX = 16_000_000
KEYS_PER_READ = 5_000
# Families that are larger than the number of documents asked for may exceed it by so much.
EXCESS = 1.5
_RAW: Any = CodecOptions(document_class=RawBSONDocument)
_DUPLICATE = 11000

Report = Callable[[str, int, int], None]


@dataclass(slots=True)
class Copier:
    """One copy in the making."""

    source: Database[Any]
    target: Database[Any]
    scan: Scan
    documents: int
    named: Named
    report: Report
    operation_seconds: float = 60.0
    notes: list[str] = field(default_factory=list)
    copied: dict[str, int] = field(default_factory=dict)
    # Per collection and path: the values of the documents that were copied, where children go by them.
    keys: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    # (parent, key) -> the collections whose documents go with it, and by which path.
    children: dict[tuple[str, str], list[tuple[str, str]]] = field(default_factory=dict)
    # (collection, path) -> the (parent, key) that its values name.
    places: dict[tuple[str, str], list[tuple[str, str]]] = field(default_factory=dict)
    # How many documents there are.
    total: int = 1

    def run(self, collections: Sequence[str], preferred: Sequence[tuple[str, str]]) -> tuple[Copied, ...]:
        counts = {name: self.scan.collections[name].count for name in collections}
        total = self.total = max(1, sum(counts.values()))
        order = steps(self.scan, collections, preferred)
        share = min(1.0, self.documents / total)
        for number, step in enumerate(order):
            self.report(f"copying {step.collection}", number, len(order))
            self._prepare(step.collection)
            if share == 1.0 or counts[step.collection] <= SMALL:
                self.whole.add(step.collection)
                self._copy(step.collection, [{}], order)
            elif step.main is not None:
                self._copy_children(step, step.main, order)
            else:
                self._copy_drawn(step, share, order)
        self._complete_parents(order)
        for step in order:
            if step.main is not None and step.collection not in self.whole:
                family = (step.main.parent, step.main.key)
                for place in (family, (step.collection, step.main.path)):
                    self.places.setdefault(place, []).append(family)
        if share < 1.0:
            self.notes.append(
                f"The copy holds {sum(self.copied.values()):,} of {total:,} documents, in whole families; "
                "the largest family is among them, and of those that the workload names as many as fit."
            )
        return tuple(Copied(name, self.copied.get(name, 0), counts[name]) for name in sorted(counts))

    def holds(self, request: Request) -> bool:
        """Whether the families that a request names are on the copy; of several, one."""
        wanted: dict[tuple[str, str], bool] = {}
        for path, value in values(request):
            place = (request.collection, path)
            # Of a parent that was copied whole, what is not there is nowhere.
            for family in self.places.get(place, ()):
                if family[0] not in self.whole:
                    present = repr(value) in self.keys.get(family, {})
                    wanted[place] = wanted.get(place, False) or present
        return all(wanted.values())

    # -- drawing -------------------------------------------------------------------------------

    def _copy_children(self, step: Step, main: Relation, order: Sequence[Step]) -> None:
        parents = self._that_fit(step, main)
        conditions: list[Mapping[str, Any]] = [
            {main.path: {"$in": list(part)}} for part in batched(parents, KEYS_PER_READ)
        ]
        own = list(self.named.get((step.collection, "_id"), {}).values())
        self._copy(step.collection, [*([{"_id": {"$in": own}}] if own else []), *conditions], order)
        self.children.setdefault((main.parent, main.key), []).append((step.collection, main.path))

    def _that_fit(self, step: Step, main: Relation) -> list[Any]:
        """The parents on the copy whose children fit; those whose children do not are removed again.

        The largest family comes first, then those that are named, then the others.
        """
        known = self.keys.get((main.parent, main.key), {})
        room = EXCESS * self.documents * self.scan.collections[step.collection].count / self.total
        grouped = {"$group": {"_id": f"${main.path}", "n": {"$sum": 1}}}
        sizes: dict[str, int] = {}
        for part in batched(list(known.values()), KEYS_PER_READ):
            rows = self._aggregate(step.collection, [{"$match": {main.path: {"$in": list(part)}}}, grouped])
            sizes.update((repr(row["_id"]), int(row["n"])) for row in rows)
        named = set(map(repr, named_parents(main.parent, main.key, [main], self.named)))
        largest = max(sizes, key=lambda text: sizes[text], default="")
        if sum(sizes.values()) <= room or sizes.get(largest, 0) > room:
            # All of them fit; or one alone is too large, and is cut off.
            return list(known.values())
        fitting: dict[str, Any] = {}
        for text in sorted(known, key=lambda text: (text != largest, text not in named)):
            if sizes.get(text, 0) <= room:
                fitting[text] = known[text]
                room -= sizes.get(text, 0)
        self._remove(main, [value for text, value in known.items() if text not in fitting])
        return list(fitting.values())

    def _remove(self, main: Relation, values: Sequence[Any]) -> None:
        """Take families off the copy again, with the children that were copied already."""
        known = self.keys[main.parent, main.key]
        # Other collections may name them; then they are copied again, by themselves.
        self.whole.discard(main.parent)
        members = [(main.parent, main.key), *self.children.get((main.parent, main.key), [])]
        for part in batched(values, KEYS_PER_READ):
            for collection, path in members:
                removed = self.target[collection].delete_many({path: {"$in": list(part)}}).deleted_count
                self.copied[collection] = self.copied.get(collection, 0) - removed
            for value in part:
                known.pop(repr(value), None)

    def _copy_drawn(self, step: Step, share: float, order: Sequence[Step]) -> None:
        """Of a collection without parents: those named, those with most children, and a uniform sample."""
        name = step.collection
        children = [each.main for each in order if each.main is not None and each.main.parent == name]
        conditions: list[Mapping[str, Any]] = []
        for key in {"_id", *(each.key for each in children)}:
            wanted = named_parents(name, key, [each for each in children if each.key == key], self.named)
            wanted += [self._largest(each) for each in children if each.key == key]
            found = [each for each in wanted if each is not None]
            conditions += [{key: {"$in": list(part)}} for part in batched(found, KEYS_PER_READ)]
        self._copy(name, [*conditions, {"$sampleRate": share}], order)

    def _largest(self, relation: Relation) -> Any:
        """The parent with most children."""
        rows = self._aggregate(
            relation.child,
            [{"$group": {"_id": f"${relation.path}", "n": {"$sum": 1}}}, {"$sort": {"n": -1}}, {"$limit": 2}],
        )
        return next((row["_id"] for row in rows if row["_id"] is not None), None)

    def _complete_parents(self, order: Sequence[Step]) -> None:
        """Copy the other parents that children name."""
        for step in order:
            for relation in step.others:
                if relation.parent in self.whole:
                    continue
                named = self.keys.get((step.collection, relation.path), {})
                have = self.keys.get((relation.parent, relation.key), {})
                missing = [value for text, value in named.items() if text not in have]
                conditions = [{relation.key: {"$in": list(part)}} for part in batched(missing, KEYS_PER_READ)]
                # As many as their children at most, so they need no other bound.
                self._copy(relation.parent, conditions, order, bounded=False)

    # -- moving --------------------------------------------------------------------------------

    def _prepare(self, name: str) -> None:
        """Make the collection with the collation and the indexes of the original."""
        reader = self._reader()
        entries = [each for each in reader.collections() if each["name"] == name]
        options = entries[0].get("options", {}) if entries else {}
        collation = options.get("collation")
        self.target.create_collection(name, **({"collation": collation} if collation else {}))
        try:
            reply = reader.command({"listIndexes": name})
        except Refused as refused:
            self.notes.append(f"The indexes of {name} could not be read: {refused.reason}.")
            return
        make_indexes(self.target, name, reply["cursor"]["firstBatch"], self.notes)

    def _copy(
        self, name: str, conditions: Sequence[Mapping[str, Any]], order: Sequence[Step], bounded: bool = True
    ) -> None:
        """Copy the documents that match any of the conditions, once each."""
        paths = {each.main.key for each in order if each.main is not None and each.main.parent == name}
        paths |= {each.key for step in order for each in step.others if each.parent == name}
        paths |= {each.path for step in order if step.collection == name for each in step.others}
        for condition in conditions:
            try:
                for batch in _batches(self._raw_reader().stream(name, None, condition)):
                    self._insert(name, batch)
                    for path in paths:
                        self._note(name, path, batch)
                    excess = sum(self.copied.values()) > EXCESS * self.documents
                    if bounded and excess and name not in self.whole:
                        self.notes.append(f"Families of {name} were cut off at the number of documents.")
                        return
            except Refused as refused:
                self.notes.append(f"{name} could not be copied in full: {refused.reason}.")

    def _insert(self, name: str, batch: list[RawBSONDocument]) -> None:
        try:
            self.target[name].insert_many(batch, ordered=False, bypass_document_validation=True)
            inserted = len(batch)
        except BulkWriteError as error:
            # It was copied already, for another reason.
            failures = error.details.get("writeErrors", [])
            if any(each.get("code") != _DUPLICATE for each in failures):
                raise
            inserted = len(batch) - len(failures)
        self.copied[name] = self.copied.get(name, 0) + inserted

    def _note(self, name: str, path: str, batch: Sequence[Any]) -> None:
        keys = self.keys.setdefault((name, path), {})
        for document in batch:
            value = _at(document, path)
            for each in value if isinstance(value, list) else [value]:
                if each is not None:
                    keys.setdefault(repr(each), each)

    def _aggregate(self, name: str, pipeline: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        try:
            return self._reader().aggregate(name, pipeline)
        except Refused as refused:
            self.notes.append(f"The largest families of {name} are not known: {refused.reason}.")
            return []

    def _reader(self) -> Reader:
        return Reader.on(self.source, self.operation_seconds, False)

    def _raw_reader(self) -> Reader:
        return Reader(self.source.with_options(codec_options=_RAW), self.operation_seconds)


def make_indexes(
    target: Database[Any], name: str, indexes: Sequence[Mapping[str, Any]], notes: list[str]
) -> None:
    """The same indexes, one by one, without any time at which documents expire."""
    for index in indexes:
        if index["name"] == "_id_":
            continue
        kept = {key: value for key, value in index.items() if key not in ("v", "ns", "expireAfterSeconds")}
        try:
            target.command({"createIndexes": name, "indexes": [kept]})
        except PyMongoError:
            notes.append(f"The index {index['name']} of {name} could not be made on the copy.")


def clone(source: Database[Any], target: Database[Any], names: Sequence[str]) -> None:
    """Copy collections with their indexes within one server."""
    for name in names:
        indexes = list(source[name].list_indexes())
        source[name].aggregate([{"$out": {"db": target.name, "coll": name}}])
        make_indexes(target, name, indexes, [])


def _batches(documents: Iterator[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.raw)
        if len(batch) >= BATCH or size >= BATCH_BYTES_MAX:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def batched(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _at(document: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document
