"""The values of gathered fields from scratch, for some targets: what every shortcut must equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import bson

from treadle.graph.gather import GatherRule, source_stages
from treadle.model.bson_types import CODEC_OPTIONS
from treadle.plan import Plan, Raw, aggregate
from treadle.query.keys import KEY, freeze

Values = dict[Any, dict[str, Any]]


def recompute(rules: Iterable[GatherRule], keys: Sequence[Any], version: tuple[int, ...]) -> Plan[Values]:
    """Per target (frozen key) the stored path and exact value of each part of each rule."""
    values: Values = {freeze(key): {} for key in keys}
    if not keys:
        return values
    groups: dict[Any, list[GatherRule]] = {}
    for rule in rules:
        if rule.finds(keys):
            for key, parts in (yield from rule.found(keys, version)).items():
                values[key].update(parts)
        else:
            groups.setdefault(_signature(rule), []).append(rule)
    for together in groups.values():
        rows = yield from _group(together, keys)
        for key in values:
            for number, rule in enumerate(together):
                row = rows.get(key)
                group = {name: row[f"{name}{number}"] for name in rule.accumulators()} if row else None
                values[key].update(rule.finish(group))
    return values


def _signature(rule: GatherRule) -> Any:
    """Rules that agree in this share one `$group`."""
    where = bson.encode(rule.where, codec_options=CODEC_OPTIONS)
    return rule.source.collection, rule.key.signature, where, rule.per_element


def _group(rules: Sequence[GatherRule], keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
    accumulators = {
        f"{name}{number}": accumulator
        for number, rule in enumerate(rules)
        for name, accumulator in rule.accumulators().items()
    }
    rows = yield from aggregate(
        rules[0].source.collection,
        [*source_stages(rules[0], keys), {"$group": {"_id": f"${KEY}", **accumulators}}],
    )
    return {freeze(row["_id"]): row for row in rows}
