"""The document that every library stores: about 200 bytes, with a nested model and a short list."""

from __future__ import annotations

from typing import Any

from bson import ObjectId

CITIES = ("Utrecht", "Porto", "Lviv", "Oaxaca", "Kyoto", "Turku")
TAGS = ("early", "press", "staff", "guest", "loyal")


def person(number: int) -> dict[str, Any]:
    """One document as it is stored, with a new id."""
    return {
        "_id": ObjectId(),
        "name": f"Robin Weaver {number}",
        "email": f"robin.{number}@example.org",
        "address": {
            "street": f"{number % 400} Loom Street",
            "city": CITIES[number % len(CITIES)],
            "zip_code": f"{10_000 + number % 80_000}",
        },
        "age": 20 + number % 60,
        "visits": number,
        "score": number / 7,
        "active": number % 3 > 0,
        "tags": [TAGS[number % len(TAGS)], TAGS[number % 3]],
    }


def people(count: int) -> list[dict[str, Any]]:
    return [person(number) for number in range(count)]
