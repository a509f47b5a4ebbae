"""What a trial on a smaller copy says of the whole database."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.advisor.trials.compare import BEST_OF, ROUNDS, ROUNDS_MIN, compare_reads, effort
from treadle.advisor.trials.full_size import Growth, grown, growth
from treadle.advisor.trials.results import Measured
from treadle.advisor.trials.rewrite import unchanged
from treadle.advisor.trials.trial import count_work
from treadle.advisor.trials.units import Group
from treadle.advisor.trials.workload_file import Request


@pytest.mark.parametrize(
    ("recorded", "before", "after", "expected"),
    [
        (1_000, 100, 1, Growth(10.0, 1.0)),
        (1_000, 100, 100, Growth(10.0, 10.0)),
        (110, 100, 1, Growth()),
        (50, 100, 1, Growth()),
        (0, 0, 0, Growth()),
    ],
    ids=["an index takes its place", "both scan", "about the same", "a larger copy", "nothing known"],
)
def test_what_grows_is_what_goes_through_the_collection(
    recorded: float, before: float, after: float, expected: Growth
) -> None:
    assert expected == growth(recorded, before, after)


def test_what_a_request_takes_without_any_work_does_not_grow() -> None:
    assert [[pytest.approx(31.0), 1.0]] == grown([[4.0, 1.0]], 10.0, 1.0)


def test_what_is_reckoned_is_less_certain() -> None:
    measured = Measured(4.0, 2.0, 8.0, 3.0)
    assert measured == Growth().widened(measured)
    wider = Growth(10.0, 1.0).widened(measured)
    assert wider.low < 2.0 < 8.0 < wider.high
    assert wider.value == 4.0
    assert wider.sure < 3.0


def test_a_scan_is_reckoned_for_the_documents_that_were_recorded(database: Any) -> None:
    """The copy holds 200 documents, the recording says that 2,000 were examined."""
    for name in ("before", "after"):
        database.client.drop_database(f"{database.name}_{name}")
    before, after = (database.client[f"{database.name}_{name}"] for name in ("before", "after"))
    try:
        for copy in (before, after):
            copy["parts"].insert_many([{"_id": number, "title": f"part {number}"} for number in range(200)])
        after["parts"].create_index("title")
        requests = [
            Request("find", "parts", {"filter": {"title": f"part {number}"}}, examined=2_000)
            for number in range(5)
        ]
        group = Group([(each,) for each in requests], len(requests))
        (result,), _ = compare_reads(before, after, [group], unchanged, 1.0, rounds=3, count=count_work)
        assert (2_000, 1) == (
            result.costs_before.documents_examined,
            result.costs_after.documents_examined,
        )
        assert "10 times as many documents" in result.note
        (plain,), _ = compare_reads(before, after, [group], unchanged, 1.0, rounds=3)
        assert "" == plain.note
    finally:
        for copy in (before, after):
            database.client.drop_database(copy.name)


@pytest.mark.parametrize(
    ("pass_seconds", "expected"),
    [(0.01, (ROUNDS, BEST_OF)), (0.25, (ROUNDS, 2)), (0.7, (7, 1)), (10.0, (ROUNDS_MIN, 1))],
)
def test_requests_that_take_long_are_run_less_often(pass_seconds: float, expected: tuple[int, int]) -> None:
    assert expected == effort(pass_seconds, ROUNDS, 5.0)


def test_an_index_that_was_made_since_the_recording_is_no_growth() -> None:
    """The whole collection was copied, and the request examined it all when there was no index."""
    assert Growth() == growth(6_000, 30, 1, largest=1.0)
    assert Growth(10.0, 1.0) == growth(6_000, 600, 1, largest=10.0)


def test_requests_that_take_long_and_are_the_same_run_once_for_all(heard: Any) -> None:
    """Three of four are one request: after the first pass, two run in each of four rounds and both ways."""
    database, listener = heard
    database["parts"].insert_many([{"_id": number} for number in range(5)])
    requests = [Request("find", "parts", {"filter": {"_id": number}}) for number in (1, 2, 1, 1)]
    group = Group([(each,) for each in requests], len(requests))
    listener.clear()
    (result,), _ = compare_reads(
        database, database, [group], unchanged, 1.0, rounds=ROUNDS_MIN, group_seconds_max=1e-9
    )
    assert 4 * 2 + ROUNDS_MIN * 2 * 2 == listener.names.count("find")
    assert (4, 4) == (result.tried, result.compared)
