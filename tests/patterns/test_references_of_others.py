"""Documents of other libraries: MongoDB's own references, and sums over the keys of a dict."""

from __future__ import annotations

from typing import Annotated, Any

from bson import DBRef, ObjectId

from treadle import Count, Document, ExtendedReference, Id, Rollup, Store, Sum


class Customer(Document, collection="customers"):
    name: str = ""
    orders: Annotated[int, Count("Order", by="customer.$id")] = 0
    spent: Annotated[int, Sum("Order", "total", by="customer.$id", where={"total": {"$gt": 0}})] = 0
    watching: Annotated[int, Count("Order", by="watchers.$id")] = 0


class Order(Document, collection="orders"):
    customer: Any = None
    customer_name: Annotated[
        str | None, ExtendedReference(Customer, by="customer.$id", field="name", on_delete="clear")
    ] = None
    watchers: list[Any] = []
    total: int = 0


def ref(identity: ObjectId) -> DBRef:
    return DBRef("customers", identity)


def test_a_reference_of_another_library_is_followed(run):
    store = run.store([Customer, Order])
    store.setup()
    ann, ben = store.insert_many([Customer(name="Ann"), Customer(name="Ben")])
    order = store.insert(Order(customer=ref(ann.id), watchers=[ref(ann.id), ref(ben.id)], total=5))
    assert ("Ann", ref(ann.id)) == (order.customer_name, order.customer)
    now = store.get(Customer, ann.id)
    assert (1, 5, 1) == (now.orders, now.spent, now.watching)
    store.update(Customer, ann.id, {"$set": {"name": "Anna"}})
    assert "Anna" == store.get(Order, order.id).customer_name
    moved = store.update(Order, order.id, {"$set": {"customer": ref(ben.id)}})
    assert "Ben" == moved.customer_name
    assert [0, 1] == [store.get(Customer, each.id).orders for each in (ann, ben)]
    assert [moved] == store.find(Order, {"customer.$id": ben.id}).to_list()
    assert [] == store.verify()
    store.delete(Customer, ben.id)
    assert (None, None) == (store.get(Order, order.id).customer, store.get(Order, order.id).customer_name)


def test_what_another_library_wrote_is_rebuilt_and_followed_by_the_worker(database):
    class Person(Document, collection="people"):
        tasks: Annotated[int, Count("Task", by="owner.$id", maintain="stream")] = 0

    class Task(Document, collection="tasks"):
        owner: Any = None

    store = Store(database, [Person, Task])
    store.setup()
    person = store.insert(Person())
    worker = store.worker()
    worker.run_until_idle()
    database["tasks"].insert_many([{"owner": DBRef("people", person.id)} for _ in range(3)])
    worker.run_until_idle()
    assert 3 == store.get(Person, person.id).tasks
    database["tasks"].delete_one({})
    worker.run_until_idle()
    assert 2 == store.get(Person, person.id).tasks
    store.rebuild()
    assert [] == store.verify()


class Product(Document, collection="products"):
    shop_id: Id
    inventory: dict[str, int] = {}


class Shop(Document, collection="shops"):
    stock: Annotated[int, Sum(Product, "inventory.stock", by="shop_id")] = 0


class Stock(Document, collection="stock", rollup=Rollup(Product, keys={"shop_id": "shop_id"})):
    shop_id: Id
    stock: Annotated[int, Sum("inventory.stock")]


def test_a_sum_reaches_into_a_dict(run):
    store = run.store([Product, Shop, Stock])
    store.setup()
    shop = store.insert(Shop())
    store.insert_many(
        [Product(shop_id=shop.id, inventory={"stock": 5, "other": 7}), Product(shop_id=shop.id)]
    )
    store.update_many(Product, {"inventory.stock": 5}, {"$inc": {"inventory.stock": 2}})
    assert (7, 7) == (store.get(Shop, shop.id).stock, store.find_one(Stock).stock)
    assert [] == store.verify()
