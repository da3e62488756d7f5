"""The pause of a synchronous job whose tensors all migrate, against checkpoint and restore.

Each job's true tensors, full size, two workers that emulate its computation (loadgen/emulate.py:
pushes follow the backward pass, pulls come before the next forward pass; gradients are produced in
the region). Two real aggregators; every few iterations all tensors go from one to the other, under
orders of the integration tests' director. The pause is what the iterations that a migration touches
take longer than the median of those between, all of them together and the worst one alone. The peer
stops the same job, writes its parameters to a file, and starts its workers again from there.

Over shm a migration hands descriptors over. Over tcp, which everybody uses then, as between hosts,
it sends bytes: how many, in how many iterations, and what a bare socket carries here a second are
printed beside the pause. It is measured with whole tensors, and with large ones divided as the
controller's `divide_bytes` does.

    python benchmarks/migration.py [--models alexnet vgg19 awd-lm bert-large] [--moves 8]
        [--rule sgd] [--transports shm tcp] [--divide-mib 0 16] [--json FILE]
"""

import argparse
import asyncio
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from aggregation import NICE, Member
from figures import Figure, Row, Skipped, favour, show, spread, write_json

from slackwater.agent import Agent
from slackwater.common.bus.nats import NatsBus
from slackwater.common.domains.slots.rules import RULES
from slackwater.common.embedded import Supervisor
from slackwater.loadgen import models
from slackwater.loadgen.emulate import Emulation, iterate
from slackwater.loadgen.replay.workload import COMPUTE_S
from slackwater.schemas import placement
from slackwater.schemas.base import ClusterId
from slackwater.schemas.tensors import UpdateRule

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/integration/aggregator"))
from conftest import Job, Lab

WORKERS = 2
BETWEEN = {"shm": 3, "tcp": 15}
"""Iterations between two migrations, at least: by tcp one takes many, and the worst of as many is
compared with it."""
STARTING = 3
"""The first iterations after a start do not count."""
PAPER_MS = {"alexnet": 13.6, "vgg19": 21.5, "awd-lm": 40.6, "bert-large": 43.8}
NOTHING_COPIED = "between hosts, where tensors are copied; over shm the memory is handed over"


# A worker -----------------------------------------------------------------------------------------


def worker(
    url: str, job: str, model: str, rank: int, rule: str, transport: str, checkpoint: str
) -> None:
    """Says when each iteration ended; ends with its stdin. With a file: begins from there."""
    emulation = Emulation(model)
    values: dict[str, Any] = {spec.name: spec.shape for spec in emulation.tensors}
    if Path(checkpoint).exists():
        values = dict(np.load(checkpoint))
    with Agent(
        url=url, job=job, rank=rank, workers=WORKERS, tensors=values,
        update=UpdateRule(name=rule), transport=transport,  # type: ignore[arg-type]
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
    async def start(
        cls, url: str, job: str, model: str, rule: str, transport: str, checkpoint: str
    ) -> "Workers":
        me = [sys.executable, __file__, "--member", url, job, model]
        last = (rule, transport, checkpoint)
        members = [Member([*me, str(rank), *last]) for rank in range(WORKERS)]
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


async def send_all(lab: Lab, job: Job, to: str) -> int:
    """MIGRATE_INIT of every bucket to where it is; returns the places' new epoch when it was
    accepted."""
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
    return epoch


def copied(lab: Lab, job: Job, epoch: int) -> list[placement.TensorCopyDone]:
    """Return the announcements of this migration's buckets that have arrived, and note their new
    places in the job's table: not before, just as the controller does."""
    facts = [
        fact
        for fact in lab.director.facts
        if isinstance(fact, placement.TensorCopyDone)
        and fact.job == job.plan.job
        and fact.location_epoch == epoch
    ]
    for fact in facts:
        job.places[fact.bucket] = placement.BucketPlace(
            aggregator=fact.target, location_epoch=epoch
        )
    return facts


@dataclass(frozen=True)
class Pauses:
    calm_s: list[float]
    """Iterations without a migration."""
    touched_s: list[list[float]]
    """The iterations that each migration touched, in seconds."""
    nbytes: int
    """Bytes of one migration, as its aggregators tell them."""

    @property
    def usual_s(self) -> float:
        return statistics.median(self.calm_s)

    @property
    def added_s(self) -> list[float]:
        """Seconds that each migration added to all its iterations together."""
        return [sum(spans) - self.usual_s * len(spans) for spans in self.touched_s]

    @property
    def worst_s(self) -> list[float]:
        """Seconds that each migration added to one iteration at most."""
        return [max(spans) - self.usual_s for spans in self.touched_s]

    @property
    def iterations(self) -> float:
        return statistics.median(map(len, self.touched_s))

    @property
    def calm_worst_s(self) -> float:
        """The worst as in `worst_s`, where nothing moves: of as many iterations."""
        step = max(1, round(self.iterations))
        groups = [self.calm_s[i : i + step] for i in range(0, len(self.calm_s), step)]
        return statistics.median(map(max, groups)) - self.usual_s


async def pauses(lab: Lab, job: Job, workers: Workers, moves: int, between: int) -> Pauses:
    for _ in range(STARTING):
        ended_s = await workers.do("go")
    calm: list[float] = []
    touched: list[list[float]] = []
    targets = [lab.director.homes[1], lab.director.homes[0]] * moves
    rest, nbytes, epoch = between, 0, 0
    while len(touched) < moves or rest > 0:
        moving = rest == 0
        if moving:
            touched.append([])
            epoch = await send_all(lab, job, targets[len(touched) - 1])
        while True:
            before_s, ended_s = ended_s, await workers.do("go")
            (touched[-1] if moving else calm).append(ended_s - before_s)
            if not moving:
                break
            facts = {fact.bucket: fact.nbytes for fact in copied(lab, job, epoch)}
            if len(facts) == len(job.buckets):
                nbytes = sum(facts.values())
                break
        rest = between if moving else rest - 1
    return Pauses(calm, touched, nbytes)


def link_bytes_s(nbytes: int = 2**28) -> float:
    """Measure one bare socket of this host, its sender and receiver in threads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    piece, room = bytes(2**20), bytearray(2**20)

    def send() -> None:
        for _ in range(nbytes // len(piece)):
            sender.sendall(piece)

    begun_s, left = time.perf_counter(), nbytes
    thread = threading.Thread(target=send)
    thread.start()
    while left > 0:
        left -= receiver.recv_into(room)
    taken_s = time.perf_counter() - begun_s
    thread.join()
    sender.close()
    receiver.close()
    return nbytes / taken_s


async def restart(
    url: str, job: str, model: str, rule: str, transport: str, workers: Workers, file: str
) -> float:
    """Seconds from the last iteration's end until a job that goes on from its file could begin."""
    begun_s = time.perf_counter()
    await workers.do("save")
    await workers.end()
    again = await Workers.start(url, f"{job}-again", model, rule, transport, file)
    taken_s = time.perf_counter() - begun_s
    await again.end()
    return taken_s


async def measure(lab: Lab, model: str, moves: int, rule: str, transport: str) -> list[Row]:
    nbytes = 4 * models.parameters(models.tensors(model))
    need = (WORKERS + 2) * nbytes * (2 if rule == "sgd" else 3)
    free = psutil.virtual_memory().available
    if need > 0.7 * free:
        why = f"needs {need / 1e9:.0f} GB of {free / 1e9:.0f} GB free memory"
        return [Skipped(f"{model} by {transport}, pause", why)]
    url, name = lab.supervisor.url, f"bench-{model}"
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "checkpoint.npz")
        homes, lab.director.homes = lab.director.homes, ["a1"]  # Where the job begins.
        workers = await Workers.start(url, name, model, rule, transport, file)
        lab.director.homes = homes
        job = lab.director.jobs[name]
        if "a2" not in lab.director.homes:
            await lab.aggregators("a2", **fields(transport))
        await asyncio.to_thread(favour, NICE)
        seen = await pauses(lab, job, workers, moves, BETWEEN[transport])
        restart_s = await restart(url, name, model, rule, transport, workers, file)
    for gone in (name, f"{name}-again"):
        for home in lab.director.homes:
            await lab.director.insist(home, "drop", placement.DropJob(job=gone))
    by = "" if transport == "shm" else f" by {transport}"
    if lab.director.divide_bytes:
        by += f" in parts of {lab.director.divide_bytes // 2**20} MiB"
    label = f"{model}{by}, {nbytes / 1e6:.0f} MB, {len(job.buckets)} buckets"
    rows = figures(label, model, transport, seen, restart_s)
    if transport != "shm":
        live = (1 + RULES[rule].states) * nbytes / 1e6
        what = f"{label}: sent in {seen.iterations:g} iterations"
        link = f"live; a bare socket here carries {link_bytes_s() / 1e6:.0f} MB/s"
        rows.append(Figure(what, seen.nbytes / 1e6, live, "MB", link, 1.02, True))
    return rows


def figures(label: str, model: str, transport: str, seen: Pauses, restart_s: float) -> list[Row]:
    usual_s = seen.usual_s
    # A difference of medians can come out below nothing: then it is within the noise of 0.1 ms.
    pause_s = max(statistics.median(seen.added_s), 1e-4)
    worst_s = max(statistics.median(seen.worst_s), 1e-4)
    noise = spread([usual_s + extra for extra in seen.added_s])
    calm = f"({usual_s * 1e3:.0f} ms; the worst of as many calm ones adds "
    calm += f"{100 * seen.calm_worst_s / usual_s:.1f} %)"
    paper = Figure(f"{label}: pause", pause_s * 1e3, PAPER_MS[model], "ms", "paper", 1.0, True)
    if transport == "shm":
        paper = replace(paper, goal=None, unlike=NOTHING_COPIED)
    return [
        Figure(f"{label}: pause", 100 * pause_s / usual_s, 100.0, "% of iteration",
               f"({usual_s * 1e3:.0f} ms)", 0.05, True, spread=noise),
        Figure(f"{label}: worst iteration", 100 * worst_s / usual_s, 100.0, "% of iteration",
               calm, 0.05, True, spread=spread([usual_s + extra for extra in seen.worst_s])),
        paper,
        Figure(f"{label}: against restart", pause_s * 1e3, restart_s * 1e3, "ms",
               "checkpoint-restore", 0.01, True),
    ]  # fmt: skip


def fields(transport: str) -> dict[str, Any]:
    """An aggregator's configuration. Over shm it listens on nothing else, as it always did."""
    share = {"cpu_share": float(os.cpu_count() or 1)}
    return share if transport == "shm" else {**share, "transport": transport}


async def compare(options: argparse.Namespace, transport: str, divide_mib: int) -> list[Row]:
    supervisor = Supervisor()
    rows: list[Row] = []
    try:
        await supervisor.start_nats()
        bus = await NatsBus.connect(supervisor.url, "bench")
        try:
            lab = Lab(supervisor, bus)
            lab.director.divide_bytes = divide_mib * 2**20
            await lab.director.begin()
            await lab.aggregators("a1", **fields(transport))
            for model in options.models:
                got = await measure(lab, model, options.moves, options.rule, transport)
                parts = f", large tensors in parts of {divide_mib} MiB" if divide_mib else ""
                show(f"{model}, {transport}{parts}", got)
                rows += got
        finally:
            await bus.close()
    finally:
        await supervisor.stop()
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--member"]:
        url, job, model, rank, rule, transport, checkpoint = sys.argv[2:9]
        worker(url, job, model, int(rank), rule, transport, checkpoint)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(PAPER_MS))
    parser.add_argument("--moves", type=int, default=8)
    parser.add_argument("--rule", default="sgd")
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp"], choices=["shm", "tcp"])
    parser.add_argument("--divide-mib", nargs="+", type=int, default=[0, 16])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for transport in options.transports:
        for divide_mib in options.divide_mib if transport == "tcp" else [0]:
            rows += asyncio.run(compare(options, transport, divide_mib))
    if options.json is not None:
        by = f" --transports {options.transports[0]}" if len(options.transports) == 1 else ""
        write_json(options.json, f"python benchmarks/migration.py{by}", rows)


if __name__ == "__main__":
    main()
