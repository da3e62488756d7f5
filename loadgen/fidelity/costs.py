"""Measure what it costs on this machine to start, stop and restart a job, live.

Jobs of several sizes run side by side; every other one is paused in the middle and resumed. The
costs are medians over jobs, in seconds without progress:

- **start**: what a job held its GPUs for, less what it worked, where nobody disturbed it. So the
  time in which its end was reported is part of it.
- **stop**: from the order to stop until the GPUs were another's to have.
- **restart**: what a job that was paused once held its GPUs for beyond its work and its start, so
  that half an iteration that it did again is part of it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import structlog

from slackwater.common.base.errors import Rejected, Unavailable
from slackwater.common.shell.client import Client
from slackwater.loadgen.fidelity.jobs import LiveJob, live_jobs
from slackwater.loadgen.fidelity.live import LOOK_S, LiveRun, OnLook, play
from slackwater.loadgen.simulator.gpu.workload import Oracle, Submission
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec

log = structlog.get_logger()
SIZES: Final = (1, 1, 1, 1, 2, 2, 4, 4, 8, 8)
"""GPUs of the jobs, each size an even number of times."""
DURATION_S: Final = 6.0
GAP_S: Final = 1.6
"""Seconds between two of them: mostly all fit, so that no policy disturbs them."""
PAUSED_AFTER_S: Final = 2.5
TURNS: Final = 2
WITHIN_S: Final = 240.0


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Costs in seconds; each with its number of jobs and its quartiles."""

    start_s: float
    stop_s: float
    restart_s: float
    starts: int = 0
    stops: int = 0
    start_quartiles_s: tuple[float, float] = (0.0, 0.0)
    stop_quartiles_s: tuple[float, float] = (0.0, 0.0)
    restart_quartiles_s: tuple[float, float] = (0.0, 0.0)


FREE: Final = Measured(start_s=0.0, stop_s=0.0, restart_s=0.0)


def calibration(folder: Path, gpus: int, save_s: float) -> list[LiveJob]:
    """Make the jobs that are measured with, on a cluster of so many GPUs."""
    sizes = [size for size in SIZES if size <= gpus] * TURNS
    jobs = [
        Submission(
            spec=JobSpec(id=f"c{number}", gpus=size), oracle=Oracle(duration_s=DURATION_S),
            number=number, submit_s=number * GAP_S,
        )
        for number, size in enumerate(sizes)
    ]  # fmt: skip
    return live_jobs(jobs, folder, prefix="c", save_s=save_s)


async def measure(client: Client, jobs: Sequence[LiveJob], on_look: OnLook) -> Measured:
    """Raises Unavailable where too little was seen."""
    pauser = asyncio.ensure_future(_pause(client, jobs[1::2]))
    try:
        run = await play(client, jobs, WITHIN_S, on_look, beside=(pauser,))
    finally:
        pauser.cancel()
        await asyncio.gather(pauser, return_exceptions=True)
    return measured(run, jobs)


def measured(run: LiveRun, jobs: Sequence[LiveJob]) -> Measured:
    """Pure."""
    starts, stops, twice = [], [], []
    for job in jobs:
        record = run.records[job.spec.id]
        beyond_s = record.run_s - job.submission.oracle.duration_s
        if record.state != "completed" or record.preemptions:  # By a policy, at any moment.
            continue
        if record.reallocations == 0:
            starts.append(beyond_s)
        elif record.reallocations == 1:
            at_s = {fact.fact: fact.at_s for fact in run.facts[job.spec.id]}
            twice.append(beyond_s)
            stops.append(at_s["paused"] - at_s["stopping"])
    if len(starts) < 3 or len(stops) < 3:
        raise Unavailable(
            f"the calibration saw {len(starts)} undisturbed jobs and {len(stops)} pauses; it needs "
            "3 of each: see the services' logs"
        )
    start_s = median(starts)
    restarts = [beyond_s - start_s for beyond_s in twice]
    return Measured(
        start_s=start_s, stop_s=median(stops), restart_s=max(0.0, median(restarts)),
        starts=len(starts), stops=len(stops), start_quartiles_s=_quartiles(starts),
        stop_quartiles_s=_quartiles(stops), restart_quartiles_s=_quartiles(restarts),
    )  # fmt: skip


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]


async def _pause(client: Client, jobs: Sequence[LiveJob]) -> None:
    """Pause each of these once it has run for a while, and resume it once it has left."""
    left = {job.spec.id for job in jobs}
    paused: set[str] = set()
    while left or paused:
        records: Mapping[str, JobRecord] = {each.spec.id: each for each in await client.jobs()}
        for id in sorted(left):
            record = records.get(id)
            if record is None or record.state != "running":
                continue
            if client.clock.now_s() - record.started_s >= PAUSED_AFTER_S:
                left.discard(id)
                try:
                    await client.pause(id)
                    paused.add(id)
                except Rejected as error:  # It ended a moment ago.
                    log.info("not-paused", job=id, reason=str(error))
        for id in sorted(paused):
            if records[id].state == "paused":
                await client.resume(id)
            if records[id].reallocations or records[id].state in TERMINAL_STATES:
                paused.discard(id)
        await client.clock.sleep_until(client.clock.now_s() + LOOK_S / 4)
