"""The transport inside one process: for tests, and for whole systems under virtual time.

Same semantics as the real ones (keys, refusals, credit, order, the end), no thread, no socket, no
wall clock, and the same run for the same seed: a step of the way takes `latency_s` of the event
loop's own time. Faults are the network's: `cut` an address as a crash or a partition does, `heal`
it again.
"""

import asyncio
import os
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from slackwater.common.base import limits
from slackwater.common.base.background import Tasks
from slackwater.common.base.errors import (
    AccessRefused,
    ConfigRejected,
    DeadlineExceeded,
    Rejected,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.transport.base import (
    Accept,
    Address,
    Channel,
    OnChannel,
    OnHandover,
    OnPrepare,
    RemoteRegion,
)
from slackwater.common.transport.channel import KEY_BYTES, as_bytes, check_access, foreign
from slackwater.common.transport.hello import check_hello_size
from slackwater.common.transport.inbox import Credit, Inbox
from slackwater.common.transport.listeners import Accepted
from slackwater.common.transport.pacing import Pace, Parts
from slackwater.common.transport.region import Region
from slackwater.common.transport.reservations import Arriving, GiveBack, no_account


class MemoryNetwork:
    """Every fabric on one network reaches every listener on it. `shared`: a handover passes the
    memory itself, as on one host; else a copy of it."""

    def __init__(self, *, seed: int = 0, latency_s: float = 0.0, shared: bool = False) -> None:
        self.latency_s = latency_s
        self.shared = shared
        self.copied_bytes = 0
        """Bytes that handovers sent."""
        self._random = random.Random(seed)
        self._listeners: dict[Address, MemoryListener] = {}
        self._cut: set[Address] = set()
        self._named = 0

    def way_s(self, address: Address) -> float:
        """How long one step takes on a channel to a listener on `address`."""
        return self.latency_s

    def cut(self, address: Address) -> None:
        """Lose every channel to this address, and let none through until `heal`."""
        self._cut.add(address)
        listener = self._listeners.get(address)
        if listener is not None:
            listener.lose("the network was cut")

    def heal(self, address: Address) -> None:
        self._cut.discard(address)

    def key(self) -> bytes:
        return self._random.randbytes(KEY_BYTES)

    def find(self, address: Address) -> "MemoryListener":
        """Raises Unavailable."""
        listener = self._listeners.get(address)
        if listener is None or address in self._cut:
            raise Unavailable(f"nobody listens on {address}")
        return listener

    def enter(self, listener: "MemoryListener", address: Address) -> Address:
        """Raises ConfigRejected when the address is taken. An empty one gets a name."""
        if not address:
            self._named += 1
            address = f"memory-{self._named}"
        if address in self._listeners:
            raise ConfigRejected(f"somebody listens on {address}: choose another address")
        self._listeners[address] = listener
        return address

    def leave(self, listener: "MemoryListener") -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]


class MemoryRemoteRegion:
    def __init__(self, channel: "MemoryChannel", key: bytes, region: Region, mapped: bool) -> None:
        self.channel, self.key = channel, key
        self.nbytes = region.nbytes
        self._view = memoryview(region.buffer) if mapped and region.in_place else None
        self.closed = self.revoked = False

    @property
    def view(self) -> memoryview | None:
        return self._view

    def close(self) -> None:
        self.closed = True
        self._view = None


class MemoryChannel:
    """One end; `peer` is the other."""

    peer: "MemoryChannel"
    address: Address = ""
    """Where the listening end listens."""

    def __init__(
        self,
        network: MemoryNetwork,
        hello: bytes,
        on_handover: OnHandover | None,
        mapped: bool,
        on_prepare: OnPrepare | None = None,
    ) -> None:
        self._network = network
        self._hello = hello
        self._on_handover, self._on_prepare = on_handover, on_prepare
        self._mapped = mapped
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox()
        self._credit = Credit()
        self._grants: dict[bytes, Region] = {}
        self._opened: dict[MemoryRemoteRegion, None] = {}
        self._lost: str | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._handovers = 0
        self._lane: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._tasks = Tasks(self._broke)

    @property
    def hello(self) -> bytes:
        return self._hello

    @property
    def closed(self) -> bool:
        return self._lost is not None

    # Keys and regions ----------------------------------------------------------------------------

    def grant(self, region: Region) -> bytes:
        self._check_alive()
        if region.closed:
            raise Rejected(f"region {region.label} is closed: only an open one can be granted")
        if len(self._grants) >= limits.GRANTS_MAX:
            raise Rejected(f"{limits.GRANTS_MAX} keys granted on one channel: revoke some")
        key = self._network.key()
        self._grants[key] = region
        return key

    def revoke(self, key: bytes) -> None:
        self._grants.pop(key, None)

    def granted(self, key: bytes) -> Region:
        """Raises AccessRefused."""
        region = self._grants.get(key)
        if region is None or region.closed:
            raise AccessRefused("no region is granted on this channel under this key")
        return region

    async def open(self, key: bytes) -> RemoteRegion:
        await self._way()
        region = MemoryRemoteRegion(self, key, self.peer.granted(key), self._mapped)
        await self._way()
        self._opened[region] = None
        return region

    async def write(self, local: memoryview, remote: RemoteRegion, offset: int) -> None:
        source = as_bytes(local)
        key = self._check_access(remote, offset, len(source))
        await self._way()
        region = self.peer.granted(key)
        region.buffer[offset : offset + len(source)] = source
        region.arrived(offset, len(source))
        await self._way()

    async def read(self, remote: RemoteRegion, offset: int, local: memoryview) -> None:
        target = as_bytes(local)
        key = self._check_access(remote, offset, len(target))
        await self._way()
        region = self.peer.granted(key)
        region.fetch(offset, len(target))
        data = bytes(region.buffer[offset : offset + len(target)])
        await self._way()
        target[:] = data

    def _check_access(self, remote: RemoteRegion, offset: int, nbytes: int) -> bytes:
        self._check_alive()
        if not isinstance(remote, MemoryRemoteRegion) or remote.channel is not self:
            raise foreign()
        check_access(remote, offset, nbytes)
        return remote.key

    # Frames --------------------------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        self._check_alive()
        if len(frame) > limits.FRAME_BYTES_MAX:
            raise Rejected(
                f"a frame of {len(frame)} bytes, at most {limits.FRAME_BYTES_MAX} fit: "
                "write bulk bytes into a region"
            )
        self._credit.take(len(frame))
        self._later(self.peer.arrive, bytes(frame))

    def arrive(self, frame: bytes) -> None:
        if not self.closed:
            self._inbox.put(frame)

    async def receive(self) -> bytes:
        frame = await self._inbox.get()
        if self._inbox.progress_due() and not self.closed:
            self._later(self.peer.returned, self._inbox.consumed_frames, self._inbox.consumed_bytes)
        return frame

    def returned(self, frames: int, nbytes: int) -> None:
        self._credit.returned(frames, nbytes)

    # Handover ------------------------------------------------------------------------------------

    async def handover(
        self, region: Region, note: bytes, pace: Pace | None = None, parts: Parts | None = None
    ) -> None:
        if region.closed:
            raise Rejected(f"region {region.label} is closed: only an open one can be handed over")
        await self._way()
        if region.closed:
            raise Rejected(f"region {region.label} was closed while it was handed over")
        give_back = self.peer.ask_room(region.nbytes)
        try:
            copy = await self._copied(region, pace, parts)
        except BaseException:
            give_back()
            raise
        answer: asyncio.Future[None] = self._loop.create_future()
        self.peer.take(Arriving(copy, give_back), bytes(note), answer)
        done, _ = await asyncio.wait(
            {answer, self._ended},
            timeout=limits.HANDOVER_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if answer in done:
            answer.result()
            await self._way()
        self._check_alive()
        if not done:
            raise DeadlineExceeded(f"the peer did not take it within {limits.HANDOVER_S:g} s")

    async def _copied(self, region: Region, pace: Pace | None, parts: Parts | None) -> Region:
        """Return the copy that arrives at the peer."""
        if not region.in_place:
            return region.whole()
        if self._network.shared:
            return Region.adopt(os.dup(region.fileno()), region.label)
        wanted = ((0, region.nbytes),) if parts is None else parts
        if pace is not None:
            await pace(sum(nbytes for _, nbytes in wanted))
        copy = Region.create(region.nbytes, region.label)
        for first, nbytes in wanted:
            copy.buffer[first : first + nbytes] = region.buffer[first : first + nbytes]
            self._network.copied_bytes += nbytes
        return copy

    def ask_room(self, nbytes: int) -> GiveBack:
        """Ask for room before a region arrives. Raises AccessRefused, Rejected, Unavailable."""
        if self._on_handover is None:
            raise Rejected("this side takes no regions: it named no on_handover")
        return no_account if self._on_prepare is None else self._on_prepare(self.hello, nbytes)

    def take(self, arriving: Arriving, note: bytes, answer: "asyncio.Future[None]") -> None:
        """A region arrives. `answer` gets the outcome, unless the channel ends before."""
        if self.closed or self._handovers >= limits.HANDOVERS_MAX:
            arriving.end()
            answer.set_exception(Unavailable(f"{self._handovers} handovers are under way"))
            return
        self._handovers += 1
        task = self._tasks.spawn(self._run_handover(arriving, note, answer))
        task.add_done_callback(lambda _task: self._handover_ended(arriving))

    def _handover_ended(self, arriving: Arriving) -> None:
        self._handovers -= 1
        arriving.end()

    async def _run_handover(
        self, arriving: Arriving, note: bytes, answer: "asyncio.Future[None]"
    ) -> None:
        assert self._on_handover is not None  # Else no room was given.
        try:
            arriving.give_back()
            await self._on_handover(arriving.region, note)
            arriving.accepted = True
            answer.set_result(None)
        except SlackwaterError as error:
            answer.set_exception(error)
            answer.exception()  # The giver may be gone.
        except Exception as error:  # A caller's callback: the giver is told.
            answer.set_exception(Unavailable("on_handover failed"))
            answer.exception()
            self._loop.call_exception_handler(
                {"message": "transport: on_handover failed", "exception": error}
            )

    # The way and its end -------------------------------------------------------------------------

    async def _way(self) -> None:
        """One step of the way to the peer or back. Raises Unavailable when it ends meanwhile."""
        self._check_alive()
        await asyncio.sleep(self._network.way_s(self.address))
        self._check_alive()

    def _later(self, what: Callable[..., None], *arguments: Any) -> None:
        """In order with everything else on this way: the loop's timers alone keep no order among
        those that are due at one moment."""
        self._lane.append((what, arguments))
        if way_s := self._network.way_s(self.address):
            self._loop.call_later(way_s, self._deliver)
        else:
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        what, arguments = self._lane.popleft()
        what(*arguments)

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise Unavailable(self._lost)

    def lose(self, why: str) -> None:
        """The channel is over at this end. Idempotent: the first reason stands."""
        if self._lost is not None:
            return
        self._lost = why
        self._inbox.close(why)
        self._grants.clear()
        self._ended.set_result(None)
        self._tasks.cancel()

    async def close(self) -> None:
        if not self.closed:
            self.lose("the channel was closed here")
            self._later(self.peer.lose, "the peer closed the channel or died")
        for region in self._opened:
            region.close()
        self._opened.clear()
        await self._tasks.begun_ended(limits.CLOSE_S)

    def _broke(self, name: str, error: BaseException) -> None:
        """A task raised what none may: whoever waits for what it was to do would wait for ever."""
        self.lose(f"the channel broke here: {name} failed: {error!r}")
        self._later(self.peer.lose, "the peer closed the channel or died")


class MemoryListener:
    def __init__(
        self,
        network: MemoryNetwork,
        address: Address,
        accepted: Accepted,
        on_handover: OnHandover | None,
        on_prepare: OnPrepare | None,
    ) -> None:
        self._network = network
        self._accepted = accepted
        self._on_handover, self._on_prepare = on_handover, on_prepare
        self._ends: list[MemoryChannel] = []
        self._address = network.enter(self, address)

    @property
    def address(self) -> Address:
        return self._address

    def prepare(self, region: Region) -> None:
        """A region is reached as it is."""

    async def admit(self, mine: MemoryChannel) -> None:
        """Make the other end of a channel. Raises AccessRefused, Unavailable."""
        await self._accepted.admit(mine.hello)
        self._network.find(self.address)  # It may have gone, or been cut off, meanwhile.
        theirs = MemoryChannel(
            self._network, mine.hello, self._on_handover, mine._mapped, self._on_prepare
        )
        mine.peer, theirs.peer = theirs, mine
        mine.address = theirs.address = self.address
        self._ends = [end for end in self._ends if not end.closed]
        self._ends.append(theirs)
        self._accepted.begin(theirs)

    def lose(self, why: str) -> None:
        for end in self._ends:
            end.lose(why)
            end.peer.lose(why)
        self._ends.clear()

    async def close(self) -> None:
        self._network.leave(self)
        await self._accepted.close()


class MemoryFabric:
    """`mapped`: remote regions have a view, as on one host; without it they have none, as between
    hosts."""

    kind = "memory"

    def __init__(self, network: MemoryNetwork, *, mapped: bool = False) -> None:
        self._network = network
        self._mapped = mapped

    async def listen(
        self,
        address: Address,
        accept: Accept,
        on_channel: OnChannel,
        on_handover: OnHandover | None,
        on_prepare: OnPrepare | None = None,
    ) -> MemoryListener:
        accepted = Accepted(accept, on_channel)
        return MemoryListener(self._network, address, accepted, on_handover, on_prepare)

    async def connect(
        self,
        address: Address,
        hello: bytes,
        *,
        deadline_s: float,
        on_handover: OnHandover | None = None,
    ) -> Channel:
        check_hello_size(hello)
        channel = MemoryChannel(self._network, bytes(hello), on_handover, self._mapped)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.sleep(self._network.latency_s)
                await self._network.find(address).admit(channel)
                await asyncio.sleep(self._network.latency_s)
        except TimeoutError:
            channel.lose("connecting took too long")
            if hasattr(channel, "peer"):
                channel.peer.lose("the peer gave up connecting")
            raise DeadlineExceeded(f"{address} did not answer within {deadline_s:g} s") from None
        if channel.closed:
            raise Unavailable(f"{address} went away")
        return channel
