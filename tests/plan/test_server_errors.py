"""What the server's errors mean, asked of a real server wherever its words are what tells."""

from __future__ import annotations

import decimal

import pytest
from bson.errors import InvalidBSON
from pydantic import TypeAdapter, ValidationError
from pymongo import InsertOne, UpdateOne
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    DocumentTooLarge,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WriteConcernError,
)

from treadle.engine.lease import LeaseLost
from treadle.errors import DataError
from treadle.plan import create
from treadle.plan.server_errors import (
    DUPLICATE_KEY,
    codes_of,
    exists_already,
    is_about_one_document,
    is_bug,
    is_duplicate,
    is_increment_overflow,
    is_outcome_unknown,
    is_transient,
    message_of,
    refusals,
    surely_not_committed,
    translate,
)
from treadle.store.call_context import passed
from treadle.upkeep.jobs import Stopped

LARGEST = 2**63 - 1


@pytest.fixture
def numbers(database):
    database["numbers"].insert_one({"_id": 1, "n": LARGEST, "text": "a"})
    return database["numbers"]


def refusal(act) -> PyMongoError:
    with pytest.raises(PyMongoError) as caught:
        act()
    return caught.value


def labelled(label: str) -> OperationFailure:
    error = OperationFailure("x", 112)
    error._add_error_label(label)
    return error


@pytest.mark.parametrize(
    "write",
    [
        lambda numbers, pipeline: numbers.update_one({}, pipeline),
        lambda numbers, pipeline: numbers.update_many({}, pipeline),
        lambda numbers, pipeline: numbers.bulk_write([UpdateOne({}, pipeline)]),
        lambda numbers, pipeline: numbers.find_one_and_update({}, pipeline),
        lambda numbers, pipeline: numbers.aggregate(pipeline),
        lambda numbers, pipeline: numbers.aggregate([*pipeline, {"$merge": "others"}]),
        lambda numbers, pipeline: list(numbers.find({"$expr": pipeline[0]["$set"]["half"]})),
    ],
)
def test_an_expression_that_fails_is_about_its_document(numbers, write):
    """Each command says it in other words."""
    error = refusal(lambda: write(numbers, [{"$set": {"half": {"$divide": ["$text", 2]}}}]))
    assert is_about_one_document(error)


@pytest.mark.parametrize("several", [False, True])
def test_a_sum_that_does_not_fit_is_told_by_its_words(numbers, several):
    add = {"$inc": {"n": 1}}
    error = refusal(
        lambda: numbers.bulk_write([UpdateOne({}, add)]) if several else numbers.update_one({}, add)
    )
    assert [True] == [is_increment_overflow(each) for each in refusals(error)]
    other = refusal(lambda: numbers.update_one({}, {"$set": {"$x": 1}}))
    assert [False] == [is_increment_overflow(each) for each in refusals(other)]


def test_the_codes_of_a_bulk_are_those_of_its_writes(numbers):
    bulk = refusal(lambda: numbers.bulk_write([InsertOne({"_id": 1})]))
    alone = refusal(lambda: numbers.insert_one({"_id": 1}))
    assert isinstance(bulk, BulkWriteError)
    assert DUPLICATE_KEY in codes_of(bulk) & codes_of(alone)
    assert "E11000" in message_of(bulk)
    assert "E11000" in message_of(alone)
    assert is_about_one_document(bulk)
    assert is_about_one_document(alone)
    # Whoever made the other one may be waited for.
    assert is_duplicate(bulk)
    assert is_duplicate(alone)


def test_a_collection_that_is_there_is_not_made_again(run, database):
    assert run(create("numbers"))
    error = refusal(lambda: database.command({"create": "numbers", "capped": True, "size": 4096}))
    assert exists_already(error)
    assert not run(create("numbers", capped=True, size=4096))
    with pytest.raises(OperationFailure):
        run(create("others", nonsense=1))


def test_a_validator_that_refuses_is_poison_and_names_the_path(database):
    database.create_collection("strict", validator={"$jsonSchema": {"required": ["name"]}})
    error = refusal(lambda: database["strict"].insert_one({}))
    assert is_about_one_document(error)
    assert "the validator of Thing's collection refused the document (name is missing)" in str(
        translate(error, "Thing")
    )
    bulk = refusal(lambda: database["strict"].bulk_write([InsertOne({})]))
    assert "name is missing" in str(translate(bulk, "Thing"))


@pytest.mark.parametrize(
    "error",
    [
        OperationFailure("not authorized", 13),
        labelled("TransientTransactionError"),
        labelled("RetryableWriteError"),
        labelled("UnknownTransactionCommitResult"),
        WriteConcernError("x"),
        AutoReconnect("x"),
        ServerSelectionTimeoutError("x"),
        BulkWriteError({"writeErrors": [], "writeConcernErrors": [{"code": 64}]}),
        BulkWriteError({"writeErrors": [{"code": 121}, {"code": 91}]}),
        DataError("x", code="lease-busy"),
        Stopped("x", code="job-stopped"),
        passed("waiting"),
        LeaseLost(),
        TimeoutError(),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_what_every_document_would_fail_of_is_about_none(error):
    assert not is_about_one_document(error)


@pytest.mark.parametrize(
    "error",
    [
        OperationFailure("longitude out of bounds", 16755),
        OperationFailure("language override unsupported", 17262),
        OperationFailure("a code that nobody has seen", 987654),
        BulkWriteError({"writeErrors": [{"code": 121}, {"code": 11000}]}),
        InvalidBSON("x"),
        DocumentTooLarge("x"),
        DataError("x", code="document-invalid"),
        decimal.InvalidOperation(),
        OverflowError(),
        RecursionError(),
    ],
    ids=repr,
)
def test_whatever_does_not_pass_is_about_a_document(error):
    assert is_about_one_document(error)
    assert not is_bug(error)


@pytest.mark.parametrize(
    "kind", [TypeError, KeyError, AttributeError, LookupError, ValueError, AssertionError]
)
def test_what_only_a_bug_raises_is_not_about_a_document(kind):
    assert not is_about_one_document(kind("x"))
    assert is_bug(kind("x"))


def test_what_pydantic_refuses_is_about_a_document():
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python("many")
    assert is_about_one_document(caught.value)


def test_labels_say_what_may_be_tried_again():
    assert is_transient(labelled("TransientTransactionError"))
    unknown = labelled("UnknownTransactionCommitResult")
    assert is_outcome_unknown(unknown)
    assert not surely_not_committed(unknown)
    assert not surely_not_committed(WriteConcernError("x"))
    assert not surely_not_committed(KeyboardInterrupt())
    assert surely_not_committed(OperationFailure("x", 112))
