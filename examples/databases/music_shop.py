"""A music shop laid out like tables: artists, albums, tracks, customers, invoices and their lines."""

from __future__ import annotations

from examples.databases.maker import Maker


def fill(maker: Maker) -> None:
    chance = maker.chance
    artists, albums = maker.number(275), maker.number(1_000)
    tracks, customers, invoices = maker.number(7_000), maker.number(600), maker.number(3_000)
    maker.insert("artists", ({"_id": number, "name": maker.word()} for number in range(artists)))
    maker.insert(
        "albums",
        (
            {"_id": number, "title": maker.word(12), "artist_id": chance.randrange(artists)}
            for number in range(albums)
        ),
    )
    maker.insert("genres", ({"_id": number, "name": maker.word()} for number in range(25)))
    maker.insert(
        "tracks",
        (
            {
                "_id": number,
                "name": maker.word(14),
                "album_id": chance.randrange(albums),
                "genre_id": chance.randrange(25),
                "milliseconds": chance.randrange(120_000, 400_000),
                "unit_price": 0.99,
            }
            for number in range(tracks)
        ),
    )
    maker.insert(
        "customers",
        (
            {
                "_id": number,
                "first_name": maker.word(),
                "last_name": maker.word(9),
                "email": f"{maker.word()}{number}@example.org",
                "country": chance.choice(["AT", "BR", "CA", "DE", "FR", "IN"]),
            }
            for number in range(customers)
        ),
    )
    maker.insert(
        "invoices",
        (
            {
                "_id": number,
                "customer_id": chance.randrange(customers),
                "date": maker.moment(number / 8),
                "total": round(chance.uniform(1, 25), 2),
            }
            for number in range(invoices)
        ),
    )
    lines = ((number, place) for number in range(invoices) for place in range(1 + number % 7))
    maker.insert(
        "invoice_lines",
        (
            {
                "_id": f"{number}-{place}",
                "invoice_id": number,
                "track_id": chance.randrange(tracks),
                "unit_price": 0.99,
                "quantity": 1,
            }
            for number, place in lines
        ),
    )
