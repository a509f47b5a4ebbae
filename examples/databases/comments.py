"""A comment tree by parent references, below articles that are deeply nested."""

from __future__ import annotations

from examples.databases.maker import Maker


def fill(maker: Maker) -> None:
    chance = maker.chance
    articles = [maker.identity(maker.moment(number)) for number in range(maker.number(200))]
    maker.insert(
        "articles",
        (
            {
                "_id": identity,
                "title": maker.word(20),
                "layout": {"page": {"column": {"box": {"width": 300, "height": 20}}}},
            }
            for identity in articles
        ),
    )
    known: list[tuple[object, object]] = []

    def comment(number: int) -> dict[str, object]:
        above = chance.choice(known[-2_000:]) if known and number % 5 else None
        identity = maker.identity(maker.moment(number / 60))
        article = above[1] if above else chance.choice(articles)
        known.append((identity, article))
        return {
            "_id": identity,
            "article_id": article,
            "parent_id": above[0] if above else None,
            "text": maker.word(30),
            "at": maker.moment(number / 60),
        }

    maker.insert("comments", (comment(number) for number in range(maker.number(20_000))))
    maker.database["comments"].create_index([("parent_id", 1)])
    maker.database["comments"].create_index([("article_id", 1)])
    maker.database["comments"].create_index([("article_id", 1), ("at", -1)])
