"""Documents that do not validate: how many there are, which, and where.

The server says which documents they are, by the very schema that the
validator is made of. `schema_check.py` then says where the fault lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from treadle.engine.indexes import EXAMPLES_MAX
from treadle.graph.outcomes import Finding
from treadle.graph.pattern import Entry
from treadle.graph.stored_pages import matching, readable_page
from treadle.model.schema_check import Fault, faults
from treadle.plan import Plan, Raw, count_documents, find
from treadle.plan.decoding import Unreadable
from treadle.upkeep.collection_schema import collection_schema, newest_version


def is_newer(entry: Entry[Any], validator: Mapping[str, Any]) -> bool:
    """Whether an existing validator was made by a later release, which must not be taken back."""
    schema = validator.get("$jsonSchema") if isinstance(validator, Mapping) else None
    if not entry.versions.is_versioned or not isinstance(schema, Mapping):
        return False
    return newest_version(schema, entry.versions.field) > entry.versions.current


def describe_change(entry: Entry[Any], now: Raw, declared: Raw) -> Plan[str]:
    """What a new validator means for the documents that are there."""
    before, after = now["validationLevel"] if now["validator"] else "none", declared["validationLevel"]
    change = str(after) if before == after else f"{before} to {after}"
    if _only_warns(declared):
        change += ", only warns"
    if not declared["validator"]:
        return change
    schema = declared["validator"]["$jsonSchema"]
    invalid = {"$nor": [{"$jsonSchema": schema}]}
    number = yield from count_documents(entry.collection, invalid)
    if not number:
        return f"{change}; all documents that are there validate" if _only_warns(declared) else change
    try:
        examples = yield from find(entry.collection, invalid, sort=[("_id", 1)], limit=EXAMPLES_MAX)
        named = []
    except Unreadable as error:
        examples = error.documents
        named = [f"_id {key!r} (cannot be decoded)" for key, _ in error.failed]
    named += [f"_id {raw['_id']!r} ({_first(schema, raw).path})" for raw in examples]
    listed = "; ".join(named)
    more = "; …" if number > len(named) else ""
    verb = "document does" if number == 1 else "documents do"
    return f"{change}; {number} {verb} not validate: {listed}{more}"


def _only_warns(declared: Raw) -> bool:
    return bool(declared["validationAction"] == "warn")


def _first(schema: Mapping[str, Any], raw: Raw) -> Fault:
    # What only the server can judge, such as a pattern, has no path here.
    return next(iter(faults(schema, raw)), Fault("the document", None, "what the validator allows"))


def findings(entries: Iterable[Entry[Any]], sample: float | None = None) -> Plan[list[Finding]]:
    """A finding for each document that does not validate, at the place where it does not; or of a sample."""
    findings: list[Finding] = []
    chosen: dict[str, list[Entry[Any]]] = {}
    for entry in entries:
        if entry.settings.validation != "off" and (entry.layout is None or entry.layout.schema() is not None):
            chosen.setdefault(entry.collection, []).append(entry)
    for collection, members in chosen.items():
        root = members[0].root
        layout = root.layout
        schema = (None if layout is None else layout.schema()) or collection_schema(root)
        stored = [member.targets.with_deleted.exact.filter() for member in members]
        scopes = [condition for condition in stored if condition]
        condition: Raw = {"$nor": [{"$jsonSchema": schema}]}
        if sample is not None:
            condition["$sampleRate"] = sample
        if scopes and root not in members:
            condition["$or"] = scopes
        last: list[Any] | None = None
        while True:
            page = matching(collection, condition, last, root.limits.verify_page)
            rows, last = yield from readable_page(root.model.__name__, page, last)
            if last is None:
                break
            for raw in rows:
                fault, model = _first(schema, raw), root.of(raw).model.__name__
                findings.append(
                    Finding("validation", model, raw["_id"], fault.path, fault.stored, fault.expected)
                )
    return findings
