"""Measure what the elastic runtime costs, and how soon it uses more hosts.

    python benchmarks/elastic_programs.py [--rounds 3] [--only PART]

*Orders*: tasks that compute nothing, alone in one process, driver and host included: processor time
for each, from its dispatch to its completion, at 8 orders an executor, and the part of the time
that is work where a task lasts 1 and 10 ms. *Over-partitioning*: an epoch of softmax regression, of
the same data in 1 to 16 executors of one host (Qiao 2021, figure 4.8: 1.11 at 16). *Scaling out*: a
program of 4 hosts is given 8 after a quarter of its iterations; its tasks wait for a set time, as
two cores cannot compute for eight hosts. Ideal is as long as the iterations with 4 take, and those
with 8, from when the new ones are there (figure 4.9: 1.01 of ideal). *Scaling in*: from the order
until the last of four hosts that leave has ended. *Pauses*: the longest time in which no task of a
program ended, while two hosts joined two, and while none did. *Moves*: executors with a state are
moved from host to host all the time, as hosts come and go, beside a run where none is: by how much
each takes longer than ideal, with as many hosts as there were in each iteration. *Blocks*: tables
go from aggregator to aggregator. *Afar*: tasks read rows over tcp, and others run meanwhile, or do
not. *Priority*: a program of 8 hosts on 8 slots, which runs for 100 s,
beside the same where a job of higher priority has 2 of them for 30 s (figure 4.6: 1.2 of
undisturbed, and that job waits for 1 of 30 min).
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from figures import Figure, Row, show, this_command, write_json

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.jobs import JobRecord, JobSpec

GIVE_UP_S: Final = 180.0
LOOK_S: Final = 0.05
BETWEEN_S: Final = 1.0
ORDER_GOAL_US: Final = 10.0
PROGRAM: Final = '''
import json, os, sys, time
import numpy as np
from slackwater import elastic
from slackwater.elastic import Driver, Ssp, Table

what, executors, number, task_s, depth = (type_(word) for type_, word in zip(
    (str, int, int, float, int), sys.argv[1:]))


class Deep(Driver):
    """`number` tasks in all, `depth` of each executor at a time."""

    def start(self, run):
        self.begun, self.sent, self.done_ = (time.process_time(), time.perf_counter()), 0, 0
        for executor in range(executors):
            for _ in range(depth):
                self.more(run, executor)

    def more(self, run, executor):
        if self.sent < number:
            self.sent += 1
            run.dispatch(executor, 0)

    def done(self, run, executor, task, result):
        self.done_ += 1
        self.more(run, executor)
        if self.done_ == number:
            used, took_s = time.process_time() - self.begun[0], time.perf_counter() - self.begun[1]
            run.end({"cpu_us": 1e6 * used / number, "work": task_s * number / took_s})


class Watched(Ssp):
    """Notes when each iteration ended, and with how many hosts."""

    def start(self, run):
        self.ended, self.told_s = [(time.monotonic(), 0)], []
        super().start(run)

    def done(self, run, executor, task, result):
        self.told_s.append(time.monotonic())
        before = self._reported
        super().done(run, executor, task, result)
        self.ended += [(time.monotonic(), len(run.hosts))] * (self._reported - before)


class Work(elastic.App):
    pass


Work.executors = executors
Work.tables = {"w": Table(785 if what == "mlr" else 1, 10)}
if what.startswith("afar"):
    Work.tables |= {"rows": Table(20_000, 64, sparse=True)}
if what == "afar-waits":
    from slackwater.elastic.host import Host
    Host._meanwhile = lambda self, is_there: None
BLOCKS = 36
if what == "blocks":
    Work.tables |= {f"t{at}": Table(2000, 262, dtype="int32", sparse=True) for at in range(BLOCKS)}
Work.driver = Deep() if what == "orders" else Watched(number, staleness=depth)


class Executor(elastic.Executor):
    def load(self, part):
        self.state = np.zeros(1000)
        if what == "mlr":
            rng = np.random.default_rng(part)
            self.x = rng.random((20_000 // executors, 785), np.float32)
            self.y = np.eye(10, dtype=np.float32)[rng.integers(0, 10, len(self.x))]

    def run(self, ctx, task):
        if what == "mlr":
            scores = self.x @ ctx.get("w")
            p = np.exp(scores - scores.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            ctx.update("w", -0.01 * self.x.T @ (p - self.y) / len(self.x))
            return float(-np.log((p * self.y).sum(1)).mean())
        if what.startswith("afar"):
            rows = (np.arange(200) * 97 + task * 31 + self.number * 2500) % 20_000
            ctx.get("rows", rows=rows)
        if task_s:
            until_s = time.perf_counter() + task_s
            if what == "orders" or what.startswith("afar"):
                while time.perf_counter() < until_s:
                    pass
            else:
                time.sleep(task_s)
        ctx.update("w", np.ones((1, 10)))
        if what == "blocks":
            rows = np.arange(50) * 7 + self.number
            for at in (self.number + task, 3 * self.number + task):
                ctx.update(f"t{at % BLOCKS}", np.ones((50, 262), np.int32), rows=rows)

    def save(self):
        return self.state if what == "moves" else None

    def restore(self, state):
        self.state = state


Work.Executor = Executor


def finish(self, tables, result):
    if what == "orders":
        return result
    ended = self.driver.ended
    steps = [(b[0] - a[0], b[1]) for a, b in zip(ended, ended[1:])]
    grown = next((at for at, step in enumerate(steps) if step[1] > steps[1][1]), len(steps))
    steady = [step[0] for step in steps[len(steps) // 4:]]
    ideal_s = sum(-(-executors // max(1, hosts)) * task_s for _, hosts in steps)
    return {"took_s": ended[-1][0] - ended[0][0], "grown": grown, "mean_s": float(np.mean(steady)),
            "sum": float(tables["w"][0, 0]), "ideal_s": ideal_s,
            "rows": int(sum(t.sum(dtype=np.int64) for name, t in tables.items() if name != "w")),
            "silence_s": max(np.diff(self.driver.told_s))}


Work.finish = finish
if __name__ == "__main__":
    elastic.launch(Work())
'''


def alone(folder: Path, *words: object) -> dict[str, Any]:
    """Run the program in one process; return its result."""
    done = subprocess.run(
        [sys.executable, str(folder / "work.py"), *map(str, words)],
        capture_output=True, text=True, check=True, timeout=GIVE_UP_S,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    line = next(each for each in done.stdout.splitlines() if each.startswith("result: "))
    found: dict[str, Any] = json.loads(line.removeprefix("result: "))
    return found


def orders(folder: Path, rounds: int) -> list[Row]:
    cpu_us = [alone(folder, "orders", 4, 20_000, 0.0, 8)["cpu_us"] for _ in range(rounds)]
    parts = {
        ms: statistics.median(
            alone(folder, "orders", 4, int(2000 / ms), ms / 1000, 8)["work"] for _ in range(rounds)
        )
        for ms in (1, 10)
    }
    return [
        Figure(
            "an order and its completion, 8 an executor: processor time",
            statistics.median(cpu_us), ORDER_GOAL_US, "us", "our goal", 1.0, lower_is_better=True,
        ),
        Figure("tasks of 1 ms: part of the time that is work", parts[1], 0.95, "", "goal", 1.0),
        Figure("tasks of 10 ms: the same", parts[10], 0.95, "", "goal", 1.0),
    ]  # fmt: skip


def partitions(folder: Path, rounds: int) -> list[Row]:
    """Epochs of softmax regression, the same data in more and more executors, interleaved."""
    took_s: dict[int, list[float]] = {number: [] for number in (1, 2, 4, 8, 16)}
    for _ in range(rounds):
        for number, each in took_s.items():
            each.append(alone(folder, "mlr", number, 30, 0.0, 0)["mean_s"])
    one = statistics.median(took_s[1])
    return [
        Figure(
            f"softmax regression, {number} executors on a host: an epoch",
            statistics.median(each), one, "s", "one executor", 1.05 if number == 16 else None,
            lower_is_better=True,
        )
        for number, each in took_s.items() if number > 1
    ]  # fmt: skip


async def submitted(client: Client, folder: Path, id: str, hosts: int, *words: object) -> None:
    program = (sys.executable, str(folder / "work.py"), *map(str, words))
    await client.submit(
        JobSpec(
            id=id, program=program, folder=str(folder), workers=hosts, workers_min=1, workers_max=8,
            consistency="asynchronous", restarts=10, grace_s=30.0,
        )
    )  # fmt: skip


async def at_iteration(client: Client, id: str, least: int) -> None:
    for _ in range(int(GIVE_UP_S / LOOK_S)):
        progress = (await client.job_info(id)).progress
        if progress is not None and progress.program and progress.program.iteration >= least:
            return
        await asyncio.sleep(LOOK_S)
    raise RuntimeError(f"{id} did not reach iteration {least} within {GIVE_UP_S:g} s")


async def ended(client: Client, id: str) -> JobRecord:
    for _ in range(int(GIVE_UP_S / LOOK_S)):
        record = await client.job(id)
        if record.finished_s:
            if record.state != "completed":
                raise RuntimeError(f"{id}: {record.reason}")
            return record
        await asyncio.sleep(LOOK_S)
    raise RuntimeError(f"{id} did not end within {GIVE_UP_S:g} s")


async def result(client: Client, id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await ended(client, id)).results["0"])
    return found


async def holding(client: Client, id: str, hosts: int) -> float:
    """Scale the job; return the seconds until it holds so many slots."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    await client.scale(id, hosts)
    for _ in range(int(GIVE_UP_S / LOOK_S)):
        record = await client.job(id)
        if not record.resizing and sum(number for _, number in record.allocation) == hosts:
            return loop.time() - begun_s
        await asyncio.sleep(LOOK_S)
    raise RuntimeError(f"{id} did not have {hosts} hosts within {GIVE_UP_S:g} s")


EXECUTORS, ITERATIONS, TASK_S = 32, 160, 0.02
URGENT_S: Final = 30.0


async def scaling(client: Client, folder: Path, rounds: int) -> list[Row]:
    took, ideal, out_s, in_s = [], [], [], []
    for turn in range(rounds):
        id = f"out{turn}"
        await submitted(client, folder, id, 4, "sleep", EXECUTORS, ITERATIONS, TASK_S, 2)
        await at_iteration(client, id, ITERATIONS // 4)
        out_s.append(await holding(client, id, 8))
        found = await result(client, id)
        grown = found["grown"]
        took.append(found["took_s"])
        with_4 = grown * EXECUTORS / 4 * TASK_S
        ideal.append(with_4 + (ITERATIONS - grown) * EXECUTORS / 8 * TASK_S)
        id = f"in{turn}"
        await submitted(client, folder, id, 8, "moves", EXECUTORS, ITERATIONS, TASK_S, 2)
        await at_iteration(client, id, ITERATIONS // 4)
        in_s.append(await holding(client, id, 4))
        await result(client, id)
    return [
        Figure(
            "4 to 8 hosts after a quarter, emulated compute: the whole run",
            statistics.median(took), statistics.median(ideal), "s", "ideal, once they are there",
            1.02, lower_is_better=True,
            ratios=tuple(a / b for a, b in zip(took, ideal, strict=True)),
        ),
        Figure("the same: from the order until 8 have executors", statistics.median(out_s),
               statistics.median(out_s), "s", "itself"),
        Figure("8 to 4 hosts: from the order until the last has ended", statistics.median(in_s),
               1.0 + TASK_S, "s", "a task and 1 s", 1.0, lower_is_better=True),
    ]  # fmt: skip


async def pauses(client: Client, folder: Path, rounds: int) -> list[Row]:
    """The longest time without a completion of any task, of a program that goes from 2 hosts to 4,
    beside one that does not."""
    task_s = 0.2
    silent_s: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds):
        for growing in sorted(silent_s, reverse=bool(turn % 2)):
            id = f"p{turn}{'g' if growing else 's'}"
            await submitted(client, folder, id, 2, "sleep", 16, 12, task_s, 2)
            await at_iteration(client, id, 3)
            if growing:
                await holding(client, id, 4)
            silent_s[growing].append((await result(client, id))["silence_s"])
    return [
        Figure(
            "2 to 4 hosts, tasks of 0.2 s: the longest time without a completion",
            max(silent_s[True]),
            max(silent_s[False]) + task_s,
            "s",
            "2 hosts that stay, and a task",
            1.0,
            lower_is_better=True,
        )
    ]


async def moves(client: Client, folder: Path, rounds: int) -> list[Row]:
    """Executors with a state go from host to host as hosts come and go, beside a run of as many."""
    over: dict[bool, list[float]] = {True: [], False: []}
    moved = 0
    for turn in range(rounds):
        for moving in sorted(over, reverse=bool(turn % 2)):
            id = f"m{turn}{'m' if moving else 's'}"
            await submitted(client, folder, id, 4, "moves", 16, 300, 0.01, 1)
            await at_iteration(client, id, 10)
            while moving:
                progress = (await client.job_info(id)).progress
                if progress and progress.program and progress.program.iteration > 200:
                    moved += progress.program.moves
                    break
                for hosts in (3, 4):
                    await holding(client, id, hosts)
            found = await result(client, id)
            if found["sum"] != 16 * 300:
                raise RuntimeError(f"{id}: {found['sum']} updates counted of {16 * 300}")
            over[moving].append(found["took_s"] / found["ideal_s"])
    return [
        Figure(
            f"{moved} moves in {rounds} runs, every update once: the time, beside ideal",
            statistics.median(over[True]), statistics.median(over[False]), "", "hosts that stay",
            lower_is_better=True,
        )
    ]  # fmt: skip


async def emptied(client: Client, aggregator: str, order: str) -> tuple[int, float]:
    """Let all of an aggregator go elsewhere, and let it be used again; return how many buckets went
    and how long that took."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    progress = await client.drain(aggregator, order, 60.0)
    count = sum(job.buckets for job in progress.left)
    while progress.drain.state != "drained":
        if loop.time() - begun_s > GIVE_UP_S:
            raise RuntimeError(f"{aggregator} is not empty after {GIVE_UP_S:g} s")
        await asyncio.sleep(0.02)
        progress = await client.drain(aggregator, order, 60.0)
    took_s = loop.time() - begun_s
    await client.restore(aggregator)
    return count, took_s


async def blocks(client: Client, folder: Path, rounds: int) -> list[Row]:
    """Tables of 36 blocks of 2 MB go from one aggregator to the other and back while the program
    trains, a second in between, or stay (Lee 2020, section 3.3: 1.4 s for as many)."""
    executors, iterations, task_s, moved, empty_s = 8, 500, 0.02, 0, list[float]()
    over: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds):
        for moving in sorted(over, reverse=bool(turn % 2)):
            id = f"b{turn}{'m' if moving else 's'}"
            await submitted(client, folder, id, 2, "blocks", executors, iterations, task_s, 1)
            await at_iteration(client, id, 10)
            at = 0
            while moving:
                known = await client.aggregators()
                serving = sorted(each.record.id for each in known if each.record.cluster)
                count, took_s = await emptied(client, serving[at % len(serving)], f"{id}-{at}")
                moved, at = moved + count, at + 1
                empty_s += [took_s] if count >= 36 else []
                await asyncio.sleep(BETWEEN_S)
                progress = (await client.job_info(id)).progress
                if progress and progress.program and progress.program.iteration > iterations - 100:
                    break
            found = await result(client, id)
            if (found["sum"], found["rows"]) != (executors * iterations, found["sum"] * 26200):
                raise RuntimeError(f"{id}: {found['sum']} tasks and {found['rows']} counted")
            over[moving].append(found["took_s"])
    ratios = tuple(a / b for a, b in zip(over[True], over[False], strict=True))
    return [
        Figure(
            f"{moved} moves of blocks in {rounds} runs, every update once: the time",
            statistics.median(over[True]), statistics.median(over[False]), "s", "blocks that stay",
            1.02, lower_is_better=True, ratios=ratios,
        ),
        Figure("the same: 36 blocks of 2 MB, from the order until they are elsewhere",
               statistics.median(empty_s), 1.0, "s", "1 s", 1.0, lower_is_better=True),
    ]  # fmt: skip


async def afar(client: Client, folder: Path, rounds: int) -> list[Row]:
    """A host whose tasks read 200 rows of a table over tcp and compute for a millisecond: one that
    lets others run while it waits, and one that does not."""
    took: dict[str, list[float]] = {"afar": [], "afar-waits": []}
    for turn in range(rounds):
        for what, each in took.items():
            id = f"{what}{turn}"
            await submitted(client, folder, id, 1, what, 8, 400, 0.001, 2)
            each.append((await result(client, id))["took_s"])
    ratios = tuple(a / b for a, b in zip(*took.values(), strict=True))
    return [
        Figure(
            "tasks of 1 ms that read 200 rows over tcp: the whole run",
            statistics.median(took["afar"]), statistics.median(took["afar-waits"]), "s",
            "tasks that wait", lower_is_better=True, ratios=ratios,
        )
    ]  # fmt: skip


async def urgent(client: Client, id: str) -> float:
    """Run a job of higher priority on two slots for 30 s; return how many seconds that took."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    program = (sys.executable, "-c", f"import time; time.sleep({URGENT_S})")
    await client.submit(JobSpec(id=id, program=program, workers=2, priority=1))
    await ended(client, id)
    return loop.time() - begun_s


async def priority(client: Client, folder: Path, rounds: int) -> list[Row]:
    """Once: a program alone, then one that gives slots to another job. Tasks wait, as two cores
    cannot compute for eight hosts. There are as many of them for each of six hosts as of eight."""
    iterations, executors, task_s = 500, 48, 1.0 / 30.0
    took_s: dict[str, float] = {}
    for id in ("alone", "gives"):
        await submitted(client, folder, id, 8, "sleep", executors, iterations, task_s, 2)
        await at_iteration(client, id, iterations * 6 // 10)
        if id == "gives":
            other_s = await urgent(client, "urgent")
        took_s[id] = (await result(client, id))["took_s"]
    return [
        Figure(
            "2 of 8 hosts given to a job of higher priority for 30 s, emulated: the whole run",
            took_s["gives"], took_s["alone"], "s", "undisturbed (ideal 1.075)", 1.12,
            lower_is_better=True,
        ),
        Figure("the same: the other job", other_s, URGENT_S, "s", "its own time", 1.03,
               lower_is_better=True),
    ]  # fmt: skip


Measured = Callable[[Client, Path, int], Coroutine[Any, Any, list[Row]]]
Part = Callable[[Path, int], list[Row]]


def on_cluster(measured: Measured, **given: Any) -> Part:
    async def run(folder: Path, rounds: int) -> list[Row]:
        options = ClusterOptions(controllers=1, aggregators=2, **{"nodes": 2, **given})
        async with EmbeddedCluster(options) as cluster, connect(cluster.url, "bench") as client:
            return await measured(client, folder, rounds)

    return lambda folder, rounds: asyncio.run(run(folder, rounds))


PARTS: Final[dict[str, Part]] = {
    "orders": orders,
    "partitions": partitions,
    "scaling": on_cluster(scaling),
    "pauses": on_cluster(pauses),
    "moves": on_cluster(moves),
    "blocks": on_cluster(blocks),
    "afar": on_cluster(afar, transport="tcp"),
    "priority": on_cluster(priority, nodes=1, worker={"slots": 8}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=[*PARTS], action="append", help="these parts alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        folder = Path(name)
        (folder / "work.py").write_text(PROGRAM)
        parts = [PARTS[name] for name in options.only or PARTS]
        rows = [row for part in parts for row in part(folder, options.rounds)]
    show(f"elastic programs, load {os.getloadavg()[0]:.1f}", rows)
    if options.json is not None:
        write_json(options.json, this_command(), rows)


if __name__ == "__main__":
    main()
