"""Models with versions, and documents of all of them."""

from __future__ import annotations

from typing import Any

from bson import ObjectId

from treadle import Document, migration
from treadle.graph.versions import VersionChain


class User(Document, collection="users", version=3):
    name: str
    phones: list[str] = []
    n: int = 0
    initial: str | None = None


@migration(User, from_version=1)
def split_phone(document: dict) -> dict:
    phone = document.pop("phone", None)
    document["phones"] = [] if phone is None else phone.split(",")
    return document


@split_phone.down
def join_phone(document: dict) -> dict:
    phones = document.pop("phones")
    if phones:
        document["phone"] = ",".join(phones)
    return document


@migration(User, from_version=2)
def add_initial(document: dict) -> dict:
    document["initial"] = document["name"][:1] or None
    return document


@add_initial.down
def drop_initial(document: dict) -> dict:
    document.pop("initial", None)
    return document


class Stored(Document, collection="users", version=3, migrate_on_read="store"):
    name: str
    phones: list[str] = []
    n: int = 0
    initial: str | None = None


for origin, step in ((1, split_phone), (2, add_initial)):
    migration(Stored, origin, up=step.up, down=step.back)


class Piped(Document, collection="piped", version=3):
    name: str
    first: str
    last: str | None = None
    tags: list[str] = []
    n: int = 0


migration(
    Piped,
    1,
    up=[{"$set": {"first": {"$arrayElemAt": [{"$split": ["$name", " "]}, 0]}, "last": {"$literal": None}}}],
    down=[{"$unset": ["first", "last"]}],
)

migration(Piped, 2, up=[{"$set": {"tags": []}}], down=[{"$unset": "tags"}])


class PipedStored(Document, collection="piped", version=3, migrate_on_read="store"):
    name: str
    first: str
    last: str | None = None
    tags: list[str] = []
    n: int = 0


for number in (1, 2):
    one = VersionChain(Piped).steps[number]
    migration(PipedStored, number, up=one.up, down=one.back)


def old_users(database: Any, count: int = 10) -> list[dict[str, Any]]:
    documents: list[dict[str, Any]] = []
    for number in range(count):
        raw: dict[str, Any] = {"_id": number, "name": f"u{number}", "n": 0}
        if number % 3 == 0:
            raw["phone"] = f"{number},1"
        elif number % 3 == 1:
            raw |= {"schema_version": 1, "phone": "7"}
        else:
            raw |= {"schema_version": 2, "phones": ["5"]}
        documents.append(raw)
    database["users"].insert_many([dict(raw, _id=ObjectId(f"{raw['_id']:024x}")) for raw in documents])
    return documents
