"""Bucket declarations that cannot work are refused by name."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any

import pytest

from tests.patterns.bucket.sensors import HOUR, Reading
from treadle import Bucket, Count, DeclarationError, Document, Formula, Rollup, TimeSeries


def declare(model: dict[str, Any] | None = None, **options: Any) -> None:
    chosen = {"key": "sensor_id", "time": "ts", "span": HOUR, **options}
    fields = {"sensor_id": str, "ts": datetime, "temp": float, "tags": list[str], **(model or {})}
    made = type(Document)(
        "Odd",
        (Document,),
        {"__annotations__": fields, "__module__": __name__},
        collection="odd",
        bucket=Bucket(**chosen),
    )
    from treadle.graph.graph import Graph

    Graph([made])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"span": None}, "neither span= nor limit="),
        ({"span": timedelta(0)}, "whole milliseconds"),
        ({"span": timedelta(microseconds=1500)}, "whole milliseconds"),
        ({"limit": 0}, "whole number from 1"),
        ({"limit": True}, "whole number from 1"),
        ({"key": "sensor"}, "no field 'sensor'"),
        ({"key": ()}, "no key"),
        ({"key": ("sensor_id", "sensor_id")}, "one part to play"),
        ({"key": "tags"}, "list 'tags'"),
        ({"key": "id"}, "one part to play"),
        ({"time": "temp"}, "must be a datetime"),
        ({"stats": "sensor_id"}, "no number"),
        ({"stats": ("tags",)}, "no number"),
        ({"metadata": "ts"}, "one part to play"),
        ({"unique": "sensor_id"}, "measured single value"),
        ({"unique": "tags"}, "measured single value"),
        ({"unique": "temp", "span": None, "limit": 5}, "add span=.* or drop unique="),
        ({"adopt": "odd"}, "its own collection; rename"),
        ({"names": {"begin": "hour"}}, "it renames start"),
        ({"names": {"start": "end"}}, "different names"),
        ({"names": {"start": "_id"}}, "different names"),
        ({"names": {"start": "sensor_id"}}, "beside a part of that name"),
        ({"expire_after": timedelta(milliseconds=3)}, "a second or more"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(options, said):
    with pytest.raises(DeclarationError, match=said) as caught:
        declare(**options)
    assert "bucket-declaration" == caught.value.code


def test_a_bucket_belongs_on_the_class():
    class Odd(Document, collection="odd"):
        value: Annotated[int, Bucket(key="a", time="b", limit=1)]

    from treadle.graph.graph import Graph

    with pytest.raises(DeclarationError, match="class keyword bucket="):
        Graph([Odd])


def test_one_layout_per_model():
    class Odd(
        Document,
        collection="odd",
        bucket=Bucket(key="a", time="ts", limit=1),
        timeseries=TimeSeries(time="ts"),
    ):
        a: str
        ts: datetime

    from treadle.graph.graph import Graph

    with pytest.raises(DeclarationError, match="keep one"):
        Graph([Odd])


@pytest.mark.parametrize(
    "keyword",
    [{"discriminator": "type"}, {"version": 1}, {"rollup": Rollup("Reading", keys={"a": "sensor_id"})}],
    ids=lambda keyword: next(iter(keyword)),
)
def test_what_concerns_documents_does_not_go_with_readings(keyword):
    from treadle.graph.graph import Graph

    with pytest.raises(DeclarationError, match=r"keep one|readings have none|Rollup|tree"):

        class Odd(Document, collection="odd", bucket=Bucket(key="a", time="ts", limit=1), **keyword):
            a: str
            ts: datetime

        Graph([Odd, Reading])


def test_derived_data_of_readings_is_refused():
    """Readings are not documents, so nothing can follow each of them."""
    from treadle.graph.graph import Graph

    class Sensor(Document, collection="sensors"):
        id: str
        number: Annotated[int, Count(Reading, by="sensor_id")] = 0

    with pytest.raises(DeclarationError, match="statistics of its buckets") as caught:
        Graph([Reading, Sensor])
    assert "layout-derived" == caught.value.code

    class Doubled(Document, collection="doubled", bucket=Bucket(key="a", time="ts", limit=3)):
        a: str
        ts: datetime
        twice: Annotated[float | None, Formula({"$multiply": ["$a", 2]})] = None

    with pytest.raises(DeclarationError, match="not stored one by one"):
        Graph([Doubled])
