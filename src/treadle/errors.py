"""The errors of Treadle, by who can correct them.

`DeclarationError` is the model author's, `DataError` is about what the
database holds, `UsageError` is the caller's. Each has a `code`, which has a
heading in `docs/errors.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MESSAGE_LENGTH_MAX = 4_000


class TreadleError(Exception):
    """The base of all errors that Treadle raises on purpose; its text ends with its code."""

    def __init__(self, message: str, *, code: str) -> None:
        if len(message) > MESSAGE_LENGTH_MAX:
            # A caller's value may be of any length.
            message = f"{message[: MESSAGE_LENGTH_MAX // 2]} … {message[-MESSAGE_LENGTH_MAX // 2 :]}"
        super().__init__(message)
        self.message = message
        self.code = code

    def __str__(self) -> str:
        return f"{self.message} — {self.code}"

    def __reduce__(self) -> tuple[object, ...]:
        # By default, pickling loses keyword-only arguments and the attributes of subclasses.
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(kind: type[TreadleError], arguments: tuple[object, ...]) -> TreadleError:
    error = kind.__new__(kind)
    error.args = arguments
    return error


class NotSetUp(UserWarning):
    """A Store writes to a database in which `setup()` has not made all indexes."""


class DeclarationError(TreadleError):
    """A model or a pattern is declared in a way that cannot work."""


class DataError(TreadleError):
    """The database holds, or refuses, something; the message says where."""


class UsageError(TreadleError):
    """A call cannot be carried out as it was made; nothing was changed."""


class InvalidValue(UsageError, DataError):
    """An update would make a document that does not fit its model; nothing was changed.

    Also a `DataError`, which is what reading such a document raises.
    """


class NotFound(UsageError):
    """A document that the call requires does not exist."""

    def __init__(self, model: str, identity: object = None, *, code: str = "document-missing") -> None:
        which = "matches the filter" if identity is None else f"has the id {identity!r}"
        super().__init__(f"no {model} {which}; use get or find_one where it may be missing", code=code)
        self.model = model
        self.identity = identity


class Conflict(UsageError):
    """Another writer has changed the document since the caller read it."""

    def __init__(self, model: str, identity: object, *, code: str = "document-changed") -> None:
        super().__init__(
            f"{model} {identity!r} was changed by another writer since it was read; read it again and "
            "repeat the change",
            code=code,
        )
        self.model = model
        self.identity = identity


@dataclass(frozen=True)
class Failure:
    """Why one document or operation of a bulk write was refused; positions count from 0."""

    position: int
    reason: str
    code: str


class BulkFailed(DataError):
    """Some writes of a bulk were refused; the others are stored, with what is derived from them."""

    def __init__(self, failures: Sequence[Failure], of: int, *, code: str = "bulk-failed") -> None:
        first = failures[0]
        super().__init__(
            f"{len(failures)} of {of} writes were refused, the others were done; the first is number "
            f"{first.position}: {first.reason}",
            code=code,
        )
        self.failures = list(failures)


class PartlyDone(DataError):
    """A write of many documents ended at one that was refused; those before it stay written.

    `done` is how many were written, or None where the server did not say; the
    cause is why the write ended.
    """

    def __init__(self, model: str, done: int | None, cause: Exception, *, code: str = "partly-done") -> None:
        reason = cause.message if isinstance(cause, TreadleError) else str(cause)
        for claim in ("; nothing was changed", "; nothing of it was written"):
            # True of the one document, not of the whole call.
            reason = reason.removesuffix(claim)
        number = f"{done} were" if done is not None else "some may have been"
        super().__init__(
            f"not all {model} documents were written: {number} before one was refused, and stay so; it was "
            f"refused because {reason}",
            code=code,
        )
        self.done = done
