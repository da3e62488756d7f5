"""The cost of losing one lender of six: with the disk behind it, coded 4 + 2, with two copies.

Gu, dissertation, 2.7.4, and Hydra (FAST'22), 7.3. Six lenders are processes; the device is in this
one, and 16 tasks read single pages at random, all of them in remote memory. Then one lender that
backs it is killed with its memory. A figure is the rate of the four seconds after that over the
rate of the four seconds before: placement, regeneration and reads from the backup file are all in
it. `--disk` is what an operation of the backup file takes (100 us: an SSD; 4 ms: a hard disk). Each
page is checked. Modes are interleaved, round by round.

    python benchmarks/memory_loss.py [--rounds 3] [--disk 0.0001] [--modes disk,4+2,2-copies]
        [--json FILE]
"""

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
from figures import paired, show, this_command, write_json
from lending import MIB, lenders

from slackwater.common.base.clock import LiveClock
from slackwater.memory.pages.table import page_range
from slackwater.memory.service.assembly import DeviceAssembly
from slackwater.memory.service.options import DeviceOptions
from slackwater.memory.service.warm import warm
from slackwater.memory.store import PAGE_BYTES

SLAB_BYTES = 4 * MIB
PAGES = 24 * MIB // PAGE_BYTES
LENDERS = 6
SLABS = 6
"""Slabs of each lender."""
READERS = 16
PHASE_S = 4.0
GOALS = {"disk": 1 - 0.583, "4+2": 0.9, "2-copies": None}


class Readers:
    """Check every page that they read; `done` counts."""

    def __init__(self, assembly: DeviceAssembly) -> None:
        self.done = 0
        self._device = assembly.device
        self._data = np.random.default_rng(1).integers(0, 256, (PAGES, PAGE_BYTES), np.uint8)

    async def fill(self) -> None:
        """Until every page is in remote memory, with all the members that a span should have."""
        device, width = self._device, self._device.resilience.width
        spans = len(device.table.state)
        async with asyncio.timeout(120):
            while True:
                for first in range(0, PAGES, 256):
                    part = self._data[first : first + 256].reshape(-1).data
                    await device.write_pages(page_range(first, 256), part)
                await device.flush()
                members = [m for span in range(spans) for m in device.members(span)]
                present = sum(device.present_pages(span) for span in range(spans))
                if present == PAGES and len(members) - members.count(None) == spans * width:
                    return
                await asyncio.sleep(0.2)

    async def read(self, seed: int) -> None:
        rng, target = random.Random(seed), np.empty(PAGE_BYTES, np.uint8)
        while True:
            page = rng.randrange(PAGES)
            wanted = page_range(page, 1)
            if not self._device.read_now(wanted, target.data):
                await self._device.read_pages(wanted, target.data)
            if not np.array_equal(target, self._data[page]):
                raise SystemExit(f"page {page} is wrong")
            self.done += 1
            if self.done % 16 == 0:
                await asyncio.sleep(0)

    async def rate(self) -> float:
        begun, begun_s = self.done, time.monotonic()
        await asyncio.sleep(PHASE_S)
        return (self.done - begun) / (time.monotonic() - begun_s)


async def one(mode: str, disk_s: float) -> tuple[float, float]:
    """(reads a second before, after)."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        async with lenders(folder, LENDERS, SLAB_BYTES, SLABS) as supervisor:
            options = DeviceOptions(
                id="d", size_bytes=PAGES * PAGE_BYTES, socket=None, backup=folder / "backup",
                node="here", slab_bytes=SLAB_BYTES, resilience=mode, hot=0.5, hold_s=1.0,
                delay_s=disk_s, transport="shm",
            )  # fmt: skip
            assembly, stop = DeviceAssembly(options, SLAB_BYTES, LiveClock()), asyncio.Event()
            await assembly.start()
            shown = asyncio.ensure_future(assembly.publish(supervisor.url, stop))
            users: list[asyncio.Task[None]] = []
            try:
                readers = Readers(assembly)
                await readers.fill()
                users = [asyncio.ensure_future(readers.read(n)) for n in range(READERS)]
                await asyncio.sleep(1.0)
                before = await readers.rate()
                [lost, *_] = [m.lender for m in assembly.device.members(0) if m is not None]
                supervisor.drop_fds(lost)
                supervisor.kill(lost, signal.SIGKILL)
                after = await readers.rate()
                for user in users:
                    if user.done():
                        user.result()
            finally:
                for user in users:
                    user.cancel()
                stop.set()
                await assembly.close()
                await asyncio.gather(shown, *users, return_exceptions=True)
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=float, default=1e-4)
    parser.add_argument("--modes", default="disk,4+2,2-copies")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    warm()
    modes = chosen.modes.split(",")
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    for _ in range(chosen.rounds):
        for mode in modes:
            found[mode].append(asyncio.run(one(mode, chosen.disk)))
    rows = [
        paired(
            f"one lender of {LENDERS} lost: {mode}, disk of {chosen.disk * 1e6:g} us",
            [after for _, after in pairs], [before for before, _ in pairs], "pages/s", "before",
            goal=GOALS.get(mode),
        )
        for mode, pairs in found.items()
    ]  # fmt: skip
    show(f"Losing a lender, load {os.getloadavg()[0]:.1f}", rows)
    if chosen.json is not None:
        write_json(chosen.json, this_command(), rows)


if __name__ == "__main__":
    main()
