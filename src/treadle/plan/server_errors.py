"""What the server's errors mean: the one module that knows its codes, its labels and its words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bson.errors import BSONError
from pydantic import ValidationError
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
from treadle.model.bson_types import ENCODING_ERRORS, Raw, not_storable, too_deep

# -- codes, by the names that the server gives them ------------------------------------------------

BAD_VALUE = 2
UNAUTHORIZED = frozenset({13, 8000})  # 8000 is Atlas's
TYPE_MISMATCH = 14
OVERFLOW = 15  # of a nesting that is too deep, among others
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
SNAPSHOT_UNAVAILABLE = 246
OPERATION_NOT_SUPPORTED_IN_TRANSACTION = 263
CHANGE_STREAM_FATAL = 280
CHANGE_STREAM_HISTORY_LOST = 286
TRANSACTION_TOO_LARGE = 388
OBJECT_TOO_LARGE = 10334
DUPLICATE_KEY = 11000
INTERRUPTED = 11601
BACKGROUND_OPERATION = 12587  # another process builds an index on the collection
GRAPH_LOOKUP_TOO_LARGE = 40099
UNKNOWN_TIME_ZONE = 40485

# -- codes with the same meaning -------------------------------------------------------------------

TOO_LARGE = frozenset({OBJECT_TOO_LARGE, 17419, 17420})
# The document itself is refused, whichever command carries it.
POISON = TOO_LARGE | {DOCUMENT_VALIDATION_FAILURE}
# The position of a change stream is no longer in the server's history.
HISTORY_LOST = frozenset({CHANGE_STREAM_FATAL, CHANGE_STREAM_HISTORY_LOST})
# A standalone server's answers to a command that needs a replica set.
NOT_A_REPLICA_SET = frozenset({ILLEGAL_OPERATION, OPERATION_NOT_SUPPORTED_IN_TRANSACTION, 40573, 51300})
# The answers of a time-series collection to a command that it does not support.
REFUSED_ON_TIME_SERIES = frozenset({ILLEGAL_OPERATION, INVALID_OPTIONS}) | {
    COMMAND_NOT_SUPPORTED_ON_VIEW,
    OPERATION_NOT_SUPPORTED_IN_TRANSACTION,
}
# A malformed update, or one that does not fit the stored document: values, paths, fixed fields.
UPDATE_REFUSED = frozenset(
    {BAD_VALUE, 9, TYPE_MISMATCH, 28, 40, 52, 53, 54, 55, 56, 57, 66, 16554, 16840, 17280}
)
# InvalidIdField, and field names within an id.
ID_REFUSED = frozenset({52, 53})
OUT_OF_TIME = frozenset({50, 262})
OUT_OF_MEMORY = frozenset({146, 292, 16945})
# The collection was dropped while it was read.
DROPPED = frozenset({NAMESPACE_NOT_FOUND, QUERY_PLAN_KILLED, 224})
# There is no primary at the moment, or the connection to it was lost.
FAILED_OVER = frozenset({6, 7, 89, 91, 134, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436})
# Not about the command or a document: a time limit, a conflict, an interruption, an election, missing
# rights, a full disk or memory, a write concern, a lost cursor, session or snapshot.
SERVER_WIDE = (
    FAILED_OVER
    | UNAUTHORIZED
    | OUT_OF_TIME
    | {AUTHENTICATION_FAILED, 24, 43, 64, 79, 100, 112, 133, 146, QUERY_PLAN_KILLED, 202, 217, 225, 237}
    | {SNAPSHOT_TOO_OLD, 244, SNAPSHOT_UNAVAILABLE, 251, 256, OPERATION_NOT_SUPPORTED_IN_TRANSACTION}
    | {290, 292, INTERRUPTED, BACKGROUND_OPERATION, 13388, 14031}
)
# Our own errors that every document of a call would meet.
ABOUT_THE_WHOLE = frozenset(
    {
        "bucket-contended", "job-running", "job-stopped", "lease-busy", "migration-running",
        "capability-missing", "pipeline-updates-missing", "streams-unavailable",
        "transaction-elsewhere", "transaction-other", "transactions-needed", "transactions-unavailable",
        "deadline-passed", "write-contended", "write-outcome-unknown",
        "index-missing", "overflow-layout", "server-too-old",
    }
)  # fmt: skip
# What BSON, Pydantic and arithmetic raise because of a value. Any other error that is neither ours nor
# the driver's is a bug: a `TypeError` or `KeyError` must not look like a bad document. What a user's own
# function raises is wrapped in a `DataError` where that function is called.
VALUE_ERRORS = (BSONError, ValidationError, ArithmeticError, *ENCODING_ERRORS)

TRANSIENT = "TransientTransactionError"
OUTCOME_UNKNOWN = "UnknownTransactionCommitResult"
RETRYABLE = "RetryableWriteError"


def refusals(error: BaseException) -> list[Raw]:
    """List what the server says of each write that it refused, in a bulk or alone."""
    details: Raw = getattr(error, "details", None) or {}
    return list(details.get("writeErrors") or []) if isinstance(error, BulkWriteError) else [details]


def codes_of(error: BaseException) -> set[Any]:
    """Return the codes of an error and of the single writes that it reports."""
    return {getattr(error, "code", None), *(each.get("code") for each in refusals(error))} - {None}


def message_of(error: BaseException) -> str:
    """Return the server's or the driver's words; of several refused writes, those about the first."""
    return str(next((each["errmsg"] for each in refusals(error) if each.get("errmsg")), error))


# -- the whole operation ---------------------------------------------------------------------------


def is_transient(error: BaseException) -> bool:
    """Whether a transaction was aborted and is worth running again as a whole."""
    return isinstance(error, PyMongoError) and error.has_error_label(TRANSIENT)


def is_outcome_unknown(error: BaseException) -> bool:
    """Whether a transaction may or may not have been committed."""
    return isinstance(error, PyMongoError) and error.has_error_label(OUTCOME_UNKNOWN)


def lacks_sessions(error: BaseException) -> bool:
    """Whether a member that has just started does not know sessions yet; this error has no label."""
    return isinstance(error, ConfigurationError) and "Sessions are not supported" in str(error)


def is_passing(error: BaseException) -> bool:
    """Whether an idempotent command is worth repeating, because there is a new primary soon.

    False where no server was found: the client has already waited for as long as its options say.
    """
    if isinstance(error, ConnectionFailure):
        return not isinstance(error, ServerSelectionTimeoutError)
    return bool(codes_of(error) & (FAILED_OVER | {BACKGROUND_OPERATION})) or lacks_sessions(error)


def lacks_majority(error: BaseException) -> bool:
    """Whether something was written that may be rolled back: its write concern was not met."""
    details: Raw = getattr(error, "details", None) or {}
    return isinstance(error, WriteConcernError) or bool(details.get("writeConcernErrors"))


def surely_not_committed(error: BaseException) -> bool:
    """Whether a failed transaction certainly wrote nothing, so that it may run again."""
    # An unmet write concern says nothing against the commit itself.
    return isinstance(error, Exception) and not (
        lacks_majority(error)
        or is_outcome_unknown(error)
        or getattr(error, "code", None) == "write-outcome-unknown"
    )


def is_refusal(error: BaseException) -> bool:
    """Whether a command itself is refused, not for a transient reason or for missing rights."""
    return (
        isinstance(error, OperationFailure)
        and not is_transient(error)
        and not error.has_error_label(RETRYABLE)
        and error.code not in SERVER_WIDE - {OPERATION_NOT_SUPPORTED_IN_TRANSACTION}
    )


def exists_already(error: BaseException) -> bool:
    """Whether a collection or view was not created because it exists."""
    # The driver's own error has no code.
    return isinstance(error, CollectionInvalid) or NAMESPACE_EXISTS in codes_of(error)


# -- single documents ------------------------------------------------------------------------------


def is_about_one_document(error: BaseException) -> bool:
    """Whether a document causes this error, so that the others can be processed without it.

    True for what the server refuses, what the driver cannot encode or decode, what a model does not
    accept and what cannot be computed. False for bugs, and for what another attempt or another
    document would meet too: a connection, a right, a disk, a time limit, a conflict.
    """
    if isinstance(error, TreadleError):
        whole = isinstance(error, DeclarationError) or error.code in ABOUT_THE_WHOLE
        return not whole and not (isinstance(error, PyMongoError) and error.timeout)
    return isinstance(error, VALUE_ERRORS) or (
        isinstance(error, OperationFailure) and _is_refused_write(error)
    )


def _is_refused_write(error: OperationFailure) -> bool:
    labels = (TRANSIENT, OUTCOME_UNKNOWN, RETRYABLE)
    if error.timeout or lacks_majority(error) or any(map(error.has_error_label, labels)):
        return False
    # A bulk's own code says nothing.
    writes = {each.get("code") for each in refusals(error)}
    codes = writes if isinstance(error, BulkWriteError) else {error.code}
    return bool(codes) and not codes & SERVER_WIDE


def is_bug(error: BaseException) -> bool:
    """Whether an error can only come from a defect of the program: not from data, server or caller."""
    return isinstance(error, Exception) and not isinstance(error, (TreadleError, PyMongoError, *VALUE_ERRORS))


def is_duplicate(error: BaseException) -> bool:
    """Whether a unique index refused a write; the other document may be a concurrent writer's, and go."""
    return DUPLICATE_KEY in codes_of(error)


def is_increment_overflow(refusal: Mapping[str, Any]) -> bool:
    """Whether the sum of an `$inc` would not fit into 64 bits."""
    # Many refusals have this code; only the words name the operator.
    return refusal.get("code") == BAD_VALUE and "$inc" in refusal.get("errmsg", "")


# -- clearer errors --------------------------------------------------------------------------------


class DuplicateKey(UsageError, DuplicateKeyError):
    """A unique index holds another document with the same key.

    `index` is the index's name, `fields` are the stored names of its keys.
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
        name = _INDEX_NAME.search(str(refusal.get("errmsg", "")))
        self.index: str = name.group(1) if name else ""
        self.fields: tuple[str, ...] = tuple(refusal.get("keyPattern") or ())
        text = (
            f"another {model} has the same {', '.join(self.fields) or self.index} already, and the index "
            f"{self.index!r} is unique (E11000); {advice}"
        )
        UsageError.__init__(self, text, code="duplicate-key")
        # After UsageError's, which calls this one without the details.
        DuplicateKeyError.__init__(self, text, DUPLICATE_KEY, dict(refusal))
        for label in labels:
            self._add_error_label(label)


# Every version of the server puts the name between these words.
_INDEX_NAME = re.compile(r" index: (\S+) dup key")


def translate(error: Exception, model: str, documents: Sequence[Mapping[str, Any]] = ()) -> Exception:
    """Return the error to raise instead of the driver's; the same one where that is clear enough."""
    if isinstance(error, TreadleError):
        return error
    if isinstance(error, ENCODING_ERRORS):
        return not_storable(error, model, documents)
    if not isinstance(error, PyMongoError):
        return error
    first = next(iter(refusals(error)), {})
    decisive = {getattr(error, "code", None), first.get("code")}
    if DOCUMENT_VALIDATION_FAILURE in decisive:
        return _refused_by_validator(first, model)
    if DUPLICATE_KEY in decisive:
        labels = [each for each in (TRANSIENT, OUTCOME_UNKNOWN, RETRYABLE) if error.has_error_label(each)]
        return DuplicateKey(model, first, labels)
    return _clearer_error(error, model) or error


def _clearer_error(error: PyMongoError, model: str) -> UsageError | None:
    codes = codes_of(error)
    if codes & ID_REFUSED:
        return UsageError(
            f"the server does not take this as the id of a {model}: no arrays, patterns, or names that begin "
            "with '$'",
            code="value-not-storable",
        )
    if TRANSACTION_TOO_LARGE in codes:
        return UsageError(
            f"this transaction writes more of {model} than the server's cache holds; write less at a time, "
            "or give the server a larger cache",
            code="transaction-too-large",
        )
    if OVERFLOW in codes and "nest" in message_of(error):
        return too_deep(model)
    if codes & TOO_LARGE:
        return UsageError(
            f"the {model} would grow beyond the 16 MB that MongoDB stores in one document; "
            "keep large or growing parts in documents of their own",
            code="document-too-large",
        )
    return None


def translate_update(error: Exception, model: str, documents: Sequence[Mapping[str, Any]]) -> Exception:
    """Do the same for an update, which the server may refuse for what it asks."""
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
    paths = sorted(_failed_paths(refusal.get("errInfo", {}).get("details"), ""))
    places = f" ({', '.join(paths)})" if paths else ""
    return DataError(
        f"the validator of {model}'s collection refused the document{places}; "
        "repair the value, or run setup() if the model has changed",
        code="validator-refused",
    )


def _failed_paths(details: Any, path: str) -> set[str]:
    """Return the innermost paths that the server's explanation names."""
    if isinstance(details, list):
        return {failed for item in details for failed in _failed_paths(item, path)}
    if not isinstance(details, dict):
        return set()
    name = details.get("propertyName")
    path = f"{path}.{name}".lstrip(".") if name else path
    failed = {f"{path}.{missing} is missing".lstrip(".") for missing in details.get("missingProperties", ())}
    failed = failed.union(*(_failed_paths(value, path) for value in details.values()))
    return failed or ({path} if name else failed)
