"""Every feature alone and with every other, in every mode, against one oracle in plain Python.

`TREADLE_PAIRS` chooses: `some` (each feature alone, scheduled only where that changes
which documents count, and a fixed choice of pairs), `most` (every pair in mode write, a third of them in each other mode)
or `all`. A history depends on the name of its world alone, so that
`-k "<name of the world>"` plays a failure again; its steps are printed.
"""

from __future__ import annotations

import os

import pytest
from pymongo import MongoClient

from tests.world.known import REFUSED, allowed, demanded, refusal, worlds
from tests.world.models import SIDES, World, build, write_versions
from tests.world.play import Play
from treadle import DeclarationError, Store

WORLDS = worlds(os.environ.get("TREADLE_PAIRS", "some"))


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.label)
def test_a_world(world: World, database, caplog):
    caplog.set_level("CRITICAL", "treadle")
    play = Play(world, database)
    play.play()
    steps = "\n".join(play.log)
    expected = allowed(world)
    wrong = {value: details[:3] for value, details in play.failures.items() if value not in expected}
    assert {} == wrong, f"{world.label}; the steps were:\n{steps}"
    right = {value: name for value, name in demanded(world).items() if value not in play.failures}
    assert {} == right, f"{world.label} is right about these: remove the entry in tests/world/known.py"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("one", "other", "code"), REFUSED, ids=lambda each: each)
def test_a_pair_that_cannot_work_is_refused(side, one, other, code):
    """When the Store is made, which asks the server nothing."""
    world = World(frozenset({f"{side}.{one}", f"{side}.{other}"}), "write")
    assert code == refusal(world)
    models = build(world)
    with MongoClient("localhost:1", connect=False) as client, pytest.raises(DeclarationError) as raised:
        Store(client["refused"], models.all, write_versions=write_versions(world, models))
    assert code == raised.value.code


def test_the_choice_is_small_enough():
    some, most, every = (worlds(tier) for tier in ("some", "most", "all"))
    assert len(some) <= 130
    assert {world.label for world in some} <= {world.label for world in every}
    assert {world.label for world in most} <= {world.label for world in every}
    assert len(every) == len({world.label for world in every})
