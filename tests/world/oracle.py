"""What every derived value should be: plain Python over raw documents, nothing of Treadle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from bson import Decimal128
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo.database import Database

from tests.world.models import SIDES, Raw, World, camel

OPTIONS: CodecOptions[Raw] = CodecOptions(tz_aware=True, uuid_representation=UuidRepresentation.STANDARD)
# Documents that another program stored have numbers from here on.
HOSTILE = 900
# Fields whose stored names differ in camel case.
WORDS = (
    *("owner_id", "unit_price", "name_then", "high_items", "line_items", "line_amount", "top_items"),
    *("first_tag", "all_views", "deleted_at", "parent_id", "fan_count"),
)


@dataclass
class Row:
    """A stored document in the current version, by Python names."""

    fields: Raw
    raw: Raw
    archived: bool
    current: bool
    deleted: bool
    kind: str | None

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)

    @property
    def id(self) -> Any:
        return self.fields["id"]

    @property
    def live(self) -> bool:
        return not self.archived and not self.deleted


def plain(value: Any) -> Any:
    """A stored value, or one of a model, in comparable form."""
    if isinstance(value, Decimal128):
        return value.to_decimal()
    if hasattr(value, "model_dump"):
        return plain(value.model_dump())
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def hashable(value: Any) -> Any:
    """An id as a key of a dict."""
    value = plain(value)
    return tuple(sorted(value.items())) if isinstance(value, dict) else value


def number_of(key: Any) -> int:
    """The number from which the world made this id."""
    key = plain(key)
    if isinstance(key, dict):
        return int(key["number"])
    return key if isinstance(key, int) else key.int if hasattr(key, "int") else -1


def upgrade(world: World, side: str, raw: Raw) -> Raw:
    """The migrations, in the oracle's own words."""
    document = dict(raw)
    version = document.get("schema_version", 1)
    for step in world.steps(side)[version - 1 :]:
        if step == "pipeline" and side == "item":
            document[world.stored("item", "owner_id")] = document.pop("boss", None)
        elif step == "pipeline":
            document["city"] = document.pop("town", None)
        elif side == "item":
            points = document.pop("pts", None)
            document["points"] = None if points is None else int(points)
        else:
            document |= {"name": document.pop("nm"), "rank": int(document.pop("rk"))}
    return document


class Oracle:
    """Reads a world's database, and says what should be there."""

    def __init__(self, world: World, database: Database[Any]) -> None:
        self.world = world
        self.database = database.with_options(codec_options=OPTIONS)

    def raws(self, name: str) -> list[Raw]:
        return list(self.database[name].find())

    def rows(self, side: str) -> list[Row]:
        """All documents of one side, except hostile ones and unknown kinds."""
        world, rows = self.world, []
        names = [f"{side}s", *([f"{side}s_archive"] if side in world.archives else [])]
        for name in names:
            for raw in self.raws(name):
                if number_of(raw["_id"]) >= HOSTILE:
                    continue
                document = upgrade(world, side, raw)
                rows.append(
                    Row(
                        fields=self._named(side, document),
                        raw=raw,
                        archived=name.endswith("_archive"),
                        current=raw.get("schema_version", 1) == world.version(side),
                        deleted=world.has(side, "soft_delete")
                        and document.get(world.stored(side, "deleted_at")) is not None,
                        kind=document.get("type"),
                    )
                )
        return rows

    def _named(self, side: str, document: Raw) -> Raw:
        """By Python names, of which those with several words differ in camel case."""
        if not self.world.has(side, "camel"):
            return {"id" if name == "_id" else name: value for name, value in document.items()}
        known = {camel(name): name for name in WORDS}
        return {"id" if name == "_id" else known.get(name, name): value for name, value in document.items()}

    # -- expected values ---------------------------------------------------------------------------

    def sources(self, items: list[Row]) -> list[Row]:
        """The items that count."""
        world = self.world
        return [
            row
            for row in items
            if not row.deleted
            and (not row.archived or world.has("item", "archive"))
            and (not world.has("item", "kinds") or row.kind == "a")
        ]

    def owner_key(self, owner: Row) -> Any:
        return owner["code"] if self.world.has("owner", "alternate_key") else hashable(owner.id)

    def of_owner(self, owner: Row, sources: list[Row]) -> Raw:
        """Every derived value of one owner."""
        key = self.owner_key(owner)
        mine = [row for row in sources if hashable(row["owner_id"]) == key]
        lines = [
            (row, line)
            for row in sources
            for line in row["lines"] or []
            if hashable(line.get("owner_id")) == key
        ]
        points = [row["points"] for row in mine if row["points"] is not None]
        ranked = sorted(mine, key=lambda row: (row["points"] is None, -(row["points"] or 0), order(row.id)))
        found: Raw = {
            "items": len(mine),
            "high_items": sum(each >= 3 for each in points),
            "line_items": len({hashable(row.id) for row, _ in lines}),
            "line_amount": sum(line.get("amount") or 0 for _, line in lines),
            "points": sum(points),
            "price": sum((plain(row["unit_price"]) for row in mine), Decimal(0)),
            "worth": sum((plain(row["unit_price"]) * row["weight"] for row in mine), Decimal(0)),
            "scores": sum(points) * 2,
            "average": sum(points) / len(points) if points else None,
            "lowest": min(points, default=None),
            "highest": max(points, default=None),
            "first_tag": min((row["tag"] for row in mine), default=None),
            "top_items": [{"points": row["points"], "tag": row["tag"]} for row in ranked[:3]],
            "tags": sorted({row["tag"] for row in mine})[:3],
            "level": owner["rank"] + 10,
        }
        if self.world.has("item", "counter"):
            found["all_views"] = sum(row["views"] or 0 for row in mine)
        return found

    def top_ids(self, owner: Row, sources: list[Row]) -> list[Any]:
        """The ids that the cards of a subset are stored with."""
        mine = [row for row in sources if hashable(row["owner_id"]) == self.owner_key(owner)]
        ranked = sorted(mine, key=lambda row: (row["points"] is None, -(row["points"] or 0), order(row.id)))
        return [plain(row.id) for row in ranked[:3]]

    def referred(self, owners: list[Row]) -> dict[Any, Row]:
        """The owners that copies follow, by what names them."""
        return {
            self.owner_key(row): row
            for row in owners
            if not row.deleted and (not row.archived or self.world.has("owner", "archive"))
        }

    def of_daily(self, sources: list[Row]) -> dict[tuple[str, str], Raw]:
        found: dict[tuple[str, str], Raw] = {}
        for row in sources:
            day = row["at"].replace(hour=0, minute=0, second=0, microsecond=0)
            group = found.setdefault((row["group"], day.isoformat()), {"items": 0, "points": 0, "scores": 0})
            group["items"] += 1
            group["points"] += row["points"] or 0
            group["scores"] += 2 * (row["points"] or 0)
        return found


def order(key: Any) -> Any:
    """MongoDB's order of ids; all of a world are of one type."""
    key = plain(key)
    return key["number"] if isinstance(key, dict) else key


def same(expected: Any, actual: Any) -> bool:
    expected, actual = plain(expected), plain(actual)
    if isinstance(expected, float) and isinstance(actual, (int, float)):
        return math.isclose(expected, actual, rel_tol=1e-9)
    return bool(expected == actual)


def has_one(world: World, name: str) -> bool:
    return any(world.has(side, name) for side in SIDES)
