"""What a finding proposes, as data: fields and indexes that a plan applies, and what it leaves as text.

A `Draft` is merged with others, rendered as Python (`model_text.py`), used to rewrite requests, and written
to a plan's file and read back. All paths are stored names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Keys = tuple[tuple[str, int], ...]
Operator = Literal["copy", "top", "count", "sum", "average", "min", "max"]


class Conflict(Exception):
    """Two drafts ask for different things in one place."""


@dataclass(frozen=True, slots=True)
class Derived:
    """One maintained field that a finding proposes, in the documents of `target`.

    A copy refers to its source: `by` is a field of the target, and holds the
    source's `key`. For any other operator `by` is a field of the source, and
    holds the target's `key`.
    """

    target: str
    name: str
    source: str
    by: str
    key: str = "_id"
    operator: Operator = "copy"
    # The fields of the source that are copied or aggregated; none for a count.
    of: tuple[str, ...] = ()
    # Of "top": the order of the sources, and how many there are at most.
    sort: Keys = ()
    size: int = 0
    # The name to take where another proposal has the name: it says by which reference.
    other_name: str = ""

    @property
    def relation(self) -> tuple[str, str, str, str]:
        """Equal for values that are made from the same sources."""
        return self.target, self.source, self.key, self.by

    @property
    def operation(self) -> tuple[str, str]:
        """The operator of an aggregate, and the field that it aggregates."""
        return self.operator, self.of[0] if self.of else ""

    @property
    def order(self) -> Keys:
        """The order of the sources with the tie-break that Treadle adds."""
        return self.sort if "_id" in dict(self.sort) else (*self.sort, ("_id", 1))

    @property
    def paths(self) -> Mapping[str, str]:
        """The fields of a copied source, and where their copies are."""
        return {field: f"{self.name}.{field}" for field in self.of}


@dataclass(frozen=True, slots=True)
class Index:
    """An index on the documents of a collection; without a name, the server's own name is free."""

    collection: str
    keys: Keys
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A pattern on a field that is stored already, as source."""

    collection: str
    path: str
    pattern: str


@dataclass(frozen=True, slots=True)
class Line:
    """A field of a model as source; it takes the place of the stored field `replaces`, if that is given."""

    collection: str
    source: str
    replaces: str = ""


@dataclass(frozen=True, slots=True)
class Draft:
    """All that findings propose."""

    derived: tuple[Derived, ...] = ()
    indexes: tuple[Index, ...] = ()
    # Patterns that no plan applies.
    wrapped: tuple[Wrapped, ...] = ()
    lines: tuple[Line, ...] = ()
    # Whole classes, of collections that are not there yet.
    classes: tuple[str, ...] = ()

    @property
    def copies(self) -> tuple[Derived, ...]:
        return tuple(each for each in self.derived if each.operator == "copy")

    @property
    def firsts(self) -> tuple[Derived, ...]:
        """The fields that hold the first few sources."""
        return tuple(each for each in self.derived if each.operator == "top")

    @property
    def values(self) -> tuple[Derived, ...]:
        """The counts, sums and the like."""
        return tuple(each for each in self.derived if each.operator not in ("copy", "top"))

    @property
    def collections(self) -> frozenset[str]:
        """The collections that a plan of this draft reads, fills or indexes."""
        ends = {name for each in self.derived for name in (each.source, each.target)}
        return frozenset(ends | {each.collection for each in self.indexes})

    @property
    def can_apply(self) -> bool:
        """Whether there is anything in it that a plan applies."""
        return bool(self.derived or self.indexes)

    def fields(self, collection: str) -> list[str]:
        """The fields that it adds to a collection."""
        return [each.name for each in self.derived if each.target == collection]


def merge(drafts: Iterable[Draft]) -> Draft:
    """One draft of several, the first ones first; raises `Conflict` where two cannot go together."""
    listed = list(drafts)
    fields: dict[tuple[str, str], Derived] = {}
    for each in (each for draft in listed for each in draft.derived):
        if fields.get((each.target, each.name), each) != each:
            each = replace(each, name=each.other_name or each.name)
        if fields.setdefault((each.target, each.name), each) != each:
            raise Conflict(f"{each.target}.{each.name} is proposed already, with another value")
    return Draft(
        tuple(fields.values()),
        without_prefixes([each for draft in listed for each in draft.indexes]),
        tuple(dict.fromkeys(each for draft in listed for each in draft.wrapped)),
        tuple(dict.fromkeys(each for draft in listed for each in draft.lines)),
        tuple(dict.fromkeys(each for draft in listed for each in draft.classes)),
    )


def without_prefixes(indexes: Iterable[Index], others: Iterable[Index] = ()) -> tuple[Index, ...]:
    """The indexes with whose keys no other one of the collection begins, each once."""
    listed = list(dict.fromkeys(indexes))
    known = [*listed, *others]

    def is_prefix(own: Index) -> bool:
        same = [each.keys for each in known if each.collection == own.collection]
        return any(len(own.keys) < len(keys) and keys[: len(own.keys)] == own.keys for keys in same)

    return tuple(each for each in listed if not is_prefix(each))
