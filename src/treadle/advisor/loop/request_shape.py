"""A read as one tuple of stages, whichever command it came in; for matching only.

What is sent stays the request that was recorded, or the time before would not be the client's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from treadle.advisor.loop.workload_file import Request

Stage = tuple[str, Any]
# The parts of a find and of a count, as stages in the order in which the server carries them out.
_FIND = (
    ("$match", "filter"),
    ("$sort", "sort"),
    ("$skip", "skip"),
    ("$limit", "limit"),
    ("$project", "projection"),
)
_COUNT = (("$match", "query"), ("$skip", "skip"), ("$limit", "limit"))
_OPERATORS = {"$sum": "sum", "$avg": "average", "$min": "min", "$max": "max"}


class Aggregates(NamedTuple):
    """What a count or a `$group` computes, of which documents, and for each of what."""

    filter: Mapping[str, Any]
    # The name in the answer -> operator and field, as `Derived.operation` has them.
    asked: Mapping[str, tuple[str, str]]
    grouped_by: str | None


class FirstFew(NamedTuple):
    """A read of the first few documents in an order."""

    filter: Mapping[str, Any]
    sort: tuple[tuple[str, int], ...]
    limit: int
    projection: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Read:
    """A find, count or pipeline."""

    collection: str
    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, request: Request) -> Read | None:
        """The read of a request; None for a write, a distinct, and what no server understands."""
        if request.operation == "aggregate":
            pipeline = request.body.get("pipeline")
            listed = pipeline if isinstance(pipeline, list) else []
            if any(not isinstance(stage, Mapping) or len(stage) != 1 for stage in listed):
                return None
            return cls(request.collection, tuple(next(iter(stage.items())) for stage in listed))
        parts = {"find": _FIND, "count": _COUNT}.get(request.operation)
        if parts is None:
            return None
        stages = [(stage, request.body[name]) for stage, name in parts if request.body.get(name)]
        counting = [("$count", "n")] if request.operation == "count" else []
        return cls(request.collection, (*stages, *counting))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.stages]

    @property
    def filter(self) -> Mapping[str, Any]:
        """The condition of the first stage; empty where there is none."""
        return _mapping(self.stages[0][1]) if self.names[:1] == ["$match"] else {}

    @property
    def sort(self) -> Mapping[str, Any]:
        """The order of the first `$sort`."""
        return next((_mapping(body) for name, body in self.stages if name == "$sort"), {})

    @property
    def limit(self) -> int:
        """The first `$limit`; 0 where there is none."""
        found = next((body for name, body in self.stages if name == "$limit"), 0)
        return int(found) if isinstance(found, (int, float)) else 0

    @property
    def joined(self) -> list[str]:
        """The collections that it looks up."""
        return [str(_mapping(body).get("from")) for name, body in self.stages if name == "$lookup"]

    def aggregates(self) -> Aggregates | None:
        """What it computes, if it does nothing else."""
        stages = self.stages[1:] if self.names[:1] == ["$match"] else self.stages
        if len(stages) != 1:
            return None
        name, body = stages[0]
        if name == "$count" and isinstance(body, str):
            return Aggregates(self.filter, {body: ("count", "")}, None)
        return group_of(self.filter, body) if name == "$group" and isinstance(body, Mapping) else None

    def first_few(self) -> FirstFew | None:
        """The order and the number, if it reads the first few."""
        names = [name for name in self.names if name != "$match"]
        if names not in (["$sort", "$limit"], ["$sort", "$limit", "$project"]):
            return None
        if "$match" in self.names[1:]:
            return None
        order = [
            (path, 1 if way == 1 else -1) for path, way in self.sort.items() if isinstance(way, (int, float))
        ]
        if not order or len(order) != len(self.sort):
            return None
        projection = self.stages[-1][1] if names[-1] == "$project" else None
        return FirstFew(self.filter, tuple(order), self.limit, _mapping(projection) or None)


def group_of(condition: Mapping[str, Any], group: Mapping[str, Any]) -> Aggregates | None:
    """What a `$group` computes; None where that is more than counts, sums and the like of one field each."""
    asked: dict[str, tuple[str, str]] = {}
    for name, accumulator in group.items():
        if name == "_id":
            continue
        operation = _operation(accumulator)
        if operation is None:
            return None
        asked[name] = operation
    identity = group.get("_id")
    if isinstance(identity, Mapping) or not asked:
        return None
    grouped_by = identity[1:] if isinstance(identity, str) and identity.startswith("$") else None
    return Aggregates(condition, asked, grouped_by)


def _operation(accumulator: Any) -> tuple[str, str] | None:
    if not isinstance(accumulator, Mapping) or len(accumulator) != 1:
        return None
    operator, value = next(iter(accumulator.items()))
    if operator == "$count" or (operator == "$sum" and value in (1, 1.0) and not isinstance(value, bool)):
        return "count", ""
    if operator in _OPERATORS and isinstance(value, str) and value.startswith("$"):
        return _OPERATORS[operator], value[1:]
    return None


def condition_of(request: Request) -> Mapping[str, Any]:
    """The filter of any request, by whatever name its command has for it."""
    read = Read.of(request)
    if read is not None:
        return read.filter
    body = request.body
    return next((_mapping(body[name]) for name in ("query", "q") if name in body), {})


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
