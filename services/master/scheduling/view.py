"""What a GPU-scheduling policy sees, and what it answers.

    policy.allocate(view, memory) -> (plan, memory)

**The view** is a snapshot: frozen structs of the cluster and of every active job (pending or
running), valid during the call. A running job's struct is made when it (re)starts and stays true
until its state changes again: what grows with time is asked for with `now_s`
(`job.attained_gpu_s(view.now_s)`), so a snapshot of 10^4 waiting jobs costs nothing per decision.
`view.changed` names the jobs whose struct changed since the decision that returned `memory`
(arrived, started, stopped, ended: an ended job is in `changed` and no longer in `jobs`); None means
"compare everything": the first call, or a restarted master.

**The memory** is whatever a policy carries between decisions (queues, a population). It is a
value: None at first, handed over with the call, and only the one that comes back may be used
again (so a policy may grow its indexes in place). With memory None a policy must work from the
view alone.

**The plan** names only the jobs whose allocation changes; everybody else keeps what they have. It
is validated (`validate`) before it is applied, whichever policy made it: capacity of each node,
whole gangs, known jobs. `next_decision_s` is when the policy wants to be asked again even if
nothing happens: a demotion, a round, the end of a protected minute. A policy is asked at every
instant at which something happened, once, after all of it; one that works in rounds answers
`Plan(next_decision_s=<its tick>)` in between.

**Counting only.** In the simulator's `--overhead none` mode, and wherever placement is of no
interest, the cluster is a single node that holds every GPU: no policy needs a second code path.

**Sharing.** Jobs with one label in `plan.groups` run on the very same GPUs (Muri's and Harmony's
co-location): equal allocations, counted once.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Protocol

import msgspec

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.schemas.base import JobId, NodeId

Allocation = tuple[tuple[int, int], ...]
"""((node index, GPUs on it), ...) with ascending node indexes; () is no GPU at all."""

NOTHING: Allocation = ()


class NodeView(msgspec.Struct, frozen=True, gc=False):
    """A machine with GPUs. A node that is lost stays in its place with `gpus` 0."""

    index: int
    id: NodeId
    gpus: int
    gpu_type: str = ""


class ClusterView(msgspec.Struct, frozen=True):
    """The machines; `nodes[i].index == i`. A new struct whenever a node comes or goes."""

    nodes: tuple[NodeView, ...]
    gpus: int
    """GPUs of all nodes that are up."""
    gpu_types: tuple[str, ...] = ("",)
    """Every type there is, sorted; one blank name where types are of no interest."""
    node_gpus_max: int = 0


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """An active job. Fields marked (then) are true as of `since_s`."""

    id: JobId
    number: int
    """Submission order: the last tie-breaker everywhere."""
    submitted_s: float
    gpus: int
    """What the job asks for; all or nothing, unless min and max leave room."""
    gpus_min: int
    gpus_max: int
    model: str = ""
    tenant: str = ""
    priority: int = 0
    """Higher runs first."""
    batch_size: int = 0
    skew: float = 0.0
    """Largest tensor's share of the model (Tiresias section 3.3.3): who wants consolidation."""
    speeds: Mapping[str, float] = msgspec.field(default_factory=dict)
    """GPU type -> speed relative to the reference; a type left out cannot run the job; empty:
    every type alike."""

    allocation: Allocation = NOTHING
    group: str = ""
    since_s: float = 0.0
    """Since when it runs on this allocation, or waits."""
    attained_gpu_s_then: float = 0
    """(then) GPUs times seconds held since submission: integer while times are."""
    run_s_then: float = 0
    """(then) Seconds held GPUs since submission."""
    first_start_s: float = inf
    restarts: int = 0
    """How often it was given GPUs after its first start: preemptions and re-allocations."""

    remaining_s_then: float = inf
    """(then) For policies with an oracle: seconds of running it still needs with the GPUs it asks
    for. inf where nobody may know."""
    speed: float = 1
    """Oracle seconds done per second, while it runs."""
    ready_s: float = 0.0
    """When its restart is over and progress begins (if it runs)."""
    profile: Any = None
    """What the job model lets a policy know (a goodput function, stage times, a service curve);
    the model documents its type."""

    @property
    def held_gpus(self) -> int:
        if len(self.allocation) == 1:
            return self.allocation[0][1]
        return sum(gpus for _, gpus in self.allocation)

    @property
    def running(self) -> bool:
        return bool(self.allocation)

    def attained_gpu_s(self, now_s: float) -> float:
        return self.attained_gpu_s_then + self.held_gpus * (now_s - self.since_s)

    def run_s(self, now_s: float) -> float:
        return self.run_s_then + (now_s - self.since_s if self.allocation else 0)

    def waited_s(self, now_s: float) -> float:
        """Seconds spent without GPUs since submission."""
        return now_s - self.submitted_s - self.run_s(now_s)

    def moved(self, allocation: Allocation, now_s: float) -> "JobView":
        """The job as it will look with this allocation from now on."""
        return msgspec.structs.replace(
            self,
            allocation=allocation,
            since_s=now_s,
            attained_gpu_s_then=self.attained_gpu_s(now_s),
            run_s_then=self.run_s(now_s),
            first_start_s=min(self.first_start_s, now_s) if allocation else self.first_start_s,
            remaining_s_then=self.remaining_s(now_s),
        )

    def remaining_s(self, now_s: float) -> float:
        if not self.allocation or now_s <= self.ready_s:
            return self.remaining_s_then
        return self.remaining_s_then - (now_s - self.ready_s) * self.speed


class Rules(msgspec.Struct, frozen=True):
    """The operator's rules, whichever the policy."""

    quotas: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Tenant (virtual cluster) -> GPUs it is guaranteed. Beyond it a tenant borrows what is idle,
    and gives it back when an owner asks. Empty: no quotas. A tenant left out owns nothing."""
    borrowing: bool = True
    min_run_s: float = 0
    """A running job is not preempted before it has run this long since its last start."""
    restart_s: float = 0
    """What a re-allocation costs (for policies that weigh it)."""


class View(msgspec.Struct, frozen=True):
    now_s: float
    cluster: ClusterView
    jobs: Mapping[JobId, JobView]
    free: Sequence[int]
    """Idle GPUs of each node, by node index."""
    changed: Sequence[JobId] | None = None
    rules: Rules = Rules()


class Plan(msgspec.Struct, frozen=True):
    """Only what changes. An empty allocation takes a job's GPUs away."""

    allocations: Mapping[JobId, Allocation] = msgspec.field(default_factory=dict)
    groups: Mapping[JobId, str] = msgspec.field(default_factory=dict)
    """For a changed job that shares its GPUs: the label it shares them under. A member may join
    a label that already runs (with the label's allocation)."""
    next_decision_s: float = inf
    desired_nodes: int | None = None
    """A policy that scales the cluster: how many nodes it would like (None: no opinion)."""


class Pending(msgspec.Struct, frozen=True):
    """Why a job waits, for a machine and for a person."""

    job: JobId
    rule: str
    """`order` | `head-of-line` | `capacity` | `quota` | `protected` | `fragmentation` | `round` |
    `size`"""
    resource: str
    """What it lacks: "4 GPUs, 1 left" or "4 GPUs of tenant t's 8"."""
    until_s: float
    """The earliest known instant at which this may change; inf: no instant is known."""
    text: str


class Policy(Protocol):
    """What is registered under a name. Instances hold options only, never state."""

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]: ...

    def explain(self, view: View, memory: Any) -> list[Pending]:
        """Why each pending job waits, after `allocate` at the same instant (memory unchanged)."""
        ...


def refuse_types(policy: object, view: View) -> None:
    """For a policy that places without regard to types: on several, jobs would wait for ever."""
    if len(view.cluster.gpu_types) > 1:
        raise ConfigRejected(
            f"{name_of(policy)} knows one GPU type, and this cluster has "
            f"{', '.join(view.cluster.gpu_types)}; simulate one type, or use pollux or a policy "
            "that orders a queue"
        )


def name_of(policy: object) -> str:
    """The name that it is registered under."""
    return getattr(policy, "registered_name", type(policy).__name__)


class PlanRefused(Rejected):
    """A policy's plan breaks capacity or a gang; nothing of it was applied."""


def validate(plan: Plan, view: View) -> None:
    """Refuse a plan that the cluster cannot carry out. Costs only what the plan changes."""
    room: dict[int, int] = {}
    groups = _groups_of(view, plan) if plan.groups or _any_grouped(plan, view) else None
    for job_id, allocation in plan.allocations.items():
        job = view.jobs.get(job_id)
        if job is None:
            raise PlanRefused(f"the plan names job {job_id}, which is not active; drop it")
        if groups is None or not job.group:
            for node, gpus in job.allocation:
                room[node] = room.get(node, 0) + gpus
        if allocation:
            _check_gang(job, allocation, view.cluster)
            if groups is None or job_id not in plan.groups:
                for node, gpus in allocation:
                    room[node] = room.get(node, 0) - gpus
    if groups is not None:
        _check_groups(groups, room)
    for node, change in room.items():
        if view.free[node] + change < 0:
            raise PlanRefused(
                f"the plan needs {-change} more GPUs on node {view.cluster.nodes[node].id}, which "
                f"has {view.free[node]} idle of {view.cluster.nodes[node].gpus}"
            )


def _check_gang(job: JobView, allocation: Allocation, cluster: ClusterView) -> None:
    last, total = -1, 0
    for node, gpus in allocation:
        if not last < node < len(cluster.nodes) or gpus < 1:
            raise PlanRefused(
                f"job {job.id}: allocation {allocation} must name existing nodes in ascending "
                "order with at least one GPU each"
            )
        if job.speeds and cluster.nodes[node].gpu_type not in job.speeds:
            raise PlanRefused(
                f"job {job.id} cannot run on GPUs of type {cluster.nodes[node].gpu_type!r} "
                f"(node {cluster.nodes[node].id}); its types are {sorted(job.speeds)}"
            )
        last = node
        total += gpus
    if not job.gpus_min <= total <= job.gpus_max:
        raise PlanRefused(
            f"job {job.id}: {total} GPUs break its gang of {job.gpus_min}..{job.gpus_max}"
        )


def _any_grouped(plan: Plan, view: View) -> bool:
    return any((job := view.jobs.get(i)) is not None and job.group for i in plan.allocations)


def _groups_of(view: View, plan: Plan) -> dict[str, tuple[set[Allocation], set[Allocation]]]:
    """Label -> (allocations held by members before, allocations held by members after)."""
    groups: dict[str, tuple[set[Allocation], set[Allocation]]] = {}
    for job in view.jobs.values():
        if job.group:
            before, after = groups.setdefault(job.group, (set(), set()))
            before.add(job.allocation)
            if job.id not in plan.allocations:
                after.add(job.allocation)
    for job_id, label in plan.groups.items():
        allocation = plan.allocations.get(job_id, NOTHING)
        if not label or not allocation:
            raise PlanRefused(
                f"job {job_id} is put in group {label!r} without an allocation of its own; name "
                "both the label and the allocation that the group shares"
            )
        groups.setdefault(label, (set(), set()))[1].add(allocation)
    return groups


def _check_groups(
    groups: dict[str, tuple[set[Allocation], set[Allocation]]], room: dict[int, int]
) -> None:
    for label, (before, after) in groups.items():
        if len(after) > 1:
            raise PlanRefused(
                f"group {label}: its members hold different GPUs {sorted(after)}; jobs that share "
                "must have equal allocations"
            )
        for allocation in before:
            for node, gpus in allocation:
                room[node] = room.get(node, 0) + gpus
        for allocation in after:
            for node, gpus in allocation:
                room[node] = room.get(node, 0) - gpus
