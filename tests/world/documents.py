"""The documents of a world: through the Store, raw, in older versions, and hostile."""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from bson import Decimal128
from pymongo.database import Database

from tests.world.models import (
    ARCHIVE_AFTER,
    DAY,
    START,
    Raw,
    World,
    build,
    item_down,
    owner_down,
    write_versions,
)
from tests.world.oracle import HOSTILE, Oracle, Row, hashable, number_of
from treadle import Store

OWNERS = (1, 2, 3, 4, 5)
# Each source with a value of a wrong type belongs to an owner of its own, from BESIDE on; the owner
# WRONG has such values itself.
BESIDE, WRONG = HOSTILE + 50, HOSTILE + 60
WRONG_VALUES: list[Raw] = [
    {"points": "many"},
    {"unit_price": "dear"},
    {"lines": "none"},
    {"tag": 7},
    {"weight": [1]},
]
NAMES = ("Ada", "Ben", "$name", "")


class Documents:
    """The state of one run, and what it makes documents of."""

    def __init__(self, world: World, database: Database[Any]) -> None:
        self.world = world
        self.random = random.Random(zlib.crc32(world.label.encode()))
        self.models = build(world)
        self.store: Any = Store(database, self.models.all, write_versions=write_versions(world, self.models))
        self.oracle = Oracle(world, database)
        self.database = self.oracle.database
        self.failures: dict[str, list[str]] = {}
        self.log: list[str] = []
        self.item_number = 100
        self.now = START + ARCHIVE_AFTER + 5 * DAY
        self.due = datetime.now(UTC) + DAY
        # Snapshots by item, the items whose reference was written since the last check, and the names that
        # each owner had since then; None where it was missing.
        self.snapshots: dict[Any, tuple[Any, Any]] = {}
        self.moved: set[Any] = set()
        # Snapshots that stay, since the last check, though another program changed the reference.
        self.kept: dict[Any, set[Any]] = {}
        self.names: dict[Any, set[str | None]] = {}

    def settle(self) -> None:
        """Let the worker or the schedule do what there is to do."""
        raise NotImplementedError

    def fail(self, value: str, detail: str) -> None:
        self.failures.setdefault(value, []).append(detail)

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def some_reference(self) -> Any:
        return self.pick(1, 1, 2, 2, 3, 4, None)

    def lines(self, number: Callable[[int], Any]) -> list[Raw]:
        return [
            {"owner_id": number(self.pick(1, 2, 3)), "amount": self.random.randint(0, 5)}
            for _ in range(self.random.randint(0, 3))
        ]

    def item_content(self, owner: Any) -> Raw:
        pick = self.pick
        return {
            "at": START + self.random.randint(0, 60) * DAY + timedelta(hours=self.random.randint(0, 23)),
            "group": pick("a", "b"),
            "owner_id": owner,
            "points": pick(0, 1, 2, 3, 3, 4, 4, 5, None),
            "weight": pick(1, 2, 3),
            "tag": pick("x", "y", "z", "$tag", "$name"),
        }

    def new_item(self, **fields: Any) -> Any:
        world, owner = self.world, self.some_reference()
        self.item_number += 1
        model = (
            self.pick(*self.models.kinds["item"], self.models.kinds["item"][0])
            if self.models.kinds["item"]
            else self.models.item
        )
        content = self.item_content(None if owner is None else world.reference(owner))
        content |= {
            "unit_price": Decimal(self.random.randint(0, 500)) / 100,
            "lines": self.lines(world.reference),
        }
        if world.has("item", "attributes"):
            content["specs"] = {"color": self.pick("red", "blue"), "size": self.pick(1, 1, 2)}
        if world.has("item", "links") and self.random.random() < 0.5:
            content["links"] = [row.id for row in self.live("item")[:1]]
        return model(**{"id": world.id("item", self.item_number), **content, **fields})

    def new_owner(self, number: int) -> Any:
        world = self.world
        kinds = self.models.kinds["owner"]
        model = self.pick(kinds[0], kinds[0], kinds[1]) if kinds else self.models.owner
        content: Raw = {"name": self.pick(*NAMES), "city": self.pick("Oslo", "Rome"), "rank": number}
        content["at"] = START + self.random.randint(0, 60) * DAY
        if world.has("owner", "alternate_key"):
            taken = {row["code"] for row in self.oracle.rows("owner")}
            content["code"] = next(
                code for code in (f"c{each}" for each in (number, *range(1, 20))) if code not in taken
            )
        if world.has("owner", "attributes"):
            content["specs"] = {"color": "red", "size": 1}
        return model(id=world.id("owner", number), **content)

    def common_raw(self, side: str) -> Raw:
        """What the features of a side store in a document that has nothing yet."""
        world, found = self.world, {}
        for feature, fields in {
            "kinds": {"type": "a"},
            "revision": {"revision": 1},
            "links": {"links": []},
            "outlier": {"fans": [], "fan_count": 0, "has_overflow": False},
            "counter": {"views": 0},
            "tree": {"parent_id": None, "ancestors": []},
        }.items():
            if world.has(side, feature):
                found |= {
                    name if name == "type" else world.stored(side, name): value
                    for name, value in fields.items()
                }
        return copy.deepcopy(found)

    def raw_item(self, number: int, version: int | None = None) -> Raw:
        """An item as another program, or an older release, stores it; its owner is there."""
        world = self.world
        content = self.item_content(world.raw_reference(2))
        content |= {"unit_price": Decimal128("1.25"), "lines": self.lines(world.raw_reference)}
        document = {world.stored("item", name): value for name, value in content.items()}
        document = {"_id": world.raw_id("item", number), **document, **self.common_raw("item")}
        return self.lowered("item", document, world.version("item") if version is None else version)

    def raw_owner(self, number: int, version: int | None = None) -> Raw:
        world = self.world
        document = {
            "_id": world.raw_id("owner", number),
            "name": "Raw",
            "city": "Bonn",
            "rank": number,
            "at": START,
        }
        if world.has("owner", "alternate_key"):
            document["code"] = f"c{number}"
        document |= self.common_raw("owner")
        return self.lowered("owner", document, world.version("owner") if version is None else version)

    def lowered(self, side: str, document: Raw, version: int) -> Raw:
        """The same document in an earlier version, without the formulas that it did not know."""
        world = self.world
        current = world.version(side)
        for step in reversed(world.steps(side)[version - 1 :]):
            if step == "python":
                document = (item_down if side == "item" else owner_down)(document)
            elif side == "item":
                document["boss"] = document.pop(world.stored("item", "owner_id"), None)
            else:
                document["town"] = document.pop("city", None)
        if current > 1:
            document["schema_version"] = version
            if version < current:
                document.pop("score" if side == "item" else "level", None)
                if version == 1:
                    del document["schema_version"]
        return document

    # -- rows ------------------------------------------------------------------------------------------------

    def live(self, side: str, *, leaves: bool = False) -> list[Row]:
        """What callers can read and write; the leaves are those that a tree lets them delete."""
        rows = self.oracle.rows(side)
        parents = {hashable(row["parent_id"]) for row in rows} if self.world.has(side, "tree") else set()
        return [row for row in rows if row.live and not (leaves and hashable(row.id) in parents)]

    def one(self, side: str, *, leaves: bool = False) -> Row | None:
        rows = self.live(side, leaves=leaves)
        return self.random.choice(rows) if rows else None

    def key(self, side: str, row: Row) -> Any:
        return self.world.id(side, number_of(row.id))

    def model(self, side: str) -> Any:
        return getattr(self.models, side)

    # -- hostile values --------------------------------------------------------------------------------------

    def add_hostile(self) -> None:
        """Values of wrong types, stored by another program past the validator."""
        world = self.world
        owners, items = [], []
        if world.has("item", "hostile"):
            for number, wrong in enumerate(WRONG_VALUES):
                self.store.insert(self.new_owner(BESIDE + number))
                document = self.raw_item(HOSTILE + number)
                wrong = {world.stored("item", name): value for name, value in wrong.items()}
                reference = {world.stored("item", "owner_id"): self.raw_code(BESIDE + number)}
                items.append({**document, "group": "bad", **reference, "lines": [], **wrong})
        if world.has("owner", "hostile"):
            owners.append({**self.raw_owner(WRONG), "name": 17, "rank": "high"})
            document = self.raw_item(HOSTILE + 20)
            document |= {"group": "bad", "lines": [], world.stored("item", "owner_id"): self.raw_code(WRONG)}
            items.append(document)
        for name, documents in (("owners", owners), ("items", items)):
            if documents:
                self.database[name].insert_many(documents, bypass_document_validation=True)
        if world.mode == "write":
            self.store.repair()

    def raw_code(self, number: int) -> Any:
        if not self.world.has("owner", "alternate_key"):
            return self.world.raw_id("owner", number)
        rows = self.raws_by_id("owners", number)
        return rows[0]["code"] if rows else f"c{number}"

    def raws_by_id(self, name: str, number: int) -> list[Raw]:
        return list(self.database[name].find({"_id": self.world.raw_id(name[:-1], number)}))
