"""Outlier: followers are embedded in the user, except where there are far too many of them.

Most users have a handful of followers, and one read shows all. The celebrity's
array goes on in pages of its own, and a flag says so. Nobody who asks needs to
know which of the two it is.
"""

from __future__ import annotations

from typing import Annotated

from examples.story import only, show, step, tell, verified

from treadle import Document, Outlier, Store


class User(Document, collection="users"):
    id: str
    name: str
    followers: Annotated[
        list[str], Outlier(limit=50, overflow="follower_overflow", page_size=1000, unique=True)
    ] = []
    follower_count: int = 0
    has_overflow: bool = False


MODELS = [User]

FANS = [f"user{number:04}" for number in range(2500)]


def story(store: Store) -> None:
    store.setup()
    users, overflow = store.collection(User), store.database["follower_overflow"]

    step("An ordinary user: everything is in one document")
    store.insert(User(id="ann", name="Ann", followers=["ben", "cleo"]))
    assert store.array(User, "followers", "ann").append("dan")
    show("users", users.find_one({"_id": "ann"}))
    assert 0 == overflow.count_documents({})

    step("A celebrity: 2,500 followers, then one of them again")
    store.insert(User(id="star", name="The Star"))
    followers = store.array(User, "followers", "star")
    assert 2500 == followers.extend(FANS)
    assert not followers.append("user2499"), "she follows already"
    show(
        "users, and the pages of the rest (two followers each shown)",
        [
            users.find_one({"_id": "star"}, {"followers": {"$slice": 2}, "_treadle": 0}),
            *overflow.find({}, {"_id": 0, "followers": {"$slice": 2}}).sort("page"),
        ],
    )
    raw = only(users, {"_id": "star"})
    assert (50, 2500, True) == (len(raw["followers"]), raw["follower_count"], raw["has_overflow"])

    step("The same questions, whichever it is")
    for name in ("ann", "star"):
        array = store.array(User, "followers", name)
        print(f"  {name}: {array.count()} followers, the first page is {array.page(1, 3)}")
    assert FANS[1000:1100] == followers.page(11, 100)
    assert followers.contains("user2400")
    assert FANS == list(followers)

    step("Thirty of the first followers leave; a rebuild fills the document from the pages, in order")
    assert 30 == sum(followers.remove(fan) for fan in FANS[:30])
    assert 20 == len(only(users, {"_id": "star"})["followers"])
    store.rebuild(User)
    raw = only(users, {"_id": "star"})
    print(f"  embedded {len(raw['followers'])}, in all {raw['follower_count']}")
    assert FANS[30:] == list(followers)
    assert 50 == len(raw["followers"])

    step("Somebody pushes sixty followers to Ann's array, past the handle")
    users.update_one({"_id": "ann"}, {"$push": {"followers": {"$each": FANS[:60]}}})
    assert 2 == verified(store)
    store.repair()
    assert 0 == verified(store)
    raw = only(users, {"_id": "ann"})
    assert (50, 63, True) == (len(raw["followers"]), raw["follower_count"], raw["has_overflow"])

    step("They leave again: nothing is in pages any more, and the flag is cleared")
    for fan in FANS[:60]:
        store.array(User, "followers", "ann").remove(fan)
    show("users", users.find_one({"_id": "ann"}))
    assert (3, False) == (store.require(User, "ann").follower_count, store.require(User, "ann").has_overflow)
    assert 0 == overflow.count_documents({"user_id": "ann"})


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
