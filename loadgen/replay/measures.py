"""From timelines to figures: CPU reduction, losses of training speed, duty cycles. Pure.

Definitions. *Standalone*: the job alone, on as many aggregators as it asked servers for, under the
same CPU shares. *Static*: a twin on servers of its own, beside the jobs that share, in the very
seconds that the job's own figures are from; what else the machine does slows both. *Loss* is that
of samples per second: 1 - static / shared (standalone where no twin was played), both the mean
iteration, in which the slowest twentieth counts as much as the slowest of the others
(common/domains/models/iterations.py); shared is the mean over steady windows: those under a
placement that the controller kept. Left out are the job's own profiling and migrations, and, for
every job of the cluster, the time between an assignment and its revert; the *whole-life* loss has
them all in. Of jobs that are to be compared while all of them share, only the *stable* time counts:
all are placed for good, none has ended (figures 8 and 9 of the paper).
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.common.domains.facts.timeline import (
    PLACED,
    UNDONE,
    Iteration,
    JobTrack,
    Timeline,
    integral,
)
from slackwater.common.domains.models.iterations import mean_s

WARM_UP_ITERATIONS = 2
UNDERCHARGED_MAX = 0.2
"""With more of its folds undercharged, the machine was too slow for the charge."""
LOSS_LIMIT = 0.1


@dataclass(frozen=True)
class JobFigures:
    """One row of jobs.csv."""

    job: str
    model: str
    cluster: str
    state: str
    iterations: int
    standalone_s: float | None
    shared_s: float | None
    static_s: float | None
    steady_iterations: int
    loss: float | None
    loss_whole_life: float | None
    loss_against_standalone: float | None
    duty: float | None
    cpu_s: float
    migrations: int
    reverts: int
    reason: str


def mean_iteration_s(track: JobTrack) -> float | None:
    """Return the mean iteration of a run under one placement from its start, without the
    warm-up."""
    durations_s = [i.duration_s for i in track.iterations if i.number > WARM_UP_ITERATIONS]
    return mean_s(durations_s) if durations_s else None


def iteration_during(track: JobTrack, kept: Sequence[Iteration]) -> float | None:
    """The mean iteration of a job in the time that another one's iterations span; None: it has none
    there."""
    if not kept:
        return None
    from_s, to_s = kept[0].at_s - kept[0].duration_s, kept[-1].at_s
    durations_s = [
        each.duration_s
        for each in track.iterations
        if each.number > WARM_UP_ITERATIONS
        and each.at_s - each.duration_s >= from_s
        and each.at_s <= to_s
    ]
    return mean_s(durations_s) if durations_s else None


def undone_intervals(timeline: Timeline, cluster: str) -> list[tuple[float, float]]:
    """From an assignment that was later undone to the end of what undid it."""
    found = []
    for migration in timeline.migrations.values():
        if migration.cause not in UNDONE or timeline.tracks[migration.job].cluster != cluster:
            continue
        before = [
            other.started_s
            for other in timeline.migrations.values()
            if other.job == migration.job and other.started_s < migration.started_s
        ]
        start_s = max(before, default=migration.started_s)
        found.append((start_s, migration.ended_s or float("inf")))
    return found


def stable(timeline: Timeline) -> tuple[float, float]:
    """From the last placement of any job to the first end of one; empty (no later than it begins)
    where they never were all there."""
    end_s = min((track.ended_s or float("inf") for track in timeline.tracks.values()), default=0.0)
    begin_s = timeline.started_s
    for track in timeline.tracks.values():
        placed_s = [at_s for at_s, fact, _ in track.facts if fact in PLACED and at_s < end_s]
        begin_s = max(begin_s, max(placed_s, default=end_s))
    for migration in timeline.migrations.values():
        if migration.started_s < end_s:
            begin_s = max(begin_s, migration.ended_s or end_s)
    return begin_s, max(begin_s, end_s)


def steady(
    timeline: Timeline, track: JobTrack, within: tuple[float, float] | None = None
) -> list[Iteration]:
    """The iterations that ran wholly under placements that the controller kept, and `within`."""
    first_s, last_s = within or (0.0, float("inf"))
    own = sorted(
        (m.started_s, m.ended_s or float("inf"))
        for m in timeline.migrations.values()
        if m.job == track.spec.id
    )
    kept_from_s = min(
        [at_s for at_s, fact, _ in track.facts if fact in ("steady", "assigned")],
        default=track.placed_s or track.submitted_s,
    )
    closed = own + undone_intervals(timeline, track.cluster)

    def counts(iteration: Iteration) -> bool:
        begin_s = iteration.at_s - iteration.duration_s
        return (
            iteration.number > WARM_UP_ITERATIONS
            and begin_s >= max(kept_from_s, first_s)
            and iteration.at_s <= last_s
            and not any(begin_s < end_s and iteration.at_s > start_s for start_s, end_s in closed)
        )

    return [iteration for iteration in track.iterations if counts(iteration)]


def loss(standalone_s: float | None, shared_s: float | None) -> float | None:
    """Lost share of samples per second; negative where sharing is faster."""
    if standalone_s is None or shared_s is None:
        return None
    return 1.0 - standalone_s / shared_s


def duty(track: JobTrack, cpu_share: float) -> float | None:
    """Profiled sum(e_t) / D: the share of one server that the job keeps busy."""
    if track.profile is None or track.profile.iteration_s == 0:
        return None
    return sum(track.profile.task_cpu_s) / cpu_share / track.profile.iteration_s


def job_figures(
    timeline: Timeline,
    standalone: dict[str, float],
    static: dict[str, float],
    cpu_share: float,
    window_iterations: int,
    within: tuple[float, float] | None = None,
) -> list[JobFigures]:
    """One row per job; `standalone` and `static` by job id, both mean seconds."""
    rows = []
    for id, track in timeline.tracks.items():
        kept = steady(timeline, track, within)
        enough = len(kept) >= window_iterations
        shared_s = mean_s([i.duration_s for i in kept]) if enough else None
        life = [i.duration_s for i in track.iterations if i.number > WARM_UP_ITERATIONS]
        alone_s, beside_s = standalone.get(id), static.get(id)
        yardstick_s = beside_s or alone_s
        mine = [m for m in timeline.migrations.values() if m.job == id]
        rows.append(
            JobFigures(
                job=id,
                model=track.spec.model,
                cluster=track.cluster,
                state=track.state,
                iterations=track.reported,
                standalone_s=alone_s,
                shared_s=shared_s,
                static_s=beside_s,
                steady_iterations=len(kept),
                loss=loss(yardstick_s, shared_s),
                loss_whole_life=loss(yardstick_s, statistics.fmean(life) if life else None),
                loss_against_standalone=loss(alone_s, shared_s),
                duty=duty(track, cpu_share),
                cpu_s=track.cpu_s,
                migrations=len(mine),
                reverts=sum(m.cause in UNDONE and m.fact == "finished" for m in mine),
                reason=track.reason,
            )
        )
    return rows


def missing(timeline: Timeline, figures: Sequence[JobFigures]) -> list[str]:
    """The case study's events that did not come."""
    counts = {
        "assignment was undone": sum(row.reverts for row in figures),
        "aggregator was released": sum(e.fact == "released" for e in timeline.allocations),
        "bucket migrated": sum(
            m.fact == "finished" and m.copied > 0 for m in timeline.migrations.values()
        ),
    }
    return [f"no {what}" for what, count in counts.items() if count == 0]


def undercharged(timeline: Timeline) -> float:
    """Part of the folds that took more CPU time than they were charged."""
    beats = timeline.heartbeats.values()
    folds = sum(each.executions for each in beats)
    return sum(each.undercharged for each in beats) / folds if folds else 0.0


def cpu_reduction_ratio(timeline: Timeline, until_s: float, from_s: float = 0.0) -> float | None:
    """1 - integral of aggregators over integral of required servers, temporaries included."""

    def spent(steps: list[tuple[float, int]]) -> float:
        return integral(steps, until_s) - integral(steps, from_s)

    required = spent(timeline.required)
    return 1.0 - spent(timeline.aggregators) / required if required > 0 else None


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
