"""Databases of the same kind, which were written after the rules and not before them."""

from __future__ import annotations

import random
from typing import Any

from bson import Decimal128, ObjectId
from pymongo.database import Database

from tests.advisor.public_samples import at, sample, words
from tests.advisor.public_tables import hints


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
    database["users"].insert_many(
        [
            {
                "Id": n,
                "Reputation": n * 13 % 900,
                "DisplayName": f"user {n}",
                "CreationDate": at(n),
                "Views": n % 40,
            }
            for n in range(1, 121)
        ]
    )
    comments = [
        {
            "Id": n,
            "PostId": chance.randint(1, 400),
            "Score": n % 4,
            "Text": words(chance, 9),
            "CreationDate": at(n),
            "UserId": chance.randint(1, 120),
        }
        for n in range(1, 1_201)
    ]
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
    database["votes"].insert_many(
        [
            {
                "Id": n,
                "PostId": chance.randint(1, 400),
                "VoteTypeId": chance.randint(1, 3),
                "CreationDate": at(n // 9 * 24),
            }
            for n in range(1, 1_801)
        ]
    )
    database["badges"].insert_many(
        [
            {
                "Id": n,
                "UserId": chance.randint(1, 120),
                "Name": chance.choice(["Teacher", "Editor"]),
                "Date": at(n),
                "Class": 3,
            }
            for n in range(1, 301)
        ]
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
    customers = [
        {
            "_id": ObjectId(),
            "email": f"c{n}@x.example",
            "profile": {"displayName": f"Eater {n}", "language": "en"},
        }
        for n in range(70)
    ]
    restaurants: list[dict[str, Any]] = [
        {
            "_id": ObjectId(),
            "name": f"Kitchen {n}",
            "cuisine": "thai",
            "menu": [{"dish": f"d{k}", "price": 5.5 + k} for k in range(6)],
        }
        for n in range(40)
    ]
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
    reviews = [
        {
            "_id": ObjectId(),
            "orderId": each["_id"],
            "restaurantId": each["restaurantId"],
            "rating": chance.randint(1, 5),
            "text": words(chance, 6),
        }
        for each in orders[:400]
    ]
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
    courses.instructorId -> instructors._id
    students.advisorId -> instructors._id
    enrollments.studentId -> students._id
    enrollments.courseCode -> courses.code
    """,
    {("computed", "courses.enrolled_count"): {"drifted": 3}},
    hints("enrollments.studentId", "enrollments.courseCode", "courses.instructorId"),
)
def university(database: Database[Any]) -> None:
    """Courses are known by their codes; who advises a student is one of the instructors."""
    chance = random.Random(43)
    database["instructors"].insert_many(
        [{"_id": n, "name": f"Prof {n}", "office": f"R{n}"} for n in range(1, 26)]
    )
    codes = [f"{chance.choice(['MAT', 'PHY', 'CS'])}-{100 + n * 7}" for n in range(50)]
    database["students"].insert_many(
        [
            {"_id": 2_024_000 + n, "name": f"Student {n}", "advisorId": n % 25 + 1, "year": n % 4 + 1}
            for n in range(300)
        ]
    )
    enrollments = [
        {
            "studentId": 2_024_000 + n,
            "courseCode": code,
            "term": "2024W",
            "grade": chance.choice(["A", "B", None]),
        }
        for n in range(300)
        for code in chance.sample(codes, 4)
    ]
    database["courses"].insert_many(
        [
            {
                "code": code,
                "title": words(chance, 3),
                "credits": 3 + n % 4,
                "instructorId": n % 25 + 1,
                "enrolled_count": sum(each["courseCode"] == code for each in enrollments) - (n < 3),
            }
            for n, code in enumerate(codes)
        ]
    )
    database["enrollments"].insert_many(enrollments)


@sample(
    """
    bookings.guest._id -> guests._id
    bookings.room -> rooms.number
    """
)
def hotel(database: Database[Any]) -> None:
    """Modelled well: cards that are right, the price of the day, one short list per document."""
    chance = random.Random(44)
    guests = [{"_id": ObjectId(), "name": f"Guest {n}", "country": "NO", "stays": n % 5} for n in range(90)]
    rooms = [f"{floor}{place:02}" for floor in range(1, 6) for place in range(1, 13)]
    database["guests"].insert_many(guests)
    database["rooms"].insert_many(
        [{"number": each, "beds": 2, "view": "sea", "rate": Decimal128("120.00")} for each in rooms]
    )
    database["bookings"].insert_many(
        [
            {
                "guest": {key: guests[n % 90][key] for key in ("_id", "name")},
                "room": chance.choice(rooms),
                "arrival": at(n * 8),
                "departure": at(n * 8 + 48),
                "rate": Decimal128(f"{90 + n % 60}.00"),
                "extras": [{"what": "breakfast", "price": Decimal128("14.00")}][: n % 2],
                "state": chance.choice(["booked", "paid", "left"]),
            }
            for n in range(700)
        ]
    )
