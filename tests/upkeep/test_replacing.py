"""A declaration is changed beside the old one: built, proven, swapped, taken back, ended."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel

from tests.upkeep.changed_shop import FIELDS, After, Before, During, Review, given, shown
from treadle import (
    Archive,
    Count,
    DataError,
    DeclarationError,
    Document,
    ExtendedReference,
    Formula,
    Id,
    Insert,
    Replaces,
    UsageError,
)
from treadle.graph.graph import Graph
from treadle.plan.capabilities import Capabilities

RATINGS = [[1, 4, 5], [2], [], [3, 3, 5, 1]]
LABELS = [f"Product.{name}" for name in FIELDS]


def ratings(database: Any, key: Any) -> list[int]:
    return [each["rating"] for each in database["reviews"].find({"product_id": key})]


def check(database: Any, declared: str) -> None:
    """Every product shows what one declaration gives."""
    for each in database["products"].find():
        assert given(ratings(database, each["_id"]), declared) == shown(each)


@pytest.fixture
def keys(run: Any, database: Any) -> list[Any]:
    """The products of a shop whose code knows only the old declarations."""
    store = run.store([Review, Before])
    store.setup()
    products = store.insert_many([Before(name=str(number)) for number in range(len(RATINGS))])
    for each, stars in zip(products, RATINGS, strict=True):
        store.insert_many([Review(product_id=each.id, rating=rating) for rating in stars])
    check(database, "old")
    return [each.id for each in products]


@pytest.mark.quick
def test_a_changed_declaration_is_built_beside_the_old_one_and_swapped(run, database, keys):
    store = run.store([Review, During])
    listed = [str(each) for each in store.setup() if each.what != "create index"]
    assert [f"rebuild needed: {label} (new)" for label in LABELS] == listed
    assert [] == store.setup()
    new = dict.fromkeys((f"{each} (new)" for each in LABELS), "building")
    assert new == {each.rule: each.state for each in store.status().rules if each.rebuild_needed}
    assert len(RATINGS) == store.rebuild(During, shadow=True, swap=False)
    assert {"following"} == {each.state for each in store.status().rules}
    check(database, "old")
    assert ["building"] * 4 == [each.state for each in store.changes()]
    store.rebuild(During, shadow=True)
    check(database, "new")
    assert [] == store.verify()
    assert {"swapped"} == {each.state for each in store.changes()}
    assert "shadow rebuild" in [each.kind for each in store.jobs()]


@pytest.mark.parametrize("swapped", [False, True])
def test_both_declarations_follow_every_write(run, database, keys, swapped):
    store = run.store([Review, During])
    store.setup()
    store.rebuild(During, shadow=True, swap=swapped)
    store.insert(Review(product_id=keys[2], rating=5))
    first = store.find_one(Review, {"product_id": keys[0], "rating": 4})
    store.update(Review, first.id, {"$set": {"rating": 2}})
    store.delete(Review, {"product_id": keys[3], "rating": 5})
    late = store.insert(During(name="late"))
    store.insert(Review(product_id=late.id, rating=1))
    known = During(name="known", id=ObjectId())
    store.insert(Review(product_id=known.id, rating=3))
    store.insert(known)
    store.update(During, keys[0], {"$set": {"name": "another"}})
    store.replace(store.get(During, keys[3]))
    check(database, "new" if swapped else "old")
    assert [] == store.verify()
    if swapped:
        assert len(RATINGS) + 2 == store.undo_rebuild(LABELS[0]) == store.undo_rebuild(LABELS[1])
        store.undo_rebuild(LABELS[2]), store.undo_rebuild(LABELS[3])
        check(database, "old")
    else:
        store.rebuild(During, shadow=True)
        check(database, "new")
    assert [] == store.verify()


def test_verify_and_repair_know_which_of_the_two_a_document_shows(run, database, keys):
    store = run.store([Review, During])
    store.setup()
    store.rebuild(During, shadow=True)
    database["products"].update_one({"_id": keys[0]}, {"$set": {"reviews": 9, "_treadle.shadow.stars": 9}})
    found = {(each.path, each.stored, each.expected) for each in store.verify()}
    assert {("reviews", 9, 2), ("_treadle.shadow.stars", 9, 10)} == found
    assert 1 == store.repair()
    check(database, "new")
    assert [] == store.verify()


def test_a_build_goes_on_where_it_was_interrupted(run, database, keys):
    store = run.store([Review, During])
    store.setup()
    database["products"].update_one(
        {"_id": keys[0]}, {"$set": {f"_treadle.side.{name}": "old" for name in FIELDS}}
    )
    assert len(RATINGS) - 1 == store.rebuild(During, shadow=True)
    # The one that was marked and not built was proven wrong, and mended before the swap.
    check(database, "new")


def test_what_stays_wrong_is_not_swapped(run, database, keys):
    """Somebody's own validator refuses what two of the documents would hold."""
    store = run.store([Review, During])
    store.setup()
    database.command({"collMod": "products", "validator": {"_treadle.shadow.reviews": {"$ne": 0}}})
    with pytest.raises(DataError) as caught:
        store.rebuild(During, shadow=True)
    assert "shadow-wrong" == caught.value.code
    check(database, "old")
    assert set(keys[1:3]) == {each.document_id for each in store.set_aside()}
    database.command({"collMod": "products", "validator": {}})
    store.rebuild(During, shadow=True)
    check(database, "new")


def test_code_with_the_new_declaration_alone_goes_on_after_the_swap(run, database, keys):
    both = run.store([Review, During])
    both.setup()
    both.rebuild(During, shadow=True)
    alone = run.store([Review, After])
    assert [] == alone.setup()
    new = alone.insert(After(name="new"))
    for store in (alone, both):
        store.insert(Review(product_id=new.id, rating=4))
        store.insert(Review(product_id=new.id, rating=2))
        store.insert(Review(product_id=keys[0], rating=3))
        store.insert(Review(product_id=keys[0], rating=1))
        check(database, "new")
    with pytest.raises(UsageError) as caught:
        both.undo_rebuild(LABELS[0])
    assert "undo-too-late" == caught.value.code
    for label in LABELS:
        alone.finish_rebuild(label)
    check(database, "new")
    assert [] == alone.verify()
    assert {"n", "state"} >= set().union(*(each["_treadle"] for each in database["products"].find()))
    both.insert(Review(product_id=new.id, rating=5))
    check(database, "new")
    assert [] == both.verify()
    assert [] == alone.setup() == alone.changes()


def test_former_values_are_kept_for_a_day(run, database, keys):
    store = run.store([Review, During])
    store.setup()
    store.rebuild(During, shadow=True)
    now = datetime.now(UTC)
    assert [] == store.run_due(now + timedelta(hours=23))
    (ran,) = store.run_due(now + timedelta(hours=25))
    assert ("former values", 4 * len(RATINGS)) == (ran.name, ran.removed)
    with pytest.raises(UsageError) as caught:
        store.undo_rebuild(LABELS[0])
    assert "change-unknown" == caught.value.code
    assert 0 == database["products"].count_documents({"_treadle.shadow": {"$exists": True}})
    check(database, "new")


def test_a_build_is_forgotten_before_it_is_swapped(run, database, keys):
    store = run.store([Review, During])
    store.setup()
    store.rebuild(During, shadow=True, swap=False)
    for label in LABELS:
        assert 0 == store.undo_rebuild(label)
    check(database, "old")
    former = run.store([Review, Before])
    assert [] == former.verify()
    assert 0 == database["products"].count_documents({"_treadle.side": {"$exists": True}})


def test_an_empty_collection_shows_the_new_declaration_at_once(run, database):
    store = run.store([Review, During])
    store.setup()
    new = store.insert(During(name="new"))
    store.insert_many([Review(product_id=new.id, rating=each) for each in (1, 5)])
    check(database, "new")
    assert [] == store.verify() == run.store([Review, After]).setup()


def test_nothing_to_replace_is_said(run, database, keys):
    store = run.store([Review, Before])
    with pytest.raises(UsageError) as caught:
        store.rebuild(Before, shadow=True)
    assert "nothing-to-replace" == caught.value.code
    with pytest.raises(UsageError) as caught:
        store.undo_rebuild("Product.nothing")
    assert "change-unknown" == caught.value.code


def refused(field: Any) -> str:
    class Product(Document, collection="products"):
        name: str = ""
        total: Annotated[int | None, *field] = None

    with pytest.raises(DeclarationError) as caught:
        Graph([Review, Product])
    assert "replaces-refused" == caught.value.code
    return str(caught.value)


def test_what_cannot_be_swapped_is_refused_by_name():
    count = Count(Review, by="product_id")
    assert "Product.total is written whole" in refused([Formula("$name"), Replaces(Formula("$_id"))])
    assert "both must be 'write'" in refused(
        [count, Replaces(Count(Review, by="product_id", maintain="stream"))]
    )
    assert "Product.total has Replaces" in refused([Replaces(count)])
    assert "Product.total has Replaces" in refused([count, Replaces("count")])


# -- what follows from a changed field, and fields that the worker maintains -----------------------------


class Vote(Document, collection="votes"):
    shop_id: Id
    stars: int


def shop_of(field: list[Any]) -> list[type[Document]]:
    """A shop whose votes are counted, with what others make of that."""

    class Shop(Document, collection="shops"):
        name: str = ""
        votes: Annotated[int, *field] = 0
        twice: Annotated[int | None, Formula({"$multiply": ["$votes", 2]})] = None

    class ShopCard(BaseModel):
        votes: int

    class Visit(Document, collection="visits"):
        shop_id: Id
        shop: Annotated[ShopCard | None, ExtendedReference(Shop, by="shop_id")] = None

    return [Vote, Shop, Visit]


def test_what_is_made_of_the_field_follows_the_swap(run, database):
    old, new = Count(Vote, by="shop_id"), Count(Vote, by="shop_id", where={"stars": {"$gt": 1}})
    store = run.store(shop_of([old]))
    store.setup()
    _, shop, visit = store.graph.entries
    one = store.insert(shop(name="loom"))
    store.insert_many([Vote(shop_id=one.id, stars=stars) for stars in (1, 2, 3)])
    store.insert(visit(shop_id=one.id))
    store = run.store(shop_of([new, Replaces(old)]))
    store.setup()
    _, shop, _ = store.graph.entries

    def seen() -> Any:
        stored, copy = database["shops"].find_one(), database["visits"].find_one()
        return stored["votes"], stored["twice"], copy["shop"]["votes"]

    assert (3, 6, 3) == seen()
    store.rebuild(shop, shadow=True)
    assert (2, 4, 2) == seen()
    store.insert(Vote(shop_id=one.id, stars=1))
    assert (2, 4, 2) == seen()
    store.insert(Vote(shop_id=one.id, stars=2))
    assert (3, 6, 3) == seen()
    assert 1 == store.undo_rebuild("Shop.votes")
    assert (5, 10, 5) == seen()
    assert [] == store.verify()


def test_the_worker_keeps_both_declarations_right(run, database):
    """Whoever writes: these are votes that Treadle did not write."""
    old = Count(Vote, by="shop_id", maintain="stream")
    new = Count(Vote, by="shop_id", where={"stars": {"$gt": 1}}, maintain="stream")
    key = database["shops"].insert_one({"name": "loom"}).inserted_id

    def vote(*stars: int) -> None:
        database["votes"].insert_many([{"shop_id": key, "stars": each} for each in stars])

    store = run.store(shop_of([old]))
    store.setup()
    vote(1, 2)
    store.worker().run_until_idle()
    store = run.store(shop_of([new, Replaces(old)]))
    store.setup()
    worker = store.worker()
    worker.run_until_idle()
    vote(1, 3)
    worker.run_until_idle()
    assert 4 == database["shops"].find_one()["votes"]
    _, shop, _ = store.graph.entries
    store.rebuild(shop, shadow=True)
    assert 2 == database["shops"].find_one()["votes"]
    vote(1, 3)
    worker.run_until_idle()
    assert 3 == database["shops"].find_one()["votes"]
    assert 1 == store.undo_rebuild("Shop.votes")
    assert 6 == database["shops"].find_one()["votes"]
    assert [] == store.verify()


def test_what_a_rebuild_put_right_is_no_finding_any_more(run, database, keys):
    store = run.store([Review, Before])
    database["products"].update_one({"_id": keys[0]}, {"$set": {"reviews": 9}})
    assert 1 == len(store.verify()) == len(store.findings())
    store.rebuild(Before)
    assert [] == store.findings()


def test_every_way_to_make_a_document_marks_it(run, database, keys):
    store = run.store([Review, During])
    store.setup()
    store.rebuild(During, shadow=True)
    made = [ObjectId() for _ in range(5)]
    store.insert_many([Review(product_id=key, rating=rating) for key in made for rating in (1, 4)])
    store.insert(During(id=made[0]))
    store.insert_many([During(id=made[1])], ordered=False)
    store.bulk([Insert(During(id=made[2])), Insert(Review(product_id=made[2], rating=5))])
    assert store.upsert(During, {"_id": made[3]}, {"$set": {"name": "x"}}, insert=During(id=made[3])).created
    with store.transaction() as session:
        store.insert(During(id=made[4]), session=session)
        store.insert(Review(product_id=made[4], rating=2), session=session)
    marks = {"_treadle.side.reviews": "new", "_treadle.side.best": "new"}
    assert set(made) == {each["_id"] for each in database["products"].find({"_id": {"$in": made}, **marks})}
    check(database, "new")
    assert [] == store.verify()


def test_a_server_without_transactions_is_refused_by_name():
    server = Capabilities(pipeline_updates=True, retryable_writes=True)
    Graph([Review, Before]).check_server(server)
    with pytest.raises(DeclarationError, match=r"Product.reviews \(new\): .* needs transactions") as caught:
        Graph([Review, During]).check_server(server)
    assert "transactions-needed" == caught.value.code


def test_what_comes_back_from_the_archive_shows_what_others_show(run, database):
    old, new = Count(Vote, by="shop_id"), Count(Vote, by="shop_id", where={"stars": {"$gt": 1}})

    def models(field: list[Any]) -> list[type[Document]]:
        archived = Archive(by="closed", after=timedelta(days=1), into="closed_stalls")

        class Stall(Document, collection="stalls", archive=archived):
            closed: datetime | None = None
            votes: Annotated[int, *field] = 0
            twice: Annotated[int | None, Formula({"$multiply": ["$votes", 2]})] = None

        class Sign(Document, collection="signs"):
            stall_id: Id
            votes: Annotated[int | None, ExtendedReference(Stall, by="stall_id", field="votes")] = None

        return [Vote, Stall, Sign]

    def brought_back() -> set[Any]:
        for key in keys:
            store.restore(stall, key)
        assert [] == store.verify()
        stored = {(each["votes"], each["twice"]) for each in database["stalls"].find()}
        return stored | {each["votes"] for each in database["signs"].find()}

    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    store = run.store(models([old]))
    store.setup()
    _, stall, sign = store.graph.entries
    keys = [each.id for each in store.insert_many([stall(closed=long_ago), stall(closed=long_ago)])]
    store.insert_many([Vote(shop_id=key, stars=stars) for key in keys for stars in (1, 2, 3)])
    store.insert_many([sign(stall_id=key) for key in keys])
    store = run.store(models([new, Replaces(old)]))
    store.setup()
    _, stall, _ = store.graph.entries
    # One is archived when it has been built beside, and one before.
    assert 2 == store.archive(stall)
    store.restore(stall, keys[0])
    store.rebuild(stall, shadow=True, swap=False)
    assert "old" == database["stalls"].find_one()["_treadle"]["side"]["votes"]
    assert 1 == store.archive(stall)
    store.insert(stall())
    store.rebuild(stall, shadow=True)
    database["stalls"].delete_many({})
    assert {(2, 4), 2} == brought_back()
    # A document that lost its mark is turned back too.
    database["stalls"].update_one({"_id": keys[1]}, {"$unset": {"_treadle.side": 1}})
    assert 2 == store.undo_rebuild("Stall.votes")
    assert [] == store.verify()
    assert {3} == {each["votes"] for each in database["stalls"].find()}
