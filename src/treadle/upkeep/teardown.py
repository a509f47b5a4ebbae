"""What `teardown()` does: the inverse of `setup()`.

It takes back what `setup_record.py` says that setup made, and deletes Treadle's own state of the models. With
`fields=True` it also removes what can be computed again: derived fields, `_treadle`, and the documents of
rollups. It never deletes anything else. What holds the only copy of a user's data (snapshots, overflow pages,
buckets, history rows, archived documents, counts that are not flushed) stays, and is counted.

Each step may be repeated, so a teardown that was killed is run again. The recorded state goes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pymongo.errors import OperationFailure

from treadle.engine.indexes import existing_collections, existing_indexes
from treadle.engine.lease import COLLECTION as LEASES
from treadle.engine.lease import holder
from treadle.errors import UsageError
from treadle.graph.derived import DerivedRule, FormulaRule
from treadle.graph.graph import Graph
from treadle.graph.model_entry import ModelEntry
from treadle.graph.outcomes import Action, Pace, Progress, resting
from treadle.graph.quarantine import SET_ASIDE
from treadle.graph.rule import Rule
from treadle.graph.stored_pages import matching
from treadle.model.bson_types import RESERVED
from treadle.plan import (
    Plan,
    Raw,
    count_documents,
    database_command,
    delete_many,
    find,
    find_one,
    update_many,
)
from treadle.upkeep import closed_windows, findings, fingerprints, jobs, position, setup_record
from treadle.upkeep.change_stream import CONTROLS
from treadle.upkeep.setup_record import IMAGES, STATE_PREFIX, CollectionRecord

INDEX_NOT_FOUND = 27
PAGE = 1_000
# A program that replaces whole documents may write a field back; it is removed again so many times.
PASSES_MAX = 20
# State that may be a user's only copy, or another tool's; it goes only while it is empty.
_KEPT_STATE = ("treadle.buffer.", "treadle.batches", "treadle.plans")
# The server's defaults.
_NO_VALIDATOR: Raw = {"validator": {}, "validationLevel": "strict", "validationAction": "error"}


def teardown(
    graph: Graph, entries: Sequence[ModelEntry], pace: Pace, *, dry_run: bool = False, fields: bool = False
) -> Plan[list[Action]]:
    """Take back what setup made for these models. Returns what was done, or would be.

    Refused while a worker leads that follows one of them.
    """
    work = _Teardown(graph, entries, pace, dry_run)
    known = yield from setup_record.is_known_format()
    if known:
        yield from work.require_no_worker()
        yield from work.lift_validators()
        yield from work.drop_indexes_and_views()
    if fields:
        yield from work.remove_fields(entries if known else [])
    if known:
        yield from work.restore_validators()
        yield from work.count_what_stays(fields)
    yield from work.delete_state(everything=not known)
    return work.actions


class _Teardown:
    def __init__(self, graph: Graph, entries: Sequence[ModelEntry], pace: Pace, dry_run: bool) -> None:
        self.entries = entries
        self.pace = pace
        self.dry_run = dry_run
        self.actions: list[Action] = []
        is_all = len(entries) == len(graph.entries)
        # The collections that patterns keep beside those of the models go with all models.
        self.sides = sorted(graph.sides) if is_all else []
        self.collections = sorted({entry.collection for entry in entries})
        self.rules: list[Rule] = list(dict.fromkeys(rule for entry in entries for rule in entry.rules))
        self._records: list[CollectionRecord] | None = None
        self._lifted: list[CollectionRecord] = []

    def _act(self, action: Action, *commands: Raw) -> Plan[None]:
        """List an action, and perform its commands."""
        self.actions.append(action)
        for command in () if self.dry_run else commands:
            yield from database_command(command)

    def require_no_worker(self) -> Plan[None]:
        if not any(rule.maintain == "stream" for rule in self.rules):
            return
        if (yield from holder(position.NAME)) is not None:
            raise UsageError(
                "A worker follows these models and would write their values again; stop it first",
                code="teardown-worker-running",
            )

    def records(self) -> Plan[list[CollectionRecord]]:
        """What setup recorded about the collections of these models, and about views on them."""
        if self._records is None:
            own = {*self.collections, *self.sides}
            every = yield from setup_record.records()
            self._records = [each for each in every if each.collection in own or each.view_on in own]
        return self._records

    # -- what setup made -----------------------------------------------------------------------

    def lift_validators(self) -> Plan[None]:
        """Remove validators that setup set, unless they were changed since; stop keeping former states."""
        existing = yield from existing_collections()
        for record in (yield from self.records()):
            now = existing.get(record.collection, {}).get("options", {})
            validator = (record.validator or {}).get("validator")
            # One that was changed by hand since is the user's.
            if validator and validator == now.get("validator"):
                self._lifted.append(record)
                action = Action("remove validator", record.collection)
                yield from self._act(action, {"collMod": record.collection, **_NO_VALIDATOR})
            former = record.former_options.get(IMAGES) or {"enabled": False}
            if record.pre_images and now.get(IMAGES) not in (None, former):
                action = Action("stop keeping former states of", record.collection)
                yield from self._act(action, {"collMod": record.collection, IMAGES: former})

    def restore_validators(self) -> Plan[None]:
        for record in self._lifted:
            former = record.former_options
            if former.get("validator"):
                options = {name: former.get(name, default) for name, default in _NO_VALIDATOR.items()}
                action = Action("restore validator", record.collection)
                yield from self._act(action, {"collMod": record.collection, **options})

    def drop_indexes_and_views(self) -> Plan[None]:
        existing = yield from existing_collections()
        for record in (yield from self.records()):
            there = existing.get(record.collection)
            if there is None:
                continue
            if record.view_on is not None:
                if record.before is None and there["type"] == "view":
                    yield from self._act(Action("drop view", record.collection), {"drop": record.collection})
                continue
            present = {each["name"]: each for each in (yield from existing_indexes(record.collection))}
            for index in record.indexes:
                yield from self._drop_index(record.collection, index, present)
            for expiry in record.expiries:
                yield from self._restore_expiry(record.collection, expiry, present)

    def _drop_index(self, collection: str, index: Raw, present: dict[str, Raw]) -> Plan[None]:
        """Drop an index that setup made, unless one with other keys has its name by now."""
        name = index["name"]
        keys = [[path, kind] for path, kind in present.get(name, {}).get("key", {}).items()]
        is_text = any(kind == "text" for _, kind in index["key"])
        if name not in present or (keys != index["key"] and not is_text):
            return
        self.actions.append(Action("drop index", collection, name))
        if not self.dry_run:
            try:
                yield from database_command({"dropIndexes": collection, "index": name})
            except OperationFailure as error:
                if error.code != INDEX_NOT_FOUND:
                    raise

    def _restore_expiry(self, collection: str, expiry: Raw, present: dict[str, Raw]) -> Plan[None]:
        name, seconds = expiry["name"], expiry["seconds"]
        if seconds is None or present.get(name, {}).get("expireAfterSeconds") in (None, seconds):
            return
        action = Action("restore index", collection, f"{name} expires after {seconds} s")
        change = {"name": name, "expireAfterSeconds": seconds}
        yield from self._act(action, {"collMod": collection, "index": change})

    # -- documents -----------------------------------------------------------------------------

    def remove_fields(self, entries: Iterable[ModelEntry]) -> Plan[None]:
        """Remove what can be computed again from the documents; without entries, `_treadle` alone."""
        paths: dict[str, set[str]] = {each: {RESERVED} for each in self.collections}
        for entry in entries:
            if entry.layout is None:
                paths[entry.collection] |= {path for rule in entry.rules for path in derived_paths(rule)}
            else:
                paths[entry.collection].clear()
        rollups = {entry.collection for entry in entries if entry.rules.group is not None}
        for collection, own in paths.items():
            if collection in rollups:
                yield from self._remove_rollup(collection)
            elif own:
                yield from self._remove_paths(collection, sorted(own))

    def _remove_paths(self, collection: str, paths: list[str]) -> Plan[None]:
        holding: Raw = {"$or": [{path: {"$exists": True}} for path in paths]}
        total = yield from count_documents(collection, holding)
        if not total:
            return
        self.actions.append(
            Action("remove fields of", collection, f"{total:,} documents: {', '.join(paths)}")
        )
        if self.dry_run:
            return
        for _ in range(PASSES_MAX):
            if not (yield from self._pass(collection, holding, paths, total)):
                return
        left = yield from count_documents(collection, holding)
        if left:
            detail = f"{left:,} documents hold removed fields again; another program writes them"
            self.actions.append(Action("keep", collection, detail))

    def _pass(self, collection: str, holding: Raw, paths: list[str], total: int) -> Plan[int]:
        """Go once through the documents that hold one of these fields. Returns their number."""
        done, last = 0, None
        while True:
            page = yield from matching(collection, holding, last, self.pace.sized(PAGE), {"_id": 1})
            if not page:
                return done
            ids = [each["_id"] for each in page]
            # A stage, unlike an update operator, also reaches fields inside arrays.
            yield from update_many(collection, {"_id": {"$in": ids}}, [{"$unset": paths}])
            done, last = done + len(ids), [ids[-1]]
            self.pace(Progress(collection, min(done, total), max(total, done)))
            yield from resting(self.pace, len(ids), last)

    def _remove_rollup(self, collection: str) -> Plan[None]:
        """Delete the documents that the rule of a rollup made, and the collection once it is empty."""
        made = {RESERVED: {"$exists": True}}
        number = yield from count_documents(collection, made)
        others = yield from find_one(collection, {RESERVED: {"$exists": False}}, {"_id": 1})
        if number:
            self.actions.append(Action("delete computed documents of", collection, f"{number:,} documents"))
        if not self.dry_run:
            yield from delete_many(collection, made)
        if number and others is None:
            yield from self._act(Action("drop collection", collection), {"drop": collection})

    def count_what_stays(self, fields: bool) -> Plan[None]:
        """Count the documents that teardown leaves although they are not stored as the model's own."""
        own = [entry.collection for entry in self.entries if entry.layout is not None]
        for collection in sorted({*self.sides, *own}):
            number = yield from count_documents(collection, {})
            if number:
                detail = f"{number:,} documents hold the only copy of their data"
                self.actions.append(Action("keep", collection, detail))
        copies = [rule for rule in self.rules if isinstance(rule, DerivedRule) and rule.is_copy]
        for rule in copies if fields else ():
            if rule.copied.snapshots:
                detail = f"{rule.path} is a snapshot, and cannot be computed again"
                self.actions.append(Action("keep", rule.target.collection, detail))

    # -- Treadle's own state -------------------------------------------------------------------

    def delete_state(self, *, everything: bool) -> Plan[None]:
        """Delete the state of these models; if there is no other, drop the collections of Treadle's state."""
        existing = yield from existing_collections()
        state = sorted(name for name in existing if name.startswith(STATE_PREFIX))
        is_alone = everything or not (yield from self._has_others())
        if not is_alone and not self.dry_run:
            yield from self._delete_rows()
            yield from self._drop_empty(state)
        for name in state if is_alone else ():
            kept = name.startswith(_KEPT_STATE) and not everything
            if kept and (yield from find_one(name, {}, {"_id": 1})) is not None:
                number = yield from count_documents(name, {})
                if name != "treadle.plans":
                    self.actions.append(Action("keep", name, f"{number:,} documents"))
                continue
            if name != fingerprints.COLLECTION:
                yield from self._act(Action("drop collection", name), {"drop": name})
        if is_alone and fingerprints.COLLECTION in state:
            action = Action("drop collection", fingerprints.COLLECTION)
            yield from self._act(action, {"drop": fingerprints.COLLECTION})

    def _drop_empty(self, state: Iterable[str]) -> Plan[None]:
        """Drop the collections of state that are empty now; setup makes them again where it must."""
        for name in state:
            if (yield from find_one(name, {}, {"_id": 1})) is None:
                yield from database_command({"drop": name})

    def _own_rows(self) -> list[str]:
        """The rows of `treadle.setup` that are about these models."""
        collections = {*self.collections, *self.sides, *(each.collection for each in self._records or ())}
        return [
            *(rule.place.label for rule in self.rules),
            *(fingerprints.validator_of(each) for each in collections),
            *(setup_record.row_name(each) for each in collections),
        ]

    def _has_others(self) -> Plan[bool]:
        """Whether other models have state in this database."""
        others = {"_id": {"$nin": [*self._own_rows(), setup_record.FORMAT]}}
        if (yield from find_one(fingerprints.COLLECTION, others, {"_id": 1})) is not None:
            return True
        signatures = {position.signature(rule) for rule in self.rules}
        rows = yield from find(position.COLLECTION, {}, {"rules": 1})
        return any(set(row.get("rules", ())) - signatures for row in rows)

    def _delete_rows(self) -> Plan[None]:
        labels = [rule.place.label for rule in self.rules]
        names = [entry.model.__name__ for entry in self.entries]
        about = [{"_id.rule": {"$in": labels + names}}, {"_id.collection": {"$in": self.collections}}]
        signatures = [position.signature(rule) for rule in self.rules]
        pulled = {"$pull": {"rules": {"$in": signatures}, "owed": {"$in": self.collections}}}
        yield from update_many(position.COLLECTION, {}, pulled)
        if not (yield from count_documents(position.COLLECTION, {"rules.0": {"$exists": True}})):
            yield from delete_many(position.COLLECTION, {"_id": position.NAME})
            yield from delete_many(LEASES, {"_id": position.NAME})
        yield from delete_many(CONTROLS, {"_id": {"$in": labels}})
        yield from delete_many(SET_ASIDE, {"$or": about})
        yield from delete_many(findings.COLLECTION, {"_id.model": {"$in": names}})
        yield from delete_many(findings.VERIFICATIONS, {"_id": {"$in": names}})
        yield from delete_many(closed_windows.COLLECTION, {"_id": {"$in": names}})
        of_these = {"models.0": {"$exists": True}, "models": {"$not": {"$elemMatch": {"$nin": names}}}}
        yield from delete_many(jobs.COLLECTION, of_these)
        yield from delete_many(fingerprints.COLLECTION, {"_id": {"$in": self._own_rows()}})


def derived_paths(rule: Rule) -> list[str]:
    """The stored paths of a rule that can be computed again; a snapshot cannot."""
    if isinstance(rule, FormulaRule):
        return [owned.path for owned in rule.owns()]
    if not isinstance(rule, DerivedRule):
        return []
    if rule.is_copy and rule.copied.snapshots:
        synced = rule.copied.synced
        return [f"{rule.path}.{each.card}" for each in synced] if rule.copied.is_card else []
    return [owned.path for owned in rule.owns()]
