"""Measure what it costs to give a training job another number of workers, live.

A job of Agents (torch, momentum) trains with two workers, then three, one and two, again and again,
by the requests of `slackwater scale`. Told are the seconds from the order until its first iteration
with the new number has been applied, and those since the iteration before it; joiners are forked
from the node's warm process. No iteration may be lost. Beside it, in turns: the same job paused and
resumed with the other number; and torch alone, as processes that are all there already destroy
their gloo group, form another one, and broadcast the parameters (DistributedDataParallel).

    python benchmarks/resize.py [--rounds 5] [--mb 4 100]

Needs torch. Goals, medians: .5 s at 4 MB and 1.5 s at 100 MB from the order on; it stands still for
less time than to pause and resume.
"""

import argparse
import asyncio
import os
import socket
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from figures import Figure, Row, Skipped, show, spread, this_command, write_json

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.jobs import JobSpec
from slackwater.services.master.gangs import processes

SIZES = (3, 1, 2)
"""Numbers of workers, after the 2 that the job begins with."""
TRAINS_S = 1.0
GIVE_UP_S = 120.0
LOOK_S = 0.005
GOALS = {"4": 0.5, "100": 1.5}

MODEL = """
import os, sys, time, torch
from torch.nn import functional
torch.set_num_threads(1)
torch.manual_seed(1)
width = int((float(os.environ["MODEL_MB"]) * 2**18 / 4) ** 0.5)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(4)])
inner = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
inputs = torch.randn(4, width)
"""
AGENT = (
    MODEL
    + """
import slackwater.torch
optimizer = slackwater.torch.Optimizer(inner, model)
agent = optimizer.agent
log = open(os.environ["TELL"], "a") if agent.rank == 0 else None
while True:
    workers = agent.workers
    optimizer.zero_grad()
    functional.mse_loss(model(inputs), inputs).backward()
    optimizer.step()
    optimizer.synchronize()
    if log is not None:
        log.write(f"{time.time()} {optimizer.iteration} {workers} {os.getpid()}\\n")
        log.flush()
"""
)
REFORM = (
    MODEL
    + """
from datetime import timedelta
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank, total, port = map(int, sys.argv[1:4])
sizes = [int(size) for size in sys.argv[4].split(",")]
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=100))
ended_s = 0.0
for number, size in enumerate(sizes):
    store.set(f"here/{number}/{rank}", "1")
    store.wait([f"here/{number}/{each}" for each in range(total)])
    if rank >= size:
        continue
    group = dist.PrefixStore(f"round/{number}", store)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=size)
    ddp = DistributedDataParallel(model)
    for turn in range(5):
        inner.zero_grad()
        functional.mse_loss(ddp(inputs), inputs).backward()
        inner.step()
        now_s = time.time()
        if turn == 0 and rank == 0 and number:
            print(now_s - ended_s, flush=True)
        ended_s = now_s
    del ddp
    dist.destroy_process_group()
"""
)


def told(folder: Path, job: str) -> list[tuple[float, int, int, int]]:
    """(instant, iteration, workers, process) of each iteration of rank 0."""
    path = folder / f"{job}.log"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [line.split() for line in lines if len(line.split()) == 4]
    return [(float(at), int(number), int(size), int(pid)) for at, number, size, pid in found]


async def first_with(folder: Path, job: str, workers: int, since_s: float) -> tuple[float, float]:
    """Wait for the first iteration with so many workers; return the seconds until its end, and
    those since the end of the iteration before."""
    async with asyncio.timeout(GIVE_UP_S):
        while True:
            before_s = since_s
            for at_s, _, size, _ in told(folder, job)[-4000:]:
                if size == workers and at_s > since_s:
                    return at_s - since_s, at_s - before_s
                before_s = at_s
            await asyncio.sleep(LOOK_S)


async def settled(client: Client, job: str, workers: int) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while True:
            record = await client.job(job)
            if record.state == "running" and not record.resizing and processes(record) == workers:
                return
            assert not record.finished_s, record.reason
            await asyncio.sleep(LOOK_S)


async def live(client: Client, folder: Path, workers: int) -> tuple[float, float]:
    begun_s = client.clock.now_s()
    await client.scale("live", workers)
    seconds = await first_with(folder, "live", workers, begun_s)
    await settled(client, "live", workers)
    return seconds


async def anew(client: Client, folder: Path, workers: int) -> tuple[float, float]:
    """The same by pausing and resuming."""
    begun_s = client.clock.now_s()
    await client.pause("anew")
    await client.scale("anew", workers)
    await client.resume("anew")
    return await first_with(folder, "anew", workers, begun_s)


async def reformed(folder: Path, megabytes: str) -> list[float]:

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    total = max(SIZES)
    env = {
        **os.environ, "MODEL_MB": megabytes, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ranks = [
        await asyncio.create_subprocess_exec(
            sys.executable, str(folder / "reform.py"), str(rank), str(total), str(port),
            ",".join(map(str, (2, *SIZES))), env=env,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )
        for rank in range(total)
    ]  # fmt: skip
    try:
        async with asyncio.timeout(GIVE_UP_S):
            out, _ = await ranks[0].communicate()
            await asyncio.gather(*(rank.communicate() for rank in ranks[1:]))
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
    return [float(line) for line in out.split()]


def is_warm(log: Path) -> bool:
    """Say whether the node can fork ranks."""
    return log.exists() and "warm.ready" in log.read_text()


async def measure(megabytes: str, rounds: int) -> tuple[dict[str, list[float]], list[str]]:
    names = ("live", "anew", "gloo", "live.stands", "anew.stands")
    found: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "agent.py").write_text(AGENT)
        (folder / "reform.py").write_text(REFORM)
        made = ClusterOptions(
            controllers=1, aggregators=2, log_dir=folder / "logs",
            worker={"warm": "on", "slots": 12},
        )  # fmt: skip
        async with EmbeddedCluster(made) as cluster, connect(cluster.url) as client:
            for _ in range(int(GIVE_UP_S * 10)):
                if is_warm(folder / "logs" / "worker-w1.log"):
                    break
                await asyncio.sleep(0.1)
            for job in ("live", "anew"):
                env = {"MODEL_MB": megabytes, "TELL": str(folder / f"{job}.log")}
                program = ("python", str(folder / "agent.py"))
                spec = JobSpec(
                    id=job, workers=2, workers_min=1, workers_max=3, program=program, env=env
                )
                await client.submit(spec)
                await first_with(folder, job, 2, 0.0)
                if job == "live":
                    await client.pause(job)
            for _ in range(rounds):
                for way, change in (("live", live), ("anew", anew)):
                    other = "anew" if way == "live" else "live"
                    await client.pause(other)  # Each is alone with the cores.
                    resumed_s = client.clock.now_s()
                    await client.resume(way)
                    await first_with(folder, way, 2, resumed_s)
                    for workers in SIZES:
                        await asyncio.sleep(TRAINS_S)
                        seconds, stands_s = await change(client, folder, workers)
                        found[way].append(seconds)
                        found[f"{way}.stands"].append(stands_s)
                for job in ("live", "anew"):
                    await client.pause(job)
                found["gloo"] += await reformed(folder, megabytes)
        return found, faults(folder)


def faults(folder: Path) -> list[str]:
    """Say what was lost."""
    lost = []
    for (_, before, _, pid), (_, number, _, same) in pairwise(told(folder, "live")):
        if pid == same and number != before + 1:  # A pause may kill it before it writes.
            lost.append(number)
    return [f"iterations lost before {lost[:5]}"] if lost else []


def rows_of(megabytes: str, found: dict[str, list[float]], wrong: list[str]) -> list[Row]:
    ours, noise = statistics.median(found["live"]), spread(found["live"])
    title = f"{megabytes} MB: order to the first iteration"
    made: list[Row] = []
    if (goal := GOALS.get(megabytes)) is not None:
        made.append(
            Figure(f"{title}, median", ours, goal, "s", "limit", goal=1.0, lower_is_better=True,
                   spread=noise)
        )  # fmt: skip
    peer = statistics.median(found["anew"])
    made.append(Figure(title, ours, peer, "s", "paused and resumed", None, True, spread=noise))
    stands_s, noise = statistics.median(found["live.stands"]), spread(found["live.stands"])
    title = f"{megabytes} MB: last iteration of the old to first of the new number"
    ways = (("paused and resumed", "anew.stands", 1.0), ("gloo formed anew", "gloo", None))
    for name, way, most in ways:
        peer = statistics.median(found[way])
        made.append(Figure(title, stands_s, peer, "s", name, most, True, spread=noise))
    steps = [statistics.median(found["live"][at :: len(SIZES)]) for at in range(len(SIZES))]
    sys.stderr.write(f"{megabytes} MB, {dict(zip(('2->3', '3->1', '1->2'), steps, strict=True))}\n")
    made += [Skipped(f"{megabytes} MB", each) for each in wrong]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", nargs="+", default=["4", "100"], help="Megabytes of the model.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[Row] = []
    for megabytes in options.mb:
        measured, wrong = asyncio.run(measure(megabytes, options.rounds))
        sys.stderr.write(f"{megabytes} MB: {measured}\n")
        found += rows_of(megabytes, measured, wrong)
    show(f"another number of workers, load {os.getloadavg()[0]:.1f}", found)
    if options.json is not None:
        write_json(options.json, this_command(), found)
    if any(isinstance(row, Skipped) or row.met is False for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
