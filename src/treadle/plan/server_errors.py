"""What the server's errors mean: the one place that knows its codes, its labels and its words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bson.errors import BSONError
from pymongo.errors import (
    BulkWriteError,
    CollectionInvalid,
    ConfigurationError,
    ConnectionFailure,
    DuplicateKeyError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WriteConcernError,
)

from treadle.errors import DataError, DeclarationError, TreadleError, UsageError
from treadle.model.bson_types import Raw
from treadle.model.encodable import ENCODING_ERRORS, not_storable, too_deep

# -- codes, by the names that the server gives them -------------------------------------------

BAD_VALUE = 2
UNAUTHORIZED = frozenset({13, 8000})  # The second is Atlas's.
TYPE_MISMATCH = 14
AUTHENTICATION_FAILED = 18
ILLEGAL_OPERATION = 20
NAMESPACE_NOT_FOUND = 26
NAMESPACE_EXISTS = 48
INVALID_OPTIONS = 72
NOT_YET_INITIALIZED = 94
DOCUMENT_VALIDATION_FAILURE = 121
COMMAND_NOT_SUPPORTED_ON_VIEW = 166
QUERY_PLAN_KILLED = 175
SNAPSHOT_TOO_OLD = 239
CONVERSION_FAILURE = 241
TRANSACTION_TOO_LARGE = 388
SNAPSHOT_UNAVAILABLE = 246
OPERATION_NOT_SUPPORTED_IN_TRANSACTION = 263
CHANGE_STREAM_FATAL = 280
CHANGE_STREAM_HISTORY_LOST = 286
OBJECT_TOO_LARGE = 10334
DUPLICATE_KEY = 11000
INTERRUPTED = 11601
GRAPH_LOOKUP_TOO_LARGE = 40099
UNKNOWN_TIME_ZONE = 40485

# -- codes that come to the same -----------------------------------------------------------------

TOO_LARGE = frozenset({OBJECT_TOO_LARGE, 17419, 17420})
# Of one document, for certain.
POISON = TOO_LARGE | {DOCUMENT_VALIDATION_FAILURE}
# The place is no longer in the server's history, or cannot be found there.
HISTORY_LOST = frozenset({CHANGE_STREAM_FATAL, CHANGE_STREAM_HISTORY_LOST})
# What a standalone server answers to what only a replica set has.
NOT_A_REPLICA_SET = frozenset({ILLEGAL_OPERATION, OPERATION_NOT_SUPPORTED_IN_TRANSACTION, 40573, 51300})
# What a time-series collection answers to what it does not offer.
REFUSED_ON_TIME_SERIES = frozenset(
    {
        ILLEGAL_OPERATION,
        INVALID_OPTIONS,
        COMMAND_NOT_SUPPORTED_ON_VIEW,
        OPERATION_NOT_SUPPORTED_IN_TRANSACTION,
    }
)
# An update that makes no sense, or not for what is stored: bad values and paths, conflicts, fixed fields.
UPDATE_REFUSED = frozenset(
    {BAD_VALUE, 9, TYPE_MISMATCH, 28, 40, 52, 53, 54, 55, 56, 57, 66, 16554, 16840, 17280}
)
OUT_OF_TIME = frozenset({50, 262})
OUT_OF_MEMORY = frozenset({146, 292, 16945})
# A collection, while its documents were being read.
DROPPED = frozenset({NAMESPACE_NOT_FOUND, QUERY_PLAN_KILLED, 224})
# A time limit, a conflict, an interruption, a lost cursor, an ended query plan, a full disk or memory, a
# shutdown: what any execution may fail of.
PASSING = frozenset({43, 50, 91, 112, 146, 175, 189, 237, 262, 290, 292, 11600, 11601, 11602, 14031})
# There is no primary just now, or the connection to it is gone: an election, or the end of a server.
FAILED_OVER = frozenset({6, 7, 89, 91, 134, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436})
# Another process is building an index on the collection.
BACKGROUND_OPERATION = 12587
# Unreachable, not allowed, interrupted, out of time, of memory or of disk, not primary, a write concern,
# a cursor, session or snapshot that is gone.
SERVER_WIDE = (
    PASSING
    | FAILED_OVER
    | UNAUTHORIZED
    | {AUTHENTICATION_FAILED, 24, 43, 64, 79, 100, 133, 146, 202, 217, 225, 237, 244, 251, 256, 13388}
    | {SNAPSHOT_TOO_OLD, SNAPSHOT_UNAVAILABLE, OPERATION_NOT_SUPPORTED_IN_TRANSACTION, BACKGROUND_OPERATION}
)
# What Python raises for a value that it cannot compare, convert or compute with.
ODD_VALUES = (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
# Our own errors that every document would fail of.
ABOUT_THE_WHOLE = frozenset(
    {
        "bucket-contended",
        "capability-missing",
        "deadline-passed",
        "job-running",
        "job-stopped",
        "lease-busy",
        "migration-running",
        "overflow-layout",
        "pipeline-updates-missing",
        "rollup-index-missing",
        "server-too-old",
        "streams-unavailable",
        "transaction-elsewhere",
        "transactions-needed",
        "transactions-unavailable",
        "write-contended",
        "write-outcome-unknown",
    }
)

TRANSIENT = "TransientTransactionError"
OUTCOME_UNKNOWN = "UnknownTransactionCommitResult"


def refusals(error: BaseException) -> list[Raw]:
    """What the server says of each write that it refused, in a bulk or alone."""
    details: Raw = getattr(error, "details", None) or {}
    return list(details.get("writeErrors") or []) if isinstance(error, BulkWriteError) else [details]


def codes_of(error: BaseException) -> set[Any]:
    """The codes of an error, and of the single writes that it speaks of."""
    return {getattr(error, "code", None), *(each.get("code") for each in refusals(error))} - {None}


def message_of(error: BaseException) -> str:
    """What the server, or the driver, says; of the first write where several were refused."""
    return str(next((each["errmsg"] for each in refusals(error) if each.get("errmsg")), error))


# -- the whole operation ----------------------------------------------------------------------------


def is_transient(error: BaseException) -> bool:
    """Whether a transaction was aborted for a passing reason, and is to be tried again as a whole."""
    return isinstance(error, PyMongoError) and error.has_error_label(TRANSIENT)


def is_outcome_unknown(error: BaseException) -> bool:
    """Whether nobody can tell if a transaction was committed."""
    return isinstance(error, PyMongoError) and error.has_error_label(OUTCOME_UNKNOWN)


def lacks_sessions(error: BaseException) -> bool:
    """Whether a member that has only just started does not know of sessions yet; it has no label."""
    return isinstance(error, ConfigurationError) and "Sessions are not supported" in str(error)


def is_passing(error: BaseException) -> bool:
    """Whether a command that may be repeated is worth repeating: there is a new primary soon.

    Not where no server was found in the time that the client gives to that.
    """
    if isinstance(error, ConnectionFailure):
        return not isinstance(error, ServerSelectionTimeoutError)
    return bool(codes_of(error) & (FAILED_OVER | {BACKGROUND_OPERATION})) or lacks_sessions(error)


def lacks_majority(error: BaseException) -> bool:
    """Whether something was written, but nobody knows whether it stays: its write concern was not met."""
    details: Raw = getattr(error, "details", None) or {}
    return isinstance(error, WriteConcernError) or bool(details.get("writeConcernErrors"))


def surely_not_committed(error: BaseException) -> bool:
    """Whether a failed transaction certainly left nothing behind, so that it may be run again."""
    # A write concern that was not met says nothing against the commit itself.
    return isinstance(error, Exception) and not (
        lacks_majority(error)
        or is_outcome_unknown(error)
        or getattr(error, "code", None) == "write-outcome-unknown"
    )


def copied(error: Exception) -> Exception:
    """The same error for another caller: whoever raises one adds to its traceback, and may add notes.

    Of a kind that is neither ours nor the driver's, it is the very same.
    """
    if not isinstance(error, (PyMongoError, TreadleError)):
        return error
    kind = type(error)
    other = kind.__new__(kind)
    other.args = error.args
    for name, value in vars(error).items():
        vars(other)[name] = value.copy() if isinstance(value, (dict, list, set)) else value
    other.__cause__, other.__context__ = error.__cause__, error.__context__
    other.__suppress_context__ = error.__suppress_context__
    return other.with_traceback(error.__traceback__)


def refuses_transactions(error: BaseException) -> bool:
    """Whether a standalone server refused a transaction."""
    # The codes are those of many refusals; only the words tell this one.
    return (
        isinstance(error, OperationFailure)
        and error.code in (ILLEGAL_OPERATION, OPERATION_NOT_SUPPORTED_IN_TRANSACTION)
        and "replica set" in str(error)
    )


def is_refusal(error: BaseException) -> bool:
    """Whether a command is refused for what it is, not for a reason that passes or for want of rights."""
    return (
        isinstance(error, OperationFailure)
        and not is_transient(error)
        and not error.has_error_label("RetryableWriteError")
        and error.code not in SERVER_WIDE - {OPERATION_NOT_SUPPORTED_IN_TRANSACTION}
    )


def exists_already(error: BaseException) -> bool:
    """Whether a collection or view could not be made because there is one; the driver's has no code."""
    return isinstance(error, CollectionInvalid) or NAMESPACE_EXISTS in codes_of(error)


# -- single documents ---------------------------------------------------------------------------------


def is_about_one_document(error: BaseException) -> bool:
    """Whether a document stands in the way, so that the others can go on without it.

    Everything counts that no later attempt and no other document would fail
    of: what the server refuses, what the driver cannot encode or decode, and
    what cannot be compared or converted. Not a connection, a right, a disk, a
    time limit or a conflict.
    """
    if isinstance(error, PyMongoError) and error.timeout:
        return False
    if isinstance(error, TreadleError):
        return not isinstance(error, DeclarationError) and error.code not in ABOUT_THE_WHOLE
    if not isinstance(error, PyMongoError):
        return isinstance(error, (BSONError, *ODD_VALUES))
    if not isinstance(error, OperationFailure):
        return isinstance(error, ENCODING_ERRORS)
    if lacks_majority(error) or is_transient(error) or is_outcome_unknown(error):
        return False
    if error.has_error_label("RetryableWriteError"):
        return False
    codes = (
        {each.get("code") for each in refusals(error)} if isinstance(error, BulkWriteError) else {error.code}
    )
    return bool(codes) and not codes & SERVER_WIDE


def is_duplicate(error: BaseException) -> bool:
    """Whether a unique index refused a write: another writer's document may be the reason, and may go."""
    return DUPLICATE_KEY in codes_of(error)


def is_increment_overflow(refusal: Mapping[str, Any]) -> bool:
    """Whether the sum of an `$inc` would not fit into 64 bits."""
    # A bad value can be many things; only the words name the operator.
    return refusal.get("code") == BAD_VALUE and "$inc" in refusal.get("errmsg", "")


# -- clearer errors ---------------------------------------------------------------------------------


class DuplicateKey(UsageError, DuplicateKeyError):
    """A unique index holds another document with the same key.

    `index` is the index's name, `fields` are the stored names that it is of.
    `code` is Treadle's; the server's number is in `details`.
    """

    # In place of the driver's read-only property.
    code: str = "duplicate-key"  # type: ignore[assignment]

    def __init__(
        self,
        model: str,
        refusal: Mapping[str, Any],
        labels: Sequence[str] = (),
        advice: str = "choose another value, or update that document (upsert does either)",
    ) -> None:
        message = str(refusal.get("errmsg", ""))
        named = _INDEX_NAME.search(message)
        self.index: str = named.group(1) if named else ""
        self.fields: tuple[str, ...] = tuple(refusal.get("keyPattern") or ())
        which = ", ".join(self.fields) or self.index
        text = (
            f"another {model} has the same {which} already, and the index {self.index!r} is unique "
            f"(E11000); {advice}"
        )
        UsageError.__init__(self, text, code="duplicate-key")
        # Second: the first one passes on to this one, without the details.
        DuplicateKeyError.__init__(self, text, DUPLICATE_KEY, dict(refusal))
        for label in labels:
            self._add_error_label(label)


# The name stands between these words in every version of the server.
_INDEX_NAME = re.compile(r" index: (\S+) dup key")
LABELS = (TRANSIENT, OUTCOME_UNKNOWN, "RetryableWriteError")


# Of documents that are nested too deeply, among others.
OVERFLOW = 15
# InvalidIdField, and names in an id.
ID_REFUSED = frozenset({52, 53})


def translate(error: Exception, model: str, documents: Sequence[Mapping[str, Any]] = ()) -> Exception:
    """The error to raise instead of the driver's; the driver's own where that is clear enough."""
    if isinstance(error, TreadleError):
        return error
    if isinstance(error, ENCODING_ERRORS):
        return not_storable(error, model, documents)
    if not isinstance(error, PyMongoError):
        return error
    first = next(iter(refusals(error)), {})
    if DOCUMENT_VALIDATION_FAILURE in (getattr(error, "code", None), first.get("code")):
        return _refused_by_validator(first, model)
    if DUPLICATE_KEY in (getattr(error, "code", None), first.get("code")):
        return DuplicateKey(model, first, [label for label in LABELS if error.has_error_label(label)])
    if ID_REFUSED & set(codes_of(error)):
        return UsageError(
            f"the server does not take this as the id of a {model}: no arrays, patterns, or names that begin "
            "with '$'",
            code="value-not-storable",
        )
    if TRANSACTION_TOO_LARGE in codes_of(error):
        return UsageError(
            f"this transaction writes more of {model} than the server's cache holds; write less at a time, "
            "or give the server a larger cache",
            code="transaction-too-large",
        )
    if OVERFLOW in codes_of(error) and "nest" in str(error):
        return too_deep(model)
    if getattr(error, "code", None) in TOO_LARGE:
        return UsageError(
            f"the {model} would grow beyond the 16 MB that MongoDB stores in one document; "
            "keep large or growing parts in documents of their own",
            code="document-too-large",
        )
    return error


def translate_update(error: Exception, model: str, documents: Sequence[Mapping[str, Any]]) -> Exception:
    """The same for an update, which the server may refuse for what it asks."""
    refusal = next(iter(refusals(error)), {})
    code = refusal.get("code", getattr(error, "code", None))
    if isinstance(error, OperationFailure) and code in UPDATE_REFUSED and not is_transient(error):
        name = refusal.get("codeName") or f"code {code}"
        return UsageError(
            f"the server refuses this update of {model} ({name}): a path or value in it is malformed, or "
            "does not fit what the document holds there",
            code="update-invalid",
        )
    return translate(error, model, documents)


def _refused_by_validator(refusal: Mapping[str, Any], model: str) -> DataError:
    """Which rule of the collection's validator refused the document."""
    details = refusal.get("errInfo", {}).get("details", {})
    paths = sorted(_failed_paths(details, "")) if isinstance(details, dict) else []
    named = f" ({', '.join(paths)})" if paths else ""
    return DataError(
        f"the validator of {model}'s collection refused the document{named}; "
        "mend the value, or run setup() if the model has changed",
        code="validator-refused",
    )


def _failed_paths(details: Any, path: str) -> set[str]:
    """The innermost paths that the server's explanation names."""
    if isinstance(details, list):
        return {failed for item in details for failed in _failed_paths(item, path)}
    if not isinstance(details, dict):
        return set()
    failed = {f"{path}.{missing} is missing".lstrip(".") for missing in details.get("missingProperties", ())}
    if isinstance(details.get("propertyName"), str):
        path = f"{path}.{details['propertyName']}".lstrip(".")
        failed.add(path)
    for value in details.values():
        failed |= _failed_paths(value, path)
    return {
        each for each in failed if not any(other != each and other.startswith(each + ".") for other in failed)
    }
