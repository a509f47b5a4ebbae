"""What the pattern literature asks of such documents in mongosh, with the answers.

Each read is JavaScript for mongosh, the answer that is known from the story,
and the same question put to Treadle.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import ModuleType
from typing import Any, NamedTuple

from treadle import Store


class Read(NamedTuple):
    javascript: str
    known: Any
    # Takes the story's store and module. None where the question is about indexes or settings.
    treadle: Callable[[Store, ModuleType], Any] | None


TEN = datetime(2019, 1, 31, 10, tzinfo=UTC)
PART = {"$gte": TEN + timedelta(minutes=58), "$lt": TEN + timedelta(minutes=62)}
BELOW_PROGRAMMING = ["Databases", "Languages", "MongoDB", "dbm"]
FANS = [f"user{number:04}" for number in range(30, 2500)]


def ids(found: Any) -> list[Any]:
    return [each.id for each in found]


def sorted_ids(found: Any) -> list[Any]:
    return sorted(ids(found))


READS: dict[str, list[Read]] = {
    "extended_reference": [
        Read(
            "db.orders.findOne({ customer_id: 123 }).customer",
            {"name": "Katrina Bell", "email": "katrina@example.org", "tier": "gold"},
            lambda store, it: store.find_one(it.Order, {"customer_id": 123}).customer.model_dump(),
        ),
        Read(
            """db.orders.aggregate([
                 { $unwind: "$items" },
                 { $group: { _id: "$customer.name",
                             total: { $sum: { $multiply: ["$items.price", "$items.quantity"] } } } }
               ]).toArray()""",
            [{"_id": "Katrina Bell", "total": Decimal("99.95")}],
            lambda store, it: [
                {"_id": order.customer.name, "total": sum(line.price * line.quantity for line in order.items)}
                for order in store.find(it.Order)
            ],
        ),
    ],
    "computed": [
        Read(
            """db.products.find().sort({ name: 1 }).toArray().map(product =>
                 [product.review_summary.total_count, product.review_summary.average_rating])""",
            [[3, 5.0], [2, 2.0]],
            lambda store, it: [
                [product.review_summary.total_count, product.review_summary.average_rating]
                for product in store.find(it.Product, sort="name")
            ],
        ),
        Read(
            """db.reviews.aggregate([
                 { $group: { _id: "$product_id", count: { $sum: 1 }, average: { $avg: "$rating" } } },
                 { $sort: { count: -1 } }, { $project: { _id: 0 } }
               ]).toArray()""",
            [{"count": 3, "average": 5.0}, {"count": 2, "average": 2.0}],
            lambda store, it: [
                {
                    "count": product.review_summary.total_count,
                    "average": product.review_summary.average_rating,
                }
                for product in store.find(it.Product, sort=[("review_summary.total_count", -1)])
            ],
        ),
    ],
    "subset": [
        Read(
            """db.reviews.find({ product_id: 1 }).sort({ published_date: -1 }).limit(5)
                 .toArray().map(review => review.review_text)""",
            ["Day 0.", "Day 6.", "Day 5.", "Edited.", "Day 3."],
            lambda store, it: [card.review_text for card in store.get(it.Product, 1).reviews],
        ),
    ],
    "bucket": [
        Read(
            """db.sensor_data.aggregate([
                 { $match: { sensor_id: 12345, start_date: { $lt: ISODate("2019-01-31T11:02:00Z") },
                             end_date: { $gte: ISODate("2019-01-31T10:58:00Z") } } },
                 { $unwind: "$measurements" },
                 { $match: { "measurements.timestamp": { $gte: ISODate("2019-01-31T10:58:00Z"),
                                                         $lt: ISODate("2019-01-31T11:02:00Z") } } },
                 { $group: { _id: "$sensor_id", count: { $sum: 1 },
                             average: { $avg: "$measurements.temperature" } } }
               ]).toArray()""",
            [{"_id": 12345, "count": 4, "average": 41.0}],
            lambda store, it: [
                {
                    "_id": 12345,
                    "count": store.count(it.Reading, {"sensor_id": 12345, "timestamp": PART}),
                    "average": sum(each.temperature for each in store.find(it.Reading, {"timestamp": PART}))
                    / 4,
                }
            ],
        ),
        Read(
            """db.getCollection("sensor_data.flat").find({ sensor_id: 12345, timestamp: {
                 $gte: ISODate("2019-01-31T10:58:00Z"), $lt: ISODate("2019-01-31T11:02:00Z") } })
                 .sort({ timestamp: 1 }).toArray().map(reading => reading.temperature)""",
            [41.0, 42.0, 40.0, 41.0],
            lambda store, it: [
                each.temperature for each in store.find(it.Reading, {"timestamp": PART}, sort="timestamp")
            ],
        ),
    ],
    "time_series": [
        Read(
            """db.weather.aggregate([
                 { $match: { "metadata.sensorId": 5578 } },
                 { $group: { _id: "$metadata.sensorId", count: { $sum: 1 }, warmest: { $max: "$temp" } } }
               ]).toArray()""",
            [{"_id": 5578, "count": 12, "warmest": 17}],
            lambda store, it: [
                {"_id": 5578, "count": entry.count, "warmest": entry.stats["temp"].max}
                for entry in store.summary(it.Weather, it.Sensor(sensorId=5578))
            ],
        ),
        Read(
            'db.getCollectionInfos({ name: "weather" })[0].options.expireAfterSeconds', 30 * 24 * 3600, None
        ),
    ],
    "outlier": [
        Read(
            """db.users.findOne({ _id: "star" }).followers.concat(
                 db.follower_overflow.find({ user_id: "star" }).sort({ page: 1 }).toArray()
                   .flatMap(page => page.followers))""",
            FANS,
            lambda store, it: list(store.array(it.User, "followers", "star")),
        ),
        Read(
            'db.follower_overflow.countDocuments({ user_id: "star", followers: "user2400" })',
            1,
            lambda store, it: int(store.array(it.User, "followers", "star").contains("user2400")),
        ),
    ],
    "polymorphic": [
        Read(
            """db.products.find({ $text: { $search: "wireless" } }).toArray()
                 .map(product => product.title).sort()""",
            ["Essays on Wireless Telegraphy", "Wireless mouse"],
            lambda store, it: sorted(product.title for product in store.search(it.Product, "wireless")),
        ),
        Read(
            """db.products.aggregate([{ $group: { _id: "$type", count: { $sum: 1 } } },
                                      { $sort: { _id: 1 } }]).toArray()""",
            [
                {"_id": "book", "count": 3},
                {"_id": "clothing", "count": 1},
                {"_id": "electronics", "count": 2},
            ],
            lambda store, it: [
                {"_id": kind.__name__.lower(), "count": store.count(kind)}
                for kind in (it.Book, it.Clothing, it.Electronics)
            ],
        ),
        Read(
            """db.products.find({ type: "book", isbn: "9780441013593" }).explain()
                 .queryPlanner.winningPlan.inputStage.indexName""",
            "isbn_1_book",
            None,
        ),
    ],
    "bicycle_shop": [
        Read(
            'db.customer.find({ customerId: "c1" }).sort({ _id: 1 }).toArray().map(each => each.type)',
            ["customer", "salesOrder", "salesOrder"],
            lambda store, it: [
                type(each).__name__[0].lower() + type(each).__name__[1:]
                for each in store.find(it.Account, {"customerId": "c1"}, sort="_id")
            ],
        ),
        Read(
            """db.customer.find({ type: "customer" }).sort({ salesOrderCount: -1 }).limit(10).toArray()
                 .map(customer => customer.salesOrderCount)""",
            [2],
            lambda store, it: [
                customer.sales_order_count
                for customer in store.find(it.Customer, sort=[("salesOrderCount", -1)])
            ],
        ),
    ],
    "schema_versioning": [
        Read(
            """db.people.aggregate([{ $group: { _id: "$schema_version", count: { $sum: 1 } } }]).toArray()""",
            [{"_id": 2, "count": 5}],
            lambda store, it: [
                {"_id": version, "count": count}
                for version, count in store.migration_status(it.Person).items()
            ],
        ),
        Read(
            "db.people.findOne({ _id: 1 }).contact_method",
            [{"home": "503-555-0000"}, {"work": "503-555-0010"}],
            lambda store, it: store.get(it.Person, 1).contact_method,
        ),
    ],
    "categories": [
        Read(
            'db.categories.findOne({ _id: "MongoDB" }).ancestors',
            ["Books", "Programming", "Databases"],
            lambda store, it: ids(store.tree(it.ByAncestors).ancestors("MongoDB")),
        ),
        Read(
            'db.categories.find({ ancestors: "Programming" }).toArray().map(each => each._id).sort()',
            BELOW_PROGRAMMING,
            lambda store, it: sorted_ids(store.tree(it.ByAncestors).descendants("Programming")),
        ),
        Read(
            """db.categories_by_parent.aggregate([
                 { $match: { _id: "Programming" } },
                 { $graphLookup: { from: "categories_by_parent", startWith: "$_id",
                                   connectFromField: "_id", connectToField: "parent", as: "below" } }
               ]).toArray()[0].below.map(each => each._id).sort()""",
            BELOW_PROGRAMMING,
            lambda store, it: sorted_ids(store.tree(it.ByParent).descendants("Programming")),
        ),
        Read(
            'db.categories_by_children.findOne({ children: "MongoDB" })._id',
            "Databases",
            lambda store, it: store.tree(it.ByChildren).parent("MongoDB").id,
        ),
        Read(
            """db.categories_by_children.aggregate([
                 { $match: { _id: "Programming" } },
                 { $graphLookup: { from: "categories_by_children", startWith: "$children",
                                   connectFromField: "children", connectToField: "_id", as: "below" } }
               ]).toArray()[0].below.map(each => each._id).sort()""",
            BELOW_PROGRAMMING,
            lambda store, it: sorted_ids(store.tree(it.ByChildren).descendants("Programming")),
        ),
        Read(
            """db.categories_by_path.find({ path: { $gt: ",Books,Programming,", $lt: ",Books,Programming-" } })
                 .toArray().map(each => each._id).sort()""",
            BELOW_PROGRAMMING,
            lambda store, it: sorted_ids(store.tree(it.ByPath).descendants("Programming")),
        ),
    ],
    "organisation_chart": [
        Read(
            "db.employees.find({ reports_to: 3 }).sort({ _id: 1 }).toArray().map(person => person.name)",
            ["Lea", "Tom", "Ute"],
            lambda store, it: [person.name for person in store.tree(it.Employee).descendants(3, sort="_id")],
        ),
        Read(
            """db.employees.aggregate([
                 { $match: { _id: 5 } },
                 { $graphLookup: { from: "employees", startWith: "$manager_id", connectFromField: "manager_id",
                                   connectToField: "_id", depthField: "depth", as: "chain" } }
               ]).toArray()[0].chain.sort((a, b) => b.depth - a.depth).map(person => person._id)""",
            [1, 3],
            lambda store, it: store.get(it.Employee, 5).reports_to,
        ),
    ],
    "attributes": [
        Read(
            """db.products.find({ $and: [
                 { specs: { $elemMatch: { k: "material", v: "ash" } } },
                 { specs: { $elemMatch: { k: "shafts", v: { $gte: 4 } } } } ] }).toArray().map(each => each.name)""",
            ["loom"],
            lambda store, it: [
                each.name
                for each in store.find(it.Product, {"specs.material": "ash", "specs.shafts": {"$gte": 4}})
            ],
        ),
        Read(
            "db.products.findOne({ specs: { $elemMatch: { k: 'volume', u: 'ml' } } }).specs.length",
            2,
            lambda store, it: len(store.find_one(it.Product, {"specs.volume.unit": "ml"}).specs),
        ),
    ],
    "links": [
        Read(
            """db.school.find({ $or: [{ _id: "weaving" }, { links: "weaving" }] }).sort({ _id: 1 }).toArray()
                 .map(each => each.type)""",
            ["student", "student", "teacher", "course"],
            lambda store, it: [
                type(each).__name__.lower() for each in store.related(it.Course, "weaving", sort="_id")
            ],
        ),
        Read(
            "db.school.findOne({ _id: 'cleo' }).links",
            ["weaving", "dyeing"],
            lambda store, it: store.get(it.Student, "cleo").links,
        ),
    ],
    "archive": [
        Read(
            """db.sales.aggregate([
                 { $unionWith: "sales_archive" }, { $group: { _id: "$customer_name", spent: { $sum: "$price" } } }
               ]).toArray()""",
            [{"_id": "Ada", "spent": 146}],
            lambda store, it: [{"_id": each.id, "spent": each.spent} for each in store.find(it.Customer)],
        ),
    ],
    "history": [
        Read(
            """db.policies_history.find({ document_id: "P-1", valid_to: { $ne: null } }).sort({ valid_from: 1 })
                 .toArray().map(row => row.document.premium)""",
            [100, 130, 125, 130],
            lambda store, it: [state.premium for state in store.history(it.Policy, "P-1")][:0:-1],
        ),
        Read(
            """(() => { const then = db.policies_history.findOne({ revision: 2 }).valid_from;
                 return db.policies_history.findOne({ document_id: "P-1", valid_from: { $lte: then },
                   $or: [{ valid_to: { $gt: then } }, { valid_to: null }] }).document.insured; })()""",
            ["car", "watch"],
            lambda store, it: (
                store.at(it.Policy, "P-1", list(store.history(it.Policy, "P-1"))[3].valid_from).insured
            ),
        ),
    ],
    "approximation": [
        Read(
            'db.pages.findOne({ page_id: "home" }).approximate_metrics.view_count',
            2550,
            lambda store, it: store.counter(it.Page, "approximate_metrics.view_count").read(
                "home", exact=True
            ),
        ),
    ],
    "sales_per_day": [
        Read(
            """db.daily_summaries.find({ product_id: "loom", day: { $gte: ISODate("2026-02-28T23:00:00Z"),
                 $lt: ISODate("2026-03-31T22:00:00Z") } }).sort({ day: 1 }).toArray()
                 .map(day => day.total_amount)""",
            [Decimal("90.00"), Decimal("110.00")],
            lambda store, it: [
                day.total_amount for day in store.find(it.DailySales, {"product_id": "loom"}, sort="day")
            ],
        ),
        Read(
            'db.monthly_summaries.findOne({ _id: ISODate("2026-03-01T00:00:00Z") }).total_amount',
            Decimal("219.90"),
            lambda store, it: store.get(it.MonthlySales, datetime(2026, 3, 1, tzinfo=UTC)).total_amount,
        ),
    ],
    "kilowatts_per_zone": [
        Read(
            """db.zones.find().sort({ zone: 1, date: 1 }).toArray()
                 .map(zone => [zone.zone, zone.buildings, zone["kW per day"].consumption])""",
            [[13, 148, 1480], [13, 1, 12], [14, 151, 1510]],
            lambda store, it: [
                [zone.zone, zone.buildings, zone.per_day.consumption]
                for zone in store.find(it.ZoneDay, sort=["zone", "date"])
            ],
        ),
    ],
}
