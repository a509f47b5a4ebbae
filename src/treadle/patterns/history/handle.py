"""The calls on a model's history: states, documents as of a moment, and `revert`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from typing import Any

from bson import MinKey

from treadle.engine.document_layout import layout_of
from treadle.engine.replaces import ChangeKind, Replace, Restore
from treadle.engine.version_upgrade import upgraded
from treadle.engine.write_path import WritePath
from treadle.errors import UsageError
from treadle.graph.changes import Changes
from treadle.graph.layout import PageReader
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import State
from treadle.graph.write import Selector, Write
from treadle.model.bson_types import as_moment
from treadle.model.document import Document
from treadle.patterns.history.rows import NEWEST, NEWEST_OF_EACH, HistoryRows
from treadle.plan import Plan, Raw, Read, by_id, find_one
from treadle.query.filters import parse_filter
from treadle.query.paths import put, value_at


class HistoryHandle:
    """The history of one model, or of one kind of it."""

    def __init__(self, rule: HistoryRows, write_path: WritePath, entry: ModelEntry) -> None:
        self.rule = rule
        self.entry = entry
        self.write_path = write_path

    # -- states ------------------------------------------------------------------------------------

    def states(self, id: Any) -> StateReader:
        """Return a reader of the states of a document, the newest first."""
        return StateReader(self.rule, self.entry.ids.encode(id))

    def at(self, id: Any, moment: Any) -> Plan[Any]:
        """Return the document as it was at a moment, or None."""
        document = yield from self._document_at(self.entry.ids.encode(id), as_moment(moment))
        if document is None or not self.entry.targets.admits(document):
            return None
        return (yield from load(self.entry, [document]))[0]

    def _document_at(self, key: Any, moment: dt.datetime) -> Plan[Raw | None]:
        chosen = {**self.rule.of(key), "valid_from": {"$lte": moment}}
        row = yield from find_one(self.rule.rows_collection, chosen, sort=NEWEST)
        if row is None or (row.get("valid_to") is not None and row["valid_to"] <= moment):
            return None
        document: Raw = row["document"]
        return document

    def _document_of(self, key: Any, revision: Any) -> Plan[Raw]:
        """Return the document of one state, by its number."""
        row = None
        if isinstance(revision, int) and not isinstance(revision, bool):
            chosen = {**self.rule.of(key), "revision": revision}
            row = yield from find_one(self.rule.rows_collection, chosen)
        if row is None:
            raise UsageError(
                f"the history of {self.entry.model.__name__} {key!r} has no revision {revision!r}; "
                "history() lists those that there are",
                code="revision-unknown",
            )
        document: Raw = row["document"]
        return document

    def find_at(self, filter: Any, moment: Any) -> PageReader[Any]:
        """Return a reader of the documents that matched at a moment."""
        return MomentReader(
            self.rule, self.entry, parse_filter(self.entry.paths.fields, filter), as_moment(moment)
        )

    # -- revert --------------------------------------------------------------------------------------

    def revert(self, id: Any, revision: int) -> Plan[Any]:
        """Write the document as it was in an earlier state: a new state, the same fields.

        What only an insert may set, such as the place in a tree, stays as it is.
        """
        # Of any kind: the state may have another than the document.
        whole, key = self.rule.target, self.entry.ids.encode(id)
        state = yield from upgraded(whole, [(yield from self._document_of(key, revision))])
        document = whole.codec.load(state[0])
        layout = layout_of(self.write_path.graph.entry(type(document)), self.write_path)
        stored = whole.kinds.root.targets.with_deleted
        images = yield from stored.find(by_id(key))
        if not images and (yield from layout.bring_back(Selector(whole, by_id(key)))):
            images = yield from stored.find(by_id(key))
        if not images:
            return (yield from layout.insert(document))
        now = images[0].document
        for path, owned in layout.entry.paths.owned.items():
            if owned.insert_may_set:
                put(state[0], path, value_at(now, path))
        document = whole.codec.load(state[0])
        return (yield from self.write_path.execute(Revert(layout.entry, document, whole.kinds.of(now))))


class Revert(Write[Any]):
    """An earlier state over the stored document, whatever its revision, and also if it is soft-deleted."""

    def __init__(self, entry: ModelEntry, document: Document, was: ModelEntry) -> None:
        self.entry = entry
        self.restore = None if entry.paths.deletion is None else Restore(was, document.id)
        self.replace = Replace(entry, document) if was is entry else ChangeKind(entry, document, was)
        self.replace.unchanged = {}

    def apply(self, changes: Changes) -> Plan[Raw]:
        if self.restore is not None:
            yield from self.restore.apply(changes)
        return (yield from self.replace.apply(changes))

    def result(self, outcome: Raw) -> Any:
        return self.replace.result(outcome)


def load(entry: ModelEntry, documents: Sequence[Raw]) -> Plan[list[Document]]:
    """Return states as documents of the current version."""
    current = yield from upgraded(entry, documents)
    return [entry.codec.load(document) for document in current]


class StateReader(PageReader[Any]):
    """Reads the states of one document, the newest first."""

    def __init__(self, rule: HistoryRows, key: Any) -> None:
        self.page = rule.limits.find_page
        self.done = False
        self._rule = rule
        self._key = key

    @property
    def command(self) -> Read:
        return Read(self._rule.rows_collection, "find", (self._rule.of(self._key),), {"sort": NEWEST})

    def take(self, raws: list[Raw], ended: bool) -> Plan[Iterable[State[Any]]]:
        self.done = ended
        loaded = yield from load(self._rule.target, [row["document"] for row in raws])
        return [
            State(document, row["revision"], row["valid_from"], row.get("valid_to"), row.get("missed", 0))
            for document, row in zip(loaded, raws, strict=True)
        ]


class MomentReader(PageReader[Any]):
    """Reads the documents of a model that matched a filter at a moment, in the order of their ids."""

    def __init__(self, rule: HistoryRows, entry: ModelEntry, filter: Raw, moment: dt.datetime) -> None:
        self.page = rule.limits.find_page
        self.done = False
        self._rule = rule
        self._entry = entry
        self._stages: list[Raw] = [
            # With a bound for each field of the index, the server seeks one row per document.
            {"$match": {"document_id": {"$gte": MinKey()}, "valid_from": {"$lte": moment}}},
            *NEWEST_OF_EACH,
            {"$match": {"$or": [{"row.valid_to": {"$gt": moment}}, {"row.valid_to": None}]}},
            {"$sort": {"_id": 1}},
            {"$replaceWith": "$row.document"},
            {"$match": filter},
        ]

    @property
    def command(self) -> Read:
        return Read(self._rule.rows_collection, "aggregate", (self._stages,), {"allowDiskUse": True})

    def take(self, raws: list[Raw], ended: bool) -> Plan[Iterable[Any]]:
        self.done = ended
        return (yield from load(self._entry, raws))
