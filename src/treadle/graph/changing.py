"""A declaration that takes the place of another while both are kept right.

`Replaces(…)` beside the new declaration names the former one. The two are
ordinary rules: the former one at the field, the new one at a shadow path in
the reserved sub-document. A mark in each document says which of the two its
field shows: by default the former one. Where the new one is shown, field and
shadow have changed places.

Every update of such a document first exchanges the two if the mark says so,
then does what it would do to any document, and exchanges them again. So
whoever writes does not have to know how far the swap is, and no document ever
holds a value of which one half is the one declaration's and one the other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from treadle.errors import DeclarationError
from treadle.graph.gather import GatherRule
from treadle.graph.pattern import Pattern, Place
from treadle.model.bson_types import RESERVED
from treadle.query.paths import put, value_at
from treadle.values import frozen

if TYPE_CHECKING:
    from treadle.graph.pattern import Rule
    from treadle.plan import Raw

Side: TypeAlias = Literal["old", "new"]
SHADOW = f"{RESERVED}.shadow"
MARK = f"{RESERVED}.side"


@dataclass(frozen=True)
class Replaces:
    """The declaration that a field had until now; it is shown until `rebuild(shadow=True)` swaps."""

    declared: Pattern


@frozen
class ShadowPlace(Place):
    """Where the new declaration of a field stands until it is swapped in."""

    @property
    def label(self) -> str:
        return f"{shown_at(self).label} (new)"

    @property
    def stored(self) -> str:
        return f"{SHADOW}.{shown_at(self).stored}"


def shown_at(place: Place) -> Place:
    """The place of the field itself."""
    return Place(place.entry, place.owner, place.steps, place.field)


def placed(place: Place, marks: Sequence[Pattern]) -> Iterator[tuple[Place, Pattern]]:
    """Where the declaration of a field stands, if it has one; the one that it replaces comes first."""
    former = [each for each in place.field.shape.metadata if isinstance(each, Replaces)]
    if not former:
        yield from ((place, mark) for mark in marks)
        return
    if len(former) > 1 or not marks or not isinstance(former[0].declared, Pattern):
        raise _refused(
            f"{place.label} has Replaces(…), which names the one declaration that stood there, beside the "
            'new one: Annotated[int, Count(Review, by="product_id"), Replaces(Count(Vote, by="product_id"))]'
        )
    yield place, former[0].declared
    yield ShadowPlace(place.entry, place.owner, place.steps, place.field), marks[0]


@frozen
class Replacement:
    """The two declarations of one field: how it is called, where the mark is, and what changes places."""

    label: str
    mark: str
    # Each stored path of the field's own value and state, with that of the shadow.
    pairs: tuple[tuple[str, str], ...]

    def side(self, document: Raw, unmarked: Side) -> Side:
        """Which declaration a document shows."""
        side: Side | None = value_at(document, self.mark)
        return unmarked if side is None else side

    def exchange(self, document: Raw) -> None:
        """Let field and shadow of a document change places."""
        for shown, shadow in self.pairs:
            value = value_at(document, shown)
            put(document, shown, value_at(document, shadow))
            put(document, shadow, value)

    def show(self, document: Raw, side: Side) -> None:
        """Let a document that is about to be stored show one of the two."""
        if self.side(document, "old") != side:
            self.exchange(document)
        put(document, self.mark, side)

    def twin(self, path: str) -> str:
        """Where a value of one side is while the other one is shown."""
        for pair in self.pairs:
            if path in pair:
                return pair[1 - pair.index(path)]
        return path

    def exchanging(self, unmarked: Side) -> Raw:
        """The `$set` that exchanges the two in documents that show the new one."""
        return {"$set": self._exchanged({"$eq": [{"$ifNull": [f"${self.mark}", unmarked]}, "new"]})}

    def turning(self, to: Side) -> Raw:
        """The `$set` that lets documents which show the other declaration show this one."""
        other = {"$eq": [f"${self.mark}", "old" if to == "new" else "new"]}
        return {"$set": {**self._exchanged(other), self.mark: {"$cond": [other, to, f"${self.mark}"]}}}

    def _exchanged(self, condition: Raw) -> Raw:
        return {
            here: {"$cond": [condition, f"${there}", f"${here}"]}
            for pair in self.pairs
            for here, there in (pair, pair[::-1])
        }


def replace(rule: Rule, former: Rule) -> None:
    """Let a rule at its shadow take the place of the former one; refuses what cannot be swapped."""
    entry, label = former.target, former.place.label
    instead = "leave out Replaces(…) and run rebuild()"
    if not isinstance(rule, GatherRule) or not isinstance(former, GatherRule):
        raise _refused(
            f"{label} is written whole each time, so that a plain rebuild never shows anything that neither "
            f"declaration would give; {instead}"
        )
    if entry.group is not None:
        raise _refused(
            f"{label} stands in a rollup, which has a collection of its own; declare a second rollup with "
            "another collection= beside it, rebuild that, and let readers change over"
        )
    if entry.family is not None or entry.tombstone is not None:
        raise _refused(f"{label} stands in a model with kinds or soft_delete=, and is not swapped; {instead}")
    if rule.maintain != former.maintain or rule.maintain == "schedule":
        raise _refused(
            f"{label} replaces maintain={former.maintain!r} by {rule.maintain!r}; both must be 'write' or "
            f"both 'stream', and what is scheduled is written whole: {instead}"
        )
    rule.replaces, former.replaced_by = former, rule
    rule.needs = {**rule.needs, "transactions": instead}
    rule.replacement = Replacement(label, f"{MARK}.{former.path}", _pairs(rule, former))


def _pairs(rule: GatherRule, former: GatherRule) -> tuple[tuple[str, str], ...]:
    """What either declaration keeps at the field, with the same at the shadow."""
    pairs = {path: path.removesuffix(former.path) + rule.path for path in former.empty()}
    pairs |= {path.removesuffix(rule.path) + former.path: path for path in rule.empty()}
    return tuple(pairs.items())


def _refused(what: str) -> DeclarationError:
    return DeclarationError(what, code="replaces-refused")
