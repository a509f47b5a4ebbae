"""Reads of outlier arrays: the embedded part first, then the overflow, each item once.

They are meant to be run at one moment: in a snapshot, or in the caller's own
transaction. Where the server has no snapshots, `moves` tells whether items
changed their place between two reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pymongo.errors import OperationFailure

from treadle.errors import DataError, UsageError
from treadle.graph.pattern import Entry
from treadle.patterns.outlier.fields import OutlierFields
from treadle.patterns.outlier.move import missing, owned
from treadle.plan import Plan, Raw, aggregate, by_id, find, find_one, wait
from treadle.plan.capabilities import Capabilities
from treadle.plan.server_errors import SNAPSHOT_TOO_OLD, SNAPSHOT_UNAVAILABLE

R = TypeVar("R")

# How many overflow documents an iteration reads at once.
SNAPSHOTS_SINCE = (5, 0)


def rule_named(entry: Entry[Any], field: str) -> OutlierFields:
    """The outlier array that a caller named by its Python path."""
    for rule in entry.having(OutlierFields):
        if field == rule.python_path:
            return rule
    known = ", ".join(repr(rule.python_path) for rule in entry.having(OutlierFields)) or "none"
    raise UsageError(
        f"{entry.model.__name__} has no outlier array {field!r}; it has {known}: declare it as "
        "Annotated[list[…], Outlier(limit=…, overflow=…)]",
        code="array-unknown",
    )


def has_snapshots(server: Capabilities) -> bool:
    return server.version >= SNAPSHOTS_SINCE


def steadily(rule: OutlierFields, make: Callable[[], Plan[R]]) -> Plan[R]:
    """Run a read again where its collection was made just now, so that no snapshot holds it yet."""
    for _ in range(rule.target.limits.array_attempts_max - 1):
        try:
            return (yield from make())
        except OperationFailure as error:
            if error.code == SNAPSHOT_TOO_OLD:
                raise DataError(
                    f"the reading of {rule.place.label} took longer than the server keeps a snapshot; "
                    "begin again, or read page by page",
                    code="snapshot-too-old",
                ) from error
            if error.code != SNAPSHOT_UNAVAILABLE:
                raise
        yield from wait(rule.target.limits.array_pause_seconds)
    return (yield from make())


def _array(rule: OutlierFields) -> Raw:
    return {"$cond": [{"$isArray": f"${rule.path}"}, f"${rule.path}", []]}


def _owner(rule: OutlierFields, key: Any, **shown: Any) -> Plan[Raw]:
    """What is asked for of an owner, with its state."""
    state = dict.fromkeys([rule.state, *([rule.flag_path] if rule.flag_path else [])], 1)
    if rule.names_count:
        state[rule.count_path] = 1
    found = yield from aggregate(
        rule.target.collection, [{"$match": by_id(key)}, {"$project": {**state, **shown}}]
    )
    if not found:
        raise missing(rule, key)
    return found[0]


def count(rule: OutlierFields, key: Any) -> Plan[int]:
    """How many items there are."""
    owner = yield from _owner(rule, key, n={"$size": _array(rule)})
    stored = rule.value(owner, rule.count_path)
    if isinstance(stored, int):
        return stored
    # An older document, that nobody has counted yet.
    items: Any = {"$size": f"${rule.field}"} if rule.layout == "page" else 1
    rows = yield from aggregate(
        rule.collection, [{"$match": owned(rule, key)}, {"$group": {"_id": None, "n": {"$sum": items}}}]
    )
    return int(owner["n"]) + (int(rows[0]["n"]) if rows else 0)


def contains(rule: OutlierFields, key: Any, item: Any) -> Plan[bool]:
    """Whether an item is there, embedded or not."""
    owner = yield from _owner(rule, key, found={"$in": [{"$literal": item}, _array(rule)]})
    if owner["found"] or not rule.flagged(owner):
        return bool(owner["found"])
    held = {**owned(rule, key), rule.content: {"$eq": item}}
    return (yield from find_one(rule.collection, held, {"_id": 1})) is not None


def page(rule: OutlierFields, key: Any, number: int, size: int) -> Plan[list[Any]]:
    """The items of one page of the caller's own size, counted from 1."""
    start = (number - 1) * size
    part = {"$slice": [_array(rule), start, size]}
    owner = yield from _owner(rule, key, n={"$size": _array(rule)}, part=part)
    items: list[Any] = owner["part"]
    if len(items) == size or not rule.flagged(owner):
        return items
    skip = max(0, start - owner["n"])
    return [*items, *(yield from _overflow(rule, key, skip, size - len(items)))]


def check_page(rule: OutlierFields, number: int, size: int) -> None:
    """Refuse what is no page."""
    size_max = rule.target.limits.array_page_max
    for name, value, most in (("number", number, None), ("size", size, size_max)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most and value > most):
            limit = f" to {most:,}" if most else ""
            raise UsageError(
                f"page() has {name}={value!r}; it takes a whole number from 1{limit}", code="page-invalid"
            )


def _overflow(rule: OutlierFields, key: Any, skip: int, size: int) -> Plan[list[Any]]:
    """Items of the overflow, after `skip` of them; pages may be short."""
    condition = owned(rule, key)
    if rule.layout == "documents":
        rows = yield from find(
            rule.collection, condition, {rule.item: 1}, sort=[("position", 1)], skip=skip, limit=size
        )
        return [row[rule.item] for row in rows]
    numbers = []
    first: int | None = None
    covered = 0
    for row in (yield from find(rule.collection, condition, {"page": 1, "count": 1}, sort=[("page", 1)])):
        length = row.get("count", 0)
        if covered + length > skip and covered < skip + size:
            first = covered if first is None else first
            numbers.append(row["_id"])
        covered += length
    pages = yield from find(rule.collection, {"_id": {"$in": numbers}}, sort=[("page", 1)])
    items = [item for each in pages for item in rule.contents(each)]
    begin = skip - (first or 0)
    return items[begin : begin + size]


class Walk:
    """An iteration: what was read so far, and what comes next."""

    def __init__(self, rule: OutlierFields, key: Any, steady: bool) -> None:
        self._rule = rule
        self._key = key
        # Whether all reads see one moment.
        self._steady = steady
        self._moves: Any = None
        self._begun = False
        self._last: Any = None
        self.over = False

    def next(self) -> Plan[list[Any]]:
        """The next items; none, and `over`, at the end."""
        rule = self._rule
        if not self._begun:
            owner = yield from find_one(rule.target.collection, by_id(self._key), rule.projection())
            if owner is None:
                raise missing(rule, self._key)
            self._begun = True
            self._moves = rule.value(owner, rule.moves_path)
            self.over = not rule.flagged(owner)
            return rule.embedded(owner)
        limits = rule.target.limits
        many = limits.array_pages_max if rule.layout == "page" else limits.array_documents_max
        condition = owned(rule, self._key)
        if self._last is not None:
            condition[rule.order] = {"$gt": self._last}
        pages = yield from find(rule.collection, condition, sort=[(rule.order, 1)], limit=many)
        items = [item for each in pages for item in rule.contents(each)]
        self.over = len(pages) < many
        if pages:
            self._last = pages[-1][rule.order]
        if not self._steady:
            yield from self._check()
        return items

    def _check(self) -> Plan[None]:
        """Without a snapshot: refuse to go on where items may have been passed over."""
        rule = self._rule
        owner = yield from find_one(rule.target.collection, by_id(self._key), {rule.moves_path: 1})
        if owner is None or rule.value(owner, rule.moves_path) != self._moves:
            raise DataError(
                f"{rule.place.label} of {self._key!r} was rearranged while it was being read, and this "
                "server has no snapshots; begin again",
                code="array-moved",
            )
