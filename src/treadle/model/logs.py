"""The log: it names documents by collection and `_id`, and never quotes them.

The logger is `treadle`, with a child per room: `treadle.upkeep`.
"""

from __future__ import annotations

import logging

from pymongo.errors import OperationFailure

from treadle.model.shown import shown_lines


class _Discreet(logging.Filter):
    """Lets a message name documents, but never quote them, and steer no terminal.

    What the server says of a document may quote it, so that only its code is logged.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                f"{type(each).__name__}, code {each.code}" if isinstance(each, OperationFailure) else each
                for each in record.args
            )
        record.msg, record.args = shown_lines(record.getMessage()), ()
        return True


_DISCREET = _Discreet()


def logger(module: str) -> logging.Logger:
    """The logger of a module's room. A filter of `treadle` alone would not see what its children log."""
    made = logging.getLogger(".".join(module.split(".")[:2]))
    made.addFilter(_DISCREET)
    return made


logger("treadle")
