"""The copy of the one source to which a target refers: a card of some of its fields, or a single value.

A synced field follows its source. A snapshot keeps the value of the moment in which the reference was set.
A slot holds a copy beside its reference, or around it: a card such as {_id, name} may hold its reference,
which is the caller's to write.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from treadle.errors import DataError
from treadle.graph.aggregate import (
    RECOMPUTE,
    Accumulator,
    Aggregate,
    Operand,
    Recompute,
    State,
    TargetField,
    Values,
)
from treadle.plan import Raw
from treadle.query.comparison import differs_condition, identical, same
from treadle.query.keys import Frozen, Key, Slot, freeze, holder_of
from treadle.query.paths import REFERRED, expression_of, has, overlap, put, top, value_at


class CopiedField(NamedTuple):
    """One copied field: its stored name in the card (empty for a single value) and in the source."""

    card: str
    source: str
    snapshot: bool


class CopiedFields(Aggregate):
    """The copy of one source. What a source contributes is its card, or its single value.

    `on` is the key of the reference, and `by` its path beside the copy. `keep` says that a copy outlives its
    source, and `required` that there must be a source.
    """

    def __init__(
        self,
        field: TargetField,
        source: str,
        fields: Sequence[CopiedField],
        on: Key,
        by: str,
        *,
        keep: bool,
        required: bool,
    ) -> None:
        self.fields = list(fields)
        self.synced = [each for each in fields if not each.snapshot]
        self.snapshots = [each for each in fields if each.snapshot]
        self.is_card = bool(fields[0].card)
        self.on, self.by, self.keep, self.required = on, by, keep, required
        self.name = field.path.rpartition(".")[2]
        self.holds_reference = by.startswith(f"{self.name}.")
        # Whether the copies of a source are equal, whatever their targets held.
        self.is_uniform = not self.snapshots and not self.holds_reference
        # The field of the target that holds the slots.
        self.top = top(field.path)
        expression: Any = expression_of(fields[0].source)
        if self.is_card:
            expression = {each.card: expression_of(each.source) for each in fields}
        reads = frozenset(each.source for each in self.synced)
        super().__init__(field, Operand(expression, self._card_of, reads, label=source))

    def paths(self) -> list[str]:
        return [f"{self.path}.{each.card}" for each in self.fields] if self.holds_reference else [self.path]

    # -- the algebra -------------------------------------------------------------------------

    def _card_of(self, source: Raw) -> Any:
        if not self.is_card:
            return value_at(source, self.fields[0].source)
        return _moved(source, [(each.source, each.card) for each in self.fields])

    def is_unchanged(self, before: Any, after: Any) -> bool:
        if not self.is_card or after is None:
            return identical(before, after)
        return identical(self._synced_part(before), self._synced_part(after))

    def _synced_part(self, card: Raw) -> Raw:
        return _moved(card, [(each.card, each.card) for each in self.synced])

    def empty(self) -> State:
        return {"copy": None}

    def accumulators(self) -> Mapping[str, Accumulator]:
        return {"copy": Accumulator({"$first": self.expression()}, _present)}

    def finish(self, state: State) -> Values:
        return {self.path: state["copy"]}

    def difference(self, state: State, removed: Sequence[Any], added: Sequence[Any]) -> State | Recompute:
        return {"copy": added[-1]} if added else RECOMPUTE

    # -- the slots of a target -----------------------------------------------------------------

    def fill(
        self,
        document: Raw,
        cards: Mapping[Frozen, Any],
        before: Raw | None,
        *,
        lenient: bool = False,
    ) -> None:
        """Set each slot of a document from the cards of the sources, which are by frozen key.

        A snapshot that `before` holds for the same reference is kept. A required copy without a source is an
        error, or None if `lenient`.
        """
        slots = list(self._slots(document))
        held = self._held(() if before is None else self._slots(before))
        for (key, holder), (is_known, former) in zip(slots, self._carried(slots, held), strict=True):
            frozen = freeze(key)
            if key is None:
                self._set(holder, None)
            elif frozen in cards:
                self._set(holder, self._merged(cards[frozen], is_known, former))
            else:
                self._set(holder, self._without_source(key, former, lenient))

    def _slots(self, document: Raw) -> Iterator[tuple[Any, Raw]]:
        """Yield the key of each slot, with the sub-document that holds its copy."""
        if "." not in self.path:
            key = value_at(document, self.by)
            yield (None if isinstance(key, list) else key), document
            return
        for slot in self.on.slots(document, self.path):
            yield slot.key, holder_of(document, slot.path)

    def _held(self, slots: Iterable[tuple[Any, Raw]]) -> dict[Frozen, list[Any]]:
        """Return the copies that a document holds, by their frozen keys."""
        held: dict[Frozen, list[Any]] = {}
        for key, holder in slots:
            # Without the name it was written before the pattern was declared: nothing to keep.
            if key is not None and self.name in holder:
                held.setdefault(freeze(key), []).append(holder[self.name])
        return held

    def _carried(
        self, slots: Sequence[tuple[Any, Raw]], held: dict[Frozen, list[Any]]
    ) -> list[tuple[bool, Any]]:
        """Return for each slot whether its reference was there before, and the copy that it had.

        Elements of an array have no identity. Those that still hold the copy they had are matched first, so
        that removing one does not shift the snapshots of the others; the rest in order.
        """
        carried: list[tuple[bool, Any]] = [(False, None)] * len(slots)
        waiting = []
        for number, (key, holder) in enumerate(slots):
            copies = held.get(freeze(key), [])
            position = _position(copies, partial(same, holder.get(self.name)))
            if position is None:
                waiting.append(number)
            else:
                carried[number] = (True, copies.pop(position))
        for number in waiting:
            if copies := held.get(freeze(slots[number][0]), []):
                carried[number] = (True, copies.pop(0))
        return carried

    def _merged(self, card: Any, is_known: bool, former: Any) -> Any:
        """Return what a slot should hold.

        What a snapshot was stays, be it nothing; only a card that is not there at all is made whole.
        """
        if is_known and not self.synced:
            return self._own_part(former)
        if not (is_known and self.snapshots and isinstance(former, dict)):
            return dict(card) if self.is_card else card
        merged: Raw = {}
        for each in self.fields:
            origin, name = former if each.snapshot else card, each.card
            if has(origin, name):
                put(merged, name, value_at(origin, name))
        return merged

    def _without_source(self, key: Any, former: Any, lenient: bool) -> Any:
        """Return what a slot holds whose source does not exist."""
        if former is not None and self.keep:
            return self._own_part(former)
        if self.required and not lenient:
            raise DataError(
                f"{self.field.label} refers to {self.operand.label} {key!r}, which does not "
                "exist; insert it first, or let the card be None",
                code="reference-missing",
            )
        return None

    def _own_part(self, card: Any) -> Any:
        """Return a stored card without what is not copied, such as its reference."""
        if not self.is_card or not isinstance(card, dict):
            return card
        names = {top(each.card) for each in self.fields}
        return {name: value for name, value in card.items() if name in names}

    def _set(self, holder: Raw, card: Any) -> None:
        if not self.holds_reference:
            holder[self.name] = card
            return
        own = holder.get(self.name)
        if not isinstance(own, dict):
            return
        for each in self.fields:
            if card is not None and has(card, each.card):
                put(own, each.card, value_at(card, each.card))
            else:
                own.pop(top(each.card), None)

    def keep_copies(self, before: Raw, document: Raw) -> None:
        """Put back the copies that a document had of the sources to which it still refers, in their order."""
        for (key, old), (now, new) in zip(self._slots(before), self._slots(document), strict=False):
            if freeze(key) == freeze(now) and self.name in old and not self.holds_reference:
                new[self.name] = copy.deepcopy(old[self.name])

    def clear(self, document: Raw, gone: Collection[Frozen]) -> None:
        """Clear the references to deleted sources, and their copies."""
        for key, holder in self._slots(document):
            if key is not None and freeze(key) in gone:
                holder[self.name] = None
                if not self.holds_reference:
                    put(holder, self.by.removesuffix(f".{REFERRED}"), None)

    def remove(self, document: Raw, gone: Collection[Frozen]) -> None:
        """Remove the elements of the innermost array that refer to deleted sources."""
        slots = [slot for slot in self.on.slots(document, self.path) if slot.key is not None]
        # From the end, because a removal shifts what follows.
        for slot in reversed([slot for slot in slots if freeze(slot.key) in gone]):
            elements, position = _element(document, slot)
            del elements[position]

    # -- the copies of one source, without reading their targets ------------------------------------

    def differing(self, card: Any) -> Raw:
        """Return the condition that a copy differs from its source; empty where only writing it tells."""
        return {} if self.on.arrays or not self.is_uniform else differs_condition(self.path, card)

    def update(self, key: Any, card: Any, formulas: Sequence[Raw]) -> tuple[Any, list[Raw] | None]:
        """Return the update, and array filters, that set all copies of one source.

        Without a card there is no source any more. A pipeline ends with the formulas. A plain update takes
        half its time, and array filters go with nothing else.
        """
        if self.on.arrays:
            return self._update_in_arrays(key, card)
        if not formulas and self.is_uniform:
            return {"$set": {self.path: card}}, None
        return [*self._stages(card), *formulas], None

    def _stages(self, card: Any) -> list[Raw]:
        whole = {"$literal": card}
        if self.is_uniform or (card is None and not self.holds_reference):
            return [{"$set": {self.path: whole}}]
        if self.holds_reference:
            sets, unsets = self._synced_values(self.path, card)
            literals = {path: {"$literal": value} for path, value in sets.items()}
            return [*([{"$set": literals}] if sets else []), *([{"$unset": unsets}] if unsets else [])]
        # An empty card takes the snapshots of today, too.
        synced: Raw = {}
        for each in self.synced:
            put(synced, each.card, value_at(card, each.card))
        merged = {"$mergeObjects": [f"${self.path}", {"$literal": synced}]}
        is_card = {"$eq": [{"$type": f"${self.path}"}, "object"]}
        return [{"$set": {self.path: {"$cond": [is_card, merged, whole]}}}]

    def _update_in_arrays(self, key: Any, card: Any) -> tuple[Raw, list[Raw]]:
        path, filters = self.on.blind(self.path, key)
        if self.is_uniform or (card is None and not self.holds_reference):
            return {"$set": {path: card}}, filters
        innermost, *outer = filters
        element, reference = next(iter(innermost)).split(".", 1)
        inside = self.path.removeprefix(f"{self.on.arrays[-1]}.")
        filters = [*outer, {**innermost, f"{element}.{inside}": {"$type": "object"}}]
        sets, unsets = self._synced_values(path, card)
        if not self.holds_reference:
            sets[path.replace(f"$[{element}]", "$[empty]")] = card
            filters.append(
                {f"empty.{reference}": {"$eq": key}, f"empty.{inside}": {"$not": {"$type": "object"}}}
            )
        return {"$set": sets, **({"$unset": dict.fromkeys(unsets, "")} if unsets else {})}, filters

    def _synced_values(self, path: str, card: Any) -> tuple[Raw, list[str]]:
        """Return what to set in a stored card, by path, and which paths the source no longer has."""
        names = [each.card for each in (self.fields if card is None else self.synced)]
        sets = {f"{path}.{name}": value_at(card, name) for name in names if has(card, name)}
        return sets, [f"{path}.{name}" for name in names if not has(card, name)]

    # -- snapshots, for the worker -------------------------------------------------------------------

    def recall(
        self,
        before: Raw,
        cards: Raw | None,
        between: Sequence[Raw] = (),
        renewed: Collection[str] = (),
    ) -> None:
        """Leave in `before` the snapshots that are each reference's own.

        `cards` are the fields with references and copies as they were before several writes, and `between`
        as they were between these; `renewed` are paths, with positions, of references that changed where the
        event does not tell what was before.
        """
        # What was another reference's is taken out, and what a replacement dropped is put back. Told by the
        # snapshots alone, because synced fields may have followed the new reference already.
        held = self._held(() if cards is None else self._slots(cards))
        strangers = [part for _, part in self._snapshots_in(cards or {})]
        passing = [self._snapshots_in(each) for each in between]
        slots = [slot for slot in self.on.slots(before, self.path) if slot.key is not None]
        unsettled = [slot for slot in slots if not self._is_settled(before, slot, held, renewed)]
        for slot in unsettled:
            holder, key = holder_of(before, slot.path), freeze(slot.key)
            mine = self._snapshot_part(holder.get(self.name))
            if not self._is_filled(holder):
                self._put_back(holder, held.get(key, []))
            elif _position(strangers, partial(same, mine)) is not None or self._is_anothers(
                mine, key, passing
            ):
                holder.pop(self.name)

    def _snapshots_in(self, cards: Raw) -> list[tuple[Frozen, list[Any]]]:
        """Return the snapshots in a former state, each with the frozen key of its reference."""
        snapshots = []
        for key, holder in self._slots(cards):
            part = self._snapshot_part(holder.get(self.name))
            # A snapshot without a reference is an outdated document's, whose reference has another name.
            if key is not None or not any(each is not None for each in part):
                snapshots.append((freeze(key), part))
        return snapshots

    def _is_settled(
        self, document: Raw, slot: Slot, held: dict[Frozen, list[Any]], renewed: Collection[str]
    ) -> bool:
        """Whether a snapshot is its reference's own, or has gone with a reference that changed."""
        holder = holder_of(document, slot.path)
        reference = f"{slot.path.removesuffix(self.name)}{self.by}"
        if any(overlap(path, reference) for path in renewed):
            holder.pop(self.name, None)
            return True
        own, mine = held.get(freeze(slot.key), []), self._snapshot_part(holder.get(self.name))
        position = _position(map(self._snapshot_part, own), partial(same, mine))
        if position is None or not self._is_filled(holder):
            return False
        own.pop(position)
        return True

    @staticmethod
    def _is_anothers(mine: list[Any], key: Frozen, passing: Sequence[Sequence[tuple[Frozen, Any]]]) -> bool:
        """Whether a snapshot was taken of a source to which the target referred in passing.

        It is of the reference beside which it appeared first.
        """
        for slots in passing:
            if keys := {other for other, part in slots if same(part, mine)}:
                return key not in keys
        return False

    def _put_back(self, holder: Raw, own: list[Any]) -> None:
        """Put back the copy that a replacement dropped, beside what a card holds of its own."""
        rest = holder.pop(self.name, None)
        if own:
            former = own.pop(0)
            holder[self.name] = {**former, **rest} if isinstance(rest, dict) else former

    def _snapshot_part(self, card: Any) -> list[Any]:
        return [value_at(card, each.card) for each in self.snapshots]

    def _is_filled(self, holder: Raw) -> bool:
        """Whether a copy was ever filled; a card that holds its reference is there before it is."""
        if not self.holds_reference:
            return self.name in holder
        return any(has(holder.get(self.name), each.card) for each in self.fields)


def _present(one: Any, other: Any) -> Any:
    """Merge the copies of two parts of the sources, of which one has the source."""
    return other if one is None else one


def _moved(document: Raw, names: Iterable[tuple[str, str]]) -> Raw:
    """Return the values at some paths of a document, at other paths; without what is not there."""
    moved: Raw = {}
    for path, name in names:
        if has(document, path):
            put(moved, name, value_at(document, path))
    return moved


def _position(items: Iterable[Any], matches: Callable[[Any], bool]) -> int | None:
    return next((number for number, each in enumerate(items) if matches(each)), None)


def _element(document: Raw, slot: Slot) -> tuple[list[Any], int]:
    """Return the innermost array on the way to a slot, and the position there."""
    value: Any = document
    element: tuple[list[Any], int] = [], 0
    for name in slot.path.split("."):
        if isinstance(value, list):
            element = value, int(name)
            value = value[int(name)]
        else:
            value = value.get(name)
    return element
