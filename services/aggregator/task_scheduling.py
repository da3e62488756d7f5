"""Rules by which an aggregator orders and limits what its jobs ask. Pure.

    arrival    a request runs when it comes (what ps-lite does, and what profiling wants)
    cyclic     the paper's cyclic execution (AutoPS section 3.3.1): the cycle's slots are those of
               the requests that are expected in it; one that missed its own has what they leave,
               until its own comes again
    deadline   our own: the earliest deadline first, the deadlines those that demand.py of the
               controller admitted the job by (docs/adr/0010)

A rule sees requests and gives each a deadline, by which the slot orders them (schedule.py); where
there is none, a request has its turn as it came. A request is known by its task: (job,
bucket). Which jobs follow which rule is the controller's plan (`SlotPlan`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf

from slackwater.services.aggregator.schedule import Profile

Task = tuple[str, int]
"""(job, bucket)"""


class TaskRules:
    """The tasks of one aggregator, each by its job's rule."""

    def __init__(self) -> None:
        self.cycle = CyclicRule()
        self.deadlines = DeadlineRule()

    def plan(
        self,
        cycle_s: float,
        slack: float,
        paces: Mapping[str, float],
        slacks: Mapping[str, float] | None = None,
    ) -> None:
        """All of it anew: `paces` is job -> how often its tasks are expected. `cycle_s` 0: nobody's
        tasks run in a cycle. `slacks`: of jobs whose tenant has a loss limit of its own."""
        self.cycle.plan(slack, paces if cycle_s else {}, slacks)
        if not cycle_s:
            self.deadlines.pace(slack, paces, slacks or {})

    def planned(self, task: Task) -> bool:
        """Say whether it has a rule; else it runs as it comes."""
        return self.deadlines.planned(task) or self.cycle.planned(task)

    def arrived(self, task: Task, now_s: float, slot_s: float) -> float:
        """The deadline of a request that comes now. `slot_s`: what the task will be charged."""
        if self.deadlines.planned(task):
            return self.deadlines.arrived(task, now_s, slot_s)
        return self.cycle.arrived(task, now_s, slot_s)

    def forget(self, task: Task) -> None:
        """The bucket is not here any more."""
        self.cycle.forget(task)
        self.deadlines.forget(task)


# The paper's cycle --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Reserved:
    slot_s: float = 0.0
    expected_s: float = inf
    """When its next request should be there; inf: it has not had a first one."""


@dataclass(slots=True)
class _Member:
    every_s: float
    slack: float = 0.0
    tasks: dict[int, _Reserved] = field(default_factory=dict)


class CyclicRule:
    """The slots of an execution cycle C_n, which repeats.

    A job's tasks are expected once every d_j, so that a faster job has k_jn = C_n / d_j executions
    in each cycle; each has its place in the order when it is expected. A request that comes then
    runs as it comes. Two kinds are outliers. One that is ahead, because its job pushes more often
    than the plan has slots for, keeps its place: until then it runs only in slots that nobody else
    asks for, and the places that are waited for are d_j apart however often it comes. A late one
    missed its execution: its slot would be over, and the next one is nearer. (A nearer bound takes
    a job that waited for its neighbours for a straggler, and what it then waits makes it one.) It
    runs only in slots that the scheduled requests leave, until its own slot comes again, in the
    next cycle or, of a faster job, in this one.

    Slots are reserved by giving way: an outlier that has begun leaves the slot after a chunk to a
    scheduled request, so that "co-located model aggregations are not affected". To let it begin
    where the rest of the cycle has time enough, and then run to its end, is not the same: the
    others' requests wait for the whole of its largest tensor, three quarters of a VGG19.

    A straggler is late with everything that it still asks for, so its first late request moves the
    expectations of all: it is held back once. (Judged each by itself, one request that waited made
    the others late in the next iteration, and so on for ever: in played-out slots, two AlexNet jobs
    that lost nothing as they came lost 12 %.)
    """

    def __init__(self) -> None:
        self.late = 0
        """Requests that came after their place."""
        self._members: dict[str, _Member] = {}

    def plan(
        self,
        slack: float,
        paces: Mapping[str, float],
        slacks: Mapping[str, float] | None = None,
    ) -> None:
        """`slack`: the part of d_j by which a request may be late and is none. Of jobs that stay,
        what is expected is remembered."""
        members = {
            job: self._members.get(job) or _Member(every_s) for job, every_s in paces.items()
        }
        for job, every_s in paces.items():
            members[job].every_s = every_s
            members[job].slack = (slacks or {}).get(job, slack)
        self._members = members

    def planned(self, task: Task) -> bool:
        return task[0] in self._members

    def forget(self, task: Task) -> None:
        member = self._members.get(task[0])
        if member is not None:
            member.tasks.pop(task[1], None)

    def arrived(self, task: Task, now_s: float, slot_s: float) -> float:
        """A task of a planned job."""
        member = self._members[task[0]]
        entry = member.tasks.setdefault(task[1], _Reserved())
        entry.slot_s, expected_s = slot_s, entry.expected_s
        if expected_s == inf:
            expected_s = now_s
        if now_s > expected_s + self._tolerance_s(member, entry):
            self.late += 1
            for other in member.tasks.values():
                other.expected_s += now_s - expected_s
            entry.expected_s = now_s + member.every_s
            missed = ceil((now_s - expected_s) / member.every_s)
            return expected_s + missed * member.every_s
        place_s = min(max(now_s, expected_s), now_s + member.every_s)
        entry.expected_s = place_s + member.every_s
        return place_s

    def _tolerance_s(self, member: _Member, entry: _Reserved) -> float:
        return max(entry.slot_s, max(0.5, member.slack) * member.every_s)


# Deadlines ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Paced:
    position: float
    slack: float
    period: Profile
    last_s: float = -inf
    """The release that its last deadline was counted from."""
    arrived_s: float = -inf


class DeadlineRule:
    """A task of position x on a job of iteration D is due max(x D, C) + slack D after it became
    complete. Its deadlines are at least D apart: a job that pushes more often than it was profiled
    to runs ahead only on time that nobody else needs.
    """

    def __init__(self) -> None:
        self._tasks: dict[Task, _Paced] = {}

    def plan(self, task: Task, position: float, slack: float, period_s: float = 0.0) -> None:
        """`period_s` 0: D is the lower quartile of the first times between two requests here."""
        known = self._tasks.get(task)
        if known is None:
            self._tasks[task] = _Paced(position, slack, Profile(kept_s=period_s))
        else:
            known.position, known.slack = position, slack
            known.period.kept_s = period_s or known.period.kept_s

    def pace(self, slack: float, paces: Mapping[str, float], slacks: Mapping[str, float]) -> None:
        """Set the paces that the jobs were profiled to, in place of those that were learned
        here."""
        for (job, _), known in self._tasks.items():
            if job in paces:
                known.slack, known.period.kept_s = slacks.get(job, slack), paces[job]

    def forget(self, task: Task) -> None:
        self._tasks.pop(task, None)

    def planned(self, task: Task) -> bool:
        return task in self._tasks

    def arrived(self, task: Task, now_s: float, slot_s: float) -> float:
        """`slot_s`: what it will be charged. A task whose D is not known is due as it comes: it is
        being profiled."""
        known = self._tasks[task]
        if known.arrived_s > -inf and not known.period.kept_s:
            known.period.charge(now_s - known.arrived_s)
        known.arrived_s = now_s
        period_s = known.period.cpu_s
        if not period_s:
            return now_s + slot_s
        known.last_s = max(now_s, known.last_s + period_s)
        window_s = max(known.position * period_s, slot_s) + known.slack * period_s
        return known.last_s + window_s
