"""A peer's region whose body is on a device, as a channel between processes of one host reaches it.

With the same device here, the body is the peer's own allocation, opened by its handle: copies go
between the caller's memory and the device, and the peer takes no part. Without it, the mapped memfd
is the staging area, and the peer is asked to take bytes on, or to bring them, before the answer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from slackwater.common.base import limits
from slackwater.common.transport import wire
from slackwater.common.transport.copying import copy
from slackwater.common.transport.gpu import Loan

Ask = Callable[[int, bytes], Awaitable[object]]
"""(kind, body) to the owner; returns when it has done it."""


class Staged(Protocol):
    """A mapped remote region, as staging needs it."""

    @property
    def key(self) -> bytes: ...

    @property
    def mapping(self) -> memoryview: ...


class RemoteBody:
    def __init__(self, place: tuple[int, int], loan: Loan | None) -> None:
        self.place = place
        self.loan = loan

    def touches(self, offset: int, nbytes: int) -> bool:
        return offset < self.place[1] and offset + nbytes > self.place[0]

    async def write(self, remote: Staged, offset: int, source: memoryview, ask: Ask) -> None:
        """`source` to `offset` of the region, which is partly or wholly on the device."""
        end = offset + len(source)
        if self.loan is None:
            await copy(remote.mapping[offset:end], source)
            await ask(wire.ARRIVED, remote.key + wire.RANGE.pack(offset, len(source)))
            return
        first, last = max(offset, self.place[0]), min(end, self.place[1])
        for outside in (range(offset, first), range(last, end)):
            part = source[outside.start - offset : outside.stop - offset]
            await copy(remote.mapping[outside.start : outside.stop], part)
        part = source[first - offset : last - offset]
        await _off_loop(self.loan.upload, first - self.place[0], part)

    async def read(self, remote: Staged, offset: int, target: memoryview, ask: Ask) -> None:
        end = offset + len(target)
        if self.loan is None:
            await ask(wire.FETCH, remote.key + wire.RANGE.pack(offset, len(target)))
            await copy(target, remote.mapping[offset:end])
            return
        first, last = max(offset, self.place[0]), min(end, self.place[1])
        for outside in (range(offset, first), range(last, end)):
            part = target[outside.start - offset : outside.stop - offset]
            await copy(part, remote.mapping[outside.start : outside.stop])
        part = target[first - offset : last - offset]
        await _off_loop(self.loan.download, first - self.place[0], part)


async def _off_loop(work: Callable[[int, memoryview], None], offset: int, view: memoryview) -> None:
    """When this returns or raises, nobody touches the view any more."""
    if len(view) <= limits.COPY_INLINE_BYTES:
        work(offset, view)
        return
    done = asyncio.get_running_loop().run_in_executor(None, work, offset, view)
    try:
        await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait({done})
        raise
