"""Proof: every stored value that is not what its sources say.

Targets are read page by page, in the order of `_id`, and their values are
recomputed on the server. What looks wrong is looked at again inside one
snapshot before it is reported, so that a writer who is just at work is not
mistaken for a fault.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pymongo.errors import OperationFailure

from treadle.canonical import same
from treadle.gather import freeze
from treadle.maintenance.fill import fill_references
from treadle.maintenance.intents import is_about_one_document, log
from treadle.maintenance.recompute import recompute
from treadle.paths import Step, put, value_at
from treadle.plan import Plan, Raw, aggregate, count_documents, find, transact, wait
from treadle.topology import Topology

if TYPE_CHECKING:
    from treadle.graph import Entry, Graph

PAGE = 500
SECOND_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Finding:
    """Something stored is not what it should be."""

    pattern: str
    model: str
    document_id: Any
    path: str
    stored: Any
    expected: Any


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long run has come with one model."""

    model: str
    done: int
    total: int


Report = Callable[[Progress], None]


def verify(
    graph: Graph, server: Topology, entries: Iterable[Entry[Any]], report: Report | None = None
) -> Plan[list[Finding]]:
    """All findings in the targets of these models."""
    findings: list[Finding] = []
    for entry in entries:
        if not entry.rules:
            continue
        total = (yield from count_documents(entry.collection, entry.exactly)) if report else 0
        done = 0
        last: Any = None
        while True:
            documents = yield from page(entry, last, PAGE)
            if not documents:
                break
            last = documents[-1]["_id"]
            suspects = yield from examine(server, entry, documents)
            if suspects:
                findings.extend((yield from _look_again(server, entry, suspects)))
            done += len(documents)
            if report:
                report(Progress(entry.model.__name__, done, max(total, done)))
    return findings


def page(entry: Entry[Any], last: Any, limit: int, *, kinds: bool = False) -> Plan[list[Raw]]:
    """The next documents in the order of `_id`, whatever types the ids have; with `kinds` those below too."""
    chosen = entry.scope if kinds else entry.exactly
    if last is None:
        return (yield from find(entry.collection, chosen, sort=[("_id", 1)], limit=limit))
    # A range query would end where the type of the ids changes; index bounds do not.
    found = yield from find(
        entry.collection,
        chosen,
        sort=[("_id", 1)],
        limit=limit + 1,
        min={"_id": last},
        hint=[("_id", 1)],
    )
    return [each for each in found if freeze(each["_id"]) != freeze(last)][:limit]


def _look_again(server: Topology, entry: Entry[Any], suspects: Sequence[Finding]) -> Plan[list[Finding]]:
    """The findings that remain when target and sources are read at one moment."""
    keys = list({freeze(each.document_id): each.document_id for each in suspects}.values())

    def look() -> Plan[list[Finding]]:
        documents = yield from find(entry.collection, {"_id": {"$in": keys}, **entry.exactly})
        return (yield from examine(server, entry, documents))

    if server.transactions:
        return (yield from transact(look))
    yield from wait(SECOND_LOOK_SECONDS)
    return (yield from look())


def examine(server: Topology, entry: Entry[Any], documents: Sequence[Raw]) -> Plan[list[Finding]]:
    """The findings in these documents."""
    wanted = yield from expected(server, entry, documents)
    findings: list[Finding] = []
    for document, right in zip(documents, wanted, strict=True):
        for rule in entry.gathers:
            for path in rule.empty():
                _compare(findings, entry, rule.pattern, document, right, path)
        for formula in entry.formulas:
            _compare(findings, entry, formula.pattern, document, right, formula.path)
        for reference in entry.references:
            wanted_places = dict(_places(right, reference.steps, ""))
            for prefix, container in _places(document, reference.steps, ""):
                stored, should = container.get(reference.name), wanted_places[prefix].get(reference.name)
                if not same(stored, should):
                    findings.append(
                        Finding(
                            reference.pattern,
                            entry.model.__name__,
                            document["_id"],
                            prefix + reference.name,
                            stored,
                            should,
                        )
                    )
    return findings


def _compare(
    findings: list[Finding], entry: Entry[Any], pattern: str, document: Raw, right: Raw, path: str
) -> None:
    segments = path.split(".")
    stored, should = value_at(document, segments), value_at(right, segments)
    if not same(stored, should):
        findings.append(Finding(pattern, entry.model.__name__, document["_id"], path, stored, should))


def _places(raw: Any, steps: Sequence[Step], prefix: str) -> Iterable[tuple[str, Raw]]:
    """Each sub-document that the steps lead to, with its path, positions included."""
    if isinstance(raw, list):
        for number, item in enumerate(raw):
            yield from _places(item, steps, f"{prefix}{number}.")
    elif isinstance(raw, dict):
        if not steps:
            yield prefix, raw
        elif steps[0].stored in raw:
            yield from _places(raw[steps[0].stored], steps[1:], f"{prefix}{steps[0].stored}.")


def expected(server: Topology, entry: Entry[Any], documents: Sequence[Raw]) -> Plan[list[Raw]]:
    """The documents as they should be stored."""
    if not documents:
        return []
    keys = [each["_id"] for each in documents]
    wanted = [copy.deepcopy(each) for each in documents]
    values = yield from recompute(entry.gathers, keys, server.version)
    for right in wanted:
        for path, value in values[freeze(right["_id"])].items():
            put(right, path.split("."), value)
    pairs: list[tuple[Raw | None, Raw]] = list(zip(documents, wanted, strict=True))
    yield from fill_references(entry, pairs, look_only=True)
    if entry.formulas:
        rows = yield from _formulas(entry, keys)
        for document, right in zip(documents, wanted, strict=True):
            row = rows.get(freeze(right["_id"]))
            for number, formula in enumerate(entry.formulas):
                segments = formula.path.split(".")
                # What the server cannot compute is neither right nor wrong.
                put(
                    right,
                    segments,
                    row.get(f"f{number}") if row is not None else value_at(document, segments),
                )
    return wanted


def _formulas(entry: Entry[Any], keys: Sequence[Any]) -> Plan[dict[Any, Raw]]:
    """What the formulas of these documents give; nothing for one that the server cannot compute."""
    computed = {f"f{number}": formula.expression for number, formula in enumerate(entry.formulas)}
    # Not $project, where a plain number would mean to include a field.
    stages = [{"$match": {"_id": {"$in": list(keys)}}}, {"$replaceWith": {"_id": "$_id", **computed}}]
    try:
        rows = yield from aggregate(entry.collection, stages)
    except OperationFailure as error:
        if not is_about_one_document(error):
            raise
        if len(keys) == 1:
            log.warning("a formula of %s %r cannot be computed: %s", entry.model.__name__, keys[0], error)
            return {}
        found: dict[Any, Raw] = {}
        for key in keys:
            found.update((yield from _formulas(entry, [key])))
        return found
    return {freeze(row["_id"]): row for row in rows}
