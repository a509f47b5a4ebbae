"""What repeats another document's values without anybody keeping it right; nothing here talks to a server.

A *copy* is a field beside a reference that holds a field of the document
referred to: `customerName` beside `customer_id`. A *tally* is a number in a
parent that counts or sums its children: `review_count` in a product. Names
make a candidate, values decide: most must agree, and more than by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bson import Decimal128

from treadle.advisor.facts import NUMBERS, CollectionFacts, FieldFacts, Relation
from treadle.advisor.relations import singular, stem, subject, words
from treadle.advisor.structure import Steps, has_plain_path, is_plain_name
from treadle.query.keys import freeze

# Types that are copied; numbers with a fraction are prices and measures, which a copy keeps on purpose.
COPIED_TYPES = frozenset({"string", "bool", "date", "int", "long"})
COPIES_MAX = 6
TEXT_BYTES_MAX = 1_000
# What something cost, weighed or was on the day of the copy stays as it was.
SNAPSHOTS = frozenset(
    {"price", "cost", "amount", "rate", "tariff", "tax", "fee", "total", "discount", "salary", "balance"}
    | {"quantity", "qty", "stock", "count", "score", "points", "rank", "status", "state", "version"}
    | {"created", "updated", "modified", "at", "date", "time", "id", "address", "type", "kind"}
)
# A field that is called just like the source is its copy if it names something.
NAMES = frozenset({"name", "title", "handle", "username", "label", "firstname", "lastname", "nickname"})
AGREEMENT_MIN = 0.5
AGREEMENT_MIN_QUALIFIED = 0.8
# Cohen's kappa: how far the agreement exceeds what chance would give.
KAPPA_MIN = 0.4
KAPPA_MIN_UNNAMED = 0.6
COMPARED_MIN = 20
DISTINCT_COUNTED_MAX = 5_000

COUNTING = frozenset({"count", "counts", "num", "number", "no", "n", "nb", "nr", "total", "cnt", "of", "qty"})
SUMMING = frozenset(
    {"total", "sum", "spent", "revenue", "balance", "amount", "points", "turnover", "value", "hours"}
    | {"minutes", "paid", "sales", "weight", "score", "earned"}
)
SUMMED_FIELDS_MAX = 4
SUM_TOLERANCE = 0.005
TALLIED_MIN = 10


@dataclass(frozen=True, slots=True)
class CopyCandidate:
    """A field of the child that may repeat a field of the parent."""

    field: FieldFacts
    source: FieldFacts
    named: bool


def copy_candidates(
    child: CollectionFacts, relation: Relation, parent: CollectionFacts
) -> list[CopyCandidate]:
    """The fields beside a reference that may be copies, those whose names say so first."""
    reference = child.fields[relation.path]
    if child.name == parent.name or reference.name == "[]":
        return []
    around = reference.steps[:-1]
    owner = next((step for step in reversed(around) if step != "[]"), "")
    is_card = reference.name in ("_id", "id") and bool(around)
    about = {stem(owner) if is_card else stem(reference.name), subject(parent.name)} - {()}
    sources = {
        _normal(each.name): each for each in parent.top() if _is_copied(each) and each.path != relation.key
    }
    found: list[CopyCandidate] = []
    for each in child.fields.values():
        if each.path == relation.path or not _is_copied(each) or not has_plain_path(each):
            continue
        source, named = _source(each, around, about, sources, is_card)
        if source is not None and _alike(each, source):
            found.append(CopyCandidate(each, source, named))
    found.sort(key=lambda candidate: (not candidate.named, candidate.field.path))
    return found[:COPIES_MAX]


def _source(
    each: FieldFacts,
    around: Steps,
    about: set[tuple[str, ...]],
    sources: Mapping[str, FieldFacts],
    is_card: bool,
) -> tuple[FieldFacts | None, bool]:
    """Which field it may repeat, and whether the names say so."""
    name = _normal(each.name)
    if each.steps[:-1] == around:
        for prefix in map("".join, about):
            if name.startswith(prefix) and name[len(prefix) :] in sources:
                return sources[name[len(prefix) :]], True
        source = sources.get(name)
        return source, is_card
    # A card beside the reference: customer.name.
    if each.steps[:-2] == around and len(each.steps) > 1 and stem(each.steps[-2]) in about:
        return sources.get(name), True
    return None, False


def _normal(name: str) -> str:
    return name.replace("_", "").lower()


def _is_copied(each: FieldFacts) -> bool:
    if len(each.value_types) != 1 or each.type not in COPIED_TYPES or (each.bytes_max or 0) > TEXT_BYTES_MAX:
        return False
    return not SNAPSHOTS & set(words(each.name))


def _alike(one: FieldFacts, other: FieldFacts) -> bool:
    return one.type == other.type or {one.type, other.type} <= NUMBERS


@dataclass(slots=True)
class Comparison:
    """Pairs of a copy and its source, as they come."""

    compared: int = 0
    stale: int = 0
    absent: int = 0
    _copies: Counter[Any] = field(default_factory=Counter)
    _sources: Counter[Any] = field(default_factory=Counter)

    def add(self, copy: Any, source: Any) -> None:
        if copy is None:
            self.absent += source is not None
            return
        self.compared += 1
        one, other = freeze(copy), freeze(source)
        self.stale += one != other
        for counter, value in ((self._copies, one), (self._sources, other)):
            if value in counter or len(counter) < DISTINCT_COUNTED_MAX:
                counter[value] += 1

    @property
    def agreement(self) -> float:
        return 1 - self.stale / self.compared if self.compared else 0.0

    @property
    def kappa(self) -> float:
        """How far they agree beyond chance: 1 is always, 0 is as often as by chance."""
        total = self.compared**2 or 1
        chance = sum(number * self._sources[value] for value, number in self._copies.items()) / total
        return (self.agreement - chance) / (1 - chance) if chance < 1 else 0.0

    def is_copy(self, named: bool) -> bool:
        """Whether the field repeats the other at all."""
        if self.compared < COMPARED_MIN or self.agreement < AGREEMENT_MIN:
            return False
        return self.kappa >= (KAPPA_MIN if named else KAPPA_MIN_UNNAMED)


def pairs(
    row: Mapping[str, Any], around: Steps, reference: Steps, copies: list[Steps]
) -> Iterator[tuple[Any, list[Any]]]:
    """Each reference of a document with the copies beside it; steps are relative to what is around them."""
    for holder in _holders(row, around):
        key = _inside(holder, reference)
        if key is not None:
            yield key, [_inside(holder, copy) for copy in copies]


def _holders(value: Any, steps: Steps) -> Iterator[Any]:
    if not steps:
        yield value
    elif steps[0] == "[]":
        for item in value if isinstance(value, list) else ():
            yield from _holders(item, steps[1:])
    elif isinstance(value, Mapping) and steps[0] in value:
        yield from _holders(value[steps[0]], steps[1:])


def _inside(value: Any, steps: Steps) -> Any:
    for step in steps:
        value = value.get(step) if isinstance(value, Mapping) else None
    return None if isinstance(value, (list, Mapping)) else value


# -- tallies ---------------------------------------------------------------------------


def count_fields(parent: CollectionFacts, relation: Relation) -> list[FieldFacts]:
    """The whole numbers of a parent whose names say that they count these children."""
    about = subject(relation.child)
    plural = words(relation.child.rpartition(".")[2] or relation.child)
    found = []
    for each in _numbers(parent):
        parts = words(each.name)
        bare = tuple(part for part in parts if part not in COUNTING)
        # `num_site_comments` counts comments, but perhaps not all; the values decide.
        named = bool(bare) and singular(bare)[-len(about) :] in (about, about[-1:])
        # `reviews: 17` counts too, but `review: 17` is some number of one review.
        if named and (len(bare) < len(parts) or parts in (plural, plural[-1:])):
            found.append(each)
    return found


def sum_fields(
    parent: CollectionFacts, relation: Relation, child: CollectionFacts
) -> tuple[list[FieldFacts], list[FieldFacts]]:
    """Numbers of a parent that may be sums, and the numbers of the children that they may be sums of."""
    keys = {relation.path, relation.key}
    sums = [each for each in _numbers(parent) if each.path not in keys and SUMMING & set(words(each.name))]
    summed = [each for each in _numbers(child) if each.path not in keys and words(each.name)[-1:] != ("id",)]
    return sums[:SUMMED_FIELDS_MAX], summed[:SUMMED_FIELDS_MAX]


def _numbers(facts: CollectionFacts) -> list[FieldFacts]:
    return [
        each
        for each in facts.top()
        if each.value_types and set(each.value_types) <= NUMBERS and is_plain_name(each.name)
    ]


def same_number(stored: Any, actual: Any) -> bool:
    """Whether a stored number is the actual one, but for the rounding of floats."""
    one, other = (_float(value) for value in (stored, actual))
    return abs(one - other) <= SUM_TOLERANCE + 1e-9 * abs(other)


def _float(value: Any) -> float:
    if isinstance(value, Decimal128):
        return float(value.to_decimal())
    return float(value) if isinstance(value, (int, float)) else 0.0


def is_plainly_named(each: FieldFacts, relation: Relation) -> bool:
    """Whether a name says nothing but what is counted: `review_count`, not `approved_review_count`."""
    bare = tuple(part for part in words(each.name) if part not in COUNTING)
    about = subject(relation.child)
    return singular(bare) in (about, about[-1:])


def is_tally(compared: int, drifted: int, plain: bool) -> bool:
    """Whether a number follows the children at all; where both are none, that proves nothing."""
    least = AGREEMENT_MIN if plain else AGREEMENT_MIN_QUALIFIED
    return compared >= TALLIED_MIN and drifted <= compared * (1 - least)
