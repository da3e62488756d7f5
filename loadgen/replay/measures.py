"""From timelines to figures: CPU reduction, losses of training speed, duty cycles. Pure.

Definitions. *Standalone*: the job alone, on as many aggregators as it asked servers for, under the
same CPU shares; its speed is the median iteration. *Loss* is 1 - standalone / shared, where shared
is the median iteration in steady windows: those under a placement that the controller kept. Left
out are the job's own profiling and migrations, and, for every job of the cluster, the time between
an assignment and its revert; the *whole-life* loss has them all in. Of jobs that are to be
compared while all of them share, only the *stable* time counts: all are placed for good, none has
ended (figures 8 and 9 of the paper).
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.loadgen.replay.timeline import Iteration, JobTrack, Timeline, integral

WARM_UP_ITERATIONS = 2
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
    loss_against_static: float | None
    duty: float | None
    cpu_s: float
    migrations: int
    reverts: int
    reason: str


def median_iteration_s(track: JobTrack) -> float | None:
    """Of a run under one placement from its start, without the warm-up."""
    durations = [i.duration_s for i in track.iterations if i.number > WARM_UP_ITERATIONS]
    return median(durations)


def undone_intervals(timeline: Timeline, cluster: str) -> list[tuple[float, float]]:
    """From an assignment that was later reverted to the end of its revert."""
    found = []
    for migration in timeline.migrations.values():
        if migration.cause != "reverted" or timeline.tracks[migration.job].cluster != cluster:
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
        placed_s = [
            at_s
            for at_s, fact, _ in track.facts
            if fact in ("located", "assigned", "steady") and at_s < end_s
        ]
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
    """Lost share of training speed; negative where sharing is faster."""
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
    """One row per job; `standalone` by model, `static` by job id, both median seconds."""
    rows = []
    for id, track in timeline.tracks.items():
        kept = steady(timeline, track, within)
        enough = len(kept) >= window_iterations
        shared_s = statistics.median(i.duration_s for i in kept) if enough else None
        life = [i.duration_s for i in track.iterations if i.number > WARM_UP_ITERATIONS]
        alone_s = standalone.get(track.spec.model)
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
                static_s=static.get(id),
                steady_iterations=len(kept),
                loss=loss(alone_s, shared_s),
                loss_whole_life=loss(alone_s, statistics.fmean(life) if life else None),
                loss_against_static=loss(static.get(id), shared_s),
                duty=duty(track, cpu_share),
                cpu_s=track.cpu_s,
                migrations=len(mine),
                reverts=sum(m.cause == "reverted" and m.fact == "finished" for m in mine),
                reason=track.reason,
            )
        )
    return rows


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
