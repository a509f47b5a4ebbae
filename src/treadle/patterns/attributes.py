"""Attributes: many optional, searchable fields as `[{"k": …, "v": …}]` under one index.

What it keeps right: each name is there once, and every filter on a name is
one that the index serves. How filters, updates and sorts are translated is in
`query/attributes.py`, how a dict is stored and read in `model/attributes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pymongo import ASCENDING, IndexModel, UpdateOne

from treadle.engine.version_upgrade import lower_documents, upgrade_matching_upgraded
from treadle.errors import DeclarationError
from treadle.graph.changes import Changes
from treadle.graph.outcomes import Finding
from treadle.graph.owned import Owned
from treadle.graph.rule import STATE, Models, Pattern, Place, Reads, Rule, Storage
from treadle.graph.scope import Image
from treadle.model.attributes import Pairs
from treadle.model.codec import codec_of
from treadle.plan import Plan, Raw, bulk_write, by_id, transact
from treadle.query.comparison import identical
from treadle.query.paths import value_at

# Neighbouring keys are much alike; as one index it holds no fewer of them than many would.
COMPRESSED: Raw = {"wiredTiger": {"configString": "block_compressor=zstd"}}


@dataclass(frozen=True)
class Attributes(Pattern, Pairs):
    """A dict whose names are searched for in turn: `specs: Annotated[dict[str, str | int], Attributes()]`."""

    pattern: ClassVar[str] = "attributes"

    def bind(self, place: Place, graph: Models) -> Rule:
        shape = place.field.shape
        if place.in_array or shape.kind != "map" or shape.items[0].python is not str:
            raise DeclarationError(
                f"{place.label} must be a dict[str, …] of the document itself or of a nested model, to be "
                "stored as attributes",
                code="maintained-type",
            )
        return AttributesRule(place)


class AttributesRule(Rule):
    """Attributes at their place."""

    pattern = "attributes"

    def reads(self) -> Reads:
        return {self.target.collection: set()}

    def owns(self) -> Sequence[Owned]:
        # The pairs are the caller's own.
        return [Owned(f"{STATE}.{self.path}")]

    def storage(self) -> Storage:
        keys = [(f"{self.path}.k", ASCENDING), (f"{self.path}.v", ASCENDING)]
        return Storage(indexes=[(self.target, IndexModel(keys, storageEngine=COMPRESSED))])

    def check(self, graph: Models) -> None:
        family = self.target.kinds.family.members if self.target.kinds.family is not None else []
        for other in family:
            own = codec_of(other.model)
            if self.path in own.by_stored and self.path not in own.pairs:
                raise DeclarationError(
                    f"{self.place.label} is stored as attributes, but {other.model.__name__} has a plain "
                    f"{self.path!r} in the same collection, and no filter could mean both; rename one",
                    code="maintained-type",
                )

    # -- proof and repair ----------------------------------------------------------------------------

    def verify(self, page: Sequence[Raw] | None) -> Plan[list[Finding]]:
        findings = []
        for document in page or ():
            stored = value_at(document, self.path)
            expected = in_order(stored)
            if not identical(stored, expected):
                name = self.target.model.__name__
                findings.append(Finding(self.pattern, name, document["_id"], self.path, stored, expected))
        return findings
        yield  # pragma: no cover (a plan that asks for nothing)

    def repair(self, keys: Sequence[Any] | None) -> Plan[list[Any]]:
        wrong = (yield from self._wrong(keys)) if keys else []
        if any(image.outdated for image in wrong):
            ids = [image.document["_id"] for image in wrong]
            yield from transact(lambda: self._upgrade({"_id": {"$in": ids}}))
            wrong = yield from self._wrong(ids)
        operations = []
        for image in wrong:
            stored = value_at(image.document, self.path)
            # Only the value that was read; another writer may have changed it since.
            seen = {**by_id(image.document["_id"]), self.path: {"$eq": stored}}
            operations.append(UpdateOne(seen, {"$set": {self.path: in_order(stored)}}))
        if operations:
            yield from bulk_write(self.target.collection, operations, ordered=False)
        return [image.document["_id"] for image in wrong]

    def _wrong(self, ids: Sequence[Any]) -> Plan[list[Image]]:
        """Return those of some documents whose pairs are not as they should be."""
        images = yield from self.target.targets.with_deleted.find({"_id": {"$in": list(ids)}})
        values = [(image, value_at(image.document, self.path)) for image in images]
        return [image for image, stored in values if not identical(stored, in_order(stored))]

    def _upgrade(self, own: Raw) -> Plan[None]:
        """Store outdated documents in the current version, where the field may have another name."""
        changes = Changes()
        yield from upgrade_matching_upgraded(self.target, own, changes, [self.path])
        yield from lower_documents(changes)


def in_order(stored: Any) -> Any:
    """Pairs as they should be: each name once, of a doubled one the last; a plain dict as pairs."""
    if isinstance(stored, dict):
        return [{"k": name, "v": value} for name, value in stored.items()]
    if not isinstance(stored, list):
        return stored
    by_name: dict[Any, Raw] = {}
    for each in stored:
        if isinstance(each, dict) and isinstance(each.get("k"), str) and "v" in each:
            by_name[each["k"]] = each
    return list(by_name.values())
