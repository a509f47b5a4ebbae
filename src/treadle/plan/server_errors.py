"""What the server's errors mean: the one place that knows its codes, its labels and its words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pymongo.errors import (
    BulkWriteError,
    CollectionInvalid,
    OperationFailure,
    PyMongoError,
    WriteConcernError,
    WriteError,
)

from treadle.errors import DataError, TreadleError, UsageError
from treadle.model.bson_types import Raw
from treadle.model.schema_check import join
from treadle.model.storable import ENCODING_ERRORS, not_storable

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
SNAPSHOT_TOO_OLD = 239
SNAPSHOT_UNAVAILABLE = 246
OPERATION_NOT_SUPPORTED_IN_TRANSACTION = 263
CHANGE_STREAM_FATAL = 280
CHANGE_STREAM_HISTORY_LOST = 286
OBJECT_TOO_LARGE = 10334
DUPLICATE_KEY = 11000
INTERRUPTED = 11601
GRAPH_LOOKUP_TOO_LARGE = 40099

# -- codes that come to the same -----------------------------------------------------------------

TOO_LARGE = frozenset({OBJECT_TOO_LARGE, 17419, 17420})
# Errors of one document that would stop all the others.
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
OUT_OF_TIME = frozenset({50, 262})
OUT_OF_MEMORY = frozenset({146, 292, 16945})
# A collection, while its documents were being read.
DROPPED = frozenset({NAMESPACE_NOT_FOUND, 175, 224})
# A time limit, a conflict, an interruption, a full disk, a shutdown: what any execution may fail of.
PASSING = frozenset({50, 91, 112, 189, 262, 290, 11600, 11601, 11602, 14031})
# Unreachable, not allowed, interrupted, out of time, of memory or of disk, not primary, a write concern.
SERVER_WIDE = (
    PASSING
    | UNAUTHORIZED
    | {6, 7, AUTHENTICATION_FAILED, 24, 64, 79, 89, 100, 133, 146, 202, 244, 251}
    | {OPERATION_NOT_SUPPORTED_IN_TRANSACTION, 9001, 10107, 13388, 13435, 13436}
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


def surely_not_committed(error: BaseException) -> bool:
    """Whether a failed transaction certainly left nothing behind, so that it may be run again."""
    # A write concern that was not met says nothing against the commit itself.
    return isinstance(error, Exception) and not (
        isinstance(error, WriteConcernError) or is_outcome_unknown(error)
    )


def refuses_transactions(error: BaseException) -> bool:
    """Whether a standalone server refused a transaction."""
    # The codes are those of many refusals; only the words tell this one.
    return (
        isinstance(error, OperationFailure)
        and error.code in (ILLEGAL_OPERATION, OPERATION_NOT_SUPPORTED_IN_TRANSACTION)
        and "replica set" in str(error)
    )


def exists_already(error: BaseException) -> bool:
    """Whether a collection or view could not be made because there is one; the driver's has no code."""
    return isinstance(error, CollectionInvalid) or NAMESPACE_EXISTS in codes_of(error)


# -- single documents ---------------------------------------------------------------------------------


def is_poison(error: BaseException) -> bool:
    """Whether a document is too large, or refused by its collection's validator."""
    return isinstance(error, OperationFailure) and error.code in POISON


def is_about_one_document(error: BaseException) -> bool:
    """Whether a document stands in the way: poison, or an expression that fails on it."""
    if not isinstance(error, OperationFailure):
        return False
    if isinstance(error, (WriteError, BulkWriteError)):
        # What is said of a single write is about its document, unless every write would fail of it.
        # Not a duplicate: it may be another writer's document, which is there by now.
        return any(
            each.get("code") not in SERVER_WIDE and each.get("code") != DUPLICATE_KEY
            for each in refusals(error)
        )
    # A command fails as a whole, with a code for each reason; that it was running, only the words tell.
    failed = "xecutor error" in str(error) and error.code not in PASSING and not is_transient(error)
    return error.code in POISON or failed


def lies_in_a_document(error: BaseException) -> bool:
    """Whether a write failed by its document: an expression, a validator, a size, an index.

    Not a connection, a right, a disk or a time limit, by which every document would fail.
    """
    if isinstance(error, ENCODING_ERRORS):
        return True
    if not isinstance(error, OperationFailure) or is_transient(error):
        return False
    if error.has_error_label("RetryableWriteError"):
        return False
    first = refusals(error)[:1] if isinstance(error, BulkWriteError) else []
    return (first[0].get("code") if first else error.code) not in SERVER_WIDE


def is_increment_overflow(refusal: Mapping[str, Any]) -> bool:
    """Whether the sum of an `$inc` would not fit into 64 bits."""
    # A bad value can be many things; only the words name the operator.
    return refusal.get("code") == BAD_VALUE and "$inc" in refusal.get("errmsg", "")


# -- clearer errors ---------------------------------------------------------------------------------


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
    if getattr(error, "code", None) in TOO_LARGE:
        return UsageError(
            f"the {model} would grow beyond the 16 MB that MongoDB stores in one document; "
            "keep large or growing parts in documents of their own",
            code="document-too-large",
        )
    return error


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
    failed = {join(path, f"{missing} is missing") for missing in details.get("missingProperties", ())}
    if isinstance(details.get("propertyName"), str):
        path = join(path, details["propertyName"])
        failed.add(path)
    for value in details.values():
        failed |= _failed_paths(value, path)
    return {
        each for each in failed if not any(other != each and other.startswith(each + ".") for other in failed)
    }
