"""Accepting connections: bounded, each with a deadline to say who it is, and closed as one.

A connection that does not greet in time or greets with garbage is closed; the others do not notice.
Where there are too many, the peer that has the most of them loses its oldest: whoever greets at
once is heard, however many others connect and say nothing. The channels that were accepted belong
to the listener and end with it.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any, Final

from slackwater.common.base import limits
from slackwater.common.base.background import Tasks
from slackwater.common.base.errors import AccessRefused, DecodeRejected, Rejected, Unavailable
from slackwater.common.transport import wire
from slackwater.common.transport.base import Accept, Channel, OnChannel
from slackwater.common.transport.stream import Greeting

BACKLOG: Final = 512
_FULL_WAIT_S: Final = 0.5

OnGreeting = Callable[[Greeting, wire.Header, bytes], Awaitable[None]]
PeerOf = Callable[[socket.socket, Any], Hashable]
"""The peer that a connection belongs to: by the socket, and the address that came with it."""
Dress = Callable[[socket.socket], socket.socket]
"""Sets options of a connection. Returns the socket on which the peer is heard. Raises OSError."""


def by_host(_sock: socket.socket, address: Any) -> Hashable:
    """Return the host's address, without the port."""
    host: Hashable = address[0]
    return host


class Greeter:
    """A listening socket, and the greetings that are under way behind it.

    `on_greeting` gets the first record of each connection, within `greet_s` in all; it keeps the
    stream, or raises Rejected or Unavailable: then the peer is told why and the connection closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_greeting: OnGreeting,
        *,
        greet_s: float,
        passes_fds: bool,
        peer_of: PeerOf = by_host,
        dress: Dress = lambda sock: sock,
    ) -> None:
        self._sock = sock
        self._peer_of = peer_of
        self._dress = dress
        self._on_greeting = on_greeting
        self._greet_s = greet_s
        self._passes_fds = passes_fds
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks(lambda _, error: _report("a greeting failed", error))
        self._greetings: dict[asyncio.Task[None], Greeting] = {}
        self._by_peer: dict[Hashable, dict[asyncio.Task[None], None]] = {}
        """The same, of each peer the oldest first."""
        self._again: asyncio.TimerHandle | None = None
        self._full = False
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors: the connection stays in the backlog, so look again a little later.
            self._loop.remove_reader(self._sock.fileno())
            self._again = self._loop.call_later(_FULL_WAIT_S, self._listen_again)
            if not self._full:  # Said once, however often it is tried.
                _report("cannot accept a connection", error)
            self._full = True
            return
        self._full = False
        try:
            peer = self._peer_of(sock, address)
        except OSError:  # It left already.
            sock.close()
            return
        if len(self._greetings) >= limits.GREETINGS_MAX:
            self._drop_oldest()
        sock.setblocking(False)
        try:
            dressed = self._dress(sock)
        except OSError:  # It left already, or no descriptor is left, which the next accept says.
            sock.close()
            return
        greeting = Greeting(dressed, passes_fds=self._passes_fds)
        task = self._tasks.spawn(self._greet(greeting))
        self._greetings[task] = greeting
        self._by_peer.setdefault(peer, {})[task] = None
        task.add_done_callback(partial(self._forget, peer))

    def _drop_oldest(self) -> None:
        """Drop the oldest connection of the peer that has the most."""
        peer = max(self._by_peer, key=lambda peer: len(self._by_peer[peer]))
        task = next(iter(self._by_peer[peer]))
        greeting = self._greetings[task]
        self._forget(peer, task)
        self._cancel(task, greeting)

    def _cancel(self, task: "asyncio.Task[None]", greeting: Greeting) -> None:
        if not task.done():  # Else the stream is its channel's.
            greeting.stream.close()  # A task that has not begun would not.
            task.cancel()

    def _forget(self, peer: Hashable, task: "asyncio.Task[None]") -> None:
        if self._greetings.pop(task, None) is None:
            return
        of_peer = self._by_peer[peer]
        del of_peer[task]
        if not of_peer:
            del self._by_peer[peer]

    def _listen_again(self) -> None:
        self._again = None
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    async def _greet(self, greeting: Greeting) -> None:
        stream = greeting.stream
        try:
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
        for task, greeting in tuple(self._greetings.items()):
            self._cancel(task, greeting)
        await self._tasks.begun_ended(limits.CLOSE_S)


class Accepted:
    """The channels of one listener and the program's tasks for them."""

    def __init__(self, accept: Accept, on_channel: OnChannel) -> None:
        self._accept = accept
        self._on_channel = on_channel
        # In order, for the simulation's sake: a set's would differ from run to run.
        self._channels: dict[Channel, None] = {}
        self._tasks = Tasks(lambda _, error: _report("a channel did not close", error))

    async def admit(self, hello: bytes) -> None:
        """Raises Unavailable when there are too many channels, and as `accept` does."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limits.ADMIT_WAIT_S
        while True:
            try:
                self._look_at(hello)
                return
            except Unavailable as error:
                if loop.time() + error.retry_after_s > until_s:
                    raise
                await asyncio.sleep(error.retry_after_s)

    def _look_at(self, hello: bytes) -> None:
        self._channels = {channel: None for channel in self._channels if not channel.closed}
        if len(self._channels) >= limits.CHANNELS_MAX:
            raise Unavailable(f"{limits.CHANNELS_MAX} channels are open here: try again later")
        try:
            self._accept(hello)
        except (AccessRefused, Unavailable):
            raise
        except Rejected as error:
            raise AccessRefused(str(error)) from error
        except Exception as error:  # A caller's callback: it costs this peer, not the listener.
            _report("accept failed", error)
            raise Unavailable("the listener could not look at the hello") from error

    def begin(self, channel: Channel) -> None:
        self._channels[channel] = None
        self._tasks.spawn(self._run(channel))

    async def _run(self, channel: Channel) -> None:
        """A handler may return and keep its channel; one that fails loses it."""
        try:
            await self._on_channel(channel)
        except Unavailable:
            await channel.close()  # How a handler ends whose peer is gone.
        except Exception as error:  # A caller's callback, as above.
            _report("on_channel failed", error)
            await channel.close()

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels))
        await self._tasks.begun_ended(limits.CLOSE_S)
        await self._tasks.close(limits.CLOSE_S)


def _report(what: str, error: BaseException) -> None:
    asyncio.get_running_loop().call_exception_handler(
        {"message": f"transport: {what}", "exception": error}
    )
