"""The full-screen `top`, driven by keys: a thousand jobs without a cluster, and a live one."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.integration.web.test_scale import job, node

from slackwater.cli.full_screen import JobScreen, Listing, LogScreen, Question, Top
from slackwater.client import AsyncClient
from slackwater.common.base.clock import LiveClock
from slackwater.common.bus.memory import MemoryBroker
from slackwater.common.embedded.cluster import ClusterOptions, EmbeddedCluster
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.memory import DeviceHeartbeat, SlabdHeartbeat
from slackwater.web.rows import device, lender
from slackwater.web.watch import Watch

SIZES = [(80, 24), (160, 50)]
LENDER = SlabdHeartbeat(
    service="slabd", id="m1", incarnation=1, at_s=0.0, node="n1", addresses=(), free_slabs=1,
    lent_slabs=3, slab_bytes=2**30, devices=2, total_bytes=2**33, used_bytes=2**31,
    headroom_bytes=0,
)  # fmt: skip
DEVICE = DeviceHeartbeat(
    service="device", id="swap1", incarnation=1, at_s=0.0, node="n2", resilience="replicas",
    size_bytes=2**32, spans=4, mapped_spans=3, lenders=2, read_pages=400, read_remote_pages=300,
    written_pages=0, written_remote_pages=0, backup_waiting_pages=0, activity=1.0,
)  # fmt: skip


async def until(pilot: Any, look: Callable[[], Any]) -> Any:
    for _ in range(600):
        await pilot.pause(0.05)
        if found := look():
            return found
    raise AssertionError("never")


def notes(app: Top) -> list[Any]:
    return list(app._notifications)


async def forever(_: Watch) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("size", SIZES)
async def test_a_thousand_jobs_are_sorted_filtered_and_walked(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes a few seconds: tables of a thousand rows are filled several times."""
    monkeypatch.setattr(Watch, "run", forever)
    clock = LiveClock()
    app = Top(AsyncClient(MemoryBroker(1, clock=clock).connect("top"), clock))
    board = app.watch_cluster.board
    for id in range(1000):
        board.put("jobs", f"job-{id}", job(id))
        board.put("going", f"job-{id}", [id, 1.0, 100.0, 0.01, 0])
        board.put("nodes", f"n{id % 200}", node(id, 1))
    board.put("lenders", "m1", lender(LENDER))
    board.put("devices", "swap1", device(DEVICE))
    board.put("counts", "jobs", {"running": 750, "pending": 250})
    async with app.run_test(size=size) as pilot:
        listing = app.listing
        await until(pilot, lambda: listing.row_count == 1000)
        assert listing.shown[0]["state"] == "running"
        await pilot.press("end")
        await until(pilot, lambda: listing.cursor_row == 999)
        board.put("going", "job-1", [123_456, 1.0, 100.0, 0.01, 0])
        app.look()
        place = [row["id"] for row in listing.shown].index("job-1")
        cells = [str(cell) for cell in listing.get_row_at(place)]
        assert "123,456/1,000,000" in cells
        assert listing.cursor_row == 999, "it stays where the user is"
        await pilot.press("slash", *"job-77 running", "enter")
        await until(pilot, lambda: listing.row_count == 9)
        assert all("job-77" in row["id"] for row in listing.shown)
        await pilot.press("escape")
        await until(pilot, lambda: listing.row_count == 1000)
        await pilot.press("s", "S")
        await until(pilot, lambda: (listing.sort_key, listing.descending) == ("age", True))
        await pilot.press("2")
        nodes = app.query_one("#table-nodes", Listing)
        await until(pilot, lambda: nodes.row_count == 200)
        await pilot.press("5")
        lenders = app.query_one("#table-lenders", Listing)
        await until(pilot, lambda: lenders.row_count == 1)
        cells = [str(cell) for cell in lenders.get_row_at(0)]
        assert cells[:6] == ["m1", "n1", "yes", "3.0 GiB", "1.0 GiB", "2.0 GiB"]
        await pilot.press("6")
        devices = app.query_one("#table-devices", Listing)
        await until(pilot, lambda: devices.row_count == 1)
        cells = [str(cell) for cell in devices.get_row_at(0)]
        assert cells[:7] == ["swap1", "serving", "n2", "4.0 GiB", "3/4", "2", "75.0%"]
        await pilot.press("question_mark", "escape", "q")
        await until(pilot, lambda: app.return_value == 0)


@pytest.mark.live
async def test_a_live_job_is_opened_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes some seconds: a cluster and a job."""
    async with (
        EmbeddedCluster(ClusterOptions(controllers=1, aggregators=1)) as cluster,
        AsyncClient.connect(cluster.url) as client,
    ):
        says = "import time\nfor i in range(999): print('step', i, flush=True); time.sleep(0.1)"
        await client.submit(JobSpec(id="walks", program=(sys.executable, "-c", says)))
        app = Top(client)
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: app.listing.row_count == 1)
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, JobScreen))
            text = app.screen.query_one("#job")
            await until(pilot, lambda: "walks runs on w1" in str(getattr(text, "content", "")))
            await pilot.press("l")
            await until(pilot, lambda: isinstance(app.screen, LogScreen))
            log: Any = app.screen.query_one("#log")
            await until(pilot, lambda: any("step 5" in strip.text for strip in log.lines))
            await pilot.press("escape", "escape")
            await until(pilot, lambda: app.screen is app.screen_stack[0])
            await pilot.press("c")
            await until(pilot, lambda: isinstance(app.screen, Question))
            await pilot.press("n")
            await until(pilot, lambda: app.screen is app.screen_stack[0])
            assert (await client.job("walks")).state == "running"
            await pilot.press("c")
            await until(pilot, lambda: isinstance(app.screen, Question))
            await pilot.press("y")
            await until(pilot, lambda: app.listing.shown[0]["state"] == "cancelled")
            await pilot.press("p")
            await until(pilot, lambda: isinstance(app.screen, Question))
            await pilot.press("y")
            await until(pilot, lambda: any(note.severity == "error" for note in notes(app)))
            await pilot.press("4")
            await until(
                pilot,
                lambda: any("walks cancelled" in row["text"] for row in app.listing.shown),
            )
