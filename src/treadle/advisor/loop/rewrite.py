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

from treadle.advisor.loop.answers import (
    at,
    same,
    same_embedded,
    same_piped,
    same_rows,
    same_sorted,
    without,
)
from treadle.advisor.loop.children import ChildrenRewriter
from treadle.advisor.loop.joins import JoinRewriter
from treadle.advisor.loop.request_shape import FirstFew, Read, condition_of
from treadle.advisor.loop.workload_file import Request
from treadle.advisor.proposals import Derived, Draft

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


def rewrite(unit: Request | Sequence[Request], draft: Draft) -> Rewritten | None:
    """What takes the place of a read; None where the patterns do not change it."""
    requests = [unit] if isinstance(unit, Request) else list(unit)
    first = requests[0]
    if not first.is_read:
        return None
    if len(requests) > 1:
        return _followed(requests, draft)
    if first.body.get("collation"):
        # By a collation other documents may be equal than those that a value was kept for.
        return _joined(first, draft.copies)
    return (
        _computed(first, draft.values)
        or _first_few(first, draft.firsts)
        or _joined(first, draft.copies)
        or _children(first, draft)
    )


def follows(first: Request, other: Request, draft: Draft) -> Derived | None:
    """The card that makes the second read superfluous, if one does."""
    if other.operation != "find":
        return None
    for card in draft.copies:
        ends = (card.target, card.source) == (first.collection, other.collection)
        if not ends or set(condition_of(other)) != {card.key}:
            continue
        if _shown(other.body.get("projection"), {*card.paths, card.key}) is not None:
            return card
    return None


# -- Extended Reference -------------------------------------------------------------------------


def _joined(request: Request, cards: Sequence[Derived]) -> Rewritten | None:
    """A `$lookup` becomes a read of the card."""
    own = [each for each in cards if each.target == request.collection]
    if request.operation != "aggregate" or not own:
        return None
    joins = JoinRewriter(request, own)
    after = joins.rewritten()
    if after is None:
        return None

    def compare(before: Sequence[Answer], later: Sequence[Answer]) -> bool:
        rows = [joins.plain_before(row) for row in before[0]]
        return same_piped(rows, [joins.plain_after(row) for row in later[0]], request.body["pipeline"])

    places = ", ".join(sorted({card.name for card, _ in joins.aliases.values()}))
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


def _followed(requests: Sequence[Request], draft: Draft) -> Rewritten | None:
    """Reads by id that follow a read are left out where a card holds what they ask for."""
    first = requests[0]
    pairs = [(other, follows(first, other, draft)) for other in requests[1:]]
    left_out = {number: card for number, (_, card) in enumerate(pairs, 1) if card is not None}
    if not left_out:
        return None
    cards = list(dict.fromkeys(left_out.values()))
    body = dict(first.body)
    projection = body.get("projection")
    if isinstance(projection, Mapping) and any(map(_includes, projection.values())):
        shown = {path: 1 for card in cards for path in (card.by, card.name)}
        body["projection"] = {**projection, **shown}
    after = replace(first, body=body)
    kept = [other for number, other in enumerate(requests) if number and number not in left_out]

    def compare(before: Sequence[Answer], later: Sequence[Answer]) -> bool:
        places = [card.name for card in cards]
        one = [without(row, *places) for row in before[0]]
        other = [_like(row, without(row, *places), body, first.body) for row in later[0]]
        if not _same_found(first, one, other):
            return False
        return all(_holds(card, before[number], later[0]) for number, card in left_out.items())

    def applies(before: Sequence[Answer]) -> bool:
        """Whether what follows is about the documents that the first read shows."""
        return all(_refers(first, before[0], before[number], card) for number, card in left_out.items())

    label = f"{first.collection}: read with {', '.join(sorted({card.name for card in cards}))}"
    return Rewritten((after, *kept), compare, label, _cut(True, cards[0].source), applies)


def _refers(first: Request, rows: Answer, sources: Answer, card: Derived) -> bool:
    """Whether the first read names each of the sources, in its answer or in its filter."""
    named = {repr(at(row, card.by)) for row in rows}
    if rows:
        # A client that asks for one customer's orders knows the customer, whatever the answer shows.
        named.add(repr(condition_of(first).get(card.by)))
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


def _holds(card: Derived, sources: Answer, rows: Answer) -> bool:
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


def _computed(request: Request, values: Sequence[Derived]) -> Rewritten | None:
    """A count or sum over the sources becomes a read of the target's fields."""
    read = Read.of(request)
    parts = read.aggregates() if read is not None else None
    if parts is None:
        return None
    condition, asked, grouped_by = parts
    for target in {each.relation: each for each in values}.values():
        if target.source != request.collection or grouped_by not in (None, target.by):
            continue
        key = _key_of(condition, target.by)
        if key is None or (grouped_by is None and isinstance(key, Mapping)):
            continue
        names = {each.operation: each.name for each in values if each.relation == target.relation}
        places = {name: names.get(operation) for name, operation in asked.items()}
        if None in places.values():
            continue
        found = {name: place for name, place in places.items() if place is not None}
        return _field_read(request, target, key, found, grouped_by is not None)
    return None


def _field_read(
    request: Request, target: Derived, key: Any, places: Mapping[str, str], grouped: bool
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

    label = f"{target.target}: read of {', '.join(sorted(set(places.values())))}"
    return Rewritten((Request("find", target.target, body),), compare, label)


def _key_of(condition: Mapping[str, Any], by: str) -> Any:
    """The value, or `{"$in": …}`, that a filter asks of the reference; None where it asks for more."""
    if set(condition) != {by}:
        return None
    value = condition[by]
    if isinstance(value, Mapping):
        if set(value) == {"$eq"}:
            return value["$eq"]
        return value if set(value) == {"$in"} else None
    return value


# -- Subset -------------------------------------------------------------------------------------


def _first_few(request: Request, firsts: Sequence[Derived]) -> Rewritten | None:
    """A sort and a limit over the sources become a read of the embedded ones."""
    read = Read.of(request)
    asked = read.first_few() if read is not None else None
    if asked is None:
        return None
    for first in firsts:
        if first.source != request.collection or not 0 < asked.limit <= first.size:
            continue
        key = _key_of(asked.filter, first.by)
        if key is None or isinstance(key, Mapping) or asked.sort != first.order[: len(asked.sort)]:
            continue
        names = _shown(asked.projection, {*first.of, first.by})
        if names is None:
            continue
        if not asked.projection or asked.projection.get("_id", True):
            names |= {"_id"}
        return _embedded_read(request, first, key, asked, names)
    return None


def _embedded_read(
    request: Request, first: Derived, key: Any, asked: FirstFew, names: frozenset[str]
) -> Rewritten:
    shown = [name for name in first.of if name in names]
    body = {"filter": {first.key: key}, "projection": {first.name: 1}, "limit": 1}

    def compare(before: Sequence[Answer], later: Sequence[Answer]) -> bool:
        items = at(later[0][0], first.name) if later[0] else []
        sort = [path for path, _ in asked.sort]
        return same_embedded(before[0], (items or [])[: asked.limit], first.of, shown, sort)

    note = _cut(asked.projection is None, request.collection)
    after = Request("find", first.target, body)
    return Rewritten((after,), compare, f"{first.target}: read of {first.name}", note)


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


def _children(request: Request, draft: Draft) -> Rewritten | None:
    """A `$lookup` of the children becomes a read of what the parent holds of them."""
    if request.collection not in {each.target for each in (*draft.values, *draft.firsts)}:
        return None
    children = ChildrenRewriter(request, draft)
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


# -- what is not rewritten --------------------------------------------------------------------


def why_not(request: Request, draft: Draft) -> str | None:
    """What of a read the draft's fields do not hold; None where it has nothing to do with them."""
    read = Read.of(request)
    if read is None:
        return None
    joined = set(read.joined)
    for card in draft.copies:
        if request.collection == card.target and card.source in joined:
            return f"it uses more of {card.source} than the card holds, or joins it in another way"
    held = (*draft.values, *draft.firsts)
    for each in held:
        if request.collection == each.target and each.source in joined:
            return f"it asks for more of {each.source} than {each.target}.{each.name} holds"
    reasons = (_why_not_of_source(request, read, each) for each in held)
    return next((reason for reason in reasons if reason is not None), None)


def _why_not_of_source(request: Request, read: Read, each: Derived) -> str | None:
    if request.collection != each.source or each.by not in read.filter:
        return None
    if request.body.get("collation"):
        return "it has a collation"
    if each.operator == "top" and read.sort and read.limit:
        return "it sorts otherwise, or asks for more or other fields than are embedded"
    if each.operator != "top" and read.aggregates() is not None:
        return "it counts only some of them, or computes what is not kept"
    return None
