"""One simulated run of Harmony's workload, and what it used: what its reproduction's rows are of.

Both resources are counted in machine-seconds, over all machines until the last job has ended: a
job's subtasks that compute take Tcpu of each of its machines (eq. 4.2), the others Tnet.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from slackwater.common.domains.models.group import CPU_WEIGHT, NETWORK_WEIGHT, Subtasks
from slackwater.loadgen.simulator.gpu.jobmodels.subtasks import subtasks_of
from slackwater.loadgen.simulator.gpu.outcome import Result
from slackwater.loadgen.simulator.gpu.runner import Task, simulated
from slackwater.loadgen.simulator.options import Options
from slackwater.services.master.scheduling.policies.harmony_grouping import (
    Jobs,
    schedule,
    utilization,
)

MACHINES: Final = 100


@dataclass(frozen=True)
class Cell:
    jct_s: float
    makespan_s: float
    cpu: float
    """The part of all machines' time in which subtasks computed."""
    network: float
    jobs: float
    """Jobs, and sets of machines that they share, at a time; means over the makespan."""
    groups: float
    machines: float
    """Machines of a group, mean over the groups' time."""


def cell(
    policy: str,
    seed: int = 0,
    settings: tuple[str, ...] = (),
    *,
    restart_s: float = 0.0,
    trace: str = "generate:harmony",
) -> Cell:
    options = Options(
        trace=trace, policies=(policy,), nodes=MACHINES, gpus_per_node=1,
        overhead="full" if restart_s else "none", restart_s=restart_s, job_model="subtasks",
        mode="malleable" if policy == "harmony" else "rigid", settings=settings,
    )  # fmt: skip
    report, result = simulated(Task(0, options, policy, seed))
    return _used(result, report.summary.avg_jct_s, report.summary.makespan_s)


def _used(result: Result, jct_s: float, makespan_s: float) -> Cell:
    profiles = {o.job.number: subtasks_of(o.job) for o in result.outcomes}
    cpu_s = network_s = jobs_s = 0.0
    shared: dict[object, list[tuple[float, float]]] = defaultdict(list)
    sizes: dict[object, int] = {}
    for segment in result.segments:
        machines = sum(count for _, count in segment.allocation)
        profile, done = profiles[segment.number], segment.work_after - segment.work_before
        cpu_s += done * profile.cpu_s * profile.machines
        network_s += done * profile.network_s * machines
        jobs_s += segment.end_s - segment.start_s
        which = (segment.allocation, segment.group or segment.number)
        shared[which].append((segment.start_s, segment.end_s))
        sizes[which] = machines
    spans_s = {which: _length(spans) for which, spans in shared.items()}
    groups_s, all_s = sum(spans_s.values()), MACHINES * makespan_s
    return Cell(
        jct_s, makespan_s, cpu_s / all_s, network_s / all_s, jobs_s / makespan_s,
        groups_s / makespan_s, sum(sizes[w] * s for w, s in spans_s.items()) / groups_s,
    )  # fmt: skip


def _length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that are in one of the spans at least."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


# The best grouping --------------------------------------------------------------------------------


def greedy_part(jobs: Sequence[Subtasks], machines: int) -> float:
    """Return U of Harmony's grouping over that of the best one, found by trying all (section
    4.4.7)."""
    return schedule(jobs, machines).utilization / best_utilization(jobs, machines)


def best_utilization(jobs: Sequence[Subtasks], machines: int) -> float:
    """Return the largest U of any grouping of any of the jobs on any numbers of machines."""
    arrays, best = Jobs(jobs), 0.0
    for count in range(1, len(jobs) + 1):
        for some in combinations(range(len(jobs)), count):
            for groups in _partitions(some):
                if len(groups) <= machines:
                    best = max(best, _best_shares(arrays, groups, machines))
    return best


def _best_shares(jobs: Jobs, groups: list[list[int]], machines: int) -> float:
    """All groups at all sizes once, then the best division of the machines among them."""
    most = machines - len(groups) + 1
    gains = np.zeros((len(groups), most + 1))
    for row, group in zip(gains, groups, strict=True):
        for count in range(1, most + 1):
            weights = (CPU_WEIGHT, NETWORK_WEIGHT)
            row[count] = utilization(jobs, [group], [count], machines, weights)
    best = np.full(machines + 1, -np.inf)
    best[0] = 0.0
    for row in gains:
        then = np.full(machines + 1, -np.inf)
        for count in range(1, most + 1):
            then[count:] = np.maximum(then[count:], best[: machines + 1 - count] + row[count])
        best = then
    return float(best.max())


def _partitions(items: Sequence[int]) -> Iterable[list[list[int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for groups in _partitions(rest):
        yield [[first], *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], [first, *group], *groups[at + 1 :]]
