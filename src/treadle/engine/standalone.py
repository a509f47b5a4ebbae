"""Maintenance on a server without transactions.

A lease lets one writer at a time maintain; threads and tasks of one process
share it through the queue of writers. Before each document is written, an
intent notes it with the keys that it feeds. Then the source is written, then
everything that it is and feeds is recomputed from the sources, then the
intent goes. Deltas have no place here: without a transaction nobody could
tell whether one was applied.

A writer that was halted until its lease ran out may still wake up. So a
recomputation writes a target only if the target's revision is still the one
that it read before it read the sources.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bson import ObjectId
from pymongo.errors import DuplicateKeyError, OperationFailure

from treadle.engine.deletes import follow_deletions
from treadle.engine.fill import fill_references
from treadle.engine.intents import COLLECTION, is_poison, log, set_aside
from treadle.engine.lease import COLLECTION as LEASES
from treadle.engine.lease import acquire, release
from treadle.engine.ledger import Ledger, keys_now
from treadle.engine.pipelines import stamps_of, update_pipeline
from treadle.engine.react import update_copies
from treadle.engine.recompute import recompute
from treadle.errors import DataError, UsageError
from treadle.graph.pattern import REVISION
from treadle.plan import Plan, Raw, by_id, delete_one, find, find_one, find_one_and_update, update_one, wait
from treadle.plan.capabilities import Capabilities
from treadle.query.comparison import same
from treadle.query.keys import freeze
from treadle.query.paths import outermost, overlap, put, value_at

if TYPE_CHECKING:
    from treadle.engine.writes import Work
    from treadle.graph.graph import Entry, Graph
    from treadle.patterns.extended_reference import ReferenceRule

LEASE = "standalone"
LEASE_SECONDS = 60.0
ATTEMPTS_MAX = 50
PAUSE_SECONDS = 0.01
CHAIN_MAX = 20


@dataclass(frozen=True, slots=True)
class Failed:
    """The outcome of a work that raised; its neighbours are not concerned."""

    error: Exception


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
        references = [rule for each in entry.related for rule in each.references]
        tops = {top(rule) for rule in references}
        tops |= {rule.reference_path.split(".")[0] for rule in references}
        feeds: dict[str, list[Any]] = {}
        cards = []
        found = yield from find(entry.collection, {"_id": {"$in": list(ids)}})
        for rule, keys in (yield from keys_now(entry.feeds_gathers, found)).items():
            feeds[rule.place.label] = list({freeze(key): key for key in keys}.values())
        for before in found:
            if tops:
                cards.append([before["_id"], {name: before[name] for name in tops if name in before}])
        if found:
            yield from self._record(entry, [before["_id"] for before in found], feeds, cards)

    def note_new(self, entry: Entry[Any], ids: Sequence[Any]) -> Plan[None]:
        yield from self._record(entry, ids, {}, [])

    def _record(self, entry: Entry[Any], keys: Sequence[Any], feeds: Raw, cards: list[Any]) -> Plan[None]:
        identity = {"kind": "write", "n": ObjectId()}
        intent = {"collection": entry.collection, "keys": list(keys), "feeds": feeds, "cards": cards}
        yield from update_one(
            COLLECTION,
            {"_id": identity},
            {"$setOnInsert": {**intent, "owner": self.owner}, "$currentDate": {"at": True}},
            upsert=True,
        )
        self.intents.append({"_id": identity, **intent})


def commit(
    graph: Graph,
    server: Capabilities,
    works: Sequence[Work[Any]],
    owner: str,
    is_dead: Callable[[str], bool],
    left: Callable[[], None],
) -> Plan[list[Any]]:
    """Perform writes one after another under the lease; an error is the outcome of its own work."""
    outcomes: list[Any] = []
    token = yield from acquire(LEASE, owner, LEASE_SECONDS, is_dead)
    for work in works:
        ledger = IntentLedger(owner)
        try:
            outcome = yield from work.body(graph, server, ledger)
        except Exception as error:
            outcome = Failed(error)
        try:
            yield from settle(graph, server, ledger)
            if work.shows_document and isinstance(outcome, (dict, list)):
                outcome = yield from _as_stored(work.entry, outcome)
        except Exception as error:
            # The write is done; what it owes stays written down.
            log.warning("%s: maintenance is owed: %s", work.entry.model.__name__, error)
            left()
        outcomes.append(outcome)
    try:
        yield from release(LEASE, token)
    except Exception as error:
        # The writes must not seem to have failed; the next one lets go of it first.
        log.warning("the lease could not be released: %s", error)
        left()
    return outcomes


def give_up(owners: Sequence[str]) -> Plan[None]:
    """Let go of the lease after an interruption that did not reach its end."""
    held = {"_id": LEASE, "owner": {"$in": list(owners)}}
    yield from update_one(LEASES, held, [{"$set": {"until": "$$NOW", "owner": "", "session": None}}])


def settle(graph: Graph, server: Capabilities, ledger: IntentLedger) -> Plan[None]:
    """Do what the intents of a ledger say, and let them go; those made meanwhile too."""
    done = 0
    while done < len(ledger.intents):
        intent = ledger.intents[done]
        yield from redo(graph, server, intent, ledger)
        done += 1
    for intent in ledger.intents:
        yield from delete_one(COLLECTION, {"_id": intent["_id"]})


def _as_stored(entry: Entry[Any], outcome: Raw | list[Raw]) -> Plan[Any]:
    documents = [outcome] if isinstance(outcome, dict) else outcome
    found = yield from find(entry.collection, {"_id": {"$in": [each["_id"] for each in documents]}})
    by_key = {freeze(each["_id"]): each for each in found}
    now = [by_key.get(freeze(each["_id"]), each) for each in documents]
    return now[0] if isinstance(outcome, dict) else now


def recover(graph: Graph, server: Capabilities, owner: str, is_dead: Callable[[str], bool]) -> Plan[int]:
    """Do what crashed writers left; how many intents there were.

    One that cannot be done is told and kept, and the others go on.
    """
    mine = {"_id.kind": "write", "collection": {"$in": list(graph.by_collection)}}
    if (yield from find_one(COLLECTION, mine)) is None:
        return 0
    token = yield from acquire(LEASE, owner, LEASE_SECONDS, is_dead)
    try:
        left = yield from find(COLLECTION, mine)
        for intent in left:
            yield from _recover_one(graph, server, intent, owner)
    except Exception:
        yield from release(LEASE, token)
        raise
    yield from release(LEASE, token)
    return len(left)


def _recover_one(graph: Graph, server: Capabilities, intent: Raw, owner: str) -> Plan[None]:
    ledger = IntentLedger(owner)
    try:
        yield from redo(graph, server, intent, ledger)
        yield from settle(graph, server, ledger)
        yield from delete_one(COLLECTION, {"_id": intent["_id"]})
    except (DataError, UsageError, OperationFailure) as error:
        log.warning("the intent %s could not be done: %s", intent["_id"], error)


# -- recomputation -----------------------------------------------------------------------------


def redo(graph: Graph, server: Capabilities, intent: Raw, ledger: IntentLedger) -> Plan[None]:
    """Bring right everything that the documents of an intent are and feed, along all chains."""
    entry = graph.by_collection[intent["collection"]]
    pending: list[tuple[Entry[Any], Any]] = []
    cards = {freeze(key): fields for key, fields in intent.get("cards") or []}
    for key in intent["keys"]:
        yield from _refresh_written(server, entry, key, cards.get(freeze(key)))
        pending.extend((yield from _follow(server, entry, key, by_id(key), intent["feeds"], ledger)))
    seen: set[Any] = set()
    for _ in range(CHAIN_MAX):
        following: list[tuple[Entry[Any], Any]] = []
        for target, key in pending:
            mark = (target.collection, freeze(key))
            # Also where nothing changed: the writer before may have got no further.
            if target.feeds and mark not in seen:
                seen.add(mark)
                following.extend((yield from _follow(server, target, key, target.at(key), {}, ledger)))
        if not following:
            return
        pending = following


def _refresh_written(server: Capabilities, entry: Entry[Any], identity: Any, cards: Raw | None) -> Plan[None]:
    """Recompute a document that was itself written, known by its id."""
    if entry.group is None:
        yield from refresh(server, entry, identity, cards)
        return
    document = yield from find_one(entry.collection, by_id(identity))
    if document is not None:
        yield from refresh(server, entry, entry.key_of(document))


def _follow(
    server: Capabilities, entry: Entry[Any], key: Any, which: Raw, feeds: Raw, ledger: IntentLedger
) -> Plan[list[tuple[Entry[Any], Any]]]:
    """Recompute the targets of a document; those targets."""
    document = yield from find_one(entry.collection, which)
    targets: dict[tuple[str, Any], tuple[Entry[Any], Any]] = {}
    current = (yield from keys_now(entry.feeds_gathers, [document])) if document is not None else {}
    for rule in entry.feeds_gathers:
        for target_key in [*feeds.get(rule.place.label, []), *current.get(rule, [])]:
            # The rules of several kinds may lead to one document; what it is, is seen when it is read.
            targets[(rule.target.collection, freeze(target_key))] = (rule.target.root, target_key)
    for target, target_key in targets.values():
        yield from refresh(server, target, target_key, None, ledger)
    reached = list(targets.values())
    if document is None:
        # Deleted: what refers to it is dealt with, under intents of its own.
        if entry.group is None:
            yield from follow_deletions(entry, [key], ledger, restrict=False)
        return reached
    key = document["_id"]
    for reference in entry.feeds_references:
        if reference.synced and reference.source.holds(document):
            yield from _copy(reference, key, document)
            referring = {reference.reference_path: {"$eq": key}, **reference.target.scope}
            found = yield from find(reference.target.collection, referring, reference.target.key_projection())
            reached.extend((reference.target, reference.target.key_of(each)) for each in found)
    return reached


def _copy(rule: ReferenceRule, key: Any, source: Raw) -> Plan[None]:
    """Copy a source to all its targets; one that cannot take the copy is set aside."""
    try:
        yield from update_copies(rule, key, source, {})
    except OperationFailure as error:
        if not is_poison(error):
            raise
        referring = {rule.reference_path: {"$eq": key}, **rule.target.scope}
        found = yield from find(rule.target.collection, referring, {"_id": 1})
        for each in found:
            try:
                yield from update_copies(rule, key, source, by_id(each["_id"]))
            except OperationFailure as refusal:
                if not is_poison(refusal):
                    raise
                yield from set_aside(rule.place.label, rule.target.collection, each["_id"], refusal)


def refresh(
    server: Capabilities,
    entry: Entry[Any],
    key: Any,
    cards: Raw | None = None,
    ledger: IntentLedger | None = None,
) -> Plan[bool]:
    """Recompute everything that one document maintains; whether it changed.

    `cards` are the fields with references and cards as they were before the
    write, so that a snapshot is not taken for that of another reference. The
    document of a group is made where it is missing, and removed where the
    group is empty.
    """
    if not any(each.derived for each in entry.related):
        return False
    made = False
    for _ in range(ATTEMPTS_MAX):
        document = yield from find_one(entry.collection, entry.at(key))
        if document is None:
            if not (yield from _make(server, entry, key)):
                return made
            # Looked at once more, as it is now: who made it may have slept for long.
            made = True
            continue
        entry = entry.of(document)
        sets = yield from _wanted(server, entry, document, cards)
        unchanged = _unchanged(entry, document, sets)
        changed = any(not same(value_at(document, path.split(".")), sets[path]["$literal"]) for path in sets)
        if ledger is not None and (changed or entry.formulas) and moves(entry):
            # What it feeds now must be known even if it feeds something else afterwards.
            yield from ledger.note_before(entry, [document["_id"]])
        if entry.group is not None and not sets[entry.group.path]["$literal"]:
            if (yield from delete_one(entry.collection, unchanged)).deleted_count:
                return True
            continue
        stamps = stamps_of(entry.gathers) if changed else {}
        # Written even where nothing changes: a slower writer must notice.
        pipeline = update_pipeline(entry, {**sets, **stamps}, {})
        after = yield from find_one_and_update(entry.collection, unchanged, pipeline)
        if after is not None:
            return (
                made
                or changed
                or any(
                    not same(value_at(document, rule.path.split(".")), value_at(after, rule.path.split(".")))
                    for rule in entry.formulas
                )
            )
        yield from wait(PAUSE_SECONDS)
    raise DataError(
        f"{entry.model.__name__} {key!r} changed {ATTEMPTS_MAX} times while it was being recomputed; "
        "try again when fewer writers are at it",
        code="write-contended",
    )


def _unchanged(entry: Entry[Any], document: Raw, sets: Raw) -> Raw:
    """The filter for a document as long as nobody has rewritten it."""
    revision = value_at(document, REVISION.split("."))
    unchanged: Raw = {**by_id(document["_id"]), REVISION: {"$eq": revision} if revision is not None else None}
    for path in sets:
        if path in document and any(top(rule) == path for rule in entry.references):
            unchanged[path] = {"$eq": document[path]}
    return unchanged


def moves(entry: Entry[Any]) -> bool:
    """Whether what Treadle maintains in a document decides which targets the document feeds."""
    return any(
        overlap(path, maintained)
        for rule in entry.feeds_gathers
        for path in rule.key.paths
        for maintained in entry.protected
    )


def _make(server: Capabilities, entry: Entry[Any], key: Any) -> Plan[bool]:
    """Make the document of a group that has sources; whether there is one now."""
    group = entry.group
    if group is None:
        return False
    blank: Raw = {}
    for part, value in zip(group.key.parts, key, strict=True):
        put(blank, part.target.split("."), value)
    sets = yield from _wanted(server, entry, blank, None)
    if not sets[group.path]["$literal"]:
        return False
    pipeline = update_pipeline(entry, {**sets, **stamps_of(entry.gathers)}, {})
    # Never again the revision of an earlier document of this group.
    pipeline.append({"$set": {REVISION: {"$toLong": "$$NOW"}}})
    try:
        absent = {**entry.at(key), REVISION: None}
        yield from update_one(entry.collection, absent, pipeline, upsert=True)
    except DuplicateKeyError:
        # Another writer made it first.
        return True
    return True


def _wanted(server: Capabilities, entry: Entry[Any], document: Raw, cards: Raw | None) -> Plan[Raw]:
    """What a document should hold, as literals by stored path."""
    wanted = copy.deepcopy(document)
    if entry.gathers:
        key = entry.key_of(document)
        values = yield from recompute(entry.gathers, [key], server.version)
        for path, value in values[freeze(key)].items():
            put(wanted, path.split("."), value)
    before = copy.deepcopy(document)
    if cards is not None:
        for rule in entry.references:
            forget_stale_cards(rule, before, cards)
    yield from fill_references(entry, [(before, wanted)], look_only=True)
    paths = {path for rule in entry.gathers for path in rule.empty()}
    paths |= {top(rule) for rule in entry.references if top(rule) in wanted}
    return {path: {"$literal": value_at(wanted, path.split("."))} for path in outermost(paths)}


def top(rule: ReferenceRule) -> str:
    return rule.steps[0].stored if rule.steps else rule.name


def forget_stale_cards(rule: ReferenceRule, document: Raw, cards: Raw) -> None:
    """Drop cards that were another reference's before the write, and are only left over."""
    old = [
        (freeze(reference), container.get(rule.name))
        for container, reference in rule.references(cards)
        if reference is not None
    ]
    known = {reference for reference, _ in old}
    for container, reference in rule.references(document):
        if reference is None or freeze(reference) in known or rule.holds_reference:
            continue
        if any(same(card, container.get(rule.name)) for _, card in old):
            container.pop(rule.name, None)
