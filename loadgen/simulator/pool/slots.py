"""The true cost of a placement: a few jobs' iterations, slot by slot.

The pool's simulation counts a job's loss as its policy does. This plays the placement out on the
aggregators' own slot schedule and rules (services/aggregator/schedule.py, task_scheduling.py),
which are told the controller's own plans (`SlotPlan`): a job goes forward layer by layer, each
waiting for its parameters, then backward, pushing each gradient as it is ready; the update of a
task is done when its slot ends. Nothing is assumed about phases: each job starts when it is told
to, and runs into the others as it happens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from slackwater.schemas.placement import SlotPlan
from slackwater.services.aggregator.schedule import SlotSchedule
from slackwater.services.aggregator.task_scheduling import TaskRules
from slackwater.services.controller.policies.view import Order

FORWARD_PART: float = 1 / 3
"""The forward pass's part of computing; backward costs twice as much (docs/readings.md)."""


@dataclass(frozen=True, slots=True)
class SlotTask:
    """`position`: which part of the forward pass comes before it is pulled."""

    aggregator: str
    cpu_s: float
    position: float


@dataclass(frozen=True, slots=True)
class SlotJob:
    """`compute_s`: one iteration of forward and backward if no update had to be waited for;
    `iteration_s`: as profiled alone."""

    id: str
    compute_s: float
    tasks: tuple[SlotTask, ...]
    iteration_s: float = 0.0
    slack: float = 0.0
    """The part of an iteration by which its tasks may be late."""
    begin_s: float = 0.0


@dataclass(slots=True)
class _Running:
    job: SlotJob
    order: list[int]
    """The job's tasks in forward order."""
    done: list[bool]
    next: int = 0
    at_s: float = 0.0
    ends_s: list[float] = field(default_factory=list)
    """When each forward pass ended."""


@dataclass(slots=True)
class _Slot:
    schedule: SlotSchedule[tuple[str, int]]
    turns: TaskRules
    ends: int = 0
    """The number of the event that ends the task that has the slot; 0: it is free."""
    begun_s: float = 0.0
    holds: str = ""
    """The job whose task has the slot since `begun_s`."""


class SlotRun:
    """One run. `shares`: aggregator -> cpu_share, below 1. `order` "deadline": the aggregators know
    the tasks' deadlines (`HostBuckets` told). `plans`: what the controller told them since; those
    without a plan run what has no deadline as it comes."""

    def __init__(
        self,
        jobs: Sequence[SlotJob],
        shares: Mapping[str, float],
        order: Order,
        until_s: float,
        plans: Mapping[str, SlotPlan] | None = None,
    ) -> None:
        self._until_s = until_s
        self._shares = shares
        self._slots = {
            name: _Slot(SlotSchedule(share), TaskRules()) for name, share in shares.items()
        }
        self._events: list[tuple[float, int, str, str, int, bool]] = []
        self._number = 0
        self.spans: list[tuple[str, float, float]] | None = None
        """Set to a list: (aggregator, from, until) of every stretch that a slot is used."""
        self._jobs: dict[str, _Running] = {}
        for job in jobs:
            positions = [task.position for task in job.tasks]
            forward = sorted(range(len(positions)), key=positions.__getitem__)
            self._jobs[job.id] = _Running(job, forward, [True] * len(job.tasks), at_s=job.begin_s)
            if order != "deadline":
                continue
            for index, task in enumerate(job.tasks):
                deadlines = self._slots[task.aggregator].turns.deadlines
                deadlines.plan((job.id, index), task.position, job.slack, job.iteration_s)
        for name, plan in (plans or {}).items():
            paces: dict[str, float] = {each.job: each.every_s for each in plan.jobs}
            slacks: dict[str, float] = {each.job: each.slack for each in plan.jobs if each.slack}
            self._slots[name].turns.plan(plan.cycle_s, plan.slack, paces, slacks)

    def iterations_s(self) -> dict[str, list[float]]:
        """Return how long the iterations of each job lasted."""
        for name in self._jobs:
            self._forward(name)
        while self._events and self._events[0][0] <= self._until_s:
            at_s, number, aggregator, name, task, ended = heappop(self._events)
            slot = self._slots[aggregator]
            if not ended:
                self._pushed(slot, name, task, at_s)
            elif slot.ends == number:  # Else it was cut.
                slot.ends = 0
                if self.spans is not None:
                    self.spans.append((aggregator, slot.begun_s, at_s))
                if task >= 0:
                    self._jobs[name].done[task] = True
                    self._forward(name, at_s)
            if slot.ends:
                self._cut(slot, aggregator, at_s)
            else:
                self._begin(slot, aggregator, at_s)
        return {
            name: [b - a for a, b in zip(running.ends_s, running.ends_s[1:], strict=False)]
            for name, running in self._jobs.items()
        }

    def _note(self, at_s: float, aggregator: str, name: str, task: int, ended: bool) -> int:
        self._number += 1
        heappush(self._events, (at_s, self._number, aggregator, name, task, ended))
        return self._number

    def _pushed(self, slot: _Slot, name: str, task: int, at_s: float) -> None:
        deadline_s = inf
        if slot.turns.planned((name, task)):
            entry = self._jobs[name].job.tasks[task]
            slot_s = entry.cpu_s / self._shares[entry.aggregator]
            deadline_s = slot.turns.arrived((name, task), at_s, slot_s)
        slot.schedule.arrived((name, task), at_s, deadline_s)

    def _begin(self, slot: _Slot, aggregator: str, now_s: float) -> None:
        begun = slot.schedule.begin()
        if begun is None:
            return
        name, task = begun.task
        ended = slot.schedule.end(self._jobs[name].job.tasks[task].cpu_s, now_s)
        slot.begun_s, slot.holds = begun.start_s, name
        slot.ends = self._note(ended.at_s, aggregator, name, task, True)

    def _cut(self, slot: _Slot, aggregator: str, now_s: float) -> None:
        """Something more urgent may be there by now."""
        cut = slot.schedule.cut(now_s)
        if cut is not None:
            slot.ends = self._note(cut.at_s, aggregator, slot.holds, -1, True)

    def _forward(self, name: str, now_s: float = 0.0) -> None:
        """Go forward as far as the parameters are there; after the last layer, backward."""
        running = self._jobs[name]
        job, forward_s = running.job, running.job.compute_s * FORWARD_PART
        before = 0.0 if running.next == 0 else job.tasks[running.order[running.next - 1]].position
        while running.next < len(running.order):
            task = running.order[running.next]
            if not running.done[task]:
                return
            position = job.tasks[task].position
            running.at_s = max(running.at_s + forward_s * (position - before), now_s)
            before = position
            running.next += 1
        turn_s = running.at_s + forward_s * (1.0 - before)
        running.ends_s.append(turn_s)
        backward_s = job.compute_s - forward_s
        for index, entry in enumerate(job.tasks):
            running.done[index] = False
            pushed_s = turn_s + (1.0 - entry.position) * backward_s
            self._note(pushed_s, entry.aggregator, name, index, False)
        running.next, running.at_s = 0, turn_s + backward_s


def losses(
    jobs: Sequence[SlotJob],
    shares: Mapping[str, float],
    order: Order,
    until_s: float,
    plans: Mapping[str, SlotPlan] | None = None,
    skip: int = 2,
) -> dict[str, float]:
    """Return the share of its speed alone that each job loses; the first iterations not counted."""
    found = {}
    for name, lasted_s in SlotRun(jobs, shares, order, until_s, plans).iterations_s().items():
        alone_s = next(job.iteration_s for job in jobs if job.id == name)
        kept = lasted_s[skip:]
        found[name] = 1.0 - alone_s * len(kept) / sum(kept) if kept else 0.0
    return found


def alone_s(job: SlotJob, shares: Mapping[str, float], iterations: int = 4) -> float:
    """How long its iteration lasts on these aggregators without anybody else: what the profiler
    measures on temporary ones."""
    cost_s = sum(task.cpu_s / shares[task.aggregator] for task in job.tasks)
    until_s = job.begin_s + (iterations + 2) * (job.compute_s + cost_s)
    lasted_s = SlotRun([job], shares, "arrival", until_s).iterations_s()[job.id]
    return lasted_s[-1]
