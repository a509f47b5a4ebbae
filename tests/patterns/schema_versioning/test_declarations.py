"""Migrations that cannot work are refused when the Store is made."""

from __future__ import annotations

import pytest

from tests.patterns.schema_versioning.users import split_phone
from treadle import Document, UsageError, migration


def test_code_in_a_pipeline_is_refused():
    class Some(Document, collection="some", version=2): ...

    with pytest.raises(UsageError, match="function"):
        migration(Some, 1, up=[{"$set": {"a": {"$function": {"body": "x", "args": [], "lang": "js"}}}}])


def test_a_function_may_be_called_as_it_is():
    assert {"phones": ["1"]} == split_phone({"phone": "1"})
