"""The one write of counters: amounts are claimed, and added to their documents, in one commit.

A claim makes sure that amounts count once. A batch from memory is claimed by
its number, durable events by deleting them (`durable_buffer.py`), and a
sampled event needs no claim. The number of a writer's last batch is in
`treadle.batches`; a batch of unknown outcome is written again under the same
number. Amounts that cannot be added do not stop the others: they are refused,
and returned to the caller of `flush`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from bson import ObjectId
from pymongo import UpdateOne
from pymongo.errors import DuplicateKeyError, OperationFailure

from treadle.engine.documents import revisions
from treadle.engine.pages import by_ids
from treadle.engine.references import follow_own
from treadle.engine.updates import concerns, may_upgrade
from treadle.engine.version_upgrade import upgrade_possible, upgraded
from treadle.graph.calls import Sums
from treadle.graph.changes import Changes
from treadle.graph.write import Write
from treadle.model.bson_types import to_bson
from treadle.patterns.approximation.counter_field import INT64, CounterField
from treadle.plan import Plan, Raw, bulk_write, find, find_one, find_one_and_update, insert_many, update_one
from treadle.plan.server_errors import (
    BAD_VALUE,
    POISON,
    TYPE_MISMATCH,
    codes_of,
    is_about_one_document,
    is_duplicate,
    is_transient,
    refusals,
    translate,
)
from treadle.query.keys import freeze
from treadle.query.paths import value_at

BATCHES = "treadle.batches"
# Nothing can be added to what the document holds: no number, or the sum would be too large.
REFUSALS = POISON | {TYPE_MISMATCH, BAD_VALUE}


NOTHING: Sums = MappingProxyType({})


class Claim(NamedTuple):
    """What a commit is to add."""

    amounts: Sums
    # Amounts under keys that no document can have.
    refused: Sums = NOTHING
    # Whether the amounts were added before, by an attempt whose reply was lost.
    is_done: bool = False
    # Events that were taken from a durable buffer.
    events: int = 0


class Added(NamedTuple):
    """What a commit has added, and what it could not add."""

    amounts: Sums
    refused: Sums
    events: int


def claim_amounts(amounts: Sums) -> Plan[Claim]:
    """Claim amounts that nothing else can add."""
    yield from ()
    return Claim(amounts)


def claim_batch(amounts: Sums, writer: ObjectId, number: int) -> Plan[Claim]:
    """Claim the batch of a writer by its number, which only grows."""
    update = {"$set": {"n": number}, "$currentDate": {"at": True}}
    before = yield from find_one_and_update(
        BATCHES, {"_id": writer}, update, after=False, upsert=True, projection={"n": 1}
    )
    return Claim(amounts, is_done=before is not None and before["n"] >= number)


def was_added(writer: ObjectId, number: int) -> Plan[bool]:
    """Whether a batch whose outcome is unknown was committed."""
    batch = yield from find_one(BATCHES, {"_id": writer}, {"n": 1})
    return batch is not None and batch["n"] >= number


class AddAmounts(Write[Added]):
    """Add what a claim gives, without the keys that are known to be refused."""

    shows_document = False

    def __init__(
        self, rule: CounterField, claim: Callable[[], Plan[Claim]], refused_keys: Collection[Any] = ()
    ) -> None:
        self.rule = rule
        self.entry = rule.target
        self.claim = claim
        self.refused_keys = refused_keys
        # With `upsert=True` a concurrent writer may insert the same document.
        self.races = rule.declared.upsert
        written = {*(owned.path for owned in rule.owns()), *revisions(self.entry)}
        self._is_followed = concerns(self.entry, written) or may_upgrade(self.entry)
        # What the last attempt tried to add.
        self.amounts: Sums = {}

    def apply(self, changes: Changes) -> Plan[Added]:
        claim = yield from self.claim()
        refused = {key: n for key, n in claim.amounts.items() if key in self.refused_keys}
        self.amounts = {key: n for key, n in claim.amounts.items() if n and key not in refused}
        add = self._find_missing if claim.is_done else partial(self._add, changes)
        missing = (yield from add(self.amounts)) if self.amounts else {}
        everything = self.rule.add_up([missing, claim.refused, refused])
        return Added(self.amounts, everything, claim.events)

    def _add(self, changes: Changes, amounts: Sums) -> Plan[Sums]:
        """Add amounts to their documents. Returns those that have none, or one that cannot be upgraded."""
        rule, entry, befores = self.rule, self.entry, []
        if self._is_followed:
            befores = yield from find(entry.collection, rule.filter_any(amounts))
        stuck: Sums = {}
        if entry.versions.is_versioned:
            stuck = yield from self._upgrade(amounts, changes)
            amounts = {key: n for key, n in amounts.items() if key not in stuck}
        if rule.declared.upsert:
            yield from self._insert_missing(amounts)
        operations = [UpdateOne(rule.filter(key), rule.increment(n)) for key, n in amounts.items()]
        matched, size = 0, rule.limits.counter_chunk
        for start in range(0, len(operations), size):
            chunk = operations[start : start + size]
            matched += (yield from bulk_write(entry.collection, chunk, ordered=False)).matched_count
        yield from self._follow(befores, changes)
        missing = (yield from self._find_missing(amounts)) if matched < len(amounts) else {}
        return {**missing, **stuck}

    def _upgrade(self, amounts: Sums, changes: Changes) -> Plan[Sums]:
        """Store documents in the current version: in an older one the number may have another name.

        Returns the amounts of those that cannot be upgraded.
        """
        keys, failed, size = list(amounts), [], self.rule.limits.upgrade_chunk
        for start in range(0, len(keys), size):
            chosen = self.rule.filter_any(keys[start : start + size])
            outcome = yield from upgrade_possible(self.entry, chosen, changes)
            ids = {freeze(key) for key, _ in outcome.failed}
            failed += [each for each in outcome.given if freeze(each["_id"]) in ids]
        return self.rule.select(amounts, failed)

    def _insert_missing(self, amounts: Sums) -> Plan[None]:
        missing = yield from self._find_missing(amounts)
        if missing:
            documents = [self.rule.new_document(key) for key in missing]
            try:
                yield from insert_many(self.entry.collection, documents)
            except OperationFailure as error:
                if is_duplicate(error):
                    raise translate(error, self.entry.model.__name__) from error
                raise

    def _find_missing(self, amounts: Sums) -> Plan[Sums]:
        """Return the amounts that have no document."""
        rule = self.rule
        documents = yield from find(self.entry.collection, rule.filter_any(amounts), {rule.by_path: 1})
        existing = rule.select(amounts, documents)
        return {key: n for key, n in amounts.items() if key not in existing}

    def _follow(self, befores: Sequence[Raw], changes: Changes) -> Plan[None]:
        """Let formulas and other documents follow the new counts."""
        entry = self.entry
        if not befores:
            return
        afters = yield from by_ids(entry.collection, [each["_id"] for each in befores])
        pairs = [(each, afters[freeze(each["_id"])]) for each in befores if freeze(each["_id"]) in afters]
        # Its own references are the same in another version, whatever their names were.
        own = [(after if entry.versions.is_outdated(before) else before, after) for before, after in pairs]
        finals = yield from follow_own(entry, own)
        yield from changes.add(entry, zip([before for before, _ in pairs], finals, strict=True))


class AddSample(AddAmounts):
    """One event that stands for many."""

    def __init__(self, rule: CounterField, key: Any, n: Any) -> None:
        super().__init__(rule, partial(claim_amounts, {key: n}))
        self._key, self._n = key, n

    def command(self) -> Plan[Added] | None:
        is_plain = not (self._is_followed or self.entry.versions.is_versioned or self.races)
        return self._update() if is_plain else None

    def _update(self) -> Plan[Added]:
        rule, sums = self.rule, {self._key: self._n}
        result = yield from update_one(self.entry.collection, rule.filter(self._key), rule.increment(self._n))
        return Added(sums, {} if result.matched_count else sums, 0)


# -- refusals ----------------------------------------------------------------------------------------


def is_refusal(error: BaseException) -> bool:
    """Whether an error is about a document to which an amount cannot be added, or about the amount."""
    if isinstance(error, OverflowError):
        return True
    if not isinstance(error, OperationFailure) or isinstance(error, DuplicateKeyError):
        return False
    if is_transient(error):
        return False
    return bool(codes_of(error) & REFUSALS) or is_about_one_document(error)


def find_refused(rule: CounterField, amounts: Sums, error: BaseException) -> dict[Any, Any]:
    """Return the amounts that an error is about; none where it is about something else.

    Of amounts beyond 64 bits the driver names none. In a transaction the server names one at a time.
    """
    if isinstance(error, OverflowError):
        return {key: n for key, n in amounts.items() if abs(n) >= INT64}
    if not is_refusal(error):
        return {}
    keys = [_key_of(rule, refusal.get("op") or {}) for refusal in refusals(error)]
    refused = {freeze(key) for key in keys if key is not None}
    return {key: n for key, n in amounts.items() if freeze(to_bson(key, [])) in refused}


def _key_of(rule: CounterField, operation: Raw) -> Any:
    """Return the key of an operation that was refused; None if it is none of ours."""
    if "q" not in operation:
        # The insert of a document, for upsert=True.
        return value_at(operation, rule.by_path)
    update, condition = operation.get("u"), operation["q"].get(rule.by_path)
    is_ours = isinstance(update, dict) and rule.path in update.get("$inc", {})
    return condition.get("$eq") if is_ours and isinstance(condition, dict) else None


# -- reads -------------------------------------------------------------------------------------------


def read_number(rule: CounterField, key: Any) -> Plan[Any]:
    """Return the stored number; None where there is no document."""
    entry = rule.target
    projection = None if entry.versions.is_versioned else {rule.path: 1}
    document = yield from find_one(entry.collection, rule.filter(key), projection)
    if document is None:
        return None
    (document,) = yield from upgraded(entry, [document])
    return rule.load(value_at(document, rule.path))
