"""The master's core: which jobs are admitted, where they run, which cluster aggregates for them.

Pure. Whatever must be told to a controller or a worker node (place, start, stop, release) follows
from the job's record, so that a master that was killed at any instant tells it again, and every
receiver takes a repeated command for the one it has carried out.

    admission           which jobs may run: room, tenants' parts
    snapshot            what a policy sees              scheduling     policies, and their check
    dispatch            who starts, and who stops       lifecycle      what is ordered, and ended
    gpu_policy          which policy, and its facts     schedule       a policy and its resource
    gangs               ranks, their nodes and GPUs     nodes          worker nodes
    cluster_assignment  admitted, sent to a cluster     clusters       which one, and how many
    pool                aggregators, allocations        progress       how far jobs are
    state               what is known                   explain        why a job waits
    rank_restarts       ranks that died                 missing_ranks  ranks that others wait for
    rerun               run again, deleted         goodput        what jobs' agents report
    gang_starts         gangs kept from starting   hangs          ranks that hold others up
    usage               what tenants used          usage_listing  the same for people
    scaling             another number of workers  autoscaling    orders to the hook
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.effects import (
    Answered,
    Draining,
    Effect,
    Log,
    Observed,
    Recovered,
    RefusedSoFar,
    Requested,
    ShellEvent,
    StartTimer,
    TimerFired,
)
from slackwater.schemas.base import (
    NOT_FOUND,
    RUN_ATTEMPTS,
    JobId,
    Message,
    Ok,
    Record,
    Refused,
)
from slackwater.schemas.cluster import (
    AdoptAggregators,
    AggregatorHeartbeat,
    AggregatorRecord,
    AllocateAggregators,
    ClusterReport,
    DeallocateAggregators,
    ListAggregators,
    ListNodes,
    NodeList,
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
    JobAccepted,
    JobList,
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
from slackwater.schemas.jobs import JobRecord, upgraded
from slackwater.schemas.scheduling import GetPolicy, PolicyRecord, SetPolicy
from slackwater.schemas.telemetry import GoodputReport, IterationsObserved, JobProfiled
from slackwater.schemas.tenants import ListTenants, TenantList
from slackwater.schemas.traffic import TrafficObserved
from slackwater.schemas.usage import GetUsage
from slackwater.schemas.workers import WorkerExited
from slackwater.services.master import (
    autoscaling,
    cluster_assignment,
    cluster_reports,
    dispatch,
    following,
    gang_starts,
    goodput,
    gpu_policy,
    hangs,
    idle_gpus,
    lifecycle,
    marks,
    missing_ranks,
    node_list,
    orphans,
    own_size,
    pausing,
    rank_restarts,
    regrouping,
    rerun,
    scaling,
    silence,
    step_times,
    traffic,
    usage_listing,
)
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.ended import ENDED_BUCKET
from slackwater.services.master.explain import brief, fitting, info, shown
from slackwater.services.master.gangs import joins, processes
from slackwater.services.master.gpu_machines import GpuMachines, vacate
from slackwater.services.master.jobs import (
    Job,
    active_first,
    as_of,
    dead,
    late,
    newest_first,
    restartable,
    silent_node,
    unknown,
)
from slackwater.services.master.keys import (
    DecisionDue,
    HeldKey,
    JobForgotten,
    LineKey,
    LookKey,
    Order,
    OrderKey,
    RankDue,
    TickDue,
    UsageStored,
)
from slackwater.services.master.pool import BUCKET as NODES_BUCKET
from slackwater.services.master.snapshot import Durations
from slackwater.services.master.spare_aggregators import SpareAggregators
from slackwater.services.master.state import JOBS_BUCKET, State, tenants
from slackwater.services.master.tenancy import held_to
from slackwater.services.master.usage import USAGE_BUCKET


class Master:
    def __init__(self, config: MasterConfig, durations: Durations | None = None) -> None:
        """`durations`: seconds that jobs run, where a simulation knows them."""
        chosen = gpu_policy.scheduler(
            config, config.gpu_policy, config.gpu_policy_settings, durations is not None
        )
        self.state = State(config, chosen, durations)
        self.scalings = [autoscaling.Scaling(kind()) for kind in (GpuMachines, SpareAggregators)]
        autoscaling.check(config, self.scalings)
        pool = self.state.pool
        self._handlers: dict[type[Message], Callable[[int, Any, float], None]] = {
            SubmitJob: self._submit,
            CancelJob: self._cancel,
            RerunJob: self._answer(rerun.rerun),
            DeleteJob: self._answer(rerun.delete),
            PauseJob: self._answer(pausing.pause),
            ResumeJob: self._answer(pausing.resume),
            ScaleJob: self._answer(scaling.scale),
            AskSize: self._answer(scaling.size),
            JoinJob: self._answer(scaling.joined),
            Meet: self._answer(scaling.meet),
            KeepMark: self._answer(marks.keep),
            UseHosts: self._answer(own_size.use),
            GetJob: self._get,
            ListJobs: self._list,
            RegisterJob: self._register,
            FinishJob: self._finish,
            WorkerExited: self._worker_exited,
            AskMissing: self._missing,
            ListTenants: self._tenants,
            GetUsage: self._usage,
            GetPolicy: self._policy,
            SetPolicy: self._set_policy,
            ListNodes: self._nodes,
            ListAggregators: self._aggregators,
            AllocateAggregators: self._approve(pool.allocate),
            DeallocateAggregators: self._approve(pool.deallocate),
            AdoptAggregators: self._approve(pool.adopt),
        }

    def step(self, event: ShellEvent | autoscaling.HookEnded, now_s: float) -> list[Effect]:
        self.state.out = []
        self.state.now_s = now_s
        match event:
            case Requested():
                self._requested(event, now_s)
            case Observed():
                self._observe(event, now_s)
            case Answered(key=key, message=message):
                self._answered(key, message, now_s)
            case RefusedSoFar(key=key, message=refused):
                self._answered(key, refused, now_s, final=False)
            case TimerFired(key=DecisionDue(schedule=schedule)):
                dispatch.wake(self.state, schedule)
            case TimerFired(key=RankDue() as due):
                rank_restarts.on_delay_over(self.state, due)
            case TimerFired(key=UsageStored(job=id)):
                lifecycle.forget(self.state, id)
            case TimerFired(key=JobForgotten(job=id)):
                lifecycle.forgotten(self.state, id)
            case TimerFired():
                self._tick(now_s)
            case Recovered():
                self.state.unreadable = event.damaged.get(JOBS_BUCKET, frozenset())
                self.state.usage.unreadable = event.damaged.get(USAGE_BUCKET, frozenset())
                self.state.pool.unreadable = event.damaged.get(NODES_BUCKET, frozenset())
                self._recover(event.epoch, event.records, now_s)
            case autoscaling.HookEnded():
                autoscaling.ended(self.state, self.scalings, event, now_s)
            case Draining():
                pass  # The shell refuses what is new; what is begun needs nothing from here.
        if dispatch.dispatch(self.state, now_s):
            gpu_policy.remember(self.state)
        return self.state.out

    def _requested(self, event: Requested, now_s: float) -> None:
        message = event.message
        if event.tenant:
            message = held_to(self.state, event.tenant, message)
        if isinstance(message, Refused):
            self.state.reply(event.token, message)
        else:
            self._handlers[type(message)](event.token, message, now_s)

    def _answer(self, decide: Callable[..., Message]) -> Any:
        def handle(token: int, message: Message, now_s: float) -> None:
            self.state.reply(token, decide(self.state, message, now_s))

        return handle

    def _approve(self, decide: Callable[..., tuple[list[Effect], Message]]) -> Any:
        def handle(token: int, message: Message, now_s: float) -> None:
            effects, answer = decide(message, now_s)
            self.state.out += effects
            self.state.reply(token, answer)

        return handle

    def _recover(self, epoch: int, records: dict[str, dict[str, Record]], now_s: float) -> None:
        state = self.state
        state.epoch = epoch
        state.begun_s = state.clusters.since_s = state.nodes.since_s = now_s
        nodes = records.get(NODES_BUCKET, {})
        state.pool.recover(
            {key: r for key, r in nodes.items() if isinstance(r, AggregatorRecord)}, epoch
        )
        found = [r for r in records.get(JOBS_BUCKET, {}).values() if isinstance(r, JobRecord)]
        state.usage.recover(records.get(USAGE_BUCKET, {}))
        state.ended.recover(records.get(ENDED_BUCKET, {}))
        for record in sorted(found, key=lambda r: (r.submitted_s, r.spec.id)):
            if state.usage.has(record):  # Its use is in its tenant's sums.
                lifecycle.forget_again(state, record)
            else:
                known = as_of(upgraded(record), now_s)
                state.know(Job(known, heard_s=now_s, found=known.attempt))
                state.usage.note(record.usage)
        lifecycle.prune(state)
        policies = records.get(gpu_policy.POLICIES_BUCKET, {})
        policy = policies.get(gpu_policy.POOL)
        gpu_policy.restore(state, policy if isinstance(policy, PolicyRecord) else None)
        autoscaling.recover(state, self.scalings, records.get(autoscaling.SCALING_BUCKET, {}))
        state.out.append(StartTimer(TickDue(), now_s + state.config.tick_s))
        for job in list(state.unsettled.values()):
            lifecycle.advance(state, job)

    # People's requests ----------------------------------------------------------------------------

    def _submit(self, token: int, message: SubmitJob, now_s: float) -> None:
        job = self.state.shown_job(message.spec.id)
        known = job.record if job is not None else self.state.ended.known(message.spec)
        refusal = cluster_assignment.admit(self.state, message.spec, now_s)
        told = brief(known) if known is not None else None
        self.state.reply(token, refusal or JobAccepted(job=message.spec.id, known=told))

    def _cancel(self, token: int, message: CancelJob, now_s: float) -> None:
        job = self.state.shown_job(message.job)
        if job is None and message.job not in self.state.ended:
            self.state.reply(token, Refused(reason=unknown(message.job), code=NOT_FOUND))
            return
        if job is not None and not job.ended:
            lifecycle.end(self.state, job, "cancelled", "cancelled by its user", now_s)
        self.state.reply(token, Ok())

    def _get(self, token: int, message: GetJob, now_s: float) -> None:
        state = self.state
        job = state.shown_job(message.job)
        if job is None:
            state.reply(token, Refused(reason=unknown(message.job), code=NOT_FOUND))
            return
        state.reply(token, info(state, job, now_s))

    def _list(self, token: int, message: ListJobs, now_s: float) -> None:
        state = self.state
        all_of = [job for job in state.jobs.values() if not job.record.deleted]
        if message.tenant is not None:
            all_of = [job for job in all_of if job.record.spec.tenant == message.tenant]
        found = [job for job in all_of if message.state in (None, job.record.state)]
        found.sort(key=active_first if message.order == "active" else newest_first)
        page = found[message.offset : message.offset + limits.LIST_JOBS_MAX]
        some = shown(state, page, now_s)
        records = tuple(fitting(some) if message.whole else map(brief, some))
        told = ((job.id, job.shown_progress(now_s)) for job in page[: len(records)])
        answer = JobList(
            jobs=records,
            total=len(found),
            progress={id: progress for id, progress in told if progress is not None},
            counts=dict(Counter(job.record.state for job in all_of)),
        )
        state.reply(token, answer)

    def _aggregators(self, token: int, message: ListAggregators, now_s: float) -> None:
        state = self.state
        state.reply(token, state.pool.listing(state.clusters.drains(now_s)))

    def _tenants(self, token: int, message: ListTenants, now_s: float) -> None:
        self.state.reply(token, TenantList(tenants=tuple(tenants(self.state, now_s))))

    def _usage(self, token: int, message: GetUsage, now_s: float) -> None:
        self.state.reply(token, usage_listing.answer(self.state, message, now_s))

    def _policy(self, token: int, message: GetPolicy, now_s: float) -> None:
        told = autoscaling.described(self.state, self.scalings, now_s)
        info = gpu_policy.info(self.state)
        self.state.reply(token, msgspec.structs.replace(info, machines=told))

    def _set_policy(self, token: int, message: SetPolicy, now_s: float) -> None:
        self.state.reply(token, gpu_policy.set_policy(self.state, message, now_s))

    def _nodes(self, token: int, message: ListNodes, now_s: float) -> None:
        state = self.state
        records = (job.record for job in state.unsettled.values())
        infos = node_list.listing(state.nodes.heartbeats(now_s), records)
        page = tuple(fitting(infos[message.offset :]))
        state.reply(token, NodeList(nodes=page, total=len(infos)))

    # Agents and worker nodes ----------------------------------------------------------------------

    def _register(self, token: int, message: RegisterJob, now_s: float) -> None:
        cluster_assignment.register(self.state, token, message, now_s)

    def _finish(self, token: int, message: FinishJob, now_s: float) -> None:
        job = self.state.jobs.get(JobId(message.job))
        if job is None or message.rank >= job.record.spec.workers:
            reason = f"{unknown(message.job)}, or it has no rank {message.rank}"
            self.state.reply(token, Refused(reason=reason, code=NOT_FOUND))
            return
        if job.by_hand:  # For other jobs, the worker node reports the end.
            lifecycle.rank_ended(self.state, job, message.rank, message.result, now_s)
        self.state.reply(token, Ok())

    def _missing(self, token: int, message: AskMissing, now_s: float) -> None:
        state, job = self.state, self.state.jobs.get(JobId(message.job))
        if job is None:
            state.reply(token, Refused(reason=unknown(message.job)))
            return
        state.reply(token, missing_ranks.answer(state, job, message, now_s))

    def _worker_exited(self, token: int, message: WorkerExited, now_s: float) -> None:
        job = self.state.jobs.get(JobId(message.job))
        if job is not None and not job.ended and _is_of(job.record, message):
            number = message.attempt % RUN_ATTEMPTS - joins(job.record, message.rank)
            message = msgspec.structs.replace(message, attempt=max(0, number))
            if number < 0 or scaling.rank_ended(self.state, job, message, now_s):
                pass  # It is of a process that left, or that does not count yet.
            elif message.code == 0 and (message.result or job.record.state != "stopping"):
                lifecycle.rank_ended(self.state, job, message.rank, message.result, now_s)
            elif job.record.state != "stopping":  # Else it ended as it was told to.
                rank_restarts.rank_died(self.state, job, message, now_s)
        self.state.reply(token, Ok())

    # Answers and observations ---------------------------------------------------------------------

    def _answered(self, key: object, message: Message, now_s: float, *, final: bool = True) -> None:
        state = self.state
        match key:
            case HeldKey(aggregator=aggregator):
                state.out += state.pool.held(aggregator, message)
            case LookKey(job=id, rank=rank) if (job := state.jobs.get(id)) is not None:
                hangs.looked(state, job, rank, message)
            case LineKey(job=id, rank=rank) if (job := state.jobs.get(id)) is not None:
                job.reading.discard(rank)
                missing_ranks.line_read(job, rank, message)
            case OrderKey(job=id, what=what) if (job := state.jobs.get(id)) is not None:
                self._obeyed(job, what, message, now_s, final)

    def _obeyed(self, job: Job, what: Order, message: Message, now_s: float, final: bool) -> None:
        """Take the answer to an order. Not `final`: it was refused, and is repeated."""
        refused = message if isinstance(message, Refused) else None
        job.refusals.pop(what, None)
        if refused is not None:
            job.refusals[what] = refused.reason
        if not final:
            return
        job.asked.discard(what)
        if what.verb == "place":
            cluster_assignment.placed(self.state, job, what, refused)
        else:
            scaling.carried_out(self.state, job, what, message, now_s)

    def _observe(self, event: Observed, now_s: float) -> None:
        state, message = self.state, event.message
        match message:
            case AggregatorHeartbeat():
                state.out += state.pool.heard(message, now_s)
            case WorkerHeartbeat():
                if state.nodes.heard(message, now_s):
                    state.slots.due = state.gpus.due = True
                    lifecycle.stop_strangers(state, message)
                orphans.look(state, message, now_s)
                regrouping.heard(state, message, now_s)
            case ClusterReport():
                state.clusters.heard(message, now_s)
                cluster_reports.take(state, message, now_s)
            case JobProfiled():
                job = state.jobs.get(message.job)
                if job is not None:
                    state.clusters.learned(job.record.spec.model, message.profile)
            case JobEvent():
                job = state.jobs.get(message.job)
                if job is not None and not job.record.optimizer_state_lost:
                    state.change(job, now_s, optimizer_state_lost=True)
            case IterationsObserved():
                job = state.jobs.get(message.job)
                if job is not None and message.rank < processes(job.record):
                    job.heard_s = now_s
                    job.progress.reported(message, now_s)
                    lifecycle.on_iterations(job, message, now_s)
                    step_times.heard(state, job, message, now_s)
            case GoodputReport():
                goodput.take(state, message, event.subject)
            case TrafficObserved():
                traffic.take(state, message, event.subject, now_s)
            case _:
                state.out.append(Log("unexpected", {"type": type(message).__name__}, "warning"))

    def _tick(self, now_s: float) -> None:
        state = self.state
        state.out.append(StartTimer(TickDue(), now_s + state.config.tick_s))
        state.out += state.pool.tick(now_s)
        state.nodes.tick(now_s)
        state.clusters.tick(now_s)
        lifecycle.expire(state)
        for job in list(state.unsettled.values()):
            self._look_after(job, now_s)
        vacate(state, state.nodes.cordoned(), now_s)
        regrouping.look(state, now_s)
        dispatch.tick(state, now_s)
        autoscaling.tick(state, self.scalings, now_s)

    def _look_after(self, job: Job, now_s: float) -> None:
        """Find out whether it is dead, and order what nobody has confirmed."""
        state = self.state
        following.look(state, job, now_s)
        if not job.ended:
            over = late(job, now_s)
            reason = over or dead(job, state.nodes, state.config, state.begun_s, now_s)
            if reason and not over and restartable(job) and self._silent(job, now_s):
                lifecycle.leave(state, job, (), now_s, reason=f"{reason}; it waits for others")
            elif reason:
                lifecycle.end(state, job, "failed", reason, now_s)
            elif late_one := gang_starts.late_node(state, job, now_s):
                gang_starts.give_up(state, job, *late_one, now_s)
        hangs.watch(state, job, now_s)
        silence.watch(state, job, now_s)
        idle_gpus.watch(state, job, now_s)
        lifecycle.advance(state, job)
        scaling.look_after(state, job, now_s)
        if job.record.state == "stopping":
            lifecycle.on_processes_gone(state, job, now_s)
        gang_starts.free_early(state, job, now_s)

    def _silent(self, job: Job, now_s: float) -> bool:
        state = self.state
        return silent_node(job, state.nodes, state.config, state.begun_s, now_s) is not None


def _is_of(record: JobRecord, exited: WorkerExited) -> bool:
    """Say whether a rank's end is one of the attempt that the job is in. A job that was paused has
    no processes: what is told of its attempt then is told again."""
    return exited.job_attempt == record.attempt and processes(record) > 0
