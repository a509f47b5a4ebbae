"""Text from data on its way to a terminal, a log or JSON, and the loggers of the library.

A log line names documents by collection and `_id`, and never quotes them.
Loggers are children of `treadle`, one for each package: `treadle.upkeep`.
"""

from __future__ import annotations

import logging
import sys


def escape_text(value: object, length: int | None = None) -> str:
    """Return a value as one line of printable text; text as it is, anything else as its `repr`.

    Control characters, and those that change the direction of text, become escapes.
    """
    text = value if isinstance(value, str) else repr(value)
    if length is not None:
        text = _shorten(text, length)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def escape_lines(text: str) -> str:
    """Escape text of several lines, and keep its line breaks."""
    return "\n".join(map(escape_text, text.split("\n")))


def quote(value: object, length: int = 200) -> str:
    """Return the `repr` of a caller's value for a message; never long, and never an error itself."""
    try:
        return _shorten(repr(value), length)
    except Exception:  # whatever the caller's own __repr__ raises
        return f"this {type(value).__name__}"


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


class _WithoutValues(logging.Filter):
    """Escapes each message, and logs only the code of a server error, whose text may quote a document."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_without_values, record.args))
        record.msg, record.args = escape_lines(record.getMessage()), ()
        return True


def _without_values(argument: object) -> object:
    # The driver is not imported for this: `treadle --help` would wait for it.
    errors = sys.modules.get("pymongo.errors")
    if errors is not None and isinstance(argument, errors.OperationFailure):
        return f"{type(argument).__name__}, code {argument.code}"
    return argument


_WITHOUT_VALUES = _WithoutValues()


def get_logger(module: str) -> logging.Logger:
    """Return the logger of a module's package."""
    logger = logging.getLogger(".".join(module.split(".")[:2]))
    # A filter of `treadle` alone would not see what its children log.
    logger.addFilter(_WITHOUT_VALUES)
    return logger


get_logger("treadle")
