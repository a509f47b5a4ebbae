"""An update that its model refuses changes nothing.

Its values are judged before anything is sent, its results before the commit.
What was wrong with a document before is no reason to refuse an update that
does not touch it, or one that mends a part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from treadle.engine.ledger import Ledger
from treadle.errors import DataError, InvalidValue
from treadle.graph.pattern import Entry
from treadle.model.bson_types import Update
from treadle.model.codec import Codec, InvalidDocument
from treadle.model.document import Document
from treadle.model.text import escape_text, get_logger
from treadle.plan import Plan, Raw, by_id, update_one
from treadle.query.comparison import identical
from treadle.query.keys import freeze
from treadle.query.paths import plain
from treadle.query.update_values import Checked, as_far_as_it_fits, check_values, spot_of, unlike

D = TypeVar("D", bound=Document)

log = get_logger(__name__)


def checked(entry: Entry[Any], update: Update) -> Checked:
    """A cleaned update with its values as the fields store them; raises where one does not fit."""
    codec = entry.codec
    others = entry.once("other kinds", lambda: [each.codec for each in entry.below])
    filled = entry.once("filled", lambda: [path for path, rule in entry.shielded.items() if rule.refills])

    def lenient(path: str) -> bool:
        around = plain(path) + "."
        return any(each.startswith(around) for each in filled)

    if not others or not isinstance(update, dict):
        return check_values(codec, update, lenient)
    return _for_kinds(codec, others, update, lenient)


def _for_kinds(codec: Codec[Any], others: Sequence[Codec[Any]], update: Raw, lenient: Any) -> Checked:
    """The same where a document may be of several kinds: each path by a kind that has it."""
    result: Raw = {}
    sure = True
    for operator, changes in update.items():
        result[operator] = {}
        for path, value in changes.items():
            name = path.split(".", 1)[0]
            having = [each for each in (codec, *others) if name in each.by_stored] or [codec]
            agreed = not any(unlike(having[0], each, path) for each in having[1:])
            one = check_values(having[0], {operator: {path: value}}, lenient if agreed else lambda _: True)
            result[operator][path] = one.update[operator][path] if agreed else value  # type: ignore[call-overload]
            sure = sure and agreed and one.sure and all(spot_of(each, path).sure for each in (codec, *others))
            # The same field may have a validator in one kind and none in another.
            sure = sure and all(_suits(each, {operator: {path: value}}) for each in having[1:])
    return Checked(result, sure)


def _suits(codec: Codec[Any], update: Raw) -> bool:
    """Whether no result of an update can fail to fit one of the kinds that it may meet."""
    try:
        return check_values(codec, update, lambda _: False).sure
    except InvalidValue:
        return False


def require_valid(
    entry: Entry[Any], befores: Sequence[Raw], afters: Sequence[Raw], ledger: Ledger
) -> Plan[None]:
    """Refuse documents, written but not committed, that could not be read; undone without a transaction.

    Not where a field is at fault that the update has left as it was.
    """
    by_key = {freeze(each["_id"]): each for each in befores}
    for after in afters:
        try:
            require_readable(entry, after, "the update would leave", by_key.get(freeze(after["_id"])))
        except DataError:
            if not ledger.transactional:
                yield from _undo(entry, befores, afters)
            raise


def require_readable(entry: Entry[Any], raw: Raw, what: str, before: Raw | None = None) -> None:
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


def as_written(entry: Entry[D], raw: Raw) -> D:
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
    exact = entry.of(raw) if entry.family is not None else entry
    codec: Codec[D] = getattr(exact.codec, "own", exact.codec)
    return as_far_as_it_fits(codec, raw)


def _undo(entry: Entry[Any], befores: Sequence[Raw], afters: Sequence[Raw]) -> Plan[None]:
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
