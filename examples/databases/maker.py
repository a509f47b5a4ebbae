"""What the generators share: a seeded chance, ids with a time in them, and writing in batches."""

from __future__ import annotations

import datetime as dt
import itertools
import random
from collections.abc import Iterable
from typing import Any

from bson import ObjectId
from pymongo.database import Database

BATCH = 5_000
START = dt.datetime(2025, 1, 1, tzinfo=dt.UTC)


class Maker:
    """Fills one database; equal seeds give equal documents, ids included."""

    def __init__(self, database: Database[Any], scale: float = 1.0, seed: int = 20_250_101) -> None:
        self.database = database
        self.scale = scale
        self.chance = random.Random(seed)
        self._numbers = itertools.count(1)

    def number(self, full: int) -> int:
        """How many, at this scale."""
        return max(1, round(full * self.scale))

    def identity(self, moment: dt.datetime = START) -> ObjectId:
        """An ObjectId that was made at that moment."""
        return ObjectId(int(moment.timestamp()).to_bytes(4, "big") + next(self._numbers).to_bytes(8, "big"))

    def moment(self, days: float) -> dt.datetime:
        return START + dt.timedelta(days=days)

    def insert(self, collection: str, documents: Iterable[dict[str, Any]]) -> None:
        rest = iter(documents)
        while batch := list(itertools.islice(rest, BATCH)):
            self.database[collection].insert_many(batch, ordered=False)

    def word(self, length: int = 7) -> str:
        return "".join(self.chance.choice("abcdefghiklmnoprstuw") for _ in range(length))

    def power(self, least: int, most: int, exponent: float = 2.0) -> int:
        """A number from a power law: usually near the least, rarely near the most."""
        share = self.chance.random()
        return min(most, int(least / (1 - share) ** (1 / (exponent - 1))))

    def validate(self, collection: str, required: dict[str, str]) -> None:
        """A collection with a validator of these fields and types."""
        schema = {
            "bsonType": "object",
            "required": list(required),
            "properties": {name: {"bsonType": kind} for name, kind in required.items()},
        }
        self.database.create_collection(collection, validator={"$jsonSchema": schema})
