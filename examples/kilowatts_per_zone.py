"""Rollup by change stream: kilowatts per zone and day, from reports that others write.

Each building of the city reports once a day what it consumed, what its own
panels produced and what the city had to add. The meters know nothing of
Treadle; a worker follows what they write.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from examples.story import show, step, tell, verified
from pydantic import BaseModel, Field

from treadle import Count, Day, Document, Rollup, Store, Sum


class Power(BaseModel):
    consumption: int
    self_produced: int = Field(alias="self-produced")
    city_supplemented: int = Field(alias="city-supplemented")


class Address(BaseModel):
    building_number: str = Field(alias="building number")
    street_name: str = Field(alias="street name")
    city: str = "Springfield"


class Report(Document, collection="buildings"):
    address: Address
    owner: str
    zone: int
    date: datetime
    per_day: Power = Field(alias="kW per day")


class ZonePower(BaseModel):
    consumption: Annotated[int, Sum("per_day.consumption")] = 0
    self_produced: Annotated[int, Sum("per_day.self_produced")] = Field(default=0, alias="self-produced")
    city_supplemented: Annotated[int, Sum("per_day.city_supplemented")] = Field(
        default=0, alias="city-supplemented"
    )


class ZoneDay(
    Document,
    collection="zones",
    rollup=Rollup(Report, keys={"zone": "zone", "date": Day("date")}, maintain="stream"),
):
    zone: int
    date: datetime
    per_day: ZonePower = Field(ZonePower(), alias="kW per day")
    buildings: Annotated[int, Count()] = 0


MODELS = [Report, ZoneDay]

DAY = datetime(2019, 3, 21, 23, 3, 31, tzinfo=UTC)


def report(number: int, zone: int, consumption: int, produced: int, date: datetime = DAY) -> dict[str, Any]:
    """What a meter writes."""
    return {
        "address": {
            "building number": str(number),
            "street name": "Evergreen Terrace",
            "city": "Springfield",
        },
        "owner": f"owner of {number}",
        "zone": zone,
        "date": date,
        "kW per day": {
            "consumption": consumption,
            "self-produced": produced,
            "city-supplemented": consumption - produced,
        },
    }


def story(store: Store) -> None:
    store.setup()
    zones = store.collection(ZoneDay)
    # In production: `treadle watch --app …`, or store.worker().run() in a process of its own.
    worker = store.worker()
    worker.run_until_idle()
    meters = store.database["buildings"]

    step("Three hundred meters report, with a plain insert_many")
    meters.insert_many([report(number, 13 + number % 2, 10, number % 8) for number in range(300)])
    meters.insert_one(report(742, 13, 10, 7, date=DAY + timedelta(days=1)))
    show("a report in buildings", meters.find_one({"address.building number": "742"}))

    step("The worker follows")
    worker.run_until_idle()
    show("zones", zones.find().sort([("zone", 1), ("date", 1)]))
    thirteen = store.find(ZoneDay, {"zone": 13}, sort="date").to_list()[0]
    produced = sum(number % 8 for number in range(0, 300, 2))
    assert (150, 1500, produced) == (
        thirteen.buildings,
        thirteen.per_day.consumption,
        thirteen.per_day.self_produced,
    )

    step("A meter corrects itself, another was booked in the wrong zone, a third is struck out")
    meters.update_one({"address.building number": "742"}, {"$set": {"kW per day.consumption": 12}})
    meters.update_one({"address.building number": "0"}, {"$set": {"zone": 14}})
    meters.delete_one({"address.building number": "2"})
    worker.run_until_idle()
    assert [148, 1, 151] == [each.buildings for each in store.find(ZoneDay, sort=["zone", "date"])]
    assert 12 == store.find(ZoneDay, {"zone": 13}, sort="-date").to_list()[0].per_day.consumption

    step("Somebody overwrites a total")
    zones.update_one({"zone": 14}, {"$set": {"kW per day.consumption": 1}})
    assert 1 == verified(store)
    store.repair()
    assert 0 == verified(store)


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
