"""The Store's calls on a bucketed model, put together from their parts."""

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
from treadle.patterns.bucket.changing import Change, Pair, applied
from treadle.patterns.bucket.grouping import group
from treadle.patterns.bucket.matching import Selection, select
from treadle.patterns.bucket.prepare import flat_view
from treadle.patterns.bucket.spec import ANY_ID, Spec, milliseconds, moment
from treadle.patterns.bucket.upkeep import BucketUpkeep
from treadle.plan import Plan, Raw, Read, is_inside, server_facts
from treadle.query.filters import Sort
from treadle.query.updates import parse_update

D = TypeVar("D", bound=Document)


class Stored(list[D]):
    """The readings that were stored; `duplicates` says how many were there already, under `unique`."""

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
        """Add one reading to its bucket; what was there first, if it is a duplicate."""
        stored = yield from self._insert([document], together=False)
        if stored:
            return stored[0]
        first = yield from self._first(document)
        return document if first is None else first

    def _first(self, document: D) -> Plan[D | None]:
        """The reading that made another one a duplicate."""
        spec, unique = self.spec, self.spec.unique
        raw = dump(self.entry, document, [])
        assert unique is not None
        condition = {name: {"$eq": raw[name]} for name in (*spec.key_names, unique.stored)}
        if unique is not spec.time:
            start = spec.window(milliseconds(raw[spec.time.stored]))
            condition[spec.time.stored] = {"$gte": moment(start), "$lte": moment(spec.last(start))}
        first: D | None = yield from self.first(condition, None)
        return first

    def insert_many(self, documents: Iterable[D], ordered: bool = True) -> Plan[list[D]]:
        """Add readings to their buckets, one update per bucket; those that were stored."""
        if not ordered:
            self._not_answered("insert_many with ordered=False", "leave it out")
        server = yield from server_facts()
        # Several buckets share a transaction where there are any; each is right by itself, too.
        return (yield from self._insert(list(documents), together=server.transactions))

    def _insert(self, given: list[D], *, together: bool) -> Plan[Stored[D]]:
        entry = self.entry
        altered: list[Any] = []
        raws = dump_all(entry, given, altered, self.spec.dumping)
        check_batch(raws, self.spec.label)
        self._require_types(raws)
        results = given
        if altered:
            results = [
                as_stored(entry, document, self.spec.identified({**raw}), altered)
                for document, raw in zip(given, raws, strict=True)
            ]
        for document in given:
            document.__pydantic_fields_set__.add("id")
        batches = group(self.spec, raws, documents=given)
        careful = yield from is_inside()
        with translated(self.spec.label, raws):
            duplicates = yield from self.writer.append(batches, careful=careful, together=together)
        if not duplicates:
            return Stored(results)
        dropped = set(duplicates)
        stored = Stored(each for place, each in enumerate(results) if place not in dropped)
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
        query.require_window()
        return reading.Reader(self.spec, query)

    def archive_reader(self, query: Query) -> reading.ArchiveReader:
        return reading.ArchiveReader(self.reader(query))

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
        """A pipeline over readings: the server takes the buckets apart."""
        stages = reads.checked_pipeline(self.entry, pipeline)
        flat = [*flat_view(self.spec), *stages]
        command = Read(self.spec.collection, "aggregate", (flat,), {"allowDiskUse": True})
        return reads.PipelineReader(self.entry, command, into)

    def summary(self, key: Any, start: Any, end: Any) -> Plan[list[Summary]]:
        return series.summary(self.spec, key, start, end)

    def tuples(
        self, key: Any, start: Any, end: Any, fields: Sequence[str] | None
    ) -> Plan[list[tuple[Any, ...]]]:
        return series.tuples(self.spec, key, start, end, fields)

    # -- changing -------------------------------------------------------------------------

    def _change_one(self, id_or_filter: Any, change: Change, sent: Sequence[Raw] = ()) -> Plan[Pair | None]:
        """Change the reading that a caller means, before and after; an id must mean one reading."""
        if isinstance(id_or_filter, Mapping):
            selection = select(self.spec, id_or_filter)
        else:
            selection = yield from self._by_id(id_or_filter)
        with translated(self.spec.label, sent):
            _, pairs = yield from self.changer.change_all(selection, change, only_first=True)
        return pairs[0] if pairs else None

    def _by_id(self, identity: Any) -> Plan[Selection]:
        selection = select(self.spec, self.id_filter(identity))
        number = yield from reading.count_opened(self.spec, selection)
        if number > 1:
            raise UsageError(
                f"{number} readings of {self.spec.label} have the id {identity!r}, as they are of one "
                "series and one moment; say which by a filter, or declare an id on the model",
                code="reading-ambiguous",
            )
        return selection

    def _loaded(self, flat: Raw) -> D:
        """A changed reading with the id that it has now."""
        document: D = as_written(self.entry, copy.deepcopy(self.spec.identified(flat)))
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
        change = applied(self.spec, cleaned)
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
        change = applied(self.spec, cleaned)
        with translated(self.spec.label, [{"update": cleaned}]):
            count, _ = yield from self.changer.change_all(select(self.spec, filter), change)
        return count

    def replace(self, document: D) -> Plan[D]:
        raw = dump(self.entry, document, [])
        identity = raw["_id"]

        def change(readings: list[Raw]) -> Plan[list[Raw | None]]:
            return [copy.deepcopy(raw) for _ in readings]
            yield  # pragma: no cover (a plan that asks for nothing)

        if (yield from self._change_one(identity, change, [raw])) is None:
            raise gone(self.entry, identity)
        return self._loaded(raw)

    def delete(self, id_or_filter: Any) -> Plan[D | None]:
        pair = yield from self._change_one(id_or_filter, _delete)
        return None if pair is None else as_written(self.entry, pair[0])

    def delete_all(self, filter: Any) -> Plan[int]:
        require_filter(self.entry, filter)
        selection = select(self.spec, filter)
        if selection.whole and selection.low is None and selection.high is None:
            return (yield from self.changer.delete_buckets(selection))
        count, _ = yield from self.changer.change_all(selection, _delete)
        return count


def _delete(readings: list[Raw]) -> Plan[list[Raw | None]]:
    return [None] * len(readings)
    yield  # pragma: no cover (a plan that asks for nothing)
