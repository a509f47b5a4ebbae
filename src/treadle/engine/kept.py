"""What plain writes do for models one of whose fields is stored in several documents, or written later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from bson import ObjectId

from treadle.model.bson_types import RESERVED
from treadle.patterns.outlier import intents as array_intents
from treadle.plan import Plan, Raw, by_id, find_one_and_update, insert_many
from treadle.query.paths import put

if TYPE_CHECKING:
    from treadle.graph.graph import Entry
    from treadle.patterns.outlier.rule import OutlierRule

Overflow: TypeAlias = "tuple[OutlierRule, Raw, list[Raw]]"


def split_arrays(entry: Entry[Any], raws: Sequence[Raw]) -> list[Overflow]:
    """Cut the arrays of new documents to their embedded part; what overflows, per array."""
    overflow = []
    for raw in raws:
        for rule in entry.all_outliers:
            made, _ = rule.split(raw)
            if made:
                overflow.append((rule, raw, made))
    return overflow


def insert_overflow(server: Any, overflow: Sequence[Overflow]) -> Plan[Callable[[], Plan[None]]]:
    """Called before new documents are inserted; the plan that is to follow the insert.

    In a transaction the overflow documents are simply inserted then. Without
    one, they are written down first, and the document itself says so: if it
    is there, they will be.
    """
    if not server.transactions:
        for rule, raw, made in overflow:
            puts = [{"_id": ObjectId(), **page} for page in made]
            operation = yield from array_intents.record(rule, raw["_id"], [], puts)
            put(raw, rule.open_path.split("."), operation)

    def after() -> Plan[None]:
        if not server.transactions:
            for rule, raw, _ in overflow:
                yield from array_intents.finish(rule, raw)
                _forget(raw, rule)
            return
        by_rule: dict[OutlierRule, list[Raw]] = {}
        for rule, _, made in overflow:
            by_rule.setdefault(rule, []).extend(made)
        for rule, made in by_rule.items():
            yield from insert_many(rule.collection, made)

    return after


def _forget(raw: Raw, rule: OutlierRule) -> None:
    """Take the note of the operation out of the document that is shown to the caller."""
    *path, name = rule.open_path.split(".")
    for part in path:
        raw = raw[part]
    raw.pop(name, None)


def replace_keeping(entry: Entry[Any], document: Raw) -> Plan[Raw]:
    """Write a whole document, except for what others write all the time; the document after.

    One update that takes those values from the stored document itself: what
    was read a moment ago may be stale, and must not be written back.
    """
    kept: Raw = {
        f"new.{path}": {"$ifNull": [f"$old.{path}", {"$literal": value}]}
        for path, value in entry.kept.items()
    }
    rest = {name: value for name, value in document.items() if name != RESERVED}
    pipeline: list[Raw] = [
        {"$replaceWith": {"new": {"$literal": rest}, "old": "$$ROOT"}},
        {"$set": {**kept, f"new.{RESERVED}": f"$old.{RESERVED}"}},
        {"$replaceWith": "$new"},
    ]
    after = yield from find_one_and_update(entry.collection, by_id(document["_id"]), pipeline)
    return document if after is None else after
