"""The literature's naive versions, put back one by one: a named check must fail with each.

A check is a small story that ends in an assertion about stored values. Each
is run twice: with Treadle as it is, where it holds, and with one piece of
Treadle replaced by the naive version, where it must not. So none of them
could pass with the feature removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from bson import ObjectId
from pydantic import BaseModel
from pymongo.errors import OperationFailure

from treadle import Average, Count, Document, ExtendedReference, Id, Max, Store, Subset, Sum
from treadle.engine import fill, named, pipelines, react
from treadle.patterns.computed.aggregates import AverageRule, CountRule, ExtremeRule, SumRule
from treadle.patterns.extended_reference import ReferenceRule
from treadle.patterns.subset import SubsetRule
from treadle.plan import update_many


class Customer(Document, collection="customers"):
    name: str
    email: str = "shared@example.org"


class CustomerCard(BaseModel):
    name: str
    email: str


class Internal(BaseModel):
    card_token: str = "4111-1111"


class Order(Document, collection="orders"):
    customer_id: Id
    customer: Annotated[
        CustomerCard | None, ExtendedReference(Customer, by="customer_id", snapshot=["email"])
    ] = None
    customer_name: Annotated[str | None, ExtendedReference(Customer, by="customer_id", field="name")] = None
    internal: Internal = Internal()


class Review(Document, collection="reviews"):
    product_id: Id
    rating: int
    text: str = ""


class ReviewCard(BaseModel):
    rating: int
    text: str


class Product(Document, collection="products"):
    name: str = "product"
    internal: Internal = Internal()
    average: Annotated[float | None, Average(Review, "rating", by="product_id")] = None
    top: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-rating", size=3)] = []
    last_text: Annotated[str | None, Max(Review, "text", by="product_id")] = None


class Counted(Document, collection="counted"):
    name: str = "counted"
    best: Annotated[int | None, Max(Review, "rating", by="product_id")] = None


class Tally(Document, collection="tallies"):
    name: str = "tally"
    count: Annotated[int, Count(Review, by="product_id")] = 0
    total: Annotated[int, Sum(Review, "rating", by="product_id")] = 0


def start(database: Any, *models: type[Document]) -> Store:
    store = Store(database, models)
    store.setup()
    # Made by hand, so that two sessions do not meet at the creation of a collection.
    database["treadle.guards"].insert_one({"_id": "made by the test"})
    return store


def pushed_aside(work: Callable[[Any], Any], store: Store) -> bool:
    """Whether a write in a second session meets a conflict with one that is still open."""
    try:
        with store.transaction() as second:
            work(second)
    except OperationFailure as error:
        assert error.has_error_label("TransientTransactionError")
        return True
    return False


# -- the checks ---------------------------------------------------------------------------------


def check_namesakes_keep_their_own_names(database: Any) -> None:
    """Two customers share a name; a rename of one does not reach the orders of the other."""
    store = start(database, Customer, Order)
    one, other = store.insert_many([Customer(name="Kim"), Customer(name="Kim")])
    mine, theirs = store.insert_many([Order(customer_id=one.id), Order(customer_id=other.id)])
    store.update(Customer, one.id, {"$set": {"name": "Lee"}})
    found = [store.get(Order, mine.id).customer_name, store.get(Order, theirs.id).customer_name]
    assert ["Lee", "Kim"] == found


def check_copies_end_at_the_last_name(database: Any) -> None:
    """A copy that is wrong already is mended by the next rename."""
    store = start(database, Customer, Order)
    customer = store.insert(Customer(name="Kim"))
    order = store.insert(Order(customer_id=customer.id))
    database.orders.update_one({}, {"$set": {"customer_name": "somebody else wrote this"}})
    store.update(Customer, customer.id, {"$set": {"name": "Lee"}})
    assert "Lee" == store.get(Order, order.id).customer_name


def check_average_is_of_all_ratings(database: Any) -> None:
    """1, 1, 1 and 5 average to 2, whatever the order of inserts, updates and deletes."""
    store = start(database, Review, Product)
    product = store.insert(Product())
    for rating in [1, 1, 1, 5]:
        last = store.insert(Review(product_id=product.id, rating=rating))
    assert 2.0 == store.get(Product, product.id).average
    store.update(Review, last.id, {"$set": {"rating": 3}})
    assert 1.5 == store.get(Product, product.id).average
    store.delete(Review, last.id)
    assert 1.0 == store.get(Product, product.id).average


def check_average_begins_on_an_old_document(database: Any) -> None:
    """A document that lacks the fields gets an average with its first review, not null for ever."""
    store = start(database, Review, Product)
    key = database.products.insert_one({"name": "from before", "internal": {"card_token": "x"}}).inserted_id
    store.insert(Review(product_id=key, rating=4))
    assert 4.0 == database.products.find_one({"_id": key})["average"]


def check_subset_is_the_first_three(database: Any) -> None:
    """A low rating that comes last is not among the best."""
    store = start(database, Review, Product)
    product = store.insert(Product())
    for rating in [5, 3, 4, 1]:
        store.insert(Review(product_id=product.id, rating=rating))
    assert [5, 4, 3] == [each.rating for each in store.get(Product, product.id).top]


def check_subset_takes_a_child_once(database: Any) -> None:
    """The update of an insert, performed again by a retry, changes nothing more."""
    store = start(database, Review, Product)
    product = store.insert(Product())
    review = store.insert(Review(product_id=product.id, rating=5, text="once"))
    rule = next(each for each in store.graph.entry(Product).having(SubsetRule))
    sets, _ = rule.apply([{"_id": review.id, "rating": 5, "text": "once"}])
    database.products.update_one({"_id": product.id}, [{"$set": sets}])
    assert ["once"] == [each.text for each in store.get(Product, product.id).top]


def check_two_recomputations_do_not_pass_each_other(database: Any) -> None:
    """Both of the best reviews are deleted at once; neither session may keep the other's value."""
    store = start(database, Review, Counted)
    counted = store.insert(Counted())
    one, other = store.insert_many([Review(product_id=counted.id, rating=5) for _ in range(2)])
    with store.transaction() as first:
        store.delete(Review, one.id, session=first)
        again = pushed_aside(lambda session: store.delete(Review, other.id, session=session), store)
    if again:
        store.delete(Review, other.id)
    assert (0, None) == (store.count(Review), store.get(Counted, counted.id).best)


def check_an_insert_during_a_rename_is_not_stale(database: Any) -> None:
    """The order copies the old name while the rename is under way."""
    store = start(database, Customer, Order)
    customer = store.insert(Customer(name="old"))
    with store.transaction() as first:
        store.insert(Order(customer_id=customer.id), session=first)
        rename = {"$set": {"name": "new"}}
        again = pushed_aside(
            lambda session: store.update(Customer, customer.id, rename, session=session), store
        )
    if again:
        store.update(Customer, customer.id, rename)
    assert ["new"] == database.orders.distinct("customer_name")


def check_target_and_source_do_not_miss_each_other(database: Any) -> None:
    """A review comes while its product is being inserted."""
    store = start(database, Review, Product, Tally)
    key = ObjectId()
    with store.transaction() as first:
        store.insert(Tally(id=key), session=first)
        again = pushed_aside(
            lambda session: store.insert(Review(product_id=key, rating=4), session=session), store
        )
    if again:
        store.insert(Review(product_id=key, rating=4))
    tally = store.get(Tally, key)
    assert (1, 4) == (tally.count, tally.total)


def check_a_copied_name_is_no_path(database: Any) -> None:
    """A customer who calls himself "$internal.card_token" reads no secret."""
    store = start(database, Customer, Order)
    customer = store.insert(Customer(name="Kim"))
    order = store.insert(Order(customer_id=customer.id))
    store.update(Customer, customer.id, {"$set": {"name": "$internal.card_token"}})
    assert "$internal.card_token" == store.get(Order, order.id).customer.name


def check_an_embedded_text_is_no_path(database: Any) -> None:
    """Nor does a review with such a text."""
    store = start(database, Review, Product)
    product = store.insert(Product())
    store.insert(Review(product_id=product.id, rating=1, text="$internal.card_token"))
    assert ["$internal.card_token"] == [each.text for each in store.get(Product, product.id).top]


def check_a_largest_text_is_no_path(database: Any) -> None:
    """Nor one whose text is the largest."""
    store = start(database, Review, Product)
    product = store.insert(Product())
    store.insert(Review(product_id=product.id, rating=1, text="$internal.card_token"))
    assert "$internal.card_token" == store.get(Product, product.id).last_text


def check_totals_follow_updates_and_moves(database: Any) -> None:
    """An update is a difference, and a move takes from one what it gives to the other."""
    store = start(database, Review, Tally)
    one, other = store.insert_many([Tally(), Tally()])
    review = store.insert(Review(product_id=one.id, rating=4))
    store.update(Review, review.id, {"$set": {"rating": 6}})
    store.update(Review, review.id, {"$set": {"product_id": other.id}})
    found = [store.get(Tally, each.id) for each in (one, other)]
    assert [(0, 0), (1, 6)] == [(each.count, each.total) for each in found]


# -- the naive versions --------------------------------------------------------------------------


def match_copies_by_their_old_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(rule: Any, change: Any, ledger: Any, copies_max: Any) -> Any:
        if rule.path == "customer_name" and change.before and change.after:
            old, new = change.before["name"], change.after["name"]
            yield from update_many(rule.target.collection, {rule.path: old}, {"$set": {rule.path: new}})
        return []

    monkeypatch.setattr(react, "_copy", copy)


def keep_an_average_of_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: Any, difference: Any) -> Any:
        (value,) = difference[0]
        mean = {"$divide": [{"$add": [f"${self.path}", value]}, 2]}
        return {self.path: {"$cond": [{"$eq": [f"${self.path}", None]}, value, mean]}}, {}

    monkeypatch.setattr(AverageRule, "apply", apply)


def keep_an_average_without_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The literature's (average * count + value) / (count + 1), of fields that may be missing."""

    def apply(self: Any, difference: Any) -> Any:
        (value,) = difference[0]
        count = f"${self.state}.count"
        mean = {
            "$divide": [
                {"$add": [{"$multiply": [f"${self.path}", count]}, value]},
                {"$add": [count, 1]},
            ]
        }
        return {self.path: mean}, {f"{self.state}.count": {"$add": [count, difference[1]]}}

    monkeypatch.setattr(AverageRule, "apply", apply)


def push_without_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: Any, difference: Any) -> Any:
        merged = {"$concatArrays": [{"$ifNull": [f"${self.path}", []]}, {"$literal": difference}]}
        return {self.path: {"$slice": [merged, -self.size]}}, {}

    monkeypatch.setattr(SubsetRule, "apply", apply)


def push_without_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: Any, difference: Any) -> Any:
        merged = {"$concatArrays": [{"$ifNull": [f"${self.path}", []]}, {"$literal": difference}]}
        ordered = {"$sortArray": {"input": merged, "sortBy": self.embedded_sort}}
        return {self.path: {"$slice": [ordered, self.size]}}, {}

    monkeypatch.setattr(SubsetRule, "apply", apply)


def recompute_without_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "BUMP", {})


def copy_without_writing_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceRule, "guards_source", property(lambda self: False))


def insert_without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    def guard(collection: str, keys: Any) -> Any:
        yield from ()

    for module in (named, fill, react):
        monkeypatch.setattr(module, "guard", guard)


def without_literals(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"$literal"}:
            return value["$literal"]
        return {key: without_literals(item) for key, item in value.items()}
    return [without_literals(each) for each in value] if isinstance(value, list) else value


def copy_values_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ReferenceRule._plain_update
    monkeypatch.setattr(ReferenceRule, "_plain_update", lambda *given: without_literals(real(*given)))


def embed_values_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SubsetRule.apply
    monkeypatch.setattr(
        SubsetRule, "apply", lambda *given: tuple(without_literals(each) for each in real(*given))
    )


def compare_values_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ExtremeRule.apply
    monkeypatch.setattr(
        ExtremeRule, "apply", lambda *given: tuple(without_literals(each) for each in real(*given))
    )


def count_what_comes_and_forget_what_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (CountRule, SumRule):
        real = kind.difference
        monkeypatch.setattr(
            kind,
            "difference",
            lambda self, removed, added, version, real=real: real(self, [], added, version),
        )


MUTATIONS = [
    (match_copies_by_their_old_value, check_namesakes_keep_their_own_names),
    (match_copies_by_their_old_value, check_copies_end_at_the_last_name),
    (keep_an_average_of_averages, check_average_is_of_all_ratings),
    (keep_an_average_without_its_parts, check_average_begins_on_an_old_document),
    (push_without_sorting, check_subset_is_the_first_three),
    (push_without_a_guard, check_subset_takes_a_child_once),
    (recompute_without_a_write, check_two_recomputations_do_not_pass_each_other),
    (copy_without_writing_the_source, check_an_insert_during_a_rename_is_not_stale),
    (insert_without_guards, check_target_and_source_do_not_miss_each_other),
    (copy_values_as_they_are, check_a_copied_name_is_no_path),
    (embed_values_as_they_are, check_an_embedded_text_is_no_path),
    (compare_values_as_they_are, check_a_largest_text_is_no_path),
    (count_what_comes_and_forget_what_goes, check_totals_follow_updates_and_moves),
]


@pytest.mark.parametrize(
    "check", dict.fromkeys(check for _, check in MUTATIONS), ids=lambda each: each.__name__
)
def test_the_check_holds(check, database):
    """With Treadle as it is."""
    check(database)


@pytest.mark.parametrize(("mutate", "check"), MUTATIONS, ids=lambda each: each.__name__)
def test_the_check_fails_with_the_naive_version(mutate, check, database, monkeypatch):
    """The assertion at the end of the story, and not some accident on the way there."""
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(database)
