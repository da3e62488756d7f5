"""The controller of one aggregator cluster: where every bucket of every job of it lives.

Pure. A job's life: it is given to us (PlaceJob), gets as many temporary aggregators as it asked
servers for, is hosted there and located by its Agents, profiled, assigned to the shared aggregators
by the policy, migrated, watched, perhaps reverted, and released (AutoPS sections 3.2 and 3.3). Each
step follows from the job's stored record and from what is observed, and is simply tried again until
it is confirmed: a lost message costs time, a crash nothing.

    policies      which aggregator takes a bucket
    snapshot      the state as a policy sees it
    assignment    requests, plans, approvals
    hosting       regions made, found, dropped
    migrations    buckets moved to another aggregator
    reconcile     what aggregators hold, compared with the records
    feedback      reverts and recycling
    membership    aggregators, ours and others
    idle_jobs     jobs that keep aggregators and do not iterate
    interference  links that are congested
    drains        aggregators that are emptied
    evacuation    where jobs go that leave a link or an aggregator
    slot_plans    what aggregators' slots are told
    room          whether regions fit into memory
    index         which jobs have anything where
    waiting_jobs  jobs that wait for an aggregator
    host_load     other work on aggregators' machines
    usage         aggregators in use, over a period
    checkpoints   buckets copied at one version, and written
"""

from random import Random

from slackwater.common.base import limits
from slackwater.common.base.codec import encode_record
from slackwater.common.base.effects import (
    Answered,
    Draining,
    Effect,
    EffectKey,
    Observed,
    Recovered,
    RefusedSoFar,
    Reply,
    Requested,
    ShellEvent,
    StartTimer,
    TimerFired,
)
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.layout import plan_buckets
from slackwater.schemas.base import CONFLICT, AggregatorId, JobId, Message, Ok, Record, Refused
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
    BucketPlace,
    JobPlacement,
    JobPlan,
    LocateJob,
    PlaceJob,
    Profile,
    ReleaseJob,
    TensorCopyDone,
    WorkerDone,
)
from slackwater.schemas.telemetry import JobProfiled, WindowMeasured
from slackwater.schemas.tensors import first_difference
from slackwater.services.controller import (
    assignment,
    checkpoints,
    drains,
    feedback,
    hosting,
    idle_jobs,
    interference,
    membership,
    migrations,
    reconcile,
    room,
    scaling,
    slot_plans,
)
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.keys import (
    AdoptionAsked,
    AllocationAsked,
    CheckpointDue,
    CopyAsked,
    DropAsked,
    HeldAsked,
    HostAsked,
    JobKey,
    MigrateAsked,
    PoolAsked,
    ReturnAsked,
    SlotPlanAsked,
    TickDue,
    WriteAsked,
)
from slackwater.services.controller.state import Asked, Job, State

LAYOUT_EPOCH = 1


class Controller:
    def __init__(self, config: ControllerConfig, rng: Random) -> None:
        self.state = State(config, rng)

    def step(self, event: ShellEvent, now_s: float) -> list[Effect]:
        state = self.state
        state.out, state.moved = [], False
        state.usage.note(len(state.index.involved), now_s)
        match event:
            case Requested():
                self._requested(event.token, event.message, now_s)
            case Observed():
                self._observed(event.message, now_s)
            case RefusedSoFar(key=key, message=refused):
                self._note_refusal(key, refused)
            case Answered(key=key, message=message):
                self._note_refusal(key, message)
                asked = state.asked.pop(key, Asked(now_s))
                self._answered(key, asked, message, now_s)
                membership.sweep(state, now_s)
            case TimerFired(key=TickDue()):
                self._tick(now_s)
            case TimerFired(key=CheckpointDue(job=id)):
                if id in state.jobs:
                    checkpoints.pursue(state, state.jobs[id], now_s)
            case TimerFired():
                pass  # Jobs that wait in line go on.
            case Recovered():
                self.state.unreadable = event.damaged.get(state.bucket, frozenset())
                self._recover(event.epoch, event.records, now_s)
            case Draining():
                pass  # Another instance finds all of it in the records.
        if state.moved:
            drains.tick(state, now_s)
        if state.line.serving:
            assignment.serve(state, now_s)
        return state.out

    def _recover(self, epoch: int, records: dict[str, dict[str, Record]], now_s: float) -> None:
        state = self.state
        state.epoch = epoch
        for record in records.get(state.bucket, {}).values():
            assert isinstance(record, JobPlacement)
            job = Job(record, settled_s=now_s, synced_s=now_s)
            state.know(job)
            for aggregator in sorted(job.involved()):
                entry = state.aggregator(aggregator, now_s)
                # Ours, and by our own record; the master's list adds by which allocation.
                entry.ours, entry.ours_since_s, entry.changed_s = True, now_s, now_s
        for drain in records.get(state.drains_bucket, {}).values():
            assert isinstance(drain, AggregatorDrain)
            drains.recover(state, drain, now_s)
        membership.ask_pool(state, now_s)
        for job in sorted(state.jobs.values(), key=lambda job: job.record.submitted_s):
            assignment.resume_pending(state, job, now_s)
        state.out.append(StartTimer(TickDue(), now_s + state.config.tick_s))

    def _tick(self, now_s: float) -> None:
        state = self.state
        state.out.append(StartTimer(TickDue(), now_s + state.config.tick_s))
        membership.tick(state, now_s)
        if not state.pool_known or now_s - state.pool_asked_s >= state.config.resync_s:
            state.pool_asked_s = now_s
            membership.ask_pool(state, now_s)
        scaling.begin(state, now_s)
        interference.tick(state, now_s)
        drains.tick(state, now_s)
        checkpoints.tick(state, now_s)
        idle_jobs.tick(state, now_s)
        membership.lose_and_retry(state, now_s)
        feedback.recycle(state, now_s)
        membership.sweep(state, now_s)
        scaling.end(state)
        slot_plans.send_plans(state, now_s)
        membership.report(state, now_s)

    # Requests -------------------------------------------------------------------------------------

    def _requested(self, token: int, message: Message, now_s: float) -> None:
        state = self.state
        match message:
            case LocateJob():
                job = state.jobs.get(JobId(message.job))
                answer = hosting.locate(state, job, message, now_s)
                state.out.append(Reply(token, answer))
            case PlaceJob():
                self._place(token, message, now_s)
            case ReleaseJob():
                self._told_to_release(token, message, now_s)
            case CheckpointJob():
                job = state.jobs.get(JobId(message.job))
                state.out.append(Reply(token, checkpoints.order(state, job, message, now_s)))
            case MarkJob():
                job = state.jobs.get(JobId(message.job))
                state.out.append(Reply(token, checkpoints.mark(state, job, message, now_s)))
            case DrainAggregator():
                state.out.append(Reply(token, drains.order(state, message, now_s)))
            case RestoreAggregator():
                state.out.append(Reply(token, drains.restore(state, message, now_s)))
            case AggregatorLost():
                state.out.append(Reply(token, membership.lost(state, message, now_s)))
            case _:
                reason = f"{type(message).__name__} is not a controller's to answer"
                state.out.append(Reply(token, Refused(reason=reason)))

    def _place(self, token: int, message: PlaceJob, now_s: float) -> None:
        state, spec = self.state, message.spec
        if spec.id in state.unreadable:
            state.out.append(Reply(token, hosting.unreadable(state, spec.id)))
            return
        known = state.jobs.get(JobId(spec.id))
        if known is not None:
            if known.record.run < message.run:
                self._release(known, now_s)
            state.out.append(Reply(token, _again(known, message)))
            return
        if len(state.jobs) >= limits.JOBS_MAX:
            reason = f"cluster {state.cluster} has {limits.JOBS_MAX} jobs"
            state.out.append(Reply(token, Refused(reason=reason, retry_after_s=5.0)))
            return
        if spec.aggregation and (stranger := state.stranger(spec.aggregation)):
            reason = f"job {spec.id}: {stranger}; install it beside the controller or leave it out"
            state.out.append(Reply(token, Refused(reason=reason)))
            return
        record = self._record(message, now_s)
        too_large = _too_large(record)
        if too_large:
            state.out.append(Reply(token, Refused(reason=too_large)))
            return
        job = Job(record, settled_s=now_s)
        if too_much := room.impossible_reason(state, job, message.aggregators_max):
            state.out.append(Reply(token, Refused(reason=too_much)))
            return
        state.know(job)
        state.change(job)
        state.out.append(Reply(token, Ok()))
        assignment.request_assignment(state, job, "start", now_s)

    def _record(self, message: PlaceJob, now_s: float) -> JobPlacement:
        spec = message.spec
        synchronous = spec.consistency == "synchronous"
        divides = synchronous and spec.gradient_dtype != "int8"  # Blocks are of whole buckets.
        divide_bytes = self.state.config.divide_bytes if divides else 0
        plan = JobPlan(
            job=JobId(spec.id),
            workers=spec.virtual_ranks or max(spec.workers, spec.workers_bounds[1]),
            active=spec.workers if spec.elastic or spec.virtual_ranks else 0,
            virtual=spec.virtual_ranks > 0,
            gradient_dtype=spec.gradient_dtype,
            update=spec.update,
            consistency=spec.consistency,
            staleness=spec.staleness,
            noise=spec.noise,
            state_copies=spec.state_copies,
            layout_epoch=LAYOUT_EPOCH + message.run,
            token=f"{self.state.rng.getrandbits(128):032x}",
        )
        return JobPlacement(
            spec=spec,
            tensors=message.tensors,
            plan=plan,
            buckets=plan_buckets(message.tensors, divide_bytes=divide_bytes),
            submitted_s=now_s,
            loss_limit=message.loss_limit,
            run=message.run,
        )

    def _told_to_release(self, token: int, message: ReleaseJob, now_s: float) -> None:
        state, id = self.state, JobId(message.job)
        if id in state.unreadable:  # Its buckets are still there, and must go some day.
            state.out.append(Reply(token, hosting.unreadable(state, id)))
            return
        job = state.jobs.get(id)
        if job is not None and job.record.run <= message.run:
            self._release(job, now_s)
            membership.sweep(state, now_s)
        state.out.append(Reply(token, Ok()))  # Unknown: it was released before.

    def _release(self, job: Job, now_s: float) -> None:
        state = self.state
        if job.record.phase != "released":
            job.pending = None
            hosting.settle(state, job, now_s)
            state.change(job, phase="released")
        hosting.let_go(state, job, now_s)

    # Observations ---------------------------------------------------------------------------------

    def _observed(self, message: Message, now_s: float) -> None:
        state = self.state
        if isinstance(message, AggregatorHeartbeat):
            membership.heard(state, message, now_s)
            return
        if isinstance(message, AggregatorRestarts):
            membership.restarts(state, message, now_s)
            return
        if isinstance(message, AllocationEvent):
            if message.fact == "released":
                state.line.wake()
            return
        job = state.jobs.get(getattr(message, "job", JobId("")))
        if job is None or job.record.phase == "released":
            return  # Another cluster's.
        match message:
            case JobProfiled():
                feedback.profiled(state, job, message, now_s)
            case WindowMeasured():
                feedback.measured(state, job, message, now_s)
            case TensorCopyDone():
                migrations.copied(state, job, message, now_s)
            case WorkerDone():
                migrations.worker_done(state, job, message, now_s)
            case _:
                state.log("unexpected", "warning", type=type(message).__name__)
        if job.record.phase == "steady":
            membership.sweep(state, now_s)

    # Answers --------------------------------------------------------------------------------------

    def _note_refusal(self, key: EffectKey, answer: Message) -> None:
        """Note why a job waits, for `explain`; an answer ends it."""
        job = self.state.jobs.get(key.job) if isinstance(key, JobKey) else None
        if job is not None:
            job.refusals.pop(key, None)
            if isinstance(answer, Refused):
                job.refusals[key] = answer.reason

    def _answered(self, key: EffectKey, asked: Asked, answer: Message, now_s: float) -> None:
        state = self.state
        job = state.jobs.get(key.job) if isinstance(key, JobKey) else None
        match key:
            case PoolAsked():
                membership.listed(state, asked, answer, now_s)
            case AllocationAsked():
                assignment.allocated(state, job, answer, now_s)
            case ReturnAsked(aggregator=aggregator):
                membership.deallocated(state, aggregator, answer)
            case AdoptionAsked(aggregator=aggregator):
                membership.adopted(state, aggregator, answer)
            case SlotPlanAsked(aggregator=aggregator):
                slot_plans.confirm_plan(state, aggregator, asked, answer)
            case HeldAsked(aggregator=aggregator):
                reconcile.compare(state, aggregator, asked, answer, now_s)
            case HostAsked(aggregator=aggregator) if job is not None:
                hosting.hosted(state, job, aggregator, asked, answer, now_s)
                migrations.pursue(state, job, now_s)
            case MigrateAsked(source=source, target=target) if job is not None:
                migrations.initiated(state, job, (source, target), answer, now_s)
            case CopyAsked(aggregator=aggregator) if job is not None:
                checkpoints.copied(state, job, aggregator, answer, now_s)
            case WriteAsked(aggregator=aggregator) if job is not None:
                checkpoints.wrote(state, job, aggregator, answer, now_s)
            case DropAsked(aggregator=aggregator) if job is not None:
                if not isinstance(answer, Refused):
                    job.dropped.add(aggregator)
                    if job.record.phase == "released":
                        hosting.let_go(state, job, now_s)
            case _:
                pass  # The job has ended, or a stray bucket was dropped.


def _again(known: Job, message: PlaceJob) -> Message:
    """Answer a repeated command: the first one stands, if it says the same."""
    spec = message.spec
    if known.record.phase == "released":
        return Refused(reason=f"job {spec.id} is ending", retry_after_s=0.5)
    if message.run < known.record.run:
        return Refused(reason=f"job {spec.id}: this is run {known.record.run}, a later one")
    difference = first_difference(known.record.tensors, message.tensors)
    if difference:
        return Refused(reason=f"job {spec.id}: {difference}", code=CONFLICT)
    if known.record.spec != spec:
        return Refused(
            reason=f"job {spec.id} is placed with another spec; choose another id", code=CONFLICT
        )
    return Ok()


def _too_large(record: JobPlacement) -> str:
    """Refuse now what could not be stored later, at its fullest: moving, profiled."""
    place = BucketPlace(aggregator=AggregatorId("a" * 24), location_epoch=1 << 31)
    places = (place,) * len(record.buckets)
    costs = tuple(0.1 for _ in record.buckets)
    fullest = JobPlacement(
        spec=record.spec,
        tensors=record.tensors,
        plan=record.plan,
        buckets=record.buckets,
        places=places,
        target=places,
        profile=Profile(iteration_s=0.1, task_cpu_s=costs),
    )
    try:
        encode_record(fullest, 1)
    except Rejected as error:
        return (
            f"job {record.spec.id}: {len(record.tensors)} tensors in {len(record.buckets)} "
            f"buckets: {error}; join small tensors"
        )
    return ""
