"""The calls on one outlier array.

Reads take the embedded part first, then the overflow, each item once. They run
at one moment: in a snapshot, or in the caller's own transaction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

from pymongo.errors import OperationFailure

from treadle.engine.sizes import cut
from treadle.engine.write_path import WritePath
from treadle.errors import DataError, UsageError
from treadle.patterns.outlier.overflow_format import array_expression
from treadle.patterns.outlier.problems import count_overflow
from treadle.patterns.outlier.stored_array import StoredArray
from treadle.patterns.outlier.writes import Extend, Remove
from treadle.plan import Plan, Raw, by_id, server_facts, wait
from treadle.plan.server_errors import SNAPSHOT_TOO_OLD, SNAPSHOT_UNAVAILABLE
from treadle.query.paths import value_at

# The largest page that page() gives.
ARRAY_PAGE_MAX = 100_000
# Attempts to read a collection that was made just now.
ARRAY_ATTEMPTS_MAX = 50
# The pause between two.
ARRAY_PAUSE_SECONDS = 0.02

P = ParamSpec("P")
R = TypeVar("R")


def in_snapshot(read: Callable[Concatenate[Any, P], Plan[R]]) -> Callable[Concatenate[Any, P], Plan[R]]:
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

    def __init__(self, rule: StoredArray, write_path: WritePath, key: Any) -> None:
        self.rule = rule
        self.key = key
        self.ignored = 0
        self._write_path = write_path
        self._array = array_expression(rule.path)
        # The number of the last page when this handle wrote last; None where there was no overflow.
        self._last: int | None = None

    # -- writes --------------------------------------------------------------------------------

    def extend(self, items: Iterable[Any]) -> Plan[int]:
        """Add items at the end. Returns the number of those added."""
        total, limits = 0, self.rule.limits
        # First, because it refuses a server where overflow cannot be kept.
        yield from server_facts()
        for part in cut(self.rule.dump(list(items)), limits.array_extend_max, limits.array_bytes_max):
            write = Extend(self.rule, self.key, part, self._last)
            added = yield from self._write_path.execute(write)
            self._last = write.last
            total += sum(added)
            self.ignored += len(added) - sum(added)
        return total

    def remove(self, item: Any) -> Plan[int]:
        """Remove every occurrence of an item. Returns their number."""
        (dumped,) = self.rule.dump([item])
        yield from server_facts()
        return (yield from self._write_path.execute(Remove(self.rule, self.key, dumped, self._last)))

    # -- reads ---------------------------------------------------------------------------------

    def _owner(self, **fields: Any) -> Plan[Raw]:
        """Return these expressions of the owner, with its state."""
        rule = self.rule
        state = dict.fromkeys([rule.state_path, *rule.beside], 1)
        rows = yield from rule.owners.group(
            by_id(self.key), [{"$project": {**state, **fields}}], reads=rule.projection()
        )
        if not rows:
            raise rule.missing(self.key)
        return rows[0]

    @in_snapshot
    def count(self) -> Plan[int]:
        """Return the number of items."""
        owner = yield from self._owner(n={"$size": self._array})
        stored = value_at(owner, self.rule.count_path)
        if isinstance(stored, int):
            return stored
        # A document from before the declaration.
        return int(owner["n"]) + (yield from count_overflow(self.rule, self.key))

    @in_snapshot
    def contains(self, item: Any) -> Plan[bool]:
        """Whether an item is embedded or in the overflow."""
        rule = self.rule
        (dumped,) = rule.dump([item])
        owner = yield from self._owner(embedded={"$in": [{"$literal": dumped}, self._array]})
        if owner["embedded"] or not rule.has_overflow(owner):
            return bool(owner["embedded"])
        return (yield from rule.overflow.contains(self.key, dumped))

    @in_snapshot
    def page(self, number: int, size: int) -> Plan[list[Any]]:
        """Return the items of one page of the caller's own size, counted from 1."""
        _check_page("number", number)
        _check_page("size", size, ARRAY_PAGE_MAX)
        rule, start = self.rule, (number - 1) * size
        part = {"$slice": [self._array, start, size]}
        owner = yield from self._owner(n={"$size": self._array}, part=part)
        items: list[Any] = owner["part"]
        if len(items) < size and rule.has_overflow(owner):
            skip = max(0, start - owner["n"])
            items += yield from rule.overflow.read_slice(self.key, skip, size - len(items))
        return rule.load(items)

    def reader(self) -> ArrayReader:
        """Return what reads all items."""
        return ArrayReader(self.rule, self.key)


def _check_page(name: str, value: Any, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most and value > most):
        limit = f" to {most:,}" if most else ""
        raise UsageError(
            f"page() has {name}={value!r}; it takes a whole number from 1{limit}", code="page-invalid"
        )


class ArrayReader:
    """One pass over an array."""

    def __init__(self, rule: StoredArray, key: Any) -> None:
        self.rule = rule
        self.key = key
        # Whether all items have been read.
        self.over = False
        self._has_begun = False
        # The number of the page that was read last.
        self._last: int | None = None

    @in_snapshot
    def next(self) -> Plan[list[Any]]:
        """Return the next items."""
        rule = self.rule
        if not self._has_begun:
            return rule.load((yield from self._begin()))
        overflow = rule.overflow
        pages = yield from overflow.read(self.key, self._last, overflow.pages_read)
        self.over = len(pages) < overflow.pages_read
        items = [item for page in pages for item in overflow.items_of(page)]
        self._last = pages[-1][overflow.order] if pages else None
        return rule.load(items)

    def _begin(self) -> Plan[list[Any]]:
        """Return the embedded items."""
        rule = self.rule
        # A migration may read any field of an outdated document.
        projection = None if rule.target.versions.may_change else rule.projection()
        images = yield from rule.owners.find(by_id(self.key), projection=projection)
        if not images:
            raise rule.missing(self.key)
        owner = images[0].document
        self._has_begun, self.over = True, not rule.has_overflow(owner)
        return rule.embedded(owner)
