"""Jobs that run on any number of nodes between their bounds: what their policies share.

Lin et al. (2018), section IV. A policy here answers one question, `sizes`: how many nodes for whom.
The rest is common: which jobs wait (kept in order of their work, by kind of job, so that a decision
costs what runs and what changed, not what waits), filling (eq. 5), and placing the sizes on
machines with as few moves as possible.

Remaining work J is what the job model's oracle says (`JobView.remaining_s`), in the unit of the
job's curve. A job without a curve is taken to scale linearly, as the fixed job model does.

Deviations: nodes are GPUs of one type; tenants' quotas divide the cluster (see
`scheduling.tenants`). A running job that the operator protects from preemption keeps its nodes as
they are.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace, merge
from math import inf
from typing import Any, NamedTuple

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.common.base.words import number_of
from slackwater.common.domains.models.speedup import (
    STRICT,
    ElasticProfile,
    Sizes,
    SpeedupCurve,
    linear_curve,
)
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.placement import Placer
from slackwater.services.master.scheduling.rules import Rule
from slackwater.services.master.scheduling.view import (
    Allocation,
    JobView,
    Pending,
    Plan,
    View,
    shrunk,
)


class Kind(NamedTuple):
    """Jobs that differ in nothing but their work: the least work comes first under any budget."""

    priority: int
    curve: SpeedupCurve
    fixed: int
    """A moldable job keeps the size it was first given; 0: not given any yet, or malleable."""


class Member(NamedTuple):
    work: float
    """J, weighted (see `progress_exponent`)."""
    number: int
    job: JobView


class Pool:
    """The memory: who waits, by kind and work; who runs; sizes already given; arrivals seen."""

    __slots__ = (
        "_curves", "_fixed", "_kinds", "first_s", "gpus", "last_number", "queue", "running",
        "waiting", "work_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.waiting: dict[Kind, list[Member]] = {}
        self.queue: list[tuple[int, int, JobView]] = []
        """The same in order of submission, priority first."""
        self.running: dict[JobId, JobView] = {}
        self.gpus = -1
        self.last_number = -1
        self.first_s = inf
        self.work_s = 0.0
        """S(1) of every job seen: the load's numerator."""
        self._kinds: dict[JobId, tuple[Kind, Member]] = {}
        self._fixed: dict[JobId, int] = {}
        self._curves: dict[int, SpeedupCurve] = {}

    def facts(self) -> "PoolFacts":
        return PoolFacts(self._fixed, self.first_s, self.last_number, self.work_s)

    @classmethod
    def restored(cls, facts: "PoolFacts") -> "Pool":
        pool = cls()
        pool._fixed, pool.first_s = dict(facts.fixed), facts.first_s
        pool.last_number, pool.work_s = facts.last_number, facts.work_s
        return pool

    def update(
        self, view: View, changed: Iterable[JobId] | None, exponent: float, moldable: bool
    ) -> None:
        if changed is None or view.cluster.gpus != self.gpus:
            # Bounds follow the cluster's size: everybody is sorted in anew.
            self.waiting, self._kinds, self.running, self.queue = {}, {}, {}, []
            self._fixed = {i: size for i, size in self._fixed.items() if i in view.jobs}
            self.gpus = view.cluster.gpus
            changed = view.jobs
        for job_id in dict.fromkeys(changed):
            known = self._kinds.pop(job_id, None)
            if known is not None:
                _drop(self.waiting[known[0]], known[1])
                _drop(self.queue, (known[0].priority, known[1].number, known[1].job))
            self.running.pop(job_id, None)
            job = view.jobs.get(job_id)
            if job is None:
                self._fixed.pop(job_id, None)
                continue
            self._note_arrival(job)
            if moldable and job.allocation:
                self._fixed[job_id] = job.held_gpus
            if job.allocation:
                self.running[job_id] = job
            else:
                kind = self.kind(job)
                member = Member(self.work(job, view.now_s, exponent), job.number, job)
                self._kinds[job_id] = kind, member
                insort(self.waiting.setdefault(kind, []), member)
                insort(self.queue, (kind.priority, job.number, job))

    def _note_arrival(self, job: JobView) -> None:
        if job.number <= self.last_number:
            return
        self.last_number = job.number
        self.first_s = min(self.first_s, job.submitted_s)
        if isinstance(job.profile, ElasticProfile):
            self.work_s += job.profile.work / job.profile.curve.x[1]
        else:
            self.work_s += job.remaining_s_then * job.gpus

    def kind(self, job: JobView) -> Kind:
        return Kind(-job.priority, self.curve(job), self._fixed.get(job.id, 0))

    def curve(self, job: JobView) -> SpeedupCurve:
        """The job's, within its bounds and the cluster."""
        nodes = max(self.gpus, 1)
        if isinstance(job.profile, ElasticProfile):
            whole = job.profile.curve
        else:
            if job.gpus not in self._curves:
                self._curves[job.gpus] = linear_curve(max(nodes, job.gpus), job.gpus)
            whole = self._curves[job.gpus]
        least = job.gpus_min if job.gpus_min <= nodes else nodes + 1
        return whole.bounded(least, job.gpus_max, nodes)

    def work(self, job: JobView, now_s: float, exponent: float) -> float:
        """J, or with an exponent J (J_0 / J)^exponent: jobs that are far along count as larger,
        because new ones are more likely to be ended early (section VI)."""
        left_s = max(0.0, job.remaining_s(now_s))
        profile = job.profile
        if isinstance(profile, ElasticProfile):
            rate, whole = profile.curve.x[min(job.gpus, profile.curve.nodes)], profile.work
        else:
            # Progress can't be told without a profile: the seconds run stand for what is done.
            rate, whole = 1.0, left_s + job.run_s(now_s)
        if left_s == inf:
            raise Rejected(
                f"job {job.id}: its remaining work is unknown; run it with a job model that knows "
                "it (queueing, fixed)"
            )
        work = left_s * rate
        if exponent and work > 0:
            work *= (max(whole, work) / work) ** exponent
        return work

    def by_kind(
        self, now_s: float, exponent: float, kept: Mapping[JobId, int]
    ) -> dict[Kind, Iterator[Member]]:
        """All jobs but the kept, by kind, the least work first."""
        running: dict[Kind, list[Member]] = {}
        for job in self.running.values():
            if job.id not in kept:
                member = Member(self.work(job, now_s, exponent), job.number, job)
                running.setdefault(self.kind(job), []).append(member)
        kinds = {kind: iter(members) for kind, members in self.waiting.items() if members}
        for kind, members in running.items():
            members.sort()
            kinds[kind] = merge(self.waiting.get(kind, ()), members)
        return kinds

    def in_submission_order(self, count: int, kept: Mapping[JobId, int]) -> list[JobView]:
        """The first `count` jobs by submission, priority first, without the kept."""
        jobs = [(-j.priority, j.number, j) for j in self.running.values() if j.id not in kept]
        jobs += self.queue[:count]
        jobs.sort(key=lambda entry: entry[:2])
        return [job for _, _, job in jobs[:count]]


class PoolFacts(msgspec.Struct, frozen=True):
    """A moldable policy must not forget these when the master restarts."""

    fixed: dict[JobId, int]
    first_s: float
    last_number: int
    work_s: float


def _drop(entries: list[Any], entry: Any) -> None:
    del entries[bisect_left(entries, entry)]


class Choice(NamedTuple):
    """A job that was given nodes."""

    job: JobView
    work: float
    curve: SpeedupCurve


class ElasticPolicy(ABC):
    """An elastic policy, but for its choice of sizes."""

    elastic = divisible = True
    honours = frozenset[Rule]({"priorities", "min_run_s"})
    progress_exponent = 0.0
    moldable = False

    @abstractmethod
    def sizes(
        self, view: View, pool: Pool, budget: int, kept: Mapping[JobId, int]
    ) -> dict[JobId, int]:
        """How many nodes of the budget for whom; jobs left out get none. The kept have theirs."""

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        pool = memory if memory is not None else Pool()
        changed = view.changed if memory is not None else None
        pool.update(view, changed, self.progress_exponent, self.moldable)
        kept, until_s = self._kept(view, pool)
        sizes = self.sizes(view, pool, view.cluster.gpus - sum(kept.values()), kept)
        changes = resize(view, pool.running, {**sizes, **kept})
        return Plan(changes, next_decision_s=until_s if pool.waiting else inf), pool

    def _kept(self, view: View, pool: Pool) -> tuple[dict[JobId, int], float]:
        """Running jobs within their protected time, and when the first of them may be touched."""
        if view.rules.min_run_s <= 0:
            return {}, inf
        ends = {
            job.id: (job.held_gpus, job.since_s + view.rules.min_run_s)
            for job in pool.running.values()
        }
        kept = {job_id: held for job_id, (held, end_s) in ends.items() if end_s > view.now_s}
        return kept, min((ends[job_id][1] for job_id in kept), default=inf)

    facts = PoolFacts

    def durable(self, memory: Pool) -> PoolFacts | None:
        """A malleable job is sized anew at every decision: nothing is lost then."""
        return memory.facts() if self.moldable else None

    def restored(self, facts: PoolFacts) -> Pool:
        return Pool.restored(facts)

    def explain(self, view: View, memory: Any) -> list[Pending]:
        free = sum(view.free)
        answers = []
        for job in sorted(view.jobs.values(), key=lambda job: job.number):
            if job.allocation:
                continue
            rule, text = "order", "the nodes it could use are held by jobs that come before it"
            if job.gpus_min > view.cluster.gpus:
                rule = "capacity"
                least = number_of(job.gpus_min, "node")
                text = f"needs {least} at least while {view.cluster.gpus} are up"
            elif free >= job.gpus_min:
                rule, text = "size", "waits for as many nodes as its speed-up is worth"
            lacking = f"{number_of(job.gpus_min, 'GPU')}, {free} idle"
            answers.append(Pending(job.id, rule, lacking, inf, text))
        return answers


def select(
    kinds: dict[Kind, Iterator[Member]],
    budget: int,
    table: Callable[[Kind], Sizes],
    weight: Callable[[Kind], float],
    skip: bool = True,
) -> tuple[dict[JobId, int], list[Choice]]:
    """Again and again the job with the least cost gets the size that is best for it within what is
    left (algorithms 1 and 2). A smaller budget never makes a job cheaper, so a heap of the heads
    is enough: who became dearer goes back. A kind whose size no longer fits drops out, or, without
    `skip`, ends the walk."""
    order = list(kinds)
    heads = [next(kinds[kind], None) for kind in order]

    def entry(index: int) -> tuple[int, float, int, int] | None:
        kind, member = order[index], heads[index]
        if member is None:
            return None
        cost = table(kind).at(budget)[1] * member.work * weight(kind)
        return kind.priority, cost, member.number, index

    heap = [found for index in range(len(order)) if (found := entry(index)) is not None]
    heapify(heap)
    sizes: dict[JobId, int] = {}
    choices: list[Choice] = []
    while heap and budget > 0:
        index = heap[0][3]
        found, member = entry(index), heads[index]
        size = table(order[index]).at(budget)[0]
        if found is None or member is None or not size or size > budget:
            if not skip:
                break
            heappop(heap)
        elif found > heap[0]:
            heapreplace(heap, found)
        else:
            sizes[member.job.id] = size
            choices.append(Choice(member.job, member.work, order[index].curve))
            budget -= size
            heads[index] = next(kinds[order[index]], None)
            successor = entry(index)
            if successor is None:
                heappop(heap)
            else:
                heapreplace(heap, successor)
    return sizes, choices


def fill(sizes: dict[JobId, int], choices: list[Choice], budget: int) -> None:
    """Eq. 5: the fewest idle nodes that make one job the shortest of all, for as long as there are
    any. "All k" includes the job itself; strictly shorter means by more than rounding."""
    if not choices or budget <= 0:
        return
    shortest_s = min(c.curve.service_s(c.work, sizes[c.job.id]) for c in choices)

    def bid(index: int) -> tuple[int, float, int, int] | None:
        choice = choices[index]
        held = sizes[choice.job.id]
        beat = choice.work / shortest_s * (1 + STRICT) if shortest_s > 0 else inf
        nodes = choice.curve.more(held, beat)
        if not nodes or nodes > budget:
            return None
        service_s = choice.curve.service_s(choice.work, held + nodes)
        return nodes, service_s, choice.job.number, index

    heap = [found for i in range(len(choices)) if (found := bid(i)) is not None]
    heapify(heap)
    while heap and budget > 0:
        found = bid(heap[0][3])
        if found is None:
            heappop(heap)
        elif found > heap[0]:
            heapreplace(heap, found)  # The bar fell since it made its bid.
        else:
            nodes, shortest_s, _, index = found
            sizes[choices[index].job.id] += nodes
            budget -= nodes
            again = bid(index)
            if again is None:
                heappop(heap)
            else:
                heapreplace(heap, again)


def resize(
    view: View, running: Mapping[JobId, JobView], sizes: Mapping[JobId, int]
) -> dict[JobId, Allocation]:
    """Allocations of those whose size changes: who shrinks leaves its smallest parts, who grows
    keeps what it has."""
    changes: dict[JobId, Allocation] = {}
    placer = Placer(view)
    for job in running.values():
        size = sizes.get(job.id, 0)
        if size < job.held_gpus:
            left = shrunk(job.allocation, size)
            placer.give_back(job.allocation)
            placer.take(left)
            changes[job.id] = left
    growing = [job for job in running.values() if sizes.get(job.id, 0) > job.held_gpus]
    for job in sorted(growing, key=lambda job: job.number):
        added = placer.place(sizes[job.id] - job.held_gpus)
        together = dict(job.allocation)
        for node, gpus in added:
            together[node] = together.get(node, 0) + gpus
        changes[job.id] = tuple(sorted(together.items()))
    for job_id, size in sizes.items():
        if job_id not in running and (allocation := placer.place(size)):
            changes[job_id] = allocation
    return changes
