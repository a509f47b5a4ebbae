"""What repeats another document's values without anybody keeping it right; nothing here talks to a server.

A *copy* is a field beside a reference that holds a field of the document
referred to: `customerName` beside `customer_id`. A *tally* is a number in a
parent that counts or sums its children: `review_count` in a product. Names
make a candidate, values decide: most must agree, and more than by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bson import Decimal128

from treadle.advisor.facts import NUMBERS, CollectionFacts, FieldFacts, Relation
from treadle.advisor.naming import singular, stem, subject, words
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
# Of a field that is named after its source, a part that agrees far beyond chance shows that it was copied and
# that nothing maintains it, however few are right today.
DRIFTED_AGREEMENT_MIN = 0.1
DRIFTED_CHANCE_MAX = 0.05
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
AVERAGING = frozenset({"average", "avg", "mean"})
# What is mostly an average where it has a fraction: `rating: 4.3` of reviews with a rating each.
AVERAGED = frozenset({"rating", "score", "stars", "grade"})
DECIMALS_MAX = 4
ROUNDED_SHARE_MIN = 0.8
EXACT = 1e-9
KIN_LETTERS_MIN = 5
KIN_SHARE_MIN = 0.6
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
    nested = _nested_sources(parent)
    found: list[CopyCandidate] = []
    for each in child.fields.values():
        if each.path == relation.path or not _is_copied(each) or not has_plain_path(each):
            continue
        beside = each.steps[:-1] == around and not is_card
        known = {**nested, **sources} if beside else sources
        source, named = _source(each, around, about, known, is_card)
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


def _nested_sources(parent: CollectionFacts) -> dict[str, FieldFacts]:
    """The fields of objects, `profile.name`, by their own names and by those with the object's."""
    found: dict[str, list[FieldFacts]] = {}
    for each in parent.fields.values():
        if len(each.steps) != 2 or not all(map(is_plain_name, each.steps)) or each.in_array or each.is_map:
            continue
        # What has a unique index is referred to.
        is_key = any(index.unique and index.fields == (each.path,) for index in parent.indexes)
        if _is_copied(each) and not is_key and not SNAPSHOTS & set(words(each.steps[0])):
            for name in {each.name, "".join(each.steps)}:
                found.setdefault(_normal(name), []).append(each)
    return {name: fields[0] for name, fields in found.items() if len(fields) == 1}


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
    def chance(self) -> float:
        """How often they would agree by chance."""
        total = self.compared**2 or 1
        return sum(number * self._sources[value] for value, number in self._copies.items()) / total

    @property
    def kappa(self) -> float:
        """How far they agree beyond chance: 1 is always, 0 is as often as by chance."""
        chance = self.chance
        return (self.agreement - chance) / (1 - chance) if chance < 1 else 0.0

    def is_copy(self, named: bool) -> bool:
        """Whether the field repeats the other at all."""
        if self.compared < COMPARED_MIN:
            return False
        if self.agreement < AGREEMENT_MIN:
            drifted = self.agreement >= DRIFTED_AGREEMENT_MIN and self.chance <= DRIFTED_CHANCE_MAX
            return named and drifted
        return self.kappa >= (KAPPA_MIN if named else KAPPA_MIN_UNNAMED)


def pairs(
    row: Mapping[str, Any], around: Steps, reference: Steps, copies: list[Steps]
) -> Iterator[tuple[Any, list[Any]]]:
    """Each reference of a document with the copies beside it; steps are relative to what is around them."""
    for holder in _holders(row, around):
        key = inside(holder, reference)
        if key is not None:
            yield key, [inside(holder, copy) for copy in copies]


def _holders(value: Any, steps: Steps) -> Iterator[Any]:
    if not steps:
        yield value
    elif steps[0] == "[]":
        for item in value if isinstance(value, list) else ():
            yield from _holders(item, steps[1:])
    elif isinstance(value, Mapping) and steps[0] in value:
        yield from _holders(value[steps[0]], steps[1:])


def inside(value: Any, steps: Steps) -> Any:
    """The scalar at some steps into an object; None where there is none."""
    for step in steps:
        value = value.get(step) if isinstance(value, Mapping) else None
    return None if isinstance(value, (list, Mapping)) else value


# -- tallies ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TallyCandidate:
    """A number of a parent that may count its children, or sum or average a number of theirs."""

    field: FieldFacts
    operator: Literal["count", "sum", "average"]
    part: FieldFacts | None = None

    @property
    def name(self) -> str:
        """What to call the actual number."""
        return self.operator if self.part is None else f"{self.operator}_{self.part.path}"

    @property
    def accumulator(self) -> dict[str, Any]:
        if self.part is None:
            return {"$sum": 1}
        return {"$avg" if self.operator == "average" else "$sum": f"${self.part.path}"}


def tally_candidates(
    parent: CollectionFacts, relation: Relation, child: CollectionFacts
) -> list[TallyCandidate]:
    """Everything in a parent that may follow from its children; of references in arrays, only counts."""
    found = [TallyCandidate(each, "count") for each in _counts(parent, relation)]
    if relation.many:
        return found
    keys = {relation.path, relation.key}
    own = [each for each in _numbers(parent) if each.path not in keys]
    parts = [each for each in _numbers(child) if each.path not in keys and words(each.name)[-1:] != ("id",)]
    sums = [each for each in own if SUMMING & set(words(each.name))][:SUMMED_FIELDS_MAX]
    found += [TallyCandidate(each, "sum", part) for each in sums for part in parts[:SUMMED_FIELDS_MAX]]
    averages = [(each, part) for each in own for part in parts if _may_be_average(each, part)]
    return found + [TallyCandidate(each, "average", part) for each, part in averages[:SUMMED_FIELDS_MAX]]


def _counts(parent: CollectionFacts, relation: Relation) -> list[FieldFacts]:
    """The whole numbers of a parent whose names say that they count these children."""
    about = subject(relation.child)
    plural = words(relation.child.rpartition(".")[2] or relation.child)
    found = []
    for each in _numbers(parent):
        parts = words(each.name)
        bare = tuple(part for part in parts if part not in COUNTING)
        # `num_site_comments` counts comments, but perhaps not all; the values decide.
        named = bool(bare) and singular(bare)[-len(about) :] in (about, about[-1:])
        # `enrolled_count` counts enrollments.
        named = named or (len(bare) == 1 and len(parts) > 1 and _are_kin(bare[0], about[-1]))
        # `reviews: 17` counts too, but `review: 17` is some number of one review.
        if named and (len(bare) < len(parts) or parts in (plural, plural[-1:])):
            found.append(each)
    return found


def _are_kin(one: str, other: str) -> bool:
    """Whether two words begin alike, as those of one family do."""
    common = next(
        (place for place, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    return common >= KIN_LETTERS_MIN and common >= KIN_SHARE_MIN * min(len(one), len(other))


def _may_be_average(each: FieldFacts, part: FieldFacts) -> bool:
    """Whether a number with a fraction is called an average of the other, or is such as only averages are."""
    own = set(words(each.name))
    if COUNTING & own or not {"double", "decimal"} & set(each.value_types):
        return False
    shared = own & set(words(part.name))
    return bool(shared) and bool(AVERAGING & own or AVERAGED & shared)


def decimals(values: Iterable[Any]) -> int:
    """To how many decimals numbers are rounded, except a few that were not rounded."""
    numbers = [_float(value) for value in values]
    for most in range(DECIMALS_MAX):
        rounded = sum(abs(round(number, most) - number) < EXACT for number in numbers)
        if rounded >= ROUNDED_SHARE_MIN * len(numbers):
            return most
    return DECIMALS_MAX


def same_average(stored: Any, actual: Any, rounded: int) -> bool:
    """Whether a stored average is the actual one, as far as it is rounded."""
    slack = EXACT if rounded == DECIMALS_MAX else 0.5 * 10.0**-rounded + EXACT
    return abs(_float(stored) - _float(actual)) <= slack


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
