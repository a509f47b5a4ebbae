"""The Store's calls on a bucketed model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

from treadle.engine import reads
from treadle.engine.documents import as_stored, as_written, dump, dump_all, gone, require_filter, translated
from treadle.engine.updates import change_of, check_returns
from treadle.errors import DataError, UsageError
from treadle.graph.layout import PageReader
from treadle.graph.operations import Returns
from treadle.graph.outcomes import Summary
from treadle.graph.query import Query
from treadle.model.bson_types import check_batch
from treadle.model.document import Document
from treadle.patterns.bucket import reading, series
from treadle.patterns.bucket.bucket_document import readings_of
from treadle.patterns.bucket.grouping import group
from treadle.patterns.bucket.query import ReadingQuery, identify, split_filter
from treadle.patterns.bucket.setup import flat_view
from treadle.patterns.bucket.spec import ANY_ID, Spec, milliseconds, to_datetime
from treadle.patterns.bucket.updates import Change, Pair, Picked, compile_update, delete_readings
from treadle.patterns.bucket.verify import BucketUpkeep
from treadle.plan import Plan, Raw, Read, find_one
from treadle.query.filters import Sort
from treadle.query.keys import same_key
from treadle.query.updates import parse_update

D = TypeVar("D", bound=Document)


class Stored(list[D]):
    """The readings that were stored; `duplicates` is the number of those that `unique` knew already."""

    duplicates: int = 0


class BucketLayout(BucketUpkeep[D]):
    """Readings in buckets."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        # Per field, the types of single values that are known to fit.
        self._fitting: dict[str, set[type]] = {
            each.stored: set()
            for each in spec.codec.fields
            if each.shape.kind in ("scalar", "enum", "literal") and each.stored != "_id"
        }

    # -- writing --------------------------------------------------------------------------

    def insert(self, document: D) -> Plan[D]:
        """Add one reading to its bucket. Returns the one that was there first, if it is a duplicate."""
        stored = yield from self._insert([document])
        if stored:
            return stored[0]
        first = yield from self._first_stored(document)
        return document if first is None else first

    def _first_stored(self, document: D) -> Plan[D | None]:
        """Return the reading, archived or not, that made another one a duplicate."""
        spec, unique = self.spec, self.spec.unique
        assert unique is not None
        raw = dump(self.entry, document, [])
        start = spec.window(milliseconds(raw[spec.time.stored]))
        bucket_filter = spec.key_filter(spec.key_of(raw))
        bucket_filter[spec.names.start] = {"$eq": to_datetime(start)}
        bucket_filter[f"{spec.names.readings}.{unique.stored}"] = {"$eq": raw[unique.stored]}
        for collection in spec.collections:
            bucket = yield from find_one(collection, bucket_filter)
            for each in [] if bucket is None else readings_of(spec, bucket):
                if same_key(each.get(unique.stored), raw[unique.stored]):
                    first: D = self.entry.codec.load(spec.to_reading(bucket or {}, each))
                    return first
        return None

    def insert_many(self, documents: Iterable[D], ordered: bool = True) -> Plan[list[D]]:
        """Add readings to their buckets, all or none. Returns those that are not duplicates."""
        if not ordered:
            self._not_answered("insert_many with ordered=False", "leave it out")
        return (yield from self._insert(list(documents)))

    def _insert(self, given: list[D]) -> Plan[Stored[D]]:
        entry, spec = self.entry, self.spec
        altered: list[Any] = []
        raws = dump_all(entry, given, altered, spec.dump_codec)
        check_batch(raws, spec.label)
        self._require_types(raws)
        results = given
        if altered:
            results = [
                as_stored(entry, document, spec.with_derived_id({**raw}), altered)
                for document, raw in zip(given, raws, strict=True)
            ]
        for document in given:
            document.__pydantic_fields_set__.add("id")
        batches = group(spec, raws, documents=given)
        with translated(spec.label, raws):
            duplicates = set((yield from self.writer.append(batches)))
        if not duplicates:
            return Stored(results)
        stored = Stored(each for position, each in enumerate(results) if position not in duplicates)
        stored.duplicates = len(duplicates)
        return stored

    def _require_types(self, raws: Sequence[Raw]) -> None:
        """Refuse values that were assigned past Pydantic and could not be read back.

        By their types, because that costs next to nothing: the first of each
        type is tried. The validator looks at each reading only if asked to.
        """
        for name, fitting in self._fitting.items():
            for kind in set(map(type, map(itemgetter(name), raws))) - fitting:
                first = next(raw for raw in raws if type(raw[name]) is kind)
                try:
                    self.entry.codec.load(copy.deepcopy({"_id": ANY_ID, **first}))
                except DataError as error:
                    raise UsageError(
                        f"a {self.spec.label} does not fit its own model ({error.message}); build it "
                        "through its constructor",
                        code="model-inconsistent",
                    ) from None
                fitting.add(kind)

    # -- reading --------------------------------------------------------------------------

    def reader(self, query: Query) -> reading.Reader:
        if query.deleted:
            self._not_answered("find(…, deleted=True)")
        return reading.Reader(self.spec, query)

    def archive_reader(self, query: Query) -> reading.ArchiveReader:
        return reading.ArchiveReader(self.reader(query))

    def first(self, filter: Any, sort: Sort | None, card: Any = None) -> Plan[Any]:
        return reading.first(self.reader(Query(filter, sort, limit=1, card=card)))

    def aged_by(self, path: str) -> str | None:
        return self.spec.names.end if path == self.spec.time.stored else None

    def count(self, filter: Any) -> Plan[int]:
        with translated(self.spec.label):
            return (yield from reading.count(self.spec, filter))

    def distinct(self, field: str, filter: Any) -> Plan[list[Any]]:
        path, owner = reads.path_of(self.entry, field)
        with translated(self.spec.label):
            values = yield from reading.distinct(self.spec, path, filter)
        return reads.adapted_values(owner, path, values)

    def aggregate(self, pipeline: Any, into: Any) -> PageReader[Any]:
        """Return the reader of a pipeline over readings."""
        stages = [*flat_view(self.spec), *reads.checked_pipeline(self.entry, pipeline)]
        command = Read(self.spec.collection, "aggregate", (stages,), {"allowDiskUse": True})
        return reads.PipelineReader(self.entry, command, into)

    def summary(self, key: Any, start: Any, end: Any) -> Plan[list[Summary]]:
        return series.summary(self.spec, key, start, end)

    def tuples(
        self, key: Any, start: Any, end: Any, fields: Sequence[str] | None
    ) -> Plan[list[tuple[Any, ...]]]:
        return series.reading_tuples(self.spec, key, start, end, fields)

    # -- changing -------------------------------------------------------------------------

    def _change_one(self, id_or_filter: Any, change: Change, sent: Sequence[Raw] = ()) -> Plan[Pair | None]:
        """Change the one reading that a caller means. Returns it before and after."""
        with translated(self.spec.label, sent):
            if isinstance(id_or_filter, Mapping):
                query = yield from self._query(id_or_filter)
            else:
                query, number = yield from identify(
                    self.spec, split_filter(self.spec, self.id_filter(id_or_filter))
                )
                if number > 1:
                    raise UsageError(
                        f"{number} readings of {self.spec.label} have the id {id_or_filter!r}, as they are "
                        "of one series and one moment; say which by a filter, or declare an id on the model",
                        code="reading-ambiguous",
                    )
            return (yield from self.updater.change_first(query, change))

    def _query(self, filter: Any) -> Plan[ReadingQuery]:
        return (yield from identify(self.spec, split_filter(self.spec, filter)))[0]

    def _loaded(self, flat: Raw) -> D:
        """Return a changed reading with the id that it has now."""
        document: D = as_written(self.entry, copy.deepcopy(self.spec.with_derived_id(flat)))
        return document

    def update(
        self,
        id_or_filter: Any,
        update: Any,
        sort: Sort | None = None,
        returns: Returns = "after",
        array_filters: Sequence[Any] | None = None,
    ) -> Plan[D | None]:
        if sort is not None or array_filters is not None:
            self._not_answered("update with sort= or array_filters=", "say which by its id")
        check_returns(returns)
        cleaned = parse_update(self.entry.paths.fields, update).update
        change = compile_update(self.spec, cleaned)
        pair = yield from self._change_one(id_or_filter, change, [{"update": cleaned}])
        if pair is None or pair[1] is None:
            return None
        return self._loaded(pair[1]) if returns == "after" else self.entry.codec.load(pair[0])

    def change(self, document: D, fields: Mapping[str, Any]) -> Plan[D]:
        raw, update = change_of(self.entry, document, fields)
        changed = yield from self.update(raw["_id"], update)
        if changed is None:
            raise gone(self.entry, raw["_id"], "changed")
        return changed

    def update_all(self, filter: Any, update: Any) -> Plan[int]:
        require_filter(self.entry, filter)
        cleaned = parse_update(self.entry.paths.fields, update).update
        change = compile_update(self.spec, cleaned)
        with translated(self.spec.label, [{"update": cleaned}]):
            return (yield from self.updater.change_all((yield from self._query(filter)), change))

    def replace(self, document: D) -> Plan[D]:
        raw = dump(self.entry, document, [])

        def change(picked: Picked) -> Plan[Sequence[Raw | None]]:
            return [copy.deepcopy(raw) for _ in picked.places]
            yield  # pragma: no cover (a plan that asks for nothing)

        if (yield from self._change_one(raw["_id"], change, [raw])) is None:
            raise gone(self.entry, raw["_id"])
        return self._loaded(raw)

    def delete(self, id_or_filter: Any) -> Plan[D | None]:
        pair = yield from self._change_one(id_or_filter, delete_readings)
        return None if pair is None else as_written(self.entry, pair[0])

    def delete_all(self, filter: Any) -> Plan[int]:
        require_filter(self.entry, filter)
        with translated(self.spec.label):
            query = yield from self._query(filter)
            if query.takes_whole_buckets:
                return (yield from self.updater.delete_buckets(query))
            return (yield from self.updater.change_all(query, delete_readings))
