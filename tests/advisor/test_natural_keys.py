"""References by natural keys, compared by hashes of their values."""

from __future__ import annotations

from treadle.advisor.facts import FieldFacts
from treadle.advisor.natural_keys import mark_of, unique_keys


def test_values_with_one_hash_in_python_are_two_keys() -> None:
    """hash(-1) == hash(-2)."""
    field = FieldFacts("n", {"int": 3}, 3, ("n",))
    assert {"n"} == set(unique_keys([field], [{"f0": -1}, {"f0": -2}, {"f0": 0}]))
    assert {} == unique_keys([field], [{"f0": -1}, {"f0": -1.0}])
    assert mark_of(-1) == mark_of(-1.0) != mark_of(-2)
