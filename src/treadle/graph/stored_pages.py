"""Pages of stored documents in the order of `_id`, whatever types the ids have.

The id of a page's last document stands in a list, because it may itself be
null. A document that cannot be decoded is quarantined and never hides its page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from pymongo.errors import OperationFailure

from treadle.graph.quarantine import set_aside_unreadable
from treadle.plan import Plan, Raw, find, one_reply, outside
from treadle.plan.decoding import UndecodableId, Unreadable
from treadle.plan.server_errors import UNAUTHORIZED
from treadle.query.keys import freeze

T = TypeVar("T")
Note: TypeAlias = Callable[[Unreadable], None]


def starting_at(last: list[Any] | None) -> Raw:
    """Return the options by which a find starts at an id.

    A range query would end where the type of the ids changes.
    """
    return {} if last is None else {"min": {"_id": last[0]}, "hint": [("_id", 1)]}


def matching(
    collection: str, condition: Raw, last: list[Any] | None, limit: int, projection: Raw | None = None
) -> Plan[list[Raw]]:
    """Return the next documents that match, as many as fit into one reply; never the last one again."""
    if last is not None and isinstance(last[0], UndecodableId):
        beyond = {"$and": [condition, last[0].greater()]}
        return (yield from find(collection, beyond, projection, sort=[("_id", 1)], **one_reply(limit)))
    beyond = condition if last is None else {"$and": [condition, {"_id": {"$ne": last[0]}}]}
    options = {**one_reply(limit), **starting_at(last)}
    return (yield from find(collection, beyond, projection, sort=[("_id", 1)], **options))


def readable_page(
    label: str, reading: Plan[list[Raw]], last: list[Any] | None, note: Note | None = None
) -> Plan[tuple[list[Raw], list[Any] | None]]:
    """Return the documents of a page that can be decoded, and the last id in a list; None at the end.

    The others are passed to `note` and quarantined, unless the caller may only read.
    """
    try:
        documents = yield from reading
    except Unreadable as error:
        if last is not None and freeze(error.last) == freeze(last[0]):
            # Nothing follows the one with which it began.
            return [], None
        if note is not None:
            note(error)
        yield from quarantine_quietly(partial(set_aside_unreadable, label, error))
        kept = [each for each in error.documents if last is None or freeze(each["_id"]) != freeze(last[0])]
        return kept, [error.last]
    return documents, [documents[-1]["_id"]] if documents else None


def quarantine_quietly(make: Callable[[], Plan[None]]) -> Plan[None]:
    """Quarantine documents outside of the transaction under way; not where the caller may only read."""
    try:
        yield from outside(make)
    except OperationFailure as refused:
        if refused.code not in UNAUTHORIZED:
            raise


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield items in pieces of a size."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
