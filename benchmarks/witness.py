"""Records that are noted by a witness before they are durable, against records that are not.

Writes of 2 KiB into a bucket of a nats-server that flushes each, interleaved: one after another,
for the time of one, and all at once, for their rate. The floor is a flush of the disk alone.

    python benchmarks/witness.py [--rounds 5] [--writes 2000]
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import truediv
from pathlib import Path
from typing import Any

import uvloop
from figures import Figure, show

from slackwater.common.base.codec import encode_record
from slackwater.common.bus.server import NatsServer
from slackwater.common.shell.marker import Marker
from slackwater.common.shell.persister import BucketWriter
from slackwater.common.shell.world import live_world
from slackwater.common.store.base import EPOCH_KEY
from slackwater.common.store.witness import Mark
from slackwater.common.store.witness_file import FolderWitnesses
from slackwater.schemas.jobs import JobRecord, JobSpec

ALONE = 200
"""Writes that wait for one another."""


def record() -> bytes:
    """Return a job's record of some 2 KiB."""
    environment = {f"V{number}": 40 * "x" for number in range(32)}
    spec = JobSpec(id="j", program=("true",), env=environment)
    return encode_record(JobRecord(spec=spec), 1)


@asynccontextmanager
async def writer(
    url: str, folder: Path, name: str, noted: bool
) -> AsyncIterator[tuple[BucketWriter, "asyncio.Queue[Any]"]]:
    durable: asyncio.Queue[Any] = asyncio.Queue()

    async def tell(_bucket: str, _mark: Mark) -> None: ...

    def fail(error: BaseException) -> None:
        raise error

    async with live_world(url, "writer") as world:
        bucket = await world.store.bucket(name)
        last = await bucket.last_sequence()
        fence = await bucket.put(EPOCH_KEY, b"", expected_last=last)
        witness = FolderWitnesses(str(folder)).of(name) if noted else None
        marker = Marker(name, {}, 1, witness, tell)
        await marker.begin(fence)
        made = BucketWriter(bucket, fence, world.clock, world.rng, durable.put_nowait, fail, marker)
        try:
            yield made, durable
        finally:
            made.close()


async def measure(
    url: str, folder: Path, name: str, noted: bool, writes: int
) -> tuple[float, float]:
    """Return seconds of one write, the median, and writes a second of many."""
    value, took_s = record(), []
    async with writer(url, folder, name, noted) as (made, durable):
        for number in range(ALONE):
            began_s = time.perf_counter()
            made.write(f"j{number}", value, number)
            await durable.get()
            took_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        for number in range(writes):
            made.write(f"j{number}", value, number)
        for _ in range(writes):
            await durable.get()
        return statistics.median(took_s), writes / (time.perf_counter() - began_s)


def flush_s(folder: Path) -> float:
    """Return seconds of a flush of a hundred bytes, the median."""
    took_s = []
    with (folder / "floor").open("ab") as file:
        for _ in range(ALONE):
            began_s = time.perf_counter()
            file.write(100 * b"x")
            file.flush()
            os.fdatasync(file.fileno())
            took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--writes", type=int, default=2000)
    options = parser.parse_args()
    alone: dict[bool, list[float]] = {True: [], False: []}
    many: dict[bool, list[float]] = {True: [], False: []}
    floors = []
    with (
        tempfile.TemporaryDirectory(prefix="sw-") as folder,
        NatsServer(Path(folder) / "nats") as server,
    ):
        for number in range(options.rounds):
            floors.append(flush_s(Path(folder)))
            for noted in (True, False):
                name = f"b{number}{noted}"
                took_s, rate = uvloop.run(
                    measure(server.url, Path(folder), name, noted, options.writes)
                )
                alone[noted].append(1e3 * took_s)
                many[noted].append(rate)
    peer, median = "without a witness", statistics.median
    show(
        "A witness of each bucket",
        [
            Figure(
                "one write", median(alone[True]), median(alone[False]), "ms", peer,
                lower_is_better=True, floor=1e3 * median(floors),
                ratios=tuple(map(truediv, alone[True], alone[False])),
            ),
            Figure(
                "many writes", median(many[True]), median(many[False]), "1/s", peer,
                ratios=tuple(map(truediv, many[True], many[False])),
            ),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
