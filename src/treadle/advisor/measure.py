"""Measures one collection: sizes, fields, arrays, indexes, and what only some collections call for.

Sizes and array lengths come from full passes on the server. The fields of a
large collection come from a uniform sample. Where a pass takes too long, no
other pass is tried on that collection: its fields come from the server's own
quick choice, which is not uniform, and the facts say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from treadle.advisor import inner, statistics, structure
from treadle.advisor.facts import CollectionFacts, FieldFacts, Growth, Limits, Shape
from treadle.advisor.reading import NO_RIGHTS, TOO_LARGE, TOO_LONG, TOO_MUCH, Lost, Reader, Refused
from treadle.advisor.structure import Stage

ARRAYS_MAX = 12
VALUES_MEASURED_MAX = 20
# Documents smaller than this hold no large value worth measuring.
LARGE_DOCUMENT_BYTES = 16 * 1024
# Values kept of samples until relations are looked for; some 40 MB at most.
KEPT_VALUES_MAX = 500_000
KEYS_BROUGHT_MAX = 6
GUESSED_DOCUMENTS = 50
# Names and types in all shapes of one collection; some 60 MB at most.
SHAPE_ENTRIES_MAX = 250_000
DAY_SECONDS = 86_400.0


def noted(facts: CollectionFacts, note: str) -> CollectionFacts:
    """The facts with one more note, unless it is there already."""
    return facts if note in facts.notes else replace(facts, notes=(*facts.notes, note))


@dataclass(slots=True)
class Measurer:
    """Measures collections, one after another."""

    reader: Reader
    limits: Limits
    version: tuple[int, ...]
    values_shown: bool
    # Values of possible keys, per collection and field; never part of the facts.
    samples: dict[str, dict[str, list[Any]]] = field(default_factory=dict)

    def collection(self, name: str, listed: Mapping[str, Any]) -> CollectionFacts:
        """The facts of one collection; what cannot be read is said in them."""
        options = listed.get("options")
        kind = {"view": "view", "timeseries": "time series"}.get(listed.get("type", ""), "collection")
        # A login that sees only names sees no options: then nobody can tell whether there is a validator.
        validated = None if options is None else bool(options.get("validator"))
        facts = CollectionFacts(name, kind, validated=validated)
        options = options or {}
        if kind == "view":
            return replace(facts, skipped=f"a view on {options.get('viewOn', 'another collection')}")
        try:
            facts = self._counted(facts)
        except Refused as refused:
            if kind == "collection":
                return replace(facts, skipped=refused.reason)
        if kind == "time series":
            told = options.get("timeseries", {})
            note = f"a time series collection by {told.get('timeField', 'its time field')}; not looked into"
            return replace(facts, notes=(note,))
        if not facts.count:
            return noted(self._indexed(facts), "empty")
        try:
            return self._measured(facts)
        except Refused as refused:
            return replace(facts, skipped=refused.reason)
        except Lost:
            raise
        except Exception as error:
            # Data that this module does not understand is said, and the others go on.
            return replace(facts, skipped=f"it was not understood ({type(error).__name__})")

    def _counted(self, facts: CollectionFacts) -> CollectionFacts:
        try:
            rows = self.reader.aggregate(facts.name, [{"$collStats": {"storageStats": {}}}])
        except Refused as refused:
            if refused.reason != NO_RIGHTS:
                raise
            # A login may read documents without seeing the statistics.
            count = int(self.reader.command({"count": facts.name})["n"])
            return noted(replace(facts, count=count), f"its statistics were not seen: {NO_RIGHTS}")
        return statistics.counted(facts, [row["storageStats"] for row in rows])

    def _measured(self, facts: CollectionFacts) -> CollectionFacts:
        facts = self._indexed(facts)
        facts = self._sized(facts)
        facts = self._shaped(facts)
        facts = self._nested(facts)
        facts = self._array_lengths(facts)
        facts = self._large_values(facts)
        facts = self._identified(facts)
        facts = self._grown(facts)
        for what, probe in (("kinds", self._kinds), ("series", self._series), ("versions", self._versions)):
            try:
                facts = probe(facts)
            except Refused as refused:
                facts = noted(facts, f"{what} were not measured: {refused.reason}")
        return facts

    # -- how much of it -----------------------------------------------------------------

    def _pass_share(self, facts: CollectionFacts) -> float:
        """All of it, up to the budget; beyond, a uniform sample."""
        if facts.slow:
            raise Refused(TOO_LONG)
        if facts.count <= self.limits.full_pass_documents:
            return 1.0
        return min(self.limits.sample_documents, self.limits.full_pass_documents) / facts.count

    def _indexed(self, facts: CollectionFacts) -> CollectionFacts:
        sizes = {index.name: index.bytes for index in facts.indexes}
        try:
            reply = self.reader.command({"listIndexes": facts.name, "cursor": {"batchSize": 1000}})
        except Refused as refused:
            return noted(replace(facts, indexes=()), f"indexes were not seen: {refused.reason}")
        used: dict[str, tuple[int, datetime]] = {}
        try:
            for row in self.reader.aggregate(facts.name, [{"$indexStats": {}}]):
                before = used.get(row["name"], (0, row["accesses"]["since"]))
                used[row["name"]] = (before[0] + int(row["accesses"]["ops"]), row["accesses"]["since"])
        except Refused as refused:
            facts = noted(facts, f"the use of indexes was not seen: {refused.reason}")
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
            rows = self.reader.aggregate(facts.name, structure.sizes(structure.sampled(share)))
        except Refused as refused:
            if refused.reason == NO_RIGHTS:
                raise
            facts = replace(facts, slow=refused.reason == TOO_LONG)
            return noted(facts, f"document sizes were not measured: {refused.reason}")
        sizes = structure.read_sizes(rows, facts.count if share < 1 else None)
        if share < 1:
            facts = noted(facts, f"sizes are of a uniform sample of {sizes.count:,} documents")
        return replace(facts, sizes=sizes, data_bytes=facts.data_bytes or round(sizes.mean * facts.count))

    # -- fields ---------------------------------------------------------------------------

    def _shaped(self, facts: CollectionFacts) -> CollectionFacts:
        """The top-level fields and which occur together; of a sample where that was too much."""
        whole = facts.count <= self.limits.structure_documents and not facts.slow
        share = 1.0 if whole else structure.share_of(facts, self.limits.sample_documents)
        keys = [] if whole else self._likely_keys(facts)
        for smaller in (1.0, 0.1, 0.01):
            wanted = min(1.0, share * smaller)
            try:
                rows = self._shapes(facts, wanted, keys)
            except Refused as refused:
                if refused.reason == TOO_LONG and not facts.slow:
                    return self._shaped(replace(facts, slow=True))
                if refused.reason == TOO_LARGE:
                    continue
                if refused.reason == TOO_MUCH:
                    break
                raise
            if len(rows) <= self.limits.shapes:
                if keys:
                    self.samples[facts.name] = structure.read_values(rows, keys)
                return self._with_shapes(facts, structure.read_shapes(rows), wanted)
            break
        return self._with_paths_only(facts)

    def _shapes(self, facts: CollectionFacts, share: float, keys: list[str]) -> list[dict[str, Any]]:
        pipeline = structure.shapes(structure.chosen(facts, share), self.limits.shapes, keys)
        return self.reader.aggregate(
            facts.name, pipeline, cost=lambda row: len(row["_id"]), cost_max=SHAPE_ENTRIES_MAX
        )

    def _likely_keys(self, facts: CollectionFacts) -> list[str]:
        """Fields whose values are worth bringing along; a guess, which a few documents are enough for."""
        kept = sum(len(values) for sample in self.samples.values() for values in sample.values())
        if kept > KEPT_VALUES_MAX:
            return []
        # The first documents will do: a field that is missed here is asked for by itself later.
        few = structure.shapes([{"$limit": GUESSED_DOCUMENTS}], self.limits.shapes)
        return structure.likely_keys(self.reader.aggregate(facts.name, few), KEYS_BROUGHT_MAX)

    def _with_shapes(self, facts: CollectionFacts, found: list[Shape], share: float) -> CollectionFacts:
        shapes, had_map = structure.collapse_shapes(found)
        looked_at = sum(shape.count for shape in shapes)
        if share < 1 or facts.slow:
            facts = noted(facts, f"fields are of {structure.sample_words(facts)} of {looked_at:,} documents")
        if had_map:
            facts = noted(facts, "its documents use data as field names; those are shown as *")
        return replace(
            facts,
            looked_at=facts.count if share >= 1 and not facts.slow else looked_at,
            fields=structure.fields_of_shapes(shapes),
            shapes=tuple(shapes),
        )

    def _with_paths_only(self, facts: CollectionFacts) -> CollectionFacts:
        """For collections with more shapes than fit: each field by itself, of a sample."""
        share = structure.share_of(facts, max(1, self.limits.sample_documents // 2))
        pipeline = structure.paths(structure.chosen(facts, share), self.limits.paths, False)
        rows = self.reader.aggregate(facts.name, pipeline)
        looked_at = structure.looked_at(rows)
        cut = len(rows) > self.limits.paths
        if share < 1 or facts.slow:
            facts = noted(facts, f"fields are of {structure.sample_words(facts)} of {looked_at:,} documents")
        facts = noted(
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
        share = structure.share_of(facts, max(1, self.limits.sample_documents // 2))
        pipeline = structure.paths(structure.chosen(facts, share), self.limits.paths, True)
        try:
            rows = self.reader.aggregate(facts.name, pipeline)
        except Refused as refused:
            facts = replace(facts, depth=1, slow=facts.slow or refused.reason == TOO_LONG)
            return noted(facts, f"nested fields were not seen: {refused.reason}")
        looked_at = structure.looked_at(rows)
        if share < 1:
            facts = noted(
                facts,
                f"nested fields are of {structure.sample_words(facts)} of {looked_at:,} documents",
            )
        found = structure.fields_of_paths(rows, looked_at)
        fields = dict(facts.fields)
        fields.update({path: each for path, each in found.items() if len(each.steps) > 1})
        for path, each in found.items():
            if each.is_map and path in fields:
                fields[path] = replace(fields[path], is_map=True)
        depth = max(each.depth for each in fields.values())
        return replace(facts, fields=fields, nested_looked_at=looked_at, depth=depth)

    # -- arrays and large values --------------------------------------------------------------

    def _array_lengths(self, facts: CollectionFacts) -> CollectionFacts:
        arrays = structure.measurable_arrays(facts)
        if not arrays:
            return facts
        fields = dict(facts.fields)
        for each in arrays[:ARRAYS_MAX]:
            if self.version < (5,) and not all(map(structure.is_plain_name, each.steps)):
                facts = noted(facts, "arrays with odd names were not measured; that needs MongoDB 5.0")
                continue
            try:
                share = self._pass_share(facts)
                pipeline = structure.lengths(each.steps, structure.sampled(share))
                rows = self.reader.aggregate(facts.name, pipeline)
            except Refused as refused:
                facts = replace(facts, slow=facts.slow or refused.reason == TOO_LONG)
                facts = noted(facts, f"array lengths were not measured: {refused.reason}")
                break
            lengths = structure.read_lengths(rows, facts.count if share < 1 else None)
            fields[each.path] = replace(each, lengths=lengths)
            if share < 1:
                number = sum(row["n"] for row in rows)
                facts = noted(
                    facts, f"lengths of {each.path} are of a uniform sample of {number:,} documents"
                )
        if len(arrays) > ARRAYS_MAX:
            facts = noted(facts, f"of {len(arrays)} arrays, {ARRAYS_MAX} were measured")
        return replace(facts, fields=fields)

    def _large_values(self, facts: CollectionFacts) -> CollectionFacts:
        """How large text and binary values are, where documents are large."""
        if facts.sizes is None or facts.sizes.maximum < LARGE_DOCUMENT_BYTES:
            return facts
        measured: list[FieldFacts] = [
            each
            for each in facts.fields.values()
            if {"binData", "string"} & set(each.types)
            and not each.in_array
            and "*" not in each.steps
            and all(map(structure.is_plain_name, each.steps))
        ][:VALUES_MEASURED_MAX]
        if not measured:
            return facts
        share = structure.share_of(facts, self.limits.structure_documents)
        pipeline = structure.value_bytes(measured, structure.chosen(facts, share))
        try:
            rows = self.reader.aggregate(facts.name, pipeline)
        except Refused as refused:
            facts = replace(facts, slow=facts.slow or refused.reason == TOO_LONG)
            return noted(facts, f"large values were not measured: {refused.reason}")
        fields = dict(facts.fields)
        for number, each in enumerate(measured):
            if rows and rows[0][f"m{number}"] is not None:
                fields[each.path] = replace(
                    each, bytes_max=int(rows[0][f"m{number}"]), bytes_mean=float(rows[0][f"a{number}"])
                )
        return replace(facts, fields=fields)

    def _identified(self, facts: CollectionFacts) -> CollectionFacts:
        """Which binary values are UUIDs: other programs keep them as ids."""
        binary = structure.uuid_fields(facts)
        if not binary:
            return facts
        try:
            rows = self.reader.aggregate(facts.name, structure.uuids(binary, self._few(facts)))
        except Refused as refused:
            return noted(facts, f"whether binary values are UUIDs was not seen: {refused.reason}")
        fields = dict(facts.fields)
        for number, each in enumerate(binary):
            if rows and 0 < rows[0][f"n{number}"] == rows[0][f"u{number}"]:
                fields[each.path] = replace(fields[each.path], is_uuid=True)
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
            ends += [getattr(row["_id"], "generation_time", None) for row in rows]
        # Fields of a sample may hide the one id that is no ObjectId.
        first, last = ends if len(ends) == 2 else (None, None)
        if first is None or last is None:
            return facts
        days = max((last - first).total_seconds() / DAY_SECONDS, 1.0)
        return replace(facts, growth=Growth(first, last, facts.count / days))

    # -- what only some collections call for ---------------------------------------------------

    def _few(self, facts: CollectionFacts) -> list[Stage]:
        share = structure.share_of(facts, self.limits.sample_documents)
        return structure.chosen(facts, share)

    def _kinds(self, facts: CollectionFacts) -> CollectionFacts:
        for name in inner.kind_candidates(facts):
            rows = self.reader.aggregate(facts.name, inner.kinds_pipeline(name, facts, self._few(facts)))
            kinds = inner.read_kinds(name, facts, rows, self.values_shown)
            if kinds is not None:
                return replace(facts, kinds=kinds)
        return facts

    def _series(self, facts: CollectionFacts) -> CollectionFacts:
        fields = inner.series_fields(facts)
        if fields is None:
            return facts
        time, keys, measures = fields
        if inner.is_unlike_series(keys, self.samples.get(facts.name, {})):
            return facts
        row = self.reader.aggregate(facts.name, inner.distinct_pipeline(keys, self._few(facts)))[0]
        key = inner.choose_key(keys, row, facts)
        if key is None:
            return facts
        others = [each.name for each in facts.top() if each.name not in (key, time, *measures)]
        share = self._pass_share(facts)
        pipeline = inner.series_pipeline(key, time, others, structure.sampled(share))
        rows = self.reader.aggregate(facts.name, pipeline)
        return replace(facts, series=inner.read_series(key, time, measures, others, rows, share))

    def _versions(self, facts: CollectionFacts) -> CollectionFacts:
        name = inner.version_field(facts)
        if name is None:
            return facts
        chosen = structure.sampled(self._pass_share(facts))
        rows = self.reader.aggregate(facts.name, inner.versions_pipeline(name, chosen))
        return replace(facts, versions=inner.read_versions(name, rows, self.values_shown))
