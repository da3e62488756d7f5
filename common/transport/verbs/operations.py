"""A write or read of the program: cut into parts, done when all of them are.

A part goes straight between the caller's memory and the peer's where the caller's memory is
registered, and through a staging block otherwise (a short write then leaves inside its request). A
caller that is cancelled gets its staged buffer back at once; where the NIC itself works on the
buffer, the caller waits until the parts under way are settled, which the NIC's timeouts bound.
"""

import asyncio
from typing import Protocol

from slackwater.common.base import limits
from slackwater.common.base.errors import SlackwaterError
from slackwater.common.transport.verbs import library as ibv
from slackwater.common.transport.verbs.control import WORKS
from slackwater.common.transport.verbs.queue_pair import QueuePair, Work
from slackwater.common.transport.verbs.staging import Block, Quota


class Target(Protocol):
    """A peer's region."""

    @property
    def address(self) -> int: ...
    @property
    def rkey(self) -> int: ...


class Operation:
    """`offset` is where it begins in `target`."""

    def __init__(self, opcode: int, target: Target, offset: int, nbytes: int) -> None:
        self.opcode, self.target, self.offset, self.nbytes = opcode, target, offset, nbytes
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: SlackwaterError | None = None
        self.abandoned = False
        self._pending = self._direct = 0
        self._issued = False
        self._quiet: asyncio.Future[None] | None = None

    def begin(self, direct: bool) -> None:
        self._pending += 1
        self._direct += direct

    def end(self, direct: bool, error: SlackwaterError | None) -> None:
        self._pending -= 1
        self._direct -= direct
        if error is not None and self.error is None:
            self.error = error
        self._settle()
        if self._quiet is not None and not self._direct and not self._quiet.done():
            self._quiet.set_result(None)

    def issued(self) -> None:
        """All parts were begun."""
        self._issued = True
        self._settle()

    def _settle(self) -> None:
        if self._issued and not self._pending and not self.done.done():
            if self.error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(self.error)

    async def abandon(self) -> None:
        """The caller takes its buffer back: nothing comes into it once this has returned."""
        self.abandoned = True
        if self.done.done() and not self.done.cancelled():
            self.done.exception()
        while self._direct:
            self._quiet = asyncio.get_running_loop().create_future()
            try:
                await self._quiet
            except asyncio.CancelledError:
                continue  # Once is enough; the caller is on its way out already.


class Part(Work):
    """The bytes that one request of an operation moves. `place`: where a staged read belongs."""

    __slots__ = ("_block", "_place", "_quota", "_settled", "nbytes", "offset", "operation")

    def __init__(
        self,
        operation: Operation,
        quota: Quota,
        offset: int,
        place: memoryview,
        block: Block | None = None,
    ) -> None:
        super().__init__(None)
        self.operation, self.offset, self.nbytes = operation, offset, len(place)
        self._quota, self._place, self._block = quota, place, block
        self._settled = False
        operation.begin(block is None)

    def settle(self, error: SlackwaterError | None) -> None:
        if self._settled:
            return
        self._settled = True
        block, operation = self._block, self.operation
        if block is not None:
            if operation.opcode == ibv.READ and error is None and not operation.abandoned:
                self._place[:] = block.view[: self.nbytes]
            block.give()
        self._quota.give(self.nbytes)
        operation.end(block is None, error)


class Mover:
    """The writes and reads over one queue pair, bounded in number and in bytes under way."""

    def __init__(self, pair: QueuePair) -> None:
        self._pair, self._domain = pair, pair.domain
        self._quota = Quota(pair.domain.device.sends - WORKS, limits.VERBS_IN_FLIGHT_BYTES)

    async def run(self, opcode: int, target: Target, offset: int, view: memoryview) -> None:
        """Raises Unavailable, AccessRefused."""
        if not view:
            return
        operation = Operation(opcode, target, offset, len(view))
        keys = self._domain.find(view)
        step = limits.VERBS_BLOCK_BYTES if keys is None else self._domain.device.part_bytes
        try:
            for start in range(0, len(view), step):
                piece = view[start : start + step]
                await self._quota.take(len(piece))
                if operation.error is not None:
                    self._quota.give(len(piece))
                    break
                if keys is None:
                    await self._stage(operation, start, piece)
                else:
                    part = Part(operation, self._quota, offset + start, piece)
                    self._submit(part, (keys[0] + start, len(piece), keys[1]))
            operation.issued()
            await operation.done
        except BaseException:
            await operation.abandon()
            raise

    async def _stage(self, operation: Operation, start: int, piece: memoryview) -> None:
        """Send one part of unregistered memory, whose quota is taken, through staging."""
        memory, staging = self._domain.staging
        nbytes, write = len(piece), operation.opcode == ibv.WRITE
        try:
            block = await staging.take(nbytes)
        except BaseException:
            self._quota.give(nbytes)
            raise
        if write:
            block.view[:nbytes] = piece
        part = Part(operation, self._quota, operation.offset + start, piece, block)
        local = memory.address + block.offset, nbytes, memory.lkey
        self._submit(part, local, inline=write and nbytes <= self._pair.inline_bytes)

    def _submit(self, part: Part, local: tuple[int, int, int], *, inline: bool = False) -> None:
        operation = part.operation
        remote = operation.target.address + part.offset, operation.target.rkey
        part.request = self._pair.rdma(operation.opcode, local, remote, inline=inline)
        self._pair.submit(part)

    async def slot(self) -> None:
        """Room for one request without bytes; `give` it back."""
        await self._quota.take(0)

    def give(self) -> None:
        self._quota.give(0)

    def lose(self, why: str) -> None:
        self._quota.lose(why)
