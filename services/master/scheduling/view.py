"""The view that a GPU-scheduling policy sees, and the plan that it answers.

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
is checked (`validation`) before anything of it is carried out, under every policy: capacity
of each node, whole gangs, known jobs, the operator's rules. `next_decision_s` is when the policy
wants to be asked again even if nothing happens: a demotion, a round, the end of a protected minute.
A policy is asked at every instant at which something happened, once, after all of it; one that
works in rounds answers `Plan(next_decision_s=<its tick>)` in between.

**Counting only.** In the simulator's `--overhead none` mode, and wherever placement is of no
interest, the cluster is a single node that holds every GPU: no policy needs a second code path.

**Sharing.** Jobs with one label in `plan.groups` run on the very same GPUs (Muri's and Harmony's
co-location): equal allocations, counted once.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Protocol, runtime_checkable

import msgspec

from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.gpus import Within

Allocation = tuple[tuple[int, int], ...]
"""((node index, GPUs on it), ...) with ascending node indexes; () means without GPUs."""

NOTHING: Allocation = ()


def racks_of(nodes: Sequence["NodeView"]) -> tuple[str, ...]:
    """Return the racks of these machines; empty where there are not several."""
    found = sorted({node.rack for node in nodes})
    return tuple(found) if len(found) > 1 else ()


def shrunk(allocation: Allocation, size: int) -> Allocation:
    """So many of its GPUs: the smallest parts are left first."""
    if not size:
        return NOTHING
    left = []
    for node, gpus in sorted(allocation, key=lambda part: (-part[1], part[0])):
        taken = min(gpus, size)
        size -= taken
        if taken:
            left.append((node, taken))
    return tuple(sorted(left))


class NodeView(msgspec.Struct, frozen=True, gc=False):
    """A machine with GPUs. A node that is lost stays in its place with `gpus` 0."""

    index: int
    id: NodeId
    gpus: int
    gpu_type: str = ""
    cores: float = inf
    memory_bytes: float = inf
    """Processor cores and main memory for jobs; inf: it does not say."""
    rack: str = ""


class ClusterView(msgspec.Struct, frozen=True):
    """The machines; `nodes[i].index == i`. A new struct whenever a node comes or goes."""

    nodes: tuple[NodeView, ...]
    gpus: int
    """GPUs of all nodes that are up."""
    gpu_types: tuple[str, ...] = ("",)
    """Every type there is, sorted; one blank name where types are of no interest."""
    node_gpus_max: int = 0
    racks: tuple[str, ...] = ()
    """Every rack there is, sorted; empty where there are not several."""

    def fewest_nodes(self, gpus: int, gpu_type: str) -> int:
        """On how many machines of that type so many GPUs lie when they are packed."""
        largest = self.node_gpus_max
        if len(self.gpu_types) > 1:
            largest = max((n.gpus for n in self.nodes if n.gpu_type == gpu_type), default=0)
        return -(-gpus // max(1, largest))


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """An active job. Fields marked (then) are true as of `since_s`."""

    id: JobId
    number: int
    """Submission order: the last tie-breaker everywhere."""
    submitted_s: float
    gpus: int
    """GPUs that the job asks for; all or nothing, unless min and max leave room."""
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
    cores: float = 0.0
    memory_bytes: int = 0
    """Processor cores and main memory that it needs beside each of its GPUs; 0: it does not say."""
    within: Within = ""
    """Set where all its GPUs must lie on one machine, or in one rack."""
    anywhere: bool = False
    """Its processes need no place to meet: they may be on any machines, whatever others may."""
    one_each: bool = False
    """It shares machines by turns: each of its processes, which may be anywhere, is best on a
    machine of its own."""
    limit_s: float = inf
    """Seconds that it may run in all; inf: it has no limit."""

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
    restart_s: float | None = None
    """Seconds that a re-allocation costs it, as measured of it (see `delays`) or known of its
    application; None: not known."""

    remaining_s_then: float = inf
    """(then) For policies with an oracle: seconds of running it still needs with the GPUs it asks
    for. inf where nobody may know."""
    speed: float = 1
    """Oracle seconds done per second, while it runs; 0 where nobody may know."""
    ready_s: float = 0.0
    """When its restart is over and progress begins (if it runs)."""
    profile: Any = None
    """The facts that the job model lets a policy know (a goodput function, stage times, a service
    curve); the model documents its type."""

    @property
    def held_gpus(self) -> int:
        if len(self.allocation) == 1:
            return self.allocation[0][1]
        return sum(gpus for _, gpus in self.allocation)

    @property
    def needs_host(self) -> bool:
        """Say whether it asks for processor cores or main memory."""
        return bool(self.cores or self.memory_bytes)

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
    """The operator's rules, which hold under every policy."""

    quotas: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Tenant (virtual cluster) -> GPUs it is guaranteed. Beyond it a tenant borrows what is idle,
    and gives it back when an owner asks. Empty: no quotas. A tenant left out owns nothing."""
    borrowing: bool = True
    min_run_s: float = 0
    """A running job is not preempted before it has run this long since its last start."""
    restart_s: float = 0
    """Seconds that a re-allocation costs (for policies that weigh it)."""

    def protects(self, job: JobView, now_s: float) -> bool:
        """Say whether a job has run too short a time to lose or change its GPUs."""
        return self.min_run_s > 0 and bool(job.allocation) and job.since_s + self.min_run_s > now_s


NO_RULES = Rules()


class View(msgspec.Struct, frozen=True):
    now_s: float
    cluster: ClusterView
    jobs: Mapping[JobId, JobView]
    free: Sequence[int]
    """Idle GPUs of each node, by node index."""
    changed: Sequence[JobId] | None = None
    rules: Rules = NO_RULES


class Plan(msgspec.Struct, frozen=True):
    """The allocations that change. An empty allocation takes a job's GPUs away."""

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
    """The resource that it lacks: "4 GPUs, 1 left" or "4 GPUs of tenant t's 8"."""
    until_s: float
    """When this changes if nothing arrives, ends or fails until then; inf: no instant is known."""
    text: str


class Policy(Protocol):
    """The object that is registered under a name. Instances hold options only, never state.

    Its class declares in `honours` which rules it knows (see `rules`); the scheduler refuses the
    others by name. `divisible = True`: tenants' quotas hold by asking it for each tenant's part of
    the cluster (see `tenants`), which needs jobs that never share GPUs.
    """

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]: ...

    def explain(self, view: View, memory: Any) -> list[Pending]:
        """Why each pending job waits, after `allocate` at the same instant (memory unchanged)."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """A policy that must not forget everything when its process ends."""

    @property
    def facts(self) -> type[msgspec.Struct]:
        """The struct of what it must not forget, of bounded size."""
        ...

    def durable(self, memory: Any) -> msgspec.Struct | None:
        """Pick out what must outlast the process; None: nothing yet."""
        ...

    def restored(self, facts: Any) -> Any:
        """The memory for the first `allocate` of a new process, which compares everything."""
        ...


def name_of(policy: object) -> str:
    """The name that it is registered under."""
    return getattr(policy, "registered_name", type(policy).__name__)
