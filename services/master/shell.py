"""The master's shell: its subjects, its buckets, its lease."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, get_args

import msgspec

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.limits import ADMISSIONS_MAX
from slackwater.common.shell.definition import Level, ServiceDefinition
from slackwater.common.shell.effect_runner import handlers, on
from slackwater.common.shell.metrics import NO_TENANT
from slackwater.common.shell.world import World
from slackwater.schemas import subjects
from slackwater.schemas.base import Message, Seconds
from slackwater.schemas.cluster import (
    TENANTS_MAX,
    AdoptAggregators,
    AggregatorHeartbeat,
    AggregatorRecord,
    AllocateAggregators,
    ClusterReport,
    DeallocateAggregators,
    ListAggregators,
    ListNodes,
    WorkerHeartbeat,
)
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_requests import (
    AskMissing,
    AskSize,
    CancelJob,
    DeleteJob,
    FinishJob,
    GetJob,
    JoinJob,
    KeepMark,
    ListJobs,
    Meet,
    PauseJob,
    RegisterJob,
    RerunJob,
    ResumeJob,
    ScaleJob,
    SubmitJob,
    UseHosts,
)
from slackwater.schemas.job_states import JobState
from slackwater.schemas.jobs import EndedJobs, JobRecord
from slackwater.schemas.scheduling import GetPolicy, PolicyRecord, ScalingRecord, SetPolicy
from slackwater.schemas.telemetry import GoodputReport, IterationsObserved, JobProfiled
from slackwater.schemas.tenants import ListTenants, TenantInfo
from slackwater.schemas.traffic import TrafficObserved
from slackwater.schemas.usage import GetUsage, UsageRecord
from slackwater.schemas.usage import UsageSums as Sums
from slackwater.schemas.workers import WorkerExited
from slackwater.services.master import hook
from slackwater.services.master.autoscaling import SCALING_BUCKET, CallHook
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.core import Master
from slackwater.services.master.ended import ENDED_BUCKET
from slackwater.services.master.fact_stream import keep_facts
from slackwater.services.master.gpu_policy import POLICIES_BUCKET
from slackwater.services.master.hangs import hang_of
from slackwater.services.master.pool import BUCKET as NODES_BUCKET
from slackwater.services.master.snapshot import Durations
from slackwater.services.master.state import JOBS_BUCKET, State, tenants
from slackwater.services.master.usage import USAGE_BUCKET
from slackwater.services.master.usage_listing import totals

LEASE = "master"
ENDPOINTS: Final[dict[str, type[Message]]] = {
    "submit": SubmitJob,
    "cancel": CancelJob,
    "rerun": RerunJob,
    "delete": DeleteJob,
    "pause": PauseJob,
    "resume": ResumeJob,
    "scale": ScaleJob,
    "size": AskSize,
    "join": JoinJob,
    "meet": Meet,
    "mark": KeepMark,
    "use": UseHosts,
    "get": GetJob,
    "list": ListJobs,
    "register": RegisterJob,
    "finish": FinishJob,
    "worker-exited": WorkerExited,
    "missing": AskMissing,
    "allocate": AllocateAggregators,
    "deallocate": DeallocateAggregators,
    "adopt": AdoptAggregators,
    "aggregators": ListAggregators,
    "tenants": ListTenants,
    "usage": GetUsage,
    "policy": GetPolicy,
    "set-policy": SetPolicy,
    "nodes": ListNodes,
}
READS: Final[frozenset[type[Message]]] = frozenset(
    (GetJob, ListJobs, ListAggregators, ListTenants, ListNodes, GetUsage, GetPolicy, AskSize)
)


def definition(
    config: MasterConfig, world: World, durations: Durations | None = None
) -> ServiceDefinition:
    """One instance leads, the others of this lease stand by; whichever leads answers as `main`.
    `durations`: seconds that jobs run, where a simulation knows them."""
    core = Master(config, _told(config) if durations is None else durations)

    return ServiceDefinition(
        service="master",
        id=subjects.MASTER,
        instance=config.id,
        lease=LEASE,
        core=core,
        description="Admits jobs, chooses their cluster, approves (de)allocations.",
        buckets={
            JOBS_BUCKET: JobRecord,
            NODES_BUCKET: AggregatorRecord,
            POLICIES_BUCKET: PolicyRecord,
            USAGE_BUCKET: UsageRecord,
            SCALING_BUCKET: ScalingRecord,
            ENDED_BUCKET: EndedJobs,
        },
        endpoints=ENDPOINTS,
        concurrency={"submit": ADMISSIONS_MAX},
        reads=READS,
        adds=frozenset((SubmitJob, RerunJob)),
        subscriptions={
            subjects.telemetries("aggregator", what="heartbeat"): AggregatorHeartbeat,
            subjects.telemetries("worker", what="heartbeat"): WorkerHeartbeat,
            subjects.telemetries("controller", what="report"): ClusterReport,
            subjects.telemetries("job", what="iterations"): IterationsObserved,
            subjects.telemetries("job", what="goodput"): GoodputReport,
            subjects.telemetries("job", what="traffic"): TrafficObserved,
            subjects.events("job", fact="profiled"): JobProfiled,
            subjects.events("job", fact="optimizer-state-lost"): JobEvent,
        },
        service_gauges=lambda: service_gauges(core.state, world.clock.now_s()),
        handlers=handlers(CallHook, on(CallHook, hook.call)),
        tasks=(keep_facts(world, config),),
    )


def _told(config: MasterConfig) -> Durations | None:
    """Read how long jobs run, where somebody tells that. Raises ConfigRejected."""
    if not config.gpu_durations:
        return None
    try:
        found = Path(config.gpu_durations).read_bytes()
        return msgspec.json.decode(found, type=dict[str, Seconds])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigRejected(
            f"gpu_durations {config.gpu_durations}: {error}; name a JSON file of the seconds by "
            "job, or none"
        ) from error


def tenant_gauges(info: TenantInfo) -> Iterator[Level]:
    shown = {
        "asked_cores": info.cpu,
        "allowed_cores": info.cpu_fraction * info.pool_cpu,
        "used_cores": info.used_cpu,
        "used_aggregators": info.used_slots,
        "loss_worst_ratio": max(0.0, info.loss),
        "jobs_beyond_limit": info.beyond,
        "jobs_running": info.running,
        "jobs_waiting": info.waiting,
    }
    for name, value in shown.items():
        yield Level(f"tenant_{name}", {"tenant": info.tenant or NO_TENANT}, value)


def usage_gauges(tenant: str, sums: Sums) -> Iterator[Level]:
    shown = {
        "gpu_seconds": sums.gpu_s,
        "core_seconds": sums.core_s,
        "saved_core_seconds": sums.saved_core_s,
        "jobs_ended": sums.ended,
    }
    for name, value in shown.items():
        yield Level(f"tenant_{name}", {"tenant": tenant or NO_TENANT}, value)


def service_gauges(state: State, now_s: float) -> Iterator[Level]:
    states = Counter(job.record.state for job in state.jobs.values())
    for name in get_args(JobState):
        yield Level("master_jobs", {"state": name}, states[name])
    yield Level("master_jobs_queued", {}, state.slots.queued + state.gpus.queued)
    yield Level("master_jobs_held", {}, len(state.held))
    hanging = sum(hang_of(job) is not None for job in state.unsettled.values())
    yield Level("master_jobs_hanging", {}, hanging)
    idle = sum(len(job.idle_gpus) for job in state.unsettled.values())
    yield Level("master_gpus_idle", {}, idle)
    for name, count in state.pool.counts().items():
        yield Level("master_aggregators", {"state": name}, count)
    for info in islice(tenants(state, now_s), TENANTS_MAX):
        yield from tenant_gauges(info)
    for tenant in islice(sorted({*state.usage.totals, *state.admitted}), TENANTS_MAX):
        yield from usage_gauges(tenant, totals(state, tenant, now_s))
