"""The stored paths of a model: which of them callers do not write, and what filters and updates may name."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, TypeAlias

from treadle.query.field_paths import FieldPaths
from treadle.query.paths import Path

# How a caller's write sets a path: to the server's time, or to one more than before.
Touch: TypeAlias = Literal["now", "next"]
# An owned path has no such value.
NO_VALUE: Final = object()


class Owned(NamedTuple):
    """A stored path of the target that callers do not write."""

    path: str
    # How the refusal of an update ends: what maintains the path, or what to do instead.
    advice: str = " from the document's other fields; write those instead"
    # Whether an insert may set it.
    insert_may_set: bool = False
    # What a caller's own write of the document sets it to: the server's time, or one more than before.
    on_write: Touch | None = None
    # Whether that is done by inserts only.
    insert_only: bool = False
    # The first value of a path that is written all the time: a replace keeps what is stored at that moment.
    initial: Any = NO_VALUE
    # What a new document holds there, whatever its caller passed.
    blank: Any = NO_VALUE
    # Whether it is filled again after each write, so that callers may write what surrounds it.
    refilled: bool = False
    # Whether other rules may own it as well, such as a date of computation.
    shared: bool = False


class ModelPaths:
    """The stored paths of one model that have a meaning of their own."""

    def __init__(self, fields: FieldPaths) -> None:
        # The paths that filters, updates and sorts may name.
        self.fields = fields
        # What callers do not write, in documents of the model and in any that a filter on it may match.
        self.owned: dict[str, Owned] = {}
        self.owned_in_collection = self.owned
        # The unique fields other than the id by which documents of other models refer to this one's.
        self.alternate_keys: dict[str, Path] = {}
        # The date of a soft delete; None where deleted documents are removed.
        self.deletion: str | None = None

    def kept_on_replace(self) -> dict[str, Any]:
        """Return the paths that a replace leaves as they are stored, each with its first value."""
        return {path: owned.initial for path, owned in self.owned.items() if owned.initial is not NO_VALUE}
