"""Frozen values behave as the frozen dataclasses with slots that they stand for."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import pytest

from treadle.values import frozen


def _classes(make: Any, make_named: Any) -> list[type[Any]]:
    @make
    class Place:
        """Where."""

        name: str
        tags: list[str] = field(default_factory=list, hash=False)
        note: str = field(default="", compare=False, repr=False)
        length: int = field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", len(self.name))

    @make
    class Inner(Place):
        depth: int = 1

    @make_named
    class Named:
        one: int
        two: int = 2

    @make
    class Empty: ...

    return [Place, Inner, Named, Empty]


OURS = _classes(frozen, frozen(kw_only=True))
THEIRS = _classes(dataclass(frozen=True, slots=True), dataclass(frozen=True, slots=True, kw_only=True))
CALLS: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = [
    (0, ("a",), {}),
    (0, ("a", ["x"], "note"), {}),
    (0, ("a",), {"note": "other"}),
    (0, ("b",), {}),
    (1, ("a", ["x"], "", 3), {}),
    (1, ("a",), {"depth": 1}),
    (2, (), {"one": 1}),
    (2, (), {"one": 1, "two": 2}),
    (2, (), {"two": 3, "one": 1}),
    (3, (), {}),
    (3, (), {}),
]
WRONG: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = [
    (0, (), {}),
    (0, ("a", [], "", 4), {}),
    (0, ("a",), {"what": 1}),
    (2, (1,), {}),
    (3, (1,), {}),
]


def test_they_compare_hash_and_show_like_dataclasses() -> None:
    ours, theirs = ([kinds[at](*given, **named) for at, given, named in CALLS] for kinds in (OURS, THEIRS))
    assert [repr(each) for each in theirs] == [repr(each) for each in ours]
    assert [dataclasses.asdict(each) for each in theirs] == [dataclasses.asdict(each) for each in ours]
    for one in range(len(CALLS)):
        for two in range(len(CALLS)):
            assert (theirs[one] == theirs[two]) == (ours[one] == ours[two])
            if ours[one] == ours[two]:
                assert hash(ours[one]) == hash(ours[two])
    assert ours[0] != theirs[0]
    assert len(set(theirs)) == len(set(ours))


@pytest.mark.parametrize(("at", "given", "named"), WRONG)
def test_they_refuse_the_same_arguments(at: int, given: Any, named: Any) -> None:
    for kinds in (OURS, THEIRS):
        with pytest.raises(TypeError):
            kinds[at](*given, **named)


def test_they_are_frozen_and_have_no_room_for_more() -> None:
    place = OURS[0]("a")
    with pytest.raises(FrozenInstanceError):
        place.name = "b"
    with pytest.raises(FrozenInstanceError):
        del place.name
    with pytest.raises(FrozenInstanceError):
        place.other = 1
    assert not hasattr(place, "__dict__")


def test_copies_and_replacements_are_values_too() -> None:
    place = OURS[1]("a", ["x"], depth=4)
    for same in (copy.copy(place), copy.deepcopy(place), dataclasses.replace(place)):
        assert (place, repr(place)) == (same, repr(same))
    other = dataclasses.replace(place, name="longer")
    assert ("longer", 6, 4) == (other.name, other.length, other.depth)
    assert copy.deepcopy(place).tags is not place.tags


@frozen
class Pickled:
    one: int
    two: str = "x"


def test_they_can_be_pickled() -> None:
    assert Pickled(1, "y") == pickle.loads(pickle.dumps(Pickled(1, "y")))


def test_their_signatures_are_those_of_dataclasses() -> None:
    def parameters(kind: Any) -> list[tuple[str, Any]]:
        return [(name, each.kind) for name, each in inspect.signature(kind).parameters.items()]

    for ours, theirs in zip(_classes(frozen, frozen(kw_only=True)), THEIRS, strict=True):
        # Whether or not a value was made before.
        assert parameters(theirs) == parameters(ours)
        assert str(inspect.signature(theirs)).removesuffix(" -> None") == str(inspect.signature(ours))
        assert [each.name for each in dataclasses.fields(theirs)] == [
            each.name for each in dataclasses.fields(ours)
        ]
    assert THEIRS[0].__match_args__ == OURS[0].__match_args__


def test_a_store_needs_nothing_of_the_upkeep_before_it_is_asked_for() -> None:
    code = (
        "import sys, gc, treadle; treadle.Store, treadle.AsyncStore; assert gc.isenabled();"
        "print(*[name for name in sys.modules if name.startswith('treadle.upkeep.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"treadle.upkeep.position", "treadle.upkeep.change_stream"} >= set(done.stdout.split())


def test_a_frozen_dataclass_may_derive_from_one() -> None:
    place: Any = OURS[1]

    @dataclass(frozen=True)
    class Deeper(place):  # type: ignore[misc]
        way: str = "down"

    deeper = Deeper("a", depth=2, way="up")
    assert ("a", 1, 2, "up") == (deeper.name, deeper.length, deeper.depth, deeper.way)
    assert deeper == dataclasses.replace(deeper)
    assert deeper != Deeper("a", depth=2)
    assert ["name", "tags", "note", "depth", "way"] == list(inspect.signature(Deeper).parameters)
    with pytest.raises(FrozenInstanceError):
        deeper.way = "down"
    with pytest.raises(TypeError):
        dataclass(type("Loose", (place,), {"__annotations__": {"way": str}}))


def test_a_class_with_an_init_of_its_own_has_the_signature_of_that() -> None:
    named: Any = OURS[2]

    class Short(named):  # type: ignore[misc]
        def __init__(self, both: int) -> None:
            super().__init__(one=both, two=both)

    assert ["both"] == list(inspect.signature(Short).parameters)
    assert (4, 4) == (Short(4).one, Short(4).two)


@pytest.mark.parametrize("wanted", [True, False])
def test_importing_leaves_the_collector_as_it_was(wanted: bool) -> None:
    code = f"import gc; gc.{'enable' if wanted else 'disable'}(); import treadle; treadle.Store; print(gc.isenabled())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(wanted) == ran.stdout.strip()
