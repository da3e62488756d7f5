"""Start waiting jobs and stop running ones, as a scheduler decides.

A policy is asked once a step in which something changed, and when it wants to be. What it decides
is carried out through records: all that change are stored first, as intended; then jobs that lose
GPUs are told to stop; and a start is ordered once everybody has left its GPUs (lifecycle.py). So a
master that is killed at any instant finds what was decided, and goes on with it.

A decision that fails, or a start that admission holds back, changes nothing: who runs goes on.
"""

from collections import Counter
from math import inf
from typing import Any, Final

from slackwater.common.base.effects import Log, StartTimer
from slackwater.common.base.words import number_of
from slackwater.schemas.base import JobId
from slackwater.schemas.gpus import Within
from slackwater.services.master import scaling, yielding
from slackwater.services.master.admission import Hold, gathers, named
from slackwater.services.master.gangs import fits_processes, lies_anywhere
from slackwater.services.master.jobs import Job
from slackwater.services.master.keys import DecisionDue
from slackwater.services.master.lifecycle import advance, choose_devices, leave
from slackwater.services.master.nodes import Room
from slackwater.services.master.schedule import Schedule, units_min
from slackwater.services.master.scheduling.scheduler import Decision
from slackwater.services.master.scheduling.view import Allocation, View
from slackwater.services.master.snapshot import Capacity
from slackwater.services.master.speed_curves import with_curves
from slackwater.services.master.state import State, held_back

SETTLE_S: Final = 2.5
"""After its start a master knows which GPUs there are once every node was heard, as they are each
second. A policy that saw half of the cluster would pause jobs for want of room."""


LATE_S: Final = 1.0
"""A timer fires milliseconds after the instant that its policy named. A policy that works in rounds
takes any other instant for one between two rounds, so up to so much later it is asked as of it."""


def dispatch(state: State, now_s: float) -> bool:
    """Ask the schedulers that something changed for. True: the one of GPUs was asked."""
    asked_gpus = False
    for schedule in (state.slots, state.gpus):
        if not schedule.due and not schedule.snapshot.changed:
            continue
        if schedule is state.gpus and not _settled(state, now_s):
            continue
        schedule.due = False
        if schedule is state.slots:
            yielding.take_back(state, now_s)
        _dispatch(state, schedule, now_s)
        if schedule is state.slots:
            yielding.give_way(state, now_s)
        asked_gpus |= schedule is state.gpus
    return asked_gpus


def wake(state: State, name: str) -> None:
    """Ask a scheduler that wanted it when its timer fires."""
    schedule = state.slots if name == state.slots.name else state.gpus
    schedule.due = True


def tick(state: State, now_s: float) -> None:
    """Ask again for what no record tells: a node became silent, tenants have room, a policy that
    failed may not fail again. Nobody else: a policy that is asked at other instants than it wants
    to be decides otherwise."""
    state.slots.due = True
    gpus = state.gpus
    _tell_waits_for_gpus(state, now_s)
    changed = state.nodes.gpus(now_s) != gpus.capacities
    gpus.due |= changed or bool(gpus.failure) or bool(gpus.closed) or bool(gpus.gathering)


def _settled(state: State, now_s: float) -> bool:
    schedule = state.gpus
    if now_s >= state.begun_s + SETTLE_S:
        return True
    if schedule.wake_s == inf:
        schedule.wake_s = state.begun_s + SETTLE_S
        state.out.append(StartTimer(DecisionDue(schedule.name), schedule.wake_s))
    return False


def _dispatch(state: State, schedule: Schedule, now_s: float) -> None:
    gpus = schedule is state.gpus
    capacities = state.nodes.gpus(now_s) if gpus else state.nodes.slots(now_s)
    schedule.capacities = capacities
    fresh = list(dict.fromkeys(schedule.snapshot.changed))
    moved = _hide_too_large(schedule, capacities)
    holds = _Holds(state, schedule, now_s)
    holds.reopen()
    asked_s = schedule.wake_s if now_s - LATE_S < schedule.wake_s < now_s else now_s
    while not holds.blocked():
        view = schedule.snapshot.view(capacities, asked_s)
        view = with_curves(schedule.scheduler.policy, view, state.jobs)
        decision = _decide(state, schedule, view, now_s)
        if decision is None or _carry_out(state, schedule, decision, holds, now_s):
            break
    holds.keep()
    _tell_waits(state, schedule, list(state.jobs) if moved else fresh, now_s)


def _decide(state: State, schedule: Schedule, view: View, now_s: float) -> Decision | None:
    """None: the policy failed. Everybody keeps what they have, and its operator is told."""
    schedule.decisions += 1
    try:
        decision = schedule.scheduler.decide(view)
    except Exception as error:  # A policy may be anybody's.
        schedule.failures += 1
        failure = f"{type(error).__name__}: {error}"
        if failure != schedule.failure:
            fields = {"schedule": schedule.name, "reason": failure}
            state.out.append(Log("policy.failed", fields, "error"))
        schedule.failure = failure
        return None
    schedule.failure = ""
    if decision.desired_nodes is not None:
        schedule.nodes_wanted = decision.desired_nodes
    if view.now_s < decision.wake_s < inf and decision.wake_s != schedule.wake_s:
        state.out.append(StartTimer(DecisionDue(schedule.name), decision.wake_s))
    schedule.wake_s = decision.wake_s
    return decision


# Carrying a decision out --------------------------------------------------------------------------


def _carry_out(
    state: State, schedule: Schedule, decision: Decision, holds: "_Holds", now_s: float
) -> bool:
    """False: admission held a start back, so that the policy is to decide anew."""
    names = schedule.snapshot.names
    concerned = []
    # Take no GPUs from anybody for a job that may not start.
    if (decision.pause or decision.resize) and any(
        holds.back(state.jobs[id]) for id in sorted(decision.start)
    ):
        for id in (*decision.pause, *decision.resize, *decision.start):
            schedule.snapshot.touch(id)
        return False
    schedule.split = {id: why for id, why in schedule.split.items() if id in schedule.snapshot.jobs}
    for id in decision.pause:
        job = state.jobs[id]
        preemptions = job.record.preemptions + 1
        leave(state, job, (), now_s, preemptions=preemptions, reason="its GPUs go to other jobs")
        concerned.append(job)
    for id, allocation in decision.resize.items():
        job = state.jobs[id]
        if job.record.resizing:  # It is asked for again once that is done.
            schedule.snapshot.touch(id)
        elif _feasible(state, schedule, job, allocation, now_s):
            if scaling.resize(state, job, names(allocation), now_s):
                continue
            reallocations = job.record.reallocations + 1
            leave(state, job, names(allocation), now_s, reallocations=reallocations, reason="")
            concerned.append(job)
    complete = True
    starts = sorted(decision.start, key=lambda id: schedule.snapshot.jobs[id].number)
    for id in starts:
        job = state.jobs[id]
        if complete and holds.back(job):
            complete = False
        if not complete or not _feasible(state, schedule, job, decision.start[id], now_s):
            schedule.snapshot.touch(id)
            continue
        _begin(state, job, decision.start[id], schedule, now_s)
        concerned.append(job)
    for job in concerned:
        advance(state, job)
    return complete


def _begin(
    state: State, job: Job, allocation: Allocation, schedule: Schedule, now_s: float
) -> None:
    record, placed = job.record, schedule.snapshot.names(allocation)
    again = record.run_s > 0.0 or record.gpu_s > 0.0
    changes: dict[str, Any] = {
        "reason": "",
        "since_s": now_s,
        "started_s": record.started_s if again else now_s,
        "reallocations": record.reallocations + again,
    }
    if record.state == "stopping":  # It was paused a moment ago, and goes on after all.
        state.change(job, now_s, "resized", planned=placed, **changes)
        return
    changes |= choose_devices(state, record, placed)
    state_now = "starting" if record.spec.gpus else "running"
    state.change(job, now_s, state_now, state=state_now, allocation=placed, **changes)


def _feasible(
    state: State, schedule: Schedule, job: Job, allocation: Allocation, now_s: float
) -> bool:
    """Whether every process finds its GPUs on one node. The user and the operator are told where
    not: a policy knows a job's GPUs and not its processes."""
    spec, placed = job.record.spec, schedule.snapshot.names(allocation)
    if fits_processes(spec, placed):
        schedule.split.pop(job.id, None)
        return True
    parts = " and ".join(f"{number} on {node}" for node, number in placed)
    why = (
        f"the policy {schedule.policy} gave it {parts}, which splits a process over nodes: each of "
        f"its {spec.workers} processes has {spec.gpus_each} GPUs of one node. It waits until as "
        "many are idle together; submit it with a process for each GPU to run on any (rule: split)"
    )
    if schedule.split.get(job.id) != why:
        schedule.split[job.id] = why
        fields = {"job": job.id, "policy": schedule.policy, "reason": why}
        state.out.append(Log("policy.splits-process", fields, "warning"))
        if not job.record.allocation:
            state.tell(job, "waiting", now_s, why)
            schedule.told[job.id] = "told"
    return False


# Jobs that may not start --------------------------------------------------------------------------


def _hide_too_large(schedule: Schedule, capacities: tuple[Capacity, ...]) -> bool:
    """Hide the jobs that no node, or not even all nodes, could ever hold. True: there is another
    limit than before."""
    largest = most_together(capacities)
    snapshot, moved = schedule.snapshot, largest != schedule.largest
    schedule.largest = largest
    looked = snapshot.waiting if moved else dict.fromkeys(snapshot.changed)
    large = [
        id for id in looked if id in snapshot.waiting and not schedule.holds(snapshot.record(id))
    ]
    if moved:
        fits = [
            id
            for id, record in snapshot.hidden.items()
            if schedule.holds(record)
            and record.spec.tenant not in schedule.closed
            and id not in schedule.gathering
        ]
        snapshot.unhide(fits)
    snapshot.hide(large)
    return moved


def most_together(capacities: tuple[Capacity, ...]) -> dict[Within, int]:
    """Return the most that one job can be given anywhere, on one node and in one rack."""
    node = max((each.number for each in capacities), default=0)
    racks = Counter[str]()
    for each in capacities:
        racks[each.rack] += each.number
    return {"": racks.total(), "node": node, "rack": max(racks.values(), default=0)}


def needs_aggregators(state: State, id: JobId) -> bool:
    """Tell whether admission counts aggregators for the job, and it has none yet."""
    record = state.jobs[id].record
    return record.cluster is None and (
        state.config.admission == "standalone" or gathers(record.spec)
    )


class _Holds:
    """The jobs that admission holds back (admission.py), in one look at a schedule."""

    def __init__(self, state: State, schedule: Schedule, now_s: float) -> None:
        self._state, self._schedule, self._now_s = state, schedule, now_s
        snapshot = schedule.snapshot
        self._before = {id for id in state.held if id in snapshot.jobs or id in snapshot.hidden}
        self._now: dict[JobId, Hold] = {}
        self._idle = not state.limited and schedule is state.slots

    def reopen(self) -> None:
        """Show the jobs of tenants that have room again."""
        schedule = self._schedule
        schedule.barrier = None
        self._gather()
        for tenant in sorted(schedule.closed):
            hidden = [
                id for id, record in schedule.snapshot.hidden.items()
                if record.spec.tenant == tenant
                and schedule.holds(record)
                and id not in schedule.gathering
            ]  # fmt: skip
            first = self._state.jobs[hidden[0]] if hidden else None
            why = held_back(self._state, first, self._now_s) if first is not None else None
            if first is not None and why is not None and why.cause == "tenant":
                self._note(first, why)
                continue
            del schedule.closed[tenant]
            schedule.snapshot.unhide(hidden)
        if schedule.closed:
            waiting = schedule.snapshot.waiting
            fresh = (id for id in dict.fromkeys(schedule.snapshot.changed) if id in waiting)
            schedule.snapshot.hide([id for id in fresh if waiting[id].tenant in schedule.closed])

    def blocked(self) -> bool:
        """Say whether nobody may start: the first that waits may not, and nobody overtakes it."""
        if self._idle or self._schedule is self._state.gpus:
            return False
        waiting = self._schedule.snapshot.waiting
        while (first := next(iter(waiting), None)) is not None:
            if not self.back(self._state.jobs[first]):
                return False
            if self._schedule.barrier is not None:
                return True
        return False

    def back(self, job: Job) -> bool:
        """Say whether the job may not start; its tenant's others, or all others, may not either."""
        # A stopping job that goes on after all has what was promised to it before.
        asked = not self._idle and job.record.state != "stopping"
        why = held_back(self._state, job, self._now_s) if asked else None
        if why is None:
            return False
        self._note(job, why)
        schedule = self._schedule
        if why.cause == "tenant":
            tenant = job.record.spec.tenant
            schedule.closed[tenant] = why
            of = [id for id, view in schedule.snapshot.waiting.items() if view.tenant == tenant]
            schedule.snapshot.hide(of)
        elif schedule is self._state.gpus:
            schedule.gathering[job.id] = why
            schedule.snapshot.hide([job.id])
            self._line_up()
        else:
            schedule.barrier = job.id
        return True

    def _gather(self) -> None:
        """Show the jobs that wait for aggregators, once there are enough for the first of them."""
        schedule, hidden = self._schedule, self._schedule.snapshot.hidden
        line = {id: why for id, why in schedule.gathering.items() if id in hidden}
        schedule.gathering = line
        first = self._state.jobs[next(iter(line))] if line else None
        why = held_back(self._state, first, self._now_s) if first is not None else None
        if first is not None and why is not None and why.cause == "aggregators":
            line[first.id] = why
            self._note(first, why)
            self._line_up()
            return
        schedule.gathering = {}
        schedule.snapshot.unhide(
            id
            for id in line
            if schedule.holds(hidden[id]) and hidden[id].spec.tenant not in schedule.closed
        )

    def _line_up(self) -> None:
        """Hide those that need aggregators too, or they would starve the first that waits for
        them. Jobs that need none pass."""
        schedule = self._schedule
        first = next(iter(schedule.gathering))
        behind = Hold(
            "aggregators",
            f"waits for aggregators beside its GPUs: job {first}, submitted earlier, waits for "
            "some too; runs after it, or cancel that one",
        )
        needing = [id for id in schedule.snapshot.waiting if needs_aggregators(self._state, id)]
        schedule.gathering |= dict.fromkeys(needing, behind)
        schedule.snapshot.hide(needing)

    def _note(self, job: Job, why: Hold) -> None:
        self._now[job.id] = why
        if job.id not in self._before:
            self._state.tell(job, "waiting", self._now_s, why.reason)

    def keep(self) -> None:
        for id in self._before:
            self._state.held.pop(id, None)
        self._state.held |= self._now


# Why jobs wait ------------------------------------------------------------------------------------


def room_of(state: State, now_s: float) -> Room:
    """The slots as they are, and who is the first that waits for some."""
    room = state.nodes.room(now_s)
    schedule = state.slots
    room.ahead = schedule.barrier or next(iter(schedule.snapshot.waiting), None)
    if room.ahead in state.held:
        room.ahead_for = state.held[room.ahead].cause
    return room


def waits_here(state: State, room: Room, job: Job) -> str:
    """Why a job that waits for slots is not started; empty: it is about to be."""
    wait = room.wait(job.record)
    if wait is not None and wait.cause not in ("slots", "turn"):
        return wait.reason
    if job.id in state.held:
        return state.held[job.id].reason
    tenant = job.record.spec.tenant
    if tenant in state.slots.closed:
        return f"waits until {named(tenant)}'s jobs, submitted earlier, have their part of the pool"
    return wait.reason if wait is not None else ""


def waits_for_gpus(state: State, now_s: float) -> dict[JobId, str]:
    """Why each job that waits for GPUs does: the rule, what it lacks, and who holds that."""
    schedule = state.gpus
    if schedule.failure:
        why = f"waits: the policy {schedule.policy} failed ({schedule.failure})"
        return dict.fromkeys((*schedule.snapshot.waiting, *schedule.snapshot.hidden), why)
    found = {}
    view = schedule.snapshot.shown(now_s)
    holders = sorted(
        (job for job in view.jobs.values() if job.allocation),
        key=lambda job: (-job.held_gpus, job.number),
    )
    by = ", ".join(f"{job.id} ({job.held_gpus})" for job in holders[:3])
    more = f" and {len(holders) - 3} more jobs" if len(holders) > 3 else ""
    for pending in schedule.scheduler.explain(view):
        held_by = f"; held by {by}{more}" if by and pending.rule != "size" else ""
        lacks = f"waits for {pending.resource}{held_by}"
        starts = _starts(pending.until_s - now_s)
        found[pending.job] = f"{lacks}: {pending.text} (rule: {pending.rule}{starts})"
    found |= {id: why for id, why in schedule.split.items() if id in schedule.snapshot.waiting}
    for id, record in schedule.snapshot.hidden.items():
        if not schedule.holds(record):
            within = record.spec.within
            where = {"": "all nodes together have", "node": "the largest node has",
                     "rack": "the largest rack has"}[within]  # fmt: skip
            found[id] = (
                f"waits for {number_of(units_min(record), 'GPU')}"
                f"{f' of one {within}' if within else ''}: {where} "
                f"{schedule.largest.get(within, 0)}; start a worker node with more, or submit the "
                "job with fewer"
            )
        else:
            tenant = record.spec.tenant
            hold = state.held.get(id) or schedule.gathering.get(id) or schedule.closed.get(tenant)
            found[id] = hold.reason if hold is not None else ""
    left_out = state.nodes.avoided(now_s)
    return {id: f"{why}; {left_out}" for id, why in found.items()} if left_out else found


def _starts(in_s: float) -> str:
    """Say when the policy starts a job by itself; inf: it waits for an arrival or an end."""
    if in_s == inf:
        return ""
    return f"; it starts in {max(0.0, in_s):.0f} s unless a job arrives, ends or fails before"


def _tell_waits(state: State, schedule: Schedule, ids: list[JobId], now_s: float) -> None:
    """Tell new jobs why they wait, and all for which the limit of size has another meaning; nobody
    with each slot or GPU that comes or goes."""
    snapshot, told = schedule.snapshot, schedule.told
    room = room_of(state, now_s)
    for id in ids:
        if id not in snapshot.waiting and id not in snapshot.hidden:
            told.pop(id, None)
            continue
        job = state.jobs[id]
        if schedule is state.gpus:
            told.setdefault(id, "")  # A policy explains all at once: at the next tick.
            continue
        cause = room.barrier(units_min(job.record), lies_anywhere(job.record.spec))
        if told.get(id) == cause:
            continue
        told[id] = cause
        why = waits_here(state, room, job)
        if why and id not in state.held:  # Held jobs were told already.
            state.tell(job, "waiting", now_s, why)


def _tell_waits_for_gpus(state: State, now_s: float) -> None:
    told = state.gpus.told
    untold = [id for id, cause in told.items() if not cause]
    if not untold:
        return
    reasons = waits_for_gpus(state, now_s)
    for id in untold:
        told[id] = "told"
        if id in reasons and id not in state.held:
            state.tell(state.jobs[id], "waiting", now_s, reasons[id])
