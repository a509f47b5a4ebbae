"""Prometheus metrics of the worker and of each rule; needs the extra `treadle[metrics]`.

The figures are read when they are asked for, so nothing is measured while
nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from treadle.errors import UsageError
from treadle.upkeep.status import Status

if TYPE_CHECKING:
    from treadle.store.async_worker import AsyncWorker
    from treadle.store.blocking.worker import Worker

ADDRESS = "127.0.0.1"


class Collector:
    """Turns a `Status` into metric families."""

    def __init__(self, status: Callable[[], Status], worker: Worker | AsyncWorker) -> None:
        self._status = status
        self._worker = worker

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = self._status()
        yield GaugeMetricFamily(
            "treadle_worker_leading",
            "1 if this process is the active worker",
            value=int(self._worker.leading),
        )
        if found.worker is not None:
            yield GaugeMetricFamily(
                "treadle_worker_lag_seconds",
                "Age of the oldest change not handled",
                value=found.worker.lag_seconds,
            )
            yield GaugeMetricFamily(
                "treadle_worker_lag_events", "Changes not handled", value=found.worker.events
            )
            counts = CounterMetricFamily(
                "treadle_worker", "What workers of this database have counted", labels=["what"]
            )
            for name, number in sorted(found.worker.counts.items()):
                counts.add_metric([name], number)
            yield counts
        yield GaugeMetricFamily("treadle_set_aside", "Documents that were set aside", value=found.set_aside)
        yield GaugeMetricFamily("treadle_intents", "Intents under way or left over", value=found.intents)
        yield from self._of_rules(found)

    def _of_rules(self, found: Status) -> Iterable[Any]:
        from prometheus_client.core import GaugeMetricFamily

        labels = ["rule", "pattern", "maintain"]
        dirty = GaugeMetricFamily("treadle_rule_dirty", "Changed documents not followed yet", labels=labels)
        findings = GaugeMetricFamily("treadle_rule_findings", "Findings of the last verify", labels=labels)
        last_run = GaugeMetricFamily(
            "treadle_rule_last_run_timestamp_seconds", "When a schedule last ran", labels=labels
        )
        duration = GaugeMetricFamily("treadle_rule_last_run_seconds", "How long that took", labels=labels)
        for rule in found.rules:
            told = [rule.rule, rule.pattern, rule.maintain]
            for family, value in (
                (dirty, rule.dirty),
                (findings, rule.findings),
                (last_run, rule.last_run.timestamp() if rule.last_run is not None else None),
                (duration, rule.last_seconds),
            ):
                if value is not None:
                    family.add_metric(told, value)
        yield from (dirty, findings, last_run, duration)


@contextmanager
def served(port: int, status: Callable[[], Status], worker: Worker | AsyncWorker) -> Generator[None]:
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
