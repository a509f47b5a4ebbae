"""Load by every pattern while members fail: what was acknowledged is there once, and every error is true.

Each kind of sabotage at the end must be noticed by the same means.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Any

import pytest
from benchmarks.torture.__main__ import NotEmpty, main, report, require_empty
from benchmarks.torture.oracle import Account
from benchmarks.torture.replica_set import Cluster
from benchmarks.torture.rounds import FAULTS, Fault, Result, run
from pymongo.write_concern import WriteConcern

from tests import servers
from treadle import Count, Document, Limits, Store
from treadle.engine.lease import LeaseLost
from treadle.plan import Plan, Raw, update_one
from treadle.store import common
from treadle.upkeep.position import COLLECTION
from treadle.upkeep.stream import Follower

pytestmark = [pytest.mark.all, pytest.mark.heavy, pytest.mark.server]
SEED = 7


def whole(result: Result) -> None:
    """Nothing lost, doubled, untrue or drifted; the oracle and `verify` agree."""
    assert [] == result.journal.unexpected
    assert Account() == result.account
    assert [] == result.findings
    assert result.journal.outcomes["acknowledged"] > 50
    # No kind of write was refused all along.
    kinds = {kind for kind, _ in result.journal.states}
    assert {"orders", "reviews", "sales", "categories", "members", "readings", "items", "users"} <= kinds


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("sync", ["kill", "hang", "cut off and kill"]),
        ("async", ["step down", "kill all"]),
    ],
)
def test_nothing_is_lost_doubled_or_stale(cluster: Cluster, name: str, mode: Any, names: list[str]) -> None:
    result = run(cluster, name, mode, SEED, [FAULTS[each] for each in names])
    whole(result)
    assert names == [each for each, _, _ in result.stalls]
    assert str(len(names)) == report([result]).splitlines()[1 if mode == "sync" else 2].split()[1]


@pytest.fixture
def older() -> Generator[Cluster]:
    with Cluster() as started:
        yield started


def test_a_rolling_upgrade_loses_nothing(older: Cluster) -> None:
    newer = servers.mongod("6.0.27")

    def upgrade(cluster: Cluster) -> None:
        older_secondaries = [each for each in cluster.secondaries if each.mongod != newer]
        member = older_secondaries[0] if older_secondaries else cluster.primary
        cluster.shut_down(member)
        cluster.start(member, mongod=newer)

    steps = [Fault(f"upgrade {place}", upgrade, failover=place == 2) for place in range(3)]
    whole(run(older, "upgraded", "sync", SEED, steps))
    for member in older.members:
        with older.direct(member) as client:
            assert "6.0.27" == client.server_info()["version"]


# -- the command line ------------------------------------------------------------------------------


def test_a_database_that_holds_something_is_refused(
    cluster: Cluster, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.client[name]["anything"].insert_one({})
    uri = cluster.uri_of(name)
    with pytest.raises(NotEmpty, match="is not empty"):
        require_empty(uri)
    assert 2 == main([uri, "--failovers", "1"])
    assert "is not empty (anything)" in capsys.readouterr().err
    assert ["anything"] == cluster.client[name].list_collection_names()


def test_a_set_of_somebody_elses_steps_down_where_that_is_asked_for(
    cluster: Cluster, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = cluster.primary
    assert 0 == main([cluster.uri_of(name), "--step-down", "--failovers", "1"])
    assert "step down" in capsys.readouterr().out
    assert before is not cluster.primary
    assert [] == cluster.client[name].list_collection_names()


# -- sabotage --------------------------------------------------------------------------------------


def test_skipped_maintenance_is_noticed(cluster: Cluster, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(*arguments: Any, **options: Any) -> Plan[list[Any]]:
        return []
        yield

    monkeypatch.setattr("treadle.engine.write_path.propagate", idle)
    result = run(cluster, name, "sync", SEED, [])
    assert result.account.drift
    assert result.findings


def test_a_dropped_majority_is_noticed(cluster: Cluster, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "MAJORITY", WriteConcern(1))
    monkeypatch.setitem(common.TRANSACTION_OPTIONS, "write_concern", WriteConcern(1))
    assert run(cluster, name, "sync", SEED, [FAULTS["cut off and kill"]]).account.lost


class Sale(Document, collection="sales"):
    id: int
    shop_id: int


class Shop(Document, collection="shops"):
    id: int
    sales: Annotated[int, Count(Sale, by="shop_id", maintain="stream")] = 0


def slept_through_an_election(cluster: Cluster, name: str) -> None:
    """A worker read events, slept while another took over at a new primary, and goes on where it was."""
    limits = Limits(worker_lease_seconds=1.0)
    store = Store(cluster.client[name], [Sale, Shop], limits=limits)
    store.setup()
    store.insert(Shop(id=1))
    perform, client = store.runner.run, cluster.client
    with client.start_session() as mine, client.start_session() as theirs:
        zombie = store.worker()._following(store._capabilities(), mine, "zombie")
        successor = store.worker()._following(store._capabilities(), theirs, "successor")
        assert perform(zombie.lead(), mine)
        perform(zombie.run_until_idle(), mine)
        store.insert(Sale(id=1, shop_id=1))
        events: list[Any] = []
        while not events:
            events = perform(zombie._read(0.5), mine)
        cluster.step_down()
        cluster.wait_until_healthy()
        while not perform(successor.lead(), theirs):
            pass
        store.insert(Sale(id=2, shop_id=1))
        perform(successor.run_until_idle(), theirs)
        before = client[name][COLLECTION].find_one()
        with pytest.raises(LeaseLost):
            perform(zombie._handle(events), mine)
        assert before == client[name][COLLECTION].find_one()
    assert 2 == client[name]["shops"].find_one()["sales"]


def test_a_worker_that_slept_through_an_election_changes_nothing(cluster: Cluster, name: str) -> None:
    slept_through_an_election(cluster, name)


def test_a_lease_without_a_fence_is_noticed(
    cluster: Cluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfenced(self: Follower, update: Raw) -> Plan[None]:
        yield from update_one(COLLECTION, {"_id": self.name}, update)

    monkeypatch.setattr(Follower, "_write_if_leading", unfenced)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        slept_through_an_election(cluster, name)
