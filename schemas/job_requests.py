"""Requests about jobs to the master, and its answers."""

from typing import Annotated, Literal

import msgspec

from slackwater.schemas.base import (
    RUNS_MAX,
    TENSORS_MAX,
    WORKERS_MAX,
    ClusterId,
    Count,
    IdText,
    JobId,
    Message,
    Positive,
    Rank,
    Seconds,
    Secret,
    Text,
    VirtualRanks,
    Workers,
    cut_texts,
)
from slackwater.schemas.cluster import PermitUse, TurnGroup
from slackwater.schemas.hangs import Hang
from slackwater.schemas.job_states import JobState
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.progress import JobProgress, ProgramProgress, TuningPoint
from slackwater.schemas.tenants import Tenant
from slackwater.schemas.tensors import DType, TensorSpec, UpdateRule, check_elements

Address = Annotated[str, msgspec.Meta(max_length=259)]

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


class PauseJob(Message, kw_only=True, frozen=True, tag="job.pause"):
    """Keep a job from running until it is resumed: one that runs saves and ends. Answered by
    JobInfo once it is stored, or Refused. Idempotent."""

    job: IdText
    waiting: bool = False
    """Refuse it for a job that has processes, or is about to."""


class ResumeJob(Message, kw_only=True, frozen=True, tag="job.resume"):
    """Let policies start a paused job again. Answered by JobInfo once it is stored, or Refused.
    Idempotent."""

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
    tenant: Tenant | None = None
    """List only this tenant's jobs."""
    order: Literal["newest", "active"] = "newest"
    whole: bool = False


class RegisterJob(Message, kw_only=True, frozen=True, tag="job.register"):
    """An Agent says that its rank is there and which tensors its program trains.

    Rank 0's list is the job's; another rank's must equal it. A job unknown to the master is
    admitted on the spot when `spec` is given (a program that its user started by hand). `update`:
    the program's rule; it counts where the submitted spec has the default one. `noise`: the program
    asks for what tells the gradient noise scale, as `JobSpec.noise` does.
    """

    job: IdText
    rank: Rank
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=TENSORS_MAX)]
    spec: JobSpec | None = None
    update: UpdateRule | None = None
    noise: bool = False
    virtual_ranks: VirtualRanks = 0
    """The program's; it counts where the submitted spec has none."""
    gradient_dtype: DType | None = None
    """The program's; it counts where the submitted spec has the default one."""

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
    behind: Annotated[
        tuple[tuple[Rank, Count], ...], msgspec.Meta(min_length=1, max_length=WORKERS_MAX)
    ]
    """Each rank that it waits for, and the newest iteration that this one has pushed."""


class ScaleJob(Message, kw_only=True, frozen=True, tag="job.scale"):
    """Give a job another number of workers, within its bounds: at once where it can go on
    meanwhile, else when it starts next. Answered by JobInfo once it is stored, or Refused.
    Idempotent."""

    job: IdText
    workers: Workers


class AskSize(Message, kw_only=True, frozen=True, tag="job.ask-size"):
    """Rank 0 of an elastic job asks how many workers are wanted. Answered by SizeWanted."""

    job: IdText
    rank: Annotated[int, msgspec.Meta(ge=0, le=0)] = 0
    """It is nobody else's to say."""
    workers: Annotated[int, msgspec.Meta(ge=0, le=WORKERS_MAX)] = 0
    """How many have counted since version `since`, the newest such number of which a version has
    been applied; 0: none has yet."""
    since: Count = 0


class JoinJob(Message, kw_only=True, frozen=True, tag="job.join"):
    """A rank is all ready and waits until it counts. Repeated until then. Answered by Ok."""

    job: IdText
    rank: Rank


class Meet(Message, kw_only=True, frozen=True, tag="job.meet"):
    """A rank asks where the driver of its elastic program listens; rank 0, where it does, tells.
    Said again now and then, as no master stores it. Answered by Meeting."""

    job: IdText
    rank: Rank
    address: Address = ""
    """host:port, from rank 0 alone; empty: it asks."""
    secret: Secret = ""
    """By which hosts are known there."""
    progress: ProgramProgress | None = None
    """How far the program is, from rank 0."""


class UseHosts(Message, kw_only=True, frozen=True, tag="job.use-hosts"):
    """Rank 0 of an elastic program asks for another number of hosts on the program's behalf; beyond
    the job's bounds, for the nearest. Answered by Ok once it is stored, or Refused. Idempotent."""

    job: IdText
    rank: Annotated[int, msgspec.Meta(ge=0, le=0)] = 0
    attempt: Count
    """The number of its process."""
    hosts: Workers


class KeepMark(Message, kw_only=True, frozen=True, tag="job.keep-mark"):
    """Rank 0 of an elastic program has a new mark, whole: from now on the job goes back to that.
    Answered by Ok once it is stored. Idempotent."""

    job: IdText
    rank: Annotated[int, msgspec.Meta(ge=0, le=0)] = 0
    attempt: Count
    """The number of its process."""
    mark: IdText
    """Its name, which is that of its folder in the job's `save_to`."""


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


class SizeWanted(Message, kw_only=True, frozen=True, tag="job.size-wanted"):
    """From the next iteration on so many workers are to count."""

    workers: Workers


class Meeting(Message, kw_only=True, frozen=True, tag="job.meeting"):
    """Where the driver of an elastic program listens; empty: it has not told yet."""

    address: Address = ""
    secret: Secret = ""
    over: bool = False
    """Rank 0 has ended: there is nobody to meet."""


class JobInfo(Message, kw_only=True, frozen=True, tag="job.info"):
    job: JobRecord
    progress: JobProgress | None = None
    """None: no Agent and no controller has said anything of it to this master."""
    hang: Hang | None = None
    """Set while no rank of it goes on."""
    history: Annotated[tuple[TuningPoint, ...], msgspec.Meta(max_length=1024)] = ()
    """How it was tuned over time, by its reports of goodput to this master: thinned as they grow
    many."""
    turns: Annotated[tuple[PermitUse, ...], msgspec.Meta(max_length=WORKERS_MAX)] = ()
    """Its use of its nodes' permits, of a job that takes turns."""
    group: TurnGroup | None = None
    """Set for a job that takes turns and has not ended."""


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
