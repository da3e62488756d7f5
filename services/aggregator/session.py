"""One Agent's channel: its frames in, ours out. The hot path: no message, no log line a push."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from slackwater.common.base.errors import DecodeRejected, Unavailable
from slackwater.common.base.rare_log import RareLog
from slackwater.common.domains.slots.frames import (
    ENTRIES_MAX,
    Attach,
    Control,
    Done,
    Hello,
    Offer,
    Part,
    Ring,
    Seed,
    decode,
    encode_control,
    encode_dones,
)
from slackwater.common.transport.base import Channel
from slackwater.services.aggregator.bucket import Bucket


class Plane(Protocol):
    """The data plane as a session uses it."""

    def attach(self, session: "Session", index: int) -> None: ...
    def offered(self, session: "Session", bucket: Bucket, offer: Offer) -> None: ...
    def seeded(self, session: "Session", bucket: Bucket, seed: Seed) -> None: ...
    def on_doorbell(self, session: "Session", bucket: Bucket, iteration: int) -> None: ...
    def on_partial_push(self, session: "Session", bucket: Bucket, part: Part) -> None: ...
    def session_closed(self, session: "Session") -> None: ...

    @property
    def strangers(self) -> RareLog: ...


class Session:
    def __init__(self, plane: Plane, number: int, channel: Channel, hello: Hello) -> None:
        self.number = number
        self.hello = hello
        self.rank = hello.rank
        self.handles: dict[int, Bucket] = {}
        """Buckets granted on this channel, with those that left since."""
        self._plane = plane
        self._channel = channel
        self._keys: dict[int, bytes] = {}
        self._dones: list[tuple[int, int, int]] = []
        self._over = asyncio.Event()

    @property
    def channel(self) -> Channel:
        return self._channel

    async def serve(self) -> None:
        """Until the peer is gone, reads no more, or says what cannot be understood."""
        closer = asyncio.get_running_loop().create_task(self._close())
        try:
            while True:
                for said in decode(await self._channel.receive()):
                    self._take(said)
        except Unavailable:
            self._over.set()  # Agents come and go.
        except DecodeRejected as error:
            self._plane.strangers.warning(
                "channel.refused", job=self.hello.job, rank=self.rank, reason=str(error)
            )
        finally:
            self._plane.session_closed(self)
            self._over.set()
            await closer

    async def _close(self) -> None:
        await self._over.wait()
        await self._channel.close()

    def _take(self, said: Ring | Done | Part | Control) -> None:
        match said:
            case Ring(handle=handle, iteration=iteration):
                bucket = self.handles.get(handle)
                if bucket is not None:  # A late doorbell of a handle that is gone changes nothing.
                    self._plane.on_doorbell(self, bucket, iteration)
            case Part(handle=handle, elements=elements):
                bucket = self.handles.get(handle)
                if bucket is not None:
                    if not 0 < elements <= bucket.layout.elements:
                        raise DecodeRejected(f"{elements} elements of {bucket.layout.elements}")
                    self._plane.on_partial_push(self, bucket, said)
            case Attach(buckets=buckets):
                for index in buckets:
                    self._plane.attach(self, index)
            case Offer(handle=handle):
                if (bucket := self.handles.get(handle)) is not None:
                    self._plane.offered(self, bucket, said)
            case Seed(handle=handle):
                if (bucket := self.handles.get(handle)) is not None:
                    self._plane.seeded(self, bucket, said)
            case _:
                raise DecodeRejected(f"an Agent does not say {type(said).__name__}")

    # Out ------------------------------------------------------------------------------------------

    def granted(self, bucket: Bucket, key: bytes) -> None:
        """Remember what the handle stands for; an older key of it is worthless from now on."""
        self.ungranted(bucket)
        self.handles[bucket.handle] = bucket
        self._keys[bucket.handle] = key

    def ungranted(self, bucket: Bucket) -> None:
        key = self._keys.pop(bucket.handle, None)
        if key is not None and not self._channel.closed:
            self._channel.revoke(key)

    def done(self, bucket: Bucket) -> None:
        """The pull response."""
        if not self._dones:  # All answers of one turn of the loop leave in one frame.
            asyncio.get_running_loop().call_soon(self._send_dones)
        answered = bucket.answered(self.rank)
        self._dones.append((bucket.handle, answered, bucket.location_epoch))

    def _send_dones(self) -> None:
        dones, self._dones = self._dones, []
        for first in range(0, len(dones), ENTRIES_MAX):
            self.send(encode_dones(dones[first : first + ENTRIES_MAX]))

    def tell(self, control: Control) -> None:
        """Send a message after all earlier ones."""
        self._send_dones()
        self.send(encode_control(control))

    def send(self, frame: bytes) -> None:
        """A peer that reads no more is let go: it asks again on another channel."""
        try:
            self._channel.send(frame)
        except Unavailable as error:
            if not self._channel.closed:
                self._plane.strangers.warning(
                    "channel.full", job=self.hello.job, rank=self.rank, reason=str(error)
                )
            self._over.set()


def by_number(sessions: dict[int, Session], numbers: Iterable[int]) -> list[Session]:
    """Return the sessions of these numbers that are still here."""
    return [sessions[number] for number in numbers if number in sessions]
