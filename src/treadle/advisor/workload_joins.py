"""What a pipeline joins, and what it takes of it; nothing here talks to a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEPTH_MAX = 30


@dataclass(frozen=True, slots=True)
class Join:
    """A `$lookup`: by what, which documents, what is done with them, and its name for them."""

    source: str
    key: str
    by: str
    where: Mapping[str, Any]
    stages: Sequence[Mapping[str, Any]]
    alias: str


def join_of(body: Any) -> Join | None:
    """A `$lookup` in one form, however it names what it joins by."""
    if not isinstance(body, Mapping) or not isinstance(body.get("from"), str):
        return None
    stages = body.get("pipeline") or []
    if not isinstance(stages, list) or not all(isinstance(each, Mapping) and each for each in stages):
        return None
    where: dict[str, Any] = {}
    key, by = body.get("localField"), body.get("foreignField")
    if stages and isinstance(stages[0].get("$match"), Mapping):
        where, stages = dict(stages[0]["$match"]), stages[1:]
    if key is None and by is None:
        key, by = _joined_by(where.pop("$expr", None), body.get("let"))
    alias = body.get("as")
    if not all(isinstance(each, str) for each in (key, by, alias)) or "$expr" in where or "." in str(alias):
        return None
    return Join(body["from"], str(key), str(by), where, stages, str(alias))


def _joined_by(condition: Any, variables: Any) -> tuple[str | None, str | None]:
    """The two fields of `{"$eq": ["$product_id", "$$id"]}`."""
    pair = condition.get("$eq") if isinstance(condition, Mapping) and len(condition) == 1 else None
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(variables, Mapping):
        return None, None
    if len(variables) != 1 or not all(isinstance(each, str) for each in pair):
        return None, None
    outer, inner = sorted(pair, key=lambda each: not each.startswith("$$"))
    local = variables.get(outer[2:])
    if not isinstance(local, str) or not local.startswith("$") or not inner.startswith("$"):
        return None, None
    return local[1:], inner[1:]


def used(value: Any, alias: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """(operator, path) of each use of what was joined: `("$avg", "rating")`, `("", "name")`."""
    if depth > DEPTH_MAX:
        return
    if isinstance(value, Mapping):
        for name, each in value.items():
            if isinstance(each, str) and each.startswith(f"${alias}"):
                head, _, path = each[1:].partition(".")
                if head == alias:
                    yield str(name) if str(name).startswith("$") else "", path
            elif str(name).startswith(f"{alias}."):
                yield "", str(name).partition(".")[2]
            yield from used(each, alias, depth + 1)
    elif isinstance(value, list):
        for each in value:
            if isinstance(each, str) and each.startswith(f"${alias}."):
                yield "", each.partition(".")[2]
            yield from used(each, alias, depth + 1)
