"""Commands of several callers as one: reads and inserts by id.

A command that names its `ids` may go together with others of its kind. Each
caller gets what its own command would have given it, or its own error. What
cannot be told from the joint answer is not guessed: that command goes `ALONE`,
as it would have without the others. So does each of them where one may be at
fault and nothing was written.

- Reads by id are one `$in`. No answer is older than its question: a group is
  sent after all of its callers have asked.
- Inserts are one unordered `insert_many`, which says of each document why it
  was refused. They are encoded before anything is sent, so that a document
  that cannot be encoded, or is large, fails nobody else. That it is stored is
  all that the result of an insert tells, so it is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import bson
from bson import ObjectId
from bson.raw_bson import RawBSONDocument
from pymongo.errors import (
    BulkWriteError,
    DuplicateKeyError,
    PyMongoError,
    WriteConcernError,
    WriteError,
    WTimeoutError,
)

from treadle.model.bson_types import CODEC_OPTIONS
from treadle.model.encodable import ENCODING_ERRORS
from treadle.plan import (
    Call,
    Plan,
    Raw,
    Read,
    find,
    insert_many,
)
from treadle.plan.server_errors import (
    DUPLICATE_KEY,
    copied,
    is_about_one_document,
    refusals,
)
from treadle.query.keys import freeze

Shareable: TypeAlias = Call | Read

# Ids that one query asks for, and bytes that one insert sends; a message of the driver holds 48 MB.
IDS_MAX = 1_000
BYTES_MAX = 16 * 1024 * 1024
# A larger document is sent by itself.
LARGE_BYTES = 1024 * 1024


@dataclass(slots=True, eq=False, repr=False)
class Failed:
    """The outcome of one of several that raised; its neighbours are not concerned."""

    error: Exception


class _Alone:
    """See `ALONE`."""

    def __repr__(self) -> str:
        return "ALONE"


# In the place of an outcome: this one is to be performed by itself.
ALONE = _Alone()


_BYTES = attrgetter("binary")


def lane_of(command: Shareable) -> tuple[str, str]:
    """Commands of the same lane may go together."""
    method = command.method
    return command.collection, "find" if method == "find_one" else method


def perform_together(commands: Sequence[Shareable]) -> Plan[list[Any]]:
    """The outcome of each command: its result, `Failed`, or `ALONE`; commands of one lane."""
    _, method = lane_of(commands[0])
    perform: Callable[[Sequence[Any]], Plan[list[Any]]] = _LANES[method]
    return (yield from perform(commands))


# -- reads -----------------------------------------------------------------------------------------


def _find(commands: Sequence[Shareable]) -> Plan[list[Any]]:
    asked = [_asked(command) for command in commands]
    if len(set(asked)) == 1:
        return (yield from _find_or_say(commands))
    alike: dict[str, list[int]] = {}
    for place, condition in enumerate(asked):
        alike.setdefault(condition, []).append(place)
    outcomes: list[Any] = [ALONE] * len(commands)
    for places in alike.values():
        answers = yield from _find_or_say([commands[place] for place in places])
        for place, answer in zip(places, answers, strict=True):
            outcomes[place] = answer
    return outcomes


def _asked(command: Shareable) -> str:
    """What is asked for besides the ids: equal where two reads can be one."""
    arguments = command.arguments
    if len(arguments[0]) == 1 and (len(arguments) == 1 or arguments[1] is None):
        return ""
    filter, projection = _read_of(command)
    return repr((_condition(filter), projection))


def _read_of(command: Shareable) -> tuple[Raw, Any]:
    filter, *rest = command.arguments
    return filter, rest[0] if rest else None


def _condition(filter: Raw) -> Raw:
    return {name: value for name, value in filter.items() if name != "_id"}


def _find_or_say(commands: Sequence[Shareable]) -> Plan[list[Any]]:
    """The outcomes of reads that differ in nothing but the ids."""
    try:
        return (yield from _find_alike(commands))
    except Exception as error:
        # One document that cannot be decoded is not its neighbours' concern.
        concerned = is_about_one_document(error)
        return [ALONE if concerned else Failed(copied(error)) for _ in commands]


def _find_alike(commands: Sequence[Shareable]) -> Plan[list[Any]]:
    filter, projection = _read_of(commands[0])
    condition, collection = _condition(filter), commands[0].collection
    given = [key for command in commands for key in command.ids]
    hashed = _hashing(given)
    asked = dict(zip(map(hashed, given), given, strict=True))
    keys, rows = list(asked.values()), list[Raw]()
    for start in range(0, len(keys), IDS_MAX):
        some = keys[start : start + IDS_MAX]
        # One more than there can be, so that the server need not be asked for the end.
        chosen, most = {"_id": {"$in": some}, **condition}, len(some) + 1
        rows += yield from find(collection, chosen, projection, batch_size=most)
    stored = {hashed(raw["_id"]): raw for raw in rows}
    if len(asked) == len(commands) and stored.keys() == asked.keys() and _are_calls(commands):
        # Each has asked for one document that is there, and that nobody else has asked for.
        return [stored[key] for key in asked]
    taken: set[Any] = set()
    return [
        _one(command.ids[0], hashed, stored, taken)
        if type(command) is Call
        else _several(command, hashed, stored, taken)
        for command in commands
    ]


def _hashing(keys: Sequence[Any]) -> Callable[[Any], Any]:
    """What stands for each of these ids, and for those of their documents, in a dict."""
    # ObjectIds are compared by functions of Python, and their bytes are not.
    return _BYTES if set(map(type, keys)) == {ObjectId} else freeze


def _are_calls(commands: Sequence[Shareable]) -> bool:
    return set(map(type, commands)) == {Call}


def _several(
    command: Shareable, hashed: Callable[[Any], Any], stored: Mapping[Any, Raw], taken: set[Any]
) -> Any:
    raws = [_one(key, hashed, stored, taken) for key in command.ids]
    return ALONE if ALONE in raws else [raw for raw in raws if raw is not None]


def _one(key: Any, hashed: Callable[[Any], Any], stored: Mapping[Any, Raw], taken: set[Any]) -> Any:
    """The document of one id; of one that is taken already, because nobody shares it, a copy."""
    place = hashed(key)
    raw = stored.get(place)
    if raw is None:
        # By the collation of its collection, another text may be the same.
        return None if type(key) is ObjectId else ALONE
    if place in taken:
        return bson.decode(bson.encode(raw, codec_options=CODEC_OPTIONS), CODEC_OPTIONS)
    taken.add(place)
    return raw


# -- inserts ---------------------------------------------------------------------------------------


def _insert(commands: Sequence[Call]) -> Plan[list[Any]]:
    outcomes: list[Any] = [ALONE] * len(commands)
    batch: dict[int, RawBSONDocument] = {}
    size = 0
    for place, command in enumerate(commands):
        try:
            encoded = bson.encode(command.arguments[0], codec_options=CODEC_OPTIONS)
        except ENCODING_ERRORS:
            continue
        if len(encoded) > LARGE_BYTES:
            continue
        if size + len(encoded) > BYTES_MAX:
            yield from _insert_batch(commands, batch, outcomes)
            batch, size = {}, 0
        batch[place] = RawBSONDocument(encoded)
        size += len(encoded)
    if batch:
        yield from _insert_batch(commands, batch, outcomes)
    return outcomes


def _insert_batch(
    commands: Sequence[Call], batch: dict[int, RawBSONDocument], outcomes: list[Any]
) -> Plan[None]:
    places = list(batch)
    refused: dict[int, Exception] = {}
    try:
        yield from insert_many(commands[0].collection, list(batch.values()), ordered=False)
    except BulkWriteError as error:
        for each in (error.details or {}).get("writeConcernErrors", ()):
            # Stored, but not by a majority: nobody's insert is acknowledged.
            refused = dict.fromkeys(places, _not_acknowledged(each))
        refused |= {places[each["index"]]: _as_if_alone(each) for each in refusals(error)}
    except Exception as error:
        refused = dict.fromkeys(places, error)
    for place in places:
        outcomes[place] = Failed(copied(refused[place])) if place in refused else None


def _as_if_alone(refusal: Raw) -> PyMongoError:
    """The error that this document's own insert would have raised."""
    details = {name: value for name, value in refusal.items() if name != "op"} | {"index": 0}
    kind = DuplicateKeyError if details.get("code") == DUPLICATE_KEY else WriteError
    return kind(details.get("errmsg", ""), details.get("code"), details)


def _not_acknowledged(details: Raw) -> PyMongoError:
    kind = WTimeoutError if (details.get("errInfo") or {}).get("wtimeout") else WriteConcernError
    return kind(details.get("errmsg", ""), details.get("code"), details)


_LANES: dict[str, Callable[[Sequence[Any]], Plan[list[Any]]]] = {
    "find": _find,
    "insert_one": _insert,
}
