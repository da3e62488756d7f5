"""The transport between processes of one host: memfds that both sides map.

Control goes over a Unix stream socket with our own framing; a memfd follows its record by
SCM_RIGHTS. `open` maps the owner's memory, so a write or read is a copy that the owner's process
takes no part in, and `view` lets a consumer work in place. Handing a region over is handing its
descriptor over. Mapped memory cannot be taken back: after `revoke` a peer of ours refuses to use
it, but a region whose peer is not trusted any more must never be lent again.

Who may connect: processes of our user or of root (SO_PEERCRED), over a socket file with mode 0600;
where jobs have accounts of their own, these as well.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from slackwater.common.base import limits
from slackwater.common.base.errors import (
    AccessRefused,
    DecodeRejected,
    Rejected,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.transport import wire
from slackwater.common.transport.base import (
    Accept,
    Address,
    Channel,
    OnChannel,
    OnHandover,
    OnPrepare,
    RemoteRegion,
)
from slackwater.common.transport.channel import (
    KEY_BYTES,
    LABEL_BYTES_MAX,
    SocketChannel,
    as_bytes,
    check_access,
    check_range,
    foreign,
)
from slackwater.common.transport.copying import copy
from slackwater.common.transport.gpu import Device, DeviceRegion, Loan, body_of, borrow
from slackwater.common.transport.gpu_remote import RemoteBody
from slackwater.common.transport.hello import check_hello, check_hello_size, connect_error
from slackwater.common.transport.host import elsewhere, host_identity, identified, split_identity
from slackwater.common.transport.listeners import Accepted, Greeter
from slackwater.common.transport.mapping import Mapping
from slackwater.common.transport.pacing import Pace, Parts
from slackwater.common.transport.region import Region, check_foreign
from slackwater.common.transport.reservations import GiveBack
from slackwater.common.transport.socket_files import (
    bind,
    checked,
    connect,
    credentials,
    peer_process,
)
from slackwater.common.transport.stream import Greeting, Stream

_NOTE_BYTES_MAX: Final = limits.FRAME_BYTES_MAX


class ShmRemoteRegion:
    """A peer's memory, mapped here. `body`: what of it is on a device, and no view shows."""

    def __init__(
        self, channel: "ShmChannel", key: bytes, mapping: Mapping, body: RemoteBody | None
    ) -> None:
        self.channel = channel
        self.key = key
        self.body = body
        self.revoked = False
        self._map: Mapping | None = mapping
        self.nbytes = mapping.nbytes

    @property
    def view(self) -> memoryview | None:
        return self.mapping if self.body is None else None

    @property
    def loan(self) -> tuple[Loan, int] | None:
        """The body, where it is open here, and its place in the region."""
        if self.body is None or self.body.loan is None:
            return None
        return self.body.loan, self.body.place[0]

    @property
    def mapping(self) -> memoryview:
        """Raises AccessRefused once closed."""
        if self._map is None:
            raise AccessRefused("this remote region was closed here: open its key again")
        return self._map.view

    @property
    def closed(self) -> bool:
        return self._map is None

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
            if self.body is not None:
                self.body.loan = None
            self.channel.forget(self)


class ShmChannel(SocketChannel):
    def __init__(
        self,
        stream: Stream,
        hello: bytes,
        on_handover: OnHandover | None,
        device: Device | None = None,
        on_prepare: OnPrepare | None = None,
    ) -> None:
        super().__init__(hello, on_handover, on_prepare)
        self._stream = stream
        self._device = device
        self._lent: dict[bytes, list[Callable[[], None]]] = {}
        self._offers: dict[bytes, Mapping] = {}
        """Memory that the peer sent before we asked for it, by key."""
        self._staging = 0

    # One-sided access ----------------------------------------------------------------------------

    def offer(self, region: Region) -> bytes:
        """Raises as `grant`, and Unavailable when no descriptor is left for the peer's copy."""
        key = self.grant(region)
        if not isinstance(region, DeviceRegion):
            record = wire.pack(wire.OPENED, number=region.nbytes, body=key)
            try:
                self._push(record, fd=region.fileno())
            except Unavailable:
                self._grants.pop(key)
                raise
        return key

    async def open(self, key: bytes) -> RemoteRegion:
        self._check_alive()
        offered = self._offers.pop(key, None)
        if offered is not None:
            region = ShmRemoteRegion(self, key, offered, None)
            self._opened.add(region)
            return region
        answer = await self._ask(wire.OPEN, body=key)
        if answer.mapping is None:
            raise Unavailable("the peer opened the region and sent no memory")
        body = self._body(key, answer.body, answer.header.number) if answer.body else None
        region = ShmRemoteRegion(self, key, answer.mapping, body)
        self._opened.add(region)
        return region

    def _body(self, key: bytes, invitation: bytes, nbytes: int) -> RemoteBody:
        """The region's body is on a device: open it here, or have the owner stage it."""
        place = body_of(invitation)
        check_range(place[0], place[1] - place[0], nbytes)
        try:
            loan = borrow(self._device, invitation, lambda: self._returned(key))
        except AccessRefused:  # No IPC between these processes (containers, say).
            loan = None
        if loan is None:
            self._push(wire.pack(wire.RETURNED, body=key))
        return RemoteBody(place, loan)

    def _returned(self, key: bytes) -> None:
        """Close memory that the peer lent; called in any thread."""
        with contextlib.suppress(RuntimeError):  # The loop has ended, and the channel with it.
            self._loop.call_soon_threadsafe(self._reply, wire.pack(wire.RETURNED, body=key))

    async def write(self, local: memoryview, remote: RemoteRegion, offset: int) -> None:
        source = as_bytes(local)
        mapped = self._checked_region(remote, offset, len(source))
        if mapped.body is not None and mapped.body.touches(offset, len(source)):
            await mapped.body.write(mapped, offset, source, self._ask_owner)
        else:
            await copy(mapped.mapping[offset : offset + len(source)], source)
        self._check_alive()

    async def read(self, remote: RemoteRegion, offset: int, local: memoryview) -> None:
        target = as_bytes(local)
        mapped = self._checked_region(remote, offset, len(target))
        if mapped.body is not None and mapped.body.touches(offset, len(target)):
            await mapped.body.read(mapped, offset, target, self._ask_owner)
        else:
            await copy(target, mapped.mapping[offset : offset + len(target)])
        self._check_alive()

    async def _ask_owner(self, kind: int, body: bytes) -> None:
        await self._ask(kind, body=body)

    def _checked_region(self, remote: RemoteRegion, offset: int, nbytes: int) -> ShmRemoteRegion:
        self._check_alive()
        if not isinstance(remote, ShmRemoteRegion) or remote.channel is not self:
            raise foreign()
        check_access(remote, offset, nbytes)
        return remote

    async def handover(
        self, region: Region, note: bytes, pace: Pace | None = None, parts: Parts | None = None
    ) -> None:
        if region.closed:
            raise Rejected(f"region {region.label} is closed: only an open one can be handed over")
        label = region.label.encode()[:LABEL_BYTES_MAX]
        if len(note) > _NOTE_BYTES_MAX:
            raise Rejected(f"a note of {len(note)} bytes, at most {_NOTE_BYTES_MAX} fit")
        whole = region if region.in_place else await asyncio.to_thread(region.whole)
        try:
            await self._ask(
                wire.HANDOVER,
                handle=len(label),
                body=label + note,
                fd=whole.fileno(),
                deadline_s=limits.HANDOVER_S,
            )
        finally:
            if whole is not region:
                whole.close()

    # Records -------------------------------------------------------------------------------------

    def begin(self, header: wire.Header) -> None:
        wire.check_length(header, limits.FRAME_BYTES_MAX + 1024)

    def end(self, header: wire.Header, body: bytes) -> None:
        if header.kind in (wire.ARRIVED, wire.FETCH):
            self._serve_staging(header, body)
        elif header.kind == wire.REVOKED:
            self._offers.pop(body, None)
            self._control_record(header, body)
        elif header.kind == wire.RETURNED:
            for ended in self._lent.pop(body, ()):
                ended()
        else:
            self._control_record(header, body)

    def _end_opened(self, header: wire.Header, body: bytes) -> None:
        fd = self._stream.claim_fd()
        try:
            nbytes = check_foreign(fd)
            if nbytes != header.number:
                raise DecodeRejected(f"{nbytes} bytes of memory came, {header.number} were said")
            if header.offset:
                self._answer(header, body, Mapping(fd, nbytes))
            else:
                self._offered(body, Mapping(fd, nbytes))
        except AccessRefused as error:
            raise DecodeRejected(str(error)) from error
        except OSError as error:
            self._fail(header, Unavailable(f"the region cannot be mapped here: {error}"))
        finally:
            os.close(fd)  # The mapping holds its own.

    def _offered(self, key: bytes, mapping: Mapping) -> None:
        """Kept for `open`. One that nobody opens is let go for a later one: its key can be opened
        all the same, by asking."""
        if len(key) != KEY_BYTES:
            raise DecodeRejected(f"memory was offered under a key of {len(key)} bytes")
        self._offers[key] = mapping
        if len(self._offers) > limits.OFFERS_MAX:
            del self._offers[next(iter(self._offers))]

    def _serve_open(self, header: wire.Header, key: bytes, region: Region) -> None:
        invitation = b""
        if isinstance(region, DeviceRegion):
            invitation = region.invitation()
            self._lent.setdefault(key, []).append(region.lend(peer_process(self._stream.sock)))
        record = wire.pack(wire.OPENED, number=region.nbytes, offset=header.offset, body=invitation)
        try:
            self._push(record, fd=region.fileno())
        except Unavailable as error:
            self._push(wire.pack_refusal(error, offset=header.offset))

    def _serve_staging(self, header: wire.Header, body: bytes) -> None:
        """The peer has put bytes of a body into the memfd, or is going to take them from there."""
        if len(body) != KEY_BYTES + wire.RANGE.size:
            raise DecodeRejected(f"a staging request with {len(body)} bytes")
        region = self._grants.get(body[:KEY_BYTES])
        offset, nbytes = wire.RANGE.unpack_from(body, KEY_BYTES)
        try:
            if region is None or region.closed:
                raise AccessRefused("no region is granted on this channel under this key")
            check_range(offset, nbytes, region.nbytes)
            if self._staging >= limits.CHANNEL_REQUESTS_MAX:
                raise Unavailable(f"{self._staging} copies are under way", retry_after_s=0.1)
        except (AccessRefused, Unavailable) as error:
            self._push(wire.pack_refusal(error, offset=header.offset))
            return
        self._staging += 1
        self._spawn(self._stage(region, header, offset, nbytes))

    async def _stage(self, region: Region, header: wire.Header, offset: int, nbytes: int) -> None:
        work = region.arrived if header.kind == wire.ARRIVED else region.fetch
        try:
            if nbytes <= limits.COPY_INLINE_BYTES:
                work(offset, nbytes)
            else:
                await asyncio.to_thread(work, offset, nbytes)
            self._reply(wire.pack(wire.ACCEPTED, offset=header.offset))
        except Exception as error:  # A device's library raises many kinds: the peer is told.
            self._reply(wire.pack_refusal(Unavailable("staging failed"), offset=header.offset))
            if not region.closed:
                self._report("staging failed", error)
        finally:
            self._staging -= 1

    def _adopt(self, header: wire.Header, label: str) -> tuple[Region, GiveBack]:
        fd = self._stream.claim_fd()
        give_back: GiveBack | None = None
        try:
            give_back = self._ask_room(check_foreign(fd))
            return Region.adopt(fd, label), give_back
        except (SlackwaterError, OSError) as error:
            os.close(fd)
            if give_back is not None:
                give_back()
            if isinstance(error, Unavailable):
                raise
            raise Rejected(f"region {label} cannot be taken: {error}") from error

    def _connections(self) -> Iterable[tuple[Stream, bool]]:
        return ((self._stream, False),)

    def _push(self, record: bytes, *, fd: int = -1, ordered: bool = True) -> None:
        if fd < 0:
            self._stream.push(record)
        else:
            self._stream.push_with_fd(record, fd)

    # The end -------------------------------------------------------------------------------------

    def lost(self, stream: Stream, error: Exception | None) -> None:
        self.lose("the peer closed the channel or died" if error is None else f"lost: {error}")

    def _teardown(self) -> None:
        self._stream.close()
        self._offers.clear()

    async def close(self) -> None:
        """Close the channel. Frames that were sent before arrive, if the peer takes them within
        CLOSE_S."""
        if not self.closed:
            for region in tuple(self._opened):
                if region.body is not None:  # The peer waits for what it lent.
                    region.close()
            await asyncio.sleep(0)
            with contextlib.suppress(TimeoutError):  # The peer does not read: so it loses the rest.
                async with asyncio.timeout(limits.CLOSE_S):
                    await self._stream.drain()
            self.lose("the channel was closed here")
        await self._tasks.begun_ended(limits.CLOSE_S)
        for region in tuple(self._opened):
            region.close()


class ShmListener:
    def __init__(self, path: str, host: str, door: Greeter, accepted: Accepted, inode: int) -> None:
        self._path, self._address = path, identified(path, host)
        self._door, self._accepted, self._inode = door, accepted, inode

    @property
    def address(self) -> Address:
        """The path, and where it means something: `<host>@<folder>!/run/.../a.sock`."""
        return self._address

    async def close(self) -> None:
        await self._door.close()
        await self._accepted.close()
        try:
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)  # Ours still, not a successor's.
        except FileNotFoundError:
            return

    def prepare(self, region: Region) -> None:
        """A region is reached as it is."""


class ShmFabric:
    """`allowed_uids` may connect too, and may be connected to, beside our own and root's. `device`:
    open what peers have on it."""

    kind = "shm"

    def __init__(
        self,
        *,
        host: str = "",
        allowed_uids: frozenset[int] = frozenset(),
        device: Device | None = None,
    ) -> None:
        self._host = host or host_identity()
        self._device = device
        self._mode = 0o666 if allowed_uids else 0o600
        self._uids = allowed_uids | {os.geteuid(), 0}

    async def listen(
        self,
        address: Address,
        accept: Accept,
        on_channel: OnChannel,
        on_handover: OnHandover | None,
        on_prepare: OnPrepare | None = None,
    ) -> ShmListener:
        """Replaces the socket file of a dead process. Raises ConfigRejected where a living one
        listens, or the path cannot be used."""
        _, path = split_identity(address)
        accepted = Accepted(accept, on_channel)

        async def greet(greeting: Greeting, header: wire.Header, body: bytes) -> None:
            stream = greeting.stream
            self._check_peer(stream.sock)
            check_hello(header)
            await accepted.admit(body)
            channel = ShmChannel(stream, body, on_handover, self._device, on_prepare)
            stream.push(wire.pack(wire.WELCOME))
            stream.start(channel)
            accepted.begin(channel)

        sock = bind(path, self._mode)
        door = Greeter(
            sock, greet, greet_s=limits.CONNECT_S, passes_fds=True,
            peer_of=lambda sock, _: credentials(sock),
        )  # fmt: skip
        return ShmListener(path, self._host, door, accepted, os.stat(path).st_ino)

    async def connect(
        self,
        address: Address,
        hello: bytes,
        *,
        deadline_s: float,
        on_handover: OnHandover | None = None,
    ) -> Channel:
        _, path = split_identity(address)
        if why := elsewhere(address, self._host):
            raise Unavailable(f"{why}: connect to one of its other addresses")
        check_hello_size(hello)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        stream: Stream | None = None
        try:
            async with asyncio.timeout(deadline_s):
                await connect(sock, checked(path))
                self._check_peer(sock, _owner(path))
                greeting = Greeting(sock, passes_fds=True)
                stream = greeting.stream
                stream.push(wire.pack(wire.HELLO, handle=wire.VERSION, body=hello))
                header, body = await greeting.first_record()
            if header.kind == wire.REFUSED:
                raise wire.refusal(header, body)
            if header.kind != wire.WELCOME:
                raise Unavailable(f"{path} answered a hello with a record of kind {header.kind}")
            channel = ShmChannel(stream, hello, on_handover, self._device)
            stream.start(channel)
            return channel
        except BaseException as error:
            sock.close() if stream is None else stream.close()
            mapped = connect_error(error, path, deadline_s)
            if mapped is error:
                raise
            raise mapped from error

    def _check_peer(self, sock: socket.socket, owner: int = -1) -> None:
        """Check that the other end is one of our users, or `owner`. Raises AccessRefused."""
        pid, uid = credentials(sock)
        if uid not in self._uids and uid != owner:
            raise AccessRefused(
                f"process {pid} belongs to user {uid}, allowed are {sorted(self._uids)}"
            )


def _owner(path: str) -> int:
    """Return the account that alone, beside root, can make a socket at this path; -1: several
    can. The path comes from the job's controller."""
    folder = os.stat(Path(path).parent)
    return -1 if folder.st_mode & 0o022 else folder.st_uid
