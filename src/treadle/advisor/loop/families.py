"""Which documents are copied together: a parent with its children, a source with its copies.

Each collection goes by its main relation: those of its documents are taken
whose parent was. The parents that a workload names, and the one with most
children, always are. Nothing here talks to a server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.advisor.facts import Relation, Scan
from treadle.advisor.loop.values import values
from treadle.advisor.loop.workload_file import Request

# Smaller collections are copied whole.
SMALL = 2_000
NAMED_MAX = 2_000

Named = dict[tuple[str, str], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Step:
    """A collection to copy, after its parent; without a main relation it is drawn from itself."""

    collection: str
    main: Relation | None
    # The other parents that its documents name, of which those are copied too.
    others: tuple[Relation, ...] = ()


def touched(requests: Iterable[Request]) -> tuple[set[str], Named]:
    """The collections that requests read and write, and the values that they name, by field."""
    names: set[str] = set()
    named: Named = {}
    for request in requests:
        names.update(collections_of(request))
        if request.operation == "insert":
            continue
        for path, value in values(request):
            if path and not isinstance(value, (Mapping, list)) and value is not None:
                found = named.setdefault((request.collection, path), {})
                if len(found) < NAMED_MAX:
                    found.setdefault(repr(value), value)
    return names, named


def collections_of(request: Request) -> Iterator[str]:
    """The collection of a request, and those that it joins."""
    yield request.collection
    stages = request.body.get("pipeline")
    for stage in stages if isinstance(stages, list) else ():
        for name in ("$lookup", "$graphLookup", "$unionWith"):
            body = stage.get(name) if isinstance(stage, Mapping) else None
            joined = body.get("from", body.get("coll")) if isinstance(body, Mapping) else body
            if isinstance(joined, str):
                yield str(joined)


def steps(scan: Scan, collections: Iterable[str], preferred: Iterable[tuple[str, str]] = ()) -> list[Step]:
    """The collections in the order in which they are copied; `preferred` are (child, path) of findings."""
    chosen = set(collections)
    favourites = set(preferred)
    relations = [
        each
        for each in scan.relations
        if each.child in chosen and each.parent in chosen and each.child != each.parent
    ]
    main: dict[str, Relation] = {}
    for relation in sorted(
        relations, key=lambda each: ((each.child, each.path) in favourites, each.references)
    ):
        if not relation.many:
            main[relation.child] = relation
    ordered: list[Step] = []
    placed: set[str] = set()
    while waiting := sorted(chosen - placed):
        ready = [name for name in waiting if name not in main or main[name].parent in placed]
        # Of parents that are each other's children, one has to begin.
        for name in ready or waiting[:1]:
            relation_of = main.get(name) if ready else None
            others = tuple(
                each for each in relations if each.child == name and each is not relation_of and not each.many
            )
            ordered.append(Step(name, relation_of, others))
            placed.add(name)
    return ordered


def named_parents(parent: str, key: str, relations: Sequence[Relation], named: Named) -> list[Any]:
    """The keys of a collection that a workload names, directly or by a child's reference."""
    places = [(parent, key), *((each.child, each.path) for each in relations if each.parent == parent)]
    found: dict[str, Any] = {}
    for place in places:
        found.update(named.get(place, {}))
    return list(found.values())
