"""Accepting connections: bounded, each with a deadline to say who it is, and closed as one.

A connection that does not greet in time, greets with garbage, or is one too many is closed; the
others do not notice. The channels that were accepted belong to the listener and end with it.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from slackwater.common import limits
from slackwater.common.errors import AccessRefused, DecodeRejected, Rejected, Unavailable
from slackwater.common.transport import wire
from slackwater.common.transport.base import Accept, Channel, OnChannel
from slackwater.common.transport.stream import Greeting

BACKLOG: Final = 512
_FULL_WAIT_S: Final = 0.5

OnGreeting = Callable[[Greeting, wire.Header, bytes], Awaitable[None]]


class Door:
    """A listening socket, and the greetings that are under way behind it.

    `on_greeting` gets the first record of each connection, within `greet_s` in all; it keeps the
    stream, or raises Rejected or Unavailable: then the peer is told why and the connection closed.
    `ready` is awaited first, and does not count.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_greeting: OnGreeting,
        *,
        greet_s: float,
        passes_fds: bool,
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._sock = sock
        self._ready = ready
        self._on_greeting = on_greeting
        self._greet_s = greet_s
        self._passes_fds = passes_fds
        self._loop = asyncio.get_running_loop()
        self._greetings: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors: the connection stays in the backlog, so look again a little later.
            self._loop.remove_reader(self._sock.fileno())
            self._again = self._loop.call_later(_FULL_WAIT_S, self._listen_again)
            self._loop.call_exception_handler(
                {"message": "transport: cannot accept a connection", "exception": error}
            )
            return
        if len(self._greetings) >= limits.GREETINGS_MAX:
            sock.close()
            return
        sock.setblocking(False)
        task = self._loop.create_task(self._greet(sock))
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    def _listen_again(self) -> None:
        self._again = None
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    async def _greet(self, sock: socket.socket) -> None:
        greeting = Greeting(sock, passes_fds=self._passes_fds)
        stream = greeting.stream
        try:
            if self._ready is not None:
                await self._ready()
            async with asyncio.timeout(self._greet_s):
                header, body = await greeting.first_record()
                await self._on_greeting(greeting, header, body)
        except DecodeRejected:
            stream.close()  # Not one of ours: it gets no answer.
        except (Rejected, Unavailable) as error:
            stream.push(wire.pack_refusal(error))
            stream.flush_and_close()
        except TimeoutError:
            stream.close()
        except BaseException:
            stream.close()
            raise

    async def close(self) -> None:
        """Idempotent."""
        if self._sock.fileno() < 0:
            return
        if self._again is not None:
            self._again.cancel()
        else:
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for task in self._greetings:
            task.cancel()
        if self._greetings:
            await asyncio.wait(self._greetings, timeout=limits.CLOSE_S)


class Accepted:
    """The channels of one listener and the program's tasks for them."""

    def __init__(self, accept: Accept, on_channel: OnChannel) -> None:
        self._accept = accept
        self._on_channel = on_channel
        # In order, for the simulation's sake: a set's would differ from run to run.
        self._channels: dict[Channel, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}

    def admit(self, hello: bytes) -> None:
        """Raises Unavailable when there are too many channels, AccessRefused as `accept` does."""
        self._channels = {channel: None for channel in self._channels if not channel.closed}
        if len(self._channels) >= limits.CHANNELS_MAX:
            raise Unavailable(f"{limits.CHANNELS_MAX} channels are open here: try again later")
        try:
            self._accept(hello)
        except AccessRefused:
            raise
        except Rejected as error:
            raise AccessRefused(str(error)) from error
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "transport: accept failed", "exception": error}
            )
            raise Unavailable("the listener could not look at the hello") from error

    def begin(self, channel: Channel) -> None:
        self._channels[channel] = None
        task = asyncio.get_running_loop().create_task(self._run(channel))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _run(self, channel: Channel) -> None:
        """A handler may return and keep its channel; one that fails loses it."""
        try:
            await self._on_channel(channel)
        except Unavailable:
            await channel.close()  # How a handler ends whose peer is gone.
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "transport: on_channel failed", "exception": error}
            )
            await channel.close()

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels))
        tasks = self._tasks.keys() - {asyncio.current_task()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=limits.CLOSE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=limits.CLOSE_S)
