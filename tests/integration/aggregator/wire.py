"""A wire that a test can count, cut and refuse."""

import asyncio
import contextlib
import socket
import struct


class Wire:
    """Before an aggregator's tcp address: forwards, resets, refuses."""

    def __init__(self) -> None:
        self.refuses = False
        self.carried = 0
        self.links: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, port: int) -> str:
        async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._tasks.add(asyncio.current_task())  # type: ignore[arg-type]
            try:
                await self._carry(port, reader, writer)
            except OSError:
                reset(writer)  # The aggregator is not there.

        self._server = await asyncio.start_server(link, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _carry(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.refuses:
            reset(writer)
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        ends = (writer, far_writer)
        self.links.append(ends)
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer)),
            asyncio.create_task(self._pump(far_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in ends:
                end.close()
            if ends in self.links:
                self.links.remove(ends)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(262_144):
                self.carried += len(data)
                writer.write(data)
                await writer.drain()

    def reset(self, index: int) -> None:
        for end in self.links.pop(index):
            reset(end)

    def cut(self) -> None:
        """All of it, until `refuses` is taken back."""
        self.refuses = True
        while self.links:
            self.reset(0)

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
