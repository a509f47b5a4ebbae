"""Documents that do not validate: how many there are, which, and where.

The server says which documents they are, by the very schema that the
validator is made of. `schema_check.py` then says where the fault lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from treadle.engine.pages import starting_at
from treadle.graph.pattern import Entry
from treadle.graph.reports import Finding
from treadle.model.schema_check import Fault, faults
from treadle.plan import Plan, Raw, count_documents, find, in_one_reply
from treadle.upkeep.collection_schema import collection_schema, newest_version


def is_newer(entry: Entry[Any], validator: Mapping[str, Any]) -> bool:
    """Whether an existing validator was made by a later release, which must not be taken back."""
    lineages = [each.lineage for each in entry.related if each.lineage is not None]
    schema = validator.get("$jsonSchema") if isinstance(validator, Mapping) else None
    if not lineages or not isinstance(schema, Mapping):
        return False
    return newest_version(schema, lineages[0].field) > max(lineage.current for lineage in lineages)


def describe_change(entry: Entry[Any], now: Raw, wanted: Raw) -> Plan[str]:
    """What a new validator means for the documents that are there."""
    before, after = now["validationLevel"] if now["validator"] else "none", wanted["validationLevel"]
    told = str(after) if before == after else f"{before} to {after}"
    if wanted["validationAction"] == "warn":
        told += ", only warns"
    if not wanted["validator"]:
        return told
    schema = wanted["validator"]["$jsonSchema"]
    invalid = {"$nor": [{"$jsonSchema": schema}]}
    number = yield from count_documents(entry.collection, invalid)
    if not number:
        return told
    shown = yield from find(entry.collection, invalid, sort=[("_id", 1)], limit=entry.limits.examples_max)
    listed = "; ".join(f"_id {raw['_id']!r} ({_first(schema, raw).path})" for raw in shown)
    more = "; …" if number > len(shown) else ""
    verb = "document does" if number == 1 else "documents do"
    return f"{told}; {number} {verb} not validate: {listed}{more}"


def _first(schema: Mapping[str, Any], raw: Raw) -> Fault:
    found = faults(schema, raw)
    # What only the server can judge, such as a pattern, has no path here.
    return found[0] if found else Fault("the document", None, "what the validator allows")


def findings(entries: Iterable[Entry[Any]]) -> Plan[list[Finding]]:
    """A finding for each document that does not validate, at the place where it does not."""
    found: list[Finding] = []
    chosen: dict[str, list[Entry[Any]]] = {}
    for entry in entries:
        if entry.settings.validation != "off" and (entry.layout is None or entry.layout.schema() is not None):
            chosen.setdefault(entry.collection, []).append(entry)
    for collection, members in chosen.items():
        root = members[0].root
        layout = root.layout
        schema = (None if layout is None else layout.schema()) or collection_schema(root)
        scopes = [member.exactly for member in members if member.exactly]
        condition: Raw = {"$nor": [{"$jsonSchema": schema}]}
        if scopes and root not in members:
            condition["$or"] = scopes
        last: list[Any] | None = None
        while True:
            options = {**in_one_reply(root.limits.verify_page), **starting_at(last)}
            beyond = condition if last is None else {"$and": [condition, {"_id": {"$ne": last[0]}}]}
            fresh = yield from find(collection, beyond, sort=[("_id", 1)], **options)
            if not fresh:
                break
            last = [fresh[-1]["_id"]]
            for raw in fresh:
                fault = _first(schema, raw)
                model = root.of(raw).model.__name__
                found.append(
                    Finding("validation", model, raw["_id"], fault.path, fault.stored, fault.expected)
                )
    return found
