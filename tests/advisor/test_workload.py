"""Profiler documents become shapes without values."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

from bson.regex import Regex

from treadle.advisor.facts import Query, Workload
from treadle.advisor.workload import parse, read, read_together

NOW = dt.datetime(2025, 1, 1, tzinfo=dt.UTC)


def profile(
    op: str, command: dict[str, Any], seconds: float = 0, ns: str = "shop.orders", **more: Any
) -> dict[str, Any]:
    return {
        "op": op,
        "ns": ns,
        "command": command,
        "ts": NOW + dt.timedelta(seconds=seconds),
        "millis": 2,
        **more,
    }


def parsed(document: dict[str, Any]) -> Query:
    query = parse(document, "shop")
    assert query is not None
    return query


def test_a_find_keeps_names_and_no_values() -> None:
    command = {
        "find": "orders",
        "filter": {"status": "secret", "$or": [{"a": 1}, {"b.c": {"$gt": "hush"}}]},
        "sort": {"at": -1},
        "limit": 5,
    }
    query = parsed(profile("query", command, docsExamined=10, nreturned=5))
    assert ("orders", "find", ("a", "b.c", "status"), (("at", -1),), 5) == (
        query.collection,
        query.kind,
        query.filter_paths,
        query.sort,
        query.limit,
    )
    assert (10, 5) == (query.examined, query.returned)
    assert "secret" not in repr(query)
    assert "hush" not in repr(query)


def test_regular_expressions_without_case_are_noted_in_all_forms() -> None:
    for value in (
        {"$regex": "a", "$options": "i"},
        Regex("a", "i"),
        re.compile("a", re.IGNORECASE),
        {"$in": [Regex("a", "i")]},
        {"$not": Regex("a", "i")},
    ):
        query = parsed(profile("query", {"find": "orders", "filter": {"name": value}}))
        assert ("name",) == query.case_insensitive, value
    for value in ({"$regex": "a"}, Regex("a", "m"), "i", {"$eq": "i"}):
        query = parsed(profile("query", {"find": "orders", "filter": {"name": value}}))
        assert () == query.case_insensitive, value


def test_only_updates_that_just_count_are_increments() -> None:
    def increments(update: Any) -> tuple[str, ...]:
        query = parsed(profile("update", {"q": {"_id": 1}, "u": update}))
        return query.increments

    assert ("n",) == increments({"$inc": {"n": 1}})
    assert ("n",) == increments({"$inc": {"n": 1}, "$set": {"at": NOW}})
    assert () == increments({"$inc": {"n": 1}, "$set": {"name": "x"}})
    assert () == increments({"$set": {"n": 1}})
    assert () == increments([{"$set": {"n": 1}}])


def test_pushes_with_a_bound_are_not_noted() -> None:
    pushes = {"$push": {"a": 1, "b": {"$each": [1], "$slice": -5}}, "$addToSet": {"c": 1}}
    query = parsed(profile("update", {"q": {}, "u": pushes}))
    assert ("a", "c") == query.pushes


def test_other_databases_and_odd_documents_are_left_out() -> None:
    odd: list[Any] = [
        {},
        {"ns": 5},
        {"op": "query", "ns": "other.orders", "command": {"find": "orders"}},
        {"op": "query", "ns": "shop.system.profile", "command": {"find": "system.profile"}},
        {"op": "getmore", "ns": "shop.orders", "command": {"getMore": 1}},
        {"op": "command", "ns": "shop.orders", "command": {"$truncated": "…"}},
        {"op": "command", "ns": "shop.orders", "command": "text"},
        profile("query", {"find": "orders", "filter": {"a": 1}, "comment": "treadle scan"}),
    ]
    assert () == read(odd, "shop", "file", 100).queries


def test_strange_commands_do_not_fail() -> None:
    for command in (
        {"aggregate": "orders", "pipeline": "x"},
        {
            "aggregate": "orders",
            "pipeline": [5, {}, {"$group": 5}, {"$sort": 1}, {"$limit": "x"}, {"$lookup": 1}],
        },
        {"find": "orders", "filter": 7, "sort": [], "limit": None},
        {"find": "orders", "filter": {"$and": 5, "a": {"$in": 7}}},
        {"find": "orders", "limit": float("inf"), "lsid": 5},
        {"find": "orders", "limit": 10**400, "lsid": {"id": [{}]}},
        {"findAndModify": "orders", "query": [], "update": {"$inc": 5, "$push": 7, "$set": None}},
        {"aggregate": "orders", "pipeline": [{"$lookup": {"from": {"a": 1}, "localField": 5}}]},
    ):
        for examined in ("x", float("nan"), -1, None, 10**400):
            document = profile("command", command, docsExamined=examined, client=5)
            assert 1 == read([document], "shop", "file", 10).operations


def together(found: Workload, *relation: str) -> tuple[int, int]:
    counts = read_together(found, *relation)
    return counts["read_together"], counts["child_reads"]


def test_children_fetched_after_their_parent_are_read_from_there() -> None:
    """And so are those that a parent joins; a parent that is read after a child is not."""
    documents = []
    for number in range(10):
        documents.append(
            profile("query", {"find": "invoices", "filter": {"_id": 1}}, number, "shop.invoices")
        )
        documents.append(
            profile("query", {"find": "lines", "filter": {"invoice_id": 1}}, number + 0.01, "shop.lines")
        )
    lookup = {"from": "lines", "localField": "_id", "foreignField": "invoice_id"}
    documents.append(
        profile("command", {"aggregate": "invoices", "pipeline": [{"$lookup": lookup}]}, 50, "shop.invoices")
    )
    counts = read_together(read(documents, "shop", "file", 100), "lines", "invoices", "invoice_id", "_id")
    assert (10, 1) == (counts["fetched_by_parent"], counts["joined_by_parent"])
    assert (1, 11) == (counts["read_together"], counts["child_reads"])


def test_reads_that_follow_each_other_count_as_together() -> None:
    documents = []
    for number in range(10):
        documents.append(profile("query", {"find": "orders", "filter": {"status": 1}}, number))
        documents.append(
            profile("query", {"find": "customers", "filter": {"_id": 1}}, number + 0.01, "shop.customers")
        )
    # Much later, so not the same page.
    documents.append(profile("query", {"find": "customers", "filter": {"_id": 1}}, 100, "shop.customers"))
    found = read(documents, "shop", "file", 100)
    assert (10, 10) == together(found, "orders", "customers", "customer_id", "_id")
    # By another field it is no look-up of the reference.
    assert (0, 10) == together(found, "orders", "customers", "customer_mail", "mail")
    assert (0, 11) == together(found, "customers", "orders", "x", "_id")
    assert 100 == found.seconds


def test_what_others_do_in_the_same_moment_is_not_together() -> None:
    """Two clients read one thing each, all the time; only sessions tell that apart."""

    def documents(sessions: tuple[int, int]) -> list[dict[str, Any]]:
        return [
            profile(
                "query",
                {"find": name, "filter": {"_id": 1}, "lsid": {"id": sessions[place]}},
                number / 100 + place / 1000,
                f"shop.{name}",
            )
            for number in range(20)
            for place, name in enumerate(("orders", "customers"))
        ]

    found = read(documents((1, 2)), "shop", "file", 100)
    assert (0, 20) == together(found, "orders", "customers", "customer_id", "_id")
    found = read(documents((1, 1)), "shop", "file", 100)
    assert (20, 20) == together(found, "orders", "customers", "customer_id", "_id")


def test_a_read_is_together_only_once() -> None:
    """Joined by $lookup and then looked up again; and a parent that joins its children reads both."""
    lookup = {"from": "customers", "localField": "customer_id", "foreignField": "_id"}
    documents = []
    for number in range(10):
        documents.append(
            profile("command", {"aggregate": "orders", "pipeline": [{"$lookup": lookup}]}, number)
        )
        documents.append(
            profile("query", {"find": "customers", "filter": {"_id": 1}}, number + 0.01, "shop.customers")
        )
    found = read(documents, "shop", "file", 100)
    assert (10, 10) == together(found, "orders", "customers", "customer_id", "_id")
    back = {"from": "orders", "localField": "_id", "foreignField": "customer_id"}
    command = {"aggregate": "customers", "pipeline": [{"$lookup": back}]}
    found = read([profile("command", command, 0, "shop.customers")] * 5, "shop", "file", 100)
    assert (5, 5) == together(found, "orders", "customers", "customer_id", "_id")


def test_operations_beyond_the_maximum_are_left_out_and_said() -> None:
    found = read([profile("insert", {}) for _ in range(20)], "shop", "file", 10)
    assert (10, False) == (found.operations, found.complete)
