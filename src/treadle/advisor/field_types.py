"""What several types in one field mean; shared by the rules on types, so that only one of them claims it."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from treadle.advisor.facts import NUMBERS, CollectionFacts, FieldFacts

DOCUMENTS_MIN = 20
# Pairs of a name and a value, whose types differ on purpose.
PAIRS = ({"k", "v"}, {"key", "value"}, {"name", "value"}, {"attribute", "value"}, {"field", "value"})
# A rarer type is a mistake; from here on it is how documents of some time look.
MINORITY_SHARE_MIN = 0.05
STRUCTURES = frozenset({"object", "array"})


def families(each: FieldFacts) -> dict[str, int]:
    """The types with all numbers taken as one; exact decimals stay apart from floats."""
    found: Counter[str] = Counter()
    for kind, number in each.value_types.items():
        found["number" if kind in NUMBERS and kind != "decimal" else kind] += number
    # Whole numbers beside decimals lose nothing.
    if {"decimal", "number"} <= set(found) and "double" not in each.value_types:
        found["decimal"] += found.pop("number")
    return found


def is_mixed(facts: CollectionFacts, each: FieldFacts) -> bool:
    """Whether a field has several types, without being made for it."""
    if len(families(each)) < 2 or each.present < DOCUMENTS_MIN or "*" in each.steps or each.name == "[]":
        return False
    beside = {other.name for other in facts.fields.values() if other.steps[:-1] == each.steps[:-1]}
    is_value = each.in_array and any(each.name in pair and pair <= beside for pair in PAIRS)
    return not (is_value and each.name in ("v", "value"))


def has_versions(facts: CollectionFacts) -> bool:
    """Whether a number tells versions of the schema apart, and several are there."""
    return facts.versions is not None and len(facts.versions.counts) > 1


def retyped(facts: CollectionFacts, each: FieldFacts) -> tuple[str, str] | None:
    """The older and the newer type of a field that became an object or a list, or was one; else None.

    The ids tell which is newer; where they do not, it is the one with more structure.
    """
    found = families(each)
    if not is_mixed(facts, each) or each.in_array or len(found) != 2 or not STRUCTURES & set(found):
        return None
    if min(found.values()) < max(DOCUMENTS_MIN, MINORITY_SHARE_MIN * each.present):
        return None
    one, other = sorted(found, key=lambda kind: (kind == "object", kind == "array"))
    times = {kind: _first(facts, each, kind) for kind in (one, other)}
    earlier, later = times[one], times[other]
    if earlier is not None and later is not None and later < earlier:
        return other, one
    return one, other


def _first(facts: CollectionFacts, each: FieldFacts, kind: str) -> datetime | None:
    kinds = NUMBERS if kind == "number" else {kind}
    times = [
        shape.first
        for shape in facts.shapes
        if shape.first is not None and any(name == each.path and of in kinds for name, of in shape.fields)
    ]
    return min(times, default=None)
