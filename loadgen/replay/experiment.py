"""The phases of a replay and what they prove.

`shared_experiment` is the paper's case study, and a cell's of its tables (cells.py): every model
standalone, the workload under sharing, the control with one aggregator, and beside all of it twins
on servers of their own (`static`), under equal CPU shares; without them "servers saved" proves
nothing. `lone_experiment` plays one job beside its twin. `play` replays a workload alone, on a
cluster that may be somebody else's.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from slackwater.common.base.errors import Unavailable
from slackwater.common.domains.facts.timeline import Timeline
from slackwater.common.domains.models.iterations import mean_s
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster, fit_cpu_share
from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.replay import calibrate, session
from slackwater.loadgen.replay.measures import (
    LOSS_LIMIT,
    WARM_UP_ITERATIONS,
    JobFigures,
    duty,
    iteration_during,
    job_figures,
    known,
    loss,
    mean_iteration_s,
    missing,
    stable,
    steady,
)
from slackwater.loadgen.replay.workload import (
    COMPUTE_S,
    PlannedJob,
    Workload,
    emulated,
    respecified,
)
from slackwater.schemas.jobs import JobRecord, JobSpec

CLUSTER_SCALING_S = 3600.0
"""One aggregator cluster stays open while it has room, the paper's hybrid scaling."""
BASELINE_SPACING_S = 1.0
CONTROL_ITERATIONS = 10
CONTROL_DUTY = 1.3
"""Servers that the control's jobs keep busy at least: fewer fit on its one aggregator unharmed."""
CONTROL_JOBS_MAX = 8
TRIES = 2
"""A phase that did not show what it is for is played once more."""
ENDLESS_ITERATIONS = 1_000_000

OnPhase = Callable[[str, Timeline, float], None]


@dataclass(frozen=True)
class Phases:
    """Phases that a shared experiment has to show."""

    only_stable: bool = False
    """Losses count while all jobs share, and not before or after."""
    events: bool = False
    """The case study's events: a phase without them is played once more."""


@dataclass
class Outcome:
    """Findings of the phases; `timeline` is the shared run's."""

    timeline: Timeline
    until_s: float
    figures: list[JobFigures]
    cpu_share: float
    within: tuple[float, float] | None = None
    """The only time that losses were counted in; None: all of it."""
    control_loss: float | None = None
    verified: int = 0
    mismatches: dict[str, str] = field(default_factory=dict)
    """Why a job's parameters are not those of its replay, by job."""


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
    """Each model alone; the workload under sharing; the control, one aggregator for all. Beside all
    of it, on a cluster of its own, a twin of each model has servers to itself (the `static`
    baseline): what is compared ran in the same seconds. Raises what the phases raise; the embedded
    clusters are gone either way."""
    ticking = partial(_ticking, on_phase)
    ours, apart = side_by_side(options, workload)
    async with (
        EmbeddedCluster(ours) as cluster,
        connect(cluster.url, "loadgen") as client,
        EmbeddedCluster(apart) as other,
        connect(other.url, "loadgen") as elsewhere,
    ):
        standalone = {}
        for model in workload.models:
            alone = standalone_workload(workload, model, window)
            timeline = await session.replay(client, alone, ticking(alone.name))
            standalone[model] = _only(timeline)
        async with session.endless(elsewhere, twins(workload)) as twin:
            outcome = await _shared(client, workload, twin, standalone, window, phases, ticking)
            for again in range(TRIES):
                if again == 0 or not (outcome.control_loss or 0.0) > LOSS_LIMIT:
                    outcome.control_loss = await _control(
                        client, outcome, workload, twin, ticking, again
                    )
        records = [await client.job(id) for id in outcome.timeline.tracks]
    check(outcome, records)
    return outcome


async def _shared(
    client: Client,
    workload: Workload,
    twin: Timeline,
    standalone: dict[str, float],
    window: int,
    phases: Phases,
    ticking: Callable[[str], session.OnTick],
) -> Outcome:
    """The workload under sharing; once more, under other ids, where an event did not come that the
    experiment is about."""
    for again in range(TRIES):
        name = "shared aggregation" if not again else "shared aggregation, again"
        played = workload if not again else workload.renamed(f"again{again}")
        shared = await session.replay(client, played, ticking(name))
        within = stable(shared) if phases.only_stable else None
        share = await cpu_share(client)
        outcome = Outcome(
            timeline=shared,
            until_s=client.clock.now_s(),
            figures=job_figures(
                shared,
                {id: standalone[track.spec.model] for id, track in shared.tracks.items()},
                beside_each(shared, twin, within),
                share,
                window,
                within,
            ),
            cpu_share=share,
            within=within,
        )
        if phases.events and missing(shared, outcome.figures):
            continue
        break
    return outcome


async def cpu_share(client: Client) -> float:
    """Cores of one aggregator."""
    infos = await client.aggregators()
    return max((i.heartbeat.cpu_share for i in infos if i.heartbeat), default=1.0)


def side_by_side(
    options: ClusterOptions, workload: Workload
) -> tuple[ClusterOptions, ClusterOptions]:
    """The cluster of the workload and the one of its twins, with equal shares of the machine."""
    servers = sum(spec.servers for spec in twins(workload))
    both = options.aggregators + servers
    share = fit_cpu_share(options.cpu_share, both, len(os.sched_getaffinity(0)))
    apart = replace(
        options,
        controllers=1,
        aggregators=servers,
        cpu_share=share,
        log_dir=options.log_dir / "beside" if options.log_dir else None,
    )
    return replace(options, cpu_share=share), apart


def twins(workload: Workload) -> list[JobSpec]:
    """A job of each model that has servers of its own and never ends by itself."""
    found = []
    for model in workload.models:
        first = next(job.spec for job in workload.jobs if job.spec.model == model)
        endless = respecified(first, ENDLESS_ITERATIONS)
        found.append(msgspec.structs.replace(endless, id=f"twin-{model}", aggregation="static"))
    return found


def beside_each(
    timeline: Timeline, twin: Timeline, within: tuple[float, float] | None
) -> dict[str, float]:
    """Return each job's twin's mean iteration, over the seconds of the job's own figures."""
    found = {}
    for id, track in timeline.tracks.items():
        own = twin.tracks[f"twin-{track.spec.model}"]
        seconds = iteration_during(own, steady(timeline, track, within))
        if seconds is not None:
            found[id] = seconds
    return found


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
    client: Client,
    outcome: Outcome,
    workload: Workload,
    twin: Timeline,
    ticking: Callable[[str], session.OnTick],
    again: int,
) -> float | None:
    """One aggregator for all jobs, nothing reverted: it must break the loss limit."""
    busy = sum(known([row.duty for row in outcome.figures]))
    jobs = crowded(workload, busy).shortened(CONTROL_ITERATIONS, BASELINE_SPACING_S)
    prefix = "control" if not again else f"control{again}"
    timeline = await session.replay(client, jobs.with_policy("packed", prefix), ticking(prefix))
    losses = []
    for track in timeline.tracks.values():
        own = [each for each in track.iterations if each.number > WARM_UP_ITERATIONS]
        beside_s = iteration_during(twin.tracks[f"twin-{track.spec.model}"], own)
        if own and (lost := loss(beside_s, mean_s([i.duration_s for i in own]))) is not None:
            losses.append(lost)
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
        static = {}
        if len(own) >= window:
            static[job.spec.id] = mean_s([i.duration_s for i in own])
        figures = job_figures(timeline, {}, static, cluster.cpu_share, window, within)
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
    found = mismatches_of(records)
    outcome.mismatches |= found
    outcome.verified += sum(record.state == "completed" for record in records) - len(found)


def mismatches_of(records: Sequence[JobRecord]) -> dict[str, str]:
    """Say why a finished job's parameters are not those of its replay, by job."""
    from slackwater.loadgen.replay.proof import mismatch  # numba: commands start without.

    differences = {
        record.spec.id: mismatch(record) for record in records if record.state == "completed"
    }
    return {id: text for id, text in differences.items() if text is not None}


async def play(
    client: Client, workload: Workload, cpu_share: float, window: int, on_phase: OnPhase
) -> Outcome:
    """The workload alone; each job's loss is against its own profile (standalone, on temporary
    aggregators)."""
    timeline = await session.replay(
        client, workload, lambda seen, now_s: on_phase(workload.name, seen, now_s)
    )
    standalone = {
        id: alone_s
        for id, track in timeline.tracks.items()
        if (alone_s := track.alone_s) is not None
    }
    outcome = Outcome(
        timeline=timeline,
        until_s=client.clock.now_s(),
        figures=job_figures(timeline, standalone, {}, cpu_share, window),
        cpu_share=cpu_share,
    )
    check(outcome, [await client.job(id) for id in timeline.tracks])
    return outcome


def _only(timeline: Timeline) -> float:
    """Return the mean iteration of the timeline's only job."""
    (track,) = timeline.tracks.values()
    seconds = mean_iteration_s(track)
    assert seconds is not None, f"{track.spec.id} reported no iteration"
    return seconds
