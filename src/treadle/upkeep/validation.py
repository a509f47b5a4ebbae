"""Documents that do not validate: how many there are, which, and at which field.

The server judges both: the documents by the schema of the validator, and the
field by the part of the schema that describes that field alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from treadle.engine.indexes import EXAMPLES_MAX
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Finding
from treadle.graph.stored_pages import matching, readable_page
from treadle.model.json_schema import Schema
from treadle.model.keywords import stamped_names
from treadle.plan import Plan, Raw, count_documents, find
from treadle.plan.decoding import Unreadable
from treadle.query.keys import freeze
from treadle.upkeep.collection_schema import collection_schema, newest_version


def is_newer(entry: ModelEntry, validator: Mapping[str, Any]) -> bool:
    """Whether an existing validator was made by a later release, which must not be taken back."""
    schema = validator.get("$jsonSchema") if isinstance(validator, Mapping) else None
    if not entry.versions.is_versioned or not isinstance(schema, Mapping):
        return False
    return newest_version(schema, entry.versions.field) > entry.versions.current


def describe_change(entry: ModelEntry, now: Raw, declared: Raw) -> Plan[str]:
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
    faults = yield from _find_faults(entry, schema, examples)
    named += [f"_id {raw['_id']!r} ({faults[freeze(raw['_id'])].path})" for raw in examples]
    listed = "; ".join(named)
    more = "; …" if number > len(named) else ""
    verb = "document does" if number == 1 else "documents do"
    return f"{change}; {number} {verb} not validate: {listed}{more}"


def _only_warns(declared: Raw) -> bool:
    return bool(declared["validationAction"] == "warn")


class Fault(NamedTuple):
    """The first field of a document that does not validate, what is stored there, and what may be."""

    path: str
    stored: Any
    expected: Any


def _find_faults(entry: ModelEntry, schema: Schema, documents: Sequence[Raw]) -> Plan[dict[Any, Fault]]:
    """Return where documents that the server refused do not validate, by frozen id."""
    branches = schema.get("anyOf", [schema])
    # Kind and version say which branch a document was meant for, so they are looked at first.
    tags = list(dict.fromkeys(name for each in entry.kinds.related for name in stamped_names(each.model)))
    by_branch: dict[int, list[Raw]] = {}
    for raw in documents:
        distances = [_wrong_tags(branch, tags, raw) for branch in branches]
        by_branch.setdefault(distances.index(min(distances)), []).append(raw)
    faults: dict[Any, Fault] = {}
    for number, raws in by_branch.items():
        faults |= yield from _find_fields(entry.collection, branches[number], tags, raws)
    return faults


def _wrong_tags(branch: Schema, tags: Sequence[str], raw: Raw) -> list[bool]:
    """Which tags of a document are not those of a branch; of several branches, the least is the nearest."""
    properties, absent = branch.get("properties", {}), branch.get("not", {}).get("required", ())
    return [
        raw.get(tag) not in properties[tag]["enum"] if "enum" in properties.get(tag, {}) else tag in absent
        for tag in tags
    ]


def _find_fields(
    collection: str, branch: Schema, tags: Sequence[str], documents: Sequence[Raw]
) -> Plan[dict[Any, Fault]]:
    properties, required = branch.get("properties", {}), branch.get("required", [])
    pending = {freeze(raw["_id"]): raw for raw in documents}
    faults: dict[Any, Fault] = {}
    for name in sorted(properties, key=lambda each: each not in tags):
        if not pending:
            break
        alone: Schema = {"properties": {name: properties[name]}}
        if name in required:
            alone["required"] = [name]
        ids = [raw["_id"] for raw in pending.values()]
        invalid = {"_id": {"$in": ids}, "$nor": [{"$jsonSchema": alone}]}
        for row in (yield from find(collection, invalid, {"_id": 1})):
            raw = pending.pop(freeze(row["_id"]), {})
            expected = properties[name] if name in raw else {"required": True, **properties[name]}
            faults[freeze(row["_id"])] = Fault(name, raw.get(name), expected)
    for key, raw in pending.items():
        # No declared field is at fault: one that is not declared, or the document has changed since.
        name = next((name for name in raw if name not in properties), "the document")
        faults[key] = Fault(
            name, raw.get(name), "no such field" if name in raw else "what the validator allows"
        )
    return faults


def findings(entries: Iterable[ModelEntry], sample: float | None = None) -> Plan[list[Finding]]:
    """A finding for each document that does not validate, at the place where it does not; or of a sample."""
    findings: list[Finding] = []
    chosen: dict[str, list[ModelEntry]] = {}
    for entry in entries:
        if entry.model.__treadle__.validation != "off" and (
            entry.layout is None or entry.layout.schema() is not None
        ):
            chosen.setdefault(entry.collection, []).append(entry)
    for collection, members in chosen.items():
        root = members[0].kinds.root
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
            faults = yield from _find_faults(root, schema, rows)
            findings += [
                Finding(
                    "validation", root.kinds.of(raw).model.__name__, raw["_id"], *faults[freeze(raw["_id"])]
                )
                for raw in rows
            ]
    return findings
