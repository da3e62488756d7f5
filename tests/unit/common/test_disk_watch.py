"""The watch over a bus server's disk: what it tells, holds back and does."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from slackwater.common.base import codec, limits
from slackwater.common.base.clock import LiveClock
from slackwater.common.bus.base import Delivery
from slackwater.common.bus.disk_watch import DiskWatch, looked, reason_in
from slackwater.common.bus.memory import MemoryBroker
from slackwater.schemas.service import BusState


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("", ""),
        ("JetStream has not established contact with a meta leader", ""),
        ("JetStream stream '$G > KV_jobs' is not current", ""),
        ("JetStream not enabled (10076)", "its disk refused a write, and it keeps no records"),
        (
            "JetStream stream 'facts' is not current: stream assignment error: insufficient "
            "storage resources available (10047)",
            "it started when its disk had no room",
        ),
        ("stream write error: no space left on device", "stream write error: no space left"),
    ],
)
def test_only_refused_writes_are_a_reason(said: str, reason: str) -> None:
    """A server of a cluster ends its JetStream when its disk is full; it was left like that."""
    assert reason_in(said).startswith(reason)
    assert bool(reason_in(said)) is bool(reason)


def test_a_server_is_started_anew_once_its_disk_was_well_for_some_looks() -> None:
    ill, done = 0, []
    for mended in (False, *[True] * (limits.BUS_MENDED_LOOKS + 1)):
        ill, restart = looked(ill, mended)
        done.append(restart)
    assert done.index(True) == limits.BUS_MENDED_LOOKS
    assert looked(limits.BUS_MENDED_LOOKS - 1, False) == (0, False)


class Page(BaseHTTPRequestHandler):
    said = ""

    def do_GET(self) -> None:
        body = json.dumps({"error": self.said}).encode() if self.said else b'{"status":"ok"}'
        self.send_response(503 if self.said else 200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def page() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


async def test_it_tells_and_restarts_and_holds_a_reserve(page: str, tmp_path: Path) -> None:
    restarts: list[str] = []
    told: list[BusState] = []
    broker = MemoryBroker()

    async def hear(delivery: Delivery) -> None:
        told.append(codec.decode(delivery.payload, BusState))

    await broker.connect("listener").subscribe("sw.v1.tel.bus.n1.state", hear)
    watch = DiskWatch(
        "n1", tmp_path, page, broker.connect("bus-n1"), LiveClock(), lambda: restarts.append("n1")
    )
    await watch._look()
    await settled(told, 1)
    assert (told[0].server, told[0].reason) == ("n1", "")
    assert told[0].free_bytes > 0
    held = (tmp_path / ".reserve").stat().st_blocks * 512
    assert held >= min(told[0].total_bytes // 50, 16 * 2**20)
    Page.said = "JetStream not enabled (10076)"
    try:
        for _ in range(limits.BUS_MENDED_LOOKS):
            assert not restarts
            await watch._look()
    finally:
        Page.said = ""
    assert restarts == ["n1"]
    await settled(told, 1 + limits.BUS_MENDED_LOOKS)
    assert told[-1].reason.startswith("its disk refused a write")


async def settled(told: list[BusState], number: int) -> None:
    async with asyncio.timeout(5.0):
        while len(told) < number:  # noqa: ASYNC110 (the listener is another task)
            await asyncio.sleep(0.01)
