"""Documents: ids, class keywords, inheritance.

Covers: model/keywords
"""

from __future__ import annotations

from bson import ObjectId
from pydantic import BaseModel

from treadle import Document, Id


class Thing(Document, collection="things"):
    n: int = 0


def test_a_document_has_an_object_id_from_the_start():
    thing = Thing()
    assert isinstance(thing.id, ObjectId)
    assert thing.id == thing.id
    assert Thing().id != thing.id


def test_an_id_can_be_given_as_text():
    class Reference(BaseModel):
        thing_id: Id

    identity = ObjectId()
    assert identity == Thing(id=str(identity)).id
    assert identity == Reference.model_validate_json(f'{{"thing_id": "{identity}"}}').thing_id
    assert f'{{"thing_id":"{identity}"}}' == Reference(thing_id=identity).model_dump_json()


def test_keywords_are_inherited():
    class Base(Document, naming="camel", validation="strict"):
        first_name: str

    class Child(Base, collection="children"):
        last_name: str

    assert ("children", "camel", "strict") == (
        Child.__treadle__.collection, Child.__treadle__.naming, Child.__treadle__.validation,
    )  # fmt: skip
    child = Child(first_name="a", last_name="b")
    assert child == Child.model_validate({"_id": child.id, "firstName": "a", "lastName": "b"})


def test_a_document_works_with_future_annotations_and_own_methods():
    class Named(Document, collection="named"):
        name: str

        def shout(self) -> str:
            return self.name.upper()

    assert "A" == Named(name="a").shout()
    assert Named.model_json_schema()["properties"].keys() >= {"name"}
