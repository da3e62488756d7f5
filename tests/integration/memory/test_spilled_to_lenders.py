"""Spilled data goes to real lenders' memory, and comes back while that is taken away."""

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from tests.integration.memory.test_array_on_lenders import MIB, lender

from slackwater.common.base.errors import Rejected
from slackwater.common.embedded import Supervisor
from slackwater.common.shell.client import Client, connect
from slackwater.memory.spill import SpillServer, Tiers
from slackwater.schemas import subjects
from slackwater.schemas.memory import EvictBegun, EvictNow

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]
BLOBS, NBYTES = 200, 40_000


def blob(number: int) -> bytes:
    return np.random.default_rng(number).bytes(NBYTES)


def put_all(spill_server: SpillServer) -> None:
    assert all(spill_server.put(str(number), blob(number)) for number in range(BLOBS))


def check_all(spill_server: SpillServer) -> None:
    found = spill_server.get([str(number) for number in range(BLOBS)])
    assert [bytes(one or b"") for one in found] == [blob(number) for number in range(BLOBS)]


async def test_blobs_go_to_lenders_and_come_back_while_slabs_are_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for a tenth, lenders for half, the disk for the rest; and a program that ends without
    a word leaves nothing and complains of nothing."""
    monkeypatch.setenv("SLACKWATER_CLUSTER_TOKEN", "secret")
    supervisor = Supervisor()
    try:
        url = await supervisor.start_nats()
        await supervisor.start_units([lender(tmp_path, f"s{i}", url) for i in (1, 2)])
        (folder := tmp_path / "spilled").mkdir()
        tiers = Tiers(
            memory_bytes=BLOBS * NBYTES // 10, remote_bytes=4 * MIB, disk_bytes=64 * MIB,
            folder=folder, url=url, node="here",
        )  # fmt: skip
        spill_server = await asyncio.to_thread(SpillServer, tiers)
        async with connect(url, "test") as client:
            await asyncio.to_thread(put_all, spill_server)
            found = spill_server.figures()
            assert found["memory_blobs"] + found["remote_blobs"] + found["disk_blobs"] == BLOBS
            assert found["remote_bytes"] > 3 * MIB
            evicted = 0
            async with asyncio.timeout(30):
                while evicted < 2:  # Spans become hot once what they have is read.
                    await asyncio.to_thread(check_all, spill_server)
                    for id in ("s1", "s2"):
                        evicted += await _evict(client, id)
            await asyncio.to_thread(check_all, spill_server)
            assert spill_server.figures().get("unreadable", 0) == 0
        await asyncio.to_thread(spill_server.close)
        assert not list(folder.iterdir())
        await asyncio.to_thread(_forgetful, url, folder)
    finally:
        await supervisor.stop()


async def _evict(client: Client, id: str) -> int:
    try:
        subject = subjects.command("slabd", id, "evict")
        return (await client.ask(subject, EvictNow(count=1), EvictBegun)).slabs
    except Rejected:
        return 0  # It lends nothing at present.


def _forgetful(url: str, folder: Path) -> None:
    program = f"""
        from pathlib import Path
        from slackwater.memory.spill import SpillServer, Tiers

        server = SpillServer(Tiers(memory_bytes=0, remote_bytes=1 << 20, url={url!r},
                              folder=Path({str(folder)!r}), node="here"))
        assert server.put("a", bytes(100_000))
        assert server.get(["a", "b"]) == [bytearray(100_000), None]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert not list(folder.iterdir())
