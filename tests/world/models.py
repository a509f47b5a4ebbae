"""The features, and the models of a world with any of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any
from uuid import UUID

from pydantic import BaseModel

from treadle import (
    AncestorArray,
    Approximate,
    Archive,
    Attributes,
    Average,
    Collect,
    Count,
    CreatedAt,
    Day,
    Document,
    ExtendedReference,
    Formula,
    History,
    Links,
    Max,
    Min,
    Outlier,
    Rollup,
    Subset,
    Sum,
    UpdatedAt,
    migration,
)

Raw = dict[str, Any]
MODES = ("write", "stream", "schedule")
SIDES = ("item", "owner")
FEATURES = (
    *("kinds", "python_version", "pipeline_version", "write_versions", "soft_delete"),
    *("archive", "uncounted", "revision", "history", "camel", "attributes", "auto_fields"),
    *("links", "outlier", "counter", "tree", "uuid_id", "nested_id", "hostile"),
)
# Nothing refers to an item, so that only the owner can have an alternate key.
NAMES = (*(f"{side}.{name}" for side in SIDES for name in FEATURES), "owner.alternate_key")
# One field cannot be both.
EXCLUSIVE = ({"archive", "uncounted"}, {"uuid_id", "nested_id"})

START = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
# So long that `run_due`, which archives too, finds nothing to archive.
ARCHIVE_AFTER = 3650 * DAY


class Key(BaseModel):
    """An id that is a nested model."""

    site: str
    number: int


class ItemCard(BaseModel):
    points: int | None = None
    tag: str = ""


class OwnerCard(BaseModel):
    name: str = ""
    city: str = ""


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


@dataclass(frozen=True)
class World:
    """Features as "item.kinds" or "owner.archive", and a mode of maintenance."""

    features: frozenset[str]
    mode: str

    @property
    def label(self) -> str:
        return "+".join(sorted(self.features, key=NAMES.index) or ["plain"]) + f"-{self.mode}"

    def has(self, side: str, *names: str) -> bool:
        return any(f"{side}.{name}" in self.features for name in names)

    def steps(self, side: str) -> list[str]:
        """The migrations from version 1 on. The last is a function: write_versions needs a way down that is."""
        found = ["pipeline"] if self.has(side, "pipeline_version") else []
        return [*found, "python"] if self.has(side, "python_version", "write_versions") else found

    def version(self, side: str) -> int:
        return 1 + len(self.steps(side))

    def stored(self, side: str, name: str) -> str:
        """The stored name of a field."""
        if name == "id":
            return "_id"
        return camel(name) if self.has(side, "camel") else name

    def id_type(self, side: str) -> type[Any]:
        return UUID if self.has(side, "uuid_id") else Key if self.has(side, "nested_id") else int

    def id(self, side: str, number: int) -> Any:
        """The id of a document as the Store takes it."""
        kind = self.id_type(side)
        if kind is Key:
            return Key(site="north", number=number)
        return UUID(int=number) if kind is UUID else number

    def raw_id(self, side: str, number: int) -> Any:
        found = self.id(side, number)
        return found.model_dump() if isinstance(found, Key) else found

    def reference(self, number: int) -> Any:
        """What an item holds to name an owner."""
        return f"c{number}" if self.has("owner", "alternate_key") else self.id("owner", number)

    def raw_reference(self, number: int) -> Any:
        return f"c{number}" if self.has("owner", "alternate_key") else self.raw_id("owner", number)

    @property
    def archives(self) -> list[str]:
        return [side for side in SIDES if self.has(side, "archive", "uncounted")]

    @cached_property
    def how(self) -> Raw:
        """The mode, as derived values are told."""
        every = {"every": timedelta(minutes=1)} if self.mode == "schedule" else {}
        return {"maintain": self.mode, **every}


def has_history(world: World) -> bool:
    return world.has("item", "history") or world.has("owner", "history")


# -- fields and keywords of the features ------------------------------------------------------------


def feature_fields(world: World, side: str) -> dict[str, tuple[Any, Any]]:
    """Annotation and default by name."""
    identity = world.id_type(side)
    every: dict[str, dict[str, tuple[Any, Any]]] = {
        "soft_delete": {"deleted_at": (datetime | None, None)},
        "revision": {"revision": (int, 0)},
        "attributes": {"specs": (Annotated[dict[str, int | str], Attributes()], {})},
        "auto_fields": {
            "created_at": (Annotated[datetime | None, CreatedAt()], None),
            "updated_at": (Annotated[datetime | None, UpdatedAt()], None),
        },
        "links": {"links": (list[identity], [])},  # type: ignore[valid-type]
        "outlier": {
            "fans": (Annotated[list[int], Outlier(limit=2, overflow=f"{side}_fans", page_size=2)], []),
            "fan_count": (int, 0),
            "has_overflow": (bool, False),
        },
        "counter": {"views": (Annotated[int, Approximate(every=1000, within=None)], 0)},
        "tree": {"parent_id": (identity | None, None), "ancestors": (list[identity], [])},  # type: ignore[valid-type]
        "alternate_key": {"code": (str, "")},
    }
    return {
        name: field
        for feature, fields in every.items()
        if world.has(side, feature)
        for name, field in fields.items()
    }


def keywords(world: World, side: str) -> Raw:
    """Class keywords."""
    collection = f"{side}s"
    archive = Archive(
        by="at", after=ARCHIVE_AFTER, into=f"{side}s_archive", counted=not world.has(side, "uncounted")
    )
    history = History(collection=f"{side}s_history", maintain="write" if world.mode == "write" else "stream")
    chosen = {
        "kinds": {"discriminator": "type"},
        "soft_delete": {"soft_delete": "deleted_at"},
        "archive": {"archive": archive},
        "uncounted": {"archive": archive},
        "revision": {"revision": "revision"},
        "history": {"history": history},
        "camel": {"naming": "camel"},
        "links": {"links": Links("links")},
        "tree": {"tree": AncestorArray(parent="parent_id", ancestors="ancestors")},
    }
    found: Raw = {"collection": collection}
    for feature, given in chosen.items():
        if world.has(side, feature):
            found |= given
    if world.version(side) > 1:
        found["version"] = world.version(side)
    return found


# -- migrations: the same in the oracle, written again -----------------------------------------------


def declare_migrations(world: World, side: str, model: Any) -> None:
    for version, step in enumerate(world.steps(side), start=1):
        if step == "python":
            # The owner's names its fields, so that what reads others need not be upgraded.
            up, down, names = (
                (item_up, item_down, None)
                if side == "item"
                else (owner_up, owner_down, ("nm", "name", "rk", "rank"))
            )
            migration(model, from_version=version, fields=names)(up).down(down)
        else:
            old = {"item": "boss", "owner": "town"}[side]
            new = world.stored(side, {"item": "owner_id", "owner": "city"}[side])
            migration(
                model,
                from_version=version,
                up=[{"$set": {new: f"${old}"}}, {"$unset": [old]}],
                down=[{"$set": {old: f"${new}"}}, {"$unset": [new]}],
            )


def item_up(document: Raw) -> Raw:
    points = document.pop("pts")
    document["points"] = None if points is None else int(points)
    return document


def item_down(document: Raw) -> Raw:
    points = document.pop("points", None)
    document["pts"] = None if points is None else str(points)
    return document


def owner_up(document: Raw) -> Raw:
    document["name"] = document.pop("nm")
    document["rank"] = int(document.pop("rk"))
    return document


def owner_down(document: Raw) -> Raw:
    document["nm"] = document.pop("name")
    document["rk"] = str(document.pop("rank"))
    return document


# -- models -------------------------------------------------------------------------------------------


def make(name: str, base: type[Any], fields: dict[str, tuple[Any, Any]], **given: Any) -> Any:
    body: Raw = {
        "__annotations__": {key: annotation for key, (annotation, _) in fields.items()},
        "__module__": __name__,
        **{key: default for key, (_, default) in fields.items() if default is not ...},
    }
    return type(base)(name, (base,), body, **given)


@dataclass(frozen=True)
class Models:
    item: Any
    owner: Any
    daily: Any
    kinds: dict[str, list[Any]]

    @property
    def all(self) -> list[Any]:
        return [self.item, *self.kinds["item"], self.owner, *self.kinds["owner"], self.daily]


def build(world: World) -> Models:
    """The models, with every derived value."""
    reference = str if world.has("owner", "alternate_key") else world.id_type("owner")
    to = {"to": "code"} if world.has("owner", "alternate_key") else {}
    how = world.how
    on_delete = "keep" if world.mode == "schedule" else "clear"
    line = make(
        "Line",
        BaseModel,
        {
            "owner_id": (reference | None, None),
            "amount": (int, 0),
            "name": (
                Annotated[
                    str | None,
                    ExtendedReference("Owner", by="owner_id", field="name", on_delete=on_delete, **to, **how),
                ],
                None,
            ),
        },
    )
    item_fields: dict[str, tuple[Any, Any]] = {
        "id": (world.id_type("item"), ...),
        "at": (datetime, START),
        "group": (str, "a"),
        "owner_id": (reference | None, None),
        "points": (int | None, None),
        "weight": (int, 1),
        "tag": (str, ""),
        "unit_price": (Decimal, Decimal(0)),
        "lines": (list[line], []),
        "owner": (
            Annotated[OwnerCard | None, ExtendedReference("Owner", by="owner_id", **to, **how)],
            None,
        ),
        "name_then": (
            Annotated[
                str | None,
                ExtendedReference("Owner", by="owner_id", field="name", policy="snapshot", **to, **how),
            ],
            None,
        ),
        "score": (
            Annotated[int | None, Formula({"$multiply": [{"$ifNull": ["$points", 0]}, 2]}, **how)],
            None,
        ),
        **feature_fields(world, "item"),
    }
    source = "ItemA" if world.has("item", "kinds") else "Item"
    by = {"by": "owner_id", **to, **how}
    in_lines = {**by, "by": "lines.owner_id"}
    price = world.stored("item", "unit_price")
    derived: dict[str, tuple[Any, Any]] = {
        "items": (Annotated[int, Count(source, **by)], 0),
        "high_items": (Annotated[int, Count(source, where={"points": {"$gte": 3}}, **by)], 0),
        "line_items": (Annotated[int, Count(source, **in_lines)], 0),
        "line_amount": (Annotated[int, Sum(source, "lines.amount", **in_lines)], 0),
        "points": (Annotated[int, Sum(source, "points", **by)], 0),
        "price": (Annotated[Decimal, Sum(source, "unit_price", **by)], Decimal(0)),
        "worth": (
            Annotated[Decimal, Sum(source, {"$multiply": [f"${price}", "$weight"]}, **by)],
            Decimal(0),
        ),
        "scores": (Annotated[int, Sum(source, "score", **by)], 0),
        "average": (Annotated[float | None, Average(source, "points", **by)], None),
        "lowest": (Annotated[int | None, Min(source, "points", **by)], None),
        "highest": (Annotated[int | None, Max(source, "points", **by)], None),
        "first_tag": (Annotated[str | None, Min(source, "tag", **by)], None),
        "top_items": (Annotated[list[ItemCard], Subset(source, sort="-points", size=3, **by)], []),
        "tags": (Annotated[list[str], Collect(source, "tag", size=3, **by)], []),
        "level": (Annotated[int | None, Formula({"$add": ["$rank", 10]}, **how)], None),
    }
    if world.has("item", "counter"):
        derived["all_views"] = (Annotated[int, Sum(source, "views", **by)], 0)
    owner_fields: dict[str, tuple[Any, Any]] = {
        "id": (world.id_type("owner"), ...),
        "at": (datetime, START),
        "name": (str, ""),
        "city": (str, ""),
        "rank": (int, 0),
        **feature_fields(world, "owner"),
    }
    if not world.has("owner", "kinds"):
        owner_fields |= derived
    item = make("Item", Document, item_fields, **keywords(world, "item"))
    owner = make("Owner", Document, owner_fields, **keywords(world, "owner"))
    kinds: dict[str, list[Any]] = {"item": [], "owner": []}
    if world.has("item", "kinds"):
        kinds["item"] = [make("ItemA", item, {}, kind="a"), make("ItemB", item, {}, kind="b")]
    if world.has("owner", "kinds"):
        kinds["owner"] = [make("OwnerA", owner, derived, kind="a"), make("OwnerB", owner, {}, kind="b")]
    for side, model in (("item", item), ("owner", owner)):
        declare_migrations(world, side, model)
    daily = make(
        "Daily",
        Document,
        {
            "group": (str, ...),
            "day": (datetime, ...),
            "items": (Annotated[int, Count()], 0),
            "points": (Annotated[int, Sum("points")], 0),
            "scores": (Annotated[int, Sum("score")], 0),
        },
        collection="daily",
        rollup=Rollup(source, keys={"group": "group", "day": Day("at")}, **how),
    )
    return Models(item, owner, daily, kinds)


def write_versions(world: World, models: Models) -> dict[Any, int] | None:
    """As the first step of a rolling deploy: the version before."""
    lowered = {
        getattr(models, side): world.version(side) - 1 for side in SIDES if world.has(side, "write_versions")
    }
    return lowered or None
