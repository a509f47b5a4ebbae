"""The validator of a collection: what each kind and each version of its documents may look like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.json_schema import Schema, model_schema

if TYPE_CHECKING:
    from treadle.graph import Entry


def collection_schema(entry: Entry[Any]) -> Schema:
    """The `$jsonSchema` that accepts exactly what the kinds and versions of a collection allow."""
    if entry.family is None:
        return model_schema(entry.codec)
    branches = []
    for kind, member in entry.family.by_kind.items():
        schema = model_schema(member.codec)
        branches.append(_with(schema, entry.family.discriminator, {"enum": [kind]}))
    return {"anyOf": branches} if branches else model_schema(entry.codec)


def _with(schema: Schema, name: str, allowed: Schema) -> Schema:
    """A schema in which a field is required and confined."""
    required = [each for each in schema.get("required", []) if each != name]
    return {
        **schema,
        "properties": {**schema.get("properties", {}), name: allowed},
        "required": [*required, name],
    }
