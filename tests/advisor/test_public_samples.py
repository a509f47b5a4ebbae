"""Of databases shaped like public samples, everything that is so is said, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.advisor import public_later, public_records, public_samples, public_tables
from tests.advisor.public_samples import SAMPLES
from tests.advisor.test_rules import compiled
from tests.kit.tiers import IS_FULL
from treadle import Store
from treadle.advisor import Finding, scan
from treadle.advisor.html import html

MODULES = (public_samples, public_tables, public_records, public_later)
# What is kept by hand, and so is compared with what it should be: what the evidence calls those that are not.
WRONG = {"extended-reference": "stale", "computed": "drifted"}


def wrong(finding: Finding) -> int | None:
    """How many values are not what they should be; an average that is rounded never is."""
    name = WRONG.get(finding.code, "")
    number = finding.evidence.get(name)
    return None if number is None or "Average(" in finding.declaration else int(number)


def telling_values(database: Any) -> list[str]:
    """Texts of the first documents that no name of a field or a collection could be."""
    first = (database[each].find_one({}, {"_id": 0}) for each in database.list_collection_names())
    values = [
        value for each in first if each is not None for value in each.values() if isinstance(value, str)
    ]
    return [each for each in values if len(each) > 7 and not each.isidentifier()]


@pytest.mark.parametrize("name", list(SAMPLES)[:: 1 if IS_FULL else 2])
def test_what_is_so_is_said_and_nothing_else(name: str, database: Any) -> None:
    sample = SAMPLES[name]
    sample.fill(database)
    report = scan(database)
    assert () == report.failures
    relations = {f"{each.child}.{each.path} -> {each.parent}.{each.key}" for each in report.scan.relations}
    assert sample.relations == relations
    found = {
        (each.code, each.where): each
        for each in report.findings
        if (each.code, each.where) not in sample.tolerated and each.code != "no-validation"
    }
    assert set(sample.findings) == set(found)
    for place, evidence in sample.findings.items():
        assert evidence == {what: found[place].evidence.get(what) for what in evidence}
    text = json.dumps(report.as_json()) + html(report)
    assert [] == [value for value in telling_values(database) if value in text]
    for each in report.findings:
        if each not in found.values():
            Store(database, models=compiled(each.declaration)).setup(dry_run=True)
            continue
        with Store(database, models=compiled(each.declaration)) as store:
            store.setup()
            differences = [one for one in store.verify() if one.pattern == each.code]
        if wrong(each) is not None:
            assert wrong(each) == len(differences)
