"""Databases of the same kind, which were written after the rules and not before them."""

from __future__ import annotations

import random
from typing import Any

from bson import Decimal128, ObjectId
from pymongo.database import Database

from tests.advisor.public_samples import at, sample, words
from tests.advisor.public_tables import hints
from tests.advisor.tables import rows, table


@sample(
    """
    posts.ParentId -> posts.Id
    posts.OwnerUserId -> users.Id
    comments.PostId -> posts.Id
    comments.UserId -> users.Id
    votes.PostId -> posts.Id
    badges.UserId -> users.Id
    """,
    {
        ("computed", "posts.CommentCount"): {"drifted": 8},
        ("polymorphic", "posts.PostTypeId"): {"kinds": 2},
    },
    [
        *hints("comments.PostId", "comments.UserId", "posts.OwnerUserId", "votes.PostId"),
        ("tree", "posts.ParentId"),
    ],
)
def stackexchange(database: Database[Any]) -> None:
    """Questions and answers in one collection, with how many comments each has."""
    chance = random.Random(41)
    table(
        database,
        "users",
        "Id Reputation DisplayName CreationDate Views",
        [(n, n * 13 % 900, f"user {n}", at(n), n % 40) for n in range(1, 121)],
    )
    comments = rows(
        "Id PostId Score Text CreationDate UserId",
        [
            (n, chance.randint(1, 400), n % 4, words(chance, 9), at(n), chance.randint(1, 120))
            for n in range(1, 1_201)
        ],
    )
    posts = []
    for n in range(1, 401):
        post: dict[str, Any] = {
            "Id": n,
            "PostTypeId": 1 if n % 3 == 1 else 2,
            "CreationDate": at(n * 5),
            "Score": chance.randint(-2, 30),
            "Body": words(chance, 25),
            "OwnerUserId": chance.randint(1, 120),
            "CommentCount": sum(each["PostId"] == n for each in comments) + (n > 392),
        }
        if n % 3 == 1:
            post |= {"Title": words(chance, 5), "Tags": "<a><b>", "ViewCount": n * 7, "AnswerCount": 2}
        else:
            post["ParentId"] = n - (n - 1) % 3
        posts.append(post)
    database["posts"].insert_many(posts)
    database["comments"].insert_many(comments)
    table(
        database,
        "votes",
        "Id PostId VoteTypeId CreationDate",
        [(n, chance.randint(1, 400), chance.randint(1, 3), at(n // 9 * 24)) for n in range(1, 1_801)],
    )
    table(
        database,
        "badges",
        "Id UserId Name Date Class",
        [(n, chance.randint(1, 120), chance.choice(["Teacher", "Editor"]), at(n), 3) for n in range(1, 301)],
    )


@sample(
    """
    orders.restaurantId -> restaurants._id
    orders.customerId -> customers._id
    orders.courierId -> couriers._id
    reviews.restaurantId -> restaurants._id
    reviews.orderId -> orders._id
    pings.source.courierId -> couriers._id
    """,
    {
        ("extended-reference", "orders.restaurantName"): {"stale": 11},
        ("extended-reference", "orders.customerDisplayName"): {"stale": 7},
        ("computed", "restaurants.avgRating"): {"drifted": 4},
        ("bucket", "pings.at"): {"series": 8},
    },
    hints("orders.courierId", "reviews.restaurantId", "reviews.orderId", "pings.source.courierId"),
)
def delivery(database: Database[Any]) -> None:
    """Names that were copied at the time of the order, ratings to one decimal, and where couriers are."""
    chance = random.Random(42)
    customers = rows(
        "_id email profile",
        [(ObjectId(), f"c{n}@x.example", {"displayName": f"Eater {n}", "language": "en"}) for n in range(70)],
    )
    restaurants: list[dict[str, Any]] = rows(
        "_id name cuisine menu",
        [
            (ObjectId(), f"Kitchen {n}", "thai", [{"dish": f"d{k}", "price": 5.5 + k} for k in range(6)])
            for n in range(40)
        ],
    )
    couriers = [{"_id": n, "name": f"Rider {n}", "vehicle": "bike"} for n in range(8)]
    orders = []
    for n in range(500):
        customer, restaurant = chance.choice(customers), restaurants[n % 40]
        orders.append(
            {
                "_id": ObjectId(),
                "restaurantId": restaurant["_id"],
                "restaurantName": restaurant["name"] if n >= 11 else "Old name",
                "customerId": customer["_id"],
                "customerDisplayName": customer["profile"]["displayName"] if n % 75 else "Gone",
                "courierId": chance.randrange(8),
                "lines": [{"dish": "d1", "price": 6.5, "quantity": 1 + n % 3}],
                "total": Decimal128(f"{n % 50}.90"),
                "placedAt": at(n),
            }
        )
    reviews = rows(
        "_id orderId restaurantId rating text",
        [
            (ObjectId(), each["_id"], each["restaurantId"], chance.randint(1, 5), words(chance, 6))
            for each in orders[:400]
        ],
    )
    for n, each in enumerate(restaurants):
        mine = [one["rating"] for one in reviews if one["restaurantId"] == each["_id"]]
        each["avgRating"] = round(sum(mine) / len(mine), 1) + (0.5 if n < 4 else 0)
    database["customers"].insert_many(customers)
    database["restaurants"].insert_many(restaurants)
    database["couriers"].insert_many(couriers)
    database["orders"].insert_many(orders)
    database["reviews"].insert_many(reviews)
    database["pings"].insert_many(
        [
            {
                "source": {"courierId": n % 8, "app": "v3"},
                "at": at(n // 8 / 60),
                "lat": 48.2 + chance.random(),
                "lon": 16.3 + chance.random(),
                "speed": chance.uniform(0, 9),
            }
            for n in range(2_400)
        ]
    )


@sample(
    """
    customers.meters[] -> meters.serial
    readings.meter -> meters.serial
    bills.customer_no -> customers.customer_no
    bill_positions.bill_id -> bills._id
    """,
    {
        ("bucket", "readings.slot"): {"series": 10, "at whole steps of": "60 minutes"},
        ("normalised-everything", "bill_positions.bill_id"): {},
        ("computed", "bills.total_amount"): {"drifted": 7},
    },
    hints("readings.meter", "bills.customer_no"),
)
def energy(database: Database[Any]) -> None:
    """Meters known by their serials, one reading an hour with gaps, and bills with their positions."""
    chance = random.Random(51)
    serials = [f"EM-{chance.randrange(10**6):06}" for _ in range(60)]
    database["meters"].insert_many([{"serial": each, "model": "K2", "phase": 3} for each in serials])
    database["customers"].insert_many(
        [
            {"customer_no": 70_000 + n * 13, "name": f"C {n}", "meters": serials[2 * n : 2 * n + 2]}
            for n in range(30)
        ]
    )
    table(
        database,
        "readings",
        "meter slot kwh volts",
        [
            (serial, at(hour), round(chance.uniform(0, 3), 3), 229.5 + chance.random())
            for hour in range(250)
            for serial in serials[:10]
            if chance.random() > 0.05
        ],
    )
    positions, bills = [], []
    for n in range(200):
        amounts = [round(chance.uniform(5, 90), 2) for _ in range(1 + n % 5)]
        total = round(sum(amounts), 2) + (1 if n < 7 else 0)
        bills.append(
            {"_id": n, "customer_no": 70_000 + n % 30 * 13, "month": at(n * 24), "total_amount": total}
        )
        positions += [
            {"bill_id": n, "position": place, "what": "energy", "amount": each}
            for place, each in enumerate(amounts, 1)
        ]
    database["bills"].insert_many(bills)
    database["bill_positions"].insert_many(positions)


@sample(
    """
    SalesOrderHeader.CustomerID -> Customer.CustomerID
    SalesOrderHeader.SalesPersonID -> Employee.BusinessEntityID
    SalesOrderDetail.SalesOrderID -> SalesOrderHeader.SalesOrderID
    SalesOrderDetail.ProductID -> Product.ProductID
    Product.ProductSubcategoryID -> ProductSubcategory.ProductSubcategoryID
    ProductSubcategory.ProductCategoryID -> ProductCategory.ProductCategoryID
    """,
    {
        ("normalised-everything", "SalesOrderDetail.SalesOrderID"): {},
        ("computed", "SalesOrderHeader.SubTotal"): {"drifted": 5},
    },
    hints(
        *("SalesOrderHeader.CustomerID", "SalesOrderHeader.SalesPersonID", "SalesOrderDetail.ProductID"),
        *("Product.ProductSubcategoryID", "ProductSubcategory.ProductCategoryID"),
    ),
)
def adventureworks(database: Database[Any]) -> None:
    """Tables in the singular, whose keys repeat the table's name, but for one."""
    chance = random.Random(52)
    database["ProductCategory"].insert_many(
        [{"ProductCategoryID": n, "Name": f"Cat {n}"} for n in range(1, 5)]
    )
    database["ProductSubcategory"].insert_many(
        [
            {"ProductSubcategoryID": n, "ProductCategoryID": n % 4 + 1, "Name": f"Sub {n}"}
            for n in range(1, 38)
        ]
    )
    table(
        database,
        "Product",
        "ProductID Name ProductNumber ListPrice ProductSubcategoryID",
        [(700 + n, f"P {n}", f"BK-{n}", n * 1.5, n % 37 + 1) for n in range(120)],
    )
    table(
        database,
        "Employee",
        "BusinessEntityID NationalIDNumber JobTitle HireDate",
        [(n, f"{n * 99_991}", "Sales", at(n)) for n in range(1, 91)],
    )
    database["Customer"].insert_many(
        [{"CustomerID": 11_000 + n, "AccountNumber": f"AW{n:08}"} for n in range(150)]
    )
    headers, details = [], []
    for n in range(300):
        lines = [(chance.randint(1, 5), 700 + product) for product in chance.sample(range(120), 1 + n % 4)]
        for quantity, product in lines:
            details.append(
                {
                    "SalesOrderID": 43_659 + n,
                    "SalesOrderDetailID": len(details) + 1,
                    "ProductID": product,
                    "OrderQty": quantity,
                    "UnitPrice": 2.5,
                    "LineTotal": quantity * 2.5,
                }
            )
        headers.append(
            {
                "SalesOrderID": 43_659 + n,
                "OrderDate": at(n * 6),
                "Status": 5,
                "CustomerID": 11_000 + n % 150,
                "SalesPersonID": 40 + n % 17,
                "SubTotal": sum(quantity * 2.5 for quantity, _ in lines) + (n < 5),
            }
        )
    database["SalesOrderHeader"].insert_many(headers)
    database["SalesOrderDetail"].insert_many(details)
