"""An error about a document that cannot be stored names the path, and comes before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
from bson import Int64

from treadle import UsageError
from treadle.model.bson_types import SIZE_MAX_BYTES, check_batch, refuse_unsendable, require_encodable


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (
            {"a": {"b": [1, 2**63]}},
            r"Thing\.a\.b\.1 cannot be stored: the integer needs more than the 64 bits",
        ),
        ({"a": "\ud800"}, r"Thing\.a cannot be stored: the text holds a lone surrogate"),
        ({"a": [object()]}, r"Thing\.a\.0 cannot be stored: BSON has no form for object"),
        ({"a": {1: 2}}, r"Thing\.a\.1 cannot be stored: a key must be text without NUL"),
        ({"a\0b": 1}, r"Thing\.'a\\x00b' cannot be stored: a key must be text without NUL"),
        ({"a": "x" * SIZE_MAX_BYTES}, r"takes 16,777,\d+ bytes"),
    ],
    ids=["integer", "surrogate", "object", "key", "NUL", "size"],
)
def test_the_error_names_the_first_path_that_cannot_be_stored(document, text):
    with pytest.raises(UsageError, match=text):
        require_encodable(document, "Thing")


def test_a_batch_is_refused_as_a_whole():
    documents: list[dict[str, Any]] = [{"a": "x" * 50_000} for _ in range(200)]
    check_batch(documents, "Thing")
    documents[150] = {"a": 2**63}
    with pytest.raises(UsageError, match=r"Thing\.a cannot"):
        check_batch(documents, "Thing")
    documents[150] = {"a": "x" * SIZE_MAX_BYTES}
    with pytest.raises(UsageError) as caught:
        check_batch(documents, "Thing")
    assert "document-too-large" == caught.value.code


@pytest.mark.parametrize("value", [None, True, 2**63 - 1, Int64(5), 1.5, "ä", b"x", -(2**63)])
def test_values_that_bson_holds_are_sent(value):
    refuse_unsendable(value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, "\udfff", object()])
def test_values_that_bson_cannot_hold_are_refused(value):
    with pytest.raises(UsageError) as caught:
        refuse_unsendable(value)
    assert "value-not-storable" == caught.value.code
