"""What set-up and the first write of a Store say, so that no mistake passes in silence."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import create_model
from pymongo.errors import WriteError

from treadle import Count, Document, Id, Indexed, Store, Sum, UsageError


class Account(Document, collection="accounts"):
    email: Annotated[str, Indexed(unique=True)]


class Loose(Document, collection="loose"):
    name: str = ""


def test_before_setup_reads_work_and_writes_of_unique_fields_are_refused(run):
    store = run.store([Account, Loose])
    assert 0 == store.count(Account)
    store.insert(Loose())
    with pytest.raises(UsageError, match="index-missing"):
        store.insert(Account(email="a"))
    assert store.index_ready()
    store.setup()
    assert [] == store.index_ready()
    store.insert(Account(email="a"))


def test_ping_takes_some_milliseconds(run):
    assert 0 < run.store([Loose]).ping() < 60_000


def test_the_options_of_the_client_pass_through(server):
    uri = server.uri.replace("/?", "/shop?")
    with Store.open(uri, [Loose], appname="shop") as store:
        assert "shop" == store.database.client.options.pool_options.metadata["application"]["name"]


# -- validators ---------------------------------------------------------------------------------------


def test_a_validator_on_a_live_collection_begins_with_warnings(run, database):
    database["accounts"].insert_many([{"email": "a"}, {"email": 5}])
    store = run.store([Account])
    (action,) = [each for each in store.setup() if "validator" in each.what]
    assert "only warns" in str(action)
    assert "1 document does not validate" in str(action)
    assert "enforce" in str(action)
    database["accounts"].insert_one({"email": 6})
    assert [] == store.setup()
    with pytest.raises(UsageError) as caught:
        store.setup(validation="all")
    assert "setup-invalid" == caught.value.code
    (action,) = store.setup(validation="enforce")
    assert "2 documents do not validate" in str(action)
    with pytest.raises(WriteError):
        database["accounts"].insert_one({"email": 7})
    assert [] == store.setup()
    assert [] == store.setup(validation="enforce")


def test_a_new_or_empty_collection_is_validated_at_once(run, database):
    database.create_collection("accounts")
    run.store([Account]).setup()
    with pytest.raises(WriteError):
        database["accounts"].insert_one({"email": 7})


# -- declarations that changed ------------------------------------------------------------------------


def models(where: Any = None, more: bool = False) -> list[type[Document]]:
    class Order(Document, collection="orders"):
        customer_id: Id
        total: int = 0

    count = Count(Order, by="customer_id", where=where)
    fields: dict[str, Any] = {"order_count": (Annotated[int, count], 0)}
    if more:
        fields["spent"] = (Annotated[int, Sum(Order, "total", by="customer_id")], 0)
    customer = create_model(
        "Customer", __base__=Document, __cls_kwargs__={"collection": "customers"}, **fields
    )
    return [customer, Order]


def test_a_changed_declaration_must_be_rebuilt(run):
    customer_model, order_model = before = models()
    store = run.store(before)
    assert all("rebuild" not in str(each) for each in store.setup())
    customer = store.insert(customer_model())
    store.insert_many([order_model(customer_id=customer.id, total=n) for n in (0, 5)])
    assert [] == store.setup()

    after = models(where={"total": {"$gt": 0}}, more=True)
    store = run.store(after)
    planned = [str(each) for each in store.setup(dry_run=True)]
    assert ["rebuild needed: Customer.order_count", "rebuild needed: Customer.spent"] == [
        each for each in planned if "rebuild" in each
    ]
    assert planned == [str(each) for each in store.setup()]
    assert [] == store.setup()
    assert [True, True] == [each.rebuild_needed for each in store.status().rules]
    store.rebuild(after[0])
    assert [False, False] == [each.rebuild_needed for each in store.status().rules]
    assert (1, 5) == (store.get(after[0], customer.id).order_count, store.get(after[0], customer.id).spent)


# -- a server without change streams ---------------------------------------------------------------------


def test_set_up_leaves_validators_alone_where_it_is_told_to(run, database):
    """One of somebody else's stays; a declaration without validation would remove it."""

    class Lax(Document, collection="loose", validation="off"):
        name: Annotated[str, Indexed()]

    database.create_collection("loose", validator={"name": {"$type": "string"}})
    was = next(iter(database.list_collections()))["options"]
    store = run.store([Lax])
    assert ["create index"] == [each.what for each in store.setup(validation="keep")]
    assert was == next(iter(database.list_collections(filter={"name": "loose"})))["options"]
    assert [] == store.setup(validation="keep")
    assert ["change validator"] == [each.what for each in store.setup(dry_run=True)]
