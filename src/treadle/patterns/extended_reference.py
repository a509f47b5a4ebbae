"""Extended Reference: the hot fields of the document that a reference names, kept beside it.

`policy="sync"` follows the source, `"snapshot"` keeps the values of the moment
in which the reference was set, and `snapshot=[…]` mixes both in one card.

Two writers can miss each other: one inserts a copy of the old value while the
other changes the source, and in snapshot isolation both commit. Treadle lets
the insert really write the source (a counter in its reserved sub-document),
so that one of the two meets a conflict and starts again. It was chosen over a
later second sweep because a copy is then right as soon as it can be seen; the
price is that inserts which share a source wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Literal

from treadle.errors import DeclarationError
from treadle.graph.binding import check_choice, check_maintenance
from treadle.graph.copied_fields import CopiedField, CopiedFields
from treadle.graph.derived import ID, DerivedRule, OnDelete, Relation, target_field
from treadle.graph.model_entry import Maintain, ModelEntry
from treadle.graph.rule import ModelReference, Models, Pattern, Place, Rule
from treadle.model.codec import codec_of
from treadle.model.shape import Shape
from treadle.query.keys import Key
from treadle.query.paths import ARRAYS, Path, model_of, resolve

Policy = Literal["sync", "snapshot"]


@dataclass(frozen=True)
class ExtendedReference(Pattern):
    """A card of the document of `source` whose id, or unique field `to`, stands in the field `by`."""

    pattern: ClassVar[str] = "extended-reference"

    source: ModelReference
    by: str
    fields: Sequence[str] | None = None
    field: str | None = None
    policy: Policy = "sync"
    snapshot: Sequence[str] = ()
    on_delete: OnDelete = "keep"
    maintain: Maintain = "write"
    every: timedelta | None = None
    to: str | None = None

    def bind(self, place: Place, graph: Models) -> Rule:
        check_maintenance(place, self.maintain, self.every)
        check_choice(place, "policy", self.policy, ("sync", "snapshot"))
        check_choice(place, "on_delete", self.on_delete, ("keep", "restrict", "clear", "cascade"))
        source = graph.resolve(self.source, place.label)
        reference = resolve(place.owner, self.by, place.label, "reference-field-missing")
        if reference.in_array:
            raise DeclarationError(
                f"{place.label} has by={self.by!r}, which is an array; declare the card inside the "
                "array's own model, beside its reference",
                code="reference-field-in-array",
            )
        name = graph.check_reference(reference, source, place.label, self.to)
        on = _reference_key(place, reference)
        aggregate = CopiedFields(
            target_field(place),
            source.model.__name__,
            self._copied_fields(place, source, reference),
            on,
            reference.stored,
            keep=self.on_delete == "keep",
            required=not place.field.shape.optional,
        )
        self._check_deletion(place, reference, aggregate)
        relation = Relation(source, ID if name is None else Key(name), on, {})
        rule = DerivedRule(place, relation, aggregate, self)
        if name is not None and self.maintain == "stream" and self.on_delete in ("clear", "cascade"):
            # The event of a deletion has the id alone.
            rule.needs = {
                "pre_images": f'declare maintain="write" or on_delete="keep", or leave out to={name!r}'
            }
        return rule

    def _copied_fields(self, place: Place, source: ModelEntry, reference: Path) -> list[CopiedField]:
        frozen = set(self.snapshot)
        if self.field is not None:
            path = resolve(source.codec, self.field, place.label, "embedded-field-missing")
            _check_types(place, source, place.field.shape, path, self.field)
            return [CopiedField("", path.stored, self.policy == "snapshot" or self.field in frozen)]
        model = model_of(place.field.shape)
        if model is None or place.field.shape.kind != "model":
            raise DeclarationError(
                f"{place.label} is no card; use a model of the fields to copy, or field='…' for a single one",
                code="maintained-type",
            )
        card = codec_of(model)
        chosen = list(self.fields) if self.fields is not None else list(card.by_name)
        copied = []
        for name in [*chosen, *sorted(frozen - set(chosen))]:
            path = resolve(source.codec, name, place.label, "embedded-field-missing")
            inside = resolve(card, name, place.label, "embedded-field-missing")
            if reference.stored == f"{place.field.stored}.{inside.stored}":
                # The card holds its reference, which is the caller's to write.
                continue
            _check_types(place, source, inside.shape, path, name, several=inside.steps[-1].array)
            snapshot = self.policy == "snapshot" or name in frozen
            copied.append(CopiedField(inside.stored, path.stored, snapshot))
        if not copied:
            raise DeclarationError(
                f"{place.label} copies no field; name at least one", code="embedded-field-missing"
            )
        return copied

    def _check_deletion(self, place: Place, reference: Path, aggregate: CopiedFields) -> None:
        if self.maintain == "schedule" and self.on_delete in ("clear", "cascade"):
            raise DeclarationError(
                f"{place.label} has on_delete={self.on_delete!r} and maintain='schedule'; a schedule copies "
                "and does not delete: use maintain='write' or 'stream', or on_delete='keep'",
                code="pattern-keyword",
            )
        # A card that holds its reference is cleared as a whole.
        clearable = not aggregate.required and (reference.shape.optional or aggregate.holds_reference)
        if self.on_delete == "clear" and not clearable:
            raise DeclarationError(
                f"{place.label} has on_delete='clear', so {self.by!r} and the card must be able to be None",
                code="maintained-type",
            )


def _reference_key(place: Place, reference: Path) -> Key:
    """Return the key of the references in a target, which lie beside the card or in it."""
    names = [step.stored for step in place.steps]
    arrays = [".".join(names[: number + 1]) for number, step in enumerate(place.steps) if step.array]
    return Key(".".join([*names, reference.stored]), tuple(arrays))


def _check_types(
    place: Place, entry: ModelEntry, inside: Shape, source: Path, name: str, *, several: bool = False
) -> None:
    """Refuse a copy that could not hold what the source's field holds; `several` says a list of these."""
    if inside.kind in ARRAYS and inside.items:
        inside, several = inside.items[0], True
    model, is_list = entry.model.__name__, source.steps[-1].array
    if any(step.array for step in source.steps[:-1]):
        raise DeclarationError(
            f"{place.label} embeds {name!r}, which lies inside an array of {model}; copy the array as "
            "a whole",
            code="maintained-type",
        )
    if not _fits(inside, source.shape, several, is_list):
        raise DeclarationError(
            f"{place.label} embeds {name!r} as a {'list of ' if several else ''}{inside.name}, but "
            f"{model}.{source.python} is a {'list of ' if is_list else ''}{source.shape.name}; declare the "
            "same type",
            code="maintained-type",
        )


def _fits(inside: Shape, outer: Shape, several: bool, is_list: bool) -> bool:
    vague = {"any", "custom", "union", "enum", "literal"}
    if several != is_list and inside.kind not in vague:
        return False
    if inside.kind == outer.kind == "scalar":
        return inside.python is outer.python
    return inside.kind == outer.kind or bool({inside.kind, outer.kind} & vague)
