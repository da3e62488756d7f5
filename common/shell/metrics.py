"""Prometheus metrics: every family is declared here, and read only when somebody scrapes.

Services count with plain numbers (`shell.counters.Counters`, a core's own state); a scrape turns
them into samples, in the thread of the service's loop. So the path of a request or a push touches
no metric object and no lock. Names follow Prometheus: base units, `_total` for what only grows, one
quantity a family; the exposed name has the prefix `slackwater_`.
"""

import asyncio
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, Final, Literal, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.histogram import Histogram
from slackwater.common.bus.base import Bus
from slackwater.common.shell.counters import Counters
from slackwater.common.shell.definition import Level
from slackwater.common.shell.metrics_port import ScrapePort

PREFIX: Final = "slackwater_"
NO_TENANT: Final = "(none)"
"""The label of jobs without a tenant; no id can be that."""


class Family(NamedTuple):
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()


def _counter(meaning: str, *labels: str) -> Family:
    return Family("counter", meaning, labels)


def _gauge(meaning: str, *labels: str) -> Family:
    return Family("gauge", meaning, labels)


def _histogram(meaning: str, *labels: str) -> Family:
    return Family("histogram", meaning, labels)


FAMILIES: Final[Mapping[str, Family]] = {
    # Every service
    "build_info": _gauge("1, for the release that runs", "version", "python"),
    "threads": _gauge("Threads of the process"),
    "epoch": _gauge("The instance's epoch: one more at each start"),
    "leading": _gauge("1: this instance leads; 0: it stands by"),
    "bus_connected": _gauge("1: the bus answers"),
    "bus_reconnects_total": _counter("Connections to the bus that were made anew"),
    "bus_dropped_total": _counter("Messages dropped: their subscriber was slow, or the bus away"),
    "requests_total": _counter("Requests received", "endpoint"),
    "requests_refused_total": _counter("Requests refused, by code", "endpoint", "code"),
    "request_duration_seconds": _histogram("Seconds from a request to its answer", "endpoint"),
    "requests_open": _gauge("Requests received that are not answered yet"),
    "fenced_total": _counter("Commands refused because their sender was replaced"),
    "undecodable_total": _counter("Payloads that are not a message of the expected type"),
    "unanswered_total": _counter("Requests not answered in time, answers nobody waited for"),
    "breaches": _gauge("Messages that broke the core of this instance, as many as are kept"),
    "breaches_refused_total": _counter("Events left out because one like them broke the core"),
    "events_total": _counter("Facts said on the bus (sw.v1.evt)", "noun", "fact"),
    "published_total": _counter("Facts and telemetry said on the bus"),
    "publish_failed_total": _counter("Facts and telemetry that the bus did not take"),
    "received_total": _counter("Facts and telemetry received"),
    "commands_sent_total": _counter("Commands sent to other services"),
    "commands_failed_total": _counter("Commands whose budget was spent without an answer"),
    "commands_open": _gauge("Commands sent that are not answered yet"),
    "step_duration_seconds": _histogram("Time in the core, an event"),
    "step_duration_max_seconds": _gauge("The longest step of the core"),
    "steps_waiting": _gauge("Steps whose records are not durable yet"),
    "records_total": _counter("Records given to the store"),
    "records_waiting": _gauge("Records that are not durable yet"),
    "records_damaged": _gauge("Records that could not be read at the start, set aside"),
    "actions": _gauge("Actions of the service that run"),
    "timers": _gauge("Timers of the core"),
    # Master
    "master_jobs": _gauge("Jobs that are known, by state", "state"),
    "master_jobs_queued": _gauge("Jobs that wait for slots of worker nodes"),
    "master_jobs_held": _gauge("Queued and registered jobs that may not run yet"),
    "master_jobs_hanging": _gauge("Running jobs none of whose ranks goes on"),
    "master_hangs_total": _counter("Jobs that were found hanging"),
    "master_gpus_idle": _gauge("GPUs of running jobs that have computed nothing for `idle_gpu_s`"),
    "master_idle_gpus_total": _counter("Jobs that were found with idle GPUs"),
    "master_unknown_jobs_stopped_total": _counter(
        "Orders to end processes of jobs that nobody knows"
    ),
    "master_facts_unkept_total": _counter("Times that the stream of facts could not be looked to"),
    "master_goodput_refused_total": _counter(
        "Reports of jobs' goodput that were not believed: of another job or attempt, or with "
        "figures that cannot be",
        "cause",
    ),
    "master_aggregators": _gauge("Aggregators of the pool: free, used, or dead", "state"),
    "tenant_asked_cores": _gauge("Cores that its admitted jobs ask for, as profiled", "tenant"),
    "tenant_allowed_cores": _gauge("Cores of the pool that they may ask for", "tenant"),
    "tenant_used_cores": _gauge("Cores that they took, in their last windows", "tenant"),
    "tenant_used_aggregators": _gauge("Aggregators that they kept busy meanwhile", "tenant"),
    "tenant_loss_worst_ratio": _gauge(
        "Part of its profiled speed that the job lost which lost most in its last window", "tenant"
    ),
    "tenant_jobs_beyond_limit": _gauge("Jobs that lost more than their limit", "tenant"),
    "tenant_jobs_running": _gauge("Jobs that were started and have not ended", "tenant"),
    "tenant_jobs_waiting": _gauge("Jobs that were not started yet", "tenant"),
    "tenant_gpu_seconds": _gauge("GPU seconds that its jobs used, kept days and now", "tenant"),
    "tenant_core_seconds": _gauge("Core seconds that their processes asked for", "tenant"),
    "tenant_saved_core_seconds": _gauge(
        "Core seconds that shared aggregation saved against servers of their own", "tenant"
    ),
    "tenant_jobs_ended": _gauge("Jobs of the tenant that ended", "tenant"),
    # Controller
    "controller_jobs": _gauge("Jobs of the cluster, by phase", "phase"),
    "controller_aggregators": _gauge("Aggregators of the cluster, by state", "state"),
    "controller_window_loss_ratio": _histogram(
        "Part of its profiled speed that a job lost, a monitor window"
    ),
    "controller_loss_worst_ratio": _gauge("The largest loss in the jobs' last windows"),
    "controller_plan_duration_seconds": _histogram("Time in the core, a step that planned"),
    "controller_drains_total": _counter("Orders to empty an aggregator"),
    "controller_drains_late_total": _counter(
        "Orders to empty an aggregator that missed their deadline"
    ),
    "controller_interferences_total": _counter("Jobs found slowed by a congested link"),
    # Aggregator
    "aggregator_received_bytes_total": _counter("Bytes that workers pushed"),
    "aggregator_sent_bytes_total": _counter("Bytes that workers pulled"),
    "aggregator_slot_busy_seconds_total": _counter("Slot time: charged CPU time / cpu_share"),
    "aggregator_fold_cpu_seconds_total": _counter("CPU time of folds, as it was measured"),
    "aggregator_folds_total": _counter("Folds"),
    "aggregator_folds_undercharged_total": _counter("Folds that took more than they were charged"),
    "aggregator_requests_late_total": _counter("Requests that came after their place in a cycle"),
    "aggregator_pushes_refused_total": _counter("Pushes refused: of a wrong shape, or not finite"),
    "aggregator_strangers_refused_total": _counter("Connections refused: the token was wrong"),
    "aggregator_migrated_buckets_total": _counter("Buckets that went to another aggregator"),
    "aggregator_migrated_bytes_total": _counter("Bytes of buckets that went to another aggregator"),
    "aggregator_buckets": _gauge("Buckets held"),
    "aggregator_jobs": _gauge("Jobs that have buckets here"),
    "aggregator_held_bytes": _gauge("Memory of its regions"),
    "aggregator_memory_limit_bytes": _gauge("Memory that its regions together may take"),
    "aggregator_cpu_share_cores": _gauge("Cores of its slot"),
    "aggregator_network_budget_bytes_per_second": _gauge(
        "Bytes a second each way to be had of its machine's link; 0: not known"
    ),
    "aggregator_network_bytes_per_second": _gauge(
        "Bytes a second that the link carried lately, the busier way"
    ),
    "aggregator_regions_recovered": _gauge("Regions kept from its former life"),
    "aggregator_regions_locked": _gauge("Recovered regions that another process has locked"),
    # Worker
    "worker_slots": _gauge("Ranks that may run at once"),
    "worker_gpus": _gauge("GPUs that the node gives to jobs, by type", "type"),
    "worker_gpus_faulty": _gauge("GPUs with a fault, which no job is given"),
    "worker_ranks": _gauge("Ranks of jobs: running, or exited and not yet forgotten", "state"),
    "worker_started_total": _counter("Ranks that were started"),
    "worker_forked_total": _counter("Ranks that were forked from the warm process"),
    "worker_restarted_total": _counter("Ranks that were started again after they had died"),
    "worker_exited_total": _counter("Ranks that ended: ok (code 0) or failed", "how"),
    "worker_relayed_total": _counter(
        "Messages of jobs' programs to the bus: passed on, or refused", "how"
    ),
    "worker_warm": _gauge("Whether ranks can be forked from a warm process: 1 or 0"),
    "worker_log_bytes": _gauge("Logs that are kept"),
    "worker_permits": _gauge(
        "Processes of jobs that take turns, by kind of permit and how far they are", "kind", "state"
    ),
    # Profiler
    "profiler_jobs": _gauge("Jobs that it hears of"),
    # Lender
    "lender_slabs": _gauge("Slabs, by state", "state"),
    "lender_slab_changes_total": _counter(
        "Slabs that were lent, returned, evicted or lost, by change", "change"
    ),
    "lender_memory_bytes": _gauge(
        "Memory of its machine: total, used by others, kept as headroom", "of"
    ),
    "lender_pressure_ratio": _gauge("Part of ten seconds in which something waited for memory"),
    "lender_devices": _gauge("Devices that are connected"),
    "lender_frames_refused_total": _counter("Messages of devices that were refused"),
    "lender_frames_unsent_total": _counter("Messages to devices that were gone"),
    # Device
    "device_spans": _gauge("Spans: all of them, and those mapped to remote memory", "state"),
    "device_lenders": _gauge("Lenders that it has slabs of"),
    "device_pages_per_second": _gauge("Page I/O requests a second, smoothed"),
    "device_backup_waiting_pages": _gauge("Pages on their way to the backup file"),
    "device_degraded": _gauge("1: the backup file fails, writes are refused"),
    "device_stuck": _gauge("1: the oldest write has not settled for 10 s"),
    "device_request_duration_seconds": _histogram(
        "Seconds of NBD requests, by what they waited for; each counts at its bucket's bound",
        "cause",
    ),
    "device_read_pages_total": _counter("Pages read"),
    "device_read_remote_pages_total": _counter("Pages read from remote memory"),
    "device_read_waited_pages_total": _counter(
        "Pages read that were neither mapped nor held nor prefetched"
    ),
    "device_written_pages_total": _counter("Pages written"),
    "device_written_remote_pages_total": _counter("Pages written to remote memory"),
    "device_prefetched_pages_total": _counter("Pages fetched ahead"),
    "device_prefetch_hit_pages_total": _counter("Prefetched pages that a client read"),
    "device_prefetch_late_pages_total": _counter(
        "Prefetched pages that were still on their way when read"
    ),
    "device_slabs_evicted_total": _counter("Slabs that lenders asked back"),
    "device_slabs_lost_total": _counter("Slabs taken by force, or gone with their lender"),
    "device_refilled_pages_total": _counter("Pages given to new slabs, out of the backup file"),
    "device_regenerated_pages_total": _counter("Fragments or copies given to members"),
    "device_repaired_fragments_total": _counter("Fragments that a read made up for"),
    "device_lost_pages_total": _counter("Pages with too few fragments: read from the backup file"),
}
"""Metrics by name, without the prefix. A histogram has the series `_bucket`, `_sum` and
`_count`."""
OWN: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "pushes_refused": ("aggregator_pushes_refused_total", {}),
    "strangers_refused": ("aggregator_strangers_refused_total", {}),
    "buckets_migrated": ("aggregator_migrated_buckets_total", {}),
    "bytes_migrated": ("aggregator_migrated_bytes_total", {}),
    "interferences": ("controller_interferences_total", {}),
    "drains": ("controller_drains_total", {}),
    "drains_late": ("controller_drains_late_total", {}),
    "frames_refused": ("lender_frames_refused_total", {}),
    "frames_unsent": ("lender_frames_unsent_total", {}),
    "facts_unkept": ("master_facts_unkept_total", {}),
    **{
        f"goodput_{cause}": ("master_goodput_refused_total", {"cause": cause})
        for cause in ("job", "attempt", "figures")
    },
    "hangs": ("master_hangs_total", {}),
    "idle_gpus": ("master_idle_gpus_total", {}),
    "unknown_jobs_stopped": ("master_unknown_jobs_stopped_total", {}),
    "ranks_started": ("worker_started_total", {}),
    "ranks_forked": ("worker_forked_total", {}),
    "ranks_restarted": ("worker_restarted_total", {}),
    "ranks_ok": ("worker_exited_total", {"how": "ok"}),
    "ranks_failed": ("worker_exited_total", {"how": "failed"}),
    "relay_passed": ("worker_relayed_total", {"how": "passed"}),
    "relay_refused": ("worker_relayed_total", {"how": "refused"}),
    **{
        f"slabs_{change}": ("lender_slab_changes_total", {"change": change})
        for change in ("lent", "returned", "evicted", "revoked", "claimed", "lost")
    },
}
"""The counters of `Port.count`, by their name in `stats`: family and labels."""
_SHELLS: Final = {
    "records": "records_total",
    "fenced": "fenced_total",
    "undecodable": "undecodable_total",
    "unanswered": "unanswered_total",
    "breaches_refused": "breaches_refused_total",
    "published": "published_total",
    "publish_failed": "publish_failed_total",
    "facts": "received_total",
    "requests_sent": "commands_sent_total",
    "requests_failed": "commands_failed_total",
}
_GAUGES: Final = {"requests_open": "commands_open", "requests_unanswered": "requests_open"}
"""Where a gauge of `stats` has another name here."""
_LEFT_OUT: Final = ("step_s_sum", "step_s_max")


def of_shell(counters: Counters, gauges: Mapping[str, float], bus: Bus) -> Iterator[Level]:
    """Yield the samples that every service has."""
    yield Level("bus_connected", {}, float(bus.connected))
    yield Level("bus_reconnects_total", {}, bus.counters.reconnects)
    yield Level("bus_dropped_total", {}, bus.counters.dropped)
    for endpoint, figures in counters.endpoints.items():
        yield Level("requests_total", {"endpoint": endpoint}, figures.requests)
        for code, count in figures.codes.items():
            labels = {"endpoint": endpoint, "code": str(code)}
            yield Level("requests_refused_total", labels, count)
        yield Level("request_duration_seconds", {"endpoint": endpoint}, figures.took_s)
    for name, family in _SHELLS.items():
        yield Level(family, {}, getattr(counters, name))
    for (noun, fact), count in counters.events.items():
        yield Level("events_total", {"noun": noun, "fact": fact}, count)
    yield Level("step_duration_seconds", {}, counters.step_s)
    yield Level("step_duration_max_seconds", {}, counters.step_s_max)
    for name, level in gauges.items():
        if name not in _LEFT_OUT:
            yield Level(_GAUGES.get(name, name), {}, level)
    for name, count in counters.own.items():
        if name in OWN:
            yield Level(*OWN[name], count)


def of_process() -> Iterator[Level]:
    labels = {"version": version("slackwater"), "python": platform.python_version()}
    yield Level("build_info", labels, 1.0)
    yield Level("threads", {}, threading.active_count())


class ServiceCollector(Collector):
    """Collects one service's samples as they are at the moment of the scrape."""

    def __init__(self, service: str, id: str, samples: Callable[[], Iterable[Level]]) -> None:
        self._labels = {"service": service, "id": id}
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        for name, labels, value in (*of_process(), *self._samples()):
            family = families.get(name)
            if family is None:
                family = families[name] = self._family(name)
            known = [*self._labels.values(), *(labels[label] for label in FAMILIES[name].labels)]
            if isinstance(value, Histogram):
                family.add_metric(known, _buckets(value), value.sum)
            else:
                family.add_metric(known, value)
        yield from families.values()

    def _family(self, name: str) -> Any:
        kind, meaning, labels = FAMILIES[name]
        names = [*self._labels, *labels]
        match kind:
            case "counter":
                return CounterMetricFamily(PREFIX + name, meaning, labels=names)
            case "gauge":
                return GaugeMetricFamily(PREFIX + name, meaning, labels=names)
            case "histogram":
                return HistogramMetricFamily(PREFIX + name, meaning, labels=names)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    found, total = [], 0
    bounds = [*map(str, histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, list(histogram.counts), strict=True):
        total += count
        found.append((bound, float(total)))
    return found


class Exposition:
    """Answers GET /metrics on `address`."""

    def __init__(self, collector: Collector, address: str, port: int) -> None:
        """Listen; a negative port means any free one. Raises OSError where it cannot be had."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        ProcessCollector(registry=registry)
        self._scraped = ScrapePort(registry, address, max(0, port))
        self.port = self._scraped.port

    def close(self) -> None:
        self._scraped.close()


def expose(
    service: str, id: str, address: str, port: int, samples: Callable[[], Iterable[Level]]
) -> Exposition:
    """`samples` is called in the thread of the loop that runs now: a scrape is another's. Raises
    ConfigRejected where the port cannot be had."""
    loop = asyncio.get_running_loop()

    async def read() -> list[Level]:
        return list(samples())

    def ask() -> list[Level]:
        return asyncio.run_coroutine_threadsafe(read(), loop).result(limits.SCRAPE_ANSWER_S)

    try:
        return Exposition(ServiceCollector(service, id, ask), address, port)
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigRejected(
            f"metrics_port {port} of {address}: {why}; choose another, or 0 for none"
        ) from error
