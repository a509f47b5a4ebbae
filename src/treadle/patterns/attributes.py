"""Attributes: many optional, searchable fields as `[{"k": …, "v": …}]` under one index.

The invariant: each name is there once, and every filter on a name is one that
the index serves. How filters, updates and sorts are translated is in
`query/attributes.py`, how a dict is stored and read in `model/attributes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from pymongo import ASCENDING, IndexModel

from treadle.engine.expected_rule import ExpectedRule
from treadle.errors import DataError, DeclarationError
from treadle.graph.owned import Owned
from treadle.graph.quarantine import set_aside
from treadle.graph.rule import STATE, Models, Pattern, Place, Reads, Rule, Storage
from treadle.graph.stored_pages import quarantine_quietly
from treadle.model.attributes import Pairs
from treadle.model.codec import codec_of
from treadle.plan import Plan, Raw
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


class AttributesRule(ExpectedRule):
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

    # -- verify and repair ---------------------------------------------------------------------------

    def expected(self, documents: Sequence[Raw]) -> Plan[list[Mapping[str, Any]]]:
        for document in documents:
            if not is_understood(value_at(document, self.path)):
                yield from quarantine_quietly(partial(self._quarantine, document["_id"]))
        return [{self.path: in_order(value_at(document, self.path))} for document in documents]

    def _quarantine(self, key: Any) -> Plan[None]:
        error = DataError(
            f"{self.place.label} of {key!r} holds elements that are not attributes; each is "
            '{"k": text, "v": value}: repair them by hand',
            code="document-invalid",
        )
        yield from set_aside(self.place.label, self.target.collection, key, error)


def is_understood(stored: Any) -> bool:
    """Whether all elements are pairs; other values are for the validator to judge."""
    return not isinstance(stored, list) or all(map(_is_pair, stored))


def _is_pair(each: Any) -> bool:
    return isinstance(each, dict) and isinstance(each.get("k"), str) and "v" in each


def in_order(stored: Any) -> Any:
    """Return pairs as they should be: of a repeated name the last, a plain dict as pairs.

    Elements of other writers that are not pairs stay where they are.
    """
    if isinstance(stored, dict):
        return [{"k": name, "v": value} for name, value in stored.items()]
    if not isinstance(stored, list):
        return stored
    by_name: dict[Any, Any] = {}
    for position, each in enumerate(stored):
        by_name[each["k"] if _is_pair(each) else position] = each
    return list(by_name.values())
