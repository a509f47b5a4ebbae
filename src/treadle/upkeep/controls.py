"""What an operator asked of single rules: to pause, and to go on.

A row of `treadle.controls` says that a rule is paused, since when, and from
which place in the stream it has to catch up. The place is written by the
worker that stops following the rule, before it reads on without it; so a
crash can make the place too early, which costs a replay, never too late.
The rows themselves come by in the stream, which is how a worker learns of
them at once.
"""

from __future__ import annotations

from typing import Any, Literal

from pymongo.errors import OperationFailure

from treadle.errors import UsageError
from treadle.graph.graph import Graph
from treadle.graph.model_entry import implements
from treadle.graph.rule import Rule
from treadle.model.text import quote
from treadle.plan import Plan, Raw, delete_one, find, find_one, update_one
from treadle.plan.server_errors import HISTORY_LOST
from treadle.upkeep.change_stream import BEATS, ChangeStream, first_stages, places
from treadle.upkeep.change_stream import CONTROLS as COLLECTION

# How a rule continues after a pause: at once, by catching up, or by a rebuild because history is gone.
Resumed = Literal["following", "behind", "building"]


def pausable(graph: Graph) -> dict[str, Rule]:
    """The rules that are maintained beside the writers, by their labels; what they miss is recomputed."""
    return {
        rule.place.label: rule
        for rule in graph.rules
        if (rule.maintain != "write" or rule.due_work) and not _replays(rule)
    }


def _replays(rule: Rule) -> bool:
    """Whether a rule records every change of the stream, so that no backfill makes good what it misses."""
    return rule.maintain == "stream" and implements(rule, "replay")


def together(graph: Graph, label: str) -> list[Rule]:
    """The rules that a label stands for: those of one group's documents stop and go together."""
    rule = pausable(graph).get(label)
    if rule is None:
        return []
    if rule.target.rules.group is None:
        return [rule]
    return [each for each in pausable(graph).values() if each.target is rule.target]


def require(graph: Graph, label: Any) -> None:
    """Refuse what is no rule that could be paused."""
    if isinstance(label, str) and label in pausable(graph):
        return
    if any(rule.place.label == label and _replays(rule) for rule in graph.rules):
        raise UsageError(
            f"{label} is recorded from each change in the stream; states that pass during a pause could not "
            "be recovered: stop the worker for a moment instead, which reads on from where it stopped",
            code="rule-not-pausable",
        )
    if any(rule.place.label == label for rule in graph.rules):
        raise UsageError(
            f"{label} is maintained in the writers' own commits, so that there is nothing to pause; "
            'declare it with maintain="stream" or "schedule"',
            code="rule-not-pausable",
        )
    known = ", ".join(sorted(pausable(graph))) or "none"
    raise UsageError(
        f"there is no rule {quote(label)}; those that can be paused: {known}", code="rule-unknown"
    )


def pause(graph: Graph, label: str) -> Plan[bool]:
    """Stop maintaining a rule until it is resumed; whether it was not paused before."""
    require(graph, label)
    since = {"$cond": [{"$eq": ["$paused", True]}, "$at", "$$NOW"]}
    result = yield from update_one(
        COLLECTION, {"_id": label}, [{"$set": {"at": since, "paused": True}}], upsert=True
    )
    return bool(result.modified_count or result.upserted_id is not None)


def resume(graph: Graph, label: str) -> Plan[Resumed]:
    """Let a rule go on from where it was paused; in which way it does."""
    require(graph, label)
    # Where no worker has stopped following it, there is nothing to catch up with.
    yield from delete_one(COLLECTION, {"_id": label, "place": None})
    row = yield from find_one(COLLECTION, {"_id": label})
    if row is None:
        return "following"
    reached = yield from _is_reachable(row["place"])
    yield from update_one(COLLECTION, {"_id": label}, {"$set": {"paused": False}})
    return "behind" if reached else "building"


def _is_reachable(place: Raw) -> Plan[bool]:
    """Whether the server's history still reaches back to a place."""
    for each in places(place):
        stream = ChangeStream()
        try:
            yield from stream.open(first_stages(each, [BEATS]))
            yield from stream.read(1, 0.001)
        except OperationFailure as error:
            if error.code not in HISTORY_LOST:
                raise
            continue
        yield from stream.close()
        return True
    return False


def rows(graph: Graph) -> Plan[dict[str, Raw]]:
    """What was asked of the rules of a Store, by their labels."""
    known = pausable(graph)
    return {row["_id"]: row for row in (yield from find(COLLECTION, {})) if row["_id"] in known}


def paused_rules(graph: Graph) -> Plan[set[Rule]]:
    """The rules that are paused."""
    asked = yield from rows(graph)
    return {rule for label, row in asked.items() if row["paused"] for rule in together(graph, label)}


def stop_at(label: str, place: Raw) -> Plan[bool]:
    """Note from where a paused rule will have to catch up; whether it is still paused."""
    result = yield from update_one(
        COLLECTION, {"_id": label, "paused": True, "place": None}, {"$set": {"place": place}}
    )
    return bool(result.matched_count)


def move(label: str, place: Raw) -> Plan[None]:
    """Note how far a rule has caught up."""
    yield from update_one(COLLECTION, {"_id": label}, {"$set": {"place": place}})


def caught_up(label: str) -> Plan[None]:
    """Let a rule follow with the others, unless it was paused again."""
    yield from delete_one(COLLECTION, {"_id": label, "paused": False})
