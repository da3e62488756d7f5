"""Handlers of the core's orders about regions: its effects.

Making and dropping wait for the descriptor store, copying for another aggregator; none of it stops
a push or pull of other buckets.
"""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import structlog

from slackwater.common.base import limits
from slackwater.common.base.background import Tasks
from slackwater.common.base.clock import Clock
from slackwater.common.base.errors import DeadlineExceeded, Rejected, Unavailable
from slackwater.common.base.failpoints import failpoint
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.shell.definition import Port
from slackwater.schemas.placement import BucketHeld, HostBuckets, JobPlan
from slackwater.services.aggregator.bucket import Bucket, Key, Move, Spare
from slackwater.services.aggregator.core import AggregatorCore, LockedBucket
from slackwater.services.aggregator.effects import (
    DropBuckets,
    KeepBucket,
    MakeRegions,
    MoveBucket,
    SetDeadlines,
    SetSlotPlan,
)
from slackwater.services.aggregator.events import BucketCopied, RegionsDropped, RegionsMade
from slackwater.services.aggregator.executor import Executor, OffLoop, warm
from slackwater.services.aggregator.migration import Handovers, standing_order
from slackwater.services.aggregator.plane import DataPlane
from slackwater.services.aggregator.regions import Held, Regions

_log = structlog.get_logger()


def _as_locked(slots: SlotRegion) -> BucketHeld:
    return BucketHeld(
        job=slots.plan.job,
        bucket=slots.bucket.index,
        layout_epoch=slots.layout_epoch,
        location_epoch=slots.location_epoch,
        version=slots.version,
        moving=True,
    )


class Orders:
    """`handovers` is set by whoever builds it (it calls back here)."""

    handovers: Handovers

    def __init__(
        self,
        core: AggregatorCore,
        regions: Regions,
        plane: DataPlane,
        executor: Executor,
        clock: Clock,
        off_loop: OffLoop,
    ) -> None:
        self._core, self._regions, self._plane = core, regions, plane
        self._executor, self._clock, self._off_loop = executor, clock, off_loop
        self._tasks = Tasks(self._failed)
        self._loaded = False
        self._fail: Callable[[BaseException], None] | None = None
        self._post: Callable[[Any], None] | None = None

    async def begin(self, port: Port, recovered: Sequence[Held]) -> None:
        """Take over what was found, and go on where it stopped."""
        self._fail, self._post = port.fail, port.post
        self._resume(recovered)
        self._show_locked()
        if self._regions.locked:
            self._background(self._take_over_later())

    def _resume(self, recovered: Sequence[Held]) -> None:
        for held in recovered:
            bucket = self._add(held, arrived=True)
            if held.slots.transfer:
                bucket.doubt()
                bucket.move = standing_order(held.slots)
        self._background(self._warm_all(recovered))
        for held in recovered:
            bucket = self._core.buckets[held.key]
            if bucket.move is not None:
                self.frozen(bucket, held)
            self._plane.fold_if_complete(bucket, held)

    def _show_locked(self) -> None:
        """Report locked buckets, so that the controller waits and does not begin them anew."""
        self._core.locked = {
            held.key: LockedBucket(_as_locked(held.slots), held.region.nbytes)
            for held in self._regions.locked.values()
        }

    async def _take_over_later(self) -> None:
        """Take over regions that another process had locked at the start, as soon as it lets go."""
        while self._regions.locked:
            await self._clock.sleep_until(self._clock.now_s() + limits.RETRY_WAIT_S_MAX)
            for held in await self._regions.unlocked():
                await self._take_over(held)
            self._show_locked()

    async def _take_over(self, held: Held) -> None:
        settled = await self._regions.settle(held)
        wanted = self._core.awaits(held.key)
        _log.info("region.unlocked", name=held.name, wanted=wanted)
        if wanted:
            self._regions.add_recovered(held, settled)
            self._resume([settled])
        elif settled is not held:
            settled.close()
        if settled is not held or not wanted:
            await self._regions.let_go(held)

    async def close(self) -> None:
        await self.handovers.close()
        await self._tasks.close()

    # Making ---------------------------------------------------------------------------------------

    async def make(self, effect: MakeRegions) -> RegionsMade:
        message, job = effect.message, effect.message.plan.job
        try:
            made = await self._regions.make(message, effect.new)
        except (MemoryError, DeadlineExceeded) as error:
            return RegionsMade(job, effect.token, str(error))
        except Rejected as error:
            return RegionsMade(job, effect.token, str(error), for_good=True)
        for held in made:
            self._regions.add(held)
            self._add(held)
        self._plan_deadlines(message)
        await self._warm_all(made)  # So that no push waits for a compiler.
        failpoint("aggregator.host.after")
        return RegionsMade(job, effect.token)

    def deadlines(self, effect: SetDeadlines) -> None:
        self._plan_deadlines(effect.message)

    def _plan_deadlines(self, message: HostBuckets) -> None:
        for layout, position in zip(message.buckets, message.positions, strict=False):
            task = (message.plan.job, layout.index)
            self._executor.turns.deadlines.plan(task, position, message.slack, message.iteration_s)

    def turns(self, effect: SetSlotPlan) -> None:
        message = effect.message
        if message.jobs and not self._loaded and self._regions.device is None:
            self._loaded = True
            self._background(self._load_kernels())
        paces: dict[str, float] = {each.job: each.every_s for each in message.jobs}
        slacks: dict[str, float] = {e.job: e.slack for e in message.jobs if e.slack}
        self._executor.turns.plan(message.cycle_s, message.slack, paces, slacks)

    def _add(self, held: Held, *, arrived: bool = False) -> Bucket:
        slots = held.slots
        bucket = Bucket(
            slots.plan,
            slots.bucket,
            self._core.next_handle(),
            held.region.nbytes,
            slots.location_epoch,
            version=slots.version if slots.initialized else 0,
            applied=slots.applied(),
            initialized=slots.initialized,
            arrived=arrived,
        )
        if not slots.initialized and slots.version:
            bucket.spare = Spare(slots.version, slots.version - slots.state_since)
        bucket.resized(slots.look())
        self._core.add(bucket)
        return bucket

    async def _warm_all(self, held: Sequence[Held]) -> None:
        """Load what these jobs' rules need, each once."""
        plans = [each.slots.plan for each in held]
        for plan in {(plan.job, plan.update.name): plan for plan in plans}.values():
            await self._warm(plan)

    async def _warm(self, plan: JobPlan) -> None:
        changes = plan.active and not plan.virtual
        folded = plan.active if changes else plan.workers
        await self._load(plan, folded if plan.consistency == "synchronous" else 1)
        if changes:
            self._background(self._warm_other_sizes(plan))

    async def _warm_other_sizes(self, plan: JobPlan) -> None:
        for workers in range(1, plan.workers + 1):
            await self._load(plan, workers)

    async def _load(self, plan: JobPlan, folded: int) -> None:
        device = self._regions.device_of(plan)
        await self._off_loop(
            warm, plan.update.name, plan.gradient_dtype, folded, device, plan.noise
        )

    async def _load_kernels(self) -> None:
        """A process's first kernel takes most of a second to load, the others milliseconds: the
        first bucket that moves here would wait for that, and its whole job. Who is of no job's
        plan saves the time, and 120 MB."""
        await self._off_loop(warm, "sgd", "float32", 1)

    # Dropping -------------------------------------------------------------------------------------

    def drop(self, effect: DropBuckets) -> Awaitable[RegionsDropped]:
        """Forget the buckets now; their memory goes later."""
        removed = [self._remove(key, "has dropped it") for key in effect.keys]
        return self._drop([held for held in removed if held is not None], effect.token)

    def _remove(self, key: Key, what: str) -> Held | None:
        self.handovers.cancel(key)
        self.handovers.departures.forget(key)
        self._executor.forget(key)
        bucket = self._core.remove(key)
        if bucket is not None:
            self._plane.part(bucket, f"{self._core.id} {what}")
        return self._regions.held.pop(key, None)

    async def _drop(self, gone: Sequence[Held], token: int, moved: bool = False) -> RegionsDropped:
        for held in gone:
            await self._regions.forget(held, moved=moved)
            held.close()
        return RegionsDropped(token)

    def taken(self, bucket: Bucket) -> None:
        """Let go of a bucket that another aggregator took over while this one was thought to be
        gone."""
        _log.warning("bucket.taken", job=bucket.key[0], bucket=bucket.key[1])
        held = self._remove(bucket.key, "does not own it any more")
        if held is not None:
            self._background(self._drop((held,), 0, moved=True))

    # Staying and leaving --------------------------------------------------------------------------

    def keep(self, effect: KeepBucket) -> None:
        key, location_epoch = effect.key, effect.location_epoch
        bucket, held = self._core.buckets.get(key), self._regions.held.get(key)
        if bucket is None or held is None:
            return
        self.handovers.cancel(key)
        try:
            with held.locked() as slots:
                slots.transfer = 0
                slots.owner = self._regions.me
                slots.location_epoch = location_epoch
        except Unavailable:  # Another process is in the middle of taking it.
            self._background(self._keep_later(effect))
            return
        if bucket.phase == "moving":
            slots = held.slots
            bucket.found(slots.version, slots.initialized, slots.applied())
        bucket.thaw(location_epoch)
        self._plane.fold_if_complete(bucket, held)

    async def _keep_later(self, effect: KeepBucket) -> None:
        await self._clock.sleep_until(self._clock.now_s() + limits.RETRY_WAIT_S_MIN)
        self.keep(effect)

    def move(self, effect: MoveBucket) -> None:
        key, move = effect.key, effect.move
        bucket, held = self._core.buckets.get(key), self._regions.held.get(key)
        if bucket is None or held is None:
            return
        bucket.move = move
        if bucket.phase != "moving":
            self._prepare(bucket, held)
            return
        self.handovers.cancel(key)  # Another target, or found again after a restart.
        bucket.location_epoch = move.location_epoch
        self._plane.redirect_all(bucket, held, move)

    def _prepare(self, bucket: Bucket, held: Held) -> None:
        assert self._fail is not None
        if bucket.sent_on:  # Its workers push elsewhere already.
            self._plane.leave_if_idle(bucket, held)
            return

        def leave() -> bool:
            gone = self._regions.held.get(bucket.key) is not held or bucket.move is None
            return gone or self._plane.leave_if_idle(bucket, held)

        self.handovers.prepare(bucket, held, leave, self._fail)

    def may_leave(self, bucket: Bucket, held: Held) -> bool:
        return bucket.sent_on or self.handovers.may_leave(bucket, held)

    def frozen(self, bucket: Bucket, held: Held) -> None:
        assert self._fail is not None
        self.handovers.start(bucket, held, self._fail)

    def copied(self, bucket: Bucket, held: Held, move: Move, nbytes: int, copy_s: float) -> None:
        """Let the bucket go: its new aggregator has it. Workers may still read the last version
        here."""
        if self._core.buckets.get(bucket.key) is not bucket:
            return
        assert self._post is not None
        self._core.remove(bucket.key)
        self._executor.forget(bucket.key)
        self.handovers.departures.forget(bucket.key)
        self._regions.held.pop(bucket.key, None)
        self._plane.port.count("buckets_migrated")
        self._plane.port.count("bytes_migrated", nbytes)
        self._post(
            BucketCopied(
                bucket.key,
                move,
                bucket.version,
                bucket.initialized,
                nbytes,
                copy_s,
                bucket.all_answered,
                bucket.plan,
            )
        )
        self._background(self._linger(held))

    async def _linger(self, held: Held) -> None:
        await self._regions.forget(held, moved=True)
        await self._clock.sleep_until(self._clock.now_s() + limits.LINGER_S)
        held.close()

    # Arriving: what adoptions ask -----------------------------------------------------------------

    def passed_on(self, key: Key, location_epoch: int) -> bool:
        gone = self._core.forwarding_of(key, self._clock.now_s())
        return gone is not None and gone.move.location_epoch > location_epoch

    def may_adopt(self, key: Key, nbytes: int) -> None:
        reason = self._core.no_room_for(nbytes)
        if reason:
            raise Rejected(reason)

    def adopted(self, held: Held) -> None:
        self._remove(held.key, "has it at a higher epoch")  # A stale one, if any.
        self._regions.add(held)
        bucket = self._add(held, arrived=True)
        self._background(self._warm(held.slots.plan))
        self._plane.fold_if_complete(bucket, held)

    # Tasks ----------------------------------------------------------------------------------------

    def _background(self, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks.spawn(work)

    def _failed(self, _: str, error: BaseException) -> None:
        assert self._fail is not None
        self._fail(error)
