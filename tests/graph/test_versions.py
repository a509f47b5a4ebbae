"""A version chain: which documents are outdated, which conditions mean the same in all versions."""

from __future__ import annotations

from typing import Any

import pytest

from treadle import DataError, DeclarationError, Document, Store, migration
from treadle.graph.versions import VersionChain, command_chunks, written_fields


def chain_of(up: Any, fields: Any = None, down: Any = None) -> VersionChain:
    class Some(Document, collection="some", version=2): ...

    migration(Some, 1, up=up, down=down, fields=fields)
    return VersionChain(Some)


def unchanged(document: dict[str, Any]) -> dict[str, Any]:
    return document


def result_of(plan: Any) -> Any:
    """What a plan returns that sends nothing."""
    with pytest.raises(StopIteration) as stop:
        next(plan)
    return stop.value.value


PIPELINE = [{"$set": {"points": "$pts", "at.day": 1}}, {"$unset": "pts"}]


# -- which documents are outdated -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "outdated"),
    [
        ({}, True),
        ({"schema_version": None}, True),
        ({"schema_version": 1}, True),
        ({"schema_version": 2}, False),
        ({"schema_version": 2.0}, False),
        ({"schema_version": 3}, True),
        ({"schema_version": "2"}, True),
    ],
)
def test_a_document_of_another_version_is_outdated(raw, outdated):
    assert outdated == chain_of(unchanged).is_outdated(raw)


def test_without_versions_every_document_is_current():
    class Plain(Document, collection="plain"): ...

    chain = VersionChain(Plain)
    assert not chain.is_outdated({"schema_version": 7})
    assert not chain.may_change
    assert [{"a": 1}] == result_of(chain.upgrade([{"a": 1}])).documents


# -- conversions ------------------------------------------------------------------------------------


def test_each_document_becomes_a_current_one_or_a_reason():
    def halve(document: dict[str, Any]) -> dict[str, Any]:
        document["n"] = document["n"] // 2
        return document

    given = [{"_id": 1, "n": 4}, {"_id": 2, "n": "x"}, {"_id": 3, "n": 7, "schema_version": 2}]
    upgraded = result_of(chain_of(halve).upgrade(given))
    assert [{"_id": 1, "n": 2, "schema_version": 2}, given[2]] == upgraded.documents
    ((key, reason),) = upgraded.failed
    assert (2, "migration-failed") == (key, reason.code)
    assert "TypeError" in reason.message
    assert {"_id": 1, "n": 4} == given[0], "the document that was read is not changed"
    with pytest.raises(DataError, match="TypeError"):
        upgraded.required()


@pytest.mark.parametrize("version", ["2", 0, 1.5, True, 3])
def test_what_is_no_known_version_is_a_reason(version):
    upgraded = result_of(chain_of(unchanged).upgrade([{"_id": 1, "schema_version": version}]))
    ((_, reason),) = upgraded.failed
    assert "version-unknown" == reason.code


def test_a_function_may_change_only_the_fields_that_it_names():
    def add(document: dict[str, Any]) -> dict[str, Any]:
        return {**document, "b": 1}

    assert not result_of(chain_of(add, fields=("a", "b")).upgrade([{"_id": 1, "a": 1}])).failed
    ((_, reason),) = result_of(chain_of(add, fields=["a"]).upgrade([{"_id": 1}])).failed
    assert "'b', which fields= does not name" in reason.message


@pytest.mark.parametrize("fields", ["phone", ("a", 1), ("",)])
def test_fields_are_names(fields):
    with pytest.raises(DeclarationError) as caught:
        chain_of(unchanged, fields=fields)
    assert "migration-invalid" == caught.value.code


def test_documents_are_lowered_by_the_ways_down():
    def drop(document: dict[str, Any]) -> dict[str, Any]:
        del document["b"]
        return document

    chain = chain_of(unchanged, down=drop)
    (lowered,) = result_of(chain.lower([{"_id": 1, "b": 2, "schema_version": 2}], 1))
    assert {"_id": 1, "schema_version": 1} == lowered


def test_commands_hold_a_bounded_number_of_documents():
    documents = [{"n": number} for number in range(1001)]
    assert [500, 500, 1] == [len(each) for each in command_chunks(documents)]
    large = [{"text": "x" * 4_000_000} for _ in range(3)]
    assert [1, 1, 1] == [len(each) for each in command_chunks(large)]


# -- conditions ---------------------------------------------------------------------------------------


def test_the_fields_that_a_pipeline_writes_are_known():
    assert {"points", "at", "pts"} == written_fields(PIPELINE)
    assert {"a", "b"} == written_fields([{"$unset": ["a", "b"]}])
    assert written_fields([{"$replaceWith": {"_id": "$_id"}}]) is None


@pytest.mark.parametrize(
    ("own", "before"),
    [
        ({}, None),
        ({"points": 1}, {}),
        ({"owner": 1, "points": 1}, {"owner": 1}),
        ({"$and": [{"owner": 1}, {"at": 2}, {"$and": [{"a": 1}]}]}, {"owner": 1, "a": 1}),
        ({"a": 1, "$and": [{"a": 2}, {"at": 2}]}, {"$and": [{"a": 1}, {"a": 2}]}),
        ({"$or": [{"a": 1}, {"points": 1}]}, {}),
        ({"$or": [{"a": 1}, {"b": 1}]}, None),
        ({"$expr": {"$eq": ["$a", "$pts"]}, "_id": 1}, {"_id": 1}),
        ({"schema_version": 2}, {}),
        ({"$where": "true"}, {}),
    ],
)
def test_conditions_on_changed_fields_are_left_out_before_the_upgrade(own, before):
    for chain in (chain_of(PIPELINE), chain_of(unchanged, fields=("points", "pts", "at"))):
        divided = chain.divide_strictly(own)
        assert before == (None if divided is None else divided.stored)


def test_a_function_that_names_no_fields_may_change_all_but_the_id():
    chain = chain_of(unchanged)
    assert ({"_id": 1}, {"owner": 1}) == chain.divide_strictly({"_id": 1, "owner": 1})
    # Of a caller's filter only what is known to change counts.
    assert chain.divide({"_id": 1, "owner": 1}) is None


# -- pipelines, on a server ----------------------------------------------------------------------------


def test_a_pipeline_that_fails_for_one_document_upgrades_the_others(database):
    class Numbered(Document, collection="numbered", version=2):
        n: int = 0

    migration(Numbered, 1, up=[{"$set": {"n": {"$toInt": "$text"}}}])
    store = Store(database, [Numbered])
    given = [{"_id": number, "text": "x" if number == 3 else "$5"[1:]} for number in range(7)]
    with store.transaction() as session:
        # The failure of one does not end the caller's transaction.
        upgraded = store.runner.run(store.graph.entry(Numbered).versions.upgrade(given), session)
        store.insert(Numbered(n=1))
    assert [3] == [key for key, _ in upgraded.failed]
    assert [5] * 6 == [each["n"] for each in upgraded.documents]
    assert 1 == store.count(Numbered)
