"""Calls that are cancelled at random moments: nothing is left half done, and nothing stays locked."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Annotated, Any

from pydantic import BaseModel
from pymongo import AsyncMongoClient

from tests.fuzz import rounds
from treadle import AsyncStore, Count, Document, ExtendedReference, Id, Sum


class Author(Document, collection="authors"):
    name: str


class Card(BaseModel):
    name: str


class Post(Document, collection="posts"):
    blog_id: Id
    author_id: Id
    likes: int = 1
    author: Annotated[Card | None, ExtendedReference(Author, by="author_id")] = None


class Blog(Document, collection="blogs"):
    posts: Annotated[int, Count(Post, by="blog_id")] = 0
    likes: Annotated[int, Sum(Post, "likes", by="blog_id")] = 0


def call(store: AsyncStore, chance: random.Random, blogs: list[Any], authors: list[Any]) -> Any:
    blog, author = chance.choice(blogs), chance.choice(authors)
    return chance.choice(
        [
            lambda: store.insert(Post(blog_id=blog.id, author_id=author.id)),
            lambda: store.insert_many([Post(blog_id=blog.id, author_id=author.id) for _ in range(5)]),
            lambda: store.update(Author, author.id, {"$set": {"name": f"name {chance.random()}"}}),
            lambda: store.update_many(Post, {"blog_id": blog.id}, {"$inc": {"likes": 1}}),
            lambda: store.delete(Post, {"blog_id": blog.id}),
            lambda: store.repair(Blog),
        ]
    )()


async def cancelled(store: AsyncStore, chance: random.Random, blogs: list[Any], authors: list[Any]) -> None:
    tasks = [asyncio.ensure_future(call(store, chance, blogs, authors)) for _ in range(4)]
    await asyncio.sleep(chance.random() * 0.03)
    for task in tasks:
        if chance.random() < 0.7:
            task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)


def test_what_is_cancelled_leaves_nothing_behind(server, database):
    async def scenario() -> None:
        async with AsyncMongoClient(server.uri) as client:
            store = AsyncStore(client[database.name], [Author, Post, Blog])
            await store.setup()
            blogs = await store.insert_many([Blog() for _ in range(2)])
            authors = await store.insert_many([Author(name="a") for _ in range(2)])
            for chance in rounds(30):
                await cancelled(store, chance, blogs, authors)
            await store.recover()
            assert [] == await store.verify()
            # Whoever comes next waits for nobody.
            await asyncio.wait_for(store.insert(Post(blog_id=blogs[0].id, author_id=authors[0].id)), 30)

    asyncio.run(scenario())
