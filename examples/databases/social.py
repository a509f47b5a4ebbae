"""People who follow each other: most have a few followers, one has thousands."""

from __future__ import annotations

from examples.databases.maker import Maker


def fill(maker: Maker) -> None:
    chance = maker.chance
    people = [maker.identity(maker.moment(number / 100)) for number in range(maker.number(10_000))]
    most = maker.number(8_000)

    def followers(place: int) -> int:
        return most if place == 4_711 % len(people) else maker.power(2, most // 4, 2.2)

    maker.insert(
        "people",
        (
            {
                "_id": identity,
                "name": maker.word(),
                "joined": maker.moment(place / 100),
                "followers": chance.sample(people, min(followers(place), len(people))),
            }
            for place, identity in enumerate(people)
        ),
    )
    maker.insert(
        "posts",
        (
            {
                "_id": maker.identity(maker.moment(number / 300)),
                "author_id": people[min(len(people) - 1, int(chance.paretovariate(0.8)))],
                "text": maker.word(40),
                "likes": maker.power(1, 5_000),
            }
            for number in range(maker.number(15_000))
        ),
    )
    maker.database["posts"].create_index([("author_id", 1)])
