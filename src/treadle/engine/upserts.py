"""One document however many race to make it: an update where it is there, an insert where it is not.

A unique index decides who makes it. So an upsert is refused unless one covers
what its filter says the document is equal to.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from treadle.engine.documents import as_written, filter_of, require_readable
from treadle.engine.indexes import declared_indexes
from treadle.engine.inserts import Insert
from treadle.engine.queries import find_matching
from treadle.engine.updates import Update
from treadle.errors import UsageError
from treadle.graph.changes import Changes
from treadle.graph.model_entry import ModelEntry
from treadle.graph.operations import Upserted
from treadle.graph.write import Write
from treadle.model.bson_types import to_bson
from treadle.model.document import Document
from treadle.plan import Plan, Raw
from treadle.query.comparison import same
from treadle.query.paths import value_at

D = TypeVar("D", bound=Document)


class Upsert(Write[Upserted[D]]):
    """An update of the document that matches, or the insert of a new one.

    The filter finds documents of the model that was asked for, of whichever kind; `inserted` is the
    entry of the kind that is inserted.
    """

    entry: ModelEntry[D]
    # A concurrent upsert may make the document first; the next attempt updates it.
    races = True

    def __init__(
        self, entry: ModelEntry[D], inserted: ModelEntry[D], filter: Any, update: Any, insert: D
    ) -> None:
        self.entry = entry
        self.created = False
        by_filter = filter if isinstance(filter, Mapping) else {"_id": entry.ids.encode(filter)}
        self._update: Update[D] = Update(entry, by_filter, update)
        self.insert: Insert[D] = Insert(inserted, [insert])
        self.reserved_ids = self.insert.reserved_ids
        # An assignment to a field is not validated by itself.
        require_readable(inserted, self.insert.raws[0], "this would store")
        # The new document must be unique among those of its own kind.
        require_unique(inserted, filter_of(inserted, by_filter), self.insert.raws[0])

    def command(self) -> Plan[Raw] | None:
        update, insert = self._update.command(), self.insert.command()
        return None if update is None or insert is None else self._upsert_alone(update, insert)

    @property
    def targets(self) -> frozenset[Hashable]:
        return self._update.targets | self.insert.targets

    def _upsert_alone(self, update: Plan[Raw | None], insert: Plan[list[Raw]]) -> Plan[Raw]:
        raw = yield from update
        self.created = raw is None
        if raw is None:
            (raw,) = yield from insert
        return raw

    def apply(self, changes: Changes) -> Plan[Raw]:
        matches = yield from find_matching(self.entry, self._update.filter, limit=1)
        raw: Raw | None = None
        if matches:
            raw = yield from self._update.update_document(matches[0], changes)
        self.created = raw is None
        if raw is None:
            (raw,) = yield from self.insert.apply(changes)
        return raw

    def result(self, outcome: Raw) -> Upserted[D]:
        if self.created:
            return Upserted(self.insert.result([outcome])[0], True)
        return Upserted(as_written(self.entry, outcome), False)


def require_unique(entry: ModelEntry, filter: Raw, new: Raw) -> None:
    """Refuse an upsert of which two could make two documents, or whose new document its filter misses."""
    equal = equalities(filter)
    matched = {path for path, value in equal.items() if same(value_at(new, path), value)}
    covering = _covering(entry, equal, new)
    if any(paths <= matched for paths in covering):
        return
    for paths in covering:
        if paths <= set(equal):
            missed = ", ".join(sorted(paths - matched))
            raise UsageError(
                f"the filter asks for another {missed} than insert= has, so that each upsert would make a "
                f"{entry.model.__name__} that the next one does not find; give both the same value",
                code="upsert-not-unique",
            )
    named = ", ".join(equal) or "no field"
    raise UsageError(
        f"this upsert finds its {entry.model.__name__} by {named}, of which no unique index is declared, so "
        "that two at the same time would make two documents; declare Indexed(unique=True), or a unique "
        "IndexModel in indexes=, over fields that the filter gives a value for",
        code="upsert-not-unique",
    )


def _covering(entry: ModelEntry, equal: Raw, new: Raw) -> list[set[str]]:
    """The paths of each unique index that holds the new document and all that the filter may find."""
    unique = [
        index.document
        for index in declared_indexes(entry.kinds.root)
        if index.document.get("unique") and not index.document.get("sparse")
    ]
    holding = [set(dict(each["key"])) for each in unique if _holds(each, equal, new)]
    return [{"_id"}, *holding] if "_id" in equal else holding


def equalities(filter: Mapping[str, Any]) -> Raw:
    """The stored paths that a filter gives one value each."""
    equal: Raw = {}
    for key, condition in filter.items():
        if key == "$and":
            for each in condition:
                equal |= equalities(each)
        elif not key.startswith("$"):
            wanted = condition if _has_operators(condition) else {"$eq": condition}
            if "$eq" in wanted:
                equal[key] = wanted["$eq"]
    return equal


def _has_operators(condition: Any) -> bool:
    return isinstance(condition, Mapping) and any(str(name).startswith("$") for name in condition)


def _holds(document: Mapping[str, Any], equal: Raw, new: Raw) -> bool:
    """Whether a partial index holds the new document and all that the filter may find."""
    partial: Raw = to_bson(document.get("partialFilterExpression", {}), [])
    for path, condition in partial.items():
        if isinstance(condition, Mapping) and set(condition) <= {"$exists", "$type"}:
            # Whatever is equal to a value is there, and of its type.
            if equal.get(path) is None or condition.get("$exists") is False:
                return False
        elif path not in equal or not same(value_at(new, path), equalities({path: condition}).get(path)):
            return False
    return True
