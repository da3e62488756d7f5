"""Tiresias as Pollux's authors ran it: the baseline behind their published numbers.

One limit of 16 GPU-hours, rounds of 60 s, and two plain lists. A job enters the first list at its
end, moves to the end of the second when its service reaches the limit, and stays where it is
otherwise. At a round in which a job came, left or was demoted, both lists are walked in order and
whoever fits runs: a job earlier in a list preempts a later one of the same list. New allocations
take the emptiest machines first.
"""

from math import floor, inf
from typing import Any

import msgspec

from slackwater.common.base.words import number_of
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.placement import Placer
from slackwater.services.master.scheduling.registry import AtLeast0, Period, register
from slackwater.services.master.scheduling.rules import Rule
from slackwater.services.master.scheduling.view import (
    NOTHING,
    Allocation,
    Pending,
    Plan,
    View,
)


class Lists(msgspec.Struct):
    first: list[JobId] = msgspec.field(default_factory=list)
    second: list[JobId] = msgspec.field(default_factory=list)


@register("tiresias-artifact")
class TiresiasArtifact:
    """Tiresias in rounds with two lists, as Pollux's authors ran it."""

    divisible = True
    honours = frozenset[Rule]({"min_run_s"})

    def __init__(self, limit_gpu_s: AtLeast0 = 57600, round_s: Period = 60) -> None:
        self.limit_gpu_s, self.round_s = limit_gpu_s, round_s

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        lists: Lists = memory if memory is not None else Lists()
        tick_s = floor(view.now_s / self.round_s) * self.round_s
        next_s = tick_s + self.round_s if view.jobs else inf
        if tick_s != view.now_s:
            return Plan(next_decision_s=next_s), lists
        lists, moved = self._update(view, lists)
        lost = any(not job.allocation for job in view.jobs.values())
        if not moved and not lost:
            return Plan(next_decision_s=next_s), lists
        return Plan(self._walk(view, lists), next_decision_s=next_s), lists

    def _update(self, view: View, lists: Lists) -> tuple[Lists, bool]:
        known = {*lists.first, *lists.second}
        new = sorted((j for j in view.jobs.values() if j.id not in known), key=lambda j: j.number)
        first = [i for i in lists.first if i in view.jobs] + [job.id for job in new]
        second = [i for i in lists.second if i in view.jobs]
        demoted = [
            i
            for i in first
            if view.jobs[i].allocation
            and view.jobs[i].attained_gpu_s(view.now_s) >= self.limit_gpu_s
        ]
        moved = bool(new or demoted) or len(first) + len(second) < len(known) + len(new)
        gone = set(demoted)
        return Lists([i for i in first if i not in gone], second + demoted), moved

    def _walk(self, view: View, lists: Lists) -> dict[JobId, Allocation]:
        kept = {i for i, job in view.jobs.items() if view.rules.protects(job, view.now_s)}
        room = view.cluster.gpus - sum(view.jobs[job_id].held_gpus for job_id in kept)
        stops, starts = [], []
        for job_id in (*lists.first, *lists.second):
            if job_id in kept:
                continue
            job = view.jobs[job_id]
            gpus = job.held_gpus or job.gpus
            if gpus <= room:
                room -= gpus
                if not job.allocation:
                    starts.append(job_id)
            elif job.allocation:
                stops.append(job_id)
        placer = Placer(view, stops)
        changes: dict[JobId, Allocation] = dict.fromkeys(stops, NOTHING)
        for job_id in starts:
            allocation = placer.place(view.jobs[job_id].gpus, mode="emptiest")
            if allocation:
                changes[job_id] = allocation
        return changes

    facts = Lists

    def durable(self, memory: Lists) -> Lists:
        return memory

    def restored(self, facts: Lists) -> Lists:
        return facts

    def explain(self, view: View, memory: Any) -> list[Pending]:
        tick_s = floor(view.now_s / self.round_s) * self.round_s + self.round_s
        free = sum(view.free)
        return [
            Pending(
                job.id,
                "round" if job.gpus <= free else "order",
                f"{number_of(job.gpus, 'GPU')}, {free} idle",
                tick_s,
                "decisions are taken at rounds, in the order of the two lists",
            )
            for job in sorted(view.jobs.values(), key=lambda job: job.number)
            if not job.allocation
        ]
