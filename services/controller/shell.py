"""The controller's shell: its subjects and its bucket."""

from slackwater.common.shell.definition import ServiceDefinition
from slackwater.common.world import World
from slackwater.schemas import subjects
from slackwater.schemas.cluster import AggregatorHeartbeat
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


def definition(config: ControllerConfig, world: World) -> ServiceDefinition:
    """Raises ConfigRejected for an unknown policy."""
    core = Controller(config, world.rng)
    return ServiceDefinition(
        service="controller",
        id=config.id,
        core=core,
        description="Assigns a cluster's model aggregations to its aggregators.",
        buckets={core.state.bucket: JobPlacement},
        endpoints={"place": PlaceJob, "release": ReleaseJob, "locate": LocateJob},
        subscriptions={
            subjects.telemetries("aggregator", what="heartbeat"): AggregatorHeartbeat,
            subjects.events("job", fact="profiled"): JobProfiled,
            subjects.events("job", fact="window"): WindowMeasured,
            subjects.events("migration", fact="copied"): TensorCopyDone,
            subjects.events("migration", fact="worker-done"): WorkerDone,
        },
    )
