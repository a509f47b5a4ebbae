"""Refuses writes that rely on a unique index which the server does not have.

Without it, concurrent writers could store duplicates: of a field that its
author declared unique, of an alternate key, or two documents of one group of a
rollup. The server is asked before the first write of each model, and again
before each of its writes as long as an index is missing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pymongo import IndexModel
from pymongo.errors import OperationFailure, PyMongoError

from treadle.engine.indexes import (
    compare_indexes,
    declared_indexes,
    describe_index,
    existing_collections,
    existing_indexes,
    is_same,
    maintenance_indexes,
    serves_all,
)
from treadle.errors import DataError, NotSetUp, UsageError
from treadle.graph.derived import aggregates_of, copies_in
from treadle.graph.graph import Graph
from treadle.graph.levels import models_reached
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Action
from treadle.model.text import get_logger
from treadle.plan import Plan, Raw, outside
from treadle.plan.server_errors import NAMESPACE_NOT_FOUND, UNAUTHORIZED

# Actions that the warning names.
ACTIONS_SHOWN_MAX = 10

log = get_logger(__name__)


class IndexCheck:
    """The models of one Store whose writes still have to look for unique indexes."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._warned = False
        collections = [each for each in graph.by_collection.values() if each.layout is None]
        # The entries, one per collection, whose unique indexes were not all seen yet.
        self._unseen = {each for each in collections if unique_indexes(each)}
        # What the next write of a model looks for. A Store without unique indexes never looks.
        self.pending = _pending(graph, self._unseen) if self._unseen else {}

    def require(self, entries: Iterable[ModelEntry]) -> Plan[None]:
        """Raise `UsageError` while the server lacks a unique index on which writes of these models rely."""
        for entry in entries:
            if entry in self.pending:
                yield from outside(functools.partial(self._look, entry))

    def clear(self) -> None:
        """Stop looking: `setup()` has just made what is declared."""
        self.pending.clear()

    def _look(self, entry: ModelEntry) -> Plan[None]:
        for each in self.pending.get(entry, ()):
            if each in self._unseen:
                yield from require_unique_indexes(each, entry)
                self._unseen.discard(each)
        self.pending.pop(entry, None)
        if not self._warned:
            self._warned = True
            # Other indexes make writes and reads fast; a failure to look for them must not fail a write.
            with contextlib.suppress(PyMongoError, DataError):
                _warn((yield from _missing(self._graph)))


def _pending(graph: Graph, unseen: set[ModelEntry]) -> dict[ModelEntry, list[ModelEntry]]:
    """Return by model the entries whose unique indexes its next write looks for."""
    pending: dict[ModelEntry, list[ModelEntry]] = {}
    for entry in graph.entries.values():
        relied = [each for each in _relied_on(entry) if each in unseen]
        if relied or not entry.effects.is_plain:
            pending[entry] = relied
    return pending


def require_unique_indexes(entry: ModelEntry, writing: ModelEntry | None = None) -> Plan[None]:
    """Raise `UsageError` unless the collection has each unique index that its models declare."""
    try:
        present = yield from existing_indexes(entry.collection)
    except OperationFailure as error:
        if error.code in UNAUTHORIZED:
            # A login that may not list indexes may be meant to write all the same.
            log.warning("%s: cannot list its indexes, so unique ones may be missing", entry.collection)
            return
        if error.code != NAMESPACE_NOT_FOUND:
            raise
        present = []
    missing = [index for index in unique_indexes(entry) if not _is_ensured(index.document, present)]
    if missing:
        raise _index_missing(entry, writing or entry, missing) from None


def unique_indexes(entry: ModelEntry) -> list[IndexModel]:
    """Return the unique indexes that the models of a collection declare."""
    return [index for index in declared_indexes(entry) if index.document.get("unique")]


def _index_missing(entry: ModelEntry, writing: ModelEntry, missing: Sequence[IndexModel]) -> UsageError:
    listed = ", ".join(describe_index(index.document) for index in missing)
    return UsageError(
        f"{writing.model.__name__} cannot be written while the collection {entry.collection!r} lacks the "
        f"index {listed}: duplicates could be stored; run setup(), or "
        "`treadle setup --app package.module:store`",
        code="index-missing",
    )


def _is_ensured(declared: Mapping[str, Any], present: Sequence[Raw]) -> bool:
    """Whether an existing index keeps the documents of a declared one unique, perhaps others as well."""

    def is_stricter(index: Raw) -> bool:
        whole = serves_all(index) and not declared.get("collation")
        return bool(index.get("unique")) and whole and set(index["key"]) == set(declared["key"])

    return any(is_same(each, declared) or is_stricter(each) for each in present)


def _relied_on(entry: ModelEntry) -> list[ModelEntry]:
    """Return the entries, one per collection, whose unique indexes a write of a model relies on.

    Its own, those of the rollups that follow it, and those of alternate keys on either end of a relation.
    """
    groups = [each for each in models_reached(entry) if each.rules.group is not None]
    related = [rule.source for rule in copies_in(entry)]
    related += [rule.target for rule in aggregates_of(entry, None)]
    named = [each for each in related if each.paths.alternate_keys]
    return list(dict.fromkeys(each.kinds.root for each in (entry, *groups, *named)))


def _missing(graph: Graph) -> Plan[list[Action]]:
    """Return the collections and indexes that `setup()` would make, by a few quick reads."""
    existing, actions = (yield from existing_collections()), list[Action]()
    for entry in graph.by_collection.values():
        if entry.layout is not None:
            continue
        present = list[Raw]()
        if entry.collection in existing:
            present = yield from existing_indexes(entry.collection)
        else:
            actions.append(Action("create collection", entry.collection))
        missing, _ = compare_indexes(entry, present)
        missing += maintenance_indexes(graph, entry, present)
        actions += [
            Action("create index", entry.collection, describe_index(index.document)) for index in missing
        ]
    return actions


def _warn(actions: Sequence[Action]) -> None:
    """Warn at the caller's line if `setup()` would make an index."""
    if not any(action.what == "create index" for action in actions):
        return
    listed = "; ".join(map(str, actions[:ACTIONS_SHOWN_MAX]))
    more = f"; and {len(actions) - ACTIONS_SHOWN_MAX} more" if len(actions) > ACTIONS_SHOWN_MAX else ""
    warnings.warn(
        f"this Store writes before setup() was run. It would still {listed}{more} (index_ready() lists it)",
        NotSetUp,
        stacklevel=_stack_level(),
    )


def _stack_level() -> int:
    """Return how far up the stack the caller of this library is, as `warnings.warn` counts."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("treadle."):
        level, frame = level + 1, frame.f_back
    return level
