"""Baselines that Harmony is compared with (Lee, dissertation, section 4.4.1).

`isolated`          every job on machines of its own, as many as it asks for, by submission
`naive-colocation`  the same sets of machines with up to `ways` jobs on each, joined in order of
                    submission wherever the fewest jobs are, and nobody orders their subtasks. The
                    paper tries every combination and reports the best and the worst; this is one
                    of them, and its `stride` gives others. `ordered`: the same sets, in which jobs
                    take turns (section 4.4.4: subtasks alone)
"""

from math import inf
from typing import Annotated, Any, Final

import msgspec

from slackwater.common.base.words import number_of
from slackwater.common.domains.models.group import NAIVE
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.placement import Placer
from slackwater.services.master.scheduling.policies.sequences import Fifo
from slackwater.services.master.scheduling.registry import Count, register
from slackwater.services.master.scheduling.rules import Rule
from slackwater.services.master.scheduling.view import (
    Allocation,
    JobView,
    Pending,
    Plan,
    View,
)


@register("isolated")
class Isolated(Fifo):
    """First come, first served; the paper's DoP is what a job asks for."""


ORDERED: Final = "ordered-"
"""Labels of naive sets in which jobs take turns start so."""
Ways = Annotated[int, msgspec.Meta(ge=1, le=16)]


class Host(msgspec.Struct):
    """A set of machines and the jobs on it."""

    label: str
    allocation: Allocation
    members: int


class Labels(msgspec.Struct, frozen=True):
    """The number of the next label: two sets of machines never had the same."""

    next_label: int


@register("naive-colocation")
class NaiveColocation:
    job_model = "subtasks"
    honours = frozenset[Rule]({"priorities", "min_run_s"})

    def __init__(self, ways: Ways = 2, stride: Count = 1, ordered: bool = False) -> None:
        self.ways, self.stride = ways, stride
        self._label = ORDERED if ordered else NAIVE

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        next_label: int = memory if memory is not None else 0
        hosts: dict[str, Host] = {}
        for job in view.jobs.values():
            if job.allocation:
                host = hosts.setdefault(job.group, Host(job.group, job.allocation, 0))
                host.members += 1
                next_label = max(next_label, int(job.group.removeprefix(self._label)) + 1)
        placer = Placer(view)
        room = sum(view.free)
        allocations: dict[JobId, Allocation] = {}
        labels: dict[JobId, str] = {}
        for job in self._order(view):
            if job.gpus <= room:
                room -= job.gpus
                host = Host(f"{self._label}{next_label}", placer.place(job.gpus), 0)
                hosts[host.label] = host
                next_label += 1
            else:
                fitting = [
                    h for h in hosts.values()
                    if h.members < self.ways and sum(n for _, n in h.allocation) == job.gpus
                ]  # fmt: skip
                if not fitting:
                    continue
                host = min(fitting, key=lambda h: (h.members, h.label))
            host.members += 1
            allocations[job.id], labels[job.id] = host.allocation, host.label
        return Plan(allocations, labels), next_label

    def _order(self, view: View) -> list[JobView]:
        """Return the waiting jobs by submission; with a stride, every n-th first, for another
        combination."""
        waiting = [job for job in view.jobs.values() if not job.allocation]
        return sorted(waiting, key=lambda j: (-j.priority, j.number % self.stride, j.number))

    facts = Labels

    def durable(self, memory: int) -> Labels:
        return Labels(memory)

    def restored(self, facts: Labels) -> int:
        return facts.next_label

    def explain(self, view: View, memory: Any) -> list[Pending]:
        free = sum(view.free)
        return [
            Pending(
                job.id, "capacity", f"{number_of(job.gpus, 'GPU')}, {free} idle", inf,
                f"every set of {number_of(job.gpus, 'machine')} has "
                f"{number_of(self.ways, 'job')} on it",
            )
            for job in self._order(view)
        ]  # fmt: skip
