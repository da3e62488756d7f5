"""What a device tells Prometheus: the figures of its heartbeats, read when somebody scrapes."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

import structlog

from slackwater.common import metrics
from slackwater.common.errors import ConfigRejected
from slackwater.common.shell.definition import Level
from slackwater.common.shell.main import SCRAPE_S
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


def expose(id: str, port: int, beat: Callable[[], DeviceHeartbeat]) -> metrics.Exposition:
    """On this loopback port, -1: any free one (logged). Raises ConfigRejected."""
    loop = asyncio.get_running_loop()

    async def read() -> DeviceHeartbeat:
        return beat()

    def ask() -> DeviceHeartbeat:
        """A scrape is another thread's: the loop is asked."""
        return asyncio.run_coroutine_threadsafe(read(), loop).result(SCRAPE_S)

    collector = metrics.ShellCollector(
        "device", id, lambda: counted(ask()), dict[str, float], lambda: levels(ask())
    )
    try:
        exposition = metrics.Exposition(collector, port)
    except (OSError, OverflowError) as error:
        raise ConfigRejected(
            f"metrics port {port}: {error}; choose another, or 0 for none"
        ) from error
    _log.info("metrics", port=exposition.port)
    return exposition
