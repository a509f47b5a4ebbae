"""Pipelines on the parent that join its children, as reads of what the parent holds of them.

`$lookup` with a sort and a limit becomes the embedded first few, one that
groups or counts becomes the computed values: both under the name that the
pipeline gave them, so that what follows stays as it is. A `$lookup` of all
children is taken out where only `$size`, `$sum`, `$avg`, `$min` or `$max` is
made of them. Anything else is not rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treadle.advisor.loop.answers import at, same, same_embedded, same_piped, without
from treadle.advisor.loop.request_shape import group_of
from treadle.advisor.loop.workload_file import Request
from treadle.advisor.proposals import Derived, Draft
from treadle.advisor.workload_joins import Join, join_of

Row = Mapping[str, Any]
_SIZES = {"$size": "count", "$sum": "sum", "$avg": "average", "$min": "min", "$max": "max"}
_REMOVING = ("$project", "$group", "$count", "$replaceRoot", "$replaceWith", "$unset")


@dataclass(slots=True)
class ChildrenRewriter:
    """Rewrites one pipeline of a parent collection."""

    request: Request
    draft: Draft
    # Name -> the embedded children that it shows now, and what it sorts them by.
    firsts: dict[str, tuple[Derived, list[str]]] = field(default_factory=dict)
    # Names of all children of a parent -> the join, until its stages are rewritten.
    counted: dict[str, Join] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    whole: bool = False

    def rewritten(self) -> Request | None:
        pipeline = self.request.body.get("pipeline")
        if self.request.operation != "aggregate" or not isinstance(pipeline, list):
            return None
        stages: list[dict[str, Any]] = []
        if not all(isinstance(stage, Mapping) and len(stage) == 1 for stage in pipeline):
            return None
        waiting = list(pipeline)
        while waiting:
            grouped = self._grouped(waiting)
            if grouped is not None:
                stages += grouped
                del waiting[:2]
            else:
                stages += self._stage(*next(iter(waiting.pop(0).items())))
        if not self.used or not self._vanishes(stages):
            return None
        names = ("collation", "hint", "let")
        body = {name: value for name, value in self.request.body.items() if name in names}
        return replace(self.request, body={**body, "pipeline": stages})

    def same(self, before: Sequence[Row], after: Sequence[Row]) -> bool:
        """Whether two answers mean the same, but for what the parent holds in any case."""
        one, other = ([self._plain(row) for row in rows] for rows in (before, after))
        first, second = ([without(row, *self.firsts) for row in rows] for rows in (one, other))
        if not same_piped(first, second, self.request.body["pipeline"]):
            return False
        if not self.firsts:
            return True
        held = {repr(row.get("_id")): row for row in other}
        return all(
            self._same_first(name, row, held.get(repr(row.get("_id")), {}))
            for row in one
            for name in self.firsts
        )

    def _plain(self, row: Row) -> dict[str, Any]:
        maintained = [each.name for each in self.draft.derived if each.target == self.request.collection]
        return without(row, *(each for each in maintained if each not in self.firsts))

    def _same_first(self, name: str, before: Row, after: Row) -> bool:
        first, sort = self.firsts[name]
        one, other = before.get(name), after.get(name)
        if not isinstance(one, list) or not isinstance(other, list):
            return same(one, other)
        shown = [path for path in first.of if any(at(each, path) is not None for each in one)]
        return same_embedded(one, other, first.of, shown, sort)

    # -- stages --------------------------------------------------------------------------------

    def _stage(self, name: str, body: Any) -> list[dict[str, Any]]:
        if name == "$lookup":
            join = join_of(body)
            found = self._lookup(join) if join is not None else None
            return [{name: body}] if found is None else found
        if self.counted:
            return [{name: self._expression(body)}]
        return [{name: body}]

    def _lookup(self, join: Join) -> list[dict[str, Any]] | None:
        """What takes the place of a `$lookup`; None where it stays."""
        names = [next(iter(stage), "") for stage in join.stages]
        if not names:
            if self._values(join):
                self.counted[join.alias] = join
                return []
            return None
        if names[:2] == ["$sort", "$limit"] and names[2:] in ([], ["$project"]):
            return self._first_few(join)
        if len(names) == 1:
            return self._computed(join)
        return None

    def _values(self, join: Join) -> list[Derived]:
        own = (self.request.collection, join.source, join.key, join.by)
        return [each for each in self.draft.values if each.relation == own and not join.where]

    def _first_few(self, join: Join) -> list[dict[str, Any]] | None:
        sort, limit = join.stages[0]["$sort"], join.stages[1]["$limit"]
        projection = join.stages[2]["$project"] if len(join.stages) > 2 else None
        own = (self.request.collection, join.source, join.key, join.by)
        for first in self.draft.firsts:
            if first.relation != own or join.where:
                continue
            order = tuple((path, 1 if way == 1 else -1) for path, way in dict(sort).items())
            if not 0 < int(limit) <= first.size or order != first.order[: len(order)]:
                continue
            if projection is not None and not _plain_names(projection) <= {*first.of, "_id", join.by}:
                continue
            self.firsts[join.alias] = first, [path for path, _ in order]
            self.used.add(first.name)
            self.whole = self.whole or projection is None
            place: Any = f"${first.name}"
            if int(limit) < first.size:
                place = {"$slice": [{"$ifNull": [place, []]}, int(limit)]}
            return [{"$set": {join.alias: place}}]
        return None

    def _computed(self, join: Join) -> list[dict[str, Any]] | None:
        """`$count` and `$group` of one parent's children: one document, or none, made of its fields."""
        ((name, body),) = join.stages[0].items()
        if name == "$count" and isinstance(body, str):
            asked: Mapping[str, tuple[str, str]] | None = {body: ("count", "")}
            identity: dict[str, Any] = {}
        elif name == "$group" and isinstance(body, Mapping):
            parts = group_of({}, body)
            asked = parts.asked if parts is not None and parts.grouped_by in (None, join.by) else None
            identity = {
                "_id": f"${join.key}" if parts is not None and parts.grouped_by else {"$literal": None}
            }
        else:
            return None
        values = {each.operation: each.name for each in self._values(join)}
        if asked is None or not all(each in values for each in asked.values()):
            return None
        present = values.get(("count", ""))
        shown = {key: f"${values[each]}" for key, each in asked.items()}
        if present is None:
            firm = [values[each] for each in asked.values() if each[0] != "sum"]
            if not firm:
                return None
            some: Any = {"$ne": [{"$ifNull": [f"${firm[0]}", None]}, None]}
        else:
            some = {"$gt": [{"$ifNull": [f"${present}", 0]}, 0]}
        self.used.update(values[each] for each in asked.values())
        return [{"$set": {join.alias: {"$cond": [some, [{**identity, **shown}], []]}}}]

    def _grouped(self, stages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """Children that are unwound and grouped by their parent again: the parents that have some."""
        unwind = stages[0].get("$unwind")
        alias = unwind[1:] if isinstance(unwind, str) else ""
        join = self.counted.get(alias)
        group = stages[1].get("$group") if len(stages) > 1 else None
        if join is None or not isinstance(group, Mapping) or group.get("_id") != f"${join.key}":
            return None
        values = {each.operation: each.name for each in self._values(join)}
        if ("count", "") not in values:
            return None
        shown: dict[str, Any] = {"_id": f"${join.key}"}
        for name, accumulator in group.items():
            if name == "_id":
                continue
            ((operator, argument),) = accumulator.items() if len(accumulator) == 1 else (("", None),)
            if operator == "$sum" and argument == 1:
                place = values["count", ""]
            elif operator == "$first" and isinstance(argument, str) and not _mentions(argument, alias):
                shown[name] = argument
                continue
            elif isinstance(argument, str) and argument.startswith(f"${alias}."):
                kept = values.get((_SIZES.get(operator, ""), argument.partition(".")[2]))
                if kept is None:
                    return None
                place = kept
            else:
                return None
            self.used.add(place)
            shown[name] = f"${place}"
        del self.counted[alias]
        return [{"$match": {values["count", ""]: {"$gt": 0}}}, {"$project": shown}]

    def _expression(self, value: Any) -> Any:
        """An expression in which `$size` and the like of the children are the computed fields."""
        if isinstance(value, Mapping):
            if len(value) == 1:
                ((operator, argument),) = value.items()
                place = self._place(operator, argument)
                if place is not None:
                    return {"$ifNull": [f"${place}", 0]} if operator in ("$size", "$sum") else f"${place}"
            return {name: self._expression(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._expression(each) for each in value]
        return value

    def _place(self, operator: str, argument: Any) -> str | None:
        if operator not in _SIZES or not isinstance(argument, str) or not argument.startswith("$"):
            return None
        alias, _, path = argument[1:].partition(".")
        join = self.counted.get(alias)
        if join is None or (operator == "$size") != (not path):
            return None
        for each in self._values(join):
            if each.operation == (_SIZES[operator], path):
                self.used.add(each.name)
                return each.name
        return None

    def _vanishes(self, stages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the children that were joined whole are used for nothing else, nor in the answer."""
        for alias in self.counted:
            removed = False
            for stage in stages:
                ((name, body),) = stage.items()
                if name in ("$unset", "$project") and _removes(body, alias):
                    removed = True
                    continue
                if _mentions(body, alias):
                    return False
                removed = removed or (name in _REMOVING and not _excludes(body))
            if not removed:
                return False
        return True


def _plain_names(projection: Any) -> set[str]:
    """The fields that a projection includes; only "?" if it does anything else."""
    if not isinstance(projection, Mapping):
        return {"?"}
    included = {str(name) for name, value in projection.items() if value in (1, True)}
    rest = {name for name in projection if name not in included}
    return included if all(projection[name] in (0, False) and name == "_id" for name in rest) else {"?"}


def _removes(body: Any, alias: str) -> bool:
    """`{"$unset": "reviews"}`, or `{"$project": {"reviews": 0}}`."""
    if isinstance(body, Mapping):
        return body.get(alias) in (0, False) and alias in body
    return body == alias or (isinstance(body, list) and alias in body)


def _excludes(body: Any) -> bool:
    """Whether a projection keeps everything but what it names."""
    if not isinstance(body, Mapping):
        return True
    return all(value in (0, False) for value in body.values() if not isinstance(value, (Mapping, list, str)))


def _mentions(value: Any, alias: str) -> bool:
    if isinstance(value, Mapping):
        return any(
            _mentions(each, alias) or str(name).partition(".")[0] == alias for name, each in value.items()
        )
    if isinstance(value, (list, tuple)):
        return any(_mentions(each, alias) for each in value)
    return isinstance(value, str) and value.startswith("$") and value.lstrip("$").partition(".")[0] == alias
