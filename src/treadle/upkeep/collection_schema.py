"""The validator of a collection: what each kind and each version of its documents may look like.

The current version of each kind is as its model says. Versions before it have
no declared shape, so their branch only asks for the version itself. An
unknown kind and an unknown version fit no branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.graph.model_entry import ModelEntry
from treadle.graph.versions import VersionChain
from treadle.model.json_schema import Schema, model_schema


def collection_schema(entry: ModelEntry) -> Schema:
    """The `$jsonSchema` that accepts exactly what the kinds and versions of a collection allow."""
    if entry.kinds.family is None:
        branches = _branches(entry, {})
    else:
        branches = []
        for kind, member in entry.kinds.family.by_kind.items():
            stored = entry.kinds.family.stored_as(kind)
            branches += _branches(member, {entry.kinds.family.discriminator: {"enum": stored}})
        older = _other_versions(entry.versions, {})
        if older:
            # Documents that get their kind only by a migration of the base.
            branches.append({**older, "not": {"required": [entry.kinds.family.discriminator]}})
    unique: list[Schema] = []
    for branch in branches:
        if branch not in unique:
            unique.append(branch)
    if not unique:
        return model_schema(entry.codec)
    return unique[0] if len(unique) == 1 else {"anyOf": unique}


def _branches(entry: ModelEntry, kind: Schema) -> list[Schema]:
    """The current version of one class, and those before it."""
    schema = model_schema(entry.codec)
    for name, allowed in kind.items():
        schema = _confined(schema, name, allowed, required=None not in allowed["enum"])
    chain = entry.versions
    if not chain.is_versioned:
        return [schema]
    # A document without a version is of the first.
    numbers: list[Any] = [chain.current] if chain.current > 1 else [1, None]
    schema = _confined(schema, chain.field, {"enum": numbers}, required=chain.current > 1)
    older = _other_versions(chain, kind)
    return [schema, older] if older else [schema]


def _other_versions(chain: VersionChain, kind: Schema) -> Schema:
    """Whatever is of an older version, or of a newer one that can be read."""
    others: list[Any] = [number for number in range(1, chain.newest + 1) if number != chain.current]
    if not others:
        return {}
    first = 1 in others
    schema: Schema = {"bsonType": "object", "properties": {}}
    for name, allowed in kind.items():
        schema = _confined(schema, name, allowed, required=None not in allowed["enum"])
    allowed = {"enum": [*others, None] if first else others}
    return _confined(schema, chain.field, allowed, required=not first)


def _confined(schema: Schema, name: str, allowed: Schema, *, required: bool) -> Schema:
    """A schema in which a field may only be what is allowed."""
    others = [each for each in schema.get("required", []) if each != name]
    names = [*others, name] if required else others
    changed = {**schema, "properties": {**schema.get("properties", {}), name: allowed}}
    if names:
        changed["required"] = names
    return changed


def newest_version(schema: Mapping[str, Any], field: str) -> int:
    """The highest version that an existing validator describes; 0 where it describes none."""
    highest = 0
    for branch in schema.get("anyOf", [schema]):
        if not isinstance(branch, Mapping) or "_id" not in branch.get("required", ()):
            # Of a version before, or after, of which nothing is asked.
            continue
        allowed = branch.get("properties", {}).get(field, {})
        for number in allowed.get("enum", []) if isinstance(allowed, Mapping) else []:
            if isinstance(number, int) and not isinstance(number, bool):
                highest = max(highest, number)
    return highest
