"""Links: students, courses and teachers in one collection, each found with all that belongs to it.

A link is written at one end, and is there from both. When somebody leaves, the
links go too. One query gives a course with its students and its teacher, each
as what it is.
"""

from __future__ import annotations

from examples.story import show, step, tell, verified

from treadle import Document, Links, Store


class Node(Document, collection="school", discriminator="type", links=Links("links")):
    id: str
    name: str
    links: list[str] = []


class Course(Node, kind="course"):
    room: str = ""


class Student(Node, kind="student"):
    year: int = 1


class Teacher(Node, kind="teacher"):
    subject: str = ""


MODELS = [Node, Course, Student, Teacher]


def story(store: Store) -> None:
    store.setup()
    school = store.collection(Node)

    step("Two courses, a teacher, three students")
    store.insert_many([Course(id="weaving", name="Weaving", room="12"), Course(id="dyeing", name="Dyeing")])
    store.insert(Teacher(id="noor", name="Noor", subject="textiles", links=["weaving", "dyeing"]))
    store.insert_many(
        [
            Student(id="ada", name="Ada", links=["weaving"]),
            Student(id="ben", name="Ben", links=["weaving", "dyeing"]),
            Student(id="cleo", name="Cleo", year=2),
        ]
    )
    show("school", school.find_one({"_id": "weaving"}, {"_treadle": 0}))
    assert {"noor", "ada", "ben"} == set(store.require(Course, "weaving").links)

    step("A course with all that belongs to it, in one query")
    for each in store.related(Course, "weaving", sort="_id"):
        print(f"  {type(each).__name__}: {each.name}")
    kinds = {each.id: type(each).__name__ for each in store.related(Course, "weaving")}
    assert {"weaving": "Course", "noor": "Teacher", "ada": "Student", "ben": "Student"} == kinds

    step("Cleo joins from the course's end, Ben leaves")
    store.update(Course, "weaving", {"$push": {"links": "cleo"}})
    store.delete(Student, "ben")
    assert ["weaving"] == store.require(Student, "cleo").links
    assert {"noor", "ada", "cleo"} == set(store.require(Course, "weaving").links)
    assert ["noor"] == store.require(Course, "dyeing").links

    step("Somebody writes one end only")
    school.update_one({"_id": "cleo"}, {"$push": {"links": "dyeing"}})
    assert 1 == verified(store)
    assert 1 == store.repair()
    assert 0 == verified(store)
    assert {"noor", "cleo"} == set(store.require(Course, "dyeing").links)


if __name__ == "__main__":
    raise SystemExit(tell(story, MODELS))
