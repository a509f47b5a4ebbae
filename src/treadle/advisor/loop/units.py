"""What of a workload is tried: requests of one shape as a group, a bounded part of each.

A group counts all its requests and keeps some, evenly over the recording. A
read and the reads by id right after it, in the same session, are one unit
where a card makes the latter superfluous.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from treadle.advisor.loop.request_shape import Read, condition_of
from treadle.advisor.loop.rewrite import follows, rewrite, why_not
from treadle.advisor.loop.values import shape
from treadle.advisor.loop.workload_file import MALFORMED, Request
from treadle.advisor.proposals import Draft

GROUPS_MAX = 300
UNITS_MAX = 40
GROUP_BYTES_MAX = 400_000
MISSED_MAX = 20
FOLLOWERS_MAX = 100
FOLLOW_SECONDS_MAX = 0.1
# A page that is being put together, per session.
SESSIONS_MAX = 10_000

Unit = tuple[Request, ...]


@dataclass(slots=True)
class Group:
    """Units of one shape: how many there were, and some of them."""

    units: list[Unit] = field(default_factory=list)
    recorded: int = 0
    milliseconds: float = 0.0
    stride: int = 1
    # Which of those that were recorded are kept.
    kept_max: int = UNITS_MAX
    bytes: int = 0
    used: int = 0

    def add(self, unit: Unit, usable: bool = True) -> None:
        """Count a unit, and perhaps keep it; one that cannot be used is only counted."""
        if usable:
            if self.used % self.stride == 0:
                if len(self.units) >= self.kept_max or (self.bytes > GROUP_BYTES_MAX and len(self.units) > 1):
                    self.units = self.units[::2]
                    self.stride *= 2
                    self.bytes //= 2
                if self.used % self.stride == 0:
                    self.units.append(unit)
                    self.bytes += sum(len(each.as_line()) for each in unit)
            self.used += 1
        self.recorded += 1
        self.milliseconds += sum(each.milliseconds for each in unit)

    @property
    def first(self) -> Request:
        return self.units[0][0]


@dataclass(slots=True)
class Collector:
    """Takes requests one by one, and keeps the units that are wanted, by shape.

    The requests of a session that follow each other closely are looked at
    together. Several collectors can share one pass over a workload.
    """

    draft: Draft
    wanted: Callable[[Unit], bool]
    kept_max: int = UNITS_MAX
    # Shapes that came when there were too many already.
    left_out: int = 0
    # Why a unit that is not wanted might have been, where it might; and how often which did.
    reason: Callable[[Unit], str | None] = lambda unit: None
    missed: dict[str, int] = field(default_factory=dict)
    # Whether a unit can be run where it is tried; those that cannot are counted with the others.
    usable: Callable[[Unit], bool] = lambda unit: True
    _groups: dict[str, Group] = field(default_factory=dict)
    _open: dict[int, list[Request]] = field(default_factory=dict)
    _holding: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._holding = frozenset(card.target for card in self.draft.copies)

    def take(self, request: Request) -> None:
        """Look at the next request; one that no server understands, which is recorded too, is passed over."""
        with contextlib.suppress(*MALFORMED):
            self._take(request)

    def _take(self, request: Request) -> None:
        unit = self._open.get(request.session)
        if unit is not None:
            soon = request.at - unit[-1].at <= FOLLOW_SECONDS_MAX and len(unit) <= FOLLOWERS_MAX
            if soon and follows(unit[0], request, self.draft) is not None:
                unit.append(request)
                return
            self._keep(tuple(self._open.pop(request.session)))
        if request.operation in ("find", "aggregate") and request.collection in self._holding:
            if len(self._open) >= SESSIONS_MAX:
                self._keep(tuple(self._open.pop(next(iter(self._open)))))
            self._open[request.session] = [request]
        else:
            self._keep((request,))

    def groups(self) -> list[Group]:
        """The groups, the commonest first; to be asked for when everything was taken."""
        for unit in self._open.values():
            with contextlib.suppress(*MALFORMED):
                self._keep(tuple(unit))
        self._open.clear()
        found = [group for group in self._groups.values() if group.units]
        return sorted(found, key=lambda group: -group.recorded)

    def _keep(self, unit: Unit) -> None:
        if not self.wanted(unit):
            reason = self.reason(unit)
            if reason is not None:
                text = f"{describe(unit)}: {reason}."
                if text in self.missed or len(self.missed) < MISSED_MAX:
                    self.missed[text] = self.missed.get(text, 0) + 1
            return
        # However many reads follow, it is one page.
        followers = sorted({shape(each) for each in unit[1:]})
        key = "\n".join([shape(unit[0]), *followers])
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= GROUPS_MAX:
                self.left_out += 1
                return
            describe(unit)
            group = self._groups[key] = Group(kept_max=self.kept_max)
        group.add(unit, self.usable(unit))


class Takes(Protocol):
    """What sees all requests of a workload, one by one."""

    def take(self, request: Request) -> None: ...


def collect(requests: Iterable[Request], collectors: Sequence[Takes]) -> None:
    """Let collectors see all requests, in one pass."""
    for request in requests:
        for each in collectors:
            each.take(request)


def grouped(
    requests: Iterable[Request], draft: Draft, wanted: Callable[[Unit], bool], kept_max: int = UNITS_MAX
) -> list[Group]:
    """The units that are wanted, by shape, the commonest first."""
    collector = Collector(draft, wanted, kept_max)
    collect(requests, [collector])
    return collector.groups()


def reads_of(draft: Draft) -> Collector:
    """Collects the reads that the patterns change."""
    return Collector(
        draft,
        lambda unit: rewrite(unit, draft) is not None,
        reason=lambda unit: why_not(unit[0], draft),
    )


# -- in words ---------------------------------------------------------------------------------

NAMES_SHOWN_MAX = 4


def describe(unit: Unit) -> str:
    """The shape of a unit in words, without values."""
    text = _describe(unit[0])
    followers = sorted({_describe(each) for each in unit[1:]})
    return f"{text}; then {', '.join(followers)}" if followers else text


def _describe(request: Request) -> str:
    read = Read.of(request)
    condition = list(condition_of(request))
    parts = [f"{request.collection}: {request.operation}", *_listed("by", condition)]
    if read is not None:
        parts += _listed("with", read.joined)
        counts = request.operation != "count" and {"$group", "$count", "$sortByCount"} & set(read.names)
        parts += ["grouped"] if counts else []
        order = [("-" if way == -1 else "") + str(path) for path, way in read.sort.items()]
        parts += _listed("sorted by", order)
        parts += [f"first {read.limit}"] if read.limit and request.operation != "count" else []
    update = request.body.get("u", request.body.get("update"))
    if isinstance(update, Mapping):
        operators = [name for name in update if str(name).startswith("$")]
        fields = [path for name in operators if isinstance(update[name], Mapping) for path in update[name]]
        parts += _listed("of", fields) or ["of the whole document"]
    return " ".join(parts)


def _listed(word: str, names: Sequence[str]) -> list[str]:
    shown = [re.sub(r"^\$", "", str(name)) for name in names[:NAMES_SHOWN_MAX]]
    return [f"{word} {', '.join(shown)}"] if names else []
