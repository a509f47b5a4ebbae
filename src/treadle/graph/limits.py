"""Every bound of a Store, in one value.

Not here are the facts of a format, of the server or of a declaration, such as
how large `limit=` of a bucket may be: another value would make no sense of
what is stored already.
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
    bulk_chunk: int = 1_000  # operations that bulk does in one commit
    write_chunk: int = 1_000  # documents that update_many and delete_many write in one commit
    combined_max: int = 100  # writes of threads or tasks that share one commit
    together_max: int = 250  # reads or plain writes of threads or tasks that share one round trip
    together_wait_seconds: float = 0.1  # how long calls queue behind one that takes long
    retry_seconds: float = 60.0  # how long a write without a deadline is retried, or queues behind others

    # -- what follows from a write
    fan_out_max: int = 2_000  # copies of one source that are made in the commit of its write
    fan_out_chunk: int = 2_000  # copies that are made at a time after the commit
    cascade_max: int = 10_000  # documents that are deleted or changed with the one that they refer to

    # -- versions and migrations
    upgrade_chunk: int = 500  # older documents that an update brings up at a time
    migration_batch: int = 1_000  # documents that a migration converts at a time
    migration_range: int = 50_000  # documents that the server converts by itself in one update
    migration_lease_seconds: float = 60.0  # the lease of the process that migrates

    # -- verify, rebuild and status
    verify_page: int = 2_000  # documents that are examined at a time
    rebuild_page: int = 100  # documents that are recomputed in one commit

    # -- jobs: verify, repair, rebuild, migrate
    jobs_kept: int = 100  # jobs that are remembered
    findings_kept: int = 1_000  # findings of one verify that are remembered, without their values
    gentle_page: int = 20  # documents at a time of a gentle job
    gentle_rest_min: float = 9.0  # how many times as long as a page took a gentle job rests, at least

    # -- the worker
    worker_lease_seconds: float = 6.0  # how long the lease of a worker that was killed keeps others away
    worker_standby_seconds: float = 0.5  # how often another looks whether it may take over
    worker_batch_max: int = 10_000  # events that are applied at a time
    worker_linger_below: int = 500  # fewer events wait for more
    worker_lag_max_seconds: float = 60.0  # a rule that is further behind is not ready

    # -- schedules
    schedule_lease_seconds: float = 15.0  # the lease of a run
    schedule_events_max: int = 300_000  # changes since the last run; with more, everything is computed

    # -- counters
    counter_chunk: int = 25_000  # keys that are flushed in one batch
    counter_events_max: int = 500  # buffered events that one transaction moves

    # -- trees
    tree_move_max: int = 2_000  # nodes that are moved or removed in one transaction; more go in chunks

    # -- outlier arrays
    array_extend_max: int = 10_000  # items that are added in one transaction
    array_bytes_max: int = 8_000_000  # their size, and that of what one document holds

    # -- archives
    archive_chunk: int = 1_000  # documents that move to the archive in one transaction
    archive_chunk_bytes: int = 16_000_000  # their size together, if they are more than one

    # -- histories
    history_trim_page: int = 1_000  # states that keep= no longer holds which are removed at a time

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
                    f"Limits({field.name}={value!r}) is no bound; it takes {kind} above 0",
                    code="limits-invalid",
                )
