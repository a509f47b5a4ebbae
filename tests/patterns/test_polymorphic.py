"""Polymorphic: several kinds in one collection, each read, written, indexed and maintained as its own."""

from __future__ import annotations

import enum
import threading
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from bson import ObjectId
from pydantic import BaseModel, ConfigDict, Field
from pymongo import IndexModel, MongoClient

from treadle import (
    Average,
    Count,
    DataError,
    DeclarationError,
    Document,
    ExtendedReference,
    Formula,
    Id,
    Indexed,
    Store,
    Subset,
    Sum,
    UsageError,
)
from treadle.server.local import start


class Item(Document, collection="items", discriminator="type"):
    title: Annotated[str, Indexed(text=3)]
    price: Decimal = Decimal(0)


class Media(Item):
    """Abstract: it has no kind of its own."""

    author: str = "unknown"


class Book(Media, kind="book"):
    isbn: Annotated[str | None, Indexed(unique=True)] = None
    pages: Annotated[int, Indexed()] = 0


class Comic(Book, kind="comic"):
    colours: set[str] = set()


class Electronics(Item, kind="electronics"):
    brand: Annotated[str, Indexed(text=True)]
    code: Annotated[str | None, Indexed(unique=True)] = None


class Voucher(Item, kind="voucher"):
    code: Annotated[str | None, Indexed(unique=True)] = None


MODELS = [Item, Media, Book, Comic, Electronics, Voucher]


def stocked(run: Any) -> tuple[Any, list[Any]]:
    store = run.store(MODELS)
    store.setup()
    documents = [
        Book(title="Dune", isbn="1", pages=412),
        Comic(title="Asterix", isbn="2", colours={"red", "blue"}),
        Electronics(title="Mouse", brand="Click", price=Decimal("9.90")),
        Voucher(title="Ten off"),
    ]
    return store, store.insert_many(documents)


# -- reading ----------------------------------------------------------------------------------


def test_each_document_is_read_as_its_own_class(run):
    store, documents = stocked(run)
    assert documents == list(store.find(Item, sort="_id"))
    assert documents == [store.get(Item, each.id) for each in documents]
    assert [Book, Comic] == [type(each) for each in store.find(Media, sort="_id")]
    assert [Book, Comic] == [type(each) for each in store.find(Book, sort="_id")]
    assert [Comic] == [type(each) for each in store.find(Comic)]
    assert [4, 2, 2, 1, 1] == [store.count(each) for each in (Item, Media, Book, Comic, Electronics)]


def test_the_kind_is_stored_under_the_discriminator(run, database):
    _, documents = stocked(run)
    raw = database["items"].find_one({"_id": documents[1].id})
    assert ["_id", "type"] == list(raw)[:2]
    assert "comic" == raw["type"]


def test_a_kind_does_not_find_documents_of_another(run):
    store, (book, _, mouse, _) = stocked(run)
    assert store.get(Electronics, book.id) is None
    assert store.get(Media, mouse.id) is None
    assert store.find_one(Electronics, {"title": "Dune"}) is None
    assert book == store.find_one(Book, {"title": "Dune", "type": "book"})
    assert store.find_one(Electronics, {"type": "book"}) is None
    assert 0 == store.count(Electronics, {"$or": [{"type": "book"}, {"type": "comic"}]})


def test_the_base_is_known_even_if_only_kinds_were_given(run):
    store = run.store([Book, Electronics])
    store.insert(Book(title="Dune"))
    assert ["Dune"] == [each.title for each in store.find(Item)]


@pytest.mark.parametrize("kind", ["spaceship", None, [1], {"a": 1}, True])
def test_an_unknown_kind_is_an_error_that_names_it(run, database, kind):
    identity = database["items"].insert_one({"type": kind, "title": "x"}).inserted_id
    store = run.store([Item, Book])
    for read in (lambda: store.get(Item, identity), lambda: list(store.find(Item))):
        with pytest.raises(DataError) as caught:
            read()
        assert "kind-unknown" == caught.value.code
        assert repr(kind) in str(caught.value)
        assert repr(identity) in str(caught.value)


def test_a_kind_is_never_taken_for_something_to_import(run, database):
    database["items"].insert_one({"type": "os.system", "title": "x"})
    with pytest.raises(DataError, match=r"os\.system"):
        run.store([Item, Book]).find_one(Item)


def test_an_unknown_kind_is_the_base_with_the_rest_kept_by_choice(run, database):
    class Open(Document, collection="open", discriminator="type", unknown_kinds="base"):
        title: str

    class Known(Open, kind="known"):
        extra: int = 0

    database["open"].insert_one({"type": "ship", "title": "Argo", "oars": 50})
    store = run.store([Open, Known])
    found = store.find_one(Open)
    assert isinstance(found, Open)
    assert ("Argo", {"type": "ship", "oars": 50}) == (found.title, found.__pydantic_extra__)
    with pytest.raises(UsageError):
        store.replace(found)


# -- writing ------------------------------------------------------------------------------------


def test_an_abstract_model_cannot_be_stored(run, database):
    store = run.store(MODELS)
    for document in (Item(title="x"), Media(title="x")):
        with pytest.raises(UsageError) as caught:
            store.insert(document)
        assert "kind-missing" == caught.value.code
    with pytest.raises(UsageError):
        store.insert_many([Book(title="x"), Media(title="y")])
    assert 0 == database["items"].count_documents({})


def test_a_base_with_a_kind_is_concrete(run):
    class Animal(Document, collection="animals", discriminator="species", kind="animal"):
        name: str

    class Dog(Animal, kind="dog"):
        tricks: int = 0

    store = run.store([Animal, Dog])
    both = store.insert_many([Animal(name="a"), Dog(name="b")])
    assert both == list(store.find(Animal, sort="_id"))
    assert [both[1]] == list(store.find(Dog))


def test_writes_on_a_kind_do_not_reach_another(run, database):
    store, (book, _, mouse, _) = stocked(run)
    before = database["items"].find_one({"_id": book.id})
    assert store.update(Electronics, book.id, {"$set": {"price": Decimal(1)}}) is None
    assert store.update(Electronics, {"title": "Dune"}, {"$set": {"price": Decimal(1)}}) is None
    assert 0 == store.update_many(Electronics, {"type": "book"}, {"$set": {"title": "x"}})
    assert store.delete(Electronics, book.id) is None
    assert 0 == store.delete_many(Electronics, {"title": "Dune"})
    with pytest.raises(DataError) as caught:
        store.replace(Electronics(id=book.id, title="x", brand="y"))
    assert "document-gone" == caught.value.code
    assert before == database["items"].find_one({"_id": book.id})
    assert 1 == store.delete_many(Electronics, {})
    assert store.get(Item, mouse.id) is None
    assert 3 == store.count(Item)


def test_a_subclass_is_no_substitute_in_replace(run):
    """A comic is found as a book, but a book written over it would lose what makes it a comic."""
    store, (_, comic, _, _) = stocked(run)
    with pytest.raises(DataError):
        store.replace(Book(id=comic.id, title="x"))
    assert comic == store.get(Item, comic.id)


@pytest.mark.parametrize(
    "update",
    [
        {"$set": {"type": "electronics"}},
        {"$unset": {"type": ""}},
        {"$rename": {"title": "type"}},
        {"$rename": {"type": "title"}},
        [{"$set": {"type": "x"}}],
        [{"$replaceWith": {"_id": "$_id", "type": "comic"}}],
    ],
)
def test_an_update_cannot_change_the_kind(run, update):
    store, (book, *_) = stocked(run)
    for call in (store.update, store.update_many):
        for model in (Item, Book):
            with pytest.raises(UsageError) as caught:
                call(model, {"_id": book.id}, update)
            assert "field-maintained" == caught.value.code
    assert book == store.get(Item, book.id)


def test_the_kind_changes_by_an_explicit_call_only(run, database):
    store, (book, _, mouse, _) = stocked(run)
    changed = store.change_kind(Comic(id=book.id, title="Dune", colours={"sand"}), was=Book)
    assert changed == store.get(Item, book.id)
    assert isinstance(changed, Comic)
    with pytest.raises(DataError) as caught:
        store.change_kind(Electronics(id=book.id, title="Dune", brand="x"), was=Book)
    assert "kind-differs" == caught.value.code
    assert "'comic'" in str(caught.value)
    with pytest.raises(DataError) as caught:
        store.change_kind(Comic(title="new"), was=Book)
    assert "document-gone" == caught.value.code
    for was in (Item, Media):
        with pytest.raises(UsageError) as refused:
            store.change_kind(Comic(id=mouse.id, title="x"), was=was)
        assert "kind-change" == refused.value.code
    assert "electronics" == database["items"].find_one({"_id": mouse.id})["type"]


def test_of_two_changes_of_kind_one_wins(database):
    store = Store(database, MODELS)
    for _ in range(10):
        book = store.insert(Book(title="x"))
        outcomes: list[str] = []

        def change(document: Any, outcomes: list[str] = outcomes) -> None:
            try:
                outcomes.append(type(store.change_kind(document, was=Book)).__name__)
            except DataError as error:
                outcomes.append(error.code)

        threads = [
            threading.Thread(target=change, args=(each,))
            for each in (Comic(id=book.id, title="c"), Electronics(id=book.id, title="e", brand="b"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 1 == outcomes.count("kind-differs")
        assert {type(store.get(Item, book.id)).__name__} == set(outcomes) - {"kind-differs"}


def test_documents_of_several_kinds_are_inserted_in_one_command(heard):
    database, listener = heard
    store = Store(database, MODELS)
    listener.clear()
    store.insert_many([Book(title="a"), Electronics(title="b", brand="c")])
    assert ["insert"] == listener.names
    with pytest.raises(UsageError):
        store.insert_many([Book(title="a"), Customer(name="Ada")])


# -- indexes ------------------------------------------------------------------------------------


def used_index(store: Any, database: Any, model: type[Document], filter: dict[str, Any]) -> str | None:
    """The index by which the server would answer a find on a model."""
    from treadle.engine.crud import find_command

    command = find_command(store.graph.entry(model), filter, None, 0, None)
    plan = database[command.collection].find(*command.arguments).explain()["queryPlanner"]["winningPlan"]
    while "inputStage" in plan:
        plan = plan["inputStage"]
    return plan.get("indexName")


def test_a_partial_unique_index_lets_many_documents_lack_the_field(database):
    """Without $exists in its condition, the second voucher without a code is refused."""
    store = Store(database, MODELS)
    store.setup()
    store.insert_many([Voucher(title="a"), Voucher(title="b"), Book(title="c"), Book(title="d")])
    store.insert(Voucher(title="e", code="X"))
    # The same code on another kind is another matter.
    store.insert(Electronics(title="f", brand="g", code="X"))
    for again in (Voucher(title="h", code="X"), Electronics(title="i", brand="g", code="X")):
        with pytest.raises(Exception, match="E11000"):
            store.insert(again)


def test_a_unique_field_of_a_kind_is_unique_among_the_kinds_below_it(database):
    store = Store(database, MODELS)
    store.setup()
    store.insert(Book(title="a", isbn="1"))
    with pytest.raises(Exception, match="E11000"):
        store.insert(Comic(title="b", isbn="1"))


def test_a_query_on_the_kind_uses_its_partial_index(database):
    """The same query on the base cannot: nothing says that it is about that kind."""
    store = Store(database, MODELS)
    store.setup()
    by_code = [used_index(store, database, model, {"code": "X"}) for model in (Voucher, Electronics, Item)]
    assert ["code_1_voucher", "code_1_electronics", None] == by_code
    assert "isbn_1_book" == used_index(store, database, Book, {"isbn": "1"})
    assert "isbn_1_book" == used_index(store, database, Comic, {"isbn": "1"})
    assert "pages_1_book" == used_index(store, database, Book, {"pages": {"$gt": 300}})


def test_kinds_that_share_a_field_with_strangers_have_an_index_of_their_own(run, database):
    class Thing(Document, collection="things", discriminator="t"):
        pass

    class A(Thing, kind="a"):
        code: Annotated[str | None, Indexed(unique=True)] = None

    class B(A, kind="b"):
        pass

    class C(Thing, kind="c"):
        code: str | None = None

    store = run.store([Thing, A, B, C])
    store.setup()
    assert [] == store.setup()
    store.insert_many([A(code="1"), C(code="1"), C(code="1"), A(), B()])
    with pytest.raises(Exception, match="E11000"):
        store.insert(B(code="1"))
    if not hasattr(store, "_inner"):
        assert "code_1_a" == used_index(store, database, A, {"code": "1"})


def test_set_up_is_idempotent_and_lists_each_index_once(run):
    store = run.store(MODELS)
    made = [action.detail.split(" ")[0] for action in store.setup() if action.what == "create index"]
    assert ["code_1_electronics", "code_1_voucher", "isbn_1_book", "pages_1_book", "text"] == sorted(made)
    assert [] == store.setup()
    assert [] == store.setup(dry_run=True)


def test_indexes_of_the_class_keyword_are_made_once(run, database):
    class Base(Document, collection="bases", discriminator="t", indexes=[IndexModel([("a", 1)])]):
        a: int = 0

    class Kind(Base, kind="k", indexes=[IndexModel([("b", 1)])]):
        b: int = 0

    store = run.store([Base, Kind])
    store.setup()
    assert {"_id_", "a_1", "b_1"} == set(database["bases"].index_information())


# -- search -------------------------------------------------------------------------------------


def test_search_finds_across_kinds_the_best_match_first(run):
    store = run.store(MODELS)
    store.setup()
    store.insert_many(
        [
            Book(title="The wireless age"),
            Electronics(title="Mouse", brand="wireless"),
            Electronics(title="Cable", brand="Plug"),
            Electronics(title="wireless wireless", brand="wireless"),
        ]
    )
    found = list(store.search(Item, "wireless"))
    assert ["wireless wireless", "The wireless age", "Mouse"] == [each.title for each in found]
    assert ["The wireless age"] == [each.title for each in store.search(Book, "wireless")]
    assert ["Mouse"] == [each.title for each in store.search(Item, "wireless", {"title": "Mouse"})]
    assert 1 == len(list(store.search(Item, "wireless", limit=1)))


@pytest.mark.parametrize(
    "text", ['"wireless cable"', "-wireless cable", "wireless -cable", '--"wireless', "\\wireless"]
)
def test_what_users_type_is_words_and_no_operators(run, text):
    store = run.store(MODELS)
    store.setup()
    store.insert(Electronics(title="wireless", brand="x"))
    assert 1 == len(list(store.search(Item, text)))


def test_a_search_without_a_text_index_is_refused(run):
    store = run.store([Customer])
    for text, model in (("x", Customer),):
        with pytest.raises(UsageError) as caught:
            store.search(model, text)
        assert "search-invalid" == caught.value.code
    with pytest.raises(UsageError):
        run.store(MODELS).search(Item, "  ")


# -- declarations -----------------------------------------------------------------------------


def test_declarations_that_cannot_work_are_refused_early():
    def refused(make: Any) -> str:
        with pytest.raises(DeclarationError) as caught:
            make()
        return caught.value.code

    def kind_without_discriminator() -> None:
        class A(Document, collection="a", kind="x"): ...

    def other_discriminator() -> None:
        class A(Item, kind="x", discriminator="other"): ...

    def bad_kind() -> None:
        class A(Item, kind=""): ...

    def bad_name() -> None:
        class A(Document, collection="a", discriminator="a.b"): ...

    assert "kind-invalid" == refused(kind_without_discriminator)
    assert "kind-invalid" == refused(other_discriminator)
    assert "kind-invalid" == refused(bad_kind)
    assert "stored-name-invalid" == refused(bad_name)

    class Twin(Item, kind="book"): ...

    class OtherId(Item, kind="numbered"):
        id: int

    class Wrong(Item, kind="wrong"):
        type: Literal["right"] = "right"

    class Level(Item, kind="level", validation="strict"): ...

    store = MongoClient("mongodb://localhost:1", connect=False)["x"]
    assert "kind-twice" == refused(lambda: Store(store, [Book, Twin]))
    assert "id-invalid" == refused(lambda: Store(store, [Item, OtherId]))
    assert "kind-invalid" == refused(lambda: Store(store, [Item, Wrong]))
    assert "kind-invalid" == refused(lambda: Store(store, [Item, Level]))


def test_a_model_may_show_its_kind(run):
    class Species(enum.Enum):
        CAT = "cat"

    class Animal(Document, collection="animals", discriminator="species", naming="camel"):
        model_config = ConfigDict(extra="forbid")
        first_name: str

    class Cat(Animal, kind=Species.CAT):
        species: Species = Species.CAT

    class Dog(Animal, kind="dog"):
        species: str = "wolf"

    class Bird(Animal, kind="bird"): ...

    store = run.store([Animal, Cat, Dog, Bird])
    store.setup()
    cat, dog, bird = store.insert_many([Cat(first_name="a"), Dog(first_name="b"), Bird(first_name="c")])
    assert Species.CAT == cat.species
    assert "dog" == dog.species, "a model shows its kind, and does not choose it"
    assert [cat, dog, bird] == list(store.find(Animal, sort="_id"))
    assert "a" == store.find_one(Cat, {"firstName": "a"}).first_name
    with pytest.raises(UsageError, match="firstName"):
        store.find_one(Cat, {"first_name": "a"})


def test_kinds_may_be_numbers(run):
    class Event(Document, collection="events", discriminator="code"): ...

    class Started(Event, kind=1): ...

    class Ended(Event, kind=2): ...

    store = run.store([Event, Started, Ended])
    store.setup()
    store.insert_many([Started(), Ended()])
    assert [Started, Ended] == [type(each) for each in store.find(Event, sort="_id")]


# -- the single view: documents of several former systems in one collection -------------------


def test_documents_of_several_former_systems_are_queried_together(run, database):
    class Policy(Document, collection="policies", discriminator="system"):
        customer: str

    class CarPolicy(Policy, kind="cars-1998"):
        plate: str = Field(alias="licencePlate")
        customer: str = Field(alias="CUST_NAME")

    class HomePolicy(Policy, kind="homes"):
        since: date

    database["policies"].insert_many(
        [
            {"system": "cars-1998", "CUST_NAME": "Ada", "licencePlate": "X 1"},
            {"system": "homes", "customer": "Ada", "since": datetime(2020, 1, 1, tzinfo=UTC), "legacy": 1},
            {"system": "homes", "customer": "Ben", "since": datetime(2021, 1, 1, tzinfo=UTC)},
        ]
    )
    store = run.store([Policy, CarPolicy, HomePolicy])
    store.setup()
    of_ada = list(store.find(Policy, {"$or": [{"customer": "Ada"}, {"CUST_NAME": "Ada"}]}, sort="_id"))
    assert [CarPolicy, HomePolicy] == [type(each) for each in of_ada]
    assert ["Ada", "Ada"] == [each.customer for each in of_ada]
    assert date(2020, 1, 1) == of_ada[1].since


# -- kinds that carry other patterns -----------------------------------------------------------


class Customer(Document, collection="customers"):
    name: str


class CustomerCard(BaseModel):
    name: str


class Review(Document, collection="reviews"):
    product_id: Id
    stars: int
    when: datetime = datetime(2026, 1, 1, tzinfo=UTC)


class ReviewCard(BaseModel):
    stars: int


class Product(Document, collection="products", discriminator="kind"):
    name: str
    reviews: Annotated[int, Count(Review, by="product_id")] = 0
    doubled: Annotated[int | None, Formula({"$multiply": ["$reviews", 2]})] = None


class Toy(Product, kind="toy"):
    stars: Annotated[int, Sum(Review, "stars", by="product_id")] = 0
    rank: Annotated[int | None, Formula({"$add": ["$stars", "$reviews"]})] = None


class Game(Toy, kind="game"):
    latest: Annotated[list[ReviewCard], Subset(Review, by="product_id", sort="-when", size=2)] = []


class Service(Product, kind="service"):
    customer_id: Id | None = None
    customer: Annotated[CustomerCard | None, ExtendedReference(Customer, by="customer_id")] = None
    average: Annotated[float | None, Average(Review, "stars", by="product_id")] = None


class ToyCard(BaseModel):
    name: str
    stars: int


class Shelf(Document, collection="shelves"):
    toy_id: Id | None = None
    toy: Annotated[ToyCard | None, ExtendedReference(Toy, by="toy_id")] = None


class Owner(Document, collection="owners"):
    name: str = ""
    services: Annotated[int, Count("Service", by="customer_id")] = 0


RULED = [Customer, Review, Product, Toy, Game, Service, Shelf, Owner]


def check(store: Any) -> None:
    assert [] == store.verify()


def story(store: Any, database: Any) -> None:
    """The life of some products, with everything they maintain checked after each step."""
    store.setup()
    ada = store.insert(Customer(name="Ada"))
    toy, game, service = store.insert_many(
        [Toy(name="ball"), Game(name="go"), Service(name="repair", customer_id=ada.id)]
    )
    assert "Ada" == service.customer.name
    for product in (toy, game, service):
        store.insert_many([Review(product_id=product.id, stars=stars) for stars in (2, 3)])
    raws = {raw["kind"]: raw for raw in database["products"].find()}
    # Each review is counted once, though three models inherit the count.
    assert [2, 2, 2] == [raws[kind]["reviews"] for kind in ("toy", "game", "service")]
    assert [4, 4, 4] == [raws[kind]["doubled"] for kind in ("toy", "game", "service")]
    # A kind's own fields are not made in documents of others.
    assert [5, 5, None] == [raws[kind].get("stars") for kind in ("toy", "game", "service")]
    assert [7, 7, None] == [raws[kind].get("rank") for kind in ("toy", "game", "service")]
    assert 2 == len(raws["game"]["latest"])
    assert not {"latest", "average"} & set(raws["toy"])
    assert not {"stars", "rank", "latest"} & set(raws["service"])
    assert 2.5 == raws["service"]["average"]
    check(store)

    shelves = store.insert_many([Shelf(toy_id=toy.id), Shelf(toy_id=game.id), Shelf(toy_id=service.id)])
    assert ["ball", "go", None] == [each.toy and each.toy.name for each in shelves]
    store.update(Product, toy.id, {"$set": {"name": "red ball"}})
    store.update_many(Product, {"_id": {"$in": [game.id, service.id]}}, {"$set": {"name": "new"}})
    assert ["red ball", "new", None] == [
        (store.get(Shelf, each.id).toy or ToyCard(name="", stars=0)).name or None for each in shelves
    ]
    check(store)

    store.insert(Review(product_id=toy.id, stars=4))
    assert 9 == store.get(Shelf, shelves[0].id).toy.stars
    store.update(Customer, ada.id, {"$set": {"name": "Ada L."}})
    assert "Ada L." == store.get(Product, service.id).customer.name
    with pytest.raises(UsageError, match="maintains"):
        store.update(Product, toy.id, {"$set": {"stars": 1}})
    check(store)

    store.delete(Product, game.id)
    store.delete_many(Product, {"_id": service.id})
    check(store)


def test_kinds_carry_other_patterns(run, database):
    story(run.store(RULED), database)


def test_kinds_carry_other_patterns_without_transactions():
    with start(replica_set=False) as alone, MongoClient(alone.uri) as client:
        story(Store(client["kinds"], RULED), client["kinds"])


def test_a_kind_as_a_source_counts_its_own_documents_only(run, database):
    store = run.store(RULED)
    store.setup()
    owner = store.insert(Owner(name="o"))
    service = store.insert(Service(name="s", customer_id=owner.id))
    assert 1 == store.get(Owner, owner.id).services
    # The same stored field in a document of another kind is nobody's business.
    database["products"].insert_one({"kind": "toy", "name": "t", "customer_id": owner.id})
    store.rebuild(Product)
    check(store)
    toy = store.find_one(Toy)
    store.update(Product, toy.id, {"$set": {"customer_id": owner.id, "name": "u"}})
    assert 1 == store.get(Owner, owner.id).services
    store.delete(Product, toy.id)
    assert 1 == store.get(Owner, owner.id).services
    store.delete(Product, service.id)
    assert 0 == store.get(Owner, owner.id).services
    check(store)


def test_a_change_of_kind_moves_all_that_hangs_on_it(run):
    store = run.store(RULED)
    store.setup()
    owner = store.insert(Owner(name="o"))
    customer = store.insert(Customer(name="Ada"))
    service = store.insert(Service(name="s", customer_id=customer.id))
    store.insert_many([Review(product_id=service.id, stars=stars) for stars in (2, 3)])
    shelf = store.insert(Shelf(toy_id=service.id))
    assert shelf.toy is None
    game = store.change_kind(Game(id=service.id, name="g"), was=Service)
    assert (2, 5, 4, 7, 2) == (game.reviews, game.stars, game.doubled, game.rank, len(game.latest))
    assert "g" == store.get(Shelf, shelf.id).toy.name
    check(store)
    back = store.change_kind(Service(id=service.id, name="s", customer_id=owner.id), was=Game)
    assert (2, 2.5, None) == (back.reviews, back.average, back.customer)
    assert 1 == store.get(Owner, owner.id).services
    check(store)


def test_old_documents_of_all_kinds_are_rebuilt(run, database):
    keys = [ObjectId() for _ in range(3)]
    database["products"].insert_many(
        [{"_id": key, "kind": kind, "name": kind} for key, kind in zip(keys, ("toy", "game", "service"))]
    )
    database["reviews"].insert_many(
        [{"product_id": key, "stars": 4, "when": datetime(2026, 1, 1)} for key in keys]
    )
    store = run.store(RULED)
    store.setup()
    assert {"Toy", "Game", "Service"} == {finding.model for finding in store.verify()}
    assert {"Game"} == {finding.model for finding in store.verify(Game)}
    assert {"Toy", "Game"} == {finding.model for finding in store.verify(Toy)}
    assert 2 == store.repair(Toy)
    store.rebuild(Product)
    check(store)
    assert 4 == store.get(Product, keys[1]).stars
    assert not {"stars", "latest"} & set(database["products"].find_one({"_id": keys[2]}))


def test_two_kinds_may_maintain_the_same_field_in_their_own_ways(run):
    class Node(Document, collection="nodes", discriminator="is"):
        parent_id: Id | None = None

    class File(Node, kind="file"):
        size: int = 0

    class Folder(Node, kind="folder"):
        size: Annotated[int, Sum(File, "size", by="parent_id")] = 0

    class Link(Node, kind="link"):
        size: Annotated[int | None, Formula({"$literal": 1})] = None

    store = run.store([Node, File, Folder, Link])
    store.setup()
    folder = store.insert(Folder())
    files = store.insert_many([File(parent_id=folder.id, size=size) for size in (3, 4)])
    link = store.insert(Link(parent_id=folder.id))
    assert (7, 1) == (store.get(Node, folder.id).size, store.get(Node, link.id).size)
    store.update(Node, files[0].id, {"$inc": {"parent": 0}})
    store.replace(File(id=files[0].id, parent_id=folder.id, size=10))
    assert 14 == store.get(Node, folder.id).size
    assert [] == store.verify()


def test_a_maintained_field_cannot_be_redeclared_by_a_kind(database):
    class Base(Document, collection="bases", discriminator="t"):
        n: Annotated[int, Count(Review, by="product_id")] = 0

    class Kind(Base, kind="k"):
        n: Annotated[int, Sum(Review, "stars", by="product_id")] = 0

    with pytest.raises(DeclarationError) as caught:
        Store(database, [Review, Base, Kind])
    assert "path-maintained-twice" == caught.value.code


def test_a_reference_may_not_block_a_deletion_of_another_kind(run):
    class Part(Document, collection="parts", discriminator="t"): ...

    class Wheel(Part, kind="wheel"):
        name: str = "w"

    class Bolt(Part, kind="bolt"): ...

    class Card(BaseModel):
        name: str

    class Cart(Document, collection="carts"):
        wheel_id: Id | None = None
        wheel: Annotated[Card | None, ExtendedReference(Wheel, by="wheel_id", on_delete="restrict")] = None

    store = run.store([Part, Wheel, Bolt, Cart])
    wheel, bolt = store.insert_many([Wheel(), Bolt()])
    store.insert(Cart(wheel_id=wheel.id))
    store.insert(Cart(wheel_id=bolt.id))
    with pytest.raises(DataError, match="restrict"):
        store.delete(Part, wheel.id)
    with pytest.raises(DataError, match="restrict"):
        store.change_kind(Bolt(id=wheel.id), was=Wheel)
    assert store.delete(Part, bolt.id) is not None


# -- embedded values that are one of several models -------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Card(BaseModel):
    method: Literal["card"] = "card"
    number: str = Field(alias="no")
    limit: Decimal = Decimal(1)
    colours: set[Colour] = set()


class Transfer(BaseModel):
    method: Literal["transfer"] = "transfer"
    number: int = Field(alias="no")
    day: date


class Cash(BaseModel):
    how: Literal["cash", "coins"]
    at: dict[date, Decimal] = {}


Payment = Annotated[Card | Transfer, Field(discriminator="method")]


class Bill(Document, collection="bills"):
    payment: Payment
    others: list[Payment] = []
    named: dict[str, Payment] = {}
    either: Cash | Card | None = None


def test_an_embedded_value_may_be_one_of_several_models(run, database):
    store = run.store([Bill])
    store.setup()
    card = Card(no="1", limit=Decimal("2.5"), colours={Colour.RED})
    transfer = Transfer(no=7, day=date(2026, 3, 1))
    cash = Cash(how="coins", at={date(2026, 1, 2): Decimal("1.10")})
    bills = [
        Bill(payment=card, others=[transfer, card], named={"a": transfer}, either=cash),
        Bill(payment=transfer, either=card),
        Bill(payment=transfer),
    ]
    store.insert_many(bills)
    assert bills == list(store.find(Bill, sort="_id"))
    assert [Card, Transfer] == [type(each.payment) for each in bills[:2]]
    raw = database["bills"].find_one({"_id": bills[1].id})
    assert {"method": "transfer", "no": 7, "day": datetime(2026, 3, 1)} == raw["payment"]


@pytest.mark.parametrize(
    "payment",
    [
        {"method": "cheque", "no": "1"},
        {"method": "transfer", "no": "not a number", "day": datetime(2026, 3, 1)},
        {"method": "transfer", "no": 1},
        {"no": "1", "limit": 1},
        5,
    ],
)
def test_the_validator_refuses_what_no_member_is(run, database, payment):
    run.store([Bill]).setup()
    with pytest.raises(Exception, match="validation"):
        database["bills"].insert_one({"payment": payment})


def test_patterns_inside_a_union_are_refused_and_not_forgotten(database):
    class Line(BaseModel):
        t: Literal["line"] = "line"
        customer_id: Id
        customer: Annotated[CustomerCard | None, ExtendedReference(Customer, by="customer_id")] = None

    class Note(BaseModel):
        t: Literal["note"] = "note"

    class Paper(Document, collection="papers"):
        parts: list[Line | Note] = []

    with pytest.raises(DeclarationError) as caught:
        Store(database, [Customer, Paper])
    assert "pattern-in-union" == caught.value.code


# -- kinds that a worker looks after -------------------------------------------------------------


class Streamed(Document, collection="streamed", discriminator="kind"):
    reviews: Annotated[int, Count(Review, by="product_id", maintain="stream")] = 0


class Loud(Streamed, kind="loud"):
    stars: Annotated[int, Sum(Review, "stars", by="product_id", maintain="stream")] = 0


class Quiet(Streamed, kind="quiet"):
    loud_id: Id | None = None


class Reader(Document, collection="readers"):
    quiet: Annotated[int, Count(Quiet, by="loud_id", maintain="stream")] = 0


def test_the_worker_knows_kinds(run, database):
    store = run.store([Review, Streamed, Loud, Quiet, Reader])
    store.setup()
    reader = store.insert(Reader())
    loud, quiet = store.insert_many([Loud(), Quiet(loud_id=reader.id)])
    worker = store.worker()
    worker.run_until_idle()
    database["reviews"].insert_many(
        [{"product_id": each.id, "stars": 3, "when": datetime(2026, 1, 1)} for each in (loud, quiet)]
    )
    database["streamed"].insert_one({"kind": "loud", "loud_id": reader.id})
    worker.run_until_idle()
    assert (1, 3) == (store.get(Streamed, loud.id).reviews, store.get(Streamed, loud.id).stars)
    assert 1 == store.get(Streamed, quiet.id).reviews
    assert "stars" not in database["streamed"].find_one({"_id": quiet.id})
    assert 1 == store.get(Reader, reader.id).quiet
    assert [] == store.verify()
