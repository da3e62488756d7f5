"""A job on its way to a cluster of aggregators: admitted, registered, sent to a controller.

A job is stored before it is acknowledged. Its first registration chooses its cluster (AutoPS
section 3.3.3, step one; see clusters.py), whose controller does the rest.
"""

import msgspec

from slackwater.common.base.effects import Log
from slackwater.common.base.errors import Rejected
from slackwater.schemas import subjects
from slackwater.schemas.base import CONFLICT, NOT_FOUND, RUNS_MAX, ClusterId, JobId, Refused
from slackwater.schemas.job_checks import holds_nul
from slackwater.schemas.job_requests import JobRegistered, RegisterJob
from slackwater.schemas.job_states import STATE_SAID
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.placement import PlaceJob
from slackwater.schemas.tensors import largest_share
from slackwater.services.master import following
from slackwater.services.master.admission import Hold, aggregates, beyond_quota, limits_of
from slackwater.services.master.explain import NO_CONTROLLER
from slackwater.services.master.gangs import processes
from slackwater.services.master.jobs import Job, unfit, unknown
from slackwater.services.master.keys import Order
from slackwater.services.master.lifecycle import answer_waiting
from slackwater.services.master.rerun import begin_again, ending, forgetting
from slackwater.services.master.state import (
    JOBS_BUCKET,
    RETRY_S,
    State,
    cluster_rooms,
    demands,
    held_back,
    tenant_aggregators,
)
from slackwater.services.master.traffic import registered


def admit(state: State, spec: JobSpec, now_s: float) -> Refused | None:
    id = JobId(spec.id)
    known = state.jobs.get(id)
    if known is not None and not known.record.deleted:
        if known.record.spec == spec:
            return None  # A retry: the first answer stands.
        return Refused(reason=_another_spec(known), code=CONFLICT)
    if known is None and state.ended.known(spec) is not None:
        return None  # The same, of a job that ended.
    if taken := state.ended.taken(id):
        return Refused(reason=taken, code=CONFLICT)
    if id in state.unreadable:
        return Refused(
            reason=f"the record of job {id} is damaged; restore key {id} of bucket {JOBS_BUCKET}, "
            "or delete it and start the master again; or choose another id",
            code=CONFLICT,
        )
    if odd := holds_nul(spec.program, spec.folder, spec.env):
        return Refused(reason=f"job {id}: {odd}")
    refused = (
        state.no_room(spec)
        or _ignored(state, spec)
        or following.refusal(state, spec)
        or (ending(state, known) if known is not None else forgetting(state, id))
    )
    if refused is not None:
        return refused
    if known is not None:  # It was deleted.
        again = begin_again(state, known, spec, now_s)
        if waits_for := following.first(state, spec):
            state.change(again, now_s, waits_for=waits_for)
        return None
    waits_for = following.first(state, spec)
    job = Job(JobRecord(spec=spec, submitted_s=now_s, waits_for=waits_for), heard_s=now_s)
    state.know(job)
    state.change(job, now_s, "pending")
    return None


def _ignored(state: State, spec: JobSpec) -> Refused | None:
    """Refuse a job with GPUs that asks for what their policy does not know."""
    if not spec.gpus:
        return None
    try:
        state.gpus.scheduler.admit(state.gpus.snapshot.preview(JobRecord(spec=spec)))
    except Rejected as error:
        return Refused(reason=f"job {spec.id}: {error}")
    return None


def _another_spec(known: Job) -> str:
    remedy = "choose another id"
    if known.ended:
        remedy += f", or `slackwater rerun {known.id}` runs it again as it was, or "
        remedy += f"`slackwater delete {known.id}` makes the id free"
    return f"job {known.id} exists with another spec and {STATE_SAID[known.record.state]}; {remedy}"


def register(state: State, token: int, message: RegisterJob, now_s: float) -> None:
    id = JobId(message.job)
    if state.shown_job(id) is None and message.spec is not None:
        refusal = _too_slow(state, message.spec) or _admit_by_hand(state, message.spec, id, now_s)
        if refusal is not None:
            state.reply(token, refusal)
            return
    job = state.shown_job(id)
    refusal = unfit(job, message)
    if job is not None and refusal is None and job.record.cluster is None:
        refusal = _too_slow(state, job.record.spec)
    if job is not None and job.record.sums and job.record.placement >= RUNS_MAX:
        refusal = Refused(reason=f"job {id} began {RUNS_MAX} attempts; submit it under another id")
    if job is None or refusal is not None:
        reason = state.ended.taken(id) or unknown(id)
        state.reply(token, refusal or Refused(reason=reason, code=NOT_FOUND))
        return
    job.heard_s = now_s
    if job.record.state == "pending" and job.by_hand:
        state.change(job, now_s, "running", state="running", started_s=now_s, since_s=now_s)
    if not job.tensors:
        job.tensors, job.update, job.noise = message.tensors, message.update, message.noise
        job.virtual_ranks = message.virtual_ranks
        job.gradient_dtype = message.gradient_dtype or "float32"
        _learn(state, job, now_s)
    if job.placed:
        state.reply(token, _registered(job))
        return
    job.waiting[token] = message.rank
    _place(state, job, now_s)


def _learn(state: State, job: Job, now_s: float) -> None:
    """Note what the first registration of an attempt says of the job."""
    record = job.record
    skew, known = record.skew, record.traffic
    if record.spec.gpus:
        skew, known = largest_share(job.tensors), registered(job.tensors)
    sums = job.spec.update.name == "sum"
    if (skew, sums, known) != (record.skew, record.sums, record.traffic):
        state.change(job, now_s, skew=skew, sums=sums, traffic=known)


def placed(state: State, job: Job, what: Order, refused: Refused | None) -> None:
    """The controller's answer."""
    if what != _place_order(job):
        return  # It is of an attempt before.
    job.placed = refused is None and not job.ended
    if refused is not None:
        job.tensors = ()  # The next rank's list may be the one that the controller has.
    if job.waiting:
        answer_waiting(state, job, refused or _registered(job))


def _too_slow(state: State, spec: JobSpec) -> Refused | None:
    """Refuse a program that really trains on an emulated pool, where it would crawl without an
    apparent reason."""
    share = state.pool.smallest_share()
    if share >= 1.0 or spec.fractional_share:
        return None
    return Refused(
        reason=f"job {spec.id}: the aggregators of this cluster have {share:g} of a core each, as "
        f"those of an emulated pool, so that an update takes {1.0 / share:.1f} times as long as on "
        "a whole core; start the cluster with whole cores (`slackwater up` without --cpu-share), "
        "or ask for it: `slackwater submit --allow-fractional-share`, or, where you start the "
        "program yourself, Agent(fractional_share=True)"
    )


def _admit_by_hand(state: State, spec: JobSpec, id: JobId, now_s: float) -> Refused | None:
    if spec.id != id:
        return Refused(reason=f"job {id}: its spec says {spec.id}; use one id")
    return admit(state, spec, now_s)


def _registered(job: Job) -> JobRegistered:
    assert job.record.cluster is not None
    return JobRegistered(
        job=job.record.spec.id, cluster=job.record.cluster, workers=job.record.spec.workers
    )


def _place(state: State, job: Job, now_s: float) -> None:
    """Step one of the placement, then the order to the chosen cluster's controller."""
    if _place_order(job) in job.asked:
        return
    if job.record.cluster is None:
        if (job.by_hand or not aggregates(job.record.spec)) and _held_back(state, job, now_s):
            return
        cluster = _choose_cluster(state, job, now_s)
        if cluster is None:
            reason = f"job {job.id} {NO_CONTROLLER}"
            answer_waiting(state, job, Refused(reason=reason, retry_after_s=RETRY_S))
            return
        state.change(job, now_s, "placed", cluster=cluster)
    assert job.record.cluster is not None
    subject = subjects.command("controller", job.record.cluster, "place")
    tenant = limits_of(state.config.tenants, job.record.spec.tenant)
    message = PlaceJob(
        spec=_as_it_runs(job) if job.record.sums else job.spec,
        tensors=job.tensors,
        loss_limit=job.spec.loss_limit or tenant.loss_limit,
        aggregators_max=state.config.aggregators_max,
        run=job.record.placement,
    )
    state.ask(job, _place_order(job), subject, message)


def _place_order(job: Job) -> Order:
    record = job.record
    anew = record.sums or record.spec.recover == "rollback"
    return Order("place", f"-{record.placement}" if anew else "")


def _as_it_runs(job: Job) -> JobSpec:
    """Return the specification with the workers of this attempt, who do not change in it."""
    workers, spec = processes(job.record), job.spec
    gpus = workers * spec.gpus_each
    return msgspec.structs.replace(
        spec, workers=workers, workers_min=0, workers_max=0, gpus=gpus, gpus_min=0, gpus_max=0
    )


def _held_back(state: State, job: Job, now_s: float) -> bool:
    """A job that a worker node starts was held back before its start. This one's Agents are told to
    come again."""
    why = held_back(state, job, now_s) if job.by_hand else _beyond_quota(state, job)
    known = state.held.pop(job.id, None)
    if why is None:
        return False
    state.held[job.id] = why
    if known is None:
        state.tell(job, "waiting", now_s, why.reason)
    reason = f"job {job.id} {why.reason}"
    answer_waiting(state, job, Refused(reason=reason, retry_after_s=RETRY_S))
    return True


def _beyond_quota(state: State, job: Job) -> Hold | None:
    """Say why a job that runs on GPUs, and had not said that it aggregates, may not now."""
    spec = job.record.spec
    taken = tenant_aggregators(state, spec.tenant, job.id)
    return beyond_quota(spec, taken, limits_of(state.config.tenants, spec.tenant))


def _choose_cluster(state: State, job: Job, now_s: float) -> ClusterId | None:
    clusters, pool = state.clusters, state.pool
    share, lendable = pool.share(), {c: pool.unallocated(c) for c in clusters.known}
    placed = demands(state)
    rooms = cluster_rooms(state, placed, now_s)
    # Where the job's profiling would wait for temporaries is worse than any other fit.
    ready = [room for room in rooms if lendable[room.id] >= job.record.spec.servers]
    demand_cpu = clusters.demand_cpu(job.record.spec, share)
    before = sorted(clusters.open)
    clusters.scale(placed, state.config.aggregators_max * share, now_s)
    chosen = clusters.choose(ready or rooms, demand_cpu)
    if state.config.cluster_scaling_s and (after := sorted(clusters.open)) != before:
        fields = {"open": after, "of": len(clusters.known), "demand_cpu": round(demand_cpu, 4)}
        state.out.append(Log("clusters.scaled", fields))
    return chosen
