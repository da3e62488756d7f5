"""Endpoints that every service answers itself, whatever its core does: health, info, stats,
drain."""

from collections.abc import Callable
from importlib.metadata import version

from slackwater.common.base.clock import Clock
from slackwater.common.bus.base import Bus, Endpoint, ServiceInfo
from slackwater.common.shell.counters import Counters
from slackwater.common.shell.definition import ServiceDefinition
from slackwater.common.shell.endpoints import Intake
from slackwater.common.shell.process import Process
from slackwater.schemas.base import SCHEMA_VERSION, Message, Ok
from slackwater.schemas.permissions import OWN_VERBS
from slackwater.schemas.service import Drain, GetHealth, GetInfo, GetStats, Health, Info, Stats


class Introspection:
    """`gauges` and `doubts` are read when somebody asks; `drain` is called when told to."""

    def __init__(
        self,
        definition: ServiceDefinition,
        process: Process,
        bus: Bus,
        clock: Clock,
        counters: Counters,
        gauges: Callable[[], dict[str, float]],
        steps_waiting: Callable[[], int],
        doubts: Callable[[], str],
        drain: Callable[[], None],
    ) -> None:
        self._definition = definition
        self._process = process
        self._bus = bus
        self._clock = clock
        self._counters = counters
        self._gauges = gauges
        self._steps_waiting = steps_waiting
        self._doubts = doubts
        self._drain = drain
        self._started_s = clock.now_s()
        self.draining = False

    def endpoints(self, intake: Intake) -> list[Endpoint]:
        return [
            intake.direct("health", GetHealth, self.health),
            intake.direct("info", GetInfo, self.info),
            intake.direct("stats", GetStats, self.stats),
            intake.direct("drain", Drain, self._told_to_drain),
        ]

    def service_info(self, epoch: int) -> ServiceInfo:
        """Return the entry that `nats micro ls` and `info` show."""
        definition = self._definition
        return ServiceInfo(
            name=definition.service,
            version=version("slackwater"),
            description=definition.description or f"slackwater {definition.service}",
            metadata={
                "id": definition.id,
                "epoch": str(epoch),
                "host": self._process.host,
                "pid": str(self._process.pid),
                "schema": str(SCHEMA_VERSION),
            },
        )

    def health(self) -> Message:
        doubts = self._doubts()
        degraded = bool(doubts) or not self._bus.connected
        return Health(
            state="draining" if self.draining else "degraded" if degraded else "ok",
            service=self._definition.service,
            id=self._definition.id,
            uptime_s=self._uptime_s(),
            bus_connected=self._bus.connected,
            steps_waiting=self._steps_waiting(),
            reason=doubts,
        )

    def info(self) -> Message:
        definition = self._definition
        return Info(
            service=definition.service,
            id=definition.id,
            version=version("slackwater"),
            schema_version=SCHEMA_VERSION,
            host=self._process.host,
            pid=self._process.pid,
            started_s=self._started_s,
            endpoints=(*definition.endpoints, *OWN_VERBS),
            subscriptions=tuple(definition.subscriptions),
            buckets=tuple(definition.buckets),
        )

    def stats(self) -> Message:
        return Stats(
            service=self._definition.service,
            id=self._definition.id,
            uptime_s=self._uptime_s(),
            counters=self._counters.all(),
            gauges=self._gauges(),
        )

    def _uptime_s(self) -> float:
        return self._clock.now_s() - self._started_s

    def _told_to_drain(self) -> Message:
        self._drain()
        return Ok()
