"""The daemons' and the devices' own cores under one event heap; what their shells do is played.

One lender and one device a machine. Frames between them take `message_s`; a slab is made, opened,
left and let go in the times of `Times`. Channels do not break and no message is lost: that is the
whole-system simulation's subject. Heartbeats are told to a device when it may look for a lender,
as of their senders' last look at memory: at other times it does nothing with them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.effects import (
    Action,
    CancelTimer,
    Effect,
    EffectKey,
    Log,
    Publish,
    Requested,
    StartTimer,
    TimerFired,
)
from slackwater.common.base.errors import Rejected
from slackwater.memory.control import events as to_device
from slackwater.memory.control.core import DeviceCore
from slackwater.memory.control.effects import (
    AdmitSlab,
    ConnectLender,
    LeaveSlab,
    OpenSlab,
    SaveMap,
    SendToLender,
)
from slackwater.memory.control.spans import DeviceSettings
from slackwater.schemas.base import Message, NodeId
from slackwater.schemas.memory import (
    DeviceHello,
    DeviceId,
    LenderId,
    SlabdHeartbeat,
    SlabEvent,
    SlabMapped,
    SlabState,
    SpanEvent,
    ToDevice,
    ToLender,
)
from slackwater.services.slabd import events as to_lender
from slackwater.services.slabd.config import SlabdConfig
from slackwater.services.slabd.core import LenderCore
from slackwater.services.slabd.effects import (
    LendSlab,
    MakeSlab,
    ReleaseSlab,
    RenewSlab,
    SendToDevice,
)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds; the paper's (2.7.4), where it has them."""

    message_s: float = 30e-6
    make_s: float = 0.4
    """Pre-allocating a slab masks close to 400 ms."""
    open_s: float = 0.054
    """Registration."""
    leave_s: float = 300e-6
    """From EVICT until the device's requests are over: eviction takes 363 us in all."""
    free_s: float = 0.05


@dataclass(slots=True)
class Machine:
    """`seen` is its lender's last heartbeat."""

    number: int
    lender: LenderCore
    device: DeviceCore
    states: Counter[SlabState] = field(default_factory=Counter)
    """How many of its slabs are at what, at its last look."""
    seen: SlabdHeartbeat | None = None
    sessions: dict[int, "Machine"] = field(default_factory=dict)
    """The lender's sessions: number -> the machine at the other end."""
    channels: dict[LenderId, tuple["Machine", int]] = field(default_factory=dict)
    """The device's channels: lender -> its machine, and the session's number there."""
    timers: dict[tuple[str, EffectKey], int] = field(default_factory=dict)


class World:
    """`on_mapped` and `on_unmapped` are told which span of which machine's device has a slab.
    `even`: heartbeats only say whether there is a free slab, so that all lenders are drawn alike.
    """

    def __init__(
        self,
        machines: int,
        spans: int,
        memory_bytes: int,
        headroom_bytes: int,
        slab_bytes: int,
        seed: int,
        on_mapped: Callable[[int, int], None],
        on_unmapped: Callable[[int, int], None],
        times: Times,
        *,
        even: bool = False,
    ) -> None:
        self.now_s = 0.0
        self.steps = 0
        self.facts: Counter[str] = Counter()
        self.map_s: list[float] = []
        self.evict_s: list[float] = []
        self._times, self._even = times, even
        self._total_bytes = memory_bytes
        self._slab_bytes = slab_bytes
        self._on_mapped, self._on_unmapped = on_mapped, on_unmapped
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._session = 0
        self.machines = [
            Machine(
                number,
                LenderCore(
                    SlabdConfig(
                        id=f"m{number}",
                        node=f"m{number}",
                        slab_bytes=slab_bytes,
                        headroom_bytes=headroom_bytes,
                    ),
                    Random(f"{seed} lender {number}"),
                ),
                DeviceCore(
                    DeviceSettings(id=DeviceId(f"d{number}"), node=f"m{number}", spans=spans),
                    slab_bytes,
                    Random(f"{seed} device {number}"),
                ),
            )
            for number in range(machines)
        ]
        self._named = {LenderId(f"m{m.number}"): m for m in self.machines}

    # Time -----------------------------------------------------------------------------------------

    def at(self, at_s: float, do: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._events, (at_s, self._number, do))

    def run_until(self, at_s: float) -> None:
        while self._events and self._events[0][0] <= at_s:
            self.now_s, _, do = heappop(self._events)
            do()
        self.now_s = at_s

    def _after(self, delay_s: float, do: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, do)

    # Events from outside --------------------------------------------------------------------------

    def sampled(self, machine: Machine, others_bytes: int) -> None:
        """The lender looks at its machine, and tells the bus."""
        self.lender_step(machine, to_lender.MemorySampled(self._total_bytes, others_bytes))
        core = machine.lender
        machine.states = Counter(slab.state for slab in core.slabs.values())
        free = machine.states["free"]
        machine.seen = SlabdHeartbeat(
            service="slabd",
            id=core.id,
            incarnation=1,
            at_s=self.now_s,
            node=NodeId(core.id),
            addresses=(),
            slab_bytes=self._slab_bytes,
            free_slabs=min(free, 1) if self._even else free,
            lent_slabs=machine.states["lent"] + machine.states["evicting"],
            devices=len(machine.sessions),
            total_bytes=self._total_bytes,
            used_bytes=others_bytes,
            headroom_bytes=core.sizing.headroom_bytes,
            lending=core.lending,
        )

    def measured(self, machine: Machine, counts: NDArray[np.int64]) -> None:
        """The device looks at its spans' activity. Who has pages in a span without a slab may
        look for one now: only then are heartbeats of any use."""
        waiting = counts.copy()
        waiting[machine.device.spans.in_use()] = 0
        if waiting.any():
            for other in self.machines:
                if other.seen is not None and other is not machine:
                    machine.device.step(to_device.LenderSeen(other.seen), self.now_s)
        self.device_step(machine, to_device.ActivityMeasured(counts))

    def command(self, machine: Machine, message: Message) -> None:
        """An operator's, to the lender; nobody waits for the answer."""
        self.lender_step(machine, Requested(0, message))

    # Steps and effects ----------------------------------------------------------------------------

    def lender_step(self, machine: Machine, event: to_lender.Event) -> None:
        self.steps += 1
        for effect in machine.lender.step(event, self.now_s):
            if isinstance(effect, Action):
                self._lender_does(machine, effect)
            else:
                self._carry(machine, "lender", effect)

    def device_step(self, machine: Machine, event: to_device.Event) -> None:
        self.steps += 1
        for effect in machine.device.step(event, self.now_s):
            if isinstance(effect, Action):
                self._device_does(machine, effect)
            else:
                self._carry(machine, "device", effect)

    def _carry(self, machine: Machine, side: str, effect: Effect) -> None:
        match effect:
            case StartTimer(key=key, at_s=at_s):
                self._number += 1
                number = machine.timers[side, key] = self._number
                self.at(at_s, lambda: self._fire(machine, side, key, number))
            case CancelTimer(key=key):
                machine.timers.pop((side, key), None)
            case Publish(message=message):
                self._hear(message)
            case Log(event="slab.not-made"):
                raise Rejected(f"m{machine.number}: a slab was not made: {effect.fields}")
            case _:
                pass  # Replies have no receiver here.

    def _fire(self, machine: Machine, side: str, key: EffectKey, number: int) -> None:
        if machine.timers.get((side, key)) != number:
            return
        del machine.timers[side, key]
        if side == "lender":
            self.lender_step(machine, TimerFired(key))
        else:
            self.device_step(machine, TimerFired(key))

    def _hear(self, message: Message) -> None:
        match message:
            case SlabEvent(fact=fact, took_s=took_s):
                self.facts[f"slab {fact}"] += 1
                if fact == "evicted":
                    self.evict_s.append(took_s)
            case SpanEvent(fact=fact, took_s=took_s):
                self.facts[f"span {fact}"] += 1
                if fact == "mapped":
                    self.map_s.append(took_s)
            case _:
                pass

    # The lender's shell ---------------------------------------------------------------------------

    def _lender_does(self, machine: Machine, action: Action) -> None:
        times = self._times
        match action:
            case SendToDevice(session=session, message=message):
                self._to_device(machine, session, message)
            case MakeSlab(slab=slab) | RenewSlab(slab=slab):
                made = to_lender.SlabMade(slab)
                self._after(times.make_s, lambda: self.lender_step(machine, made))
            case LendSlab(identity=identity):
                granted = SlabMapped(
                    request=action.request,
                    slab=identity.slab,
                    generation=identity.generation,
                    slab_bytes=identity.slab_bytes,
                    key=b"",
                )
                self._to_device(machine, action.session, granted)
            case ReleaseSlab(slab=slab):
                gone = to_lender.SlabGone(slab)
                self._after(times.free_s, lambda: self.lender_step(machine, gone))
            case _:
                raise AssertionError(f"a lender's core asked for {action}")

    def _to_device(self, lender: Machine, session: int, message: ToDevice) -> None:
        device = lender.sessions[session]
        heard = to_device.Heard(lender.lender.id, message)
        self._after(self._times.message_s, lambda: self.device_step(device, heard))

    # The device's shell ---------------------------------------------------------------------------

    def _device_does(self, machine: Machine, action: Action) -> None:
        times = self._times
        match action:
            case SendToLender(lender=name, message=message):
                lender, session = machine.channels[name]
                self._to_lender(lender, session, message)
            case ConnectLender(lender=name):
                self._after(times.message_s, lambda: self._connect(machine, name))
            case OpenSlab(member=member):
                opened = to_device.Opened(member)
                self._after(times.open_s, lambda: self.device_step(machine, opened))
            case AdmitSlab(span=span):
                self._on_mapped(machine.number, span)
            case LeaveSlab(member=member, span=span):
                self._on_unmapped(machine.number, span)
                left = to_device.Left(member)
                self._after(times.leave_s, lambda: self.device_step(machine, left))
            case SaveMap():
                pass  # The slab map is for a restart.
            case _:
                raise AssertionError(f"a device's core asked for {action}")

    def _to_lender(self, lender: Machine, session: int, message: ToLender) -> None:
        heard = to_lender.Heard(session, message)
        self._after(self._times.message_s, lambda: self.lender_step(lender, heard))

    def _connect(self, machine: Machine, name: LenderId) -> None:
        lender = self._named[name]
        self._session += 1
        session = self._session
        lender.sessions[session] = machine
        machine.channels[name] = (lender, session)
        hello = DeviceHello(
            device=machine.device.settings.id, node=NodeId(f"m{machine.number}"), incarnation=1
        )
        self.lender_step(lender, to_lender.SessionOpened(session, hello))
        self.device_step(machine, to_device.Connected(name))
