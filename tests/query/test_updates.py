"""Updates, parsed once: what is sent, what it touches, and whether its result must be looked at.

Covers: query/updates, query/field_types.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from bson import Decimal128, ObjectId

from tests.query.models import (
    Address,
    Line,
    Loose,
    Maintained,
    Order,
    Ordered,
    Size,
    Task,
    codec_of,
    paths_of,
)
from treadle import Unchecked, UsageError
from treadle.query.field_types import load_what_fits
from treadle.query.updates import ParsedUpdate, parse_update

pytestmark = pytest.mark.quick
TEXT = "0123456789abcdef01234567"
ID = ObjectId(TEXT)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def parsed(update: Any, *, model: Any = Order, array_filters: Any = None) -> ParsedUpdate:
    return parse_update(paths_of(model), update, array_filters)


def code_of(update: Any, *, model: Any = Order, maintained: Any = None) -> str:
    with pytest.raises(UsageError) as caught:
        parse_update(paths_of(model, maintained), update)
    return caught.value.code


@pytest.mark.parametrize(
    ("update", "expected", "exact"),
    [
        ({"$set": {"status": "paid"}}, {"$set": {"status": "paid"}}, True),
        ({"$set": {"total": "4"}}, {"$set": {"total": 4}}, True),
        ({"$set": {"price": 2}}, {"$set": {"price": Decimal128("2")}}, True),
        ({"$set": {"customerId": TEXT}}, {"$set": {"customerId": ID}}, True),
        ({"$setOnInsert": {"bounded": 10}}, {"$setOnInsert": {"bounded": 10}}, True),
        ({"$set": {"paidAt": None}}, {"$set": {"paidAt": None}}, True),
        ({"$set": {"letters": "abc"}}, {"$set": {"letters": "abc"}}, True),
        ({"$set": {"address": {"zip": "1", "owner_id": TEXT}}}, {"$set": {"address": {"city": "", "zip": "1", "owner_id": ID}}}, True),
        ({"$set": {"needed": Address(city="x")}}, {"$set": {"needed": {"city": "x", "zip": "", "owner_id": None}}}, True),
        ({"$set": {"address.owner_id": TEXT}}, {"$set": {"address.owner_id": ID}}, True),
        ({"$set": {"lines.$[].quantity": "4"}}, {"$set": {"lines.$[].quantity": 4}}, True),
        ({"$set": {"lines.0.quantity": 4}}, {"$set": {"lines.0.quantity": 4}}, False),
        ({"$set": {"scores.a": "5"}}, {"$set": {"scores.a": 5}}, True),
        ({"$set": {"root.a": 5}}, {"$set": {"root.a": 5}}, False),
        ({"$set": {"place.city": "x"}}, {"$set": {"place.city": "x"}}, False),
        ({"$set": {"anything": {"a": Decimal(1)}}}, {"$set": {"anything": {"a": Decimal128("1")}}}, True),
        # A validator that looks at other fields cannot judge a value alone.
        ({"$set": {"later": 1}}, {"$set": {"later": 1}}, False),
        ({"$max": {"bounded": 7}}, {"$max": {"bounded": 7}}, True),
        ({"$unset": {"status": ""}}, {"$unset": {"status": ""}}, True),
        ({"$inc": {"total": 1.0}}, {"$inc": {"total": 1}}, True),
        ({"$inc": {"bounded": 1}}, {"$inc": {"bounded": 1}}, False),
        ({"$inc": {"weight": Decimal("1.5")}}, {"$inc": {"weight": 1.5}}, True),
        ({"$inc": {"price": 2}}, {"$inc": {"price": Decimal128("2")}}, True),
        ({"$inc": {"price": Decimal("9E6130")}}, {"$inc": {"price": Decimal128("9E6130")}}, False),
        ({"$mul": {"price": 2}}, {"$mul": {"price": Decimal128("2")}}, False),
        ({"$push": {"lines": {"product_id": TEXT}}}, {"$push": {"lines": {"product_id": ID, "quantity": 0}}}, True),
        ({"$push": {"lines": Line(product_id=ID)}}, {"$push": {"lines": {"product_id": ID, "quantity": 0}}}, True),
        ({"$push": {"tags": {"$each": [TEXT], "$slice": -5}}}, {"$push": {"tags": {"$each": [ID], "$slice": -5}}}, True),
        ({"$addToSet": {"tags": TEXT}}, {"$addToSet": {"tags": ID}}, True),
        ({"$push": {"pair": 1}}, {"$push": {"pair": 1}}, False),
        ({"$pull": {"tags": TEXT}}, {"$pull": {"tags": ID}}, True),
        ({"$pull": {"tags": {"$in": [TEXT]}}}, {"$pull": {"tags": {"$in": [ID]}}}, True),
        ({"$pull": {"lines": {"product_id": TEXT, "quantity": {"$gt": 2}}}}, {"$pull": {"lines": {"product_id": ID, "quantity": {"$gt": 2}}}}, True),
        ({"$pullAll": {"tags": [TEXT]}}, {"$pullAll": {"tags": [ID]}}, True),
        ({"$pop": {"tags": 1}}, {"$pop": {"tags": 1}}, True),
        ({"$currentDate": {"paidAt": True}}, {"$currentDate": {"paidAt": True}}, True),
        ({"$currentDate": {"paidAt": {"$type": "timestamp"}}}, {"$currentDate": {"paidAt": {"$type": "timestamp"}}}, False),
        ({"$bit": {"total": {"and": 1}}}, {"$bit": {"total": {"and": 1}}}, True),
        ({"$rename": {"status": "letters"}}, {"$rename": {"status": "letters"}}, False),
    ],
    ids=str,
)  # fmt: skip
def test_values_are_sent_as_an_insert_would_store_them(update, expected, exact):
    result = parsed(update)
    assert (expected, exact) == (result.update, result.is_exact)


@pytest.mark.parametrize(
    "update",
    [
        {"$set": {"total": "four"}}, {"$set": {"bounded": 11}}, {"$max": {"bounded": 11}},
        {"$set": {"letters": "123"}}, {"$set": {"lines": [{"quantity": 2}]}}, {"$set": {"lines.0.quantity": 3}},
        {"$set": {"scores.a": "x"}}, {"$set": {"customerId": "no id"}}, {"$set": {"price": Decimal("NaN")}},
        {"$inc": {"price": Decimal("NaN")}}, {"$inc": {"total": 1.5}}, {"$inc": {"total": True}},
        {"$inc": {"total": float("inf")}}, {"$mul": {"total": "2"}}, {"$push": {"tags": 7}},
        {"$push": {"tags": {"$each": 7}}}, {"$addToSet": {"tags": {"$each": [TEXT, 1]}}},
        {"$unset": {"customerId": ""}}, {"$unset": {"lines.0.product_id": ""}},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_does_not_fit_is_refused_before_anything_is_sent(update):
    assert "document-invalid" == code_of(update)


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ({"$set": {"takes": timedelta(5)}}, {"$set": {"takes": 5}}),
        ({"$set": {"takes": 5}}, {"$set": {"takes": 5}}),
        ({"$set": {"steps": (timedelta(5),)}}, {"$set": {"steps": [5]}}),
        ({"$set": {"steps.0": timedelta(5)}}, {"$set": {"steps.0": 5}}),
        ({"$set": {"named.a": timedelta(5)}}, {"$set": {"named.a": 5}}),
        ({"$push": {"steps": {"$each": (timedelta(5), 6), "$slice": -9}}}, {"$push": {"steps": {"$each": [5, 6], "$slice": -9}}}),
        ({"$addToSet": {"steps": timedelta(5)}}, {"$addToSet": {"steps": 5}}),
        ({"$pull": {"steps": {"$gt": timedelta(5)}}}, {"$pull": {"steps": {"$gt": 5}}}),
        ({"$set": {"size": Size.LARGE}}, {"$set": {"size": "LARGE"}}),
        ({"$set": {"size": 2}}, {"$set": {"size": "LARGE"}}),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_with_a_serializer_is_stored_as_by_an_insert(update, expected):
    assert expected == parsed(update, model=Task).update


def test_array_filters_compare_with_what_a_serializer_stores():
    update = {"$set": {"steps.$[step]": timedelta(1)}}
    sent = parsed(update, model=Task, array_filters=[{"step": {"$gte": timedelta(5)}}])
    assert [{"step": {"$gte": 5}}] == sent.array_filters


def test_a_refused_value_is_named_by_its_whole_path():
    for update, place in (
        ({"$set": {"address": {"city": 5}}}, "Order.address.city that"),
        ({"$push": {"lines": {"product_id": ID, "quantity": 3}}}, "Order.lines.quantity that"),
        ({"$set": {"scores.a": "x"}}, "Order.scores.a that"),
    ):
        with pytest.raises(UsageError, match=place):
            parsed(update)


def test_a_validator_of_the_whole_model_needs_the_result():
    assert not parsed({"$set": {"low": 9}}, model=Ordered).is_exact
    assert "document-invalid" == code_of({"$set": {"low": "x"}}, model=Ordered)


@pytest.mark.parametrize(
    "update",
    [
        {}, [], None, "a", 5, {"status": 1}, {"$odd": {"status": 1}}, {"$set": 5}, {5: {"status": 1}},
        {"$set": {"": 1}}, {"$set": {"a..b": 1}}, {"$set": {"$status": 1}}, [{"$match": {}}], [5],
        [{"$set": {"status": 1}, "$unset": "total"}],
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_an_update_is_refused(update):
    assert "update-invalid" == code_of(update)


def test_an_empty_operator_changes_nothing_and_the_server_says_so():
    assert {"$set": {}} == parsed({"$set": {}}).update


@pytest.mark.parametrize(
    ("update", "code"),
    [
        ({"$set": {"stauts": 1}}, "field-unknown"),
        ({"$set": {"customer_id": ID}}, "python-name"),
        ({"$rename": {"status": "stauts"}}, "field-unknown"),
        ({"$rename": {"status": "_treadle.n"}}, "field-maintained"),
        ({"$pull": {"lines": {"quantty": 1}}}, "field-unknown"),
        ({"$set": {"_treadle": 1}}, "field-maintained"),
        ([{"$set": {"stauts": 1}}], "field-unknown"),
        ([{"$set": {"_treadle.n": 1}}], "field-maintained"),
        ({"$set": {"anything": {"$function": 1}}}, "operator-forbidden"),
        ([{"$set": {"status": {"$function": 1}}}], "operator-forbidden"),
    ],
)
def test_names_are_checked(update, code):
    assert code == code_of(update)


def test_unchecked_lets_names_and_values_through_but_not_maintained_fields():
    result = parsed(Unchecked({"$set": {"stauts": Decimal(1), "total": "x"}}))
    assert {"$set": {"stauts": Decimal128("1"), "total": "x"}} == result.update
    assert result.is_exact
    maintained = {"total": Maintained()}
    assert "field-maintained" == code_of(Unchecked({"$set": {"total": 1}}), maintained=maintained)
    assert "python-name" == code_of(Unchecked({"$set": {"customer_id": 1}}))
    assert "operator-forbidden" == code_of(Unchecked({"$set": {"a": {"$where": 1}}}))


def test_maintained_fields_are_refused_in_every_form():
    maintained = {"address.city": Maintained()}
    for update in (
        {"$set": {"address.city": "x"}},
        {"$set": {"address": {}}},
        {"$unset": {"address": ""}},
        {"$rename": {"status": "address.city"}},
        [{"$set": {"address.city": "x"}}],
        [{"$unset": ["status", "address"]}],
        [{"$replaceWith": {"status": "x"}}],
        [{"$project": {"status": 1}}],
    ):
        assert "field-maintained" == code_of(update, maintained=maintained), update


def test_what_treadle_completes_need_not_be_whole():
    paths = paths_of(Order, {"lines.product_id": Maintained(refilled=True)})
    result = parse_update(paths, {"$push": {"lines": {"quantity": 2}}})
    assert ({"$push": {"lines": {"quantity": 2}}}, False) == (result.update, result.is_exact)


def test_an_update_knows_what_it_touches_and_whether_something_follows():
    paths = paths_of(Order, followed=("lines.quantity",))
    result = parse_update(
        paths, {"$set": {"lines.0.quantity": 2, "status": "x"}, "$rename": {"total": "later"}}
    )
    assert ({"lines.quantity", "status", "total", "later"}, True) == (result.touched, result.is_followed)
    assert not parse_update(paths, {"$set": {"status": "x"}}).is_followed
    assert parse_update(paths, {"$rename": {"status": "lines"}}).is_followed
    rewrite = parse_update(paths, [{"$replaceWith": "$$ROOT"}])
    assert (None, True, False) == (rewrite.touched, rewrite.is_followed, rewrite.is_exact)
    stages = parse_update(paths, [{"$set": {"note": 1, "status": "$note"}}, {"$unset": "note"}])
    assert ({"note", "status"}, False) == (stages.touched, stages.is_followed)


def test_array_filters_are_conditions_on_the_elements_that_the_update_names():
    update = {"$set": {"lines.$[line].quantity": 2}}
    result = parsed(update, array_filters=[{"line.product_id": TEXT}, {"$or": [{"line.quantity": 2}]}])
    assert [{"line.product_id": ID}, {"$or": [{"line.quantity": 2}]}] == result.array_filters
    for filters in ([{"line.quantty": 2}], [{"other.x": 1}]):
        with pytest.raises(UsageError, match="array filter"):
            parsed(update, array_filters=filters)
    assert [{"x.y": 1}] == parsed(Unchecked(update), array_filters=[{"x.y": 1}]).array_filters
    assert [{"tag": ID}] == parsed({"$set": {"tags.$[tag]": ID}}, array_filters=[{"tag": TEXT}]).array_filters
    assert parsed(update).array_filters is None


def test_deep_values_are_refused():
    value: Any = 1
    for _ in range(5000):
        value = {"$not": value}
    for update in (
        {"$set": {"anything": value}},
        {"$pull": {"anything": value}},
        {"$pull": {"lines": value}},
    ):
        assert "document-too-deep" == code_of(update)


def test_a_document_that_does_not_fit_is_returned_as_far_as_it_does():
    raw = {"_id": ID, "customerId": "none", "price": Decimal128("1.5"), "letters": "123", "lines": [{"x": 1}]}
    document = load_what_fits(codec_of(Order), raw)
    assert (ID, "none", Decimal("1.5"), "123") == (
        document.id,
        document.customer_id,
        document.price,
        document.letters,
    )
    assert [{"x": 1}] == document.lines
    assert document.model_fields_set == {"id", "customer_id", "price", "letters", "lines"}
    assert load_what_fits(codec_of(Loose), {"name": 5}).name == 5
