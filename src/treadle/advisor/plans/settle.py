"""Proof while others write: values that are behind are waited for, values that are wrong are named.

Writers that do not use Treadle go on, so a value may be late when it is
looked at. The worker catches up and the same documents are looked at again.
A value that stays as it was, though the worker has seen everything, is wrong.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from treadle.engine.lease import holder
from treadle.errors import DataError
from treadle.graph.outcomes import Finding
from treadle.model.bson_types import RESERVED
from treadle.query.keys import freeze
from treadle.query.paths import value_at
from treadle.store.blocking.store import Store
from treadle.upkeep.position import NAME
from treadle.upkeep.verify import confirm

ROUNDS_MAX = 30
PAGE = 500
# How long to wait for a worker that leads, and how often to look.
FOLLOWED_SECONDS_MAX = 60.0
FOLLOWED_LOOK_SECONDS = 0.2


def is_followed(store: Store) -> bool:
    """Whether a worker leads just now."""
    return store.runner.run(holder(NAME)) is not None


def catch_up(store: Store) -> int:
    """Apply every change that was made before this call, or let the worker that leads do so; how many."""
    if not any(rule.maintain == "stream" for rule in store.graph.rules):
        return 0
    if not is_followed(store):
        with contextlib.suppress(LeaseBusy):
            return _run(store)
    deadline = time.monotonic() + FOLLOWED_SECONDS_MAX
    while store.worker().lag().events and time.monotonic() < deadline:
        time.sleep(FOLLOWED_LOOK_SECONDS)
    return 0


class LeaseBusy(Exception):
    """`treadle watch` began to lead meanwhile."""


def _run(store: Store) -> int:
    try:
        return int(store.worker().run_until_idle())
    except DataError as error:
        if error.code == "lease-busy":
            raise LeaseBusy from error
        raise


def verified(
    store: Store, *models: type[Any], verify: Callable[[], list[Finding]] | None = None
) -> list[Finding]:
    """The findings of `verify` that remain when the worker has caught up.

    A document that the worker has written since the last look was late, and
    is looked at again.
    """
    catch_up(store)
    findings = verify() if verify is not None else store.verify(*models)
    seen: dict[Any, Any] = {}
    for _ in range(ROUNDS_MAX):
        if not findings:
            return []
        revisions, findings = _look_again(store, findings)
        now = {
            _place(each): (revisions.get(_document(each)), each.stored, each.expected) for each in findings
        }
        if now and all(seen.get(place) == values for place, values in now.items()):
            return findings
        seen = now
        catch_up(store)
    return findings


def _document(finding: Finding) -> Any:
    return finding.model, freeze(finding.document_id)


def _place(finding: Finding) -> Any:
    return *_document(finding), finding.path


def _look_again(store: Store, findings: Sequence[Finding]) -> tuple[dict[Any, Any], list[Finding]]:
    """The revisions of these documents, and what is wrong with them when they are examined after that."""
    by_model: dict[str, list[Any]] = {}
    for each in findings:
        by_model.setdefault(each.model, []).append(each.document_id)
    again: list[Finding] = []
    revisions: dict[Any, Any] = {}
    for model, entry in store.graph.entries.items():
        ids = by_model.get(model.__name__, [])
        for start in range(0, len(ids), PAGE):
            chosen = {"_id": {"$in": ids[start : start + PAGE]}}
            documents = [image.document for image in store.runner.run(entry.targets.exact.find(chosen))]
            for document in documents:
                revisions[model.__name__, freeze(document["_id"])] = value_at(document, f"{RESERVED}.n")
            again += store.runner.run(confirm(store.graph, store._capabilities(), entry, documents))
    return revisions, again
