"""History: what an insurance policy said on the day of the accident.

The policy changes; each of its states stays, with the time for which it held.
The claim is settled by the policy of that day, not by that of today. Somebody
who writes past Treadle is found, and an error of last week is taken back as a
new state, not by rewriting what was.
"""

from __future__ import annotations

from examples.story import only, show, step, tell, verified

from treadle import Document, History, Store


class Policy(Document, collection="policies", history=History(collection="policies_history", keep=50)):
    id: str
    holder: str
    premium: int
    insured: list[str] = []


MODELS = [Policy]


def story(store: Store) -> None:
    store.setup()
    policies, rows = store.collection(Policy), store.database["policies_history"]

    step("A policy is sold, and changes twice")
    store.insert(Policy(id="P-1", holder="Michelle", premium=100, insured=["car"]))
    store.update(Policy, "P-1", {"$push": {"insured": "watch"}, "$set": {"premium": 130}})
    store.update(Policy, "P-1", {"$set": {"premium": 125}})
    show("policies", policies.find_one())
    show("policies_history", rows.find({}, {"_id": 0}).sort("revision"))
    assert [1, 2, 3] == [row["revision"] for row in rows.find().sort("revision")]
    assert 1 == rows.count_documents({"valid_to": None})

    step("What did it say on the day of the accident?")
    accident = only(rows, {"revision": 2})["valid_from"]
    then = store.at(Policy, "P-1", accident)
    assert then is not None
    print(f"  insured then: {', '.join(then.insured)}, for {then.premium}")
    assert (["car", "watch"], 130) == (then.insured, then.premium)

    step("Back to how it was")
    store.revert(Policy, "P-1", 2)
    assert [4, 3, 2, 1] == [state.revision for state in store.history(Policy, "P-1")]

    step("Somebody writes past Treadle")
    policies.update_one({"_id": "P-1"}, {"$set": {"premium": 1}})
    assert 1 == verified(store)
    assert 1 == store.repair()
    assert 0 == verified(store)
    assert 5 == next(iter(store.history(Policy, "P-1"))).revision


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
