"""Programs that choose their own number of hosts, from a bad one, beside a search of all numbers.

Eight nodes and the machine of the only aggregator are network namespaces of their own on one
bridge, each with a shaped link. Four elastic programs move tables of different sizes for different
times of computing, which are waited for, so that this machine's few cores do not count; bytes are
real. NMF, MLR, LDA and Lasso stand for their ratios (Lee 2020, table 3.1): from nearly nothing but
computing to nearly nothing but transfers.

*Searched*: a program is scaled to each number of hosts in turn, and its iterations are timed.
*Chosen*: it begins with one host, or with all, and `--choose-hosts` measures, models and asks
(section 3.3.1). Compared is what an iteration took with the numbers of hosts that it came to.

*Opportunistic* (section 3.4.4): four of the nodes are another job's, of a higher priority, in every
other phase. Compared is the time of a program that uses what is there with that of one that has
four hosts, and what both cost where a machine that comes and goes has a price of its own.

    python benchmarks/choose_hosts.py [--rate-mbit 80] [--of nmf,mlr,lda,lasso,opportunistic]
        [--hosts 8] [--phase-s 40] [--json FILE] [--logs FOLDER]
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from emulated_cluster import HOST, cluster
from figures import Figure, Row, show, write_json
from namespaces import Machine, in_a_namespace, machines

from slackwater.common.native import blas_threads
from slackwater.common.shell.client import Client
from slackwater.schemas.jobs import JobSpec

CHEAPER = 6.7
"""The price of a machine that stays over that of one that comes and goes (section 3.4.4)."""
GOAL_SHORTER, GOAL_HALVES = 0.85, 0.55
GOAL = 1.065
"""The chosen configuration's iteration over the best one's (Lee 2020, section 3.4.3)."""
EXECUTORS = 24
ITERATIONS_MAX = 1_000_000
MEASURED_S = 5.0
SETTLES_S = 20.0
"""A program that asks for no other number in so long has chosen."""
GIVE_UP_S = 150.0
PROGRAM = """
import sys, time
import numpy as np
from slackwater import elastic
from slackwater.elastic import Bsp, Table

rows, task_ms, executors, iterations = map(int, sys.argv[1:])


class Emulated(elastic.App):
    tables = {"w": Table(rows, 1000)}
    driver = Bsp(iterations)

    class Executor(elastic.Executor):
        def run(self, ctx, task):
            values = ctx.get("w")
            time.sleep(task_ms / 1e3)
            ctx.update("w", np.full(values.shape, 1e-3, np.float32))
            return float(values[0, 0])


Emulated.executors = executors
elastic.launch(Emulated())
"""


@dataclass(frozen=True)
class Kind:
    name: str
    rows: int
    """Rows of the table, 4 kB each."""
    task_ms: int


KINDS = (Kind("nmf", 50, 40), Kind("mlr", 20, 60), Kind("lda", 100, 20), Kind("lasso", 60, 30))


class Bench:
    def __init__(self, client: Client, folder: Path, hosts: int) -> None:
        self.client, self.folder, self.hosts = client, folder, hosts
        self.number = 0
        (folder / "emulated.py").write_text(PROGRAM)

    async def submit(
        self, kind: Kind, workers: int, *, choose: bool, iterations: int = ITERATIONS_MAX
    ) -> str:
        self.number += 1
        words = (str(kind.rows), str(kind.task_ms), str(EXECUTORS), str(iterations))
        spec = JobSpec(
            id=f"{kind.name}-{self.number}", workers=workers, workers_min=1, restarts=5,
            workers_max=self.hosts, choose_hosts=choose, consistency="asynchronous",
            program=(sys.executable, str(self.folder / "emulated.py"), *words), grace_s=10.0,
            env=blas_threads.one_each({}), checkpoint=str(self.folder / f"{self.number}"),
        )  # fmt: skip
        await self.client.submit(spec)
        return spec.id

    async def at(self, job: str) -> tuple[int, int]:
        """Return its iteration, and the hosts that its executors are on. Raises RuntimeError."""
        info = await self.client.job_info(job)
        if (record := info.job).state in ("failed", "cancelled"):
            raise RuntimeError(f"{job} {record.state}: {record.reason}")
        told = info.progress.program if info.progress is not None else None
        return (told.iteration, told.hosts) if told is not None else (0, 0)

    async def until_on(self, job: str, hosts: int) -> None:
        until_s = time.monotonic() + GIVE_UP_S
        while (await self.at(job))[1] != hosts:
            if time.monotonic() > until_s:
                record = await self.client.job(job)
                raise RuntimeError(
                    f"{job} is not on {hosts} hosts after {GIVE_UP_S:g} s: {record.state}, "
                    f"{record.reason}"
                )
            await asyncio.sleep(0.2)

    async def iteration_s(self, job: str) -> float:
        """Measure from one report to another."""
        (first, _), first_s = await self._next_report(job, -1), time.monotonic()
        last, last_s = first, first_s
        while last_s - first_s < MEASURED_S or last - first < 3:
            (last, _), last_s = await self._next_report(job, last), time.monotonic()
        return (last_s - first_s) / (last - first)

    async def _next_report(self, job: str, after: int) -> tuple[int, int]:
        begun, _ = await self.at(job)
        while True:
            found = await self.at(job)
            if found[0] > max(begun, after):
                return found
            await asyncio.sleep(0.02)

    async def end(self, job: str) -> None:
        await self.client.cancel(job)
        for _ in range(300):
            if (await self.client.job(job)).state == "cancelled":
                return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"{job} is not cancelled after 30 s")

    async def searched(self, kind: Kind) -> dict[int, float]:
        """Return the seconds of an iteration by number of hosts."""
        job, found = await self.submit(kind, self.hosts, choose=False), dict[int, float]()
        for hosts in range(self.hosts, 0, -1):
            if hosts < self.hosts:
                await self.client.scale(job, hosts)
            await self.until_on(job, hosts)
            await asyncio.sleep(1.0)
            found[hosts] = await self.iteration_s(job)
        await self.end(job)
        return found

    async def chosen(self, kind: Kind, workers: int) -> tuple[list[int], float]:
        """Return the numbers of hosts that it had, and the seconds until it came to the last."""
        job = await self.submit(kind, workers, choose=True)
        await self.until_on(job, workers)
        begun_s = since_s = time.monotonic()
        had = [workers]
        while time.monotonic() - since_s < SETTLES_S and time.monotonic() - begun_s < GIVE_UP_S:
            hosts = (await self.client.job(job)).workers or workers
            if hosts != had[-1]:
                had.append(hosts)
                since_s = time.monotonic()
            await asyncio.sleep(0.2)
        await self.end(job)
        return had, since_s - begun_s

    async def neighbour(self, workers: int) -> str:
        """Have slots taken by a job of a higher priority."""
        self.number += 1
        spec = JobSpec(
            id=f"neighbour-{self.number}", workers=workers, consistency="asynchronous", priority=5,
            program=(sys.executable, "-c", "import time; time.sleep(3600)"), grace_s=1.0,
        )  # fmt: skip
        await self.client.submit(spec)
        return spec.id

    async def come_and_go(self, kind: Kind, iterations: int, phase_s: float) -> "Watched":
        """Train while half of the nodes come and go; they are away first."""
        half = self.hosts // 2
        neighbour: str | None = await self.neighbour(half)
        job = await self.submit(kind, half, choose=True, iterations=iterations)
        await self.until_on(job, half)
        watched, turned_s = Watched(), time.monotonic()
        while (await self.client.job(job)).state == "running":
            watched.look(*(await self.at(job)))
            if time.monotonic() - turned_s > phase_s:
                turned_s = time.monotonic()
                if neighbour is not None:
                    await self.end(neighbour)
                    neighbour = None
                else:
                    neighbour = await self.neighbour(half)
            await asyncio.sleep(0.1)
        if neighbour is not None:
            await self.end(neighbour)
        return watched

    async def stays(self, kind: Kind, iterations: int) -> "Watched":
        """Train on half of the nodes."""
        half = self.hosts // 2
        job = await self.submit(kind, half, choose=False, iterations=iterations)
        await self.until_on(job, half)
        await self.client.scale(job, half)
        watched = Watched()
        while (await self.client.job(job)).state == "running":
            watched.look(*(await self.at(job)))
            await asyncio.sleep(0.1)
        return watched


class Watched:
    """How a program went on."""

    def __init__(self) -> None:
        self.looks: list[tuple[float, int, int]] = []
        """Seconds, iterations, hosts."""

    def look(self, iteration: int, hosts: int) -> None:
        self.looks.append((time.monotonic(), iteration, hosts))

    @property
    def took_s(self) -> float:
        return self.looks[-1][0] - self.looks[0][0]

    def host_s(self, above: int) -> float:
        """Return the host seconds of hosts beyond so many."""
        return sum(
            (after[0] - before[0]) * max(0, before[2] - above)
            for before, after in pairwise(self.looks)
        )

    def iteration_s(self, hosts: int) -> float:
        """Return the median seconds of an iteration on so many, a second after they came."""
        found: list[float] = []
        same: list[tuple[float, int]] = []
        for at_s, iteration, now in [*self.looks, (0.0, 0, -1)]:
            if now == hosts:
                same.append((at_s, iteration))
                continue
            settled = [each for each in same if each[0] > same[0][0] + 2.0]
            if len(settled) > 1 and settled[-1][1] > settled[0][1]:
                (first_s, first), (last_s, last) = settled[0], settled[-1]
                found.append((last_s - first_s) / (last - first))
            same = []
        return statistics.median(found)


async def opportunistic(bench: Bench, phase_s: float) -> list[Row]:
    kind = Kind("mlr", 5, 80)
    half = bench.hosts // 2
    iterations = int(4 * phase_s / (-(-EXECUTORS // half) * kind.task_ms / 1e3))
    fixed = await bench.stays(kind, iterations)
    ours = await bench.come_and_go(kind, iterations, phase_s)
    used = sorted({hosts for _, _, hosts in ours.looks if hosts})
    print(f"{iterations} iterations: {ours.took_s:.0f} s on {used[0]} to {used[-1]} hosts, "
          f"{fixed.took_s:.0f} s on {half}", flush=True)  # fmt: skip
    # Machines that stay are paid for as long as it runs.
    costs = [
        half * each.took_s + each.host_s(half) / CHEAPER for each in (ours, fixed)
    ]  # fmt: skip
    return [
        Figure("nodes that come and go, used: the whole run", ours.took_s, fixed.took_s, "s",
               f"{half} that stay", goal=GOAL_SHORTER, lower_is_better=True),
        Figure("the same: seconds of a machine that stays, paid for", costs[0], costs[1], "s",
               f"{half} that stay", lower_is_better=True),
        Figure(f"an iteration on {bench.hosts} hosts", 1e3 * ours.iteration_s(bench.hosts),
               1e3 * ours.iteration_s(half), "ms", f"on {half}", goal=GOAL_HALVES,
               lower_is_better=True),
    ]  # fmt: skip


async def run(options: argparse.Namespace, hosts: dict[str, Machine]) -> list[Row]:
    names = [f"w{number}" for number in range(options.hosts)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="sw-choose-") as made:
        workers = {name: {"slots": 1} for name in names}
        async with cluster(hosts, workers, options.logs) as client:
            bench = Bench(client, Path(made), options.hosts)
            for kind in KINDS:
                if kind.name in options.of.split(","):
                    rows += await compared(bench, kind)
            if "opportunistic" in options.of.split(","):
                rows += await opportunistic(bench, options.phase_s)
    return rows


async def compared(bench: Bench, kind: Kind) -> list[Row]:
    grid = await bench.searched(kind)
    best = min(grid, key=lambda hosts: grid[hosts])
    said = ", ".join(f"{hosts}: {1e3 * s:.0f}" for hosts, s in sorted(grid.items()))
    print(f"{kind.name}: ms an iteration by hosts: {said}", flush=True)
    rows: list[Row] = []
    for workers in (1, bench.hosts):
        had, within_s = await bench.chosen(kind, workers)
        print(f"{kind.name}: from {workers}: {had}, within {within_s:.0f} s", flush=True)
        rows.append(
            Figure(
                f"{kind.name}, from {workers} to {had[-1]} hosts: an iteration of"
                f" {1e3 * grid[workers]:.0f} ms becomes",
                1e3 * grid[had[-1]], 1e3 * grid[best], "ms", f"the best, {best} hosts",
                goal=GOAL, lower_is_better=True,
            )
        )  # fmt: skip
    return rows


def inside(options: argparse.Namespace) -> None:
    with ExitStack() as held:
        names = [f"w{number}" for number in range(options.hosts)]
        hosts = held.enter_context(machines(options.rate_mbit, HOST, *names))
        rows = asyncio.run(run(options, hosts))
    show(f"links of {options.rate_mbit} Mbit/s, load {os.getloadavg()[0]:.1f}", rows)
    if options.json is not None:
        write_json(options.json, "python benchmarks/choose_hosts.py", rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate-mbit", type=int, default=80)
    everything = ",".join((*(kind.name for kind in KINDS), "opportunistic"))
    parser.add_argument("--of", default=everything)
    parser.add_argument("--phase-s", type=float, default=40.0)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="where the services' logs are kept")
    options = parser.parse_args(arguments)
    return in_a_namespace(arguments, lambda: inside(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
