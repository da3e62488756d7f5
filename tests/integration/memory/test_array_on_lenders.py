"""An array whose pages are in lenders' memory, while that is taken away: real slabd, a real bus."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import nats
import numpy as np
import pytest

from slackwater.common.base.errors import ConfigRejected, SlackwaterError
from slackwater.common.embedded import Supervisor, UnitSpec
from slackwater.common.shell.client import connect
from slackwater.common.shell.config import write_config
from slackwater.loadgen.memory.checker import content
from slackwater.memory import RemoteArray
from slackwater.memory.array import userfault
from slackwater.memory.store import PAGE_BYTES
from slackwater.schemas import subjects
from slackwater.schemas.memory import EvictBegun, EvictNow

MIB = 1024 * 1024
PAGES = 1024

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


def work(
    url: str, folder: Path, evict: "asyncio.Queue[int]", loop: asyncio.AbstractEventLoop
) -> int:
    """Write and verify random pages; every now and then have a slab evicted. Pages checked."""
    rng = np.random.default_rng(11)
    newest = np.zeros(PAGES, np.int64)
    checked = 0
    with RemoteArray(
        (PAGES, PAGE_BYTES), np.uint8, cache_bytes=MIB, url=url, slab_bytes=MIB, node="here",
        backup=folder / "backup",
    ) as pages:  # fmt: skip
        for _ in range(200):  # Until it is in remote memory.
            pages[:] = 0
            pages.flush()
            if pages.figures()["remote_pages"] == PAGES:
                break
        assert pages.figures()["remote_pages"] == PAGES
        for generation in range(1, 4000):
            page = int(rng.integers(PAGES))
            assert pages[page].tobytes() == content(page, int(newest[page])), page
            checked += 1
            if generation % 2:
                pages[page] = np.frombuffer(content(page, generation), np.uint8)
                newest[page] = generation
            if generation % 400 == 0:
                loop.call_soon_threadsafe(evict.put_nowait, generation)
        for page in range(PAGES):
            assert pages[page].tobytes() == content(page, int(newest[page])), page
        assert pages.figures()["evicted"] > PAGES
    return checked


async def test_every_page_is_right_while_lenders_take_their_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        os.close(userfault.open_userfault())
    except ConfigRejected as error:
        pytest.skip(str(error))
    monkeypatch.setenv("SLACKWATER_CLUSTER_TOKEN", "secret")
    supervisor = Supervisor()
    evict: asyncio.Queue[int] = asyncio.Queue()
    asked = evicted = 0
    try:
        url = await supervisor.start_nats()
        await supervisor.start_units([lender(tmp_path, f"s{i}", url) for i in (1, 2)])
        loop = asyncio.get_running_loop()
        working = asyncio.ensure_future(asyncio.to_thread(work, url, tmp_path, evict, loop))
        async with connect(url, "test") as client:
            while not working.done():
                waiting = asyncio.ensure_future(evict.get())
                await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    continue
                subject = subjects.command("slabd", f"s{1 + asked % 2}", "evict")
                asked += 1
                with contextlib.suppress(SlackwaterError):  # It has none to evict.
                    await client.ask(subject, EvictNow(count=1), EvictBegun)
                    evicted += 1
            assert await working == 3999
        assert evicted >= 3
        kept = [name for name in await streams(url) if "array" in name]
        assert not kept, "an array that has gone leaves records on the bus"
    finally:
        await supervisor.stop()


async def streams(url: str) -> list[str]:
    client = await nats.connect(url)
    try:
        found = await client.jetstream().streams_info()
        return [one.config.name or "" for one in found]
    finally:
        await client.close()


def lender(folder: Path, id: str, url: str) -> UnitSpec:
    config, state = folder / f"{id}.toml", folder / id
    state.mkdir()
    values = {
        "id": id, "node": id, "url": url, "state_dir": str(state), "slab_bytes": MIB,
        "tcp_address": "127.0.0.1:0", "cluster_token": "secret", "lend_bytes_max": 8 * MIB,
        "headroom_bytes": 256 * MIB,
    }  # fmt: skip
    write_config(config, values)
    command = (sys.executable, "-m", "slackwater.services.slabd", "--config", str(config))
    return UnitSpec(name=id, command=command)
