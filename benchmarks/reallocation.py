"""Measure what it costs to take a job's GPUs away and to give them back, live.

A job of two Agents trains on a node with two (fake) GPUs, and another one waits for them. The job
is paused and resumed, again and again: told are the seconds from the order to pause until the other
one's program runs on its GPUs, and from the order to resume until every rank has made its first
iteration. The iterations must go on where they stopped: the parameters are the aggregators', there
is no checkpoint. In turns with it: the same job started cold, and torchrun's restart of two ranks
of which one was killed.

    python benchmarks/reallocation.py [--rounds 20] [--cold 5] [--torchrun 3] [--mb 4 100] [--ddp]

`--ddp` measures a plain DistributedDataParallel script instead, which `slackwater.torch.checkpoint`
saves: half of its megabytes are parameters, half are momentum. Its peer saves and loads as many
bytes with torch.save and torch.load.

Needs torch. Goals, medians and worst: 0.5 and 1 s to give the GPUs away, 1 and 1.5 s to the first
iteration at 4 MB; medians of 1 and 1.5 s at 100 MB; medians of 1.5 s each with --ddp at 200 MB.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from figures import Figure, Row, Skipped, show, this_command, write_json

from slackwater.common.base.clock import LiveClock
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.jobs import JobSpec

RANKS = 2
TRAINS_S = 0.5
"""Seconds that a job trains between two orders."""
GIVE_UP_S = 120.0
LOOK_S = 0.005
TORCHRUN_RESTARTS = 8
"""Its ranks fail again while they find one another, and it starts them once more."""
COLD = {"PYTHONHASHSEED": "0"}
"""Read by the interpreter before anything else: such a rank is not forked."""
GOALS = {
    ("4", False): (0.5, 1.0, 1.0, 1.5),
    ("100", False): (1.0, None, 1.5, None),
    ("200", True): (1.5, None, 1.5, None),
}
"""Megabytes, and whether it is a DDP script -> most seconds to give the GPUs away (median, worst),
and to the first iteration (median, worst)."""

MODEL = """
import os, time, torch
from torch.nn import functional
torch.set_num_threads(1)
torch.manual_seed(1)
width = int((float(os.environ["MODEL_MB"]) * 2**18 / 4) ** 0.5)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(4)])
inner = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
inputs = torch.randn(4, width)

def tell(name, number):
    path = os.path.join(os.environ["TELL"], name)
    with open(path + ".new", "w") as file:
        file.write(f"{time.time()} {number}")
    os.rename(path + ".new", path)
"""
AGENT = (
    MODEL
    + """
import slackwater.torch
optimizer = slackwater.torch.Optimizer(inner, model)
name = "{SLACKWATER_JOB}.{SLACKWATER_ATTEMPT}.{SLACKWATER_RANK}".format(**os.environ)
told = False
while True:
    optimizer.zero_grad()
    functional.mse_loss(model(inputs), inputs).backward()
    optimizer.step()
    optimizer.synchronize()
    if not told:
        tell(name, optimizer.iteration)
        told = True
"""
)
DDP = (
    MODEL
    + """
import torch.distributed as dist
import slackwater.torch
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(model)
state = slackwater.torch.checkpoint(model=model, optimizer=inner)
name = "{SLACKWATER_JOB}.{SLACKWATER_ATTEMPT}.{SLACKWATER_RANK}".format(**os.environ)
told = False
while True:
    inner.zero_grad()
    functional.mse_loss(model(inputs), inputs).backward()
    inner.step()
    state.step()
    if not told:
        tell(name, state.iteration)
        told = True
"""
)
PEER = (
    MODEL
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(model)
saved = os.path.join(os.environ["TELL"], "peer.pt")
if os.environ.get("SAVES") and os.path.exists(saved):
    found = torch.load(saved)
    model.load_state_dict(found["model"])
    inner.load_state_dict(found["optimizer"])
count = 0
while True:
    inner.zero_grad()
    functional.mse_loss(model(inputs), inputs).backward()
    inner.step()
    count += 1
    if count == 1:
        if os.environ.get("SAVES") and dist.get_rank() == 0 and not os.path.exists(saved):
            parts = {"model": model.state_dict(), "optimizer": inner.state_dict()}
            torch.save(parts, saved + ".new")
            os.rename(saved + ".new", saved)
        tell(f"torchrun.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{dist.get_rank()}", os.getpid())
"""
)


@dataclass
class Seconds:
    """The measurements of one way to start."""

    given: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)


async def soon(look: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + GIVE_UP_S
    while not look():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {GIVE_UP_S:.0f} s: {what}")
        await asyncio.sleep(LOOK_S)


async def told(folder: Path, name: str, since_s: float) -> tuple[float, int]:
    """Wait until every rank has told; return the last one's instant, and the least number."""
    paths = [folder / f"{name}.{rank}" for rank in range(RANKS)]
    await soon(lambda: all(path.exists() for path in paths), name)
    found = [path.read_text().split() for path in paths]
    return max(float(at) for at, _ in found) - since_s, min(int(number) for _, number in found)


async def paused(client: Client, job: str) -> None:
    await client.pause(job)
    async with asyncio.timeout(GIVE_UP_S):
        while (record := await client.job(job)).state != "paused":
            await client.clock.sleep_until(client.clock.now_s() + LOOK_S)
    assert not record.allocation


async def turn(client: Client, folder: Path, job: str, seconds: Seconds) -> None:
    """Resume the job, let it train, let the next one have its GPUs."""
    attempt = (await client.job(job)).attempt
    begun_s = client.clock.now_s()
    await client.resume(job)
    resumed_s, iteration = await told(folder, f"{job}.{attempt}", begun_s)
    await client.resume("next")
    await asyncio.sleep(TRAINS_S)
    next_attempt = (await client.job("next")).attempt
    begun_s = client.clock.now_s()
    await client.pause(job)
    given_s, _ = await told(folder, f"next.{next_attempt}", begun_s)
    seconds.resumed.append(resumed_s)
    seconds.given.append(given_s)
    seconds.iterations.append(iteration)
    for each in (job, "next"):
        await paused(client, each)


async def torchrun(folder: Path, megabytes: str, saves: bool) -> float | None:
    """Return the seconds from the kill of one rank until both train again; None: they do not."""
    names = [f"torchrun.{again}" for again in range(TORCHRUN_RESTARTS + 1)]
    for each in (folder / f"{name}.{rank}" for name in names for rank in range(RANKS)):
        each.unlink(missing_ok=True)
    environment = {**os.environ, "MODEL_MB": megabytes, "TELL": str(folder), "OMP_NUM_THREADS": "1"}
    if saves:
        environment["SAVES"] = "1"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
        f"--max-restarts={TORCHRUN_RESTARTS}", "--monitor-interval=0.1", str(folder / "peer.py"),
        env=environment,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await told(folder, "torchrun.0", 0.0)
        await asyncio.sleep(TRAINS_S)
        pid = int((folder / "torchrun.0.1").read_text().split()[1])
        begun_s = LiveClock().now_s()
        os.kill(pid, signal.SIGKILL)
        found: list[str] = []

        def again() -> bool:
            found[:] = [name for name in names[1:] if (folder / f"{name}.{RANKS - 1}").exists()]
            return bool(found)

        await soon(again, "torchrun restarts")
        return (await told(folder, found[-1], begun_s))[0]
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            agent = psutil.Process(process.pid)
            for child in (*agent.children(recursive=True), agent):
                child.kill()
        await process.wait()


def specs(folder: Path, megabytes: str, ddp: bool) -> tuple[JobSpec, ...]:
    common = {"MODEL_MB": megabytes, "TELL": str(folder)}
    waits = f"date +'%s.%N 0' > {folder}/n && mv {folder}/n {folder}/next.$SLACKWATER_ATTEMPT."
    program = ("python", str(folder / ("ddp.py" if ddp else "agent.py")))
    warm, cold = (str(folder / name) if ddp else "" for name in ("warm", "cold"))
    return (
        JobSpec(id="warm", workers=RANKS, gpus=RANKS, program=program, env=common,
                checkpoint=warm),
        JobSpec(id="cold", workers=RANKS, gpus=RANKS, program=program, env=common | COLD,
                checkpoint=cold),
        JobSpec(id="next", workers=RANKS, gpus=RANKS, program=(
            "/bin/sh", "-c", waits.replace("/n ", "/n$SLACKWATER_RANK ")
            + "$SLACKWATER_RANK; exec sleep 600",
        )),
    )  # fmt: skip


async def measure(
    megabytes: str, options: argparse.Namespace
) -> tuple[Seconds, Seconds, list[float]]:
    ways, peer = {"warm": Seconds(), "cold": Seconds()}, []
    # Momentum is half of a DDP script's state.
    model_mb = f"{float(megabytes) / 2:g}" if options.ddp else megabytes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "agent.py").write_text(AGENT)
        (folder / "ddp.py").write_text(DDP)
        (folder / "peer.py").write_text(PEER)
        made = ClusterOptions(
            controllers=1, aggregators=2, gpus_per_node=RANKS, log_dir=folder / "logs",
            worker={"warm": "on"},
        )  # fmt: skip
        async with EmbeddedCluster(made) as cluster, connect(cluster.url) as client:
            await warm_up(client, folder, model_mb, options.ddp)
            for number in range(options.rounds):
                await turn(client, folder, "warm", ways["warm"])
                if number < options.cold:
                    await turn(client, folder, "cold", ways["cold"])
                if number < options.torchrun:
                    seconds = await torchrun(folder, model_mb, options.ddp)
                    peer += [] if seconds is None else [seconds]
    return ways["warm"], ways["cold"], peer


async def warm_up(client: Client, folder: Path, megabytes: str, ddp: bool) -> None:
    """Run each job once, unmeasured: its model is registered and placed then."""
    logs = folder / "logs"
    await soon(lambda: "warm.ready" in (logs / "worker-w1.log").read_text(), "it is warm")
    for spec in specs(folder, megabytes, ddp):
        await client.submit(spec)
        await told(folder, f"{spec.id}.0", 0.0)
        await paused(client, spec.id)


def rows(megabytes: str, ddp: bool, warm: Seconds, cold: Seconds, peer: list[float]) -> list[Row]:
    given, given_worst, resumed, resumed_worst = GOALS.get((megabytes, ddp), (None,) * 4)
    made: list[Row] = []

    def row(name: str, ours: float, limit: float | None) -> None:
        if limit is not None:
            name = f"{megabytes} MB: {name}"
            made.append(Figure(name, ours, limit, "s", "limit", goal=1.0, lower_is_better=True))

    row("GPUs given to the next job, median", statistics.median(warm.given), given)
    row("GPUs given to the next job, worst", max(warm.given), given_worst)
    row("first iteration again, median", statistics.median(warm.resumed), resumed)
    row("first iteration again, worst", max(warm.resumed), resumed_worst)
    again = statistics.median(warm.resumed)
    for name, found, goal in (("cold", cold.resumed, None), ("torchrun", peer, 0.2)):
        title = f"{megabytes} MB: first iteration again, beside {name}"
        if not found:
            made.append(Skipped(title, "no round of it came to an end"))
            continue
        made.append(
            Figure(title, again, statistics.median(found), "s", name, goal=goal,
                   lower_is_better=True)
        )  # fmt: skip
    lost = [b for a, b in zip(warm.iterations, warm.iterations[1:], strict=False) if b <= a]
    if lost:
        made.append(Skipped(f"{megabytes} MB: iterations", f"they did not go on: {lost}"))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--cold", type=int, default=5, help="Rounds in which it is started cold, too."
    )
    parser.add_argument("--torchrun", type=int, default=3, help="Rounds with torchrun's restart.")
    parser.add_argument("--mb", nargs="+", default=["4", "100"], help="Megabytes of the model.")
    parser.add_argument("--ddp", action="store_true", help="A plain DDP script with checkpoints.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[Row] = []
    for megabytes in options.mb:
        measured = asyncio.run(measure(megabytes, options))
        for way, seconds in zip(("warm", "cold"), measured, strict=False):
            sys.stderr.write(f"{megabytes} MB, {way}: {seconds}\n")
        found += rows(megabytes, options.ddp, *measured)
    show(f"GPUs taken away and given back, load {os.getloadavg()[0]:.1f}", found)
    if options.json is not None:
        write_json(options.json, this_command(), found)
    if any(isinstance(row, Skipped) or row.met is False for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
