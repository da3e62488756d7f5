"""GPUs held and used over time, from a run's segments."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.loadgen.simulator.gpu.outcome import Result, Segment

Span = tuple[float, float, int]
"""(from, until, GPUs)"""


def held_spans(segments: Sequence[Segment]) -> list[Span]:
    """When how many GPUs were held; GPUs that a group shared are counted once."""
    spans: list[Span] = []
    shared: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for s in segments:
        gpus = sum(count for _, count in s.allocation)
        if s.group:
            shared.setdefault((s.group, gpus), []).append((s.start_s, s.end_s))
        else:
            spans.append((s.start_s, s.end_s, gpus))
    for (_, gpus), intervals in shared.items():
        spans += [(start_s, end_s, gpus) for start_s, end_s in union(intervals)]
    return spans


def union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time, in disjoint intervals."""
    merged: list[tuple[float, float]] = []
    for start_s, end_s in sorted(intervals):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end_s, merged[-1][1]))
        else:
            merged.append((start_s, end_s))
    return merged


class Series(msgspec.Struct):
    """Averages in equal bins of time: bin i ends at `at_s[i]`."""

    at_s: list[float]
    allocated_gpus: list[float]
    efficiency: list[float]
    """Useful GPU-seconds over held ones; with co-location it may exceed 1."""
    active_jobs: list[float]


def series(result: Result, bins: int = limits.SERIES_BINS) -> Series:
    first_s = min((o.job.submit_s for o in result.outcomes), default=0.0)
    edges = np.linspace(first_s, max(result.end_s, first_s + 1), bins + 1)
    width = edges[1] - edges[0]
    held = _integral([(a, b, float(g)) for a, b, g in held_spans(result.segments)], edges)
    useful = _integral(
        [
            (s.start_s, s.end_s, s.useful_gpu_s / (s.end_s - s.start_s))
            for s in result.segments
            if s.end_s > s.start_s
        ],
        edges,
    )
    active = _integral([(o.job.submit_s, o.end_s, 1.0) for o in result.outcomes], edges)
    held_in, useful_in = np.diff(held), np.diff(useful)
    efficiency = np.divide(
        useful_in, held_in, out=np.zeros_like(useful_in), where=held_in > 1e-9 * width
    )
    return Series(
        [float(x) for x in edges[1:]],
        [float(x) for x in held_in / width],
        [float(x) for x in efficiency],
        [float(x) for x in np.diff(active) / width],
    )


def _integral(
    spans: Sequence[tuple[float, float, float]], at: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The integral up to each instant of a sum of constant spans."""
    if not spans:
        return np.zeros_like(at)
    table = np.array(spans)
    times = np.concatenate([table[:, 0], table[:, 1]])
    steps = np.concatenate([table[:, 2], -table[:, 2]])
    order = np.argsort(times, kind="stable")
    times, rates = times[order], np.cumsum(steps[order])
    areas = np.concatenate([[0.0], np.cumsum(np.diff(times) * rates[:-1])])
    return np.asarray(np.interp(at, times, areas), dtype=np.float64)
