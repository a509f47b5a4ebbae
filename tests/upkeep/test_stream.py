"""What the worker makes of raw writes, what it costs, and how rules come and change.

The writers here are plain PyMongo. After `run_until_idle()` nothing may be
left to find, neither for `verify` nor for the oracle in `tests/streamed.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from tests import streamed
from tests.streamed import MODELS, Writer
from tests.upkeep.followed import Sale, Shop, of, settled, without_former_states
from treadle import Count, Document, ExtendedReference, Id, Max, Subset, Sum

# -- everything at once ------------------------------------------------------------------------------


def test_raw_writes_of_every_kind_are_followed_without_former_states(run, database):
    """Inserts, updates, replacements, deletions and moves of sources and targets, by plain PyMongo.

    The worlds of test_pairs.py follow them with former states.
    """
    store = run.store(MODELS)
    store.setup()
    without_former_states(database, "reviews", "articles")
    writer = Writer(database, 3)
    for _ in range(4):
        writer.write(40)
        settled(store)
        assert [] == streamed.wrong(database)


# -- chains ------------------------------------------------------------------------------------------


def chain(first: str, second: str) -> list[type[Document]]:
    class Leaf(Document, collection="leaves"):
        id: int
        branch_id: int
        weight: int = 1

    class Branch(Document, collection="branches"):
        id: int
        tree_id: int
        weight: Annotated[int, Sum(Leaf, "weight", by="branch_id", maintain=first)] = 0

    class Tree(Document, collection="trees"):
        id: int
        weight: Annotated[int, Sum(Branch, "weight", by="tree_id", maintain=second)] = 0
        heaviest: Annotated[int | None, Max(Branch, "weight", by="tree_id", maintain=second)] = None

    class Bird(Document, collection="birds"):
        id: int
        tree_id: int
        tree_weight: Annotated[
            int | None, ExtendedReference(Tree, by="tree_id", field="weight", maintain=second)
        ] = None

    return [Leaf, Branch, Tree, Bird]


@pytest.mark.parametrize("first", ["stream", "write"])
@pytest.mark.parametrize("second", ["stream", "write"])
def test_values_made_of_maintained_values_follow(run, database, first, second):
    """Stream over stream, write over stream, stream over write."""
    leaf, branch, tree, bird = chain(first, second)
    store = run.store([leaf, branch, tree, bird])
    store.setup()
    store.insert(tree(id=1))
    store.insert_many([branch(id=number, tree_id=1) for number in (1, 2)])
    store.insert(bird(id=1, tree_id=1))
    store.insert_many([leaf(id=number, branch_id=number % 2 + 1, weight=number) for number in range(6)])
    settled(store)
    assert (15, 9) == (of(database, "trees", 1)["weight"], of(database, "trees", 1)["heaviest"])
    assert 15 == of(database, "birds", 1)["tree_weight"]
    if first == "stream":
        database["leaves"].update_one({"_id": 5}, {"$set": {"weight": 50}})
        database["leaves"].delete_one({"_id": 4})
    else:
        store.update(leaf, 5, {"$set": {"weight": 50}})
        store.delete(leaf, 4)
    settled(store)
    assert (56, 54) == (of(database, "trees", 1)["weight"], of(database, "trees", 1)["heaviest"])
    assert 56 == of(database, "birds", 1)["tree_weight"]


# -- what it costs, and where it cannot be had -------------------------------------------------------


class ReviewCard(BaseModel):
    amount: int


class Fair(Document, collection="fairs"):
    name: str = ""
    sales: Annotated[int, Count("Ticket", by="fair_id", maintain="stream")] = 0
    top: Annotated[
        list[ReviewCard], Subset("Ticket", by="fair_id", sort="-amount", size=2, maintain="stream")
    ] = []


class Ticket(Document, collection="tickets"):
    fair_id: Id
    amount: int = 1


def test_writes_of_what_the_worker_follows_stay_plain(heard):
    """One command each, and no transaction."""
    from treadle import Store

    database, listener = heard
    store = Store(database, [Fair, Ticket])
    store.setup()
    fair = store.insert(Fair(name="a"))
    ticket = store.insert(Ticket(fair_id=fair.id))
    listener.clear()
    store.insert(Ticket(fair_id=fair.id))
    store.insert(Fair(name="b"))
    store.update(Ticket, ticket.id, {"$set": {"amount": 3}})
    store.update(Fair, fair.id, {"$set": {"name": "c"}})
    store.delete(Ticket, ticket.id)
    assert ["insert", "insert", "findAndModify", "findAndModify", "findAndModify"] == listener.names
    assert not any("startTransaction" in command for _, command in listener.commands)


def test_lag_counts_what_the_worker_has_not_seen(shops, database):
    store, (a, *_) = shops
    settled(store)
    worker = store.worker()
    assert (0, 0.0) == (worker.lag().events, worker.lag().seconds)
    database["sales"].insert_many([{"shop_id": a, "amount": 1, "open": True} for _ in range(25)])
    assert 25 == worker.lag().events
    assert 0.0 <= worker.lag().seconds < 30.0
    settled(store)
    assert (0, 0.0) == (worker.lag().events, worker.lag().seconds)


# -- declarations that come and change ---------------------------------------------------------------


def tally(**fields: Any) -> list[type[Document]]:
    class Vote(Document, collection="votes"):
        id: int
        poll_id: int
        weight: int = 1

    body = {"__annotations__": {"id": int, **fields}, "__module__": __name__}
    body |= {"count": 0} if "count" in fields else {}
    body |= {"total": 0} if "total" in fields else {}
    return [Vote, type(Document)("Poll", (Document,), body, collection="polls")]


COUNT = Annotated[int, Count("Vote", by="poll_id", maintain="stream")]
HEAVY = Annotated[int, Count("Vote", by="poll_id", maintain="stream", where={"weight": {"$gte": 3}})]
TOTAL = Annotated[int, Sum("Vote", "weight", by="poll_id", maintain="stream")]


@pytest.mark.parametrize(
    ("after", "expected"),
    [({"count": COUNT, "total": TOTAL}, {"count": 5, "total": 10}), ({"count": HEAVY}, {"count": 2})],
    ids=["added", "changed"],
)
def test_a_rule_that_is_added_or_changed_is_built_once(run, database, after, expected):
    store = run.store(tally(count=COUNT))
    store.setup()
    database["polls"].insert_one({"_id": 1})
    database["votes"].insert_many([{"_id": number, "poll_id": 1, "weight": number} for number in range(5)])
    settled(store)
    later = run.store(tally(**after))
    later.setup()
    settled(later)
    assert expected == of(database, "polls", 1)
    worker = later.worker()
    assert 0 == worker.run_until_idle()
    assert 0 == worker.totals.get("verified", 0)


def lettering(*names: str) -> list[type[Document]]:
    fields = {"__annotations__": dict.fromkeys(names, str | None), "__module__": __name__}
    small = type(BaseModel)("SmallCard", (BaseModel,), {**fields, **dict.fromkeys(names)})

    class Author(Document, collection="authors"):
        id: int
        name: str | None = None
        town: str | None = None

    class Book(Document, collection="books"):
        id: int
        author_id: int
        author: Annotated[small | None, ExtendedReference(Author, by="author_id", maintain="stream")] = None

    return [Author, Book]


def test_a_card_with_one_field_more_is_built_again(run, database):
    """The declaration's own words are the same; what it copies is not."""
    store = run.store(lettering("name"))
    store.setup()
    database["authors"].insert_one({"_id": 1, "name": "Ann", "town": "Ghent"})
    database["books"].insert_one({"_id": 1, "author_id": 1})
    settled(store)
    settled(run.store(lettering("name", "town")))
    assert {"name": "Ann", "town": "Ghent"} == of(database, "books", 1)["author"]


def test_the_same_declaration_is_the_same_in_every_process():
    """Else each start would go over everything: nothing in it may depend on where objects lie in memory."""
    import subprocess
    import sys

    program = (
        f"from {__name__} import validated\n"
        "from treadle.graph.graph import Graph\n"
        "from treadle.upkeep.position import signature\n"
        "print([signature(rule) for rule in Graph(validated()).rules])\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert 1 == len(said)


def validated() -> list[type[Document]]:
    from pydantic import AfterValidator

    def checked(value: int) -> int:
        return value

    one = Annotated[
        int,
        AfterValidator(checked),
        Count("Vote", by="poll_id", maintain="stream", where={"weight": {"$in": [1, 2]}}),
    ]
    return tally(count=one)


# -- rebuild and handover ----------------------------------------------------------------------------


def test_rebuild_hands_over_to_the_worker_without_a_gap(run, database):
    """What is written during and after the rebuild is the worker's; nothing is gone over twice."""
    store = run.store([Sale, Shop])
    store.setup()
    shop = database["shops"].insert_one({"name": "a"}).inserted_id
    database["sales"].insert_many([{"shop_id": shop, "amount": 1, "open": True} for _ in range(10)])
    seen = []

    def meanwhile(progress: Any) -> None:
        seen.append(progress)
        database["sales"].insert_one({"shop_id": shop, "amount": 100, "open": True})

    store.rebuild(Shop, progress=meanwhile)
    database["sales"].insert_one({"shop_id": shop, "amount": 1000, "open": True})
    worker = store.worker()
    worker.run_until_idle()
    assert [] == store.verify()
    assert 10 + 100 * len(seen) + 1000 == of(database, "shops", shop)["total"]
    assert 0 == worker.totals.get("verified", 0)


def test_a_rebuild_beside_a_worker_that_does_not_know_the_rule_leaves_no_gap(run, database):
    """The old version's worker reads on past what it does not know; the new one has to look again."""
    old, new = run.store(tally(count=COUNT)), run.store(tally(count=COUNT, total=TOTAL))
    new.setup()
    database["polls"].insert_one({"_id": 1})
    database["votes"].insert_one({"_id": 1, "poll_id": 1, "weight": 5})
    settled(old)
    new.rebuild()
    database["votes"].insert_one({"_id": 2, "poll_id": 1, "weight": 7})
    old.worker().run_until_idle()
    settled(new)
    assert 12 == of(database, "polls", 1)["total"]
