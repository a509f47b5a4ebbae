"""A shop that is modelled well: nothing to say about it."""

from __future__ import annotations

from typing import Any

from examples.databases.maker import Maker


def fill(maker: Maker) -> None:
    chance = maker.chance
    maker.validate("customers", {"name": "string", "email": "string", "addresses": "array"})
    maker.validate("products", {"name": "string", "price": "double", "review_count": "int"})
    maker.validate("orders", {"customer_id": "objectId", "customer": "object", "lines": "array"})
    maker.validate("reviews", {"product_id": "objectId", "rating": "int", "text": "string"})
    customers = [
        (maker.identity(maker.moment(number / 20)), maker.word()) for number in range(maker.number(2_000))
    ]
    products = [
        (maker.identity(maker.moment(number / 10)), maker.word(10)) for number in range(maker.number(500))
    ]
    maker.insert(
        "customers",
        (
            {
                "_id": identity,
                "name": name,
                "email": f"{name}@example.org",
                "addresses": [
                    {"city": maker.word(), "street": maker.word()} for _ in range(chance.randint(1, 3))
                ],
            }
            for identity, name in customers
        ),
    )
    reviews = [
        {
            "_id": maker.identity(maker.moment(number / 50)),
            "product_id": products[chance.randrange(len(products))][0],
            "author": {"name": chance.choice(customers)[1]},
            "rating": chance.randint(1, 5),
            "text": maker.word(40),
            "date": maker.moment(number / 50),
        }
        for number in range(maker.number(4_000))
    ]
    counts: dict[object, list[dict[str, Any]]] = {}
    for review in reviews:
        counts.setdefault(review["product_id"], []).append(review)
    maker.insert(
        "products",
        (
            {
                "_id": identity,
                "name": name,
                "price": round(chance.uniform(3, 90), 2),
                "review_count": len(counts.get(identity, [])),
                "recent_reviews": [
                    {"_id": review["_id"], "rating": review["rating"]}
                    for review in counts.get(identity, [])[-3:]
                ],
            }
            for identity, name in products
        ),
    )
    maker.insert("reviews", reviews)
    maker.insert(
        "orders",
        (
            {
                "_id": maker.identity(maker.moment(number / 100)),
                "customer_id": identity,
                "customer": {"name": name},
                "date": maker.moment(number / 100),
                "status": chance.choice(["open", "paid", "sent"]),
                "lines": [
                    {"product_id": product, "name": title, "quantity": chance.randint(1, 3), "price": 9.5}
                    for product, title in chance.sample(products, chance.randint(1, 4))
                ],
            }
            for number in range(maker.number(8_000))
            for identity, name in [chance.choice(customers)]
        ),
    )
    maker.database["orders"].create_index([("customer_id", 1), ("date", -1)])
    maker.database["reviews"].create_index([("product_id", 1), ("date", -1)])
