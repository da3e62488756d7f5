"""Play the jobs that a cluster has now under another GPU policy.

Pure. The snapshot is built by the master's own module, so that the simulator begins with the view
that the cluster's policy has. Instants are seconds from now on; jobs that are submitted later are
not foreseen.
"""

from collections.abc import Iterable, Mapping
from math import inf
from statistics import median
from typing import Final

import msgspec
from msgspec.structs import replace

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.estimates import Estimates
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.loadgen.simulator.gpu.outcome import Begun, Costs, Settings
from slackwater.loadgen.simulator.gpu.workload import Oracle, Submission
from slackwater.schemas.base import JobId
from slackwater.schemas.cluster import NodeInfo
from slackwater.schemas.gpus import NodeAllocation
from slackwater.schemas.job_states import TERMINAL_STATES, JobState
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.progress import JobProgress
from slackwater.schemas.scheduling import PolicyInfo
from slackwater.services.master.nodes import Nodes
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.view import JobView, NodeView, Rules, View
from slackwater.services.master.snapshot import Snapshot, shown_allocation

_HEARD_S: Final = 1.0
ASSUME_S: Final = 3600.0
"""Seconds of work that a job has left of which nothing is known at all."""


class LiveJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job with GPUs that has not ended."""

    id: JobId
    state: JobState
    allocation: NodeAllocation
    """GPUs that it holds now, or is about to hold."""
    remaining_s: float
    """Seconds that it still needs on the GPUs that it asks for, at the reference speed."""
    assumed: bool
    """Set where its agents do not report `remaining_s`."""


class Situation(msgspec.Struct, frozen=True):
    """The cluster as it is now, in the simulator's terms."""

    nodes: tuple[tuple[int, str], ...]
    """(GPUs, type) of each node."""
    hosts: tuple[tuple[float, float], ...]
    """(cores, bytes of memory) for jobs of each node."""
    racks: tuple[str, ...]
    """The rack of each node; empty: not known."""
    jobs: tuple[Submission, ...]
    """In the order of their submission; submitted at 0 or before."""
    begun: Mapping[str, JobView]
    live: Mapping[str, LiveJob]
    left_out: Mapping[str, str]
    """Job -> why it is not played."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """When each job that has not ended will end, in seconds from now; empty: none can be played."""

    ends_s: Mapping[str, float] = msgspec.field(default_factory=dict)
    assumed: frozenset[str] = frozenset()
    """Jobs that tell nothing of the work that they have left."""
    compared: int = 0
    """Jobs that ended: the work of the middling one is taken for that of the assumed. 0: none did,
    and the work of the assumed is made up."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """A job's end under both policies, in seconds from now."""

    job: LiveJob
    ends_s: float
    """Under the policy that the cluster has."""
    would_end_s: float
    """Under the other one."""

    @property
    def difference_s(self) -> float:
        """Seconds that it would end later; below 0: earlier."""
        return self.would_end_s - self.ends_s


def situation(
    records: Iterable[JobRecord],
    progress: Mapping[JobId, JobProgress],
    nodes: Iterable[NodeInfo],
    now_s: float,
    assume_s: float,
) -> Situation:
    """Build the simulator's cluster and jobs. `assume_s`: `remaining_s` of jobs that do not tell.

    Raises Rejected where no job with GPUs is there to be played.
    """
    heard = Nodes(_HEARD_S)
    for info in nodes:
        heard.heard(info.heartbeat, now_s if info.alive else -inf)
    known = list(records)
    active = sorted(
        (each for each in known if each.spec.gpus and each.state not in TERMINAL_STATES),
        key=lambda each: (each.submitted_s, each.spec.id),
    )
    snapshot, left_out = Snapshot(), {each.spec.id: _HELD for each in active if each.held}
    for record in active:
        if not record.held:
            snapshot.show(record)
    view = snapshot.view(heard.gpus(now_s), now_s)
    estimates = Estimates(known, progress, now_s)
    jobs: list[Submission] = []
    begun: dict[str, JobView] = {}
    live: dict[str, LiveJob] = {}
    for record in active:
        id = JobId(record.spec.id)
        if id in left_out:
            continue
        seen = view.jobs.get(id)
        if seen is None:
            left_out[id] = _KEPT if record.spec.program else _BY_HAND
        elif room := _lacks_room(seen, view.cluster.nodes):
            left_out[id] = room
        else:
            left_s = _remaining_s(seen, view.cluster.nodes, progress.get(id), now_s)
            if left_s is None:
                left_s = estimates.remaining_s(record)
            live[id] = LiveJob(
                id=id,
                state=record.state,
                allocation=shown_allocation(record),
                remaining_s=assume_s if left_s is None else left_s,
                assumed=left_s is None,
            )
            jobs.append(
                Submission(
                    spec=record.spec, oracle=Oracle(duration_s=live[id].remaining_s),
                    number=len(jobs), submit_s=min(0.0, record.submitted_s - now_s),
                )
            )  # fmt: skip
            begun[id] = _from_now(seen, now_s)
    if not jobs:
        raise Rejected(_nothing(left_out))
    sizes = tuple((node.gpus, node.gpu_type) for node in view.cluster.nodes)
    hosts = tuple((node.cores, node.memory_bytes) for node in view.cluster.nodes)
    return Situation(sizes, hosts, _racks(view), tuple(jobs), begun, live, left_out)


def play(
    now: Situation, policy: str, settings: Mapping[str, str], rules: Rules, restart_s: float = 0
) -> dict[str, float]:
    """Return each job's end under the policy, in seconds from now; inf: it never starts it.
    `restart_s`: seconds without progress at every start and every change of a job's GPUs; policies
    that weigh it know it.

    Raises ConfigRejected for a rule, or something that a job asks for, which the policy ignores.
    """
    world = Settings(
        rules=replace(rules, restart_s=restart_s),
        costs=Costs(start_s=restart_s, restart_s=restart_s),
        may_wait_for_ever=True,
    )
    engine = Engine(
        now.jobs, Cluster(now.nodes, hosts=now.hosts, racks=now.racks),
        make(policy, settings), FixedModel(whole_seconds=False), world,
        record=False, begun=Begun(0, now.begun),
    )  # fmt: skip
    return {each.job.spec.id: each.end_s for each in engine.run().outcomes}


def measured_restarts(records: Iterable[JobRecord]) -> tuple[float, int]:
    """Return the median of what re-allocations cost jobs, in seconds, and of how many jobs it is
    the median; 0: nothing was measured."""
    found = [each.reallocation_s for each in records if each.reallocation_s]
    return (median(found), len(found)) if found else (0.0, 0)


def forecast(
    records: Iterable[JobRecord],
    progress: Mapping[JobId, JobProgress],
    nodes: Iterable[NodeInfo],
    now_s: float,
    policy: PolicyInfo,
    restart_s: float = 0.0,
) -> Forecast:
    """Foretell the ends of all jobs under the policy that the cluster has, without jobs that it
    never starts.

    Raises ConfigRejected for a policy that only a simulator can play.
    """
    known = list(records)
    ran = [each.run_s for each in known if each.state == "completed" and each.run_s]
    try:
        now = situation(known, progress, nodes, now_s, median(ran) if ran else ASSUME_S)
    except Rejected:
        return Forecast()
    rules = Rules(quotas=policy.quotas, min_run_s=policy.min_run_s)
    ends_s = play(now, policy.policy, policy.settings, rules, restart_s)
    return Forecast(
        ends_s={id: end_s for id, end_s in ends_s.items() if end_s < inf},
        assumed=frozenset(id for id, job in now.live.items() if job.assumed),
        compared=len(ran),
    )


def compared(
    now: Situation, ends_s: Mapping[str, float], would_end_s: Mapping[str, float]
) -> tuple[tuple[Ending, ...], dict[str, str]]:
    """Return the ends of the jobs that both policies start, and why each other one is left out.

    Raises Rejected where none is left.
    """
    endings, left_out = [], dict(now.left_out)
    for id, job in now.live.items():
        if inf in (ends_s[id], would_end_s[id]):
            which = "neither policy" if ends_s[id] == would_end_s[id] else "only one policy"
            left_out[id] = f"{which} ever starts it on these nodes, with these quotas"
        else:
            endings.append(Ending(job=job, ends_s=ends_s[id], would_end_s=would_end_s[id]))
    if not endings:
        raise Rejected(_nothing(left_out))
    return tuple(endings), left_out


_HELD: Final = "somebody paused it"
_KEPT: Final = "it may not be paused, and its GPUs are taken off the cluster"
_BY_HAND: Final = "its user starts it by hand"


def _nothing(left_out: Mapping[str, str]) -> str:
    if not left_out:
        return "no job with GPUs runs or waits: submit some with `slackwater submit --gpus`"
    id, why = next(iter(left_out.items()))
    return f"none of the {len(left_out)} jobs with GPUs can be played; job {id}: {why}"


def _racks(view: View) -> tuple[str, ...]:
    return tuple(node.rack for node in view.cluster.nodes)


def _lacks_room(job: JobView, nodes: Iterable[NodeView]) -> str:
    """Say why no policy could ever start it; empty: one could."""
    together: dict[tuple[str, str], int] = {}
    for number, node in enumerate(nodes):
        if not job.speeds or node.gpu_type in job.speeds:
            places = {"": "", "node": str(number), "rack": node.rack}
            key = node.gpu_type, places[job.within]
            together[key] = together.get(key, 0) + node.gpus
    room = max(together.values(), default=0)
    if job.gpus_min <= room:
        return ""
    where = f" in one {job.within}" if job.within else ""
    return (
        f"it asks for {job.gpus_min} GPUs of one type{where}, and there are {room} that it can use"
    )


def _remaining_s(
    job: JobView, nodes: tuple[NodeView, ...], told: JobProgress | None, now_s: float
) -> float | None:
    """Convert what is left at its present speed to the GPUs that it asks for; None: not known."""
    if told is None or told.eta_s is None or not job.allocation:
        return None
    speed = job.speeds.get(nodes[job.allocation[0][0]].gpu_type, 1.0)
    since_s = now_s - told.updated_s if told.updated_s else 0.0
    left_s = max(0.0, float(told.eta_s) - max(0.0, since_s))
    return left_s * speed * job.held_gpus / job.gpus


def _from_now(job: JobView, now_s: float) -> JobView:
    """Count its instants in seconds from now, which are 0 or before."""
    return replace(
        job,
        since_s=min(0.0, job.since_s - now_s),
        first_start_s=min(0.0, job.first_start_s - now_s) if job.first_start_s < inf else inf,
    )
