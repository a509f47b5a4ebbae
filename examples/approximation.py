"""Approximation: page views, written now and then instead of each time.

Nobody reads the number of views to its last digit, and one write per view
would keep the server busy with a single document.
"""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Annotated

from examples.story import only, show, step, tell, verified
from pydantic import BaseModel

from treadle import Approximate, Document, Store, UsageError


class Metrics(BaseModel):
    view_count: Annotated[
        int,
        Approximate(
            every=100, within=timedelta(minutes=5), by="page_id", upsert=True, flushed_at="last_flushed"
        ),
    ] = 0
    last_flushed: datetime | None = None


class Page(Document, collection="pages"):
    page_id: str
    approximate_metrics: Metrics = Metrics()
    likes: Annotated[int, Approximate(buffer="durable", by="page_id")] = 0
    impressions: Annotated[int, Approximate(buffer="sampled", every=100, by="page_id")] = 0


MODELS = [Page]


def story(store: Store) -> None:
    store.setup()
    pages = store.collection(Page)

    step("2,550 views of a page: 25 writes, and the rest waits in memory")
    views = store.counter(Page, "approximate_metrics.view_count")
    for _ in range(2550):
        views.add("home")
    show("pages", pages.find_one())
    assert 2500 == views.read("home")
    assert 2550 == views.read("home", exact=True)
    print(f"  still in memory: {views.pending()}")
    assert {"home": 50} == views.pending()

    step("Written after five minutes, at the end of the process, or now")
    views.flush()
    assert 2550 == only(pages, {"page_id": "home"})["approximate_metrics"]["view_count"]
    assert {} == views.pending()

    step("Likes must survive a crash: they go to a buffer in the database first")
    likes = store.counter(Page, "likes")
    for _ in range(30):
        likes.add("home")
    print(f"  in the buffer: {likes.pending()}, in the page: {likes.read('home')}")
    likes.flush()
    assert 30 == likes.read("home")

    step("Impressions are sampled: one in a hundred is written, and is worth a hundred")
    impressions = store.counter(Page, "impressions", random=random.Random(7).random)
    for _ in range(10_000):
        impressions.add("home")
    impressions.flush()
    stored = impressions.read("home")
    print(f"  10,000 impressions, stored {stored}")
    assert 8_000 < stored < 12_000

    step("The number belongs to its counter")
    try:
        store.update(Page, {"page_id": "home"}, {"$inc": {"approximate_metrics.view_count": 1}})
    except UsageError as error:
        print(f"  refused: {error}")
    else:
        raise AssertionError("the update went through")
    pages.update_one({"page_id": "home"}, {"$unset": {"likes": ""}})
    assert 1 == verified(store)
    store.repair()
    assert 0 == verified(store)
    likes.add("home", 30)
    likes.flush()
    show("pages", pages.find_one())


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
