"""Random histories of writes: every subset is the first few after each step."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from pydantic import BaseModel

from tests.engine.histories import POOL, Machine, Raw, first, ids, maybe_ids, play, simple
from treadle import Document, Id, Subset


class Comment(Document, collection="comments"):
    post_id: Id | None = None
    also: list[Id] = []
    likes: int | None = None
    day: int | None = None
    text: str | None = "t"
    state: str | None = None


class LikesCard(BaseModel):
    likes: int | None = None
    day: int | None = None
    text: str | None = None


class TextCard(BaseModel):
    text: str | None = None


class Post(Document, collection="posts"):
    title: str = "post"
    liked: Annotated[list[LikesCard], Subset(Comment, by="post_id", sort=["-likes", "day"], size=3)] = []
    texts: Annotated[list[TextCard], Subset(Comment, by="post_id", sort="-day", size=2)] = []
    opened: Annotated[
        list[LikesCard],
        Subset(
            Comment,
            by="post_id",
            sort=[("likes", 1)],
            size=2,
            where={"state": "open", "likes": {"$ne": None}},
        ),
    ] = []
    also: Annotated[list[LikesCard], Subset(Comment, by="also", sort=["day"], size=2)] = []


def expected_post(key: Any, comments: list[Raw]) -> Raw:
    mine = [each for each in comments if each.get("post_id") == key]
    opened = [each for each in mine if each.get("state") == "open" and each.get("likes") is not None]
    named = [each for each in comments if key in (each.get("also") or [])]
    card = ["likes", "day", "text"]
    return {
        "liked": first(mine, [("likes", -1), ("day", 1)], 3, card),
        "texts": first(mine, [("day", -1)], 2, ["text"]),
        "opened": first(opened, [("likes", 1)], 2, card),
        "also": first(named, [("day", 1)], 2, card),
    }


few = st.sampled_from([None, 0, 1, 1, 2])

comments = st.builds(
    dict,
    post_id=maybe_ids,
    also=st.lists(ids, max_size=2),
    likes=few,
    day=few,
    text=st.sampled_from(["t", None, "$day"]),
    state=st.sampled_from(["open", None]),
)


class SubsetMachine(Machine):
    """The first N, with several keys, ties, conditions and cards that lack the sort key."""

    models: ClassVar = [Post, Comment]

    def check(self) -> None:
        self.state = self.read()
        written = list(self.state["comments"].values())
        for key, post in self.state["posts"].items():
            expected = expected_post(key, written)
            assert expected == {name: simple(post[name]) for name in expected}

    @initialize()
    def begin(self):
        self.store.insert_many([Post(id=key) for key in POOL[:3]])
        for at, key in enumerate(POOL[:4]):
            self.store.insert(
                Comment(id=key, post_id=POOL[0], also=POOL[:2], likes=at // 2, day=at, state="open")
            )
            self.keep(Comment, key)

    @rule(chosen=st.sets(ids, min_size=1, max_size=3), many=st.booleans())
    def insert_posts(self, chosen, many):
        new = [Post(id=each) for each in sorted(chosen) if not self.has(Post, each)]
        if many:
            self.store.insert_many(new)
        else:
            for post in new:
                self.add(post)

    @rule(id=ids)
    def delete_post(self, id):
        self.store.delete(Post, id)

    @rule(id=ids, comment=comments)
    def insert_comment(self, id, comment):
        self.add(Comment(id=id, **comment))

    @rule(chosen=st.lists(comments, max_size=4))
    def insert_comments(self, chosen):
        self.store.insert_many([Comment(**each) for each in chosen])

    @rule(id=ids, value=few, post=maybe_ids, how=st.integers(0, 8))
    def update_comment(self, id, value, post, how):
        updates: list[Any] = [
            {"$set": {"day": value}},
            {"$set": {"likes": value}},
            {"$set": {"post_id": post}},
            {"$set": {"text": "edited"}},
            {"$unset": {"likes": "", "text": ""}},
            {"$set": {"state": "open"}},
            {"$set": {"state": None, "likes": value}},
            {"$push": {"also": post}} if post else {"$set": {"also": []}},
            [{"$set": {"day": {"$add": [{"$ifNull": ["$day", 0]}, 1]}}}],
        ]
        self.store.update(Comment, id, updates[how])

    @rule(old=maybe_ids, new=maybe_ids)
    def move_comments(self, old, new):
        self.store.update_many(Comment, {"post_id": old}, {"$set": {"post_id": new}})

    @rule(value=few)
    def like_all(self, value):
        self.store.update_many(Comment, {"likes": value}, [{"$set": {"likes": 1, "day": value}}])

    @rule(model=st.sampled_from([Comment, Post]), id=ids)
    def remember(self, model, id):
        self.keep(model, id)

    @rule(which=st.integers(0, 3), day=few, post=maybe_ids)
    def replace(self, which, day, post):
        self.replace_kept(Comment, which, day=day, post_id=post)
        self.replace_kept(Post, which, title="again")

    @rule(id=ids)
    def delete_comment(self, id):
        self.store.delete(Comment, id)

    @rule(post=maybe_ids)
    def delete_comments(self, post):
        self.store.delete_many(Comment, {"post_id": post, "likes": {"$gte": 1}})


@pytest.mark.heavy
def test_subsets_are_the_first_ones(run, database):
    play(SubsetMachine, run, database, examples=8)
