"""A job: what a user submits, what the master remembers, what happens to it.

There is one job model; a trace row, a submission and a running emulation all become a `JobSpec`.
"""

from math import prod
from typing import Annotated, Final, Literal

import msgspec

from slackwater.schemas.base import (
    COUNT_MAX,
    ID_PATTERN,
    RUNS_MAX,
    SECONDS_MAX,
    AggregatorId,
    ClusterId,
    Count,
    Finite,
    IdText,
    JobId,
    LossLimit,
    Message,
    Name,
    NodeId,
    Positive,
    Rank,
    Record,
    Run,
    Seconds,
    Text,
    Workers,
    bound,
    cut_details,
    cut_texts,
)

DType = Literal["float32", "float16", "bfloat16"]
Aggregation = Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]
"""A placement policy's name; controllers know which there are."""
Consistency = Literal["synchronous", "asynchronous", "stale-synchronous"]
"""What is applied, and whom a worker waits for: the mean of an iteration's pushes, once all are
in; each push by itself, as it comes; the same, and nobody is further ahead than a bound."""
Staleness = Annotated[int, msgspec.Meta(ge=0, le=1000)]
"""Iterations that a worker of a stale-synchronous job may be ahead of the slowest."""
JobState = Literal["pending", "running", "completed", "failed", "cancelled"]
ELEMENTS_MAX: Final = 2**42
"""Of a tensor and of a job: with all slots and states of 64 workers its bytes fit 64 bits."""
Extent = Annotated[int, msgspec.Meta(ge=1, le=ELEMENTS_MAX)]
Single = Annotated[float, msgspec.Meta(ge=-3e38, le=3e38)]
"""What a float32 holds: kernels reckon with it."""
Decay = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
STATE_SAID: Final[dict[JobState, str]] = {
    "pending": "is pending",
    "running": "is running",
    "completed": "has completed",
    "failed": "has failed",
    "cancelled": "was cancelled",
}
"""Words for a job's state in the middle of a sentence."""
TERMINAL_STATES: frozenset[JobState] = frozenset({"completed", "failed", "cancelled"})


TENSORS_MAX: Final = 20_000
"""Tensors of one job."""


class TensorSpec(Record, kw_only=True, frozen=True):
    """A trainable tensor: its name, its shape and the parameters' dtype (always float32).

    Tensors of different groups have different hyper-parameters; a push has one set a bucket, so
    they never share one.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    shape: Annotated[tuple[Extent, ...], msgspec.Meta(max_length=8)]
    group: Count = 0


def check_elements(tensors: tuple[TensorSpec, ...]) -> None:
    """Raise ValueError where the tensors of one job have too many elements, one or together."""
    elements = sum(prod(tensor.shape) for tensor in tensors)
    if elements > ELEMENTS_MAX:
        raise ValueError(
            f"tensors: {elements} elements in all, at most {ELEMENTS_MAX} in one job; "
            "train them in several"
        )


def first_difference(expected: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]) -> str:
    """Names the first tensor in which two ranks' lists differ; empty: they are equal."""
    if expected == found:
        return ""
    for index, (mine, other) in enumerate(zip(expected, found, strict=False)):
        if mine != other:
            return (
                f"tensor {index} is {other.name} {list(other.shape)}, but {mine.name} "
                f"{list(mine.shape)} in the job's list; all ranks must train the same tensors"
            )
    return (
        f"{len(found)} tensors, but {len(expected)} in the job's list; "
        "all ranks must train the same tensors"
    )


class UpdateRule(Record, kw_only=True, frozen=True):
    """How a gradient changes the parameters. Unused hyper-parameters of a rule are ignored.

    These are the values of a push that carries none of its own (see slots.Hyper).
    """

    name: Literal["sgd", "momentum", "nesterov", "adam", "adamw", "adagrad"] = "sgd"
    """The rule."""
    learning_rate: Single = 0.01
    """The step, for every rule."""
    momentum: Single = 0.9
    """The share of the last update that goes into the next: momentum and nesterov."""
    beta1: Decay = 0.9
    """Decay of the mean of gradients: adam and adamw."""
    beta2: Decay = 0.999
    """Decay of the mean of squared gradients: adam and adamw."""
    epsilon: Single = 1e-8
    """Added to divisors: adam, adamw and adagrad."""
    weight_decay: Single = 0.0
    """The share of the parameters that is taken off, with the gradient or, by adamw, beside it."""


class JobSpec(Record, kw_only=True, frozen=True):
    """What a user asks for.

    `servers` is the number of parameter servers that the job would reserve for itself ("2s-2w": 2
    servers, 2 workers): the number its standalone speed is profiled with. `program` is the command
    line that the worker service starts once per rank; empty means that the training program is
    started by its user and registers itself through `slackwater.Agent`.
    """

    id: IdText
    """The job's id, unique in the cluster."""
    model: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """The network's name, for people and for reports."""
    workers: Workers = 1
    """Processes that train, one per rank."""
    servers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Parameter servers that it would reserve for itself; its standalone speed is profiled so."""
    iterations: Positive = 1
    """Iterations that it trains for."""
    program: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)] = ()
    """The command line of one rank, as words; empty: its user starts it by hand."""
    folder: Text = ""
    """The node's folder that the program runs in; empty: where `slackwater submit` is called, of a
    job that comes by another way the worker service's own."""
    gradient_dtype: DType = "float32"
    """The type in which gradients are sent."""
    update: UpdateRule = msgspec.field(default_factory=UpdateRule)
    """How a gradient changes the parameters, unless the program says it itself."""
    consistency: Consistency = "synchronous"
    """When a gradient is applied, and whom a worker waits for."""
    staleness: Staleness = 0
    """Iterations that a worker may be ahead of the slowest, if stale-synchronous."""
    seed: Count = 0
    """The seed of what an emulated program draws."""
    aggregation: Aggregation | None = None
    """How it shares aggregators, by a placement policy's name; left out: as its cluster does."""
    tenant: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The tenant on whose account it runs; empty: none."""
    restarts: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    """How often ranks that die are started again, counted over all ranks; each goes on where the
    job is."""
    fractional_share: bool = False
    """It takes aggregators of less than a core, as emulated pools have, and is slowed by them."""
    loss_limit: LossLimit = 0.0
    """The part of its speed that sharing may cost; 0: as its tenant, or cluster, says."""


class JobRecord(Record, kw_only=True, frozen=True):
    """The master's durable record of a job: one key of the bucket `jobs`."""

    spec: JobSpec
    state: JobState = "pending"
    cluster: ClusterId | None = None
    node: NodeId | None = None
    submitted_s: Seconds = 0.0
    started_s: Seconds = 0.0
    finished_s: Seconds = 0.0
    reason: Text = ""
    results: Annotated[dict[Name, Text], msgspec.Meta(max_length=64)] = msgspec.field(
        default_factory=dict
    )
    """What each rank reported when it ended: rank -> a JSON text of at most 4 KiB."""
    restarts: Annotated[dict[Name, Count], msgspec.Meta(max_length=64)] = msgspec.field(
        default_factory=dict
    )
    """Rank -> how often it was started again. Its processes are numbered by it, from 0."""
    optimizer_state_lost: bool = False
    run: Run = 0
    """How often it was run again."""
    deleted: bool = False
    """It ended, and nobody is shown it any more. Its id is free."""
    released: bool = False
    """It ended, its controller and its worker node know, and nothing of it is left there."""
    epoch: Count = 0

    def __post_init__(self) -> None:
        cut_texts(self)


class RankProgress(Record, kw_only=True, frozen=True):
    """How far one rank is."""

    rank: Rank
    iteration: Count = 0
    """The last iteration that ended."""
    speed: Seconds = 0.0
    """Iterations a second, over the last seconds."""
    heard_s: Seconds = 0.0
    """When its Agent last reported."""

    def __post_init__(self) -> None:
        bound(self, "speed", most=SECONDS_MAX)


class JobProgress(Record, kw_only=True, frozen=True):
    """How far a job is, how fast, and where: known to the master that leads, and not stored."""

    iteration: Count = 0
    """The last iteration that ended on every rank."""
    iterations: Count = 0
    """Iterations that it trains for; 0: its program counts for itself."""
    speed: Seconds = 0.0
    """Iterations a second of its slowest rank, over the last seconds; 0: not known."""
    eta_s: Seconds | None = None
    """Seconds until its last iteration at this speed; None: not known."""
    loss: Finite | None = None
    """Part of its profiled speed that it lost in its last monitor window; below 0: it is faster;
    None: not measured."""
    phase: Name = ""
    """The phase of its placement: hosting, profiling, moving or steady; empty: it has none."""
    moves: Count = 0
    """Migrations so far."""
    aggregators: Annotated[tuple[AggregatorId, ...], msgspec.Meta(max_length=1024)] = ()
    updated_s: Seconds = 0.0
    """When an Agent of it last reported; 0: none did to this master."""
    ranks: Annotated[tuple[RankProgress, ...], msgspec.Meta(max_length=64)] = ()
    """Ranks that have reported; only in the answer to GetJob."""

    def __post_init__(self) -> None:
        for name in ("speed", "eta_s"):
            if getattr(self, name) is not None:
                bound(self, name, most=SECONDS_MAX)


# Requests to the master ------------------------------------------------------------------------


class SubmitJob(Message, kw_only=True, frozen=True, tag="job.submit"):
    """Answered by JobAccepted after the record is stored, or Refused."""

    spec: JobSpec


class CancelJob(Message, kw_only=True, frozen=True, tag="job.cancel"):
    job: IdText


class RerunJob(Message, kw_only=True, frozen=True, tag="job.rerun"):
    """Run a job that ended once more, as it was submitted. Answered by JobInfo once it is stored,
    or Refused. Idempotent by `run`, which is one more than that of the job's record."""

    job: IdText
    run: Annotated[int, msgspec.Meta(ge=1, le=RUNS_MAX)]


class DeleteJob(Message, kw_only=True, frozen=True, tag="job.delete"):
    """Forget a job that ended; its id is free. Idempotent."""

    job: IdText


class GetJob(Message, kw_only=True, frozen=True, tag="job.get"):
    job: IdText


class ListJobs(Message, kw_only=True, frozen=True, tag="job.list"):
    """Newest first, without results and with the first word of programs only (`whole`: with all of
    it), at most LIST_JOBS_MAX from `offset` on, fewer where they fill a message.

    `order` active: those that run, then those that wait, in the order of their submission, then
    those that ended, the latest first.
    """

    state: JobState | None = None
    offset: Count = 0
    tenant: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    """Only this tenant's."""
    order: Literal["newest", "active"] = "newest"
    whole: bool = False


class RegisterJob(Message, kw_only=True, frozen=True, tag="job.register"):
    """An Agent says that its rank is there and which tensors its program trains.

    Rank 0's list is the job's; another rank's must equal it. A job unknown to the master is
    admitted on the spot when `spec` is given (a program that its user started by hand). `update`:
    the program's rule; it counts where the submitted spec has the default one.
    """

    job: IdText
    rank: Rank
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=TENSORS_MAX)]
    spec: JobSpec | None = None
    update: UpdateRule | None = None

    def __post_init__(self) -> None:
        check_elements(self.tensors)


class FinishJob(Message, kw_only=True, frozen=True, tag="job.finish"):
    """An Agent of a job without `program` says that its rank is done."""

    job: IdText
    rank: Rank
    result: Text = ""


class AskMissing(Message, kw_only=True, frozen=True, tag="job.missing"):
    """An Agent has waited for `waited_s` for an iteration that other ranks have not pushed: where
    are they? Answered by MissingRanks."""

    job: IdText
    rank: Rank
    """The rank that asks."""
    iteration: Count
    waited_s: Seconds
    behind: Annotated[tuple[tuple[Rank, Count], ...], msgspec.Meta(min_length=1, max_length=64)]
    """Each rank that it waits for, and the newest iteration that this one has pushed."""


class ListTenants(Message, kw_only=True, frozen=True, tag="tenant.list"):
    """Tenants that have limits or jobs."""


# Answers ---------------------------------------------------------------------------------------


class JobAccepted(Message, kw_only=True, frozen=True, tag="job.accepted"):
    job: IdText
    known: JobRecord | None = None
    """The record of a job that was there already, with this spec: nothing was started. None: it is
    new."""


class JobRegistered(Message, kw_only=True, frozen=True, tag="job.registered"):
    """The job's cluster: its controller answers `locate` with the tensors' places."""

    job: IdText
    cluster: ClusterId
    workers: Positive


class JobInfo(Message, kw_only=True, frozen=True, tag="job.info"):
    job: JobRecord
    progress: JobProgress | None = None
    """None: no Agent and no controller has said anything of it to this master."""


class JobList(Message, kw_only=True, frozen=True, tag="job.list-reply"):
    jobs: Annotated[tuple[JobRecord, ...], msgspec.Meta(max_length=10_000)]
    total: Count = 0
    """Jobs that match, on all pages."""
    progress: Annotated[dict[JobId, JobProgress], msgspec.Meta(max_length=10_000)] = msgspec.field(
        default_factory=dict
    )
    """Progress of the page's jobs, where any is known."""
    counts: Annotated[dict[JobState, Count], msgspec.Meta(max_length=16)] = msgspec.field(
        default_factory=dict
    )
    """State -> number of jobs of the tenant that was asked for, in every state."""


class MissingRanks(Message, kw_only=True, frozen=True, tag="job.missing-reply"):
    reason: Text
    """Sentence that names each of the ranks, and says how far it is."""
    final: bool = False
    """They will never push it: waiting longer is useless."""
    restarting: bool = False
    """One of them is being started again: its time does not count as waiting."""

    def __post_init__(self) -> None:
        cut_texts(self)


class TenantInfo(Record, kw_only=True, frozen=True):
    """What a tenant may have (of the master's configuration), and what it has now."""

    tenant: Annotated[str, msgspec.Meta(max_length=64)]
    cpu_fraction: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    """Part of the pool's CPU that its jobs may ask for together."""
    loss_limit: LossLimit
    """0: that of the job's cluster."""
    queued_max: Count
    waiting: Count
    """Jobs that were not started yet."""
    running: Count
    cpu: Finite
    """Cores that the running ones ask for: as profiled, else their servers."""
    pool_cpu: Finite
    """Cores of the pool."""
    used_cpu: Finite = 0.0
    """Cores that their tasks took of aggregators, in each job's last monitor window."""
    used_slots: Finite = 0.0
    """Aggregators that they kept busy."""
    measured: Count = 0
    """Jobs of which such a window is known."""
    loss: Finite = 0.0
    """Of its profiled speed, of the job that lost most; below 0: all are faster."""
    beyond: Count = 0
    """Jobs that lost more than their limit."""

    def __post_init__(self) -> None:
        bound(self, "cpu", "pool_cpu", "used_cpu", "used_slots", "loss")
        bound(self, "measured", "beyond", most=COUNT_MAX)


class TenantList(Message, kw_only=True, frozen=True, tag="tenant.list-reply"):
    tenants: Annotated[tuple[TenantInfo, ...], msgspec.Meta(max_length=10_000)]


# Facts -----------------------------------------------------------------------------------------


class JobEvent(Message, kw_only=True, frozen=True, tag="job.event"):
    """sw.v1.evt.job.<id>.<state or fact>: the job's life, as operators and loadgen follow it."""

    job: JobId
    fact: Annotated[str, msgspec.Meta(max_length=64)]
    at_s: Seconds
    cluster: ClusterId | None = None
    reason: Text = ""
    detail: Annotated[dict[Name, Text], msgspec.Meta(max_length=32)] = msgspec.field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        cut_texts(self)
        cut_details(self)
