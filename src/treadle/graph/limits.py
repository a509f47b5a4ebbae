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
    page_max: int = 10_000  # documents of one page()
    read_keys_max: int = 1_000  # documents that one query asks for by their keys
    examples_max: int = 5  # examples that a message names
    insert_max: int = 10_000  # documents that insert_many stores in one commit
    bulk_chunk: int = 1_000  # operations that bulk does in one commit
    upsert_attempts_max: int = 20  # attempts at an upsert whose document others make and delete
    write_chunk: int = 1_000  # documents that update_many and delete_many write in one commit
    combined_max: int = 100  # writes of threads or tasks that share one commit
    combine_seconds: float = 0.0005  # how long the next group waits for writers of the last one
    combined_past_max: int = 4  # groups that wait for a locked document while other writes go past them
    together_max: int = 250  # reads or plain writes of threads or tasks that share one round trip
    together_groups_max: int = 4  # so many of these are under way at once, each full but the first
    together_wait_seconds: float = 0.1  # how long those who come next wait for one that takes long
    retry_seconds: float = 60.0  # how long a write without a deadline is retried, or queues behind others
    retry_pause_seconds: float = 0.005  # the first pause between two attempts
    retry_pause_max_seconds: float = 0.5  # the longest
    abort_seconds: float = 0.5  # how long a transaction that failed is given to let go of its documents
    let_go_seconds: float = 3.0  # how long its caller waits, if there is time, where that was not heard
    give_way_max: int = 20  # how often a write lets something larger finish first
    contended_attempts_max: int = 3  # attempts after which a transaction among many writers is cut to pieces
    contended_pieces: int = 8  # how many pieces
    set_aside_retried_max: int = 1_000  # documents that were set aside and are tried again at a time
    set_aside_listed_max: int = 100  # those that status lists

    # -- what follows from a write
    fan_out_max: int = 2_000  # copies of one source that are made in the commit of its write
    chained_fan_out_max: int = 100  # the same, where the copies feed others
    fan_out_chunk: int = 2_000  # copies that are made at a time after the commit
    cascade_max: int = 10_000  # documents that are deleted or changed with the one that they refer to
    delete_together_max: int = 10_000  # nodes of a tree that delete_many deletes, all or none
    group_page: int = 200  # groups of a rollup that are computed in one query

    # -- leases
    lease_renewals: int = 3  # how often the worker and run_due renew a lease within its time
    session_end_looks: int = 250  # looks at whether the commands of a former holder have ended
    session_end_seconds: float = 0.02  # the pause between two looks

    # -- versions and migrations
    convert_documents_max: int = 500  # documents that the server converts in one command
    convert_bytes_max: int = 6 * 1024 * 1024  # their size; a command holds 16 MB
    compare_bytes_max: int = 12 * 1024 * 1024  # what one update compares and sets
    older_chunk: int = 2_000  # older sources that are converted into one aggregation
    older_bytes_max: int = 4 * 1024 * 1024  # their size; the command holds them twice
    upgrade_chunk: int = 500  # older documents that an update brings up at a time
    upgrade_attempts_max: int = 30  # attempts while others write older versions
    upgrade_pause_seconds: float = 0.002  # the pause between two, times their number
    old_documents_milliseconds: int = 200  # how long a reader looks for older documents, to warn of them
    migration_batch: int = 1_000  # documents that a migration converts at a time
    migration_range: int = 50_000  # documents that the server converts by itself in one update
    migration_followed_batch: int = 100  # documents at a time where others follow
    migration_passes_max: int = 20  # passes over a collection that is written meanwhile
    migration_rounds_max: int = 10  # attempts at a batch that others keep changing
    migration_samples: int = 3  # documents that a dry run shows
    migration_sampled_max: int = 100  # documents among which it looks for them
    migration_listed_max: int = 1_000  # documents set aside that are listed at a time
    migration_lease_seconds: float = 60.0  # the lease of the process that migrates
    migration_wait_seconds: float = 10.0  # the longest sleep at a time of a migration with a rate
    migration_pause_seconds: float = 0.005  # the pause after a conflict
    migration_large_bytes: int = 4 * 1024 * 1024  # larger documents are sent alone after a refusal

    # -- verify, rebuild and status
    verify_page: int = 2_000  # documents that are examined at a time
    verify_sample_max: int = 1_000_000  # documents of a sample
    verify_looks: int = 4  # further looks at a wrong value that an active worker may be about to put right
    verify_look_seconds: float = 0.5  # the pause before each
    cold_shard_seconds: float = 10.0  # on a sharded cluster, the periodicNoopIntervalSecs of its shards
    rebuild_page: int = 100  # documents that are recomputed in one commit
    rebuild_rounds_max: int = 5  # how often repair verifies again
    status_events_max: int = 100_000  # pending events that are counted
    status_events_page: int = 10_000  # events read at a time
    status_await_milliseconds: int = 100  # how long a read waits for events

    # -- jobs: verify, repair, rebuild, migrate
    jobs_kept: int = 100  # jobs that are remembered
    job_note_seconds: float = 1.0  # how often a job writes how far it came, and reads what was asked of it
    job_lost_seconds: float = 60.0  # how long a job may say nothing before it is taken for dead
    findings_kept: int = 1_000  # findings of one verify that are remembered, without their values
    gentle_page: int = 20  # documents at a time of a gentle job
    gentle_rest_min: float = 9.0  # how many times as long as a page took a gentle job rests, at least
    gentle_rest_max: float = 200.0  # and at most
    gentle_rest_seconds_max: float = 10.0  # the longest rest
    gentle_look_seconds: float = 1.0  # how often it looks at the server
    gentle_slower: float = 1.5  # how much slower than usual answers mean that the server is busy
    gentle_replication_seconds: float = 2.0  # how far a majority may be behind the primary

    # -- the worker
    worker_lease_seconds: float = 6.0  # how long the lease of a worker that was killed keeps others away
    worker_standby_seconds: float = 0.5  # how often another looks whether it may take over
    worker_wait_seconds: float = 60.0  # how long run_until_idle waits for another worker
    worker_batch_max: int = 10_000  # events that are applied at a time
    worker_linger_below: int = 500  # fewer events wait for more
    worker_linger_seconds: float = 0.1  # how long
    worker_await_seconds: float = 1.0  # how long a read waits for events
    worker_heartbeat_reads: int = 10  # empty reads after which the position is saved
    worker_unsaved_max: int = 5_000  # events that concerned nobody after which it is saved
    worker_backoff_seconds: float = 0.2  # the first pause after an error
    worker_backoff_max_seconds: float = 15.0  # the longest
    worker_attempts_max: int = 20  # attempts of run_until_idle after errors
    worker_replay_reads: int = 50  # reads in which a rule that was resumed must meet its own marker
    worker_lag_max_seconds: float = 60.0  # a rule that is further behind is not ready
    worker_headroom_renewals: int = 15  # renewals of the lease between two looks at the server's history
    worker_resync_page: int = 200  # documents at a time where events were lost
    worker_targets_max: int = 500  # targets in one transaction
    worker_totals_max: int = 100_000  # targets whose counts and sums it remembers
    worker_copies_max: int = 50  # sources of copies in one transaction
    worker_gone_max: int = 1_000  # references to a deleted document that are followed in one transaction

    # -- schedules
    schedule_lease_seconds: float = 15.0  # the lease of a run
    schedule_dirty_max: int = 5_000  # changed groups; with more, everything is computed
    schedule_page: int = 200  # documents whose scheduled fields are examined at a time
    schedule_events_max: int = 300_000  # changes since the last run; with more, everything is computed
    schedule_events_page: int = 20_000  # changes that are read at a time
    schedule_events_first: int = 50  # the first, after which inserts into known windows are passed over
    schedule_windows_passed: int = 40  # changed windows whose inserts the server passes over
    schedule_empty_reads_max: int = 30  # reads without a change after which everything is computed
    schedule_read_milliseconds: int = 1_000  # how long a read waits
    schedule_lookup_max: int = 5_000  # updated sources whose group is looked up at a time

    # -- counters
    counter_chunk: int = 25_000  # keys that are flushed in one batch
    counter_again_chunk: int = 200  # keys in one batch after a refusal
    counter_fold_max: int = 1_024  # events that are kept one by one before they are added up
    counter_combined_max: int = 5_000  # callers of a durable counter who share one write
    counter_attempts_max: int = 3  # attempts at a write that met another writer or lost its connection
    counter_due_seconds: float = 10.0  # how long a flush may take that nobody asked for
    counter_exit_seconds: float = 20.0  # how long the flush at the end of the process may take
    counter_pause_seconds: float = 1.0  # how long flushes that nobody asked for rest after a failure
    counter_unknown_max: int = 10_000  # ids without a document that are remembered
    counter_parts_max: int = 10_000  # parts of a durable buffer that one flush moves
    counter_events_max: int = 500  # buffered events that one transaction moves
    counter_events_again_max: int = 20  # the same, after one was refused
    counter_amounts_max: int = 1_000  # amounts in one buffered event
    counter_key_bytes_max: int = 15_000  # the id or key of an amount
    counter_keys_bytes_max: int = 8 * 1024 * 1024  # the keys that are sent in one command
    counter_overdue_periods: int = 3  # verify names what was buffered for so many times within=
    counter_overdue_seconds: float = 2.0  # and at least so long
    counter_overdue_max: int = 1_000  # overdue ids that verify names
    counter_writers_seconds: float = 7 * 24 * 3600.0  # how long the last batch of a writer is remembered

    # -- trees
    tree_move_max: int = 2_000  # nodes of a subtree that moves in one transaction
    tree_move_chunk: int = 2_000  # nodes at a time of a larger one
    tree_remove_max: int = 2_000  # nodes that are removed in one transaction
    tree_remove_chunk: int = 1_000  # nodes at a time of more
    tree_check_max: int = 10_000  # nodes that are checked at a time
    tree_flat_max: int = 100  # nodes that insert_many stores without looking at how deep they stand
    tree_ancestors_max: int = 100_000  # entries of ancestor arrays that it stores in one commit
    tree_batch: int = 1_000  # nodes whose children are read at a time
    tree_ranges_batch: int = 100  # subtrees that are read at a time by their paths
    tree_graph_levels: int = 3  # levels that $graphLookup is asked for; deeper ones are read by batches
    tree_depth_max: int = 10_000  # levels after which a tree is taken for a cycle
    tree_nested_max: int = 100_000  # nodes that nested() gives at once
    tree_ended_max: int = 50  # large moves and removals whose outcome is remembered for their callers
    tree_passed_max: int = 1_000  # nodes that a large move passes over because they cannot be written
    tree_attempts_max: int = 20  # how often repair lets large moves finish first

    # -- outlier arrays
    array_extend_max: int = 10_000  # items that are added in one transaction
    array_bytes_max: int = 8_000_000  # their size, and that of what one document holds
    array_pages_max: int = 4  # pages of overflow that are read at a time
    array_documents_max: int = 1_000  # items at a time where each is a document
    array_page_max: int = 100_000  # size= of page()
    array_attempts_max: int = 50  # attempts to read a collection that was made just now
    array_pause_seconds: float = 0.02  # the pause between two
    array_orphans_max: int = 1_000  # overflow documents without an owner that verify names
    array_repeated_max: int = 10  # items of one array, stored twice, that verify names

    # -- archives
    archive_chunk: int = 1_000  # documents that move to the archive in one transaction
    archive_chunk_bytes: int = 16_000_000  # their size together, if they are more than one

    # -- histories
    history_trim_page: int = 1_000  # states that keep= no longer holds which are removed at a time
    history_disorder_max: int = 1_000  # documents whose rows do not follow each other that verify names

    # -- links
    related_page: int = 1_000  # documents that related() reads at a time

    # -- buckets and time series
    bucket_page: int = 32  # buckets that are read at a time
    bucket_small_page: int = 4  # the same, for few readings
    bucket_held_max: int = 1_000_000  # readings that are held to sort them
    bucket_summaries_max: int = 1_000_000  # buckets in one summary
    bucket_operations_max: int = 5_000  # buckets that are written in one command
    bucket_bytes_max: int = 8 * 1024 * 1024  # readings in one command
    bucket_together_max: int = 1_000  # buckets that are written in one transaction
    bucket_judged_max: int = 2_000  # readings that the server filters in one query
    bucket_candidates_max: int = 8  # the last buckets of a window, among which one with room is looked for
    bucket_remembered_max: int = 20_000  # windows whose last bucket is remembered
    bucket_keys_max: int = 50_000  # keys whose hashes are remembered
    bucket_alone_max: int = 256  # calls that do without a transaction after one was in vain
    bucket_attempts_max: int = 500  # attempts to add readings
    bucket_change_attempts_max: int = 1_000  # attempts to change a bucket
    bucket_pause_seconds: float = 0.001  # the first pause between two attempts to add
    bucket_change_pause_seconds: float = 0.002  # and to change
    bucket_pause_max_seconds: float = 0.05  # the longest of both
    bucket_delete_page: int = 500  # whole buckets that are deleted at a time
    bucket_upkeep_page: int = 50  # buckets that are verified or rebuilt at a time
    bucket_upkeep_attempts_max: int = 100  # attempts at one bucket, and at a batch of adoption
    adopt_page: int = 1_000  # documents that are adopted at a time
    adopt_passes_max: int = 1_000  # passes over a collection that is written meanwhile
    adopt_named_max: int = 10  # documents that cannot be adopted and are named

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
