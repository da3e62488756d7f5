"""A lender's memory: slabs made and faulted in, zeroed, fenced off and given back to the machine.

Every slab is a memfd in the supervisor's descriptor store before it is offered, so a kill of the
daemon takes no byte from a device. The order when one goes: the fence word, then the key (and
where memory is not mapped, the channel), then the data. Nothing here decides.

Mapped memory cannot be taken out of the hands of whoever keeps its mapping. So it is never lent
again, not even zeroed: it goes back to the machine, and fresh memory takes its place.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np
import structlog

from slackwater.common.base.errors import DeadlineExceeded, Rejected
from slackwater.common.base.failpoints import failpoint
from slackwater.common.domains.memory import trailer
from slackwater.common.native.hole_punch import punch
from slackwater.common.shell.notify import SdNotify
from slackwater.common.shell.process import Process
from slackwater.common.transport.region import Region
from slackwater.schemas.memory import SlabId
from slackwater.services.slabd.effects import LendSlab, MakeSlab, ReleaseSlab, RenewSlab
from slackwater.services.slabd.events import SlabGone, SlabMade, SlabsFound
from slackwater.services.slabd.sessions import Sessions

OffLoop = Callable[[Callable[[], None]], Awaitable[None]]
_PIECE_BYTES: Final = 16 * 1024 * 1024
_log = structlog.get_logger()


async def in_thread(work: Callable[[], None]) -> None:
    await asyncio.to_thread(work)


async def at_once(work: Callable[[], None]) -> None:
    """For simulations, which have no threads."""
    work()


class Slabs:
    def __init__(self, slab_bytes: int, sessions: Sessions, off_loop: OffLoop = in_thread) -> None:
        self._slab_bytes = slab_bytes
        self._sessions = sessions
        self.off_loop = off_loop
        self._notify = SdNotify()
        self._telling = asyncio.Lock()
        self.regions: dict[SlabId, Region] = {}
        self._passing: set[Region] = set()
        """Memory that is being made or freed: in the set until it is there, or closed."""
        self._turn = threading.Lock()
        self._mapped: set[SlabId] = set()
        """Devices may have mapped these."""
        self.prepare: Callable[[Region], None] = lambda region: None
        """Further preparation of a slab before it is offered: a NIC registers it."""

    # A life ---------------------------------------------------------------------------------------

    async def recover(self, process: Process) -> SlabsFound:
        """Take up what the descriptor store kept. Memory other than a whole slab is let go."""
        self._notify = process.notify
        found = []
        for name, fd in process.stored:
            region = Region.adopt(fd, name)
            try:
                word, identity = trailer.read(region.buffer)
                if identity.slab_bytes != self._slab_bytes:
                    raise Rejected(f"slabs have {self._slab_bytes} bytes now")
            except Rejected as error:
                _log.warning("slab.unreadable", name=name, reason=str(error))
                await self._notify.remove(name)
                region.close()
                continue
            self.regions[identity.slab] = region
            if trailer.fence_state(word) != trailer.FREE:
                self._mapped.add(identity.slab)  # Unknown how it was lent, so it counts as mapped.
            await self.off_loop(region.populate)
            found.append((word, identity))
        return SlabsFound(tuple(found))

    def resident_bytes(self) -> int:
        """Memory of the machine that our slabs take at present."""
        with self._turn:
            ours = (*self.regions.values(), *self._passing)
            return sum(os.fstat(region.fileno()).st_blocks * 512 for region in ours)

    def close(self) -> None:
        """The process ends; the descriptor store keeps them."""
        for region in self.regions.values():
            region.close()
        self.regions.clear()

    # Handlers of the core's effects ---------------------------------------------------------------

    async def make(self, effect: MakeSlab) -> SlabMade:
        return await self._make(effect.slab, 0)

    async def _make(self, slab: SlabId, generation: int) -> SlabMade:
        """`generation`: how often it was lent, in other memory."""
        made: list[Region] = []

        def create() -> None:
            nbytes = self._slab_bytes + trailer.TRAILER_BYTES
            region = Region.create(nbytes, f"slab.{slab}")
            made.append(region)
            self._pass(region)
            region.prefault()
            self._set_free(slab, region, generation)
            self.prepare(region)

        try:
            failpoint("slabd.make.before")
            await self.off_loop(create)
            async with self._telling:
                await self._notify.store(made[0].fileno(), f"slab.{slab}")
                await self._notify.barrier()
        except (MemoryError, DeadlineExceeded) as error:
            for region in made:
                self._close(region)
            return SlabMade(slab, str(error))
        failpoint("slabd.make.after")
        with self._turn:
            self._passing.discard(made[0])
            self.regions[slab] = made[0]
        return SlabMade(slab)

    def _set_free(self, slab: SlabId, region: Region, generation: int) -> None:
        identity = trailer.SlabIdentity(
            slab=slab, slab_bytes=self._slab_bytes, generation=generation
        )
        trailer.write(region.buffer, trailer.FREE, identity)

    def _pass(self, region: Region) -> None:
        with self._turn:
            self._passing.add(region)

    def _close(self, region: Region) -> None:
        with self._turn:
            self._passing.discard(region)
        region.close()

    def lend(self, effect: LendSlab) -> None:
        """The trailer first: from the moment the device has a key, the memory says whose it is."""
        identity = effect.identity
        region = self.regions[identity.slab]
        failpoint("slabd.lend.before")
        trailer.write(region.buffer, trailer.LENT, identity)
        failpoint("slabd.lend.after")
        if self._sessions.maps(effect.session):
            self._mapped.add(identity.slab)
        self._sessions.grant(effect.session, effect.request, identity, region)

    async def renew(self, effect: RenewSlab) -> SlabMade:
        """Returned in good order: the next device must not see what this one wrote, nor this one
        what the next one writes. Where only a key led to the memory, zeros will do."""
        failpoint("slabd.clear.before")
        slab, generation = effect.slab, effect.generation
        region = self.regions[slab]
        trailer.write_fence(region.buffer, trailer.REVOKED, generation)
        self._sessions.revoke(effect.session, slab)
        if slab in self._mapped:
            self._take_out(slab)
            await self._free(slab, region)
            return await self._make(slab, generation)

        def clear() -> None:
            data = np.frombuffer(region.buffer, np.uint8)[: self._slab_bytes]
            for first in range(0, len(data), _PIECE_BYTES):
                data[first : first + _PIECE_BYTES] = 0

        await self.off_loop(clear)
        self._set_free(slab, region, generation)
        return SlabMade(slab)

    async def release(self, effect: ReleaseSlab) -> SlabGone:
        slab = effect.slab
        region = self._take_out(slab)
        trailer.write_fence(region.buffer, trailer.REVOKED, effect.generation)
        await self._sessions.fence_off(effect.session, slab, effect.forced)
        await self._free(slab, region)
        return SlabGone(slab)

    def _take_out(self, slab: SlabId) -> Region:
        region = self.regions.pop(slab)
        self._pass(region)
        self._mapped.discard(slab)
        return region

    async def _free(self, slab: SlabId, region: Region) -> None:
        def free() -> None:
            # Punched first: a device that still maps it must not keep the pages alive.
            punch(region.fileno(), 0, self._slab_bytes)
            self._close(region)

        failpoint("slabd.free.before")
        await self.off_loop(free)
        failpoint("slabd.free.after")
        try:
            async with self._telling:
                await self._notify.remove(f"slab.{slab}")
        except DeadlineExceeded as error:
            _log.warning("slab.not-forgotten", slab=slab, reason=str(error))
