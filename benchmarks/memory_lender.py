"""The loss of a machine's own memcached by the lender beside it: lending, and giving up slabs.

Gu, dissertation, table 2.1: under 2 % of throughput and at most 4 % of the 99th percentile are
lost. There a memcached grows and the lender retreats (figure 2.17); here each eviction is ordered,
of a memcached that does not grow, so nothing is said of when a lender retreats. memcached
(Debian's) is driven by a process of its own with the ETC and SYS mixes over a Unix socket, one
request at a time. In a period `with` the lender runs, has lent its slabs, and gives one up, which
its device answers; in a period `without` its process is stopped (SIGSTOP). Two such neighbours,
whichever comes first by chance, are a pair; a figure is the median of the pairs' ratios. On one
machine the device's own work for an eviction counts against us as well, and at one eviction in four
tenths of a second there are more of them than a lender ever has.

    python benchmarks/memory_lender.py [--pairs 120] [--period 0.4] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from aggregation import Member
from figures import Figure, Row, Skipped, paired, show, this_command, write_json
from lending import MIB, evict_one, lenders
from memory_slabs import SLAB_BYTES, fill

from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.memory.workloads import workload
from slackwater.memory import RemoteArray
from slackwater.memory.store import PAGE_BYTES

LENDER = "s0"
SETTLE_S = 0.05
"""Seconds after a process was stopped or continued, or a slab was asked for."""
WARM_UP_S = 1.0
MEASURES = {
    "requests a second": ("1/s", 0.98), "p50": ("us", None), "p99": ("us", 1.04),
}  # fmt: skip
ITEMS = 20_000
VALUES = {"etc": (16, 512), "sys": (320, 500)}
"""Sizes that most values have (2.7.3.2); smaller and larger ones are left out."""
SETS = {"etc": 0.05, "sys": 0.25}


@contextlib.contextmanager
def memcached(folder: Path) -> Iterator[Path]:
    path = folder / "memcached"
    user = ["-u", "root"] if os.geteuid() == 0 else []
    server = subprocess.Popen(["memcached", "-s", str(path), "-m", "256", "-t", "1", *user])
    try:
        give_up_s = time.monotonic() + 10
        while not path.exists():
            if server.poll() is not None or time.monotonic() > give_up_s:
                raise SystemExit("memcached did not come up")
            time.sleep(0.05)
        yield path
    finally:
        server.terminate()
        server.wait()


class Store:
    """One connection, one request at a time."""

    def __init__(self, path: Path, mix: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._answers = self._socket.makefile("rb")
        self._rng = random.Random(mix)
        self._sizes = VALUES[mix]
        self._sets = SETS[mix]
        self._popular = workload("zipf", ITEMS, 1)
        self._body = os.urandom(self._sizes[1])
        for item in range(ITEMS):
            self.put(item)

    def put(self, item: int) -> None:
        size = self._rng.randint(*self._sizes)
        head = b"set key-%012d 0 0 %d\r\n" % (item, size)
        self._socket.sendall(head + self._body[:size] + b"\r\n")
        if self._answers.readline() != b"STORED\r\n":
            raise SystemExit("memcached did not store a value")

    def get(self, item: int) -> None:
        self._socket.sendall(b"get key-%012d\r\n" % item)
        head = self._answers.readline().split()
        if head != [b"END"]:  # Else it was pushed out.
            self._answers.read(int(head[3]) + len(b"\r\nEND\r\n"))

    def run(self, seconds: float) -> tuple[float, float, float]:
        """Requests a second; the median and the 99th percentile in microseconds."""
        took_ns: list[int] = []
        begun_s = time.monotonic()
        while True:
            for item in self._popular.batch(256).first.tolist():
                changes = self._rng.random() < self._sets
                before_ns = time.perf_counter_ns()
                self.put(item) if changes else self.get(item)
                took_ns.append(time.perf_counter_ns() - before_ns)
            if (took_s := time.monotonic() - begun_s) >= seconds:
                middle, high = np.percentile(took_ns, (50, 99)) / 1e3
                return len(took_ns) / took_s, float(middle), float(high)


def play(path: Path, mix: str) -> None:
    """The process that asks memcached: for as many seconds as a line says, until there is none."""
    store = Store(path, mix)
    print("ready", flush=True)
    for line in sys.stdin:
        print(*store.run(float(line)), flush=True)


Period = tuple[float, float, float]


async def periods(
    client: Client, player: Member, lender: int, arguments: argparse.Namespace
) -> list[tuple[Period, Period]]:
    """(with, without) of each pair. `lender`: its process."""

    async def one(lending: bool) -> Period:
        os.kill(lender, signal.SIGCONT if lending else signal.SIGSTOP)
        await asyncio.sleep(SETTLE_S)
        player.tell(str(arguments.period))
        if lending:
            await evict_one(client, LENDER)
        rate, middle_us, high_us = (await asyncio.to_thread(player.hear)).split()
        return float(rate), float(middle_us), float(high_us)

    rng, found = random.Random(2), []
    try:
        for _ in range(arguments.pairs):
            first = rng.random() < 0.5
            pair = {first: await one(first), (not first): await one(not first)}
            found.append((pair[True], pair[False]))
    finally:
        os.kill(lender, signal.SIGCONT)
    return found


async def measure(arguments: argparse.Namespace) -> list[Figure]:
    os.environ["SLACKWATER_CLUSTER_TOKEN"] = token = secrets.token_hex(16)
    slabs = arguments.pairs * len(VALUES)  # A slab that went is not touched: it stays away.
    pages = slabs * SLAB_BYTES // PAGE_BYTES
    made: list[Figure] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        cache = stack.enter_context(memcached(folder))
        async with (
            lenders(folder, 1, SLAB_BYTES, slabs, token) as supervisor,
            connect(supervisor.url, "benchmark") as client,
        ):
            array = await asyncio.to_thread(
                RemoteArray, (pages, PAGE_BYTES), np.uint8, cache_bytes=MIB,
                url=supervisor.url, node="here", transport="shm", backup=folder / "backup",
            )  # fmt: skip
            try:
                await asyncio.to_thread(fill, array, pages)
                for mix in VALUES:
                    player = Member([sys.executable, __file__, "--play", str(cache), mix])
                    stack.callback(player.end)
                    await asyncio.to_thread(player.hear)
                    player.tell(str(WARM_UP_S))
                    await asyncio.to_thread(player.hear)
                    lender = supervisor.units[LENDER].status.pid
                    made += rows(mix, await periods(client, player, lender, arguments))
            finally:
                await asyncio.to_thread(array.close)
    return made


def rows(mix: str, found: list[tuple[Period, Period]]) -> list[Figure]:
    return [
        paired(
            f"the lender's own memcached, {mix.upper()}: {name}",
            [within[column] for within, _ in found],
            [without[column] for _, without in found],
            unit, "without lending", goal, lower_is_better=unit == "us",
        )
        for column, (name, (unit, goal)) in enumerate(MEASURES.items())
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=120, help="of periods, of each mix")
    parser.add_argument("--period", type=float, default=0.4, help="seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--play", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.play:
        play(Path(chosen.play[0]), chosen.play[1])
        return
    found: list[Row]
    if shutil.which("memcached") is None:
        found = [Skipped("the lender's own memcached", "memcached is not installed")]
    else:
        found = [*asyncio.run(measure(chosen))]
    show(f"The lender's own memcached, load {os.getloadavg()[0]:.1f}", found)
    if chosen.json is not None:
        write_json(chosen.json, this_command(), found)


if __name__ == "__main__":
    main()
