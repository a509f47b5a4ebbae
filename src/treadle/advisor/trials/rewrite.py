"""Requests as they are after a pattern: what a client would send instead.

A unit is one request, or a read with the reads by id that follow it. Where
patterns change it, `rewrite` gives the requests that take its place, and how
to compare both answers; else None. All of it is MongoDB's own language, so it
runs on any database on which the patterns are set up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treadle.advisor.trials.answers import (
    at,
    same,
    same_embedded,
    same_piped,
    same_rows,
    same_sorted,
    without,
)
from treadle.advisor.trials.children import ChildrenRewriter
from treadle.advisor.trials.declared import Card, First, Patterns, Value
from treadle.advisor.trials.grouping import filter_of, grouping
from treadle.advisor.trials.joins import JoinRewriter
from treadle.advisor.trials.workload_file import Request

Row = Mapping[str, Any]
Answer = Sequence[Row]
# The answers to the requests of a unit, before, and of what takes its place -> whether they mean the same.
Same = Callable[[Sequence[Answer], Sequence[Answer]], bool]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What takes the place of a unit."""

    requests: tuple[Request, ...]
    same: Same
    # In words, without values.
    label: str
    note: str = ""
    # Whether the answers before show that it takes the place of these very requests; None if it always does.
    applies: Callable[[Sequence[Answer]], bool] | None = None


def rewrite(unit: Request | Sequence[Request], patterns: Patterns) -> Rewritten | None:
    """What takes the place of a read; None where the patterns do not change it."""
    requests = [unit] if isinstance(unit, Request) else list(unit)
    first = requests[0]
    if not first.is_read:
        return None
    if len(requests) > 1:
        return _followed(requests, patterns)
    if first.body.get("collation"):
        # By a collation other documents may be equal than those that a value was kept for.
        return _joined(first, patterns.cards)
    return (
        _computed(first, patterns.values)
        or _first_few(first, patterns.firsts)
        or _joined(first, patterns.cards)
        or _children(first, patterns)
    )


def follows(first: Request, other: Request, patterns: Patterns) -> Card | None:
    """The card that makes the second read superfluous, if one does."""
    if other.operation != "find":
        return None
    for card in patterns.cards:
        ends = (card.collection, card.source) == (first.collection, other.collection)
        if not ends or set(filter_of(other)) != {card.key}:
            continue
        if _shown(other.body.get("projection"), {*card.paths, card.key}) is not None:
            return card
    return None


# -- Extended Reference -------------------------------------------------------------------------


def _joined(request: Request, cards: Sequence[Card]) -> Rewritten | None:
    """A `$lookup` becomes a read of the card."""
    own = [each for each in cards if each.collection == request.collection]
    if request.operation != "aggregate" or not own:
        return None
    joins = JoinRewriter(request, own)
    after = joins.rewritten()
    if after is None:
        return None

    def compare(before: Sequence[Answer], later: Sequence[Answer]) -> bool:
        rows = [joins.plain_before(row) for row in before[0]]
        return same_piped(rows, [joins.plain_after(row) for row in later[0]], request.body["pipeline"])

    places = ", ".join(sorted({card.place for card, _ in joins.aliases.values()}))
    sources = ", ".join(sorted({card.source for card, _ in joins.aliases.values()}))
    return Rewritten(
        (after,), compare, f"{request.collection}: read with {places}", _cut(joins.whole, sources)
    )


def _cut(whole: bool, sources: str) -> str:
    if not whole:
        return ""
    return (
        f"The request asks for all fields of {sources}; compared are those that the copy holds. "
        "A reader that needs another one needs it in the card."
    )


def _followed(requests: Sequence[Request], patterns: Patterns) -> Rewritten | None:
    """Reads by id that follow a read are left out where a card holds what they ask for."""
    first = requests[0]
    pairs = [(other, follows(first, other, patterns)) for other in requests[1:]]
    left_out = {number: card for number, (_, card) in enumerate(pairs, 1) if card is not None}
    if not left_out:
        return None
    cards = list(dict.fromkeys(left_out.values()))
    body = dict(first.body)
    projection = body.get("projection")
    if isinstance(projection, Mapping) and any(map(_includes, projection.values())):
        shown = {path: 1 for card in cards for path in (card.by, card.place)}
        body["projection"] = {**projection, **shown}
    after = replace(first, body=body)
    kept = [other for number, other in enumerate(requests) if number and number not in left_out]

    def compare(before: Sequence[Answer], later: Sequence[Answer]) -> bool:
        places = [card.place for card in cards]
        one = [without(row, *places) for row in before[0]]
        other = [_like(row, without(row, *places), body, first.body) for row in later[0]]
        if not _same_found(first, one, other):
            return False
        return all(_holds(card, before[number], later[0]) for number, card in left_out.items())

    def applies(before: Sequence[Answer]) -> bool:
        """Whether what follows is about the documents that the first read shows."""
        return all(_refers(first, before[0], before[number], card) for number, card in left_out.items())

    label = f"{first.collection}: read with {', '.join(sorted({card.place for card in cards}))}"
    return Rewritten((after, *kept), compare, label, _cut(True, cards[0].source), applies)


def _refers(first: Request, rows: Answer, sources: Answer, card: Card) -> bool:
    """Whether the first read names each of the sources, in its answer or in its filter."""
    named = {repr(at(row, card.by)) for row in rows}
    if rows:
        # A client that asks for one customer's orders knows the customer, whatever the answer shows.
        named.add(repr(filter_of(first).get(card.by)))
    return all(repr(at(source, card.key)) in named for source in sources)


def _same_found(request: Request, one: Answer, other: Answer) -> bool:
    """Whether two answers to a find agree; an index gives documents that tie in another order."""
    sort = request.body.get("sort")
    if isinstance(sort, Mapping) and sort:
        return same_sorted(one, other, sort, cut=bool(request.body.get("limit")))
    return same_rows(one, other, ordered=False)


def _includes(value: Any) -> bool:
    return value in (1, True) and not isinstance(value, Mapping)


def _like(
    row: Row, plain: dict[str, Any], body: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """The row without fields that the projection before did not ask for."""
    if body is before or body.get("projection") == before.get("projection"):
        return plain
    asked = {str(name).partition(".")[0] for name in before["projection"]} | {"_id"}
    return {name: value for name, value in plain.items() if name in asked}


def _holds(card: Card, sources: Answer, rows: Answer) -> bool:
    """Whether the rows' cards hold what the second read found."""
    by_id: dict[str, list[Row]] = {}
    for row in rows:
        by_id.setdefault(repr(at(row, card.by)), []).append(row)
    for source in sources:
        holders = by_id.get(repr(at(source, card.key)))
        if not holders:
            return False
        for field, path in card.paths.items():
            if at(source, field) is not None and not all(
                same(at(source, field), at(row, path)) for row in holders
            ):
                return False
    return True


# -- Computed -----------------------------------------------------------------------------------


def _computed(request: Request, values: Sequence[Value]) -> Rewritten | None:
    """A count or sum over the sources becomes a read of the target's fields."""
    parts = grouping(request)
    if parts is None:
        return None
    condition, asked, grouped_by = parts
    for target in {(each.collection, each.by, _text(each.where)): each for each in values}.values():
        if target.source != request.collection or grouped_by not in (None, target.by):
            continue
        key = _key_of(condition, target.by, target.where)
        if key is None or (grouped_by is None and isinstance(key, Mapping)):
            continue
        alike = [
            each
            for each in values
            if (each.collection, each.source, each.by, _text(each.where))
            == (target.collection, target.source, target.by, _text(target.where))
        ]
        places = {
            name: next((each.place for each in alike if (each.operator, each.of) == operation), None)
            for name, operation in asked.items()
        }
        if None in places.values():
            continue
        found = {name: place for name, place in places.items() if place is not None}
        return _field_read(request, target, key, found, grouped_by is not None)
    return None


def _field_read(
    request: Request, target: Value, key: Any, places: Mapping[str, str], grouped: bool
) -> Rewritten:
    projection = dict.fromkeys(sorted({*places.values(), target.key}), 1)
    body: dict[str, Any] = {"filter": {target.key: key}, "projection": projection}
    if not isinstance(key, Mapping):
        body["limit"] = 1

    def groups(rows: Answer, names: Mapping[str, str], identity: str) -> dict[str, dict[str, Any]]:
        result = {}
        for row in rows:
            found = {name: at(row, path) for name, path in names.items()}
            # A group without sources is absent before, and zero or null after.
            if any(value not in (0, None) for value in found.values()):
                result[repr(at(row, identity)) if grouped else ""] = found
        return result

    def compare(before: Sequence[Answer], later: Sequence[Answer]) -> bool:
        asked = groups(before[0], {name: name for name in places}, "_id")
        return same(asked, groups(later[0], places, target.key))

    label = f"{target.collection}: read of {', '.join(sorted(set(places.values())))}"
    return Rewritten((Request("find", target.collection, body),), compare, label)


def _key_of(condition: Mapping[str, Any], by: str, where: Mapping[str, Any]) -> Any:
    """The value, or `{"$in": …}`, that a filter asks of the reference; None where it asks for more."""
    rest = {name: value for name, value in condition.items() if name != by}
    if by not in condition or _text(rest) != _text(where):
        return None
    value = condition[by]
    if isinstance(value, Mapping):
        if set(value) == {"$eq"}:
            return value["$eq"]
        return value if set(value) == {"$in"} else None
    return value


def _text(value: Any) -> str:
    return repr(value)


# -- Subset -------------------------------------------------------------------------------------


def _first_few(request: Request, firsts: Sequence[First]) -> Rewritten | None:
    """A sort and a limit over the sources become a read of the embedded ones."""
    asked = _sorted_read(request)
    if asked is None:
        return None
    condition, sort, limit, projection = asked
    for first in firsts:
        if first.source != request.collection or not 0 < limit <= first.size:
            continue
        key = _key_of(condition, first.by, first.where)
        if key is None or isinstance(key, Mapping) or tuple(sort) != first.sort[: len(sort)]:
            continue
        names = _shown(projection, {*first.fields, first.by})
        if names is None:
            continue
        if not projection or projection.get("_id", True):
            names |= {"_id"}
        paths = [path for path, _ in sort]
        return _embedded_read(request, first, key, limit, names, paths, projection is None)
    return None


def _embedded_read(
    request: Request, first: First, key: Any, limit: int, names: frozenset[str], sort: list[str], whole: bool
) -> Rewritten:
    shown = [name for name in first.fields if name in names]
    body = {"filter": {first.key: key}, "projection": {first.place: 1}, "limit": 1}

    def compare(before: Sequence[Answer], later: Sequence[Answer]) -> bool:
        items = at(later[0][0], first.place) if later[0] else []
        return same_embedded(before[0], (items or [])[:limit], first.fields, shown, sort)

    note = _cut(whole, request.collection)
    after = Request("find", first.collection, body)
    return Rewritten((after,), compare, f"{first.collection}: read of {first.place}", note)


def _sorted_read(
    request: Request,
) -> tuple[Mapping[str, Any], list[tuple[str, int]], int, Mapping[str, Any] | None] | None:
    """The filter, sort, limit and projection of a read of the first few."""
    body = request.body
    if request.operation == "find" and not body.get("skip"):
        parts = (body.get("filter"), body.get("sort"), body.get("limit", 0), body.get("projection"))
    elif request.operation == "aggregate":
        names = [next(iter(stage), "") for stage in body.get("pipeline", ())]
        if names not in (["$match", "$sort", "$limit"], ["$match", "$sort", "$limit", "$project"]):
            return None
        stages = {name: stage[name] for name, stage in zip(names, body["pipeline"], strict=True)}
        parts = (stages["$match"], stages["$sort"], stages["$limit"], stages.get("$project"))
    else:
        return None
    condition, sort, limit, projection = parts
    if not isinstance(condition, Mapping) or not isinstance(sort, Mapping) or not sort:
        return None
    order = [(path, 1 if way == 1 else -1) for path, way in sort.items() if isinstance(way, (int, float))]
    return (condition, order, int(limit), projection or None) if len(order) == len(sort) else None


def _shown(projection: Mapping[str, Any] | None, held: set[str]) -> frozenset[str] | None:
    """The fields that a request shows; None where it shows one that is not held."""
    if not projection:
        return frozenset(held)
    included = {str(name) for name, value in projection.items() if _includes(value)}
    plain = all(
        value in (0, 1, True, False) for value in projection.values() if not isinstance(value, Mapping)
    )
    if not plain or any(isinstance(value, Mapping) for value in projection.values()):
        return None
    if not included - {"_id"}:
        excluded = {str(name) for name in projection} - {"_id"}
        return frozenset(held - excluded)
    return frozenset(included) if included <= held | {"_id"} else None


# -- Computed and Subset, from the parent ---------------------------------------------------------


def _children(request: Request, patterns: Patterns) -> Rewritten | None:
    """A `$lookup` of the children becomes a read of what the parent holds of them."""
    holders = {each.collection for each in patterns.values} | {each.collection for each in patterns.firsts}
    if request.collection not in holders:
        return None
    children = ChildrenRewriter(request, patterns)
    after = children.rewritten()
    if after is None:
        return None
    sources = ", ".join(sorted({first.source for first, _ in children.firsts.values()}))
    return Rewritten(
        (after,),
        lambda before, later: children.same(before[0], later[0]),
        f"{request.collection}: read of {', '.join(sorted(children.used))}",
        _cut(children.whole, sources),
    )


# -- indexes ------------------------------------------------------------------------------------


def unchanged(unit: Sequence[Request]) -> Rewritten | None:
    """The same request, where only the way to its answer changes."""
    first = unit[0]

    def compare(before: Sequence[Answer], later: Sequence[Answer]) -> bool:
        if first.body.get("limit") and not first.body.get("sort"):
            # Any documents may be the first few of those that match.
            return len(before[0]) == len(later[0])
        return _same_found(first, before[0], later[0])

    return Rewritten(tuple(unit), compare, f"{first.collection}: the same, by an index")
