"""The phases of a replay and what they prove.

`shared_experiment` is the built-in one: every job standalone, the `static` baseline (own
servers per job), the workload under sharing, and the control with one aggregator, all under equal
CPU shares; without them "servers saved" proves nothing. `play` replays a workload alone, on a
cluster that may be somebody else's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from slackwater.common.client import Client, connect
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.loadgen.replay import session
from slackwater.loadgen.replay.measures import (
    JobFigures,
    job_figures,
    loss,
    median_iteration_s,
)
from slackwater.loadgen.replay.proof import mismatch
from slackwater.loadgen.replay.timeline import Timeline
from slackwater.loadgen.replay.workload import PlannedJob, Workload, emulated
from slackwater.schemas.jobs import JobRecord

BASELINE_ITERATIONS = 24
BASELINE_SPACING_S = 1.0
CONTROL_ITERATIONS = 10

OnPhase = Callable[[str, Timeline, float], None]


@dataclass
class Outcome:
    """What the phases found; `timeline` is the shared run's."""

    timeline: Timeline
    until_s: float
    figures: list[JobFigures]
    cpu_share: float
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


async def shared_experiment(
    workload: Workload, options: ClusterOptions, window: int, on_phase: OnPhase
) -> Outcome:
    """Raises what the phases raise; the embedded clusters are gone either way."""

    def ticking(phase: str) -> session.OnTick:
        return lambda timeline, now_s: on_phase(phase, timeline, now_s)

    async with EmbeddedCluster(options) as cluster, connect(cluster.url, "loadgen") as client:
        standalone = {}
        for model in workload.models:
            alone = standalone_workload(workload, model, window)
            timeline = await session.replay(client, alone, ticking(alone.name))
            standalone[model] = _only(timeline)
        baseline = workload.shortened(BASELINE_ITERATIONS, BASELINE_SPACING_S)
        own = await session.replay(
            client, baseline.with_policy("static", "static"), ticking("static baseline")
        )
        static = {
            id.removeprefix("static-"): seconds
            for id, track in own.tracks.items()
            if (seconds := median_iteration_s(track)) is not None
        }
        shared = await session.replay(client, workload, ticking("shared aggregation"))
        outcome = Outcome(
            timeline=shared,
            until_s=client.clock.now_s(),
            figures=job_figures(shared, standalone, static, cluster.cpu_share, window),
            cpu_share=cluster.cpu_share,
        )
        outcome.control_loss = await _control(client, workload, standalone, ticking("control"))
        records = [await client.job(id) for id in shared.tracks]
    check(outcome, records)
    return outcome


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


def check(outcome: Outcome, records: list[JobRecord]) -> None:
    """Every finished job's parameters against a single-process replay of its seeded gradients."""
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
