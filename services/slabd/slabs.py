"""A lender's memory: slabs made and faulted in, zeroed, fenced off and given back to the machine.

Every slab is a memfd in the supervisor's descriptor store before it is offered, so a kill of the
daemon takes no byte from a device. The order when one goes: the fence word, then the key (and
where memory is not mapped, the channel), then the data. Nothing here decides.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np
import structlog

from slackwater.common.errors import DeadlineExceeded, Rejected
from slackwater.common.memory import trailer
from slackwater.common.sdnotify import SdNotify
from slackwater.common.shell.process import Process
from slackwater.common.sparse import punch
from slackwater.common.transport.region import Region
from slackwater.schemas.memory import SlabId
from slackwater.services.slabd.events import SlabGone, SlabMade, SlabsFound, SlabZeroed
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
        self.prepare: Callable[[Region], None] = lambda region: None
        """What else is done to a slab before it is offered: a NIC registers it."""

    # A life ---------------------------------------------------------------------------------------

    async def recover(self, process: Process) -> SlabsFound:
        """What the descriptor store kept. A memory that is no whole slab of this size is let go."""
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
            await self.off_loop(region.populate)
            found.append((word, identity))
        return SlabsFound(tuple(found))

    def resident_bytes(self) -> int:
        """What our slabs take of the machine at present."""
        return sum(os.fstat(r.fileno()).st_blocks * 512 for r in self.regions.values())

    def close(self) -> None:
        """The process ends; the descriptor store keeps them."""
        for region in self.regions.values():
            region.close()
        self.regions.clear()

    # Handlers of the core's effects ---------------------------------------------------------------

    async def make(self, slab: SlabId) -> SlabMade:
        made: list[Region] = []

        def create() -> None:
            nbytes = self._slab_bytes + trailer.TRAILER_BYTES
            region = Region.create(nbytes, f"slab.{slab}", prefault=True)
            identity = trailer.SlabIdentity(slab=slab, slab_bytes=self._slab_bytes)
            trailer.write(region.buffer, trailer.FREE, identity)
            made.append(region)
            self.prepare(region)

        try:
            await self.off_loop(create)
        except MemoryError as error:
            return SlabMade(slab, str(error))
        region = made[0]
        try:
            async with self._telling:
                await self._notify.store(region.fileno(), f"slab.{slab}")
                await self._notify.barrier()
        except DeadlineExceeded as error:
            region.close()
            return SlabMade(slab, str(error))
        self.regions[slab] = region
        return SlabMade(slab)

    def lend(self, session: int, request: int, identity: trailer.SlabIdentity) -> None:
        """The trailer first: from the moment the device has a key, the memory says whose it is."""
        region = self.regions[identity.slab]
        trailer.write(region.buffer, trailer.LENT, identity)
        self._sessions.grant(session, request, identity, region)

    async def zero(self, slab: SlabId, session: int) -> SlabZeroed:
        """Returned in good order: the next device must not read what this one wrote."""
        region = self.regions[slab]
        _, identity = trailer.read(region.buffer)
        trailer.write_fence(region.buffer, trailer.REVOKED, identity.generation)
        self._sessions.revoke(session, slab)

        def clear() -> None:
            data = np.frombuffer(region.buffer, np.uint8)[: self._slab_bytes]
            for first in range(0, len(data), _PIECE_BYTES):
                data[first : first + _PIECE_BYTES] = 0

        await self.off_loop(clear)
        free = trailer.SlabIdentity(
            slab=slab, slab_bytes=self._slab_bytes, generation=identity.generation
        )
        trailer.write(region.buffer, trailer.FREE, free)
        return SlabZeroed(slab)

    async def let_go(self, slab: SlabId, session: int, forced: bool) -> SlabGone:
        region = self.regions.pop(slab)
        word = trailer.read_fence(region.buffer)
        trailer.write_fence(region.buffer, trailer.REVOKED, trailer.generation_of(word))
        await self._sessions.fence_off(session, slab, forced)

        def free() -> None:
            # Punched first: a device that still maps it must not keep the pages alive.
            punch(region.fileno(), 0, self._slab_bytes)
            region.close()

        await self.off_loop(free)
        try:
            async with self._telling:
                await self._notify.remove(f"slab.{slab}")
        except DeadlineExceeded as error:
            _log.warning("slab.not-forgotten", slab=slab, reason=str(error))
        return SlabGone(slab)

    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {"make": self.make, "lend": self.lend, "zero": self.zero, "let_go": self.let_go}
