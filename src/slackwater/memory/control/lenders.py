"""The driver of a device's core: channels to lenders, timers, and what the core wants done.

Events go in one at a time; effects are carried out at once and in order. What takes time (to
connect, to open a slab, to fall silent) runs as a task and comes back as an event. The device's
data path does not wait for any of it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

import numpy as np
import structlog

from slackwater.common.base import limits
from slackwater.common.base.clock import Clock
from slackwater.common.base.effects import Publish
from slackwater.common.base.errors import DecodeRejected, SlackwaterError, Unavailable
from slackwater.common.base.failpoints import failpoint
from slackwater.common.domains.memory import frames
from slackwater.common.shell.effect_runner import EffectRunner, Handlers, handlers, on
from slackwater.common.transport.base import Channel, Fabric
from slackwater.common.transport.negotiate import choose
from slackwater.common.transport.pacing import Bandwidth, Leftover
from slackwater.memory.control.core import DeviceCore
from slackwater.memory.control.effects import (
    AdmitSlab,
    ConnectLender,
    DeviceAction,
    LeaveSlab,
    OpenSlab,
    SaveMap,
    SendToLender,
    SuspendSlab,
)
from slackwater.memory.control.events import (
    ActivityMeasured,
    Connected,
    Disconnected,
    Event,
    Fenced,
    Heard,
    Left,
    LenderSeen,
    Opened,
    Restored,
    Stopping,
)
from slackwater.memory.control.refill import Refiller
from slackwater.memory.control.regeneration import Regenerator
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import states
from slackwater.memory.pages.device import Device
from slackwater.memory.pages.remote import RemoteSlab
from slackwater.schemas.memory import LenderId, SlabdHeartbeat, SlabMapped

TICK_S: Final = 1.0
_STOP_S: Final = 2.0
_log = structlog.get_logger()


class Lenders:
    """`publish` takes the core's facts, `changed` is called when the slab map is another."""

    def __init__(
        self,
        core: DeviceCore,
        device: Device,
        fabrics: Mapping[str, Fabric],
        clock: Clock,
        hello: bytes,
        *,
        publish: Callable[[Publish], None],
        changed: Callable[[], None],
        transport: str | None = None,
        leftover: Leftover | None = None,
    ) -> None:
        """`leftover`: what the machine's link leaves to what may take its time."""
        self.core = core
        self.device = device
        self.populates = True
        """Mapped slabs are faulted in by a thread; a simulation has none."""
        self._fabrics = fabrics
        self._clock = clock
        self._hello = hello
        self._publish = publish
        self._changed = changed
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._background = device.background
        self._channels: dict[LenderId, Channel] = {}
        self._unreachable: set[LenderId] = set()
        self._slabs: dict[int, RemoteSlab] = {}
        self._unpopulated: list[RemoteSlab] = []
        self._populating = False
        self._closed = False
        self.regenerator = Regenerator(
            device, clock, Bandwidth(limits.REGENERATION_BYTES_S, clock, leftover)
        )
        self.refiller = Refiller(device, clock, Bandwidth(limits.REFILL_BYTES_S, clock, leftover))
        self._resting = False
        device.on_fenced = lambda span: self.feed(Fenced(span))
        device.on_failed = self._failed
        self._runner = EffectRunner(
            clock, self._background.guarded(self.feed), self._background.fail, self._handlers()
        )
        self._refills = self._runner.tasks.group()
        self._leavings = self._runner.tasks.group()

    def _handlers(self) -> Handlers:
        own = handlers(
            DeviceAction,
            on(ConnectLender, lambda e: self._spawn(self._live(e.lender, e.addresses))),
            on(SendToLender, self._send),
            on(OpenSlab, lambda e: self._spawn(self._opening(e.member, e.lender, e.message))),
            on(AdmitSlab, self._admit),
            on(SuspendSlab, self._suspend),
            on(LeaveSlab, self._leave),
            on(SaveMap, lambda _: self._soon(self._changed)),
        )
        # Facts wait for a moment: what is sent to lenders leaves before.
        return {**own, Publish: lambda effect: self._soon(self._publish, effect)}

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon(self._background.guarded(function), *arguments)

    # A life ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Measure the spans' activity once a second, for as long as the device lives."""
        counts = np.zeros(self.core.settings.spans, np.int64)
        before_s = self._clock.now_s()
        while True:
            await self._clock.sleep_until(before_s + TICK_S)
            now_s = self._clock.now_s()
            k.take_activity(self.device.table, counts)
            self.feed(ActivityMeasured(counts.copy(), max(now_s - before_s, 1e-3)))
            before_s = now_s

    def seen(self, heartbeat: SlabdHeartbeat) -> None:
        self.feed(LenderSeen(heartbeat))

    async def rest(self) -> None:
        """Nothing reads the backup any more; call this before it is closed."""
        self._resting = True
        await self._refills.close()

    async def close(self) -> None:
        """Give the slabs back, within a moment, and end the channels, also where it is given up
        that they are given back."""
        self.feed(Stopping())
        try:
            await self._leavings.begun_ended(_STOP_S)
        finally:
            self._closed = True
            self._runner.timers.close()
            await asyncio.gather(*(channel.close() for channel in tuple(self._channels.values())))
            await self._runner.close()
            for slab in self._slabs.values():
                slab.close()

    def feed(self, event: Event) -> None:
        """One step, and its effects."""
        if self._closed:
            return
        for effect in self.core.step(event, self._clock.now_s()):
            self._runner.perform(effect)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.tasks.spawn(work)

    # Channels -------------------------------------------------------------------------------------

    async def _live(self, lender: LenderId, addresses: tuple[tuple[str, str], ...]) -> None:
        """A channel from its beginning to its end; the frames in between."""
        try:
            fabric, address = choose(self._fabrics, addresses, forced=self._transport)
            channel = await fabric.connect(address, self._hello, deadline_s=limits.CONNECT_S)
        except SlackwaterError as error:
            self._tell_reached(lender, str(error))
            self.feed(Disconnected(lender, str(error)))
            return
        self._channels[lender] = channel
        self._tell_reached(lender)
        reason = "the channel was closed"
        try:
            self.feed(Connected(lender))
            while True:
                self.feed(Heard(lender, frames.to_device(await channel.receive())))
        except (Unavailable, DecodeRejected) as error:
            reason = str(error)
        finally:
            del self._channels[lender]
            if not self._closed:
                _log.warning("lender.lost", lender=lender, reason=reason)
            # First nothing may use the channel, then it goes, with the memory mapped through it.
            self.feed(Disconnected(lender, reason))
            await channel.close()

    def _tell_reached(self, lender: LenderId, failure: str = "") -> None:
        """When it is another way than before: it is tried several times a second."""
        if failure and lender not in self._unreachable:
            self._unreachable.add(lender)
            _log.warning("lender.unreachable", lender=lender, reason=failure)
        elif not failure and lender in self._unreachable:
            self._unreachable.remove(lender)
            _log.info("lender.reached-again", lender=lender)

    def _send(self, effect: SendToLender) -> None:
        channel = self._channels.get(effect.lender)
        if channel is None:
            return
        try:
            channel.send(frames.pack(effect.message))
        except Unavailable:
            self._spawn(channel.close())  # Its end is seen by the one who receives.

    def _failed(self, span: int) -> None:
        """A request failed: unless its channel is over already, it ends now, so that nothing that
        was begun on it can land after a claim."""
        for slab in self.device.members(span):
            if slab is not None and slab.alive:
                self._spawn(slab.abandon())

    # Slabs ----------------------------------------------------------------------------------------

    async def _opening(self, member: int, lender: LenderId, message: SlabMapped) -> None:
        channel = self._channels.get(lender)
        failure = ""
        try:
            if channel is None:
                raise Unavailable("the channel was lost meanwhile")
            failpoint("device.open.before")
            region = await channel.open(message.key)
            slab = RemoteSlab(lender, channel, region, message)
            if not slab.intact():
                slab.close()
                raise Unavailable("the slab was taken away before it was used")
            self._slabs[member] = slab
        except SlackwaterError as error:
            failure = str(error)
            _log.warning("slab.not-opened", lender=lender, slab=message.slab, reason=failure)
        self.feed(Opened(member, failure))
        if self.core.spans.numbered(member) is None and member in self._slabs:
            self._slabs.pop(member).close()  # It was given up meanwhile.
            return
        if not failure and self.populates:
            await self._populate(slab)

    async def _populate(self, slab: RemoteSlab) -> None:
        """One thread for all that came meanwhile: to hand one slab to it costs the loop as much as
        half a mapping, and others are being mapped."""
        self._unpopulated.append(slab)
        if self._populating:
            return
        self._populating = True
        try:
            while self._unpopulated:
                batch, self._unpopulated = self._unpopulated, []
                await asyncio.to_thread(_populate_all, batch)
        finally:
            self._populating = False

    def _admit(self, effect: AdmitSlab) -> None:
        member, span, index = effect.member, effect.span, effect.index
        failpoint("device.admit.before")
        self.device.admit(span, index, self._slabs[member])
        failpoint("device.admit.after")
        if self.device.resilience.width > 1:
            self._spawn(self._restore(member, span, index))
        if self.device.table.state[span] == states.MAPPED and not self._resting:
            self._refills.spawn(self.refiller.run(span))

    async def _restore(self, member: int, span: int, index: int) -> None:
        if await self.regenerator.run(span, index):
            self.feed(Restored(member))

    def _suspend(self, effect: SuspendSlab) -> None:
        self.device.suspend(effect.span, effect.index)
        slab = self._slabs.pop(effect.member, None)
        if slab is not None:
            self._spawn(self._close_quiet(effect.span, slab))

    async def _close_quiet(self, span: int, slab: RemoteSlab) -> None:
        await self.device.quiet(span)
        slab.close()

    def _leave(self, effect: LeaveSlab) -> None:
        member, span, index = effect.member, effect.span, effect.index
        self.device.leave(span, index)  # At once: the channel may end before a task runs.
        self._leavings.spawn(self._leaving(member, span, index))

    async def _leaving(self, member: int, span: int, index: int) -> None:
        await self.device.retire(span, index)
        failpoint("device.leave.before")
        slab = self._slabs.pop(member, None)
        if slab is not None:
            slab.close()
        failpoint("device.leave.after")
        self.feed(Left(member))


def _populate_all(slabs: Sequence[RemoteSlab]) -> None:
    for slab in slabs:
        slab.populate()
