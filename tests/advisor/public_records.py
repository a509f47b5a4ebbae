"""Shops, hospitals, books and events, as public files of records have them."""

from __future__ import annotations

import random
import uuid
from typing import Any

from bson import ObjectId
from pymongo.database import Database

from tests.advisor.public_samples import at, sample, words
from tests.advisor.public_tables import hints
from tests.advisor.tables import rows, table


@sample(
    """
    order_items.order_id -> orders.order_id
    order_items.product_id -> products.product_id
    order_items.seller_id -> sellers.seller_id
    order_payments.order_id -> orders.order_id
    order_reviews.order_id -> orders.order_id
    orders.customer_id -> customers.customer_id
    products.product_category_name -> product_category_name_translation.product_category_name
    """,
    {
        ("normalised-everything", "order_items.order_id"): {},
        ("normalised-everything", "order_payments.order_id"): {},
    },
    [
        # A review has an id of its own; whether it is part of the order is for the shop to say.
        ("normalised-everything", "order_reviews.order_id"),
        *hints("order_items.product_id", "order_items.seller_id", "orders.customer_id"),
    ],
)
def olist(database: Database[Any]) -> None:
    chance = random.Random(25)

    def key() -> str:
        return f"{chance.getrandbits(128):032x}"

    names = [f"category_{n}" for n in range(30)]
    database["product_category_name_translation"].insert_many(
        [
            {"product_category_name": each, "product_category_name_english": f"english {each}"}
            for each in names
        ]
    )
    products, sellers = [key() for _ in range(150)], [key() for _ in range(50)]
    table(
        database,
        "products",
        "product_id product_category_name product_photos_qty product_weight_g",
        [(each, chance.choice(names), 1, 225) for each in products],
    )
    database["sellers"].insert_many(
        [
            {"seller_id": each, "seller_zip_code_prefix": f"{13_023 + n}", "seller_city": "campinas"}
            for n, each in enumerate(sellers)
        ]
    )
    customers, orders = [key() for _ in range(500)], [key() for _ in range(500)]
    table(
        database,
        "customers",
        "customer_id customer_unique_id customer_zip_code_prefix customer_city",
        [(each, key(), f"{14_409 + n % 90}", "franca") for n, each in enumerate(customers)],
    )
    table(
        database,
        "orders",
        "order_id customer_id order_status order_purchase_timestamp order_delivered_customer_date",
        [(each, customers[n], "delivered", at(n), at(n + 200)) for n, each in enumerate(orders)],
    )
    table(
        database,
        "order_items",
        "order_id order_item_id product_id seller_id shipping_limit_date",
        [
            (each, place + 1, chance.choice(products), chance.choice(sellers), at(n + 90))
            for n, each in enumerate(orders)
            for place in range(1 + n % 4)
        ],
        price=58.9,
        freight_value=13.29,
    )
    table(
        database,
        "order_payments",
        "order_id payment_sequential payment_type payment_value",
        [(each, place + 1, "voucher", 24.39) for n, each in enumerate(orders) for place in range(1 + n % 2)],
    )
    database["order_reviews"].insert_many(
        [
            {"review_id": key(), "order_id": each, "review_score": 4, "review_creation_date": at(n + 220)}
            for n, each in enumerate(orders[:450])
        ]
    )


@sample(
    """
    encounters.PATIENT -> patients.Id
    encounters.ORGANIZATION -> organizations.Id
    encounters.PROVIDER -> providers.Id
    providers.ORGANIZATION -> organizations.Id
    conditions.PATIENT -> patients.Id
    conditions.ENCOUNTER -> encounters.Id
    observations.PATIENT -> patients.Id
    observations.ENCOUNTER -> encounters.Id
    """,
    {
        ("computed", "providers.ENCOUNTERS"): {"drifted": 6},
        ("mixed-types", "observations.VALUE"): {},
    },
    hints(
        *("encounters.PATIENT", "encounters.ORGANIZATION", "encounters.PROVIDER", "providers.ORGANIZATION"),
        *("conditions.PATIENT", "conditions.ENCOUNTER", "observations.PATIENT", "observations.ENCOUNTER"),
    ),
)
def synthea(database: Database[Any]) -> None:
    """Records of patients: UUIDs as text under the name of what they refer to, in capitals."""
    chance = random.Random(26)

    def key() -> str:
        return str(uuid.UUID(int=chance.getrandbits(128), version=4))

    organizations = [key() for _ in range(20)]
    providers = [key() for _ in range(50)]
    patients = [key() for _ in range(120)]
    database["organizations"].insert_many(
        [
            {"Id": each, "NAME": f"Hospital {n}", "CITY": "Boston", "PHONE": "617"}
            for n, each in enumerate(organizations)
        ]
    )
    table(
        database,
        "patients",
        "Id BIRTHDATE FIRST LAST GENDER CITY",
        [(each, at(-9_000 * n), f"F{n}", f"L{n}", "M", "Boston") for n, each in enumerate(patients)],
    )
    encounters = [
        {
            "Id": key(),
            "START": at(n * 3),
            "STOP": at(n * 3 + 1),
            "PATIENT": chance.choice(patients),
            "ORGANIZATION": chance.choice(organizations),
            "PROVIDER": chance.choice(providers),
            "ENCOUNTERCLASS": chance.choice(["ambulatory", "wellness"]),
            "CODE": 162_673_000 + n % 9,
            "DESCRIPTION": f"Reason {n % 9}",
            "TOTAL_CLAIM_COST": 129.16 + n % 7,
        }
        for n in range(900)
    ]
    counts = {each: sum(row["PROVIDER"] == each for row in encounters) for each in providers}
    table(
        database,
        "providers",
        "Id ORGANIZATION NAME SPECIALITY ENCOUNTERS",
        [
            (each, organizations[n % 20], f"Dr {n}", "GENERAL PRACTICE", counts[each] + (n < 6))
            for n, each in enumerate(providers)
        ],
    )
    database["encounters"].insert_many(encounters)
    table(
        database,
        "conditions",
        "START PATIENT ENCOUNTER CODE DESCRIPTION",
        [
            (each["START"], each["PATIENT"], each["Id"], 44_054_006 + n % 40, f"C {n % 40}")
            for n, each in enumerate(encounters[::2])
        ],
    )
    database["observations"].insert_many(
        [
            {
                "DATE": each["START"],
                "PATIENT": each["PATIENT"],
                "ENCOUNTER": each["Id"],
                "CODE": f"8302-{place}",
                "DESCRIPTION": f"D {place}",
                "VALUE": 20.5 + n % 90 if place else "Never smoker",
                "UNITS": "kg",
            }
            for n, each in enumerate(encounters)
            for place in range(3)
        ]
    )


@sample(
    """
    ratings.book_id -> books.book_id
    to_read.book_id -> books.book_id
    book_tags.goodreads_book_id -> books.goodreads_book_id
    book_tags.tag_id -> tags.tag_id
    """,
    {
        ("computed", "books.ratings_count"): {"drifted": 5},
        ("computed", "books.average_rating"): {"drifted": 5},
    },
    # A book's tags with their numbers may well be a list of the book.
    [
        ("normalised-everything", "book_tags.goodreads_book_id"),
        *hints("book_tags.goodreads_book_id", "book_tags.tag_id"),
    ],
)
def goodbooks(database: Database[Any]) -> None:
    """Books with how many ratings they have and their mean, which some writer forgot."""
    chance = random.Random(27)
    keys = chance.sample(range(1, 9_000_000), 80)
    ratings = rows(
        "user_id book_id rating",
        [(chance.randint(1, 53_000), chance.randint(1, 80), chance.randint(1, 5)) for _ in range(2_000)],
    )
    books = []
    for n in range(1, 81):
        mine = [each["rating"] for each in ratings if each["book_id"] == n]
        books.append(
            {
                "book_id": n,
                "goodreads_book_id": keys[n - 1],
                "isbn": f"{439_023_480 + n * 7}",
                "authors": words(chance, 2),
                "original_publication_year": 1_950 + n % 60,
                "title": words(chance, 3),
                "language_code": "eng",
                "average_rating": round(sum(mine) / len(mine), 2) + (0.2 if n <= 5 else 0),
                "ratings_count": len(mine) + (2 if n > 75 else 0),
            }
        )
    database["books"].insert_many(books)
    database["ratings"].insert_many(ratings)
    database["tags"].insert_many([{"tag_id": n, "tag_name": f"tag {n}"} for n in range(300)])
    database["book_tags"].insert_many(
        [
            {"goodreads_book_id": each, "tag_id": tag, "count": chance.randint(1, 9_000)}
            for each in keys
            for tag in chance.sample(range(300), 8)
        ]
    )
    database["to_read"].insert_many(
        [{"user_id": chance.randint(1, 53_000), "book_id": chance.randint(1, 80)} for _ in range(600)]
    )


@sample(
    """
    events.actor.id -> users.id
    events.repo.id -> repos.id
    repos.owner.id -> users.id
    """,
    {
        ("extended-reference", "events.actor.login"): {"stale": 12},
        ("polymorphic", "events.type"): {"kinds": 4},
    },
)
def github(database: Database[Any]) -> None:
    """Events of several kinds, whose payload is another one for each kind."""
    chance = random.Random(28)
    users = [
        {"id": n * 911 + 1, "login": f"user{n}", "avatar_url": f"https://x.example/{n}", "site_admin": False}
        for n in range(80)
    ]
    repos = [
        {
            "id": n * 7_919 + 5,
            "full_name": f"user{n % 80}/repo{n}",
            "owner": {"id": users[n % 80]["id"], "login": users[n % 80]["login"]},
            "fork": False,
            "language": "Python",
        }
        for n in range(120)
    ]

    def payload(kind: str, n: int) -> dict[str, Any]:
        if kind == "PushEvent":
            return {
                "push_id": n,
                "size": 1,
                "ref": "refs/heads/main",
                "commits": [{"sha": f"{n:040x}", "message": "m"}],
            }
        if kind == "WatchEvent":
            return {"action": "started"}
        if kind == "IssuesEvent":
            return {"action": "opened", "issue": {"number": n, "title": words(chance, 4), "state": "open"}}
        return {
            "action": "created",
            "comment": {"body": words(chance, 9)},
            "pull_request": {"number": n, "title": "t"},
        }

    database["users"].insert_many(users)
    database["repos"].insert_many(repos)
    events = []
    for n in range(800):
        kind = ["PushEvent", "WatchEvent", "IssuesEvent", "PullRequestReviewCommentEvent"][n % 4]
        user, repo = chance.choice(users), chance.choice(repos)
        login = f"former{n}" if n < 12 else user["login"]
        events.append(
            {
                "_id": ObjectId(),
                "id": str(22_000_000_000 + n * 17),
                "type": kind,
                "actor": {"id": user["id"], "login": login, "avatar_url": user["avatar_url"]},
                "repo": {"id": repo["id"], "name": repo["full_name"]},
                "payload": payload(kind, n),
                "public": True,
                "created_at": at(n / 60),
            }
        )
    database["events"].insert_many(events)
