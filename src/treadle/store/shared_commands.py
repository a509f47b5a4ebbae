"""Commands of several callers as one: reads and inserts by id.

A command that has `ids` may share a round trip with others of its lane. Each caller gets what its own
command would have given it, or its own error. What the shared answer does not tell is never guessed: that
command is performed by itself (`ALONE`). So is each of them where one may be at fault and nothing was
written.

- Reads by id are one `$in`. A group is sent after all of its callers have asked, so that no answer is
  older than its question.
- Inserts are one unordered `insert_many`, which says of each document why it was refused. Documents are
  encoded before anything is sent, so that one that cannot be encoded, or is large, affects no others. The
  result of an insert is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

from treadle.errors import TreadleError
from treadle.model.bson_types import CODEC_OPTIONS, ENCODING_ERRORS
from treadle.plan import Call, Failed, Plan, Raw, Read, find, insert_many
from treadle.plan.server_errors import DUPLICATE_KEY, is_about_one_document, refusals
from treadle.query.keys import freeze

Shareable: TypeAlias = Call | Read
Hash: TypeAlias = Callable[[Any], Any]

# Ids that one query asks for, and bytes that one insert sends; a message of the driver holds 48 MB.
IDS_MAX = 1_000
BYTES_MAX = 16 * 1024 * 1024
# A larger document is sent by itself.
LARGE_BYTES = 1024 * 1024


class _Alone:
    def __repr__(self) -> str:
        return "ALONE"


# In place of an outcome: this command is to be performed by itself.
ALONE = _Alone()


def lane_of(command: Shareable) -> tuple[str, str]:
    """Return the lane of a command; commands of one lane may share a round trip."""
    return command.collection, "find" if command.method == "find_one" else command.method


def perform_together(commands: Sequence[Shareable]) -> Plan[list[Any]]:
    """Perform commands of one lane. Returns for each its result, `Failed`, or `ALONE`."""
    perform: Callable[[Sequence[Any]], Plan[list[Any]]] = _LANES[lane_of(commands[0])[1]]
    return (yield from perform(commands))


def copy_error(error: Exception) -> Exception:
    """Return an equal error for another caller, because raising one adds to its traceback and notes.

    An error that is neither ours nor the driver's is returned as it is.
    """
    if not isinstance(error, (PyMongoError, TreadleError)):
        return error
    kind = type(error)
    other: Exception = kind.__new__(kind)
    other.args = error.args
    for name, value in vars(error).items():
        vars(other)[name] = value.copy() if isinstance(value, (dict, list, set)) else value
    other.__cause__, other.__context__ = error.__cause__, error.__context__
    other.__suppress_context__ = error.__suppress_context__
    return other.with_traceback(error.__traceback__)


# -- reads -----------------------------------------------------------------------------------------


def _find(commands: Sequence[Shareable]) -> Plan[list[Any]]:
    groups: dict[str, list[int]] = {}
    for place, command in enumerate(commands):
        groups.setdefault(_question(command), []).append(place)
    if len(groups) == 1:
        return (yield from _find_or_fail(commands))
    outcomes: list[Any] = [ALONE] * len(commands)
    for places in groups.values():
        answers = yield from _find_or_fail([commands[place] for place in places])
        for place, answer in zip(places, answers, strict=True):
            outcomes[place] = answer
    return outcomes


def _question(command: Shareable) -> str:
    """Return what a read asks for besides its ids, as text that is equal where two reads can be one."""
    arguments = command.arguments
    if len(arguments[0]) == 1 and (len(arguments) == 1 or arguments[1] is None):
        return ""
    return repr((_besides_id(arguments[0]), arguments[1:]))


def _besides_id(filter: Raw) -> Raw:
    return {name: value for name, value in filter.items() if name != "_id"}


def _find_or_fail(commands: Sequence[Shareable]) -> Plan[list[Any]]:
    """Perform reads that ask the same of different ids."""
    try:
        return (yield from _find_by_ids(commands))
    except Exception as error:
        # Any error is raised in each of the callers; one that a single document causes, in its callers alone.
        concerns_one = is_about_one_document(error)
        return [ALONE if concerns_one else Failed(copy_error(error)) for _ in commands]


def _find_by_ids(commands: Sequence[Shareable]) -> Plan[list[Any]]:
    filter, *rest = commands[0].arguments
    given = [key for command in commands for key in command.ids]
    hashed = _hash_function(given)
    asked = dict(zip(map(hashed, given), given, strict=True))
    keys, rows = list(asked.values()), list[Raw]()
    for start in range(0, len(keys), IDS_MAX):
        some = keys[start : start + IDS_MAX]
        # A batch larger than the result, so that the server need not be asked for the end.
        condition = {"_id": {"$in": some}, **_besides_id(filter)}
        rows += yield from find(commands[0].collection, condition, *rest, batch_size=len(some) + 1)
    stored = {hashed(raw["_id"]): raw for raw in rows}
    if len(asked) == len(commands) and stored.keys() == asked.keys() and set(map(type, commands)) == {Call}:
        # Each command asks for one document, which exists, and which no other command asks for.
        return [stored[key] for key in asked]
    taken: set[Any] = set()
    return [
        _document(command.ids[0], hashed, stored, taken)
        if type(command) is Call
        else _documents(command.ids, hashed, stored, taken)
        for command in commands
    ]


_BYTES = attrgetter("binary")


def _hash_function(keys: Sequence[Any]) -> Hash:
    """Return the function that makes dict keys of these ids."""
    # ObjectIds are compared by Python code, their bytes by C.
    return _BYTES if set(map(type, keys)) == {ObjectId} else freeze


def _documents(keys: Sequence[Any], hashed: Hash, stored: Mapping[Any, Raw], taken: set[Any]) -> Any:
    raws = [_document(key, hashed, stored, taken) for key in keys]
    return ALONE if ALONE in raws else [raw for raw in raws if raw is not None]


def _document(key: Any, hashed: Hash, stored: Mapping[Any, Raw], taken: set[Any]) -> Any:
    """Return the document of one id; a copy if another caller has got it, because a caller may change it."""
    place = hashed(key)
    raw = stored.get(place)
    if raw is None:
        # By the collation of its collection, another text may be equal.
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
            yield from _insert_batch(commands[0].collection, batch, outcomes)
            batch, size = {}, 0
        batch[place] = RawBSONDocument(encoded)
        size += len(encoded)
    if batch:
        yield from _insert_batch(commands[0].collection, batch, outcomes)
    return outcomes


def _insert_batch(collection: str, batch: dict[int, RawBSONDocument], outcomes: list[Any]) -> Plan[None]:
    places = list(batch)
    refused: dict[int, Exception] = {}
    try:
        yield from insert_many(collection, list(batch.values()), ordered=False)
    except BulkWriteError as error:
        for each in (error.details or {}).get("writeConcernErrors", ()):
            # Stored, but not by a majority: no insert of the batch is acknowledged.
            refused = dict.fromkeys(places, _not_acknowledged(each))
        refused |= {places[each["index"]]: _single_refusal(each) for each in refusals(error)}
    except Exception as error:
        # Any error is raised in each of the callers.
        refused = dict.fromkeys(places, error)
    for place in places:
        outcomes[place] = Failed(copy_error(refused[place])) if place in refused else None


def _single_refusal(refusal: Raw) -> PyMongoError:
    """Return the error that this document's own insert would have raised."""
    details = {name: value for name, value in refusal.items() if name != "op"} | {"index": 0}
    kind = DuplicateKeyError if details.get("code") == DUPLICATE_KEY else WriteError
    return kind(details.get("errmsg", ""), details.get("code"), details)


def _not_acknowledged(details: Raw) -> PyMongoError:
    kind = WTimeoutError if (details.get("errInfo") or {}).get("wtimeout") else WriteConcernError
    return kind(details.get("errmsg", ""), details.get("code"), details)


_LANES: dict[str, Callable[[Sequence[Any]], Plan[list[Any]]]] = {"find": _find, "insert_one": _insert}
