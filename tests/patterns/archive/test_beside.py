"""Archives beside other patterns, and the other words of `find`.

Covers: patterns/archive/layout
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

import pytest

from tests.patterns.archive.models import NOW, OLD, YEAR, Letter
from treadle import Archive, Attributes, Document, History, Limits, Store, UsageError
from treadle.engine.document_layout import layout_of
from treadle.graph.write import Selector
from treadle.patterns.archive import moves


class Tool(
    Document,
    collection="tools",
    archive=Archive(by="date", after=YEAR, into="old_tools"),
    soft_delete="deleted_at",
):
    id: int
    weight: int = 1
    specs: Annotated[dict[str, int], Attributes()] = {}
    date: dt.datetime
    deleted_at: dt.datetime | None = None


def test_what_is_archived_is_found_by_the_indexes_of_its_patterns(run, database):
    store = run.store([Tool])
    store.setup()
    store.insert_many([Tool(id=key, specs={"size": key}, date=OLD) for key in range(20)])
    assert 20 == store.archive(Tool, now=NOW)
    assert [7] == [each.id for each in store.find(Tool, {"specs.size": 7}, archived=True)]
    sent = {"specs": {"$elemMatch": {"k": "size", "v": 7}}}
    assert "COLLSCAN" not in str(database["old_tools"].find(sent).explain()["queryPlanner"]["winningPlan"])
    assert [] == store.setup()


def test_find_in_both_places_takes_the_other_words_of_find(run, database):
    """Deleted documents are not archived; documents that do not fit are passed over."""
    store = run.store([Tool])
    store.setup()
    store.insert_many([Tool(id=key, date=OLD) for key in range(3)])
    store.delete(Tool, 2)
    store.archive(Tool, now=NOW)
    with pytest.raises(UsageError, match="not both") as refused:
        store.find(Tool, archived=True, deleted=True)
    assert "filter-invalid" == refused.value.code
    assert [2] == [each.id for each in store.find(Tool, deleted=True)]
    database["old_tools"].update_one({"_id": 0}, {"$set": {"weight": "heavy"}})
    found = store.find(Tool, archived=True, sort="_id", invalid="skip")
    assert ([1], 1) == ([each.id for each in found], len(found.invalid))


def test_archived_documents_do_not_hide_rows_whose_document_is_gone(database, constants):
    body = {"__annotations__": {"id": int, "date": dt.datetime}, "__module__": __name__}
    words = {"collection": "papers", "history": History()}
    archive = Archive(by="date", after=YEAR, into="old_papers")
    paper: Any = type(Document)("Paper", (Document,), body, archive=archive, **words)
    constants(history_disorder_max=2)
    store = Store(database, [paper], limits=Limits(verify_page=2))
    store.setup()
    store.insert_many([paper(id=key, date=OLD) for key in range(6)])
    store.insert(paper(id=9, date=NOW))
    store.archive(paper, now=NOW)
    assert [] == store.verify()
    database["papers"].delete_one({"_id": 9})
    assert [9] == [each.document_id for each in store.verify()]
    store.repair()
    assert [] == store.verify()


def test_large_documents_move_in_smaller_chunks(heard, database):
    other, listener = heard
    store = Store(other, [Tool], limits=Limits(archive_chunk=10, archive_chunk_bytes=3_000))
    store.setup()
    large = {f"name{number}": number for number in range(40)}
    store.insert_many([Tool(id=key, specs=large, date=OLD) for key in range(4)])
    listener.clear()
    assert 4 == store.archive(Tool, now=NOW)
    sizes = [len(command["documents"]) for name, command in listener.commands if name == "insert"]
    assert [2, 2] == sizes
    # It does not look at all of them again for the two that move.
    finds = [command for name, command in listener.commands if name == "find" and "sort" in command]
    assert [10, 4, 8] == [each["limit"] for each in finds if each["find"] == "tools"]
    store.insert(Tool(id=9, specs={f"{name}{name}{name}": 1 for name in large} | large, date=OLD))
    assert 1 == store.archive(Tool, now=NOW)


def test_a_write_finds_a_document_that_moves_while_it_looks_for_it(database, monkeypatch):
    store, other = Store(database, [Letter]), Store(database, [Letter])
    store.setup()
    store.insert(Letter(id=1, number="1", date=OLD.date()))
    other.recover()
    racing, find_one = [lambda: other.archive(Letter, now=NOW)], moves.find_one

    def look(collection, *rest):
        # Between the look into the archive and the one into the collection itself.
        while collection == "letters" and racing:
            assert 1 == racing.pop()()
        return find_one(collection, *rest)

    monkeypatch.setattr(moves, "find_one", look)
    layout = layout_of(store.graph.entry(Letter), store.write_path)
    assert store.runner.run(layout.bring_back(Selector(layout.entry, {"_id": 1})))
    assert [] == racing
    assert "read" == store.update(Letter, 1, {"$set": {"text": "read"}}).text
