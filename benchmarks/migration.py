"""What a synchronous job sees of the migration of all its tensors, against checkpoint and restore.

Each job's true tensors, full size, two workers that emulate its computation (loadgen/emulate.py:
pushes follow the backward pass, pulls come before the next forward pass; gradients are produced in
the region). Two real aggregators; every few iterations all tensors go from one to the other, under
orders of the integration tests' director. The pause is what the iterations that a migration touches
take longer than the median of those between. The peer stops the same job, writes its parameters to
a file, and starts its workers again from there.

    python benchmarks/migration.py [--models alexnet vgg19 awd-lm bert-large] [--moves 8]
        [--rule sgd] [--json FILE]
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from aggregation import NICE, Member
from figures import Figure, Row, Skipped, favour, show, spread, write_json

from slackwater.agent import Agent
from slackwater.common.bus.nats import NatsBus
from slackwater.common.embedded import Supervisor
from slackwater.loadgen import models
from slackwater.loadgen.emulate import Emulation, iterate
from slackwater.loadgen.replay.workload import COMPUTE_S
from slackwater.schemas import placement
from slackwater.schemas.base import AggregatorId, ClusterId
from slackwater.schemas.jobs import UpdateRule

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/integration/aggregator"))
from conftest import Job, Lab

WORKERS = 2
BETWEEN = 3
"""Iterations between two migrations, at least; the first ones after a start do not count."""
PAPER_MS = {"alexnet": 13.6, "vgg19": 21.5, "awd-lm": 40.6, "bert-large": 43.8}


# A worker -----------------------------------------------------------------------------------------


def worker(url: str, job: str, model: str, rank: int, rule: str, checkpoint: str) -> None:
    """Says when each iteration ended; ends with its stdin. With a file: begins from there."""
    emulation = Emulation(model)
    values: dict[str, Any] = {spec.name: spec.shape for spec in emulation.tensors}
    if Path(checkpoint).exists():
        values = dict(np.load(checkpoint))
    with Agent(
        url=url, job=job, rank=rank, workers=WORKERS, tensors=values,
        update=UpdateRule(name=rule), transport="shm",  # type: ignore[arg-type]
    ) as agent:  # fmt: skip
        print(f"ready {time.perf_counter()!r}", flush=True)
        while True:
            command = sys.stdin.readline().strip()
            if command == "save":
                if rank == 0:
                    with open(checkpoint, "wb") as file:
                        np.savez(file, **agent.parameters())
                        file.flush()
                        os.fsync(file.fileno())
            elif command == "go":
                iterate(emulation, agent, COMPUTE_S[model], lambda tensor, buffer: None)
            else:
                break
            print(f"{time.perf_counter()!r}", flush=True)
        agent.wait()


@dataclass
class Workers:
    members: list[Member]

    @classmethod
    async def start(cls, url: str, job: str, model: str, rule: str, checkpoint: str) -> "Workers":
        me = [sys.executable, __file__, "--member", url, job, model]
        members = [Member([*me, str(rank), rule, checkpoint]) for rank in range(WORKERS)]
        started = cls(members)
        await started.heard()
        return started

    async def heard(self) -> float:
        """When the last of them said something."""
        said = [await asyncio.to_thread(member.hear) for member in self.members]
        return max(float(line.split()[-1]) for line in said)

    async def do(self, command: str) -> float:
        for member in self.members:
            member.tell(command)
        return await self.heard()

    async def end(self) -> None:
        for member in self.members:
            await asyncio.to_thread(member.end)


# Migrations ---------------------------------------------------------------------------------------


async def send_all(lab: Lab, job: Job, to: str) -> None:
    """MIGRATE_INIT of every bucket to where it is; returns when it was accepted."""
    director = lab.director
    (home,) = {place.aggregator for place in job.places}
    epoch = job.places[0].location_epoch + 1
    message = placement.MigrateInit(
        cluster=ClusterId("c1"),
        migration=f"m{epoch}",
        job=job.plan.job,
        buckets=tuple(bucket.index for bucket in job.buckets),
        epochs=(epoch,) * len(job.buckets),
        to=director.endpoint(to),
    )
    await director.insist(home, "migrate", message)
    place = placement.BucketPlace(aggregator=AggregatorId(to), location_epoch=epoch)
    job.places = [place] * len(job.places)


def copied(lab: Lab, job: Job) -> int:
    """Buckets of the newest migration that are said to be there."""
    epoch = job.places[0].location_epoch
    return sum(
        isinstance(fact, placement.TensorCopyDone)
        and fact.job == job.plan.job
        and fact.location_epoch == epoch
        for fact in lab.director.facts
    )


async def pauses(lab: Lab, job: Job, workers: Workers, moves: int) -> tuple[float, list[float]]:
    """(median iteration without migration, what each migration added), seconds."""
    ended_s = await workers.do("go")
    calm: list[float] = []
    touched: list[list[float]] = []
    targets = ["a2", "a1"] * moves
    rest = BETWEEN
    while len(touched) < moves or rest > 0:
        moving = rest == 0
        if moving:
            touched.append([])
            await send_all(lab, job, targets[len(touched) - 1])
        while True:
            before_s, ended_s = ended_s, await workers.do("go")
            (touched[-1] if moving else calm).append(ended_s - before_s)
            if not moving or copied(lab, job) == len(job.buckets):
                break
        rest = BETWEEN if moving else rest - 1
    usual_s = statistics.median(calm)
    added = [sum(spans) - usual_s * len(spans) for spans in touched]
    return usual_s, added


async def restart(url: str, job: str, model: str, rule: str, workers: Workers, file: str) -> float:
    """Seconds from the last iteration's end until a job that goes on from its file could begin."""
    begun_s = time.perf_counter()
    await workers.do("save")
    await workers.end()
    again = await Workers.start(url, f"{job}-again", model, rule, file)
    taken_s = time.perf_counter() - begun_s
    await again.end()
    return taken_s


async def measure(lab: Lab, model: str, moves: int, rule: str) -> list[Row]:
    nbytes = 4 * models.parameters(models.tensors(model))
    need = (WORKERS + 2) * nbytes * (2 if rule == "sgd" else 3)
    free = psutil.virtual_memory().available
    if need > 0.7 * free:
        why = f"needs {need / 1e9:.0f} GB of {free / 1e9:.0f} GB free memory"
        return [Skipped(f"{model}, pause", why)]
    url, name = lab.supervisor.url, f"bench-{model}"
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "checkpoint.npz")
        homes, lab.director.homes = lab.director.homes, ["a1"]  # Where the job begins.
        workers = await Workers.start(url, name, model, rule, file)
        lab.director.homes = homes
        job = lab.director.jobs[name]
        if "a2" not in lab.director.homes:
            await lab.aggregators("a2", cpu_share=float(os.cpu_count() or 1))
        await asyncio.to_thread(favour, NICE)
        usual_s, added = await pauses(lab, job, workers, moves)
        restart_s = await restart(url, name, model, rule, workers, file)
    for gone in (name, f"{name}-again"):
        for home in lab.director.homes:
            await lab.director.insist(home, "drop", placement.DropJob(job=gone))
    pause_s = statistics.median(added)
    # A difference of medians can come out below nothing: then it is within the noise of 0.1 ms.
    pause_s = max(pause_s, 1e-4)
    label = f"{model}, {nbytes / 1e6:.0f} MB, {len(job.buckets)} buckets"
    noise = spread([usual_s + extra for extra in added])
    return [
        Figure(f"{label}: pause", 100 * pause_s / usual_s, 100.0, "% of iteration",
               f"({usual_s * 1e3:.0f} ms)", 0.05, True, spread=noise),
        Figure(f"{label}: pause", pause_s * 1e3, PAPER_MS[model], "ms", "paper", 1.0, True),
        Figure(f"{label}: against restart", pause_s * 1e3, restart_s * 1e3, "ms",
               "checkpoint-restore", 0.01, True),
    ]  # fmt: skip


async def compare(options: argparse.Namespace) -> list[Row]:
    supervisor = Supervisor()
    rows: list[Row] = []
    try:
        await supervisor.start_nats()
        bus = await NatsBus.connect(supervisor.url, "bench")
        try:
            lab = Lab(supervisor, bus)
            await lab.director.begin()
            await lab.aggregators("a1", cpu_share=float(os.cpu_count() or 1))
            for model in options.models:
                got = await measure(lab, model, options.moves, options.rule)
                show(model, got)
                rows += got
        finally:
            await bus.close()
    finally:
        await supervisor.stop()
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--member"]:
        url, job, model, rank, rule, checkpoint = sys.argv[2:8]
        worker(url, job, model, int(rank), rule, checkpoint)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(PAPER_MS))
    parser.add_argument("--moves", type=int, default=8)
    parser.add_argument("--rule", default="sgd")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(compare(options))
    if options.json is not None:
        write_json(options.json, "python benchmarks/migration.py", rows)


if __name__ == "__main__":
    main()
