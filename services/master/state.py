"""The state of the master: its jobs' records, the pool, the clusters' reports, the worker nodes.

Only the records are durable (a job's here, an aggregator's in pool.py); everything else is learned
again after a restart. `State` collects the effects of a step; the modules beside this one are
functions on it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappush
from math import inf
from typing import Any, Final

import msgspec

from slackwater.common.base.effects import Effect, Persist, Publish, Reply, Request
from slackwater.common.base.limits import JOBS_MAX
from slackwater.schemas import subjects
from slackwater.schemas.base import TOO_MANY, ClusterId, JobId, Message, NodeId, Refused
from slackwater.schemas.cluster import TenantUse
from slackwater.schemas.gpus import GpuId
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_states import HOLDING_STATES, TERMINAL_STATES, WAITING_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.scheduling import PolicyRecord
from slackwater.schemas.tenants import TenantInfo
from slackwater.services.master.admission import (
    DEFAULT,
    Capacity,
    Hold,
    aggregates,
    gathers,
    hold,
    limits_of,
    named,
    promised,
    refusal,
)
from slackwater.services.master.clusters import ClusterRoom, Clusters
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.ended import Ended
from slackwater.services.master.gangs import slots_held, vacating
from slackwater.services.master.jobs import Job
from slackwater.services.master.keys import OF_PROCESSES, Order, OrderKey, OrphanKey
from slackwater.services.master.nodes import Nodes
from slackwater.services.master.pool import Pool
from slackwater.services.master.schedule import Schedule
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.scheduler import Scheduler
from slackwater.services.master.snapshot import Durations, Snapshot
from slackwater.services.master.usage import Sharers, Usage

JOBS_BUCKET = "jobs"
ASK_BUDGET_S = 10.0
"""The shell retries this long; the tick asks again after that."""
RETRY_S = 0.5
TENANT_ROOMS: Final = 9
"""A tenant's jobs that wait are at most so many times as many as there is room for in the queue:
whoever comes first cannot fill it, and two of them have nearly the same (dynamic thresholds, as in
switches with a shared buffer)."""


@dataclass(slots=True)
class Turning:
    """Jobs that take turns on nodes (regrouping.py)."""

    jobs: dict[JobId, Job] = field(default_factory=dict)
    """The ones that hold slots of nodes."""
    moves: dict[JobId, tuple[tuple[NodeId, ...], float]] = field(default_factory=dict)
    """Job -> nodes at which it is to go on, once they have room; until when it waits for that."""
    look_s: float = 0.0
    """When it is looked at again who shares nodes with whom."""


class State:
    def __init__(
        self, config: MasterConfig, scheduler: Scheduler, durations: Durations | None = None
    ) -> None:
        """`scheduler`: of the GPUs."""
        self.config = config
        self.durations_known = durations is not None
        self.policy = PolicyRecord(policy=config.gpu_policy, settings=config.gpu_policy_settings)
        """The record of the GPUs' policy."""
        self.jobs: dict[JobId, Job] = {}
        self.pool = Pool(config.aggregators_max)
        self.pool.grows_to = config.autoscale_aggregators_max if config.autoscale_hook else 0
        self.clusters = Clusters(config.cluster_scaling_s)
        self.nodes = Nodes(config.node_silent_s)
        self.usage = Usage(config.usage_days)
        self.ended = Ended()
        self.sharers = Sharers()
        self.epoch = 0
        self.begun_s = 0.0
        """Since when this master listens."""
        self.now_s = 0.0
        """The instant of the event that is being taken."""
        self.orphans: dict[OrphanKey, float] = {}
        """Unknown jobs that nodes run (orphans.py) -> since when; when stopped last."""
        self.unreadable: frozenset[str] = frozenset()
        """Jobs whose records are damaged: their ids are not free."""
        self.out: list[Effect] = []
        # Indices of `jobs`, so that no step is longer the more of them there are.
        self.slots = Schedule("slots", Scheduler(make("fifo", {"consolidate": "require"})))
        """Gives slots to jobs without GPUs: none overtakes the first that some node could hold."""
        self.gpus = Schedule("gpus", scheduler, Snapshot(durations or {}))
        self.elastic: dict[JobId, Job] = {}
        """Jobs without GPUs that run, and whose number of workers may change."""
        self.turning = Turning()
        self.starting: dict[JobId, Job] = {}
        """Jobs that may wait until others have left their GPUs."""
        self.holders: dict[GpuId, dict[JobId, Job]] = {}
        """GPU -> the jobs whose processes run on it, or are about to."""
        self.limited = config.admission != "open" or any(
            tenant.cpu_fraction < 1.0 or tenant.aggregators for tenant in config.tenants.values()
        )
        """Admission may hold jobs back."""
        self.held: dict[JobId, Hold] = {}
        """Queued or registered jobs that may not run yet, as of the last look at them."""
        self.pending: Counter[str] = Counter()
        """Jobs that wait to be started, by tenant."""
        self.reports_refused: Counter[str] = Counter()
        """Reports of goodput that were not believed, by cause."""
        self.admitted: dict[str, dict[JobId, Job]] = {}
        """Tenant -> its jobs that were started, or sent to a cluster, and have not ended."""
        self.live = 0
        """Jobs that have not ended."""
        self.placed: dict[JobId, Job] = {}
        """Jobs that have a cluster."""
        self.unsettled: dict[JobId, Job] = {}
        """Jobs that have not ended, or of whose end somebody does not know."""
        self.settled: list[tuple[float, JobId]] = []
        """A heap of the others, by (end, id)."""

    def know(self, job: Job) -> None:
        """A job that is new, or was found in the records."""
        self.jobs[job.id] = job
        self._index(job, None, job.record)

    def shown_job(self, id: str) -> Job | None:
        """Return the job if people are shown it: None where it is unknown or was deleted."""
        job = self.jobs.get(JobId(id))
        return None if job is None or job.record.deleted else job

    def unsettle(self, job: Job) -> None:
        """A settled job begins anew."""
        self.settled.remove((job.record.finished_s, job.id))
        heapify(self.settled)

    def no_room(self, spec: JobSpec) -> Refused | None:
        """Say why no further job is taken; None: one is."""
        if self.live >= JOBS_MAX:
            reason = f"{JOBS_MAX} jobs are pending or running already"
            return Refused(reason=reason, retry_after_s=5.0)
        if refused := self.ended.no_room(self.now_s):
            return refused
        config, tenant = self.config, limits_of(self.config.tenants, spec.tenant)
        pending = self.pending[spec.tenant]
        if pending > TENANT_ROOMS * (JOBS_MAX - self.live):
            left = f"and the {JOBS_MAX - self.live} places that are left are for others"
            reason = f"{pending} jobs of {named(spec.tenant)} wait, {left}; submit it when some run"
            return Refused(reason=reason, retry_after_s=5.0, code=TOO_MANY)
        return refusal(spec, pending, tenant, config.admission, config.aggregators_max)

    def reply(self, token: int, message: Message) -> None:
        self.out.append(Reply(token, message))

    def change(self, job: Job, now_s: float, fact: str = "", **changes: Any) -> None:
        """Store the changed record, then tell `fact`. Raises InvalidTransition for a state that
        cannot follow the one before."""
        job.move(changes.get("state", job.record.state), fact or "it is stored")
        record = msgspec.structs.replace(job.record, epoch=self.epoch, **changes)
        self._index(job, job.record, record)
        job.record = record
        self.out.append(Persist(JOBS_BUCKET, record.spec.id, record))
        if fact:
            self.tell(job, fact, now_s)

    def _index(self, job: Job, old: JobRecord | None, new: JobRecord) -> None:
        id, was_live = job.id, old is not None and old.state not in TERMINAL_STATES
        is_live = new.state not in TERMINAL_STATES
        self.live += is_live - was_live
        self._index_holds(job, old, new)
        self.pending[new.spec.tenant] += (new.state == "pending") - (
            old is not None and old.state == "pending"
        )
        if is_admitted(new):
            self.admitted.setdefault(new.spec.tenant, {})[id] = job
        elif old is not None and is_admitted(old):
            del self.admitted[new.spec.tenant][id]
        if not self.admitted.get(new.spec.tenant) and not self.pending[new.spec.tenant]:
            self.admitted.pop(new.spec.tenant, None)  # Forgets a tenant without live jobs.
            del self.pending[new.spec.tenant]
        if not is_live:
            self.held.pop(id, None)
        if is_live and new.cluster is not None:
            self.placed[id] = job
        else:
            self.placed.pop(id, None)
        if not new.released:
            self.unsettled[id] = job
        elif old is None or not old.released:
            self.unsettled.pop(id, None)
            heappush(self.settled, (new.finished_s, id))

    def _index_holds(self, job: Job, old: JobRecord | None, new: JobRecord) -> None:
        """Update what it holds of nodes, and what policies see of it."""
        if new.spec.gpus:
            for gpu in _gpus_held(old):
                del self.holders[gpu][job.id]
            for gpu in _gpus_held(new):
                self.holders.setdefault(gpu, {})[job.id] = job
            self.gpus.snapshot.show(new)
        else:
            self.nodes.taken.subtract(slots_held(old) if old is not None else {})
            self.nodes.taken.update(slots_held(new))
            self.slots.snapshot.show(new)
        if new.state == "running" and new.spec.elastic and not new.spec.gpus:
            self.elastic[job.id] = job
        else:
            self.elastic.pop(job.id, None)
        if new.spec.by_turns and new.state in HOLDING_STATES and new.allocation:
            self.turning.jobs[job.id] = job
        else:
            self.turning.jobs.pop(job.id, None)
        if new.state == "starting":
            self.starting[job.id] = job
        else:
            self.starting.pop(job.id, None)

    def indexes(self) -> dict[str, Any]:
        """Return what follows from the records, to compare it with what they say."""
        return {
            "live": self.live,
            "pending": +self.pending,
            "admitted": {tenant: set(jobs) for tenant, jobs in self.admitted.items() if jobs},
            "placed": set(self.placed),
            "unsettled": set(self.unsettled),
            "settled": sorted(e for e in self.settled if e[1] not in self.usage.forgetting),
            "elastic": set(self.elastic),
            "turning": set(self.turning.jobs),
            "starting": set(self.starting),
            "holders": {gpu: set(jobs) for gpu, jobs in self.holders.items() if jobs},
            "slots taken": +self.nodes.taken,
        }

    def check_invariants(self) -> None:
        """Raises AssertionError when an index is not what all records together say, or a GPU is
        given to two jobs neither of which is leaving it."""
        anew = State(self.config, self.gpus.scheduler)
        anew.usage = self.usage
        for id, job in self.jobs.items():
            assert job.id == id, f"job {job.id} is kept as {id}"
            anew.know(job)
        here, there = self.indexes(), anew.indexes()
        wrong = {name: (here[name], there[name]) for name in here if here[name] != there[name]}
        assert not wrong, f"by name, (the index, what the records say): {wrong}"
        for gpu, jobs in self.holders.items():
            staying = {id: str(j.story) for id, j in jobs.items() if not vacating(j.record)}
            assert len(staying) <= 1, f"GPU {gpu} is given to {staying}"
        stale = self.held.keys() - {id for id, job in self.jobs.items() if not job.ended}
        assert not stale, f"admission holds back {stale}, which have ended"
        for schedule in (self.slots, self.gpus):
            both = schedule.snapshot.waiting.keys() & schedule.snapshot.hidden.keys()
            assert not both, f"{both} are shown to the {schedule.name} policy, and hidden from it"
            for id in (*schedule.snapshot.waiting, *schedule.snapshot.hidden):
                job = self.jobs[id]
                kept = job.record.held or job.record.waits_for
                assert not kept, f"job {id} is held back, and waits for {schedule.name}"
                assert job.queued, f"job {id} waits for {schedule.name}; before: {job.story}"

    def tell(self, job: Job, fact: str, now_s: float, reason: str = "") -> None:
        record = job.record
        self.out.append(
            Publish(
                subjects.event("job", record.spec.id, fact),
                JobEvent(
                    job=JobId(record.spec.id),
                    fact=fact,
                    at_s=now_s,
                    cluster=record.cluster,
                    attempt=record.attempt,
                    allocation=record.planned if record.state == "stopping" else record.allocation,
                    reason=reason or record.reason,
                    detail=_detail(record, fact),
                ),
            )
        )

    def ask(self, job: Job, what: Order, subject: str, message: Message) -> None:
        """Order it unless it is on its way, or was confirmed."""
        if what in job.asked or what in job.told:
            return
        job.asked.add(what)
        key = OrderKey(JobId(job.record.spec.id), what)
        # Start, stop: in order, or a start that is repeated late would follow the stop.
        ordered = what.verb in OF_PROCESSES
        lane = f"{subject.rpartition('.')[0]}/{job.record.spec.id}" if ordered else ""
        self.out.append(
            Request(subject, message, key, lane=lane, budget_s=ASK_BUDGET_S, hear_refusals=True)
        )


def _gpus_held(record: JobRecord | None) -> Iterator[GpuId]:
    """GPUs on which a process of the job may be; one that two nodes say they have, once."""
    if record is not None and (record.state in HOLDING_STATES or not record.released):
        yield from dict.fromkeys(id for ids in record.gpu_ids.values() for id in ids)


def _detail(record: JobRecord, fact: str) -> dict[str, str]:
    """Say beside a fact on which node the job is, and, where a run of it begins, its size."""
    found = {"node": str(record.node)} if record.node else {}
    if fact == "pending":
        spec = record.spec
        found |= {"servers": str(spec.servers), "gpus": str(spec.gpus), "tenant": spec.tenant}
    return found


def is_admitted(record: JobRecord) -> bool:
    """Say whether a worker node was told to start the job, or a cluster to serve it."""
    if record.state in TERMINAL_STATES:
        return False
    return record.node is not None or record.cluster is not None


def held_back(state: State, job: Job, now_s: float) -> Hold | None:
    """Why the job may not run yet (admission.py); None: it may."""
    spec, config = job.record.spec, state.config
    tenant = limits_of(config.tenants, spec.tenant)
    gathering = gathers(spec) and job.record.cluster is None
    if not state.limited and not gathering:
        return None
    share = state.pool.share()
    counting = config.admission == "standalone" or gathering
    capacity = Capacity(
        free=_free(state, job.id, now_s) if counting else 0,
        pool_cpu=state.pool.alive * share,
        tenant_cpu=tenant_cpu(state, spec.tenant, job.id),
        tenant_aggregators=tenant_aggregators(state, spec.tenant, job.id),
        shared_cpu=_shared_cpu(state, job.id, now_s) if gathering else inf,
    )
    demand_cpu = state.clusters.demand_cpu(spec, share)
    return hold(spec, demand_cpu, capacity, tenant, config.admission)


def tenant_aggregators(state: State, tenant: str, without: JobId | None = None) -> float:
    """Count the aggregators that its admitted jobs take, or may take once they are placed."""
    taken = 0.0
    for id, job in state.admitted.get(tenant, {}).items():
        part = state.sharers.part_of(id)
        if id != without and (part or _promised(job.record)):
            taken += part or job.record.spec.servers
    return taken


def _promised(record: JobRecord) -> bool:
    """Tell whether aggregators are the job's, or are kept for it. A gang that waits for GPUs again
    and was never placed has none."""
    waits = bool(record.spec.gpus) and record.state in WAITING_STATES
    return record.cluster is not None or (aggregates(record.spec) and not waits)


def demands(state: State) -> list[tuple[ClusterId, JobId, float]]:
    """List the jobs that were sent to a cluster, and the cores that each still asks for there."""
    clusters, share, lent = state.clusters, state.pool.share(), state.pool.lent()
    return [
        (
            job.record.cluster,
            id,
            # Aggregators lent for its profiling are allocated already.
            max(0.0, clusters.demand_cpu(job.record.spec, share) - lent[id] * share),
        )
        for id, job in state.placed.items()
        if job.record.cluster is not None
    ]


def cluster_rooms(
    state: State, placed: list[tuple[ClusterId, JobId, float]], now_s: float
) -> list[ClusterRoom]:
    """Return the CPU that each cluster that is heard has for one more job."""
    share = state.pool.share()
    unallocated_cpu = {c: state.pool.unallocated(c) * share for c in state.clusters.known}
    return state.clusters.rooms(unallocated_cpu, placed, now_s)


def _shared_cpu(state: State, without: JobId, now_s: float) -> float:
    """Return the CPU that the best cluster has for one more gang, without what those were promised
    that have their GPUs and have not registered yet."""
    share = state.pool.share()
    promised_cpu = sum(
        state.clusters.demand_cpu(job.record.spec, share)
        for jobs in state.admitted.values()
        for id, job in jobs.items()
        if id != without and job.record.cluster is None and _promised(job.record)
        if gathers(job.record.spec)
    )
    rooms = cluster_rooms(state, demands(state), now_s)
    return max((room.free_cpu for room in rooms), default=0.0) - promised_cpu


def tenant_cpu(state: State, tenant: str, without: JobId | None = None) -> float:
    """Cores that its admitted jobs ask for."""
    share = state.pool.share()
    jobs = state.admitted.get(tenant, {}).items()
    specs = (job.record.spec for id, job in jobs if id != without)
    return sum(state.clusters.demand_cpu(spec, share) for spec in specs)


def tenants(state: State, now_s: float) -> Iterator[TenantInfo]:
    """Yield the tenants that have limits or live jobs."""
    limits, pool_cpu = state.config.tenants, state.pool.alive * state.pool.share()
    uses = state.clusters.uses(now_s)
    names = {*limits, *state.admitted, *state.pending} - {DEFAULT}
    for name in sorted(names)[:JOBS_MAX]:
        of, use = limits_of(limits, name), uses.get(name, TenantUse())
        yield TenantInfo(
            tenant=name,
            cpu_fraction=of.cpu_fraction,
            loss_limit=of.loss_limit,
            queued_max=of.queued_max,
            waiting=state.pending.get(name, 0),
            running=len(state.admitted.get(name, ())),
            cpu=tenant_cpu(state, name),
            pool_cpu=pool_cpu,
            used_cpu=use.cpu,
            used_slots=use.slots,
            measured=use.jobs,
            loss=use.loss,
            beyond=use.beyond,
        )


def _free(state: State, without: JobId, now_s: float) -> int:
    """Count the aggregators that one cluster could be given, without promised ones."""
    clusters, pool = state.clusters, state.pool
    served = pool.profiling | {
        id for id, job in state.placed.items() if clusters.counts(job.record.cluster, id)
    }
    admitted = (
        (id, job.record.spec)
        for jobs in state.admitted.values()
        for id, job in jobs.items()
        if id != without and _promised(job.record)
    )
    alive = [c for c in clusters.known if clusters.alive(c, now_s)]
    most = max((pool.unallocated(cluster) for cluster in alive), default=0)
    return most - promised(admitted, frozenset(served))
