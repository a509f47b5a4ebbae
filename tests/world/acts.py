"""What callers, other programs and older releases do in a world."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal

from tests.world.documents import BESIDE, NAMES, OWNERS, WRONG_VALUES, Documents
from tests.world.models import DAY, SIDES, START, Raw
from tests.world.oracle import HOSTILE, Row, hashable, number_of
from treadle import Conflict

ACTS: dict[str, tuple[str, ...]] = {
    "kinds": ("change_kind", "change_kind"),
    "python_version": ("downgrade", "downgrade", "migrate", "migrate_down"),
    "pipeline_version": ("downgrade", "downgrade", "migrate", "migrate_down"),
    "write_versions": ("downgrade",),
    "soft_delete": ("delete", "restore", "return_later", "purge"),
    "archive": ("archive", "archive", "restore", "return_later"),
    "uncounted": ("archive", "archive", "restore", "return_later"),
    "revision": ("stale_replace",),
    "history": ("revert",),
    "attributes": ("set_spec", "set_spec"),
    "links": ("link", "link", "link"),
    "outlier": ("append", "append", "remove"),
    "counter": ("count", "count"),
    "tree": ("tree_move", "tree_move", "tree_move"),
    "alternate_key": ("change_code", "change_code"),
    "hostile": ("write_beside", "write_beside"),
}


class GiveUp(Exception):
    """Raised in a transaction by its caller."""


class Acts(Documents):
    """Each act describes what it did, or returns None where there is nothing to do."""

    def script(self) -> list[tuple[str, Callable[[], str | None]]]:
        """Every act that this world has, in an order of its own."""
        world = self.world
        acts = [
            *(["insert_items", "set_points", "set_points"] * 2),
            *("insert_owner", "insert_owner", "set_price", "move", "move", "update_many", "replace"),
            *("replace_owner", "change", "change_owner", "delete_item", "delete_item", "delete_many"),
            *("delete_owner", "rename_owner", "rename_owner", "lines_act", "lines_act", "upsert"),
            *("upsert_new", "transaction", "rollback"),
        ]
        if world.mode != "write":
            acts += ["raw_insert", "raw_insert", "raw_update", "raw_move", "raw_delete", "raw_rename"]
        found = [(name, getattr(self, name)) for name in acts]
        for side in SIDES:
            chosen = [name for feature, names in ACTS.items() if world.has(side, feature) for name in names]
            # The links of a deleted document, another program does not know.
            if world.mode != "write" and world.has(side, "soft_delete") and not world.has(side, "links"):
                chosen += ["raw_return"]
            if world.has(side, "write_versions"):
                chosen = [name for name in chosen if name not in ("migrate", "migrate_down")]
            found += [
                (f"{name} {side}", lambda name=name, side=side: getattr(self, name)(side)) for name in chosen
            ]  # type: ignore[misc]
        self.random.shuffle(found)
        return found

    # -- acts of every world ---------------------------------------------------------------------------------

    def insert_items(self) -> str:
        documents = [self.new_item() for _ in range(self.pick(1, 2, 2, 3))]
        if len(documents) == 1:
            self.store.insert(documents[0])
        else:
            self.store.insert_many(documents)
        return repr([each.id for each in documents])

    def insert_owner(self) -> str | None:
        taken = {number_of(row.id) for row in self.oracle.rows("owner")}
        free = [number for number in OWNERS if number not in taken]
        if not free:
            return None
        document = self.new_owner(free[0])
        self.store.insert(document)
        return repr(document)

    def set_points(self) -> str | None:
        row = self.one("item")
        if row is None:
            return None
        update = self.pick(
            {"$set": {"points": self.pick(0, 1, 3, 4, 9, None)}},
            {"$set": {"points": self.pick(0, 5)}, "$inc": {"weight": 1}},
            {"$min": {"points": 2}},
            {"$set": {"tag": self.pick("u", "v", "x")}},
        )
        self.store.update(self.models.item, self.key("item", row), update)
        return f"{row.id} {update}"

    def set_price(self) -> str | None:
        """Then a replacement that holds wrong derived values, which are not the caller's to write."""
        row = self.one("item")
        if row is None:
            return None
        update = {
            "$set": {self.world.stored("item", "unit_price"): Decimal("7.25"), "group": self.pick("a", "b")}
        }
        document = self.store.update(self.models.item, self.key("item", row), update)
        document.name_then, document.owner, document.score = "wrong", None, -1
        self.store.replace(document)
        return f"{row.id} {update}"

    def move(self) -> str | None:
        row, owner = self.one("item"), self.some_reference()
        if row is None:
            return None
        self.moved.add(hashable(row.id))
        reference = None if owner is None else self.world.reference(owner)
        update = {"$set": {self.world.stored("item", "owner_id"): reference}}
        self.store.update(self.models.item, self.key("item", row), update)
        return f"{row.id} {update}"

    def update_many(self) -> str:
        ids = [self.key("item", row) for row in self.live("item")][::2]
        update = {"$inc": {"weight": 1}, "$set": {"points": self.pick(2, 6)}}
        self.store.update_many(self.models.item, {"_id": {"$in": ids}}, update)
        return f"{ids} {update}"

    def replace(self) -> str | None:
        row = self.one("item")
        document = None if row is None else self.store.get(self.models.item, self.key("item", row))
        if row is None or document is None:
            return None
        owner = self.some_reference()
        self.moved.add(hashable(row.id))
        document.points = self.pick(1, 3, 8)
        document.owner_id = None if owner is None else self.world.reference(owner)
        document.lines = document.lines[1:]
        self.store.replace(document)
        return f"{document!r}"

    def replace_owner(self) -> str | None:
        row = self.one("owner")
        document = None if row is None else self.store.get(self.models.owner, self.key("owner", row))
        if document is None:
            return None
        document.name = self.pick(*NAMES, "Replaced")
        if hasattr(document, "points"):
            document.points, document.average, document.top_items = -1, None, []
        self.store.replace(document)
        return f"{document!r}"

    def change(self) -> str | None:
        row = self.one("item")
        document = None if row is None else self.store.get(self.models.item, self.key("item", row))
        if document is None:
            return None
        points = self.pick(0, 2, 7)
        self.store.change(document, points=points, tag="changed")
        return f"{document.id} points={points}"

    def change_owner(self) -> str | None:
        row = self.one("owner")
        document = None if row is None else self.store.get(self.models.owner, self.key("owner", row))
        if document is None:
            return None
        rank = self.random.randint(5, 9)
        self.store.change(document, rank=rank, city="Bern")
        return f"{document.id} rank={rank}"

    def delete_item(self) -> str | None:
        row = self.one("item", leaves=True)
        if row is None:
            return None
        self.store.delete(self.models.item, self.key("item", row))
        return f"{row.id}"

    def delete_many(self) -> str:
        ids = [self.key("item", row) for row in self.live("item", leaves=True)[:2]]
        self.store.delete_many(self.models.item, {"_id": {"$in": ids}})
        return f"{ids}"

    def delete_owner(self) -> str | None:
        row = self.one("owner", leaves=True)
        if row is None:
            return None
        self.note_references(row)
        self.store.delete(self.models.owner, self.key("owner", row))
        return f"{row.id}"

    def note_references(self, owner: Row) -> None:
        """References that `on_delete="clear"` or a changed key make invalid."""
        key = self.oracle.owner_key(owner)
        self.moved |= {
            hashable(row.id) for row in self.oracle.rows("item") if hashable(row["owner_id"]) == key
        }

    def rename_owner(self) -> str | None:
        """One that has items, if any has; text that a pipeline would take for a path stays text."""
        held = {hashable(row["owner_id"]) for row in self.live("item")}
        rows = self.live("owner")
        rows = [row for row in rows if self.oracle.owner_key(row) in held] or rows
        if not rows:
            return None
        row = self.random.choice(rows)
        update = {
            "$set": {"name": self.pick("$tag", "$tag", *NAMES, "Cid"), "city": self.pick("Bern", "Kiel")}
        }
        self.store.update(self.models.owner, self.key("owner", row), update)
        return f"{row.id} {update}"

    def lines_update(self) -> Raw:
        reference = self.world.reference(self.pick(1, 2, 3))
        return self.pick(
            {"$push": {"lines": {"owner_id": reference, "amount": 3}}},
            {"$push": {"lines": {"$each": [{"owner_id": reference, "amount": 2}], "$position": 0}}},
            {"$set": {"lines.0.owner_id": reference}},
            {"$pull": {"lines": {"owner_id": reference}}},
            {"$set": {"lines": [{"owner_id": reference, "amount": 1}, {"owner_id": reference, "amount": 4}]}},
        )

    def lines_act(self) -> str | None:
        rows = [row for row in self.live("item") if row["lines"]]
        if not rows:
            return None
        row, update = self.random.choice(rows), self.lines_update()
        self.store.update(self.models.item, self.key("item", row), update)
        return f"{row.id} {update}"

    def upsert(self) -> str | None:
        """Of a document that is there, in place of which another kind would be inserted."""
        row = self.one("item")
        if row is None:
            return None
        given = {"links": []} if self.world.has("item", "links") else {}
        document = self.new_item(id=self.key("item", row), **given)
        kinds = self.models.kinds["item"]
        while kinds and document.__class__ is kinds[row.kind != "a"]:
            document = self.new_item(id=self.key("item", row), **given)
        done = self.store.upsert(
            self.models.item, {"_id": document.id}, {"$set": {"points": 5}}, insert=document
        )
        assert not done.created, f"{row.id} was inserted again"
        return f"{row.id}"

    def upsert_new(self) -> str:
        document = self.new_item()
        filter = {"_id": document.id}
        done = self.store.upsert(self.models.item, filter, {"$set": {"points": 5}}, insert=document)
        assert done.created, f"{document.id} was not inserted"
        return f"{document.id}"

    def transaction(self) -> str | None:
        row, owner = self.one("item"), self.one("owner")
        if row is None or owner is None:
            return None
        with self.store.transaction():
            self.store.update(self.models.item, self.key("item", row), {"$set": {"points": 6}})
            self.store.update(self.models.owner, self.key("owner", owner), {"$set": {"name": "Eve"}})
            self.store.insert(self.new_item())
        return f"{row.id} {owner.id}"

    def rollback(self) -> str | None:
        """A transaction that is given up: nothing of it is left, derived values and history included."""
        row, owner = self.one("item"), self.one("owner")
        if row is None or owner is None:
            return None
        try:
            with self.store.transaction():
                self.store.update(self.models.item, self.key("item", row), {"$set": {"points": 8}})
                self.store.update(self.models.owner, self.key("owner", owner), {"$set": {"name": "Ivy"}})
                raise GiveUp
        except GiveUp:
            return f"{row.id} {owner.id}"

    # -- raw writes, where the worker or the schedule follows them -------------------------------------------

    def raw_insert(self) -> str:
        self.item_number += 1
        document = self.raw_item(self.item_number, version=self.random.randint(1, self.world.version("item")))
        self.database["items"].insert_one(document)
        return f"{document}"

    def raw_one(self, side: str) -> Row | None:
        rows = [row for row in self.live(side) if row.current]
        return self.random.choice(rows) if rows else None

    def raw_update(self) -> str | None:
        row = self.raw_one("item")
        if row is None:
            return None
        update = {
            "$set": {"points": self.pick(0, 4, 9, None), "group": self.pick("a", "b")},
            "$inc": {"weight": 1},
        }
        self.database["items"].update_one({"_id": row.raw["_id"]}, update)
        return f"{row.id} {update}"

    def raw_move(self) -> str | None:
        row = self.raw_one("item")
        if row is None:
            return None
        self.moved.add(hashable(row.id))
        if self.world.mode != "stream":
            # Treadle does not see that the reference is another one.
            self.kept.setdefault(hashable(row.id), set()).add(row["name_then"])
        reference = self.world.raw_reference(self.pick(1, 2, 3))
        update = {"$set": {self.world.stored("item", "owner_id"): reference}}
        self.database["items"].update_one({"_id": row.raw["_id"]}, update)
        return f"{row.id} {update}"

    def raw_delete(self) -> str | None:
        # What links, trees and overflow hold of a document, another program does not know.
        rows = [row for row in self.live("item", leaves=True) if not row["links"] and not row["fans"]]
        if not rows:
            return None
        row = self.random.choice(rows)
        self.database["items"].delete_one({"_id": row.raw["_id"]})
        return f"{row.id}"

    def raw_rename(self) -> str | None:
        row = self.raw_one("owner")
        if row is None:
            return None
        update = {"$set": {"name": self.pick("Fay", "$Gil"), "rank": 3}}
        self.database["owners"].update_one({"_id": row.raw["_id"]}, update)
        return f"{row.id} {update}"

    def raw_return(self, side: str) -> str | None:
        """Another program clears the date of a deletion."""
        row = self.leave(side)
        if row is None:
            return None
        update = {"$set": {self.world.stored(side, "deleted_at"): None}}
        self.database[f"{side}s"].update_one({"_id": row.raw["_id"]}, update)
        return f"{row.id}"

    # -- acts of the features --------------------------------------------------------------------------------

    def change_kind(self, side: str) -> str | None:
        row = self.one(side)
        document = None if row is None else self.store.get(self.model(side), self.key(side, row))
        if document is None:
            return None
        one, other = self.models.kinds[side]
        was = type(document)
        into = other if was is one else one
        fields = {
            name: getattr(document, name) for name in type(document).model_fields if name in into.model_fields
        }
        self.store.change_kind(into(**fields), was=was)
        return f"{document.id} {was.__name__} to {into.__name__}"

    def downgrade(self, side: str) -> str | None:
        """An older release wrote this document: the same content in an older version, archived or not."""
        rows = [row for row in self.oracle.rows(side) if row.current]
        rows = [row for row in rows if row.archived] or rows
        if not rows:
            return None
        row = self.random.choice(rows)
        version = self.random.randint(1, self.world.version(side) - 1)
        document = self.lowered(side, copy.deepcopy(row.raw), version)
        name = f"{side}s_archive" if row.archived else f"{side}s"
        self.database[name].replace_one({"_id": row.raw["_id"]}, document)
        return f"{row.id} to version {version}"

    def migrate(self, side: str) -> str:
        done = self.store.migrate(self.model(side))
        return f"{done}"

    def migrate_down(self, side: str) -> str:
        done = self.store.migrate(self.model(side), to=1)
        return f"{done}"

    def delete(self, side: str) -> str | None:
        return self.delete_item() if side == "item" else self.delete_owner()

    def restore(self, side: str) -> str | None:
        rows = [row for row in self.oracle.rows(side) if not row.live]
        if self.world.has(side, "tree"):
            active = {hashable(row.id) for row in self.live(side)}
            rows = [row for row in rows if row["parent_id"] is None or hashable(row["parent_id"]) in active]
        if not rows:
            return None
        row = self.random.choice(rows)
        if side == "owner":
            self.note_references(row)
        document = self.store.restore(self.model(side), self.key(side, row))
        assert document is not None, f"{row.id} was not restored"
        return f"{row.id}"

    def return_later(self, side: str) -> str | None:
        """A document leaves; what it derives from, or what derives from it, changes; it returns."""
        row = self.leave(side)
        if row is None:
            return None
        self.store.restore(self.model(side), self.key(side, row))
        return f"{row.id}"

    def leave(self, side: str) -> Row | None:
        rows = [row for row in self.live(side, leaves=True) if row.kind in (None, "a")]
        if not rows:
            return None
        row = self.random.choice(rows)
        if side == "owner":
            self.note_references(row)
        if self.world.has(side, "soft_delete"):
            self.store.delete(self.model(side), self.key(side, row))
        else:
            self.archive(side)
        self.settle()
        # A snapshot may be taken now, of nothing.
        self.note_names()
        if side == "owner":
            reference = row["code"] if self.world.has("owner", "alternate_key") else self.key("owner", row)
            self.store.insert(self.new_item(owner_id=reference, points=7))
        else:
            self.rename_owner()
        self.settle()
        return row

    def purge(self, side: str) -> str:
        if self.world.has(side, "tree"):
            return "not of trees"
        return f"{self.store.purge(self.model(side), before=datetime.now(UTC) + DAY)}"

    def archive(self, side: str) -> str:
        self.now += 3 * DAY
        if side == "owner":
            for row in self.live("owner"):
                self.note_references(row)
        return f"{self.store.archive(self.model(side), now=self.now)}"

    def stale_replace(self, side: str) -> str | None:
        row = self.one(side)
        document = None if row is None else self.store.get(self.model(side), self.key(side, row))
        if row is None or document is None:
            return None
        self.store.update(self.model(side), document.id, {"$set": {"at": START + 9 * DAY}})
        try:
            self.store.replace(document)
        except Conflict:
            return f"{row.id}"
        raise AssertionError(f"a stale replacement of {row.id} was accepted")

    def revert(self, side: str) -> str | None:
        row = self.one(side)
        if row is None:
            return None
        if side == "item":
            self.moved.add(hashable(row.id))
        states = list(self.store.history(self.model(side), self.key(side, row)))
        ids = {hashable(each.id) for each in self.oracle.rows(side) if each.live}
        if not states or not {hashable(each) for each in getattr(states[-1].document, "links", [])} <= ids:
            # A state that links to a document which is gone is refused.
            return None
        self.store.revert(self.model(side), self.key(side, row), states[-1].revision)
        return f"{row.id} to {states[-1].revision} of {len(states)}"

    def set_spec(self, side: str) -> str | None:
        row = self.one(side)
        if row is None:
            return None
        update = self.pick({"$set": {"specs.color": "green"}}, {"$unset": {"specs.size": ""}})
        self.store.update(self.model(side), self.key(side, row), update)
        return f"{row.id} {update}"

    def link(self, side: str) -> str | None:
        rows = self.live(side)
        if len(rows) < 2:
            return None
        one, other = self.random.sample(rows, 2)
        update = {self.pick("$addToSet", "$addToSet", "$pull"): {"links": self.key(side, other)}}
        self.store.update(self.model(side), self.key(side, one), update)
        return f"{one.id} {update}"

    def append(self, side: str) -> str | None:
        row = self.one(side)
        if row is None:
            return None
        array = self.store.array(self.model(side), "fans", self.key(side, row))
        array.extend([self.random.randint(1, 9) for _ in range(4)])
        return f"{row.id} {array.count()}"

    def remove(self, side: str) -> str | None:
        rows = [row for row in self.live(side) if row["fans"]]
        if not rows:
            return None
        row = self.random.choice(rows)
        array = self.store.array(self.model(side), "fans", self.key(side, row))
        return f"{row.id} {array.remove(row['fans'][0])}"

    def count(self, side: str) -> str | None:
        rows = self.live(side)
        if not rows:
            return None
        counter = self.store.counter(self.model(side), "views")
        for row in self.random.sample(rows, min(2, len(rows))):
            counter.add(self.key(side, row), self.random.randint(1, 5))
        return f"{counter.flush()}"

    def tree_move(self, side: str) -> str | None:
        rows = self.live(side)
        if len(rows) < 2:
            return None
        node, parent = self.random.sample(rows, 2)
        if hashable(node.id) in [hashable(each) for each in parent["ancestors"] or []]:
            parent, node = node, parent
        self.store.tree(self.model(side)).move(self.key(side, node), self.key(side, parent))
        return f"{node.id} below {parent.id}"

    def change_code(self, side: str) -> str | None:
        row = self.one("owner")
        taken = {each["code"] for each in self.oracle.rows("owner")}
        free = [code for code in (f"c{number}" for number in OWNERS) if code not in taken]
        if row is None or not free:
            return None
        self.note_references(row)
        self.moved |= {hashable(each.id) for each in self.oracle.rows("item") if each["owner_id"] == free[0]}
        self.store.update(self.models.owner, self.key("owner", row), {"$set": {"code": free[0]}})
        return f"{row.id} {row['code']} to {free[0]}"

    def write_beside(self, side: str) -> str | None:
        """A healthy item of the owner whose other items are not: inserted, updated, deleted."""
        if side != "item":
            return None
        number = BESIDE + self.random.randrange(len(WRONG_VALUES))
        code = self.world.has("owner", "alternate_key")
        reference = self.raw_code(number) if code else self.world.id("owner", number)
        document = self.new_item(owner_id=reference, group="bad", lines=[])
        document.id = self.world.id("item", HOSTILE + 100 + self.item_number)
        self.store.insert(document)
        self.store.update(self.models.item, document.id, {"$set": {"points": 1}})
        self.store.delete(self.models.item, document.id)
        return f"{document.id}"
