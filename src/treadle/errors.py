"""Three errors, told apart by who can mend them.

`DeclarationError` is the model author's, `DataError` is about what was found
in the database, `UsageError` is the caller's. Each carries a `code` that has
a heading of its own in `docs/errors.md`.
"""

from __future__ import annotations


class TreadleError(Exception):
    """The base of all errors that Treadle raises on purpose."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling.
        return (_rebuild, (type(self), str(self), self.code))


def _rebuild(kind: type[TreadleError], message: str, code: str) -> TreadleError:
    return kind(message, code=code)


class DeclarationError(TreadleError):
    """A model or a pattern is declared in a way that cannot work."""


class DataError(TreadleError):
    """The database holds, or refuses, something; the message says where."""


class UsageError(TreadleError):
    """A call cannot be carried out as it was made; nothing was changed."""
