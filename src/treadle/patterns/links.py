"""Links: things of several kinds that belong together, in one collection, found by one array of ids.

The invariant (Single Collection): a link exists from both ends or not at all.
A write of one end writes the other in the same commit, and the links of a
document disappear with it. `store.related(…)` is one query by one index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pymongo import ASCENDING, IndexModel, UpdateOne

from treadle.engine.document_layout import DocumentLayout
from treadle.engine.documents import stamping
from treadle.engine.expected_rule import ExpectedRule
from treadle.engine.pages import by_ids
from treadle.engine.version_upgrade import upgrade_matching_upgraded
from treadle.engine.write_path import WritePath
from treadle.errors import DeclarationError, UsageError
from treadle.graph.calls import RelatingRule
from treadle.graph.changes import Before, Change, Changes
from treadle.graph.layout import PageReader
from treadle.graph.query import Query
from treadle.graph.rule import REVISION, TRANSACTIONS, Models, Pattern, Place, Reads, Rule, Storage
from treadle.graph.scope import Image
from treadle.plan import Plan, Raw, bulk_write, by_id
from treadle.query.keys import freeze
from treadle.query.paths import resolve

# Documents that related() reads at a time.
RELATED_PAGE = 1_000


@dataclass(frozen=True)
class Links(Pattern):
    """Keep the ids in the list `field` from both ends."""

    pattern: ClassVar[str] = "links"
    keyword: ClassVar[str] = "links"
    beside: ClassVar[bool] = True

    field: str = "links"

    def bind(self, place: Place, graph: Models) -> Rule:
        return LinksRule(place, self.field)


@dataclass(slots=True)
class _Moves:
    """What changed documents add to and remove from the documents at the other ends, by frozen id."""

    joining: dict[Any, list[Any]] = field(default_factory=dict)
    leaving: dict[Any, list[Any]] = field(default_factory=dict)
    # The ids of both, and of the documents that are no longer there.
    ids: dict[Any, Any] = field(default_factory=dict)
    gone: list[Any] = field(default_factory=list)


class LinksRule(ExpectedRule, RelatingRule):
    """The links of one collection."""

    pattern = "links"
    needs = TRANSACTIONS
    spreads = True

    def __init__(self, place: Place, field: str) -> None:
        super().__init__(place)
        entry, label = place.entry, place.label
        path = resolve(entry.codec, field, label, "source-field-missing")
        held, expected = path.shape, entry.ids.shape
        if len(path.steps) != 1 or not path.steps[0].array or held.python is not expected.python:
            raise DeclarationError(
                f"{label} keeps its links in {field!r}, which must be a list of the documents' ids: "
                f"list[{expected.name}]",
                code="links-declaration",
            )
        if entry.kinds.above:
            raise DeclarationError(
                f"{label} is one kind of {entry.kinds.above[0].model.__name__}; links reach all kinds of a "
                "collection: declare links= on that",
                code="links-declaration",
            )
        self.field = path.stored

    # -- what it is about ---------------------------------------------------------------------------

    def reads(self) -> Reads:
        return {self.target.collection: {self.field}}

    def storage(self) -> Storage:
        return Storage(indexes=[(self.target, IndexModel([(self.field, ASCENDING)]))])

    def check(self, graph: Models) -> None:
        if self.target.everything.archive is not None:
            raise DeclarationError(
                f"{self.place.label} has links= and archive=; a link to what was archived would be there "
                "from one end only: drop one of the two",
                code="links-declaration",
            )

    def related(
        self, write_path: WritePath, id: Any, filter: Any, sort: Any, limit: int | None
    ) -> PageReader[Any]:
        key = self.target.ids.encode(id)
        belongs: Raw = {"$or": [{"_id": {"$eq": key}}, {self.field: {"$eq": key}}]}
        chosen = belongs if filter is None else {"$and": [belongs, filter]}
        reader = DocumentLayout(self.target, write_path).reader(Query(chosen, sort, limit=limit))
        return reader.in_pages_of(RELATED_PAGE)

    def _linked(self, image: Before) -> dict[Any, Any]:
        """Return the ids that a document names, by frozen id; none where it does not exist."""
        return self.links(image.document) if isinstance(image, Image) else {}

    def links(self, document: Raw) -> dict[Any, Any]:
        """Return the ids that a document names, by frozen id; none where it is deleted."""
        if not self.target.targets.admits(document):
            return {}
        stored = document.get(self.field)
        return {freeze(each): each for each in stored} if isinstance(stored, list) else {}

    def _is_active(self, image: Image | None) -> bool:
        return image is not None and self.target.targets.holds(image)

    # -- writes ------------------------------------------------------------------------------------

    def record(self, changes: Sequence[Change], ledger: Changes) -> Plan[None]:
        """Bring the other ends in line with what was written."""
        moves = self._moves(changes)
        named = [moves.ids[key] for key in {**moves.joining, **moves.leaving}]
        documents: list[Raw] = []
        if named or moves.gone:
            own = [{"_id": {"$in": named}}, {self.field: {"$in": moves.gone}}]
            documents = yield from self._load({"$or": own if moves.gone else own[:1]}, ledger)
        missing = moves.joining.keys() - {freeze(each["_id"]) for each in documents}
        self._refuse_dangling([moves.ids[key] for key in moves.joining if key in missing], changes)
        yield from self._clean(changes, missing, ledger)
        yield from self._write(documents, moves, ledger)

    def _moves(self, changes: Sequence[Change]) -> _Moves:
        """Return what changes add to and remove from the other ends."""
        moves = _Moves()
        for change in changes:
            before, after = self._linked(change.before), self._linked(change.after)
            moves.ids |= before | after
            for other in after.keys() - before.keys():
                moves.joining.setdefault(other, []).append(change.id)
            for other in before.keys() - after.keys():
                moves.leaving.setdefault(other, []).append(change.id)
            if change.before is not None and not self._is_active(change.after):
                moves.gone.append(change.id)
        return moves

    def _load(self, own: Raw, ledger: Changes) -> Plan[list[Raw]]:
        """Return the documents that match, the outdated ones stored in the current version."""
        yield from upgrade_matching_upgraded(self.target, own, ledger, [self.field])
        return [image.document for image in (yield from self.target.targets.find(own))]

    def _refuse_dangling(self, missing: Sequence[Any], changes: Sequence[Change]) -> None:
        """Refuse links to documents that do not exist; a restored document may hold such links."""
        for key in missing:
            frozen = freeze(key)
            if any(frozen in self._linked(each.after) and not self._is_restored(each) for each in changes):
                raise UsageError(
                    f"{self.target.model.__name__} {key!r} does not exist, so nothing can be linked to it; "
                    "insert it first, or both in one call of insert_many",
                    code="link-dangling",
                )

    def _is_restored(self, change: Change) -> bool:
        """Whether a document was soft-deleted before a change."""
        before = change.before
        return isinstance(before, Image) and not self._is_active(before) and self._is_active(change.after)

    def _clean(self, changes: Sequence[Change], missing: Set[Any], ledger: Changes) -> Plan[None]:
        """Take repeated links, and those to missing documents, out of what was written."""
        cleaned: dict[Any, Change] = {}
        operations = []
        for change in changes:
            own = self._linked(change.after)
            links = [link for key, link in own.items() if key not in missing]
            if own and change.after is not None and len(links) < len(change.after.document[self.field]):
                cleaned[freeze(change.id)] = change
                operations.append(UpdateOne(by_id(change.id), {"$set": {self.field: links}}))
        if not operations:
            return
        entry = self.target
        yield from bulk_write(entry.collection, operations)
        stored = yield from by_ids(entry.collection, [change.id for change in cleaned.values()])
        for key, after in stored.items():
            ledger.note(entry, cleaned[key].after, Image(after, entry.collection))

    def _write(self, documents: Sequence[Raw], moves: _Moves, ledger: Changes) -> Plan[None]:
        """Add and remove links in the documents at the other ends."""
        entry = self.target
        updates = {freeze(each["_id"]): self._updates(each, moves) for each in documents}
        befores = {key: each for each in documents if updates[key := freeze(each["_id"])]}
        if not befores:
            return
        yield from bulk_write(entry.collection, [each for some in updates.values() for each in some])
        afters = yield from by_ids(entry.collection, [each["_id"] for each in befores.values()])
        yield from ledger.add(entry, [(befores[key], after) for key, after in afters.items()])

    def _updates(self, document: Raw, moves: _Moves) -> list[UpdateOne]:
        """Return the updates of one document at the other end."""
        key, own, chosen = freeze(document["_id"]), self.links(document), by_id(document["_id"])
        come = [each for each in moves.joining.get(key, ()) if freeze(each) not in own]
        left = [each for each in [*moves.leaving.get(key, ()), *moves.gone] if freeze(each) in own]
        if not come and not left and key not in moves.joining:
            return []
        # Another operator of the same field; one update takes one of them.
        pull = [UpdateOne(chosen, {"$pull": {self.field: {"$in": left}}})] if left else []
        return [*pull, UpdateOne(chosen, self._update(document, come, left))]

    def _update(self, document: Raw, come: list[Any], left: list[Any]) -> Any:
        """Return the update of a document at the other end, for the links that come and those that left."""
        # A no-op update takes no lock, so increment a counter: a deletion of the document must conflict.
        update: Raw = {"$inc": {REVISION: 1}}
        if come and isinstance(document.get(self.field, []), list):
            update["$addToSet"] = {self.field: {"$each": come}}
        elif come:
            # Another writer stored something else there, such as null.
            update["$set"] = {self.field: come}
        # A link from the other end is a change: a replacement of what was read before conflicts.
        return stamping(self.target.kinds.of(document), update) if come or left else update

    # -- verify and repair ---------------------------------------------------------------------------

    def expected(self, documents: Sequence[Raw]) -> Plan[list[Mapping[str, Any]]]:
        entry, keys = self.target, [each["_id"] for each in documents]
        linked = [other for each in documents for other in self.links(each).values()]
        # A migration may read any field of an outdated document.
        shown = None if entry.versions.may_change else {**entry.kinds.projection, self.field: 1}
        images = yield from entry.targets.find({"_id": {"$in": linked}}, projection=shown)
        existing = {freeze(image.document["_id"]) for image in images}
        naming: dict[Any, list[Any]] = {}
        for image in (yield from entry.targets.find({self.field: {"$in": keys}}, projection=shown)):
            for other in self.links(image.document):
                naming.setdefault(other, []).append(image.document["_id"])
        return [self._right(each, existing, naming.get(freeze(each["_id"]), [])) for each in documents]

    def _right(self, document: Raw, existing: Set[Any], naming: Sequence[Any]) -> Raw:
        """Return the links of a document: its own to existing documents, then those that only they name."""
        own = self.links(document)
        right = [link for key, link in own.items() if key in existing]
        right += [link for link in naming if freeze(link) not in own]
        is_right = right == (document.get(self.field) or []) or not self.target.targets.admits(document)
        return {} if is_right else {self.field: right}
