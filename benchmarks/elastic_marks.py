"""Measure what it costs a program to be saved whole now and then, and what a loss costs it in
either mode of recovery (SCAR: Qiao 2021, chapter 5).

    python benchmarks/elastic_marks.py [--rounds 3] [--every 5]

A program of eight executors on two hosts, each with a state of 80 kB, its tables on two
aggregators; tasks wait for 20 ms, so that two cores suffice. It runs undisturbed, then saved whole
every few seconds (`--recover rollback`); then one aggregator loses its memory in the middle, in
either mode. What a loss costs is by how much the whole run took longer: with a rollback the work
since the mark, which is two and a half seconds old when the memory is lost, and the time until all
processes run again; with partial recovery what it takes until the tables are elsewhere, but not
what training makes up for later. After a rollback every task counts exactly once, which is checked.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
from elastic_programs import at_iteration, result
from figures import Figure, Row, show, this_command, write_json

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.jobs import JobSpec

ITERATIONS: Final = 400
GIVE_UP_S: Final = 60.0
PROGRAM: Final = """
import sys, time
import numpy as np
from slackwater import elastic
from slackwater.elastic import Ssp, Table

class Work(elastic.App):
    executors = 8
    tables = {f"t{at}": Table(1000, 100, dtype="int32") for at in range(4)}
    driver = Ssp(int(sys.argv[1]), staleness=1)

    class Executor(elastic.Executor):
        def load(self, part):
            self.state, self.done = np.zeros(10_000), 0

        def run(self, ctx, task):
            assert task == self.done, (task, self.done)
            self.done += 1
            time.sleep(0.02)
            row = (97 * task + self.number) % 1000
            for name in self.app.tables:
                ctx.update(name, np.ones((1, 100), np.int32), rows=[row])

        def save(self):
            return self.done, self.state

        def restore(self, state):
            self.done, self.state = state

    def finish(self, tables, result):
        return {"sums": [int(table.sum(dtype=np.int64)) for table in tables.values()]}

if __name__ == "__main__":
    elastic.launch(Work())
"""


async def taken(
    cluster: EmbeddedCluster, client: Client, folder: Path, id: str, lose: bool, **fields: Any
) -> float:
    """Run the program; return how long it took from its first iterations to its end."""
    spec = JobSpec(
        id=id, program=(sys.executable, "work.py", str(ITERATIONS)), folder=str(folder), workers=2,
        workers_min=1, workers_max=2, servers=2, consistency="asynchronous", restarts=20,
        save_to=str(folder / id), grace_s=30.0,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    await client.submit(msgspec.structs.replace(spec, **fields))
    await at_iteration(client, id, 10)
    begun_s = loop.time()
    if lose:
        await at_iteration(client, id, ITERATIONS // 2)
        if fields.get("recover") == "rollback":
            await another_mark(client, id)
            await asyncio.sleep(fields["save_every_s"] / 2.0)
        pool = sorted(each.record.id for each in await client.aggregators() if each.record.cluster)
        home = f"aggregator-{pool[0]}"
        cluster.supervisor.drop_fds(home)
        cluster.supervisor.kill(home, signal.SIGKILL)
        await cluster.supervisor.until_ready(home)
    found = await result(client, id)
    record = await client.job(id)
    exact = [100 * 8 * ITERATIONS] * 4
    if record.spec.recover == "rollback" and found["sums"] != exact:
        raise RuntimeError(f"{id}: {found['sums']} counted, of {exact[0]} each")
    if lose and record.spec.recover == "rollback" and not record.begins_with:
        raise RuntimeError(f"{id} did not go back")
    return loop.time() - begun_s


async def another_mark(client: Client, id: str) -> None:
    """Return as soon as the job has another mark than now."""
    before, deadline_s = (await client.job(id)).mark, asyncio.get_running_loop().time() + GIVE_UP_S
    while (await client.job(id)).mark == before:
        if asyncio.get_running_loop().time() > deadline_s:
            raise RuntimeError(f"{id} has no new mark within {GIVE_UP_S:g} s")
        await asyncio.sleep(0.02)


async def measured(folder: Path, rounds: int, every_s: float) -> list[Row]:
    (folder / "work.py").write_text(PROGRAM)
    back = {"recover": "rollback", "save_every_s": every_s}
    part = {"save_every_s": every_s}
    runs: dict[str, tuple[bool, dict[str, Any]]] = {
        "plain": (False, {"save_to": ""}),
        "marked": (False, back),
        "back": (True, back),
        "partial": (True, part),
    }
    took_s: dict[str, list[float]] = {name: [] for name in runs}
    options = ClusterOptions(controllers=1, aggregators=2, restarts_max=1000)
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "bench") as client:
        for turn in range(rounds):
            for name in sorted(runs, reverse=bool(turn % 2)):
                lose, fields = runs[name]
                found = await taken(cluster, client, folder, f"{name}{turn}", lose, **fields)
                took_s[name].append(found)
    ratios = tuple(a / b for a, b in zip(took_s["marked"], took_s["plain"], strict=True))
    plain_s, marked_s = (statistics.median(took_s[name]) for name in ("plain", "marked"))
    marks = marked_s / every_s
    return [
        Figure(f"saved whole every {every_s:g} s: the whole run", marked_s, plain_s, "s",
               "not saved", 1.02, lower_is_better=True, ratios=ratios),
        Figure("the same: it stands still for, each time", 1e3 * (marked_s - plain_s) / marks,
               10.0 * every_s, "ms", "1 % of the interval", lower_is_better=True),
        Figure("an aggregator's memory lost: longer with a rollback by",
               statistics.median(took_s["back"]) - plain_s,
               statistics.median(took_s["partial"]) - plain_s, "s", "partial recovery",
               lower_is_better=True),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two marks")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        rows = asyncio.run(measured(Path(name), options.rounds, options.every))
    show(f"marks of an elastic program, load {os.getloadavg()[0]:.1f}", rows)
    if options.json is not None:
        write_json(options.json, this_command(), rows)


if __name__ == "__main__":
    main()
