"""The paper's placement: profile on temporary aggregators, then share by the assignment scheme.

AutoPS sections 3.3.1 and 3.3.2. A new job gets as many aggregators as it asked servers for, its
buckets round robin, and is profiled there. Then every bucket is assigned to the shared ones. A job
that is alone in its cluster keeps what it asked for (figure 10), and no job ever needs more new
aggregators than it asked servers for: where the scheme would, or would use that many and no shared
one, it gets its standalone arrangement, which is known to lose nothing (best fit fills the first of
them to the brim).
"""

from dataclasses import replace

from slackwater.schemas.base import AggregatorId, JobId
from slackwater.services.controller.policies.scheme import Packing, loss, place_tasks
from slackwater.services.controller.policies.view import (
    NEW,
    ClusterView,
    Defaults,
    Expected,
    JobView,
    Memory,
    Order,
    Plan,
    PlanRefused,
    TaskIntervals,
    residents,
    validate,
)


class Cyclic(Defaults):
    """Registered as `cyclic`. Another scheme for shared aggregators overrides `place`."""

    adapts = True
    order: Order = "cyclic"

    def __init__(self) -> None:
        self._last: tuple[ClusterView, Packing, dict[JobId, float]] | None = None

    def place(self, view: ClusterView, job: JobView) -> tuple[dict[int, str], int]:
        """Every open bucket of a profiled job -> its aggregator, and how many of them are new."""
        return place_tasks(view, job)

    def assign(self, view: ClusterView, job: JobView, memory: Memory) -> tuple[Plan, Memory]:
        return self._assign(view, job), memory

    def free(self, view: ClusterView) -> dict[AggregatorId, float]:
        """F_n / C_n; all that may be used of an aggregator on which no profiled job is."""
        packing, found = Packing(view), {}
        for aggregator in view.aggregators:
            free_s, cycle_s = packing.free_s(aggregator.id)
            found[aggregator.id] = free_s / cycle_s if cycle_s else aggregator.usable
        return found

    def explains(self, view: ClusterView, job: JobId) -> Expected | None:
        """1 - D_j / d_j, with the job's own slots. Where a cycle stretches it beyond its limit, the
        cycle's longest job has ended, and what is left fits the others worse: of those with whom,
        or without whom, all the others keep their limits, that one leaves who has least there;
        else the job itself."""
        packing, durations_s = self._packing(view)
        if job not in durations_s:
            return None
        iteration_s, limit = packing.standalone_s(job), packing.limit(job)
        where = tuple(
            each.id
            for each in view.aggregators
            if packing.uses(job, each.id)
            and loss(iteration_s, packing.lasting_s(job, each.id)) > limit
        )
        lost = max(0.0, 1.0 - iteration_s / durations_s[job])
        if not where:
            return Expected(lost)
        found = [packing.leavers(id) for id in where]
        there_s = {id: sum(each[id] for each in found) for id in set.intersection(*map(set, found))}
        leaving = min(there_s, key=lambda id: (there_s[id], id), default=job)
        return Expected(lost, where, leaving)

    def plans(self, view: ClusterView) -> dict[AggregatorId, TaskIntervals]:
        """Return each aggregator's cycle, with the d_j of each job there. A job whose aggregators
        are all away is not stretched."""
        packing, durations_s = self._packing(view)
        every_s = {job.id: durations_s.get(job.id, job.iteration_s) for job in view.jobs}
        return {
            id: TaskIntervals({job: every_s[job] for job in jobs}, packing.free_s(id)[1])
            for id, jobs in residents(view).items()
        }

    def _packing(self, view: ClusterView) -> tuple[Packing, dict[JobId, float]]:
        """Compute the view's packing once: every job of a view is asked for in turn."""
        if self._last is None or self._last[0] is not view:
            packing = Packing(view)
            self._last = (view, packing, packing.durations_s())
        return self._last[1], self._last[2]

    def _assign(self, view: ClusterView, job: JobView) -> Plan:
        if view.forced:
            return _spread_least_loaded(view, job, self.free(replace(view, jobs=(*view.jobs, job))))
        if not job.task_cpu_s:
            return _keep(view, job, temporary=True) or round_robin(view, job, temporary=True)
        if job.standalone:
            return _grow(view, job)
        if not view.pack_alone and not any(other.id != job.id for other in view.jobs):
            kept = _keep(view, job, temporary=False)
            if kept is not None:
                return kept
            if job.current and not any(job.current):
                return round_robin(view, job, temporary=False)
        placed, new = self.place(view, job)
        alone = all(home.startswith(NEW) for home in placed.values())
        if all(place is None for place in job.places) and (
            new > job.servers or (new == job.servers and alone)
        ):
            return round_robin(view, job, temporary=False)
        if new > view.new_max:
            return Plan(reason=f"{new} more aggregators are needed, {view.new_max} may be asked")
        plan = Plan(
            places=tuple(
                placed[bucket] if place is None else place
                for bucket, place in enumerate(job.places)
            ),
            new=new,
        )
        return plan if _holds(plan, view, job) else self._alone(view, job)

    def _alone(self, view: ClusterView, job: JobView) -> Plan:
        """Cycles count whole executions: a job that is stretched elsewhere to a little more than
        half a cycle counts one and runs almost two. Where that overfills, it does not share."""
        if any(place is not None for place in job.places) or view.new_max == 0:
            return Plan(reason="its tasks fit the cycles, but not the time of an aggregator")
        return round_robin(view, job, temporary=False)


def _holds(plan: Plan, view: ClusterView, job: JobView) -> bool:
    try:
        validate(plan, view, job)
    except PlanRefused:
        return False
    return True


def round_robin(view: ClusterView, job: JobView, *, temporary: bool) -> Plan:
    """The job's open buckets on as many new aggregators as it asked servers for: ps-lite's."""
    if job.servers > view.new_max:
        return Plan(reason=f"{job.servers} aggregators are needed, {view.new_max} may be asked")
    places: list[str] = []
    turn = 0
    for place in job.places:
        if place is not None:
            places.append(place)
            continue
        places.append(f"{NEW}{turn % job.servers}")
        turn += 1
    return Plan(places=tuple(places), new=min(job.servers, turn), temporary=temporary)


def _keep(view: ClusterView, job: JobView, *, temporary: bool) -> Plan | None:
    """A job alone in its cluster stays where it is; what was lost goes to one new aggregator."""
    if not any(job.current):
        return None
    lost = any(
        place is None and current is None
        for place, current in zip(job.places, job.current, strict=True)
    )
    if lost and view.new_max < 1:
        return None
    if any(current in job.excluded for current in job.current):
        return None
    places = tuple(
        place or current or f"{NEW}0"
        for place, current in zip(job.places, job.current, strict=True)
    )
    return Plan(places=places, new=1 if lost else 0, temporary=temporary)


def _grow(view: ClusterView, job: JobView) -> Plan:
    """Take as many aggregators as the job asked for, those that it has to itself among them."""
    used = {place for other in view.jobs if other.id != job.id for place in other.places}
    own = sorted({current for current in job.current if current is not None} - used)
    new = max(0, job.servers - len(own))
    if new > view.new_max:
        return Plan(reason=f"{new} more aggregators are needed, {view.new_max} may be asked")
    names = [*own, *(f"{NEW}{k}" for k in range(new))][: job.servers]
    return Plan(
        places=tuple(
            place or names[bucket % len(names)] for bucket, place in enumerate(job.places)
        ),
        new=new,
    )


def _spread_least_loaded(view: ClusterView, job: JobView, free: dict[AggregatorId, float]) -> Plan:
    """Put each open bucket on the least utilised aggregator: none fits, and none can be added."""
    if not view.aggregators:
        return Plan(reason="the cluster has no aggregator that is alive")
    welcome = [a for a in view.aggregators if a.id not in job.excluded] or view.aggregators
    load = {id: 1.0 - free[id] for id in sorted(aggregator.id for aggregator in welcome)}
    iteration_s = job.iteration_s or 1.0
    shares = {aggregator.id: aggregator.cpu_share for aggregator in view.aggregators}
    places: list[AggregatorId] = []
    for bucket, place in enumerate(job.places):
        if place is None:
            place = min(load, key=lambda name: (load[name], name))
            # An unprofiled bucket counts as an equal part of one server.
            cpu_s = job.task_cpu_s[bucket] if job.task_cpu_s else shares[place] / len(job.places)
            load[place] += cpu_s / shares[place] / iteration_s
        places.append(place)
    return Plan(places=tuple(places))
