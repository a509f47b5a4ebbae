"""What a document says about its own life: when it was made, last written, how often, and when deleted.

`CreatedAt()` and `UpdatedAt()` stand on fields; `revision=` and
`soft_delete=` are class keywords that name a field. All are maintained by the
write of a document itself, and by nothing else: what follows from the writes
of other documents is nobody's write of this one. `UpdatedAt(on=[Review])`
also counts the writes of the documents that name this one, by a rule for each
of these models: it gathers nothing, and only stamps the date.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

from treadle.errors import DeclarationError
from treadle.graph.binding import check_choice, snake
from treadle.graph.gather import GatherRule, origin
from treadle.graph.pattern import Entry, Maintain, ModelReference, Models, Pattern, Place, Rule, Touch
from treadle.plan import Plan, Raw
from treadle.plan.capabilities import Capabilities
from treadle.query.paths import value_at
from treadle.values import frozen

ADVICE = " with each write of the document; leave it out"


@frozen
class _Lifecycle(Pattern):
    """What these declarations have in common: where they may stand."""

    expected: ClassVar[tuple[type, ...]] = (dt.datetime,)

    def _check(self, place: Place) -> None:
        entry, shape = place.entry, place.field.shape
        if place.in_array:
            raise DeclarationError(
                f"{place.label} stands inside an array; it belongs to the document itself or to a nested "
                "model",
                code="maintained-in-array",
            )
        if entry.group is not None:
            raise DeclarationError(
                f"{place.label} stands in a rollup, whose documents Treadle makes and removes; use "
                "computed_at= for when a value was computed",
                code="rollup-maintained",
            )
        if entry.above:
            raise DeclarationError(
                f"{place.label} is declared on one kind, but writes go to the collection of "
                f"{entry.root.model.__name__}; declare it there, for all kinds",
                code="kind-invalid",
            )
        if shape.kind != "any" and not (shape.kind == "scalar" and shape.python in self.expected):
            names = " or ".join(each.__name__ for each in self.expected)
            raise DeclarationError(f"{place.label} must be a {names}", code="maintained-type")


@frozen
class CreatedAt(_Lifecycle):
    """When the document was inserted, by the server's clock."""

    pattern: ClassVar[str] = "created_at"

    def bind(self, place: Place, graph: Models) -> Rule:
        self._check(place)
        return StampRule(place, self.pattern, always=False)


@frozen
class UpdatedAt(_Lifecycle):
    """When a caller last wrote the document, by the server's clock; maintained values do not count.

    With `on`, also when a caller wrote a document of one of these models that
    names it: in their field `by`, or in `product_id` for a Product. With
    `maintain="stream"` the worker follows these, whoever writes them.
    """

    pattern: ClassVar[str] = "updated_at"

    on: Sequence[ModelReference] = ()
    by: str | None = None
    maintain: Literal["write", "stream"] = "write"

    def bind(self, place: Place, graph: Models) -> Rule:
        self._check(place)
        if isinstance(self.on, (str, type)) or (self.by is not None and not self.on):
            raise DeclarationError(
                f"{place.label} has on={self.on!r}; it takes a list of models, such as on=[Review]",
                code="pattern-keyword",
            )
        check_choice(place, "maintain", self.maintain, ("write", "stream"))
        if self.maintain == "stream" and not self.on:
            raise DeclarationError(
                f"{place.label} has maintain='stream', which is about the models in on=; a document's own "
                "writes date it at once",
                code="pattern-keyword",
            )
        by = self.by or f"{snake(place.entry.model.__name__)}_id"
        followed = []
        for each in self.on:
            name = graph.resolve(each, place.label).model.__name__
            own = _Followed(place.entry, place.owner, place.steps, place.field, name)
            followed.append(FollowedRule(own, graph, each, by, self.maintain))
        return StampRule(place, self.pattern, always=True, followed=followed)


class StampRule(Rule):
    """A date that the document's own writes set."""

    def __init__(
        self, place: Place, pattern: str, always: bool, followed: Sequence[FollowedRule] = ()
    ) -> None:
        super().__init__(place)
        self.pattern = pattern
        self._always = always
        self._followed = followed

    def companions(self) -> Sequence[Rule]:
        return self._followed

    def advice(self, maintained: str) -> str:
        return ADVICE

    def touches(self, new: bool) -> dict[str, Touch]:
        return {self.path: "now"} if new or self._always else {}


@frozen
class _Followed(Place):
    """The place of a date, as one of the models whose writes count has it."""

    followed: str

    @property
    def label(self) -> str:
        # Each has a name of its own: what is pending is noted by it.
        steps = [self.entry.model.__name__, *(step.name for step in self.steps), self.field.name]
        return f"{'.'.join(steps)} on {self.followed}"


class FollowedRule(GatherRule):
    """A date that the writes of documents which name this one set as well."""

    pattern = "updated_at"
    only_dates = True

    def __init__(
        self, place: Place, graph: Models, source: ModelReference, by: str, maintain: Maintain
    ) -> None:
        super().__init__(place, origin(place, graph, source, by, None))
        self.maintain = maintain

    def maintained(self) -> set[str]:
        return set()

    def stamps(self) -> set[str]:
        return {self.path}

    def shares(self, path: str, other: Rule) -> bool:
        return path == self.path and other.pattern == self.pattern

    def value_paths(self) -> set[str]:
        """What callers write of a source: a value that Treadle maintains there is nobody's write."""
        own = {field.stored for each in self.source.related for field in each.codec.fields}
        maintained = {path for each in self.source.related for path in each.protected}
        return own - maintained

    def value(self, raw: Raw) -> Raw:
        return {path: raw[path] for path in self._value_paths if path in raw}

    @cached_property
    def _value_paths(self) -> set[str]:
        return self.value_paths()

    def empty(self) -> dict[str, Any]:
        return {}

    def difference(self, removed: Sequence[Any], added: Sequence[Any]) -> Any:
        return True

    def finds(self, keys: Sequence[Any]) -> bool:
        return True

    def found(self, keys: Sequence[Any], server: Capabilities) -> Plan[dict[Any, dict[str, Any]]]:
        """Nothing: when a source was last written, nobody can tell from the sources."""
        return {}
        yield  # pragma: no cover

    def found_among(self, keys: Sequence[Any], sources: Sequence[Raw]) -> Plan[dict[Any, dict[str, Any]]]:
        return {}
        yield  # pragma: no cover


@frozen
class Revision(_Lifecycle):
    """How often the document was written; whoever writes over an older one is told."""

    pattern: ClassVar[str] = "revision"
    expected: ClassVar[tuple[type, ...]] = (int,)

    def bind(self, place: Place, graph: Models) -> Rule:
        self._check(place)
        return RevisionRule(place)


class RevisionRule(Rule):
    """A number that each write of the document raises."""

    pattern = "revision"

    def advice(self, maintained: str) -> str:
        return ADVICE

    def touches(self, new: bool) -> dict[str, Touch]:
        return {self.path: "next"}

    def unchanged(self, raw: Raw) -> Raw:
        known = value_at(raw, self.path)
        # Documents from before the declaration have none.
        return {self.path: {"$eq": known} if known else {"$in": [0, None]}}


@frozen
class SoftDelete(_Lifecycle):
    """When the document was deleted; it stays stored, and everybody takes it for gone."""

    pattern: ClassVar[str] = "soft_delete"

    def bind(self, place: Place, graph: Models) -> Rule:
        self._check(place)
        if not place.field.shape.optional:
            raise DeclarationError(
                f"{place.label} must be able to be None, for documents that are not deleted; write "
                "datetime | None",
                code="maintained-type",
            )
        return SoftDeleteRule(place)


class SoftDeleteRule(Rule):
    """The date of a deletion that can be taken back."""

    pattern = "soft_delete"

    def advice(self, maintained: str) -> str:
        return " when the document is deleted; use delete() and restore()"

    def prepare(self, raw: Raw) -> None:
        raw[self.path] = None


KEYWORDS: dict[str, Pattern] = {"revision": Revision(), "soft_delete": SoftDelete()}


def declared(entry: Entry[Any]) -> Iterator[tuple[Place, Pattern]]:
    """The class keywords of a model that name a field of its life."""
    for keyword, pattern in KEYWORDS.items():
        name = getattr(entry.settings, keyword)
        if name is None:
            continue
        field = entry.codec.by_name.get(name)
        if field is None:
            raise DeclarationError(
                f"{entry.model.__name__} has {keyword}={name!r}, but no such field; declare it, such as "
                + (f"{name}: int = 0" if keyword == "revision" else f"{name}: datetime | None = None"),
                code="source-field-missing",
            )
        yield Place(entry, entry.codec, (), field), pattern
