"""Connects of honest peers while strangers connect, 300 a second, and say nothing.

Rounds with strangers and without are interleaved; the listener is that of an aggregator's fabric.
Strangers are a process of their own and keep each connection open until it is ended for them.

    python benchmarks/strangers.py [--rounds 3] [--seconds 10] [--rate 300]
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import truediv
from pathlib import Path
from typing import Final

import uvloop
from figures import Figure, show

from slackwater.common.base.errors import Retryable
from slackwater.common.transport.base import Channel, Fabric, Listener
from slackwater.common.transport.host import split_identity
from slackwater.common.transport.region import Region
from slackwater.common.transport.shm import ShmFabric
from slackwater.common.transport.tcp import TcpFabric

EVERY_S: Final = 0.025
SOON_S: Final = 1.0
GIVE_UP_S: Final = 5.0


def strangers(kind: str, where: str, rate: float, seconds: float) -> None:
    """Connect at that rate, evenly, and say nothing."""
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (16_384, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    began_s, opened = time.monotonic(), list[socket.socket]()
    while (passed_s := time.monotonic() - began_s) < seconds:
        while len(opened) < passed_s * rate:
            sock = socket.socket(socket.AF_UNIX if kind == "shm" else socket.AF_INET)
            sock.settimeout(GIVE_UP_S)
            with contextlib.suppress(OSError):  # Its queue is full: it waits in vain.
                if kind == "shm":
                    sock.connect(where)
                else:
                    sock.bind(("127.0.0.2", 0))
                    sock.connect(("127.0.0.1", int(where)))
            opened.append(sock)
        time.sleep(0.001)
    for sock in opened:
        sock.close()


@asynccontextmanager
async def listening(kind: str, folder: Path) -> AsyncIterator[tuple[Fabric, Listener, str]]:
    """Yield a fabric, its listener, and where a stranger finds it."""
    fabric: Fabric = ShmFabric() if kind == "shm" else TcpFabric()

    async def keep(channel: Channel) -> None:
        with contextlib.suppress(Retryable):
            await channel.receive()

    async def refuse(_region: Region, _note: bytes) -> None:
        raise AssertionError("nobody hands over here")

    at = str(folder / "listener") if kind == "shm" else "127.0.0.1:0"
    listener = await fabric.listen(at, lambda _hello: None, keep, refuse)
    address = listener.address
    try:
        port = address.rpartition(":")[2]
        yield fabric, listener, split_identity(address)[1] if kind == "shm" else port
    finally:
        await listener.close()


async def measure(kind: str, folder: Path, rate: float, seconds: float) -> list[float]:
    """Return how long each honest connect took; GIVE_UP_S: it was given up."""
    took_s = []
    async with listening(kind, folder) as (fabric, listener, where):
        near = await fabric.connect(listener.address, b"first", deadline_s=60.0)
        await near.close()
        crowd = multiprocessing.get_context("spawn").Process(
            target=strangers, args=(kind, where, rate, seconds + 1.0)
        )
        crowd.start()
        await asyncio.sleep(1.0)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            began_s = time.perf_counter()
            try:
                near = await fabric.connect(listener.address, b"honest", deadline_s=GIVE_UP_S)
                await near.close()
                took_s.append(time.perf_counter() - began_s)
            except Retryable:
                took_s.append(GIVE_UP_S)
            await asyncio.sleep(EVERY_S)
        await asyncio.to_thread(crowd.join)
    return took_s


def p99(took_s: list[float]) -> float:
    return 1e3 * statistics.quantiles(took_s, n=100)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=300.0)
    options = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        for kind in ("tcp", "shm"):
            beside, alone = [], []
            for _ in range(options.rounds):
                for rate, into in ((options.rate, beside), (0.0, alone)):
                    into.append(uvloop.run(measure(kind, Path(folder), rate, options.seconds)))
            every = [took_s for part in beside for took_s in part]
            soon = sum(took_s < SOON_S for took_s in every) / len(every)
            tails = [list(map(p99, parts)) for parts in (beside, alone)]
            figures += [
                Figure(
                    f"{kind}: connects under {SOON_S:g} s, of {len(every):,}", soon, 1.0, "share",
                    "all of them", goal=0.99,
                ),
                Figure(
                    f"{kind}: p99 of a connect", statistics.median(tails[0]),
                    statistics.median(tails[1]), "ms", "without strangers", lower_is_better=True,
                    ratios=tuple(map(truediv, *tails)),
                ),
            ]  # fmt: skip
    show(f"Beside {options.rate:g} silent connections a second", figures)


if __name__ == "__main__":
    main()
