"""Two releases of one application, to be run as processes: `python -m tests.deployed old URI DATABASE …`.

`old` and `new` write the same documents for some seconds and then print, as
JSON, how often they increased each. `migrate` migrates until it is done.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from bson import ObjectId
from pymongo import MongoClient

from treadle import Document, Store, migration

# However busy the machine is.
WRITES_MIN = 20
IDS = [ObjectId(f"{number:024x}") for number in range(24)]


def split_phone(document: dict[str, Any]) -> dict[str, Any]:
    document["phones"] = document.pop("phone").split(",")
    return document


def join_phone(document: dict[str, Any]) -> dict[str, Any]:
    document["phone"] = ",".join(document.pop("phones"))
    return document


class OldUser(Document, collection="users", version=1, validation="strict"):
    """The release before: it knows the next migration, and so the way back from it."""

    name: str
    phone: str
    old: int = 0
    new: int = 0
    by_hand: int = 0


class NewUser(Document, collection="users", version=2, validation="strict"):
    name: str
    phones: list[str]
    old: int = 0
    new: int = 0
    by_hand: int = 0


for model in (OldUser, NewUser):
    migration(model, 1, up=split_phone, down=join_phone)


def write(store: Store, model: type[Any], field: str, seconds: float, seed: int) -> dict[str, int]:
    """Increase a counter, and change the phone, of random documents; how often each was increased."""
    chance = random.Random(seed)
    done = dict.fromkeys(map(str, IDS), 0)
    until = time.monotonic() + seconds
    while time.monotonic() < until or sum(done.values()) <= WRITES_MIN:
        identity = chance.choice(IDS)
        number = str(chance.randrange(1000))
        phone = {"phone": number} if model is OldUser else {"phones": [number]}
        after = store.update(model, identity, {"$inc": {field: 1}, "$set": phone})
        assert after is not None
        done[str(identity)] += 1
        for user in store.find(model, {"_id": {"$in": chance.sample(IDS, 3)}}):
            assert user.name == "x"
    return done


def write_by_hand(uri: str, name: str, seconds: float, seed: int) -> dict[str, int]:
    """The same without Treadle, and without any notion of versions."""
    chance = random.Random(seed)
    users = MongoClient[dict[str, Any]](uri)[name]["users"]
    done = dict.fromkeys(map(str, IDS), 0)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        identity = chance.choice(IDS)
        done[str(identity)] += users.update_one({"_id": identity}, {"$inc": {"by_hand": 1}}).modified_count
    return done


def main(role: str, uri: str, name: str, *rest: str) -> None:
    if role == "hand":
        print(json.dumps(write_by_hand(uri, name, float(rest[0]), int(rest[1]))))  # noqa: T201
        return
    model: type[Any] = OldUser if role == "old" else NewUser
    store = Store(MongoClient(uri)[name], [model])
    if role == "migrate":
        store.migrate(NewUser, to=int(rest[0]), batch=int(rest[1]))
        return
    store.setup()
    print(json.dumps(write(store, model, role, float(rest[0]), int(rest[1]))))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
