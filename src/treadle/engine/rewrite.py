"""Store recomputed values, inside a transaction: the one way of `repair`, `rebuild` and the worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from pymongo import ReplaceOne, UpdateOne

from treadle.engine.groups import Arranged, arrange
from treadle.engine.pages import by_ids
from treadle.engine.pipelines import derivation
from treadle.engine.recompute import Gather, Recomputation
from treadle.graph.changes import Changes, load_images
from treadle.graph.quarantine import set_aside
from treadle.graph.rule import REVISION
from treadle.graph.scope import Failed
from treadle.plan import Plan, Raw, bulk_write, by_id
from treadle.plan.capabilities import Capabilities
from treadle.plan.decoding import Unreadable
from treadle.query.keys import freeze, freeze_all


def rewrite(
    server: Capabilities,
    recomputation: Recomputation,
    keys: Sequence[Any],
    ledger: Changes,
    *,
    exact: bool = False,
    recall: Callable[[Raw], Raw] | None = None,
    unforced: Collection[Any] | None = None,
    gather: Gather | None = None,
) -> Plan[list[Any]]:
    """Store what the documents of these keys derive, and record the changes. Returns the keys of these.

    With `exact` only documents of the model's very class. `recall` gives a
    document as it was before, where snapshots depend on that. Each document
    is written, so that concurrent writers conflict, and the sources of its
    copies too. With `unforced` no source is written, and the documents of
    these frozen keys only if they are incorrect. `gather` is as in
    `Recomputation.expected`.
    """
    entry = recomputation.entry
    arranged = Arranged([], [])
    if entry.rules.group is not None:
        arranged = yield from arrange(server, entry, keys, ledger)
    new = {freeze(each) for each in arranged.made}
    projection = None if unforced is None else recomputation.projection
    scope = entry.targets.exact if exact else entry.targets
    own_keys = {"_id": {"$in": list(keys)}} if entry.rules.group is None else entry.filter_for_keys(keys)
    failed: Failed = []
    images = yield from scope.find(own_keys, projection=projection, failed=failed)
    if failed:
        # The caller halves its batch until the document is alone, and counts it.
        raise Unreadable(entry.collection, failed)
    documents = [image.document for image in images]
    present, own = [each["_id"] for each in documents], recomputation.keys(documents)
    frozen = freeze_all(present)
    frozen_keys = frozen if entry.rules.group is None else freeze_all(own)
    befores = documents if recall is None else [recall(each) for each in documents]
    # The worker's copies need their sources written too: it finds a copy correct and leaves it, while this
    # transaction still holds an older value for it.
    expected = yield from recomputation.expected(
        server, documents, befores, guarded=unforced is None, frozen=frozen_keys, gather=gather
    )
    operations: list[UpdateOne | ReplaceOne[Raw]] = []
    changed = [*arranged.removed]
    for number, (document, correct) in enumerate(zip(documents, expected, strict=True)):
        for rule, error in recomputation.leave_refused(document, correct):
            yield from set_aside(rule.place.label, entry.collection, own[number], error)
        is_new, outdated = frozen[number] in new, images[number].outdated
        if is_new or recomputation.differs(document, correct):
            changed.append(own[number])
            if outdated:
                operations.append(ReplaceOne(by_id(document["_id"]), document))
        elif unforced is not None and frozen_keys[number] in unforced:
            continue
        elif outdated:
            # Correct as it is; storing the migration is up to `migrate`.
            operations.append(UpdateOne(by_id(document["_id"]), {"$inc": {REVISION: 1}}))
            continue
        # One that was created here has its values, but not their dates.
        update = recomputation.rewrite(
            {} if is_new else document, correct, incorrect_only=unforced is not None
        )
        operations.append(UpdateOne(by_id(document["_id"]), update))
    if operations:
        yield from bulk_write(entry.collection, operations, ordered=entry.versions.may_change)
        ledger.note_upgraded(entry, [each.document["_id"] for each in images if each.outdated])
    if changed and derivation(entry).feeds:
        afters = yield from by_ids(entry.collection, present)
        loaded = yield from load_images(entry, [afters[key] for key in frozen])
        for before, key, after in zip(images, frozen, loaded, strict=True):
            ledger.note(entry, None if key in new else before, after)
    return changed
