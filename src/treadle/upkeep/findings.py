"""What verify found, stored for `status` and the dashboard, without the documents' values.

`treadle.verifications` holds per model how many findings there were, and
`treadle.findings` where they were. The stored and the expected
value are read again from the documents on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pymongo import UpdateOne

from treadle.engine.pages import projection_of
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding
from treadle.graph.quarantine import storable_key
from treadle.graph.rule import Rule
from treadle.plan import Plan, Raw, bulk_write, delete_many, find
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import distinct, freeze
from treadle.query.paths import plain
from treadle.upkeep.verify import confirm

VERIFICATIONS = "treadle.verifications"
COLLECTION = "treadle.findings"


@dataclass(frozen=True)
class KeptFinding:
    """Where something was wrong when verify last looked."""

    model: str
    rule: str | None
    pattern: str
    document_id: Any
    path: str
    at: datetime | None = None


def keep(graph: Graph, job: Any, findings: Sequence[Finding]) -> Plan[None]:
    """Remember where findings were."""
    operations = []
    for each in findings[: graph.limits.findings_kept]:
        entry = next((one for one in graph.entries.values() if one.model.__name__ == each.model), None)
        rule = None if entry is None else rule_of(entry, each.path)
        identity = {"model": each.model, "id": storable_key(each.document_id), "path": each.path}
        values = {
            "job": job,
            "pattern": {"$literal": each.pattern},
            "rule": {"$literal": None if rule is None else rule.place.label},
            "at": "$$NOW",
        }
        operations.append(UpdateOne({"_id": identity}, [{"$set": values}], upsert=True))
    if operations:
        yield from bulk_write(COLLECTION, operations, ordered=False)


def forget_older(models: Sequence[str], job: Any) -> Plan[None]:
    """Delete what earlier jobs found in these models."""
    yield from delete_many(COLLECTION, {"_id.model": {"$in": list(models)}, "job": {"$ne": job}})


def listed(graph: Graph, **chosen: Any) -> Plan[list[KeptFinding]]:
    """What is remembered, newest first."""
    most = graph.limits.findings_kept
    rows = yield from find(COLLECTION, chosen, sort=[("at", -1), ("_id", 1)], limit=most)
    return [
        KeptFinding(
            row["_id"]["model"], row["rule"], row["pattern"], row["_id"]["id"], row["_id"]["path"], row["at"]
        )
        for row in rows
    ]


def look(graph: Graph, server: Capabilities, entry: ModelEntry, ids: Sequence[Any]) -> Plan[list[Finding]]:
    """What is wrong now in some documents, with the values."""
    chosen = {"_id": {"$in": distinct(ids)}}
    images = yield from entry.targets.exact.find(chosen, projection=projection_of(entry))
    return (yield from confirm(graph, server, entry, [image.document for image in images]))


def look_again(
    graph: Graph, server: Capabilities, entries: Iterable[ModelEntry], **chosen: Any
) -> Plan[list[Finding]]:
    """What is still wrong of what is remembered of these models; the rest is forgotten."""
    left: list[Finding] = []
    for entry in entries:
        name = entry.model.__name__
        kept = yield from listed(graph, **{"_id.model": name}, **chosen)
        if not kept or entry.layout is not None:
            continue
        still = yield from look(graph, server, entry, [each.document_id for each in kept])
        wrong = {(freeze(each.document_id), each.path) for each in still}
        left += still
        for each in kept:
            if each.rule is not None and (freeze(each.document_id), each.path) not in wrong:
                identity = {"model": name, "id": storable_key(each.document_id), "path": each.path}
                yield from delete_many(COLLECTION, {"_id": identity})
    return left


def note(entries: Iterable[ModelEntry], findings: Sequence[Finding]) -> Plan[list[Raw]]:
    """Note for `status` how many findings there were per rule; these numbers."""
    operations = []
    counted: list[Raw] = []
    for entry in entries:
        mine = [each.path for each in findings if each.model == entry.model.__name__]
        rules = [
            {"rule": rule.place.label, "findings": sum(is_of(rule, path) for path in mine)}
            for rule in entry.rules
        ]
        counted += rules
        if rules:
            values = {"rules": {"$literal": rules}, "findings": len(mine), "at": "$$NOW"}
            operations.append(UpdateOne({"_id": entry.model.__name__}, [{"$set": values}], upsert=True))
    if operations:
        yield from bulk_write(VERIFICATIONS, operations, ordered=False)
    return counted


def rule_of(entry: ModelEntry, path: str) -> Rule | None:
    """The rule that maintains a path of a finding."""
    return next((rule for rule in entry.rules if is_of(rule, path)), None)


def is_of(rule: Rule, path: str) -> bool:
    """Whether a path of a finding is one that a rule maintains."""
    bare = plain(path)
    return bare == rule.path or bare.startswith(rule.path + ".") or bare.endswith(f".state.{rule.path}")
