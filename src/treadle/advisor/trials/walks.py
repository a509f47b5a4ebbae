"""Walks through a hierarchy as reads by the ancestors that each node holds.

A `$graphLookup` up or down becomes a `$lookup` by the ancestors, an indexed
join. A node and the reads of its parents one by one, or of its children level
by level, become one read. Whether reads walked the whole way is seen in their
answers; those that did not are not compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from treadle.advisor.trials.answers import at, same_rows, without
from treadle.advisor.trials.declared import Ancestors
from treadle.advisor.trials.grouping import filter_of
from treadle.advisor.trials.workload_file import Request

Row = Mapping[str, Any]
Answers = Sequence[Sequence[Row]]
# A name that no document has.
ALIAS = "treadle_above"
Walk = tuple[Request, Callable[[Answers, Answers], bool], Callable[[Answers], bool], str]


def always(answers: Answers) -> bool:
    return True


def graph_walk(request: Request, trees: Sequence[Ancestors]) -> Walk | None:
    """A `$graphLookup` over the tree as a `$lookup` by its ancestors."""
    tree = next((each for each in trees if each.collection == request.collection), None)
    stages = request.body.get("pipeline")
    if request.operation != "aggregate" or tree is None or not isinstance(stages, list):
        return None
    rewritten: list[Any] = []
    aliases: list[str] = []
    for stage in stages:
        body = stage.get("$graphLookup") if isinstance(stage, Mapping) else None
        join = _joined(body, tree) if isinstance(body, Mapping) else None
        rewritten.append(stage if join is None else {"$lookup": join})
        aliases += [join["as"]] if join is not None else []
    if not aliases:
        return None

    def plain(rows: Sequence[Row]) -> list[dict[str, Any]]:
        return [without(row, tree.place, *aliases) for row in rows]

    def nodes(row: Row, alias: str) -> list[dict[str, Any]]:
        found = row.get(alias)
        return (
            [without(each, tree.place) for each in found if isinstance(each, Mapping)]
            if isinstance(found, list)
            else []
        )

    def compare(before: Answers, after: Answers) -> bool:
        ordered = any("$sort" in stage for stage in stages)
        if not same_rows(plain(before[0]), plain(after[0]), ordered):
            return False
        later = {repr(row.get("_id")): row for row in after[0]}
        return all(
            same_rows(nodes(row, alias), nodes(later.get(repr(row.get("_id")), {}), alias), ordered=False)
            for row in before[0]
            for alias in aliases
        )

    after = replace(request, body={**request.body, "pipeline": rewritten})
    return after, compare, always, f"{request.collection}: joined by {tree.place}"


def _joined(body: Mapping[str, Any], tree: Ancestors) -> dict[str, Any] | None:
    parts = {"from", "startWith", "connectFromField", "connectToField", "as"}
    if set(body) != parts or body["from"] != tree.collection:
        return None
    ways = (body["startWith"], body["connectFromField"], body["connectToField"])
    if ways == (f"${tree.parent}", tree.parent, "_id"):
        return {"from": tree.collection, "localField": tree.place, "foreignField": "_id", "as": body["as"]}
    if ways == ("$_id", "_id", tree.parent):
        return {"from": tree.collection, "localField": "_id", "foreignField": tree.place, "as": body["as"]}
    return None


# -- node by node -------------------------------------------------------------------------------


def begins(request: Request, trees: Sequence[Ancestors]) -> bool:
    """Whether a read may be the first of a walk: of one node, or of one node's children."""
    return any(_step(request, each) is not None for each in trees)


def goes_on(first: Request, other: Request, trees: Sequence[Ancestors]) -> bool:
    """Whether a read may be a further step of the walk that the first began."""
    for tree in trees:
        way = _step(first, tree)
        if way is not None and way == _step(other, tree):
            return True
    return False


def _step(request: Request, tree: Ancestors) -> str | None:
    """Up where a read goes by id, down where it goes by the parent; None of anything else."""
    body = request.body
    condition = filter_of(request)
    if request.operation != "find" or request.collection != tree.collection or len(condition) != 1:
        return None
    if body.get("projection") or body.get("skip") or int(body.get("limit") or 0) > 1:
        return None
    (name,) = condition
    if name == tree.parent and not body.get("limit"):
        return "down"
    return "up" if name == "_id" else None


def step_walk(requests: Sequence[Request], trees: Sequence[Ancestors]) -> Walk | None:
    """A read and the steps that follow it, as one read."""
    for tree in trees:
        ways = {_step(each, tree) for each in requests}
        key = _value(filter_of(requests[0]))
        if ways == {"up"} and not isinstance(key, Mapping):
            return _up(requests, tree, key)
        if ways == {"down"} and not isinstance(key, Mapping):
            return _down(requests, tree, key)
    return None


def _value(condition: Mapping[str, Any]) -> Any:
    (value,) = condition.values()
    if isinstance(value, Mapping) and set(value) == {"$eq"}:
        return value["$eq"]
    return value


def _up(requests: Sequence[Request], tree: Ancestors, key: Any) -> Walk:
    join = {"from": tree.collection, "localField": tree.place, "foreignField": "_id", "as": ALIAS}
    after = Request("aggregate", tree.collection, {"pipeline": [{"$match": {"_id": key}}, {"$lookup": join}]})

    def whole(answers: Answers) -> bool:
        """One node each, each the parent of the one before, up to a root."""
        if any(len(rows) != 1 for rows in answers):
            return False
        path = [rows[0] for rows in answers]
        steps = itertools.pairwise(path)
        linked = all(at(node, tree.parent) == above["_id"] for node, above in steps)
        return linked and at(path[-1], tree.parent) is None

    def compare(before: Answers, later: Answers) -> bool:
        found = [node for row in later[0] for node in (without(row, ALIAS), *row.get(ALIAS, []))]
        return _same_nodes(before, found, tree)

    return after, compare, whole, f"{tree.collection}: read with its {tree.place}"


def _down(requests: Sequence[Request], tree: Ancestors, key: Any) -> Walk:
    after = Request("find", tree.collection, {"filter": {tree.place: key}})
    asked = [_keys(filter_of(each)) for each in requests]

    def whole(answers: Answers) -> bool:
        """The children of every node that was found were asked for too."""
        wanted = {repr(each) for keys in asked for each in keys}
        return all(repr(row["_id"]) in wanted for rows in answers for row in rows)

    def compare(before: Answers, later: Answers) -> bool:
        return _same_nodes(before, list(later[0]), tree)

    return after, compare, whole, f"{tree.collection}: read by {tree.place}"


def _keys(condition: Mapping[str, Any]) -> list[Any]:
    value = _value(condition)
    if isinstance(value, Mapping):
        among = value.get("$in")
        return list(among) if isinstance(among, list) else []
    return [value]


def _same_nodes(before: Answers, found: Sequence[Row], tree: Ancestors) -> bool:
    one = {repr(row["_id"]): without(row, tree.place) for rows in before for row in rows}
    other = {repr(row["_id"]): without(row, tree.place) for row in found}
    return set(one) == set(other) and same_rows(
        [one[key] for key in sorted(one)], [other[key] for key in sorted(other)], ordered=True
    )
