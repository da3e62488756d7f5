"""The master's configuration."""

from typing import Annotated, Literal

import msgspec

from slackwater.common.base.limits import JOBS_MAX, WORKER_NODES_MAX
from slackwater.common.shell.config import ServiceConfig
from slackwater.schemas.base import AGGREGATORS_MAX, GPUS_MAX, IdText, LossLimit, Name
from slackwater.services.master.scheduling.view import Rules

Duration = Annotated[float, msgspec.Meta(gt=0.0)]


Admission = Literal["open", "standalone"]


class Tenant(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Limits of the jobs of one tenant together (admission.py)."""

    cpu_fraction: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """Part of the pool's CPU."""
    loss_limit: LossLimit = 0.0
    """LossLimit of each of its jobs; 0: that of the cluster."""
    aggregators: Annotated[int, msgspec.Meta(ge=0, le=AGGREGATORS_MAX)] = 0
    """Aggregators that its jobs may take together: of one that n jobs share, each takes 1/n. 0: any
    number."""
    queued_max: Annotated[int, msgspec.Meta(ge=1, le=JOBS_MAX)] = JOBS_MAX
    """Jobs that wait to be started; one more is refused."""
    gpus: Annotated[int, msgspec.Meta(ge=0, le=GPUS_MAX)] = 0
    """GPUs that are the tenant's own, whoever waits; beyond, it borrows idle ones. 0: none, and
    where no tenant has some, all share alike."""


class MasterConfig(ServiceConfig, kw_only=True, frozen=True):
    """Fields with unit, default and meaning."""

    id: IdText = "m0"
    """Tells this instance from its standby; the leading one answers as `main`."""
    aggregators_max: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    """Aggregators that one cluster may hold at once, temporary ones included."""
    cluster_scaling_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Seconds between two adjustments of the number of clusters that take new jobs; 0: all do."""
    admission: Admission = "open"
    """`standalone`: a job runs once some cluster can be given as many aggregators as it asks
    servers for (dissertation, 4.3.3.5); `open`: at once, its cluster finds room."""
    tenants: dict[Annotated[str, msgspec.Meta(max_length=64)], Tenant] = msgspec.field(
        default_factory=dict
    )
    """Limits by tenant; `default`: of each tenant that is not named."""
    gpu_policy: Name = "fifo"
    """The policy that gives GPUs to jobs; `slackwater policy list` names them all."""
    gpu_policy_settings: dict[Name, Name] = msgspec.field(default_factory=dict)
    """Options of `gpu_policy`, as `--set` of `loadgen simulate` takes them."""
    autoscale_hook: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """A command, or the address of a webhook, that adds and returns machines as the policy asks:
    `HOOK add ID COUNT`, `HOOK return ID MACHINE ...`; empty: nobody does."""
    autoscale_nodes_min: Annotated[int, msgspec.Meta(ge=1, le=WORKER_NODES_MAX)] = 1
    """Machines with GPUs that there are at least."""
    autoscale_nodes_max: Annotated[int, msgspec.Meta(ge=1, le=WORKER_NODES_MAX)] = 1
    """Machines with GPUs that are had at most."""
    autoscale_aggregators_min: Annotated[int, msgspec.Meta(ge=0, le=AGGREGATORS_MAX)] = 0
    """Aggregators that there are at least."""
    autoscale_aggregators_max: Annotated[int, msgspec.Meta(ge=0, le=AGGREGATORS_MAX)] = 0
    """Aggregators that the hook starts at most; 0: it starts and stops none."""
    autoscale_node_hour_cost: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """The price of a machine's hour, in any currency; 0: it is not shown."""
    autoscale_period_s: Duration = 300.0
    """Seconds between two orders to the hook at least, and without any GPU job before machines are
    returned."""
    autoscale_hook_s: Duration = 60.0
    """Seconds that the hook may take to answer; then it is killed, and has refused."""
    autoscale_wait_s: Duration = 900.0
    """Seconds in which machines that were ordered must be heard, jobs leave those that are to be
    returned, and these become silent."""
    gpu_durations: str = ""
    """A JSON file, job -> seconds that it runs on the GPUs that it asks for: where a trace is
    replayed, a policy that plans with them (srtf, srsf) may be told. Empty: nobody knows them."""
    gpu_min_run_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Seconds that a job keeps its GPUs at least, once it has them."""
    regroup_gain: Annotated[float, msgspec.Meta(ge=0.0, le=1000.0)] = 0.05
    """The part by which the use of nodes must become larger for jobs that take turns to be moved to
    others that they fit better; 0: they stay where they were started."""
    tick_s: Duration = 1.0
    """Seconds between two looks at what is lost, silent or still to be told."""
    jobs_kept_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    """Ended jobs that are remembered; the oldest are forgotten first."""
    usage_days: Annotated[int, msgspec.Meta(ge=31, le=36_500)] = 1100
    """Days for which tenants' use is kept, by whole months; their jobs may be forgotten before."""
    agent_silent_s: Duration = 300.0
    """A job that its user started by hand has failed when no rank was heard for so many seconds."""
    agent_absent_s: Duration = 3600.0
    """A job that its user would start by hand has failed when it is not started in this time."""
    node_silent_s: Duration = 30.0
    """The jobs of a worker node that was not heard for so many seconds have failed."""
    idle_gpu_s: Annotated[float, msgspec.Meta(ge=0.0)] = 600.0
    """A GPU of a running job that has computed nothing for so many seconds, by its driver, is told;
    0: never."""
    rank_missing_s: Duration = 15.0
    """A rank that its node no longer runs has failed when no end of it is reported in this time."""
    facts_bytes: Annotated[int, msgspec.Meta(ge=64 * 1024, le=2**40)] = 64 * 1024**2
    """Bytes of facts that the bus keeps for `slackwater events`; the oldest go first."""
    facts_s: Duration = 604_800.0
    """How long they are kept."""
    facts_per_subject: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 256
    """Facts of one kind about one job, aggregator or other thing."""
    facts_replicas: Annotated[int, msgspec.Meta(ge=0, le=5)] = 0
    """Servers that keep the facts; 0: as many as keep records (`replicas`)."""


def gpu_rules(config: MasterConfig) -> Rules:
    """Return the operator's rules for GPUs."""
    quotas = {name: of.gpus for name, of in config.tenants.items() if of.gpus}
    return Rules(quotas=quotas, min_run_s=config.gpu_min_run_s)
