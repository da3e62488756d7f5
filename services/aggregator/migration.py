"""TENSOR_COPY, from both ends, on a lane of its own (Gu et al. 2021, section 3.2, appendix B).

    controller   MIGRATE_INIT(bucket, epoch, B)                                       -> A
    A            at the next committed version (or at once, if no push is outstanding) freezes the
                 bucket, raises its location epoch, answers the pulls with `Moved` to B
    A            hands the region over (the memfd on one host, a copy between hosts)  -> B
    B            stores it in its descriptor store, writes itself into the owner word, accepts
    A            forgets it, remembers where it went, TENSOR_COPY_DONE                -> controller
    B            when every worker has pushed there, WORKER_DONE                      -> controller

Why there is exactly one owner, whoever is killed when. On one host both ends map one memory, with
one `owner` word. A writes its wish into `transfer` (B's word) before it offers the region. B takes
it by one store into `owner`, only if `transfer` still names B, and only after its own descriptor
store holds the memory. A takes its wish back by clearing `transfer`, only if `owner` is still A.
Both are done holding a lock that dies with its holder, so one of the two happens. Then:

- A dies before B's store: A comes back, reads owner = A, clears `transfer`, goes on as the owner.
  The controller, which heard no TENSOR_COPY_DONE, repeats MIGRATE_INIT. Had B the region in its
  hands at that moment, it finds `transfer` cleared and refuses.
- A dies after B's store: it comes back, reads owner = B, and lets the memory go. The controller
  learns from B that it holds the bucket.
- B dies before its store: it comes back, reads owner = A, lets the memory go; A offers it again.
- B dies after its store: it comes back, reads owner = B, and holds the bucket; A's next look at the
  word says so, too.

Between hosts there are two memories, and A cannot see B's. Before the first byte leaves, A writes
the order into the region's header and marks `transfer` as a copy. From then on A is frozen, and
after a restart it offers the region again to the B that the header names, until B accepts (what B
has already, or has passed on since, it accepts at once) or the controller says where the bucket is:
a command to host it at A with a higher epoch, given when B stays away, makes A the owner, and B's
copy, should it come back, is stale by its epoch and dropped. Until one of them happens nobody folds
at A; B folds only what is its own. A kernel commits only while the owner word is its aggregator's.

The order's location epoch is in the region before anybody is told of it. So when A is killed after
it told some workers, and is given the order again, it knows by the epoch that workers have gone on:
it waits for no push any more, and freezes the bucket with those that are in. They stand: words and
slots go along, and whoever pushed too late for that pushes again at B.

A copy between hosts sends what counts alone (common/domains/slots/live.py): words, one buffer of
parameters, one of each optimiser state, and the slots whose pushes wait. The receiver's other slots
and buffers are fresh.

Copies between hosts keep to a cap of bandwidth that all of an aggregator's share, on channels of
their own: pushes and pulls wait for none of them, but for the bucket's own that is frozen.

A bucket may come back while A still waits to hear that it left: the order of words decides, never
what a list says. A copy has its original's identity, but its own name in the descriptor store.

A worker that was told `Moved` before the owner changed finds the bucket denied at B and comes back
by way of the controller's table, until it is where the owner is.
"""

import asyncio
import contextlib
import hmac
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any, Protocol

import msgspec
import structlog

from slackwater.common.base import limits
from slackwater.common.base.clock import Clock
from slackwater.common.base.codec import shortened
from slackwater.common.base.errors import AccessRefused, Rejected, Retryable, Unavailable
from slackwater.common.base.failpoints import failpoint
from slackwater.common.base.retry import next_wait_s
from slackwater.common.domains.slots.frames import Hello, encode_hello
from slackwater.common.domains.slots.live import live_parts, parts_bytes
from slackwater.common.domains.slots.region import SlotRegion, owner_word
from slackwater.common.transport.base import Channel, Fabric, Reserving
from slackwater.common.transport.negotiate import connect_best
from slackwater.common.transport.pacing import Bandwidth, Leftover
from slackwater.common.transport.region import Region
from slackwater.schemas.base import WORKERS_MAX, Count, Epoch, IdText, Index, JobId, Name, Record
from slackwater.schemas.placement import Endpoint
from slackwater.services.aggregator.bucket import Bucket, Key, Move
from slackwater.services.aggregator.departure import Departures
from slackwater.services.aggregator.regions import COPIED, Held, Regions, region_name

_log = structlog.get_logger()
SHARED = "shm"
"""The transport over which a region is handed over without a second memory."""
_TURN_S = 30.0
"""A bucket that could not leave for so long lets others try."""
_LOOK_S = 0.25
"""Seconds between two looks at a bucket that might leave though no version flips."""
_SOON_S = 0.2
_SOON_ATTEMPTS = 20


class HandoverNote(Record, kw_only=True, frozen=True):
    """Facts that the target of a move must know beside the region itself."""

    token: Name
    source: IdText
    job: JobId
    bucket: Index
    layout_epoch: Count
    location_epoch: Epoch
    pushed: Annotated[tuple[Count, ...], msgspec.Meta(max_length=WORKERS_MAX)]
    """The pushed words when A froze: a copy may have caught later ones without their slots."""
    copied: bool = False
    """Also on one host this is a copy: A has the bucket on a device."""


class _Order(Record, kw_only=True, frozen=True):
    migration: IdText
    location_epoch: Epoch
    to: Endpoint


def encode_order(move: Move) -> bytes:
    """For the region's header."""
    order = _Order(migration=move.migration, location_epoch=move.location_epoch, to=move.to)
    return msgspec.msgpack.encode(order)


def standing_order(slots: SlotRegion) -> Move | None:
    """The copy that was under way when this aggregator's former life ended."""
    if not slots.transfer & COPIED or not slots.order:
        return None
    order = msgspec.msgpack.decode(slots.order, type=_Order)
    return Move(order.migration, order.location_epoch, order.to)


def _live_bytes(held: Held) -> int:
    """Return the bytes that a copy of it would send now."""
    return parts_bytes(live_parts(held.slots, held.region.nbytes, held.slots.all_pushed()))


class Destination(Protocol):
    """The data plane as the adopting side needs it."""

    def passed_on(self, key: Key, location_epoch: int) -> bool:
        """Say whether it was here at that epoch or later, and went on."""
        ...

    def may_adopt(self, key: Key, nbytes: int) -> None:
        """Raises Rejected when there is no room."""
        ...

    def adopted(self, held: Held) -> None: ...


Copied = Callable[[Bucket, Held, Move, int, float], None]
"""The new aggregator has it: (bucket, its region, the order, bytes and seconds that it took)."""


@dataclass(slots=True)
class _Readiness:
    """Preparations for a bucket that is to leave, made while it trains on."""

    move: Move
    done: bool = False
    """The bucket may leave, if it fits."""
    unhindered: bool = False
    """The bucket may leave at once: nothing is copied, or the target does not answer."""
    channel: Channel | None = None
    room: int = 0
    """At the target, on `channel`; 0: none."""


class Handovers:
    """A's side: one task per bucket that leaves."""

    def __init__(
        self, id: str, token: str, fabrics: dict[str, Fabric], clock: Clock, rng: random.Random,
        copied: Copied, bytes_s: int = 0, leftover: Leftover | None = None,
    ) -> None:  # fmt: skip
        """`bytes_s`: what all copies to other hosts together may take of the link, 0: no cap; nor
        more than `leftover` says."""
        self._id, self._token = id, token
        self._me = owner_word(id)
        self._fabrics = fabrics
        self._clock, self._rng = clock, rng
        self._copied = copied
        capped = bytes_s or leftover is not None
        self._pace = Bandwidth(bytes_s, clock, leftover).take if capped else None
        self._room = asyncio.Semaphore(limits.MOVES_AT_ONCE)
        self._rooms = asyncio.Semaphore(limits.MOVES_AT_ONCE)
        self.departures = Departures(bytes_s)
        self._changed = asyncio.Event()
        """A copy has ended: others may fit."""
        self._ready: dict[Key, _Readiness] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._channels: dict[str, tuple[Fabric, Channel]] = {}
        self._connecting: dict[str, asyncio.Lock] = {}

    def start(self, bucket: Bucket, held: Held, fail: Callable[[BaseException], None]) -> None:
        """The bucket is frozen: offer it until it is taken, or `cancel`led."""
        assert bucket.move is not None
        readiness = self._ready.pop(bucket.key, None) or _Readiness(bucket.move)
        self.cancel(bucket.key)
        if not readiness.unhindered:  # At once: others are asked about in this turn of the loop.
            self.departures.began(bucket.key, _live_bytes(held), self._clock.now_s())
        self._run(bucket.key, self._offer(bucket, held, bucket.move, readiness), fail)

    def prepare(
        self, bucket: Bucket, held: Held, leave: Callable[[], bool],
        fail: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        """The bucket is to leave: see to a channel and to room at its target while it trains on,
        and call `leave` then, and whenever it might leave though no version flips."""
        assert bucket.move is not None
        self.cancel(bucket.key)
        readiness = self._ready[bucket.key] = _Readiness(bucket.move)
        self._run(bucket.key, self._prepare(bucket, held, readiness, leave), fail)

    def may_leave(self, bucket: Bucket, held: Held) -> bool:
        """Asked of a bucket that stands still."""
        readiness = self._ready.get(bucket.key)
        if readiness is None or not readiness.done:
            return readiness is None
        if readiness.unhindered:
            return True
        nbytes = _live_bytes(held)
        return self.departures.may_leave(bucket.key, nbytes, self._clock.now_s())

    def _run(
        self, key: Key, work: Coroutine[Any, Any, None], fail: Callable[[BaseException], None]
    ) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[key] = task

        def ended(done: asyncio.Task[None]) -> None:
            if self._tasks.get(key) is done:
                del self._tasks[key]
            if not done.cancelled() and (error := done.exception()) is not None:
                fail(error)

        task.add_done_callback(ended)

    def cancel(self, key: Key) -> None:
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()
        self._give_back(self._ready.pop(key, None))
        self._end(key, copied=False)

    def _give_back(self, readiness: _Readiness | None) -> None:
        if readiness is None or not readiness.room or readiness.channel is None:
            return
        room, readiness.room = readiness.room, 0
        if isinstance(readiness.channel, Reserving):
            readiness.channel.give_back(room)

    def _end(self, key: Key, *, copied: bool) -> None:
        """End the bucket's migration, copied or not."""
        self.departures.ended(key, self._clock.now_s(), copied=copied)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _prepare(
        self, bucket: Bucket, held: Held, readiness: _Readiness, leave: Callable[[], bool]
    ) -> None:
        try:
            fabric, channel = await self._channel(readiness.move.to)
            readiness.unhindered = fabric.kind == SHARED and held.region.in_place
        except (Retryable, Rejected):
            readiness.unhindered = True  # Frozen, it is offered until it is taken.
        if readiness.unhindered:
            readiness.done = True
            await self._until_left(leave)
            return
        readiness.channel = channel
        left = False
        while not left:  # A bucket whose workers do not push must not hold up others.
            async with self._rooms:
                left = await self._take_turn(channel, held, readiness, leave)

    async def _take_turn(
        self, channel: Channel, held: Held, readiness: _Readiness, leave: Callable[[], bool]
    ) -> bool:
        """Compete to leave for a while; return whether the bucket has left."""
        try:
            if isinstance(channel, Reserving):
                readiness.room = await channel.make_room(held.region)
        except (Retryable, Rejected):
            readiness.unhindered = True
        readiness.done = True
        try:
            async with asyncio.timeout(None if readiness.unhindered else _TURN_S):
                await self._until_left(leave)
            return True
        except TimeoutError:
            readiness.done = False
            self._give_back(readiness)
            return False

    async def _until_left(self, leave: Callable[[], bool]) -> None:
        while not leave():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _LOOK_S)

    async def close(self) -> None:
        tasks = tuple(self._tasks.values())
        for key in tuple(self._tasks):
            self.cancel(key)
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, channel in self._channels.values():
            await channel.close()

    async def _offer(self, bucket: Bucket, held: Held, move: Move, readiness: _Readiness) -> None:
        begun_s = self._clock.now_s()
        theirs = owner_word(move.to.aggregator)
        for attempt in count(1):
            try:
                async with self._room:
                    nbytes = await self._hand_over(bucket.key, held, move, readiness)
                break
            except (Retryable, Rejected) as error:
                self._end(bucket.key, copied=False)
                if held.slots.owner != self._me:
                    nbytes = held.region.nbytes
                    break  # Taken; only the answer was lost.
                if attempt in (1, 10) or attempt % 100 == 0:
                    _log.warning(
                        "copy.refused", job=bucket.key[0], bucket=bucket.key[1],
                        to=move.to.aggregator, attempt=attempt, reason=str(error),
                    )  # fmt: skip
                hint_s = error.retry_after_s if isinstance(error, Unavailable) else 0.0
                wait_s = next_wait_s(attempt, min(hint_s, 0.2), self._rng)
                if attempt <= _SOON_ATTEMPTS:  # A target that was killed is back by then.
                    wait_s = min(wait_s, _SOON_S)
                await self._clock.sleep_until(self._clock.now_s() + wait_s)
        self._end(bucket.key, copied=True)
        failpoint("aggregator.copy.after")
        if held.slots.transfer & COPIED:
            held.slots.owner = (
                theirs  # Our memory is history. A shared one may be elsewhere by now.
            )
        self._copied(bucket, held, move, nbytes, self._clock.now_s() - begun_s)

    async def _hand_over(self, key: Key, held: Held, move: Move, readiness: _Readiness) -> int:
        """How many bytes that took: those that were sent, or all that one memory has."""
        fabric, channel = await self._channel(move.to)
        slots, theirs = held.slots, owner_word(move.to.aggregator)
        with held.locked():
            if slots.owner != self._me:
                return held.region.nbytes
            shared = fabric.kind == SHARED and held.region.in_place
            copied = slots.transfer & COPIED if shared else COPIED
            if copied:
                slots.set_order(encode_order(move))
            slots.transfer = theirs | copied
        pushed = tuple(slots.all_pushed())
        note = HandoverNote(
            token=self._token,
            source=self._id,
            job=slots.plan.job,
            bucket=slots.bucket.index,
            layout_epoch=slots.layout_epoch,
            location_epoch=slots.location_epoch,
            pushed=pushed,
            copied=not held.region.in_place,
        )
        failpoint("aggregator.copy.before")
        encoded = msgspec.msgpack.encode(note)
        if not copied:
            self._end(key, copied=False)
            await channel.handover(held.region, encoded)
            return held.region.nbytes
        parts = live_parts(slots, held.region.nbytes, pushed)
        self.departures.began(key, parts_bytes(parts), self._clock.now_s())
        room, readiness.room = readiness.room, 0
        if room and channel is readiness.channel and isinstance(channel, Reserving):
            await channel.hand_over_into(room, held.region, encoded, self._pace, parts)
        else:
            await channel.handover(held.region, encoded, self._pace, parts)
        return parts_bytes(parts)

    async def _channel(self, to: Endpoint) -> tuple[Fabric, Channel]:
        """Raises Unavailable, AccessRefused, ConfigRejected, DeadlineExceeded."""
        async with self._connecting.setdefault(to.aggregator, asyncio.Lock()):
            known = self._channels.get(to.aggregator)
            if known is not None and not known[1].closed:
                return known
            hello = Hello(role="aggregator", token=self._token, sender=self._id)
            fabric, channel = await connect_best(
                self._fabrics, to.addresses, encode_hello(hello), deadline_s=limits.CONNECT_S
            )
            self._channels[to.aggregator] = (fabric, channel)
            return fabric, channel


class Adoptions:
    """B's side: `adopt` is what a listener calls with a region that was handed over."""

    def __init__(self, id: str, token: str, regions: Regions, destination: Destination) -> None:
        self._me, self._token = owner_word(id), token
        self._regions = regions
        self._destination = destination
        self._under_way: set[Key] = set()

    async def adopt(self, region: Region, payload: bytes, *, shared: bool) -> None:
        """When this returns the region is ours. Raises Rejected, Unavailable: it is not."""
        note = self._read(payload)
        shared = shared and not note.copied
        slots = SlotRegion.open(region.buffer)
        key = (slots.plan.job, slots.bucket.index)
        if key != (note.job, note.bucket) or slots.layout_epoch != note.layout_epoch:
            raise Rejected(
                f"the note speaks of bucket {note.job}/{note.bucket}, the region of {key}"
            )
        if key in self._under_way:
            raise Unavailable(f"bucket {key} is being taken over already", retry_after_s=0.05)
        ours = self._regions.held.get(key)
        if shared and (ours is None or ours.holds(region)):
            # One memory: its own word says whose it is. We may list it still, though it went on a
            # moment ago and returns before we heard that it arrived.
            here = slots.owner == self._me
        else:
            here = ours is not None and ours.slots.location_epoch >= note.location_epoch
        if here or self._destination.passed_on(key, note.location_epoch):
            slots.release()
            region.close()
            return  # We have it, or had it: the last acceptance did not arrive.
        self._under_way.add(key)
        try:
            await self._take(Held(region, slots, region_name(region, slots)), note, ours, shared)
        finally:
            self._under_way.discard(key)

    def _read(self, payload: bytes) -> HandoverNote:
        try:
            note = msgspec.msgpack.decode(payload, type=HandoverNote)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Rejected(shortened(f"a note that is none: {error}")) from error
        if not hmac.compare_digest(note.token.encode(), self._token.encode()):
            raise AccessRefused("the note's token is not this cluster's")
        return note

    async def _take(self, held: Held, note: HandoverNote, stale: Held | None, shared: bool) -> None:
        self._destination.may_adopt(held.key, held.region.nbytes)
        try:
            await self._regions.keep([held])
            settled = await self._regions.settle(held)
            failpoint("aggregator.copy.mid")
            self._become_owner(held, note, shared)
        except BaseException:  # The giver's end, too.
            await self._regions.forget(held, moved=True)
            raise
        if settled is not held:  # On our device: that copy is what we own from now on.
            self._own(settled.slots, note, shared=False)
        self._destination.adopted(settled)  # Adopted at once: no other aggregator answers for it.
        if settled is not held:
            await self._regions.forget(held, moved=True)
            held.close()
        if stale is not None:
            returned = stale.slots.identity == held.slots.identity
            await self._regions.forget(stale, moved=returned)

    def _become_owner(self, held: Held, note: HandoverNote, shared: bool) -> None:
        """Raises Rejected, Unavailable."""
        with held.locked() as slots:
            source = owner_word(note.source)
            if slots.owner not in (source, self._me):
                raise Rejected(f"{note.source} does not own bucket {held.key}")
            if slots.owner == source and slots.transfer & ~COPIED != self._me:
                raise Rejected(f"{note.source} has taken bucket {held.key} back")
            self._own(slots, note, shared=shared)
            if not shared:
                parts = live_parts(slots, held.region.nbytes, note.pushed)
                slots.copied_bytes += parts_bytes(parts)

    def _own(self, slots: SlotRegion, note: HandoverNote, *, shared: bool) -> None:
        if not shared:
            for rank, iteration in enumerate(note.pushed):
                slots.set_pushed(rank, iteration)
        slots.owner = self._me
        slots.transfer = 0
