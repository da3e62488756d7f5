"""What a device tells Prometheus: the figures of its heartbeats, read when somebody scrapes."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

import structlog
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slackwater.common import metrics
from slackwater.common.errors import ConfigRejected
from slackwater.common.shell.definition import Level
from slackwater.common.shell.main import SCRAPE_S
from slackwater.memory.latency import BUCKETS, CAUSES, Latencies, bound_ns
from slackwater.schemas.memory import DeviceHeartbeat

COUNTED: Final = (
    "read_pages",
    "read_remote_pages",
    "read_waited_pages",
    "written_pages",
    "written_remote_pages",
    "prefetched_pages",
    "prefetch_hit_pages",
    "prefetch_late_pages",
    "slabs_evicted",
    "slabs_lost",
    "refilled_pages",
    "regenerated_pages",
    "repaired_fragments",
    "lost_pages",
)
_PARTS: Final = 4
"""Of a power of two, in the histograms: scraped are whole ones."""
_log = structlog.get_logger()


def counted(beat: DeviceHeartbeat) -> dict[str, int]:
    return {name: getattr(beat, name) for name in COUNTED}


def levels(beat: DeviceHeartbeat) -> Iterator[Level]:
    yield Level("device_spans", {"state": "all"}, float(beat.spans))
    yield Level("device_spans", {"state": "mapped"}, float(beat.mapped_spans))
    yield Level("device_lenders", {}, float(beat.lenders))
    yield Level("device_pages_per_s", {}, beat.activity)
    yield Level("device_backup_waiting_pages", {}, float(beat.backup_waiting_pages))
    yield Level("device_degraded", {}, float(beat.state == "degraded"))
    yield Level("device_stuck", {}, float(beat.state == "stuck"))


class _Collector(Collector):
    """What all services tell, and how long requests took."""

    def __init__(self, figures: Collector, id: str, latency: Latencies) -> None:
        self._figures = figures
        self._id = id
        self._latency = latency

    def collect(self) -> Iterator[Metric]:
        yield from self._figures.collect()
        family = HistogramMetricFamily(
            "slackwater_device_request_seconds",
            "Time of NBD requests by what they waited for, each counted at its bucket's bound",
            labels=["service", "id", "cause"],
        )
        for cause, counts in zip(CAUSES, self._latency.total().tolist(), strict=True):
            below, seconds = 0, 0.0
            buckets: list[tuple[str, float]] = []
            for at, count in enumerate(counts):
                below += count
                seconds += count * bound_ns(at) / 1e9
                if at % _PARTS == 0 and at < BUCKETS - 1:
                    buckets.append((f"{bound_ns(at) / 1e9:g}", below))
            family.add_metric(
                ["device", self._id, cause], [*buckets, ("+Inf", below)], sum_value=seconds
            )
        yield family


def expose(
    id: str, port: int, beat: Callable[[], DeviceHeartbeat], latency: Latencies
) -> metrics.Exposition:
    """On this loopback port, -1: any free one (logged). Raises ConfigRejected."""
    loop = asyncio.get_running_loop()

    async def read() -> DeviceHeartbeat:
        return beat()

    def ask() -> DeviceHeartbeat:
        """A scrape is another thread's: the loop is asked."""
        return asyncio.run_coroutine_threadsafe(read(), loop).result(SCRAPE_S)

    figures = metrics.ShellCollector(
        "device", id, lambda: counted(ask()), dict[str, float], lambda: levels(ask())
    )
    collector = _Collector(figures, id, latency)
    try:
        exposition = metrics.Exposition(collector, port)
    except (OSError, OverflowError) as error:
        raise ConfigRejected(
            f"metrics port {port}: {error}; choose another, or 0 for none"
        ) from error
    _log.info("metrics", port=exposition.port)
    return exposition
