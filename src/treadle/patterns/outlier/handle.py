"""The calls on one outlier array.

Reads take the embedded part first, then the overflow, each item once. They
are meant to be run at one moment: in a snapshot, or in the caller's own
transaction. Where the server has no snapshots, `moves` tells whether items
changed their place between two reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

from pymongo.errors import OperationFailure

from treadle.engine.write_path import WritePath
from treadle.errors import DataError, UsageError
from treadle.patterns.outlier.fields import OutlierFields
from treadle.patterns.outlier.item_bytes import cut
from treadle.patterns.outlier.parts import ARRAY_PAGES_MAX
from treadle.patterns.outlier.writes import ArrayWork, Extend, Remove
from treadle.plan import Plan, Raw, aggregate, by_id, find, find_one, server_facts, wait
from treadle.plan.server_errors import SNAPSHOT_TOO_OLD, SNAPSHOT_UNAVAILABLE

# Items at a time where each is a document.
ARRAY_DOCUMENTS_MAX = 1_000
# Size= of page().
ARRAY_PAGE_MAX = 100_000
# Attempts to read a collection that was made just now.
ARRAY_ATTEMPTS_MAX = 50
# The pause between two.
ARRAY_PAUSE_SECONDS = 0.02

P = ParamSpec("P")
R = TypeVar("R")


def steadily(read: Callable[Concatenate[Any, P], Plan[R]]) -> Callable[Concatenate[Any, P], Plan[R]]:
    """Let a read run again where its collection was made just now, so that no snapshot holds it yet."""

    @functools.wraps(read)
    def plan(self: Any, /, *arguments: P.args, **options: P.kwargs) -> Plan[R]:
        for _ in range(ARRAY_ATTEMPTS_MAX - 1):
            try:
                return (yield from read(self, *arguments, **options))
            except OperationFailure as error:
                if error.code == SNAPSHOT_TOO_OLD:
                    raise DataError(
                        f"the reading of {self.rule.place.label} took longer than the server keeps a "
                        "snapshot; begin again, or read page by page",
                        code="snapshot-too-old",
                    ) from error
                if error.code != SNAPSHOT_UNAVAILABLE:
                    raise
            yield from wait(ARRAY_PAUSE_SECONDS)
        return (yield from read(self, *arguments, **options))

    return plan


class ArrayHandle:
    """The array of one document."""

    def __init__(self, rule: OutlierFields, write_path: WritePath, key: Any) -> None:
        self.rule = rule
        self.key = key
        self.ignored = 0
        self._write_path = write_path
        self._array: Raw = {"$cond": [{"$isArray": f"${rule.path}"}, f"${rule.path}", []]}
        # The last page that was met, so that the next addition need not try without overflow.
        self._last: int | None = None

    # -- writing -------------------------------------------------------------------------------------

    def extend(self, items: Iterable[Any]) -> Plan[int]:
        """Add items at the end; how many were added."""
        total, limits = 0, self.rule.limits
        for part in cut(self.rule.dump(list(items)), limits.array_extend_max, limits.array_bytes_max):
            work = Extend(self.rule, self.key, part, self._last)
            added = yield from self._write(work)
            self._last = work.last
            total += sum(added)
            self.ignored += len(added) - sum(added)
        return total

    def remove(self, item: Any) -> Plan[int]:
        """Remove every occurrence of an item; how many there were."""
        return (yield from self._write(Remove(self.rule, self.key, self.rule.dump([item])[0])))

    def _write(self, work: ArrayWork[R]) -> Plan[R]:
        # First, because it refuses a server where overflow cannot be kept.
        yield from server_facts()
        yield from self._write_path.index_check.require([self.rule.target])
        if self._last is None:
            done: R | None = yield from work.quick()
            if done is not None:
                return done
        return (yield from self._write_path.execute(work))

    # -- reading -------------------------------------------------------------------------------------

    def _owner(self, **fields: Any) -> Plan[Raw]:
        """What is asked for of the owner, with its state."""
        rule = self.rule
        state = dict.fromkeys([rule.state, *rule.beside], 1)
        rows = yield from rule.owners.group(
            by_id(self.key), [{"$project": {**state, **fields}}], reads=rule.projection()
        )
        if not rows:
            raise rule.missing(self.key)
        return rows[0]

    @steadily
    def count(self) -> Plan[int]:
        """How many items there are."""
        rule = self.rule
        owner = yield from self._owner(n={"$size": self._array})
        stored = rule.value(owner, rule.count_path)
        if isinstance(stored, int):
            return stored
        # An older document, that nobody has counted yet.
        items: Any = {"$size": f"${rule.field}"} if rule.form == "page" else 1
        stages = [{"$match": rule.owned(self.key)}, {"$group": {"_id": None, "n": {"$sum": items}}}]
        rows = yield from aggregate(rule.overflow_collection, stages)
        return sum(int(row["n"]) for row in [owner, *rows])

    @steadily
    def contains(self, item: Any) -> Plan[bool]:
        """Whether an item is there, embedded or not."""
        rule = self.rule
        (dumped,) = rule.dump([item])
        owner = yield from self._owner(embedded={"$in": [{"$literal": dumped}, self._array]})
        if owner["embedded"] or not rule.flagged(owner):
            return bool(owner["embedded"])
        held = {**rule.owned(self.key), rule.content: {"$eq": dumped}}
        return (yield from find_one(rule.overflow_collection, held, {"_id": 1})) is not None

    @steadily
    def page(self, number: int, size: int) -> Plan[list[Any]]:
        """The items of one page of the caller's own size, counted from 1."""
        for name, value, most in (("number", number, None), ("size", size, ARRAY_PAGE_MAX)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most and value > most):
                limit = f" to {most:,}" if most else ""
                raise UsageError(
                    f"page() has {name}={value!r}; it takes a whole number from 1{limit}", code="page-invalid"
                )
        start = (number - 1) * size
        part = {"$slice": [self._array, start, size]}
        owner = yield from self._owner(n={"$size": self._array}, part=part)
        items: list[Any] = owner["part"]
        if len(items) < size and self.rule.flagged(owner):
            items += yield from self._overflow(max(0, start - owner["n"]), size - len(items))
        return self.rule.load(items)

    def _overflow(self, skip: int, size: int) -> Plan[list[Any]]:
        """Items of the overflow, after `skip` of them; pages may be short."""
        rule, condition = self.rule, self.rule.owned(self.key)
        order = [(rule.order, 1)]
        if rule.form == "documents":
            rows = yield from find(
                rule.overflow_collection, condition, {rule.item: 1}, sort=order, skip=skip, limit=size
            )
            return [row[rule.item] for row in rows]
        keys: list[Any] = []
        begin = covered = 0
        for row in (
            yield from find(rule.overflow_collection, condition, {"page": 1, "count": 1}, sort=order)
        ):
            length = row.get("count", 0)
            if covered + length > skip and covered < skip + size:
                begin = begin if keys else skip - covered
                keys.append(row["_id"])
            covered += length
        pages = yield from find(rule.overflow_collection, {"_id": {"$in": keys}}, sort=order)
        items = [item for each in pages for item in rule.contents(each)]
        return items[begin : begin + size]

    def reader(self, snapshot: bool) -> ArrayReader:
        """What reads all items."""
        return ArrayReader(self.rule, self.key, snapshot)


class ArrayReader:
    """One pass over an array: what was read so far, and what comes next."""

    def __init__(self, rule: OutlierFields, key: Any, snapshot: bool) -> None:
        self.rule = rule
        self.key = key
        self._snapshot = snapshot
        self._moves: Any = None
        # The condition on the overflow that was not read yet; none before the embedded part was.
        self._rest: Raw = {}
        self.over = False

    @steadily
    def next(self) -> Plan[list[Any]]:
        """The next items."""
        rule = self.rule
        if not self._rest:
            # A migration may read any field of an outdated document.
            projection = None if rule.target.versions.may_change else rule.projection()
            images = yield from rule.owners.find(by_id(self.key), projection=projection)
            if not images:
                raise rule.missing(self.key)
            owner = images[0].document
            self._rest = rule.owned(self.key)
            self._moves = rule.value(owner, rule.moves_path)
            self.over = not rule.flagged(owner)
            return rule.load(rule.embedded(owner))
        many = ARRAY_PAGES_MAX if rule.form == "page" else ARRAY_DOCUMENTS_MAX
        pages = yield from find(rule.overflow_collection, self._rest, sort=[(rule.order, 1)], limit=many)
        items = [item for each in pages for item in rule.contents(each)]
        self.over = len(pages) < many
        if pages:
            self._rest = {**self._rest, rule.order: {"$gt": pages[-1][rule.order]}}
        if not self._snapshot:
            yield from self._check()
        return rule.load(items)

    def _check(self) -> Plan[None]:
        """Without a snapshot: refuse to go on where items may have been passed over."""
        rule = self.rule
        owner = yield from find_one(rule.target.collection, by_id(self.key), {rule.moves_path: 1})
        if owner is None or rule.value(owner, rule.moves_path) != self._moves:
            raise DataError(
                f"{rule.place.label} of {self.key!r} was rearranged while it was being read, and this "
                "server has no snapshots; begin again",
                code="array-moved",
            )
