"""Databases shaped like well-known public samples, with what a careful reader would say of each.

Everything that is not listed is to stay unsaid: a relation that is not named
is wrong, and so is a finding, but for those in `tolerated`. That nothing is
validated is true of all of them and not listed.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bson import ObjectId
from pymongo.database import Database

from tests.advisor.tables import rows, table

START = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
Fill = Callable[[Database[Any]], None]
Place = tuple[str, str]


def at(hours: float) -> dt.datetime:
    return START + dt.timedelta(hours=hours)


@dataclass(frozen=True)
class Sample:
    """A database with its truths."""

    fill: Fill
    # `child.path -> parent.key`
    relations: frozenset[str]
    # code and place, with numbers that the evidence must give
    findings: dict[Place, dict[str, Any]]
    tolerated: frozenset[Place]


SAMPLES: dict[str, Sample] = {}


def sample(
    relations: str = "",
    findings: dict[Place, dict[str, Any]] | None = None,
    tolerated: Iterable[Place] = (),
) -> Callable[[Fill], Fill]:
    def note(fill: Fill) -> Fill:
        lines = frozenset(line.strip() for line in relations.strip().splitlines())
        SAMPLES[fill.__name__] = Sample(fill, lines, findings or {}, frozenset(tolerated))
        return fill

    return note


def words(chance: random.Random, number: int) -> str:
    return " ".join(
        "".join(chance.choices("abcdefghiklmnoprstuvw", k=chance.randint(2, 9))) for _ in range(number)
    )


# -- films and their comments -----------------------------------------------------------------


@sample(
    """
    comments.movie_id -> movies._id
    comments.email -> users.email
    sessions.user_id -> users.email
    """,
    {
        ("computed", "movies.num_mflix_comments"): {"drifted": 9},
        ("extended-reference", "comments.name"): {"stale": 14},
        ("mixed-types", "movies.year"): {},
    },
)
def mflix(database: Database[Any]) -> None:
    """A catalogue with a comment count that has drifted, and comments that repeat their writer's name."""
    chance = random.Random(1)
    users = rows(
        "_id name email password",
        [(ObjectId(), f"Name {n}", f"n{n}@gameof.example", "$2b$12$" + "x" * 53) for n in range(60)],
    )
    movies, comments = [], []
    for n in range(150):
        movie = ObjectId()
        number = chance.choice([0, 0, 1, 2, 3, 8])
        for _ in range(number):
            user = chance.choice(users)
            comments.append(
                {
                    "name": user["name"],
                    "email": user["email"],
                    "movie_id": movie,
                    "text": words(chance, 12),
                    "date": at(chance.uniform(0, 90_000)),
                }
            )
        movies.append(
            {
                "_id": movie,
                "plot": words(chance, 20),
                "genres": chance.sample(["Drama", "Short", "Comedy", "Western"], 2),
                "runtime": chance.randint(1, 200),
                "cast": [words(chance, 2) for _ in range(4)],
                "num_mflix_comments": number + (n % 17 == 0),
                "title": words(chance, 3),
                "fullplot": words(chance, 60),
                "countries": ["USA"],
                "released": at(-24 * n),
                "directors": [words(chance, 2)],
                "rated": chance.choice(["PG", "TV-G", "R"]),
                "awards": {"wins": n % 4, "nominations": n % 9, "text": "1 win."},
                "lastupdated": f"2015-08-{n % 28 + 1:02} 00:03:50.133000000",
                "year": 1900 + n % 110 if n % 30 else "1981è",
                "imdb": {"rating": n % 90 / 10, "votes": n * 37, "id": 5_000 + n},
                "type": "movie",
                "tomatoes": {
                    "viewer": {"rating": 3.0, "numReviews": n * 3, "meter": n % 100},
                    "critic": {"rating": 6.1, "numReviews": n, "meter": n % 100},
                    "lastUpdated": at(n),
                },
            }
        )
    for each in comments[:14]:
        each["name"] = "Former " + each["name"]
    database["users"].insert_many(users)
    database["movies"].insert_many(movies)
    database["comments"].insert_many(comments)
    database["sessions"].insert_many(
        [{"user_id": user["email"], "jwt": "eyJ" + words(chance, 20)} for user in users[:40]]
    )
    database["theaters"].insert_many(
        [
            {
                "theaterId": 1_000 + n,
                "location": {
                    "address": {
                        "street1": words(chance, 3),
                        "city": words(chance, 1),
                        "state": "MN",
                        "zipcode": "55425",
                    },
                    "geo": {"type": "Point", "coordinates": [-93.2 + n / 9, 44.8]},
                },
            }
            for n in range(80)
        ]
    )


# -- accounts and buckets of their transactions -------------------------------------------------


@sample(
    """
    customers.accounts[] -> accounts.account_id
    transactions.account_id -> accounts.account_id
    """
)
def analytics(database: Database[Any]) -> None:
    """Modelled well: transactions are in buckets of a hundred, customers hold their account numbers."""
    chance = random.Random(3)
    numbers = chance.sample(range(50_000, 999_999), 350)
    table(
        database,
        "accounts",
        "account_id limit products",
        [(each, 10_000 - each % 3 * 1_000, ["InvestmentStock", "Brokerage"]) for each in numbers],
    )
    database["customers"].insert_many(
        [
            {
                "username": f"user{n * 37 % 997}",
                "name": words(chance, 2),
                "address": words(chance, 6),
                "birthdate": at(-24 * 365 * 30 + n),
                "email": f"m{n}@example.com",
                "active": True,
                "accounts": chance.sample(numbers, chance.randint(1, 6)),
                "tier_and_details": {
                    f"{chance.getrandbits(128):032x}": {"tier": "Bronze", "benefits": ["x"], "active": True}
                    for _ in range(n % 3)
                },
            }
            for n in range(120)
        ]
    )
    database["transactions"].insert_many(
        [
            {
                "account_id": each,
                "transaction_count": count,
                "bucket_start_date": at(-90_000),
                "bucket_end_date": at(0),
                "transactions": [
                    {
                        "date": at(-count * 100 + place * 100),
                        "amount": chance.randint(1, 9_999),
                        "transaction_code": chance.choice(["buy", "sell"]),
                        "symbol": chance.choice(["adbe", "msft", "team"]),
                        "price": str(chance.uniform(9, 99)),
                        "total": str(chance.uniform(999, 9_999)),
                    }
                    for place in range(count)
                ],
            }
            for each in numbers
            for count in [chance.randint(1, 100)]
        ]
    )


# -- one collection of everything ------------------------------------------------------------------


@sample(
    findings={
        ("subset", "posts.comments"): {"items, median": 100},
        ("mixed-types", "trips.birth year"): {},
    }
)
def training(database: Database[Any]) -> None:
    """Unrelated collections, whose codes and numbers coincide and do not refer."""
    chance = random.Random(5)
    letters = "ABCDEFGHIKLMNOPRSTUVWYZ"
    airports = ["".join(chance.choices(letters, k=3)) for _ in range(90)]
    database["routes"].insert_many(
        [
            {
                "airline": {"id": n % 30 + 20, "name": f"Air {n % 30}", "alias": "2G", "iata": "CRG"},
                "src_airport": chance.choice(airports),
                "dst_airport": chance.choice(airports),
                "codeshare": "",
                "stops": 0,
                "airplane": chance.choice(["CR2", "A81", "738"]),
            }
            for n in range(700)
        ]
    )
    database["zips"].insert_many(
        [
            {
                "city": words(chance, 1).upper(),
                "zip": f"{35_000 + n}",
                "loc": {"y": 33.1 + n / 99, "x": 86.2},
                "pop": chance.randint(10, 30_000),
                "state": chance.choice(["AL", "NY", "CA"]),
            }
            for n in range(500)
        ]
    )
    database["grades"].insert_many(
        [
            {
                "student_id": float(n // 10),
                "scores": [
                    {"type": kind, "score": chance.uniform(0, 100)} for kind in ("exam", "quiz", "homework")
                ],
                "class_id": float(chance.randint(1, 500)),
            }
            for n in range(600)
        ]
    )
    database["inspections"].insert_many(
        [
            {
                "id": f"{n}-2015-ENFO",
                "certificate_number": 9_278_806 + n,
                "business_name": words(chance, 3).upper(),
                "date": "Feb 20 2015",
                "result": chance.choice(["No Violation Issued", "Pass", "Fail"]),
                "sector": "Cigarette Retail Dealer - 127",
                "address": {"city": "BROOKLYN", "zip": 11_200 + n % 40, "street": "AVE", "number": n},
            }
            for n in range(500)
        ]
    )
    database["posts"].insert_many(
        [
            {
                "body": words(chance, 80),
                "permalink": "".join(chance.choices(letters, k=20)),
                "author": "machine",
                "title": words(chance, 3),
                "tags": [words(chance, 1) for _ in range(20)],
                "comments": [
                    {"body": words(chance, 15), "email": "a@b.example", "author": words(chance, 2)}
                    for _ in range(100)
                ],
                "date": at(n),
            }
            for n in range(40)
        ]
    )
    database["trips"].insert_many(
        [
            {
                "tripduration": chance.randint(60, 3_000),
                "start station id": chance.randint(1, 300),
                "start station name": words(chance, 3),
                "end station id": chance.randint(1, 300),
                "end station name": words(chance, 3),
                "bikeid": chance.randint(14_000, 14_200),
                "usertype": "Subscriber" if n % 9 else "Customer",
                "birth year": 1_960 + n % 40 if n % 9 else "",
                "gender": n % 3,
                "start station location": {"type": "Point", "coordinates": [-73.9, 40.7]},
                "end station location": {"type": "Point", "coordinates": [-73.9, 40.7]},
                "start time": at(n / 40),
                "stop time": at(n / 40 + chance.random()),
            }
            for n in range(2_500)
        ]
    )
