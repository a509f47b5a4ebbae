"""The worker's place in the server's history, as it is kept in the database.

A row of `treadle.streams` holds the place (a resume token, or the operation
time at which to begin), the number of the lease that may move it, the rules
that have been built, and what still has to be gone over.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from treadle.graph.pattern import Pattern, Rule
from treadle.plan import Plan, Raw, database_command, update_one

NAME = "worker"
COLLECTION = "treadle.streams"


def signature(rule: Rule) -> str:
    """A rule by its place and declaration: another declaration is another rule.

    So is one that copies other fields by the same words, because its card is
    another. The same in every process.
    """
    declared = [mark for mark in rule.place.field.shape.metadata if isinstance(mark, Pattern)]
    watched = {name: sorted(paths or ()) for name, paths in sorted(rule.watches().items())}
    copied = [getattr(rule, name, None) for name in ("copied", "card")]
    described = repr((declared, rule.target.collection, rule.path, watched, copied))
    return f"{rule.place.label}:{zlib.crc32(described.encode()):08x}"


def resume(position: Raw) -> Raw:
    """The change stream's option for where to begin."""
    if position.get("token") is not None:
        return {"startAfter": position["token"]}
    return {"startAtOperationTime": position["start"]}


def operation_time() -> Plan[Any]:
    """The server's present place in its history."""
    return (yield from database_command({"ping": 1}, writes=False))["operationTime"]


def begin(name: str = NAME) -> Plan[None]:
    """Note the place in history from which the worker is to stream, unless it has one."""
    first = {
        "start": (yield from operation_time()),
        "token": None,
        "rules": [],
        "owed": [],
        "ledgers": [],
        "n": 0,
    }
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
