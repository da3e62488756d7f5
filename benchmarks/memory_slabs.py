"""Times to map and to evict a slab, and the cost of each eviction to the device's client.

Gu, dissertation, 2.7.4: a slab is mapped in 54 ms, nearly all of it registration, and evicted in
363 us (medians, slabs of 1 GB over InfiniBand); with one eviction a second the client, a database
with three quarters of its memory local, loses 2.3 % for each. Here slabs have 1 MiB and, over shm,
nothing is registered: what is measured is the protocol between processes, so a mapping cannot be
compared with the paper's. Six lenders are processes; an array of 4 KiB pages with three quarters of
it in local memory is played a key-value mix (loadgen/memory), a third of it writes. Each second
with an eviction, by batch eviction on a lender in turn, has a second without for a neighbour,
whichever comes first by chance; the figure is the median of the pairs' ratios. Times are those that
lenders and devices tell the bus.

    python benchmarks/memory_slabs.py [--pairs 120] [--size 32] [--transport shm] [--json FILE]
"""

import argparse
import asyncio
import os
import random
import secrets
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from figures import Figure, paired, show, this_command, write_json
from lending import (
    EVICT_MS,
    MAP_MS,
    MIB,
    PAPER_EVICT_MS,
    PAPER_MAP_MS,
    REGISTERED,
    Events,
    evict_one,
    lenders,
    slab_times,
)

from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.memory.workloads import workload
from slackwater.memory import RemoteArray
from slackwater.memory.store import PAGE_BYTES

LENDERS = 6
SLAB_BYTES = MIB
PERIOD_S = 1.0
LOSS_GOAL = 0.023


class Player(threading.Thread):
    """Touches pages until it is stopped; `done` counts requests."""

    def __init__(self, array: RemoteArray, pages: int) -> None:
        super().__init__(daemon=True)
        self.done = 0
        self.stopping = False
        self._rows, self._pages = array.array, pages

    def run(self) -> None:
        rows, target = self._rows, np.empty(PAGE_BYTES, np.uint8)
        stream = workload("sys", self._pages, 1)
        while not self.stopping:
            asked = stream.batch(64)
            for first, count, write in zip(
                asked.first.tolist(), asked.count.tolist(), asked.write.tolist(), strict=True
            ):
                for page in range(first, first + count):
                    if write:
                        rows[page] = target
                    else:
                        target[:] = rows[page]
                self.done += 1
        del self._rows


def fill(array: RemoteArray, pages: int) -> None:
    """Written until all of it is in remote memory."""
    for _ in range(60):
        for page in range(pages):
            array.array[page] = page % 251
        array.flush()
        if array.figures()["remote_pages"] >= pages:
            return
    raise SystemExit("the lenders did not take the array: is there room for it?")


async def seconds(client: Client, player: Player, pairs: int) -> list[tuple[float, float]]:
    """Requests a second in periods with an eviction, and in those beside them without one."""

    async def one(lender: int | None) -> float:
        begun, begun_s = player.done, time.monotonic()
        if lender is not None:
            await evict_one(client, *(f"s{(lender + n) % LENDERS}" for n in range(LENDERS)))
        await asyncio.sleep(PERIOD_S - (time.monotonic() - begun_s))
        return (player.done - begun) / (time.monotonic() - begun_s)

    rng, found = random.Random(1), []
    for number in range(pairs):
        lender = number % LENDERS
        if rng.random() < 0.5:
            found.append((await one(lender), await one(None)))
        else:
            without = await one(None)
            found.append((await one(lender), without))
    return found


async def measure(arguments: argparse.Namespace) -> list[Figure]:
    token = secrets.token_hex(16)
    os.environ["SLACKWATER_CLUSTER_TOKEN"] = token
    pages = arguments.size * MIB // PAGE_BYTES
    slabs = 2 * arguments.size * MIB // SLAB_BYTES // LENDERS + 1
    events = Events()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        async with (
            lenders(Path(folder), LENDERS, SLAB_BYTES, slabs, token) as supervisor,
            connect(supervisor.url, "benchmark") as client,
        ):
            await events.listen(client)
            array = await asyncio.to_thread(
                RemoteArray, (pages, PAGE_BYTES), np.uint8,
                cache_bytes=pages * PAGE_BYTES * 3 // 4, url=supervisor.url, node="here",
                transport=arguments.transport, backup=Path(folder) / "backup",
            )  # fmt: skip
            player = Player(array, pages)
            try:
                await asyncio.to_thread(fill, array, pages)
                first = list(events.map_s)
                player.start()
                await asyncio.sleep(3.0)
                pairs = await seconds(client, player, arguments.pairs)
                await asyncio.sleep(1.0)
            finally:
                player.stopping = True
                await asyncio.to_thread(player.join)
                await asyncio.to_thread(array.close)
    again = events.map_s[len(first) :]
    return rows(first, again, events, pairs, arguments.transport)


def rows(
    first: list[float],
    again: list[float],
    events: Events,
    pairs: list[tuple[float, float]],
    transport: str,
) -> list[Figure]:
    made = [
        *slab_times(f"{transport}: map a slab, many at once", first, MAP_MS, None),
        *slab_times(
            f"{transport}: map a slab of 1 MiB again", again, MAP_MS, paper_ms=PAPER_MAP_MS,
            unlike=REGISTERED,
        ),
        *slab_times(
            f"{transport}: evict a slab of 1 MiB", events.evict_s, EVICT_MS,
            paper_ms=PAPER_EVICT_MS,
        ),
        paired(
            f"{transport}: client's rate in a second with an eviction",
            [evicting for evicting, _ in pairs], [quiet for _, quiet in pairs], "1/s",
            "a second without", goal=1.0 - LOSS_GOAL,
        ),
    ]  # fmt: skip
    if events.forced:
        raise SystemExit(f"{events.forced} slabs were taken by force: no DONE within the deadline")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=120, help="of seconds")
    parser.add_argument("--size", type=int, default=32, help="MiB of the array")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    found = asyncio.run(measure(chosen))
    show(f"Slabs, {chosen.transport}, load {os.getloadavg()[0]:.1f}", found)
    if chosen.json is not None:
        write_json(chosen.json, this_command(), found)


if __name__ == "__main__":
    main()
