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

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal

from pymongo import ASCENDING, IndexModel

from treadle.errors import DataError, DeclarationError
from treadle.graph.binding import check_choice, check_maintenance
from treadle.graph.derived import CopyRule, OnDelete
from treadle.graph.rule import ModelReference, Models, Pattern, Place, Reads, Rule, Storage
from treadle.graph.rule_set import Maintain
from treadle.model.codec import codec_of
from treadle.model.shape import Shape
from treadle.plan import Raw
from treadle.query.comparison import differs_condition, same
from treadle.query.keys import freeze
from treadle.query.paths import (
    ARRAYS,
    REFERRED,
    Path,
    Step,
    containers,
    has,
    model_of,
    overlap,
    places_of,
    put,
    resolve,
    top,
    value_at,
)

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
        return ReferenceRule(place, graph, self)


@dataclass(frozen=True)
class Copied:
    """One copied field: its stored name in the card (None for a flat copy) and in the source."""

    card: str | None
    source: str
    snapshot: bool


class ReferenceRule(CopyRule):
    pattern = "extended-reference"

    def __init__(self, place: Place, graph: Models, declared: ExtendedReference) -> None:
        super().__init__(place)
        self.declared = declared
        self.maintain, self.every = declared.maintain, declared.every
        self.on_delete = declared.on_delete
        self.source = graph.resolve(declared.source, place.label)
        relative: Path = resolve(place.owner, declared.by, place.label, "reference-field-missing")
        if relative.in_array:
            raise DeclarationError(
                f"{place.label} has by={declared.by!r}, which is an array; declare the card inside the "
                "array's own model, beside its reference",
                code="reference-field-in-array",
            )
        name = graph.check_reference(relative, self.source, place.label, declared.to)
        self.to = name or "_id"
        # No shard knows of the names that others hold.
        self.across_shards = name is None
        if name is not None and declared.maintain == "stream" and declared.on_delete in ("clear", "cascade"):
            # The event of a deletion has the id alone.
            self.needs = {
                "pre_images": f'declare maintain="write" or on_delete="keep", or leave out to={name!r}'
            }
        self.by = relative.stored
        self.by_optional = relative.shape.optional
        self.steps = place.steps
        self.name = place.field.stored
        # A card such as {_id, name} may hold its own reference; that part is the caller's.
        self.holds_reference = self.by.startswith(f"{self.name}.")
        self.reference_path = ".".join([*(step.stored for step in self.steps), self.by])
        self.copied = self._copied(place)
        self.synced = [each for each in self.copied if not each.snapshot]
        self.snapshots = [each for each in self.copied if each.snapshot]
        self._check(place)

    def _copied(self, place: Place) -> list[Copied]:
        declared = self.declared
        frozen = set(declared.snapshot)
        if declared.field is not None:
            source = resolve(self.source.codec, declared.field, place.label, "embedded-field-missing")
            self._check_types(place.field.shape, source, declared.field)
            return [Copied(None, source.stored, declared.policy == "snapshot" or declared.field in frozen)]
        model = model_of(place.field.shape)
        if model is None or place.field.shape.kind != "model":
            raise DeclarationError(
                f"{place.label} is no card; use a model of the fields to copy, or field='…' for a single one",
                code="maintained-type",
            )
        card = codec_of(model)
        chosen = list(declared.fields) if declared.fields is not None else list(card.by_name)
        copied = []
        for name in [*chosen, *sorted(frozen - set(chosen))]:
            source = resolve(self.source.codec, name, place.label, "embedded-field-missing")
            inside = resolve(card, name, place.label, "embedded-field-missing")
            if self.holds_reference and self.by == f"{self.name}.{inside.stored}":
                continue
            self._check_types(inside.shape, source, name, several=inside.steps[-1].array)
            copied.append(
                Copied(inside.stored, source.stored, declared.policy == "snapshot" or name in frozen)
            )
        return copied

    def _check(self, place: Place) -> None:
        if not self.copied:
            raise DeclarationError(
                f"{place.label} copies no field; name at least one", code="embedded-field-missing"
            )
        if self.maintain == "schedule" and self.on_delete in ("clear", "cascade"):
            raise DeclarationError(
                f"{place.label} has on_delete={self.on_delete!r} and maintain='schedule'; a schedule copies "
                "and does not delete: use maintain='write' or 'stream', or on_delete='keep'",
                code="pattern-keyword",
            )
        # A card that holds its reference is cleared as a whole.
        clearable = self.optional and (self.by_optional or self.holds_reference)
        if self.on_delete == "clear" and not clearable:
            raise DeclarationError(
                f"{place.label} has on_delete='clear', so {self.declared.by!r} and the card must be able "
                "to be None",
                code="maintained-type",
            )

    def _check_types(self, inside: Shape, source: Path, name: str, *, several: bool = False) -> None:
        """Refuse a copy that could not hold what the source's field holds; `several` says a list of these."""
        outer, vague = source.shape, {"any", "custom", "union", "enum", "literal"}
        if inside.kind in ARRAYS and inside.items:
            inside, several = inside.items[0], True
        if any(step.array for step in source.steps[:-1]):
            raise DeclarationError(
                f"{self.place.label} embeds {name!r}, which lies inside an array of "
                f"{self.source.model.__name__}; copy the array as a whole",
                code="maintained-type",
            )
        if several != source.steps[-1].array and inside.kind not in vague:
            fits = False
        elif inside.kind == outer.kind == "scalar":
            fits = inside.python is outer.python
        else:
            fits = inside.kind == outer.kind or bool({inside.kind, outer.kind} & vague)
        if not fits:
            raise DeclarationError(
                f"{self.place.label} embeds {name!r} as a {'list of ' if several else ''}{inside.name}, but "
                f"{self.source.model.__name__}.{source.python} is a "
                f"{'list of ' if source.steps[-1].array else ''}{outer.name}; declare the same type",
                code="maintained-type",
            )

    @property
    def optional(self) -> bool:
        return self.place.field.shape.optional

    def reads(self) -> Reads:
        watched = {each.source for each in self.copied if not each.snapshot}
        return {self.source.collection: watched if self.to == "_id" else watched | {self.to}}

    def copied_paths(self) -> Sequence[str]:
        return [f"{self.path}.{each.card}" for each in self.copied] if self.holds_reference else [self.path]

    def storage(self) -> Storage:
        index = IndexModel([(self.reference_path, ASCENDING), ("_id", ASCENDING)])
        return Storage(indexes=[(self.target, index)])

    @property
    def guards_source(self) -> bool:
        if self.maintain != "write":
            # Whoever maintains it later looks at the source again.
            return self.on_delete == "restrict"
        return bool(self.synced) or self.on_delete != "keep"

    # -- cards ---------------------------------------------------------------------------

    def references(self, raw: Raw) -> Iterator[tuple[dict[str, Any], Any]]:
        for container in containers(raw, self.steps):
            yield container, value_at(container, self.by)

    def fill(
        self, raw: Raw, sources: Mapping[Any, Raw], before: Raw | None, *, lenient: bool = False
    ) -> None:
        places = list(self.references(raw))
        previous = self._match(places, self._old_cards(before))
        for (container, reference), (known, card) in zip(places, previous, strict=True):
            if reference is None:
                self._set(container, None)
                continue
            source = sources.get(freeze(reference))
            if source is None:
                self._missing(container, reference, card, lenient)
            else:
                self._set(container, self._card(source, known, card))

    def _old_cards(self, before: Raw | None) -> dict[Any, list[Any]]:
        """The cards that a document had, by their references."""
        old: dict[Any, list[Any]] = {}
        for container, reference in self.references(before or {}):
            # Without the key it was written before the pattern was declared: nothing to keep.
            if reference is not None and self.name in container:
                old.setdefault(freeze(reference), []).append(container[self.name])
        return old

    def _match(
        self, places: Sequence[tuple[dict[str, Any], Any]], old: dict[Any, list[Any]]
    ) -> list[tuple[bool, Any]]:
        """For each place whether its reference was there before, and the card it had.

        Elements of an array have no identity. Those that still hold the card
        they had are matched first, so that removing one does not shift the
        snapshots of the others; the rest in order.
        """
        matched: list[tuple[bool, Any]] = [(False, None)] * len(places)
        waiting = []
        for number, (container, reference) in enumerate(places):
            cards = old.get(freeze(reference), []) if reference is not None else []
            mine = container.get(self.name)
            mate = next((index for index, card in enumerate(cards) if same(card, mine)), None)
            if mate is None:
                waiting.append(number)
            else:
                matched[number] = (True, cards.pop(mate))
        for number in waiting:
            reference = places[number][1]
            cards = old.get(freeze(reference), []) if reference is not None else []
            if cards:
                matched[number] = (True, cards.pop(0))
        return matched

    def _missing(self, container: dict[str, Any], reference: Any, previous: Any, lenient: bool) -> None:
        if previous is not None and self.on_delete == "keep":
            # The source is gone and the copy was to be kept.
            self._set(container, self._parts_of(previous))
        elif self.optional or self.holds_reference or lenient:
            self._set(container, None)
        else:
            raise DataError(
                f"{self.place.label} refers to {self.source.model.__name__} {reference!r}, which does not "
                "exist; insert it first, or let the card be None",
                code="reference-missing",
            )

    def _card(self, source: Raw, known: bool = False, previous: Any = None) -> Any:
        """What to copy: a value for a flat copy, else the card's fields.

        A snapshot is taken when the reference is set. What it was then stays,
        be it nothing; only a card that is not there at all is made whole.
        """
        if known and not self.synced:
            return self._parts_of(previous)
        if self.copied[0].card is None:
            return value_at(source, self.copied[0].source)
        card: Raw = {}
        for each in self.copied:
            assert each.card is not None
            origin, path = source, each.source
            if each.snapshot and known and isinstance(previous, dict):
                origin, path = previous, each.card
            if has(origin, path):
                put(card, each.card, value_at(origin, path))
        return card

    def _parts_of(self, previous: Any) -> Any:
        if self.copied[0].card is None or not isinstance(previous, dict):
            return previous
        names = {top(each.card) for each in self.copied if each.card}
        return {name: value for name, value in previous.items() if name in names}

    def _set(self, container: dict[str, Any], card: Any) -> None:
        if not self.holds_reference:
            container[self.name] = card
            return
        own = container.get(self.name)
        if not isinstance(own, dict):
            return
        for each in self.copied:
            assert each.card is not None
            if card is not None and has(card, each.card):
                put(own, each.card, value_at(card, each.card))
            else:
                own.pop(top(each.card), None)

    # -- copying a changed source to its targets ----------------------------------------------

    def changed(self, before: Raw | None, after: Raw) -> bool:
        if not before or not same(value_at(before, self.to), value_at(after, self.to)):
            return True
        return any(
            not same(value_at(before, each.source), value_at(after, each.source)) for each in self.synced
        )

    def sync_update(self, identity: Any, source: Raw, formulas: list[Raw]) -> tuple[Any, list[Raw] | None]:
        # A pipeline that ends with the formulas where there are some; a plain update is quicker, and array
        # filters go with nothing else.
        if any(step.array for step in self.steps):
            return self._array_update(identity, source)
        if not formulas and not self.snapshots and not self.holds_reference:
            return {"$set": {self.path: self._card(source)}}, None
        return [*self._plain_update(source), *formulas], None

    def differing(self, source: Raw) -> Raw:
        if self.snapshots or self.holds_reference or any(step.array for step in self.steps):
            return {}
        return differs_condition(self.path, self._card(source))

    def _plain_update(self, source: Raw) -> list[Raw]:
        if not self.snapshots and not self.holds_reference:
            return [{"$set": {self.path: {"$literal": self._card(source)}}}]
        whole = {"$literal": self._card(source)}
        if self.holds_reference:
            values, unsets = self._synced_values(self.path, source)
            sets = {path: {"$literal": value} for path, value in values.items()}
            return [*([{"$set": sets}] if sets else []), *([{"$unset": unsets}] if unsets else [])]
        # Under a mixed policy only an empty card takes the snapshot values of today.
        synced: Raw = {}
        for each in self.synced:
            assert each.card is not None
            put(synced, each.card, value_at(source, each.source))
        merged = {"$mergeObjects": [f"${self.path}", {"$literal": synced}]}
        return [
            {"$set": {self.path: {"$cond": [{"$eq": [{"$type": f"${self.path}"}, "object"]}, merged, whole]}}}
        ]

    def _array_update(self, identity: Any, source: Raw) -> tuple[Raw, list[Raw]]:
        last = max(number for number, step in enumerate(self.steps) if step.array)
        rest = [step.stored for step in self.steps[last + 1 :]]
        parts: list[str] = []
        outer: list[Raw] = []
        for number, step in enumerate(self.steps[: last + 1]):
            parts.append(step.stored)
            if step.array and number == last:
                parts.append("$[{}]")
            elif step.array:
                # Only elements on the way to a reference: others may hold no array at all.
                inside = ".".join([*(each.stored for each in self.steps[number + 1 :]), self.by])
                parts.append(f"$[o{number}]")
                outer.append({f"o{number}.{inside}": {"$eq": identity}})
        place = ".".join([*parts, *rest, self.name])
        reference = ".".join([*rest, self.by])
        card = ".".join([*rest, self.name])
        match = {"$eq": identity}
        if not self.snapshots and not self.holds_reference:
            return {"$set": {place.format("e"): self._card(source)}}, [*outer, {f"e.{reference}": match}]
        sets, unsets = self._synced_values(place.format("e"), source)
        filters: list[Raw] = [*outer, {f"e.{reference}": match, f"e.{card}": {"$type": "object"}}]
        if not self.holds_reference:
            sets[place.format("n")] = self._card(source)
            filters.append({f"n.{reference}": match, f"n.{card}": {"$not": {"$type": "object"}}})
        return {"$set": sets, **({"$unset": dict.fromkeys(unsets, "")} if unsets else {})}, filters

    def _synced_values(self, card: str, source: Raw) -> tuple[Raw, list[str]]:
        """What to set in a card, by path, and which paths the source no longer has."""
        paths = {f"{card}.{each.card}": each.source for each in self.synced}
        sets = {path: value_at(source, origin) for path, origin in paths.items() if has(source, origin)}
        return sets, [path for path in paths if path not in sets]

    # -- deleted sources ---------------------------------------------------------------------

    def detach(self, raw: Raw, gone: set[Any]) -> None:
        if self.on_delete == "cascade":
            self._remove_elements(raw, self.steps, gone)
            return
        for container, reference in self.references(raw):
            if reference is not None and freeze(reference) in gone:
                container[self.name] = None
                if not self.holds_reference:
                    put(container, self.by.removesuffix(f".{REFERRED}"), None)

    def _remove_elements(self, raw: Any, steps: Sequence[Step], gone: set[Any]) -> None:
        """Remove the elements of the innermost array that refer to what is gone."""
        if not isinstance(raw, dict) or not steps or steps[0].stored not in raw:
            return
        inner = raw[steps[0].stored]
        if not isinstance(inner, list):
            self._remove_elements(inner, steps[1:], gone)
        elif any(step.array for step in steps[1:]):
            for element in inner:
                self._remove_elements(element, steps[1:], gone)
        else:
            rest = ".".join([*(step.stored for step in steps[1:]), self.by])
            references = [value_at(element, rest) for element in inner]
            raw[steps[0].stored] = [
                element
                for element, reference in zip(inner, references, strict=True)
                if reference is None or freeze(reference) not in gone
            ]

    # -- values of a moment ------------------------------------------------------------------

    def recall(self, before: Raw, cards: Raw | None, renewed: Collection[str] = ()) -> None:
        # What was another reference's is taken out, and what a replacement dropped is put back. Told by the
        # values of the moment alone, because the others may have followed the new reference already.
        old = self._old_cards(cards)
        strangers = [self._moment(card) for several in old.values() for card in several]
        unmatched = []
        for at, container in list(places_of(before, self.steps)):
            reference = value_at(container, self.by)
            mine, own = self._moment(container.get(self.name)), old.get(freeze(reference), [])
            mate = next((number for number, card in enumerate(own) if same(mine, self._moment(card))), None)
            if reference is None:
                continue
            if any(overlap(path, at + self.by) for path in renewed):
                container.pop(self.name, None)
            elif self._filled(container) and mate is not None:
                own.pop(mate)
            else:
                unmatched.append((container, mine, own))
        for container, mine, own in unmatched:
            if not self._filled(container):
                rest = container.pop(self.name, None)
                if own:
                    former = own.pop(0)
                    container[self.name] = {**former, **rest} if isinstance(rest, dict) else former
            elif any(same(mine, each) for each in strangers):
                container.pop(self.name)

    def _moment(self, card: Any) -> list[Any]:
        """The values of a card that do not follow their source."""
        return [card if each.card is None else value_at(card, each.card) for each in self.snapshots]

    def _filled(self, container: Raw) -> bool:
        """Whether a card was ever filled; one that holds its reference is there before it is."""
        if not self.holds_reference:
            return self.name in container
        return any(has(container.get(self.name), each.card or "") for each in self.copied)
