"""Proof while others write: values that are behind are waited for, values that are wrong are named.

Writers that do not use Treadle go on, so a value may be late when it is
looked at. The worker catches up and the same documents are looked at again.
A value that stays as it was, though the worker has seen everything, is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treadle.engine.lease import holder
from treadle.errors import DataError
from treadle.graph.outcomes import Finding
from treadle.plan import Plan, find
from treadle.query.keys import freeze
from treadle.store.blocking.store import Store
from treadle.upkeep.position import NAME
from treadle.upkeep.verify import confirm

ROUNDS_MAX = 30
PAGE = 500


def is_followed(store: Store) -> bool:
    """Whether a worker leads just now."""
    return store.runner.run(holder(NAME)) is not None


def catch_up(store: Store) -> int:
    """Apply every change that was made before this call; how many there were."""
    if not any(rule.maintain == "stream" for rule in store.graph.rules):
        return 0
    try:
        return int(store.worker().run_until_idle())
    except DataError as error:
        # `treadle watch` leads already, and does this.
        if error.code != "lease-busy":
            raise
        return 0


def verified(
    store: Store, *models: type[Any], verify: Callable[[], list[Finding]] | None = None
) -> list[Finding]:
    """The findings of `verify` that remain when the worker has caught up."""
    catch_up(store)
    findings = verify() if verify is not None else store.verify(*models)
    for _ in range(ROUNDS_MAX):
        if not findings:
            return []
        catch_up(store)
        again = _look_again(store, findings)
        before = {_place(each): each for each in findings}
        if again and all(_same(before.get(_place(each)), each) for each in again):
            return again
        findings = again
    return findings


def _place(finding: Finding) -> Any:
    return finding.model, freeze(finding.document_id), finding.path


def _same(before: Finding | None, now: Finding) -> bool:
    return before is not None and (before.stored, before.expected) == (now.stored, now.expected)


def _look_again(store: Store, findings: Sequence[Finding]) -> list[Finding]:
    """The same documents, examined once more."""
    by_model: dict[str, list[Any]] = {}
    for each in findings:
        by_model.setdefault(each.model, []).append(each.document_id)
    again: list[Finding] = []
    for model, entry in store.graph.entries.items():
        ids = by_model.get(model.__name__, [])
        for start in range(0, len(ids), PAGE):
            again += store.runner.run(_examined(store, entry, ids[start : start + PAGE]))
    return again


def _examined(store: Store, entry: Any, ids: list[Any]) -> Plan[list[Finding]]:
    documents = yield from find(entry.collection, {"_id": {"$in": ids}})
    findings: list[Finding] = []
    for exact, own in entry.by_class(documents):
        findings += yield from confirm(store.graph, store._capabilities(), exact, own)
    return findings
