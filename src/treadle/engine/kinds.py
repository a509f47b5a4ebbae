"""The calls that exist for the sake of kinds: text search over all of them, and a change of kind.

A document changes its kind by `change_kind` only, and only if it still is of
the kind that the caller believes it to be. How documents of several kinds are
told apart is in `graph/kinds.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from treadle.engine import crud
from treadle.engine.alternate_keys import guard_arrivals
from treadle.engine.deletes import check_restrictions, follow_references, restricting
from treadle.engine.indexes import declared_indexes
from treadle.engine.pipelines import derivation
from treadle.engine.recompute import recompute, refuse_unfit
from treadle.engine.replaces import Replace
from treadle.errors import Conflict, DataError, TreadleError, UsageError
from treadle.graph.batch import Batch
from treadle.graph.card import Card
from treadle.graph.changes import Changes
from treadle.graph.derived import DerivedRule, copies_of
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import Rule
from treadle.model.document import Document
from treadle.plan import Plan, Raw, Read, by_id, find_one, server_facts
from treadle.query.filters import parse_filter
from treadle.query.keys import freeze
from treadle.query.paths import put

D = TypeVar("D", bound=Document)

# What MongoDB's text search reads as operators: phrases in quotes, and words to leave out.
_OPERATORS = re.compile(r'["\\]|(?<!\w)-+')


# -- text search ------------------------------------------------------------------------------


def search_command(
    entry: ModelEntry[Any], text: Any, filter: Any, limit: int | None, card: Card[Any] | None = None
) -> Read:
    """The command whose cursor streams what holds the words, the best match first."""
    if not isinstance(text, str) or not text.strip():
        raise UsageError(
            f"a search of {entry.model.__name__} takes the words to look for, not {text!r}",
            code="search-invalid",
        )
    if not _has_text_index(entry):
        raise UsageError(
            f"no field of {entry.model.__name__} is marked Indexed(text=True), so its collection has no "
            "text index to search; mark the fields and run setup()",
            code="search-invalid",
        )
    command = crud.find_command(entry, None, None, 0, limit, card)
    words = _OPERATORS.sub(" ", text)
    # In front of the caller's filter, which must not replace it.
    sought = {"$and": [{"$text": {"$search": words}}, parse_filter(entry.paths.fields, filter)]}
    ranked = [("score", {"$meta": "textScore"}), ("_id", 1)]
    options = {**command.options, "sort": ranked}
    return replace(command, arguments=(sought, *command.arguments[1:]), options=options)


def _has_text_index(entry: ModelEntry[Any]) -> bool:
    return any("text" in dict(index.document["key"]).values() for index in declared_indexes(entry.kinds.root))


# -- change of kind -----------------------------------------------------------------------------


def former(graph: Graph, document: Document, was: Any) -> ModelEntry[Any]:
    """The entry of the kind that a document is said to have had."""
    entry = graph.entry(type(document))
    before = graph.entry(was)
    if entry.kinds.family is None or before.kinds.family is not entry.kinds.family:
        raise UsageError(
            f"{before.model.__name__} and {entry.model.__name__} are not kinds of one collection, so a "
            "document cannot change from one to the other",
            code="kind-change",
        )
    if before.kinds.kind is None:
        raise UsageError(
            f"was={before.model.__name__} is abstract; name the kind that the document has now",
            code="kind-change",
        )
    return before


class ChangeKind(Replace[D]):
    """A document over the stored one of another kind: it leaves that kind's rules and enters its own."""

    def _filter(self) -> Raw:
        assert self.was.kinds.family is not None
        kind = {
            self.was.kinds.family.discriminator: {"$in": self.was.kinds.family.stored_as(self.was.kinds.kind)}
        }
        return {**self.was.targets.exact.filter(), **by_id(self.raw["_id"]), **kind}

    def _refusal(self) -> Plan[TreadleError]:
        assert self.was.kinds.family is not None
        identity, name = self.raw["_id"], self.was.kinds.family.discriminator
        living = {} if self.was.paths.deletion is None else {self.was.paths.deletion: None}
        stored = yield from find_one(self.entry.collection, {**by_id(identity), **living}, {name: 1})
        if stored is None:
            return crud.gone(self.entry, identity)
        if stored.get(name) in self.was.kinds.family.stored_as(self.was.kinds.kind):
            return Conflict(self.entry.model.__name__, identity)
        return DataError(
            f"the document with _id {identity!r} is stored as kind {stored.get(name)!r}, not as "
            f"{self.was.kinds.kind!r} ({self.was.model.__name__}), so it was left alone; read it again "
            "and decide anew",
            code="kind-differs",
        )

    def _entered(self) -> list[Rule]:
        """The rules of the new kind that the old one has not; for these the document is a new one."""
        return [rule for rule in self.entry.rules if rule not in self.was.rules]

    def _kept(self) -> dict[str, Any]:
        # What the new kind alone would keep is the caller's to say.
        was = self.was.paths.owned
        return {
            path: value
            for path, value in self.entry.paths.kept_on_replace().items()
            if was.get(path) is self.entry.paths.owned[path]
        }

    def _left(self, rules: Sequence[DerivedRule]) -> list[DerivedRule]:
        """The references to the old kind only, for which the document is gone."""
        return [rule for rule in rules if not rule.source.targets.admits(self.raw)]

    def _check(self, before: Raw) -> Plan[None]:
        yield from check_restrictions(self._left(restricting(self.was)), [before])

    def _after(self, before: Raw) -> Plan[Raw]:
        after = yield from super()._after(before)
        identity, old = after["_id"], derivation(self.was).aggregates
        new = [rule for rule in derivation(self.entry).aggregates if rule not in old]
        if new:
            yield from guard_arrivals(self.entry, new, [after])
            values = yield from recompute(new, [identity], (yield from server_facts()), documents=[after])
            refuse_unfit(new, values[freeze(identity)])
            for path, value in values[freeze(identity)].items():
                put(after, path, value)
        entered = self._entered()
        # To the rules of the new kind alone it is a new document.
        self.batch = Batch([after], [False])
        for rule in self.entry.rules.implementing("prepare"):
            if rule in entered:
                self.batch.notes[rule] = [rule.prepare(after)]
        self.prepared = bool(self.batch.notes)
        return after

    def apply(self, changes: Changes) -> Plan[Raw]:
        after = yield from super().apply(changes)
        keys = [after["_id"]]
        entered = self._entered()
        for rule in self.entry.rules.implementing("after_insert"):
            if rule in entered:
                yield from rule.after_insert(self.batch, None, changes)
        for rule in self.was.rules.implementing("after_delete"):
            if rule not in self.entry.rules:
                yield from rule.after_delete(keys, changes)
        yield from follow_references(self.was, self._left(copies_of(self.was)), [after], changes)
        return after
