"""Measures one collection: sizes, fields, arrays, indexes, and what only some collections call for.

Sizes and array lengths come from full passes on the server. The fields of a
large collection come from a uniform sample. Where a pass takes too long, no
other pass is tried on that collection: its fields come from the server's own
quick sample, which is not uniform, and the facts say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from bson import ObjectId

from treadle.advisor import natural_keys, probes, samples, statistics, structure
from treadle.advisor.facts import CollectionFacts, FieldFacts, Growth, Limits, Shape
from treadle.advisor.reading import NO_RIGHTS, TOO_LARGE, TOO_LONG, TOO_MUCH, Lost, Reader, Refused
from treadle.advisor.relations import thin
from treadle.advisor.structure import Stage

ARRAYS_MAX = 12
VALUES_MEASURED_MAX = 20
# Documents smaller than this hold no large value worth measuring.
LARGE_DOCUMENT_BYTES = 16 * 1024
# Values of samples, kept until relations are proven; some 40 MB at most.
KEPT_VALUES_MAX = 500_000
SAMPLED_KEYS_MAX = 6
FIRST_DOCUMENTS = 50
# Names and types in all shapes of one collection; some 60 MB at most.
SHAPE_ENTRIES_MAX = 250_000
DAY_SECONDS = 86_400.0

Step = Callable[[CollectionFacts], CollectionFacts]


def with_note(facts: CollectionFacts, note: str) -> CollectionFacts:
    """The facts with one more note, unless they have it already."""
    return facts if note in facts.notes else replace(facts, notes=(*facts.notes, note))


def _attempt(step: Step, complaint: str, facts: CollectionFacts) -> CollectionFacts:
    """The result of a step; where it is refused, the facts with a complaint."""
    try:
        return step(facts)
    except Refused as refused:
        slow = facts.slow or refused.reason == TOO_LONG
        return with_note(replace(facts, slow=slow), f"{complaint}: {refused.reason}")


@dataclass(slots=True)
class Measurer:
    """Measures collections, one after another."""

    reader: Reader
    limits: Limits
    version: tuple[int, ...]
    values_shown: bool
    # Values of possible keys, per collection and field; never part of the facts.
    samples: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    # The same of whatever may refer to another collection.
    referring: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    # Some documents of the collection that is being measured.
    documents: list[dict[str, Any]] = field(default_factory=list)

    def collection(self, name: str, entry: Mapping[str, Any], gridfs: bool = False) -> CollectionFacts:
        """The facts of a collection, given its entry in `listCollections`, with what could not be read."""
        options = entry.get("options")
        kind = {"view": "view", "timeseries": "time series"}.get(entry.get("type", ""), "collection")
        # A login that sees only names sees no options: whether there is a validator is unknown.
        validated = None if options is None else bool(options.get("validator"))
        facts = CollectionFacts(name, kind, validated=validated)
        options = options or {}
        if kind == "view":
            return replace(facts, skipped=f"a view on {options.get('viewOn', 'another collection')}")
        try:
            facts = self._add_statistics(facts)
        except Refused as refused:
            if kind == "collection":
                return replace(facts, skipped=refused.reason)
        if kind == "time series":
            time = options.get("timeseries", {}).get("timeField", "its time field")
            return replace(facts, notes=(f"a time series collection by {time}; not looked into",))
        if not facts.count:
            return with_note(self._add_indexes(facts), "empty")
        try:
            if gridfs and self._is_gridfs(facts):
                # Files in chunks are what the server's own convention makes of them.
                facts = replace(self._add_indexes(facts), kind="GridFS")
                return with_note(facts, "part of a GridFS bucket; not looked into")
            return self._measure(facts)
        except Refused as refused:
            return replace(facts, skipped=refused.reason)
        except Lost:
            raise
        except Exception as error:
            # Data that this module does not understand is reported, and the scan continues.
            return replace(facts, skipped=f"it was not understood ({type(error).__name__})")

    def _is_gridfs(self, facts: CollectionFacts) -> bool:
        """Whether the first document looks as drivers write it."""
        names = statistics.GRIDFS_FIELDS[facts.name.rpartition(".")[2]]
        first = self.reader.find(facts.name, {}, dict.fromkeys(names, 1), limit=1)
        return all(name in row for row in first for name in names)

    def _add_statistics(self, facts: CollectionFacts) -> CollectionFacts:
        try:
            rows = self.reader.aggregate(facts.name, [{"$collStats": {"storageStats": {}}}])
        except Refused as refused:
            if refused.reason != NO_RIGHTS:
                raise
            # A login may read documents without seeing the statistics.
            count = int(self.reader.command({"count": facts.name})["n"])
            return with_note(replace(facts, count=count), f"its statistics were not seen: {NO_RIGHTS}")
        return statistics.add_storage_statistics(facts, [row["storageStats"] for row in rows])

    def _measure(self, facts: CollectionFacts) -> CollectionFacts:
        self.documents = []
        facts = self._add_indexes(facts)
        facts = _attempt(self._add_sizes, "document sizes were not measured", facts)
        facts = self._add_fields(facts)
        for step, complaint in (
            (self._add_nested_fields, "nested fields were not seen"),
            (self._keep_referring, "what it may refer to was not kept"),
            (self._add_array_lengths, "array lengths were not measured"),
            (self._add_value_sizes, "large values were not measured"),
            (self._add_uuids, "whether binary values are UUIDs was not seen"),
            (self._add_growth, "growth was not measured"),
            (self._add_kinds, "kinds were not measured"),
            (self._add_series, "series were not measured"),
            (self._add_versions, "versions were not measured"),
        ):
            facts = _attempt(step, complaint, facts)
        return facts

    # -- how much of it -----------------------------------------------------------------

    def _pass_share(self, facts: CollectionFacts) -> float:
        """How much a pass reads: all, or beyond the budget a uniform sample."""
        if facts.slow:
            raise Refused(TOO_LONG)
        if facts.count <= self.limits.full_pass_documents:
            return 1.0
        return min(self.limits.sample_documents, self.limits.full_pass_documents) / facts.count

    def _sample(self, facts: CollectionFacts) -> list[Stage]:
        return structure.sample_stages(facts, structure.share_of(facts, self.limits.sample_documents))

    # -- indexes and sizes ----------------------------------------------------------------

    def _add_indexes(self, facts: CollectionFacts) -> CollectionFacts:
        sizes = {index.name: index.bytes for index in facts.indexes}
        try:
            reply = self.reader.command({"listIndexes": facts.name, "cursor": {"batchSize": 1000}})
        except Refused as refused:
            return with_note(replace(facts, indexes=()), f"indexes were not seen: {refused.reason}")
        uses: dict[str, tuple[int, datetime]] = {}
        try:
            for row in self.reader.aggregate(facts.name, [{"$indexStats": {}}]):
                since = row["accesses"]["since"]
                before, counted = uses.get(row["name"], (0, since))
                # Over shards, what all of them have counted began with the last to begin.
                uses[row["name"]] = (before + int(row["accesses"]["ops"]), max(counted, since))
        except Refused as refused:
            facts = with_note(facts, f"the use of indexes was not seen: {refused.reason}")
        now = datetime.now(UTC)
        indexes = (
            statistics.index_facts(each, sizes.get(each["name"]), uses.get(each["name"]), now)
            for each in reply["cursor"]["firstBatch"]
        )
        return replace(facts, indexes=tuple(indexes))

    def _add_sizes(self, facts: CollectionFacts) -> CollectionFacts:
        share = self._pass_share(facts)
        pipeline = structure.sizes_pipeline(structure.uniform_sample(share))
        rows = self.reader.aggregate(facts.name, pipeline)
        sizes = structure.read_sizes(rows, facts.count if share < 1 else None)
        if share < 1:
            facts = with_note(facts, f"sizes come from a uniform sample of {sizes.count:,} documents")
        return replace(facts, sizes=sizes, data_bytes=facts.data_bytes or round(sizes.mean * facts.count))

    # -- fields ---------------------------------------------------------------------------

    def _add_fields(self, facts: CollectionFacts) -> CollectionFacts:
        """The top-level fields and which occur together; of a sample where all is too much."""
        whole = facts.count <= self.limits.structure_documents and not facts.slow
        share = 1.0 if whole else structure.share_of(facts, self.limits.sample_documents)
        if not whole and not facts.slow and samples.are_small(facts):
            with_shapes = self._with_documents(facts, share)
            if with_shapes is not None:
                return with_shapes
        keys = [] if whole else self._likely_keys(facts)
        for part in (share, share * 0.1, share * 0.01):
            sample = structure.sample_stages(facts, part)
            pipeline = structure.shapes_pipeline(sample, self.limits.shapes, keys)
            try:
                rows = self.reader.aggregate(
                    facts.name, pipeline, cost=lambda row: len(row["_id"]), cost_max=SHAPE_ENTRIES_MAX
                )
            except Refused as refused:
                if refused.reason == TOO_LONG and not facts.slow:
                    return self._add_fields(replace(facts, slow=True))
                if refused.reason == TOO_LARGE:
                    continue
                if refused.reason == TOO_MUCH:
                    break
                raise
            if len(rows) > self.limits.shapes:
                break
            if keys:
                self.samples[facts.name] = structure.read_values(rows, keys)
            return self._with_shapes(facts, structure.read_shapes(rows), part)
        return self._with_paths_only(facts)

    def _with_documents(self, facts: CollectionFacts, share: float) -> CollectionFacts | None:
        """The fields of sampled documents, sent whole; None where the server must take them apart."""
        try:
            documents = self.reader.aggregate(facts.name, structure.sample_stages(facts, share))
            rows, keys = samples.shape_rows(documents, SAMPLED_KEYS_MAX)
        except Refused as refused:
            return self._add_fields(replace(facts, slow=True)) if refused.reason == TOO_LONG else None
        except KeyError:
            return None
        if not rows or len(rows) > self.limits.shapes:
            return None
        self.documents = thin(documents, natural_keys.SAMPLED_DOCUMENTS)
        if not self._keeps_enough():
            self.samples[facts.name] = structure.read_values(rows, keys)
        return self._with_shapes(facts, structure.read_shapes(rows), share)

    def _keep_referring(self, facts: CollectionFacts) -> CollectionFacts:
        """Keep what the sampled documents may refer to; the facts are as before."""
        if self.documents and not self._keeps_enough():
            self.referring[facts.name] = samples.referring_values(facts, self.documents)
        return facts

    def _keeps_enough(self) -> bool:
        kept = [*self.samples.values(), *self.referring.values()]
        return sum(len(values) for sample in kept for values in sample.values()) > KEPT_VALUES_MAX

    def _likely_keys(self, facts: CollectionFacts) -> list[str]:
        """Fields whose values are worth collecting; a guess, for which a few documents are enough."""
        if self._keeps_enough():
            return []
        # The first documents will do: a field that is missed here is read on its own later.
        first = structure.shapes_pipeline([{"$limit": FIRST_DOCUMENTS}], self.limits.shapes)
        return structure.likely_keys(self.reader.aggregate(facts.name, first), SAMPLED_KEYS_MAX)

    def _with_shapes(self, facts: CollectionFacts, shapes: list[Shape], share: float) -> CollectionFacts:
        shapes, has_map = structure.collapse_maps(shapes, _indexed(facts))
        looked_at = sum(shape.count for shape in shapes)
        if share < 1 or facts.slow:
            facts = _note_sample(facts, "fields", looked_at)
        if has_map:
            facts = with_note(facts, "its documents use data as field names; those are shown as *")
        return replace(
            facts,
            looked_at=facts.count if share >= 1 and not facts.slow else looked_at,
            fields=structure.fields_of_shapes(shapes),
            shapes=tuple(shapes),
        )

    def _read_paths(self, facts: CollectionFacts, nested_only: bool) -> tuple[list[dict[str, Any]], float]:
        """Rows of paths in a sample, and the share of the documents in it."""
        share = structure.share_of(facts, max(1, self.limits.sample_documents // 2))
        sample = structure.sample_stages(facts, share)
        pipeline = structure.paths_pipeline(sample, self.limits.paths, nested_only)
        return self.reader.aggregate(facts.name, pipeline), share

    def _with_paths_only(self, facts: CollectionFacts) -> CollectionFacts:
        """For collections with too many shapes: each field by itself, of a sample."""
        rows, share = self._read_paths(facts, nested_only=False)
        looked_at = structure.read_document_count(rows)
        if share < 1 or facts.slow:
            facts = _note_sample(facts, "fields", looked_at)
        more = ", and too many fields" if len(rows) > self.limits.paths else ""
        facts = with_note(facts, f"it has too many different shapes to list{more}")
        fields = structure.fields_of_paths(rows, looked_at, _indexed(facts))
        return replace(
            facts, looked_at=looked_at, fields=fields, shapes_complete=False, nested_looked_at=looked_at
        )

    def _add_nested_fields(self, facts: CollectionFacts) -> CollectionFacts:
        """The fields inside objects and arrays, of a uniform sample, each with its own count."""
        is_nested = any({"object", "array"} & set(each.types) for each in facts.fields.values())
        if facts.nested_looked_at or not is_nested:
            return facts
        rows, share = self._read_paths(facts, nested_only=True)
        looked_at = structure.read_document_count(rows)
        if share < 1:
            facts = _note_sample(facts, "nested fields", looked_at)
        fields = dict(facts.fields)
        for path, each in structure.fields_of_paths(rows, looked_at, _indexed(facts)).items():
            if len(each.steps) > 1:
                fields[path] = each
            elif each.is_map and path in fields:
                fields[path] = replace(fields[path], is_map=True)
        return replace(facts, fields=fields, nested_looked_at=looked_at)

    # -- arrays and large values --------------------------------------------------------------

    def _add_array_lengths(self, facts: CollectionFacts) -> CollectionFacts:
        arrays = structure.measurable_arrays(facts)
        for each in arrays[:ARRAYS_MAX]:
            step = partial(self._add_array_length, each)
            facts = _attempt(step, "array lengths were not measured", facts)
        if len(arrays) > ARRAYS_MAX:
            facts = with_note(facts, f"of {len(arrays)} arrays, {ARRAYS_MAX} were measured")
        return facts

    def _add_array_length(self, array: FieldFacts, facts: CollectionFacts) -> CollectionFacts:
        if self.version < (5,) and not all(map(structure.is_plain_name, array.steps)):
            return with_note(facts, "arrays with odd names were not measured; that needs MongoDB 5.0")
        share = self._pass_share(facts)
        pipeline = structure.lengths_pipeline(array.steps, structure.uniform_sample(share))
        rows = self.reader.aggregate(facts.name, pipeline)
        lengths = structure.read_lengths(rows, facts.count if share < 1 else None)
        if share < 1:
            number = sum(row["n"] for row in rows)
            facts = with_note(
                facts, f"lengths of {array.path} come from a uniform sample of {number:,} documents"
            )
        return _with_fields(facts, {array.path: {"lengths": lengths}})

    def _add_value_sizes(self, facts: CollectionFacts) -> CollectionFacts:
        """How large text and binary values are, where documents are large."""
        if facts.sizes is None or facts.sizes.maximum < LARGE_DOCUMENT_BYTES:
            return facts
        fields = [
            each
            for each in facts.fields.values()
            if {"binData", "string"} & set(each.types)
            and not each.in_array
            and structure.has_plain_path(each)
        ][:VALUES_MEASURED_MAX]
        if not fields:
            return facts
        share = structure.share_of(facts, self.limits.structure_documents)
        pipeline = structure.value_sizes_pipeline(fields, structure.sample_stages(facts, share))
        changes = {
            each.path: {"bytes_max": int(row[f"m{number}"]), "bytes_mean": float(row[f"a{number}"])}
            for row in self.reader.aggregate(facts.name, pipeline)
            for number, each in enumerate(fields)
            if row[f"m{number}"] is not None
        }
        return _with_fields(facts, changes)

    def _add_uuids(self, facts: CollectionFacts) -> CollectionFacts:
        """Which binary values are UUIDs: other programs use them as ids."""
        fields = structure.uuid_fields(facts)
        if not fields:
            return facts
        rows = self.reader.aggregate(facts.name, structure.uuids_pipeline(fields, self._sample(facts)))
        changes = {
            each.path: {"is_uuid": True}
            for row in rows
            for number, each in enumerate(fields)
            if 0 < row[f"n{number}"] == row[f"u{number}"]
        }
        return _with_fields(facts, changes)

    # -- what only some collections call for ---------------------------------------------------

    def _add_growth(self, facts: CollectionFacts) -> CollectionFacts:
        """The rate of growth, where ids tell when documents were created."""
        identity = facts.fields.get("_id")
        if identity is None or set(identity.types) != {"objectId"}:
            return facts
        rows = [
            row
            for way in (1, -1)
            for row in self.reader.find(facts.name, {}, {"_id": 1}, sort=[("_id", way)], limit=1)
        ]
        # The fields of a sample may miss the one id that is no ObjectId.
        if len(rows) != 2 or not all(isinstance(row["_id"], ObjectId) for row in rows):
            return facts
        first, last = (row["_id"].generation_time for row in rows)
        days = max((last - first).total_seconds() / DAY_SECONDS, 1.0)
        return replace(facts, growth=Growth(first, last, facts.count / days))

    def _add_kinds(self, facts: CollectionFacts) -> CollectionFacts:
        for name, inside in probes.kind_questions(facts):
            pipeline = probes.kinds_pipeline(name, inside, facts, self._sample(facts))
            rows = self.reader.aggregate(facts.name, pipeline)
            kinds = probes.read_kinds(name, inside, facts, rows, self.values_shown)
            if kinds is not None:
                return replace(facts, kinds=kinds)
        return facts

    def _add_series(self, facts: CollectionFacts) -> CollectionFacts:
        fields = probes.series_fields(facts)
        if fields is None:
            return facts
        time, keys, measures = fields
        if probes.is_unlike_series(keys, self.samples.get(facts.name, {})):
            return facts
        is_text = probes.is_text_time(facts.fields[time])
        if is_text:
            pipeline = probes.text_time_pipeline(time, self._sample(facts))
            if any(row["times"] < row["n"] for row in self.reader.aggregate(facts.name, pipeline)):
                return facts
        row = self.reader.aggregate(facts.name, probes.distinct_pipeline(keys, self._sample(facts)))[0]
        key = probes.choose_key(keys, row, facts)
        if key is None:
            return facts
        others = [
            each.path
            for each in probes.reading_fields(facts)
            if each.path not in (key, time, *measures) and not probes.is_aside(each)
        ]
        share = self._pass_share(facts)
        pipeline = probes.series_pipeline(key, time, others, structure.uniform_sample(share), is_text)
        rows = self.reader.aggregate(facts.name, pipeline)
        return replace(facts, series=probes.read_series(key, time, measures, others, rows, share))

    def _add_versions(self, facts: CollectionFacts) -> CollectionFacts:
        name = probes.version_field(facts)
        if name is None:
            return facts
        sample = structure.uniform_sample(self._pass_share(facts))
        rows = self.reader.aggregate(facts.name, probes.versions_pipeline(name, sample))
        return replace(facts, versions=probes.read_versions(name, rows, self.values_shown))


def _indexed(facts: CollectionFacts) -> set[str]:
    return {path for index in facts.indexes for path in index.fields}


def _note_sample(facts: CollectionFacts, what: str, looked_at: int) -> CollectionFacts:
    return with_note(facts, f"{what} come from {structure.sample_name(facts)} of {looked_at:,} documents")


def _with_fields(facts: CollectionFacts, changes: Mapping[str, Mapping[str, Any]]) -> CollectionFacts:
    """The facts with some attributes of some fields changed."""
    changed = {path: replace(facts.fields[path], **values) for path, values in changes.items()}
    return replace(facts, fields={**facts.fields, **changed})
