"""What it takes to map and to evict a slab, and what each eviction costs the device's client.

Gu, dissertation, 2.7.4: a slab is mapped in 54 ms, nearly all of it registration, and evicted in
363 us (medians); with one eviction a second the client, a database with three quarters of its
memory local, loses 2.3 % for each. Here six lenders are processes; an array of 4 KiB pages with
three quarters of it in local memory is played a key-value mix (loadgen/memory), a third of it
writes. Seconds with one eviction, by batch eviction on a lender in turn, and seconds without are
mixed at random; a figure is the mean rate of the ones over that of the others. Times are those that
lenders and devices tell the bus.

    python benchmarks/memory_slabs.py [--seconds 40] [--size 32] [--transport shm]
"""

import argparse
import asyncio
import os
import random
import secrets
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from figures import Figure, show
from lending import MIB, Events, lenders

from slackwater.common.client import Client, connect
from slackwater.loadgen.memory.workloads import workload
from slackwater.memory import RemoteArray
from slackwater.memory.store import PAGE_BYTES
from slackwater.schemas import subjects
from slackwater.schemas.base import Ok
from slackwater.schemas.memory import EvictNow

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


async def seconds(client: Client, player: Player, count: int) -> tuple[list[float], list[float]]:
    """Requests a second in periods without an eviction, and with one."""
    kinds = [False, True] * (count // 2)
    random.Random(1).shuffle(kinds)
    found: dict[bool, list[float]] = {False: [], True: []}
    for number, evicting in enumerate(kinds):
        begun, begun_s = player.done, time.monotonic()
        if evicting:
            subject = subjects.command("slabd", f"s{number % LENDERS}", "evict")
            await client.ask(subject, EvictNow(count=1), Ok)
        await asyncio.sleep(PERIOD_S)
        found[evicting].append((player.done - begun) / (time.monotonic() - begun_s))
    return found[False], found[True]


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
                quiet, evicting = await seconds(client, player, arguments.seconds)
                await asyncio.sleep(1.0)
            finally:
                player.stopping = True
                await asyncio.to_thread(player.join)
                await asyncio.to_thread(array.close)
    again = events.map_s[len(first) :]
    return rows(first, again, events, quiet, evicting)


def rows(
    first: list[float],
    again: list[float],
    events: Events,
    quiet: list[float],
    evicting: list[float],
) -> list[Figure]:
    made = []
    for name, found, paper_ms, goal_ms in (
        ("map a slab, many at once", first, 54.25, None),
        ("map a slab again", again, 54.25, 2.0),
        ("evict a slab", events.evict_s, 0.363, 5.0),
    ):
        if found:
            made.append(
                Figure(
                    f"{name} ({len(found)} times)", statistics.median(found) * 1e3, paper_ms, "ms",
                    "paper", goal=goal_ms and goal_ms / paper_ms, lower_is_better=True,
                    spread=(np.percentile(found, 90) - np.percentile(found, 10)) * 1e3,
                )
            )  # fmt: skip
    made.append(
        Figure(
            f"client's rate, a slab evicted ({len(evicting)} seconds)",
            statistics.fmean(evicting), statistics.fmean(quiet), "1/s", "undisturbed",
            goal=1.0 - LOSS_GOAL, spread=statistics.stdev(evicting) / statistics.fmean(evicting),
        )
    )  # fmt: skip
    if events.forced:
        raise SystemExit(f"{events.forced} slabs were taken by force: no DONE within the deadline")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=40)
    parser.add_argument("--size", type=int, default=32, help="MiB of the array")
    parser.add_argument("--transport", default="shm")
    chosen = parser.parse_args()
    load = os.getloadavg()[0]
    show(f"Slabs, {chosen.transport}, load {load:.1f}", asyncio.run(measure(chosen)))


if __name__ == "__main__":
    main()
