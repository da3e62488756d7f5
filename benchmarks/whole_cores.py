"""Measure aggregators of a whole core, which `slackwater up` gives by default, on this machine.

Part one: jobs that share such an aggregator. A slot of a core stretches nothing, so what a job
loses there is found by measuring alone: its profile, its windows, and then a move. Emulated jobs of
one worker, each with the same duty, come one after another. One that "outgrows" its profile
computes nothing any more from the middle of its run on, and pushes as fast as it is served. Each
row says how fast a job was alone and together; the lines above it, what it lost in each window, and
when the controller moved a job, if it had anywhere to move it.

Part two: a small network of PyTorch, two workers: DDP over gloo, Slackwater on a whole core, and on
a tenth of one as an emulated pool has. Interleaved rounds, medians of steps.

    python benchmarks/whole_cores.py [--parts sharing ddp] [--rounds 3] [--json FILE]
"""

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from figures import Figure, Row, Skipped, show, this_command, write_json

from slackwater.common.domains.facts.timeline import UNDONE, JobTrack, Timeline
from slackwater.common.domains.models.iterations import mean_s
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.embedded.cluster import CPU_SHARE
from slackwater.common.shell.client import connect
from slackwater.loadgen.replay import calibrate, session
from slackwater.loadgen.replay.measures import LOSS_LIMIT, loss
from slackwater.loadgen.replay.workload import PlannedJob, Workload, emulated

PARTS: Final = ("sharing", "ddp")
COMPUTE_S: Final = 0.2
ITERATIONS: Final = 150
SPACING_S: Final = 5.0
DUTY: Final = 0.25
GOAL_DDP: Final = 1.0
"""Steps per second over those of DDP."""
WORKERS: Final = 2
STEPS: Final = 300
WARM_STEPS: Final = 50
GIVE_UP_S: Final = 180.0


@dataclass(frozen=True)
class Scenario:
    name: str
    aggregators: int
    jobs: int
    outgrows: bool = False


SCENARIOS: Final = (
    Scenario("three that fit one core", 1, 3),
    Scenario("one of two outgrows its profile, a second core is free", 2, 2, outgrows=True),
    Scenario("one of two outgrows its profile, no other core", 1, 2, outgrows=True),
)


# Part one: sharing ------------------------------------------------------------------------------


def workload(scenario: Scenario, scale: float) -> Workload:
    jobs = []
    for number in range(scenario.jobs):
        spec = emulated(
            f"j{number}", "vgg19", workers=1, servers=1, iterations=ITERATIONS,
            compute_s=COMPUTE_S, bytes_scale=scale, seed=number,
        )  # fmt: skip
        if scenario.outgrows and number == scenario.jobs - 1:
            hurry = ("--hurry-after", str(ITERATIONS // 2))
            spec = msgspec.structs.replace(spec, program=spec.program + hurry)
        jobs.append(PlannedJob(at_s=number * SPACING_S, spec=spec, compute_s=COMPUTE_S))
    return Workload(name=scenario.name, jobs=tuple(jobs), bytes_scale=scale, time_scale=1.0, seed=1)


async def play(scenario: Scenario, scale: float) -> Timeline:
    options = ClusterOptions(
        controllers=1,
        aggregators=scenario.aggregators,
        profiler={"window_iterations": 12, "profile_iterations": 5},
    )
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "bench") as client:
        return await session.replay(client, workload(scenario, scale), lambda *_: None)


def judged(scenario: Scenario, timeline: Timeline) -> list[Row]:
    """Print a row for each job that stays as it was: its speed together over its speed alone."""
    rows: list[Row] = []
    last_submitted_s = max(track.submitted_s for track in timeline.tracks.values())
    change_s = _changed_s(scenario, timeline) or last_submitted_s
    tell(scenario, timeline, change_s)
    first_end_s = min(track.ended_s or float("inf") for track in timeline.tracks.values())
    for id, track in timeline.tracks.items():
        if scenario.outgrows and id == f"j{scenario.jobs - 1}":
            continue  # It changed what it does: there is nothing to compare it with.
        name = f"{scenario.name}: {id}"
        late_s = _between(track, change_s + (first_end_s - change_s) / 2, first_end_s)
        if track.alone_s is None or not late_s:
            rows.append(Skipped(name, "not profiled, or over before it shared"))
            continue
        together_s = mean_s(late_s)
        rows.append(
            Figure(name, 1.0 / together_s, 1.0 / track.alone_s, "it/s", "alone", 1.0 - LOSS_LIMIT)
        )
    return rows


def tell(scenario: Scenario, timeline: Timeline, change_s: float) -> None:
    print(f"\n{scenario.name}; pool of {scenario.aggregators}", flush=True)
    for id, track in timeline.tracks.items():
        alone_s = track.alone_s
        windows = [each for each in track.windows if each.at_s > change_s]
        losses = [loss(alone_s, each.iteration_s) for each in windows]
        said = ", ".join(f"{each:.0%}" for each in losses if each is not None) or "none"
        profile = f"{alone_s * 1e3:.0f} ms" if alone_s is not None else "not profiled"
        print(f"  {id}: alone {profile}; loss by window after the change: {said}")
        for at_s, fact, detail in track.facts:
            where = detail.get("aggregators", "")
            print(f"      {at_s - timeline.started_s:6.1f} s  {fact} {where}")
    moved = [m for m in timeline.migrations.values() if m.started_s > change_s]
    for each in moved:
        undone = " (undone for a loss)" if each.cause in UNDONE else ""
        print(f"  {each.job} moved {each.started_s - change_s:.1f} s after the change{undone}")
    if not moved:
        print("  nothing was moved")


def _changed_s(scenario: Scenario, timeline: Timeline) -> float | None:
    """The time when the job that outgrows its profile began to."""
    if not scenario.outgrows:
        return None
    track = timeline.tracks[f"j{scenario.jobs - 1}"]
    hurried = [each for each in track.iterations if each.number > ITERATIONS // 2]
    return hurried[0].at_s if hurried else None


def _between(track: JobTrack, from_s: float, to_s: float) -> list[float]:
    return [i.duration_s for i in track.iterations if from_s < i.at_s <= to_s]


# Part two: PyTorch, against DDP -----------------------------------------------------------------


def train(rank: int, port: int, share: float) -> None:
    """Train as one rank, and print its median step in seconds. `port`: gloo's; 0: Slackwater, as
    the environment says."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(1)
    torch.set_num_threads(1)
    model: Any = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if port:
        import torch.distributed as dist

        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORKERS)
        model = nn.parallel.DistributedDataParallel(model)
    else:
        import slackwater.torch

        optimizer = slackwater.torch.Optimizer(optimizer, model, fractional_share=share < 1.0)
    images, labels = torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,))
    seconds = []
    for _ in range(STEPS):
        begun_s = time.perf_counter()
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun_s)
    if not port:
        optimizer.close()
    print(statistics.median(seconds[WARM_STEPS:]), flush=True)


def steps_per_s(port: int, share: float, url: str = "", job: str = "") -> float:
    """Return the slower rank's speed."""
    command = [sys.executable, __file__, "--share", str(share), "--port", str(port), "--rank"]
    own = {"SLACKWATER_URL": url, "SLACKWATER_JOB": job, "SLACKWATER_WORKERS": str(WORKERS)}
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            env={**os.environ, **own, "SLACKWATER_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORKERS)
    ]
    try:
        said = [each.communicate(timeout=GIVE_UP_S)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    if any(each.returncode for each in ranks):
        raise SystemExit(f"a rank ended with {[each.returncode for each in ranks]}")
    return 1.0 / max(map(float, said))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def against_ddp(rounds: int) -> list[Row]:
    """Let three contenders take turns; the clusters idle meanwhile."""
    whole = ClusterOptions(controllers=1, aggregators=1)
    tenth = ClusterOptions(controllers=1, aggregators=1, cpu_share=CPU_SHARE)
    found: dict[str, list[float]] = {"ddp": [], "whole": [], "tenth": []}
    async with EmbeddedCluster(whole) as large, EmbeddedCluster(tenth) as small:
        for turn in range(rounds):
            took = {
                "ddp": await asyncio.to_thread(steps_per_s, free_port(), 1.0),
                "whole": await asyncio.to_thread(steps_per_s, 0, 1.0, large.url, f"w{turn}"),
                "tenth": await asyncio.to_thread(steps_per_s, 0, CPU_SHARE, small.url, f"t{turn}"),
            }
            for name, speed in took.items():
                found[name].append(speed)
            print(", ".join(f"{name} {speed:.0f} steps/s" for name, speed in took.items()))
    return [
        Figure(
            f"PyTorch, 2 workers, {what}",
            statistics.median(found[name]),
            statistics.median(found["ddp"]),
            "steps/s",
            "DDP (gloo)",
            goal,
            ratios=tuple(a / b for a, b in zip(found[name], found["ddp"], strict=True)),
        )
        for name, what, goal in (
            ("whole", "aggregators of a core (`up`)", GOAL_DDP),
            ("tenth", f"of {CPU_SHARE:g} cores", None),
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=["sharing", "ddp"], default=["sharing", "ddp"]
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the race with DDP")
    parser.add_argument("--duty", type=float, default=DUTY, help="of a core, each job")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options.rank, options.port, options.share)
        return
    rows: list[Row] = []
    if "sharing" in options.parts:
        scale = calibrate.bytes_scale(1.0, COMPUTE_S, options.duty)
        print(f"tensors at {scale:.3f} of their bytes")
        for scenario in SCENARIOS:
            rows += judged(scenario, asyncio.run(play(scenario, scale)))
    if "ddp" in options.parts:
        rows += asyncio.run(against_ddp(options.rounds))
    show("Aggregators of a whole core", rows)
    if options.json:
        write_json(options.json, this_command(), rows)


if __name__ == "__main__":
    main()
