"""How many nodes of a large subtree go at once, and what brings them to a halt."""

from __future__ import annotations

from typing import Any

from pymongo.errors import OperationFailure

from treadle.errors import DataError
from treadle.plan.server_errors import is_about_one_document


class Pace:
    """How many nodes go at once: fewer where one stands in the way, until it is alone."""

    def __init__(self, chunk: int) -> None:
        self.most = self._chunk = chunk
        self.tried: list[Any] = []

    def slower(self, error: Exception) -> bool:
        """Whether fewer may be tried; False if the one that was tried is itself in the way."""
        if not in_the_way(error):
            raise error
        if self.most == 1:
            return False
        self.most = max(1, min(self.most, len(self.tried)) // 8)
        return True

    def faster(self) -> None:
        self.most = min(self.most * 4, self._chunk)


def in_the_way(error: Exception) -> bool:
    """Whether one node cannot be written, as it is too large or invalid, or its path is taken."""
    if isinstance(error, DataError):
        return error.code == "tree-segment-taken"
    return isinstance(error, OperationFailure) and is_about_one_document(error)
