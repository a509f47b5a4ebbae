"""Naive versions of Treadle, put back one by one: a world of test_pairs.py, or a story, must notice each.

A mutant replaces one piece of Treadle by the mistake that the pattern
literature makes. Mistakes in values are noticed by worlds. Mistakes that
need two sessions, a crash or a lost reply are noticed by stories, which hold
without the mutant. This file knows the insides of Treadle.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError

from tests.patterns.archive.models import COUNTED, NOW, OLD, Sale, Shop, places
from tests.patterns.history.models import Policy, disorder, rows
from tests.upkeep.followed import leading, read
from tests.world.known import allowed, world_named
from tests.world.play import Play
from treadle import Count, Document, ExtendedReference, Id, Max, Store, Subset, Sum
from treadle.engine import alternate_keys, lease, pipelines, propagate, references, salvage, updates
from treadle.engine.lease import LeaseLost
from treadle.errors import TreadleError
from treadle.graph.aggregate import (
    RECOMPUTE,
    BlindUpdate,
    Extreme,
    FirstDocuments,
    NumberAverage,
    NumberSum,
    SourceCount,
)
from treadle.graph.changes import Changes
from treadle.graph.copied_fields import CopiedFields
from treadle.graph.derived import DerivedRule, aggregates_in
from treadle.graph.model_entry import ModelEntry
from treadle.patterns import links
from treadle.patterns.archive import moves
from treadle.patterns.history import rows as history_rows
from treadle.patterns.history.rule import WrittenHistory
from treadle.plan import (
    delete_many,
    find,
    find_one,
    find_one_and_update,
    insert_many,
    outside,
    transact,
    update_many,
    update_one,
)
from treadle.query import attributes
from treadle.query.filters import FilterParser
from treadle.upkeep import apply, events, position, rebuild, stream
from treadle.upkeep.stream import Follower

pytestmark = pytest.mark.all

Patch = pytest.MonkeyPatch

# -- mutants that a world notices -------------------------------------------------------------------------


def copies_are_found_by_their_old_value(patch: Patch) -> None:
    def copy(rule: Any, change: Any, ledger: Any, copies_max: Any) -> Any:
        if rule.path == "owner" and change.before and change.after:
            old, new = change.before.document["name"], change.after.document
            card = {"name": new["name"], "city": new["city"]}
            yield from update_many("items", {"owner.name": old}, {"$set": {"owner": card}})
        return []

    patch.setattr(propagate, "_copy", copy)


def an_average_of_averages(patch: Patch) -> None:
    def blind(self: Any, removed: Any, added: Any) -> Any:
        value = added[0] if added else 0
        mean = {"$divide": [{"$add": [f"${self.path}", value]}, 2]}
        return BlindUpdate({self.path: {"$cond": [{"$eq": [f"${self.path}", None]}, value, mean]}})

    patch.setattr(NumberAverage, "blind", blind)


def an_average_without_its_parts(patch: Patch) -> None:
    """The literature's (average * count + value) / (count + 1), of fields that may be missing."""

    def blind(self: Any, removed: Any, added: Any) -> Any:
        value = (added[0] if added else 0) - (removed[0] if removed else 0)
        count = f"${self.state_path}.count"
        mean = {
            "$divide": [
                {"$add": [{"$multiply": [f"${self.path}", count]}, value]},
                {"$add": [count, 1]},
            ]
        }
        counted = {"$add": [count, len(added) - len(removed)]}
        return BlindUpdate({self.path: mean}, {f"{self.state_path}.count": counted})

    patch.setattr(NumberAverage, "blind", blind)


def cards_are_pushed_without_sorting(patch: Patch) -> None:
    def blind(self: Any, removed: Any, added: Any) -> Any:
        cards = {"$literal": [entry["card"] for entry in added]}
        merged = {"$concatArrays": [{"$ifNull": [f"${self.path}", []]}, cards]}
        return RECOMPUTE if removed else BlindUpdate({self.path: {"$slice": [merged, -self.size]}})

    patch.setattr(FirstDocuments, "blind", blind)


def without_literals(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"$literal"}:
            return value["$literal"]
        return {key: without_literals(item) for key, item in value.items()}
    return [without_literals(each) for each in value] if isinstance(value, list) else value


def copied_text_is_code(patch: Patch) -> None:
    real = CopiedFields._stages
    patch.setattr(CopiedFields, "_stages", lambda *given: without_literals(real(*given)))


def without_literals_in(patch: Patch, aggregate: Any) -> None:
    real = aggregate.blind

    def blind(self: Any, removed: Any, added: Any) -> Any:
        update = real(self, removed, added)
        return update if update is RECOMPUTE else BlindUpdate(*map(without_literals, update))

    patch.setattr(aggregate, "blind", blind)


def embedded_text_is_code(patch: Patch) -> None:
    without_literals_in(patch, FirstDocuments)


def compared_text_is_code(patch: Patch) -> None:
    without_literals_in(patch, Extreme)


def what_leaves_is_not_subtracted(patch: Patch) -> None:
    for kind in (SourceCount, NumberSum):
        real = kind.blind
        patch.setattr(kind, "blind", lambda self, removed, added, real=real: real(self, [], added))


def the_worker_adds_what_is_inserted(patch: Patch) -> None:
    """And looks at nothing else. The token is saved after the effect."""

    def handle(self: Any, batch: Any) -> Any:
        for event in batch:
            if event["operationType"] == "insert" and event["coll"] == "items":
                for item in (yield from find("items", {"_id": event["id"]})):
                    added = {"$inc": {"items": 1, "points": item.get("points") or 0}}
                    yield from update_one("owners", {"_id": item.get("owner_id")}, added)
            elif event["coll"] == stream.BEATS:
                self._beats.add(event["id"])
        self.position = self._ahead
        yield from self._save()
        return len(batch)

    patch.setattr(Follower, "_handle", handle)


def the_worker_watches_sources_only(patch: Patch) -> None:
    patch.setattr(events._Own, "note", lambda *given: None)


def a_deletion_has_no_former_state(patch: Patch) -> None:
    real = events._Gathered.note

    def note(self: Any, event: Any, dirty: Any) -> None:
        if event.kind != "delete":
            real(self, event, dirty)

    patch.setattr(events._Gathered, "note", note)


def history_is_written_beside_the_commit(patch: Patch) -> None:
    patch.setattr(
        WrittenHistory, "record", lambda self, changes, ledger: outside(lambda: self.advance(changes, ledger))
    )


def history_ends_by_another_clock(patch: Patch) -> None:
    patch.setattr(history_rows, "END", {"$literal": dt.datetime(2001, 1, 1, tzinfo=dt.UTC)})


def history_has_one_state_per_commit(patch: Patch) -> None:
    """Not one per document."""
    original = Changes.take_unrecorded
    patch.setattr(Changes, "take_unrecorded", lambda self, rule, model: original(self, rule, model)[:1])


def archived_documents_are_not_counted(patch: Patch) -> None:
    patch.setattr(ModelEntry, "counted_elsewhere", None)


def two_attributes_in_one_element(patch: Patch) -> None:
    original = FilterParser._conditions

    def merged(self: Any, *arguments: Any) -> Any:
        translated = original(self, *arguments)
        together: dict[str, Any] = {}
        for each in translated.get("$and", []):
            together |= each.get("specs", {}).get("$elemMatch", {})
        return {"specs": {"$elemMatch": together}} if len(together) > 2 or "v" in together else translated

    patch.setattr(FilterParser, "_conditions", merged)


def a_removed_attribute_leaves_its_name(patch: Patch) -> None:
    original = attributes._pair_stage

    def pair(operator: str, path: str, name: str, value: Any) -> Any:
        if operator != "$unset":
            return original(operator, path, name, value)
        is_it = {"$eq": ["$$this.k", name]}
        return {
            "$set": {path: {"$map": {"input": f"${path}", "in": {"$cond": [is_it, {"k": name}, "$$this"]}}}}
        }

    patch.setattr(attributes, "_pair_stage", pair)


def links_are_written_at_one_end(patch: Patch) -> None:
    def write(self: Any, *_: Any) -> Any:
        yield from ()

    patch.setattr(links.LinksRule, "_write", write)


def a_deletion_leaves_links(patch: Patch) -> None:
    def record(self: Any, changes: Any, ledger: Any) -> Any:
        if any(change.after is None for change in changes):
            return
        yield from find_one(self.target.collection, {})

    patch.setattr(links.LinksRule, "record", record)


# The mutant, the world, and values of which one at least must be wrong there.
NOTICED_BY_WORLDS: list[tuple[Callable[[Patch], None], str, set[str]]] = [
    (copies_are_found_by_their_old_value, "plain-write", {"owner"}),
    (an_average_of_averages, "plain-write", {"average"}),
    (an_average_without_its_parts, "plain-write", {"average"}),
    (cards_are_pushed_without_sorting, "plain-write", {"top_items"}),
    (copied_text_is_code, "plain-write", {"owner", "lines.name"}),
    (embedded_text_is_code, "plain-write", {"top_items"}),
    (compared_text_is_code, "plain-write", {"first_tag"}),
    (what_leaves_is_not_subtracted, "plain-write", {"items", "points"}),
    (the_worker_adds_what_is_inserted, "plain-stream", {"items", "points"}),
    (the_worker_watches_sources_only, "plain-stream", {"score", "lines.name"}),
    (a_deletion_has_no_former_state, "plain-stream", {"items", "daily"}),
    (history_is_written_beside_the_commit, "item.history-write", {"history"}),
    (history_ends_by_another_clock, "item.history-write", {"history"}),
    (history_has_one_state_per_commit, "item.history-write", {"history"}),
    (archived_documents_are_not_counted, "item.archive-write", {"items", "points"}),
    (two_attributes_in_one_element, "item.attributes-write", {"find item by attributes"}),
    (a_removed_attribute_leaves_its_name, "item.attributes-write", {"find item", "specs"}),
    (links_are_written_at_one_end, "item.links-write", {"links"}),
    (a_deletion_leaves_links, "item.links-write", {"links"}),
]


@pytest.mark.parametrize(
    ("mutate", "label", "values"), NOTICED_BY_WORLDS, ids=[each[0].__name__ for each in NOTICED_BY_WORLDS]
)
def test_a_world_notices(mutate, label, values, database, monkeypatch, caplog):
    caplog.set_level("CRITICAL", "treadle")
    mutate(monkeypatch)
    world = world_named(label)
    play = Play(world, database)
    play.play()
    assert values & (play.failures.keys() - allowed(world).keys()), play.failures.keys()


# -- models of the stories ------------------------------------------------------------------------------------


class Customer(Document, collection="customers"):
    name: str


class Order(Document, collection="orders"):
    customer_id: Id
    customer_name: Annotated[str | None, ExtendedReference(Customer, by="customer_id", field="name")] = None


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    text: str = ""


class ReviewCard(BaseModel):
    rating: int
    text: str


class Product(Document, collection="products"):
    top: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-rating", size=3)] = []


class Best(Document, collection="best"):
    best: Annotated[int | None, Max(Review, "rating", by="product_id")] = None


class Tally(Document, collection="tallies"):
    count: Annotated[int, Count(Review, by="product_id")] = 0


class Visit(Document, collection="visits"):
    site_id: Id
    pages: int = 1


class Site(Document, collection="sites"):
    name: str = ""
    total: Annotated[int, Sum(Visit, "pages", by="site_id", maintain="stream")] = 0


def start(database: Any, *models: type[Document]) -> Store:
    store = Store(database, models)
    store.setup()
    # Two sessions must not conflict over the creation of this collection.
    database["treadle.guards"].insert_one({"_id": "made by the test"})
    return store


def conflicts(work: Callable[[Any], Any], store: Store) -> bool:
    """Whether a write in a second session conflicts with one that is still open."""
    try:
        with store.transaction() as second:
            work(second)
    except OperationFailure as error:
        assert error.has_error_label("TransientTransactionError")
        return True
    return False


# -- stories of two sessions ------------------------------------------------------------------------------------


def story_of_a_retried_insert(database: Any) -> None:
    """The update of an insert, performed again by a retry, changes nothing more."""
    store = start(database, Review, Product)
    product = store.insert(Product())
    review = store.insert(Review(product_id=product.id, rating=5, text="once"))
    (aggregate,) = (each.aggregate for each in aggregates_in(store.graph.entry(Product)))
    stored = {"_id": review.id, "rating": 5, "text": "once"}
    update = aggregate.blind([], [aggregate.contribution(stored)])
    database.products.update_one({"_id": product.id}, [{"$set": update.values}])
    assert ["once"] == [each.text for each in store.get(Product, product.id).top]


def story_of_two_recomputations(database: Any) -> None:
    """Both of the best reviews are deleted at once; neither session may keep the other's value."""
    store = start(database, Review, Best)
    target = store.insert(Best())
    one, other = store.insert_many([Review(product_id=target.id, rating=5) for _ in range(2)])
    with store.transaction() as first:
        store.delete(Review, one.id, session=first)
        again = conflicts(lambda session: store.delete(Review, other.id, session=session), store)
    if again:
        store.delete(Review, other.id)
    assert (0, None) == (store.count(Review), store.get(Best, target.id).best)


def story_of_an_insert_during_a_rename(database: Any) -> None:
    """The order copies the old name while the rename is under way."""
    store = start(database, Customer, Order)
    customer = store.insert(Customer(name="old"))
    with store.transaction() as first:
        store.insert(Order(customer_id=customer.id), session=first)
        rename = {"$set": {"name": "new"}}
        again = conflicts(lambda session: store.update(Customer, customer.id, rename, session=session), store)
    if again:
        store.update(Customer, customer.id, rename)
    assert ["new"] == database.orders.distinct("customer_name")


def story_of_a_target_and_its_source(database: Any) -> None:
    """A review is inserted while its product is being inserted."""
    store = start(database, Review, Tally)
    key = ObjectId()
    with store.transaction() as first:
        store.insert(Tally(id=key), session=first)
        review = Review(product_id=key, rating=4)
        again = conflicts(lambda session: store.insert(review, session=session), store)
    if again:
        store.insert(Review(product_id=key, rating=4))
    assert 1 == store.get(Tally, key).count


def cards_are_pushed_without_a_guard(patch: Patch) -> None:
    def blind(self: Any, removed: Any, added: Any) -> Any:
        cards = {"$literal": [entry["card"] for entry in added]}
        merged = {"$concatArrays": [{"$ifNull": [f"${self.path}", []]}, cards]}
        ordered = {"$sortArray": {"input": merged, "sortBy": self._embedded_sort}}
        return BlindUpdate({self.path: {"$slice": [ordered, self.size]}})

    patch.setattr(FirstDocuments, "blind", blind)


def a_recomputation_writes_nothing(patch: Patch) -> None:
    patch.setattr(pipelines, "BUMP", {})


def a_copy_does_not_write_its_source(patch: Patch) -> None:
    patch.setattr(DerivedRule, "guards_source", property(lambda self: False))


def inserts_write_no_guards(patch: Patch) -> None:
    def guard(collection: str, keys: Any) -> Any:
        yield from ()

    for module in (alternate_keys, references, propagate):
        patch.setattr(module, "guard", guard)


# -- stories of the worker ------------------------------------------------------------------------------------------


class Death(BaseException):
    """The process ends here; nothing after it is done."""


def begun(database: Any) -> tuple[Store, list[Any]]:
    """A store that a worker has looked at, and the ids of three sites."""
    store = Store(database, [Visit, Site])
    store.setup()
    keys = [ObjectId() for _ in range(3)]
    database["sites"].insert_many([{"_id": key, "name": "site", "total": 0} for key in keys])
    store.worker().run_until_idle()
    return store, keys


def totals(database: Any, keys: list[Any]) -> list[int]:
    return [database["sites"].find_one({"_id": key})["total"] for key in keys]


def die_at(collection: str, database: Any) -> None:
    """A worker dies just before it first writes there; the next one reaches the correct sums."""
    store, keys = begun(database)
    database["visits"].insert_one({"site_id": keys[0], "pages": 5})
    with leading(store) as (follower, run):
        real = store.runner._perform

        def perform(command: Any, session: Any) -> Any:
            if getattr(command, "collection", None) == collection and getattr(command, "writes", False):
                raise Death
            return real(command, session)

        store.runner._perform = perform  # type: ignore[method-assign]
        with pytest.raises(Death):
            run(follower._handle(read(follower, run)))
        store.runner.__dict__.pop("_perform")
        run(follower.lease.release())
    store.worker().run_until_idle()
    assert [5, 0, 0] == totals(database, keys)


def story_of_a_death_before_the_effect(database: Any) -> None:
    die_at("sites", database)


def story_of_a_death_after_the_effect(database: Any) -> None:
    die_at(position.COLLECTION, database)


def story_of_a_batch_that_fails(database: Any) -> None:
    """`run_until_idle` loses its connection while it applies what it has read."""
    store, keys = begun(database)
    database["visits"].insert_one({"site_id": keys[0], "pages": 5})
    real, failures = store.runner._perform, iter([True])

    def perform(command: Any, session: Any) -> Any:
        is_write = getattr(command, "collection", None) == "sites" and command.method == "bulk_write"
        if is_write and next(failures, False):
            raise AutoReconnect("the connection is lost")
        return real(command, session)

    store.runner._perform = perform  # type: ignore[method-assign]
    store.worker().run_until_idle()
    assert [5, 0, 0] == totals(database, keys)


def story_of_a_replaced_leader(database: Any) -> None:
    """It slept, another leads, and now it continues with what it had read: it moves no position."""
    store, keys = begun(database)
    with leading(store) as (sleeper, run):
        database["visits"].insert_one({"site_id": keys[0], "pages": 5})
        batch = read(sleeper, run)
        database["treadle.leases"].update_one({}, [{"$set": {"until": "$$NOW"}}])
        with leading(store) as (successor, other):
            database["visits"].insert_one({"site_id": keys[1], "pages": 7})
            other(successor.step(0.5, linger=False))
            other(successor.step(0.5, linger=False))
            before = database["treadle.streams"].find_one()
            with contextlib.suppress(LeaseLost):
                run(sleeper._handle(batch))
            assert before == database["treadle.streams"].find_one()


def story_of_a_fast_clock(database: Any) -> None:
    """The holder has its lease for another minute, whatever the clock of another client says."""
    store = Store(database, [Visit, Site])
    real, take = time.time, store.runner.run
    assert take(lease.Lease("one", 60.0, "holder", lambda owner: False).take())
    try:
        time.time = lambda: real() + 3600.0
        assert not take(lease.Lease("one", 60.0, "other", lambda owner: False).take())
    finally:
        time.time = real


def story_of_a_write_during_a_rebuild(database: Any) -> None:
    """The worker streams from before the scan, not from after it."""
    store = Store(database, [Visit, Site])
    store.setup()
    key = database["sites"].insert_one({"name": "site"}).inserted_id

    def during(progress: Any) -> None:
        database["visits"].insert_one({"site_id": key, "pages": 5})
        database["others"].insert_one({"text": "so that the visit is not the very last event"})

    store.rebuild(Site, progress=during)
    store.worker().run_until_idle()
    assert [5] == totals(database, [key])


def story_of_one_target_that_is_refused(database: Any) -> None:
    """A validator refuses one of three targets; the others are correct."""
    store, keys = begun(database)
    refusing = {"$or": [{"_id": {"$ne": keys[1]}}, {"total": 0}]}
    database.command({"collMod": "sites", "validator": refusing, "validationLevel": "strict"})
    database["visits"].insert_many([{"site_id": key, "pages": 5} for key in keys])
    with contextlib.suppress(Exception):
        store.worker().run_until_idle()
    assert [5, 0, 5] == totals(database, keys)


def the_token_is_saved_first(patch: Patch) -> None:
    real = stream.apply

    def early(graph: Any, server: Any, dirty: Any, fence: Any, finish: Any, **options: Any) -> Any:
        yield from transact(finish)
        return (yield from real(graph, server, dirty, fence, fence, **options))

    patch.setattr(stream, "apply", early)


def events_are_added_and_the_token_saved_last(patch: Patch) -> None:
    def handle(self: Any, batch: Any) -> Any:
        for event in batch:
            if event["operationType"] == "insert" and event["coll"] == "visits":
                (visit,) = yield from find("visits", {"_id": event["id"]})
                yield from update_one("sites", {"_id": visit["site_id"]}, {"$inc": {"total": visit["pages"]}})
            elif event["coll"] == stream.BEATS:
                self._beats.add(event["id"])
        self.position = self._ahead
        yield from self._save()
        return len(batch)

    patch.setattr(Follower, "_handle", handle)


def a_batch_is_done_when_it_is_read(patch: Patch) -> None:
    real = Follower._handle

    def handle(self: Any, batch: Any) -> Any:
        self._beats.update(each["id"] for each in batch if each["coll"] == stream.BEATS)
        return (yield from real(self, batch))

    patch.setattr(Follower, "_handle", handle)


def nothing_is_fenced(patch: Patch) -> None:
    def write(self: Any, update: Any) -> Any:
        yield from update_one(position.COLLECTION, {"_id": self.name}, update)

    patch.setattr(Follower, "_write_if_leading", write)


def leases_go_by_the_clients_clock(patch: Patch) -> None:
    def take(self: lease.Lease) -> Any:
        now = dt.datetime.fromtimestamp(time.time(), dt.UTC)
        until = {"until": now + dt.timedelta(seconds=self.seconds), "owner": self.owner}
        absent = {"$setOnInsert": {"n": 0, "until": now}}
        yield from update_one(lease.COLLECTION, {"_id": self.name}, absent, upsert=True)
        taken = yield from find_one_and_update(
            lease.COLLECTION, {"_id": self.name, "until": {"$lte": now}}, {"$set": until, "$inc": {"n": 1}}
        )
        return None if taken is None else taken["n"]

    patch.setattr(lease.Lease, "_take", take)


def the_stream_begins_after_the_scan(patch: Patch) -> None:
    begin, built = position.begin, position.built

    def late(rules: Any, *rest: Any) -> Any:
        yield from begin(*rest)
        yield from built(rules, *rest)

    def never(*rest: Any) -> Any:
        yield from ()

    patch.setattr(rebuild.position, "begin", never)
    patch.setattr(rebuild.position, "built", late)


def one_document_stops_all(patch: Patch) -> None:
    for module in (apply, stream, salvage):
        patch.setattr(module, "divides", lambda error: False)


# -- stories of history and archive ---------------------------------------------------------------------------------------

RACING: list[Callable[[], Any]] = []


def story_of_a_racing_update_in_history(database: Any) -> None:
    """A concurrent writer conflicts, and its state is recorded as well."""
    store, other = Store(database, [Policy]), Store(database, [Policy])
    store.setup()
    store.insert_many([Policy(id=key) for key in range(3)])
    other.recover()
    original = updates._Update._apply
    RACING[:] = [lambda: other.update(Policy, 1, {"$set": {"holder": "Ben"}})]

    def apply(self: Any, *arguments: Any) -> Any:
        # The documents were read, and are not written yet.
        while RACING:
            RACING.pop()()
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates._Update, "_apply", apply)
        store.update_many(Policy, {}, {"$inc": {"premium": 1}})
    states = [(row["document"]["holder"], row["document"]["premium"]) for row in rows(database, 1)]
    assert [("Ada", 0), ("Ben", 0), ("Ben", 1)] == states
    assert [] == disorder(database, Policy)


def story_of_a_racing_update_in_an_archive(database: Any) -> None:
    store, other = Store(database, COUNTED), Store(database, COUNTED)
    store.setup()
    store.insert(Shop(id=1))
    store.insert_many([Sale(id=key, date=OLD, amount=1) for key in range(4)])
    other.recover()

    def update() -> None:
        if database["sales"].find_one({"_id": 2}) is None:
            other.restore(Sale, 2)
        other.update(Sale, 2, {"$set": {"amount": 50}})

    RACING[:] = [update]
    store.archive(Sale, now=NOW)
    while RACING:
        RACING.pop()()
    assert [1] * 4 == [len(places(database, key)) for key in range(4)]
    assert (4, 53) == (sum(1 for _ in store.find(Sale, archived=True)), store.require(Shop, 1).total)
    assert 50 == store.require(Sale, 2).amount


def history_is_made_from_an_earlier_read(patch: Patch) -> None:
    """`update_many` that makes its states of the documents as it read them first."""
    befores: dict[Any, Any] = {}
    apply, record = updates._Update._apply, WrittenHistory.record

    def noting(self: Any, documents: Any, *rest: Any) -> Any:
        for each in documents:
            befores.setdefault((each["_id"], each["premium"]), each)
        return apply(self, documents, *rest)

    def recording(self: Any, changes: Any, ledger: Any) -> Any:
        outdated = []
        for change in changes:
            image = change.after
            before = befores.get((change.id, image.document["premium"] - 1)) if change.before else None
            if before is not None:
                image = image._replace(document={**before, "premium": image.document["premium"]})
            outdated.append(change._replace(after=image))
        return record(self, outdated, ledger)

    patch.setattr(updates._Update, "_apply", noting)
    patch.setattr(WrittenHistory, "record", recording)


def an_archive_copies_and_then_deletes(patch: Patch) -> None:
    """Without a transaction: an update between the copy and the deletion is lost."""

    def move(rule: Any, chosen: Any, ledger: Any) -> Any:
        documents = yield from outside(lambda: find(rule.target.collection, chosen))
        if documents:
            yield from outside(lambda: insert_many(rule.into, documents))
            while RACING:
                RACING.pop()()
            keys = {"_id": {"$in": [each["_id"] for each in documents]}}
            yield from outside(lambda: delete_many(rule.target.collection, keys))
        return len(documents)

    patch.setattr(moves, "_move", move)


NOTICED_BY_STORIES: list[tuple[Callable[[Patch], None], Callable[[Any], None]]] = [
    (cards_are_pushed_without_a_guard, story_of_a_retried_insert),
    (a_recomputation_writes_nothing, story_of_two_recomputations),
    (a_copy_does_not_write_its_source, story_of_an_insert_during_a_rename),
    (inserts_write_no_guards, story_of_a_target_and_its_source),
    (the_token_is_saved_first, story_of_a_death_before_the_effect),
    (events_are_added_and_the_token_saved_last, story_of_a_death_after_the_effect),
    (a_batch_is_done_when_it_is_read, story_of_a_batch_that_fails),
    (nothing_is_fenced, story_of_a_replaced_leader),
    (leases_go_by_the_clients_clock, story_of_a_fast_clock),
    (the_stream_begins_after_the_scan, story_of_a_write_during_a_rebuild),
    (one_document_stops_all, story_of_one_target_that_is_refused),
    (history_is_made_from_an_earlier_read, story_of_a_racing_update_in_history),
    (an_archive_copies_and_then_deletes, story_of_a_racing_update_in_an_archive),
]


@pytest.mark.parametrize(
    "story", dict.fromkeys(story for _, story in NOTICED_BY_STORIES), ids=lambda each: each.__name__
)
def test_the_story_holds(story, database):
    story(database)


@pytest.mark.parametrize(("mutate", "story"), NOTICED_BY_STORIES, ids=lambda each: each.__name__)
def test_the_story_notices(mutate, story, database, monkeypatch):
    """The assertion at the end of the story fails, not something on the way there."""
    mutate(monkeypatch)
    with pytest.raises(Exception) as raised:
        story(database)
    assert isinstance(raised.value, (AssertionError, PyMongoError, TreadleError))
