"""One slab of a lender, open for one-sided access over the channel it was granted on."""

import asyncio
import ctypes
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from slackwater.common.domains.memory import trailer
from slackwater.common.transport.base import Channel, Laned, RemoteRegion, Scattering
from slackwater.memory.pages import kernels as k
from slackwater.schemas.memory import LenderId, SlabMapped

_MADV_POPULATE_WRITE: Final = 23
_libc = ctypes.CDLL(None)
_Work = Callable[[int, memoryview], Coroutine[Any, Any, None]]


class RemoteSlab:
    """Implements store.RemoteMember."""

    def __init__(
        self, lender: LenderId, channel: Channel, region: RemoteRegion, message: SlabMapped
    ) -> None:
        self.lender = lender
        self.slab = message.slab
        self.nbytes = message.slab_bytes
        self.fence = trailer.fence(trailer.LENT, message.generation)
        self.mapped = region.view
        self._channel = channel
        self._scattering = channel if isinstance(channel, Scattering) else None
        self._region = region

    @property
    def address(self) -> int:
        """Where the data lie in this process; 0: they are not mapped."""
        return k.address(self.mapped) if self.mapped is not None else 0

    @property
    def laned(self) -> tuple[Laned, int] | None:
        """Its channel, and what requests on that one's lanes name the slab by; if it has any."""
        if not isinstance(self._channel, Laned) or self._channel.closed or self._region.view:
            return None
        return self._channel, self._channel.lane_handle(self._region)

    @property
    def alive(self) -> bool:
        return not self._channel.closed

    async def abandon(self) -> None:
        """End its channel: what was begun on it is over, on both sides."""
        await self._channel.close()

    def populate(self) -> None:
        """Enter the slab's pages into this process's table now, the interpreter lock released: the
        first touch of each would cost a fault, under the mutex of the page table."""
        if (view := self.mapped) is not None:
            first, nbytes = ctypes.c_void_p(k.address(view)), ctypes.c_size_t(self.nbytes)
            _libc.madvise(first, nbytes, _MADV_POPULATE_WRITE)

    def intact(self) -> bool:
        return self.mapped is None or trailer.read_fence(self.mapped) == self.fence

    async def read(self, offsets: Sequence[int], length: int, target: memoryview) -> None:
        """Neighbouring pieces go as one request; scattered ones together where that is offered."""
        parts = _joined(offsets, length, target)
        if len(parts) > 1 and self._scattering is not None:
            await self._scattering.read_scattered(self._region, offsets, length, target)
        else:
            await self._each(parts, self._read)

    async def write(self, offsets: Sequence[int], length: int, source: memoryview) -> None:
        parts = _joined(offsets, length, source)
        if len(parts) > 1 and self._scattering is not None:
            await self._scattering.write_scattered(source, self._region, offsets, length)
        else:
            await self._each(parts, self._write)

    async def _read(self, offset: int, part: memoryview) -> None:
        await self._channel.read(self._region, offset, part)

    async def _write(self, offset: int, part: memoryview) -> None:
        await self._channel.write(part, self._region, offset)

    async def _each(self, parts: Sequence[tuple[int, memoryview]], work: _Work) -> None:
        if len(parts) == 1:
            await work(*parts[0])
            return
        tasks = [asyncio.ensure_future(work(offset, part)) for offset, part in parts]
        try:
            await asyncio.gather(*tasks)
        finally:  # The buffer must be left alone once this has ended.
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self.mapped = None
        self._region.close()


def _joined(
    offsets: Sequence[int], length: int, buffer: memoryview
) -> list[tuple[int, memoryview]]:
    """(offset, part of the buffer) with neighbours joined."""
    found: list[tuple[int, memoryview]] = []
    start = 0
    for i in range(1, len(offsets) + 1):
        if i == len(offsets) or offsets[i] != offsets[i - 1] + length:
            found.append((offsets[start], buffer[start * length : i * length]))
            start = i
    return found
