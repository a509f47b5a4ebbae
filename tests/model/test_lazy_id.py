"""A generated id has no value until somebody asks for it, in whatever way."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import pickle
import re
import threading
import warnings
from typing import Annotated, Any

import bson
import pydantic_core
import pytest
from bson import ObjectId
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationInfo, field_validator

from treadle import Count, Document, ExtendedReference, Id, Store
from treadle.model.lazy_id import LazyObjectId, PendingId, reserve_id


class Review(Document, collection="reviews"):
    product_id: Id
    product_name: Annotated[str | None, ExtendedReference("Product", by="product_id", field="name")] = None


class Product(Document, collection="products"):
    model_config = ConfigDict(frozen=True, from_attributes=True)

    name: str = "loom"
    review_count: Annotated[int, Count(Review, by="product_id")] = 0

    @field_validator("name")
    @classmethod
    def _note(cls, name: str, info: ValidationInfo) -> str:
        SEEN_BY_VALIDATOR.append(info.data["id"])
        return name


SEEN_BY_VALIDATOR: list[Any] = []


class Wrapper(BaseModel):
    it: Product


class Anything(BaseModel):
    it: Any


class Card(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: Id
    name: str


@dataclasses.dataclass
class Box:
    it: Product


def by_match(product: Product) -> Any:
    match product:
        case Product(id=identity):
            return identity


def by_deprecated(product: Product) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return product.copy().id


def of_text(text: str | bytes) -> Any:
    found = re.search(r"[0-9a-f]{24}", text if isinstance(text, str) else text.decode())
    assert found is not None
    return found[0]


WAYS = {
    "attribute": lambda p: p.id,
    "getattr": lambda p: getattr(p, "id"),  # noqa: B009
    "attrgetter": operator.attrgetter("id"),
    "match": by_match,
    "vars": lambda p: vars(p)["id"],
    "__dict__ by object": lambda p: object.__getattribute__(p, "__dict__")["id"],
    "items of __dict__": lambda p: dict(p.__dict__.items())["id"],
    "iteration": lambda p: dict(p)["id"],
    "repr": lambda p: of_text(repr(p)),
    "str": lambda p: of_text(str(p)),
    "__repr_args__": lambda p: dict(p.__repr_args__())["id"],
    "model_dump": lambda p: p.model_dump()["id"],
    "model_dump of the id": lambda p: p.model_dump(include={"id"})["id"],
    "model_dump for JSON": lambda p: p.model_dump(mode="json")["id"],
    "model_dump_json": lambda p: of_text(p.model_dump_json()),
    "serializer": lambda p: Product.__pydantic_serializer__.to_python(p)["id"],
    "adapter": lambda p: TypeAdapter(Product).dump_python(p)["id"],
    "adapter to JSON": lambda p: of_text(TypeAdapter(Product).dump_json(p)),
    "adapter of a list": lambda p: TypeAdapter(list[Product]).dump_python([p])[0]["id"],
    "adapter of a dataclass": lambda p: TypeAdapter(Box).dump_python(Box(p))["it"]["id"],
    "wrapper": lambda p: Wrapper(it=p).model_dump()["it"]["id"],
    "wrapper to JSON": lambda p: of_text(Wrapper(it=p).model_dump_json()),
    "wrapper by any": lambda p: Anything(it=p).model_dump(serialize_as_any=True)["it"]["id"],
    "wrapper's copy": lambda p: Wrapper(it=p).model_copy(deep=True).it.id,
    "to_jsonable_python": lambda p: pydantic_core.to_jsonable_python(p)["id"],
    "to_json": lambda p: of_text(pydantic_core.to_json(p)),
    "validated again": lambda p: Product.model_validate(p).id,
    "card from attributes": lambda p: Card.model_validate(p).id,
    "validator of another field": lambda p: SEEN_BY_VALIDATOR[-1],
    "copy": lambda p: copy.copy(p).id,
    "deepcopy": lambda p: copy.deepcopy(p).id,
    "deepcopy of __dict__": lambda p: copy.deepcopy(vars(p))["id"],
    "model_copy": lambda p: p.model_copy().id,
    "deprecated copy": by_deprecated,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)).id,
    "pickle of __dict__": lambda p: pickle.loads(pickle.dumps(vars(p)))["id"],
    "__getstate__": lambda p: p.__getstate__()["__dict__"]["id"],
    "BSON": lambda p: bson.decode(bson.encode(vars(p)))["id"],
}


def insert(store: Store, product: Product) -> Product:
    return store.insert(product)


def insert_many(store: Store, product: Product) -> Product:
    return store.insert_many([Product(name="heddle"), product])[1]


@pytest.mark.parametrize("write", [insert, insert_many])
@pytest.mark.parametrize("way", WAYS)
def test_a_product_whose_id_was_read_is_filled_from_the_review_that_names_it(database, way, write):
    """The count of the target and the copy of the source, whichever way the id got out."""
    store = Store(database, [Product, Review])
    product = Product(name="loom")
    review = store.insert(Review(product_id=WAYS[way](product)))
    stored = write(store, product)
    assert (review.product_id, 1) == (stored.id, stored.review_count)
    assert "loom" == store.get(Review, review.id).product_name
    assert [] == store.verify()


def test_a_document_that_pydantic_validates_anew_keeps_its_id(database):
    class Revalidated(Document, collection="revalidated"):
        model_config = ConfigDict(revalidate_instances="always")

        reviews: Annotated[int, Count(Review, by="product_id")] = 0

    store = Store(database, [Revalidated, Review, Product])
    product = Revalidated()
    store.insert(Review(product_id=TypeAdapter(Revalidated).validate_python(product).id))
    assert 1 == store.insert(product).reviews
    assert [] == store.verify()


@pytest.mark.parametrize("identity", ["settings", ObjectId()])
def test_an_id_that_the_model_itself_gives_is_known_to_everybody(database, identity):
    class Setting(Document, collection="settings"):
        id: Any = identity
        uses: Annotated[int, Count("Use", by="setting_id")] = 0

    class Use(Document, collection="uses"):
        setting_id: Any

    store = Store(database, [Setting, Use])
    store.insert(Use(setting_id=identity))
    assert 1 == store.insert(Setting()).uses
    assert [] == store.verify()


class Person(Document, collection="people"):
    name: str
    boss_id: Id | None = None
    boss_name: Annotated[str | None, ExtendedReference("Person", by="boss_id", field="name")] = None


@pytest.mark.parametrize("order", [1, -1])
def test_documents_of_one_call_may_refer_to_each_other(database, order):
    """By an id that is made only when the call encodes it."""
    store = Store(database, [Person])
    boss = Person(name="Ada")
    store.insert_many([boss, Person(name="Bob", boss_id=vars(boss)["id"])][::order])
    assert {"Ada": None, "Bob": "Ada"} == {each.name: each.boss_name for each in store.find(Person)}
    assert [] == store.verify()


# -- without a server -----------------------------------------------------------------------


def test_an_id_that_nobody_asked_for_has_no_value():
    product = Product()
    assert type(vars(product)["id"]) is LazyObjectId
    assert "id" not in product.model_fields_set
    for known in (Product(id=ObjectId()), Product(_id=ObjectId())):
        assert type(vars(known)["id"]) is ObjectId
        assert reserve_id(known) is None


@pytest.mark.parametrize(
    "look",
    [
        str, repr, hash, copy.copy, copy.deepcopy, pickle.dumps, ObjectId,
        lambda each: each == ObjectId(), lambda each: each != ObjectId(), lambda each: ObjectId() == each,
        lambda each: each < ObjectId(), lambda each: each >= ObjectId(), lambda each: each in {ObjectId()},
        lambda each: each.binary, lambda each: each.generation_time, lambda each: f"{each}",
        ObjectId.__str__, lambda each: each.__getstate__(),
        lambda each: bson.encode({"": each}), lambda each: object.__reduce_ex__(each, 2),
    ],
)  # fmt: skip
def test_whoever_looks_at_an_id_makes_it_an_ordinary_one(look):
    identity = LazyObjectId()
    look(identity)
    assert type(identity) is ObjectId
    assert 12 == len(identity.binary)
    product = Product()
    reserved = reserve_id(product)
    assert reserved is not None
    identity = vars(product)["id"]
    assert (PendingId, False) == (type(identity), reserved.is_known)
    look(identity)
    assert (ObjectId, True) == (type(identity), reserved.is_known)
    assert reserved.value == identity


def test_an_id_is_promised_once():
    product = Product()
    first = reserve_id(product)
    assert first is not None
    assert reserve_id(product) is None
    assert first.value == product.id


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
@pytest.mark.parametrize("kind", [LazyObjectId, PendingId])
def test_a_copy_of_an_id_is_the_same_id(again, kind):
    identity = kind()
    copied = again(identity)
    assert (type(copied), copied) == (ObjectId, identity)


def test_threads_that_ask_at_once_get_the_same_id():
    for _ in range(200):
        product = Product()
        answers: list[bytes] = []
        start = threading.Barrier(4)

        def ask(product: Product = product, answers: list[bytes] = answers, start: Any = start) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                start.wait()
            answers.append(vars(product)["id"].binary)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [product.id.binary] * 4 == answers


def test_documents_are_equal_by_their_ids():
    assert Product() != Product()
    product = Product()
    assert product == product.model_copy()
    assert hash(product) == hash(product.model_copy())
