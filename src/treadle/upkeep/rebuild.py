"""Making right what is not: whole collections (`rebuild`) or single findings (`repair`).

Both recompute from the sources in small transactions that really write each
target, so that writers can go on: who collides starts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bson.errors import BSONError
from pymongo import UpdateOne
from pymongo.errors import OperationFailure

from treadle.engine import standalone
from treadle.engine.contention import Contended, attempting, pieces
from treadle.engine.fill import fill_references
from treadle.engine.groups import Arranged, arrange, differing, keys_found, require_indexes
from treadle.engine.intents import is_about_one_document, set_aside
from treadle.engine.ledger import Ledger
from treadle.engine.pipelines import stamps_of, update_pipeline
from treadle.engine.react import UNBOUNDED, react
from treadle.graph.change import Change
from treadle.graph.pattern import REVISION
from treadle.patterns.approximation import inspection as counts
from treadle.patterns.outlier import inspection as outliers
from treadle.patterns.tree.inspection import mend_tree, rebuild_tree
from treadle.plan import Plan, Raw, bulk_write, by_id, count_documents, find, transact, update_many
from treadle.plan.capabilities import Capabilities
from treadle.query.comparison import same
from treadle.query.keys import freeze
from treadle.query.paths import outermost, value_at
from treadle.upkeep import position
from treadle.upkeep.closed import Bounds, is_closed, last_bounds
from treadle.upkeep.verify import Finding, Progress, Report, expected, page, verify, within

if TYPE_CHECKING:
    from treadle.graph.graph import Entry, Graph

PAGE = 100
ROUNDS_MAX = 5


def in_order(entries: Iterable[Entry[Any]]) -> list[Entry[Any]]:
    """Models whose fields feed others before those others."""
    return sorted(
        (entry for entry in entries if entry.rules), key=lambda entry: min(rule.level for rule in entry.rules)
    )


def rebuild(
    graph: Graph, server: Capabilities, entries: Iterable[Entry[Any]], report: Report | None = None
) -> Plan[int]:
    """Recompute every maintained value of these models; how many documents were visited."""
    visited = 0
    listed = list(entries)
    for entry in listed:
        if entry.layout is not None:
            visited += yield from entry.layout.rebuild(server, report)
    chosen = in_order(listed)
    streamed = [rule for entry in chosen for rule in entry.rules if rule.maintain == "stream"]
    if streamed and server.streams:
        # What changes from here on is the worker's; what was before is seen by the scan.
        yield from position.begin()
    for entry in chosen:
        if entry.tree is not None:
            nodes = yield from rebuild_tree(graph, server, entry.tree, report)
            visited += 0 if entry.derived else nodes
        if not entry.derived:
            continue
        bounds: Bounds | None = None
        if entry.group is not None and entry.group.maintain == "schedule":
            bounds = yield from last_bounds(entry)
            if bounds is None:
                # Its first scheduled run computes it.
                continue
        total = (yield from count_documents(entry.collection, entry.exactly)) if report else 0
        done = 0
        last: list[Any] | None = None
        while True:
            documents = yield from page(entry, last, PAGE)
            if not documents:
                break
            last = [documents[-1]["_id"]]
            keys = [entry.key_of(each) for each in documents if within(entry, each, bounds)]
            yield from mend(graph, server, entry, keys)
            done += len(documents)
            if report:
                report(Progress(entry.model.__name__, done, max(total, done)))
        yield from outliers.remove_orphans(entry)
        if entry.counters:
            yield from counts.forget_old_writers()
        if entry.group is not None:
            # Groups that have no document yet, or too many.
            others = [key for key in (yield from differing(entry)) if not bounds or is_closed(key, bounds)]
            yield from _in_chunks(graph, server, entry, others)
            done += len(others)
        visited += done
    yield from position.built(streamed)
    return visited


def repair(
    graph: Graph, server: Capabilities, entries: Iterable[Entry[Any]], report: Report | None = None
) -> Plan[int]:
    """Mend what `verify` finds, until it finds nothing more; how many documents were mended."""
    listed = list(entries)
    chosen = in_order(listed)
    mended: set[Any] = set()
    laid_out = 0
    for entry in listed:
        if entry.layout is not None:
            laid_out += yield from entry.layout.repair(server, report)
    for _ in range(ROUNDS_MAX):
        findings: list[Finding] = yield from verify(graph, server, chosen, report)
        by_entry: dict[str, list[Finding]] = {}
        for finding in findings:
            by_entry.setdefault(finding.model, []).append(finding)
        progress = False
        for entry in chosen:
            found = by_entry.get(entry.model.__name__, [])
            keys = list({freeze(each.document_id): each.document_id for each in found}.values())
            if entry.group is not None:
                keys = yield from keys_found(entry, found)
            done = yield from _in_chunks(graph, server, entry, keys)
            progress = progress or bool(done)
            mended.update((entry.collection, freeze(key)) for key in done)
        if not progress:
            break
    return len(mended) + laid_out


def _in_chunks(graph: Graph, server: Capabilities, entry: Entry[Any], keys: Sequence[Any]) -> Plan[list[Any]]:
    done: list[Any] = []
    for start in range(0, len(keys), PAGE):
        some = keys[start : start + PAGE]
        if entry.tree is not None:
            done.extend((yield from mend_tree(graph, server, entry.tree, some)))
        if entry.derived:
            done.extend((yield from mend(graph, server, entry, some)))
    return done


def mend(graph: Graph, server: Capabilities, entry: Entry[Any], keys: Sequence[Any]) -> Plan[list[Any]]:
    """Recompute what these documents maintain, and what that feeds; the keys of those that changed."""
    if entry.group is not None:
        yield from require_indexes([] if entry.group.key.identity else [entry.group])
    if not keys:
        return []
    changed = yield from outliers.mend(graph, server, entry, keys)
    changed += yield from counts.mend(graph, server, entry, keys)
    if not changed and not (entry.outliers or entry.counters):
        return (yield from _mend_derived(graph, server, entry, keys))
    if len(entry.derived) > len(entry.outliers) + len(entry.counters):
        changed += yield from _mend_derived(graph, server, entry, keys)
    return list({freeze(key): key for key in changed}.values())


def _mend_derived(
    graph: Graph, server: Capabilities, entry: Entry[Any], keys: Sequence[Any]
) -> Plan[list[Any]]:
    # Documents are mended in pages in a transaction, one by one under intents elsewhere.
    if not server.transactions:
        return (yield from _mend_without_transactions(graph, server, entry, keys))

    def hold() -> Plan[None]:
        held = {**entry.at_any(keys), **entry.exactly}
        yield from update_many(entry.collection, held, {"$inc": {REVISION: 1}})

    attempt = attempting(lambda: _attempt(graph, server, entry, keys), hold, len(keys))
    try:
        return (yield from transact(attempt))
    except (OperationFailure, BSONError, Contended) as error:
        if isinstance(error, OperationFailure) and (
            error.has_error_label("TransientTransactionError") or not is_about_one_document(error)
        ):
            raise
        if len(keys) == 1:
            yield from set_aside(entry.model.__name__, entry.collection, keys[0], error)
            return []
        changed: list[Any] = []
        for start, end in pieces(len(keys), error):
            changed += yield from _mend_derived(graph, server, entry, keys[start:end])
        return changed


def _mend_without_transactions(
    graph: Graph, server: Capabilities, entry: Entry[Any], keys: Sequence[Any]
) -> Plan[list[Any]]:
    changed = []
    for key in keys:
        ledger = standalone.IntentLedger("repair")
        if (yield from standalone.refresh(server, entry, key, None, ledger)):
            changed.append(key)
            documents = yield from find(entry.collection, entry.at(key), {"_id": 1})
            ids = [each["_id"] for each in documents]
            intent = {"collection": entry.collection, "keys": ids, "feeds": {}, "cards": []}
            yield from standalone.redo(graph, server, intent, ledger)
        yield from standalone.settle(graph, server, ledger)
    return changed


def _attempt(graph: Graph, server: Capabilities, entry: Entry[Any], keys: Sequence[Any]) -> Plan[list[Any]]:
    ledger = Ledger()
    arranged = Arranged([], [])
    if entry.group is not None:
        arranged = yield from arrange(server, entry, keys, ledger)
    made = {freeze(each) for each in arranged.made}
    documents = yield from find(entry.collection, {**entry.at_any(keys), **entry.exactly})
    present = [each["_id"] for each in documents]
    yield from ledger.note_before(entry, [each for each in present if freeze(each) not in made])
    wanted = yield from expected(server, entry, documents)
    # Again, this time really writing the sources of synced copies; of the worker's too, which finds a
    # copy right and leaves it, while this transaction still holds an older value for it.
    pairs: list[tuple[Raw | None, Raw]] = list(zip(documents, wanted, strict=True))
    yield from fill_references(entry, pairs, lenient=True, guard_all=True)
    operations = []
    changed = [*arranged.removed]
    for document, right in pairs:
        assert document is not None
        sets = {}
        for path in _written_paths(entry):
            value = value_at(right, path.split("."))
            if value is None and value_at(document, path.split(".")) is None:
                continue
            sets[path] = {"$literal": value}
        differs = any(not same(value_at(document, path.split(".")), sets[path]["$literal"]) for path in sets)
        differs = differs or any(
            not same(value_at(document, formula.path.split(".")), value_at(right, formula.path.split(".")))
            for formula in entry.formulas
        )
        if differs or freeze(document["_id"]) in made:
            changed.append(entry.key_of(document))
            sets.update(stamps_of(entry.gathers))
        operations.append(UpdateOne(by_id(document["_id"]), update_pipeline(entry, sets, {})))
    if operations:
        yield from bulk_write(entry.collection, operations, ordered=False)
    if changed and entry.feeds:
        afters = yield from find(entry.collection, {"_id": {"$in": present}})
        by_key = {freeze(each["_id"]): each for each in afters}
        for document in documents:
            frozen = freeze(document["_id"])
            before = None if frozen in made else document
            ledger.add(Change(entry.collection, document["_id"], before, by_key[frozen]))
        yield from react(graph, server, ledger, copies_max=UNBOUNDED)
    return changed


def _written_paths(entry: Entry[Any]) -> list[str]:
    """What a rewrite sets: gathered values by their paths, cards with the field that holds them."""
    paths = {path for rule in entry.gathers for path in rule.empty()}
    for rule in entry.references:
        paths.add(rule.steps[0].stored if rule.steps else rule.name)
    return outermost(paths)
