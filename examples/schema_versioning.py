"""Schema Versioning: phone numbers in two versions, side by side in one collection.

Years ago a person had a home and a work number. Now there is a list of ways to
reach somebody. Old documents stay as they are until they are touched or moved
in the background, and nobody waits for that.
"""

from __future__ import annotations

from typing import Any

from examples.story import show, step, tell, verified

from treadle import Document, Store, migration


class Person(Document, collection="people", version=2):
    id: int
    name: str
    contact_method: list[dict[str, str]] = []
    logins: int = 0


@migration(Person, from_version=1)
def list_the_numbers(document: dict[str, Any]) -> dict[str, Any]:
    names = ("home", "work", "mobile")
    document["contact_method"] = [{name: document.pop(name)} for name in names if name in document]
    return document


@list_the_numbers.down
def spread_the_numbers(document: dict[str, Any]) -> dict[str, Any]:
    for method in document.pop("contact_method"):
        document.update(method)
    return document


MODELS = [Person]


def story(store: Store) -> None:
    step("What the old release left: no version, numbers in fields of their own")
    people = store.collection(Person)
    people.insert_many(
        [
            {"_id": 1, "name": "Anakin Skywalker", "home": "503-555-0000", "work": "503-555-0010"},
            {"_id": 2, "name": "Darth Vader", "work": "503-555-0100", "logins": 7},
            {"_id": 3, "name": "Padmé Amidala", "mobile": "503-555-0200"},
        ]
    )
    # The collection is in use: without this its validator would only warn.
    store.setup(validation="enforce")

    step("The new release writes its own version and reads both")
    store.insert(
        Person(id=4, name="Luke Skywalker", contact_method=[{"skype": "luke"}, {"work": "503-555-0210"}])
    )
    for person in store.find(Person, sort="_id"):
        print(f"  {person.name}: {person.contact_method}")
    assert [{"home": "503-555-0000"}, {"work": "503-555-0010"}] == store.require(Person, 1).contact_method
    show("people, as they are stored", people.find())
    assert {1: 3, 2: 1} == store.migration_status(Person)

    step("An update brings its document up to date, and only that one")
    store.update(Person, 3, {"$inc": {"logins": 1}})
    assert 1 == store.require(Person, 3).logins
    show("people", people.find_one({"_id": 3}))
    assert {1: 2, 2: 2} == store.migration_status(Person)

    step("A filter speaks of what is stored, so until all are moved ask for both versions")
    either = {"$or": [{"contact_method.work": "503-555-0100"}, {"work": "503-555-0100"}]}
    assert [2] == [person.id for person in store.find(Person, either)]

    step("The rest moves in the background; a document that cannot is set aside")
    people.insert_one({"_id": 5, "name": "R2-D2", "work": {"beep": True}})
    moved = store.migrate(Person)
    for failure in store.migration_failures(Person):
        print(f"  set aside: _id {failure.document_id}, {failure.reason}")
    print(f"  {moved.migrated} migrated; by version: {store.migration_status(Person)}")
    assert {1: 1, 2: 4} == store.migration_status(Person)

    step("Once it is corrected, it moves as well")
    people.update_one({"_id": 5}, {"$set": {"work": "503-555-0042"}})
    store.migrate(Person, retry=True)
    assert {2: 5} == store.migration_status(Person)

    step("The release is withdrawn: everything goes back, and forward again later")
    store.migrate(Person, to=1)
    show("people", people.find_one({"_id": 1}))
    assert {1: 5} == store.migration_status(Person)
    store.migrate(Person)
    assert 0 == verified(store)
    show("people", people.find())


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
