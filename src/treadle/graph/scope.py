"""Scope: the documents of a model that one role sees, each in the current version.

Kinds and soft delete contribute conditions, the archive a collection, schema
versions the upgrade. Conditions are evaluated after the upgrade: a migration
may rename the discriminator or the date of a deletion. A scope is a list of
parts (its collections; in each the current documents, and the outdated ones
once upgraded), because a transaction takes no `$unionWith`.

Several collections are read at one moment only in a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from treadle.errors import DataError
from treadle.graph.quarantine import set_aside
from treadle.graph.stored_pages import matching, quarantine_quietly, readable_page
from treadle.graph.versions import Divided, VersionChain, command_chunks, given
from treadle.plan import Plan, Raw, aggregate, find
from treadle.plan.decoding import Unreadable
from treadle.query.keys import KEY, freeze

# The ids of documents that were quarantined, with the reasons.
Failed: TypeAlias = list[tuple[Any, str]]
Role: TypeAlias = Literal["targets", "sources", "everything", "deleted"]
# The names of the conditions.
KIND = "kind"
ACTIVE = "active"
# The rows of one key, in the pipeline of a `Seek`.
ROWS = "__treadle_rows"
NO_FILTER: Mapping[str, Any] = MappingProxyType({})


class Image(NamedTuple):
    """A document at one moment, in the current version, with its formulas evaluated."""

    document: Raw
    # Where it is stored: the model's collection, or its archive.
    collection: str
    # Whether the stored form has another version.
    outdated: bool = False


class Condition(NamedTuple):
    """A condition on current documents, for the server and in Python."""

    name: str
    filter: Raw
    holds: Callable[[Raw], bool]


class ScopePart(NamedTuple):
    """What a rule contributes to the scopes of its model."""

    conditions: Sequence[Condition] = ()
    # Further collections, each with the roles that see it.
    collections: Mapping[str, frozenset[Role]] = MappingProxyType({})


@dataclass(slots=True)
class ScopePage:
    """Images of some stored documents of one collection, in the order of `_id`."""

    images: list[Image]
    # The id of the last stored document, in a list; None at the end.
    last: list[Any] | None
    failed: Failed = field(default_factory=list)


class Seek(NamedTuple):
    """Keys whose documents are found by an index, key by key, within one command.

    `stages` leave the documents that count of one key, and give one row of them.
    """

    path: str
    keys: Sequence[Any]
    own: Raw
    stages: Sequence[Raw]


@dataclass(eq=False, repr=False)
class Scope:
    """The documents of a model that one role sees."""

    # The model's name, under which documents are quarantined.
    label: str
    # The model's own, then its archive.
    collections: tuple[str, ...]
    conditions: tuple[Condition, ...]
    # The conditions of documents of the model's own class, without the kinds below it.
    exact_conditions: tuple[Condition, ...]
    versions: VersionChain
    # Outdated documents that are upgraded at a time.
    chunk: int

    @property
    def archive(self) -> str | None:
        """The second collection, where there is one."""
        return self.collections[1] if len(self.collections) > 1 else None

    def within(self, *collections: str) -> Scope:
        """Return the same scope in other collections."""
        return replace(self, collections=collections)

    @cached_property
    def exact(self) -> Scope:
        """The same scope for documents of the model's own class, without the kinds below it."""
        return replace(self, conditions=self.exact_conditions)

    @cached_property
    def with_deleted(self) -> Scope:
        """The same scope with soft-deleted documents."""
        conditions, exact = (
            tuple(each for each in some if each.name != ACTIVE)
            for some in (self.conditions, self.exact_conditions)
        )
        return replace(self, conditions=conditions, exact_conditions=exact)

    # -- conditions ----------------------------------------------------------------------------------

    @cached_property
    def _stored(self) -> Raw:
        merged: Raw = {}
        for condition in self.conditions:
            merged = beside(merged, condition.filter)
        return merged

    def filter(self, own: Mapping[str, Any] = NO_FILTER) -> Raw:
        """Return the condition of current documents that match; the caller must not modify the result.

        An outdated document is compared as it is stored.
        """
        stored = self._stored
        return beside(stored, own) if own else stored

    def current(self, own: Mapping[str, Any] = NO_FILTER) -> Raw:
        """Return the same condition without outdated documents."""
        return beside(self.versions.current_only, self.filter(own))

    def stored(self, own: Mapping[str, Any] = NO_FILTER) -> Raw:
        """Return a condition that every stored document meets which matches once it is upgraded."""
        divided = self.divide(own)
        if divided is None:
            return self.filter(own)
        return {"$or": [self.current(own), beside(self.versions.outdated_only, divided.stored)]}

    def admits(self, document: Raw) -> bool:
        """Whether a current document meets the conditions."""
        return all(condition.holds(document) for condition in self.conditions)

    def holds(self, image: Image) -> bool:
        """Whether this scope sees an image."""
        return image.collection in self.collections and self.admits(image.document)

    def through(self, before: Image | None, after: Image | None) -> tuple[Raw | None, Raw | None]:
        """Return a change as this scope sees it: one that leaves it is deleted, one that enters it is new."""
        return (
            before.document if before is not None and self.holds(before) else None,
            after.document if after is not None and self.holds(after) else None,
        )

    def splits(self, own: Mapping[str, Any], reads: Iterable[str] | None = ()) -> bool:
        """Whether outdated documents must be upgraded before a condition is evaluated.

        Or before what `reads` these paths is, None for any.
        """
        if not self.versions.may_change:
            return False
        return self.versions.may_change_any(reads) or self.divide(own) is not None

    def divide(self, own: Mapping[str, Any]) -> Divided | None:
        """Return what matches in two parts, before and after the upgrade; None where versions agree."""
        return self.versions.divide_strictly(self.filter(own))

    # -- documents ---------------------------------------------------------------------------------

    def load(self, raws: Sequence[Raw], collection: str, failed: Failed | None = None) -> Plan[list[Image]]:
        """Return stored documents as images, whether or not this scope sees them.

        One that cannot be upgraded is quarantined, and added to `failed`.
        """
        chain = self.versions
        if not chain.is_versioned:
            return [Image(raw, collection) for raw in raws]
        upgraded = yield from chain.upgrade(raws)
        images = []
        for raw, outcome in zip(raws, upgraded.outcomes, strict=True):
            if isinstance(outcome, DataError):
                key, reason = raw.get("_id"), outcome
                yield from quarantine_quietly(partial(set_aside, self.label, collection, key, reason))
                if failed is not None:
                    failed.append((key, reason.message))
            else:
                images.append(Image(outcome, collection, outcome is not raw))
        return images

    def find(
        self,
        own: Raw,
        *,
        limit: int = 0,
        projection: Raw | None = None,
        failed: Failed | None = None,
    ) -> Plan[list[Image]]:
        """Return everything in the scope that matches, of all versions, in all collections.

        Outside of a snapshot parts are read in the order in which documents
        move: outdated ones before current ones, the archive last. So one that
        is migrated or archived between two reads is found, and returned once.
        Documents that cannot be read are quarantined, and added to `failed`.
        A projection must leave out nothing that a migration or a formula reads.
        """
        splits = self.splits(own)
        condition = self.current(own) if splits else self.filter(own)
        images: list[Image] = []
        for collection in self.collections:
            if splits:
                images += yield from self.find_outdated(own, collection=collection, failed=failed)
            reading = find(collection, condition, projection, limit=limit)
            raws = yield from self.readable(reading, failed)
            images += yield from self.load(raws, collection, failed)
        if splits or len(self.collections) > 1:
            images = [*{freeze(image.document["_id"]): image for image in images}.values()]
        return images[:limit] if limit else images

    def readable(self, reading: Plan[list[Raw]], failed: Failed | None = None) -> Plan[list[Raw]]:
        """Return the documents of a read that can be decoded; quarantines others, adding them to `failed`."""
        documents, _ = yield from readable_page(self.label, reading, None, _noting(failed))
        return documents

    def find_outdated(
        self,
        own: Raw | Divided,
        *,
        collection: str | None = None,
        failed: Failed | None = None,
    ) -> Plan[list[Image]]:
        """Return the outdated documents of one collection that match once they are upgraded.

        A divided filter is a caller's, which holds the conditions of its scope.
        """
        collection = self.collections[0] if collection is None else collection
        divided = own if isinstance(own, Divided) else self._divide(own)
        stages = [{"$match": divided.upgraded}]
        images: list[Image] = []

        def visit(documents: list[Raw]) -> Plan[None]:
            rows = yield from self.evaluate(documents, stages)
            images.extend(Image(row, collection, True) for row in rows)

        yield from self._each_outdated(collection, divided.stored, visit, failed)
        return images

    def _divide(self, own: Raw) -> Divided:
        return self.divide(own) or Divided(self.filter(own), {})

    def _each_outdated(
        self,
        collection: str,
        stored: Raw,
        visit: Callable[[list[Raw]], Plan[None]],
        failed: Failed | None = None,
    ) -> Plan[None]:
        """Pass the outdated documents that match as they are stored to `visit`, upgraded, by the page."""
        condition = beside(self.versions.outdated_only, stored)
        last: list[Any] | None = None
        while True:
            reading = matching(collection, condition, last, self.chunk)
            raws, last = yield from readable_page(self.label, reading, last, _noting(failed))
            if last is None:
                return
            images = yield from self.load(raws, collection, failed)
            yield from visit([image.document for image in images])

    def group(
        self,
        own: Raw,
        stages: Sequence[Raw],
        *,
        reads: Iterable[str] | None = None,
        outdated: Sequence[Raw] | None = None,
        keep: Callable[[Raw], bool] | None = None,
        seek: Seek | None = None,
    ) -> Plan[list[Raw]]:
        """Return the rows that stages give for what matches: a set for each part, which the caller merges.

        `reads` are the paths that the stages read, None for any. With outdated
        documents a part is a page of these, of which `outdated` are the
        stages, if they differ, and `keep` says which may match. With `seek`
        current documents are found by it.
        """
        splits, condition = self.splits(own, reads), self.filter(own)
        current = beside(self.versions.current_only, condition) if splits else condition
        divided, rows = self._divide(own), list[Raw]()
        upgraded = [{"$match": divided.upgraded}, *(stages if outdated is None else outdated)]

        def visit(documents: list[Raw]) -> Plan[None]:
            chosen = [each for each in documents if keep is None or keep(each)]
            rows.extend((yield from self.evaluate(chosen, upgraded)))

        for collection in self.collections:
            match = [{"$match": current}] if current else []
            pipeline = [*match, *stages] if seek is None else self._seek(collection, seek, splits)
            rows += yield from aggregate(collection, pipeline)
            if splits:
                yield from self._each_outdated(collection, divided.stored, visit)
        return rows

    def _seek(self, collection: str, seek: Seek, splits: bool) -> list[Raw]:
        """Return the pipeline that gives a row for each key which current documents hold."""
        current = self.current(seek.own) if splits else self.filter(seek.own)
        inner = [*([{"$match": current}] if current else []), *seek.stages]
        join = {"from": collection, "localField": KEY, "foreignField": seek.path, "pipeline": inner}
        return [
            *given([{KEY: key} for key in seek.keys]),
            {"$lookup": {**join, "as": ROWS}},
            {"$unwind": f"${ROWS}"},
            {"$replaceWith": {"$mergeObjects": [f"${ROWS}", {"_id": f"${KEY}"}]}},
        ]

    def evaluate(self, documents: Sequence[Raw], stages: Sequence[Raw]) -> Plan[list[Raw]]:
        """Return the rows that stages give for documents at hand, whether or not this scope sees them."""
        rows: list[Raw] = []
        for some in command_chunks(documents):
            rows += yield from aggregate(self.collections[0], [*given(some), *stages])
        return rows

    # -- sweeps --------------------------------------------------------------------------------------

    def page(
        self,
        after: list[Any] | None,
        size: int,
        *,
        collection: str | None = None,
        projection: Raw | None = None,
    ) -> Plan[ScopePage]:
        """Return images of the next stored documents of one collection; by default the model's own.

        A projection must leave out nothing that a migration, a formula or a
        condition reads.
        """
        collection = self.collections[0] if collection is None else collection
        failed: Failed = []
        reading = matching(collection, self.stored(), after, size, projection)
        raws, last = yield from readable_page(self.label, reading, after, _noting(failed))
        images = yield from self.load(raws, collection, failed)
        return ScopePage([image for image in images if self.admits(image.document)], last, failed)


def _noting(failed: Failed | None) -> Callable[[Unreadable], None]:
    def note(error: Unreadable) -> None:
        if failed is not None:
            failed.extend(error.failed)

    return note


def beside(one: Mapping[str, Any], other: Mapping[str, Any]) -> Raw:
    """Return two conditions as one.

    They stand beside each other, so that a partial index serves, unless they share a name.
    """
    if one.keys() & other.keys():
        return {"$and": [dict(one), dict(other)]}
    return {**one, **other}


def is_one_of(values: Sequence[Any]) -> Raw:
    """Return the condition that a field has one of these values."""
    return {"$eq": values[0]} if len(values) == 1 else {"$in": list(values)}
