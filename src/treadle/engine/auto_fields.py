"""What a caller's own write stamps on its document: dates by the server's clock, and revisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.engine import crud
from treadle.engine.pipelines import derivation
from treadle.errors import Conflict, TreadleError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.owned import Touch
from treadle.plan import Plan, Raw, Update, find_one, outside
from treadle.plan.capabilities import clock
from treadle.query.paths import put, value_at


def touches_of(entry: ModelEntry[Any], *, new: bool) -> dict[str, Touch]:
    """The stored paths that a write of a model's documents stamps, and how."""
    return derivation(entry).touches[new]


def counted(entry: ModelEntry[Any]) -> dict[str, int]:
    """The revisions that any write of a document raises, as increments; dates are left as they are."""
    return {path: 1 for path, how in touches_of(entry, new=False).items() if how == "next"}


def stamp(entry: ModelEntry[Any], raws: Sequence[Raw], *, new: bool) -> Plan[None]:
    """Stamp documents that are about to be stored as wholes."""
    touched = touches_of(entry, new=new)
    if not touched:
        return
    # Outside of a transaction, which does not begin with such a command.
    now = (yield from outside(clock)) if "now" in touched.values() else None
    for raw in raws:
        for path, how in touched.items():
            put(raw, path, now if how == "now" else (value_at(raw, path) or 0) + 1)


def touching(entry: ModelEntry[Any], update: Update) -> Update:
    """An update that stamps what it writes."""
    touched = touches_of(entry, new=False)
    if not touched:
        return update
    if isinstance(update, Mapping):
        dates = {path: True for path, how in touched.items() if how == "now"}
        counts = {path: 1 for path, how in touched.items() if how == "next"}
        stamped = dict(update)
        for operator, paths in (("$currentDate", dates), ("$inc", counts)):
            if paths:
                stamped[operator] = {**stamped.get(operator, {}), **paths}
        return stamped
    return [*update, {"$set": stamp_expressions(touched)}]


def stamp_expressions(touched: Mapping[str, Touch]) -> Raw:
    """The same as expressions of a pipeline."""
    return {
        path: "$$NOW" if how == "now" else {"$add": [{"$ifNull": [f"${path}", 0]}, 1]}
        for path, how in touched.items()
    }


def unchanged(entry: ModelEntry[Any], raw: Raw) -> Raw:
    """The condition that nobody else has written a document since the caller read it."""
    known = {path: value_at(raw, path) for path in counted(entry)}
    # Documents from before the declaration have no revision.
    return {path: {"$eq": value} if value else {"$in": [0, None]} for path, value in known.items()}


def why_not(
    entry: ModelEntry[Any], which: Raw, identity: Any, condition: Raw, done: str
) -> Plan[TreadleError]:
    """Why no document was written: somebody else wrote it, or there is none."""
    if condition and (yield from find_one(entry.collection, which, {"_id": 1})) is not None:
        return Conflict(entry.model.__name__, identity)
    return crud.gone(entry, identity, done)
