"""One world, played: a seeded history of writes, and the checks between them.

A play collects what is wrong by the name of the derived value, and continues:
one wrong value does not hide another. The name "call restore" stands for a
call that raised.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.world.acts import Acts
from tests.world.checks import Checks
from tests.world.models import DAY, has_history

STEPS_PER_CHECK = 8


class Play(Acts, Checks):
    """The whole history of one world."""

    def play(self) -> None:
        self.begin()
        self.check("at first")
        script = self.script()
        for number, (name, act) in enumerate(script, start=1):
            self.step(name, act)
            if number % STEPS_PER_CHECK == 0 or number == len(script):
                self.check(f"after step {number}")
        self.corrupt_and_repair()

    def step(self, name: str, act: Callable[[], str | None]) -> None:
        try:
            done = act()
            self.log.append(f"{len(self.log) + 1}. {name}: {done or 'nothing to do'}")
        except Exception as error:
            self.log.append(f"{len(self.log) + 1}. {name} raised {error!r}")
            self.fail(f"call {name.split(' ')[0]}", f"step {len(self.log)} {name}: {error!r}"[:500])
        self.note_names()

    def begin(self) -> None:
        """Documents from before Treadle, then some through the Store."""
        world = self.world
        self.database["owners"].insert_one(self.raw_owner(2, version=1))
        self.database["items"].insert_many([self.raw_item(number, version=1) for number in (1, 2, 3)])
        self.store.setup()
        if world.mode == "write":
            self.store.rebuild()
        self.settle()
        self.step("insert_owner", self.insert_owner)
        for _ in range(3):
            self.step("insert_items", self.insert_items)
        if world.has("item", "hostile") or world.has("owner", "hostile"):
            self.add_hostile()

    def settle(self) -> None:
        world = self.world
        if world.mode == "schedule":
            self.due += DAY
            for ran in self.store.run_due(now=self.due):
                assert ran.error is None, ran
        if world.mode == "stream" or (world.mode == "schedule" and has_history(world)):
            self.store.worker().run_until_idle()
