"""The naive versions of History, Archive, Attributes and Links, each caught by the checks of its own tests.

A mutant is a patch that puts a known mistake back. Without it the scenario
holds; with it an assertion must fail.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.patterns.archive.models import COUNTED, NOW, OLD, Sale, Shop, places
from tests.patterns.history.models import Policy, disorder, rows
from tests.patterns.test_attributes import Product
from tests.patterns.test_links import MODELS, Course, Student, lopsided
from treadle import Store
from treadle.engine import ledger as ledgers
from treadle.engine import writes
from treadle.graph.pattern import Entry
from treadle.patterns import links
from treadle.patterns.archive import moves
from treadle.patterns.history import rows as history_rows
from treadle.patterns.history.rule import WrittenHistory
from treadle.plan import delete_many, find, find_one, insert_many, outside
from treadle.query import pairs, safety

# -- scenarios: what must hold ---------------------------------------------------------------------


def states_go_with_their_writes(database: Any) -> None:
    store = Store(database, [Policy])
    store.setup()
    store.insert(Policy(id=1))
    with pytest.raises(RuntimeError), store.transaction():
        store.update(Policy, 1, {"$set": {"premium": 1}})
        raise RuntimeError
    assert [0] == [row["document"]["premium"] for row in rows(database, 1)]
    store.update(Policy, 1, {"$set": {"premium": 2}})
    store.update_many(Policy, {}, {"$inc": {"premium": 1}})
    assert [0, 2, 3] == [row["document"]["premium"] for row in rows(database, 1)]
    assert [] == disorder(database, Policy)
    assert [] == store.verify()


def states_are_those_that_the_write_ended(database: Any) -> None:
    """A writer who comes in between conflicts, and its state is recorded as well."""
    store = Store(database, [Policy])
    store.setup()
    store.insert_many([Policy(id=key) for key in range(3)])
    for _ in range(3):
        store.update_many(Policy, {}, {"$inc": {"premium": 1}})
    for key in range(3):
        assert [0, 1, 2, 3] == [row["document"]["premium"] for row in rows(database, key)]
    other, original = Store(database, [Policy]), ledgers.Ledger.note_before
    other.recover()
    RACING[:] = [lambda: other.update(Policy, 1, {"$set": {"holder": "Ben"}})]

    def note_before(self: Any, entry: Any, ids: Any) -> Any:
        # The documents were read, and are not written yet.
        while RACING:
            RACING.pop()()
        return original(self, entry, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledgers.Ledger, "note_before", note_before)
        store.update_many(Policy, {}, {"$inc": {"premium": 1}})
    last = [(row["document"]["holder"], row["document"]["premium"]) for row in rows(database, 1)[-3:]]
    assert [("Ada", 3), ("Ben", 3), ("Ben", 4)] == last
    assert [] == disorder(database, Policy)
    assert [] == store.verify()


def moved_documents_keep_racing_updates(database: Any) -> None:
    store, other = Store(database, COUNTED), Store(database, COUNTED)
    store.setup()
    store.insert(Shop(id=1))
    store.insert_many([Sale(id=key, date=OLD, amount=1) for key in range(4)])
    other.recover()

    def update() -> None:
        if database["sales"].find_one({"_id": 2}) is None:
            other.restore(Sale, 2)
        other.update(Sale, 2, {"$set": {"amount": 50}})

    RACING[:] = [update]
    store.archive(Sale, now=NOW)
    while RACING:
        RACING.pop()()
    assert [1] * 4 == [len(places(database, key)) for key in range(4)]
    assert (4, 53) == (sum(1 for _ in store.find(Sale, archived=True)), store.require(Shop, 1).total)
    assert 50 == store.require(Sale, 2).amount


RACING: list[Callable[[], Any]] = []


def archived_documents_are_counted(database: Any) -> None:
    store = Store(database, COUNTED)
    store.setup()
    store.insert(Shop(id=1))
    store.insert_many([Sale(id=key, date=OLD, amount=1) for key in range(4)])
    store.archive(Sale, now=NOW)
    store.rebuild()
    assert 4 == store.require(Shop, 1).sales


def attributes_are_kept(database: Any) -> None:
    store = Store(database, [Product])
    store.setup()
    store.insert(Product(id=1, specs={"color": "red", "size": 5}))
    store.insert(Product(id=2, specs={"color": "red", "size": 4}))
    store.insert(Product(id=3, specs={"color": "blue", "size": 5}))
    assert [1] == [each.id for each in store.find(Product, {"specs.color": "red", "specs.size": 5})]
    store.update(Product, 1, {"$unset": {"specs.color": ""}, "$set": {"specs.size": 6}})
    assert [{"k": "size", "v": 6}] == database["products"].find_one({"_id": 1})["specs"]
    assert [1, 3] == [each.id for each in store.find(Product, {"specs.color": {"$ne": "red"}})]


def links_have_two_ends(database: Any) -> None:
    store = Store(database, MODELS)
    store.setup()
    store.insert(Course(id="math"))
    store.insert(Student(id="ada", links=["math"]))
    assert [] == lopsided(database)
    store.delete(Course, "math")
    assert [] == lopsided(database)


# -- mutants: what goes wrong ----------------------------------------------------------------------


def recorded_beside_the_commit(patch: pytest.MonkeyPatch) -> None:
    """The row is not written in the transaction of the write."""
    patch.setattr(
        WrittenHistory, "record", lambda self, changes, ledger: outside(lambda: self.advance(changes, ledger))
    )


def ended_by_another_clock(patch: pytest.MonkeyPatch) -> None:
    wrong = {"$literal": dt.datetime(2001, 1, 1, tzinfo=dt.UTC)}
    patch.setattr(history_rows, "END", wrong)


def numbered_by_counting_the_write(patch: pytest.MonkeyPatch) -> None:
    """States from the changes of the whole commit only, and not of each document as it was."""
    original = ledgers.Ledger.unrecorded

    def unrecorded(self: Any, rule: Any) -> Any:
        return original(self, rule)[:1]

    patch.setattr(ledgers.Ledger, "unrecorded", unrecorded)


def recorded_from_an_earlier_read(patch: pytest.MonkeyPatch) -> None:
    """`update_many` that makes its states of the documents as it read them first."""
    read: dict[Any, Any] = {}
    apply, record = writes._Update._apply, WrittenHistory.record

    def noting(self: Any, befores: Any, *rest: Any) -> Any:
        for each in befores:
            read.setdefault((each["_id"], each["premium"]), each)
        return apply(self, befores, *rest)

    def recording(self: Any, changes: Any, ledger: Any) -> Any:
        stale = []
        for change in changes:
            known = read.get((change.id, change.after["premium"] - 1)) if change.before else None
            after = change.after if known is None else {**known, "premium": change.after["premium"]}
            stale.append(replace(change, after=after))
        return record(self, stale, ledger)

    patch.setattr(writes._Update, "_apply", noting)
    patch.setattr(WrittenHistory, "record", recording)


def copied_then_deleted(patch: pytest.MonkeyPatch) -> None:
    """The archive without a transaction: an update between the copy and the deletion is lost."""

    def move(rule: Any, chosen: Any, ledger: Any) -> Any:
        documents = yield from outside(lambda: find(rule.target.collection, chosen))
        if documents:
            yield from outside(lambda: insert_many(rule.into, documents))
            while RACING:
                RACING.pop()()
            keys = {"_id": {"$in": [each["_id"] for each in documents]}}
            yield from outside(lambda: delete_many(rule.target.collection, keys))
        return len(documents)

    patch.setattr(moves, "_move", move)


def counted_in_one_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Entry, "counted_elsewhere", None)


def two_names_in_one_element(patch: pytest.MonkeyPatch) -> None:
    original = pairs.paired_filter

    def merged(codec: Any, filter: Any) -> Any:
        translated = original(codec, filter)
        together: dict[str, Any] = {}
        for each in translated.get("$and", []):
            together |= each.get("specs", {}).get("$elemMatch", {})
        return {"specs": {"$elemMatch": together}} if len(together) > 2 or "v" in together else translated

    patch.setattr(safety, "paired_filter", merged)


def unset_leaves_the_name(patch: pytest.MonkeyPatch) -> None:
    original = pairs._pair

    def pair(operator: str, path: str, name: str, value: Any) -> Any:
        if operator != "$unset":
            return original(operator, path, name, value)
        named = {"$eq": ["$$this.k", name]}
        return {
            "$set": {path: {"$map": {"input": f"${path}", "in": {"$cond": [named, {"k": name}, "$$this"]}}}}
        }

    patch.setattr(pairs, "_pair", pair)


def linked_from_one_end(patch: pytest.MonkeyPatch) -> None:
    def write(self: Any, *_: Any) -> Any:
        yield from ()

    patch.setattr(links.LinksRule, "_write", write)


def found_by_what_was_written_only(patch: pytest.MonkeyPatch) -> None:
    """A deletion that forgets who named the document."""

    def record(self: Any, changes: Any, ledger: Any) -> Any:
        if any(change.after is None for change in changes):
            return
        yield from find_one(self.target.collection, {})

    patch.setattr(links.LinksRule, "record", record)


MUTANTS = [
    (recorded_beside_the_commit, states_go_with_their_writes),
    (ended_by_another_clock, states_go_with_their_writes),
    (numbered_by_counting_the_write, states_are_those_that_the_write_ended),
    (recorded_from_an_earlier_read, states_are_those_that_the_write_ended),
    (copied_then_deleted, moved_documents_keep_racing_updates),
    (counted_in_one_place, archived_documents_are_counted),
    (two_names_in_one_element, attributes_are_kept),
    (unset_leaves_the_name, attributes_are_kept),
    (linked_from_one_end, links_have_two_ends),
    (found_by_what_was_written_only, links_have_two_ends),
]


@pytest.mark.parametrize(
    "scenario", dict.fromkeys(scenario for _, scenario in MUTANTS), ids=lambda s: s.__name__
)
def test_the_scenario_holds(scenario, database):
    scenario(database)


@pytest.mark.parametrize(("mutant", "scenario"), MUTANTS, ids=lambda each: each.__name__)
def test_the_mutant_is_caught(mutant, scenario, database, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(Exception) as raised:
        scenario(database)
    assert not isinstance(raised.value, (AttributeError, TypeError, NameError))
