"""What the server says about itself, and what follows from it."""

from __future__ import annotations

import pytest

from treadle.plan.capabilities import capabilities_of

BUILD = {"versionArray": [8, 0, 4, 0]}


@pytest.mark.parametrize(
    ("hello", "transactions", "seconds"),
    [
        ({"setName": "rs0", "logicalSessionTimeoutMinutes": 10}, True, 600.0),
        ({"msg": "isdbgrid", "logicalSessionTimeoutMinutes": 30}, True, 1800.0),
        ({"logicalSessionTimeoutMinutes": 30}, False, 1800.0),
        # One member of the set has no sessions.
        ({"setName": "rs0"}, False, 1800.0),
        ({"setName": "rs0", "logicalSessionTimeoutMinutes": None}, False, 1800.0),
    ],
)
def test_transactions_need_a_replica_set_and_sessions(hello, transactions, seconds):
    known = capabilities_of(hello, BUILD)
    assert (transactions, seconds) == (known.transactions, known.session_timeout_seconds)
    assert (8, 0, 4) == known.version
