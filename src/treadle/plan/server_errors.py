"""What the server's errors mean."""

from __future__ import annotations

from pymongo.errors import BulkWriteError, OperationFailure

# Errors of one document that would stop all the others: too large, or refused by the validator.
POISON = frozenset({10334, 17419, 17420, 121})
# What an execution may also fail of: a time limit, a conflict, an interruption, a full disk, a shutdown.
PASSING = frozenset({50, 91, 112, 189, 262, 290, 11600, 11601, 11602, 14031})


def is_poison(error: BaseException) -> bool:
    """Whether an error is about a single document rather than about the whole."""
    return isinstance(error, OperationFailure) and error.code in POISON


def is_about_one_document(error: OperationFailure) -> bool:
    """Whether a document stands in the way: poison, or an expression that fails on it."""
    if isinstance(error, BulkWriteError):
        refusals = (error.details or {}).get("writeErrors", [])
        return any(
            each.get("code") in POISON or "PlanExecutor error" in str(each.get("errmsg")) for each in refusals
        )
    fails = "PlanExecutor error" in str(error) and error.code not in PASSING
    return error.code in POISON or (fails and not error.has_error_label("TransientTransactionError"))
