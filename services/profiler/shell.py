"""The profiler's shell: its subjects, and the host's load by psutil."""

from collections.abc import Iterator

import psutil

from slackwater.common.base.failpoints import failpoint
from slackwater.common.shell.definition import Level, Port, ServiceDefinition
from slackwater.common.shell.effect_runner import handlers, on
from slackwater.common.shell.world import World
from slackwater.schemas import subjects
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.telemetry import HostLoad, IterationsObserved, TasksObserved
from slackwater.services.profiler.config import ProfilerConfig
from slackwater.services.profiler.core import HostMeasured, MeasureHost, Profiler


class _Host:
    """Handler of `MeasureHost`."""

    def __init__(self) -> None:
        self._port: Port | None = None

    async def start(self, port: Port) -> None:
        self._port = port
        psutil.cpu_percent()  # The first call only sets the mark that the next measures from.

    def load(self, _: MeasureHost) -> HostMeasured:
        assert self._port is not None
        failpoint("profiler.measure.before")
        return HostMeasured(
            HostLoad(
                cpu_percent=psutil.cpu_percent(),
                memory_percent=psutil.virtual_memory().percent,
                cores=psutil.cpu_count() or 1,
                load1=psutil.getloadavg()[0],
                at_s=self._port.now_s(),
            )
        )


def definition(config: ProfilerConfig, world: World) -> ServiceDefinition:
    host, core = _Host(), Profiler(config)

    def service_gauges() -> Iterator[Level]:
        yield Level("profiler_jobs", {}, core.jobs)

    return ServiceDefinition(
        service="profiler",
        id=config.id,
        core=core,
        description="Measures iterations, task costs and host load; says profiles and windows.",
        subscriptions={
            subjects.telemetries("job", what="iterations"): IterationsObserved,
            subjects.telemetries("aggregator", what="tasks"): TasksObserved,
            subjects.events("job", fact="completed"): JobEvent,
            subjects.events("job", fact="failed"): JobEvent,
            subjects.events("job", fact="cancelled"): JobEvent,
        },
        handlers=handlers(MeasureHost, on(MeasureHost, host.load)),
        service_gauges=service_gauges,
        on_start=host.start,
    )
