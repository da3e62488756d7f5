"""What a machine's own memcached notices of the lender beside it: lending, and retreating.

Gu, dissertation, table 2.1 and figure 2.17: under 2 % of throughput and at most 4 % of the 99th
percentile are lost. memcached (Debian's) is driven with the ETC and SYS mixes over a Unix socket,
one request at a time. In a period `with` the lender runs, has lent its slabs, and gives one up,
which its device answers; in a period `without` its process is stopped (SIGSTOP). Periods are mixed
at random; percentiles are of all requests of a kind of period. On one machine the device's own work
for an eviction counts against us as well.

    python benchmarks/memory_lender.py [--periods 30] [--period 1.0] [--size 48]
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
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from figures import Figure, show
from memory_slabs import MIB, SLAB_BYTES, fill, lenders

from slackwater.common.client import Client, connect
from slackwater.loadgen.memory.latency import Latencies
from slackwater.loadgen.memory.workloads import workload
from slackwater.memory import RemoteArray
from slackwater.memory.store import PAGE_BYTES
from slackwater.schemas import subjects
from slackwater.schemas.base import Ok
from slackwater.schemas.memory import EvictNow

ITEMS = 20_000
VALUES = {"etc": (16, 512), "sys": (320, 500)}
"""Sizes that most values have (2.7.3.2)."""
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

    def run(self, seconds: float, found: Latencies) -> float:
        """Requests a second."""
        begun_s, done = time.monotonic(), 0
        while True:
            for item in self._popular.batch(256).first.tolist():
                changes = self._rng.random() < self._sets
                before_ns = time.perf_counter_ns()
                self.put(item) if changes else self.get(item)
                found.add(time.perf_counter_ns() - before_ns)
                done += 1
            if (took_s := time.monotonic() - begun_s) >= seconds:
                return done / took_s

    def close(self) -> None:
        self._answers.close()
        self._socket.close()


def lender_processes(folder: str) -> list[psutil.Process]:
    """Those that were started with a configuration in our folder."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if "slackwater.services.slabd" in words and any(folder in word for word in words):
                found.append(process)
    return found


async def periods(
    client: Client, store: Store, servers: list[psutil.Process], arguments: argparse.Namespace
) -> dict[bool, tuple[list[float], Latencies]]:
    found = {kind: (list[float](), Latencies()) for kind in (False, True)}
    order = [False, True] * (arguments.periods // 2)
    random.Random(2).shuffle(order)
    await asyncio.to_thread(store.run, 1.0, Latencies())
    for number, lending in enumerate(order):
        for server in servers:
            server.send_signal(signal.SIGCONT if lending else signal.SIGSTOP)
        rates, latencies = found[lending]
        playing = asyncio.to_thread(store.run, arguments.period, latencies)
        running = asyncio.ensure_future(playing)
        if lending:
            subject = subjects.command("slabd", f"s{number % len(servers)}", "evict")
            await client.ask(subject, EvictNow(count=1), Ok)
        rates.append(await running)
    for server in servers:
        server.send_signal(signal.SIGCONT)
    return found


async def measure(arguments: argparse.Namespace) -> list[Figure]:
    token = secrets.token_hex(16)
    os.environ["SLACKWATER_CLUSTER_TOKEN"] = token
    pages = arguments.size * MIB // PAGE_BYTES
    made: list[Figure] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        cache = stack.enter_context(memcached(Path(folder)))
        slabs = arguments.size * MIB // SLAB_BYTES
        async with (
            lenders(Path(folder), slabs, token, count=1) as url,
            connect(url, "benchmark") as client,
        ):
            array = await asyncio.to_thread(
                RemoteArray, (pages, PAGE_BYTES), np.uint8, cache_bytes=MIB, url=url,
                node="here", transport="shm", backup=Path(folder) / "backup",
            )  # fmt: skip
            try:
                for mix in VALUES:  # An eviction a period: more slabs than that are lent.
                    await asyncio.to_thread(fill, array, pages)
                    store = await asyncio.to_thread(Store, cache, mix)
                    found = await periods(client, store, lender_processes(folder), arguments)
                    store.close()
                    made += rows(mix, found)
            finally:
                await asyncio.to_thread(array.close)
    return made


def rows(mix: str, found: dict[bool, tuple[list[float], Latencies]]) -> list[Figure]:
    (without, calm), (within, busy) = found[False], found[True]
    made = [
        Figure(
            f"{mix}: requests a second", float(np.mean(within)), float(np.mean(without)), "1/s",
            "without", goal=0.98, spread=float(np.std(within) / np.mean(within)),
        )
    ]  # fmt: skip
    for percent, goal in ((50, None), (99, 1.04)):
        made.append(
            Figure(
                f"{mix}: p{percent}", busy.percentile_us(percent), calm.percentile_us(percent),
                "us", "without", goal=goal, lower_is_better=True,
            )
        )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--periods", type=int, default=30)
    parser.add_argument("--period", type=float, default=1.0, help="seconds")
    parser.add_argument("--size", type=int, default=48, help="MiB that are lent, a slab each")
    chosen = parser.parse_args()
    if chosen.size * MIB // SLAB_BYTES < chosen.periods // 2:
        raise SystemExit("every second period evicts a slab: lend at least so many MiB (--size)")
    if shutil.which("memcached") is None:
        raise SystemExit("not installed: memcached (the Debian package of this name)")
    load = os.getloadavg()[0]
    show(f"The lender's own memcached, load {load:.1f}", asyncio.run(measure(chosen)))


if __name__ == "__main__":
    main()
