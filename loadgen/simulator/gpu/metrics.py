"""A run in figures.

p95 and p99 are sorted[int(q n)]; the median is sorted[n // 2] of the same kind (`quantile`).

**Finish-time fairness** (Themis' rho, as Sia and Pollux measure it): a job's completion time over
the time it would have taken with an equal share of the cluster to itself. Its equal share is
GPUs / N, N being the number of active jobs averaged over the job's own life; with fewer GPUs than
it asks for it is taken to scale linearly:  rho = JCT / (alone * max(1, gpus N / GPUs)).
Above 1: worse off than with a fair share.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from slackwater.loadgen.simulator.gpu.outcome import Outcome, Result
from slackwater.loadgen.simulator.gpu.series import held_spans

FAIRNESS_DEFINITION = (
    "rho = JCT / (time alone x max(1, GPUs asked x N / GPUs of the cluster)), N = active jobs "
    "averaged over the job's life"
)

SMALL_GPUS, SHORT_S = 8, 14400
"""Tiresias table 3.4 for the original trace: small is at most 8 GPUs, short below 4 hours."""


COUNTS = ("avg_finish_time_fairness", "restarts", "failures", "decisions", "events")


class Summary(msgspec.Struct, kw_only=True):
    """The figures of a run: `published()` is one object of summary.json, and COUNTS go to
    counts.json."""

    policy: str
    jobs: int
    completed: int
    avg_jct_s: float
    median_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    makespan_s: float
    avg_queueing_s: float
    median_queueing_s: float
    p95_queueing_s: float
    gpu_utilization: float
    preemptions: int
    max_finish_time_fairness: float
    wasted_gpu_s: float
    wall_s: float
    avg_finish_time_fairness: float = 0.0
    restarts: int = 0
    failures: int = 0
    decisions: int = 0
    events: int = 0

    def published(self) -> dict[str, Any]:
        return {k: v for k, v in msgspec.structs.asdict(self).items() if k not in COUNTS}

    def counts(self) -> dict[str, Any]:
        return {k: v for k, v in msgspec.structs.asdict(self).items() if k in ("policy", *COUNTS)}


class JobFigures(msgspec.Struct):
    """One row of jobs.csv."""

    job: str
    model: str
    tenant: str
    gpus: int
    submit_s: float
    start_s: float
    end_s: float
    jct_s: float
    run_s: float
    queueing_s: float
    gpu_s: float
    preemptions: int
    restarts: int
    failures: int
    wasted_gpu_s: float
    finish_time_fairness: float


def quantile(values: Sequence[float], q: float) -> float:
    """sorted[int(q n)]; `values` must be sorted."""
    return values[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def job_figures(result: Result, gpus: int) -> list[JobFigures]:
    contention = _Contention(result.outcomes)
    return [_figures(outcome, contention, gpus) for outcome in result.outcomes]


def _figures(outcome: Outcome, contention: "_Contention", gpus: int) -> JobFigures:
    job, submit_s = outcome.job.spec, outcome.job.submit_s
    jct_s = outcome.end_s - submit_s
    share = max(1.0, job.gpus * contention.average(submit_s, outcome.end_s) / gpus)
    return JobFigures(
        job.id, job.model, job.tenant, job.gpus, submit_s, outcome.start_s, outcome.end_s,
        jct_s, outcome.run_s, jct_s - outcome.run_s, outcome.gpu_s, outcome.preemptions,
        outcome.restarts, outcome.failures, outcome.wasted_gpu_s,
        jct_s / (max(outcome.alone_s, 1e-9) * share),
    )  # fmt: skip


class _Contention:
    """The number of active jobs over time, integrated once."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        steps = sorted([(o.job.submit_s, 1) for o in outcomes] + [(o.end_s, -1) for o in outcomes])
        self._times = [at_s for at_s, _ in steps]
        self._counts = list(accumulate(change for _, change in steps))
        spans = zip(self._times, self._times[1:], self._counts, strict=False)
        self._areas = [0.0, *accumulate((b - a) * count for a, b, count in spans)]

    def _area(self, at_s: float) -> float:
        i = bisect_right(self._times, at_s) - 1
        return self._areas[i] + (at_s - self._times[i]) * self._counts[i]

    def average(self, start_s: float, end_s: float) -> float:
        if end_s <= start_s:
            return 1.0
        return (self._area(end_s) - self._area(start_s)) / (end_s - start_s)


def summarize(policy: str, result: Result, figures: Sequence[JobFigures], wall_s: float) -> Summary:
    jcts = sorted(f.jct_s for f in figures)
    queueing = sorted(f.queueing_s for f in figures)
    count = max(1, len(figures))
    first_s = min((f.submit_s for f in figures), default=0.0)
    held = _held_gpu_s(result)
    return Summary(
        policy=policy,
        jobs=len(figures),
        completed=sum(f.end_s < float("inf") for f in figures),
        avg_jct_s=sum(jcts) / count,
        median_jct_s=quantile(jcts, 0.5),
        p95_jct_s=quantile(jcts, 0.95),
        p99_jct_s=quantile(jcts, 0.99),
        makespan_s=result.end_s - first_s if figures else 0.0,
        avg_queueing_s=sum(queueing) / count,
        median_queueing_s=quantile(queueing, 0.5),
        p95_queueing_s=quantile(queueing, 0.95),
        gpu_utilization=held / result.capacity_gpu_s if result.capacity_gpu_s else 0.0,
        preemptions=sum(f.preemptions for f in figures),
        max_finish_time_fairness=max((f.finish_time_fairness for f in figures), default=0.0),
        wasted_gpu_s=sum(f.wasted_gpu_s for f in figures),
        wall_s=wall_s,
        avg_finish_time_fairness=sum(f.finish_time_fairness for f in figures) / count,
        restarts=sum(f.restarts for f in figures),
        failures=sum(f.failures for f in figures),
        decisions=result.decisions,
        events=result.events,
    )


def _held_gpu_s(result: Result) -> float:
    """GPU-seconds that were held, shared GPUs counted once."""
    if any(segment.group for segment in result.segments):
        return sum((end - start) * gpus for start, end, gpus in held_spans(result.segments))
    return sum(outcome.gpu_s for outcome in result.outcomes)


def size_bins(
    figures: Sequence[JobFigures], durations_s: Sequence[float]
) -> list[dict[str, object]]:
    """JCT by small or large and short or long (Tiresias table 3.4)."""
    rows: list[dict[str, object]] = []
    for name, small, short in (
        ("SS", True, True), ("SL", True, False), ("LS", False, True), ("LL", False, False),
    ):  # fmt: skip
        jcts = sorted(
            f.jct_s
            for f, duration_s in zip(figures, durations_s, strict=True)
            if (f.gpus <= SMALL_GPUS) == small and (duration_s < SHORT_S) == short
        )
        rows.append(
            {
                "bin": name, "small": small, "short": short, "jobs": len(jcts),
                "avg_jct_s": sum(jcts) / max(1, len(jcts)),
                "median_jct_s": quantile(jcts, 0.5), "p95_jct_s": quantile(jcts, 0.95),
            }
        )  # fmt: skip
    return rows
