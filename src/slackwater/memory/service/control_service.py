"""The service of a device on the bus: heartbeats, its map for operators, facts, the durable slab
map.

A service like any other, in a shell of its own: it may end and start again while the device serves,
and the device does not notice. Its bucket `device_<id>` holds the slab map, a large one in parts of
which only those are written that changed; a device of which nothing is to be kept has none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from slackwater.common.base.effects import (
    Action,
    Answered,
    CancelTimer,
    Draining,
    Effect,
    EffectKey,
    Observed,
    Persist,
    Publish,
    Recovered,
    RefusedSoFar,
    Reply,
    Requested,
    ShellEvent,
    StartTimer,
    TimerFired,
)
from slackwater.common.shell.definition import ServiceDefinition
from slackwater.common.shell.effect_runner import handlers, on
from slackwater.schemas import subjects
from slackwater.schemas.base import Record, Refused
from slackwater.schemas.memory import (
    DeviceHeartbeat,
    DeviceMap,
    DeviceRecord,
    GetMap,
    SlabdHeartbeat,
)

SERVICE: Final = "device"
KEY: Final = "map"
"""The key of the first part; the others are `map-1` and so on."""
_SAVE_S: Final = 1.0
"""At most one look at what changed per so many seconds."""


@dataclass(frozen=True, slots=True)
class NoteLender(Action):
    """A lender's heartbeat goes to the device."""

    heartbeat: SlabdHeartbeat


class SaveDue(EffectKey, frozen=True):
    """The slab map is stored again."""


@dataclass(frozen=True, slots=True)
class FactSaid:
    """The device's core published this."""

    effect: Publish


@dataclass(frozen=True, slots=True)
class MapChanged:
    pass


@dataclass(frozen=True, slots=True)
class MapRead:
    """A snapshot of the slab map's parts by number, the first always among them."""

    records: Mapping[int, DeviceRecord]


Event = ShellEvent | FactSaid | MapChanged


class ControlServiceCore:
    """Decide when the slab map is saved, and which of its parts. Pure."""

    def __init__(self, id: str, keeps: bool = True) -> None:
        self.keeps = keeps
        self._bucket = bucket(id)
        self._saved: Mapping[str, Record] = {}
        self._saved_s = 0.0
        self._waiting = False

    def step(self, event: Event | MapRead, now_s: float) -> Sequence[Effect]:
        match event:
            case Observed(message=SlabdHeartbeat() as heartbeat):
                return [NoteLender(heartbeat)]
            case Requested(token=token, message=message):
                why = f"a device does not know {type(message).__name__}"
                return [Reply(token, Refused(reason=why))]
            case FactSaid(effect=effect):
                return [effect]
            case MapChanged():
                return self._changed(now_s)
            case MapRead(records=found):
                return self._save(found, now_s)
            case Recovered(records=records):
                self._saved = records.get(self._bucket, {})
                return []
            case Draining():
                return [CancelTimer(SaveDue())]
            case Observed() | TimerFired() | Answered() | RefusedSoFar():
                return []
        assert_never(event)

    def _changed(self, now_s: float) -> list[Effect]:
        if self._waiting or not self.keeps:
            return []
        self._waiting = True
        return [StartTimer(SaveDue(), max(now_s, self._saved_s + _SAVE_S))]

    def _save(self, found: Mapping[int, DeviceRecord], now_s: float) -> list[Effect]:
        self._waiting = False
        self._saved_s = now_s
        before = self._saved
        self._saved = {f"{KEY}-{part}" if part else KEY: record for part, record in found.items()}
        return [
            Persist(self._bucket, key, self._saved.get(key))
            for key in (*self._saved, *(before.keys() - self._saved.keys()))
            if self._saved.get(key) != before.get(key)
        ]


class ControlService:
    """The service's shell: reads the live device, and gives the core snapshots of it. `records`
    returns the slab map's parts, `map` what operators see from a span on."""

    def __init__(
        self,
        core: ControlServiceCore,
        records: Callable[[], Mapping[int, DeviceRecord]],
        map: Callable[[int], DeviceMap],
    ) -> None:
        self.core = core
        self._records = records
        self._map = map

    def step(self, event: Event, now_s: float) -> Sequence[Effect]:
        if isinstance(event, Requested) and isinstance(event.message, GetMap):
            return [Reply(event.token, self._map(event.message.first))]
        effects = self.core.step(event, now_s)
        if self.core.keeps and isinstance(event, Recovered | TimerFired | Draining):
            effects = [*effects, *self.core.step(MapRead(self._records()), now_s)]
        return effects


def bucket(id: str) -> str:
    return f"{SERVICE}_{id}"


def definition(
    id: str,
    service: ControlService,
    heartbeat: Callable[[float], DeviceHeartbeat],
    seen: Callable[[SlabdHeartbeat], None],
) -> ServiceDefinition:
    return ServiceDefinition(
        service=SERVICE,
        id=id,
        core=service,
        description="A block device in remote memory.",
        buckets={bucket(id): DeviceRecord} if service.core.keeps else {},
        endpoints={"map": GetMap},
        subscriptions={
            subjects.telemetries(service="slabd", what="heartbeat"): SlabdHeartbeat,
        },
        handlers=handlers(NoteLender, on(NoteLender, lambda effect: seen(effect.heartbeat))),
        needs_all_records=True,  # A part of the slab map would be pages lost without a word.
        heartbeat=heartbeat,
    )
