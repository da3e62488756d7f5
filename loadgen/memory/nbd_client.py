"""A small NBD client: many requests in flight on one connection, answers in any order.

For workloads and tests; the tools that users have (fio, nbdcopy, qemu-io) are the other judges.
"""

import asyncio
import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slackwater.common.base.errors import Unavailable
from slackwater.memory.nbd import protocol as nbd


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a burst; `data` is a write's payload."""

    kind: int
    offset: int
    length: int
    data: bytes = b""
    flags: int = 0


@dataclass
class _Open:
    """A request that is not answered wholly."""

    answer: asyncio.Future[bytes]
    wanted: int
    error: int = 0
    chunks: list[tuple[int, bytes]] = field(default_factory=list)
    """(offset on the device, data)"""


class NbdClient:
    """`connect`, then requests by byte offsets. Raises OSError with the server's errno, Unavailable
    once the connection is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, _Open] = {}
        self._cookie = 0
        self._receiving: asyncio.Task[None] | None = None
        self.size = 0
        self.flags = 0

    @classmethod
    async def connect(cls, path: Path, *, structured: bool = True) -> "NbdClient":
        try:
            reader, writer = await asyncio.open_unix_connection(str(path))
        except OSError as error:
            raise Unavailable(f"nobody serves at {path}: {error}") from error
        client = cls(reader, writer)
        try:
            await client._negotiate(structured)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            writer.close()
            raise Unavailable(f"{path} hung up during the handshake") from error
        except Unavailable:
            writer.close()
            raise
        client._receiving = asyncio.ensure_future(client._receive())
        return client

    async def _negotiate(self, structured: bool) -> None:
        await self._reader.readexactly(nbd.GREETING.size)
        self._writer.write(nbd.CLIENT_FLAGS.pack(nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES))
        if structured:
            self._writer.write(nbd.OPTION.pack(nbd.OPTION_MAGIC, nbd.OPT_STRUCTURED_REPLY, 0))
            await self._option_reply()
        body = bytes(4) + bytes(2)
        self._writer.write(nbd.OPTION.pack(nbd.OPTION_MAGIC, nbd.OPT_GO, len(body)) + body)
        while True:
            kind, data = await self._option_reply()
            if kind == nbd.REP_INFO and int.from_bytes(data[:2], "big") == nbd.INFO_EXPORT:
                _, self.size, self.flags = nbd.EXPORT.unpack(data)
            elif kind == nbd.REP_ACK:
                return
            elif kind >= 2**31:
                raise Unavailable(f"the server refused: {data!r}")

    async def _option_reply(self) -> tuple[int, bytes]:
        _, _, kind, length = nbd.OPTION_REPLY.unpack(
            await self._reader.readexactly(nbd.OPTION_REPLY.size)
        )
        return kind, await self._reader.readexactly(length)

    # Requests -------------------------------------------------------------------------------------

    async def read(self, offset: int, length: int) -> bytes:
        return await self._ask(nbd.READ, offset, length)

    async def write(self, offset: int, data: bytes, *, fua: bool = False) -> None:
        await self._ask(nbd.WRITE, offset, len(data), data, flags=nbd.FUA if fua else 0)

    async def flush(self) -> None:
        await self._ask(nbd.FLUSH, 0, 0)

    async def trim(self, offset: int, length: int) -> None:
        await self._ask(nbd.TRIM, offset, length)

    async def zero(self, offset: int, length: int) -> None:
        await self._ask(nbd.WRITE_ZEROES, offset, length)

    async def _ask(
        self,
        kind: int,
        offset: int,
        length: int,
        data: bytes = b"",
        *,
        flags: int = 0,
    ) -> bytes:
        [outcome] = await self.burst([Ask(kind, offset, length, data, flags)])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def burst(self, asks: Sequence[Ask]) -> list[bytes | BaseException]:
        """Send all requests in one piece. Returns the outcome of each: a read's bytes, nothing of
        the others, or the error. Raises Unavailable when the connection is gone before."""
        if self._receiving is None or self._receiving.done():
            raise Unavailable("the connection is gone")
        parts, answers = [], []
        for ask in asks:
            self._cookie += 1
            answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            wanted = ask.length if ask.kind == nbd.READ else 0
            self._waiting[self._cookie] = _Open(answer, wanted)
            parts.append(
                nbd.REQUEST.pack(
                    nbd.REQUEST_MAGIC, ask.flags, ask.kind, self._cookie, ask.offset, ask.length
                )
            )
            parts.append(ask.data)
            answers.append(answer)
        self._writer.write(b"".join(parts))
        # Given up or not, their bytes still come: `_one` takes them out.
        return await asyncio.gather(*answers, return_exceptions=True)

    async def _receive(self) -> None:
        try:
            while True:
                await self._one()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            for one in self._waiting.values():
                if not one.answer.done():
                    one.answer.set_exception(Unavailable("the connection ended"))

    async def _one(self) -> None:
        read = self._reader.readexactly
        magic = int.from_bytes(await read(4), "big")
        if magic == nbd.SIMPLE_MAGIC:
            error, cookie = nbd.SIMPLE.unpack(magic.to_bytes(4, "big") + await read(12))[1:]
            one, over = self._waiting[cookie], True
            one.error = error
            one.chunks.append((0, await read(one.wanted) if one.wanted and not error else b""))
        else:
            cookie, over = await self._chunk(magic)
        if over:
            self._resolve(self._waiting.pop(cookie))

    async def _chunk(self, magic: int) -> tuple[int, bool]:
        """(whose it was, whether it was the last one)"""
        rest = await self._reader.readexactly(nbd.CHUNK.size - 4)
        _, flags, kind, cookie, length = nbd.CHUNK.unpack(magic.to_bytes(4, "big") + rest)
        body = await self._reader.readexactly(length)
        one = self._waiting[cookie]
        if kind == nbd.CHUNK_ERROR:
            one.error = nbd.ERROR.unpack_from(body)[0]
        elif kind == nbd.CHUNK_DATA:
            one.chunks.append((int.from_bytes(body[:8], "big"), body[8:]))
        return cookie, bool(flags & nbd.CHUNK_DONE)

    @staticmethod
    def _resolve(one: _Open) -> None:
        answer, error = one.answer, one.error
        if answer.done():
            return
        if error:
            name = errno.errorcode.get(error, str(error))
            answer.set_exception(OSError(error, f"the server said {name}: {os.strerror(error)}"))
        else:
            answer.set_result(b"".join(data for _, data in sorted(one.chunks)))

    async def close(self) -> None:
        with contextlib.suppress(ConnectionError, OSError):
            self._writer.write(nbd.REQUEST.pack(nbd.REQUEST_MAGIC, 0, nbd.DISCONNECT, 0, 0, 0))
            await self._writer.drain()
        self._writer.close()
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
