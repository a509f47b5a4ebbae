"""What a process pays before its first request: imports, ten models, a Store; each in a process of its own.

The compiled files are kept in a folder of their own, and are there before the
first round is timed, as they are in an installation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Contender, Context, Goal, Group

ROUNDS = 21
MODELS = 10
SECONDS_MAX = 60.0

TIMED = """
from time import perf_counter
start = perf_counter()
{work}
print(perf_counter() - start)
"""
DRIVER = "import pymongo, pydantic"
FIELDS = """
    name: str
    age: int = 0
    tags: list[str] = []
"""
PYDANTIC = "\n".join(
    [
        "from pymongo import MongoClient",
        "from pydantic import BaseModel",
        *(f"class Model{number}(BaseModel):{FIELDS}" for number in range(MODELS)),
        "client = MongoClient('mongodb://127.0.0.1:1/x', connect=False)",
    ]
)
NUMBERED = "\n".join(
    f'class Plain{number}(Document, collection="plain{number}"):{FIELDS}' for number in range(MODELS - 4)
)
# Four models that are derived from each other, the others plain.
TREADLE = f"""
from typing import Annotated
from pydantic import BaseModel
from pymongo import MongoClient
from treadle import Count, Document, ExtendedReference, Id, Store, Sum

class Card(BaseModel):
    name: str

class Review(Document, collection="reviews"):
    product_id: Id
    rating: int

class Product(Document, collection="products"):
    name: str
    reviews: Annotated[int, Count(Review, by="product_id")] = 0
    total: Annotated[int, Sum(Review, "rating", by="product_id")] = 0

class Customer(Document, collection="customers"):
    name: str

class Order(Document, collection="orders"):
    customer_id: Id
    customer: Annotated[Card | None, ExtendedReference(Customer, by="customer_id")] = None

{NUMBERED}
client = MongoClient('mongodb://127.0.0.1:1/x', connect=False)
Store(client["x"], [Review, Product, Customer, Order, {", ".join(f"Plain{n}" for n in range(MODELS - 4))}])
"""


def groups() -> list[Group]:
    """One group: the same ten models with and without Treadle."""
    return [
        Group(
            "startup",
            "import, ten models and a Store, in a new process",
            _start,
            rounds=ROUNDS,
            seconds_max=40.0,
        )
    ]


def _start(context: Context) -> list[Contender]:
    folder = context.stack.enter_context(tempfile.TemporaryDirectory())
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def started(work: str) -> Callable[[Any], float]:
        def measure(_: Any) -> float:
            command = [sys.executable, "-c", TIMED.format(work=work)]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True, timeout=SECONDS_MAX
            )
            return float(done.stdout)

        return measure

    bound = "PyMongo and ten models of Pydantic"
    return [
        Contender("import pymongo, pydantic", lambda: None, started(DRIVER), measured=True),
        Contender(bound, lambda: None, started(PYDANTIC), measured=True),
        Contender(
            "Treadle, Store with ten models",
            lambda: None,
            started(TREADLE),
            measured=True,
            goal=Goal(250_000, "microseconds", limit=bound),
        ),
    ]
