"""Committing by intents, on a server without transactions.

A lease lets one writer at a time maintain; threads and tasks of one process
share it through the queue of writers. Before each document is written, an
intent notes it with the keys that it feeds. Then the source is written, then
everything that it is and feeds is recomputed from the sources, then the
intent is deleted. Differences have no place here: without a transaction
nobody could tell whether one was applied.

A writer that was halted until its lease ran out may still wake up. So a
recomputation writes a target only if the target's revision is still the one
that it read before it read the sources.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from bson import ObjectId
from pymongo.errors import DuplicateKeyError, OperationFailure

from treadle.engine.deletes import follow_deletions, follow_references
from treadle.engine.intents import COLLECTION
from treadle.engine.lease import COLLECTION as LEASES
from treadle.engine.lease import acquire, release
from treadle.engine.ledger import Ledger, keys_now
from treadle.engine.named import targets_of
from treadle.engine.react import update_copies
from treadle.engine.recompute import Recomputation
from treadle.engine.set_aside import around, readable
from treadle.engine.work import Commit, Failed, Work, Writer, as_they_are_now
from treadle.errors import DataError, UsageError
from treadle.graph.derived import CopyRule
from treadle.graph.gather import GatherRule
from treadle.graph.pattern import REVISION, Entry, Rule
from treadle.model.logs import logger
from treadle.model.storable import ENCODING_ERRORS
from treadle.plan import Plan, Raw, by_id, delete_one, find, find_one, find_one_and_update, update_one, wait
from treadle.plan.server_errors import is_about_one_document
from treadle.query.comparison import same
from treadle.query.keys import freeze
from treadle.query.paths import overlap, put, top, value_at

R = TypeVar("R")

LEASE = "standalone"

log = logger(__name__)


class IntentLedger(Ledger):
    """A ledger that writes down what is about to be changed, before it is."""

    transactional = False

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner
        self.intents: list[Raw] = []

    def reads_before(self, entry: Entry[Any]) -> bool:
        return True

    def note_before(self, entry: Entry[Any], ids: Sequence[Any]) -> Plan[None]:
        if entry.plain:
            return
        copies = [rule for each in entry.related for rule in each.having(CopyRule)]
        tops = {rule.top for rule in copies} | {top(rule.reference_path) for rule in copies}
        documents = yield from find(entry.collection, {"_id": {"$in": list(ids)}})
        if not documents:
            return
        feeds: dict[str, list[Any]] = {}
        for rule, keys in (yield from keys_now(entry.feeding(GatherRule), documents)).items():
            feeds[rule.place.label] = list({freeze(key): key for key in keys}.values())
        cards = [
            [before["_id"], {name: before[name] for name in tops if name in before}]
            for before in documents
            if tops
        ]
        names = {
            path: [[before["_id"], value_at(before, path)] for before in documents]
            for path in {path for each in entry.related for path in each.named_by}
        }
        yield from self._record(entry, [before["_id"] for before in documents], feeds, cards, names)

    def note_new(self, entry: Entry[Any], ids: Sequence[Any]) -> Plan[None]:
        yield from self._record(entry, ids, {}, [])

    def _record(
        self,
        entry: Entry[Any],
        keys: Sequence[Any],
        feeds: Raw,
        cards: list[Any],
        names: dict[str, list[Any]] | None = None,
    ) -> Plan[None]:
        identity = {"kind": "write", "n": ObjectId()}
        intent = {"collection": entry.collection, "keys": list(keys), "feeds": feeds, "cards": cards}
        if names:
            # As pairs: a path may have dots. Older intents have none.
            intent["names"] = [[path, pairs] for path, pairs in names.items()]
        yield from update_one(
            COLLECTION,
            {"_id": identity},
            {"$setOnInsert": {**intent, "owner": self.owner}, "$currentDate": {"at": True}},
            upsert=True,
        )
        self.intents.append({"_id": identity, **intent})


class ByIntents(Commit):
    """One writer at a time, under a lease; what a crash leaves is recomputed."""

    def perform(self, works: Sequence[Work[Any]], writer: Writer) -> Plan[list[Any]]:
        """One after another; an error is the outcome of its own work."""
        try:
            return (yield from self._perform(works, writer))
        except BaseException:
            # The lease may be held without anybody knowing: the reply may be what was lost.
            writer.left()
            raise

    def _perform(self, works: Sequence[Work[Any]], writer: Writer) -> Plan[list[Any]]:
        outcomes: list[Any] = []
        token = yield from self._acquire(writer)
        for work in works:
            ledger = IntentLedger(writer.owner)
            try:
                outcome = yield from work.body(self.graph, self.server, ledger)
            except Exception as error:
                outcome = Failed(error)
            try:
                yield from self._settle(ledger)
                if work.shows_document and isinstance(outcome, (dict, list)):
                    outcome = yield from as_they_are_now(work.entry, outcome)
            except Exception as error:
                # The write is done; what it owes stays written down.
                log.warning("%s: maintenance is pending: %s", work.entry.model.__name__, error)
                writer.left()
            outcomes.append(outcome)
        try:
            yield from release(LEASE, token)
        except Exception as error:
            # The writes must not seem to have failed; the next one releases it first.
            log.warning("the lease could not be released: %s", error)
            writer.left()
        return outcomes

    def _acquire(self, writer: Writer) -> Plan[int]:
        limits = self.graph.limits
        return acquire(limits, LEASE, writer.owner, limits.standalone_lease_seconds, writer.is_dead)

    def follow(self, body: Callable[[Ledger], Plan[R]], writer: Writer) -> Plan[R]:
        ledger = IntentLedger(writer.owner)
        try:
            outcome = yield from body(ledger)
        except (OperationFailure, *ENCODING_ERRORS):
            # Some of the writes may have been done; what they feed is recomputed all the same.
            yield from self._settle(ledger)
            raise
        yield from self._settle(ledger)
        return outcome

    def mend(
        self, entry: Entry[Any], keys: Sequence[Any], without: frozenset[Rule] = frozenset()
    ) -> Plan[list[Any]]:
        changed = []
        for key in keys:
            ledger = IntentLedger("repair")
            if (yield from self._refresh(entry, key, None, ledger, without=without)):
                changed.append(key)
                documents = yield from find(entry.collection, entry.at(key), {"_id": 1})
                ids = [each["_id"] for each in documents]
                intent = {"collection": entry.collection, "keys": ids, "feeds": {}, "cards": []}
                yield from self._redo(intent, ledger)
            yield from self._settle(ledger)
        return changed

    def look(self, look: Callable[[], Plan[R]]) -> Plan[R]:
        yield from wait(self.graph.limits.standalone_look_seconds)
        return (yield from look())

    def abandon(self, owners: Sequence[str]) -> Plan[None]:
        held = {"_id": LEASE, "owner": {"$in": list(owners)}}
        yield from update_one(LEASES, held, [{"$set": {"until": "$$NOW", "owner": "", "session": None}}])

    # -- recovery --------------------------------------------------------------------------------

    def recover(self, writer: Writer) -> Plan[int]:
        """Do what crashed writers left; what cannot be done is logged and kept, and the others go on."""
        mine = {"_id.kind": "write", "collection": {"$in": list(self.graph.by_collection)}}
        if (yield from find_one(COLLECTION, mine)) is None:
            return 0
        token = yield from self._acquire(writer)
        try:
            pending = yield from find(COLLECTION, mine)
            for intent in pending:
                yield from self._recover_one(intent, writer.owner)
        except Exception:
            yield from release(LEASE, token)
            raise
        yield from release(LEASE, token)
        return len(pending)

    def _recover_one(self, intent: Raw, owner: str) -> Plan[None]:
        ledger = IntentLedger(owner)
        try:
            yield from self._redo(intent, ledger)
            yield from self._settle(ledger)
            yield from delete_one(COLLECTION, {"_id": intent["_id"]})
        except (DataError, UsageError, OperationFailure) as error:
            log.warning("the intent %s could not be done: %s", intent["_id"], error)

    def _settle(self, ledger: IntentLedger) -> Plan[None]:
        """Do what the intents of a ledger say, and delete them; those made meanwhile too."""
        # The list may grow while this goes through it.
        for intent in ledger.intents:
            yield from self._redo(intent, ledger)
        for intent in ledger.intents:
            yield from delete_one(COLLECTION, {"_id": intent["_id"]})

    # -- recomputation ---------------------------------------------------------------------------

    def _redo(self, intent: Raw, ledger: IntentLedger) -> Plan[None]:
        """Bring right everything that the documents of an intent are and feed, along all chains."""
        entry = self.graph.by_collection[intent["collection"]]
        pending: list[tuple[Entry[Any], Any]] = []
        cards = {freeze(key): fields for key, fields in intent.get("cards") or []}
        for key in intent["keys"]:
            yield from self._refresh_written(entry, key, cards.get(freeze(key)))
            before: Raw = {"_id": key}
            for path, pairs in intent.get("names") or []:
                for name in (name for identity, name in pairs if freeze(identity) == freeze(key)):
                    put(before, path, name)
            pending += yield from self._follow(
                entry, before, by_id(key), intent["feeds"], ledger, written=True
            )
        seen: set[Any] = set()
        for _ in range(self.graph.limits.standalone_chain_max):
            following: list[tuple[Entry[Any], Any]] = []
            for target, key in pending:
                mark = (target.collection, freeze(key))
                # Also where nothing changed: the writer before may have got no further.
                if target.feeds and mark not in seen:
                    seen.add(mark)
                    known = {"_id": key}
                    following += yield from self._follow(target, known, target.at(key), {}, ledger)
            if not following:
                return
            pending = following

    def _refresh_written(self, entry: Entry[Any], identity: Any, cards: Raw | None) -> Plan[None]:
        """Recompute a document that was itself written, known by its id."""
        if entry.group is None:
            yield from self._refresh(entry, identity, cards)
            return
        label, looking = entry.model.__name__, find_one(entry.collection, by_id(identity))
        document = yield from around(label, entry.collection, identity, looking)
        if document is not None:
            yield from self._refresh(entry, entry.key_of(document))

    def _follow(
        self,
        entry: Entry[Any],
        before: Raw,
        which: Raw,
        feeds: Raw,
        ledger: IntentLedger,
        *,
        written: bool = False,
    ) -> Plan[list[tuple[Entry[Any], Any]]]:
        """Recompute the targets of a document; those targets. One that cannot be read is set aside.

        Of what it was `before`, its id and the names that it had are known.
        `written` says that a caller wrote it, and not Treadle.
        """
        following = self._follow_one(entry, before, which, feeds, ledger, written)
        return (yield from around(entry.model.__name__, entry.collection, before["_id"], following)) or []

    def _follow_one(
        self,
        entry: Entry[Any],
        before: Raw,
        which: Raw,
        feeds: Raw,
        ledger: IntentLedger,
        written: bool,
    ) -> Plan[list[tuple[Entry[Any], Any]]]:
        document = yield from find_one(entry.collection, which)
        targets: dict[tuple[str, Any], tuple[Entry[Any], Any]] = {}
        gathers = entry.feeding(GatherRule)
        current = (yield from keys_now(gathers, [document])) if document is not None else {}
        for rule in gathers:
            keys = [*feeds.get(rule.place.label, []), *current.get(rule, [])]
            for target_key in (yield from targets_of(rule, keys)):
                # The rules of several kinds may lead to one document; what it is, is seen when it is read.
                mark = (rule.target.collection, freeze(target_key))
                targets[mark] = (rule.target.root, target_key)
        for target, target_key in targets.values():
            yield from self._refresh(target, target_key, None, ledger)
        reached = list(targets.values())
        if document is None:
            # Deleted: what refers to it is dealt with, under intents of its own.
            if entry.group is None:
                yield from follow_deletions(entry, [before], ledger, restrict=False)
            return reached
        if entry.tombstone is not None and not entry.holds(document):
            yield from follow_deletions(entry, [before], ledger, restrict=False, removed=False)
            return reached
        for copied in entry.feeding(CopyRule):
            yield from self._forsake(copied, before, document, ledger)
            key = copied.name_of(document)
            if copied.synced and copied.source.holds(document) and key is not None:
                yield from self._copy(copied, key, document)
                referring = yield from find(
                    copied.target.collection, copied.referring(key), copied.target.key_projection()
                )
                reached.extend((copied.target, copied.target.key_of(each)) for each in referring)
        return reached

    def _forsake(self, rule: CopyRule, before: Raw, after: Raw, ledger: IntentLedger) -> Plan[None]:
        """Deal with what refers to a document by a name that it no longer has, unless another has it."""
        old = rule.name_of(before)
        if rule.to == "_id" or old is None or same(old, rule.name_of(after)) or rule.on_delete == "keep":
            return
        if (yield from find_one(rule.source.collection, rule.named(old), {"_id": 1})) is not None:
            return
        if rule.on_delete == "clear":
            yield from follow_references(rule.source, [rule], [before], ledger)
            return
        for each in (yield from find(rule.target.collection, rule.referring(old), {"_id": 1})):
            yield from self._refresh(rule.target, each["_id"], None, ledger)

    def _copy(self, rule: CopyRule, key: Any, source: Raw) -> Plan[None]:
        """Copy a source to all its targets; one that cannot take the copy is set aside."""
        try:
            yield from update_copies(rule, key, source, {})
        except Exception as error:
            if not is_about_one_document(error):
                raise
            label, ids = rule.place.label, {"_id": 1}
            referring = find(rule.target.collection, rule.referring(key), ids)
            for each in (yield from readable(label, referring)):
                copying = update_copies(rule, key, source, by_id(each["_id"]))
                yield from around(label, rule.target.collection, each["_id"], copying)

    def _refresh(
        self,
        entry: Entry[Any],
        key: Any,
        cards: Raw | None = None,
        ledger: IntentLedger | None = None,
        without: frozenset[Rule] = frozenset(),
    ) -> Plan[bool]:
        """Bring one document up to date; whether it changed. One that stands in the way is set aside."""
        recomputing = self._recompute(entry, key, cards, ledger, without)
        return bool((yield from around(entry.model.__name__, entry.collection, key, recomputing)))

    def _recompute(
        self,
        entry: Entry[Any],
        key: Any,
        cards: Raw | None,
        ledger: IntentLedger | None,
        without: frozenset[Rule],
    ) -> Plan[bool]:
        """Recompute everything that one document derives; whether it changed.

        `cards` are the fields with references and copies as they were before
        the write, so that a snapshot is not taken for that of another
        reference. The document of a group is made where it is missing, and
        removed where the group is empty.
        """
        if not any(Recomputation.of(each).rules for each in entry.related):
            return False
        made = False
        limits = self.graph.limits
        for _ in range(limits.standalone_attempts_max):
            document = yield from find_one(entry.collection, entry.at(key))
            if document is None:
                if not (yield from self._make(entry, key)):
                    return made
                # Looked at once more, as it is now: who made it may have slept for long.
                made = True
                continue
            entry = entry.of(document)
            recomputation = Recomputation.of(entry, None, without)
            right = yield from self._expected(recomputation, document, cards)
            sets = recomputation.sets(document, right, whole=True)
            unchanged = _unchanged(entry, document, sets)
            changed = any(not same(value_at(document, path), sets[path]["$literal"]) for path in sets)
            if ledger is not None and (changed or recomputation.formulas) and moves(entry):
                # What it feeds now must be known even if it feeds something else afterwards.
                yield from ledger.note_before(entry, [document["_id"]])
            if entry.group is not None and not value_at(right, entry.group.path):
                if (yield from delete_one(entry.collection, unchanged)).deleted_count:
                    return True
                continue
            # Written even where nothing changes: a slower writer must notice.
            pipeline = recomputation.rewrite(sets, document, right)
            after = yield from find_one_and_update(entry.collection, unchanged, pipeline)
            if after is not None:
                paths = [rule.path for rule in recomputation.formulas]
                return (
                    made
                    or changed
                    or any(not same(value_at(document, path), value_at(after, path)) for path in paths)
                )
            yield from wait(limits.standalone_pause_seconds)
        raise DataError(
            f"{entry.model.__name__} {key!r} changed {limits.standalone_attempts_max} times while it was "
            "being recomputed; try again when fewer writers are at it",
            code="write-contended",
        )

    def _expected(self, recomputation: Recomputation, document: Raw, cards: Raw | None) -> Plan[Raw]:
        before = document
        if cards is not None:
            before = copy.deepcopy(document)
            for rule in recomputation.copies:
                if rule.snapshots:
                    rule.recall(before, cards)
        (right,) = yield from recomputation.expected(self.server, [document], [before], formulas=False)
        return right

    def _make(self, entry: Entry[Any], key: Any) -> Plan[bool]:
        """Make the document of a group that has sources; whether there is one now."""
        group = entry.group
        if group is None:
            return False
        blank: Raw = {}
        for part, value in zip(group.key.parts, key, strict=True):
            put(blank, part.target, value)
        recomputation = Recomputation.of(entry)
        right = yield from self._expected(recomputation, blank, None)
        if not value_at(right, group.path):
            return False
        pipeline = recomputation.rewrite(recomputation.sets(blank, right, whole=True), blank, right)
        # Never again the revision of an earlier document of this group.
        pipeline.append({"$set": {REVISION: {"$toLong": "$$NOW"}}})
        absent = {**entry.at(key), REVISION: None}
        # Another writer may make it first.
        with contextlib.suppress(DuplicateKeyError):
            yield from update_one(entry.collection, absent, pipeline, upsert=True)
        return True


def _unchanged(entry: Entry[Any], document: Raw, sets: Raw) -> Raw:
    """The filter for a document as long as nobody has rewritten it."""
    revision = value_at(document, REVISION)
    unchanged: Raw = {**by_id(document["_id"]), REVISION: {"$eq": revision} if revision is not None else None}
    tops = {rule.top for rule in entry.having(CopyRule)}
    return unchanged | {path: {"$eq": document[path]} for path in sets if path in document and path in tops}


def moves(entry: Entry[Any]) -> bool:
    """Whether what Treadle maintains in a document decides which targets the document feeds."""
    return any(
        overlap(path, maintained)
        for rule in entry.feeding(GatherRule)
        for path in rule.key.paths
        for maintained in entry.protected
    )
