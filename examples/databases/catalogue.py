"""Products of several kinds in one collection, some of them from before the price was an object."""

from __future__ import annotations

from typing import Any

from examples.databases.maker import Maker


def fill(maker: Maker) -> None:
    chance = maker.chance

    def own(kind: str) -> dict[str, Any]:
        if kind == "book":
            return {"isbn": f"978{chance.randrange(10**10):010}", "pages": chance.randrange(80, 900)}
        if kind == "shirt":
            return {"size": chance.choice("SML"), "colour": chance.choice(["red", "blue"]), "cotton": True}
        return {"volts": chance.choice([110, 230]), "warranty_months": 24}

    maker.insert(
        "products",
        (
            {
                "_id": maker.identity(maker.moment(number / 40)),
                "type": kind,
                "title": maker.word(12),
                "price": round(chance.uniform(3, 300), 2),
                "stock": str(chance.randrange(50)) if number % 40 == 0 else chance.randrange(50),
                **own(kind),
            }
            for number in range(maker.number(12_000))
            for kind in [chance.choice(["book", "book", "shirt", "lamp"])]
        ),
    )
    maker.insert(
        "suppliers",
        (
            {
                "_id": maker.identity(maker.moment(number / 4)),
                "name": maker.word(),
                **(
                    {"phone": "1", "fax": "2"}
                    if number < maker.number(1_200)
                    else {"contact": {"phone": "1", "mail": "a@example.org"}}
                ),
            }
            for number in range(maker.number(2_000))
        ),
    )
