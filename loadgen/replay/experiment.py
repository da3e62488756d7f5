"""The phases of a replay and what they prove.

`shared_experiment` is the built-in one, and a cell's of the paper's tables (cells.py): every job
standalone, the `static` baseline (own servers per job), the workload under sharing, and the control
with one aggregator, all under equal CPU shares; without them "servers saved" proves nothing.
`lone_experiment` plays one job beside its twin under `static`. `play` replays a workload alone, on
a cluster that may be somebody else's.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from slackwater.common.client import Client, connect
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.errors import Unavailable
from slackwater.loadgen.replay import calibrate, session
from slackwater.loadgen.replay.measures import (
    JobFigures,
    duty,
    job_figures,
    known,
    loss,
    median_iteration_s,
    stable,
    steady,
)
from slackwater.loadgen.replay.timeline import Timeline
from slackwater.loadgen.replay.workload import COMPUTE_S, PlannedJob, Workload, emulated
from slackwater.schemas.jobs import JobRecord

BASELINE_SPACING_S = 1.0
CONTROL_ITERATIONS = 10
CONTROL_DUTY = 1.3
"""Servers that the control's jobs keep busy at least: fewer fit on its one aggregator unharmed."""
CONTROL_JOBS_MAX = 8

OnPhase = Callable[[str, Timeline, float], None]


@dataclass(frozen=True)
class Phases:
    """How long the phases are, in iterations of the slowest model."""

    baseline_iterations: int = 24
    only_stable: bool = False
    """Losses count while all jobs share, and not before or after."""


@dataclass
class Outcome:
    """What the phases found; `timeline` is the shared run's."""

    timeline: Timeline
    until_s: float
    figures: list[JobFigures]
    cpu_share: float
    within: tuple[float, float] | None = None
    """The only time that losses were counted in; None: all of it."""
    control_loss: float | None = None
    verified: int = 0
    mismatches: list[str] = field(default_factory=list)


def standalone_workload(workload: Workload, model: str, window: int) -> Workload:
    """One job of the model, with its own servers, long enough for a window."""
    first = next(job for job in workload.jobs if job.spec.model == model)
    spec = first.spec
    alone = PlannedJob(
        at_s=0.0,
        compute_s=first.compute_s,
        spec=emulated(
            f"alone-{model}",
            model,
            workers=spec.workers,
            servers=spec.servers,
            iterations=window + 4,
            compute_s=first.compute_s,
            bytes_scale=workload.bytes_scale,
            seed=workload.seed,
            update=spec.update,
            aggregation="static",
        ),
    )
    return Workload(
        name=f"standalone {model}",
        jobs=(alone,),
        bytes_scale=workload.bytes_scale,
        time_scale=workload.time_scale,
        seed=workload.seed,
    )


async def profiled_scale(
    options: ClusterOptions, guess: float, time_scale: float, on_phase: OnPhase
) -> float:
    """The bytes scale at which the built-in probe is as busy as it shall be. Raises what a replay
    raises."""
    compute_s = COMPUTE_S[calibrate.PROBE] * time_scale
    iterations = max(calibrate.PROBE_ITERATIONS, round(calibrate.PROBE_S / compute_s))
    probe = emulated(
        "probe", calibrate.PROBE, workers=2, servers=2, iterations=iterations,
        compute_s=compute_s, bytes_scale=guess, seed=0,
    )  # fmt: skip
    planned = PlannedJob(at_s=0.0, compute_s=compute_s, spec=probe)
    return await probed_scale(options, planned, guess, calibrate.PROBE_DUTY, on_phase)


async def probed_scale(
    options: ClusterOptions, probe: PlannedJob, guess: float, target: float, on_phase: OnPhase
) -> float:
    """The bytes scale at which a cluster's profiler finds that the probe, made with a guess of it,
    keeps `target` of a server busy. Raises what a replay raises."""
    work = Workload(name="calibration", jobs=(probe,), bytes_scale=guess, time_scale=1.0, seed=0)
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "loadgen") as client:
        timeline = await session.replay(client, work, _ticking(on_phase, work.name))
        busy = duty(timeline.tracks[probe.spec.id], cluster.cpu_share)
    if not busy:
        raise Unavailable("the calibration's job was not profiled; give --bytes-scale (0.15)")
    return min(calibrate.BYTES_SCALE_MAX, round(guess * target / busy, 3))


def _ticking(on_phase: OnPhase, phase: str) -> session.OnTick:
    return lambda timeline, now_s: on_phase(phase, timeline, now_s)


async def shared_experiment(
    workload: Workload,
    options: ClusterOptions,
    window: int,
    on_phase: OnPhase,
    phases: Phases = Phases(),
) -> Outcome:
    """Raises what the phases raise; the embedded clusters are gone either way."""
    ticking = partial(_ticking, on_phase)
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "loadgen") as client:
        standalone = {}
        for model in workload.models:
            alone = standalone_workload(workload, model, window)
            timeline = await session.replay(client, alone, ticking(alone.name))
            standalone[model] = _only(timeline)
        baseline = workload.shortened(phases.baseline_iterations, BASELINE_SPACING_S)
        own = await session.replay(
            client, baseline.with_policy("static", "static"), ticking("static baseline")
        )
        static = {
            id.removeprefix("static-"): seconds
            for id, track in own.tracks.items()
            if (seconds := median_iteration_s(track)) is not None
        }
        shared = await session.replay(client, workload, ticking("shared aggregation"))
        within = stable(shared) if phases.only_stable else None
        share = cluster.cpu_share
        outcome = Outcome(
            timeline=shared,
            until_s=client.clock.now_s(),
            figures=job_figures(shared, standalone, static, share, window, within),
            cpu_share=share,
            within=within,
        )
        busy = sum(known([row.duty for row in outcome.figures]))
        crowd = crowded(workload, busy)
        outcome.control_loss = await _control(client, crowd, standalone, ticking("control"))
        records = [await client.job(id) for id in shared.tracks]
    check(outcome, records)
    return outcome


def crowded(workload: Workload, busy: float) -> Workload:
    """The same jobs, again and again, until they ask for more than one aggregator has; they keep
    `busy` servers busy."""
    jobs = list(workload.jobs)
    while busy > 0.0 and busy * len(jobs) / len(workload.jobs) < CONTROL_DUTY:
        if len(jobs) >= CONTROL_JOBS_MAX:
            break
        again = workload.jobs[len(jobs) % len(workload.jobs)]
        spec = msgspec.structs.replace(again.spec, id=f"{again.spec.id}-{len(jobs)}")
        jobs.append(msgspec.structs.replace(again, spec=spec))
    return msgspec.structs.replace(workload, jobs=tuple(jobs))


async def _control(
    client: Client, workload: Workload, standalone: dict[str, float], on_tick: session.OnTick
) -> float | None:
    """One aggregator for all jobs, nothing reverted: it must break the loss limit."""
    jobs = workload.shortened(CONTROL_ITERATIONS, BASELINE_SPACING_S)
    timeline = await session.replay(client, jobs.with_policy("packed", "control"), on_tick)
    losses = [
        lost
        for track in timeline.tracks.values()
        if (lost := loss(standalone.get(track.spec.model), median_iteration_s(track))) is not None
    ]
    return max(losses, default=None)


async def lone_experiment(
    workload: Workload, options: ClusterOptions, window: int, on_phase: OnPhase
) -> Outcome:
    """The workload's job on aggregators, and at the same time its twin on servers of its own: two
    runs after one another would differ by what else the machine did. `loss` is against the twin.
    Raises what a replay raises."""
    (job,) = workload.jobs
    twin = workload.with_policy("static", "static").jobs[0]
    both = msgspec.structs.replace(workload, jobs=(job, twin))
    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "loadgen") as client:
        timeline = await session.replay(client, both, _ticking(on_phase, workload.name))
        within = stable(timeline)
        own = steady(timeline, timeline.tracks[twin.spec.id], within)
        static_s = statistics.median(i.duration_s for i in own) if len(own) >= window else None
        standalone = {} if static_s is None else {job.spec.model: static_s}
        figures = job_figures(timeline, standalone, {}, cluster.cpu_share, window, within)
        outcome = Outcome(
            timeline=timeline,
            until_s=client.clock.now_s(),
            figures=[row for row in figures if row.job == job.spec.id],
            cpu_share=cluster.cpu_share,
            within=within,
        )
        records = [await client.job(job.spec.id)]
    check(outcome, records)
    return outcome


def check(outcome: Outcome, records: list[JobRecord]) -> None:
    """Every finished job's parameters against a single-process replay of its seeded gradients."""
    from slackwater.loadgen.replay.proof import mismatch  # numba: commands start without.

    for record in records:
        if record.state != "completed":
            continue
        difference = mismatch(record)
        if difference is None:
            outcome.verified += 1
        else:
            outcome.mismatches.append(difference)


async def play(
    client: Client, workload: Workload, cpu_share: float, window: int, on_phase: OnPhase
) -> Outcome:
    """The workload alone; each job's loss is against its own profile (standalone, on temporary
    aggregators)."""
    timeline = await session.replay(
        client, workload, lambda seen, now_s: on_phase(workload.name, seen, now_s)
    )
    standalone: dict[str, float] = {}
    for track in timeline.tracks.values():
        if track.profile is not None:
            known = standalone.get(track.spec.model, track.profile.iteration_s)
            standalone[track.spec.model] = min(known, track.profile.iteration_s)
    outcome = Outcome(
        timeline=timeline,
        until_s=client.clock.now_s(),
        figures=job_figures(timeline, standalone, {}, cpu_share, window),
        cpu_share=cpu_share,
    )
    check(outcome, [await client.job(id) for id in timeline.tracks])
    return outcome


def _only(timeline: Timeline) -> float:
    """The median iteration of the timeline's only job."""
    (track,) = timeline.tracks.values()
    seconds = median_iteration_s(track)
    assert seconds is not None, f"{track.spec.id} reported no iteration"
    return seconds
