"""The demo's data and words; that it does what it says is tested from outside, in test_cli.py."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from treadle.commands import demo
from treadle.demo.data import Maker, Sizes
from treadle.demo.measure import Cost
from treadle.demo.requests import REQUESTS
from treadle.demo.story import Compared
from treadle.demo.words import faster, milliseconds
from treadle.errors import UsageError


def compared(before: float, after: float) -> Compared:
    advice: Any = None
    return Compared(REQUESTS[0], "", advice, Cost(before, 1, 1, 1), Cost(after, 1, 1, 1))


def test_the_shop_is_the_same_in_every_run_and_has_tens_of_thousands_of_documents() -> None:
    def made() -> list[list[dict[str, Any]]]:
        maker = Maker(Sizes.at(1.0))
        kinds = (maker.make_customers(), maker.make_products(), maker.make_reviews(), maker.make_orders(),
                 maker.make_sellers(), maker.make_readings())  # fmt: skip
        return [list(islice(kind, 300)) for kind in kinds]

    assert made() == made()
    sizes = Sizes.at(1.0)
    total = sizes.customers + sizes.products + sizes.reviews + sizes.orders + sizes.sellers + sizes.readings
    assert 40_000 < total < 60_000


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0.1, 0.004, "25 times as fast"),
        (0.009, 0.002, "4.5 times as fast"),
        (0.001, 0.001, "about as fast"),
        (0.001, 0.003, "3.0 times as slow"),
    ],
)
def test_nothing_is_called_faster_that_is_not(before: float, after: float, said: str) -> None:
    assert said == faster(compared(before, after))


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.00042, "0.42 ms"), (0.0123, "12.3 ms"), (0.123, "123 ms"), (3.333, "3.33 s")]
)
def test_times_have_three_digits(seconds: float, said: str) -> None:
    assert said == milliseconds(seconds)


@pytest.mark.parametrize("place", [".", "absent/report.html"])
def test_a_report_that_could_not_be_written_is_refused_before_anything_starts(
    tmp_path: Path, place: str
) -> None:
    quiet = Console(quiet=True)
    with pytest.raises(UsageError) as caught:
        demo.demo(quiet, quiet, tmp_path / place)
    assert "output-invalid" == caught.value.code
