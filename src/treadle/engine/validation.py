"""Documents after a write, validated before the commit: an update that its model refuses changes nothing.

What was wrong with a document before is no reason to refuse an update that
does not touch it, or one that mends a part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from treadle.errors import DataError, InvalidValue
from treadle.graph.changes import Changes
from treadle.graph.model_entry import ModelEntry
from treadle.model.codec import Codec, InvalidDocument
from treadle.model.document import Document
from treadle.model.text import escape_text, get_logger
from treadle.plan import Plan, Raw, by_id, update_one
from treadle.query.comparison import identical
from treadle.query.field_types import load_what_fits
from treadle.query.keys import freeze

D = TypeVar("D", bound=Document)

log = get_logger(__name__)


def require_valid(
    entry: ModelEntry[Any], befores: Sequence[Raw], afters: Sequence[Raw], changes: Changes
) -> Plan[None]:
    """Refuse documents, written but not committed, that could not be read; undone without a transaction.

    Not where a field is at fault that the update has left as it was.
    """
    by_key = {freeze(each["_id"]): each for each in befores}
    for after in afters:
        try:
            require_readable(entry, after, "the update would leave", by_key.get(freeze(after["_id"])))
        except DataError:
            if not changes.transactional:
                yield from _undo(entry, befores, afters)
            raise


def require_readable(entry: ModelEntry[Any], raw: Raw, what: str, before: Raw | None = None) -> None:
    """Refuse a document that could not be read again; `what` says who makes it so."""
    try:
        entry.codec.load(copy.deepcopy(raw))
    except InvalidDocument as error:
        changed = [loc for loc, _ in error.faults if before is None or not loc or _differs(before, raw, loc)]
        if not changed:
            return
        reason = str(error).partition("): ")[2].partition(";")[0]
        raise InvalidValue(
            f"{what} {entry.model.__name__} {raw['_id']!r} in a form that its model refuses ({reason}); "
            "nothing was changed",
            code="document-invalid",
        ) from None


def _differs(before: Raw, after: Raw, place: tuple[int | str, ...]) -> bool:
    name = str(place[0])
    return not identical(before.get(name, _ABSENT), after.get(name, _ABSENT))


def as_written(entry: ModelEntry[D], raw: Raw) -> D:
    """The model of a document that a write has left, or removed; takes the document over.

    The write is done, so nothing is refused any more: a field that does not fit
    the model is shown as it is stored.
    """
    try:
        return entry.codec.load(raw)
    except DataError as error:
        log.warning(
            "%s %s was written, but does not fit its model (%s); what does not is returned as it is stored",
            entry.model.__name__,
            escape_text(raw.get("_id")),
            error.code,
        )
    exact = entry.kinds.of(raw) if entry.kinds.family is not None else entry
    codec: Codec[D] = getattr(exact.codec, "own", exact.codec)
    return load_what_fits(codec, raw)


def _undo(entry: ModelEntry[Any], befores: Sequence[Raw], afters: Sequence[Raw]) -> Plan[None]:
    """Write back what documents were, where nobody has written them meanwhile."""
    by_key = {freeze(each["_id"]): each for each in befores}
    for after in afters:
        before = by_key.get(freeze(after["_id"]))
        if before is None:
            continue
        changed = [
            name for name in {**before, **after} if before.get(name, _ABSENT) != after.get(name, _ABSENT)
        ]
        unchanged = {name: {"$eq": after[name]} if name in after else {"$exists": False} for name in changed}
        update: Raw = {
            "$set": {name: before[name] for name in changed if name in before},
            "$unset": dict.fromkeys((name for name in changed if name not in before), ""),
        }
        wanted = {operator: values for operator, values in update.items() if values}
        if wanted:
            yield from update_one(entry.collection, {**by_id(after["_id"]), **unchanged}, wanted)


_ABSENT = object()
