"""The seam of the data plane: one-sided access to registered memory, and small ordered frames.

A party registers a `Region` and grants its key over a channel; the peer opens the key and then
writes or reads the region without the owner's program taking part. Frames (at most
FRAME_BYTES_MAX) are the doorbells and the little control that goes with them. Implementations:
`shm` (memfd mapped by both sides), `tcp` (scatter-gather, several streams); `verbs` and device
memory fit the same interface. All pass tests/unit/common/transport/test_conformance.py.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

from slackwater.common.transport.pacing import Pace, Parts
from slackwater.common.transport.region import Region

Address = str
"""kind-specific: `<host identity>!/path/of/a/socket` (a bare path means this host), host:port."""


class RemoteRegion(Protocol):
    """A peer's region that was granted to us."""

    @property
    def nbytes(self) -> int: ...

    @property
    def view(self) -> memoryview | None:
        """The memory itself where this transport can map it (work in place); else None."""
        ...

    def close(self) -> None: ...


class Channel(Protocol):
    """A connection between two parties. Raises Unavailable once the peer is gone, AccessRefused
    for a key that was not granted to this channel or a range outside its region."""

    @property
    def hello(self) -> bytes:
        """Return the bytes by which the connecting side introduced itself; the listener checks them
        before it accepts."""
        ...

    @property
    def closed(self) -> bool: ...

    def grant(self, region: Region) -> bytes:
        """A key (at most 64 bytes) that lets this channel's peer open the region. Unguessable."""
        ...

    def revoke(self, key: bytes) -> None:
        """No new access by this key. (Mapped memory cannot be unmapped at the peer.)"""
        ...

    async def open(self, key: bytes) -> RemoteRegion: ...

    async def write(self, local: memoryview, remote: RemoteRegion, offset: int) -> None:
        """Returns when the bytes are in the remote region and visible to its owner. Cancelled or
        failed, it leaves any part of the range written."""
        ...

    async def read(self, remote: RemoteRegion, offset: int, local: memoryview) -> None:
        """Fill `local`. Once this has ended, however it did, nothing more comes into `local`."""
        ...

    def send(self, frame: bytes) -> None:
        """Queue one small frame: ordered after every write that has returned. Never blocks;
        raises Unavailable when the peer is gone or SEND_QUEUE is full."""
        ...

    async def receive(self) -> bytes:
        """The next frame. Raises Unavailable when the peer is gone and none is left."""
        ...

    async def handover(
        self, region: Region, note: bytes, pace: Pace | None = None, parts: Parts | None = None
    ) -> None:
        """Make the region's bytes the peer's own (it arrives there through its `on_handover`):
        the memfd itself on one host, a copy otherwise, at the `pace` that is given. Of a copy only
        `parts` are sent, where they are given, and the rest arrives as zeros. Returns when the peer
        has accepted it."""
        ...

    async def close(self) -> None:
        """Close the channel, and the remote regions that this side opened. Frames that were sent
        before still arrive where the peer takes them. Idempotent; needed also after the peer is
        gone."""
        ...


@runtime_checkable
class Scattering(Protocol):
    """A channel that also moves many equal pieces of a region as one operation."""

    async def write_scattered(
        self, local: memoryview, remote: RemoteRegion, offsets: Sequence[int], length: int
    ) -> None: ...

    async def read_scattered(
        self, remote: RemoteRegion, offsets: Sequence[int], length: int, local: memoryview
    ) -> None: ...


@runtime_checkable
class Offering(Protocol):
    """A channel that also gives a grant which the peer opens without asking for it."""

    def offer(self, region: Region) -> bytes:
        """Grant access like `grant`; all that the peer needs to open the region leaves with the
        next frame. For a region that is to be opened at once."""
        ...


@runtime_checkable
class Reserving(Protocol):
    """A channel that also reserves memory at the peer before anything is handed over."""

    async def make_room(self, region: Region) -> int:
        """For a handover of this region; as long as the channel lives. Raises what `handover`
        does."""
        ...

    def give_back(self, room: int) -> None: ...

    async def hand_over_into(
        self, room: int, region: Region, note: bytes, pace: Pace | None, parts: Parts | None
    ) -> None:
        """Hand over like `handover`, into a room, which is used up, also where this fails."""
        ...


class Lane(Protocol):
    """A socket to the peer on which compiled code of the program asks (lanes.py)."""

    closed: bool

    def fileno(self) -> int: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Laned(Protocol):
    """A channel that also has lanes."""

    @property
    def closed(self) -> bool: ...

    async def lane(self) -> Lane:
        """One more. Raises Unavailable, Rejected, DeadlineExceeded."""
        ...

    def lane_handle(self, remote: RemoteRegion) -> int:
        """Return the handle by which requests on this channel's lanes name the region."""
        ...

    def violated(self, why: str) -> None:
        """The peer broke the protocol on a lane: the channel ends."""
        ...


Accept = Callable[[bytes], None]
"""Called with a peer's hello before the channel exists; raises AccessRefused to turn it away,
Unavailable where it may come back later; is that within ADMIT_WAIT_S, it is asked again then."""
OnChannel = Callable[[Channel], Awaitable[None]]
"""Runs as a task. It may return and keep its channel; if it raises, the channel is closed."""
OnPrepare = Callable[[bytes, int], Callable[[], None]]
"""Called with a peer's hello and the bytes of a region that it wants to hand over, before memory is
taken for it. Raises AccessRefused where this peer hands nothing over, Rejected or Unavailable where
there is no room. What it returns is called once: just before `on_handover`, or when the region will
not come."""
OnHandover = Callable[[Region, bytes], Awaitable[None]]
"""Called with a region that a peer handed over and its note; raises Rejected to refuse it. The
region is its own once it returns; if it raises, or the channel ends before, the region is closed.
The giver closes its own Region after `handover` returned: on one host both are the same memory."""


class Listener(Protocol):
    @property
    def address(self) -> Address: ...

    async def close(self) -> None:
        """Stop listening, and close every channel that was accepted here."""
        ...

    def prepare(self, region: Region) -> None:
        """Do now the work that takes time when a peer opens the region for the first time. It
        blocks; another thread may call it, one at a time for a region. Raises Rejected."""
        ...


class Fabric(Protocol):
    """One kind of transport in this process."""

    @property
    def kind(self) -> str: ...

    async def listen(
        self,
        address: Address,
        accept: Accept,
        on_channel: OnChannel,
        on_handover: OnHandover | None,
        on_prepare: OnPrepare | None = None,
    ) -> Listener:
        """Without `on_handover` no region is taken in; without `on_prepare` every peer that was
        accepted may hand one over."""
        ...

    async def connect(
        self,
        address: Address,
        hello: bytes,
        *,
        deadline_s: float,
        on_handover: OnHandover | None = None,
    ) -> Channel:
        """Raises Unavailable (nobody there), AccessRefused (turned away), DeadlineExceeded.
        Without `on_handover` this side refuses regions that the listener hands over."""
        ...
