"""Rules that state what documents should hold; verify and repair follow from that.

A repair is a commit like any other: what it changes is propagated and
recorded, so that values in other models and a history follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pymongo import UpdateOne

from treadle.engine.pages import by_ids
from treadle.engine.version_upgrade import upgrade_matching_upgraded
from treadle.engine.write_path import commit_changes
from treadle.graph.changes import Changes
from treadle.graph.outcomes import Finding
from treadle.graph.rule import Rule
from treadle.graph.scope import Image
from treadle.plan import Plan, Raw, bulk_write, by_id, server_facts
from treadle.query.comparison import identical
from treadle.query.keys import freeze
from treadle.query.paths import value_at


class ExpectedRule(Rule):
    """A rule that knows the right values of documents."""

    def expected(self, documents: Sequence[Raw]) -> Plan[list[Mapping[str, Any]]]:
        """Return for each current document the right values, by stored path; deleted documents included."""
        raise NotImplementedError  # pragma: no cover

    def verify(self, page: Sequence[Raw] | None) -> Plan[list[Finding]]:
        findings = []
        for document, path, right in (yield from self._wrong(page or ())):
            name = self.target.kinds.of(document).model.__name__
            stored = value_at(document, path)
            findings.append(Finding(self.pattern, name, document["_id"], path, stored, right))
        return findings

    def repair(self, keys: Sequence[Any] | None) -> Plan[list[Any]]:
        if not keys:
            return []
        body = partial(self._repair, keys)
        if (yield from server_facts()).transactions:
            graph: Any = self.models
            return (yield from commit_changes(graph, body))
        # Without transactions nothing is derived from these documents.
        return (yield from body(Changes(transactional=False)))

    def _wrong(self, documents: Sequence[Raw]) -> Plan[list[tuple[Raw, str, Any]]]:
        """Return the documents that do not hold what they should: document, path, right value."""
        return list(_differences(documents, (yield from self.expected(documents)))) if documents else []

    def _wrong_among(self, keys: Sequence[Any]) -> Plan[list[tuple[Raw, str, Any]]]:
        images = yield from self.target.targets.with_deleted.find({"_id": {"$in": list(keys)}})
        return (yield from self._wrong([image.document for image in images]))

    def _repair(self, keys: Sequence[Any], changes: Changes) -> Plan[list[Any]]:
        entry, wrong = self.target, (yield from self._wrong_among(keys))
        if wrong and entry.versions.may_change:
            # Outdated documents that are right stay as they are stored.
            keys = [document["_id"] for document, _, _ in wrong]
            paths = [path for _, path, _ in wrong]
            yield from upgrade_matching_upgraded(entry, {"_id": {"$in": keys}}, changes, paths)
            wrong = yield from self._wrong_among(keys)
        if not wrong:
            return []
        # Only the values that were read: without a transaction another writer may have changed them since.
        operations = [
            UpdateOne(
                {**by_id(document["_id"]), path: {"$eq": value_at(document, path)}}, {"$set": {path: right}}
            )
            for document, path, right in wrong
        ]
        yield from bulk_write(entry.collection, operations, ordered=False)
        befores = {freeze(document["_id"]): document for document, _, _ in wrong}
        repaired = [document["_id"] for document in befores.values()]
        for key, after in (yield from by_ids(entry.collection, repaired)).items():
            # The write that was wrong may have been followed or not: what is said to be outdated is not
            # subtracted, but computed from its sources.
            before = Image(befores[key], entry.collection, outdated=True)
            changes.note(entry, before, Image(after, entry.collection))
        return repaired


def _differences(
    documents: Sequence[Raw], rights: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Raw, str, Any]]:
    for document, values in zip(documents, rights, strict=True):
        for path, right in values.items():
            if not identical(value_at(document, path), right):
                yield document, path, right
