"""The controller's shell: its subjects and its bucket."""

from collections import Counter
from collections.abc import Iterator
from random import Random
from time import perf_counter
from typing import get_args

from slackwater.common.base.effects import Effect, ShellEvent
from slackwater.common.base.histogram import LATENCY_S, Histogram
from slackwater.common.shell.definition import Level, ServiceDefinition
from slackwater.common.shell.world import World
from slackwater.schemas import subjects
from slackwater.schemas.checkpoints import CheckpointJob, MarkJob
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
    Phase,
    PlaceJob,
    ReleaseJob,
    TensorCopyDone,
    WorkerDone,
)
from slackwater.schemas.telemetry import JobProfiled, WindowMeasured
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.core import Controller
from slackwater.services.controller.policies.scheme import loss


class _Measured(Controller):
    """Measures how long its planning takes."""

    def __init__(self, config: ControllerConfig, rng: Random) -> None:
        super().__init__(config, rng)
        self.plan_s = Histogram(LATENCY_S)

    def step(self, event: ShellEvent, now_s: float) -> list[Effect]:
        before, begun_s = self.state.plans, perf_counter()
        effects = super().step(event, now_s)
        if self.state.plans != before:
            self.plan_s.add(perf_counter() - begun_s)
        return effects

    def service_gauges(self) -> Iterator[Level]:
        """Return the levels that the metrics show."""
        state = self.state
        phases = Counter(job.record.phase for job in state.jobs.values())
        for phase in get_args(Phase):
            yield Level("controller_jobs", {"phase": phase}, phases[phase])
        ours = [entry for entry in state.aggregators.values() if entry.ours]
        states = Counter(
            "dead" if not entry.alive else "avoided" if entry.avoided else "serving"
            for entry in ours
        )
        for name in ("serving", "avoided", "dead"):
            yield Level("controller_aggregators", {"state": name}, states[name])
        yield Level("controller_window_loss_ratio", {}, state.losses)
        losses = [
            loss(job.record.profile.iteration_s, job.window.iteration_s)
            for job in state.living()
            if job.window is not None and job.window.iteration_s and job.record.profile is not None
        ]
        yield Level("controller_loss_worst_ratio", {}, max(losses, default=0.0))
        yield Level("controller_plan_duration_seconds", {}, self.plan_s)


def definition(config: ControllerConfig, world: World) -> ServiceDefinition:
    """Raises ConfigRejected for an unknown policy."""
    core = _Measured(config, world.rng)
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
            "checkpoint": CheckpointJob,
            "mark": MarkJob,
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
        service_gauges=core.service_gauges,
    )
