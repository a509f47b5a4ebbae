"""A naive shop with sensors in its greenhouse: plain documents, as many programs begin.

Equal scales give equal documents, ids included. References are bare and
indexed, everything is computed at each read, one seller has far more
followers than all others, and each reading is a document of its own.
"""

from __future__ import annotations

import datetime as dt
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bson import ObjectId
from pymongo.database import Database

SEED = 20_260_101
BATCH = 4_000
COLLECTIONS = ("customers", "products", "reviews", "orders", "sellers", "readings")
FIRST = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
MINUTE = dt.timedelta(minutes=1)
FOLLOWERS_USUAL_MAX = 12

FIRST_NAMES = ("Ada", "Ben", "Chidi", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena")
LAST_NAMES = ("Abara", "Bauer", "Costa", "Dahl", "Evans", "Ferrari", "Grau", "Horvat", "Ito", "Jansen")
TIERS = ("silver", "silver", "silver", "gold", "platinum")
THINGS = ("Loom", "Shuttle", "Yarn", "Bobbin", "Heddle", "Reed", "Spindle", "Dye", "Needle", "Frame")
KINDS = ("small", "large", "folding", "oak", "travel", "wool", "linen", "steel")
WORDS = (
    "arrived early", "well packed", "does what it says", "a little stiff at first", "would buy again",
    "colour as shown", "the manual could be better", "replaced my old one", "good value", "sturdy",
)  # fmt: skip
STATUSES = ("open", "paid", "sent", "sent", "sent")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many documents of each kind; by default those of scale 1, some 45,000 in all."""

    customers: int = 2_000
    products: int = 400
    reviews: int = 20_000
    popular_reviews: int = 2_847
    orders: int = 6_000
    sellers: int = 400
    followers: int = 20_000
    sensors: int = 12
    readings: int = 17_280
    views: int = 1_000

    @classmethod
    def at(cls, scale: float) -> Sizes:
        """Never so few that there is nothing to see."""
        least = asdict(SMALLEST)
        return cls(**{name: max(least[name], round(full * scale)) for name, full in asdict(cls()).items()})


SMALLEST = Sizes(
    customers=100,
    products=20,
    reviews=600,
    popular_reviews=200,
    orders=400,
    # With fewer, the popular seller would be more than one in a hundred, and no outlier.
    sellers=200,
    # The advisor takes an array for an outlier from a thousand items on.
    followers=2_000,
    sensors=4,
    # The advisor sees series from five thousand readings on.
    readings=5_760,
    views=200,
)


@dataclass(frozen=True, slots=True)
class Shop:
    """What was stored, and what the requests are about."""

    documents: dict[str, int]
    popular: ObjectId
    celebrity: ObjectId
    sensor: str
    day: dt.datetime
    # How many page views are counted at a time.
    views: int


class Maker:
    """Makes documents by a random generator with a fixed seed."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.random = random.Random(SEED)
        self._numbers = itertools.count(1)
        self.customers = [self.identity() for _ in range(sizes.customers)]
        self.products = [self.identity() for _ in range(sizes.products)]
        self.sellers = [self.identity() for _ in range(sizes.sellers)]

    def identity(self) -> ObjectId:
        """An ObjectId of the first day; a scan looks at the time in it."""
        return ObjectId(int(FIRST.timestamp()).to_bytes(4, "big") + next(self._numbers).to_bytes(8, "big"))

    def moment(self) -> dt.datetime:
        return FIRST + dt.timedelta(seconds=self.random.randrange(90 * 86_400))

    def name(self) -> str:
        return f"{self.random.choice(FIRST_NAMES)} {self.random.choice(LAST_NAMES)}"

    def make_customers(self) -> Iterator[dict[str, Any]]:
        for number, key in enumerate(self.customers):
            name = self.name()
            email = f"{name.split()[0].lower()}.{number}@example.org"
            yield {"_id": key, "name": name, "email": email, "tier": self.random.choice(TIERS)}

    def make_products(self) -> Iterator[dict[str, Any]]:
        for number, key in enumerate(self.products):
            name = f"{THINGS[number % len(THINGS)]}, {self.random.choice(KINDS)}, no. {number}"
            yield {"_id": key, "name": name, "price": self.random.randrange(200, 90_000) / 100, "views": 0}

    def make_reviews(self) -> Iterator[dict[str, Any]]:
        for number in range(self.sizes.reviews):
            popular = number < self.sizes.popular_reviews
            yield {
                "_id": self.identity(),
                "product_id": self.products[0] if popular else self.random.choice(self.products),
                "rating": self.random.choice((1, 2, 3, 4, 4, 5, 5, 5)),
                "text": ", ".join(self.random.sample(WORDS, 4)),
                "date": self.moment(),
            }

    def make_orders(self) -> Iterator[dict[str, Any]]:
        for _ in range(self.sizes.orders):
            yield {
                "_id": self.identity(),
                "customer_id": self.random.choice(self.customers),
                "total": self.random.randrange(500, 200_000) / 100,
                "status": self.random.choice(STATUSES),
                "placed_at": self.moment(),
            }

    def make_sellers(self) -> Iterator[dict[str, Any]]:
        for number, key in enumerate(self.sellers):
            count = self.random.randrange(FOLLOWERS_USUAL_MAX) if number else self.sizes.followers
            # Followers need not be customers: these ids have no document.
            followers = [self.identity() for _ in range(count)]
            yield {"_id": key, "name": f"{self.name()} & Co.", "followers": followers}

    def make_readings(self) -> Iterator[dict[str, Any]]:
        temperatures = [18.0 + number % 7 for number in range(self.sizes.sensors)]
        for number in range(self.sizes.readings):
            minute, sensor = divmod(number, self.sizes.sensors)
            change = self.random.choice((-0.1, 0.0, 0.1))
            temperatures[sensor] = round(temperatures[sensor] + change, 1)
            yield {
                "_id": self.identity(),
                "sensor_id": sensor_name(sensor),
                "ts": FIRST + minute * MINUTE,
                "temp": temperatures[sensor],
            }


def sensor_name(number: int) -> str:
    return f"greenhouse-{number + 1:02}"


def fill(database: Database[Any], scale: float, progress: Progress) -> Shop:
    """Store the shop; `progress` gets a collection's name, the documents stored, and all of them."""
    sizes = Sizes.at(scale)
    maker = Maker(sizes)
    totals = {name: getattr(sizes, name) for name in COLLECTIONS}
    for name, total in totals.items():
        documents, done = getattr(maker, f"make_{name}")(), 0
        while batch := list(itertools.islice(documents, BATCH)):
            database[name].insert_many(batch, ordered=False)
            done += len(batch)
            progress(name, done, total)
    database["reviews"].create_index("product_id")
    database["orders"].create_index("customer_id")
    database["orders"].create_index([("placed_at", -1), ("_id", 1)])
    database["readings"].create_index([("sensor_id", 1), ("ts", 1)])
    return Shop(totals, maker.products[0], maker.sellers[0], sensor_name(0), FIRST, sizes.views)
