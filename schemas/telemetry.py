"""Measurements taken while jobs run: iterations by Agents, task costs by aggregators, windows by
the profiler. One record per period, never one per iteration or push."""

from typing import Annotated

import msgspec

from slackwater.schemas.base import (
    AGGREGATORS_MAX,
    BUCKETS_MAX,
    FINITE_MAX,
    TASKS_MAX,
    AggregatorId,
    Attempt,
    Count,
    Finite,
    Index,
    JobId,
    Message,
    Positive,
    Rank,
    Record,
    Seconds,
    bound,
)
from slackwater.schemas.placement import Profile
from slackwater.schemas.steps import TurnTimes


class LinkTimes(Record, kw_only=True, frozen=True):
    """Bytes between a job's workers and one aggregator over a network, and the seconds in which any
    of them were on their way (several transfers at once count once)."""

    aggregator: AggregatorId
    pushed_bytes: Count = 0
    pushing_s: Seconds = 0.0
    pulled_bytes: Count = 0
    pulling_s: Seconds = 0.0


Links = Annotated[tuple[LinkTimes, ...], msgspec.Meta(max_length=AGGREGATORS_MAX)]


class SubtaskTimes(Record, kw_only=True, frozen=True):
    """Seconds that a process of a job that takes turns held its node's permits, and that it waited
    for them."""

    compute_s: Seconds = 0.0
    move_s: Seconds = 0.0
    waited_s: Seconds = 0.0


class IterationsObserved(Message, kw_only=True, frozen=True, tag="job.iterations"):
    """sw.v1.tel.job.<id>.iterations, about once a second from each rank's Agent."""

    job: JobId
    rank: Rank
    first_iteration: Count
    """The iteration that `durations_s[0]` belongs to; iterations count from 1."""
    durations_s: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=4096)]
    location_epoch: Count
    """The sum of the buckets' location epochs: changes with every migration."""
    bytes_pushed: Count
    bytes_pulled: Count
    workers: Count = 0
    """Ranks of the job (0: not said): a profile waits for all of them."""
    buckets: Count = 0
    """Buckets of the job (0: not said): a profile waits for every one's cost."""
    gaps_s: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=BUCKETS_MAX)] = ()
    """Per bucket, the shortest time since the last report from its push to the program's next wait
    for it; empty: not said."""
    links: Links = ()
    """Since the last report; over shared memory nothing travels, and nothing is said."""
    turns: TurnTimes = TurnTimes()
    """Since the last report: how its time divides."""
    subtasks: SubtaskTimes = SubtaskTimes()
    """Since the last report, of a job that takes turns."""


class TaskCost(Record, kw_only=True, frozen=True):
    """One bucket's executions in the period."""

    job: JobId
    bucket: Index
    executions: Count
    cpu_s: Seconds
    """CPU seconds that one execution is charged: the lower quartile measured so far, or what its
    bytes are charged (charge_ns_per_byte)."""
    nbytes: Count
    real_cpu_s: Seconds = 0.0
    """CPU seconds of one execution, measured: the lower quartile so far; 0: not said."""
    undercharged: Count = 0
    """Executions that took more CPU time than they were charged."""


class JobCpu(Record, kw_only=True, frozen=True):
    """The time that one job's tasks took of one aggregator in the period."""

    job: JobId
    cpu_s: Seconds
    """CPU seconds, as they were measured."""
    slot_s: Seconds
    """Seconds of the aggregator's slot: charged CPU time / cpu_share."""


class TasksObserved(Message, kw_only=True, frozen=True, tag="aggregator.tasks"):
    """sw.v1.tel.aggregator.<id>.tasks, once per profiling period."""

    aggregator: AggregatorId
    period_s: Seconds
    tasks: Annotated[tuple[TaskCost, ...], msgspec.Meta(max_length=TASKS_MAX)]
    host_cpu_percent: Finite = 0.0
    jobs: Annotated[tuple[JobCpu, ...], msgspec.Meta(max_length=TASKS_MAX)] = ()


class HostLoad(Message, kw_only=True, frozen=True, tag="host.load"):
    """sw.v1.tel.profiler.<id>.host: how busy the machine is on which the profiler runs."""

    cpu_percent: Finite
    memory_percent: Finite
    cores: Count
    load1: Finite
    at_s: Seconds


class JobProfiled(Message, kw_only=True, frozen=True, tag="job.profiled"):
    """sw.v1.evt.job.<id>.profiled, from the profiler: enough iterations, every bucket's cost."""

    job: JobId
    location_epoch: Count
    profile: Profile


class WindowMeasured(Message, kw_only=True, frozen=True, tag="job.window"):
    """sw.v1.evt.job.<id>.window, from the profiler: the mean over one monitor window of
    iterations that ran wholly under one placement, by the slowest rank. The slowest twentieth of
    them counts as much as the slowest of the others (common/domains/models/iterations.py)."""

    job: JobId
    location_epoch: Count
    last_iteration: Count
    iterations: Count
    iteration_s: Seconds
    quieter_half_s: Seconds = 0.0
    """The same over the quietest half of them in succession; 0: not said."""
    spanned_s: Seconds = 0.0
    """From the begin of the window's first iteration to the end of the last one that was reported;
    0: not said."""
    links: Links = ()
    """All ranks' transfers since the window before."""
    workers: Count = 0
    """Workers that counted; 0: not said."""
    used_cpu: Finite = 0.0
    """Cores that its tasks took since the window before, of all aggregators together: measured."""
    used_slots: Finite = 0.0
    """Aggregators that they kept busy meanwhile: slot time over time."""

    def __post_init__(self) -> None:
        bound(self, "used_cpu", "used_slots")


class ThroughputTheta(Record, kw_only=True, frozen=True):
    """Pollux's throughput model theta_sys (Qiao, thesis, eq. 3.9): `grad` is computing, `local` and
    `node` are synchronising within and between machines."""

    alpha_grad_s: Seconds
    beta_grad_s: Seconds
    """Per example."""
    alpha_local_s: Seconds
    beta_local_s: Seconds
    """Per GPU beyond two."""
    alpha_node_s: Seconds
    beta_node_s: Seconds
    """Per GPU beyond two."""
    gamma: Annotated[float, msgspec.Meta(ge=1.0, le=10.0)]
    """1: computing and synchronising take turns; 10: they overlap almost perfectly."""


class AggregatedSync(Record, kw_only=True, frozen=True):
    """Synchronising through shared aggregators: T_sync = alpha + max(2 B / link, K B / (A share)) +
    incast (K - 1), for K workers with B bytes of gradient each and A aggregators."""

    alpha_sync_s: Seconds
    share_bytes_s: Annotated[float, msgspec.Meta(gt=0.0, le=FINITE_MAX)] | None = None
    """Bytes a second that one aggregator takes of the job; None: it costs no time."""
    incast_s: Seconds = 0.0
    """Per worker beyond the first."""
    nbytes: Annotated[float, msgspec.Meta(gt=0.0, le=FINITE_MAX)] = 1.0
    """B; 1 where nobody says: shares are then in gradients a second."""
    link_bytes_s: Annotated[float, msgspec.Meta(ge=0.0, le=FINITE_MAX)] = 0.0
    """A worker's link; 0: shared memory, or not known."""
    aggregators: Annotated[int, msgspec.Meta(ge=1, le=AGGREGATORS_MAX)] = 1
    """A, as it was reported."""


class BatchBounds(Record, kw_only=True, frozen=True):
    """How large a job's batch may be, in examples."""

    initial: Positive
    """M0: no total batch is smaller, and efficiency is relative to it."""
    total_max: Positive
    per_gpu_max: Positive
    per_gpu_min: Positive = 1
    fixed: Positive | None = None
    """The total batch of a job that does not adapt it."""
    accumulate_alone: bool = False
    """On one GPU a batch above M0 takes at least one accumulation step."""


class GoodputReport(Message, kw_only=True, frozen=True, tag="job.goodput"):
    """sw.v1.tel.job.<id>.goodput, from the Agent of rank 0 at a fixed interval (Qiao, thesis,
    section 3.4.1): the job's goodput function, fitted to all that it measured."""

    job: JobId
    attempt: Attempt = 0
    """The job's attempt that the Agent belongs to; one of another attempt is not believed."""
    theta: ThroughputTheta
    noise_scale: Annotated[float, msgspec.Meta(ge=0.0, le=FINITE_MAX)] | None = None
    """phi, in examples; None: infinite, no example is redundant."""
    batch: BatchBounds
    gpus_seen: Count = 0
    """The most GPUs that an iteration of the job ran on."""
    aggregated: AggregatedSync | None = None
    """How it synchronises through shared aggregators; None: by all-reduce, as `theta` says, which
    else says the same of the aggregators that it has now."""
    per_gpu: Count = 0
    """m: examples a GPU of the step that it trains with now; 0: not said."""
    accumulation: Count = 0
    """s: steps before the one that synchronises."""
    rate_scale: Annotated[float, msgspec.Meta(ge=0.0, le=FINITE_MAX)] | None = None
    """The factor on the learning rate of the smallest batch; None: not said."""
    progress_epochs: Annotated[float, msgspec.Meta(ge=0.0, le=FINITE_MAX)] | None = None
    """Statistical epochs so far: examples by their efficiency, over the data set (section 3.3.1);
    None: not counted."""
    target_epochs: Annotated[float, msgspec.Meta(gt=0.0, le=FINITE_MAX)] | None = None
    """Statistical epochs that it trains for; None: not known."""
