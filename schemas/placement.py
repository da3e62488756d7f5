"""Where a job's tensors live: buckets, their aggregators, and the controller's durable record.

A bucket is the task of the paper's assignment scheme: one large tensor, or several neighbouring
small ones. It has one region (gradient slots, two parameter buffers, two state buffers, a header)
and lives on exactly one aggregator.
"""

from typing import Annotated, Literal

import msgspec

from slackwater.schemas.base import (
    AGGREGATORS_MAX,
    BUCKETS_MAX,
    TASKS_MAX,
    TENSORS_MAX,
    WORKERS_MAX,
    AggregatorId,
    ClusterId,
    Count,
    Epoch,
    IdText,
    Index,
    JobId,
    LossLimit,
    MaybeId,
    Message,
    Name,
    Rank,
    Record,
    Run,
    Seconds,
    Secret,
    Text,
    Workers,
    cut_texts,
)
from slackwater.schemas.cluster import Addresses, Aggregators
from slackwater.schemas.jobs import STATE_COPIES, Consistency, JobSpec, Staleness
from slackwater.schemas.tensors import ELEMENTS_MAX, DType, TensorSpec, UpdateRule, check_elements

Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Positions = Annotated[tuple[Fraction, ...], msgspec.Meta(max_length=BUCKETS_MAX)]
Indices = Annotated[tuple[Index, ...], msgspec.Meta(max_length=BUCKETS_MAX)]
Epochs = Annotated[tuple[Epoch, ...], msgspec.Meta(max_length=BUCKETS_MAX)]
"""Parallel to the buckets that a message names."""


class BucketLayout(Record, kw_only=True, frozen=True):
    """Neighbouring tensors [first, first + count) of the job's list, `elements` float32 in all."""

    index: Index
    first: Index
    count: Annotated[int, msgspec.Meta(ge=1, le=BUCKETS_MAX)]
    elements: Annotated[int, msgspec.Meta(ge=1, le=ELEMENTS_MAX)]
    start: Annotated[int, msgspec.Meta(ge=0, le=ELEMENTS_MAX)] = 0
    """Where in a divided tensor the bucket begins, in elements. Only the first of a bucket's
    tensors may be there in part."""


class BucketPlace(Record, kw_only=True, frozen=True):
    """The aggregator of a bucket. The location epoch grows by one with every move."""

    aggregator: AggregatorId
    location_epoch: Count = 0


class JobPlan(Record, kw_only=True, frozen=True):
    """The facts about a job that an aggregator needs to host buckets of it."""

    job: JobId
    workers: Workers
    """Slots that each of its regions has: its workers, or the most that an elastic job can have."""
    active: Annotated[int, msgspec.Meta(ge=0, le=WORKERS_MAX)] = 0
    """How many of `workers` an elastic job begins with; 0: all count, always."""
    virtual: bool = False
    """Each slot is a virtual rank's, and all count; `active` processes fill them to begin with."""
    gradient_dtype: DType
    update: UpdateRule
    consistency: Consistency = "synchronous"
    staleness: Staleness = 0
    noise: bool = False
    """Folds keep the sums of squares that tell the gradient noise scale."""
    state_copies: Count = STATE_COPIES
    """Iterations within which its workers copy the optimiser's states once; 0: they do not."""
    layout_epoch: Count
    token: Secret
    """The job's secret, as controller and aggregators have it: hex, another for each run. In the
    table of an Agent it is the token of its process (common/domains/slots/tokens.py)."""


class Endpoint(Record, kw_only=True, frozen=True):
    """Where an aggregator is reached on each transport, best first: ("shm", "/run/.../a1.sock")."""

    aggregator: AggregatorId
    addresses: Addresses


Layouts = Annotated[tuple[BucketLayout, ...], msgspec.Meta(max_length=BUCKETS_MAX)]
Places = Annotated[tuple[BucketPlace, ...], msgspec.Meta(max_length=BUCKETS_MAX)]
Tensors = Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=TENSORS_MAX)]


# Controller endpoints --------------------------------------------------------------------------


class PlaceJob(Message, kw_only=True, frozen=True, tag="placement.place"):
    """Master to controller: this job is yours. Idempotent by job id and run. `loss_limit`: its own,
    or its tenant's; 0: the cluster's. `aggregators_max`: of the cluster; 0: any number."""

    spec: JobSpec
    tensors: Tensors
    loss_limit: LossLimit = 0.0
    aggregators_max: Annotated[int, msgspec.Meta(ge=0, le=AGGREGATORS_MAX)] = 0
    run: Run = 0

    def __post_init__(self) -> None:
        check_elements(self.tensors)


class ReleaseJob(Message, kw_only=True, frozen=True, tag="placement.release"):
    """Master to controller: this run of the job ended, and those before it; drop its tensors."""

    job: IdText
    run: Run = 0


class LocateJob(Message, kw_only=True, frozen=True, tag="placement.locate"):
    """Agent to controller: where are my tensors?"""

    job: IdText
    rank: Rank = 0
    attempt: Count = 0
    """The number of the rank's process; 0: it was started by hand."""


class Located(Message, kw_only=True, frozen=True, tag="placement.located"):
    """The mapping table of the job (paper, appendix A). `places` is parallel to `buckets`."""

    job: JobId
    plan: JobPlan
    buckets: Layouts
    places: Places
    endpoints: Annotated[tuple[Endpoint, ...], msgspec.Meta(max_length=AGGREGATORS_MAX)]


# Aggregator endpoints --------------------------------------------------------------------------


class HostBuckets(Message, kw_only=True, frozen=True, tag="bucket.host"):
    """Controller to aggregator: make regions for these buckets. Idempotent by location epoch.

    A region that is there already (it survived a restart) is kept with its bytes; if it is there
    at a lower epoch, its epoch is raised and a migration away from here is off. `at_epochs` is
    parallel to `buckets`.
    """

    cluster: ClusterId
    plan: JobPlan
    buckets: Layouts
    at_epochs: Epochs
    tensors: Tensors
    """The job's whole list, so that a refusal can name the tensor."""
    positions: Positions = ()
    """Their tasks run by deadline: which part of the forward pass comes before each bucket is
    pulled. Empty: they run as they come."""
    slack: Fraction = 0.0
    """The part of an iteration by which a task may be late."""
    iteration_s: Seconds = 0.0
    """The profiled duration of an iteration; 0: not profiled yet."""
    restore: Text = ""
    """The folder of the checkpoint that the job begins with, which must be there; empty: its
    workers' values are its begin."""
    saved: Text = ""
    """The folder that the job is saved in. What is there goes before: a run begins with it, and it
    stands in for what no worker has, in regions that were lost."""
    begins: bool = False
    """The job's run begins: its regions are not bare where there is a checkpoint."""


class JobSlotPlan(Record, kw_only=True, frozen=True):
    """How often each of a job's tasks on the aggregator is expected."""

    job: JobId
    every_s: Annotated[float, msgspec.Meta(ge=1e-6, le=1e10)]
    """In a cycle the iteration that it is stretched to (d_j), by deadline its own (D_j); where each
    worker's push is an update, a worker's part of it."""
    slack: Fraction = 0.0
    """The slack of this job, from its tenant's loss limit; 0: the plan's slack counts."""


class SlotPlan(Message, kw_only=True, frozen=True, tag="bucket.turns"):
    """Controller to aggregator: by which rule its tasks run from now on, all of it anew.

    Idempotent; one with a lower `number` than one that was heard in this epoch comes late and
    changes nothing.

    Jobs that are not named run as they come, or by the deadlines that HostBuckets told.
    """

    cluster: ClusterId
    number: Count
    cycle_s: Seconds = 0.0
    """C_n; 0: there is no cycle, those named run by deadline."""
    slack: Fraction = 0.0
    """The part of `every_s` by which a task may be late."""
    jobs: Annotated[tuple[JobSlotPlan, ...], msgspec.Meta(max_length=TASKS_MAX)] = ()


class DropJob(Message, kw_only=True, frozen=True, tag="bucket.drop"):
    """Controller to aggregator: forget every bucket of the job (or those named) and free them.

    `up_to_epochs`, parallel to `buckets`, spares a region with a higher location epoch: a command
    that the bus repeats late cannot drop a bucket that has come back since.
    """

    job: IdText
    buckets: Indices | None = None
    up_to_epochs: Epochs | None = None
    up_to_epoch: Epoch | None = None
    """The same for all of its buckets: those of a later run are spared."""


class MigrateInit(Message, kw_only=True, frozen=True, tag="migrate.init"):
    """Controller to the old aggregator (paper, appendix B, MIGRATE_INIT).

    After the next update of each bucket its pull response names `to`, and the bucket is copied
    there with the new location epoch. `epochs` is parallel to `buckets`.
    """

    cluster: ClusterId
    migration: IdText
    job: IdText
    buckets: Indices
    epochs: Epochs
    to: Endpoint


class BucketHeld(Record, kw_only=True, frozen=True):
    """A bucket that an aggregator holds: for reconciliation after a restart of either side."""

    job: JobId
    bucket: Index
    layout_epoch: Count
    location_epoch: Epoch
    version: Count
    moving: bool = False


class ListBuckets(Message, kw_only=True, frozen=True, tag="bucket.list"):
    job: MaybeId = ""
    """List only this job's; empty: all."""


class BucketsHeld(Message, kw_only=True, frozen=True, tag="bucket.held"):
    aggregator: AggregatorId
    incarnation: Count
    held: Annotated[tuple[BucketHeld, ...], msgspec.Meta(max_length=100_000)]


# Facts of a migration ---------------------------------------------------------------------------


class TensorCopyDone(Message, kw_only=True, frozen=True, tag="migrate.copied"):
    """sw.v1.evt.migration.<id>.copied, from the old aggregator: TENSOR_COPY_DONE of one bucket."""

    migration: IdText
    job: JobId
    bucket: Index
    location_epoch: Epoch
    version: Count
    source: AggregatorId
    target: AggregatorId
    nbytes: Count
    copy_s: Seconds


class WorkerDone(Message, kw_only=True, frozen=True, tag="migrate.worker-done"):
    """sw.v1.evt.migration.<job>.worker-done, from the new aggregator: all workers pushed here."""

    job: JobId
    bucket: Index
    location_epoch: Epoch
    target: AggregatorId


class MigrationEvent(Message, kw_only=True, frozen=True, tag="migrate.event"):
    """sw.v1.evt.migration.<id>.started | finished | cancelled, from the controller."""

    migration: IdText
    job: JobId
    fact: Literal["started", "finished", "cancelled"]
    cause: Literal[
        "profiled",
        "reverted",
        "expanded",
        "recycled",
        "lost",
        "interfered",
        "drained",
        "unprofiled",
        "protected",
        "asked",
    ]
    buckets: Indices
    sources: Aggregators
    targets: Aggregators
    at_s: Seconds


# The controller's durable record -----------------------------------------------------------------


class Profile(Record, kw_only=True, frozen=True):
    """Section 3.3.1's characteristics of a job, as profiled on its temporary aggregators."""

    iteration_s: Seconds
    """D_j: the standalone iteration, the mean of the profile's quietest part. Lowered when windows
    are shorter: nobody is faster shared than alone."""
    task_cpu_s: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=BUCKETS_MAX)]
    """CPU time of each bucket's task (measured alone); e_t is this divided by cpu_share."""
    iterations: Count = 0
    workers: Count = 0
    """Workers that counted; 0: not said."""
    positions: Positions = ()
    """The part of the forward pass that comes before each bucket is pulled; empty: not known."""
    push_s_per_byte: Seconds = 0.0
    """Seconds per byte that a push takes on the link of its usual aggregator, over a network; 0:
    not measured."""
    pull_s_per_byte: Seconds = 0.0
    network_bytes: Count = 0
    """Bytes of an iteration that pass between its workers and aggregators over a network, the
    busier way; 0: none, or not measured."""


Phase = Literal["waiting", "hosting", "profiling", "moving", "steady", "released"]


class JobPlacement(Record, kw_only=True, frozen=True):
    """One key of the bucket `placements_<cluster>`: what a controller must not forget of a job."""

    spec: JobSpec
    tensors: Tensors
    plan: JobPlan
    buckets: Layouts
    places: Places = ()
    phase: Phase = "waiting"
    reason: Text = ""
    temporary: Aggregators = ()
    """Aggregators that serve this job's profiling only."""
    profile: Profile | None = None
    excluded: Aggregators = ()
    """Aggregators where this job lost speed: it may not return there."""
    crowded: Aggregators = ()
    """Aggregators where speed was lost: their usable fraction is lower while this job lives."""
    migration: MaybeId = ""
    target: Places = ()
    """Where the running migration leads; parallel to `places`."""
    cause: Name = ""
    asks: Count = 0
    """Allocation requests so far: each gets an id of its own."""
    moves: Count = 0
    """Migrations so far: each gets an id of its own."""
    reverts: Count = 0
    protected: Text = ""
    """Why its aggregators are its own until it ends; empty: they may be shared."""
    assigned_s: Seconds = 0.0
    """When its latest assignment was decided: the newest one is undone first."""
    submitted_s: Seconds = 0.0
    loss_limit: LossLimit = 0.0
    """LossLimit of its tenant; 0: the cluster's."""
    run: Run = 0
    epoch: Count = 0

    def __post_init__(self) -> None:
        cut_texts(self)
