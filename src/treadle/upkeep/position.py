"""The worker's place in the server's history, as it is kept in the database.

A row of `treadle.streams` holds the place (a resume token, or the operation
time at which to begin), the number of the lease that may move it, the rules
that have been built, and the collections whose backfill is pending (`owed`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from treadle.graph.rule import Pattern, Rule
from treadle.plan import Plan, Raw, update_one
from treadle.upkeep.change_stream import present_place

NAME = "worker"
COLLECTION = "treadle.streams"


def signature(rule: Rule) -> str:
    """A rule by its place and declaration: another declaration is another rule.

    So is one that copies other fields by the same words, because its card is
    another. The same in every process.
    """
    # One on a field; that of a class is known by what it maintains.
    marked = any(isinstance(mark, Pattern) for mark in rule.place.field.shape.metadata)
    declared = [rule.declared] if marked else []
    watched = {name: sorted(paths or ()) for name, paths in sorted(rule.reads().items())}
    aggregate = getattr(rule, "aggregate", None)
    copied = [getattr(aggregate, name, None) for name in ("fields", "card")]
    described = repr((declared, rule.target.collection, rule.path, watched, copied))
    return f"{rule.place.label}:{zlib.crc32(described.encode()):08x}"


def first_row() -> Plan[Raw]:
    """The row of a worker that has read nothing yet: it begins at the server's present place."""
    return {**(yield from present_place()), "rules": [], "owed": []}


def begin(name: str = NAME) -> Plan[None]:
    """Note the place in history from which the worker is to stream, unless it has one."""
    first = {**(yield from first_row()), "n": 0}
    yield from update_one(COLLECTION, {"_id": name}, {"$setOnInsert": first}, upsert=True)


def built(rules: Iterable[Rule], name: str = NAME) -> Plan[None]:
    """Note that rules were rebuilt, so that the worker need not do so when it begins.

    Only where no worker has led yet: one that does not know these rules may
    have read on past changes that concern them.
    """
    signatures = [signature(rule) for rule in rules if rule.maintain == "stream"]
    if signatures:
        pristine = {"_id": name, "n": 0}
        yield from update_one(COLLECTION, pristine, {"$addToSet": {"rules": {"$each": signatures}}})
