"""Databases of several kinds that are modelled well: a scan has nothing to say about them."""

from __future__ import annotations

import datetime as dt
import itertools
import random
import threading
import uuid
from collections.abc import Callable
from typing import Any

from bson import Binary, Decimal128, Int64, ObjectId
from pymongo.database import Database

from tests.advisor.tables import rows

START = dt.datetime(2025, 1, 1, tzinfo=dt.UTC)
READERS = 6
Fill = Callable[[Database[Any]], None]


def at(minutes: float) -> dt.datetime:
    return START + dt.timedelta(minutes=minutes)


def checked(database: Database[Any], name: str, documents: list[dict[str, Any]], field: str) -> None:
    """A collection with a validator that asks for one field."""
    database.create_collection(name, validator={"$jsonSchema": {"required": [field]}})
    database[name].insert_many(documents)


def accounts(database: Database[Any]) -> None:
    """Users with sessions that expire and tokens that are looked up by themselves."""
    teams = [{"_id": ObjectId(), "name": f"t{n}", "plan": "pro"} for n in range(40)]
    users = rows(
        "_id email team_id team",
        [(ObjectId(), f"u{n}@example.org", teams[n % 40]["_id"], {"name": f"t{n % 40}"}) for n in range(300)],
    )
    checked(database, "teams", teams, "name")
    checked(database, "users", users, "email")
    checked(
        database,
        "sessions",
        [{"user_id": users[n % 300]["_id"], "agent": "x", "expires_at": at(n)} for n in range(600)],
        "user_id",
    )
    checked(
        database,
        "tokens",
        [{"user_id": users[n]["_id"], "digest": f"d{n}", "used": at(n)} for n in range(300)],
        "user_id",
    )
    database["users"].create_index("email", unique=True)
    database["sessions"].create_index("expires_at", expireAfterSeconds=10**9)
    database["tokens"].create_index("digest", unique=True)


def busy_accounts(database: Database[Any]) -> None:
    """The same, while many clients each read one thing."""
    accounts(database)
    user = database["users"].find_one({}, {"_id": 1})
    wanted = itertools.cycle(
        [("users", {"_id": user and user["_id"]}), ("sessions", {"_id": 1}), ("tokens", {"digest": "d7"})]
    )

    def read(name: str, condition: dict[str, Any]) -> None:
        # A session each, as processes of their own have.
        with database.client.start_session() as session:
            for _ in range(25):
                database[name].find_one(condition, session=session)

    database.command("profile", 2)
    threads = [threading.Thread(target=read, args=next(wanted)) for _ in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    database.command("profile", 0)


def ledger(database: Database[Any]) -> None:
    """Bookings look like readings, but others refer to them."""
    money = Decimal128("1.50")
    checked(
        database,
        "accounts",
        [{"_id": Int64(n), "iban": f"AT{n}", "balance": money} for n in range(40)],
        "iban",
    )
    bookings = [
        {"_id": ObjectId(), "account_id": Int64(n % 40), "at": at(n), "amount": money} for n in range(5_200)
    ]
    checked(database, "bookings", bookings, "amount")
    checked(
        database,
        "receipts",
        [{"booking_id": each["_id"], "booking": {"amount": money}, "by": ["x"]} for each in bookings[:300]],
        "booking_id",
    )
    database["bookings"].create_index([("account_id", 1), ("at", -1)])


def numbered(database: Database[Any]) -> None:
    """Orders look like readings, but each has a number of its own."""
    rows = [{"number": n, "customer_no": n % 40, "at": at(n), "total": n / 3} for n in range(5_200)]
    checked(database, "orders", rows, "number")
    database["orders"].create_index("number", unique=True)


def buckets(database: Database[Any]) -> None:
    """Buckets as the literature draws them: long arrays, bounded on purpose."""
    places = [{"_id": f"s{n}", "place": {"type": "Point", "coordinates": [1.5, 2.5]}} for n in range(30)]
    checked(database, "sensors", places, "place")
    checked(
        database,
        "measurements",
        [
            {
                "sensor_id": f"s{n % 30}",
                "start_date": at(60 * n),
                "end_date": at(60 * n + 60),
                "transaction_count": 60,
                "sum_temperature": 1200.5,
                "measurements": [{"timestamp": at(60 * n + m), "temperature": 20.5} for m in range(60)],
            }
            for n in range(200)
        ],
        "sensor_id",
    )


def pages(database: Database[Any]) -> None:
    """A long list in pages, each told apart by its number."""
    checked(
        database, "people", [{"_id": n, "name": f"n{n}", "fans": [1] * (n % 9)} for n in range(120)], "name"
    )
    checked(
        database,
        "fan_pages",
        [{"person_id": 7, "page": n, "fans": list(range(1_000))} for n in range(30)],
        "person_id",
    )
    database["fan_pages"].create_index([("person_id", 1), ("page", 1)], unique=True)


def chat(database: Database[Any]) -> None:
    """UUIDs as ids, a bounded array of them, and copies of the hot fields."""
    chance = random.Random(1)

    def identity() -> Binary:
        return Binary.from_uuid(uuid.UUID(int=chance.getrandbits(128)))

    members = [{"_id": identity(), "name": f"m{n}", "handle": f"h{n}"} for n in range(100)]
    channels = [
        {"_id": identity(), "name": f"c{n}", "member_ids": [each["_id"] for each in members[n : n + 20]]}
        for n in range(60)
    ]
    checked(database, "members", members, "name")
    checked(database, "channels", channels, "name")
    checked(
        database,
        "messages",
        [
            {
                "_id": identity(),
                "channel_id": channels[n % 60]["_id"],
                "channel_name": f"c{n % 60}",
                "sender": {"_id": members[n % 100]["_id"], "name": f"m{n % 100}"},
                "text": "hello",
                "at": at(n),
            }
            for n in range(1_500)
        ],
        "text",
    )
    database["messages"].create_index([("channel_id", 1), ("at", -1)])


def blog(database: Database[Any]) -> None:
    """Optional fields, arrays of ids, and the newest comments beside the post."""
    authors = [{"_id": ObjectId(), "name": f"a{n}", "bio": "x" * 200} for n in range(30)]
    posts = [
        {
            "_id": ObjectId(),
            "title": f"t{n}",
            "author": {"_id": authors[n % 30]["_id"], "name": f"a{n % 30}"},
            "tag_ids": [f"t{n % 20}", f"t{n % 7}"],
            "body": "x" * (500 + n),
            **({"subtitle": "s"} if n % 3 == 0 else {}),
            **({"hero": {"url": "u", "width": 9}} if n % 7 == 0 else {}),
        }
        for n in range(400)
    ]
    checked(database, "authors", authors, "name")
    checked(database, "tags", [{"_id": f"t{n}", "name": f"T{n}"} for n in range(20)], "name")
    checked(database, "posts", posts, "title")
    checked(
        database,
        "comments",
        rows(
            "post_id author text at",
            [(posts[n * n % 400]["_id"], {"name": "a"}, "x" * (n % 50), at(n)) for n in range(1_500)],
        ),
        "text",
    )


FILLS: dict[str, Fill] = {
    fill.__name__: fill for fill in (accounts, busy_accounts, ledger, numbered, buckets, pages, chat, blog)
}
