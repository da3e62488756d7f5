"""One job as the master sees it: who may be its rank, and by what it is known to be dead."""

from dataclasses import dataclass, field
from math import inf
from typing import Final

import msgspec

from slackwater.common.base.transitions import Story
from slackwater.schemas.base import CONFLICT, NOT_FOUND, JobId, NodeId, Refused
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.hangs import Hang, RankLook
from slackwater.schemas.job_requests import RegisterJob
from slackwater.schemas.job_states import (
    HOLDING_STATES,
    TERMINAL_STATES,
    TRANSITIONS,
    WAITING_STATES,
    JobState,
)
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.progress import JobProgress
from slackwater.schemas.tensors import DType, TensorSpec, UpdateRule, first_difference
from slackwater.schemas.usage import DayUse
from slackwater.schemas.virtual_ranks import check_virtual_ranks
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.gangs import joins, present, ranks_at
from slackwater.services.master.keys import OF_PROCESSES, Order, Verb
from slackwater.services.master.learning import Learning
from slackwater.services.master.nodes import Nodes
from slackwater.services.master.progress import Progress
from slackwater.services.master.turn_profiles import TurnProfile
from slackwater.services.master.turn_sums import TurnSums
from slackwater.services.master.usage import Aggregation, lasted


@dataclass(slots=True)
class Suspicion:
    """Its job does not go on (hangs.py)."""

    asked_s: float
    asked: set[int]
    """Ranks that their nodes were asked to look at."""
    looks: dict[int, RankLook] = field(default_factory=dict)
    hang: Hang | None = None
    """None: the nodes have not answered yet, or a rank computed."""

    def answered(self, now_s: float, within_s: float) -> bool:
        """Say whether all that were asked have answered, or had time to."""
        return self.asked <= self.looks.keys() or now_s - self.asked_s > within_s


@dataclass(slots=True)
class Silence:
    """Its job counts no iterations: when a rank was last seen to do anything (silence.py)."""

    since_s: float
    look: Suspicion
    """The latest look; `compared`: with the one before it."""
    compared: bool = False
    before: dict[int, RankLook] = field(default_factory=dict)
    before_s: float = 0.0
    hang: Hang | None = None


@dataclass(slots=True)
class Job:
    """The record, and what is not worth one: it is learned again after a restart."""

    record: JobRecord
    tensors: tuple[TensorSpec, ...] = ()
    update: UpdateRule | None = None
    """The rule of its program, where that says one."""
    noise: bool = False
    """Set where its program asks for what tells the gradient noise scale."""
    virtual_ranks: int = 0
    """The number that its program says; 0: it says none."""
    gradient_dtype: DType = "float32"
    """The one that its program says."""
    placed: bool = False
    waiting: dict[int, int] = field(default_factory=dict)
    """Token -> rank of registrations that wait for the controller."""
    asked: set[Order] = field(default_factory=set)
    """Orders on their way."""
    told: set[Order] = field(default_factory=set)
    """Orders that were carried out."""
    refusals: dict[Order, str] = field(default_factory=dict)
    """Orders -> why each was refused last, until it is carried out."""
    codes: dict[NodeId, str] = field(default_factory=dict)
    """Node of a gang -> the digest of the program that it found."""
    reading: set[int] = field(default_factory=set)
    """Ranks whose logs' last lines were asked for."""
    heard_s: float = 0.0
    progress: Progress = field(default_factory=Progress)
    learning: Learning = field(default_factory=Learning)
    turns: TurnSums = field(default_factory=TurnSums)
    turn_profile: TurnProfile = field(default_factory=TurnProfile)
    aggregation: Aggregation = field(default_factory=Aggregation)
    quick_deaths: dict[int, int] = field(default_factory=dict)
    """How often each rank died soon after it had been started, one after another."""
    missing_since_s: dict[int, float] = field(default_factory=dict)
    stalled: tuple[float, tuple[int, ...], int, str] = (-inf, (), 0, "")
    """When somebody last waited for ranks, and what was known of them."""
    lines: dict[int, str] = field(default_factory=dict)
    """The last log line of each rank that others waited for."""
    meeting: str = ""
    """host:port on which the ranks of this attempt meet, as its first node said."""
    hosts_meet: tuple[str, str] = ("", "")
    """Where the driver of an elastic program listens, as its rank 0 said, and its secret."""
    found: int | None = None
    """The attempt that it was in when this master began: its processes may run already."""
    begun: tuple[Verb, float] | None = None
    """Since when the nodes of a gang have been asked to keep room, or to start it; None: they have
    not."""
    handed_s: float | None = None
    """When all others had left its GPUs, and its nodes were asked to keep room; None: not yet, or
    another master asked."""
    starting_s: float | None = None
    """Seconds from then until its ranks ran, or trained; None: they do not yet."""
    trains: bool = False
    """A rank of this attempt told of an iteration."""
    left_s: float | None = None
    """When this attempt was ordered to stop; None: it was not, or by another master."""
    joined: set[int] = field(default_factory=set)
    """Ranks that said that they are ready to join."""
    joining_s: float = 0.0
    """When their start was ordered."""
    resting: set[int] = field(default_factory=set)
    """Ranks that died and are not to be started again yet."""
    rests: bool = False
    """One of its ranks died, which meet without aggregators, and it is not to be started again
    yet."""
    died_s: dict[int, float] = field(default_factory=dict)
    """When ranks died last that this master had started again."""
    suspicion: Suspicion | None = None
    """None: it goes on."""
    idle_gpus: tuple[tuple[NodeId, Gpu], ...] = ()
    """GPUs of it that compute nothing (idle_gpus.py)."""
    silence: Silence | None = None
    """None: it counts iterations, or is not watched."""
    story: Story = field(default_factory=Story, repr=False)

    def __post_init__(self) -> None:
        self.story.begin(self.record.state, "it is submitted or found")

    def move(self, new: JobState, why: str) -> None:
        """Note that the record is about to say so. Raises InvalidTransition: the table has no such
        one."""
        if new != self.record.state:
            self.story.move(f"job {self.id}", self.record.state, new, why, TRANSITIONS)

    @property
    def id(self) -> JobId:
        return JobId(self.record.spec.id)

    @property
    def ended(self) -> bool:
        return self.record.state in TERMINAL_STATES

    @property
    def spec(self) -> JobSpec:
        """The job's specification as submitted; rule, gradients' dtype and virtual ranks are the
        program's where none were submitted, and squares of gradients are summed where either asks
        for it. It begins with the mark that it went back to."""
        spec = self.record.spec
        if self.noise and not spec.noise and spec.consistency == "synchronous":
            spec = msgspec.structs.replace(spec, noise=True)
        if self.update is not None and spec.update == UpdateRule():
            spec = msgspec.structs.replace(spec, update=self.update)
        if self.record.begins_with:
            spec = msgspec.structs.replace(spec, start_from=self.record.begins_with)
        if self.virtual_ranks and not spec.virtual_ranks:
            spec = msgspec.structs.replace(spec, virtual_ranks=self.virtual_ranks)
        if spec.gradient_dtype == "float32":
            spec = msgspec.structs.replace(spec, gradient_dtype=self.gradient_dtype)
        return spec

    @property
    def by_hand(self) -> bool:
        return not self.record.spec.program

    def shown_progress(self, now_s: float, *, by_rank: bool = False) -> JobProgress | None:
        """Show how far it is; None: nothing is known."""
        record = self.record
        found = self.progress.shown(
            record.spec, record.state, now_s, by_rank=by_rank, workers=present(record)
        )
        return self.learning.shown(found, runs=record.state in HOLDING_STATES)

    def awaited(self, rank: int) -> bool:
        """Tell whether it died or joins, and its node has not started it yet; or it leaves."""
        record = self.record
        if record.resizing == "leaving" and rank >= record.counted:
            return True
        if joins(record, rank) and self.join_order(rank) not in self.told:
            return True
        again = record.restarts.get(str(rank), 0)
        return bool(again) and Order("again", f"-{rank}-{again}") not in self.told

    def join_order(self, rank: int) -> Order:
        return Order("join", f"-{self.record.attempt}-{rank}-{joins(self.record, rank)}")

    def leave_order(self, node: NodeId) -> Order:
        """Name the order to end the node's ranks that do not count any more."""
        record = self.record
        number = f"{record.size_since}-{sum(record.joins.values())}"
        return Order("leave", f"-{record.attempt}-{number}@{node}")

    @property
    def queued(self) -> bool:
        """Say whether it waits for worker nodes to start it."""
        return self.record.state in WAITING_STATES and not self.by_hand

    def order(self, verb: Verb, node: NodeId) -> Order:
        """Name the order to a node that concerns the present attempt."""
        record = self.record
        attempt = "" if record.attempt == record.run else f"-{record.attempt}"
        return Order(verb, f"{attempt}@{node}" if len(record.allocation) > 1 else attempt)

    def concerns_now(self, what: Order) -> bool:
        """Tell whether an order to start is about the present attempt: its answer may come late."""
        record = self.record
        match what.verb:
            case "prepare" | "start":
                return any(what == self.order(what.verb, node) for node, _ in record.allocation)
            case "join":
                return any(what == self.join_order(int(rank)) for rank in record.joins)
        return True

    @property
    def unstarted(self) -> list[NodeId]:
        """The nodes that have not said yet that they started it, and have ranks to start."""
        return [
            node
            for node, ranks in ranks_at(self.record).items()
            if self.order("start", node) not in self.told
            and not all(str(rank) in self.record.results for rank in ranks)
        ]

    @property
    def unprepared(self) -> list[NodeId]:
        """The nodes of a gang that is to start which have not said yet that they keep room."""
        record = self.record
        if record.state != "starting" or not record.spec.gpus:
            return []
        nodes = (node for node, _ in record.allocation)
        return [node for node in nodes if self.order("prepare", node) not in self.told]

    @property
    def stopped_by(self) -> list[NodeId]:
        """The nodes that must say that no process of it is left."""
        record = self.record
        if record.state == "completed":
            return []
        nodes = [node for node, _ in record.allocation]
        return nodes or ([record.node] if record.node is not None else [])

    @property
    def unstopped(self) -> list[NodeId]:
        """Nodes that have not said so yet."""
        return [node for node in self.stopped_by if self.order("stop", node) not in self.told]

    def used(self, core_share: float, now_s: float) -> list[DayUse]:
        """Return what it used and its record does not say yet. While it waits for others to leave
        the GPUs that it is to have, these are theirs."""
        record = self.record
        waits = self.handed_s is None and self.found != record.attempt
        if waits and record.state in ("starting", "stopping"):
            return []
        return lasted(record, self.aggregation, core_share, now_s, self.handed_s or 0.0)

    def next_attempt(self) -> None:
        """Drop what was known of the processes of the attempt before."""
        self.told = {order for order in self.told if order.verb not in OF_PROCESSES}
        self.refusals.clear()
        self.codes.clear()
        self.meeting, self.hosts_meet, self.begun = "", ("", ""), None
        self.handed_s = self.starting_s = self.left_s = None
        self.trains = False
        self.resting.clear()
        self.joined.clear()
        self.missing_since_s.clear()


def newest_first(job: Job) -> tuple[float, JobId]:
    return -job.record.submitted_s, job.id


_INSTANTS: Final = ("submitted_s", "started_s", "since_s", "begun_s")


def as_of(record: JobRecord, now_s: float) -> JobRecord:
    """Return a record that a former master stored, with no instant after now: its clock may have
    been an hour ahead, and nothing that is reckoned from then on would fall due for so long."""
    late = {name: now_s for name in _INSTANTS if getattr(record, name) > now_s}
    return msgspec.structs.replace(record, **late) if late else record


def active_first(job: Job) -> tuple[int, float, JobId]:
    """Sort running jobs first, then waiting ones, as submitted, then ended ones, latest first."""
    record = job.record
    if job.ended:
        return 2, -record.finished_s, job.id
    return int(record.state in WAITING_STATES), record.submitted_s, job.id


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
    if message.rank >= max(spec.workers, spec.workers_bounds[1]):
        reason = f"job {spec.id}: rank {message.rank} of {spec.workers} workers"
        return Refused(reason=f"{reason}; ranks count from 0")
    if message.spec is not None and message.spec != spec:
        reason = f"job {spec.id}: rank {message.rank} has another spec than the first rank's"
        return Refused(reason=f"{reason}; start all ranks with one spec", code=CONFLICT)
    if fault := _other_virtual_ranks(job, message.virtual_ranks):
        return Refused(reason=f"job {spec.id}, rank {message.rank}: {fault}", code=CONFLICT)
    difference = first_difference(job.tensors, message.tensors) if job.tensors else ""
    if difference:
        return Refused(reason=f"job {spec.id}, rank {message.rank}: {difference}", code=CONFLICT)
    return None


def _other_virtual_ranks(job: Job, said: int) -> str:
    """Say why a program with so many virtual ranks cannot train the job; empty: it can."""
    known = job.spec.virtual_ranks
    if (job.tensors or known) and said != known:
        return (
            f"virtual_ranks: {said}, the job has {known}; give every rank the same number, and "
            "leave it out of the job's spec or make it that one"
        )
    try:
        if said:
            check_virtual_ranks(said, job.spec.workers_bounds[1], job.spec.consistency)
    except ValueError as error:
        return str(error)
    return ""


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
    if record.state not in ("starting", "running"):
        return ""
    silent = silent_node(job, nodes, config, begun_s, now_s)
    if silent is not None:
        return f"worker node {silent} was not heard for {config.node_silent_s:g} s"
    for node, ranks in ranks_at(record).items():
        seen_s = nodes.seen_s(node)
        if job.order("start", node) in job.told and seen_s is not None:
            runs, missing_s = nodes.runs(node), config.rank_missing_s
            heard_s = nodes.heard_s(node)
            if why := _vanished(job, node, ranks, runs, missing_s, seen_s, heard_s):
                return why
    return ""


def late(job: Job, now_s: float) -> str:
    """Say that it has run for longer than it asked for; empty: it has not."""
    record, limit_s = job.record, job.record.spec.time_limit_s
    if not limit_s or record.state not in ("starting", "running", "paused"):
        return ""
    begun_s = now_s if record.state == "paused" else record.since_s or record.started_s
    if record.run_s + now_s - begun_s <= limit_s:
        return ""
    return f"its time is over: it has run for {limit_s:g} s (time_limit_s)"


def restartable(job: Job) -> bool:
    """Tell whether it may go on elsewhere when a node of it is lost."""
    spec = job.record.spec
    return bool(spec.gpus) and spec.preemptible and job.record.state in ("starting", "running")


def silent_node(
    job: Job, nodes: Nodes, config: MasterConfig, begun_s: float, now_s: float
) -> NodeId | None:
    """A node of the job's that was not heard for `node_silent_s`."""
    record = job.record
    since_s = max(begun_s, record.since_s or record.started_s)
    for node, _ in record.allocation:
        if now_s - max(since_s, nodes.seen_s(node) or 0.0) > config.node_silent_s:
            return node
    return None


def _vanished(
    job: Job,
    node: NodeId,
    ranks: tuple[int, ...],
    runs: frozenset[tuple[JobId, int]],
    missing_s: float,
    seen_s: float,
    heard_s: float,
) -> str:
    """A rank that its node, heard at `seen_s` and without a gap for `heard_s`, has not run for so
    long and that has not ended has vanished. While the node is silent nobody knows, and after that
    its service may be about to tell the end."""
    for rank in ranks:
        ended = str(rank) in job.record.results
        if ended or (job.id, rank) in runs or job.awaited(rank):
            job.missing_since_s.pop(rank, None)
            continue
        since_s = job.missing_since_s.setdefault(rank, seen_s)
        if min(seen_s - since_s, heard_s) > missing_s:
            return f"rank {rank} vanished from {node} and reported no end"
    return ""
