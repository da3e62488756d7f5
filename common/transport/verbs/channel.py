"""A channel over one queue pair, which control and data share, and the bootstrap connection.

Control records are a byte stream by RDMA WRITE with immediate (control.py), so a frame follows
every write before it. Writes and reads of regions are RDMA WRITEs and READs (operations.py). The
bootstrap's TCP connection stays open and silent: its end is the end of the peer's process, noticed
at once where the NIC would retry for seconds.

What a peer opened it reaches through an exposure of its own (device.py). `revoke` closes that at
once: an access under way is then refused by the NIC, which ends the channel, because no queue pair
survives it; the peer connects anew. So does an access out of bounds or with a wrong key that passed
the checks on the peer's own side.
"""

import asyncio
import contextlib
import struct
from collections.abc import Iterable
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
from slackwater.common.transport.base import OnHandover, OnPrepare, RemoteRegion
from slackwater.common.transport.channel import (
    LABEL_BYTES_MAX,
    OpenedRegion,
    SocketChannel,
    Watched,
    as_bytes,
    check_access,
    foreign,
)
from slackwater.common.transport.pacing import Pace, Parts, paced
from slackwater.common.transport.region import Region
from slackwater.common.transport.reservations import GiveBack
from slackwater.common.transport.stream import Stream
from slackwater.common.transport.verbs import library as ibv
from slackwater.common.transport.verbs.control import ControlStream
from slackwater.common.transport.verbs.device import Domain, Exposure
from slackwater.common.transport.verbs.operations import Mover, Part
from slackwater.common.transport.verbs.queue_pair import EndPoint, QueuePair, Work

_PLACE: Final = struct.Struct("<Q")
"""The address of an opened region; its label follows."""
_BOTH: Final = ibv.REMOTE_READ | ibv.REMOTE_WRITE
_REFUSALS: Final = (ibv.REMOTE_ACCESS, ibv.REMOTE_INVALID_REQUEST, ibv.REMOTE_OPERATION)


class VerbsRemoteRegion(OpenedRegion):
    """A peer's region: its address there, and our key to it."""

    def __init__(self, channel: "VerbsChannel", key: bytes, header: wire.Header, place: bytes):
        """Raises Unavailable."""
        if len(place) < _PLACE.size:
            raise Unavailable(f"the peer described an opened region in {len(place)} bytes")
        super().__init__(channel, key, header.number)
        self.rkey = header.handle
        self.address: int = _PLACE.unpack_from(place)[0]
        self.label = place[_PLACE.size :].decode("utf-8", "replace")


class _Lifeline:
    """Owner of the bootstrap connection once the channel stands. A peer that gives the channel up
    says why, a dead one does not: nothing else may come."""

    def __init__(self, channel: "VerbsChannel") -> None:
        self._channel = channel

    def begin(self, header: wire.Header) -> None:
        wire.check_length(header, wire.REASON_BYTES_MAX if header.kind == wire.REFUSED else 0)

    def end(self, header: wire.Header, body: bytes) -> None:
        if header.kind != wire.REFUSED:
            raise DecodeRejected(f"a record of kind {header.kind} on a bootstrap connection")
        self._channel.peer_gave_up(str(wire.refusal(header, body)))

    def lost(self, stream: Stream, error: Exception | None) -> None:
        self._channel.peer_ended(error)


class VerbsChannel(SocketChannel):
    """Made over a bootstrap connection; `meet` the peer's queue pair, then `start`."""

    def __init__(
        self,
        domain: Domain,
        stream: Stream,
        hello: bytes,
        on_handover: OnHandover | None,
        on_prepare: OnPrepare | None = None,
    ) -> None:
        """Raises Unavailable, Rejected where the device has no resources left."""
        local_ip = str(stream.sock.getsockname()[0])
        try:
            self.pair = QueuePair(domain, local_ip, self._arrived, self._pair_failed)
            try:
                self._control = ControlStream(self.pair, self, self.lose)
            except BaseException:
                self.pair.close(Unavailable("the channel was never there"))
                raise
        except BaseException:
            domain.release()
            raise
        super().__init__(hello, on_handover, on_prepare)
        self._domain, self._stream = domain, stream
        self._exposed: dict[bytes, Exposure] = {}
        self._opening: dict[bytes, list[int]] = {}
        self._prepared: dict[int, tuple[Region, Exposure, GiveBack]] = {}
        self._preparing = 0
        self._started = False
        self._verdict: tuple[Part, AccessRefused] | None = None
        self._mover = Mover(self.pair)

    # Meeting the peer -----------------------------------------------------------------------------

    def end_point(self) -> EndPoint:
        return self.pair.end_point()

    async def meet(self, peer: EndPoint) -> bytes:
        """Connect the queue pair; what the peer must know of our ring. Raises Unavailable."""
        self.pair.connect(peer, self._control.landing.registration)
        return await self._control.expose()

    def start(self, ring: bytes) -> None:
        """Raises DecodeRejected."""
        self._started = True
        self._control.start(ring)
        self._stream.start(_Lifeline(self))

    # Records --------------------------------------------------------------------------------------

    def _push(self, record: bytes, *, fd: int = -1, ordered: bool = True) -> None:
        self._control.push(record)

    def _arrived(self, word: int) -> None:
        self._control.arrived(word)

    def begin(self, header: wire.Header) -> None:
        wire.check_length(header, limits.FRAME_BYTES_MAX + 1024)

    def end(self, header: wire.Header, body: bytes) -> None:
        self._control_record(header, body)

    # One-sided access -----------------------------------------------------------------------------

    async def open(self, key: bytes) -> RemoteRegion:
        answer = await self._ask(wire.OPEN, body=key)
        region = VerbsRemoteRegion(self, key, answer.header, answer.body)
        self._opened.add(region)
        return region

    async def write(self, local: memoryview, remote: RemoteRegion, offset: int) -> None:
        await self._transfer(ibv.WRITE, remote, offset, as_bytes(local))

    async def read(self, remote: RemoteRegion, offset: int, local: memoryview) -> None:
        await self._transfer(ibv.READ, remote, offset, as_bytes(local))

    async def _transfer(
        self, opcode: int, remote: RemoteRegion, offset: int, view: memoryview
    ) -> None:
        self._check_alive()
        if not isinstance(remote, VerbsRemoteRegion) or remote.channel is not self:
            raise foreign()
        check_access(remote, offset, len(view))
        await self._mover.run(opcode, remote, offset, view)

    async def handover(
        self, region: Region, note: bytes, pace: Pace | None = None, parts: Parts | None = None
    ) -> None:
        """A copy: the peer makes room, we write into it, the peer's program takes it."""
        if region.closed:
            raise Rejected(f"region {region.label} is closed: only an open one can be handed over")
        label = region.label.encode()[:LABEL_BYTES_MAX]
        if len(note) > limits.FRAME_BYTES_MAX:
            raise Rejected(f"a note of {len(note)} bytes, at most {limits.FRAME_BYTES_MAX} fit")
        answer = await self._ask_for_room(region.nbytes, label)
        room = VerbsRemoteRegion(self, b"", answer.header, answer.body)
        whole = region if region.in_place else await asyncio.to_thread(region.whole)
        try:
            await paced(
                memoryview(whole.buffer),
                pace,
                lambda offset, piece: self._mover.run(ibv.WRITE, room, offset, piece),
                parts,
            )
        except BaseException:
            if not self.closed:
                self._push(wire.pack(wire.REVOKED, number=room.rkey))
            raise
        finally:
            if whole is not region:
                whole.close()
        await self._ask(
            wire.HANDOVER,
            handle=len(label),
            number=room.rkey,
            body=label + note,
            deadline_s=limits.HANDOVER_S,
        )

    # Serving --------------------------------------------------------------------------------------

    def grant(self, region: Region) -> bytes:
        """A body on a device is staged by its owner, who takes no part in what a NIC does."""
        if not region.in_place:
            raise Rejected(f"region {region.label} is on a device: reach it over shm or tcp")
        return super().grant(region)

    def revoke(self, key: bytes) -> None:
        """From now on the NIC refuses it."""
        exposure = self._exposed.pop(key, None)
        if exposure is not None:
            exposure.close()
        super().revoke(key)

    def _serve_open(self, header: wire.Header, key: bytes, region: Region) -> None:
        """A key that is opened again leads to the exposure that it has."""
        exposure = self._exposed.get(key)
        if exposure is not None:
            self._push(_opened(region, exposure, header.offset))
            return
        requests = self._opening.setdefault(key, [])
        requests.append(header.offset)
        if len(requests) == 1:
            self._spawn(self._expose(key, region, requests))

    async def _expose(self, key: bytes, region: Region, requests: list[int]) -> None:
        refusal: SlackwaterError | None = None
        exposure: Exposure | None = None
        try:
            exposure = await self._expose_region(region)
            if self._grants.get(key) is not region or region.closed:
                exposure.close()  # Meanwhile.
                refusal = AccessRefused("the key was revoked, or the region closed, just now")
        except SlackwaterError as error:
            refusal = error
        finally:
            del self._opening[key]
        if refusal is None and exposure is not None:
            self._exposed[key] = exposure
        for request in requests:
            if refusal is not None:
                self._reply(wire.pack_refusal(refusal, offset=request))
            elif exposure is not None:
                self._reply(_opened(region, exposure, request))

    async def _expose_region(self, region: Region) -> Exposure:
        """Raises Unavailable, Rejected."""
        await self._mover.slot()
        try:
            registration = self._domain.registration(region)
            return await self.pair.expose(registration, registration.address, region.nbytes, _BOTH)
        finally:
            self._mover.give()

    def _serve_prepare(self, header: wire.Header, label: str) -> None:
        if self._preparing + len(self._prepared) >= limits.HANDOVERS_MAX:
            raise Unavailable(f"{limits.HANDOVERS_MAX} handovers are under way")
        give_back = self._ask_room(header.number)
        self._preparing += 1
        task = self._spawn(self._prepare(header, label, give_back))
        task.add_done_callback(lambda task: self._prepare_ended(task, give_back))

    def _prepare_ended(self, task: "asyncio.Task[bool]", give_back: GiveBack) -> None:
        """Also of a task that was cancelled before it began."""
        self._preparing -= 1
        if task.cancelled() or task.exception() is not None or not task.result():
            give_back()

    async def _prepare(self, header: wire.Header, label: str, give_back: GiveBack) -> bool:
        """Say whether the room is kept."""
        region: Region | None = None
        kept = False
        try:
            region = Region.create(header.number, label)
            exposure = await self._expose_region(region)
            self._prepared[exposure.rkey] = region, exposure, give_back
            kept = True
            self._reply(_opened(region, exposure, header.offset))
        except SlackwaterError as error:
            self._reply(wire.pack_refusal(error, offset=header.offset))
        except MemoryError as error:
            self._reply(wire.pack_refusal(Rejected(str(error)), offset=header.offset))
        finally:
            if region is not None and not kept:
                region.close()
        return kept

    def _withdraw(self, handle: int) -> None:
        prepared = self._prepared.pop(handle, None)
        if prepared is not None:
            region, exposure, give_back = prepared
            exposure.close()
            region.close()
            give_back()

    def _adopt(self, header: wire.Header, label: str) -> tuple[Region, GiveBack]:
        prepared = self._prepared.pop(header.number, None)
        if prepared is None:
            raise DecodeRejected(f"a handover of {header.number}, which was not prepared")
        region, exposure, give_back = prepared
        exposure.close()  # It is ours alone from here on.
        return region, give_back

    # The end --------------------------------------------------------------------------------------

    def _connections(self) -> Iterable[tuple[Watched, bool]]:
        yield self.pair, self._control.partial

    def _pair_failed(self, status: int, work: Work | None) -> None:
        """The queue pair is over. A refusal may come from a process that is dying, whose memory
        goes before its connections: those decide, within VERBS_VERDICT_S."""
        what = ibv.STATUS.get(status, f"status {status}")
        if not isinstance(work, Part) or status not in _REFUSALS:
            because = " (as after an access of the peer's that was refused)" if work is None else ""
            self.lose(f"{what}{because}")
            return
        operation = work.operation
        region = operation.target
        name = region.label if isinstance(region, VerbsRemoteRegion) else ""
        verb = "a write of" if operation.opcode == ibv.WRITE else "a read of"
        error = AccessRefused(
            f"{what}: {verb} bytes [{work.offset}, {work.offset + work.nbytes}) of the peer's "
            f"region {name} (key {region.rkey:#x}); it was revoked or closed, or the bytes lie "
            "outside it"
        )
        self._verdict = work, error
        self._loop.call_later(limits.VERBS_VERDICT_S, self._conclude)

    def _conclude(self) -> None:
        """Settle a refused access, which is not a peer's death."""
        if self._verdict is not None and not self.closed:
            part, error = self._verdict
            part.settle(error)
            self.lose(f"a queue pair does not survive a refusal: {error}")

    def peer_gave_up(self, why: str) -> None:
        self.pair.drain()  # Its earlier messages are in our ring.
        self._conclude()
        self.lose(f"the peer gave the channel up: {why}")

    def peer_ended(self, error: Exception | None) -> None:
        """Take the frames that the peer sent before its end from our ring, then end the channel."""
        self.pair.drain()
        if isinstance(error, DecodeRejected):
            self.lose(f"the peer violates the protocol: {error}")
        else:
            self.lose("the peer closed the channel or died")

    def _teardown(self) -> None:
        """First no access is answered any more, then what was exposed goes, then the pair."""
        why = self._lost or ""
        if self._started:  # Else it is still the greeting's, which may have to say why.
            self._stream.push(wire.pack_refusal(Unavailable(why)))
            self._stream.flush_and_close()
        self.pair.stop()
        for exposure in self._exposed.values():
            exposure.close()
        self._exposed.clear()
        for rkey in tuple(self._prepared):
            self._withdraw(rkey)
        self._control.hide()
        self.pair.close(Unavailable(why))
        self._control.close()
        self._mover.lose(why)
        self._domain.release()

    async def close(self) -> None:
        """Close the channel. Frames that were sent before are in the peer's ring when this returns,
        if it takes them within CLOSE_S."""
        if not self.closed:
            self._push(wire.pack(wire.GOODBYE))
            with contextlib.suppress(TimeoutError):  # The peer does not take it: so it loses it.
                async with asyncio.timeout(limits.CLOSE_S):
                    await self._control.drain()
            self.lose("the channel was closed here")
        await self._tasks.begun_ended(limits.CLOSE_S)
        for region in tuple(self._opened):
            region.close()


def _opened(region: Region, exposure: Exposure, request: int) -> bytes:
    label = region.label.encode()[:LABEL_BYTES_MAX]
    return wire.pack(
        wire.OPENED,
        handle=exposure.rkey,
        number=region.nbytes,
        offset=request,
        body=_PLACE.pack(exposure.address) + label,
    )
