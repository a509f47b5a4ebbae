"""More databases that are modelled well, from other domains; each holds what only resembles a symptom."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

from bson import Decimal128, ObjectId
from gridfs import GridFSBucket
from pymongo.database import Database

from tests.advisor.tables import rows
from tests.advisor.well_modelled import Fill, at, checked


def logistics(database: Database[Any]) -> None:
    """References by a code, copies that are right, short logs of events, tariffs of the day of shipping."""
    chance = random.Random(11)
    carriers = [
        {"code": f"C{chance.randrange(10**6):06}", "name": f"carrier {n}", "country": "AT"} for n in range(40)
    ]
    depots = [{"_id": f"D{n:03}", "city": f"city {n}", "tariff": 10 + n / 4} for n in range(60)]
    checked(database, "carriers", carriers, "code")
    database["carriers"].create_index("code", unique=True)
    checked(database, "depots", depots, "city")
    shipments = []
    for n in range(1_500):
        carrier, depot = carriers[n % 40], depots[n * 7 % 60]
        shipments.append(
            {
                "carrier": carrier["code"],
                "carrier_name": carrier["name"],
                "depot_id": depot["_id"],
                "depot": {"city": depot["city"]},
                # What it cost then, not what it costs today.
                "depot_tariff": round(8 + chance.random() * 20, 2),
                "weight": n % 40 / 3,
                "events": [
                    {"at": at(n * 60 + place), "what": "scanned", "depot_id": depots[(n + place) % 60]["_id"]}
                    for place in range(n % 6)
                ],
            }
        )
    checked(database, "shipments", shipments, "carrier")
    database["shipments"].create_index([("carrier", 1), ("weight", -1)])


def appointments(database: Database[Any]) -> None:
    """A clinic: cards of the patient and the doctor, a history of one status, vitals where they belong."""
    doctors = [{"_id": ObjectId(), "name": f"Dr. {n}", "field": "eyes"} for n in range(25)]
    patients = [
        {"_id": ObjectId(), "number": 900_000 + n * 17, "name": f"patient {n}", "born": at(-n * 10_000)}
        for n in range(400)
    ]
    checked(database, "doctors", doctors, "name")
    checked(database, "patients", patients, "number")
    database["patients"].create_index("number", unique=True)
    checked(
        database,
        "appointments",
        [
            {
                "patient_id": patients[n * 13 % 400]["_id"],
                "patient": {"name": patients[n * 13 % 400]["name"]},
                "doctor_id": doctors[n % 25]["_id"],
                "doctor": {"name": doctors[n % 25]["name"]},
                "starts": at(n * 20),
                "status": ["asked", "set", "done"][n % 3],
                "status_history": [
                    {"status": each, "at": at(n * 20 - 9)} for each in ["asked", "set", "done"][: n % 3 + 1]
                ],
                **({"vitals": {"pulse": 60 + n % 30, "weight": 70.5}} if n % 3 == 2 else {}),
            }
            for n in range(1_800)
        ],
        "patient_id",
    )
    database["appointments"].create_index([("doctor_id", 1), ("starts", 1)])


def leaderboard(database: Database[Any]) -> None:
    """A game: counters that are right, matches with their players, one standing per season and player."""
    players = [{"_id": n, "handle": f"h{n * 37 % 1009}", "level": n % 60} for n in range(300)]
    matches = []
    for n in range(900):
        seats = random.Random(n).sample(players, 2 + n % 4)
        matches.append(
            {
                "_id": ObjectId(),
                "played": at(n * 11),
                "map": f"map {n % 9}",
                "players": [
                    {"player_id": each["_id"], "handle": each["handle"], "score": (n + seat) % 50}
                    for seat, each in enumerate(seats)
                ],
            }
        )
    played = [seat["player_id"] for match in matches for seat in match["players"]]
    for each in players:
        each["match_count"] = played.count(each["_id"])
    checked(database, "players", players, "handle")
    checked(database, "matches", matches, "played")
    checked(
        database,
        "standings",
        rows(
            "season player_id handle score rank",
            [
                (season, each["_id"], each["handle"], (each["_id"] * season) % 997, number)
                for season in range(1, 7)
                for number, each in enumerate(players, 1)
            ],
        ),
        "season",
    )
    database["players"].create_index("handle", unique=True)
    database["standings"].create_index([("season", 1), ("player_id", 1)], unique=True)
    database["standings"].create_index([("season", 1), ("score", -1)])


def fleet(database: Database[Any]) -> None:
    """Devices with hourly buckets, alerts by serial number, firmware in GridFS, commands that expire."""
    devices = [
        {"_id": f"dev-{n * 7919 % 100_000:05}", "model": f"m{n % 4}", "site": {"name": f"site {n % 12}"}}
        for n in range(80)
    ]
    checked(database, "devices", devices, "model")
    checked(
        database,
        "telemetry",
        [
            {
                "device_id": device["_id"],
                "hour": at(hour * 60),
                "count": 12,
                "temperature": {"min": 1.5, "max": 3.5, "sum": 30.0},
                "samples": [{"at": at(hour * 60 + 5 * place), "temperature": 2.5} for place in range(12)],
            }
            for device in devices
            for hour in range(20)
        ],
        "device_id",
    )
    database["telemetry"].create_index([("device_id", 1), ("hour", 1)], unique=True)
    checked(
        database,
        "alerts",
        [
            {
                "device": devices[n * n % 80]["_id"],
                "site": f"site {n % 12}",
                "raised": at(n * 31),
                "text": f"alert {n}",
                **({"closed": at(n * 31 + 9), "closed_by": "x"} if n % 4 else {}),
            }
            for n in range(600)
        ],
        "device",
    )
    checked(
        database,
        "commands",
        [{"device": devices[n % 80]["_id"], "what": "restart", "sent": at(n)} for n in range(400)],
        "device",
    )
    database["commands"].create_index("sent", expireAfterSeconds=10**9)
    bucket = GridFSBucket(database, bucket_name="firmware", chunk_size_bytes=60_000)
    for n in range(5):
        bucket.upload_from_stream(f"image {n}", bytes(200_000), metadata={"model": f"m{n % 4}"})


def publishing(database: Database[Any]) -> None:
    """Books with their authors' names, chapters apart because they are long, prices of several shops."""
    authors = [{"_id": ObjectId(), "name": f"author {n}", "country": "AT"} for n in range(90)]
    books = [
        {
            "_id": f"978{n * 7_907 % 10**7:07}",
            "title": f"title {n}",
            "authors": [
                {"_id": authors[(n + place) % 90]["_id"], "name": authors[(n + place) % 90]["name"]}
                for place in range(1 + n % 3)
            ],
            "price": Decimal128(f"{5 + n % 40}.90"),
            "formats": ["paper", "epub"][: 1 + n % 2],
            "chapter_count": 4 + n % 8,
        }
        for n in range(250)
    ]
    checked(database, "authors", authors, "name")
    checked(database, "books", books, "title")
    checked(
        database,
        "chapters",
        [
            {"book_id": book["_id"], "number": number, "title": f"c{number}", "text": "word " * 900}
            for book in books
            for number in range(1, 1 + int(str(book["chapter_count"])))
        ],
        "book_id",
    )
    database["chapters"].create_index([("book_id", 1), ("number", 1)], unique=True)
    checked(
        database,
        "orders",
        [
            {
                "_id": n,
                "placed": at(n * 90),
                "lines": [
                    {
                        "book_id": books[(n * 3 + place) % 250]["_id"],
                        "title": books[(n * 3 + place) % 250]["title"],
                        # The price at which it was sold.
                        "price": Decimal128(f"{4 + n % 30}.50"),
                        "quantity": 1 + place,
                    }
                    for place in range(1 + n % 4)
                ],
            }
            for n in range(700)
        ],
        "lines",
    )


def ticketing(database: Database[Any]) -> None:
    """Seats are unique per event, buyers are known by their mail address, and a page reads one collection."""
    venues = [
        {"_id": n, "name": f"hall {n}", "rows": [{"row": f"{row}", "seats": 20} for row in range(12)]}
        for n in range(15)
    ]
    events = rows(
        "_id title starts venue_id venue sold",
        [
            (ObjectId(), f"evening {n}", at(n * 1_440), n % 15, {"name": f"hall {n % 15}"}, 24)
            for n in range(120)
        ],
    )
    checked(database, "venues", venues, "name")
    checked(database, "events", events, "title")
    tickets = [
        {
            "event_id": event["_id"],
            "event": {"title": event["title"], "starts": event["starts"]},
            "seat": f"{seat // 6}-{seat % 6}",
            "price": 20 + seat % 4 * 15,
            "buyer": f"buyer{(number * 24 + seat) * 31 % 900}@example.org",
            "bought": event["starts"] - dt.timedelta(days=seat),
        }
        for number, event in enumerate(events)
        for seat in range(24)
    ]
    checked(database, "tickets", tickets, "seat")
    database["tickets"].create_index([("event_id", 1), ("seat", 1)], unique=True)
    database["tickets"].create_index("buyer")
    mine = [each for each in tickets if each["buyer"] == "buyer31@example.org"]
    database.command("profile", 2)
    for each in mine * 15:
        list(database["tickets"].find({"buyer": each["buyer"]}))
        database["events"].find_one({"_id": each["event_id"]})
    database.command("profile", 0)


FILLS: dict[str, Fill] = {
    fill.__name__: fill for fill in (logistics, appointments, leaderboard, fleet, publishing, ticketing)
}
