"""The state of a controller: its jobs' records, its aggregators, and what is on its way.

Only the records (`JobPlacement`) are durable; everything else is learned again after a restart.
`State` collects the effects of a step; the modules beside this one are functions on it.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, Final, Literal

import msgspec

from slackwater.common.base.effects import Count, Effect, EffectKey, Log, Persist, Publish, Request
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.histogram import LOSS_RATIO, Histogram
from slackwater.common.base.limits import LOST_AFTER_S
from slackwater.common.base.transitions import Story
from slackwater.schemas import subjects
from slackwater.schemas.base import RUNS_MAX, AggregatorId, ClusterId, JobId, Message
from slackwater.schemas.cluster import AggregatorDrain, AggregatorFact, AggregatorHeartbeat
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.placement import BucketPlace, Endpoint, JobPlacement, Phase, SlotPlan
from slackwater.schemas.telemetry import WindowMeasured
from slackwater.services.controller.checkpoint_state import Checkpoint, Saving
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.host_load import Hosts
from slackwater.services.controller.index import Index, Whereabouts
from slackwater.services.controller.keys import AggregatorKey, JobKey
from slackwater.services.controller.link_load import LinkLoads
from slackwater.services.controller.phases import PHASES, PRESENCES, Presence
from slackwater.services.controller.policies import load_policy
from slackwater.services.controller.policies.view import JobView, Memory, Policy
from slackwater.services.controller.usage import Usage
from slackwater.services.controller.waiting_jobs import Line

ASK_BUDGET_S = 10.0
"""The shell retries this long; the tick asks again after that."""
RETRY_S_MAX = 60.0
RUN_EPOCHS: Final = 1 << 20
"""Location epochs of one run of a job. So whatever an aggregator still holds of a former run, or
says of it late, is older than all of this one's."""
assert RUN_EPOCHS * (RUNS_MAX + 1) <= 1 << 32

_INDEXED: Final = frozenset(
    {"phase", "places", "target", "temporary", "protected", "cause", "crowded"}
)
"""Parts of a record from which the index follows (index.py)."""
_TURNS_FOLLOW: Final = frozenset({"phase", "places", "target", "temporary", "profile"})
"""Parts of a record from which the plans of slots follow."""

Cause = Literal["start", "profiled", "reverted", "lost", "interfered", "drained"]


@dataclass(slots=True)
class PendingAssignment:
    """A reassignment of the job that is not carried out yet: not approved, or not its turn."""

    cause: Cause
    since_s: float
    next_s: float
    wait_s: float
    refused: bool = False
    hopeless: bool = False
    """The master said that the number asked for can never be had."""
    at_least: int = 0
    need: int = 0
    """The number last asked for that would have been enough."""
    request: str = ""
    """The allocation request that is not answered with aggregators yet."""
    standalone: bool = False
    protected: str = ""
    """Why the job's aggregators are to be its own from now on."""
    endured_s: float = 0.0
    """The iteration under congestion, for the cause "interfered"."""
    full: frozenset[AggregatorId] = frozenset()
    """Aggregators without memory, or a link, for what this attempt would have brought there."""


@dataclass(slots=True)
class Job:
    """A job's record, and what is known of it now."""

    record: JobPlacement
    confirmed: dict[AggregatorId, tuple[int, float]] = field(default_factory=dict)
    """Aggregator -> the incarnation that confirmed to host the job's buckets there, and when."""
    located: bool = False
    copied: set[int] = field(default_factory=set)
    worker_done: set[int] = field(default_factory=set)
    copied_all_s: float = 0.0
    initiated: set[tuple[AggregatorId, AggregatorId]] = field(default_factory=set)
    """(old, new) pairs whose MIGRATE_INIT was confirmed."""
    stranded: set[int] = field(default_factory=set)
    """Moving buckets whose old aggregator was restarted with them: it must be told of them again,
    then to move them."""
    missing_s: dict[int, float] = field(default_factory=dict)
    """Moving bucket -> when its old aggregator was found not to hold it."""
    synced_s: float = 0.0
    pending: PendingAssignment | None = None
    updates: dict[AggregatorId, int] = field(default_factory=dict)
    """Aggregator -> the sum of the versions that it held of the job (idle_jobs.py)."""
    iterated_s: float = 0.0
    """When a version was last seen to have grown."""
    settled_s: float = 0.0
    """Since when the job's placement is what it is."""
    dropped: set[AggregatorId] = field(default_factory=set)
    _where: Whereabouts | None = None
    _moved: tuple[JobPlacement, list[int]] | None = None
    settled_view: tuple[JobPlacement, JobView] | None = None
    """How a policy sees the record when nothing of it is open (snapshot.py)."""
    sizes: tuple[int, ...] | None = None
    """Sizes of its regions, in bytes (room.py)."""
    held: tuple[JobPlacement, dict[AggregatorId, int]] | None = None
    """Bytes that are held for it, by aggregator, by that record (room.py)."""
    refusals: dict[EffectKey, str] = field(default_factory=dict)
    """Refusals of commands for this job, by key: why the last attempt was refused."""
    cannot_begin: str = ""
    """Why it never will be hosted: the checkpoint that it is to begin with does not fit."""
    lost: str = ""
    """Says what was lost of a job that is to go back to a mark; empty: nothing."""
    checkpoint: Checkpoint | None = None
    """The one that is being made, or was last."""
    saving: Saving = field(default_factory=Saving)
    escapes: int = 0
    """Times that it left a congested link since its speed was last above the limit."""
    window: WindowMeasured | None = None
    """The last that was heard of it."""
    doubted_s: float = -inf
    """When a window last showed a loss beyond the limit that the next one is to confirm."""
    doubts: int = 0
    """Such windows in succession."""
    story: Story = field(default_factory=Story, repr=False)

    def __post_init__(self) -> None:
        self.story.begin(self.record.phase, "it is placed or found")

    @property
    def id(self) -> JobId:
        return self.record.plan.job

    def move(self, new: Phase, why: str) -> None:
        """Note that the record is about to say so. Raises InvalidTransition: the table has no such
        one."""
        if new != self.record.phase:
            self.story.move(f"job {self.id}", self.record.phase, new, why, PHASES)

    @property
    def moving(self) -> bool:
        return bool(self.record.target)

    @property
    def location_epoch(self) -> int:
        return sum(place.location_epoch for place in self.record.places)

    def target(self, bucket: int) -> BucketPlace:
        """Where the bucket is to be: the migration's target, or where it is."""
        return self.record.target[bucket] if self.record.target else self.record.places[bucket]

    def place(self, bucket: int) -> BucketPlace:
        """Where the bucket is, as far as is known."""
        return self.target(bucket) if bucket in self.copied else self.record.places[bucket]

    def moved(self) -> list[int]:
        """The buckets of the running migration; reckoned once per record, asked by every news."""
        if self._moved is None or self._moved[0] is not self.record:
            pairs = enumerate(zip(self.record.places, self.record.target, strict=False))
            found = [bucket for bucket, (old, new) in pairs if old.aggregator != new.aggregator]
            self._moved = (self.record, found)
        return self._moved[1]

    def homes(self) -> frozenset[AggregatorId]:
        """The aggregators that the job's buckets are on, or going to."""
        return self.whereabouts().homes

    def hosted_by(self, aggregator: AggregatorId, incarnation: int, before_s: float) -> bool:
        """Say whether that incarnation had confirmed by then."""
        found, at_s = self.confirmed.get(aggregator, (-1, 0.0))
        return found == incarnation >= 0 and at_s <= before_s

    def involved(self) -> frozenset[AggregatorId]:
        return self.whereabouts().involved

    def whereabouts(self) -> Whereabouts:
        """Compute once per record what is asked for every job at every tick."""
        if self._where is None or self._where.record is not self.record:
            self._where = Whereabouts.of(self.record)
        return self._where


@dataclass(slots=True)
class Aggregator:
    id: AggregatorId
    seen_s: float
    heartbeat: AggregatorHeartbeat | None = None
    presence: Presence = "unheard"
    alive: bool = False
    """Equals `presence == "alive"`: it is read many times an event."""
    ours: bool = False
    ours_since_s: float = 0.0
    temporary: bool = False
    """The master has it down as temporary."""
    request: str = ""
    """The allocation by which it is ours."""
    reserved_for: JobId | None = None
    """Allocated for this job's next assignment; nothing of it is there yet."""
    changed_s: float = 0.0
    """When an assignment here changed last: windows from before say nothing."""
    checked: int = -1
    """The incarnation whose buckets were compared with the records."""
    checked_s: float = 0.0
    empty_s: float = -1.0
    """When it was last seen to hold nothing."""
    turns: tuple[int, SlotPlan] | None = None
    """The incarnation that confirmed a plan of its slot, and the plan (slot_plans.py)."""
    turns_asked: SlotPlan | None = None

    congested_s: float | None = None
    """When its link was last seen congested (interference.py); None: it is not."""
    guarded: bool = False
    """Set while it holds buckets of a job whose record is damaged: it is not given back."""
    leaving: bool = False
    """Set while it is being emptied by an operator's order (drains.py)."""
    restarts: tuple[int, float] = (0, 0.0)
    """The supervisor's last report: how often it started it anew, and when that was said."""
    story: Story = field(default_factory=Story, repr=False)

    def __post_init__(self) -> None:
        self.story.begin(self.presence, "it is named")

    def become(self, new: Presence, why: str) -> None:
        """Raises InvalidTransition: the table has no such one."""
        if new != self.presence:
            self.story.move(f"aggregator {self.id}", self.presence, new, why, PRESENCES)
            self.presence, self.alive = new, new == "alive"

    @property
    def given_up(self) -> bool:
        return self.presence == "given_up"

    @property
    def avoided(self) -> bool:
        """Say whether it takes no new buckets and is not given to other jobs."""
        return self.leaving or self.congested_s is not None

    @property
    def incarnation(self) -> int:
        return self.heartbeat.incarnation if self.heartbeat else -1

    @property
    def cpu_share(self) -> float:
        return self.heartbeat.cpu_share if self.heartbeat else 0.0

    def endpoint(self) -> Endpoint:
        assert self.heartbeat is not None
        return Endpoint(aggregator=self.id, addresses=self.heartbeat.addresses)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request on its way: when, and to which incarnation."""

    at_s: float
    incarnation: int = -1


class State:
    def __init__(self, config: ControllerConfig, rng: Random) -> None:
        self.config = config
        self.rng = rng
        self.cluster = ClusterId(config.id)
        self.bucket = f"placements_{config.id}"
        self.drains_bucket = f"drains_{config.id}"
        self.epoch = 0
        self.jobs: dict[JobId, Job] = {}
        self.index = Index()
        self.aggregators: dict[AggregatorId, Aggregator] = {}
        """In the order of their ids."""
        self.asked: dict[EffectKey, Asked] = {}
        self.hosts = Hosts(config.host_s)
        self.links = LinkLoads(config.host_s)
        self.usage = Usage()
        self.line = Line(config.retry_s)
        """Jobs that are nowhere, as the master has no aggregator for them (waiting_jobs.py)."""
        self.pool_known = False
        """Whether the master's list of our aggregators was seen since the start."""
        self.pool_asked_s = 0.0
        self.recycle_due = False
        self.job_ended = False
        """Since the last scaling began."""
        self.releasing = config.scaling_s == 0.0
        """Whether unused aggregators are given back now."""
        self.scaled_s = 0.0
        """When the last scaling began."""
        self.turns: dict[AggregatorId, SlotPlan] = {}
        self.turns_present: dict[AggregatorId, int] = {}
        """Incarnations of the aggregators for which `turns` was reckoned."""
        self.turns_stale = True
        """A record changed since."""
        self.turns_told = 0
        self.placed_told = JobId("")
        """The last job of whose places the master was told, where not all fit into a report."""
        self.drains: dict[AggregatorId, AggregatorDrain] = {}
        self.moved = False
        """A job has moved in this step: an aggregator that is being emptied may be empty."""
        self.unreadable: frozenset[str] = frozenset()
        """Jobs whose records are damaged: nothing of theirs is made, given away or dropped."""
        self.out: list[Effect] = []
        self.policies: dict[str, Policy] = {}
        self._strangers: set[str] = set()
        """Policies of jobs in the records that are not installed any more."""
        self.memories: dict[str, Memory] = {}
        self.losses = Histogram(LOSS_RATIO)
        """Losses in jobs' monitor windows."""
        self.plans = 0
        """Times that a policy was asked for one."""
        self.policy_named(config.policy)

    # Lookups --------------------------------------------------------------------------------------

    def policy_named(self, name: str) -> Policy:
        if name not in self.policies:
            self.policies[name] = load_policy(name)
        return self.policies[name]

    def policy_name(self, job: Job) -> str:
        """Return the policy that the job's spec names. If that policy has been uninstalled since,
        the job goes on under the cluster's."""
        name = job.record.spec.aggregation
        if not name or name in self._strangers:
            return self.config.policy
        if name not in self.policies and self.stranger(name):
            self._strangers.add(name)
            return self.config.policy
        return name

    def stranger(self, name: str) -> str:
        """Say why no job can have that policy here; empty: a job can."""
        try:
            self.policy_named(name)
        except ConfigRejected as error:
            return str(error)
        return ""

    def adapts(self, job: Job) -> bool:
        """Say whether the job shares aggregators: monitored, reverted, recycled."""
        return self.policy_named(self.policy_name(job)).adapts

    def aggregator(self, id: AggregatorId, now_s: float) -> Aggregator:
        """The entry; a new one has the benefit of the doubt for as long as one just heard."""
        if id not in self.aggregators:
            self.aggregators[id] = Aggregator(id, seen_s=now_s)
            self.aggregators = dict(sorted(self.aggregators.items()))
        return self.aggregators[id]

    def alive(self, id: AggregatorId) -> bool:
        entry = self.aggregators.get(id)
        return entry is not None and entry.alive

    def is_gone(self, id: AggregatorId, now_s: float) -> bool:
        """Away for so long that its buckets go elsewhere. As long as its supervisor starts it anew
        it may be back with all that they hold."""
        entry = self.aggregators.get(id)
        if entry is None or entry.alive:
            return False
        return entry.given_up or now_s > self.awaited_until_s(entry)

    def awaited_until_s(self, entry: Aggregator) -> float:
        """Until when an aggregator that is away is waited for, if no further sign comes."""
        window_s = entry.heartbeat.restart_window_s if entry.heartbeat is not None else 0.0
        patience_s = max(self.config.rehost_after_s, LOST_AFTER_S)
        return max(entry.seen_s + max(window_s, patience_s), entry.restarts[1] + patience_s)

    def living(self) -> Iterator[Job]:
        """Jobs that have not ended, in the order of their ids."""
        for id in tuple(self.index.living):
            yield self.jobs[id]

    def users(self, aggregator: AggregatorId) -> list[Job]:
        return [self.jobs[id] for id in self.index.users((aggregator,))]

    # Effects --------------------------------------------------------------------------------------

    def know(self, job: Job) -> None:
        """A new job, or one that was found in the records."""
        self.jobs[job.id] = job
        self._follow(job)

    def _follow(self, job: Job) -> None:
        name = self.policy_name(job)
        self.index.follow(job.whereabouts(), name, shares=not self.policy_named(name).private)

    def change(self, job: Job, **changes: Any) -> None:
        """Store the job's changed record; this precedes all that depends on it. Raises
        InvalidTransition for a phase that cannot follow the one before."""
        job.move(changes.get("phase", job.record.phase), changes.get("cause") or "it is stored")
        job.record = msgspec.structs.replace(job.record, epoch=self.epoch, **changes)
        self.turns_stale = self.turns_stale or not changes.keys().isdisjoint(_TURNS_FOLLOW)
        if not changes.keys().isdisjoint(_INDEXED):
            self._follow(job)
        self.out.append(Persist(self.bucket, job.id, job.record))

    def forget(self, job: Job) -> None:
        del self.jobs[job.id]
        self.index.forget(job.id)
        self.line.leave(job.id)
        self.turns_stale = True
        self.out.append(Persist(self.bucket, job.id, None))

    def tell(self, job: Job, fact: str, now_s: float, **detail: str) -> None:
        event = JobEvent(
            job=job.id,
            fact=fact,
            at_s=now_s,
            cluster=self.cluster,
            reason=job.record.reason,
            detail=detail,
        )
        self.out.append(Publish(subjects.event("job", job.id, fact), event))

    def tell_aggregator(self, id: AggregatorId, fact: str, now_s: float, **detail: str) -> None:
        event = AggregatorFact(
            aggregator=id, fact=fact, cluster=self.cluster, at_s=now_s, detail=detail
        )
        self.out.append(Publish(subjects.event("aggregator", id, fact), event))

    def count(self, name: str) -> None:
        """Add one to a counter that `stats` and the metrics show."""
        self.out.append(Count(name))

    def ask(
        self,
        key: EffectKey,
        subject: str,
        message: Message,
        asked: Asked,
        *,
        lane: str = "",
        insist: bool = True,
    ) -> None:
        """Send a command unless the same is on its way. Refusals are heard as they come: whoever
        waits wants to know why before the budget is spent. Without `insist` one is the answer."""
        if key in self.asked:
            return
        self.asked[key] = asked
        self.out.append(
            Request(
                subject,
                message,
                key,
                lane=lane,
                budget_s=ASK_BUDGET_S,
                hear_refusals=True,
                retry_refusals=insist,
            )
        )

    def ask_aggregator(
        self,
        key: JobKey | AggregatorKey,
        verb: str,
        aggregator: AggregatorId,
        message: Message,
        now_s: float,
        *,
        insist: bool = True,
    ) -> None:
        """Commands about one job reach one aggregator in the order in which they were decided."""
        asked = Asked(now_s, self.aggregators[aggregator].incarnation)
        lane, subject = (
            f"{aggregator}/{key.about}",
            subjects.command("aggregator", aggregator, verb),
        )
        self.ask(key, subject, message, asked, lane=lane, insist=insist)

    def ask_master(
        self, key: EffectKey, verb: str, message: Message, now_s: float, *, insist: bool = True
    ) -> None:
        subject = subjects.command("master", subjects.MASTER, verb)
        self.ask(key, subject, message, Asked(now_s), insist=insist)

    def log(self, event: str, level: str = "info", **fields: Any) -> None:
        self.out.append(Log(event, {"cluster": self.cluster, **fields}, level))


def numbered(job: JobId, kind: str, number: int, run: int = 0) -> str:
    """Make an id for the n-th request or migration of a job's run: legible, unique, at most 63
    characters."""
    kind = f"r{run}{kind}" if run else kind
    if len(job) <= 40:
        return f"{job}-{kind}{number}"
    digest = hashlib.blake2s(job.encode(), digest_size=4).hexdigest()
    return f"{job[:32]}-{digest}-{kind}{number}"
