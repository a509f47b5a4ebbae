"""Repair of one outlier array: numbers are set, or all of its items are stored again.

Runs in a transaction that has written the owner before it read it whole, so
that plain `$push`es of other programs wait.
"""

from __future__ import annotations

from treadle.engine.sizes import count_fitting
from treadle.patterns.outlier.problems import CheckedArray, check_arrays
from treadle.patterns.outlier.stored_array import StoredArray, distinct
from treadle.plan import Plan, Raw, delete_many, insert_many


def repair_array(rule: StoredArray, owner: Raw) -> Plan[bool]:
    """Repair an array. Returns whether anything had to be changed.

    No item is lost; of repetitions under `unique=True` the first stays.
    """
    (checked,) = yield from check_arrays(rule, [owner])
    if any(problem.repacks for problem in checked.problems):
        return (yield from _repack(rule, checked))
    if checked.problems:
        count = len(rule.embedded(owner)) + checked.pages["items"]
        yield from rule.store_owner(owner["_id"], None, count, checked.pages["last"])
    return bool(checked.problems)


def _repack(rule: StoredArray, checked: CheckedArray) -> Plan[bool]:
    """Store all items again: as many as fit in the owner, the rest on full pages."""
    owner, overflow = checked.owner, rule.overflow
    key, embedded = owner["_id"], rule.embedded(owner)
    parts = [overflow.items_of(page) for page in (yield from overflow.read(key))]
    items = [*embedded, *(item for part in parts for item in part)]
    if rule.unique:
        items = distinct(items)
    # What is embedded already fits, however large it is.
    size = max(min(len(embedded), rule.limit), count_fitting(items, rule.limit, overflow.bytes_max))
    pages, last = overflow.pages(key, items[size:], None)
    is_damaged = any(problem.is_finding for problem in checked.problems)
    lengths = [len(overflow.items_of(page)) for page in pages]
    if not is_damaged and (size, lengths) == (len(embedded), list(map(len, parts))):
        # Items are so large that no fewer pages would do.
        return False
    yield from delete_many(overflow.collection_name, overflow.filter(key))
    if pages:
        yield from insert_many(overflow.collection_name, pages)
    yield from rule.store_owner(key, items[:size], len(items), last)
    return True
