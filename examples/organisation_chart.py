"""An organisation chart: who reports to whom, up to the top, with one read.

`reports_to` holds all superiors, the highest first, so the whole chain of one
person is in the document, and everybody below somebody is one indexed query.
"""

from __future__ import annotations

from typing import Annotated

from examples.story import show, step, tell, verified

from treadle import AncestorArray, Count, DataError, Document, ExtendedReference, Store, UsageError


class Employee(
    Document,
    collection="employees",
    tree=AncestorArray(parent="manager_id", ancestors="reports_to"),
):
    id: int
    name: str
    role: str
    manager_id: int | None = None
    manager: Annotated[str | None, ExtendedReference("Employee", by="manager_id", field="name")] = None
    reports_to: list[int] = []
    direct_reports: Annotated[int, Count("Employee", by="manager_id")] = 0


MODELS = [Employee]

STAFF = [
    (1, "Mary", "CEO", None),
    (2, "Omar", "head of engineering", 1),
    (3, "Nina", "head of sales", 1),
    (4, "Ivo", "database lead", 2),
    (5, "Lea", "developer", 4),
    (6, "Tom", "developer", 4),
    (7, "Ute", "seller", 3),
]


def story(store: Store) -> None:
    store.setup()
    tree = store.tree(Employee)

    step("The chart is loaded in one call, in any order")
    store.insert_many(
        [Employee(id=id, name=name, role=role, manager_id=boss) for id, name, role, boss in reversed(STAFF)]
    )
    show("employees", store.collection(Employee).find({}, {"_treadle": 0}).sort("_id"))

    step("Questions")
    print("  Lea's chain:", " > ".join(person.name for person in tree.path(5)))
    print("  below Omar:", ", ".join(person.name for person in tree.descendants(2, sort="name")))
    assert [1, 2, 4] == store.require(Employee, 5).reports_to
    assert ["Ivo", "Lea", "Tom"] == [person.name for person in tree.descendants(2, sort="name")]
    assert 2 == store.require(Employee, 4).direct_reports

    step("The database team moves to sales, and its lead takes another name")
    tree.move(4, 3)
    store.update(Employee, 4, {"$set": {"name": "Ivo Berg"}})
    lea = store.require(Employee, 5)
    assert ([1, 3, 4], "Ivo Berg") == (lea.reports_to, lea.manager)
    assert [0, 2] == [store.require(Employee, id).direct_reports for id in (2, 3)]

    step("Nobody can be put below somebody who reports to them; nobody leaves a team behind")
    for work in (lambda: tree.move(3, 5), lambda: tree.remove(4)):
        try:
            work()
        except (UsageError, DataError) as error:
            print(f"  refused: {error}")
        else:
            raise AssertionError("that was allowed")
    tree.remove(4, children="lift")
    assert [1, 3] == store.require(Employee, 5).reports_to

    step("Somebody edits the chart in mongosh")
    store.collection(Employee).update_one({"_id": 7}, {"$set": {"reports_to": [1], "manager": "Nobody"}})
    assert 2 == verified(store)
    store.repair()
    assert 0 == verified(store)


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
