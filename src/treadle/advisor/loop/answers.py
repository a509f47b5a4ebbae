"""Whether two answers are the same: by meaning, as a reader takes them.

Null equals missing, numbers compare by value, sums and averages up to the
last digits of a float. Order counts where the request asks for one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import bson
from bson import Decimal128
from bson.errors import BSONError

Row = Mapping[str, Any]
RESERVED = "_treadle"
# How far two floats may be apart that were added up in another order.
TOLERANCE = 1e-9


def at(row: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for name in path.split("."):
        if not isinstance(row, Mapping):
            return None
        row = row.get(name)
    return row


def without(row: Row, *paths: str) -> dict[str, Any]:
    """The row without some of its fields, and without what Treadle keeps for itself."""
    result = {name: value for name, value in row.items() if name != RESERVED}
    for path in paths:
        top, _, rest = path.partition(".")
        if not rest:
            result.pop(top, None)
        elif isinstance(result.get(top), Mapping):
            result[top] = without(result[top], rest)
    return result


def same(first: Any, second: Any) -> bool:
    """Whether two values mean the same."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        names = {*first, *second}
        return all(same(first.get(name), second.get(name)) for name in names)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    one, other = _number(first), _number(second)
    if one is not None and other is not None:
        return one == other or _close(one, other)
    # To Python, true is 1.
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)


def _number(value: Any) -> float | Decimal | int | None:
    if isinstance(value, Decimal128):
        return value.to_decimal()
    return value if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) else None


def _close(one: float | Decimal, other: float | Decimal) -> bool:
    if isinstance(one, int) and isinstance(other, int):
        return False
    left, right = float(one), float(other)
    # What is not a number is not even equal to itself.
    both_nan = math.isnan(left) and math.isnan(right)
    return both_nan or math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_rows(first: Sequence[Any], second: Sequence[Any], ordered: bool) -> bool:
    """Whether two answers hold the same rows, in the same order where there is one."""
    if len(first) != len(second):
        return False
    if all(map(same, first, second)):
        return True
    if ordered:
        return False
    left, right = sorted(first, key=frozen), sorted(second, key=frozen)
    return all(map(same, left, right))


def same_first(
    first: Sequence[Row], second: Sequence[Row], sort: Iterable[str], keys: Sequence[Any] | None = None
) -> bool:
    """Whether two sorted answers agree; of documents that are equal in the sort, either may be shown.

    `keys` are the sort's values in the second one, where the first does not show them.
    """
    if len(first) != len(second):
        return False
    paths = list(sort)
    left, right = (
        [[at(row, path) for path in paths] for row in rows] if keys is None else keys
        for rows in (first, second)
    )
    if not same(left, right):
        return False
    last = left[-1] if left else None
    groups: list[tuple[list[Row], list[Row]]] = []
    for number, key in enumerate(left):
        if number == 0 or not same(key, left[number - 1]):
            groups.append(([], []))
        groups[-1][0].append(first[number])
        groups[-1][1].append(second[number])
    # Of the last ones that are equal in the sort, others may have been cut off.
    tied = groups.pop() if groups and last is not None else ([], [])
    if not all(same_rows(one, other, ordered=False) for one, other in groups):
        return False
    ids = [[row.get("_id") for row in rows] for rows in tied]
    return same_rows(*tied, ordered=False) or not same(*(sorted(each, key=frozen) for each in ids))


def same_sorted(first: Sequence[Row], second: Sequence[Row], sort: Iterable[str], cut: bool) -> bool:
    """Whether two answers to one sorted read agree; where it is `cut`, others that tie may come last."""
    if same_rows(first, second, ordered=True):
        return True
    paths = list(sort)
    # Which of them tie cannot be told by what the rows do not show.
    if not all(any(at(row, path) is not None for row in first) for path in paths):
        return False
    return same_first(first, second, paths) and (cut or same_rows(first, second, ordered=False))


def same_piped(first: Sequence[Row], second: Sequence[Row], pipeline: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two answers to one pipeline agree, in the order of its last `$sort` where it has one."""
    sorts = [stage["$sort"] for stage in pipeline if "$sort" in stage]
    if not sorts:
        return same_rows(first, second, ordered=False)
    return same_sorted(first, second, sorts[-1], cut=any("$limit" in stage for stage in pipeline))


def same_embedded(
    rows: Sequence[Row],
    items: Sequence[Any],
    fields: Sequence[str],
    shown: Iterable[str],
    sort: list[str],
) -> bool:
    """Whether embedded items are what a sorted read shows; `fields` are those that an item holds."""
    paths = list(shown)
    one = [{path: at(row, path) for path in paths} for row in rows]
    other = [{path: at(item, path) for path in paths} for item in items]
    if set(sort) <= set(paths):
        return same_first(one, other, sort)
    if set(sort) <= set(fields):
        return same_first(one, other, [], [[at(item, path) for path in sort] for item in items])
    return same_rows(one, other, ordered=True)


def frozen(value: Any) -> bytes:
    """A key to sort rows by, whatever they hold."""
    try:
        return bson.encode({"": _ordered(value)})
    except (BSONError, OverflowError, TypeError):
        return repr(value).encode()


def _ordered(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _ordered(value[name]) for name in sorted(value) if value[name] is not None}
    if isinstance(value, (list, tuple)):
        return [_ordered(each) for each in value]
    return value
