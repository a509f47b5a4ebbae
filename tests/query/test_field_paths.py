"""What a stored path leads to, and why it may not be named or updated."""

from __future__ import annotations

import pytest

from tests.query.models import Loose, Maintained, Order, paths_of
from treadle import UsageError
from treadle.query.field_paths import PATHS_MAX, Unchecked

pytestmark = pytest.mark.quick
assert issubclass(Unchecked, dict)


def refusal(model, path, *, lenient=False):
    with pytest.raises(UsageError) as caught:
        paths_of(model).named(path, "filter", lenient=lenient)
    return caught.value.code, caught.value.message


@pytest.mark.parametrize(
    "path",
    [
        "_id", "customerId", "address.city", "address.zip", "lines.quantity", "lines.0.quantity",
        "lines.$[].quantity", "lines.$[i].quantity", "lines.$.quantity", "scores.any.key", "anything.at.all",
        "place.city", "root.any", "specs.any.name", "_treadle.n", "pair.0", "tags.1",
    ],
)  # fmt: skip
def test_what_a_model_has_may_be_named(path):
    assert path == paths_of(Order).named(path, "filter").path


@pytest.mark.parametrize(
    ("path", "code", "hint"),
    [
        ("stauts", "field-unknown", "did you mean 'status'"),
        ("address.town", "field-unknown", "Address has no field"),
        ("lines.0.quantty", "field-unknown", "did you mean 'quantity'"),
        ("status.deep", "field-unknown", "nothing in a str"),
        ("place.town", "field-unknown", "town"),
        ("customer_id", "python-name", "stored as 'customerId'"),
        ("address.zip_code", "python-name", "stored as 'zip'"),
        ("x" * 5000, "field-unknown", "it has"),
    ],
)
def test_a_misspelt_name_is_refused_with_a_hint(path, code, hint):
    found, message = refusal(Order, path)
    assert code == found
    assert hint in message


def test_unchecked_lifts_unknown_names_but_not_python_names_of_the_document():
    paths = paths_of(Order)
    for path in ("stauts", "address.town", "address.zip_code"):
        assert path == paths.named(path, "filter", lenient=True).path
    assert "python-name" == refusal(Order, "customer_id", lenient=True)[0]


def test_a_model_with_extra_fields_takes_any_name_but_python_names():
    assert "more" == paths_of(Loose).named("more", "filter").path
    assert "python-name" == refusal(Loose, "own_name")[0]


@pytest.mark.parametrize("path", ["a\ud800", 5, None])
def test_what_is_not_sendable_text_is_refused(path):
    with pytest.raises(UsageError):
        paths_of(Order)[path]


def protection(path, maintained):
    field = paths_of(Order, maintained)[path]
    return None if field.protected is None else field.protected.code


def test_what_treadle_maintains_is_protected_with_all_that_contains_it():
    maintained = {"address.city": Maintained()}
    for path in ("address.city", "address", "address.city.x", "_treadle", "_treadle.n"):
        assert "field-maintained" == protection(path, maintained), path
    assert protection("address.zip", maintained) is None
    assert (
        "maintains Order.address.city; write its source"
        in paths_of(Order, maintained)["address"].protected.reason
    )


def test_what_surrounds_a_copy_may_be_written_and_is_completed():
    maintained = {"lines.product": Maintained(refilled=True)}
    paths = paths_of(Order, maintained)
    for path in ("lines", "lines.0", "lines.$[]"):
        assert paths[path].protected is None
        assert paths[path].is_completed
    for path in ("lines.product", "lines.0.product", "lines.$[i].product.name"):
        assert "field-maintained" == protection(path, maintained)
    assert not paths["lines.quantity"].is_completed


@pytest.mark.parametrize("path", ["", "a..b", "$set", "a.$where", "a.$[i", "a.$[i].", "a\0b"])
def test_what_cannot_be_the_path_of_a_field_is_not_updated(path):
    assert "update-invalid" == protection(path, {})


def test_a_path_is_followed_with_all_that_contains_it():
    paths = paths_of(Order, followed=("address.city", "lines.quantity"))
    assert paths["address"].is_followed
    assert paths["address.city.x"].is_followed
    assert paths["lines.3.quantity"].is_followed
    assert not paths["status"].is_followed
    assert paths.are_followed(None)
    assert not paths_of(Order).are_followed(None)
    assert paths_of(Order, followed=None)["status"].is_followed


@pytest.mark.parametrize(
    ("path", "ids"),
    [
        ("_id", True), ("customerId", True), ("tags", True), ("tags.0", True), ("lines.product_id", True),
        ("address.owner_id", True), ("place.owner_id", True), ("either", False), ("status", False),
        ("anything", False), ("scores.a", False),
    ],
)  # fmt: skip
def test_text_stands_for_an_id_only_where_the_field_holds_nothing_else(path, ids):
    assert ids == paths_of(Order)[path].holds_ids


@pytest.mark.parametrize(
    ("path", "certain"),
    [
        ("status", True),
        ("lines.$[].quantity", True),
        # Beyond the end, the server makes an element of what is set, and nulls before it.
        ("lines.0.quantity", False),
        # Where there is no array, the server makes an object.
        ("lines.quantity", False),
        ("scores.a", True),
        # Where there is no address, the server makes one of this field alone, which is enough.
        ("address.city", True),
        ("place.city", False),
        ("later", False),
        ("root.a", False),
    ],
)
def test_a_valid_value_leaves_the_document_valid(path, certain):
    assert certain == paths_of(Order)[path].certain


def test_only_so_many_paths_are_remembered():
    paths = paths_of(Order)
    for number in range(PATHS_MAX + 100):
        paths[f"scores.k{number}"]
    assert len(paths) <= PATHS_MAX
