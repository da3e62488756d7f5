"""Figures of a block device that Prometheus sees."""

import asyncio
import urllib.request
from pathlib import Path

import pytest

from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.shell import metrics
from slackwater.memory.pages import latency
from slackwater.memory.pages.latency import Latencies
from slackwater.memory.resilience.hydra import Hydra
from slackwater.memory.service.assembly import DeviceAssembly
from slackwater.memory.service.metrics import COUNTED, expose, samples
from slackwater.memory.service.options import DeviceOptions
from slackwater.schemas.base import NodeId
from slackwater.schemas.memory import DeviceHeartbeat

BEAT = DeviceHeartbeat(
    service="device", id="d1", incarnation=1, at_s=5.0, node=NodeId("m1"), resilience="disk",
    size_bytes=1 << 20, spans=4, mapped_spans=3, lenders=2, read_pages=100, read_remote_pages=70,
    written_pages=50, written_remote_pages=40, backup_waiting_pages=7, activity=12.5,
    prefetched_pages=9, state="degraded",
)  # fmt: skip


async def test_a_scrape_shows_the_heartbeats_figures() -> None:
    times = Latencies()
    latency.add(times.loop, latency.DISK, 3_000_000, 2)
    latency.add(times.loop, latency.DISK, 1_000, 1)
    exposition = expose("d1", ("127.0.0.1", -1), lambda: BEAT, times)
    try:
        url = f"http://127.0.0.1:{exposition.port}/metrics"
        said = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read())
        with pytest.raises(ConfigRejected, match=f"metrics_port {exposition.port} of .*in use"):
            expose("d2", ("127.0.0.1", exposition.port), lambda: BEAT, times)
    finally:
        await asyncio.to_thread(exposition.close)
    lines = said.decode().splitlines()
    assert 'slackwater_device_spans{id="d1",service="device",state="mapped"} 3.0' in lines
    assert 'slackwater_device_degraded{id="d1",service="device"} 1.0' in lines
    assert 'slackwater_device_prefetched_pages_total{id="d1",service="device"} 9.0' in lines
    family = "slackwater_device_request_duration_seconds"
    disk = 'cause="disk",id="d1"'
    assert f'{family}_bucket{{{disk},le="1.024e-06",service="device"}} 1.0' in lines
    assert f'{family}_bucket{{{disk},le="0.004194304",service="device"}} 3.0' in lines
    assert f'{family}_count{{{disk},service="device"}} 3.0' in lines
    assert f'{family}_count{{cause="hit",id="d1",service="device"}} 0.0' in lines


def test_all_of_them_are_declared() -> None:
    names = {level.name for level in samples(BEAT, Latencies())}
    assert names == {name for name in metrics.FAMILIES if name.startswith("device_")}
    assert set(COUNTED) <= set(DeviceHeartbeat.__struct_fields__)


async def test_a_device_counts_what_it_lost_and_got_back(tmp_path: Path) -> None:
    options = DeviceOptions(
        id="d1", size_bytes=1 << 20, socket=None, backup=tmp_path / "backup", resilience="4+2"
    )
    assembly = DeviceAssembly(options, 1 << 20, LiveClock())
    assembly.core.departed.update({"evict": 3, "lost": 2, "cold": 7})
    assembly.lenders.refiller.refilled_pages = 4
    assembly.lenders.regenerator.regenerated_pages = 5
    hydra = assembly.device.resilience
    assert isinstance(hydra, Hydra)
    hydra.erasures, hydra.lost_pages = 6, 1
    found = {
        level.name.removeprefix("device_").removesuffix("_total"): level.value
        for level in samples(assembly.status.heartbeat(0.0), assembly.device.latency)
    }
    assert (found["slabs_evicted"], found["slabs_lost"]) == (3, 2)
    assert (found["refilled_pages"], found["regenerated_pages"]) == (4, 5)
    assert (found["repaired_fragments"], found["lost_pages"]) == (6, 1)
