"""Indexes, search and declarations of kinds."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import pytest
from pydantic import ConfigDict
from pymongo import IndexModel

from tests.patterns.stock import MODELS, Book, Comic, Customer, Electronics, Item, Voucher
from treadle import Document, Indexed, Store, UsageError

# -- indexes -----------------------------------------------------------------------------------------


def used_index(store: Any, database: Any, model: type[Document], filter: dict[str, Any]) -> str | None:
    """The index by which the server would answer a find on a model."""
    from treadle.engine.reads import find_command
    from treadle.graph.query import Query

    command = find_command(store.graph.entry(model), Query(filter))
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
    """Or are refused before anything is made, where no partial index can name several kinds."""

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


# -- search ------------------------------------------------------------------------------------------


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


# -- declarations ------------------------------------------------------------------------------------


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
