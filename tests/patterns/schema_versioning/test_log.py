"""The log of migrations: also of runs that were stopped, and of those that failed."""

from __future__ import annotations

import pytest

from treadle import Document, Limits, Store, migration


class Logged(Document, collection="logged", version=2):
    name: str


@migration(Logged, from_version=1)
def rename(document):
    document["name"] = document.pop("title")
    return document


def test_each_run_is_logged_with_how_it_ended(database):
    store = Store(database, [Logged], limits=Limits(migrations_kept=2))
    store.setup()
    assert [] == store.migration_log()
    database.logged.insert_many([{"title": "a"}, {"title": "b"}])
    store.migrate(Logged, dry_run=True)
    assert [] == store.migration_log()
    store.migrate(Logged, stop=lambda: True)

    def fail(progress):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.migrate(Logged, progress=fail)
    failed, stopped = store.migration_log(Logged)
    assert ("stopped", 0, 2, {1: 2}) == (stopped.outcome, stopped.migrated, stopped.remaining, stopped.found)
    assert ("ZeroDivisionError", 2) == (failed.outcome, failed.migrated)
    assert failed.seconds is not None
    store.migrate(Logged)
    # The oldest is forgotten.
    assert ["done", "ZeroDivisionError"] == [each.outcome for each in store.migration_log()]
