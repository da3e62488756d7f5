"""A cluster in everyday use for a long time: nothing of it may grow.

Memory, descriptors, threads and files of each service are sampled while clients submit, read and
cancel jobs. Once what is kept for a while has been filled (ids of ended jobs for ten minutes, a
thousand records), the last part of the run is compared with the one before.
"""

import asyncio
import os
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final, TypeVar

import psutil
from tests.chaos.history import unexplained
from tests.chaos.load import Load, patient

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import connect

T = TypeVar("T")
EVERY_S: Final = 2.0
FILLED: Final = 0.4
"""The part of a run in which what is kept is filled."""
MEMORY_GROWS: Final = 1.05
"""Most that the median of resident memory of the last part may be of the part before; and
MEMORY_BYTES more, which is less than a page table's step."""
MEMORY_BYTES: Final = 2 * 1024 * 1024
FACTS_BYTES: Final = 4 * 1024 * 1024
"""Facts that the bus keeps: so few that they are filled in time."""
COUNT_GROWS: Final = 2
"""The same of descriptors and threads, in numbers."""


@dataclass(frozen=True, slots=True)
class Sample:
    resident_bytes: int
    descriptors: int
    threads: int


@dataclass
class Soak:
    """The samples of each unit, and what is below the state folder."""

    units: dict[str, list[Sample]] = field(default_factory=dict)
    files: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    calls: int = 0
    seconds: float = 0.0

    def look(self, cluster: EmbeddedCluster) -> None:
        for unit in cluster.supervisor.status():
            try:
                process = psutil.Process(unit.pid)
                with process.oneshot():
                    sample = Sample(
                        process.memory_info().rss, process.num_fds(), process.num_threads()
                    )
            except psutil.NoSuchProcess:
                self.wrong.append(f"{unit.name} has no process")
                continue
            self.units.setdefault(unit.name, []).append(sample)
        files, nbytes = _below(cluster.supervisor.state_dir)
        self.files.append(files)
        self.nbytes.append(nbytes)

    def judge(self) -> None:
        for name, samples in self.units.items():
            before, last = parts(samples)
            resident = [median(each.resident_bytes for each in part) for part in (before, last)]
            if resident[1] > MEMORY_GROWS * resident[0] + MEMORY_BYTES:
                grown = " and then ".join(f"{each / 2**20:.1f} MB" for each in resident)
                self.wrong.append(f"{name} has {grown} resident")
            for what in ("descriptors", "threads"):
                counts = [max(getattr(each, what) for each in part) for part in (before, last)]
                if counts[1] > counts[0] + COUNT_GROWS:
                    self.wrong.append(f"{name} has {counts[0]} and then {counts[1]} {what}")
        files = [max(part) for part in parts(self.files)]
        if files[1] > 1.1 * files[0]:
            self.wrong.append(f"there are {files[0]} and then {files[1]} files")


def lines(told: Soak) -> list[str]:
    """Return the report as a person reads it: each figure before, and in the last part."""
    found = [
        f"{told.calls:,} calls in {told.seconds:.0f} s; each figure in the part before the last, "
        "and in the last",
        f"{'SERVICE':18}{'RESIDENT MB':>16}{'DESCRIPTORS':>14}{'THREADS':>10}",
    ]
    for name, samples in sorted(told.units.items()):
        halves = parts(samples)
        resident = [median(each.resident_bytes for each in part) / 2**20 for part in halves]
        files = [max(each.descriptors for each in part) for part in halves]
        threads = [max(each.threads for each in part) for part in halves]
        found.append(
            f"{name:18}{resident[0]:8.1f}{resident[1]:8.1f}{files[0]:7}{files[1]:7}"
            f"{threads[0]:5}{threads[1]:5}"
        )
    files = [max(part) for part in parts(told.files)]
    nbytes = [max(part) / 2**20 for part in parts(told.nbytes)]
    found.append(
        f"files of the state: {files[0]}, {files[1]}; MB: {nbytes[0]:.1f}, {nbytes[1]:.1f}"
    )
    found += [f"WRONG: {each}" for each in told.wrong[:20]]
    found.append(f"{len(told.wrong)} anomalies")
    return found


def parts(samples: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Return the two halves of what came after all was filled."""
    kept = samples[int(FILLED * len(samples)) :]
    return kept[: len(kept) // 2], kept[len(kept) // 2 :]


def _below(folder: Path) -> tuple[int, int]:
    """Count files and bytes; what goes meanwhile counts for nothing."""
    files = nbytes = 0
    for parent, _, names in os.walk(folder):  # A folder that went is passed over.
        for name in names:
            try:
                found = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:
                continue
            files, nbytes = files + 1, nbytes + found.st_size
    return files, nbytes


async def soak(seconds: float, rate: float, folder: Path, seed: int = 1) -> Soak:
    """Use a cluster for so long, at `rate` submissions a second, a tenth of them with programs."""
    options = ClusterOptions(
        controllers=1, aggregators=2, cpu_share=0.2, master={"facts_bytes": FACTS_BYTES}
    )
    told = Soak()
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(EmbeddedCluster(options))
        client = patient(await stack.enter_async_context(connect(cluster.url, "soak")))
        load = Load([client], rate, 0.1, folder, random.Random(seed))
        running = asyncio.ensure_future(load.run())
        until_s = time.monotonic() + seconds
        try:
            while time.monotonic() < until_s:
                await asyncio.sleep(EVERY_S)
                await asyncio.to_thread(told.look, cluster)
        finally:
            load.end()
            await running
        told.wrong += load.wrong
        told.wrong += [f"no order explains {job}" for job in unexplained(load.calls, load.models)]
        told.calls, told.seconds = len(load.calls), seconds
    told.judge()
    return told
