"""Readings of sensors, one small document each."""

from __future__ import annotations

from examples.databases.maker import Maker


def fill(maker: Maker) -> None:
    chance = maker.chance
    sensors, readings = maker.number(100), maker.number(60_000)
    maker.insert(
        "sensors",
        (
            {"_id": f"sensor-{number}", "room": maker.word(), "installed": maker.moment(-number)}
            for number in range(sensors)
        ),
    )
    maker.insert(
        "readings",
        (
            {
                "_id": maker.identity(moment),
                "sensor_id": f"sensor-{number % sensors}",
                "ts": moment,
                "temperature": round(20 + chance.gauss(0, 2), 2),
                "humidity": round(chance.uniform(30, 60), 1),
                "unit": "C",
            }
            for number in range(readings)
            for moment in [maker.moment(number // sensors / 1_440)]
        ),
    )
    maker.database["readings"].create_index([("sensor_id", 1), ("ts", 1)])
