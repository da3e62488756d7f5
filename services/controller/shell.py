"""The controller's shell: its subjects and its bucket."""

from slackwater.common.shell.definition import Port, ServiceDefinition
from slackwater.common.world import World
from slackwater.schemas import subjects
from slackwater.schemas.cluster import (
    AggregatorDrain,
    AggregatorHeartbeat,
    AggregatorLost,
    AggregatorRestarts,
    AllocationEvent,
    DrainAggregator,
    RestoreAggregator,
)
from slackwater.schemas.placement import (
    JobPlacement,
    LocateJob,
    PlaceJob,
    ReleaseJob,
    TensorCopyDone,
    WorkerDone,
)
from slackwater.schemas.telemetry import JobProfiled, WindowMeasured
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.core import Controller


class _Counting:
    """Handler of `count`."""

    def __init__(self) -> None:
        self._port: Port | None = None

    async def start(self, port: Port) -> None:
        self._port = port

    def count(self, name: str) -> None:
        assert self._port is not None
        self._port.count(name)


def definition(config: ControllerConfig, world: World) -> ServiceDefinition:
    """Raises ConfigRejected for an unknown policy."""
    core, counting = Controller(config, world.rng), _Counting()
    return ServiceDefinition(
        service="controller",
        id=config.id,
        core=core,
        description="Assigns a cluster's model aggregations to its aggregators.",
        buckets={core.state.bucket: JobPlacement, core.state.drains_bucket: AggregatorDrain},
        endpoints={
            "place": PlaceJob,
            "release": ReleaseJob,
            "locate": LocateJob,
            "empty": DrainAggregator,
            "restore": RestoreAggregator,
            "lost": AggregatorLost,
        },
        subscriptions={
            subjects.telemetries("aggregator", what="heartbeat"): AggregatorHeartbeat,
            subjects.telemetries("aggregator", what="restarts"): AggregatorRestarts,
            subjects.events("aggregator", fact="released"): AllocationEvent,
            subjects.events("job", fact="profiled"): JobProfiled,
            subjects.events("job", fact="window"): WindowMeasured,
            subjects.events("migration", fact="copied"): TensorCopyDone,
            subjects.events("migration", fact="worker-done"): WorkerDone,
        },
        handlers={"count": counting.count},
        on_start=counting.start,
    )
