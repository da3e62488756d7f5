"""Build what a policy sees of the cluster, a `View`, from the master's records and heartbeats.

Pure. There is one snapshot of the process slots, for jobs without GPUs, and one of the GPUs. A
job's struct is made anew when its record changes, and then alone (`changed` names it), so that a
decision costs what changed and not what waits.

Three things a policy cannot know are kept from it. A job that no node could ever hold, or that
admission or its user holds back, is hidden: it neither starts nor blocks others. A running job that
may not be paused is hidden together with what it holds. A node that is silent has nothing free, and
as many GPUs as jobs still hold there.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

import msgspec

from slackwater.common.domains.models.goodput import GoodputProfile
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.gpus import NodeAllocation
from slackwater.schemas.job_states import HOLDING_STATES, TERMINAL_STATES, WAITING_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.services.master.gangs import asked_spec, slots_held
from slackwater.services.master.scheduling.shown import shown, size_bounds
from slackwater.services.master.scheduling.view import (
    Allocation,
    ClusterView,
    JobView,
    NodeView,
    View,
    racks_of,
)

Durations = Mapping[str, float]
"""Job -> seconds that it runs on the GPUs that it asks for. Only a simulation can tell."""
SKEWS_MAX: Final = 10_000
"""Models whose skew is remembered."""
NOT_REPORTED: Final = GoodputProfile()
"""The profile of a job whose agent has told nothing yet: it begins on one GPU, or its fewest."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The slots or GPUs of a node; none while it is silent."""

    node: NodeId
    number: int
    gpu_type: str = ""
    cores: float = inf
    memory_bytes: float = inf
    """Cores and main memory for jobs; inf: the node does not say."""
    rack: str = ""


@dataclass(slots=True)
class Snapshot:
    """Use: `show` every record that changes, `hide` what may not start, then `view`."""

    durations: Durations = field(default_factory=dict)
    jobs: dict[JobId, JobView] = field(default_factory=dict)
    waiting: dict[JobId, JobView] = field(default_factory=dict)
    """Jobs among `jobs` that wait, in the order of their submission."""
    hidden: dict[JobId, JobRecord] = field(default_factory=dict)
    """Jobs that wait, and are kept from the policy."""
    profiles: dict[JobId, GoodputProfile] = field(default_factory=dict)
    """Reports of jobs' agents, for policies that plan with them."""
    skews: dict[str, float] = field(default_factory=dict)
    """Model -> its skew, as the last job that trained it registered it: a job that waits has not
    registered yet."""
    changed: list[JobId] = field(default_factory=list)
    """Since the last view."""
    _profiled: list[JobId] = field(default_factory=list)
    """Jobs that reported since the last view."""
    _records: dict[JobId, JobRecord] = field(default_factory=dict)
    _numbers: dict[JobId, int] = field(default_factory=dict)
    _next: int = 0
    _held: Counter[NodeId] = field(default_factory=Counter)
    """Slots or GPUs by node that the jobs of `jobs` hold, or are about to hold."""
    _kept: Counter[NodeId] = field(default_factory=Counter)
    """Slots or GPUs by node of jobs that may not be paused."""
    _capacities: tuple[Capacity, ...] = ()
    _cluster: ClusterView = field(default_factory=lambda: ClusterView((), 0))
    _index: dict[NodeId, int] = field(default_factory=dict)
    _all: bool = True
    """Places of nodes changed: the next view compares everything."""

    def show(self, record: JobRecord) -> None:
        """Take a record that changed."""
        id = JobId(record.spec.id)
        self._learn_skew(record)
        before = self._records.get(id)
        if before is not None and self._alike(before, record):
            self._records[id] = record
            if before.begun_s != record.begun_s and id in self.jobs:
                self._begun(id, record)
            if before.reallocation_s != record.reallocation_s and id in self.jobs:
                self._measured(id, record)
            return
        self._forget(id)
        over = record.state in TERMINAL_STATES
        kept_back = (record.held or record.waits_for) and not shown_allocation(record)
        if over or kept_back or not record.spec.program:
            self.hidden.pop(id, None)
            if over:
                self._numbers.pop(id, None)
                self.profiles.pop(id, None)
        elif id in self.hidden and record.state in WAITING_STATES:
            self.hidden[id] = record
        else:
            self.hidden.pop(id, None)
            last = next(reversed(self.waiting.values()), None)
            self._remember(id, record)
            if last is not None and last.number > self._numbers[id]:  # It was paused or held back.
                self._sort_waiting()

    def _begun(self, id: JobId, record: JobRecord) -> None:
        """Show since when the job works. For a policy that is not a change: it counted on that."""
        ready_s = record.begun_s or record.since_s
        self.jobs[id] = msgspec.structs.replace(self.jobs[id], ready_s=ready_s)

    def _measured(self, id: JobId, record: JobRecord) -> None:
        """Show what a re-allocation costs the job, from the next view on, and ask no policy."""
        restart_s = record.reallocation_s or None
        self.jobs[id] = msgspec.structs.replace(self.jobs[id], restart_s=restart_s)
        self._profiled.append(id)

    def _learn_skew(self, record: JobRecord) -> None:
        model = record.spec.model
        if not model or not record.skew or self.skews.get(model) == record.skew:
            return
        if len(self.skews) >= SKEWS_MAX and model not in self.skews:
            del self.skews[next(iter(self.skews))]
        self.skews[model] = record.skew
        for id, seen in self.waiting.items():
            if seen.model == model and not self._records[id].skew:
                view = msgspec.structs.replace(seen, skew=record.skew)
                self.jobs[id] = self.waiting[id] = view
                self.changed.append(id)

    def record(self, id: JobId) -> JobRecord:
        """Return the record of a job that is shown."""
        return self._records[id]

    def preview(self, record: JobRecord) -> JobView:
        """Show a job that is not stored yet, as a policy would see it."""
        return self._job(JobId(record.spec.id), record)

    def hide(self, ids: Iterable[JobId]) -> None:
        for id in list(ids):
            record = self._records[id]
            self._forget(id)
            self.hidden[id] = record

    def unhide(self, ids: Iterable[JobId]) -> None:
        for id in ids:
            self._remember(id, self.hidden.pop(id))
        self._sort_waiting()

    def touch(self, id: JobId) -> None:
        """Show the job once more: something of a decision about it was not carried out."""
        self.changed.append(id)

    def profiled(self, id: JobId, profile: GoodputProfile) -> None:
        """Show what the job's agent reported, from the next view on. No policy is asked because of
        it: a policy that plans with reports names its rounds itself."""
        self.profiles[id] = profile
        if id in self.jobs:
            self.jobs[id] = seen = msgspec.structs.replace(self.jobs[id], profile=profile)
            if id in self.waiting:
                self.waiting[id] = seen
            self._profiled.append(id)

    def view(self, capacities: tuple[Capacity, ...], now_s: float) -> View:
        """`capacities`: of each node that is known, by node id; 0 of those that are silent."""
        self._see(capacities)
        changed = None if self._all else [*self.changed, *self._profiled]
        self._all, self.changed, self._profiled = False, [], []
        return self._view(now_s, changed)

    def shown(self, now_s: float) -> View:
        """Return the last view with what was carried out since."""
        return self._view(now_s, None)

    def names(self, allocation: Allocation) -> NodeAllocation:
        """Nodes by name instead of by place."""
        nodes = self._cluster.nodes
        return tuple((nodes[index].id, number) for index, number in allocation)

    # One job --------------------------------------------------------------------------------------

    def _remember(self, id: JobId, record: JobRecord) -> None:
        self._records[id] = record
        if id not in self._numbers:
            self._numbers[id] = self._next
            self._next += 1
        self.changed.append(id)
        if not record.spec.preemptible and record.state in HOLDING_STATES:
            self._kept.update(dict(record.allocation))
            return
        self._held.update(dict(shown_allocation(record)))
        view = self._job(id, record)
        self.jobs[id] = view
        if record.state in WAITING_STATES:
            self.waiting[id] = view

    def _sort_waiting(self) -> None:
        self.waiting = dict(sorted(self.waiting.items(), key=lambda each: each[1].number))

    def _forget(self, id: JobId) -> None:
        record = self._records.pop(id, None)
        if record is None:
            return
        self.changed.append(id)
        if self.jobs.pop(id, None) is None:
            self._kept.subtract(dict(record.allocation))
        else:
            self.waiting.pop(id, None)
            self._held.subtract(dict(shown_allocation(record)))

    def _job(self, id: JobId, record: JobRecord) -> JobView:
        spec, allocation = asked_spec(record), shown_allocation(record)
        index = self._index
        placed = tuple(sorted((index[n], c) for n, c in allocation)) if self._knows(record) else ()
        least, most = size_bounds(spec, sum(number for _, number in allocation))
        started = record.started_s if record.run_s or allocation else inf
        duration_s = self.durations.get(spec.id, inf)
        return msgspec.structs.replace(
            shown(
                spec,
                self._numbers.get(id, self._next),
                record.submitted_s,
                skew=record.skew or self.skews.get(spec.model, 0.0),
                restart_s=record.reallocation_s or None,
            ),
            gpus_min=least,
            gpus_max=most,
            allocation=placed,
            since_s=record.since_s or record.submitted_s,
            attained_gpu_s_then=record.gpu_s,
            run_s_then=record.run_s,
            first_start_s=started,
            restarts=record.reallocations,
            remaining_s_then=max(0.0, duration_s - record.worked_s),
            ready_s=record.begun_s or record.since_s,
            speed=1.0 if spec.id in self.durations else 0.0,
            profile=self.profiles.get(id, NOT_REPORTED),
        )

    def _alike(self, before: JobRecord, after: JobRecord) -> bool:
        """Tell whether a policy sees no difference: a start that is confirmed, say."""
        return _seen_of(before) == _seen_of(after)

    def _knows(self, record: JobRecord) -> bool:
        return all(node in self._index for node, _ in shown_allocation(record))

    # The cluster ----------------------------------------------------------------------------------

    def _see(self, capacities: tuple[Capacity, ...]) -> None:
        known = {each.node for each in capacities}
        lost = {node for node, count in self._held.items() if count and node not in known}
        kind = capacities[0].gpu_type if capacities else ""
        unheard = (Capacity(node, 0, kind) for node in lost)  # By a master that just began.
        nodes = sorted((*capacities, *unheard), key=lambda c: c.node)
        now = tuple(map(self._seen, nodes))
        if now == self._capacities:
            return
        self._capacities = now
        index = {each.node: place for place, each in enumerate(now)}
        views = tuple(
            NodeView(n, c.node, c.number, c.gpu_type, c.cores, c.memory_bytes, c.rack)
            for n, c in enumerate(now)
        )
        self._cluster = ClusterView(
            nodes=views,
            gpus=sum(each.number for each in now),
            gpu_types=tuple(sorted({each.gpu_type for each in now if each.number})) or ("",),
            node_gpus_max=max((each.number for each in now), default=0),
            racks=racks_of(views),
        )
        if index != self._index:
            self._index = index
            self._all = True
            for id in self.jobs:
                self.jobs[id] = self._job(id, self._records[id])
            self.waiting = {id: self.jobs[id] for id in self.waiting}

    def _seen(self, told: Capacity) -> Capacity:
        """Leave out what jobs hold that no policy moves; what others hold is there in any case."""
        number = max(told.number - self._kept[told.node], self._held[told.node])
        return told if number == told.number else replace(told, number=number)

    def _view(self, now_s: float, changed: list[JobId] | None) -> View:
        free = [each.number - self._held[each.node] for each in self._capacities]
        return View(now_s, self._cluster, self.jobs, free, changed)


def _seen_of(record: JobRecord) -> tuple[object, ...]:
    """Return the part of a record that a policy sees, and whether it sees it."""
    return (
        record.spec, shown_allocation(record), record.state in TERMINAL_STATES,
        record.state in WAITING_STATES, record.state in HOLDING_STATES, record.since_s,
        record.gpu_s, record.run_s, record.submitted_s, record.reallocations, record.skew,
        record.held, record.workers, bool(record.waits_for),
    )  # fmt: skip


def shown_allocation(record: JobRecord) -> NodeAllocation:
    """Say what the job holds, or is about to hold; of a job on slots, for ranks that live."""
    if record.state == "stopping":
        return record.planned
    if record.state not in HOLDING_STATES:
        return ()
    if record.spec.gpus:
        return record.allocation
    return tuple((node, count) for node, count in slots_held(record).items() if count)
