"""Embed or reference: the decision, its path and its factors."""

from __future__ import annotations

from typing import Any

import pytest

from treadle import UsageError
from treadle.advisor import Relationship, decide, scan


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (Relationship(children_max=3), "embed"),
        (Relationship(children_max=49), "embed"),
        (Relationship(children_max=50), "reference"),
        (Relationship(children_max=500, read_together=True), "embed"),
        (Relationship(children_max=500, atomic=True), "embed"),
        (Relationship(children_max=500, read_together=False), "reference"),
        (Relationship(children_max=20_000, read_together=False), "reference-from-child"),
        (Relationship(children_max=2_000_000, read_together=True, atomic=True), "reference-from-child"),
        (Relationship(children_max=500, child_bytes=100_000, read_together=True), "reference-from-child"),
        (Relationship(children_max=40, child_bytes=1_000_000), "reference-from-child"),
        (Relationship(children_max=5, many_to_many=True), "arrays-of-ids"),
    ],
)
def test_the_choice(given: Relationship, choice: str) -> None:
    assert choice == decide(given).choice


def test_the_path_ends_with_the_question_that_decided() -> None:
    found = decide(Relationship(children_max=500, read_together=True))
    assert ("Are children always read together with their parent?", "yes") == (
        found.path[-1].question,
        found.path[-1].answer,
    )
    assert "Does a child belong to several parents?" == found.path[0].question
    assert "Embed the children in the parent." == found.advice


def test_what_is_not_known_is_said() -> None:
    assert "not known" == decide(Relationship(children_max=500)).path[-1].answer


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Relationship(5, children_change_often=True), "change often"),
        (Relationship(5, grows=True), "Outlier"),
        (Relationship(500, grows=True), "Subset"),
        (Relationship(500, read_together=True), "16 MB"),
        (Relationship(3000, children_typical=4), "hundred times"),
        (Relationship(2_000_000, atomic=True), "transaction"),
        (Relationship(2_000_000, read_together=True), "Extended Reference"),
        (Relationship(5, referred_to_by_others=True), "Others refer"),
        (Relationship(500), "Computed"),
    ],
)
def test_factors(given: Relationship, words: str) -> None:
    assert any(words in factor for factor in decide(given).factors)


def test_numbers_that_cannot_be_are_refused() -> None:
    for bad in ({"children_max": -1}, {"children_max": 3, "children_typical": 4}):
        with pytest.raises(UsageError) as caught:
            Relationship(**bad)
        assert "relationship-invalid" == caught.value.code


def test_measured_relations_are_decided(database: Any) -> None:
    database["orders"].insert_many([{"_id": number} for number in range(40)])
    database["lines"].insert_many(
        [{"_id": number, "order_id": number % 40, "amount": 1} for number in range(120)]
    )
    database["visits"].insert_many([{"_id": number, "order_id": number % 2} for number in range(3_000)])
    found = {relation.child: decision for relation, decision in scan(database).decisions}
    assert "embed" == found["lines"].choice
    assert "reference-from-child" == found["visits"].choice
    assert "at most 3" == found["lines"].path[-1].answer
