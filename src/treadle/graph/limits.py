"""The sizes and waits of a Store that a user may tune.

Every other number is a constant beside its use. Facts of a stored format, of
the server or of a declaration are not options either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from treadle.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes, pages, attempts and waits: `Store(database, models, limits=Limits(insert_max=1_000))`."""

    # -- reads and writes of documents
    find_page: int = 100  # documents that find reads at a time
    insert_max: int = 10_000  # documents that insert_many stores in one commit
    bulk_chunk: int = 1_000  # operations of bulk in one commit
    write_chunk: int = 1_000  # documents that update_many and delete_many write in one commit
    combined_max: int = 100  # concurrent writes that share one commit
    together_max: int = 250  # concurrent reads or inserts by id that share one round trip
    together_wait_seconds: float = 0.1  # how long a call queues behind a slow group before it goes past it

    # -- what follows from a write
    fan_out_max: int = 2_000  # copies of one source that are updated in the commit of its write
    fan_out_chunk: int = 2_000  # copies updated at a time after the commit, where there are more
    cascade_max: int = 10_000  # documents that are deleted or changed together with the one they refer to

    # -- versions and migrations
    upgrade_chunk: int = 500  # outdated documents that an update upgrades at a time
    migration_batch: int = 1_000  # documents that a migration converts at a time
    migration_range: int = 50_000  # documents that the server converts in one update
    migration_lease_seconds: float = 60.0  # the lease of the process that migrates

    # -- verify, rebuild and status
    verify_page: int = 2_000  # documents that verify examines at a time
    rebuild_page: int = 100  # documents that rebuild and repair recompute in one commit

    # -- jobs: verify, repair, rebuild, migrate
    jobs_kept: int = 100  # finished jobs that are remembered
    findings_kept: int = 1_000  # findings of one verify that are remembered, without their values
    gentle_page: int = 20  # documents at a time of a job with throttle="gentle"
    gentle_rest_min: float = 9.0  # how long such a job rests, in multiples of the time that a page took

    # -- the worker
    worker_lease_seconds: float = 6.0  # how long a killed worker's lease keeps standbys away
    worker_standby_seconds: float = 0.5  # how often a standby tries to take over
    worker_batch_max: int = 10_000  # events that the worker applies at a time
    worker_linger_below: int = 500  # with fewer events than this, the worker waits a moment for more
    worker_lag_max_seconds: float = 60.0  # lag beyond which a rule is reported as not ready

    # -- schedules
    schedule_lease_seconds: float = 15.0  # the lease of one scheduled run
    schedule_events_max: int = 300_000  # changes since the last run; with more, all windows are recomputed

    # -- counters
    counter_chunk: int = 25_000  # keys that a counter flushes in one batch
    counter_events_max: int = 500  # buffered events that a durable counter moves in one transaction

    # -- trees
    tree_move_max: int = 100_000  # nodes below one that is moved or renamed; with more it is refused

    # -- outlier arrays
    array_extend_max: int = 10_000  # items that are added to an outlier array in one transaction
    array_bytes_max: int = 8_000_000  # the size of these items, and of the part that one document holds

    # -- archives
    archive_chunk: int = 1_000  # documents that are archived in one transaction
    archive_chunk_bytes: int = 16_000_000  # their total size, where there are several

    # -- histories
    history_trim_page: int = 1_000  # expired states that are removed at a time (keep=)

    # -- buckets and time series
    bucket_page: int = 32  # buckets that are read at a time

    def __post_init__(self) -> None:
        for field in fields(self):
            value, default = getattr(self, field.name), field.default
            numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
            whole = isinstance(default, int)
            if not numeric or not 0 < value < math.inf or (whole and not isinstance(value, int)):
                kind = "a whole number" if whole else "a number"
                raise UsageError(
                    f"Limits({field.name}={value!r}): {field.name} must be {kind} greater than 0",
                    code="limits-invalid",
                )
