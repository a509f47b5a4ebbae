"""The Store's calls on a bucketed model, put together from their parts."""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, TypeVar

from treadle.engine import crud
from treadle.errors import DataError, UsageError
from treadle.graph.layout import Layout
from treadle.graph.pattern import Entry
from treadle.graph.reports import Action, Finding, Report, Summary
from treadle.model.document import Document
from treadle.model.storable import check_batch
from treadle.patterns.bucket import prepare, reading, upkeep
from treadle.patterns.bucket.changing import Changer, applied
from treadle.patterns.bucket.contents import unknown_fields
from treadle.patterns.bucket.matching import Selection, open_buckets, select
from treadle.patterns.bucket.reading import Reader, Scan
from treadle.patterns.bucket.spec import Spec, milliseconds
from treadle.patterns.bucket.writing import Writer
from treadle.plan import Plan, Raw, count_documents, is_inside, server_facts
from treadle.plan.capabilities import Capabilities
from treadle.query.safety import Sort, clean_update

D = TypeVar("D", bound=Document)


class Stored(list[D]):
    """The readings that were stored; `duplicates` says how many were there already, under `unique`."""

    duplicates: int = 0


class BucketLayout(Layout[D]):
    """Readings in buckets."""

    pattern = "bucket"

    def __init__(self, entry: Entry[D], spec: Spec) -> None:
        self.entry = entry
        self.spec = spec
        self.collection = entry.collection
        self.writer = Writer(spec, entry.collection)
        self.changer = Changer(spec, entry.collection, self.writer)
        # The types of single values that were found to fit, per field.
        self._fitting: dict[str, set[type]] = {
            each.stored: set()
            for each in entry.codec.fields
            if each.shape.kind in ("scalar", "enum", "literal") and each.stored != "_id"
        }

    # -- writing --------------------------------------------------------------------------

    def insert(self, document: D) -> Plan[D]:
        """Add one reading to its bucket; what was there first, if it is a duplicate."""
        stored = yield from self._insert([document], together=False)
        if stored:
            return stored[0]
        there = yield from self._first(document)
        return document if there is None else there

    def _first(self, document: D) -> Plan[D | None]:
        """The reading that made another one a duplicate."""
        spec = self.spec
        raw = crud.dump(self.entry, document, [])
        assert spec.unique is not None
        condition = {name: {"$eq": raw[name]} for name in spec.key_names}
        condition[spec.unique.stored] = {"$eq": raw[spec.unique.stored]}
        if spec.span is not None and spec.unique is not spec.time:
            start = spec.window(milliseconds(raw[spec.time.stored]))
            selection = select(spec, condition)
            selection.low, selection.high = start, spec.last(start)
        else:
            selection = select(spec, condition)
        scan = Scan(self.collection, selection.buckets, self.spec.limits.bucket_page)
        while buckets := (yield from scan.next()):
            for each in (yield from open_buckets(spec, self.collection, selection, buckets)):
                for place in each.picked:
                    return self.entry.codec.load(spec.flat(each.bucket, each.readings[place], each.series))
        return None

    def insert_many(self, documents: Iterable[D]) -> Plan[list[D]]:
        """Add readings to their buckets, one update per bucket; those that were stored."""
        server = yield from server_facts()
        # Several buckets share a transaction where there are any; each is right by itself, too.
        return (yield from self._insert(list(documents), together=server.transactions))

    def _insert(self, given: list[D], *, together: bool) -> Plan[Stored[D]]:
        entry = self.entry
        altered: list[Any] = []
        raws = crud.dump_all(entry, given, altered)
        check_batch(raws, entry.model.__name__)
        self._require_types(raws)
        shown = given
        if altered:
            shown = [
                self._as_stored(document, raw, altered) for document, raw in zip(given, raws, strict=True)
            ]
        for document in given:
            document.__pydantic_fields_set__.add("id")
        batches = self.writer.group(raws, documents=given)
        careful = yield from is_inside()
        with crud.translated(entry.model.__name__, raws):
            duplicates = yield from self.writer.append(batches, careful=careful, together=together)
        if not duplicates:
            return Stored(shown)
        dropped = set(duplicates)
        stored = Stored(each for place, each in enumerate(shown) if place not in dropped)
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
                    self.entry.codec.load(copy.deepcopy(first))
                except DataError as error:
                    raise UsageError(
                        f"a {self.spec.label} does not fit its own model ({error}); build it through its "
                        "constructor",
                        code="model-inconsistent",
                    ) from None
                fitting.add(kind)

    def _as_stored(self, document: D, raw: Raw, altered: list[Any]) -> D:
        """A reading as it will be read, where storing alters it."""
        spec = self.spec
        if not spec.stores_id:
            series = spec.series(tuple([raw[name] for name in spec.key_names]))
            raw["_id"] = spec.reading_id(series, milliseconds(raw[spec.time.stored]))
        return crud.as_stored(self.entry, document, raw, altered)

    # -- reading --------------------------------------------------------------------------

    def reader(self, filter: Any, sort: Sort | None, skip: int, limit: int | None) -> Reader[D]:
        crud.check_window(skip, limit)
        return Reader(self.spec, self.collection, self.entry.codec.load, filter, sort, skip, limit)

    def id_filter(self, identity: Any) -> Raw:
        return {"_id": {"$eq": self.entry.identity(identity)}}

    def count(self, filter: Any) -> Plan[int]:
        with crud.translated(self.entry.model.__name__):
            return (yield from reading.count(self.spec, self.collection, filter))

    def summary(self, key: Any, start: Any, end: Any) -> Plan[list[Summary]]:
        return (yield from reading.summary(self.spec, self.collection, key, start, end))

    def tuples(
        self, key: Any, start: Any, end: Any, fields: Sequence[str] | None
    ) -> Plan[list[tuple[Any, ...]]]:
        return (yield from reading.tuples(self.spec, self.collection, key, start, end, fields))

    # -- changing -------------------------------------------------------------------------

    def _chosen(self, id_or_filter: Any) -> Plan[Selection]:
        """What a caller means by an id or a filter; an id must mean one reading."""
        if isinstance(id_or_filter, dict) or hasattr(id_or_filter, "keys"):
            return select(self.spec, id_or_filter)
        selection = select(self.spec, self.id_filter(id_or_filter))
        found = 0
        scan = Scan(self.collection, selection.buckets, self.spec.limits.bucket_page)
        while buckets := (yield from scan.next()):
            for each in (yield from open_buckets(self.spec, self.collection, selection, buckets)):
                found += len(each.picked)
        if found > 1:
            raise UsageError(
                f"{found} readings of {self.spec.label} have the id {id_or_filter!r}, as they are of one "
                "series and one moment; say which by a filter, or declare an id on the model",
                code="reading-ambiguous",
            )
        return selection

    def update(self, id_or_filter: Any, update: Any) -> Plan[D | None]:
        cleaned = clean_update(self.entry.codec, update)
        change = applied(self.spec, self.collection, cleaned)
        selection = yield from self._chosen(id_or_filter)
        with crud.translated(self.entry.model.__name__, [{"update": cleaned}]):
            _, pairs = yield from self.changer.change_all(selection, change, only_first=True)
        return self._after(pairs[0][1]) if pairs else None

    def _after(self, flat: Raw | None) -> D:
        """A changed reading with the id that it has now."""
        assert flat is not None
        spec = self.spec
        if not spec.stores_id:
            series = spec.series(tuple(flat.get(name) for name in spec.key_names))
            flat["_id"] = spec.reading_id(series, milliseconds(flat[spec.time.stored]))
        return self.entry.codec.load(copy.deepcopy(flat))

    def update_all(self, filter: Any, update: Any) -> Plan[int]:
        crud.require_filter(self.entry, filter)
        cleaned = clean_update(self.entry.codec, update)
        change = applied(self.spec, self.collection, cleaned)
        with crud.translated(self.entry.model.__name__, [{"update": cleaned}]):
            count, _ = yield from self.changer.change_all(select(self.spec, filter), change)
        return count

    def replace(self, document: D) -> Plan[D]:
        altered: list[Any] = []
        raw = crud.dump(self.entry, document, altered)
        identity = raw["_id"]
        selection = yield from self._chosen(identity)

        def change(readings: list[Raw]) -> Plan[list[Raw | None]]:
            return [copy.deepcopy(raw) for _ in readings]
            yield  # pragma: no cover (a plan that asks for nothing)

        with crud.translated(self.entry.model.__name__, [raw]):
            _, pairs = yield from self.changer.change_all(selection, change, only_first=True)
        if not pairs:
            raise crud.gone(self.entry, identity)
        return self._after(raw)

    def delete(self, id_or_filter: Any) -> Plan[D | None]:
        selection = yield from self._chosen(id_or_filter)
        _, pairs = yield from self.changer.change_all(selection, _gone, only_first=True)
        return self.entry.codec.load(pairs[0][0]) if pairs else None

    def delete_all(self, filter: Any) -> Plan[int]:
        crud.require_filter(self.entry, filter)
        selection = select(self.spec, filter)
        if selection.whole and selection.low is None and selection.high is None:
            return (yield from self.changer.delete_buckets(selection))
        count, _ = yield from self.changer.change_all(selection, _gone)
        return count

    # -- set-up, proof and repair ---------------------------------------------------------

    def check_fields(self, flat: Raw) -> None:
        """Refuse fields that the model does not know, where there is no column for them."""
        unknown = set(flat) - set(self.entry.codec.by_stored) - {"_id"}
        if unknown and self.spec.layout != "rows":
            raise unknown_fields(self.spec, unknown)

    def normal(self, document: Raw) -> Raw:
        """A stored reading with every part that grouping takes out."""
        return {**dict.fromkeys(self.spec.outer_names), **document}

    def schema(self) -> Raw:
        # A document that is to be adopted is not invalid for that.
        return prepare.bucket_schema(self.entry, self.spec, adopting=True, deep=True)

    def setup(self, existing: dict[str, Raw], actions: list[Action]) -> Plan[None]:
        yield from prepare.setup(self.entry, self.spec, existing, actions)

    def verify(self, server: Capabilities, report: Report | None) -> Plan[list[Finding]]:
        return (yield from upkeep.Upkeep(self).verify(server, report))

    def repair(self, server: Capabilities, report: Report | None) -> Plan[int]:
        return (yield from upkeep.Upkeep(self).repair(server, report))

    def rebuild(self, server: Capabilities, report: Report | None) -> Plan[int]:
        return (yield from upkeep.Upkeep(self).rebuild(server, report))

    def pack_due(self, now: dt.datetime, *, dry_run: bool = False) -> Plan[int]:
        """Pack the buckets that are closed by now, under `layout="packed"`; how many there were, or would be.

        Twice equals once, and two who do it at the same time do not disturb each other.
        """
        if self.spec.layout != "packed":
            return 0
        work = upkeep.Upkeep(self)
        if dry_run:
            return (yield from count_documents(self.collection, work.due(now)))
        return (yield from work.compact(now))


def _gone(readings: list[Raw]) -> Plan[list[Raw | None]]:
    return [None] * len(readings)
    yield  # pragma: no cover (a plan that asks for nothing)
