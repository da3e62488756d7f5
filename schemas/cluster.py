"""Announcements of services, the pool of aggregators, allocations and their approval."""

from typing import Annotated, Final, Literal

import msgspec

from slackwater.schemas.base import (
    AGGREGATORS_MAX,
    COUNT_MAX,
    NODE_GPUS_MAX,
    SECONDS_MAX,
    AggregatorId,
    ClusterId,
    Cores,
    Count,
    Epoch,
    Finite,
    IdText,
    Index,
    JobId,
    MaybeId,
    Message,
    Name,
    NodeId,
    Record,
    Run,
    Seconds,
    Text,
    bound,
    cut_details,
    cut_texts,
)
from slackwater.schemas.gpus import Gpu, NodeGpuIds
from slackwater.schemas.tenants import Tenant

Addresses = Annotated[
    tuple[tuple[Name, Annotated[str, msgspec.Meta(max_length=512)]], ...],
    msgspec.Meta(max_length=8),
]
"""(transport, address) pairs, best first."""
Aggregators = Annotated[tuple[AggregatorId, ...], msgspec.Meta(max_length=AGGREGATORS_MAX)]


ARRIVED_MAX: Final = 512
WAITING_JOBS_MAX: Final = 200
WAITING_CHARS_MAX: Final = 512
PLACED_JOBS_MAX: Final = 500
TENANTS_MAX: Final = 1000
NODES_MAX: Final = 4096
"""Worker nodes that one message tells of."""


class Heartbeat(Message, kw_only=True, frozen=True, tag="service.heartbeat"):
    """sw.v1.tel.<service>.<id>.heartbeat, once a second. `incarnation` grows at every start."""

    service: IdText
    id: IdText
    incarnation: Count
    at_s: Seconds


class WorkersAt(Record, kw_only=True, frozen=True):
    """WORKER_DONE, as a heartbeat repeats it: all workers pushed to this bucket's new place."""

    job: JobId
    bucket: Index
    location_epoch: Epoch


class AggregatorHeartbeat(Heartbeat, kw_only=True, frozen=True, tag="aggregator.heartbeat"):
    """An aggregator of the pool: its share of CPU, where it is reached, what it holds."""

    node: NodeId
    cpu_share: Annotated[float, msgspec.Meta(ge=0.001, le=1024.0)]
    addresses: Addresses
    buckets: Count
    jobs: Count
    held_bytes: Count
    busy_s: Seconds
    """Slot time spent since start (charged CPU time / cpu_share)."""
    bytes_in: Count
    bytes_out: Count
    regions_recovered: Count = 0
    regions_locked: Count = 0
    """Kept from its former life, and locked by another process: not served until that lets go."""
    arrived: Annotated[tuple[WorkersAt, ...], msgspec.Meta(max_length=ARRIVED_MAX)] = ()
    """Lately: the fact was published once, and the bus may have been away."""
    migration_bytes_s: Count = 0
    """The aggregator's cap for copies to other hosts, in bytes a second; 0: none."""
    executions: Count = 0
    """Folds since start."""
    undercharged: Count = 0
    """Executions among them that took more CPU time than `charge_ns_per_byte` charged: with more
    than a few, the machine is too slow for this charge."""
    memory_bytes: Count = 0
    """Bytes that its regions together may take; 0: it does not say."""
    node_memory_bytes: Count = 0
    """The same of all aggregators of its node together; 0: each for itself."""
    host_cores: Count = 0
    """Cores of its machine; 0: unknown."""
    host_cpu: Cores = 0.0
    """Cores of the machine that were in use lately, by whomever."""
    own_cpu: Cores = 0.0
    """Cores of `host_cpu` that this aggregator used itself."""
    network_budget_bytes_s: Count = 0
    """Bytes a second each way that all traffic of its machine is to take of the link; 0: it does
    not say."""
    network_load_bytes_s: Count = 0
    """Bytes a second that the link carried lately, by whomever, the busier way."""
    restart_window_s: Seconds = 0.0
    """How long its supervisor keeps trying when it does not come up; 0: the supervisor says so
    itself (AggregatorRestarts), or there is none."""


class AggregatorRestarts(Message, kw_only=True, frozen=True, tag="aggregator.restarts"):
    """sw.v1.tel.aggregator.<id>.restarts, from its supervisor, once a second while the aggregator
    is not up: it is started anew, and its memory is kept. Or it was given up."""

    aggregator: AggregatorId
    restarts: Count
    """Within the supervisor's window."""
    given_up: bool = False


TURNS_MAX: Final = 64
"""Jobs that take turns on one node, and are told of."""


class PermitUse(Record, kw_only=True, frozen=True):
    """Seconds that the processes of one job that takes turns have had of their node's permits."""

    job: JobId
    node: NodeId
    computed_s: Seconds = 0.0
    moved_s: Seconds = 0.0
    waited_s: Seconds = 0.0
    """Seconds for both, in all processes."""
    late: Count = 0
    """Permits that it held for so long that others went on beside it."""
    memory_bytes: Count = 0
    """Bytes that its processes may use, of those that share what they asked for; 0: none."""
    stalled_s: Seconds = 0.0
    """Seconds for which they have waited for data that do not fit."""


TurnState = Literal["waiting", "profiling", "profiled", "running", "paused"]
"""A job that takes turns is not started yet; runs, and is measured; is measured, and waits until
the others are; runs with those that it was found to fit; or is paused (Lee 2020, section 4.3.2)."""


class TurnGroup(Record, kw_only=True, frozen=True):
    """A job that takes turns, and those that it shares nodes with."""

    state: TurnState
    computing_s: Seconds = 0.0
    moving_s: Seconds = 0.0
    """Seconds of an iteration, on its slowest node; both 0: it is not measured yet."""
    nodes: Count = 0
    """The number on which that was measured."""
    shares_with: Annotated[tuple[JobId, ...], msgspec.Meta(max_length=TURNS_MAX)] = ()


class WorkerHeartbeat(Heartbeat, kw_only=True, frozen=True, tag="worker.heartbeat"):
    """A machine that can start job processes."""

    node: NodeId
    slots: Count
    """Processes of jobs without GPUs that may run at once."""
    running: Annotated[tuple[tuple[JobId, Count], ...], msgspec.Meta(max_length=4096)] = ()
    """(job, rank) of each process that runs."""
    gpus: Annotated[tuple[Gpu, ...], msgspec.Meta(max_length=NODE_GPUS_MAX)] = ()
    """The node's GPUs, ascending by index, with those that have a fault."""
    cores: Cores = 0.0
    """Cores of CPU for jobs; 0: it does not say."""
    memory_bytes: Count = 0
    """Bytes of main memory for jobs; 0: it does not say."""
    rack: MaybeId = ""
    """The rack that the machine stands in; empty: it does not say."""
    cordoned: bool = False
    """It takes no more jobs: an operator is about to take the machine away."""
    turns: Annotated[tuple[PermitUse, ...], msgspec.Meta(max_length=TURNS_MAX)] = ()
    """By job that takes turns here and has asked for permits."""


class AggregatorRecord(Record, kw_only=True, frozen=True):
    """The master's durable record of an aggregator: one key of the bucket `nodes`."""

    id: AggregatorId
    cluster: ClusterId | None = None
    """The cluster that it is allocated to; None: it is free in the pool."""
    since_s: Seconds = 0.0
    temporary_for: JobId | None = None
    request: MaybeId = ""
    """The AllocateAggregators.request that it was given to: each request is granted once."""
    epoch: Count = 0


class AllocateAggregators(Message, kw_only=True, frozen=True, tag="aggregator.allocate"):
    """Controller to master (section 3.3.3): approval is needed. Idempotent by `request`.

    Fewer than `count` are given if they are at least `at_least` (0: all or none).
    """

    request: IdText
    cluster: ClusterId
    count: Annotated[int, msgspec.Meta(ge=1, le=AGGREGATORS_MAX)]
    at_least: Annotated[int, msgspec.Meta(ge=0, le=AGGREGATORS_MAX)] = 0
    temporary_for: MaybeId = ""


class AggregatorsAllocated(Message, kw_only=True, frozen=True, tag="aggregator.allocated"):
    request: IdText
    aggregators: Aggregators


class DeallocateAggregators(Message, kw_only=True, frozen=True, tag="aggregator.deallocate"):
    """Controller to master: their buckets are dropped, others may have them.

    `requests`, parallel to `aggregators`, names the allocation that ends: a command that the bus
    repeats late cannot end a newer one. Empty: whatever the allocation.
    """

    cluster: ClusterId
    aggregators: Aggregators
    requests: Annotated[tuple[MaybeId, ...], msgspec.Meta(max_length=AGGREGATORS_MAX)] = ()


class AdoptAggregators(Message, kw_only=True, frozen=True, tag="aggregator.adopt"):
    """Controller to master: these serve jobs for good now, they are temporary no longer."""

    cluster: ClusterId
    aggregators: Aggregators


class AllocationEvent(Message, kw_only=True, frozen=True, tag="aggregator.event"):
    """sw.v1.evt.aggregator.<id>.allocated | released | lost | returned | adopted."""

    aggregator: AggregatorId
    fact: Literal["allocated", "released", "lost", "returned", "adopted"]
    cluster: ClusterId | None
    temporary_for: MaybeId = ""
    in_use: Count
    at_s: Seconds


class AggregatorFact(Message, kw_only=True, frozen=True, tag="aggregator.fact"):
    """sw.v1.evt.aggregator.<id>.<fact>, from its controller: congested | cleared, by its link;
    draining | late | drained | restored | vanished, by an operator's order."""

    aggregator: AggregatorId
    fact: Name
    cluster: ClusterId
    at_s: Seconds
    detail: Annotated[dict[Name, Text], msgspec.Meta(max_length=32)] = msgspec.field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        cut_details(self)


class AggregatorLost(Message, kw_only=True, frozen=True, tag="aggregator.lost"):
    """To its controller, from an operator: it will not come back, nobody is to wait for it."""

    aggregator: AggregatorId


class AggregatorDrain(Record, kw_only=True, frozen=True):
    """A controller's durable record of an order to empty an aggregator: one key of the bucket
    `drains_<cluster>`, until the aggregator is gone or the order is taken back."""

    aggregator: AggregatorId
    request: IdText
    """The order's id: repeated, it is the same order."""
    begun_s: Seconds
    deadline_s: Seconds
    state: Literal["draining", "late", "drained"] = "draining"
    """Late: the deadline passed with something left, which still leaves as it can."""
    epoch: Count = 0


class DrainAggregator(Message, kw_only=True, frozen=True, tag="aggregator.drain"):
    """Operator to controller: empty it within so many seconds, and keep it empty. Answered by
    DrainProgress; idempotent by `request`, so that asking again tells how far it is."""

    request: IdText
    aggregator: IdText
    within_s: Annotated[float, msgspec.Meta(ge=1.0, le=86_400.0)]


class RestoreAggregator(Message, kw_only=True, frozen=True, tag="aggregator.restore"):
    """Operator to controller: the order to empty it is off."""

    aggregator: IdText


class DrainedJob(Record, kw_only=True, frozen=True):
    """The part of a job that is still on an aggregator that is being emptied."""

    job: JobId
    buckets: Count
    nbytes: Count
    keeps_state: bool
    """Set where the update rule has optimiser state, which only a move saves."""
    phase: Name
    reason: Text = ""
    """Why it is not on its way."""

    def __post_init__(self) -> None:
        cut_texts(self)


class DrainProgress(Message, kw_only=True, frozen=True, tag="aggregator.drain-progress"):
    """The jobs that are left, in the order in which they leave."""

    drain: AggregatorDrain
    left: Annotated[tuple[DrainedJob, ...], msgspec.Meta(max_length=1000)] = ()
    left_bytes: Count = 0
    needed_s: Seconds = 0.0
    """For what is left, at the aggregator's cap of bandwidth; 0: it has none."""
    at_s: Seconds = 0.0

    def __post_init__(self) -> None:
        bound(self, "needed_s", most=SECONDS_MAX)


class TenantUse(Record, kw_only=True, frozen=True):
    """CPU time used and speed lost by the jobs of a tenant, in the last monitor window of each."""

    tenant: Tenant = ""
    jobs: Count = 0
    """Jobs of which a window was measured."""
    cpu: Finite = 0.0
    """Cores that their tasks took."""
    slots: Finite = 0.0
    """Aggregators that they kept busy."""
    loss: Finite = 0.0
    """Loss of the job that lost most, as a share of its profiled speed; below 0: all are faster."""
    beyond: Count = 0
    """Jobs that lost more than their limit."""

    def __post_init__(self) -> None:
        bound(self, "cpu", "slots", "loss")
        bound(self, "jobs", "beyond", most=COUNT_MAX)

    def __add__(self, other: "TenantUse") -> "TenantUse":
        """Add the figures of other jobs of the same tenant. A side without jobs adds no loss."""
        losses = [each.loss for each in (self, other) if each.jobs]
        return TenantUse(
            tenant=self.tenant,
            jobs=self.jobs + other.jobs,
            cpu=self.cpu + other.cpu,
            slots=self.slots + other.slots,
            loss=max(losses, default=0.0),
            beyond=self.beyond + other.beyond,
        )


class PlacedJob(Record, kw_only=True, frozen=True, array_like=True):
    """Where a job is and what it loses, as its controller knows it."""

    at: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=AGGREGATORS_MAX)], ...],
        msgspec.Meta(max_length=AGGREGATORS_MAX),
    ]
    """The job's aggregators: places in `ClusterReport.aggregators`."""
    phase: Name = ""
    """The phase of its placement: hosting, profiling, moving or steady."""
    moves: Count = 0
    """How often its buckets were migrated so far."""
    loss: Finite | None = None
    """Part of its profiled speed that it lost in its last monitor window; below 0: it is faster."""

    def __post_init__(self) -> None:
        if self.loss is not None:
            bound(self, "loss")


class LostTables(Record, kw_only=True, frozen=True):
    """A job that is to go back to a mark."""

    run: Run
    """The number under which it is placed."""
    what: Text
    """Says what was lost of it."""


class ClusterReport(Message, kw_only=True, frozen=True, tag="cluster.report"):
    """sw.v1.tel.controller.<cluster>.report: what the master's best-fit choice needs."""

    cluster: ClusterId
    free_cpu: Finite
    """Cores: the sum over its aggregators of cpu_share times the part that the cluster's policy
    finds free (F_n / C_n by the paper's)."""
    aggregators: Aggregators
    jobs: Annotated[tuple[JobId, ...], msgspec.Meta(max_length=10_000)]
    """Jobs whose demand is in `free_cpu` already."""
    waiting: Annotated[
        dict[JobId, Annotated[str, msgspec.Meta(max_length=WAITING_CHARS_MAX)]],
        msgspec.Meta(max_length=WAITING_JOBS_MAX),
    ] = msgspec.field(default_factory=dict)
    """Jobs that wait -> why; no more of them than fit into a message."""
    tenants: Annotated[tuple[TenantUse, ...], msgspec.Meta(max_length=TENANTS_MAX)] = ()
    """Tenants that have jobs in the cluster; no more than fit into a message."""
    placed: Annotated[dict[JobId, PlacedJob], msgspec.Meta(max_length=PLACED_JOBS_MAX)] = (
        msgspec.field(default_factory=dict)
    )
    """Jobs that have their places. Where there are more, each report tells of the next ones."""
    lost: Annotated[dict[JobId, LostTables], msgspec.Meta(max_length=PLACED_JOBS_MAX)] = (
        msgspec.field(default_factory=dict)
    )
    """Jobs of which a part was lost, and which are to go back to a mark."""
    drains: Annotated[dict[AggregatorId, Name], msgspec.Meta(max_length=AGGREGATORS_MAX)] = (
        msgspec.field(default_factory=dict)
    )
    """Aggregators that are being emptied -> draining, late or drained."""
    at_s: Seconds

    def __post_init__(self) -> None:
        bound(self, "free_cpu")


class ListAggregators(Message, kw_only=True, frozen=True, tag="aggregator.list"):
    pass


class AggregatorInfo(Record, kw_only=True, frozen=True):
    record: AggregatorRecord
    alive: bool
    heartbeat: AggregatorHeartbeat | None = None
    drain: Name = ""
    """draining, late or drained: it is being emptied by an operator's order; empty: it is not."""


class AggregatorList(Message, kw_only=True, frozen=True, tag="aggregator.list-reply"):
    aggregators: Annotated[tuple[AggregatorInfo, ...], msgspec.Meta(max_length=AGGREGATORS_MAX)]


class ListNodes(Message, kw_only=True, frozen=True, tag="node.list"):
    """List known worker nodes by id, from the `offset`-th on: as many as a message holds."""

    offset: Count = 0


class NodeInfo(Record, kw_only=True, frozen=True):
    """A worker node: what it last told, and what jobs hold of it by the master's records."""

    alive: bool
    """Set while its heartbeats come."""
    heartbeat: WorkerHeartbeat
    """The node's last heartbeat, without the processes that run."""
    slots_used: Count = 0
    gpus_used: NodeGpuIds = ()
    """GPUs that jobs hold."""
    jobs: Count = 0
    """Jobs that hold slots or GPUs of it."""


class NodeList(Message, kw_only=True, frozen=True, tag="node.list-reply"):
    nodes: Annotated[tuple[NodeInfo, ...], msgspec.Meta(max_length=NODES_MAX)]
    total: Count = 0
    """Nodes on all pages."""
