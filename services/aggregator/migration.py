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

Copies between hosts keep to a cap of bandwidth that all of an aggregator's share, on channels of
their own: pushes and pulls wait for none of them, but for the bucket's own that is frozen.

A bucket may come back while A still waits to hear that it left: the order of words decides, never
what a list says. A copy has its original's identity, but its own name in the descriptor store.

A worker that was told `Moved` before the owner changed finds the bucket denied at B and comes back
by way of the controller's table, until it is where the owner is.
"""

import asyncio
import hmac
import random
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from slackwater.common import limits
from slackwater.common.clock import Clock
from slackwater.common.errors import AccessRefused, Rejected, Retryable, Unavailable
from slackwater.common.failpoints import failpoint
from slackwater.common.retry import next_wait_s
from slackwater.common.slots.frames import Hello, encode_hello
from slackwater.common.slots.region import SlotRegion, owner_word
from slackwater.common.transport.base import Channel, Fabric
from slackwater.common.transport.negotiate import connect_best
from slackwater.common.transport.pacing import Bandwidth
from slackwater.common.transport.region import Region
from slackwater.schemas.base import Count, JobId, Name, Record
from slackwater.schemas.placement import Endpoint
from slackwater.services.aggregator.bucket import Bucket, Key, Move
from slackwater.services.aggregator.regions import COPIED, Held, Regions, region_name

_log = structlog.get_logger()
SHARED = "shm"
"""The transport over which a region is handed over without a second memory."""
_SOON_S = 0.2
_SOON_ATTEMPTS = 20


class HandoverNote(Record, kw_only=True, frozen=True):
    """What B must know beside the region itself."""

    token: Name
    source: Name
    job: JobId
    bucket: Count
    layout_epoch: Count
    location_epoch: Count
    pushed: tuple[Count, ...]
    """The pushed words when A froze: a copy may have caught later ones without their slots."""
    copied: bool = False
    """Also on one host this is a copy: A has the bucket on a device."""


class _Order(Record, kw_only=True, frozen=True):
    migration: Name
    location_epoch: Count
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


class Destination(Protocol):
    """What the adopting side asks of the data plane."""

    def passed_on(self, key: Key, location_epoch: int) -> bool:
        """Whether it was here at that epoch or later, and went on."""
        ...

    def may_adopt(self, key: Key, nbytes: int) -> None:
        """Raises Rejected when there is no room."""
        ...

    def adopted(self, held: Held) -> None: ...


Copied = Callable[[Bucket, Held, Move, float], None]
"""The new aggregator has it: (bucket, its region, the order, seconds it took)."""


class Handovers:
    """A's side: one task per bucket that leaves."""

    def __init__(
        self, id: str, token: str, fabrics: dict[str, Fabric], clock: Clock, rng: random.Random,
        copied: Copied, bytes_s: int = 0,
    ) -> None:  # fmt: skip
        """`bytes_s`: what all copies to other hosts together may take of the link; 0: no cap."""
        self._id, self._token = id, token
        self._me = owner_word(id)
        self._fabrics = fabrics
        self._clock, self._rng = clock, rng
        self._copied = copied
        self._pace = Bandwidth(bytes_s, clock).take if bytes_s else None
        self._room = asyncio.Semaphore(limits.MOVES_AT_ONCE)
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._channels: dict[str, tuple[Fabric, Channel]] = {}
        self._connecting: dict[str, asyncio.Lock] = {}

    def start(self, bucket: Bucket, held: Held, fail: Callable[[BaseException], None]) -> None:
        """The bucket is frozen: offer it until it is taken, or `cancel`led."""
        assert bucket.move is not None
        self.cancel(bucket.key)
        task = asyncio.get_running_loop().create_task(self._offer(bucket, held, bucket.move))
        self._tasks[bucket.key] = task

        def ended(done: asyncio.Task[None]) -> None:
            if self._tasks.get(bucket.key) is done:
                del self._tasks[bucket.key]
            if not done.cancelled() and (error := done.exception()) is not None:
                fail(error)

        task.add_done_callback(ended)

    def cancel(self, key: Key) -> None:
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = tuple(self._tasks.values())
        for key in tuple(self._tasks):
            self.cancel(key)
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, channel in self._channels.values():
            await channel.close()

    async def _offer(self, bucket: Bucket, held: Held, move: Move) -> None:
        begun_s = self._clock.now_s()
        theirs = owner_word(move.to.aggregator)
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self._room:
                    await self._hand_over(held, move, theirs)
                break
            except (Retryable, Rejected) as error:
                if held.slots.owner != self._me:
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
        failpoint("aggregator.copy.after")
        if held.slots.transfer & COPIED:
            held.slots.owner = (
                theirs  # Our memory is history. A shared one may be elsewhere by now.
            )
        self._copied(bucket, held, move, self._clock.now_s() - begun_s)

    async def _hand_over(self, held: Held, move: Move, theirs: int) -> None:
        fabric, channel = await self._channel(move.to)
        slots = held.slots
        with held.locked():
            if slots.owner != self._me:
                return
            shared = fabric.kind == SHARED and held.region.in_place
            copied = slots.transfer & COPIED if shared else COPIED
            if copied:
                slots.set_order(encode_order(move))
            slots.transfer = theirs | copied
        note = HandoverNote(
            token=self._token,
            source=self._id,
            job=slots.plan.job,
            bucket=slots.bucket.index,
            layout_epoch=slots.layout_epoch,
            location_epoch=slots.location_epoch,
            pushed=tuple(slots.all_pushed()),
            copied=not held.region.in_place,
        )
        failpoint("aggregator.copy.before")
        await channel.handover(held.region, msgspec.msgpack.encode(note), self._pace)

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
            raise Rejected(f"a note that is none: {error}") from error
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
        self._destination.adopted(settled)  # At once: it is ours, nobody else answers for it.
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
                slots.copied_bytes += held.region.nbytes

    def _own(self, slots: SlotRegion, note: HandoverNote, *, shared: bool) -> None:
        if not shared:
            for rank, iteration in enumerate(note.pushed):
                slots.set_pushed(rank, iteration)
        slots.owner = self._me
        slots.transfer = 0
