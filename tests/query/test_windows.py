"""Windows of time, as the server computes them: against $dateTrunc, and against Python's own time zones."""

from __future__ import annotations

import datetime as dt
import random
from zoneinfo import ZoneInfo

import pytest

from tests.kit.tiers import IS_FULL
from tests.query.models import CODEC_OPTIONS
from treadle.query.windows import Window, is_timezone

UTC = dt.UTC
UNITS = ["minute", "hour", "day", "week", "month", "quarter", "year"]
# Half hours, quarters, a midnight that does not exist, a day that was skipped, changes of half an hour.
ZONES = [
    *("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Asia/Kathmandu", "+05:30", "-0330"),
    *("Australia/Lord_Howe", "America/Sao_Paulo", "Pacific/Apia", "America/Caracas"),
]
HOUR = dt.timedelta(hours=1)
SIZED = [
    {"unit": "minute", "size": 15},
    {"unit": "minute", "size": 20},
    {"unit": "hour", "size": 2},
    {"unit": "hour", "size": 6},
    {"unit": "hour", "size": 12},
]


@pytest.fixture(scope="module")
def dates(client):
    """A collection of dates: any, around changes of clocks, and far away."""
    chance = random.Random(1)
    moments = [
        dt.datetime(1996, 1, 1) + dt.timedelta(seconds=chance.randrange(30 * 365 * 86400))
        for _ in range(3000 if IS_FULL else 500)
    ]
    for year in (2011, 2012, 2017, 2018, 2024) if IS_FULL else (2011, 2018):
        for month, day in ((2, 17), (3, 10), (3, 31), (4, 1), (10, 1), (10, 20), (10, 28), (11, 3), (12, 30)):
            moments += [
                dt.datetime(year, month, day) + dt.timedelta(minutes=15 * number)
                for number in range(0, 250, 1 if IS_FULL else 3)
            ]
    far = [dt.datetime(3, 1, 1) + dt.timedelta(days=chance.randrange(9990 * 365)) for _ in range(500)]
    database = client["windows"]
    database.dates.insert_many({"t": each} for each in [*moments, *far, dt.datetime(1970, 1, 1)])
    yield database.dates
    client.drop_database("windows")


def computed(dates, expression, *more):
    return list(
        dates.with_options(CODEC_OPTIONS).aggregate([{"$project": {"t": 1, "start": expression}}, *more])
    )


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("unit", ["day", "week", "month", "quarter", "year"])
def test_days_weeks_and_months_equal_the_servers_own(dates, unit, zone):
    truncated = {"$dateTrunc": {"date": "$t", "unit": unit, "timezone": zone, "startOfWeek": "monday"}}
    window = Window(unit, zone)
    differing = {"$match": {"start": {"$ne": None}, "$expr": {"$ne": ["$start", truncated]}}}
    assert [] == computed(dates, window.expression("$t"), differing)


@pytest.mark.parametrize("zone", [each for each in ZONES if each[0] not in "+-"])
def test_hours_are_those_on_the_clock(dates, zone):
    """$dateTrunc cuts hours by the offset of the year 2000, which was another one in Caracas."""
    clock = ZoneInfo(zone)
    for row in computed(dates, Window("hour", zone).expression("$t"), {"$match": {"t": {"$gt": dt.datetime(1990, 1, 1)}}}):  # fmt: skip
        moment, start = row["t"], row["start"]
        assert dt.timedelta(0) <= moment - start < HOUR
        local, begun = moment.astimezone(clock), start.astimezone(clock)
        assert (local.date(), local.hour) == (begun.date(), begun.hour)
        # The instant before belongs to another hour, or to the same one lived the first time.
        before = (start - dt.timedelta(milliseconds=1)).astimezone(clock)
        assert (before.hour, before.utcoffset()) != (begun.hour, begun.utcoffset())


EVERY = [*({"unit": unit} for unit in UNITS), *SIZED]
MOVED = [
    "Europe/Berlin",
    "Australia/Lord_Howe",
    "Pacific/Apia",
    "Pacific/Chatham",
    "America/Havana",
    "America/Sao_Paulo",
    "Atlantic/Azores",
]


@pytest.mark.parametrize(
    ("zone", "options"),
    [(zone, each) for each in EVERY for zone in (MOVED if each in SIZED else ZONES)],
    ids=str,
)
def test_a_window_begins_with_its_own_first_instant_and_lies_within_its_span(dates, options, zone):
    window = Window(**options, timezone=zone)
    again = {"$set": {"again": window.expression("$start")}}
    for row in computed(dates, window.expression("$t"), again):
        if row["start"] is None:
            assert not window.range[0] <= row["t"] <= window.range[1]
            continue
        assert row["start"] == row["again"] or row["start"] < window.range[0]
        first, end = window.span(row["start"])
        assert first <= row["t"] < end


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_python_computes_the_same_in_utc(dates, options):
    window = Window(**options)
    for row in computed(dates, window.expression("$t")):
        assert row["start"] == window.start_of(row["t"])


@pytest.mark.parametrize("zone", MOVED)
@pytest.mark.parametrize("options", SIZED, ids=str)
def test_windows_follow_each_other_and_begin_by_the_clock(dates, options, zone):
    """No window begins while another goes on, none begins after its dates, and the clock shows its time."""
    window, clock = Window(**options, timezone=zone), ZoneInfo(zone)
    recent = {"$match": {"t": {"$gt": dt.datetime(1996, 1, 1), "$lt": dt.datetime(2026, 1, 1)}}}
    last, on_time, rows = None, 0, computed(dates, window.expression("$t"), recent, {"$sort": {"t": 1}})
    for row in rows:
        assert row["start"] <= row["t"]
        assert last is None or last <= row["start"]
        last = row["start"]
        shown = last.astimezone(clock).replace(tzinfo=None) - dt.datetime(1970, 1, 1)
        on_time += not shown % window.length
    # Where the clock is moved, its time may be skipped, or be lived for the second time.
    assert on_time >= 0.97 * len(rows)


def test_short_windows_of_an_hour_that_is_lived_twice_are_apart(client):
    """Berlin, 25 October 2026: three o'clock becomes two. 29 March: two becomes three."""
    moments = [
        dt.datetime(2026, 10, 25, 0, 10),
        dt.datetime(2026, 10, 25, 1, 10),
        dt.datetime(2026, 3, 29, 4),
    ]
    database = client["windows_twice"]
    database.twice.insert_many({"t": each} for each in moments)

    def starts(**options):
        expression = Window(**options, timezone="Europe/Berlin").expression("$t")
        return [row["start"].replace(tzinfo=None) for row in computed(database.twice, expression)]

    assert [
        dt.datetime(2026, 10, 25, 0),
        dt.datetime(2026, 10, 25, 1),
        dt.datetime(2026, 3, 29, 4),
    ] == starts(unit="minute", size=15)
    assert [
        dt.datetime(2026, 10, 24, 22),
        dt.datetime(2026, 10, 24, 22),
        dt.datetime(2026, 3, 29, 4),
    ] == starts(unit="hour", size=6)
    client.drop_database("windows_twice")


def test_the_ends_of_time(client):
    """Python's first and last date have windows in UTC, and in other zones none; nothing fails."""
    database = client["windows_ends"]
    ends = [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999000)]
    database.ends.insert_many({"t": each} for each in ends)
    for unit in UNITS:
        found = [row["start"] for row in computed(database.ends, Window(unit).expression("$t"))]
        assert [Window(unit).start_of(each.replace(tzinfo=UTC)) for each in ends] == found
        for start in found:
            Window(unit).span(start)
            Window(unit, "Asia/Kolkata").span(start)
        assert {None} == {
            row["start"] for row in computed(database.ends, Window(unit, "Asia/Kolkata").expression("$t"))
        }
    client.drop_database("windows_ends")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Europe/Berlin", True),
        ("UTC", True),
        ("+05:30", True),
        ("-03", True),
        ("Mars/North", False),
        ("", False),
        (None, False),
        ("../etc/passwd", False),
        ("/etc/localtime", False),
    ],
)
def test_time_zones_are_known_by_name(name, known):
    assert known == is_timezone(name)
