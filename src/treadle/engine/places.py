"""Documents of a model whose documents are in two collections: found by id, and merged in order.

The other collection is an archive, for example (`Rule.scope`). A document
is in one of the two at every moment. Whoever reads both one after the other
must read at one moment, in a snapshot; where a single document is looked for,
both are looked at again, in case it came back meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from treadle.engine import crud
from treadle.engine.divided_reads import divided_read, refuse_changed
from treadle.errors import DataError, UsageError
from treadle.graph.card import Card
from treadle.graph.layout import SKIPPED, skipping
from treadle.graph.model_entry import ModelEntry
from treadle.plan import Call, Plan, Raw, Read
from treadle.query.attributes import refuse_attributes
from treadle.query.comparison import order_key
from treadle.query.filters import Sort, sort_keys

KEYS = "_treadle_sort"


def get(entry: ModelEntry[Any], identity: Any, card: Card[Any] | None) -> Plan[Any]:
    """The document with this id, wherever it is, or None."""
    archive = entry.everything.archive
    assert archive is not None
    chosen: tuple[Any, ...] = (entry.filter_for_id(entry.ids.encode(identity)),)
    if card is not None:
        chosen = (*chosen, card.projection)
    here, there = entry.collection, archive
    # It may move between two looks, and while the second is made move back.
    for collection in (here, there, here, there, here):
        raw = yield Call(collection, "find_one", chosen, {}, writes=False)
        if raw is not None:
            (current,) = yield from crud.shown(entry, [raw], card)
            return None if current is None else crud.loader(entry, card)(current)
    return None


class BothReader:
    """Pages of two cursors, merged in the order of the sort; without one, the first collection's first."""

    def __init__(
        self,
        entry: ModelEntry[Any],
        filter: Any,
        sort: Sort | None,
        skip: int,
        limit: int | None,
        card: Card[Any] | None,
        noted: list[DataError] | None = None,
    ) -> None:
        archive = entry.everything.archive
        if archive is None:
            raise UsageError(
                f"{entry.model.__name__} has no archive to look into; declare it with archive=Archive(…)",
                code="archive-undeclared",
            )
        crud.check_window(skip, limit)
        self.page = entry.limits.find_page
        self.done = limit == 0
        self._entry = entry
        self._card = card
        load = crud.loader(entry, card)
        self._load = load if noted is None else skipping(load, noted)
        self._skip = skip
        self._left = limit
        most = None if limit is None else skip + limit
        refuse_attributes(entry.codec, sort_keys(sort, entry.paths.fields))
        command = crud.find_command(entry, filter, sort, 0, most, card)
        self._directions = [direction for _, direction in command.options["sort"] or ()]
        if self._directions:
            # What the server sorts by, also where that is one of an array's items.
            filtered, projection = command.arguments
            shown = {**(projection or {}), KEYS: {"$meta": "sortKey"}}
            command = replace(command, arguments=(filtered, shown))
        commands = [command, replace(command, collection=archive)]
        self._divided = [divided_read(entry, each) for each in commands]
        self.commands: list[Read] = [
            command if reading is None else reading.command
            for command, reading in zip(commands, self._divided, strict=True)
        ]
        # Pages of which the outdated documents were not upgraded and matched yet.
        self._unmatched: set[int] = set()
        self._sorts = [path for path, _ in command.options["sort"] or ()]
        self._pages: list[list[Raw]] = [[], []]
        self._ended = [False, False]

    @property
    def wanting(self) -> list[int]:
        """Which of the cursors must be read before anything else can be told."""
        missing = [at for at in (0, 1) if not self._pages[at] and not self._ended[at]]
        return missing if self._directions else missing[:1]

    def fill(self, at: int, raws: list[Raw]) -> None:
        """Take what a cursor gave; less than a page is its end."""
        self._pages[at] = raws[::-1]
        self._ended[at] = len(raws) < self.page
        self._unmatched.add(at)

    def take(self) -> Plan[Iterable[Any]]:
        """The documents that come next."""
        yield from refuse_changed(self._entry, "a sort", self._sorts)
        self._sorts = []
        for number in self._unmatched:
            reading = self._divided[number]
            if reading is not None:
                self._pages[number] = (yield from reading.take(self._pages[number][::-1]))[::-1]
                self._ended[number] = self._ended[number] or reading.done
        self._unmatched.clear()
        raws: list[Raw] = []
        while not self.wanting and not self.done:
            at = self._first()
            if at is None:
                self.done = True
                break
            raw = self._pages[at].pop()
            raw.pop(KEYS, None)
            if self._skip:
                self._skip -= 1
                continue
            raws.append(raw)
            if self._left is not None:
                self._left -= 1
                self.done = not self._left
        current = yield from crud.shown(self._entry, raws, self._card)
        documents = (self._load(raw) for raw in current if raw is not None)
        return [document for document in documents if document is not SKIPPED]

    def _first(self) -> int | None:
        """The cursor whose next document comes first."""
        present = [at for at in (0, 1) if self._pages[at]]
        if len(present) < 2 or not self._directions:
            return present[0] if present else None
        keys = [self._pages[at][-1][KEYS] for at in (0, 1)]
        for direction, one, other in zip(self._directions, *keys, strict=True):
            ranked = order_key(one), order_key(other)
            if ranked[0] != ranked[1]:
                return int((ranked[0] < ranked[1]) != (direction == 1))
        return 0
