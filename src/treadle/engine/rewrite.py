"""Documents rewritten inside a transaction as they should be: the one way of `repair` and of the worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from pymongo import ReplaceOne, UpdateOne

from treadle.engine.groups import Arranged, arrange
from treadle.engine.ledger import Ledger
from treadle.engine.pages import by_ids
from treadle.engine.pipelines import derivation
from treadle.engine.recompute import Gather, Recomputation
from treadle.engine.version_upgrade import lower_documents
from treadle.graph.change import Change
from treadle.graph.pattern import REVISION
from treadle.plan import Plan, Raw, bulk_write, by_id
from treadle.plan.capabilities import Capabilities
from treadle.query.keys import freeze, freeze_all


def rewrite(
    server: Capabilities,
    recomputation: Recomputation,
    keys: Sequence[Any],
    ledger: Ledger,
    *,
    exact: bool = False,
    recall: Callable[[Raw], Raw] | None = None,
    unforced: Collection[Any] | None = None,
    gather: Gather | None = None,
) -> Plan[list[Any]]:
    """Write what the documents of these keys derive, and note what changed; the keys of those documents.

    With `exact` only documents of the model's very class. `recall` gives a
    document as it was before, where that decides about values of a moment.
    Each document is written, so that concurrent writers conflict, and the
    sources of its copies too; with `unforced` no source is, and the documents
    of these frozen keys only if they are wrong. `gather` is as in
    `Recomputation.expected`.
    """
    entry = recomputation.entry
    arranged = Arranged([], [])
    if entry.group is not None:
        arranged = yield from arrange(server, entry, keys, ledger)
    made = {freeze(each) for each in arranged.made}
    projection = None if unforced is None else recomputation.projection
    scope = entry.targets.exact if exact else entry.targets
    own_keys = {"_id": {"$in": list(keys)}} if entry.group is None else entry.at_any(keys)
    images = yield from scope.find(own_keys, projection=projection)
    documents = [image.document for image in images]
    present, own = [each["_id"] for each in documents], recomputation.keys(documents)
    known = freeze_all(present)
    frozen_keys = known if entry.group is None else freeze_all(own)
    old = [key for key, frozen in zip(present, known, strict=True) if frozen not in made]
    yield from ledger.note_before(entry, old)
    befores = documents if recall is None else [recall(each) for each in documents]
    # Sources are written for the worker's copies too: it finds a copy right and leaves it, while this
    # transaction still holds an older value for it.
    expected = yield from recomputation.expected(
        server, documents, befores, guarded=unforced is None, frozen=frozen_keys, gather=gather
    )
    operations: list[UpdateOne | ReplaceOne[Raw]] = []
    changed = [*arranged.removed]
    for number, (document, right) in enumerate(zip(documents, expected, strict=True)):
        sets = recomputation.sets(document, right, wrong=unforced is not None)
        wrong = known[number] in made
        if unforced is None:
            forced, wrong = True, wrong or recomputation.differs(document, right)
        else:
            forced = frozen_keys[number] not in unforced
            wrong = wrong or bool(sets)
            if recomputation.formulas:
                wrong = wrong or recomputation.differs(document, right)
        if wrong:
            changed.append(own[number])
        outdated = images[number].outdated
        if outdated and forced and not wrong:
            # Right as it is; the migration is `migrate`'s to store.
            operations.append(UpdateOne(by_id(document["_id"]), {"$inc": {REVISION: 1}}))
        elif wrong or forced:
            # One that was made here has its values, but not their dates.
            known_as = {} if known[number] in made else document
            if outdated:
                operations.append(ReplaceOne(by_id(document["_id"]), document))
            update = recomputation.rewrite(sets, known_as, right)
            operations.append(UpdateOne(by_id(document["_id"]), update))
    if operations:
        yield from bulk_write(entry.collection, operations, ordered=entry.versions.may_change)
        yield from lower_documents(entry, [each.document["_id"] for each in images if each.outdated])
    if changed and derivation(entry).feeds:
        afters = yield from by_ids(entry.collection, present)
        for image, frozen in zip(images, known, strict=True):
            document, before = image.document, None if frozen in made else image.document
            if image.outdated:
                ledger.outdated.add((entry.collection, frozen))
            ledger.add(Change(entry.collection, document["_id"], before, afters[frozen]))
    return changed
