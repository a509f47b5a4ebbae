"""Migrations that cannot work are refused when the Store is made."""

from __future__ import annotations

import pytest

from tests.patterns.schema_versioning.users import split_phone
from treadle import Document, UsageError, migration
from treadle.graph.watched import Watched


def test_code_in_a_pipeline_is_refused():
    class Some(Document, collection="some", version=2): ...

    with pytest.raises(UsageError, match="function"):
        migration(Some, 1, up=[{"$set": {"a": {"$function": {"body": "x", "args": [], "lang": "js"}}}}])


def test_a_function_may_be_called_as_it_is():
    assert {"phones": ["1"]} == split_phone({"phone": "1"})


@pytest.mark.parametrize(
    "look",
    [
        dict,
        list,
        len,
        lambda document: {**document},
        lambda document: document | {},
        lambda document: {} | document,
        lambda document: document.copy(),
        lambda document: list(document.items()),
        sorted,
        lambda document: document == {},
        repr,
        bool,
        lambda document: __import__("copy").deepcopy(document),
        lambda document: __import__("copy").copy(document),
        lambda document: __import__("pickle").dumps(document),
        lambda document: __import__("json").dumps(document),
    ],
)
def test_whatever_looks_at_the_whole_has_read_all(look):
    watched = Watched({"a": 1, "b": 2})
    look(watched)
    assert watched.read is None


def test_single_looks_are_noted():
    watched = Watched({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5})
    _ = watched["a"], watched.get("b"), "x" in watched, watched.pop("c"), watched.setdefault("y", 1)
    watched["d"] = 5
    del watched["e"]
    assert {"a", "b", "x", "c", "y", "d", "e"} == watched.read
    watched.update(z=1)
    watched |= {"w": 1}
    assert {"z", "w"} <= watched.read
