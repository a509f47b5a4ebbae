"""What plain writes do for models one of whose fields is stored in several documents, or written later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from treadle.model.bson_types import RESERVED
from treadle.plan import Plan, Raw, by_id, find_one_and_update, insert_many

if TYPE_CHECKING:
    from treadle.graph.graph import Entry
    from treadle.patterns.outlier.rule import OutlierRule

Overflow: TypeAlias = "tuple[OutlierRule, list[Raw]]"


def split_arrays(entry: Entry[Any], raws: Sequence[Raw]) -> list[Overflow]:
    """Cut the arrays of new documents to their embedded part; what overflows, per array."""
    overflow = []
    for raw in raws:
        for rule in entry.all_outliers:
            made, _ = rule.split(raw)
            if made:
                overflow.append((rule, made))
    return overflow


def insert_overflow(overflow: Sequence[Overflow]) -> Plan[None]:
    """Insert what the arrays of new documents overflow by, one command per array."""
    by_rule: dict[OutlierRule, list[Raw]] = {}
    for rule, made in overflow:
        by_rule.setdefault(rule, []).extend(made)
    for rule, documents in by_rule.items():
        yield from insert_many(rule.collection, documents)


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
