"""Two elastic programs share the memory that they asked for, beside fixed shares (Lee 2020, 4.3.3).

    python benchmarks/memory_shares.py [--mb 8] [--partitions 24] [--seconds 40] [--json FILE]

Each program goes through its data again and again, on one node, in its own executors, half of which
fit into what it asked for. One computes for 0.1 s on each partition, and has read the next one by
then; the other computes for 0.01 s, and waits for its data. Computing is emulated by waiting, on a
processor for each. The disk is emulated, too: one read at a time, at 100 MB/s for both programs.

Compared are the seconds of a pass through the data over those that computing on them takes, the
mean of both programs: with *one ratio for all*, each program keeps what it asked for; *fixed
shares* are tried in steps, and the best is kept; *shared* is what the worker service gives each of
them, measured once it has stopped moving memory.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from figures import Figure, Row, show, this_command, write_json

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.native import blas_threads
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.jobs import JobSpec

PROGRAM: Final = """
import fcntl, os, sys, time

import numpy as np
from slackwater import elastic
from slackwater.elastic import Bsp, Table, memory

disk, passes = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), open(sys.argv[2], "a", buffering=1)
partitions, mb, compute_s = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
read = memory._Kept.read


def slowly(kept):
    fcntl.flock(disk, fcntl.LOCK_EX)
    time.sleep(kept.nbytes / 100e6)
    fcntl.flock(disk, fcntl.LOCK_UN)
    return read(kept)


memory._Kept.read = slowly


class Timed(Bsp):
    ended = 0

    def done(self, run, executor, task, result):
        super().done(run, executor, task, result)
        if min(self._completed) > self.ended:
            self.ended = min(self._completed)
            passes.write(f"{time.time()} {memory.private_bytes()}\\n")


class Passes(elastic.App):
    executors = partitions
    tables = {"sum": Table(1, 8)}
    driver = Timed(1_000_000)

    class Executor(elastic.Executor):
        def load(self, part):
            self.x = np.full((mb << 20) // 4, float(part), np.float32)

        def run(self, ctx, task):
            time.sleep(compute_s)
            ctx.update("sum", np.full((1, 8), self.x[0], np.float32))


elastic.launch(Passes())
"""
COMPUTES_S: Final = {"slow": 0.1, "quick": 0.01}
STEPS: Final = 4
"""Shares that are tried to each side of one ratio for all, up to half of what a job asked for."""
WARM_S: Final = 15.0
CLIMB_S: Final = 240.0
"""Seconds that hill climbing has."""
PROBED_PASSES: Final = 3


@dataclass
class Bench:
    client: Client
    folder: Path
    options: argparse.Namespace
    runs: int = 0

    @property
    def data_bytes(self) -> int:
        return int(self.options.partitions * self.options.mb) << 20

    def log(self, name: str) -> Path:
        return self.folder / f"{name}-{self.runs}"

    def passes(self, name: str) -> list[tuple[float, int]]:
        """Return when each pass ended, and the bytes that the program used then."""
        path = self.log(name)
        lines = path.read_text().splitlines() if path.exists() else []
        return [(float(at), int(used)) for at, used in (line.split() for line in lines)]

    async def begin(self, memory_bytes: dict[str, int]) -> list[str]:
        self.runs += 1
        ids = []
        for name, nbytes in memory_bytes.items():
            path = self.folder / "program.py"
            path.write_text(PROGRAM)
            given = (
                self.folder / "disk", self.log(name), self.options.partitions, self.options.mb,
                COMPUTES_S[name],
            )  # fmt: skip
            spec = JobSpec(
                id=f"{name}-{self.runs}", workers=1, by_turns=True, iterations=10**6,
                program=(sys.executable, str(path), *map(str, given)), consistency="asynchronous",
                fractional_share=True, memory_bytes=nbytes, env=blas_threads.one_each({}),
                checkpoint=str(self.folder / f"{name}-{self.runs}-files"),
            )  # fmt: skip
            await self.client.submit(spec)
            ids.append(spec.id)
        return ids

    async def end(self, ids: list[str]) -> None:
        for id in ids:
            await self.client.cancel(id)
        for _ in range(100):
            states = [(await self.client.job(id)).state for id in ids]
            if all(state in ("cancelled", "failed") for state in states):
                return
            await asyncio.sleep(0.2)
        raise TimeoutError("the programs do not end")

    async def until_passes(self, names: list[str], count: int) -> None:
        for _ in range(600):
            if all(len(self.passes(name)) >= count for name in names):
                return
            await asyncio.sleep(0.2)
        raise TimeoutError("the programs do not begin")

    async def base_bytes(self) -> int:
        """Return what a program uses beside its data."""
        ids = await self.begin({"quick": 0})
        await self.until_passes(["quick"], PROBED_PASSES)
        used_bytes = self.passes("quick")[-1][1]
        await self.end(ids)
        return used_bytes - self.data_bytes

    async def measure(self, memory_bytes: dict[str, int], warm_s: float) -> dict[str, float]:
        """Return, by program, the seconds of a pass over those that it computes."""
        ids = await self.begin(memory_bytes)
        await self.until_passes(list(memory_bytes), 1)
        await asyncio.sleep(warm_s)
        begun = {name: len(self.passes(name)) for name in memory_bytes}
        await asyncio.sleep(self.options.seconds)
        found = {}
        for name, at in begun.items():
            ends_s = [end_s for end_s, _ in self.passes(name)[at - 1 :]]
            pass_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
            found[name] = pass_s / (self.options.partitions * COMPUTES_S[name])
        await self.end(ids)
        return found


async def run(options: argparse.Namespace, shared: bool, given: Any) -> Any:
    worker = {"slots": 4, "computing": 2, "share_memory": shared}
    cluster_options = ClusterOptions(controllers=1, aggregators=2, nodes=1, worker=worker)
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/var/tmp") as folder:
        async with (
            EmbeddedCluster(cluster_options) as cluster,
            connect(cluster.url, "bench") as client,
        ):
            return await given(Bench(client, Path(folder), options))


async def compare(options: argparse.Namespace) -> list[Row]:
    async def fixed(bench: Bench) -> tuple[int, dict[int, dict[str, float]]]:
        base_bytes = await bench.base_bytes()
        asked_bytes = int((base_bytes + bench.data_bytes // 2) / 0.9)
        found = {}
        for step in range(-STEPS, STEPS + 1):
            more = step * asked_bytes // (2 * STEPS)
            memory_bytes = {"slow": asked_bytes - more, "quick": asked_bytes + more}
            found[step] = await bench.measure(memory_bytes, WARM_S)
            print(step, {k: v >> 20 for k, v in memory_bytes.items()}, found[step], flush=True)
        return asked_bytes, found

    asked_bytes, found = await run(options, False, fixed)

    async def live(bench: Bench) -> dict[str, float]:
        return await bench.measure(dict.fromkeys(COMPUTES_S, asked_bytes), CLIMB_S)

    ours = await run(options, True, live)
    print("shared", ours, flush=True)
    means = {step: statistics.fmean(each.values()) for step, each in found.items()}
    mean, best = statistics.fmean(ours.values()), min(means.values())
    at = next(step for step, each in means.items() if each == best)
    what = f"two programs of {options.partitions * options.mb} MB each"
    return [
        Figure(f"{what}: a pass beside computing alone", mean, best, "x",
               f"the best fixed shares (step {at:+d} of {STEPS})", 1.05, lower_is_better=True),
        Figure("the same", mean, means[0], "x", "one ratio for all", 0.9, lower_is_better=True),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("partitions", 24), ("mb", 8), ("seconds", 40)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(compare(options))
    show("shares of memory", rows)
    if options.json is not None:
        write_json(options.json, this_command(), rows)


if __name__ == "__main__":
    main()
