"""A pattern that is not part of Treadle gets everything that Treadle's own get."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest

from tests.outside import Outbox, Page, Slug
from tests.support import race
from treadle import Archive, Count, DeclarationError, Document, Id, Store, UsageError, migration
from treadle.graph.aggregate import RECOMPUTE, Accumulator, Aggregate, Operand, State, TargetField, Values
from treadle.graph.derived import DerivedRule, relation_of, target_field
from treadle.graph.owned import Owned
from treadle.graph.rule import Models, Pattern, Place, Rule
from treadle.plan import Plan, is_inside, update_many


def test_slugs_are_unique_among_siblings(run):
    store = run.store([Page])
    store.setup()
    stored = store.insert_many([Page(title="A b"), Page(title="A  B!"), Page(title="a b", section="sport")])
    assert ["a-b", "a-b-2", "a-b"] == [each.slug for each in stored]
    assert "a-b-3" == store.insert(Page(title="A-B")).slug
    assert [] == store.verify()


def test_a_slug_follows_its_title_and_its_section(run):
    store = run.store([Page])
    store.setup()
    first, second = store.insert_many([Page(title="One"), Page(title="Two")])
    assert "one-2" == store.update(Page, second.id, {"$set": {"title": "One"}}).slug
    assert "two" == store.update(Page, second.id, {"$set": {"section": "sport", "title": "Two"}}).slug
    assert 2 == store.update_many(Page, {}, {"$set": {"title": "Same", "section": "news"}})
    assert {"same", "same-2"} == {each.slug for each in store.find(Page)}
    first.title = "Replaced"
    assert "replaced" == store.replace(first).slug
    assert [] == store.verify()


def test_a_slug_that_fits_is_kept_when_something_else_changes(run):
    store = run.store([Page])
    store.setup()
    store.insert(Page(title="One"))
    second = store.insert(Page(title="One"))
    store.delete(Page, {"slug": "one"})
    assert "one-2" == store.update(Page, second.id, {"$set": {"title": "One!"}}).slug


def test_callers_cannot_write_it(run):
    store = run.store([Page])
    store.setup()
    assert "one" == store.insert(Page(title="One", slug="one-99")).slug
    page = store.insert(Page(title="One", slug="mine"))
    assert "one-2" == page.slug
    with pytest.raises(UsageError, match="write those instead") as caught:
        store.update(Page, page.id, {"$set": {"slug": "mine"}})
    assert "field-maintained" == caught.value.code


def test_sixteen_writers_get_sixteen_slugs(database):
    store, other = Store(database, [Page]), Store(database, [Page])
    store.setup()
    race(*[lambda each=each: each.insert(Page(title="Race")) for each in [store, other] * 8])
    assert {"race", *(f"race-{number}" for number in range(2, 17))} == set(database.pages.distinct("slug"))
    assert [] == store.verify()


def test_what_others_wrote_is_found_and_repaired(run, database):
    store = run.store([Page])
    store.setup()
    page = store.insert(Page(title="One"))
    database.pages.update_one({"_id": page.id}, {"$set": {"slug": "wrong"}})
    (finding,) = store.verify()
    assert ("slug", "Page", page.id, "slug", "wrong", "one") == (
        finding.pattern,
        finding.model,
        finding.document_id,
        finding.path,
        finding.stored,
        finding.expected,
    )
    assert 1 == store.repair()
    assert [] == store.verify()


def test_others_can_be_fed_by_it(run):
    class Link(Document, collection="links"):
        title: str
        page: Annotated[str | None, Slug("title")] = None

    class Target(Document, collection="targets"):
        id: str
        links: Annotated[int, Count(Link, by="page")] = 0

    store = run.store([Link, Target])
    store.setup()
    store.insert(Target(id="here"))
    link = store.insert(Link(title="Here"))
    assert 1 == store.get(Target, "here").links
    store.update(Link, link.id, {"$set": {"title": "There"}})
    assert 0 == store.get(Target, "here").links
    assert [] == store.verify()


class FollowedSlug(Slug):
    def bind(self, place: Place, graph: object) -> Rule:
        rule = super().bind(place, graph)
        rule.maintain = "stream"
        return rule


def test_the_worker_maintains_it_for_writers_that_do_not_use_treadle(run, database):
    class Followed(Document, collection="followed"):
        title: str
        slug: Annotated[str | None, FollowedSlug("title")] = None

    store = run.store([Followed])
    store.setup()
    database.followed.insert_many([{"title": "One"}, {"title": "One"}])
    store.worker().run_until_idle()
    assert {"one", "one-2"} == set(database.followed.distinct("slug"))
    database.followed.update_one({"slug": "one"}, {"$set": {"title": "Two"}})
    store.worker().run_until_idle()
    assert {"two", "one-2"} == set(database.followed.distinct("slug"))
    assert [] == store.verify()


def test_setup_makes_its_index(run, database):
    store = run.store([Page])
    store.setup()
    (index,) = [each for each in database.pages.index_information().values() if each.get("unique")]
    assert [("section", 1), ("slug", 1)] == index["key"]


class Event(Document, collection="events"):
    name: str
    document: dict[str, Any]


OUTBOX = Outbox(into=Event, keep=timedelta(days=7))


class Parcel(Document, collection="parcels", discriminator="kind", soft_delete="gone", outbox=OUTBOX):
    address: str
    gone: datetime | None = None
    stops: Annotated[int, Count("Stop", by="parcel_id")] = 0


class Express(Parcel, kind="express"):
    hours: int = 24


class Stop(Document, collection="stops"):
    parcel_id: Id


def names(store: Any) -> list[str]:
    return [each.name for each in store.find(Event, sort="_id")]


def test_an_outbox_has_one_event_per_changed_document_of_a_commit(run):
    store = run.store([Event, Parcel, Express, Stop])
    store.setup()
    parcel = store.insert(Express(address="here"))
    store.update(Parcel, parcel.id, {"$set": {"address": "here"}})
    assert ["Parcel.created"] == names(store)
    store.insert(Stop(parcel_id=parcel.id))
    store.update_many(Parcel, {}, {"$set": {"address": "there"}})
    store.delete(Express, parcel.id)
    store.restore(Express, parcel.id)
    store.delete(Express, parcel.id)
    store.purge(Express, before=datetime.now(UTC) + timedelta(days=1))
    kinds = ["created", "updated", "deleted", "created", "deleted"]
    assert [f"Parcel.{each}" for each in kinds] == names(store)


def test_an_event_is_in_the_commit_of_its_change(database):
    store = Store(database, [Event, Parcel, Express, Stop])
    store.setup()
    with pytest.raises(RuntimeError), store.transaction():
        store.insert(Express(address="never"))
        raise RuntimeError("rolled back")
    assert [] == names(store)


def test_concurrent_writers_leave_one_event_each(database):
    stores = [Store(database, [Event, Parcel, Express, Stop]) for _ in range(2)]
    stores[0].setup()
    parcel = stores[0].insert(Express(address="here"))
    changes = [{"$inc": {"hours": 1}}] * 12
    race(*[lambda at=at: stores[at % 2].update(Express, parcel.id, changes[at]) for at in range(12)])
    assert [*range(24, 37)] == sorted(each["document"]["hours"] for each in database.events.find())


def test_old_events_are_removed_when_it_is_due(run, database):
    store = run.store([Event, Parcel, Express, Stop])
    store.setup()
    store.insert(Express(address="here"))
    assert [] == store.run_due()
    (ran,) = store.run_due(now=datetime.now(UTC) + timedelta(days=8))
    assert ("Parcel remove old events", 1) == (ran.name, ran.written)
    assert 0 == database.events.count_documents({})


def test_events_are_no_source_of_values(database):
    class Total(Document, collection="totals"):
        id: str
        events: Annotated[int, Count(Event, by="name")] = 0

    with pytest.raises(DeclarationError, match="give the events a model of their own"):
        Store(database, [Event, Parcel, Express, Stop, Total])


class Whole(Pattern):
    pattern = "whole"
    keyword = "whole"

    def bind(self, place: Place, graph: object) -> Rule:
        return Noted(place)


class Noted(Rule):
    pattern = "whole"

    def needs_commit(self, batch: Any) -> bool:
        return False

    def before(self, batch: Any, changes: Any) -> Any:
        for raw in batch.new:
            raw["noted"] = True
        yield from ()

    def owns(self) -> Sequence[Owned]:
        return [Owned("noted")]


def test_a_class_keyword_may_be_a_users_own(run, database):
    class Odd(Document, collection="odd", whole=Whole()):
        noted: bool = False

    assert run.store([Odd]).insert(Odd()).noted
    assert True is database.odd.find_one()["noted"]


class Audit(Pattern):
    pattern = "audit"
    keyword = "audit"

    def bind(self, place: Place, graph: object) -> Rule:
        return Strict(place)


class Strict(Rule):
    """Refuses names that begin with `bad`, when documents are stored, and all deletions."""

    pattern = "audit"

    def owns(self) -> Sequence[Owned]:
        return []

    def before(self, batch: Any, changes: Any) -> Any:
        if batch.removed:
            raise RuntimeError("not to be deleted")
        yield from ()

    def after(self, batch: Any, changes: Any) -> Any:
        assert (yield from is_inside()), "not in the commit"
        if any(raw["name"].startswith("bad") for raw in batch.new):
            raise RuntimeError("refused")


class Media(Document, collection="media", discriminator="kind"):
    name: str


class Tape(Media, kind="tape", audit=Audit()): ...


def test_what_is_written_beside_a_document_is_in_its_commit(run, database):
    store = run.store([Media, Tape])
    store.insert(Tape(name="good"))
    with pytest.raises(RuntimeError, match="refused"):
        store.insert(Tape(name="bad"))
    assert ["good"] == database.media.distinct("name")


def test_a_rule_of_a_kind_is_asked_also_when_its_base_is_deleted(run, database):
    store = run.store([Media, Tape])
    tape = store.insert(Tape(name="good"))
    for delete in (
        lambda: store.delete(Tape, tape.id),
        lambda: store.delete(Media, tape.id),
        lambda: store.delete_many(Media, {}),
    ):
        with pytest.raises(RuntimeError, match="not to be deleted"):
            delete()
    assert 1 == database.media.count_documents({})


class Mending(Rule):
    """Sets a field where it is missing, without any proof."""

    pattern = "whole"

    def owns(self) -> Sequence[Owned]:
        return [Owned("mended")]

    def repair(self, keys: Sequence[Any] | None) -> Plan[list[Any]]:
        if keys is None:
            return []
        yield from update_many(self.target.collection, {"_id": {"$in": list(keys)}}, {"$set": {"mended": 1}})
        return list(keys)


class Mended(Pattern):
    pattern = "whole"
    keyword = "whole"

    def bind(self, place: Place, graph: object) -> Rule:
        return Mending(place)


def test_rebuild_asks_a_rule_that_only_mends(run, database):
    class Odd(Document, collection="odd", whole=Mended()):
        mended: int = 0

    store = run.store([Odd])
    database.odd.insert_many([{}, {}])
    assert 2 == store.rebuild()
    assert [1] == database.odd.distinct("mended")


# -- an aggregate of one's own ----------------------------------------------------------------------

START = datetime(2026, 3, 1, tzinfo=UTC)


class Deviation(Aggregate):
    """The standard deviation of integers, by their number, sum and sum of squares."""

    def __init__(self, field: TargetField, path: str) -> None:
        super().__init__(field, Operand(f"${path}", lambda source: source[path], frozenset({path}), path))

    def empty(self) -> State:
        return {"n": 0, "sum": 0, "squares": 0}

    def accumulators(self) -> Mapping[str, Accumulator]:
        value = self.expression()
        terms = {"n": 1, "sum": value, "squares": {"$multiply": [value, value]}}
        return {
            name: Accumulator({"$sum": term}, lambda one, other: one + other) for name, term in terms.items()
        }

    def finish(self, state: State) -> Values:
        if not state["n"]:
            return {self.path: None}
        mean = state["sum"] / state["n"]
        return {self.path: math.sqrt(max(0.0, state["squares"] / state["n"] - mean * mean))}

    def difference(self, state: State, removed: Sequence[Any], added: Sequence[Any]) -> Any:
        return RECOMPUTE


@dataclass(frozen=True)
class StandardDeviation(Pattern):
    pattern = "deviation"

    source: Any
    field: str
    by: str
    maintain: Any = "write"
    every: Any = None

    def bind(self, place: Place, graph: Models) -> Rule:
        relation = relation_of(place, graph, self.source, self.by, None)
        return DerivedRule(place, relation, Deviation(target_field(place), self.field), self)


def models(maintain: str) -> tuple[type[Document], type[Document]]:
    how = {"maintain": maintain, **({"every": timedelta(hours=1)} if maintain == "schedule" else {})}

    class Sample(
        Document,
        collection="samples",
        version=2,
        soft_delete="gone",
        archive=Archive(by="at", after=timedelta(days=30), into="samples_archive"),
    ):
        id: int
        sensor: str
        size: int
        at: datetime
        gone: datetime | None = None

    @migration(Sample, from_version=1)
    def renamed(document: dict[str, Any]) -> dict[str, Any]:
        document["size"] = document.pop("width")
        return document

    class Sensor(Document, collection="sensors"):
        id: str
        spread: Annotated[float | None, StandardDeviation(Sample, "size", by="sensor", **how)] = None

    return Sample, Sensor


@pytest.mark.parametrize("maintain", ["write", "stream", "schedule"])
def test_an_aggregate_of_ones_own_counts_archived_and_outdated_sources(run, database, maintain):
    Sample, Sensor = models(maintain)
    store = run.store([Sample, Sensor])
    store.setup()
    now = [START]

    def check(*sizes: int) -> None:
        if maintain == "stream":
            store.worker().run_until_idle()
        if maintain == "schedule":
            now[0] += timedelta(days=1)
            store.run_due(now=now[0])
        expected = statistics.pstdev(sizes) if sizes else None
        stored = store.get(Sensor, "s").spread
        assert stored is expected is None or math.isclose(expected, stored, abs_tol=1e-9)
        assert [] == store.verify(Sensor)

    store.insert(Sensor(id="s"))
    check()
    old, new = START - timedelta(days=90), START
    sizes = {1: old, 4: old, 9: new, 16: new}
    for number, (size, at) in enumerate(sizes.items()):
        store.insert(Sample(id=number, sensor="s", size=size, at=at))
    check(1, 4, 9, 16)
    store.archive(Sample, now=START)
    assert 2 == database["samples_archive"].count_documents({})
    for collection, key in (("samples", 2), ("samples_archive", 0)):
        row = database[collection].find_one({"_id": key})
        outdated = {**row, "width": row.pop("size"), "schema_version": 1}
        database[collection].replace_one(
            {"_id": key}, {name: outdated[name] for name in outdated if name != "size"}
        )
    store.rebuild(Sensor)
    check(1, 4, 9, 16)
    store.update(Sample, 3, {"$set": {"size": 25}})
    check(1, 4, 9, 25)
    store.delete(Sample, 3)
    check(1, 4, 9)
    store.restore(Sample, 3)
    check(1, 4, 9, 25)
