"""The tree of one model: its nodes, how they hold their places, and the errors about them."""

from __future__ import annotations

from typing import Any

from treadle.errors import DataError
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import REVISION
from treadle.model.bson_types import RESERVED
from treadle.patterns.tree.representations import NODE, ByChildren, ByPath, Representation, Selection
from treadle.plan import Plan, Raw, Read, find, find_one
from treadle.query.filters import Sort, sort_keys

# The parent that a soft-deleted node had, where its own fields do not say so.
FORMER_PARENT = f"{RESERVED}.above"


class Tree:
    """The tree of one model."""

    def __init__(self, entry: ModelEntry, representation: Representation, sort: Sort) -> None:
        self.entry = entry
        self.name = entry.model.__name__
        self.collection = entry.collection
        self.representation = representation
        # How siblings are read where the caller does not say.
        self.sort = sort
        # What a node's place is told by.
        self.projection: Raw = dict.fromkeys(["_id", REVISION, *representation.fields], 1)

    def active(self, condition: Raw) -> Raw:
        """Return a condition on the nodes of the tree, of which soft-deleted ones are none."""
        deletion = self.entry.paths.deletion
        return condition if deletion is None else {**condition, deletion: None}

    @property
    def lists(self) -> ByChildren | None:
        """The representation, where nodes list their children."""
        return self.representation if isinstance(self.representation, ByChildren) else None

    @property
    def paths(self) -> ByPath | None:
        """The representation, where only paths say whose child a node is."""
        return self.representation if isinstance(self.representation, ByPath) else None

    # -- reading -----------------------------------------------------------------------------------

    def read(self, selection: Selection, sort: Sort | None = None, limit: int = 0) -> Read:
        """Return the read of the nodes of a selection."""
        keys = sort_keys(sort, self.entry.paths.fields)
        if isinstance(selection, list):
            return self._aggregate(selection, keys, limit)
        if self.representation.path in selection and keys and keys[0][0] != self.representation.path:
            # A field that no node has, so that no index gives this order: the server would rather go
            # through the whole index on _id than sort the few nodes of a range.
            keys = [(NODE, 1), *keys]
        options: Raw = {"sort": keys, "limit": limit}
        if sort is not None:
            options["allow_disk_use"] = True
        return Read(self.collection, "find", (self.active(selection),), options)

    def _aggregate(self, stages: list[Raw], keys: list[tuple[str, int]] | None, limit: int) -> Read:
        if keys:
            stages = [*stages, {"$sort": dict(keys)}]
        if limit:
            stages = [*stages, {"$limit": limit}]
        if active := self.active({}):
            stages = [{"$match": active}, *stages]
        return Read(self.collection, "aggregate", (stages,), {"allowDiskUse": True})

    def find(self, condition: Raw, projection: Raw | None = None, **options: Any) -> Plan[list[Raw]]:
        return find(self.collection, self.active(condition), projection, **options)

    def find_one(self, condition: Raw, projection: Raw | None = None) -> Plan[Raw | None]:
        return find_one(self.collection, self.active(condition), projection)

    def first_id(self, condition: Raw) -> Plan[Any]:
        """Return the id of a node that meets a condition; None if none does."""
        node = yield from self.find_one(condition, {"_id": 1})
        return None if node is None else node["_id"]

    # -- errors ------------------------------------------------------------------------------------

    def node_missing(self, key: Any) -> DataError:
        return DataError(
            f"{self.name} {key!r} is not in the tree; another writer may have removed it",
            code="tree-node-missing",
        )

    def parent_missing(self, key: Any) -> DataError:
        restored = "" if self.entry.paths.deletion is None else ", or restore it"
        return DataError(
            f"there is no {self.name} {key!r} to be the parent; insert it first{restored}",
            code="tree-parent-missing",
        )

    def not_rebuilt(self, key: Any) -> DataError:
        fields = " and ".join(repr(field) for field in self.representation.fields)
        return DataError(
            f"{self.name} {key!r} lacks what the tree keeps in {fields}; run `treadle rebuild`, or "
            f"store.rebuild({self.name})",
            code="tree-not-rebuilt",
        )

    def cycle(self) -> DataError:
        return DataError(
            f"nodes of {self.name} are each other's ancestors, because of a write that bypassed Treadle; run "
            f"store.repair({self.name})",
            code="tree-cycle",
        )

    def segment_taken(self) -> DataError:
        return DataError(
            f"there is a {self.name} with this path already; siblings need different "
            f"{self.representation.segment!r}",
            code="tree-segment-taken",
        )
