"""Values that a document copies from another, or that follow from its own fields.

With `GatherRule` (`gather.py`) these are the families of derived data. The
engine maintains them all: on a write, by the stream, on a schedule, in
`verify`, `repair` and `rebuild`. A pattern below one of them says what a
value should be, and never writes it itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from treadle.errors import DeclarationError
from treadle.graph.owned import Owned
from treadle.graph.rule import Place, Reads, Rule
from treadle.plan import Plan, Raw
from treadle.query.expressions import field_references, require_known_names
from treadle.query.keys import may_be_id
from treadle.query.paths import Step, value_at

OnDelete = Literal["keep", "restrict", "clear", "cascade"]


class CopyRule(Rule):
    """A card, or a single field, copied from the document that the target names."""

    # What becomes of the copies when their source is deleted.
    on_delete: OnDelete
    # The steps to the sub-document that holds the copy, the copy's name in it, and the way to the reference.
    steps: tuple[Step, ...]
    name: str
    by: str
    # The stored path of the reference in the target, and of what it names in the source.
    reference_path: str
    to: str = "_id"
    # Whether the copy itself holds the reference, so that a part of it is the caller's.
    holds_reference: bool
    # The fields that follow their source, and those that keep the values of a moment.
    synced: Sequence[Any]
    snapshots: Sequence[Any]

    @property
    def top(self) -> str:
        """The field of the document that holds the copy, or leads to it."""
        return self.steps[0].stored if self.steps else self.name

    @property
    def guards_source(self) -> bool:
        """Whether a copy must not be made while its source changes."""
        raise NotImplementedError  # pragma: no cover

    def owns(self) -> Sequence[Owned]:
        advice = f"; write {self.reference_path!r}, or the {self.source.model.__name__} that it names"
        return [Owned(path, advice, refilled=True) for path in self.copied_paths()]

    def copied_paths(self) -> Sequence[str]:
        """The stored paths of the target that hold what is copied."""
        return [self.path]

    def name_of(self, source: Mapping[str, Any]) -> Any:
        """What targets name a source by; None where nothing can name it."""
        name = value_at(source, self.to)
        return name if may_be_id(name) else None

    def names_of(self, sources: Iterable[Raw]) -> list[Any]:
        """What targets name these sources by."""
        return [name for each in sources if (name := self.name_of(each)) is not None]

    def named(self, *names: Any) -> Raw:
        """The filter for the sources that these references name."""
        match = {"$eq": names[0]} if len(names) == 1 else {"$in": list(names)}
        return {self.to: match, **self.source.targets.filter()}

    def referring(self, *identities: Any) -> Raw:
        """The filter for the targets that name one of these sources."""
        match = {"$eq": identities[0]} if len(identities) == 1 else {"$in": list(identities)}
        return {self.reference_path: match, **self.target.targets.filter()}

    def references(self, raw: Raw) -> Iterator[tuple[dict[str, Any], Any]]:
        """Each sub-document that holds a reference, with that reference."""
        raise NotImplementedError  # pragma: no cover

    def fill(
        self, raw: Raw, sources: Mapping[Any, Raw], before: Raw | None, *, lenient: bool = False
    ) -> None:
        """Set every copy of a document from its sources, which are by frozen id.

        A snapshot that `before` already holds for the same reference is kept.
        A required copy without a source is an error, or None if `lenient`.
        """
        raise NotImplementedError  # pragma: no cover

    def changed(self, before: Raw | None, after: Raw) -> bool:
        """Whether a source's change is one that the copies must follow; an empty before is unknown."""
        raise NotImplementedError  # pragma: no cover

    def sync_update(self, identity: Any, source: Raw, formulas: list[Raw]) -> tuple[Any, list[Raw] | None]:
        """The update, and array filters, that bring all copies of one source up to date."""
        raise NotImplementedError  # pragma: no cover

    def differing(self, source: Raw) -> Raw:
        """The condition that a copy is not what its source says; empty where only writing it tells."""
        return {}

    def detach(self, raw: Raw, gone: set[Any]) -> None:
        """Clear the references to deleted sources, or remove the elements that hold them."""
        raise NotImplementedError  # pragma: no cover

    def recall(self, before: Raw, cards: Raw | None, renewed: Collection[str] = ()) -> None:
        """Leave in `before` the values of a moment that are each reference's own.

        `cards` are the fields with references and copies as they were before
        the write; `renewed` are paths, with positions, of references that
        changed where nobody knows what was before.
        """
        raise NotImplementedError  # pragma: no cover


class FormulaRule(Rule):
    """A field that the server computes from other fields of the same document."""

    pattern = "computed"

    def __init__(self, place: Place, expression: Any) -> None:
        super().__init__(place)
        if place.in_array:
            raise DeclarationError(
                f"{place.label} stands inside an array; a Formula speaks of the document's own fields: "
                "compute the whole array with $map instead",
                code="maintained-in-array",
            )
        require_optional(place)
        require_known_names(expression, place.entry.codec, place.label)
        self.expression = expression

    def reads(self) -> Reads:
        return {self.target.collection: field_references(self.expression)}


class LocalRule(Rule):
    """A field that Python computes from other fields of the same document, perhaps with a look at others."""

    def values(self, documents: Sequence[Raw]) -> Plan[list[Any]]:
        """The value that each of these documents should hold, in its stored form.

        Asked for documents that are about to be stored as well as for those
        that are. A value that is right as it stands must come back as it is.
        """
        raise NotImplementedError  # pragma: no cover


def require_optional(place: Place) -> None:
    """Refuse a field that could not be None, where there may be nothing to compute it from."""
    if not place.field.shape.optional and place.field.shape.kind != "any":
        raise DeclarationError(
            f"{place.label} must be able to be None, for when there is nothing to compute it from; "
            f"write {getattr(place.field.shape.python, '__name__', '…')} | None",
            code="maintained-type",
        )
