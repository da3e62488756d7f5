"""A job: what a user submits, what the master remembers, what happens to it.

There is one job model; a trace row, a submission and a running emulation all become a `JobSpec`.
"""

from typing import Annotated, Final, Literal

import msgspec

from slackwater.schemas.base import (
    ID_PATTERN,
    SECONDS_MAX,
    WORKERS_MAX,
    Attempt,
    ClusterId,
    Cores,
    Count,
    IdText,
    JobId,
    LossLimit,
    Name,
    NodeId,
    Positive,
    Record,
    Run,
    Seconds,
    Text,
    VirtualRanks,
    Workers,
    bound,
    cut_texts,
)
from slackwater.schemas.gpus import (
    GPU_TYPES_MAX,
    NODES_HELD_MAX,
    Gpus,
    GpuType,
    NodeAllocation,
    NodeGpuIds,
    Speed,
    Within,
    check_gpus,
)
from slackwater.schemas.job_checks import check_batch, check_workers
from slackwater.schemas.job_states import HOLDING_STATES, JobState
from slackwater.schemas.steps import StepProfile
from slackwater.schemas.tenants import Tenant
from slackwater.schemas.tensors import DType, UpdateRule
from slackwater.schemas.traffic import JobTraffic
from slackwater.schemas.usage import JOB_DAYS_MAX, DayUse
from slackwater.schemas.virtual_ranks import check_virtual_ranks

Aggregation = Annotated[str, msgspec.Meta(pattern=ID_PATTERN)]
"""A placement policy's name; controllers know which there are."""
Resizing = Literal["", "joining", "ordered", "leaving"]
"""A running job's way to another number of workers (services/master/scaling.py)."""
Consistency = Literal["synchronous", "asynchronous", "stale-synchronous"]
"""Says what is applied, and whom a worker waits for: the mean of an iteration's pushes, once all
are in; each push by itself, as it comes; the same, and nobody is further ahead than a bound."""
Staleness = Annotated[int, msgspec.Meta(ge=0, le=1000)]
"""Iterations that a worker of a stale-synchronous job may be ahead of the slowest."""
PRIORITY_MAX: Final = 1000
AFTER_MAX: Final = 32
"""Jobs that one job can come after."""
Priority = Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]
PROGRAM_WORDS_MAX: Final = 64
Program = Annotated[tuple[Text, ...], msgspec.Meta(max_length=PROGRAM_WORDS_MAX)]
"""A command line, as words."""
GRACE_S_MAX: Final = 600.0
GraceSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=GRACE_S_MAX)]
"""Seconds between SIGTERM and SIGKILL."""
PAUSE_GRACE_S: Final = 30.0
"""Seconds of grace of a job that is to go on later, unless it says."""
ENV_MAX: Final = 64
ENV_NAME_PATTERN: Final = r"^[A-Za-z_][A-Za-z0-9_]{0,254}\Z"
Environment = Annotated[
    dict[Annotated[str, msgspec.Meta(pattern=ENV_NAME_PATTERN)], Text],
    msgspec.Meta(max_length=ENV_MAX),
]
"""Name -> value of environment variables."""


OWN_ENV: Final = "SLACKWATER_"
"""Variables that begin so tell a program what it is: nobody else sets them."""

CHECKPOINT_VARIABLE: Final = "SLACKWATER_CHECKPOINT"
"""Tells a program the folder of its checkpoints."""
FROM_VARIABLE: Final = "SLACKWATER_FROM"
"""Tells a program the folder of the checkpoint that its job begins with."""
SAVE_TO_VARIABLE: Final = "SLACKWATER_SAVE_TO"
"""Tells an elastic program that goes back to marks `JobSpec.save_to`."""
SAVE_EVERY_VARIABLE: Final = "SLACKWATER_SAVE_EVERY_S"
"""Tells it `JobSpec.save_every_s`."""
MEMORY_VARIABLE: Final = "SLACKWATER_MEMORY_BYTES"
"""Tells a program `JobSpec.memory_bytes`, if that was said."""
CHOOSE_HOSTS_VARIABLE: Final = "SLACKWATER_CHOOSE_HOSTS"
"""Tells an elastic program that chooses its number of hosts its bounds, as LEAST:MOST."""
BY_TURNS_VARIABLE: Final = "SLACKWATER_BY_TURNS"
"""Set to 1 in the environment of a program whose job takes turns."""
AGGREGATE_VARIABLE: Final = "SLACKWATER_AGGREGATE"
"""Tells a program what `JobSpec.aggregate` says, unless that is "auto"."""
BATCH_VARIABLE: Final = "SLACKWATER_BATCH"
"""Tells a program with a fixed batch its size in examples; 0: as the program begins."""


CodeDigest = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
"""A pack of code, by its SHA-256; empty: the program is on its nodes."""
VenvDigest = CodeDigest
"""A pack of a virtual environment, by its SHA-256; empty: its interpreter is the nodes' own."""
VENV_OBJECT: Final = "venv-"
"""Begins the names of virtual environments in the object store, beside packs of code."""


STATE_COPIES: Final = 20
"""Iterations within which all of the optimiser's states are copied, unless a job says."""


class JobSpec(Record, kw_only=True, frozen=True):
    """A job as its user asks for it.

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
    """Processes that train, one per rank. A job with GPUs has so many at the size that it asks for,
    and each has an equal part of the GPUs."""
    workers_min: Annotated[int, msgspec.Meta(ge=0, le=WORKERS_MAX)] = 0
    """The fewest workers that a job without GPUs may be scaled to; 0: `workers`."""
    workers_max: Annotated[int, msgspec.Meta(ge=0, le=WORKERS_MAX)] = 0
    """The most workers that a job without GPUs may be scaled to; 0: `workers`."""
    servers: Annotated[int, msgspec.Meta(ge=1, le=WORKERS_MAX)] = 1
    """Parameter servers that it would reserve for itself; its standalone speed is profiled so."""
    iterations: Positive = 1
    """Iterations that it trains for."""
    program: Program = ()
    """The command line of one rank, as words; empty: its user starts it by hand."""
    folder: Text = ""
    """The node's folder that the program runs in; empty: where `slackwater submit` is called, of a
    job that comes by another way the worker service's own."""
    code: CodeDigest = ""
    """The pack of code, by its digest, that its nodes get and run it in (`slackwater submit
    --workdir` makes it); `folder` is one within it then. Empty: its nodes have the code."""
    venv: VenvDigest = ""
    """The virtual environment, by its digest, that its nodes get, and whose `python` and programs
    it runs (`slackwater submit --venv` makes it). Empty: it runs what its nodes have."""
    env: Environment = msgspec.field(default_factory=dict)
    """Environment variables of its program, beside those of the worker service. Whoever may see the
    job sees their values."""
    time_limit_s: Seconds = 0.0
    """Seconds that it may run, in all its attempts together; then it fails. 0: without limit."""
    hang_timeout_s: Seconds = 0.0
    """Seconds without an iteration after which it is stopped and started again, once it is found
    hanging; 0: it is only told."""
    gradient_dtype: DType = "float32"
    """The type in which gradients are sent."""
    update: UpdateRule = msgspec.field(default_factory=UpdateRule)
    """How a gradient changes the parameters, unless the program says it itself."""
    consistency: Consistency = "synchronous"
    """When a gradient is applied, and whom a worker waits for."""
    staleness: Staleness = 0
    """Iterations that a worker may be ahead of the slowest, if stale-synchronous."""
    noise: bool = False
    """Measure with each update of a synchronous job what tells its gradient noise scale: its
    program reads it from its Agent."""
    state_copies: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = STATE_COPIES
    """Iterations within which its workers, each a part, copy the optimiser's states from
    aggregators that they reach over a network, in case these are lost; 0: they copy none."""
    virtual_ranks: VirtualRanks = 0
    """Gradients of each update, whatever the number of workers that compute them; 0: one of each
    worker, unless the program says it itself."""
    seed: Count = 0
    """The seed of what an emulated program draws."""
    aggregate: Literal["auto", "on", "off"] = "auto"
    """Whether aggregators add up the gradients of a model that its program wraps in PyTorch's
    DistributedDataParallel. "auto": where they can; "on": or it fails; "off": they do not."""
    aggregation: Aggregation | None = None
    """How it shares aggregators, by a placement policy's name; left out: as its cluster does."""
    tenant: Tenant = ""
    """The tenant on whose account it runs; empty: none."""
    restarts: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    """How often ranks that die are started again, counted over all ranks; each goes on where the
    job is."""
    fractional_share: bool = False
    """Accept aggregators of less than a core, as emulated pools have, which slow the job down."""
    loss_limit: LossLimit = 0.0
    """The part of its speed that sharing may cost; 0: as its tenant, or cluster, says."""
    gpus: Gpus = 0
    """GPUs of the whole job, given all together; 0: its processes need none, and take a slot of
    their node each."""
    gpus_min: Gpus = 0
    """The fewest GPUs that it can run on; 0: `gpus`."""
    gpus_max: Gpus = 0
    """The most GPUs that it can use; 0: `gpus`."""
    gpu_types: Annotated[dict[GpuType, Speed], msgspec.Meta(max_length=GPU_TYPES_MAX)] = (
        msgspec.field(default_factory=dict)
    )
    """GPU types that it can run on, each with its speed relative to a reference type; empty: any
    type, at one speed."""
    within: Within = ""
    """All its GPUs must lie on one machine, or on machines of one rack."""
    cores: Cores = 0.0
    """Cores of CPU that each of its processes needs; 0: it does not say."""
    memory_bytes: Count = 0
    """Bytes of main memory that each of its processes needs; 0: it does not say."""
    choose_hosts: bool = False
    """Its program measures how many hosts within its bounds serve it best, and asks for these (Lee
    2020, section 3.3.1)."""
    by_turns: bool = False
    """Its processes compute, and move bytes, by turns with those of other such jobs on their node
    (Lee 2020, section 4.3.1), so that jobs share a node which would otherwise be in each other's
    way."""
    priority: Priority = 0
    """Jobs with a higher one are preferred by policies that know priorities."""
    after: Annotated[tuple[IdText, ...], msgspec.Meta(max_length=AFTER_MAX)] = ()
    """The job starts once these have completed; if one does not, it is cancelled."""
    after_any: bool = False
    """It starts once those of `after` have ended, however."""
    batch_size: Count = 0
    """Examples of one iteration over all processes; 0: it does not say."""
    batch_min: Count = 0
    """The smallest batch that it may be trained with; 0: `batch_size`."""
    batch_max: Count = 0
    """The largest batch that it may be trained with; 0: `batch_size`."""
    batch: Literal["adaptive", "fixed"] | None = None
    """Whether its batch may be tuned while it runs; None: as its program, or a policy, has it."""
    adaptive: bool = False
    """Set where the number of GPUs may change within its bounds while the job runs; otherwise it
    keeps the number that it was started with."""
    preemptible: bool = True
    """A policy may pause it for others' sake; otherwise it keeps what it was given until it ends.
    """
    grace_s: GraceSeconds = 0.0
    """Seconds that it may take to save and end after SIGTERM, before it is killed; 0: 30 where it
    is to go on later, else as its worker service's `stop_grace_s` says."""
    checkpoint: Text = ""
    """The folder in which its program saves what it needs to go on, which it finds in its
    environment as SLACKWATER_CHECKPOINT; empty: it saves nothing. Then only a job whose parameters
    are in aggregators can be paused without losing work."""
    start_from: Text = ""
    """The folder of a checkpoint that aggregators made (`slackwater checkpoint`), as they see it:
    its parameters and optimiser states are where the job begins, at that iteration; empty: it
    begins with its program's."""

    save_to: Text = ""
    """A folder in which its aggregators, which see it, save its parameters and optimiser states now
    and then: what is lost with an aggregator and its workers comes from there, and so does what
    another run begins with. Empty: they save nothing."""
    save_every_s: Seconds = 60.0
    """Seconds within which all of it is saved once; 0: its controller finds the interval that costs
    least."""
    save_fraction: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """The part that is saved at a time, so much more often: what changed most since it was saved
    (SCAR: Qiao 2021, section 5.4.2)."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """How numbers of a part are saved. bfloat16: rounded, and twice as much of the job for as many
    bytes, which costs less after a loss; whole sets are float32."""
    recover: Literal["partial", "rollback"] = "partial"
    """The way back where an aggregator's memory is lost. "partial": what was there comes from the
    newest copy of it, and training goes on. "rollback": an elastic program is saved whole in
    `save_to`, and goes back to that, whole (Qiao 2021, chapter 5)."""

    def __post_init__(self) -> None:
        if self.gpus_min or self.gpus_max or self.gpu_types or self.gpus % self.workers:
            check_gpus(self.gpus, *self.gpu_bounds, self.workers, gpu_types=bool(self.gpu_types))
        if self.workers_min or self.workers_max:
            check_workers(self)
        if self.virtual_ranks:
            check_virtual_ranks(self.virtual_ranks, self.workers_bounds[1], self.consistency)
        if self.within and not self.gpus:
            raise ValueError(f"within: {self.within} without GPUs; give gpus, or leave it out")
        if self.choose_hosts and (self.gpus or not self.elastic):
            raise ValueError("choose_hosts: give workers_min and workers_max, and no gpus")
        if self.by_turns and self.gpus:
            raise ValueError("by_turns: of a job with GPUs, which has them to itself; leave it out")
        if self.batch_size or self.batch_min or self.batch_max:
            check_batch(self)
        if self.noise and self.consistency != "synchronous":
            raise ValueError(
                f"noise: the job is {self.consistency}, so that its gradients are of different "
                "parameters; leave noise out, or make the job synchronous"
            )
        if not self.save_every_s and self.save_fraction < 1.0:
            raise ValueError(
                "save_every_s: 0, as its controller finds right, beside save_fraction; give seconds"
            )
        if self.save_dtype != "float32" and self.save_fraction == 1.0:
            raise ValueError(
                f"save_dtype: {self.save_dtype} of a job that is saved whole; give a save_fraction "
                "below 1, or leave it out"
            )
        if self.recover == "rollback":
            self._check_rollback()
        for name in self.env:
            if name.startswith(OWN_ENV):
                raise ValueError(f"env: {name} is set by the worker service itself; leave it out")

    def _check_rollback(self) -> None:
        wrong = ""
        if not self.save_to:
            wrong = "without a folder to go back to; give save_to"
        elif not self.save_every_s:
            wrong = "beside save_every_s 0; give seconds"
        elif self.save_fraction < 1.0:
            wrong = f"beside save_fraction {self.save_fraction:g}; leave that out, all is saved"
        elif not self.program or self.consistency != "asynchronous":
            wrong = "of a job that is not an elastic program; leave it out"
        if wrong:
            raise ValueError(f"recover: rollback {wrong}")

    @property
    def gpu_bounds(self) -> tuple[int, int]:
        """The fewest and the most GPUs that it may be given."""
        return self.gpus_min or self.gpus, self.gpus_max or self.gpus

    @property
    def workers_bounds(self) -> tuple[int, int]:
        """The fewest and the most workers. In a stale-synchronous job the slowest one bounds all
        others: it keeps its number."""
        if self.consistency == "stale-synchronous":
            return self.workers, self.workers
        if self.gpus:
            least, most = self.gpu_bounds
            return min(self.processes(least), WORKERS_MAX), min(self.processes(most), WORKERS_MAX)
        return self.workers_min or self.workers, self.workers_max or self.workers

    @property
    def elastic(self) -> bool:
        """Say whether its number of workers may change."""
        least, most = self.workers_bounds
        return least < most

    @property
    def gpus_each(self) -> int:
        """GPUs of each of its processes; 0: it takes slots."""
        return self.gpus // self.workers

    @property
    def needs_host(self) -> bool:
        """Say whether it asks for processor cores or main memory."""
        return bool(self.cores or self.memory_bytes)

    def processes(self, held: int) -> int:
        """Count its processes on so many GPUs; on slots: one each."""
        return -(-held * self.workers // self.gpus) if self.gpus else held


ENDED_TOGETHER_MAX: Final = 64


class EndedJob(Record, kw_only=True, frozen=True):
    """A job that ended and whose own record the master has dropped."""

    id: JobId
    spec: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    """The digest of its specification."""
    state: JobState
    run: Run = 0
    ended_s: Seconds = 0.0


class EndedJobs(Record, kw_only=True, frozen=True):
    """Some of them: a key of the bucket `ended`."""

    jobs: Annotated[tuple[EndedJob, ...], msgspec.Meta(max_length=ENDED_TOGETHER_MAX)]


class JobRecord(Record, kw_only=True, frozen=True):
    """The master's durable record of a job: one key of the bucket `jobs`."""

    spec: JobSpec
    state: JobState = "pending"
    cluster: ClusterId | None = None
    node: NodeId | None = None
    """The first node of its allocation, or of its last one; None: it never had one."""
    submitted_s: Seconds = 0.0
    started_s: Seconds = 0.0
    """When it first held an allocation in this run; 0: it has not yet."""
    finished_s: Seconds = 0.0
    reason: Text = ""
    results: Annotated[dict[Name, Text], msgspec.Meta(max_length=WORKERS_MAX)] = msgspec.field(
        default_factory=dict
    )
    """Results that the ranks reported when they ended: rank -> a JSON text of at most 4 KiB."""
    restarts: Annotated[dict[Name, Count], msgspec.Meta(max_length=WORKERS_MAX)] = msgspec.field(
        default_factory=dict
    )
    """Rank -> how often it was started again. Its processes are numbered by it, from 0."""
    optimizer_state_lost: bool = False
    run: Run = 0
    """How often it was run again."""
    attempt: Attempt = 0
    """The attempt that it is in, or that comes next while it waits: one more whenever it stops
    and may go on. Never less than `run`."""
    allocation: NodeAllocation = ()
    """GPUs that it holds, or slots for a job without GPUs. Stored before anything is ordered,
    and kept after its end until no process of it is left; empty while it waits."""
    gpu_ids: Annotated[dict[NodeId, NodeGpuIds], msgspec.Meta(max_length=NODES_HELD_MAX)] = (
        msgspec.field(default_factory=dict)
    )
    """Node of the allocation -> which of its GPUs; empty for a job without GPUs."""
    ran_on: NodeAllocation = ()
    """The allocation that it gave up when it paused, and where its ranks' logs are since."""
    planned: NodeAllocation = ()
    """While it is stopping: the allocation that it goes on with; empty: it pauses."""
    held: bool = False
    """Somebody paused it, or holds it back: no policy starts it before it is released."""
    waits_for: Annotated[tuple[JobId, ...], msgspec.Meta(max_length=AFTER_MAX)] = ()
    """The jobs of `spec.after` that it still waits for: no policy starts it before."""
    since_s: Seconds = 0.0
    """Since when it has held this allocation, or waited; `gpu_s` and `run_s` are true of then."""
    gpu_s: Seconds = 0.0
    """GPUs (or slots) times seconds that it held before `since_s`: its attained service."""
    run_s: Seconds = 0.0
    """Seconds that it held an allocation before `since_s`."""
    begun_s: Seconds = 0.0
    """When all processes of its present attempt had been started; 0: they have not."""
    worked_s: Seconds = 0.0
    """Seconds of `run_s` in which all its processes ran: without waiting for GPUs that others were
    leaving, and without being started."""
    reallocations: Count = 0
    """How often it was given an allocation after its first one."""
    preemptions: Count = 0
    """How often a policy took all of its allocation."""
    reallocation_s: Seconds = 0.0
    """Seconds in which it does not train when it changes its GPUs, as measured of it and smoothed;
    0: not measured yet."""
    placement: Run = 0
    """The number under which controllers place its tensors: one more with every run, with every
    attempt of a job that `sums`, and whenever its tables go back to a mark."""
    sums: bool = False
    """Its aggregators add gradients up and keep nothing: its programs take the steps, and all its
    ranks must begin an attempt together."""
    skew: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """The largest tensor's part of its model, as its Agents registered it, or as `traffic` says; 0:
    not known yet."""
    traffic: JobTraffic | None = None
    """Its iterations, bytes and sizes as they are known best, and how; None: nothing is."""
    usage: Annotated[tuple[DayUse, ...], msgspec.Meta(max_length=JOB_DAYS_MAX)] = ()
    """Its use by day, of all runs under its id, up to its last stop or end."""
    used_s: Seconds = 0.0
    """Until when `usage` has what its last attempt held; 0: up to `since_s`."""
    workers: Annotated[int, msgspec.Meta(ge=0, le=WORKERS_MAX)] = 0
    """The number of workers that somebody asked for since it was submitted; 0: as submitted."""
    counted: Annotated[int, msgspec.Meta(ge=0, le=WORKERS_MAX)] = 0
    """How many of its ranks count, from rank 0 on, while others join or leave; 0: all."""
    size_next: Annotated[int, msgspec.Meta(ge=0, le=WORKERS_MAX)] = 0
    """The number of workers that it changes to; 0: none."""
    resizing: Resizing = ""
    """How far a change of its number of workers is; empty: there is none."""
    size_since: Count = 0
    """The version since which its present number of workers counts, as its rank 0 told."""
    joins: Annotated[dict[Name, Count], msgspec.Meta(max_length=WORKERS_MAX)] = msgspec.field(
        default_factory=dict
    )
    """Rank -> how often it joined in this attempt, beside those that began it. Its processes are
    numbered by it, too."""
    steps: StepProfile | None = None
    """The times of its iterations, of a job whose updates are not synchronous; None: not known."""
    mark: Text = ""
    """The folder of the newest mark of its program, of a job that goes back to that after a loss;
    empty: it has none yet."""
    begins_with: Text = ""
    """The mark that its present placement began with; empty: with `spec.start_from`, if any."""
    rolls_back: bool = False
    """While it is stopping: it goes on from its mark, as a part of its tables is lost."""
    deleted: bool = False
    """Set when an ended job was deleted: it is not listed any more, and its id is free."""
    released: bool = False
    """Set when the job ended and its controller and worker nodes have let everything of it go."""
    epoch: Count = 0

    def __post_init__(self) -> None:
        cut_texts(self)
        bound(self, "gpu_s", "run_s", "worked_s", "reallocation_s", most=SECONDS_MAX)


def upgraded(record: JobRecord) -> JobRecord:
    """Return a stored record as this version keeps it: version 0.2.0 knew neither attempts nor
    allocations, but a run and one node for all processes of a job. Version 0.3.0 placed a job under
    its run."""
    attempt, allocation = max(record.attempt, record.run), record.allocation
    if not allocation and record.node is not None and record.state in HOLDING_STATES:
        allocation = ((record.node, record.spec.workers),)
    placement = max(record.placement, record.run)
    return msgspec.structs.replace(
        record, attempt=attempt, allocation=allocation, placement=placement
    )
