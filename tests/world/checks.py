"""What must hold between the steps of a history, and the repair of what does not."""

from __future__ import annotations

from typing import Any

from bson import Decimal128

from tests.world.documents import Documents
from tests.world.models import SIDES, Raw
from tests.world.oracle import HOSTILE, WORDS, Row, hashable, number_of, plain, same


class Checks(Documents):
    """Failures are noted by the name of the derived value."""

    def check(self, when: str) -> None:
        try:
            self.settle()
        except Exception as error:
            self.fail("call settle", f"{when}: {error!r}"[:500])
            raise
        self.check_values(when)
        for finding in self.store.verify():
            if not self.is_hostile(finding):
                self.fail(self.value_of(finding), f"{when}: verify {finding}")

    def check_values(self, when: str) -> None:
        items, owners = self.oracle.rows("item"), self.oracle.rows("owner")
        sources = self.oracle.sources(items)
        read_items, read_owners = (
            self.check_reads(when, "item", items),
            self.check_reads(when, "owner", owners),
        )
        for row in owners:
            if row.live and (row.kind == "a" or not self.world.has("owner", "kinds")):
                self.check_owner(when, row, read_owners.get(hashable(row.id)), sources)
        self.check_items(when, items, read_items, self.oracle.referred(owners))
        self.check_daily(when, sources)

    def check_reads(self, when: str, side: str, rows: list[Row]) -> dict[Any, Any]:
        """The documents that the Store reads, live and archived and deleted."""
        model, world = self.model(side), self.world
        found = {
            hashable(each.id): each
            for each in self.store.find(model, invalid="skip")
            if number_of(each.id) < HOSTILE
        }
        self.compare(when, f"find {side}", side, {hashable(row.id) for row in rows if row.live}, set(found))
        ways = [("archived", lambda row: not row.deleted)] if side in world.archives else []
        ways += (
            [("deleted", lambda row: row.deleted and not row.archived)]
            if world.has(side, "soft_delete")
            else []
        )
        for way, holds in ways:
            ids = [hashable(each.id) for each in self.store.find(model, invalid="skip", **{way: True})]
            ids = [
                each for each in ids if number_of(dict(each) if isinstance(each, tuple) else each) < HOSTILE
            ]
            self.compare(
                when,
                f"find {side} {way}",
                side,
                sorted(map(str, {hashable(row.id) for row in rows if holds(row)})),
                sorted(map(str, ids)),
            )
        if world.has(side, "attributes"):
            red = [{"k": "color", "v": "red"}, {"k": "size", "v": 1}]
            expected = {
                hashable(row.id)
                for row in rows
                if row.live and all(each in (row["specs"] or []) for each in red)
            }
            matches = self.store.find(model, {"specs.color": "red", "specs.size": 1}, invalid="skip")
            ids = {hashable(each.id) for each in matches if number_of(each.id) < HOSTILE}
            self.compare(when, f"find {side} by attributes", side, expected, ids)
        if world.has(side, "pipeline_version"):
            name = "owner_id" if side == "item" else "city"
            values = [row[name] for row in rows if row.live][:1]
            expected = {hashable(row.id) for row in rows if row.live and row[name] in values}
            matches = self.store.find(model, {world.stored(side, name): {"$in": values}}, invalid="skip")
            ids = {hashable(each.id) for each in matches if number_of(each.id) < HOSTILE}
            self.compare(when, f"find {side} by a renamed field", side, expected, ids)
        return found

    def compare(self, when: str, value: str, where: Any, expected: Any, actual: Any) -> None:
        if not same(expected, actual):
            self.fail(value, f"{when}: {where} is {actual!r}, expected {expected!r}")

    def check_owner(self, when: str, row: Row, read: Any, sources: list[Row]) -> None:
        for name, value in self.oracle.of_owner(row, sources).items():
            self.compare(when, name, f"Owner {row.id} read", value, getattr(read, name, "missing"))
            if row.current:
                stored = row[name]
                if name == "top_items":
                    ids = self.oracle.top_ids(row, sources)
                    value = [{"_id": key, **card} for key, card in zip(ids, value, strict=True)]
                self.compare(when, name, f"Owner {row.id} stored", value, stored)

    def check_items(self, when: str, rows: list[Row], read: dict[Any, Any], owners: dict[Any, Row]) -> None:
        for row in rows:
            if not row.live:
                # As it is when it returns.
                self.snapshots[hashable(row.id)] = (hashable(row["owner_id"]), row["name_then"])
                continue
            document = read.get(hashable(row.id))
            held = [("read", document, getattr(document, "lines", []))]
            if row.current:
                held.append(("stored", row, row["lines"] or []))
            source = owners.get(hashable(row["owner_id"]))
            for way, holder, lines in held:
                where = f"Item {row.id} {way}"
                get = (
                    (lambda name, holder=holder: getattr(holder, name, "missing"))
                    if way == "read"
                    else row.__getitem__
                )
                self.compare(when, "score", where, 2 * (row["points"] or 0), get("score"))
                if row["owner_id"] is None or source is not None:
                    card = source and {"name": source["name"], "city": source["city"]}
                    self.compare(when, "owner", where, card, get("owner"))
                for number, line in enumerate(plain(lines)):
                    named = owners.get(hashable(line.get("owner_id")))
                    if line.get("owner_id") is None or named is not None:
                        expected = named["name"] if named else None
                        self.compare(when, "lines.name", f"{where} line {number}", expected, line.get("name"))
            self.check_snapshot(when, row, document, source)
        self.moved.clear()
        self.kept.clear()
        self.names = {key: {row["name"]} for key, row in owners.items()}

    def check_snapshot(self, when: str, row: Row, document: Any, source: Row | None) -> None:
        """A snapshot is no function of the data: while its reference stays, it stays."""
        key, reference = hashable(row.id), hashable(row["owner_id"])
        taken = getattr(document, "name_then", "missing")
        before, was = self.snapshots.get(key, (None, None))
        if key not in self.moved and key in self.snapshots and before == reference and was is not None:
            self.compare(when, "name_then", f"Item {row.id}", was, taken)
        elif reference is None:
            self.compare(when, "name_then", f"Item {row.id}", None, taken)
        elif taken not in (possible := {*self.names.get(reference, {None}), *self.kept.get(key, ()), was}):
            self.fail("name_then", f"{when}: Item {row.id} is {taken!r}, expected one of {possible}")
        self.snapshots[key] = (reference, taken)

    def note_names(self) -> None:
        """Remember the name that each owner has now, or that it is missing."""
        present = self.oracle.referred(self.oracle.rows("owner"))
        for key in {*present, *self.names}:
            named = present.get(key)
            self.names.setdefault(key, {None}).add(named["name"] if named else None)

    def check_daily(self, when: str, sources: list[Row]) -> None:
        expected = self.oracle.of_daily(sources)
        found = {
            (each.group, each.day.isoformat()): {
                "items": each.items,
                "points": each.points,
                "scores": each.scores,
            }
            for each in self.store.find(self.models.daily, invalid="skip")
            if each.group != "bad"
        }
        for name in ("items", "points", "scores"):
            value = "daily" if name == "items" else f"daily.{name}"
            self.compare(
                when,
                value,
                "Daily",
                {key: each[name] for key, each in expected.items()},
                {key: each[name] for key, each in found.items()},
            )

    # -- findings --------------------------------------------------------------------------------------------

    def is_hostile(self, finding: Any) -> bool:
        """Whether this is about a hostile document, or about one that was quarantined because of it."""
        if not (self.world.has("item", "hostile") or self.world.has("owner", "hostile")):
            return False
        key = plain(finding.document_id)
        if isinstance(key, dict) and "group" in key:
            return bool(key["group"] == "bad")
        if finding.model == "Daily":
            stored = self.database["daily"].find_one({"_id": finding.document_id})
            return stored is not None and stored["group"] == "bad"
        return number_of(key) >= HOSTILE

    def value_of(self, finding: Any) -> str:
        """The derived value that a finding is about."""
        if finding.model == "Daily":
            return f"daily.{finding.path}" if finding.path in ("points", "scores") else "daily"
        first, *rest = finding.path.split(".")
        back = {self.world.stored(side, name): name for side in SIDES for name in WORDS}
        if first == "_treadle":
            first = rest[-1] if rest else ""
        if first == "lines":
            return f"lines.{rest[-1]}" if rest else "lines"
        return back.get(first, first) or f"verify {finding.pattern}"

    # -- corruption ------------------------------------------------------------------------------------------

    def corrupt_and_repair(self) -> None:
        corrupted = self.corrupt()
        named = {(finding.model, self.value_of(finding)) for finding in self.store.verify()}
        for model, value in corrupted:
            if not any(value == found and each.startswith(model) for each, found in named):
                self.fail(
                    value, f"corrupted in {model}, and verify does not name it; it names {sorted(named)}"
                )
        self.store.repair()
        self.check("after repair")
        before = self.everything()
        self.store.rebuild()
        after = self.everything()
        for name, documents in before.items():
            for key, document in documents.items():
                if document.get("group") == "bad":
                    # What hostile documents leave of their group is for their owner to repair.
                    continue
                changed = {
                    field: (value, after[name].get(key, {}).get(field))
                    for field, value in document.items()
                    if value != after[name].get(key, {}).get(field)
                }
                if changed:
                    self.fail("rebuild", f"rebuild changed {name} {key}: {changed}")

    def corrupt(self) -> list[tuple[str, str]]:
        """Wrong values and missing ones in one owner, one item and one group."""
        found: list[tuple[str, str]] = []
        owners = [row for row in self.live("owner") if row.current and row.kind in (None, "a")]
        if owners:
            names = list(self.oracle.of_owner(owners[0], []))
            found += [("Owner", name) for name in self.spoil("owner", owners[0], names)]
        known = {self.oracle.owner_key(row) for row in self.live("owner")}
        items = [row for row in self.live("item") if row.current and hashable(row["owner_id"]) in known]
        if items:
            names = ["owner", "score"]
            # A copy whose source is missing is kept as it is.
            held = [
                row for row in items if row["lines"] and hashable(row["lines"][0].get("owner_id")) in known
            ]
            row = held[0] if held else items[0]
            if held:
                names.append("lines.0.name")
            found += [("Item", name.replace(".0", "")) for name in self.spoil("item", row, names)]
        if daily := self.database["daily"].find_one({"group": {"$ne": "bad"}}):
            self.database["daily"].update_one(
                {"_id": daily["_id"]}, {"$inc": {"items": 5, "points": 5, "scores": 5}}
            )
            found += [("Daily", "daily"), ("Daily", "daily.points"), ("Daily", "daily.scores")]
        return found

    def spoil(self, side: str, row: Row, names: list[str]) -> list[str]:
        update: Raw = {"$set": {}, "$unset": {}}
        # Primes, so that the wrong score of an item does not make the wrong sum of its owner right.
        number = 7919 if side == "item" else 104729
        cards: Raw = {"top_items": [], "tags": ["wrong"], "owner": {"name": "wrong", "city": "wrong"}}
        for name in names:
            wrong: Any = cards.get(name, number)
            wrong = "wrong" if name == "lines.0.name" else wrong
            if wrong == row[name]:
                wrong = [{"_id": 0, "points": 1, "tag": "wrong"}]
            if isinstance(row[name], Decimal128):
                wrong = Decimal128(str(number))
            head, *rest = name.split(".")
            path = ".".join([self.world.stored(side, head), *rest])
            # What is missing where nothing is expected is no finding.
            if self.random.random() < 0.3 and row[name] not in (None, 0, []) and "." not in name:
                update["$unset"][path] = ""
            else:
                update["$set"][path] = wrong
        self.database[f"{side}s"].update_one(
            {"_id": row.raw["_id"]},
            {key: value for key, value in update.items() if value},
            bypass_document_validation=True,
        )
        return names

    def everything(self) -> dict[str, dict[Any, Raw]]:
        """Every document without Treadle's own state, with its array as a whole."""
        names = ["items", "owners", "daily", *(f"{side}s_archive" for side in self.world.archives)]
        return {
            name: {
                str(raw["_id"]): {
                    key: plain(value)
                    for key, value in (raw | self.whole_array(name, raw)).items()
                    if key != "_treadle"
                }
                for raw in self.oracle.raws(name)
            }
            for name in names
        }

    def whole_array(self, name: str, raw: Raw) -> Raw:
        """An outlier array with its overflow, which a rebuild may pack, and whether the flag says so."""
        side = name.removesuffix("s")
        if side not in SIDES or not isinstance(raw.get("fans"), list):
            return {}
        owner = self.world.stored(side, f"{side}_id")
        pages = [*self.database[f"{side}_fans"].find({owner: {"$eq": raw["_id"]}}).sort("page")]
        fans = [*raw["fans"], *(fan for page in pages for fan in page["fans"])]
        return {"fans": fans, "has_overflow": raw.get("has_overflow") is bool(pages)}
