"""Figures of a device for Prometheus: those of its heartbeats, read when somebody scrapes."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final

import structlog

from slackwater.common.base.histogram import Histogram
from slackwater.common.shell import metrics
from slackwater.common.shell.definition import Level
from slackwater.memory.pages.latency import BUCKETS, CAUSES, Latencies, bound_ns
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
"""Parts of a power of two in the device's histograms; a scrape gets whole powers."""
_log = structlog.get_logger()


def samples(beat: DeviceHeartbeat, latency: Latencies) -> Iterator[Level]:
    for name in COUNTED:
        yield Level(f"device_{name}_total", {}, getattr(beat, name))
    yield Level("device_spans", {"state": "all"}, float(beat.spans))
    yield Level("device_spans", {"state": "mapped"}, float(beat.mapped_spans))
    yield Level("device_lenders", {}, float(beat.lenders))
    yield Level("device_pages_per_second", {}, beat.activity)
    yield Level("device_backup_waiting_pages", {}, float(beat.backup_waiting_pages))
    yield Level("device_degraded", {}, float(beat.state == "degraded"))
    yield Level("device_stuck", {}, float(beat.state == "stuck"))
    for cause, counts in zip(CAUSES, latency.total().tolist(), strict=True):
        yield Level("device_request_duration_seconds", {"cause": cause}, _took(counts))


def _took(counts: list[int]) -> Histogram:
    """Convert to a histogram by whole powers of two; each request counts at its bucket's bound."""
    edges = range(0, BUCKETS - 1, _PARTS)
    made = Histogram([bound_ns(at) / 1e9 for at in edges])
    for at, count in enumerate(counts):
        made.counts[bisect_left(edges, at)] += count
        made.sum += count * bound_ns(at) / 1e9
    return made


def expose(
    id: str, at: tuple[str, int], beat: Callable[[], DeviceHeartbeat], latency: Latencies
) -> metrics.Exposition:
    """Serve metrics at this address and port, -1: any free one (logged). Raises ConfigRejected."""
    exposition = metrics.expose("device", id, *at, lambda: samples(beat(), latency))
    _log.info("metrics", address=at[0], port=exposition.port)
    return exposition
