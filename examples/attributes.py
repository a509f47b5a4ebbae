"""Attributes: a shop whose products have little in common but are searched by everything.

Each product has its own properties. They are stored as pairs under one index,
and asked for by their names, as if they were fields. A property that somebody
pushed twice is found.
"""

from __future__ import annotations

from typing import Annotated

from examples.story import show, step, tell, verified

from treadle import Attributes, Document, Measured, Store


class Product(Document, collection="products"):
    id: int
    name: str
    specs: Annotated[dict[str, str | int | Measured], Attributes()] = {}


MODELS = [Product]


def story(store: Store) -> None:
    store.setup()
    products = store.collection(Product)

    step("A loom, a bottle and a lamp")
    store.insert(
        Product(id=1, name="loom", specs={"material": "ash", "width": Measured(80, "cm"), "shafts": 8})
    )
    store.insert(Product(id=2, name="bottle", specs={"material": "glass", "volume": Measured(500, "ml")}))
    store.insert(Product(id=3, name="lamp", specs={"material": "ash", "watts": 9}))
    show("products", products.find().sort("_id"))

    step("Asked for by name, two names at once")
    found = [
        each.name for each in store.find(Product, {"specs.material": "ash", "specs.shafts": {"$gte": 4}})
    ]
    print(f"  of ash, with four shafts or more: {found}")
    assert ["loom"] == found
    assert ["bottle"] == [each.name for each in store.find(Product, {"specs.volume.unit": "ml"})]

    step("One property changes in place, one is added, one goes")
    store.update(
        Product, 3, {"$set": {"specs.watts": 7, "specs.color": "white"}, "$unset": {"specs.material": ""}}
    )
    show("products", products.find_one({"_id": 3}))
    assert {"watts": 7, "color": "white"} == store.require(Product, 3).specs

    step("Somebody pushes a name that is there already")
    products.update_one({"_id": 3}, {"$push": {"specs": {"k": "watts", "v": 8}}})
    assert 1 == verified(store)
    store.repair()
    assert 0 == verified(store)
    assert {"watts": 8, "color": "white"} == store.require(Product, 3).specs


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
