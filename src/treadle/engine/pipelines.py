"""The update of a target: its values, what follows from them, then its formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.graph.derived import FormulaRule
from treadle.graph.gather import GatherRule
from treadle.graph.kinds import scoped_formula
from treadle.graph.pattern import REVISION, Entry
from treadle.plan import Raw

BUMP: Raw = {REVISION: {"$add": [{"$ifNull": [f"${REVISION}", 0]}, 1]}}


def update_pipeline(target: Entry[Any], first: dict[str, Any], second: dict[str, Any]) -> list[Raw]:
    """The one update of a target: values, what follows from them, then the formulas."""
    stages: list[Raw] = [{"$set": {**first, **BUMP}}]
    if second:
        stages.append({"$set": second})
    return [*stages, *formula_stages(target)]


def formula_stages(target: Entry[Any]) -> list[Raw]:
    """The target's formulas, those that read others after these."""
    if target.family is not None:
        # Each for itself: formulas of several kinds may set the same field.
        formulas = dict.fromkeys(rule for each in target.related for rule in each.having(FormulaRule))
        ordered = sorted(formulas, key=lambda rule: rule.level)
        return [{"$set": scoped_formula(rule, rule.expression)} for rule in ordered]
    by_level: dict[int, Raw] = {}
    for formula in target.having(FormulaRule):
        expression = formula.expression
        if target.group is not None:
            # A group that has just become empty is about to go; who divides by its count must not fail.
            filled = {"$gt": [f"${target.group.path}", 0]}
            expression = {"$cond": [filled, expression, f"${formula.path}"]}
        by_level.setdefault(formula.level, {})[formula.path] = expression
    return [{"$set": sets} for _, sets in sorted(by_level.items())]


def stamps_of(rules: Sequence[GatherRule]) -> dict[str, Any]:
    """The dates of computation that a rewrite of these rules sets."""
    return {stamp: "$$NOW" for rule in rules for stamp in rule.stamps()}
