"""What the server says about itself, and what follows from it."""

from __future__ import annotations

import pytest

from treadle.plan.capabilities import capabilities_of

BUILD = {"versionArray": [8, 0, 4, 0]}


@pytest.mark.parametrize(
    ("hello", "transactions"),
    [
        ({"setName": "rs0", "logicalSessionTimeoutMinutes": 10}, True),
        ({"msg": "isdbgrid", "logicalSessionTimeoutMinutes": 30}, True),
        ({"logicalSessionTimeoutMinutes": 30}, False),
        # One member of the set has no sessions.
        ({"setName": "rs0"}, False),
        ({"setName": "rs0", "logicalSessionTimeoutMinutes": None}, False),
    ],
)
def test_transactions_need_a_replica_set_and_sessions(hello, transactions):
    known = capabilities_of(hello, BUILD)
    assert transactions == known.transactions
    assert (8, 0, 4) == known.version
