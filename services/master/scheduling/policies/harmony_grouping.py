"""Choose the jobs that share machines, and how many: Harmony's algorithms 1 and 2 (Lee, section
4.3.2).

As printed they cannot run; this is how they are read here.

- Algorithm 1 stops at the first number of jobs without a gain, which is nearly always the second;
  here every prefix of the job list is tried (geometrically spaced ones beyond `PREFIXES_DENSE`),
  and the shortest within `FEWER_JOBS` of the best utilisation taken: the paper prefers fewer jobs.
- The number of groups minimises sum |Tcpu(n_G) - Tnet| with M / n_G machines for each group. It is
  a weighted median of Tnet / Tcpu(1), found by sorting once. The paper determines it "roughly" and
  fine-tunes; with `tune` its neighbours, its half and its double are tried as well where there are
  few groups, because equal groups of M / n_G machines are then far from what comes out.
- Algorithm 2 fills a group while it has fewer than floor(|J| / n_G) jobs (printed: at most). When
  no group is left that a long job would not dominate, it goes where it balances best.
- A swap is the one exchange between the most imbalanced group and the one most unlike it that
  leaves the least imbalance in both together; it is made as long as that strictly falls.
- Machines: one each, then one at a time to the group with the largest sum Tcpu - sum Tnet. Where
  machines have so much memory and no more, a group first gets as many as hold its data and models;
  a grouping for which there are too few is none.

Everything is in machine-seconds: Tcpu(m) = work / m.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from math import ceil, floor
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slackwater.common.domains.models.group import CPU_WEIGHT, NETWORK_WEIGHT, Subtasks

Floats = NDArray[np.float64]
PREFIXES_DENSE: Final = 32
PREFIXES_RATIO: Final = 1.15
TUNED_GROUPS_MAX: Final = 32
FEWER_JOBS: Final = 0.03
STRICT: Final = 1e-9


class Grouping(NamedTuple):
    """Groups as indexes into the job list, and machines of each; jobs left out wait."""

    groups: list[list[int]]
    machines: list[int]
    utilization: float


class Jobs:
    """The job list as arrays."""

    __slots__ = ("nbytes", "network_s", "work")

    def __init__(self, jobs: Sequence[Subtasks]) -> None:
        self.work: Floats = np.array([job.cpu_s * job.machines for job in jobs], dtype=np.float64)
        """Machine-seconds of an iteration's CPU subtasks."""
        self.nbytes: Floats = np.array([job.nbytes for job in jobs], dtype=np.float64)
        self.network_s: Floats = np.array([job.network_s for job in jobs], dtype=np.float64)


def schedule(
    jobs: Sequence[Subtasks],
    machines: int,
    weights: tuple[float, float] = (CPU_WEIGHT, NETWORK_WEIGHT),
    fewer_jobs: float = FEWER_JOBS,
    tune: bool = True,
    memory_bytes: float = 0.0,
) -> Grouping:
    """Algorithm 1 over the list in its order. `memory_bytes`: of one machine; 0: no bound."""
    if not jobs or machines < 1:
        return Grouping([], [], 0.0)
    arrays = Jobs(jobs)
    found = []
    for count in _prefixes(len(jobs)):
        options = _counts_to_try(group_count(arrays, count, machines), min(count, machines), tune)
        groupings = (_grouped(arrays, count, n, machines, weights, memory_bytes) for n in options)
        found.append(max(groupings, key=lambda grouping: grouping.utilization))
    best = max(grouping.utilization for grouping in found)
    if best < 0.0:
        return Grouping([], [], 0.0)
    return next(g for g in found if g.utilization >= best * (1 - fewer_jobs))


def groupings(jobs: Sequence[Subtasks], machines: int) -> Iterator[Grouping]:
    """Yield groups of all the jobs, one to `TUNED_GROUPS_MAX` of them, by algorithm 2."""
    arrays, weights = Jobs(jobs), (CPU_WEIGHT, NETWORK_WEIGHT)
    for number in range(1, min(len(jobs), machines, TUNED_GROUPS_MAX) + 1):
        yield _grouped(arrays, len(jobs), number, machines, weights, 0.0)


def _counts_to_try(groups: int, most: int, tune: bool) -> list[int]:
    if not tune or groups > TUNED_GROUPS_MAX:
        return [groups]
    near = (groups, groups - 1, groups + 1, groups // 2, groups * 2)
    return list(dict.fromkeys(min(max(n, 1), most) for n in near))


def _grouped(
    jobs: Jobs, count: int, groups_count: int, machines: int, weights: tuple[float, float],
    memory_bytes: float,
) -> Grouping:  # fmt: skip
    groups = assign(jobs, count, groups_count, machines)
    least = [machines_for(float(jobs.nbytes[group].sum()), memory_bytes) for group in groups]
    if sum(least) > machines:
        return Grouping(groups, least, -1.0)
    shares = share_machines(jobs, groups, machines, least)
    return Grouping(groups, shares, utilization(jobs, groups, shares, machines, weights))


def _prefixes(count: int) -> list[int]:
    lengths = list(range(min(2, count), min(count, PREFIXES_DENSE) + 1))
    while lengths[-1] < count:
        lengths.append(min(count, ceil(lengths[-1] * PREFIXES_RATIO)))
    return lengths


def group_count(jobs: Jobs, count: int, machines: int) -> int:
    """n_G: with it the CPU and network times of the first `count` jobs differ least."""
    slope = jobs.work[:count] / machines  # Tcpu = slope n_G
    network_s = jobs.network_s[:count]
    most = min(count, machines)
    busy = slope > 0
    if not busy.any():
        return 1
    ratio = network_s[busy] / slope[busy]
    order = np.argsort(ratio, kind="stable")
    halves = np.cumsum(slope[busy][order])
    median = float(ratio[order][int(np.searchsorted(halves, halves[-1] / 2))])
    near = {min(max(n, 1), most) for n in (floor(median), ceil(median))}
    return min(sorted(near), key=lambda n: float(np.abs(slope * n - network_s).sum()))


def assign(jobs: Jobs, count: int, groups: int, machines: int) -> list[list[int]]:
    """Algorithm 2 and the swaps for the first `count` jobs."""
    scale = groups / machines
    cpu_s = jobs.work[:count] * scale
    network_s = jobs.network_s[:count]
    tilt: list[float] = (cpu_s - network_s).tolist()
    length: list[float] = (cpu_s + network_s).tolist()
    found, sums, rest = _fill(tilt, length, groups)
    _add_rest(found, sums, rest, tilt, length, cpu_s.tolist(), network_s.tolist())
    _swap(found, sums, tilt)
    return found


def _fill(
    tilt: list[float], length: list[float], groups: int
) -> tuple[list[list[int]], Floats, list[int]]:
    """Each group in turn takes the longest jobs that lean the other way, or else the longest."""
    order = sorted(range(len(tilt)), key=lambda j: (-length[j], j))
    # Positions in the order, longest last, of jobs bound by the CPU, by the network, by neither.
    queues: tuple[list[int], list[int], list[int]] = ([], [], [])
    for position in range(len(order) - 1, -1, -1):
        lean = tilt[order[position]]
        queues[0 if lean > 0 else 1 if lean < 0 else 2].append(position)
    size = len(tilt) // groups
    found = []
    sums = np.zeros(groups)
    for index in range(groups):
        members: list[int] = []
        total = 0.0
        for _ in range(size):
            wanted = (1, 2) if total > 0 else (0, 2) if total < 0 else (0, 1, 2)
            open_ = [q for q in wanted if queues[q]] or [q for q in (0, 1, 2) if queues[q]]
            queue = min((queues[q] for q in open_), key=lambda q: q[-1])
            job = order[queue.pop()]
            members.append(job)
            total += tilt[job]
        found.append(members)
        sums[index] = total
    return found, sums, [order[position] for queue in queues for position in queue]


def _add_rest(
    groups: list[list[int]],
    sums: Floats,
    rest: list[int],
    tilt: list[float],
    length: list[float],
    cpu_s: list[float],
    network_s: list[float],
) -> None:
    """Each where it balances best, unless it would be longer than all the group's work."""
    for job in sorted(rest, key=lambda j: (-abs(tilt[j]), j)):
        off = np.abs(sums + tilt[job])
        first = best = int(np.argmin(off))
        while length[job] > max(length[j] for j in groups[best]):
            cpu = cpu_s[job] + sum(cpu_s[j] for j in groups[best])
            network = network_s[job] + sum(network_s[j] for j in groups[best])
            if length[job] < max(cpu, network):
                break
            off[best] = np.inf
            best = int(np.argmin(off))
            if off[best] == np.inf:
                best = first
                break
        groups[best].append(job)
        sums[best] += tilt[job]


def _swap(groups: list[list[int]], sums: Floats, tilt: list[float]) -> None:
    """Exchanges between the most imbalanced group and the one most unlike it."""
    if len(groups) < 2:
        return
    for _ in range(len(tilt)):
        worst = int(np.argmax(np.abs(sums)))
        unlike = int(np.argmin(sums) if sums[worst] > 0 else np.argmax(sums))
        if unlike == worst:
            return
        mean = (sums[worst] - sums[unlike]) / 2
        partners = sorted((tilt[j], j) for j in groups[unlike])
        pair = min(
            (abs(tilt[a] - lean - mean), a, b)
            for a in groups[worst]
            for lean, b in _nearest(partners, tilt[a] - mean)
        )
        _, a, b = pair
        shift = tilt[a] - tilt[b]
        before = abs(sums[worst]) + abs(sums[unlike])
        if abs(sums[worst] - shift) + abs(sums[unlike] + shift) >= before * (1 - STRICT):
            return
        groups[worst][groups[worst].index(a)] = b
        groups[unlike][groups[unlike].index(b)] = a
        sums[worst] -= shift
        sums[unlike] += shift


def _nearest(entries: list[tuple[float, int]], value: float) -> list[tuple[float, int]]:
    index = bisect_left(entries, (value, -1))
    return entries[max(0, index - 1) : index + 1]


def machines_for(nbytes: float, memory_bytes: float) -> int:
    """Return the fewest machines that hold so much."""
    return max(1, ceil(nbytes / memory_bytes)) if memory_bytes else 1


def share_machines(
    jobs: Jobs, groups: list[list[int]], machines: int, least: Sequence[int] = ()
) -> list[int]:
    """The `least` each, or one, the others one by one to the group most bound by the CPU."""
    work = [float(jobs.work[group].sum()) for group in groups]
    network_s = [float(jobs.network_s[group].sum()) for group in groups]
    counts = list(least) or [1] * len(groups)
    heap = [(network_s[g] - work[g] / counts[g], g) for g in range(len(groups))]
    heapify(heap)
    for _ in range(machines - sum(counts)):
        g = heap[0][1]
        counts[g] += 1
        heapreplace(heap, (network_s[g] - work[g] / counts[g], g))
    return counts


def utilization(
    jobs: Jobs,
    groups: list[list[int]],
    counts: Sequence[int],
    machines: int,
    weights: tuple[float, float],
) -> float:
    """Eq. 4.4, weighted, over all `machines`."""
    if not groups:
        return 0.0
    order = np.fromiter((job for group in groups for job in group), dtype=np.int64)
    starts = np.array([0, *accumulate(len(group) for group in groups)][:-1])
    each = np.repeat(np.array(counts, dtype=np.float64), [len(group) for group in groups])
    cpu_s, network_s = jobs.work[order] / each, jobs.network_s[order]
    cpu = np.add.reduceat(cpu_s, starts)
    network = np.add.reduceat(network_s, starts)
    longest = np.maximum.reduceat(cpu_s + network_s, starts)
    iteration_s = np.maximum(np.maximum(cpu, network), longest)
    used = (weights[0] * cpu + weights[1] * network) / iteration_s
    return float((used * np.array(counts)).sum() / machines)
