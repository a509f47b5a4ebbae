"""Which fields repeat others: by how far their values agree, and not by chance."""

from __future__ import annotations

import random

import pytest

from treadle.advisor.copies import Comparison


def comparison(stale_share: float, values: int, documents: int = 500) -> Comparison:
    """A copy of which some are of a former value."""
    chance, made = random.Random(5), Comparison()
    for number in range(documents):
        source = f"v{number % values}"
        made.add(f"former {number}" if chance.random() < stale_share else source, source)
    return made


@pytest.mark.parametrize("stale", [0.06, 0.36, 0.53, 0.69, 0.86])
def test_a_copy_by_name_is_seen_however_many_are_stale(stale: float) -> None:
    assert comparison(stale, 100).is_copy(named=True)


def test_what_agrees_hardly_more_than_by_chance_is_no_copy() -> None:
    assert not comparison(0.99, 100).is_copy(named=True)
    chance, made = random.Random(6), Comparison()
    for number in range(500):
        made.add(f"v{chance.randrange(5)}", f"v{number % 5}")
    assert 0.1 < made.agreement < 0.5
    assert not made.is_copy(named=True)


def test_a_copy_that_no_name_shows_must_mostly_agree() -> None:
    assert comparison(0.2, 100).is_copy(named=False)
    assert not comparison(0.6, 100).is_copy(named=False)
