"""The master's shell: its subjects, its buckets, its lease."""

from slackwater.common.limits import ADMISSIONS_MAX
from slackwater.common.shell.definition import ServiceDefinition
from slackwater.common.world import World
from slackwater.schemas import subjects
from slackwater.schemas.cluster import (
    AdoptAggregators,
    AggregatorHeartbeat,
    AggregatorRecord,
    AllocateAggregators,
    ClusterReport,
    DeallocateAggregators,
    ListAggregators,
    WorkerExited,
    WorkerHeartbeat,
)
from slackwater.schemas.jobs import (
    CancelJob,
    FinishJob,
    GetJob,
    JobEvent,
    JobRecord,
    ListJobs,
    ListTenants,
    RegisterJob,
    SubmitJob,
)
from slackwater.schemas.telemetry import IterationsObserved, JobProfiled
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.core import Master
from slackwater.services.master.pool import BUCKET as NODES_BUCKET
from slackwater.services.master.state import JOBS_BUCKET

LEASE = "master"


def definition(config: MasterConfig, world: World) -> ServiceDefinition:
    """One instance leads, the others of this lease stand by; whichever leads answers as `main`."""
    return ServiceDefinition(
        service="master",
        id=subjects.MASTER,
        instance=config.id,
        lease=LEASE,
        core=Master(config),
        description="Admits jobs, chooses their cluster, approves (de)allocations.",
        buckets={JOBS_BUCKET: JobRecord, NODES_BUCKET: AggregatorRecord},
        endpoints={
            "submit": SubmitJob,
            "cancel": CancelJob,
            "get": GetJob,
            "list": ListJobs,
            "register": RegisterJob,
            "finish": FinishJob,
            "worker-exited": WorkerExited,
            "allocate": AllocateAggregators,
            "deallocate": DeallocateAggregators,
            "adopt": AdoptAggregators,
            "aggregators": ListAggregators,
            "tenants": ListTenants,
        },
        concurrency={"submit": ADMISSIONS_MAX},
        subscriptions={
            subjects.telemetries("aggregator", what="heartbeat"): AggregatorHeartbeat,
            subjects.telemetries("worker", what="heartbeat"): WorkerHeartbeat,
            subjects.telemetries("controller", what="report"): ClusterReport,
            subjects.telemetries("job", what="iterations"): IterationsObserved,
            subjects.events("job", fact="profiled"): JobProfiled,
            subjects.events("job", fact="optimizer-state-lost"): JobEvent,
        },
    )
