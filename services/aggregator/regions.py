"""The memory of an aggregator: made, kept beyond its life, found again, let go.

Every region's memfd lies in the supervisor's descriptor store before anybody is told of it, so a
kill -9 loses no byte. A region that is found again says itself what it is; one whose owner word
names another aggregator was handed over, and one whose maker was killed in the middle does not
open: both are let go. One that another process has locked, as everybody can who maps it, waits; the
others do not.
"""

import asyncio
import contextlib
import fcntl
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected, Unavailable
from slackwater.common.domains.slots.gpu_region import load_region, make_region
from slackwater.common.domains.slots.layout import bucket_tensors
from slackwater.common.domains.slots.region import SlotRegion, owner_word
from slackwater.common.domains.slots.saved_bucket import SavedJob
from slackwater.common.shell.notify import SdNotify
from slackwater.common.shell.process import Process
from slackwater.common.transport.gpu import Device
from slackwater.common.transport.region import Region
from slackwater.schemas.placement import BucketLayout, HostBuckets, JobPlan, Tensors
from slackwater.services.aggregator.bucket import Key
from slackwater.services.aggregator.executor import OffLoop
from slackwater.services.aggregator.ledger import NAME, Ledger

_log = structlog.get_logger()
COPIED = 1
"""The bit of the transfer word that says that two memories exist."""
_LOCK_ATTEMPTS: Final = 10


@dataclass(slots=True, eq=False)
class Held:
    """A region that is ours, and its name in the descriptor store."""

    region: Region
    slots: SlotRegion
    name: str

    @property
    def key(self) -> Key:
        return self.slots.plan.job, self.slots.bucket.index

    def holds(self, region: Region) -> bool:
        """Say whether that is the same memory."""
        return os.path.sameopenfile(self.region.fileno(), region.fileno())

    def close(self) -> None:
        """The memory goes with the last view of it: a fold may still work in it."""
        self.region.close()

    @contextlib.contextmanager
    def locked(self) -> Iterator[SlotRegion]:
        """Alone among the processes that map the region: whoever changes the owner or transfer
        word does so in here. Raises Unavailable when another process is in the middle of it."""
        try:
            fcntl.lockf(self.region.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Unavailable(
                f"region {self.name} is being taken over", retry_after_s=limits.RETRY_WAIT_S_MIN
            ) from error
        try:
            yield self.slots
        finally:
            fcntl.lockf(self.region.fileno(), fcntl.LOCK_UN)


def lock_holder(region: Region) -> int:
    """The process that has locked it; 0: the kernel does not say, as of another namespace's."""
    status = os.fstat(region.fileno())
    device = status.st_dev
    file = f"{os.major(device):02x}:{os.minor(device):02x}:{status.st_ino}"
    try:
        locks = Path("/proc/locks").read_text()
    except OSError as error:  # Then its name is not told: that is all.
        _log.info("locks.unreadable", reason=str(error))
        return 0
    for line in locks.splitlines():
        fields = line.split()
        if file in fields and fields[4].isdecimal():
            return int(fields[4])
    return 0


def region_name(region: Region, slots: SlotRegion) -> str:
    """In the descriptor store: readable, short, and unique by the memory. What the region is (job,
    bucket, epochs) it says itself; a store holds a memory once, under its first name, however often
    it moves away and comes back. Its copy, which has the same identity, is another memory: under
    one name, forgetting one of them would forget both."""
    memory = os.fstat(region.fileno()).st_ino & 0xFFFFFFFF
    identity = slots.identity.hex()[:4]
    name = f"{slots.plan.job[:8]}.{slots.bucket.index}.{identity}{memory:08x}"
    assert len(name) <= limits.REGION_NAME_MAX, name
    return name


def _checkpoint_of(message: HostBuckets) -> SavedJob | None:
    """Return what the regions are filled from; None: nothing. Raises Rejected where the job is to
    begin with a checkpoint that is not there."""
    if message.saved:
        try:
            return SavedJob(Path(message.saved))
        except Rejected as error:  # It was not saved yet.
            _log.info("checkpoint.missing", job=message.plan.job, reason=str(error))
    return SavedJob(Path(message.restore)) if message.restore else None


class Regions:
    """The regions of this aggregator, by bucket. `aggregator` is its id, whose word marks it as
    owner."""

    def __init__(
        self, aggregator: str, off_loop: OffLoop, device: Device | None = None, *, pin: bool = False
    ) -> None:
        """`device`: hold them there; `pin`: workers that cannot reach it are expected."""
        self.device = device
        self._pin = pin
        self.me = owner_word(aggregator)
        self.held: dict[Key, Held] = {}
        self.locked: dict[str, Held] = {}
        """Regions by name that another process does not let us take over yet."""
        self.recovered = 0
        """Taken over from this aggregator's former life."""
        self._aggregator = aggregator
        self._off_loop = off_loop
        self._notify = SdNotify()
        self._kept: Counter[str] = Counter()
        """Names in the descriptor store: twice, for a bucket that left and came back at once."""
        self._telling = asyncio.Lock()
        self._ledger = Ledger()

    # A start --------------------------------------------------------------------------------------

    async def recover(self, process: Process) -> list[Held]:
        """Open the regions that the descriptor store kept for us."""
        self._notify = process.notify
        for name, fd in process.stored:
            if name == NAME:
                self._go_on_counting(fd)
        for name, fd in process.stored:
            held = self._open(name, fd) if name != NAME else None
            if held is not None:
                self.locked[name] = held
            elif name != NAME:
                await self._notify.remove(name)
        for attempt in range(_LOCK_ATTEMPTS):
            if attempt:  # Another aggregator stores three words and is done, or it hangs.
                await asyncio.sleep(limits.RETRY_WAIT_S_MIN)
            for held in await self.unlocked():
                await self._recover(held)
            if not self.locked:
                break
        for held in self.locked.values():
            _log.warning(
                "region.locked", name=held.name, job=held.key[0], bucket=held.key[1],
                by_process=lock_holder(held.region), remedy="end that process; it is tried again",
            )  # fmt: skip
        self.recovered = len(self.held)
        return list(self.held.values())

    async def unlocked(self) -> list[Held]:
        """Return the locked regions that are free now, and are ours: to be taken over."""
        found = []
        for name, held in tuple(self.locked.items()):
            try:
                with held.locked() as slots:
                    ours = slots.owner == self.me
                    if ours and not slots.transfer & COPIED:
                        slots.transfer = 0  # No other aggregator has it or will take it.
            except Unavailable:
                continue
            del self.locked[name]
            if not ours:
                _log.info("region.elsewhere", name=name)
                await self.let_go(held)
                continue
            if self._ledger.has(held.slots):  # It was being dropped when we were killed.
                held.slots.count_anew()
            found.append(held)
        return found

    async def _recover(self, held: Held) -> None:
        """Keep the newer of two regions of one bucket, before any is used."""
        other = self.held.get(held.key)
        if other is not None and held.slots.location_epoch < other.slots.location_epoch:
            await self.let_go(held)
            return
        if other is not None:
            await self.forget(other, moved=True)
            other.close()
        settled = await self.settle(held)
        self.add_recovered(held, settled)
        if settled is not held:  # The store's copy would soon be an old version.
            await self.let_go(held)

    def add_recovered(self, held: Held, settled: Held) -> None:
        """A region of our former life is ours again; `let_go` of it where it settled elsewhere."""
        self.held[settled.key] = settled
        self.recovered += 1
        if settled is held:
            self._kept[held.name] += 1

    async def let_go(self, held: Held) -> None:
        """Remove a region that is not wanted from the store."""
        async with self._telling:
            await self._notify.remove(held.name)
        held.close()

    def _go_on_counting(self, fd: int) -> None:
        try:
            self._ledger.adopt(fd)
        except ValueError as error:
            _log.warning("counters.unreadable", reason=str(error))

    def _open(self, name: str, fd: int) -> Held | None:
        region = Region.adopt(fd, name)
        try:
            slots = SlotRegion.open(region.buffer)
        except Rejected as error:
            _log.warning("region.unreadable", name=name, reason=str(error))
            region.close()
            return None
        return Held(region, slots, name)

    # Making and keeping ---------------------------------------------------------------------------

    async def make(self, message: HostBuckets, new: Sequence[int]) -> list[Held]:
        """All of them, or none: raises MemoryError, DeadlineExceeded, Rejected (the checkpoint
        that they begin with is not one of such a job)."""
        made: list[Held] = []
        try:
            saved = await self._off_loop(_checkpoint_of, message)
            for position in new:
                layout, epoch = message.buckets[position], message.at_epochs[position]
                tensors = bucket_tensors(layout, message.tensors)
                held = await self._off_loop(self._make, message.plan, layout, tensors, epoch)
                made.append(held)
                if saved is not None:
                    fill = saved.restore if message.begins else saved.stand_in
                    await self._off_loop(fill, held.slots, message.tensors)
            await self.keep(made)
        except BaseException:
            for held in made:
                if held.name in self._kept:
                    await self.forget(held, moved=True)
                held.close()
            raise
        return made

    def device_of(self, plan: JobPlan) -> Device | None:
        """Return the device that holds and folds the job's buckets; None: this CPU does, also
        those of int8, of which devices know nothing."""
        return None if plan.gradient_dtype == "int8" else self.device

    def _make(self, plan: JobPlan, layout: BucketLayout, tensors: Tensors, epoch: int) -> Held:
        if (device := self.device_of(plan)) is not None:
            on_device, there = make_region(
                device, plan, layout, tensors, epoch, self._aggregator, pin=self._pin
            )
            return Held(on_device, there, region_name(on_device, there))
        nbytes = SlotRegion.nbytes_of(plan, layout, tensors)
        region = Region.create(nbytes, f"{plan.job}.{layout.index}", prefault=True)
        slots = SlotRegion.format(
            region.buffer, plan, layout, tensors, epoch, owner=self._aggregator
        )
        return Held(region, slots, region_name(region, slots))

    async def keep(self, made: Sequence[Held]) -> None:
        """Return when the supervisor holds them, too. A device's memory nobody else can hold: a
        kill loses it."""
        async with self._telling:
            for held in made:
                if not held.region.in_place:
                    continue
                self._kept[held.name] += 1
                await self._notify.store(held.region.fileno(), held.name)
            await self._notify.barrier()

    async def settle(self, held: Held) -> Held:
        """Return the memory that we fold from now on: a copy on our device, where there is one with
        room; the region itself, mapped before its first fold, which would be charged for the
        faults."""
        if (device := self.device_of(held.slots.plan)) is not None:
            load = partial(load_region, device, held.region, pin=self._pin)
            try:
                region, slots = await self._off_loop(load)
                return Held(region, slots, region_name(region, slots))
            except MemoryError as error:
                _log.warning("device.full", name=held.name, reason=str(error))
        await self._off_loop(held.region.populate)
        return held

    async def spill(self) -> None:
        """The process ends in order: what is on the device goes into the descriptor store."""
        for key, held in list(self.held.items()):
            if held.region.in_place:
                continue
            try:
                host = await self._off_loop(held.region.whole)
            except MemoryError as error:
                _log.error("region.lost", name=held.name, reason=str(error))
                continue
            slots = SlotRegion.open(host.buffer)
            self.held[key] = kept = Held(host, slots, region_name(host, slots))
            await self.keep([kept])
            held.close()

    def add(self, held: Held) -> None:
        self.held[held.key] = held

    async def forget(self, held: Held, *, moved: bool = False) -> None:
        """Let a region go that is not ours any more. Its counters stay in our sum unless they moved
        with it."""
        if self.held.get(held.key) is held:
            del self.held[held.key]
        if not moved:
            self._ledger.add(held.slots)
        if not held.region.in_place:
            return  # Only this process keeps it.
        async with self._telling:
            if not moved and not self._ledger.kept:
                await self._keep_ledger()
            self._kept[held.name] -= 1
            if self._kept[held.name] <= 0:
                del self._kept[held.name]
                await self._notify.remove(held.name)

    async def _keep_ledger(self) -> None:
        try:
            await self._notify.store(self._ledger.fileno(), NAME)
            self._ledger.kept = True
        except MemoryError as error:  # Then a kill forgets them.
            _log.warning("counters.not_kept", reason=str(error))

    # Regions that were moved ----------------------------------------------------------------------

    def bytes_moved(self) -> tuple[int, int]:
        """(in, out), by the regions' own counters: those that are here, and those that ended."""
        bytes_in, bytes_out = self._ledger.totals
        for held in self.held.values():
            more_in, more_out = held.slots.bytes_moved()
            bytes_in += more_in
            bytes_out += more_out
        return bytes_in, bytes_out

    def close(self) -> None:
        """The process ends; the descriptor store keeps them."""
        for held in (*self.held.values(), *self.locked.values()):
            held.close()
        self.held.clear()
        self.locked.clear()
        self._ledger.close()
