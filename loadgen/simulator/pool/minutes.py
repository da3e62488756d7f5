"""Allocated against required, minute by minute, and what follows from them (AutoPS section 5.2.3).

Required are the servers that the running distributed jobs asked for: what ps-lite would have
allocated. A minute in which no such job runs has no ratio. CPU time saved is 1 - (aggregator-time
allocated / server-time required) over the whole run, minutes without a job included.
"""

from collections.abc import Sequence
from math import ceil

import msgspec
import numpy as np
from numpy.typing import NDArray

from slackwater.loadgen.simulator.pool.profiles import PoolJob
from slackwater.loadgen.simulator.pool.run import PoolOutcome

MINUTE_S = 60.0
Floats = NDArray[np.float64]


class Minutes(msgspec.Struct):
    """At the end of every minute from the first job's start to the last one's end."""

    at_s: list[float]
    required: list[int]
    allocated: list[int]
    clusters: list[int]


class PoolSummary(msgspec.Struct, kw_only=True):
    """One object of summary.json."""

    policy: str
    jobs: int
    days: float
    required_mean: float
    allocated_mean: float
    saved: float
    """The share of CPU time that is saved."""
    below_one: float
    """Share of the minutes with a job in which less was allocated than required."""
    ratio_median: float
    ratio_p99: float
    ratio_worst: float
    clusters_most: int
    migrations: int
    migrations_by_cause: dict[str, int]
    buckets_moved: int
    reverts: int
    loss_worst: float
    """The worst loss of any job at any moment."""
    loss_mean_worst: float
    """The worst mean loss of any job over all the time that it ran."""
    beyond_jobs: int
    """Jobs that lost more than the limit for a time."""
    beyond_longest_s: float
    """The longest such time."""
    played_jobs: int
    played_mean: float
    played_worst: float
    played_over_limit: int
    steps: int
    wall_s: float


def _at(series: Sequence[tuple[float, int]], at_s: Floats) -> NDArray[np.int64]:
    times = np.array([t for t, _ in series])
    values = np.array([value for _, value in series], dtype=np.int64)
    found = np.searchsorted(times, at_s, side="right") - 1
    return np.where(found < 0, 0, values[np.maximum(found, 0)])


def required_series(jobs: Sequence[PoolJob]) -> list[tuple[float, int]]:
    changes = [(job.start_s, job.servers) for job in jobs]
    changes += [(job.end_s, -job.servers) for job in jobs]
    series, total = [(0.0, 0)], 0
    for at_s, change in sorted(changes):
        total += change
        if series[-1][0] == at_s:
            series.pop()
        series.append((at_s, total))
    return series


def area(series: Sequence[tuple[float, int]], from_s: float, to_s: float) -> float:
    """Return the area under a step function between two instants, in server-seconds."""
    total = 0.0
    ends = [*(at_s for at_s, _ in series[1:]), to_s]
    for (at_s, value), end_s in zip(series, ends, strict=True):
        total += value * max(0.0, min(end_s, to_s) - max(at_s, from_s))
    return total


def minutes(outcome: PoolOutcome, jobs: Sequence[PoolJob]) -> Minutes:
    first_s = min(job.start_s for job in jobs)
    last_s = max(job.end_s for job in jobs)
    count = max(1, ceil((last_s - first_s) / MINUTE_S))
    at_s: Floats = first_s + MINUTE_S * np.arange(1, count + 1, dtype=np.float64)
    return Minutes(
        at_s=at_s.tolist(),
        required=_at(required_series(jobs), at_s).tolist(),
        allocated=_at(outcome.allocated, at_s).tolist(),
        clusters=_at(outcome.clusters, at_s).tolist(),
    )


def ratios(found: Minutes) -> Floats:
    required, allocated = np.array(found.required), np.array(found.allocated)
    return np.sort(allocated[required > 0] / required[required > 0])


def summarize(
    outcome: PoolOutcome, jobs: Sequence[PoolJob], found: Minutes, loss_limit: float
) -> PoolSummary:
    first_s = min(job.start_s for job in jobs)
    last_s = max(job.end_s for job in jobs)
    span_s = max(last_s - first_s, 1e-9)
    required = area(required_series(jobs), first_s, last_s)
    allocated = area(outcome.allocated, first_s, last_s)
    ordered = ratios(found)
    if not len(ordered):
        ordered = np.array([1.0])
    played = [row.played for row in outcome.rows if row.played >= 0.0]
    return PoolSummary(
        policy=outcome.policy,
        jobs=len(jobs),
        days=span_s / 86400,
        required_mean=required / span_s,
        allocated_mean=allocated / span_s,
        saved=1.0 - allocated / required if required else 0.0,
        below_one=float((ordered < 1.0).mean()),
        ratio_median=float(ordered[len(ordered) // 2]),
        ratio_p99=float(ordered[int(0.99 * len(ordered))]),
        ratio_worst=float(ordered[-1]),
        clusters_most=max(count for _, count in outcome.clusters),
        migrations=sum(outcome.migrations.values()),
        migrations_by_cause=outcome.migrations,
        buckets_moved=outcome.buckets_moved,
        reverts=sum(row.reverts for row in outcome.rows),
        loss_worst=max(row.loss for row in outcome.rows),
        loss_mean_worst=max(row.loss_mean for row in outcome.rows),
        beyond_jobs=sum(row.beyond_longest_s > 0.0 for row in outcome.rows),
        beyond_longest_s=max(row.beyond_longest_s for row in outcome.rows),
        played_jobs=len(played),
        played_mean=float(np.mean(played)) if played else 0.0,
        played_worst=max(played, default=0.0),
        played_over_limit=sum(lost > loss_limit for lost in played),
        steps=outcome.steps,
        wall_s=outcome.wall_s,
    )
