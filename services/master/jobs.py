"""One job as the master sees it: who may be its rank, and by what it is known to be dead."""

from dataclasses import dataclass, field
from math import inf

import msgspec

from slackwater.schemas.base import CONFLICT, NOT_FOUND, JobId, Refused
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import (
    JobRecord,
    JobSpec,
    RegisterJob,
    TensorSpec,
    UpdateRule,
    first_difference,
)
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.nodes import Nodes
from slackwater.services.master.progress import Progress


@dataclass(slots=True)
class Job:
    """The record, and what is not worth one: it is learned again after a restart."""

    record: JobRecord
    tensors: tuple[TensorSpec, ...] = ()
    update: UpdateRule | None = None
    """The rule of its program, where that says one."""
    placed: bool = False
    waiting: dict[int, int] = field(default_factory=dict)
    """Token -> rank of registrations that wait for the controller."""
    asked: set[str] = field(default_factory=set)
    """place, start, stop, release: requests on their way."""
    told: set[str] = field(default_factory=set)
    """... and those that were carried out."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Requests -> why the last one was refused, until one is carried out."""
    heard_s: float = 0.0
    progress: Progress = field(default_factory=Progress)
    missing_since_s: dict[int, float] = field(default_factory=dict)
    stalled: tuple[float, tuple[int, ...], int, str] = (-inf, (), 0, "")
    """When somebody last waited for ranks, and what was known of them."""
    lines: dict[int, str] = field(default_factory=dict)
    """The last log line of each rank that others waited for."""
    resting: set[int] = field(default_factory=set)
    """Ranks that died and are not to be started again yet."""
    died_s: dict[int, float] = field(default_factory=dict)
    """When ranks died last that this master had started again."""

    @property
    def id(self) -> JobId:
        return JobId(self.record.spec.id)

    @property
    def ended(self) -> bool:
        return self.record.state in TERMINAL_STATES

    @property
    def spec(self) -> JobSpec:
        """As submitted; the rule is the program's where none was submitted."""
        spec = self.record.spec
        if self.update is None or spec.update != UpdateRule():
            return spec
        return msgspec.structs.replace(spec, update=self.update)

    @property
    def by_hand(self) -> bool:
        return not self.record.spec.program

    def awaited(self, rank: int) -> bool:
        """Tell whether it died, and its node has not started it again yet."""
        again = self.record.restarts.get(str(rank), 0)
        return bool(again) and f"again-{rank}-{again}" not in self.told

    @property
    def queued(self) -> bool:
        """Whether it waits for a worker node to start it."""
        return waits_for_slots(self.record)


def waits_for_slots(record: JobRecord) -> bool:
    return record.state == "pending" and bool(record.spec.program)


def newest_first(job: Job) -> tuple[float, JobId]:
    return -job.record.submitted_s, job.id


def active_first(job: Job) -> tuple[int, float, JobId]:
    """Sort running jobs first, then waiting ones, as submitted, then ended ones, latest first."""
    record = job.record
    if job.ended:
        return 2, -record.finished_s, job.id
    return int(record.state == "pending"), record.submitted_s, job.id


def unknown(job: str) -> str:
    return f"there is no job {job}; submit it, or register with its spec"


def unfit(job: Job | None, message: RegisterJob) -> Refused | None:
    """Why this rank cannot be one of the job's."""
    if job is None:
        return Refused(reason=unknown(message.job), code=NOT_FOUND)
    spec = job.record.spec
    if job.ended:
        reason = f"job {spec.id} is {job.record.state}: {job.record.reason or 'it ended'}"
        return Refused(reason=f"{reason}; submit it under another id", code=CONFLICT)
    if message.rank >= spec.workers:
        reason = f"job {spec.id}: rank {message.rank} of {spec.workers} workers"
        return Refused(reason=f"{reason}; ranks count from 0")
    if message.spec is not None and message.spec != spec:
        reason = f"job {spec.id}: rank {message.rank} has another spec than the first rank's"
        return Refused(reason=f"{reason}; start all ranks with one spec", code=CONFLICT)
    difference = first_difference(job.tensors, message.tensors) if job.tensors else ""
    if difference:
        return Refused(reason=f"job {spec.id}, rank {message.rank}: {difference}", code=CONFLICT)
    return None


def dead(job: Job, nodes: Nodes, config: MasterConfig, begun_s: float, now_s: float) -> str:
    """Why a job of which nothing is heard any more must end; empty: it lives. `begun_s`: since
    when this master listens."""
    record = job.record
    silent_s = now_s - job.heard_s
    if job.by_hand:
        if record.state == "running" and silent_s > config.agent_silent_s:
            return f"no Agent of it was heard for {config.agent_silent_s:g} s (agent_silent_s)"
        if record.state == "pending" and silent_s > config.agent_absent_s:
            return f"it was not started within {config.agent_absent_s:g} s (agent_absent_s)"
        return ""
    if record.state != "running" or record.node is None:
        return ""
    seen_s = nodes.seen_s(record.node)
    quiet_s = now_s - max(begun_s, record.started_s, seen_s or 0.0)
    if quiet_s > config.node_silent_s:
        return f"worker node {record.node} was not heard for {config.node_silent_s:g} s"
    if "start" in job.told and seen_s is not None:
        return _vanished(job, nodes, config.rank_missing_s, seen_s)
    return ""


def _vanished(job: Job, nodes: Nodes, missing_s: float, seen_s: float) -> str:
    """A rank that its node, heard at `seen_s`, has not run for so long and that has not ended has
    vanished. While the node is silent nobody knows: its service may be about to tell the end."""
    record = job.record
    assert record.node is not None
    runs = nodes.runs(record.node)
    for rank in range(record.spec.workers):
        ended = str(rank) in record.results
        if ended or (job.id, rank) in runs or job.awaited(rank):
            job.missing_since_s.pop(rank, None)
            continue
        since_s = job.missing_since_s.setdefault(rank, seen_s)
        if seen_s - since_s > missing_s:
            return f"rank {rank} vanished from {record.node} and reported no end"
    return ""
