"""Prometheus metrics of the worker and of each rule; needs the extra `treadle[metrics]`.

The figures are read when a scrape asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from treadle.errors import UsageError

if TYPE_CHECKING:
    from treadle.store.async_worker import AsyncWorker
    from treadle.store.blocking.worker import Worker
    from treadle.upkeep.status import RuleStatus, Status

ADDRESS = "127.0.0.1"
STATES = ("building", "following", "paused", "behind", "failed")
RULE_LABELS = ("rule", "pattern", "maintain")
RULE_GAUGES: tuple[tuple[str, str, Callable[[RuleStatus], float | None]], ...] = (
    ("treadle_rule_dirty", "Changed documents not followed yet", lambda rule: rule.dirty),
    ("treadle_rule_findings", "Findings of the last verify", lambda rule: rule.findings),
    (
        "treadle_rule_last_run_timestamp_seconds",
        "When a schedule last ran",
        lambda rule: None if rule.last_run is None else rule.last_run.timestamp(),
    ),
    ("treadle_rule_lag_seconds", "Age of the oldest change not followed", lambda rule: rule.lag_seconds),
    ("treadle_rule_lag_events", "Changes not followed", lambda rule: rule.lag_events),
    ("treadle_rule_headroom_seconds", "Until history is lost", lambda rule: rule.headroom),
    ("treadle_rule_set_aside", "Documents that were set aside", lambda rule: rule.set_aside),
    ("treadle_rule_last_run_seconds", "How long that took", lambda rule: rule.last_seconds),
)


class Collector:
    """Turns a `Status` into metric families; `worker` where this process is one."""

    def __init__(self, status: Callable[[], Status], worker: Worker | AsyncWorker | None = None) -> None:
        self._status = status
        self._worker = worker

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        status, worker = self._status(), self._worker
        if worker is not None:
            leading = int(worker.leading)
            yield Gauge("treadle_worker_leading", "1 if this process is the active worker", value=leading)
        if status.worker is not None:
            seconds, events = status.worker.lag_seconds, status.worker.events
            yield Gauge("treadle_worker_lag_seconds", "Age of the oldest change not handled", value=seconds)
            yield Gauge("treadle_worker_lag_events", "Changes not handled", value=events)
            active, low = int(status.worker.active), int(status.worker.headroom_low)
            yield Gauge("treadle_worker_active", "1 if any process leads", value=active)
            yield Gauge("treadle_worker_failing", "1 if it fails", value=int(status.worker.error is not None))
            if status.worker.headroom is not None:
                left = status.worker.headroom
                yield Gauge("treadle_headroom_seconds", "Until the server's history is lost", value=left)
                yield Gauge("treadle_headroom_low", "1 below a quarter of the window", value=low)
            counts = Counter("treadle_worker", "What workers of this database have counted", labels=["what"])
            for name, number in sorted(status.worker.counts.items()):
                counts.add_metric([name], number)
            yield counts
        yield Gauge("treadle_set_aside", "Documents that were set aside", value=status.set_aside)
        yield Gauge("treadle_intents", "Intents under way or left over", value=status.intents)
        states = Gauge(
            "treadle_rule_state", "1 for the state that a rule is in", labels=[*RULE_LABELS, "state"]
        )
        for rule in status.rules:
            for state in STATES:
                labels = [rule.rule, rule.pattern, rule.maintain, state]
                states.add_metric(labels, int(rule.state == state))
        yield states
        for name, text, value_of in RULE_GAUGES:
            gauge = Gauge(name, text, labels=RULE_LABELS)
            for rule in status.rules:
                value = value_of(rule)
                if value is not None:
                    gauge.add_metric([rule.rule, rule.pattern, rule.maintain], value)
            yield gauge


@contextmanager
def serve(port: int, status: Callable[[], Status], worker: Worker | AsyncWorker) -> Generator[None]:
    """Serve the metrics on this machine while the worker runs."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ModuleNotFoundError:
        raise UsageError(
            "metrics need prometheus-client; run pip install 'treadle[metrics]'", code="extra-missing"
        ) from None
    registry = CollectorRegistry()
    collector: Any = Collector(status, worker)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=ADDRESS, registry=registry)
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be used for metrics ({error.strerror}); choose another --metrics-port",
            code="port-unavailable",
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
