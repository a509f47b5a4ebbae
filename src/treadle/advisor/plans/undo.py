"""A plan taken back: documents, indexes and options are what they would be without it.

What the plan made is named in its row of `treadle.plans`; nothing else is
touched. Every part can be done twice, so an undo that was killed is run again.
The row goes last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pymongo.database import Database
from pymongo.errors import OperationFailure

from treadle.advisor.plans import before, own_state
from treadle.advisor.plans.apply import Tell
from treadle.advisor.plans.folder import ChangePlan, Place
from treadle.advisor.plans.models import load_models
from treadle.advisor.plans.settle import is_followed
from treadle.errors import UsageError
from treadle.graph.outcomes import Progress
from treadle.store.blocking.store import Store

PAGE = 1_000
PASSES_MAX = 100
INDEX_NOT_FOUND = 27
IMAGES = "changeStreamPreAndPostImages"


class Undoing:
    """One plan and one database."""

    def __init__(
        self,
        database: Database[Any],
        plan: ChangePlan,
        *,
        throttle: float | None = None,
        tell: Tell = lambda text: None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        before.require_database(database, plan)
        self.database = database
        self._throttle = throttle
        self._tell = tell
        self._progress = progress
        row = before.row_of(database, plan)
        if row is None:
            raise UsageError(
                f"This plan is not applied to {database.name}, or was undone; there is nothing to undo.",
                code="plan-not-applied",
            )
        self.row = row
        # What was applied, though the folder may have been edited since.
        places = tuple(Place(**each) for each in row["places"])
        self.plan = replace(plan, places=places, models=row["models"])

    def dry_run(self) -> list[str]:
        """Everything that `run` would do; nothing is changed."""
        lines = []
        for collection in self._present():
            documents = self.database[collection].count_documents(self._touched(collection))
            fields = ", ".join(self._fields(collection))
            lines.append(f"remove {fields} from {documents:,} documents of {collection}")
            lines += [f"drop the index {name} of {collection}" for name in self._indexes(collection)]
            lines += [f"change {collection}: {command}" for command in self._commands(collection)]
        return [*lines, *(f"drop the collection {name}" for name in [*self._state(), before.PLANS])]

    def run(self) -> None:
        """Take everything back that the plan made."""
        self._require_no_worker()
        before.mark(self.database, self.plan, state="undoing")
        for collection in self._present():
            self._remove(collection)
            for name in self._indexes(collection):
                self._tell(f"drop the index {name} of {collection}")
                self._drop_index(collection, name)
            for command in self._commands(collection):
                self._tell(f"change {collection}: {command}")
                self.database.command({"collMod": collection, **command})
        own_state.forget(self.database, self.row)
        for name in self._state():
            self._tell(f"drop the collection {name}")
            self.database.drop_collection(name)
        # Last, so that an undo that was killed finds its row again.
        plans = self.database[before.PLANS]
        if plans.count_documents({}, limit=2) > 1:
            plans.delete_one({"_id": self.plan.id})
            return
        self._tell(f"drop the collection {before.PLANS}")
        plans.drop()

    def _present(self) -> list[str]:
        """The collections of the plan that nobody has dropped since."""
        existing = before.options_of(self.database)
        return [name for name in self.row["collections"] if name in existing]

    def _require_no_worker(self) -> None:
        if is_followed(Store(self.database, models=load_models(self.plan.models))):
            raise UsageError(
                "A worker follows the plan's values and would write them again; stop treadle watch first.",
                code="plan-worker-running",
            )

    # -- documents ---------------------------------------------------------------------------

    def _fields(self, collection: str) -> list[str]:
        """What to remove: the plan's fields, and what Treadle keeps for itself."""
        return [*self.plan.fields(collection), before.RESERVED]

    def _touched(self, collection: str) -> dict[str, Any]:
        return {"$or": [{field: {"$exists": True}} for field in self._fields(collection)]}

    def _remove(self, collection: str) -> None:
        """Remove the plan's own fields, page by page, until a pass finds none.

        Programs that replace whole documents may write back what they have read.
        """
        documents = self.database[collection]
        removal = {"$unset": dict.fromkeys(self._fields(collection), "")}
        total = documents.estimated_document_count()
        done = 0
        for _ in range(PASSES_MAX):
            found = 0
            for ids in self._pages(collection):
                began = time.monotonic()
                documents.update_many({"_id": {"$in": ids}}, removal)
                found += len(ids)
                self._report(collection, done + found, total)
                self._rest(len(ids), time.monotonic() - began)
            if not found:
                break
            done += found
        self._tell(f"removed {', '.join(self._fields(collection))} from {done:,} documents of {collection}")

    def _pages(self, collection: str) -> Iterator[list[Any]]:
        with self.database[collection].find(self._touched(collection), {"_id": 1}, batch_size=PAGE) as cursor:
            ids: list[Any] = []
            for each in cursor:
                ids.append(each["_id"])
                if len(ids) == PAGE:
                    yield ids
                    ids = []
            if ids:
                yield ids

    def _report(self, collection: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(Progress(collection, min(done, total), total))

    def _rest(self, documents: int, worked: float) -> None:
        if self._throttle is not None:
            time.sleep(max(0.0, documents / self._throttle - worked))

    # -- indexes, options, state -------------------------------------------------------------------

    def _indexes(self, collection: str) -> list[str]:
        present = before.indexes_of(self.database, collection)
        return [
            each["name"]
            for each in self.row["indexes_made"].get(collection, [])
            if list(each["key"].items()) == list(present.get(each["name"], {}).get("key", {}).items())
        ]

    def _drop_index(self, collection: str, name: str) -> None:
        try:
            self.database[collection].drop_index(name)
        except OperationFailure as error:
            if error.code != INDEX_NOT_FOUND:
                raise

    def _commands(self, collection: str) -> list[dict[str, Any]]:
        """What brings the options of a collection back."""
        former = next(each for each in self.row["before"]["options"] if each["name"] == collection)["options"]
        now = before.options_of(self.database)[collection]["options"]
        if collection in self.row["images_made"] and now.get(IMAGES) != former.get(IMAGES):
            return [{IMAGES: former.get(IMAGES, {"enabled": False})}]
        return []

    def _state(self) -> list[str]:
        """Treadle's own collections that came with the plan."""
        names = set(self.database.list_collection_names()) - set(self.row["before"]["names"])
        return sorted(own_state.made(self.database, names, self.row))
