"""Naive versions of Treadle, put back one by one: a world of test_pairs.py, or a story, must notice each.

A mutant replaces one piece of Treadle by the mistake that the pattern
literature makes. Mistakes in values are noticed by worlds. Mistakes that
need two sessions, a crash or a lost reply are noticed by stories, which hold
without the mutant. This file knows the insides of Treadle.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel
from pymongo.errors import AutoReconnect, PyMongoError

from tests.patterns.archive.models import COUNTED, NOW, OLD, Sale, Shop, places
from tests.patterns.history import test_track as history_writes
from tests.patterns.history.models import Policy, disorder, rows
from tests.test_two_sessions import RACES, race, started
from tests.upkeep.followed import leading, read
from tests.world.known import allowed, world_named
from tests.world.play import Play
from treadle import Count, Document, ExtendedReference, Id, Insert, Store, Subset, Sum, migration
from treadle.engine import copies, guards, lease, pipelines, propagate, references, salvage, updates
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
from treadle.graph.scope import ACTIVE, Scope
from treadle.graph.versions import Upgraded, VersionChain
from treadle.patterns import links
from treadle.patterns.archive.moves import ArchiveMoves
from treadle.patterns.archive.rule import ArchiveRule
from treadle.patterns.history import track as history_track
from treadle.patterns.history.rows import HistoryRows
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

    patch.setattr(propagate, "copy_change", copy)


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
    def record(self: Any, changes: Any, ledger: Any) -> Any:
        return outside(lambda: history_track.record(self, changes, ledger))

    patch.setattr(WrittenHistory, "record", record)


def history_ends_by_another_clock(patch: Patch) -> None:
    wrong = dt.datetime(2001, 1, 1, tzinfo=dt.UTC)
    patch.setattr(history_track, "_latest", lambda at, floor: at if floor is None else wrong)


def history_has_one_state_per_commit(patch: Patch) -> None:
    """Not one per document."""
    original = Changes.take_unrecorded
    patch.setattr(Changes, "take_unrecorded", lambda self, rule, model: original(self, rule, model)[:1])


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


# -- guarantees of the kernel, taken away one at a time ----------------------------------------------------


def without_condition(patch: Patch, name: str) -> None:
    real = Scope.admits

    def admits(self: Any, document: Any) -> bool:
        return real(
            replace(self, conditions=[each for each in self.conditions if each.name != name]), document
        )

    patch.setattr(Scope, "admits", admits)


def deleted_sources_are_counted(patch: Patch) -> None:
    without_condition(patch, ACTIVE)


def a_scope_has_one_collection(patch: Patch) -> None:
    real = ArchiveRule.scope
    patch.setattr(
        ArchiveRule,
        "scope",
        lambda self: real(self)._replace(collections={self.into: frozenset({"everything"})}),
    )


def only_the_first_part_counts(patch: Patch) -> None:
    for kind in (SourceCount, NumberSum):
        patch.setattr(kind, "merge", lambda self, parts: parts[0])


def upgrades_evaluate_no_formulas(patch: Patch) -> None:
    patch.setattr(VersionChain, "upgrade", lambda self, raws: self.convert(raws, self.current))


def conditions_are_evaluated_before_the_upgrade(patch: Patch) -> None:
    real = VersionChain.divide_strictly

    def divide(self: Any, own: Any) -> Any:
        divided = real(self, own)
        return divided and divided._replace(stored=own)

    patch.setattr(VersionChain, "divide_strictly", divide)


def outdated_documents_are_read_as_they_are(patch: Patch) -> None:
    patch.setattr(Scope, "splits", lambda *given: False)


def outdated_targets_are_updated_as_they_are(patch: Patch) -> None:
    def upgrade(entry: Any, condition: Any, changes: Any) -> Any:
        yield from ()
        return Upgraded([], [])

    patch.setattr(propagate, "upgrade_possible", upgrade)


def an_outdated_source_is_subtracted(patch: Patch) -> None:
    """As if each writer of the older version had counted it."""
    real = propagate._collect

    def collect(rule: Any, moves: Any, effects: Any) -> None:
        current = [
            (change._replace(before=change.before and change.before._replace(outdated=False)), old, new)
            for change, old, new in moves
        ]
        real(rule, current, effects)

    patch.setattr(propagate, "_collect", collect)


def nothing_is_lowered(patch: Patch) -> None:
    def lower(changes: Any) -> Any:
        yield from ()

    patch.setattr(propagate, "lower_documents", lower)


def a_maximum_is_never_recomputed(patch: Patch) -> None:
    real = Extreme.blind
    patch.setattr(Extreme, "blind", lambda self, removed, added: real(self, [], added))


def targets_follow_no_targets(patch: Patch) -> None:
    patch.setattr(propagate, "is_followed", lambda *given: False)


def an_entered_target_takes_differences(patch: Patch) -> None:
    """Though its fill has counted what this transaction wrote."""
    patch.setattr(propagate, "_may_have_entered", lambda *given: False)


def history_records_nothing(patch: Patch) -> None:
    def record(self: Any, changes: Any, ledger: Any) -> Any:
        yield from ()

    patch.setattr(WrittenHistory, "record", record)


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
    (deleted_sources_are_counted, "item.soft_delete-write", {"items", "points"}),
    (a_scope_has_one_collection, "item.archive-write", {"items", "points"}),
    (only_the_first_part_counts, "item.archive-write", {"items", "points", "call restore"}),
    (upgrades_evaluate_no_formulas, "item.python_version-write", {"scores", "daily.scores"}),
    (conditions_are_evaluated_before_the_upgrade, "item.pipeline_version-write", {"items", "points"}),
    (outdated_documents_are_read_as_they_are, "item.pipeline_version-write", {"items", "points"}),
    (a_maximum_is_never_recomputed, "plain-write", {"highest", "lowest"}),
    (history_records_nothing, "item.history-write", {"history"}),
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


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    text: str = ""


class ReviewCard(BaseModel):
    rating: int
    text: str


class Product(Document, collection="products"):
    top: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-rating", size=3)] = []


class Visit(Document, collection="visits"):
    site_id: Id
    pages: int = 1


class Site(Document, collection="sites"):
    name: str = ""
    total: Annotated[int, Sum(Visit, "pages", by="site_id", maintain="stream")] = 0


def start(database: Any, *models: type[Document]) -> Store:
    store = Store(database, models)
    store.setup()
    return store


# -- a retry ------------------------------------------------------------------------------------------------------


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


def cards_are_pushed_without_a_guard(patch: Patch) -> None:
    def blind(self: Any, removed: Any, added: Any) -> Any:
        cards = {"$literal": [entry["card"] for entry in added]}
        merged = {"$concatArrays": [{"$ifNull": [f"${self.path}", []]}, cards]}
        ordered = {"$sortArray": {"input": merged, "sortBy": self._embedded_sort}}
        return BlindUpdate({self.path: {"$slice": [ordered, self.size]}})

    patch.setattr(FirstDocuments, "blind", blind)


# -- races -------------------------------------------------------------------------------------------------------------


def targets_are_not_really_written(patch: Patch) -> None:
    patch.setattr(pipelines, "BUMP", {})


def a_copy_does_not_write_its_source(patch: Patch) -> None:
    patch.setattr(references, "_bump", written_nothing)
    patch.setattr(DerivedRule, "guards_source", property(lambda self: False))


def written_nothing(*given: Any) -> Any:
    yield from ()


def no_guard_stands_in_for_a_missing_document(patch: Patch) -> None:
    for module in (guards, references, propagate, copies):
        patch.setattr(module, "guard", written_nothing)


def keys_that_change_have_no_guard(patch: Patch) -> None:
    for module in (propagate, copies):
        patch.setattr(module, "guard", written_nothing)


NOTICED_BY_RACES: list[tuple[Callable[[Patch], None], str]] = [
    (targets_are_not_really_written, "the deletions of two sources with the maximum"),
    (
        targets_are_not_really_written,
        "a source that does not move the maximum, and the deletion of the maximum",
    ),
    (a_copy_does_not_write_its_source, "a copy and the rename of its source"),
    (no_guard_stands_in_for_a_missing_document, "a target and its first source"),
    (no_guard_stands_in_for_a_missing_document, "a copy and the arrival of its source"),
    (keys_that_change_have_no_guard, "an invoice, and the account that takes its code"),
]


@pytest.mark.parametrize(
    ("mutate", "title"), NOTICED_BY_RACES, ids=lambda each: getattr(each, "__name__", each)
)
def test_a_race_notices(mutate, title, database, monkeypatch):
    mutate(monkeypatch)
    documents, works = RACES[title]
    wrong = []
    for order in itertools.permutations(works):
        store = started(database, documents)
        race(store, list(order))
        wrong += store.verify()
    assert wrong


# -- stories of one commit ------------------------------------------------------------------------------------------------


class Player(Document, collection="players", version=2):
    id: int
    team_id: int


migration(Player, from_version=1, up=lambda raw: {"team_id": raw.pop("team"), **raw}).down(
    lambda raw: {"team": raw.pop("team_id"), **raw}
)


class Team(Document, collection="teams", version=2):
    id: int
    players: Annotated[int, Count(Player, by="team_id")] = 0


migration(Team, from_version=1, up=lambda raw: raw).down(lambda raw: raw)


class Badge(Document, collection="badges"):
    id: int
    team_id: int
    size: Annotated[int | None, ExtendedReference(Team, by="team_id", field="players")] = None


def league(database: Any, **options: Any) -> Store:
    store = Store(database, [Player, Team, Badge], **options)
    store.setup()
    return store


def story_of_an_outdated_target(database: Any) -> None:
    """The release that stored it did not count."""
    store = league(database)
    database["players"].insert_many([{"_id": key, "team_id": 1, "schema_version": 2} for key in (1, 2)])
    database["teams"].insert_one({"_id": 1})
    store.insert(Player(id=3, team_id=1))
    assert (3, []) == (store.require(Team, 1).players, store.verify())


def story_of_an_outdated_source(database: Any) -> None:
    """The release that stored it did not count."""
    store = league(database)
    store.insert(Team(id=1))
    database["players"].insert_one({"_id": 1, "team": 1})
    store.update(Player, 1, {"$set": {"team_id": 1}})
    assert (1, []) == (store.require(Team, 1).players, store.verify())


def story_of_a_rolling_deploy(database: Any) -> None:
    store = league(database, write_versions={Player: 1})
    store.insert_many([Team(id=1), Team(id=2)])
    store.insert(Player(id=1, team_id=1))
    store.update(Player, 1, {"$set": {"team_id": 2}})
    assert {"_id": 1, "team": 2, "schema_version": 1} == database["players"].find_one()
    assert ([0, 1], []) == ([store.require(Team, key).players for key in (1, 2)], store.verify())


def story_of_a_copied_count(database: Any) -> None:
    store = league(database)
    store.insert(Team(id=1))
    store.insert(Badge(id=1, team_id=1))
    store.insert(Player(id=1, team_id=1))
    assert (1, []) == (store.require(Badge, 1).size, store.verify())


def story_of_a_target_beside_its_source(database: Any) -> None:
    """In one commit: the target is filled with the source that was inserted before it."""
    store = league(database)
    store.bulk([Insert(Player(id=1, team_id=1)), Insert(Team(id=1))])
    assert (1, []) == (store.require(Team, 1).players, store.verify())


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

        def perform(command: Any, *rest: Any) -> Any:
            if getattr(command, "collection", None) == collection and getattr(command, "writes", False):
                raise Death
            return real(command, *rest)

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

    def perform(command: Any, *rest: Any) -> Any:
        is_write = getattr(command, "collection", None) == "sites" and getattr(command, "writes", False)
        if is_write and next(failures, False):
            raise AutoReconnect("the connection is lost")
        return real(command, *rest)

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


def copies_are_states(patch: Patch) -> None:
    patch.setattr(HistoryRows, "paths_left_out", frozenset[str]())


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

    patch.setattr(ArchiveMoves, "into_archive", move)


NOTICED_BY_STORIES: list[tuple[Callable[[Patch], None], Callable[[Any], None]]] = [
    (cards_are_pushed_without_a_guard, story_of_a_retried_insert),
    (outdated_targets_are_updated_as_they_are, story_of_an_outdated_target),
    (an_outdated_source_is_subtracted, story_of_an_outdated_source),
    (nothing_is_lowered, story_of_a_rolling_deploy),
    (targets_follow_no_targets, story_of_a_copied_count),
    (an_entered_target_takes_differences, story_of_a_target_beside_its_source),
    (the_token_is_saved_first, story_of_a_death_before_the_effect),
    (events_are_added_and_the_token_saved_last, story_of_a_death_after_the_effect),
    (a_batch_is_done_when_it_is_read, story_of_a_batch_that_fails),
    (nothing_is_fenced, story_of_a_replaced_leader),
    (leases_go_by_the_clients_clock, story_of_a_fast_clock),
    (the_stream_begins_after_the_scan, story_of_a_write_during_a_rebuild),
    (one_document_stops_all, story_of_one_target_that_is_refused),
    (copies_are_states, history_writes.test_a_rename_of_a_source_is_no_state_of_its_targets),
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
