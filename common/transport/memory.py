"""The transport inside one process: for tests, and for whole systems under virtual time.

Same semantics as the real ones (keys, refusals, credit, order, the end), no thread, no socket, no
wall clock, and the same run for the same seed: a step of the way takes `latency_s` of the event
loop's own time. Faults are the network's: `cut` an address as a crash or a partition does, `heal`
it again.
"""

import asyncio
import random

from slackwater.common.base.errors import ConfigRejected, DeadlineExceeded, Unavailable
from slackwater.common.transport.base import (
    Accept,
    Address,
    Channel,
    OnChannel,
    OnHandover,
    OnPrepare,
)
from slackwater.common.transport.channel import KEY_BYTES
from slackwater.common.transport.hello import check_hello_size
from slackwater.common.transport.listeners import Accepted
from slackwater.common.transport.memory_channel import MemoryChannel
from slackwater.common.transport.region import Region


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
