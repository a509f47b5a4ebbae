"""Writes of outlier arrays: one update where there is no overflow, else a transaction.

Rules:

1. Whatever changes the overflow writes the owner in the same transaction, so
   that two writers of one array conflict and one of them starts again. Appends
   write it first: new pages never collide by number.
2. An owner without overflow takes items by one update, whose own filter says
   that there is room; checking first and pushing later would overshoot.
3. New items go to the end. As long as there is overflow, that is the overflow,
   also where the embedded part has room again, so that the order stays.
4. An owner that lacks what is maintained is repaired first, so that writers
   can continue while old data is adopted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import compress
from typing import Any, TypeVar

from treadle.engine.documents import stamping, translated
from treadle.engine.references import follow_own
from treadle.engine.sizes import bson_size_bound
from treadle.engine.version_upgrade import upgrade_stored
from treadle.graph.changes import Changes
from treadle.graph.rule import REVISION
from treadle.graph.write import CommitNeeded, Write
from treadle.patterns.outlier.overflow_format import without
from treadle.patterns.outlier.problems import is_consistent
from treadle.patterns.outlier.repack import repair_array
from treadle.patterns.outlier.stored_array import StoredArray, is_first_occurrence
from treadle.plan import Plan, Raw, by_id, find_one, find_one_and_update, update_one
from treadle.query.paths import value_at

R = TypeVar("R")
BUMP: Raw = {"$inc": {REVISION: 1}}


class ArrayWrite(Write[R]):
    """One write of the array of one document.

    `last` is the number of the last page as far as the caller knows it; None where there is no overflow.
    """

    shows_document = False

    def __init__(self, rule: StoredArray, key: Any, last: int | None = None) -> None:
        self.rule = rule
        self.entry = rule.target
        self.key = key
        self.last = last
        versions = self.entry.versions
        # In an older version the array may have another name, or another form.
        self.current_only = versions.current_only if versions.is_versioned else {}

    def change(self) -> Plan[Any]:
        """Perform the write in a transaction; nothing else follows from it."""
        raise NotImplementedError  # pragma: no cover

    def apply(self, changes: Changes) -> Plan[Any]:
        entry, before = self.entry, None
        if self.rule.is_followed or entry.versions.is_versioned:
            before = yield from find_one(entry.collection, by_id(self.key))
        if before is None or not (self.rule.is_followed or entry.versions.is_outdated(before)):
            return (yield from self.change())
        (before,) = yield from upgrade_stored(entry, [before], changes)
        outcome = yield from self.change()
        after = yield from find_one(entry.collection, by_id(self.key))
        if after is not None:
            (after,) = yield from follow_own(entry, [(before, after)])
            yield from changes.add(entry, [(before, after)])
        return outcome

    def _repair(self) -> Plan[bool]:
        """Repair the array. Returns whether anything had to be changed."""
        collection, projection = self.entry.collection, self.rule.projection()
        # Written before it is read, so that plain `$push`es of other programs wait.
        owner = yield from find_one_and_update(collection, by_id(self.key), BUMP, projection=projection)
        return owner is not None and (yield from repair_array(self.rule, owner))

    def _owner(self, *, hold: bool = False) -> Plan[Raw]:
        """Return the owner, repaired if it has to be; `hold` writes it, so that no other writer continues."""
        rule, collection = self.rule, self.entry.collection
        projection, chosen = rule.short_projection(), by_id(self.key)
        reading = (
            find_one_and_update(collection, chosen, BUMP, projection=projection)
            if hold
            else find_one(collection, chosen, projection)
        )
        owner = yield from reading
        if owner is not None and not is_consistent(rule, owner):
            yield from self._repair()
            owner = yield from find_one(collection, chosen, projection)
        if owner is None:
            raise rule.missing(self.key)
        return owner


def holds(item: Any) -> Raw:
    """Return the condition that an array holds an item, itself and not one of its parts."""
    return {"$elemMatch": {"$eq": item}}


class Extend(ArrayWrite[list[bool]]):
    """Items at the end of an array; for each whether it was added. `last` is right afterwards."""

    def __init__(self, rule: StoredArray, key: Any, items: Sequence[Any], last: int | None = None) -> None:
        super().__init__(rule, key, last)
        self.items = list(items)

    # -- several as one ------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return len(self.items)

    @cached_property
    def bytes(self) -> int:
        """At most so many bytes the items take."""
        return sum(map(bson_size_bound, self.items))

    def merges(self, other: Write[Any]) -> bool:
        if not isinstance(other, Extend) or other.rule is not self.rule or other.key != self.key:
            return False
        limits = self.rule.limits
        items, size = self.size + other.size, self.bytes + other.bytes
        return items <= limits.array_extend_max and size <= limits.array_bytes_max

    def merged(self, other: Extend) -> Extend:
        both = Extend(self.rule, self.key, [*self.items, *other.items], self.last)
        both.bytes = self.bytes + other.bytes
        return both

    def shares(self, parts: Sequence[Write[Any]], outcome: Any) -> list[Any]:
        for part in parts:
            if isinstance(part, Extend):
                part.last = self.last
        return super().shares(parts, outcome)

    # -- without overflow ------------------------------------------------------------------------

    def command(self) -> Plan[list[bool]] | None:
        fits = self.size == 1 or (self.size <= self.rule.limit and not self.rule.unique)
        return self._push() if fits and self.last is None and not self.rule.is_followed else None

    def _push(self) -> Plan[list[bool]]:
        rule, entry = self.rule, self.entry
        condition = {**by_id(self.key), **self.current_only, **rule.no_overflow_filter()}
        condition[f"{rule.path}.{rule.limit - self.size}"] = {"$exists": False}
        if rule.unique:
            condition[rule.path] = {**condition[rule.path], "$not": holds(self.items[0])}
        push = {"$push": {rule.path: {"$each": self.items}}, "$inc": {rule.count_path: self.size}}
        with translated(entry.model.__name__):
            result = yield from update_one(entry.collection, condition, stamping(entry, push))
        if not result.matched_count:
            raise CommitNeeded
        return [True] * self.size

    # -- in a transaction --------------------------------------------------------------------------

    def change(self) -> Plan[list[bool]]:
        with translated(self.entry.model.__name__):
            if self.rule.unique and self.size > 1:
                return (yield from self._extend())
            added = yield from self._append_to_overflow()
            return (yield from self._extend()) if added is None else [added] * self.size

    def _append_to_overflow(self) -> Plan[bool | None]:
        """Add all items to the overflow; None where there is none, or the owner must be looked at."""
        rule = self.rule
        if rule.unique and (yield from rule.overflow.contains(self.key, self.items[0])):
            return False
        before = yield from self._count_items()
        if before is None:
            return None
        self.last = yield from rule.overflow.append(self.key, self.items, before)
        if self.last != before and not self._numbers_items:
            update = {"$set": {rule.last_path: self.last}}
            yield from update_one(self.entry.collection, by_id(self.key), update)
        return True

    @property
    def _numbers_items(self) -> bool:
        """Whether each item has a page of its own, so that the last number grows with the count."""
        return self.rule.overflow.page_size == 1

    def _count_items(self) -> Plan[int | None]:
        """Add to the count of an owner with overflow. Returns the number of the last page before."""
        rule, collection = self.rule, self.entry.collection
        condition = {**by_id(self.key), **self.current_only, rule.count_path: {"$type": "number"}}
        if rule.unique:
            condition[rule.path] = {"$not": holds(self.items[0])}
        added = {rule.count_path: self.size, **({rule.last_path: self.size} if self._numbers_items else {})}
        update = stamping(self.entry, {"$inc": added})
        if self.last is not None:
            # An update is cheaper than one that returns the document.
            expected = {**condition, rule.last_path: self.last}
            if (yield from update_one(collection, expected, update)).matched_count:
                return self.last
        condition[rule.last_path] = {"$exists": True}
        owner = yield from find_one_and_update(
            collection, condition, update, after=False, projection={rule.last_path: 1}
        )
        return None if owner is None else int(value_at(owner, rule.last_path))

    def _extend(self) -> Plan[list[bool]]:
        """Add those items that may be added, to the embedded part as long as there is no overflow."""
        rule = self.rule
        owner = yield from self._owner(hold=True)
        embedded, self.last = rule.embedded(owner), value_at(owner, rule.last_path)
        added = yield from self._are_new(embedded)
        new = list(compress(self.items, added))
        room = max(0, rule.limit - len(embedded)) if self.last is None else 0
        if new[room:]:
            self.last = yield from rule.overflow.append(self.key, new[room:], self.last)
        if new:
            count = value_at(owner, rule.count_path) + len(new)
            whole = [*embedded, *new[:room]] if room else None
            yield from rule.store_owner(self.key, whole, count, self.last, stamped=True)
        return added

    def _are_new(self, embedded: Sequence[Any]) -> Plan[list[bool]]:
        if not self.rule.unique:
            return [True] * self.size
        stored = list(embedded)
        if self.last is not None:
            stored += yield from self.rule.overflow.find_items(self.key, self.items)
        return is_first_occurrence(self.items, stored)


class Remove(ArrayWrite[int]):
    """Every occurrence of an item removed; their number."""

    def __init__(self, rule: StoredArray, key: Any, item: Any, last: int | None = None) -> None:
        super().__init__(rule, key, last)
        self.item = item

    def command(self) -> Plan[int] | None:
        return self._pull() if self.last is None and not self.rule.is_followed else None

    def _pull(self) -> Plan[int]:
        """Remove from an owner without overflow."""
        rule, entry = self.rule, self.entry
        condition = {**by_id(self.key), **self.current_only, **rule.no_overflow_filter()}
        condition[rule.path] = {**condition[rule.path], **holds(self.item)}
        is_other = {"$ne": ["$$this", {"$literal": self.item}]}
        others = {"$filter": {"input": f"${rule.path}", "cond": is_other}}
        update: list[Raw] = [
            {"$set": {rule.path: others}},
            {"$set": {rule.count_path: {"$size": f"${rule.path}"}}},
        ]
        before = yield from find_one_and_update(
            entry.collection, condition, stamping(entry, update), after=False, projection={rule.path: 1}
        )
        if before is None:
            raise CommitNeeded
        embedded = rule.embedded(before)
        return len(embedded) - len(without(embedded, self.item))

    def change(self) -> Plan[int]:
        rule = self.rule
        with translated(self.entry.model.__name__):
            owner = yield from self._owner()
            embedded, last = rule.embedded(owner), value_at(owner, rule.last_path)
            others = without(embedded, self.item)
            removed = len(embedded) - len(others)
            if last is not None:
                removed += yield from rule.overflow.remove(self.key, self.item)
            if removed:
                count = value_at(owner, rule.count_path) - removed
                # Without overflow there is no last page.
                last = None if count == len(others) else last
                changed = others if len(others) < len(embedded) else None
                yield from rule.store_owner(self.key, changed, count, last, stamped=True)
        return removed


class Repair(ArrayWrite[bool]):
    """An array repaired; whether anything had to be changed."""

    def change(self) -> Plan[bool]:
        return self._repair()
