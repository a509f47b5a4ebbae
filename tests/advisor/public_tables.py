"""Databases that were tables and became collections one to one, as many public samples are."""

from __future__ import annotations

import random
from typing import Any

from pymongo.database import Database

from tests.advisor.public_samples import at, sample, words
from tests.advisor.tables import rows, table

# Whoever reads such a table whole joins; that is a hint without a workload.
_HINTS = "extended-reference"


def hints(*places: str) -> list[tuple[str, str]]:
    return [(_HINTS, place) for place in places]


@sample(
    """
    products.SupplierID -> suppliers.SupplierID
    products.CategoryID -> categories.CategoryID
    orders.CustomerID -> customers.CustomerID
    orders.EmployeeID -> employees.EmployeeID
    orders.ShipVia -> shippers.ShipperID
    order_details.OrderID -> orders.OrderID
    order_details.ProductID -> products.ProductID
    employees.ReportsTo -> employees.EmployeeID
    territories.RegionID -> region.RegionID
    employee_territories.EmployeeID -> employees.EmployeeID
    employee_territories.TerritoryID -> territories.TerritoryID
    """,
    {("normalised-everything", "order_details.OrderID"): {}},
    [
        # Each territory belongs to one employee, who may as well hold the list.
        ("normalised-everything", "employee_territories.EmployeeID"),
        *hints(
            *("products.SupplierID", "products.CategoryID", "orders.EmployeeID", "orders.CustomerID"),
            *("orders.ShipVia", "order_details.ProductID", "territories.RegionID"),
        ),
    ],
)
def northwind(database: Database[Any]) -> None:
    chance = random.Random(21)
    letters = "ABCDEFGHIKLMNOPRSTUVWYZ"
    customers = sorted({"".join(chance.choices(letters, k=5)) for _ in range(91)})
    database["categories"].insert_many(
        [
            {"CategoryID": n, "CategoryName": f"Category {n}", "Description": words(chance, 6)}
            for n in range(1, 9)
        ]
    )
    table(
        database,
        "customers",
        "CustomerID CompanyName ContactName City",
        [(each, f"{each} & Co", words(chance, 2), "Berlin") for each in customers],
    )
    table(
        database,
        "employees",
        "EmployeeID LastName FirstName ReportsTo",
        [(n, f"L{n}", f"F{n}", None if n == 2 else 2 + 3 * (n > 5)) for n in range(1, 10)],
    )
    database["shippers"].insert_many([{"ShipperID": n, "CompanyName": f"Ship {n}"} for n in range(1, 4)])
    database["suppliers"].insert_many(
        [{"SupplierID": n, "CompanyName": f"Supplier {n}", "Country": "UK"} for n in range(1, 30)]
    )
    table(
        database,
        "products",
        "ProductID ProductName SupplierID CategoryID UnitPrice UnitsInStock ReorderLevel Discontinued",
        [
            (n, f"Product {n}", n % 29 + 1, n % 8 + 1, n * 1.25, n * 7 % 120, n % 4 * 10, n % 9 == 0)
            for n in range(1, 78)
        ],
        QuantityPerUnit="10 boxes",
    )
    database["orders"].insert_many(
        [
            {
                "OrderID": 10_248 + n,
                "CustomerID": chance.choice(customers),
                "EmployeeID": chance.randint(1, 9),
                "OrderDate": at(n * 20),
                "ShippedDate": at(n * 20 + 60),
                "ShipVia": chance.randint(1, 3),
                "Freight": n * 1.1,
                "ShipName": words(chance, 2),
                "ShipCity": "Lyon",
            }
            for n in range(400)
        ]
    )
    table(
        database,
        "order_details",
        "OrderID ProductID UnitPrice Quantity Discount",
        [
            (10_248 + n, product, product * 1.2, chance.randint(1, 60), chance.choice([0.0, 0.05, 0.2]))
            for n in range(400)
            for product in chance.sample(range(1, 78), chance.randint(1, 5))
        ],
    )
    database["region"].insert_many([{"RegionID": n, "RegionDescription": f"Region {n}"} for n in range(1, 5)])
    territories = [f"{1_500 + n * 311:05}" for n in range(53)]
    database["territories"].insert_many(
        [
            {"TerritoryID": each, "TerritoryDescription": f"T {each}", "RegionID": n % 4 + 1}
            for n, each in enumerate(territories)
        ]
    )
    database["employee_territories"].insert_many(
        [{"EmployeeID": n % 9 + 1, "TerritoryID": each} for n, each in enumerate(territories[:49])]
    )


@sample(
    """
    city.country_id -> country.country_id
    address.city_id -> city.city_id
    customer.address_id -> address.address_id
    customer.store_id -> store.store_id
    staff.address_id -> address.address_id
    staff.store_id -> store.store_id
    store.manager_staff_id -> staff.staff_id
    store.address_id -> address.address_id
    film.language_id -> language.language_id
    film_actor.actor_id -> actor.actor_id
    film_actor.film_id -> film.film_id
    film_category.film_id -> film.film_id
    film_category.category_id -> category.category_id
    inventory.film_id -> film.film_id
    inventory.store_id -> store.store_id
    rental.inventory_id -> inventory.inventory_id
    rental.customer_id -> customer.customer_id
    rental.staff_id -> staff.staff_id
    payment.customer_id -> customer.customer_id
    payment.staff_id -> staff.staff_id
    payment.rental_id -> rental.rental_id
    """,
    # Each film has one category: no link, but a part of the film.
    {("links", "film_actor"): {}, ("normalised-everything", "film_category.film_id"): {}},
    hints(
        "film_category.category_id",
        *(
            "city.country_id",
            "address.city_id",
            "customer.address_id",
            "customer.store_id",
            "film.language_id",
        ),
        *("inventory.film_id", "inventory.store_id", "rental.inventory_id", "rental.customer_id"),
        *("rental.staff_id", "payment.customer_id", "payment.staff_id", "payment.rental_id"),
    ),
)
def sakila(database: Database[Any]) -> None:
    """Names in the singular, small numbers as keys, two stores with two members of staff."""
    chance = random.Random(23)
    database["country"].insert_many([{"country_id": n, "country": f"Country {n}"} for n in range(1, 41)])
    database["city"].insert_many(
        [{"city_id": n, "city": f"City {n}", "country_id": n * 7 % 40 + 1} for n in range(1, 201)]
    )
    table(
        database,
        "address",
        "address_id address district city_id phone",
        [(n, f"{n} Road", "D", n % 200 + 1, f"{n * 7919}") for n in range(1, 304)],
    )
    database["store"].insert_many([{"store_id": n, "manager_staff_id": n, "address_id": n} for n in (1, 2)])
    database["staff"].insert_many(
        [
            {"staff_id": n, "first_name": f"S{n}", "last_name": "X", "address_id": n + 2, "store_id": n}
            for n in (1, 2)
        ]
    )
    table(
        database,
        "customer",
        "customer_id store_id first_name last_name address_id active create_date",
        [(n, n % 2 + 1, f"F{n}", f"L{n}", n + 4, True, at(n)) for n in range(1, 300)],
    )
    database["language"].insert_many([{"language_id": n, "name": f"Language {n}"} for n in range(1, 7)])
    database["film"].insert_many(
        [
            {
                "film_id": n,
                "title": words(chance, 2).upper(),
                "description": words(chance, 10),
                "release_year": 2006,
                "language_id": n % 6 + 1,
                "original_language_id": None,
                "rental_duration": 3 + n % 5,
                "rental_rate": 0.99,
                "length": 46 + n % 140,
                "rating": chance.choice(["PG", "G", "R"]),
            }
            for n in range(1, 301)
        ]
    )
    database["actor"].insert_many(
        [{"actor_id": n, "first_name": f"A{n}", "last_name": f"B{n}"} for n in range(1, 101)]
    )
    database["film_actor"].insert_many(
        [
            {"actor_id": actor, "film_id": film, "last_update": at(0)}
            for film in range(1, 301)
            for actor in chance.sample(range(1, 101), 5)
        ]
    )
    database["category"].insert_many([{"category_id": n, "name": f"Category {n}"} for n in range(1, 17)])
    database["film_category"].insert_many(
        [{"film_id": n, "category_id": n % 16 + 1, "last_update": at(0)} for n in range(1, 301)]
    )
    database["inventory"].insert_many(
        [{"inventory_id": n, "film_id": (n * 3) % 300 + 1, "store_id": n % 2 + 1} for n in range(1, 1_001)]
    )
    rentals = rows(
        "rental_id rental_date inventory_id customer_id return_date staff_id",
        [
            (n, at(n / 3), chance.randint(1, 1_000), chance.randint(1, 299), at(n / 3 + 90), n % 2 + 1)
            for n in range(1, 2_001)
        ],
    )
    database["rental"].insert_many(rentals)
    table(
        database,
        "payment",
        "payment_id customer_id staff_id rental_id amount payment_date",
        [
            (n, each["customer_id"], each["staff_id"], each["rental_id"], 0.99 + n % 5, each["rental_date"])
            for n, each in enumerate(rentals, 1)
        ],
    )


@sample(
    """
    routes.agency_id -> agency.agency_id
    trips.route_id -> routes.route_id
    trips.service_id -> calendar.service_id
    stop_times.trip_id -> trips.trip_id
    stop_times.stop_id -> stops.stop_id
    stops.parent_station -> stops.stop_id
    calendar_dates.service_id -> calendar.service_id
    """,
    {
        ("normalised-everything", "stop_times.trip_id"): {},
        ("normalised-everything", "calendar_dates.service_id"): {},
    },
    hints("routes.agency_id", "trips.route_id", "trips.service_id", "stop_times.stop_id"),
)
def gtfs(database: Database[Any]) -> None:
    """A timetable: the stops of a trip are numbered, and nothing else refers to them."""
    database["agency"].insert_many(
        [
            {"agency_id": name, "agency_name": f"The {name}", "agency_timezone": "Europe/Vienna"}
            for name in ("WL", "OEBB", "WLB")
        ]
    )
    table(
        database,
        "routes",
        "route_id agency_id route_short_name route_type",
        [(f"11-{n}-j24", ["WL", "OEBB", "WLB"][n % 3], f"{n}", 3) for n in range(40)],
    )
    services = [f"TA+{n * 13}" for n in range(30)]
    database["calendar"].insert_many(
        [
            {"service_id": each, "monday": 1, "sunday": 0, "start_date": 20_240_101, "end_date": 20_241_231}
            for each in services
        ]
    )
    database["calendar_dates"].insert_many(
        [
            {"service_id": each, "date": 20_240_101 + place, "exception_type": 1 + place % 2}
            for each in services
            for place in range(4)
        ]
    )
    stops = [f"at:49:{n * 17}:0:1" for n in range(120)]
    table(
        database,
        "stops",
        "stop_id stop_name stop_lat stop_lon location_type parent_station",
        [
            (each, f"Stop {n}", 48.2 + n / 999, 16.3, int(n < 30), None if n < 30 else stops[n % 30])
            for n, each in enumerate(stops)
        ],
    )
    trips = [f"{n}.TA.11-{n % 40}-j24.1.H" for n in range(300)]
    table(
        database,
        "trips",
        "route_id service_id trip_id shape_id trip_headsign direction_id",
        [
            (f"11-{n % 40}-j24", services[n % 30], each, f"11-{n % 40}.1.H", f"to {n % 20}", n % 2)
            for n, each in enumerate(trips)
        ],
    )
    database["stop_times"].insert_many(
        [
            {
                "trip_id": each,
                "arrival_time": f"{6 + n % 16:02}:{place * 2:02}:00",
                "departure_time": f"{6 + n % 16:02}:{place * 2:02}:00",
                "stop_id": stops[30 + (n + place) % 90],
                "stop_sequence": place + 1,
                "pickup_type": 0,
            }
            for n, each in enumerate(trips)
            for place in range(8 + n % 12)
        ]
    )
    table(
        database,
        "shapes",
        "shape_id shape_pt_lat shape_pt_lon shape_pt_sequence",
        [(f"11-{n}.1.H", 48.2 + place / 99, 16.3, place + 1) for n in range(40) for place in range(40)],
    )
