"""Elastic jobs give slots to a waiting job of higher priority, and get them back after it (Qiao
2021, section 4.5.2).

Pure. The first job that waits for slots is looked at, as no other may overtake it. The jobs that
give are of lower priority, the lowest and newest first, and keep the workers that they must have.
A job leaves slots as it does when a person scales it: its processes end once the others have taken
over their work. It asks for them back before any job that waits with a priority no higher than its
own. Nothing is remembered for this: its record says how many workers it is to have.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slackwater.common.base.words import number_of
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.gpus import NodeAllocation, held
from slackwater.services.master.gangs import asked, processes
from slackwater.services.master.jobs import Job
from slackwater.services.master.scaling import begin, lives, pursue, trimmed
from slackwater.services.master.state import State


class Giver(NamedTuple):
    """A job that may give slots."""

    id: JobId
    allocation: NodeAllocation
    least: int
    """Workers that it must keep."""


def givings(
    slots: int, free: Mapping[NodeId, int], givers: Sequence[Giver]
) -> dict[JobId, int] | None:
    """Return what is given so that some node has so many free slots: job -> the workers that it
    keeps. None: there can be no such node. `givers`: who gives first comes first.

    Where several nodes would do, it is the one for which fewest slots are given: the last slots of
    a job are given first, so some may be given on other nodes.
    """
    found = [
        given
        for node in sorted(free)
        if (given := _givings_on(node, slots - free[node], givers)) is not None
    ]
    has = {giver.id: held(giver.allocation) for giver in givers}
    if not found:
        return None
    least = min(found, key=lambda given: sum(has[id] - kept for id, kept in given.items()))
    for id in tuple(least):  # It may give less where that leaves room on another node.
        while (kept := least.get(id, has[id])) < has[id]:
            fewer = least | {id: kept + 1}
            if _room(free, givers, fewer) < slots:
                break
            least = fewer
    return {id: kept for id, kept in least.items() if kept < has[id]}


def _room(free: Mapping[NodeId, int], givers: Sequence[Giver], given: Mapping[JobId, int]) -> int:
    """Return the free slots of the node that has most of them then."""
    left = dict(free)
    for giver in givers:
        kept = dict(trimmed(giver.allocation, given.get(giver.id, held(giver.allocation))))
        for node, number in giver.allocation:
            if node in left:
                left[node] += number - kept.get(node, 0)
    return max(left.values())


def _givings_on(node: NodeId, needed: int, givers: Sequence[Giver]) -> dict[JobId, int] | None:
    given: dict[JobId, int] = {}
    for giver in givers:
        has, here = held(giver.allocation), dict(giver.allocation).get(node, 0)
        for kept in range(has - 1, giver.least - 1, -1):
            if needed <= 0:
                break
            left = dict(trimmed(giver.allocation, kept)).get(node, 0)
            if left < here:
                needed, here = needed - (here - left), left
                given[giver.id] = kept
    return given if needed <= 0 else None


def give_way(state: State, now_s: float) -> None:
    """Let jobs give slots to the first that waits, if that lets it start."""
    waits = state.slots.first_waiting if state.elastic else None
    if waits is None:
        return
    lower = [job for job in state.elastic.values() if job.record.spec.priority < waits.priority]
    if any(job.record.resizing in ("ordered", "leaving") for job in lower):
        return  # The slots that they leave may be enough.
    givers = sorted(
        (job for job in lower if lives(job)),
        key=lambda job: (job.record.spec.priority, -job.record.started_s, job.id),
    )
    given = givings(
        asked(state.jobs[waits.id].record),
        state.nodes.room(now_s).free,
        [Giver(job.id, job.record.allocation, job.record.spec.workers_bounds[0]) for job in givers],
    )
    for id, kept in (given or {}).items():
        _give(state, state.jobs[id], kept, waits.id, now_s)


def _give(state: State, job: Job, kept: int, to: JobId, now_s: float) -> None:
    record = job.record
    slots = number_of(processes(record) - kept, "slot")
    if not record.workers:
        state.change(job, now_s, workers=asked(record))  # It gets so many back.
    begin(state, job, trimmed(job.record.allocation, kept), now_s)
    priority = state.jobs[to].record.spec.priority
    state.tell(job, "gives-way", now_s, f"{slots} for job {to}, whose priority is {priority}")


def take_back(state: State, now_s: float) -> None:
    """Let jobs have what they lack, before jobs that wait."""
    for job in list(state.elastic.values()):
        pursue(state, job, now_s)
