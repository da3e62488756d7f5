"""Bytes of buckets that must be moved: pushes, pulls and seeds of regions that are not mapped here.

Several go on at once, within a bound, those of early layers first (gate.py). One that fails ends
its channel, or is done again where the bucket is attached next.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from slackwater.agent.attachment import Attached
from slackwater.agent.core import AgentCore
from slackwater.agent.effects import Ring, WriteSeed, WriteSize
from slackwater.agent.gate import Gate
from slackwater.agent.initial import Initial
from slackwater.agent.on_device import StagedOnDevice
from slackwater.agent.region_access import InPlace, Staged
from slackwater.agent.sizing import Sizing
from slackwater.agent.snapshot import Snapshots, StagedSnapshot
from slackwater.agent.virtual_slots import VirtualInPlace, VirtualStaged
from slackwater.agent.worker_bucket import WorkerBucket
from slackwater.common.base.errors import Rejected, Unavailable
from slackwater.common.domains.slots.frames import Granted, Seed, encode_control, encode_rings
from slackwater.common.domains.slots.sizes import Size
from slackwater.common.transport.base import Channel
from slackwater.schemas.base import AggregatorId

_log = logging.getLogger("slackwater.agent")
LATER_S: Final = 0.03
"""Seconds that a program which reads when it likes has to ask for what its push led to, before that
is fetched unasked: nothing of the push is left for another one until it is here."""
_TRANSFERS: Final = 4
"""Pushes and pulls in flight at once; of those that wait, early layers go first."""
Drop = Callable[[AggregatorId, Channel, Exception], Awaitable[None]]
Have = Callable[[WorkerBucket, Attached, int], None]


class Transfers:
    def __init__(
        self,
        core: AgentCore,
        channels: dict[AggregatorId, Channel],
        initial: Initial,
        have: Have,
        drop: Drop,
    ) -> None:
        """`have` is called when a bucket's parameters are here, `drop` begins anew with a peer."""
        self._core, self._channels, self._initial = core, channels, initial
        self._have, self._drop = have, drop
        self._gate = Gate(_TRANSFERS)
        self._copying = asyncio.Lock()
        """States are read one part at a time: pushes and pulls come first."""
        self._seeding: set[tuple[AggregatorId, int]] = set()
        self._wanted: dict[int, asyncio.Event] = {}
        """By bucket: to be set where what was left for later is wanted."""

    async def push(
        self, ring: Ring, bucket: WorkerBucket, slots: Attached, sizing: Sizing | None
    ) -> None:
        """Write the bucket's gradient, and before it how many workers count, where this rank says
        that; then ring."""
        channel = self._channels.get(ring.aggregator)
        if channel is None or not isinstance(slots, Staged):
            return
        rung = encode_rings([(ring.handle, ring.iteration)])
        try:
            async with self._gate.turn(ring.bucket):
                # Taken now: the word alone completes the fold, so this push may be refused before
                # its write is answered.
                again, bucket.was_refused = bucket.was_refused, False
                if sizing is not None:
                    await slots.write_size(sizing.written_with(ring.iteration))
                await slots.push(
                    ring.iteration, bucket.hyper, ring.handle, again=again,
                    early=lambda: channel.send(rung) if slots.rings_early else None,
                )  # fmt: skip
            channel.send(rung)
        except (Unavailable, Rejected) as error:
            await self._drop(ring.aggregator, channel, error)

    async def fetch(self, who: str, bucket: WorkerBucket, slots: Attached, version: int) -> None:
        assert isinstance(slots, Staged)
        try:
            async with self._gate.turn(bucket.index):
                await slots.fetch(version)
        except (Unavailable, Rejected) as error:
            # It is delivered again where the bucket is attached next; if that is nowhere else, we
            # attach here anew.
            _log.info("%s: bucket %d, version %d: %s", who, bucket.index, version, error)
            if bucket.slots is slots and self._core.attached(bucket.index):
                await slots.channel.close()
            return
        self._have(bucket, slots, version)
        await self._copy_states(bucket, slots, version)

    async def fetch_later(
        self, who: str, bucket: WorkerBucket, slots: Attached, version: int
    ) -> None:
        """Fetch it once that is wanted, unless it was read meanwhile."""
        wanted = self._wanted[bucket.index] = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wanted.wait(), LATER_S)
        if bucket.slots is not slots:
            return  # It is delivered again where the bucket is then.
        if bucket.version < version:
            await self.fetch(who, bucket, slots, version)
        elif isinstance(slots, Staged):
            await self._copy_states(bucket, slots, version)

    def want(self, bucket: WorkerBucket) -> None:
        """Fetch what was left for later."""
        if (wanted := self._wanted.get(bucket.index)) is not None:
            wanted.set()

    async def read_newest(self, bucket: WorkerBucket, slots: StagedSnapshot, owner: str) -> bool:
        """Read the newest parameters, in the place of those that the newest push led to. False: the
        bucket is not this aggregator's, or is being moved. Raises Unavailable, AccessRefused."""
        version = bucket.acknowledged
        if not await slots.look_again(version, owner):
            return False
        self._have(bucket, slots, version)
        return True

    async def seed(self, seed: WriteSeed, bucket: WorkerBucket) -> None:
        """Fill a bare region with what this worker was asked for, and say so."""
        channel, key = self._channels.get(seed.aggregator), (seed.aggregator, seed.handle)
        if channel is None or (slots := bucket.slots) is None or key in self._seeding:
            return  # Asked again, while it is being written: the answer to that serves both.
        self._seeding.add(key)
        try:
            async with self._gate.turn(bucket.index):
                said = await self._fill(seed, bucket, slots)
            channel.send(encode_control(said))
        except (Unavailable, Rejected) as error:
            await self._drop(seed.aggregator, channel, error)
        finally:
            self._seeding.discard(key)

    async def _fill(self, seed: WriteSeed, bucket: WorkerBucket, slots: Attached) -> Seed:
        """Write the newest parameters that this worker has, unless another's are newer, and what it
        has of the optimiser's states: in a mapped region that was lost, or as copies of parts.
        Raises Unavailable, AccessRefused."""
        version, parts = seed.version, bucket.copies.parts
        updates = elements = 0
        if not seed.only_states:
            version = bucket.updates(version)
            states, updates = bucket.first_states(self._initial, version)
            if version and (kept := bucket.kept_states()):
                updates, states, parts = kept[0], [[state] for state in kept[1]], []
                elements = bucket.layout.elements
            await slots.seed(version, bucket.newest(self._initial), states)
        if parts:
            await slots.seed_states(version, parts)
            elements = sum(part.end - part.first for part in parts)
            updates = max(updates, version - bucket.copies.since)
        behind = max((version - part.version for part in parts), default=0)
        return Seed(
            handle=seed.handle, version=version, updates=max(0, updates), elements=elements,
            behind=max(0, behind),
        )  # fmt: skip

    async def _copy_states(self, bucket: WorkerBucket, slots: Staged, version: int) -> None:
        """Read the parts of the optimiser's states that are due, one after another, as long as the
        region holds those of `version`."""
        if isinstance(slots, StagedOnDevice) or not bucket.copies.kept:
            return
        updates_alone = isinstance(bucket.staging, Snapshots)
        try:
            async with self._copying:
                for first, end in bucket.copies.due(slots.ranks):
                    if bucket.slots is not slots or bucket.version > version:
                        return
                    found = await slots.read_part(
                        first, end, None if updates_alone else version,
                        lambda: slots.fixed and bucket.iteration <= version + 1,
                    )  # fmt: skip
                    if found is not None:
                        bucket.copies.keep(*found)
        except (Unavailable, Rejected) as error:  # The next version's turn comes where it is then.
            _log.info("bucket %d: states of version %d: %s", bucket.index, version, error)

    async def write_size(self, effect: WriteSize, bucket: WorkerBucket, sizing: Sizing) -> None:
        """Write how many workers count from now on into a region that is not mapped, and ring for
        the version that is there, so that its aggregator looks."""
        channel, slots = self._channels.get(effect.aggregator), bucket.slots
        if channel is None or slots is None or isinstance(slots, InPlace):
            return
        try:
            await slots.write_size(sizing.written_with(effect.version + 1))
            channel.send(encode_rings([(effect.handle, effect.version)]))
        except (Unavailable, Rejected) as error:
            await self._drop(effect.aggregator, channel, error)

    async def settle_size(
        self,
        granted: Granted,
        bucket: WorkerBucket,
        sizing: Sizing,
        attempt: int | None,
    ) -> bool:
        """Learn from a region that was attached how many workers count, or write it there. In a job
        of virtual ranks, whose `attempt` this is, it is written anew where the region has another
        attempt's: so many processes go on with what the others have left. Returns whether the
        aggregator must look, and tell those who join. Raises Unavailable, AccessRefused."""
        slots, bare = bucket.slots, not granted.initialized
        assert slots is not None
        if attempt is None or slots.sizes.attempt == attempt:
            sizing.found(slots.sizes, granted.version, slots.pushed, bare=bare)
            if bare:  # Before it is seeded, its aggregator must know who counts.
                await slots.write_size(sizing.at(max(bucket.version, 0) + 1))
            return False
        since = max(bucket.version, granted.version, 0) + 1
        assert isinstance(slots, VirtualInPlace | VirtualStaged)
        await slots.begin_sizes(Size(since, sizing.wanted, 0), attempt)
        sizing.found(slots.sizes, granted.version, 0, bare=False)
        return not bare
