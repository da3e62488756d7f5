"""The second part of what `make run` shows: jobs take turns on GPUs, paused and resumed.

`long` gets all GPUs. `short` comes, and by least attained service (Tiresias; Gu et al. 2021, 3.3.2)
it goes first: `long` is paused. A person pauses `mine`, and lets it go on. Their parameters stay in
the aggregators, so that each goes on at the iteration after its last one, without a checkpoint.
"""

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from slackwater.common.domains.facts.timeline import JobTrack, Timeline
from slackwater.common.shell.client import Client
from slackwater.loadgen.replay import session
from slackwater.loadgen.replay.experiment import OnPhase, mismatches_of
from slackwater.loadgen.replay.workload import PlannedJob, Workload, emulated
from slackwater.schemas.job_events import JobEvent

NODES: Final = 2
GPUS_PER_NODE: Final = 4
POLICY: Final = "tiresias-las"
SETTINGS: Final = {"limits": "16"}
"""GPU seconds after which a job stands behind those that have had less."""
COMPUTE_S: Final = 0.1
MODEL: Final = "resnet50"
BYTES_SCALE: Final = 0.02
PAUSED_BY_HAND: Final = "mine"
PAUSE_AFTER_ITERATIONS: Final = 10
PAUSED_S: Final = 1.5
_STATES: Final = ("pending", "starting", "running", "stopping", "paused")


class _Planned(NamedTuple):
    id: str
    at_s: float
    gpus: int
    workers: int
    iterations: int


JOBS: Final = (
    _Planned("long", 0.0, 8, 2, 70),
    _Planned("short", 5.0, 4, 1, 30),
    _Planned(PAUSED_BY_HAND, 5.0, 2, 1, 30),
)


class GpuJob(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. `stops`: what ended each run but the last, in order; `resumed_at`: the
    iteration with which each later run began; `resume_s`: from each order to start again to the
    end of that iteration."""

    job: str
    state: str
    gpus: int
    waited_s: float
    ran_s: float
    stops: tuple[str, ...]
    stop_s: tuple[float, ...]
    """From each order to stop to the GPUs' release."""
    resumed_at: tuple[int, ...]
    resume_s: tuple[float, ...]
    equal: bool
    """Set where its parameters equal those of a single-process replay, bit for bit."""


class GpuTurns(NamedTuple):
    """Keep what was seen. `failures`: what went wrong; empty: nothing did."""

    timeline: Timeline
    jobs: tuple[GpuJob, ...]
    failures: tuple[str, ...]


def workload(seed: int) -> Workload:
    jobs = []
    for number, job in enumerate(JOBS, 1):
        spec = emulated(
            job.id, MODEL,
            workers=job.workers, servers=1, iterations=job.iterations, compute_s=COMPUTE_S,
            bytes_scale=BYTES_SCALE, seed=seed + 100 * number,
        )  # fmt: skip
        spec = msgspec.structs.replace(spec, gpus=job.gpus)
        jobs.append(PlannedJob(at_s=job.at_s, compute_s=COMPUTE_S, spec=spec))
    return Workload(
        name="GPUs by turns", jobs=tuple(jobs), bytes_scale=BYTES_SCALE, time_scale=1.0, seed=seed
    )


async def play(client: Client, work: Workload, on_phase: OnPhase) -> GpuTurns:
    """Play the jobs, pause one by hand and let it go on. Raises what a replay raises."""
    by_hand: list[asyncio.Task[None]] = []

    def on_tick(timeline: Timeline, now_s: float) -> None:
        on_phase(work.name, timeline, now_s)
        track = timeline.tracks.get(PAUSED_BY_HAND)
        if not by_hand and track is not None and track.reported >= PAUSE_AFTER_ITERATIONS:
            by_hand.append(asyncio.ensure_future(_pause_for_a_while(client, PAUSED_BY_HAND)))

    timeline = await session.replay(client, work, on_tick)
    await asyncio.gather(*by_hand)
    mismatches = mismatches_of([await client.job(id) for id in timeline.tracks])
    jobs = rows(timeline, mismatches)
    return GpuTurns(timeline, jobs, failures(jobs, mismatches))


async def _pause_for_a_while(client: Client, job: str) -> None:
    await client.pause(job)
    await client.clock.sleep_until(client.clock.now_s() + PAUSED_S)
    await client.resume(job)


def rows(timeline: Timeline, mismatches: Mapping[str, str]) -> tuple[GpuJob, ...]:
    """Tell of each job, in the order of arrival."""
    facts = [message for _, message in timeline.events if isinstance(message, JobEvent)]
    return tuple(
        _row(
            track,
            [fact for fact in facts if fact.job == id],
            track.state == "completed" and id not in mismatches,
        )
        for id, track in timeline.tracks.items()
    )


def _row(track: JobTrack, facts: list[JobEvent], equal: bool) -> GpuJob:
    steps = [(fact.at_s, fact.fact) for fact in facts if fact.fact in _STATES]
    at = {name: [at_s for at_s, fact in steps if fact == name] for name in _STATES}
    steps.append((track.ended_s or track.submitted_s, track.state))
    spent = dict.fromkeys(_STATES, 0.0)
    for (from_s, name), (to_s, _) in pairwise(steps):
        spent[name] += max(0.0, to_s - from_s)
    again = at["starting"][1:]
    found = [next((each for each in track.iterations if each.at_s > at_s), None) for at_s in again]
    firsts = [(at_s, each) for at_s, each in zip(again, found, strict=True) if each is not None]
    return GpuJob(
        job=track.spec.id,
        state=track.state,
        gpus=track.spec.gpus,
        waited_s=spent["pending"] + spent["paused"],
        ran_s=spent["running"],
        stops=tuple(fact.reason for fact in facts if fact.fact == "stopping"),
        stop_s=tuple(b - a for a, b in zip(at["stopping"], at["paused"], strict=False)),
        resumed_at=tuple(each.number for _, each in firsts),
        resume_s=tuple(each.at_s - at_s for at_s, each in firsts),
        equal=equal,
    )


def failures(jobs: tuple[GpuJob, ...], mismatches: Mapping[str, str]) -> tuple[str, ...]:
    """Say what went wrong; empty: nothing did."""
    found = [f"{each.job} {each.state}" for each in jobs if each.state != "completed"]
    found += mismatches.values()
    for each in jobs:
        if each.job in ("long", PAUSED_BY_HAND) and each.state == "completed" and not each.stop_s:
            found.append(f"{each.job} was never paused")
    return tuple(found)
