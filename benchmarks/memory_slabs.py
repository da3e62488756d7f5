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
import contextlib
import os
import random
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
from figures import Figure, show

from slackwater.common import codec
from slackwater.common.bus.base import Delivery
from slackwater.common.client import Client, connect
from slackwater.common.config import write_config
from slackwater.common.embedded import Supervisor, UnitSpec
from slackwater.loadgen.memory.workloads import workload
from slackwater.memory import RemoteArray
from slackwater.memory.store import PAGE_BYTES
from slackwater.schemas import subjects
from slackwater.schemas.base import Ok
from slackwater.schemas.memory import EvictNow, SlabEvent, SpanEvent

MIB = 1024 * 1024
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


class Events:
    def __init__(self) -> None:
        self.map_s: list[float] = []
        self.evict_s: list[float] = []
        self.forced = 0

    async def listen(self, client: Client) -> None:
        async def span(delivery: Delivery) -> None:
            event = codec.decode(delivery.payload, SpanEvent)
            if event.fact == "mapped":
                self.map_s.append(event.took_s)

        async def slab(delivery: Delivery) -> None:
            event = codec.decode(delivery.payload, SlabEvent)
            if event.fact == "evicted":
                self.evict_s.append(event.took_s)
            self.forced += event.fact == "revoked"

        await client.bus.subscribe(subjects.events("device"), span)
        await client.bus.subscribe(subjects.events("slab"), slab)


@contextlib.asynccontextmanager
async def lenders(folder: Path, slabs: int, token: str, count: int = LENDERS) -> AsyncIterator[str]:
    supervisor = Supervisor()
    try:
        url = await supervisor.start_nats()
        specs = []
        for number in range(count):
            id = f"s{number}"
            config = folder / f"{id}.toml"
            (folder / id).mkdir()
            values = {
                "id": id, "node": id, "url": url, "state_dir": str(folder / id),
                "tcp_address": "127.0.0.1:0", "cluster_token": token, "slab_bytes": SLAB_BYTES,
                "lend_bytes_max": slabs * (SLAB_BYTES + PAGE_BYTES), "headroom_bytes": 512 * MIB,
            }  # fmt: skip
            write_config(config, values)
            command = (sys.executable, "-m", "slackwater.services.slabd", "--config", str(config))
            specs.append(UnitSpec(name=id, command=command))
        await supervisor.start_units(specs)
        await asyncio.sleep(2.0 + slabs * 0.2)  # Slabs are made one after another.
        yield url
    finally:
        await supervisor.stop()


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
        async with lenders(Path(folder), slabs, token) as url, connect(url, "benchmark") as client:
            await events.listen(client)
            array = await asyncio.to_thread(
                RemoteArray, (pages, PAGE_BYTES), np.uint8,
                cache_bytes=pages * PAGE_BYTES * 3 // 4, url=url, node="here",
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
