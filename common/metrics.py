"""Prometheus metrics: every name is declared here, and read only when somebody scrapes.

Services count with plain numbers (`shell.counters.Counters`); a scrape turns them into metrics. So
the path of a request or a push touches no metric object and no lock.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slackwater.common.scraping import ScrapePort
from slackwater.common.shell.definition import Level

COUNTERS: Final[Mapping[str, str]] = {
    "steps": "Events that went through the core",
    "records": "Records given to the store",
    "requests": "Requests received",
    "refused": "Requests refused by the shell: busy or draining",
    "fenced": "Commands refused because their sender was replaced",
    "undecodable": "Payloads that are no message of the expected type",
    "breaches_refused": "Events left out because one like them broke the core before",
    "unanswered": "Requests without an answer in time, and answers nobody waited for",
    "facts": "Facts and telemetry received",
    "published": "Facts and telemetry sent",
    "publish_failed": "Facts and telemetry that the bus did not take",
    "requests_sent": "Commands sent to other services",
    "requests_failed": "Commands whose budget was spent without an answer",
}
GAUGES: Final[Mapping[str, str]] = {
    "steps_waiting": "Steps whose records are not durable yet",
    "records_waiting": "Records that are not durable yet",
    "requests_open": "Commands sent that are not answered yet",
    "requests_unanswered": "Requests received that are not answered yet",
    "actions": "Actions of the service that run",
    "timers": "Timers of the core",
    "step_s_sum": "Seconds spent in the core",
    "step_s_max": "The longest step of the core in seconds",
    "epoch": "This instance's epoch",
    "breaches": "Events from outside that broke the core of this instance, as many as are kept",
    "records_damaged": "Records that could not be read at the start and were set aside",
}
LEVELS: Final[Mapping[str, str]] = {
    "tenant_asked_cores": "Cores that the tenant's admitted jobs ask for, as profiled",
    "tenant_allowed_cores": "Cores of the pool that they may ask for together",
    "tenant_used_cores": "Cores that their tasks took, in each job's last monitor window",
    "tenant_used_aggregators": "Aggregators that they kept busy meanwhile: slot time over time",
    "tenant_loss_worst": "Loss of profiled speed of the job that lost most in its last window",
    "tenant_jobs_beyond_limit": "Jobs that lost more than their limit in their last window",
    "tenant_jobs_running": "Jobs that were started and have not ended",
    "tenant_jobs_waiting": "Jobs that were not started yet",
    "lender_slabs": "Slabs of the lender, by state",
    "lender_memory_bytes": "Of its machine: in all, used by all but the slabs, kept free for that",
    "lender_pressure": "Share of ten seconds in which something waited for memory (PSI)",
    "lender_devices": "Devices that are connected",
    "device_spans": "Spans of the device: all of them, and those in remote memory",
    "device_lenders": "Lenders that it has slabs of",
    "device_pages_per_s": "Page I/O requests a second, smoothed",
    "device_backup_waiting_pages": "Pages on their way to the backup file",
    "device_degraded": "1: the backup file fails, writes are refused",
    "device_stuck": "1: the oldest write has not settled for 10 s",
}
"""With labels of their own."""
OWN: Final = "slackwater_own_total"
"""A service's own counters, told apart by the label `name`."""


class ShellCollector(Collector):
    """One service's numbers, as they are at the moment of the scrape."""

    def __init__(
        self,
        service: str,
        id: str,
        counters: Callable[[], Mapping[str, int]],
        gauges: Callable[[], Mapping[str, float]],
        levels: Callable[[], Iterable[Level]] = tuple[Level, ...],
    ) -> None:
        self._labels = [service, id]
        self._counters = counters
        self._gauges = gauges
        self._levels = levels

    def collect(self) -> Iterator[Metric]:
        names = ["service", "id"]
        own = CounterMetricFamily(OWN, "The service's own counters", labels=[*names, "name"])
        for name, value in self._counters().items():
            if name in COUNTERS:
                counter = CounterMetricFamily(
                    f"slackwater_{name}_total", COUNTERS[name], labels=names
                )
                counter.add_metric(self._labels, value)
                yield counter
            else:
                own.add_metric([*self._labels, name], value)
        yield own
        for name, level in self._gauges().items():
            gauge = GaugeMetricFamily(f"slackwater_{name}", GAUGES.get(name, name), labels=names)
            gauge.add_metric(self._labels, level)
            yield gauge
        yield from self._own_levels(names)

    def _own_levels(self, names: list[str]) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, labels, value in self._levels():
            if name not in families:
                families[name] = GaugeMetricFamily(
                    f"slackwater_{name}", LEVELS[name], labels=[*names, *labels]
                )
            families[name].add_metric([*self._labels, *labels.values()], value)
        yield from families.values()


class Exposition:
    """GET /metrics on loopback."""

    def __init__(self, collector: Collector, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        self._scraped = ScrapePort(registry, max(0, port))
        self.port = self._scraped.port

    def close(self) -> None:
        self._scraped.close()
