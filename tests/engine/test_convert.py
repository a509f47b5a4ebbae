"""The write that stores a converted document."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from treadle.engine.convert import Converted, guarded_write


def test_asking_for_the_write_twice_gives_the_same_write():
    """It compares what the conversion rests on, and leaves the conversion as it is."""
    lineage: Any = SimpleNamespace(field="schema_version")
    before = {"_id": 1, "name": "a b", "schema_version": 1}
    after = {"_id": 1, "first": "a", "schema_version": 2}
    converted = Converted(lineage, before, after, {"name"})
    first = guarded_write(converted)
    assert {"name"} == converted.read
    assert first == guarded_write(converted)
