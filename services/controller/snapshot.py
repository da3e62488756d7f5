"""The frozen snapshot of the cluster that a placement policy decides from."""

from slackwater.schemas.base import AGGREGATORS_MAX, AggregatorId
from slackwater.schemas.placement import JobPlacement
from slackwater.services.controller.policies.demand import positions
from slackwater.services.controller.policies.view import AggregatorView, ClusterView, JobView
from slackwater.services.controller.state import Aggregator, Job, State


def shared(state: State, policy: str = "") -> list[Aggregator]:
    """The aggregators that the jobs of `policy` (empty: the cluster's) share: ours, alive, no job's
    temporary ones, none of another policy."""
    entries = (state.aggregators[id] for id in state.index.shared(policy or state.config.policy))
    return [entry for entry in entries if entry.ours and entry.alive]


def cluster_view(
    state: State,
    job: Job | None,
    *,
    new_max: int = AGGREGATORS_MAX,
    without: frozenset[AggregatorId] = frozenset(),
    forced: bool = False,
    others: tuple[JobView, ...] | None = None,
    policy: str = "",
) -> ClusterView:
    """The cluster as `job`'s placement is decided in; without one, as jobs of `policy` (empty: the
    cluster's) share it. `others` stand in for the jobs as they are (while several are being
    reassigned). A protected job sees nobody, and nobody sees it."""
    policy = state.policy_name(job) if job is not None else policy or state.config.policy
    crowded, reduced = state.index.crowded, state.config.usable_reduced
    alone = job is not None and bool(job.record.protected) and not forced
    aggregators = tuple(
        AggregatorView(
            entry.id,
            entry.cpu_share,
            state.hosts.usable(entry.heartbeat) * (reduced if entry.id in crowded else 1.0),
        )
        for entry in shared(state, policy)
        if entry.id not in without and (job is None or forced or not entry.avoided) and not alone
    )
    if others is None:
        settled = (state.jobs[id] for id in ([] if alone else state.index.settled(policy)))
        others = tuple(_settled_view(state, other) for other in settled if other is not job)
    shares = [entry.cpu_share for entry in state.aggregators.values() if entry.cpu_share > 0]
    return ClusterView(
        aggregators=aggregators,
        jobs=others,
        new_share=min(shares, default=1.0),
        new_max=new_max,
        loss_limit=state.config.loss_limit,
        forced=forced,
        pack_alone=state.config.pack_alone,
    )


def _settled_view(state: State, job: Job) -> JobView:
    """`job_view` with nothing open: the same until the record changes, and every decision in the
    cluster asks for it."""
    if job.settled_view is None or job.settled_view[0] is not job.record:
        job.settled_view = (job.record, job_view(state, job))
    return job.settled_view[1]


def job_view(
    state: State,
    job: Job,
    open_buckets: frozenset[int] = frozenset(),
    lost: frozenset[int] = frozenset(),
    standalone: bool = False,
) -> JobView:
    """The job, its `open_buckets` to be decided; `lost` ones of these live nowhere any more."""
    record = job.record
    homes = [place.aggregator for place in record.target or record.places]
    known = bool(homes)
    return JobView(
        id=job.id,
        servers=record.spec.servers,
        iteration_s=record.profile.iteration_s if record.profile else 0.0,
        task_cpu_s=_cpu_s(record),
        places=tuple(
            None if not known or bucket in open_buckets else homes[bucket]
            for bucket in range(len(record.buckets))
        ),
        current=tuple(None if bucket in lost else home for bucket, home in enumerate(homes)),
        excluded=frozenset(record.excluded),
        standalone=standalone,
        positions=positions_of(record),
        loss_limit=record.loss_limit,
    )


def positions_of(record: JobPlacement) -> tuple[float, ...]:
    """Return for every bucket which part of the forward pass comes before it is pulled."""
    if record.profile is not None and record.profile.positions:
        return record.profile.positions
    return positions([layout.first for layout in record.buckets], len(record.tensors))


def _cpu_s(record: JobPlacement) -> tuple[float, ...]:
    """Return the CPU time of each task in an iteration: where updates are not synchronous each
    worker's push is an execution."""
    if record.profile is None:
        return ()
    if record.spec.consistency == "synchronous":
        return record.profile.task_cpu_s
    return tuple(cpu_s * record.spec.workers for cpu_s in record.profile.task_cpu_s)


def free_parts(state: State) -> dict[AggregatorId, float]:
    """Return the part that their policy finds free of every aggregator that the cluster's jobs
    share."""
    return state.policy_named(state.config.policy).free(cluster_view(state, None))
