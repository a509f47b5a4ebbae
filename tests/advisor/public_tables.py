"""Databases that were tables and became collections one to one, as many public samples are."""

from __future__ import annotations

import random
from typing import Any

from pymongo.database import Database

from tests.advisor.public_samples import at, sample, words

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
    database["customers"].insert_many(
        [
            {
                "CustomerID": each,
                "CompanyName": f"{each} & Co",
                "ContactName": words(chance, 2),
                "City": "Berlin",
            }
            for each in customers
        ]
    )
    database["employees"].insert_many(
        [
            {
                "EmployeeID": n,
                "LastName": f"L{n}",
                "FirstName": f"F{n}",
                "ReportsTo": None if n == 2 else 2 + 3 * (n > 5),
            }
            for n in range(1, 10)
        ]
    )
    database["shippers"].insert_many([{"ShipperID": n, "CompanyName": f"Ship {n}"} for n in range(1, 4)])
    database["suppliers"].insert_many(
        [{"SupplierID": n, "CompanyName": f"Supplier {n}", "Country": "UK"} for n in range(1, 30)]
    )
    database["products"].insert_many(
        [
            {
                "ProductID": n,
                "ProductName": f"Product {n}",
                "SupplierID": n % 29 + 1,
                "CategoryID": n % 8 + 1,
                "QuantityPerUnit": "10 boxes",
                "UnitPrice": n * 1.25,
                "UnitsInStock": n * 7 % 120,
                "ReorderLevel": n % 4 * 10,
                "Discontinued": n % 9 == 0,
            }
            for n in range(1, 78)
        ]
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
    database["order_details"].insert_many(
        [
            {
                "OrderID": 10_248 + n,
                "ProductID": product,
                "UnitPrice": product * 1.2,
                "Quantity": chance.randint(1, 60),
                "Discount": chance.choice([0.0, 0.05, 0.2]),
            }
            for n in range(400)
            for product in chance.sample(range(1, 78), chance.randint(1, 5))
        ]
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
    albums.ArtistId -> artists.ArtistId
    tracks.AlbumId -> albums.AlbumId
    tracks.MediaTypeId -> media_types.MediaTypeId
    tracks.GenreId -> genres.GenreId
    customers.SupportRepId -> employees.EmployeeId
    employees.ReportsTo -> employees.EmployeeId
    invoices.CustomerId -> customers.CustomerId
    invoice_items.InvoiceId -> invoices.InvoiceId
    invoice_items.TrackId -> tracks.TrackId
    playlist_track.PlaylistId -> playlists.PlaylistId
    playlist_track.TrackId -> tracks.TrackId
    """,
    {
        ("normalised-everything", "invoice_items.InvoiceId"): {},
        ("links", "playlist_track"): {},
    },
    hints(
        *("albums.ArtistId", "tracks.AlbumId", "tracks.MediaTypeId", "tracks.GenreId"),
        *("customers.SupportRepId", "invoices.CustomerId", "invoice_items.TrackId"),
    ),
)
def chinook(database: Database[Any]) -> None:
    chance = random.Random(22)
    database["artists"].insert_many([{"ArtistId": n, "Name": f"Artist {n}"} for n in range(1, 91)])
    database["albums"].insert_many(
        [{"AlbumId": n, "Title": f"Album {n}", "ArtistId": (n * 7) % 90 + 1} for n in range(1, 171)]
    )
    database["genres"].insert_many([{"GenreId": n, "Name": f"Genre {n}"} for n in range(1, 26)])
    database["media_types"].insert_many([{"MediaTypeId": n, "Name": f"Media {n}"} for n in range(1, 6)])
    database["tracks"].insert_many(
        [
            {
                "TrackId": n,
                "Name": f"Track {n}",
                "AlbumId": n % 170 + 1,
                "MediaTypeId": n % 5 + 1,
                "GenreId": n % 25 + 1,
                "Composer": words(chance, 2),
                "Milliseconds": 200_000 + n * 37,
                "Bytes": 5_000_000 + n * 911,
                "UnitPrice": 0.99,
            }
            for n in range(1, 1_401)
        ]
    )
    database["employees"].insert_many(
        [
            {
                "EmployeeId": n,
                "LastName": f"L{n}",
                "FirstName": f"F{n}",
                "Title": "Agent",
                "ReportsTo": [None, 1, 2, 2, 2, 1, 6, 6][n - 1],
            }
            for n in range(1, 9)
        ]
    )
    database["customers"].insert_many(
        [
            {
                "CustomerId": n,
                "FirstName": f"F{n}",
                "LastName": f"L{n}",
                "Email": f"{n}@x.example",
                "SupportRepId": 3 + n % 3,
            }
            for n in range(1, 60)
        ]
    )
    database["invoices"].insert_many(
        [
            {
                "InvoiceId": n,
                "CustomerId": n % 59 + 1,
                "InvoiceDate": at(n * 50),
                "BillingCity": "Oslo",
                "Total": 1.98,
            }
            for n in range(1, 301)
        ]
    )
    tracks = [n % 1_400 + 1 for n in range(0, 3 * 1_700, 3)]
    database["invoice_items"].insert_many(
        [
            {
                "InvoiceLineId": number,
                "InvoiceId": invoice,
                "TrackId": tracks[number],
                "UnitPrice": 0.99,
                "Quantity": 1,
            }
            for number, invoice in enumerate(n for n in range(1, 301) for _ in range(1 + n * 5 % 9))
        ]
    )
    database["playlists"].insert_many([{"PlaylistId": n, "Name": f"List {n}"} for n in range(1, 19)])
    database["playlist_track"].insert_many(
        [
            {"PlaylistId": n, "TrackId": track}
            for n in range(1, 19)
            for track in chance.sample(range(1, 1_401), 60)
        ]
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
    database["address"].insert_many(
        [
            {
                "address_id": n,
                "address": f"{n} Road",
                "district": "D",
                "city_id": n % 200 + 1,
                "phone": f"{n * 7919}",
            }
            for n in range(1, 304)
        ]
    )
    database["store"].insert_many([{"store_id": n, "manager_staff_id": n, "address_id": n} for n in (1, 2)])
    database["staff"].insert_many(
        [
            {"staff_id": n, "first_name": f"S{n}", "last_name": "X", "address_id": n + 2, "store_id": n}
            for n in (1, 2)
        ]
    )
    database["customer"].insert_many(
        [
            {
                "customer_id": n,
                "store_id": n % 2 + 1,
                "first_name": f"F{n}",
                "last_name": f"L{n}",
                "address_id": n + 4,
                "active": True,
                "create_date": at(n),
            }
            for n in range(1, 300)
        ]
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
    rentals = [
        {
            "rental_id": n,
            "rental_date": at(n / 3),
            "inventory_id": chance.randint(1, 1_000),
            "customer_id": chance.randint(1, 299),
            "return_date": at(n / 3 + 90),
            "staff_id": n % 2 + 1,
        }
        for n in range(1, 2_001)
    ]
    database["rental"].insert_many(rentals)
    database["payment"].insert_many(
        [
            {
                "payment_id": n,
                "customer_id": each["customer_id"],
                "staff_id": each["staff_id"],
                "rental_id": each["rental_id"],
                "amount": 0.99 + n % 5,
                "payment_date": each["rental_date"],
            }
            for n, each in enumerate(rentals, 1)
        ]
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
    database["routes"].insert_many(
        [
            {
                "route_id": f"11-{n}-j24",
                "agency_id": ["WL", "OEBB", "WLB"][n % 3],
                "route_short_name": f"{n}",
                "route_type": 3,
            }
            for n in range(40)
        ]
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
    database["stops"].insert_many(
        [
            {
                "stop_id": each,
                "stop_name": f"Stop {n}",
                "stop_lat": 48.2 + n / 999,
                "stop_lon": 16.3,
                "location_type": int(n < 30),
                "parent_station": None if n < 30 else stops[n % 30],
            }
            for n, each in enumerate(stops)
        ]
    )
    trips = [f"{n}.TA.11-{n % 40}-j24.1.H" for n in range(300)]
    database["trips"].insert_many(
        [
            {
                "route_id": f"11-{n % 40}-j24",
                "service_id": services[n % 30],
                "trip_id": each,
                "shape_id": f"11-{n % 40}.1.H",
                "trip_headsign": f"to {n % 20}",
                "direction_id": n % 2,
            }
            for n, each in enumerate(trips)
        ]
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
    database["shapes"].insert_many(
        [
            {
                "shape_id": f"11-{n}.1.H",
                "shape_pt_lat": 48.2 + place / 99,
                "shape_pt_lon": 16.3,
                "shape_pt_sequence": place + 1,
            }
            for n in range(40)
            for place in range(40)
        ]
    )
