"""The patterns that a model declares: class keywords, and annotations of fields at any depth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from treadle.errors import DeclarationError
from treadle.graph import lifecycle
from treadle.graph.model_entry import ModelEntry
from treadle.graph.rule import ClassPlace, Pattern, Place
from treadle.model.codec import Codec, codec_of
from treadle.query.paths import ARRAYS, Step, model_of, models_of, refuse_array_of_arrays


def declarations(entry: ModelEntry) -> Iterator[tuple[Place, Pattern]]:
    """Each pattern of a document: class keywords first, which the fields may ask, then fields."""
    for keyword, patterns in entry.model.__treadle__.patterns.items():
        for pattern in patterns:
            if not isinstance(pattern, Pattern) or pattern.keyword != keyword:
                raise DeclarationError(
                    f"{entry.model.__name__} has {keyword}={pattern!r}; it takes a pattern of that keyword, "
                    "with its parentheses, such as bucket=Bucket(…) or tree=AncestorArray(…)",
                    code="pattern-keyword",
                )
            yield ClassPlace(entry, entry.codec, (), entry.codec.by_name["id"], keyword), pattern
    yield from lifecycle.declared(entry)
    for place, pattern in _declared(entry, entry.codec, (), ()):
        if pattern.keyword is not None:
            raise DeclarationError(
                f"{place.label} is annotated with a pattern of the whole model; write the class keyword "
                f"{pattern.keyword}={type(pattern).__name__}(…)",
                code="pattern-keyword",
            )
        yield place, pattern


def _declared(
    entry: ModelEntry, codec: Codec[Any], steps: tuple[Step, ...], inside: tuple[type[BaseModel], ...]
) -> Iterator[tuple[Place, Pattern]]:
    if codec.model in inside:
        return
    for field in codec.fields:
        marks = [mark for mark in field.shape.metadata if isinstance(mark, Pattern)]
        if len(marks) > 1:
            raise DeclarationError(
                f"{entry.model.__name__}.{field.name} has {len(marks)} patterns; a field takes one",
                code="path-maintained-twice",
            )
        yield from ((Place(entry, codec, steps, field), mark) for mark in marks)
        model = model_of(field.shape)
        if model is None:
            _refuse_in_union(entry, field, (*inside, codec.model))
        if model is not None and not marks:
            step = Step(field.name, field.stored, field.shape.kind in ARRAYS)
            for place, mark in _declared(entry, codec_of(model), (*steps, step), (*inside, codec.model)):
                refuse_array_of_arrays(field.shape, place.label)
                yield place, mark


def _refuse_in_union(entry: ModelEntry, field: Any, inside: tuple[type[BaseModel], ...]) -> None:
    """Refuse a pattern in a model that a field may or may not hold: it would never be maintained."""
    for model in models_of(field.shape):
        for place, _ in _declared(entry, codec_of(model), (), inside):
            raise DeclarationError(
                f"{model.__name__}.{place.field.name} has a pattern, but stands in {entry.model.__name__}."
                f"{field.name}, which may hold another model instead; declare it outside of the union",
                code="pattern-in-union",
            )
