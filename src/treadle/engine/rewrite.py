"""Store recomputed values, inside a transaction: the one way of `repair`, `rebuild` and the worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from pymongo import UpdateOne

from treadle.engine.groups import Arranged, arrange
from treadle.engine.ledger import Ledger
from treadle.engine.pages import by_ids
from treadle.engine.pipelines import derivation
from treadle.engine.recompute import Gather, Recomputation
from treadle.graph.change import Change
from treadle.plan import Plan, Raw, bulk_write, by_id, find
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze, freeze_all


def rewrite(
    server: Capabilities,
    recomputation: Recomputation,
    keys: Sequence[Any],
    ledger: Ledger,
    *,
    within: Raw | None = None,
    recall: Callable[[Raw], Raw] | None = None,
    unforced: Collection[Any] | None = None,
    gather: Gather | None = None,
) -> Plan[list[Any]]:
    """Store what the documents of these keys derive, and record the changes. Returns the keys of these.

    `recall` gives a document as it was before, where snapshots depend on
    that. Each document is written, so that concurrent writers conflict, and
    the sources of its copies too. With `unforced` no source is written, and
    the documents of these frozen keys only if they are incorrect. `gather` is
    as in `Recomputation.expected`.
    """
    entry = recomputation.entry
    arranged = Arranged([], [])
    if entry.group is not None:
        arranged = yield from arrange(server, entry, keys, ledger)
    new = {freeze(each) for each in arranged.made}
    projection = None if unforced is None else recomputation.projection
    documents = yield from find(entry.collection, {**entry.at_any(keys), **(within or {})}, projection)
    present, own = [each["_id"] for each in documents], recomputation.keys(documents)
    frozen = freeze_all(present)
    frozen_keys = frozen if entry.group is None else freeze_all(own)
    yield from ledger.note_before(
        entry, [key for key, each in zip(present, frozen, strict=True) if each not in new]
    )
    befores = documents if recall is None else [recall(each) for each in documents]
    # The worker's copies need their sources written too: it finds a copy correct and leaves it, while this
    # transaction still holds an older value for it.
    expected = yield from recomputation.expected(
        server, documents, befores, guarded=unforced is None, frozen=frozen_keys, gather=gather
    )
    operations = []
    changed = [*arranged.removed]
    for number, (document, correct) in enumerate(zip(documents, expected, strict=True)):
        is_new = frozen[number] in new
        if is_new or recomputation.differs(document, correct):
            changed.append(own[number])
        elif unforced is not None and frozen_keys[number] in unforced:
            continue
        # One that was created here has its values, but not their dates.
        update = recomputation.rewrite(
            {} if is_new else document, correct, incorrect_only=unforced is not None
        )
        operations.append(UpdateOne(by_id(document["_id"]), update))
    if operations:
        yield from bulk_write(entry.collection, operations, ordered=False)
    if changed and derivation(entry).feeds:
        afters = yield from by_ids(entry.collection, present)
        for document, key in zip(documents, frozen, strict=True):
            before = None if key in new else document
            ledger.add(Change(entry.collection, document["_id"], before, afters[key]))
    return changed
