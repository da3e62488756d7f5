"""Checkpoints on this aggregator: copies in memory by a controller's order, then files.

The order comes in two steps, so that a folder gets no part of a version that another aggregator has
missed (services/controller/checkpoints.py). Both commands are repeated until all is done: what is
there already is only told. Copies are counted as memory that is taken, and go when they are
written, when another order comes, or after COPIES_S: a controller that was killed forgets them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.common.base.background import Tasks
from slackwater.common.base.checkpoint_folder import (
    BUCKETS,
    UPDATE,
    CheckpointFolder,
    check_absolute,
)
from slackwater.common.base.errors import Rejected
from slackwater.common.base.failpoints import failpoint
from slackwater.common.domains.slots.layout import bucket_start
from slackwater.common.domains.slots.saved_bucket import BucketCopy, copy_bytes
from slackwater.common.domains.slots.saved_pieces import chosen, distances, histogram, spans_of
from slackwater.schemas.base import TOO_MANY, JobId, Refused
from slackwater.schemas.checkpoints import (
    BINS,
    BucketsCopied,
    BucketsWritten,
    CopyBuckets,
    WriteBuckets,
)
from slackwater.schemas.placement import BucketLayout
from slackwater.services.aggregator.bucket import Bucket, Key
from slackwater.services.aggregator.copying import Copying
from slackwater.services.aggregator.core import AggregatorCore
from slackwater.services.aggregator.effects import CopyForCheckpoint, WriteCheckpoint
from slackwater.services.aggregator.events import CheckpointTold
from slackwater.services.aggregator.executor import OffLoop
from slackwater.services.aggregator.regions import Held, Regions

_log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Order:
    """A copy of one bucket, and how its memory is given back."""

    bucket: Bucket
    copying: Copying
    nbytes: int
    until_s: float
    """When it goes, on the loop's clock."""
    _give_back: Callable[[], None] | None

    def free(self) -> None:
        """Let the copy go. Idempotent."""
        give_back, self._give_back, self.copying.copy = self._give_back, None, None
        if give_back is not None:
            give_back()
        if self.bucket.copying is self.copying:
            self.bucket.copying = None


class Checkpoints:
    def __init__(
        self,
        core: AggregatorCore,
        regions: Regions,
        off_loop: OffLoop,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._core, self._regions = core, regions
        self._off_loop, self._tasks = off_loop, Tasks(lambda _, error: fail(error))
        self._orders: dict[Key, _Order] = {}
        self._sweeping = False

    async def close(self) -> None:
        await self._tasks.close()

    # Copies ---------------------------------------------------------------------------------------

    async def copy(self, effect: CopyForCheckpoint) -> CheckpointTold:
        message = effect.message
        found = self._found(message)
        if isinstance(found, Refused):
            return CheckpointTold(effect.token, found)
        orders: list[_Order] = []
        if not message.look:
            try:
                orders = [self._ordered(message, *each) for each in found]
            except Rejected as error:
                return CheckpointTold(effect.token, Refused(reason=str(error), code=TOO_MANY))
            for (bucket, held), order in zip(found, orders, strict=True):
                if bucket.phase in ("ready", "folding"):
                    await self._off_loop(
                        order.copying.look, held.slots, bucket.parts, bucket.came_at
                    )
        copied = [self._copied(message, bucket) for bucket, _ in found]
        bins: tuple[int, ...] = ()
        moved: float | None = None
        if message.distances and min(copied, default=-1) >= 0:
            bins, moved = await self._distances(orders)
        answer = BucketsCopied(
            aggregator=self._core.id,
            attempt=message.attempt,
            now=tuple(held.slots.version for _, held in found),
            copied=tuple(copied),
            distances=bins,
            moved=moved,
        )
        return CheckpointTold(effect.token, answer)

    async def _distances(self, orders: list[_Order]) -> tuple[tuple[int, ...], float | None]:
        """Return how many pieces of the copies are at which distance from what was saved, and the
        norm of all, if all were saved."""
        sums, squares = np.zeros(BINS, np.int64), 0.0
        for order in orders:
            copying, saved = order.copying, order.bucket.saved
            if copying.distances is None and copying.copy is not None:
                parameters = copying.copy.parameters
                copying.distances = await self._off_loop(distances, parameters, saved)
            if copying.distances is not None:
                sums += histogram(copying.distances)
                squares += float(np.square(copying.distances).sum())
        return tuple(sums.tolist()), sqrt(squares) if isfinite(squares) else None

    def _found(self, message: CopyBuckets) -> list[tuple[Bucket, Held]] | Refused:
        """Return the buckets that are named, if all are here and have parameters."""
        found: list[tuple[Bucket, Held]] = []
        for index in message.buckets:
            key = (JobId(message.job), index)
            bucket, held = self._core.buckets.get(key), self._regions.held.get(key)
            if bucket is None or held is None or not held.slots.initialized:
                where = "is not here" if bucket is None else "has no parameters yet"
                reason = f"{self._core.id}: bucket {index} of job {message.job} {where}"
                return Refused(reason=reason, retry_after_s=0.2)
            found.append((bucket, held))
        return found

    def _copied(self, message: CopyBuckets, bucket: Bucket) -> int:
        """Return the version of the bucket's copy; -1: there is none of this attempt."""
        order = self._orders.get(bucket.key)
        copy = order.copying.copy if order is not None and _is_of(order, message) else None
        return -1 if copy is None else copy.about.version

    def _ordered(self, message: CopyBuckets, bucket: Bucket, held: Held) -> _Order:
        """Return the bucket's order, made now where it is a new one. Raises Rejected: no memory."""
        order = self._orders.get(bucket.key)
        until_s = asyncio.get_running_loop().time() + limits.COPIES_S
        if order is not None and order.bucket is bucket and _is_of(order, message):
            order.until_s = until_s
            return order
        self._let_go(bucket.key)
        nbytes = copy_bytes(bucket.plan.update.name, held.slots.bucket.elements)
        give_back = self._core.prepare(nbytes)
        copying = Copying(message.request, message.attempt, message.version)
        order = self._orders[bucket.key] = _Order(bucket, copying, nbytes, until_s, give_back)
        bucket.copying = copying
        if not self._sweeping:
            self._sweeping = True
            self._tasks.spawn(self._sweep())
        return order

    def _let_go(self, key: Key) -> None:
        order = self._orders.pop(key, None)
        if order is not None and not order.copying.writing:
            order.free()

    async def _sweep(self) -> None:
        """Let old copies go, as long as there are any."""
        while self._orders:
            await asyncio.sleep(limits.COPIES_S / 2)
            now_s = asyncio.get_running_loop().time()
            for key in [key for key, order in self._orders.items() if order.until_s <= now_s]:
                self._let_go(key)
        self._sweeping = False

    # Files ----------------------------------------------------------------------------------------

    def write(self, effect: WriteCheckpoint) -> CheckpointTold:
        """Tell what is written, and see to it that the rest will be."""
        message, nbytes, reason = effect.message, 0, ""
        written: list[int] = []
        lacking: list[int] = []
        until_s = asyncio.get_running_loop().time() + limits.COPIES_S
        for layout in message.layouts:
            key = (JobId(message.job), layout.index)
            order = self._orders.get(key)
            if order is None or not _is_of(order, message):
                lacking.append(layout.index)
                continue
            order.until_s = until_s  # A large one takes long to write, and is asked for meanwhile.
            if order.copying.written:
                written.append(layout.index)
                nbytes += order.nbytes
            elif order.copying.failure:
                reason = order.copying.failure
            elif order.copying.copy is None:
                lacking.append(layout.index)
            elif not order.copying.writing:
                order.copying.writing = True
                self._tasks.spawn(self._write(message, layout, order))
        answer = BucketsWritten(
            aggregator=self._core.id,
            attempt=message.attempt,
            written=tuple(written),
            lacking=tuple(lacking),
            nbytes=nbytes,
            reason=reason,
        )
        return CheckpointTold(effect.token, answer)

    async def _write(self, message: WriteBuckets, layout: BucketLayout, order: _Order) -> None:
        copying = order.copying
        copy = copying.copy
        assert copy is not None
        spans = None
        if message.above >= 0 and copying.distances is not None:
            numbers = chosen(copying.distances, message.above, message.share)
            spans = spans_of(numbers, copy.about.elements)
        try:
            if spans is None or spans.size:
                await self._off_loop(_write, message, layout, copy, spans)
        except (OSError, Rejected) as error:
            copying.failure = f"{self._core.id}: {message.folder}: {error}"
            _log.warning(
                "checkpoint.failed", job=message.job, bucket=layout.index, reason=str(error)
            )
        else:
            copying.written = True
            if spans is not None:
                order.nbytes = int((spans[:, 1] - spans[:, 0]).sum()) * copy.bytes_each
                order.nbytes //= 2 if message.rounded else 1
            if message.remember:
                self._remember(order.bucket, copy, spans)
        copying.writing = False
        order.free()

    def _remember(self, bucket: Bucket, copy: BucketCopy, spans: NDArray[np.int64] | None) -> None:
        """Keep what is durable now. Without room nothing is: then all is far from what was
        saved."""
        if spans is None:
            self._core.remember(bucket, copy.parameters)
            return
        if bucket.saved is None:  # It came here since, or this process was restarted.
            self._core.remember(bucket, np.full_like(copy.parameters, np.inf))
        if (saved := bucket.saved) is not None:
            for first, end in spans.tolist():
                saved[first:end] = copy.parameters[first:end]


def _is_of(order: _Order, message: CopyBuckets | WriteBuckets) -> bool:
    """Say whether it is the order of this attempt."""
    copying = order.copying
    return (copying.request, copying.attempt) == (message.request, message.attempt)


def _write(
    message: WriteBuckets,
    layout: BucketLayout,
    copy: BucketCopy,
    spans: NDArray[np.int64] | None,
) -> None:
    """Write one bucket's part: of a set, or of an update. Raises OSError, Rejected."""
    check_absolute(Path(message.folder))
    folder = CheckpointFolder(Path(message.folder), BUCKETS)
    failpoint("aggregator.checkpoint.before")
    kind = BUCKETS if spans is None else UPDATE
    iteration = message.iteration if spans is None else copy.about.version
    first = bucket_start(layout, message.tensors)
    folder.write(
        iteration, layout.index, message.parts, kind,
        lambda path: copy.write(path, message.tensors, first, spans, rounded=message.rounded),
    )  # fmt: skip
    failpoint("aggregator.checkpoint.after")
    if message.prune and layout.index == 0:
        folder.prune()
