"""A flat copy of a list follows its source like any other."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from treadle import Document, ExtendedReference, Id


class Work(Document, collection="works"):
    tags: list[str] = []
    numbers: set[int] = set()


class Line(BaseModel):
    work_id: Id
    tags: Annotated[list[str], ExtendedReference(Work, by="work_id", field="tags")] = []


class Use(Document, collection="uses"):
    work_id: Id
    tags: Annotated[list[str] | None, ExtendedReference(Work, by="work_id", field="tags")] = None
    first: Annotated[list[str], ExtendedReference(Work, by="work_id", field="tags", policy="snapshot")] = []
    numbers: Annotated[set[int] | None, ExtendedReference(Work, by="work_id", field="numbers")] = None
    lines: list[Line] = []


def test_a_flat_copy_of_a_list(run, database):
    store = run.store([Work, Use])
    store.setup()
    work = store.insert(Work(tags=["a", "b"], numbers={1, 2}))
    use = store.insert(Use(work_id=work.id, lines=[Line(work_id=work.id)]))
    assert (["a", "b"], ["a", "b"], {1, 2}) == (use.tags, use.first, use.numbers)
    store.update(Work, work.id, {"$push": {"tags": "c"}})
    use = store.get(Use, use.id)
    assert (["a", "b", "c"], ["a", "b"], ["a", "b", "c"]) == (use.tags, use.first, use.lines[0].tags)
    assert [] == store.verify()
    database["uses"].update_one({}, {"$set": {"tags": ["c", "b", "a"]}})
    assert ["tags"] == [each.path for each in store.verify()]
    assert 1 == store.repair()
    store.update(Work, work.id, {"$set": {"tags": []}})
    assert [] == store.get(Use, use.id).tags
