"""Recorded writes as an application sends them through the Store, which keeps the pattern right itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bson import ObjectId
from pymongo.database import Database

from treadle.advisor.trials.answers import RESERVED
from treadle.advisor.trials.declared import Patterns
from treadle.advisor.trials.perform import Row
from treadle.advisor.trials.raw_writes import NotTried, Prepared, restore, write
from treadle.advisor.trials.workload_file import Request
from treadle.errors import TreadleError
from treadle.query.names import Unchecked
from treadle.store.blocking.store import Store

Act = Callable[[], Any]


def maintained(store: Store, collection: str) -> frozenset[str]:
    """The fields of a collection that only Treadle writes."""
    paths = [
        path
        for rule in store.graph.rules
        if rule.target.collection == collection
        for path in rule.maintained()
    ]
    return frozenset({RESERVED, *(path.partition(".")[0] for path in paths)})


@dataclass(slots=True)
class StoreWrites:
    """The calls of a Store that take the place of recorded writes."""

    store: Store
    patterns: Patterns
    # The copy without the pattern, on which an upsert shows what it makes.
    plain: Database[Row]

    def act(self, prepared: Prepared) -> Act:
        """The call that does the same."""
        request = prepared.request
        body, model = request.body, self._model(request)
        if request.operation == "insert":
            return self._insert(request)
        condition = Unchecked(body.get("q", body.get("query")) or {})
        if request.operation == "delete" or body.get("remove"):
            many = request.operation == "delete" and body.get("limit", 1) != 1
            call = self.store.delete_many if many else self.store.delete
            return lambda: call(model, condition)
        update = body.get("u", body.get("update"))
        if isinstance(update, Mapping) and not next(iter(update), "").startswith("$"):
            return self._replacement(prepared, update)
        change: Any = update if isinstance(update, list) else Unchecked(update or {})
        if prepared.absent and body.get("upsert"):
            loaded = self._load(request, self._made(prepared))
            if set(condition) == {"_id"}:
                return lambda: self.store.upsert(model, condition, change, loaded.model_copy(deep=True))
            # `upsert` asks for a unique field; by another one, an application looks and then inserts.
            return lambda: (
                self.store.update(model, condition, change) or self.store.insert(loaded.model_copy(deep=True))
            )
        filters = body.get("arrayFilters")
        if body.get("multi"):
            if filters:
                raise NotTried("Store.update_many takes no array filters")
            return lambda: self.store.update_many(model, condition, change)
        return lambda: self.store.update(model, condition, change, array_filters=filters or None)

    def restore(self, prepared: Iterable[Prepared]) -> None:
        """Put the documents back as they must be before these writes, through the Store."""
        for each in prepared:
            model = self._model(each.request)
            collection = self.store.collection(model)
            for key in each.absent:
                self.store.delete(model, Unchecked({"_id": key}))
            kept = maintained(self.store, each.request.collection)
            for document in each.documents:
                present = collection.find_one({"_id": document["_id"]})
                if present is None:
                    self.store.insert(self._load(each.request, document))
                    continue
                sets = {name: value for name, value in document.items() if name not in {"_id", *kept}}
                gone = dict.fromkeys(set(present) - set(document) - kept, "")
                update = {"$set": sets, **({"$unset": gone} if gone else {})}
                self.store.update(model, Unchecked({"_id": document["_id"]}), Unchecked(update))

    def _model(self, request: Request) -> Any:
        model = self.patterns.models.get(request.collection)
        if model is None:
            raise NotTried("no model was made for its collection")
        return model

    def _load(self, request: Request, document: Mapping[str, Any]) -> Any:
        try:
            return self.store.graph.entry(self._model(request)).codec.load(dict(document))
        except (TreadleError, ValueError):
            raise NotTried("the document does not fit the model") from None

    def _insert(self, request: Request) -> Act:
        document = request.body["document"]
        if any(each.source == request.collection for each in self.patterns.readings):
            # A reading of a bucket is one more, under an id of its own.
            reading = self._load(request, {**document, "_id": ObjectId()})
            return lambda: self.store.insert(reading.model_copy(update={"id": ObjectId()}))
        loaded = self._load(request, document)
        return lambda: self.store.insert(loaded.model_copy(deep=True))

    def _replacement(self, prepared: Prepared, document: Mapping[str, Any]) -> Act:
        keys = [*(each["_id"] for each in prepared.documents), *prepared.absent]
        loaded = self._load(prepared.request, {**document, "_id": keys[0]}) if keys else None
        if loaded is None:
            raise NotTried("the copy does not hold what it replaces")
        call = self.store.insert if prepared.absent else self.store.replace
        return lambda: call(loaded.model_copy(deep=True))

    def _made(self, prepared: Prepared) -> Row:
        """The document that an upsert makes."""
        restore(self.plain, [prepared])
        write(self.plain, prepared.request)
        document = self.plain[prepared.request.collection].find_one({"_id": prepared.absent[0]})
        restore(self.plain, [prepared])
        if document is None:
            raise NotTried("the upsert makes no document on the copy")
        return document
