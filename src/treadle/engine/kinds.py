"""Polymorphic: documents of several kinds in one collection, each read as its own class.

`discriminator=` on a base names the stored field that says of which kind a
document is, `kind=` on the classes below gives each its value. A query on the
base finds all kinds, a query on a kind adds the discriminator, which is also
what lets the server use that kind's partial indexes. An update on a kind
never reaches another. A document changes its kind by `change_kind` only, and
only if it still is of the kind that the caller believes it to be.

How documents are told apart is in `graph/kinds.py` and `graph/store_codec.py`;
here are the calls that exist for their sake.
"""

from __future__ import annotations

import copy
import re
from typing import Any, TypeVar

from treadle.engine import crud
from treadle.engine.deletes import check_restrictions, follow_references, restricting
from treadle.engine.fill import compute_formulas, fill_copies
from treadle.engine.guards import guard
from treadle.engine.indexes import declared_indexes
from treadle.engine.ledger import Ledger
from treadle.engine.recompute import recompute
from treadle.engine.writes import Replace
from treadle.errors import DataError, UsageError
from treadle.graph.change import Change
from treadle.graph.derived import CopyRule, FormulaRule
from treadle.graph.gather import GatherRule
from treadle.graph.graph import Graph
from treadle.graph.pattern import Entry
from treadle.model.bson_types import RESERVED
from treadle.model.document import Document
from treadle.plan import Plan, Raw, Read, by_id, find_one, replace_one
from treadle.plan.capabilities import Capabilities
from treadle.query.paths import has, put, value_at
from treadle.query.safety import clean_filter

D = TypeVar("D", bound=Document)

# What MongoDB's text search reads as operators: phrases in quotes, and words to leave out.
_OPERATORS = re.compile(r'["\\]|(?<!\w)-+')


# -- text search ------------------------------------------------------------------------------


def search_command(entry: Entry[Any], text: Any, filter: Any, limit: int | None) -> Read:
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
    command = crud.find_command(entry, None, None, 0, limit)
    words = _OPERATORS.sub(" ", text)
    # In front of the caller's filter, which must not replace it.
    sought = {"$and": [{"$text": {"$search": words}}, clean_filter(entry.codec, filter)]}
    ranked = [("score", {"$meta": "textScore"}), ("_id", 1)]
    return Read(entry.collection, "find", (sought,), {**command.options, "sort": ranked})


def _has_text_index(entry: Entry[Any]) -> bool:
    return any("text" in dict(index.document["key"]).values() for index in declared_indexes(entry.root))


# -- change of kind -----------------------------------------------------------------------------


def former(graph: Graph, document: Document, was: Any) -> Entry[Any]:
    """The entry of the kind that a document is said to have had."""
    entry = graph.entry(type(document))
    before = graph.entry(was)
    if entry.family is None or before.family is not entry.family:
        raise UsageError(
            f"{before.model.__name__} and {entry.model.__name__} are not kinds of one collection, so a "
            "document cannot change from one to the other",
            code="kind-change",
        )
    if before.settings.kind is None:
        raise UsageError(
            f"was={before.model.__name__} is abstract; name the kind that the document has now",
            code="kind-change",
        )
    return before


def change_kind(entry: Entry[D], before: Entry[Any], document: D) -> Plan[D]:
    """Write a document over the stored one of the same id, if that is of the kind it was said to be."""
    altered: list[Any] = []
    raw = crud.dump(entry, document, altered)
    shown = crud.as_stored(entry, document, raw, altered)
    with crud.translated(entry.model.__name__, [raw]):
        result = yield from replace_one(entry.collection, {**by_id(raw["_id"]), **_only(before)}, raw)
    if not result.matched_count:
        raise (yield from _differs(entry, before, raw["_id"]))
    return shown


def _only(entry: Entry[Any]) -> Raw:
    assert entry.family is not None
    return {entry.family.discriminator: {"$eq": entry.settings.kind}}


def _differs(entry: Entry[Any], before: Entry[Any], identity: Any) -> Plan[DataError]:
    assert entry.family is not None
    stored = yield from find_one(entry.collection, by_id(identity), {entry.family.discriminator: 1})
    if stored is None:
        return crud.gone(entry, identity)
    kind = stored.get(entry.family.discriminator)
    return DataError(
        f"the document with _id {identity!r} is stored as kind {kind!r}, not as {before.settings.kind!r} "
        f"({before.model.__name__}), so it was left alone; read it again and decide anew",
        code="kind-differs",
    )


class ChangeKind(Replace[D]):
    """The same where rules follow: the old kind's are left, the new kind's are entered."""

    def __init__(self, entry: Entry[D], before: Entry[Any], document: D) -> None:
        super().__init__(entry, document)
        self.replaces = before

    def body(self, graph: Graph, server: Capabilities, ledger: Ledger) -> Plan[Raw]:
        entry, was = self.entry, self.replaces
        identity = self.raw["_id"]
        before = yield from find_one(entry.collection, {**by_id(identity), **_only(was)})
        if before is None:
            raise (yield from _differs(entry, was, identity))
        # For those who refer to the old kind only, the document is gone.
        left = [rule for rule in was.feeding(CopyRule, None) if not rule.source.holds(self.raw)]
        yield from check_restrictions([rule for rule in restricting(was) if rule in left], [identity])
        assert entry.family is not None
        yield from ledger.note_before(entry.family.root, [identity])
        after = yield from self._after(server, before)
        yield from fill_copies(entry, [(before, after)])
        with crud.translated(entry.model.__name__, [after]):
            yield from replace_one(entry.collection, by_id(identity), after)
        if entry.having(FormulaRule):
            (after,) = yield from compute_formulas(entry, [identity])
        ledger.add(Change(entry.collection, identity, before, after))
        for rule in was.answering("after_delete"):
            if rule not in entry.rules:
                yield from rule.after_delete([identity], ledger)
        gone = [rule for rule in was.feeding(CopyRule) if rule in left]
        yield from follow_references(was, gone, [identity], ledger)
        return after

    def _after(self, server: Capabilities, before: Raw) -> Plan[Raw]:
        """The document of the new kind, with what both kinds maintain kept and the rest gathered."""
        entry, was = self.entry, self.replaces
        after = copy.deepcopy(self.raw)
        for path, rule in entry.protected.items():
            kept = was.protected.get(path) is rule and not rule.refills
            if kept and has(before, path):
                put(after, path, value_at(before, path))
        if RESERVED in before:
            after[RESERVED] = copy.deepcopy(before[RESERVED])
        new = [rule for rule in entry.having(GatherRule) if rule not in was.having(GatherRule)]
        if new:
            identity = after["_id"]
            yield from guard(entry.collection, [identity])
            for values in (yield from recompute(new, [identity], server.version)).values():
                for path, value in values.items():
                    put(after, path, value)
        return after
