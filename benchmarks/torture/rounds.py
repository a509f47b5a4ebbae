"""Faults one after another under load, the stall that each of them caused, and the account afterwards."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from pymongo import MongoClient
from pymongo.errors import AutoReconnect

from benchmarks.torture.journal import Journal
from benchmarks.torture.load import Load, Shell, wait_for
from benchmarks.torture.models import Product, User
from benchmarks.torture.oracle import Account, check
from benchmarks.torture.replica_set import Cluster
from treadle.store.background import repeating

# Load before the first fault, and between the end of one and the next.
BETWEEN_SECONDS = 1.0
RECOVERY_SECONDS_MAX = 60.0
OUTAGE_SECONDS = 3.0
ALONE_SECONDS = 0.7
STEP_DOWN_SECONDS = 10
WAIT_SECONDS = 10.0
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Fault:
    """Something that happens to a set; where nobody can write until it is undone, it undoes that itself."""

    name: str
    strike: Callable[[Any], None]
    # Whether there is another primary afterwards, or the same one again.
    failover: bool = True


def _kill_all(cluster: Cluster) -> None:
    for member in cluster.members:
        cluster.kill(member)
    for member in cluster.members:
        cluster.start(member, wait=False)


def _lose_majority(cluster: Cluster) -> None:
    secondaries = cluster.secondaries
    for member in secondaries:
        cluster.kill(member)
    time.sleep(OUTAGE_SECONDS)
    for member in secondaries:
        cluster.start(member, wait=False)


def _cut_off(cluster: Cluster) -> None:
    """The primary goes on alone for a moment and is killed; what the others never saw is rolled back."""
    primary, secondaries = cluster.primary, cluster.secondaries
    # Not by hanging them: what the primary sends would wait for them in their sockets.
    for member in secondaries:
        cluster.fail_point(member, "stopReplProducer", "alwaysOn")
    time.sleep(ALONE_SECONDS)
    cluster.kill(primary)
    for member in secondaries:
        cluster.fail_point(member, "stopReplProducer", "off")


def _lag(cluster: Cluster) -> None:
    member = cluster.secondaries[0]
    cluster.lag(member)
    time.sleep(OUTAGE_SECONDS)
    cluster.catch_up(member)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", lambda cluster: cluster.kill(cluster.primary)),
        Fault("hang", lambda cluster: cluster.hang(cluster.primary)),
        Fault("step down", lambda cluster: cluster.step_down()),
        Fault("shut down", lambda cluster: cluster.shut_down(cluster.primary)),
        Fault("cut off and kill", _cut_off),
        Fault("kill all", _kill_all),
        Fault("lose majority", _lose_majority),
        Fault("kill a secondary", lambda cluster: cluster.kill(cluster.secondaries[0]), failover=False),
        Fault("delay a secondary", _lag, failover=False),
        # For a set of somebody else's, who causes the faults meanwhile.
        Fault("wait", lambda cluster: time.sleep(WAIT_SECONDS), failover=False),
    )
}


@dataclass
class Result:
    """What a slice of faults came to."""

    shell: Shell
    seed: int
    journal: Journal
    account: Account
    findings: list[Any]
    # For each fault its name, and the seconds in which no write was acknowledged and no event followed.
    stalls: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def failovers(self) -> int:
        return sum(name not in FAULTS or FAULTS[name].failover for name, _, _ in self.stalls)

    @property
    def clean(self) -> bool:
        return self.account.clean and not self.findings and not self.journal.unexpected


class Remote:
    """A set of somebody else's, of which no more is asked than to elect another primary."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    elected = True

    def uri_of(self, database: str) -> str:
        return self._uri

    def step_down(self) -> None:
        with MongoClient[dict[str, Any]](self._uri) as client, contextlib.suppress(AutoReconnect):
            client.admin.command("replSetStepDown", STEP_DOWN_SECONDS)

    def heal(self) -> None:
        """Its members heal by themselves; the load goes on when they have."""


class Progress:
    """The moments at which the workers had followed more events, looked at from outside."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._last = 0
        self.moments: list[float] = []

    def look(self) -> None:
        followed = self._load.followed()
        if followed > self._last:
            self._last = followed
            self.moments.append(time.monotonic())


def strike(
    cluster: Cluster | Remote, load: Load, progress: Progress, fault: Fault
) -> tuple[str, float, float]:
    """Cause one fault, let the load recover, and heal the set; its stalls."""
    started = time.monotonic()
    fault.strike(cluster)
    # What was under way when it struck may still be acknowledged.
    since = time.monotonic()
    elected = not fault.failover

    def recovered() -> bool:
        nonlocal since, elected
        if not elected:
            elected, since = cluster.elected, time.monotonic()
            return False
        return all(moments and moments[-1] > since for moments in (load.journal.moments, progress.moments))

    if not wait_for(recovered, RECOVERY_SECONDS_MAX):
        load.journal.unexpected.append(TimeoutError(f"no recovery from {fault.name}"))
    ended = time.monotonic()
    cluster.heal()
    time.sleep(BETWEEN_SECONDS)
    return (
        fault.name,
        longest_gap(load.journal.moments, started, ended),
        longest_gap(progress.moments, started, ended),
    )


def longest_gap(moments: Sequence[float], start: float, end: float) -> float:
    """The longest time between two moments that touches what lies between start and end."""
    within = [each for each in moments if start <= each <= end]
    before = max((each for each in moments if each < start), default=start)
    marks = [before, *within, *([] if within else [end])]
    return max(after - earlier for earlier, after in pairwise(marks))


def run(
    cluster: Cluster | Remote,
    database: str,
    shell: Shell,
    seed: int,
    faults: Sequence[Fault],
    writers: int = 4,
) -> Result:
    """A slice: load, its faults one after another, rest, and the account."""
    load = Load(cluster.uri_of(database), shell, seed, writers)
    load.prepare()
    load.start()
    progress = Progress(load)
    with repeating(POLL_SECONDS, progress.look):
        time.sleep(BETWEEN_SECONDS)
        stalls = [strike(cluster, load, progress, fault) for fault in faults]
    load.stop()
    return settle(load, stalls)


def settle(load: Load, stalls: list[tuple[str, float, float]]) -> Result:
    """Let everything that is maintained later catch up, then compare."""
    store = load.store
    store.counter(Product, "likes").flush()
    store.worker().run_until_idle()
    store.run_due(now=datetime.now(UTC) + timedelta(days=1))
    store.migrate(User)
    findings = store.verify()
    with MongoClient[dict[str, Any]](load.uri, tz_aware=True) as client:
        account = check(client.get_default_database(), load.journal)
    store.close()
    return Result(load.shell, load.seed, load.journal, account, findings, stalls)
