"""What the bus sees of a device: heartbeats, its map for operators, facts, the durable slab map.

A service like any other, in a shell of its own: it may end and start again while the device serves,
and the device does not notice. Its bucket `device_<id>` holds the slab map, a large one in parts of
which only those are written that changed; a device of which nothing is to be kept has none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from slackwater.common.base.effects import (
    Answered,
    CancelTimer,
    Do,
    Draining,
    Effect,
    Observed,
    Persist,
    Publish,
    Recovered,
    Reply,
    Requested,
    ShellEvent,
    StartTimer,
    TimerFired,
)
from slackwater.common.shell.definition import ServiceDefinition
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
"""Of the first part; the others are `map-1` and so on."""
_SAVE_S: Final = 1.0
"""At most one look at what changed per so many seconds."""


@dataclass(frozen=True, slots=True)
class FactSaid:
    """The device's core published this."""

    effect: Publish


@dataclass(frozen=True, slots=True)
class MapChanged:
    pass


Event = ShellEvent | FactSaid | MapChanged


class ControlServiceCore:
    """`records` (the slab map's parts by number, the first always among them) and `map` (from a
    span on) read the device's state as it is."""

    def __init__(
        self,
        id: str,
        records: Callable[[], Mapping[int, DeviceRecord]],
        map: Callable[[int], DeviceMap],
        keeps: bool = True,
    ) -> None:
        self.keeps = keeps
        self._bucket = bucket(id)
        self._records = records
        self._map = map
        self._saved: Mapping[str, Record] = {}
        self._saved_s = 0.0
        self._waiting = False

    def step(self, event: Event, now_s: float) -> Sequence[Effect]:
        match event:
            case Observed(message=message):
                return [Do("seen", {"heartbeat": message})]
            case Requested(token=token, message=GetMap(first=first)):
                return [Reply(token, self._map(first))]
            case Requested(token=token, message=message):
                why = f"a device does not know {type(message).__name__}"
                return [Reply(token, Refused(reason=why))]
            case FactSaid(effect=effect):
                return [effect]
            case MapChanged():
                return self._changed(now_s)
            case Recovered(records=records):
                self._saved = records.get(self._bucket, {})
                return self._save(now_s)
            case TimerFired():
                return self._save(now_s)
            case Draining():
                return [CancelTimer("save"), *self._save(now_s)]
            case Answered():
                return []
        assert_never(event)

    def _changed(self, now_s: float) -> list[Effect]:
        if self._waiting or not self.keeps:
            return []
        if now_s - self._saved_s >= _SAVE_S:
            return self._save(now_s)
        self._waiting = True
        return [StartTimer("save", self._saved_s + _SAVE_S)]

    def _save(self, now_s: float) -> list[Effect]:
        self._waiting = False
        self._saved_s = now_s
        if not self.keeps:
            return []
        before, self._saved = (
            self._saved,
            {f"{KEY}-{part}" if part else KEY: record for part, record in self._records().items()},
        )
        return [
            Persist(self._bucket, key, self._saved.get(key))
            for key in (*self._saved, *(before.keys() - self._saved.keys()))
            if self._saved.get(key) != before.get(key)
        ]


def bucket(id: str) -> str:
    return f"{SERVICE}_{id}"


def definition(
    id: str,
    core: ControlServiceCore,
    heartbeat: Callable[[float], DeviceHeartbeat],
    seen: Callable[[SlabdHeartbeat], None],
) -> ServiceDefinition:
    return ServiceDefinition(
        service=SERVICE,
        id=id,
        core=core,
        description="A block device in remote memory.",
        buckets={bucket(id): DeviceRecord} if core.keeps else {},
        endpoints={"map": GetMap},
        subscriptions={
            subjects.telemetries(service="slabd", what="heartbeat"): SlabdHeartbeat,
        },
        handlers={"seen": seen},
        needs_all_records=True,  # A part of the slab map would be pages lost without a word.
        heartbeat=heartbeat,
    )
