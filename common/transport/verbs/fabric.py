"""The RDMA transport between hosts: a bootstrap over TCP, then one queue pair per channel.

A channel begins as a tcp channel does, with a HELLO that carries the same hello and is refused the
same way. Then both sides tell their queue pairs and their control rings:

    -> HELLO    the hello
    <- WELCOME  the listener's queue pair
    -> JOIN     ours, which is connected by now, and our ring
    <- WELCOME  the listener's ring

The address is that of the bootstrap. The RDMA interface is the device's; of its addresses (GIDs)
the one that the bootstrap connection came over is preferred.
"""

import asyncio
import socket
from dataclasses import dataclass

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected, DecodeRejected, Unavailable
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
from slackwater.common.transport.stream import Greeting
from slackwater.common.transport.tcp import dial, resolve, split_address, tune
from slackwater.common.transport.verbs import library as ibv
from slackwater.common.transport.verbs.channel import VerbsChannel
from slackwater.common.transport.verbs.device import Device, pick_port
from slackwater.common.transport.verbs.queue_pair import END_POINT_BYTES, unpack_end_point


@dataclass(frozen=True, slots=True)
class VerbsTuning:
    device: str = ""
    """`mlx5_0` or `mlx5_0/1`; empty: that of the interface which leads to the peer, or the first.
    """
    windows: bool | None = None
    """Memory windows, or a protection domain per channel; None: windows where the device has them.
    """
    greet_s: float = limits.CONNECT_S


class VerbsListener:
    def __init__(self, door: Greeter, accepted: Accepted, name: str, device: Device) -> None:
        self._door, self._accepted, self._name = door, accepted, name
        self._device: Device | None = device

    @property
    def address(self) -> Address:
        """With the port that was chosen where 0 was asked for."""
        return self._name

    async def close(self) -> None:
        await self._door.close()
        await self._accepted.close()
        device, self._device = self._device, None
        if device is not None:
            device.release()

    def prepare(self, region: Region) -> None:
        """Registered, and so pinned, in the domain that channels share; where each has a domain of
        its own that is not known yet."""
        if self._device is not None and self._device.shared is not None:
            self._device.shared.registration(region)


class VerbsFabric:
    """The device is open as long as there is a listener or a channel."""

    kind = "verbs"

    def __init__(self, tuning: VerbsTuning | None = None) -> None:
        self._tuning = tuning or VerbsTuning()
        self._devices: dict[ibv.Port, Device] = {}

    def hold_device(self, local_ip: str = "") -> Device:
        """To be released. Raises ConfigRejected, Unavailable."""
        port = pick_port(self._tuning.device, local_ip)
        device = self._devices.get(port)
        if device is None or device.closed:
            device = self._devices[port] = Device(port, self._tuning.windows)
        else:
            device.hold()
        return device

    def _channel(
        self,
        greeting: Greeting,
        hello: bytes,
        take: OnHandover | None,
        prepare: OnPrepare | None = None,
    ) -> VerbsChannel:
        """Raises ConfigRejected, Unavailable, Rejected."""
        device = self.hold_device(str(greeting.stream.sock.getsockname()[0]))
        try:
            return VerbsChannel(device.domain(), greeting.stream, hello, take, prepare)
        finally:
            device.release()  # The channel holds it by its domain.

    async def listen(
        self,
        address: Address,
        accept: Accept,
        on_channel: OnChannel,
        on_handover: OnHandover | None,
        on_prepare: OnPrepare | None = None,
    ) -> VerbsListener:
        """Raises ConfigRejected when address or device cannot be used."""
        host, port = split_address(address)
        device = self.hold_device()
        try:
            [(family, where), *_] = await resolve(host, port)
            sock = socket.create_server(where[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            device.release()
            raise ConfigRejected(f"cannot listen on {address}: {error}") from error
        sock.setblocking(False)
        accepted = Accepted(accept, on_channel)

        async def greet(greeting: Greeting, header: wire.Header, body: bytes) -> None:
            check_hello(header)
            await accepted.admit(body)
            channel = self._channel(greeting, body, on_handover, on_prepare)
            try:
                await _welcome(greeting, channel)
            except BaseException:
                channel.lose("the peer did not finish its introduction")
                raise
            accepted.begin(channel)

        def dress(connection: socket.socket) -> socket.socket:
            tune(connection, limits.STALL_S)
            return connection

        door = Greeter(sock, greet, greet_s=self._tuning.greet_s, passes_fds=False, dress=dress)
        name = f"[{host}]" if ":" in host else host
        return VerbsListener(door, accepted, f"{name}:{sock.getsockname()[1]}", device)

    async def connect(
        self,
        address: Address,
        hello: bytes,
        *,
        deadline_s: float,
        on_handover: OnHandover | None = None,
    ) -> Channel:
        check_hello_size(hello)
        channel: VerbsChannel | None = None
        greeting: Greeting | None = None
        try:
            async with asyncio.timeout(deadline_s):
                first = wire.pack(wire.HELLO, handle=wire.VERSION, body=hello)
                greeting = await dial(address, first, limits.STALL_S)
                body = await _welcomed(greeting, address)
                peer = unpack_end_point(body)
                channel = self._channel(greeting, hello, on_handover)
                ring = await channel.meet(peer)
                greeting.stream.push(wire.pack(wire.JOIN, body=channel.end_point().pack() + ring))
                channel.start(await _welcomed(greeting, address))
            return channel
        except BaseException as error:
            if channel is not None:
                channel.lose("connecting failed")
            if greeting is not None:
                greeting.stream.close()
            mapped = connect_error(error, address, deadline_s)
            if mapped is error:
                raise
            raise mapped from error


async def _welcome(greeting: Greeting, channel: VerbsChannel) -> None:
    """Set up the accepting side of a channel."""
    stream = greeting.stream
    stream.push(wire.pack(wire.WELCOME, body=channel.end_point().pack()))
    header, body = await greeting.next_record()
    if header.kind != wire.JOIN:
        raise DecodeRejected(f"a record of kind {header.kind} where a queue pair was expected")
    ring = await channel.meet(unpack_end_point(body[:END_POINT_BYTES]))
    stream.push(wire.pack(wire.WELCOME, body=ring))
    channel.start(body[END_POINT_BYTES:])


async def _welcomed(greeting: Greeting, address: Address) -> bytes:
    """The body of the peer's next WELCOME. Raises what it refused with, Unavailable."""
    header, body = await greeting.next_record()
    if header.kind == wire.REFUSED:
        raise wire.refusal(header, body)
    if header.kind != wire.WELCOME:
        raise Unavailable(f"{address} answered with a record of kind {header.kind}")
    return body
