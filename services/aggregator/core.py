"""The aggregator's core: which buckets are here, which leave, what a command means. Pure.

Pushes and pulls never come through `step`: the data plane (plane.py) asks each bucket's own state
machine. Commands of the controller and what became of their execution do. All commands are
idempotent by location epoch: a bucket that is here at that epoch or a higher one is left alone.

A command to host a bucket at a *higher* epoch than the one it is here with means that it stays
here: the controller gave up a migration that could not finish, and raised the epoch so that workers
which were sent on already come back. Bytes that are here are always kept.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from slackwater.common.base import limits
from slackwater.common.base.effects import (
    Answered,
    Draining,
    Effect,
    Log,
    Observed,
    Publish,
    Recovered,
    RefusedSoFar,
    Reply,
    Requested,
    TimerFired,
)
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.layout import bucket_tensors, element_count
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import Floats
from slackwater.schemas import subjects
from slackwater.schemas.base import CONFLICT, NOT_FOUND, AggregatorId, JobId, Message, Ok, Refused
from slackwater.schemas.checkpoints import CopyBuckets, WriteBuckets
from slackwater.schemas.cluster import ARRIVED_MAX, WorkersAt
from slackwater.schemas.placement import (
    BucketHeld,
    BucketsHeld,
    DropJob,
    HostBuckets,
    JobPlan,
    ListBuckets,
    MigrateInit,
    SlotPlan,
    TensorCopyDone,
    WorkerDone,
)
from slackwater.services.aggregator.bucket import Bucket, Key, Move
from slackwater.services.aggregator.effects import (
    CopyForCheckpoint,
    DropBuckets,
    KeepBucket,
    MakeRegions,
    MoveBucket,
    SetDeadlines,
    SetSlotPlan,
    WriteCheckpoint,
)
from slackwater.services.aggregator.events import (
    BucketCopied,
    BucketRestored,
    BucketSeeded,
    CheckpointTold,
    Event,
    RegionsDropped,
    RegionsMade,
    TasksMeasured,
    WorkersArrived,
)
from slackwater.services.aggregator.reseeding import filled_anew


@dataclass(frozen=True, slots=True)
class DepartedBucket:
    """Where a bucket went."""

    fact: BucketCopied
    until_s: float


@dataclass(frozen=True, slots=True)
class LockedBucket:
    """A bucket whose region is here and cannot be taken over yet."""

    held: BucketHeld
    nbytes: int


@dataclass(slots=True)
class _Making:
    """Regions on their way for one job; further commands about it wait."""

    message: HostBuckets
    new: tuple[int, ...]
    """Positions in the message."""
    nbytes: int
    waiting: deque[tuple[int, Message]] = field(default_factory=deque)


class AggregatorCore:
    def __init__(self, id: str, memory_bytes_max: int) -> None:
        self.id = AggregatorId(id)
        self.buckets: dict[Key, Bucket] = {}
        self.locked: dict[Key, LockedBucket] = {}
        self.departed: OrderedDict[Key, DepartedBucket] = OrderedDict()
        self._memory_bytes_max = memory_bytes_max
        self._held_bytes = 0
        self._prepared_bytes = 0
        self._by_job: dict[JobId, dict[Key, Bucket]] = {}
        self._left: OrderedDict[JobId, tuple[JobPlan, float]] = OrderedDict()
        """Jobs of which a bucket went on, and until when that is remembered."""
        self._making: dict[JobId, _Making] = {}
        self._making_bytes = 0
        self._handles = 0
        self._incarnation = 0
        self._arrived: deque[tuple[WorkersAt, float]] = deque(maxlen=ARRIVED_MAX)
        self._turns: SlotPlan | None = None

    def arrived(self, now_s: float) -> tuple[WorkersAt, ...]:
        """The newest WORKER_DONEs, which every heartbeat repeats for a while."""
        while self._arrived and self._arrived[0][1] <= now_s:
            self._arrived.popleft()
        return tuple(at for at, _ in self._arrived)

    def step(self, event: Event, now_s: float) -> Sequence[Effect]:
        match event:
            case Requested(token=token, message=message):
                return self._command(token, message, now_s)
            case RegionsMade():
                return self._made(event, now_s)
            case RegionsDropped(token=token):
                return [Reply(token, Ok())] if token else []
            case CheckpointTold(token=token, answer=answer):
                return [Reply(token, answer)]
            case BucketSeeded() | BucketRestored():
                bucket = self.buckets.get(event.key)
                return [] if bucket is None else filled_anew(self.id, bucket, event, now_s)
            case WorkersArrived(key=(job, bucket), location_epoch=epoch):
                done = WorkerDone(job=job, bucket=bucket, location_epoch=epoch, target=self.id)
                at = WorkersAt(job=job, bucket=bucket, location_epoch=epoch)
                self._arrived.append((at, now_s + limits.ARRIVED_S))
                return [Publish(subjects.event("migration", job, "worker-done"), done)]
            case BucketCopied():
                return self._copied(event, now_s)
            case TasksMeasured(reports=reports):
                subject = subjects.telemetry("aggregator", self.id, "tasks")
                return [Publish(subject, report) for report in reports]
            case Recovered(epoch=epoch):
                self._incarnation = epoch
                return []
            case Draining() | Answered() | RefusedSoFar() | Observed() | TimerFired():
                return []
        assert_never(event)

    # Inventory ------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def jobs(self) -> int:
        return len(self._by_job)

    def plan_of(self, job: JobId, now_s: float) -> JobPlan | None:
        """Return the plan of a job that has a bucket here, or had one lately that went on."""
        for bucket in self._by_job.get(job, {}).values():
            return bucket.plan
        plan, until_s = self._left.get(job, (None, 0.0))
        return plan if until_s > now_s else None

    def prepare(self, nbytes: int) -> Callable[[], None]:
        """Count the bytes of a region that is about to come; the answer counts them no more. Raises
        Rejected."""
        reason = self.no_room_for(nbytes)
        if reason:
            raise Rejected(reason)
        self._prepared_bytes += nbytes

        def give_back() -> None:
            self._prepared_bytes -= nbytes

        return give_back

    def next_handle(self) -> int:
        self._handles += 1
        return self._handles

    def no_room_for(self, nbytes: int, count: int = 1) -> str:
        """Why a region of this size cannot be taken in; empty: it can."""
        taken = self._held_bytes + self._making_bytes + self._prepared_bytes
        taken += sum(locked.nbytes for locked in self.locked.values())
        free = self._memory_bytes_max - taken
        if nbytes > free:
            return (
                f"{self.id}: {nbytes} bytes are asked for, {max(0, free)} of "
                f"{self._memory_bytes_max} are free (memory_bytes_max)"
            )
        if len(self.buckets) + count > limits.BUCKETS_HELD_MAX:
            return (
                f"{self.id}: {count} buckets are asked for, {len(self.buckets)} of "
                f"{limits.BUCKETS_HELD_MAX} are held"
            )
        return ""

    def awaits(self, key: Key) -> bool:
        """Say whether a region that was locked is still wanted: the bucket did not begin anew."""
        return key not in self.buckets and key[0] not in self._making

    def add(self, bucket: Bucket) -> None:
        """Add a bucket: made, taken over from another aggregator, or found after a restart."""
        assert bucket.key not in self.buckets
        self.buckets[bucket.key] = bucket
        self._by_job.setdefault(bucket.key[0], {})[bucket.key] = bucket
        self._held_bytes += bucket.nbytes
        self.departed.pop(bucket.key, None)

    def remove(self, key: Key) -> Bucket | None:
        bucket = self.buckets.pop(key, None)
        if bucket is not None:
            bucket.leave()
            self._held_bytes -= bucket.nbytes
            siblings = self._by_job[key[0]]
            del siblings[key]
            if not siblings:
                del self._by_job[key[0]]
        return bucket

    def remember(self, bucket: Bucket, saved: Floats) -> None:
        """Keep what was saved of a bucket beside it, as its memory, where there is room."""
        more = 0 if bucket.saved is not None else saved.nbytes
        if self.buckets.get(bucket.key) is bucket and not self.no_room_for(more, 0):
            bucket.saved, bucket.nbytes = saved, bucket.nbytes + more
            self._held_bytes += more

    def forwarding_of(self, key: Key, now_s: float) -> BucketCopied | None:
        """Return where a bucket that was here is now; None once limits.DEPARTED_S are over."""
        departed = self.departed.get(key)
        return departed.fact if departed is not None and departed.until_s > now_s else None

    def check_invariants(self) -> None:
        """Raises AssertionError when an index or a sum is not what its buckets say."""
        by_job: dict[JobId, dict[Key, Bucket]] = {}
        for key, bucket in self.buckets.items():
            by_job.setdefault(key[0], {})[key] = bucket
            assert key == bucket.key, f"{bucket.key} is held as {key}"
            assert bucket.phase != "gone", f"{key} is held though it is gone"
            bucket.check_invariants()
        assert self._by_job == by_job, f"{self._by_job} is not {by_job}"
        held, making = self.buckets.values(), self._making.values()
        assert self._held_bytes == sum(bucket.nbytes for bucket in held), self._held_bytes
        assert self._making_bytes == sum(each.nbytes for each in making), self._making_bytes
        assert self._prepared_bytes >= 0, self._prepared_bytes

    # Commands -------------------------------------------------------------------------------------

    def _command(self, token: int, message: Message, now_s: float) -> list[Effect]:
        match message:
            case ListBuckets():
                return [Reply(token, self._list(message.job))]
            case SlotPlan():
                return self._set_slot_plan(token, message)
            case CopyBuckets():
                return [CopyForCheckpoint(token, message)]
            case WriteBuckets():
                return [WriteCheckpoint(token, message)]
            case HostBuckets(plan=plan):
                job = plan.job
            case DropJob() | MigrateInit():
                job = JobId(message.job)
            case _:
                reason = f"{type(message).__name__} is not a command for an aggregator"
                return [Reply(token, Refused(reason=reason))]
        making = self._making.get(job)
        if making is not None:
            if len(making.waiting) >= limits.COMMANDS_WAITING_MAX:
                reason = f"{self.id}: regions of job {job} are being made"
                return [Reply(token, Refused(reason=reason, retry_after_s=0.2))]
            making.waiting.append((token, message))
            return []
        if isinstance(message, HostBuckets):
            return self._host(token, message, now_s)
        if isinstance(message, DropJob):
            return self._drop(token, message)
        return self._migrate(token, message, now_s)

    def _set_slot_plan(self, token: int, message: SlotPlan) -> list[Effect]:
        known = self._turns
        if known and known.cluster == message.cluster and _order(message) < _order(known):
            return [Reply(token, Ok())]  # Repeated late: a newer plan is in force.
        self._turns = message
        return [SetSlotPlan(message), Reply(token, Ok())]

    def _list(self, job: str) -> BucketsHeld:
        held = tuple(
            BucketHeld(
                job=bucket.plan.job,
                bucket=bucket.layout.index,
                layout_epoch=bucket.plan.layout_epoch,
                location_epoch=bucket.location_epoch,
                version=bucket.version,
                moving=bucket.phase == "moving" or bucket.move is not None,
            )
            for bucket in self.buckets.values()
            if job in ("", bucket.plan.job)
        )
        held += tuple(
            locked.held
            for key, locked in self.locked.items()
            if job in ("", key[0]) and key not in self.buckets
        )
        return BucketsHeld(aggregator=self.id, incarnation=self._incarnation, held=held)

    def _host(self, token: int, message: HostBuckets, now_s: float) -> list[Effect]:
        fault = _fault(message)
        if fault:
            return [Reply(token, Refused(reason=fault))]
        effects: list[Effect] = []
        if message.positions:
            effects.append(SetDeadlines(message))
        new: list[int] = []
        replaced: list[Key] = []
        for position, (layout, epoch) in enumerate(
            zip(message.buckets, message.at_epochs, strict=True)
        ):
            key = (message.plan.job, layout.index)
            bucket = self.buckets.get(key)
            if bucket is None:
                locked = self.locked.get(key)
                if locked is not None and epoch <= locked.held.location_epoch:
                    reason = f"{self.id}: another process has locked the region of bucket {key}"
                    return [*effects, Reply(token, Refused(reason=reason, retry_after_s=1.0))]
                gone = self.forwarding_of(key, now_s)
                if gone is None or gone.move.location_epoch < epoch:
                    new.append(position)
            elif bucket.plan.layout_epoch < message.plan.layout_epoch:
                replaced.append(key)
                new.append(position)
            elif bucket.location_epoch < epoch:
                effects.append(KeepBucket(key, epoch))
        if not new:
            return [*effects, Reply(token, Ok())]
        nbytes = sum(
            SlotRegion.nbytes_of(
                message.plan,
                message.buckets[position],
                bucket_tensors(message.buckets[position], message.tensors),
            )
            for position in new
        )
        reason = self.no_room_for(nbytes, len(new))
        if reason:
            return [*effects, Reply(token, Refused(reason=reason, retry_after_s=1.0))]
        if replaced:
            effects.append(DropBuckets(tuple(replaced)))
        self._making[message.plan.job] = _Making(message, tuple(new), nbytes)
        self._making_bytes += nbytes
        effects.append(MakeRegions(token, message, tuple(new)))
        return effects

    def _made(self, event: RegionsMade, now_s: float) -> list[Effect]:
        making = self._making.pop(event.job)
        self._making_bytes -= making.nbytes
        effects: list[Effect] = []
        if event.failure:
            why, code = f"{self.id}: {event.failure}", CONFLICT if event.for_good else 0
            again_s = 0.0 if event.for_good else 1.0
            effects.append(
                Reply(event.token, Refused(reason=why, code=code, retry_after_s=again_s))
            )
        else:
            effects.append(Reply(event.token, Ok()))
        for token, message in making.waiting:
            effects += self._command(token, message, now_s)
        return effects

    def _drop(self, token: int, message: DropJob) -> list[Effect]:
        job = JobId(message.job)
        ceilings: dict[int, int] | None = None
        epochs = message.up_to_epochs
        if epochs is not None and len(epochs) != len(message.buckets or ()):
            reason = "drop: up_to_epochs must be parallel to buckets"
            return [Reply(token, Refused(reason=reason))]
        if message.buckets is not None:
            high = epochs if epochs is not None else (2**53,) * len(message.buckets)
            ceilings = dict(zip(message.buckets, high, strict=True))
        most = message.up_to_epoch
        keys = tuple(
            key
            for key, bucket in self.buckets.items()
            if key[0] == job
            and (most is None or bucket.location_epoch <= most)
            and (ceilings is None or bucket.location_epoch <= ceilings.get(key[1], -1))
        )
        if not keys:
            return [Reply(token, Ok())]
        return [DropBuckets(keys, token)]

    # Migrations -----------------------------------------------------------------------------------

    def _migrate(self, token: int, message: MigrateInit, now_s: float) -> list[Effect]:
        if len(message.buckets) != len(message.epochs):
            reason = f"migration {message.migration}: epochs must be parallel to buckets"
            return [Reply(token, Refused(reason=reason))]
        effects: list[Effect] = []
        unknown: list[int] = []
        for index, epoch in zip(message.buckets, message.epochs, strict=True):
            key = (JobId(message.job), index)
            move = Move(message.migration, epoch, message.to)
            bucket = self.buckets.get(key)
            if bucket is not None:
                effects += self._order(bucket, move)
                continue
            gone = self.forwarding_of(key, now_s)
            if gone is None or gone.move.location_epoch < epoch:
                unknown.append(index)
            elif gone.move.location_epoch == epoch:
                effects.append(self._copy_done(gone))
        if unknown:
            reason = f"{self.id} does not hold buckets {unknown[:20]} of job {message.job}"
            return [*effects, Reply(token, Refused(reason=reason, code=NOT_FOUND))]
        return [*effects, Reply(token, Ok())]

    def _order(self, bucket: Bucket, move: Move) -> list[Effect]:
        """MIGRATE_INIT of a bucket that is here."""
        standing = bucket.move
        if standing is not None and (
            (standing.location_epoch, standing.to.aggregator)
            == (move.location_epoch, move.to.aggregator)
        ):
            return []  # Repeated.
        highest = max(bucket.location_epoch, standing.location_epoch if standing else 0)
        if move.location_epoch < highest:
            return []  # Late: a newer order has been carried out, or is about to be.
        if move.to.aggregator == self.id:
            keep = KeepBucket(bucket.key, move.location_epoch)
            here = BucketCopied(bucket.key, move, bucket.version, bucket.initialized, 0, 0.0)
            return [keep, self._copy_done(here)]
        return [MoveBucket(bucket.key, move)]

    def _copied(self, event: BucketCopied, now_s: float) -> list[Effect]:
        while len(self.departed) >= limits.DEPARTED_MAX:
            self.departed.popitem(last=False)
        self.departed.pop(event.key, None)
        self.departed[event.key] = DepartedBucket(event, now_s + limits.DEPARTED_S)
        if event.plan is not None:
            while len(self._left) >= limits.DEPARTED_MAX:
                self._left.popitem(last=False)
            self._left.pop(event.key[0], None)
            self._left[event.key[0]] = event.plan, now_s + limits.DEPARTED_S
        return [
            self._copy_done(event),
            Log(
                "bucket.moved",
                {
                    "job": event.key[0],
                    "bucket": event.key[1],
                    "to": event.move.to.aggregator,
                    "migration": event.move.migration,
                    "copy_s": round(event.copy_s, 6),
                },
            ),
        ]

    def _copy_done(self, fact: BucketCopied) -> Publish:
        done = TensorCopyDone(
            migration=fact.move.migration,
            job=fact.key[0],
            bucket=fact.key[1],
            location_epoch=fact.move.location_epoch,
            version=fact.version,
            source=self.id,
            target=fact.move.to.aggregator,
            nbytes=fact.nbytes,
            copy_s=fact.copy_s,
        )
        return Publish(subjects.event("migration", fact.move.migration, "copied"), done)


def _order(plan: SlotPlan) -> tuple[int, int]:
    return (plan.epoch, plan.number)


def _fault(message: HostBuckets) -> str:
    """Return why the command cannot be carried out; empty: it can."""
    if len(message.buckets) != len(message.at_epochs):
        return f"host: {len(message.at_epochs)} epochs for {len(message.buckets)} buckets"
    if len({layout.index for layout in message.buckets}) < len(message.buckets):
        return "host: a bucket is named twice; name each once"
    for layout in message.buckets:
        own = bucket_tensors(layout, message.tensors)
        if len(own) != layout.count or sum(map(element_count, own)) != layout.elements:
            return (
                f"host: bucket {layout.index} says {layout.count} tensors and {layout.elements} "
                f"elements from tensor {layout.first} on; the job's list says otherwise"
            )
    return ""
