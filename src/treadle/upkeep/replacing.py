"""Changing a declaration without a reader who sees half of it (`graph/changing.py`).

A row of `treadle.changes` holds how far one field is: "building" while shadow
values are computed, "swapping", "swapped" while the former values are still
kept right in the shadow, "done" when they are dropped. What each document
shows is written in the document, so a killed run is simply run again: what is
built has a mark, and what is swapped has another one.

Documents are swapped in one commit where one page holds them, else page by
page. Each shows one declaration or the other at every moment, and turns once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

from treadle.engine.contention import attempting, in_pieces
from treadle.engine.ledger import Ledger
from treadle.engine.pages import by_ids, starting_at
from treadle.engine.pipelines import BUMP, derivation, formula_stages
from treadle.engine.react import UNBOUNDED, react
from treadle.engine.set_aside import set_aside
from treadle.engine.sides import COLLECTION
from treadle.errors import DataError, UsageError
from treadle.graph.change import Change
from treadle.graph.changing import MARK, SHADOW, Side
from treadle.graph.graph import Graph
from treadle.graph.outcomes import Finding, Pace, Progress, Report, resting
from treadle.graph.pattern import REVISION, Entry, Rule
from treadle.plan import (
    Plan,
    Raw,
    count_documents,
    delete_one,
    find,
    find_one,
    transact,
    update_many,
    update_one,
)
from treadle.plan.capabilities import Capabilities, clock
from treadle.query.keys import distinct, freeze
from treadle.upkeep import fingerprints, position
from treadle.upkeep.rebuild import mend
from treadle.upkeep.verify import verify
from treadle.values import frozen

ChangeState = Literal["building", "swapping", "swapped", "done"]


@frozen
class ChangeStatus:
    """A field whose declaration is being changed."""

    rule: str
    model: str
    state: ChangeState
    # What new documents show: the "old" or the "new" declaration.
    shows: Side
    swapped_at: datetime | None = None
    # Until when `undo_rebuild` brings the former values back.
    undo_until: datetime | None = None


def changing(entries: Iterable[Entry[Any]]) -> list[Rule]:
    """The rules of these models that take the place of others."""
    return [rule for entry in entries for rule in entry.rules if rule.replacement is not None]


# -- rows ---------------------------------------------------------------------------------------------


def declare(graph: Graph) -> Plan[None]:
    """Note the fields that have two declarations, and those that have one again.

    Where there are no documents yet, the new one is shown at once.
    """
    for rule in changing(graph.entries.values()):
        label, to = rule.replacement.label, fingerprints.as_shown(rule)
        row = yield from find_one(COLLECTION, {"_id": label})
        if row is not None and row["to"] == to:
            continue
        used = yield from find_one(rule.target.collection, {}, {"_id": 1})
        side: Side = "new" if used is None else "old"
        sets = {
            "model": rule.target.model.__name__,
            "collection": rule.target.collection,
            "to": to,
            "mark": rule.replacement.mark,
            "pairs": [list(pair) for pair in rule.replacement.pairs],
            "state": "swapped" if side == "new" else "building",
            "new": side,
            "unmarked": side,
            "at": None,
            "settled": False,
        }
        yield from update_one(COLLECTION, {"_id": label}, {"$set": sets}, upsert=True)
        yield from fingerprints.shown(rule, side)
    # Where code has only the new declaration, nobody keeps the former values right any more.
    labels = [
        rule.place.label for rule in graph.rules if rule.replaced_by is None and rule.replacement is None
    ]
    chosen = {"_id": {"$in": labels}, "state": "swapped", "settled": False}
    for row in (yield from find(COLLECTION, chosen)):
        yield from update_one(COLLECTION, {"_id": row["_id"]}, {"$set": {"settled": True}})


def listed(graph: Graph) -> Plan[list[ChangeStatus]]:
    """The changes that are not done with."""
    rows = yield from find(COLLECTION, {"state": {"$ne": "done"}}, sort=[("_id", 1)])
    keep = timedelta(seconds=graph.limits.undo_seconds)
    statuses = []
    for row in rows:
        kept = row["state"] == "swapped" and row["at"] is not None and not row["settled"]
        until = row["at"] + keep if kept else None
        statuses.append(ChangeStatus(row["_id"], row["model"], row["state"], row["new"], row["at"], until))
    return statuses


def _row(graph: Graph, label: str) -> Plan[Raw]:
    row = yield from find_one(COLLECTION, {"_id": label})
    if row is not None and row["state"] != "done":
        return row
    known = ", ".join(each.rule for each in (yield from listed(graph))) or "none"
    raise UsageError(
        f"no declaration of {label!r} is being changed; those that are: {known}", code="change-unknown"
    )


# -- build, prove, swap -----------------------------------------------------------------------------------


def rebuild_beside(
    graph: Graph,
    server: Capabilities,
    entries: Sequence[Entry[Any]],
    report: Report | None = None,
    *,
    swap: bool = True,
) -> Plan[int]:
    """Build the new values of these models beside the old ones, prove them, swap; how many documents."""
    rules = changing(entries)
    if not rules:
        raise UsageError(
            "no field of these models has Replaces(…), so that there is nothing to build beside it; write "
            "the former declaration into Replaces(…) beside the new one, or rebuild in place",
            code="nothing-to-replace",
        )
    yield from declare(graph)
    chosen = {"_id": {"$in": [rule.replacement.label for rule in rules]}}
    states = {row["_id"]: row["state"] for row in (yield from find(COLLECTION, chosen))}
    visited = 0
    for entry in dict.fromkeys(rule.target for rule in rules):
        own = [rule for rule in rules if rule.target is entry]
        due = [rule for rule in own if states[rule.replacement.label] not in ("swapped", "done")]
        visited += yield from _build(graph, server, entry, due, report)
        yield from _prove(graph, server, entry, due, report)
        yield from fingerprints.rebuilt_rules(due)
        if server.streams:
            yield from position.built(due)
        if due and swap:
            yield from _swap(graph, server, due, "new", report)
    return visited


def _build(
    graph: Graph,
    server: Capabilities,
    entry: Entry[Any],
    rules: Sequence[Rule],
    report: Report | None,
    unmarked: Side = "old",
) -> Plan[int]:
    """Compute the shadow values of documents that have no mark yet, and mark them as what they show."""
    marks = [rule.replacement.mark for rule in rules]
    unbuilt: Raw = {"$or": [{mark: {"$exists": False}} for mark in marks]} if marks else {"_id": {"$in": []}}
    page = graph.limits.rebuild_page
    limit = report.sized(page) if isinstance(report, Pace) else page
    total = (yield from count_documents(entry.collection, unbuilt)) if report else 0
    done, last = 0, None
    while ids := (yield from _ids(entry.collection, unbuilt, last, limit)):
        yield from mend(graph, server, entry, ids)
        yield from _mark(entry, marks, ids, unmarked)
        done, last = done + len(ids), [ids[-1]]
        if report:
            report(Progress(entry.model.__name__, done, max(total, done)))
        yield from resting(report, len(ids))
    return done


def _mark(entry: Entry[Any], marks: Sequence[str], ids: Sequence[Any], side: Side) -> Plan[None]:
    """Note in documents that they are built; one that cannot be written is set aside."""

    def attempt(some: Sequence[Any]) -> Plan[list[None]]:
        for mark in marks:
            absent = {"_id": {"$in": list(some)}, mark: {"$exists": False}}
            yield from update_many(entry.collection, absent, {"$set": {mark: side}})
        return []

    def alone(key: Any, error: Exception) -> Plan[list[None]]:
        yield from set_aside(entry.model.__name__, entry.collection, key, error)
        return []

    yield from in_pieces(entry.limits, ids, attempt, alone)


def _ids(collection: str, condition: Raw, last: list[Any] | None, limit: int) -> Plan[list[Any]]:
    """The ids of the next documents that match, in their order."""
    beyond = condition if last is None else {"$and": [condition, {"_id": {"$ne": last[0]}}]}
    options = {"sort": [("_id", 1)], "limit": limit, **starting_at(last)}
    return [row["_id"] for row in (yield from find(collection, beyond, {"_id": 1}, **options))]


def _prove(
    graph: Graph, server: Capabilities, entry: Entry[Any], rules: Sequence[Rule], report: Report | None
) -> Plan[None]:
    """Mend shadow values that processes without this declaration did not follow; refuse what stays wrong."""
    paths = {path for rule in rules for pair in rule.replacement.pairs for path in pair}
    wrong: list[Finding] = []
    for _ in range(graph.limits.rebuild_rounds_max if rules else 0):
        findings = yield from verify(graph, server, [entry], report)
        wrong = [each for each in findings if each.path in paths]
        if not wrong:
            return
        yield from mend(graph, server, entry, distinct(each.document_id for each in wrong))
    if wrong:
        raise DataError(
            f"{len(wrong)} values of {entry.model.__name__} are not right after the build, the first at "
            f"{wrong[0].path}; the former values stay shown. Documents that cannot be written are listed by "
            "set_aside(); processes that write without this declaration must be replaced first",
            code="shadow-wrong",
        )


def _swap(
    graph: Graph, server: Capabilities, rules: Sequence[Rule], to: Side, report: Report | None = None
) -> Plan[int]:
    """Let every document show one of two declarations of some fields of a model; how many turned."""
    own = {"_id": {"$in": [rule.replacement.label for rule in rules]}}
    yield from update_many(COLLECTION, own, {"$set": {"state": "swapping", "new": to}})
    turned = yield from _turn_all(graph, server, rules, to, report)
    state: ChangeState = "swapped" if to == "new" else "building"
    yield from update_many(COLLECTION, own, [{"$set": {"state": state, "unmarked": to, "at": "$$NOW"}}])
    for rule in rules:
        yield from fingerprints.shown(rule, to)
    return turned


def _turn_all(
    graph: Graph, server: Capabilities, rules: Sequence[Rule], to: Side, report: Report | None
) -> Plan[int]:
    """Turn the documents that show the other declarations; all fields of a document in one commit."""
    entry, replacements = rules[0].target, [rule.replacement for rule in rules]
    other = {"$or": [{each.mark: "old" if to == "new" else "new"} for each in replacements]}
    turned = 0

    def attempt(some: Sequence[Any]) -> Plan[list[Any]]:
        chosen = {"_id": {"$in": list(some)}, **other}

        def hold() -> Plan[None]:
            yield from update_many(entry.collection, chosen, {"$inc": {REVISION: 1}})

        def turn() -> Plan[list[Any]]:
            return _turn(graph, server, entry, [each.turning(to) for each in replacements], chosen)

        return (yield from transact(attempting(entry.limits, turn, hold, len(some))))

    def alone(key: Any, error: Exception) -> Plan[list[Any]]:
        yield from set_aside(entry.model.__name__, entry.collection, key, error)
        return []

    # Those that were inserted meanwhile by transactions which had begun before come in a second pass.
    while True:
        last, before = None, turned
        while ids := (yield from _ids(entry.collection, other, last, graph.limits.swap_page)):
            last = [ids[-1]]
            turned += len((yield from in_pieces(entry.limits, ids, attempt, alone)))
            yield from resting(report, len(ids))
        if turned == before:
            return turned


def _turn(
    graph: Graph, server: Capabilities, entry: Entry[Any], stages: Sequence[Raw], chosen: Raw
) -> Plan[list[Any]]:
    """Exchange fields and shadows of some documents, with what follows from what they show."""
    before = {freeze(each["_id"]): each for each in (yield from find(entry.collection, chosen))}
    ids = [each["_id"] for each in before.values()]
    ledger, noted = Ledger(), derivation(entry).feeds
    if noted:
        yield from ledger.note_before(entry, ids)
    update = [*stages, {"$set": BUMP}, *formula_stages(entry)]
    yield from update_many(entry.collection, {"_id": {"$in": ids}}, update)
    if noted:
        for frozen, after in (yield from by_ids(entry.collection, ids)).items():
            ledger.add(Change(entry.collection, after["_id"], before[frozen], after))
        yield from react(graph, server, ledger, copies_max=UNBOUNDED)
    return ids


# -- back, and done -------------------------------------------------------------------------------------


def undo(graph: Graph, server: Capabilities, label: str, report: Report | None = None) -> Plan[int]:
    """Show the former declaration again, or forget a build; how many documents turned."""
    row = yield from _row(graph, label)
    rule = _declared(graph, label)
    if row["settled"] or rule is None:
        raise UsageError(
            f"{label} cannot be undone: code that has only the new declaration runs, and nobody has kept the "
            "former values right since; declare the former one as a change of its own",
            code="undo-too-late",
        )
    if row["state"] == "building":
        yield from _drop(graph, row)
        yield from delete_one(COLLECTION, {"_id": label})
        return 0
    keep = timedelta(seconds=graph.limits.undo_seconds)
    if row["at"] is not None and (yield from clock()) > row["at"] + keep:
        raise UsageError(
            f"{label} was swapped at {row['at']:%Y-%m-%d %H:%M} UTC, longer ago than former values are kept; "
            "declare the former one as a change of its own",
            code="undo-too-late",
        )
    # Whoever stored documents without a mark: they are about to mean the other side.
    yield from _build(graph, server, rule.target, [rule], report, row["unmarked"])
    return (yield from _swap(graph, server, [rule], "old", report))


def finish(graph: Graph, server: Capabilities, label: str, report: Report | None = None) -> Plan[int]:
    """Drop the former values of a change that was swapped; of how many documents."""
    row = yield from _row(graph, label)
    if row["state"] != "swapped":
        raise UsageError(
            f"{label} is {row['state']}; rebuild(shadow=True) brings it to its end first",
            code="change-unfinished",
        )
    rule = _declared(graph, label)
    if rule is not None:
        yield from _turn_all(graph, server, [rule], "new", report)
    dropped = yield from _drop(graph, row, report)
    yield from update_one(COLLECTION, {"_id": label}, {"$set": {"state": "done"}})
    return dropped


def finish_due(graph: Graph, server: Capabilities, now: datetime | None, dry_run: bool) -> Plan[int]:
    """Drop the former values that were kept for long enough; of how many documents."""
    chosen = {"state": "swapped", "collection": {"$in": list(graph.by_collection)}}
    rows = yield from find(COLLECTION, chosen)
    present = (now or (yield from clock())) if rows else None
    keep, dropped = timedelta(seconds=graph.limits.undo_seconds), 0
    for row in rows:
        if present is None or row["at"] is None or present <= row["at"] + keep:
            continue
        if dry_run:
            dropped += yield from count_documents(row["collection"], {row["mark"]: {"$exists": True}})
        else:
            dropped += yield from finish(graph, server, row["_id"])
    return dropped


def _declared(graph: Graph, label: str) -> Rule | None:
    """The rule that takes the place of another, where this code declares both."""
    rules = changing(graph.entries.values())
    return next((rule for rule in rules if rule.replacement.label == label), None)


def _drop(graph: Graph, row: Raw, report: Report | None = None) -> Plan[int]:
    """Remove shadow and mark from the documents."""
    shadows = [shadow for _, shadow in row["pairs"]]
    emptied = {
        path: {"$cond": [{"$eq": [f"${path}", {"$literal": {}}]}, "$$REMOVE", f"${path}"]}
        for path in (SHADOW, MARK)
    }
    marked = {"$or": [{path: {"$exists": True}} for path in [row["mark"], *shadows]]}
    last, dropped = None, 0
    while ids := (yield from _ids(row["collection"], marked, last, graph.limits.swap_page)):
        last = [ids[-1]]
        chosen = {"_id": {"$in": ids}, **marked}
        if row["state"] == "swapped":
            # What was inserted by a transaction that had begun before the swap.
            exchange = {here: f"${there}" for pair in row["pairs"] for here, there in (pair, pair[::-1])}
            yield from update_many(row["collection"], {**chosen, row["mark"]: "old"}, [{"$set": exchange}])
        yield from update_many(
            row["collection"], chosen, [{"$unset": [*shadows, row["mark"]]}, {"$set": emptied}]
        )
        dropped += len(ids)
        yield from resting(report, len(ids))
    return dropped
