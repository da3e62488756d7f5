"""The transports between hosts, tcp and tls: one control stream and several data streams per
channel.

A channel begins with a HELLO on its control stream; the answer carries a session, a secret by which
data streams join and broken streams come back. Bulk bytes go from the caller's buffer into the
peer's registered region with no copy of ours between (sendmsg, recv_into). Over tls each of the
streams is an encrypted connection (tls.py).
"""

import asyncio
import contextlib
import importlib
import secrets
import socket
import ssl
import threading
from concurrent.futures import Future
from functools import cache
from typing import Any, Final

from slackwater.common.base import limits
from slackwater.common.base.errors import AccessRefused, ConfigRejected, Unavailable
from slackwater.common.transport import wire
from slackwater.common.transport.base import (
    Accept,
    Address,
    Channel,
    OnChannel,
    OnHandover,
    OnPrepare,
)
from slackwater.common.transport.hello import check_hello, check_hello_size, connect_error
from slackwater.common.transport.listeners import BACKLOG, Accepted, Greeter
from slackwater.common.transport.region import Region
from slackwater.common.transport.stream import Greeting, Stream
from slackwater.common.transport.tcp_channel import CONTROL, TcpChannel, TcpTuning
from slackwater.common.transport.tls import TlsEnds, accepting, connecting

SESSION_BYTES: Final = 32
_COMPILED: Final = (
    "slackwater.common.transport.lanes",
    "slackwater.common.transport.transfers",
)


def split_address(address: Address) -> tuple[str, int]:
    """(host, port) of `host:port` or `[v6]:port`. Raises ConfigRejected."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigRejected(f"{address!r} is not a host:port, such as 10.0.0.7:4700 or [::1]:4700")
    return host.removeprefix("[").removesuffix("]"), int(port)


def tune(sock: socket.socket, stall_s: float) -> None:
    """Small records leave at once; a peer whose host vanished is noticed by the kernel."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(stall_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(stall_s / 6)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))


async def _loaded() -> None:
    """The compiled code is there. One thread loads it: that takes a second, or many where it must
    be compiled. Whoever comes meanwhile waits for that thread, and the event loop for nothing."""
    loading = _loading()
    if not loading.done():
        await asyncio.shield(asyncio.wrap_future(loading))
    loading.result()


@cache
def _loading() -> "Future[None]":
    loaded: Future[None] = Future()
    loaded.set_running_or_notify_cancel()

    def load() -> None:
        try:
            for name in _COMPILED:
                importlib.import_module(name)
        except BaseException as error:
            _loading.cache_clear()  # The next one tries again.
            loaded.set_exception(error)
            return
        loaded.set_result(None)

    threading.Thread(target=load, name="load-compiled", daemon=True).start()
    return loaded


async def dial(
    address: Address, first: bytes, stall_s: float, tls: ssl.SSLContext | None = None
) -> Greeting:
    """A new connection on which `first` was sent, encrypted with `tls`. Raises OSError."""
    host, port = split_address(address)
    found = await resolve(host, port)
    for number, (family, where) in enumerate(found, 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            tune(sock, stall_s)
            await asyncio.get_running_loop().sock_connect(sock, where)
            greeting = Greeting(sock if tls is None else await connecting(tls, sock, host))
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError) and number < len(found):
                continue  # A name may have an address of each family, and one of them leads there.
            raise
        greeting.stream.push(first)
        return greeting
    raise OSError(f"{address} has no address")


async def resolve(host: str, port: int) -> list[tuple[int, Any]]:
    """(family, socket address) pairs; a thread is asked only where `host` is a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return [(family, (host, port))]
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, where) for family, _, _, _, where in found]


async def _introduce(
    address: Address, first: bytes, stall_s: float, tls: ssl.SSLContext | None
) -> tuple[Stream, wire.Header, bytes]:
    """Dial, and wait for the WELCOME. Raises OSError, Unavailable, or what the peer refused with;
    the caller sets a deadline."""
    greeting = await dial(address, first, stall_s, tls)
    try:
        header, body = await greeting.first_record()
        if header.kind == wire.REFUSED:
            raise wire.refusal(header, body)
        if header.kind != wire.WELCOME:
            raise Unavailable(f"{address} answered with a record of kind {header.kind}")
        return greeting.stream, header, body
    except BaseException:
        greeting.stream.close()
        raise


class TcpListener:
    def __init__(self, door: Greeter, accepted: Accepted, sessions: "_Sessions", name: str) -> None:
        self._door, self._accepted, self._sessions, self._name = door, accepted, sessions, name

    @property
    def address(self) -> Address:
        """With the port that was chosen where 0 was asked for."""
        return self._name

    async def close(self) -> None:
        await self._door.close()
        await self._sessions.close()
        await self._accepted.close()

    def prepare(self, region: Region) -> None:
        """A region is reached as it is."""


class _Sessions:
    """The accepting side: who may join which channel."""

    def __init__(
        self,
        accepted: Accepted,
        on_handover: OnHandover | None,
        on_prepare: OnPrepare | None,
        tuning: TcpTuning,
    ) -> None:
        self._accepted = accepted
        self._on_handover, self._on_prepare = on_handover, on_prepare
        self._tuning = tuning
        self._channels: dict[bytes, TcpChannel] = {}

    async def greet(self, greeting: Greeting, header: wire.Header, body: bytes) -> None:
        stream = greeting.stream
        match header.kind:
            case wire.JOIN:
                channel = self._find(body)
                if header.handle > channel.streams:
                    channel.attach_lane(stream, header.handle)
                    return
                stream.push(wire.pack(wire.WELCOME))
                channel.attach_data(stream, header.handle)
            case wire.RESUME:
                channel = self._find(body)
                stream.push(wire.pack(wire.WELCOME, number=channel.received_ordinal))
                channel.attach_control(stream, header.number)
            case _:
                check_hello(header)
                await self._begin(stream, header, body)

    async def _begin(self, stream: Stream, header: wire.Header, hello: bytes) -> None:
        await self._accepted.admit(hello)
        await _loaded()  # Not for strangers: it is a hundred megabytes.
        if len(self._channels) >= limits.CHANNELS_MAX:
            raise Unavailable(f"{limits.CHANNELS_MAX} channels are open here: try again later")
        streams = max(1, min(header.offset, limits.STREAMS_MAX))
        session = secrets.token_bytes(SESSION_BYTES)
        channel = TcpChannel(
            hello, session, self._on_handover, self._tuning, streams, None, self._changed,
            self._on_prepare,
        )  # fmt: skip
        self._channels[session] = channel
        stream.push(wire.pack(wire.WELCOME, offset=streams, body=session))
        channel.attach_control(stream, 0)

    def _find(self, session: bytes) -> TcpChannel:
        channel = self._channels.get(session)
        if channel is None:
            raise AccessRefused("no such session: it ended, or this process was started anew")
        return channel

    def _changed(self, channel: TcpChannel) -> None:
        if channel.closed:
            self._channels.pop(channel.session, None)
        else:
            self._accepted.begin(channel)

    async def close(self) -> None:
        """Channels that never became complete; the others are the program's."""
        await asyncio.gather(*(channel.close() for channel in tuple(self._channels.values())))


class TcpFabric:
    """Connections in clear text; with `tls`, encrypted ones, another kind."""

    def __init__(self, tuning: TcpTuning | None = None, tls: TlsEnds | None = None) -> None:
        self.kind = "tcp" if tls is None else "tls"
        self._tuning = tuning or TcpTuning()
        self._tls = tls

    async def listen(
        self,
        address: Address,
        accept: Accept,
        on_channel: OnChannel,
        on_handover: OnHandover | None,
        on_prepare: OnPrepare | None = None,
    ) -> TcpListener:
        """Raises ConfigRejected when the address cannot be used."""
        host, port = split_address(address)
        accepts = self._tls.accepts if self._tls is not None else None
        if self._tls is not None and accepts is None:
            raise ConfigRejected(f"{address}: tls needs this host's certificate and key in [tls]")
        try:
            [(family, where), *_] = await resolve(host, port)
            sock = socket.create_server(where[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigRejected(f"cannot listen on {address}: {error}") from error
        sock.setblocking(False)
        accepted = Accepted(accept, on_channel)
        sessions = _Sessions(accepted, on_handover, on_prepare, self._tuning)
        stall_s = self._tuning.stall_s

        def dress(connection: socket.socket) -> socket.socket:
            tune(connection, stall_s)
            return connection if accepts is None else accepting(accepts, connection)

        door = Greeter(
            sock, sessions.greet, greet_s=self._tuning.greet_s, passes_fds=False, dress=dress
        )
        name = f"[{host}]" if ":" in host else host
        return TcpListener(door, accepted, sessions, f"{name}:{sock.getsockname()[1]}")

    async def connect(
        self,
        address: Address,
        hello: bytes,
        *,
        deadline_s: float,
        on_handover: OnHandover | None = None,
    ) -> Channel:
        check_hello_size(hello)
        await _loaded()
        channel: TcpChannel | None = None
        try:
            async with asyncio.timeout(deadline_s):
                channel = await self._begin(address, hello, on_handover)
                for index in range(channel.streams + 1):
                    await self._join(address, channel, index)
            return channel
        except BaseException as error:
            if channel is not None:
                channel.lose("connecting failed")
            mapped = connect_error(error, address, deadline_s)
            if mapped is error:
                raise
            raise mapped from error

    async def _begin(
        self, address: Address, hello: bytes, on_handover: OnHandover | None
    ) -> TcpChannel:
        tuning, tls = self._tuning, self._connects()
        first = wire.pack(wire.HELLO, handle=wire.VERSION, offset=tuning.streams, body=hello)
        stream, header, session = await _introduce(address, first, tuning.stall_s, tls)
        if not 1 <= header.offset <= limits.STREAMS_MAX:
            stream.close()
            raise Unavailable(f"{address} offers {header.offset} streams")

        async def redial(index: int, received: int) -> tuple[Stream, wire.Header]:
            if index == CONTROL:
                first = wire.pack(wire.RESUME, number=received, body=session)
            else:
                first = wire.pack(wire.JOIN, handle=index, body=session)
            stream, header, _ = await _introduce(address, first, tuning.stall_s, tls)
            return stream, header

        channel = TcpChannel(hello, session, on_handover, tuning, header.offset, redial)
        channel.attach_control(stream, 0)
        return channel

    async def _join(self, address: Address, channel: TcpChannel, index: int) -> None:
        first = wire.pack(wire.JOIN, handle=index, body=channel.session)
        stream, _, _ = await _introduce(address, first, self._tuning.stall_s, self._connects())
        channel.attach_data(stream, index)

    def _connects(self) -> ssl.SSLContext | None:
        """Raises ConfigRejected."""
        if self._tls is None:
            return None
        if self._tls.connects is None:
            raise ConfigRejected("tls: this side has no authority to trust; give `ca` in [tls]")
        return self._tls.connects
