"""The master's core: which jobs are admitted, where they run, which cluster aggregates for them.

Pure. A job is stored before it is acknowledged; its first registration chooses its aggregator
cluster (AutoPS section 3.3.3, step one; see clusters.py), whose controller does the rest. Whatever
must be told to a controller or a worker node (place, start, stop, release) follows from the job's
record, so that a master that was killed at any instant tells it again, and every receiver takes a
repeated command for the one it has carried out.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from slackwater.common import limits
from slackwater.common.effects import (
    REFUSED,
    Answered,
    Draining,
    Effect,
    Log,
    Observed,
    Persist,
    Publish,
    Recovered,
    Reply,
    Request,
    Requested,
    ShellEvent,
    StartTimer,
    TimerFired,
)
from slackwater.schemas import subjects
from slackwater.schemas.base import AggregatorId, ClusterId, JobId, Message, Ok, Record, Refused
from slackwater.schemas.cluster import (
    AdoptAggregators,
    AggregatorHeartbeat,
    AggregatorRecord,
    AllocateAggregators,
    ClusterReport,
    DeallocateAggregators,
    ListAggregators,
    StartWorkers,
    StopWorkers,
    WorkerExited,
    WorkerHeartbeat,
)
from slackwater.schemas.jobs import (
    CancelJob,
    FinishJob,
    GetJob,
    JobAccepted,
    JobEvent,
    JobInfo,
    JobList,
    JobRecord,
    JobRegistered,
    JobState,
    ListJobs,
    RegisterJob,
    SubmitJob,
)
from slackwater.schemas.placement import PlaceJob, ReleaseJob
from slackwater.schemas.telemetry import IterationsObserved, JobProfiled
from slackwater.services.master.clusters import Clusters
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.jobs import Job, dead, unfit, unknown
from slackwater.services.master.nodes import Nodes
from slackwater.services.master.pool import BUCKET as NODES_BUCKET
from slackwater.services.master.pool import Pool
from slackwater.services.master.waiting import NO_CONTROLLER, brief, shown

JOBS_BUCKET = "jobs"
ASK_BUDGET_S = 10.0
"""The shell retries this long; the tick asks again after that."""
RESULTS_BYTES_MAX = limits.RECORD_BYTES_MAX * 3 // 4
RETRY_S = 0.5


class Master:
    def __init__(self, config: MasterConfig) -> None:
        self._config = config
        self._jobs: dict[JobId, Job] = {}
        self._pool = Pool(config.aggregators_max)
        self._clusters = Clusters(config.cluster_scaling_s)
        self._nodes = Nodes(config.node_silent_s)
        self._epoch = 0
        self._begun_s = 0.0
        self._live = 0
        """Jobs that have not ended."""
        self._blocked = False
        """Whether some job waits for slots, so that one more need not look for any."""
        self._out: list[Effect] = []
        self._handlers: dict[type[Message], Callable[[int, Any, float], None]] = {
            SubmitJob: self._submit,
            CancelJob: self._cancel,
            GetJob: self._get,
            ListJobs: self._list,
            RegisterJob: self._register,
            FinishJob: self._finish,
            WorkerExited: self._worker_exited,
            ListAggregators: lambda token, _, __: self._reply(token, self._pool.listing()),
            AllocateAggregators: self._approve(self._pool.allocate),
            DeallocateAggregators: self._approve(self._pool.deallocate),
            AdoptAggregators: self._approve(self._pool.adopt),
        }

    def step(self, event: ShellEvent, now_s: float) -> list[Effect]:
        self._out = []
        match event:
            case Requested():
                self._handlers[type(event.message)](event.token, event.message, now_s)
            case Observed():
                self._observe(event.message, now_s)
            case Answered():
                self._answered(event.key, event.message, now_s)
            case TimerFired():
                self._tick(now_s)
            case Recovered():
                self._recover(event.epoch, event.records, now_s)
            case Draining():
                pass  # The shell refuses what is new; what is begun needs nothing from here.
        return self._out

    def _reply(self, token: int, message: Message) -> None:
        self._out.append(Reply(token, message))

    def _approve(self, decide: Callable[..., tuple[list[Effect], Message]]) -> Any:
        def handle(token: int, message: Message, now_s: float) -> None:
            effects, answer = decide(message, now_s)
            self._out += effects
            self._reply(token, answer)

        return handle

    # Records --------------------------------------------------------------------------------------

    def _recover(self, epoch: int, records: dict[str, dict[str, Record]], now_s: float) -> None:
        self._epoch = epoch
        self._begun_s = self._clusters.since_s = now_s
        nodes = records.get(NODES_BUCKET, {})
        self._pool.recover(
            {key: r for key, r in nodes.items() if isinstance(r, AggregatorRecord)}, epoch
        )
        for record in records.get(JOBS_BUCKET, {}).values():
            assert isinstance(record, JobRecord)
            self._jobs[JobId(record.spec.id)] = Job(record, heard_s=now_s)
        self._live = sum(not job.ended for job in self._jobs.values())
        self._out.append(StartTimer("tick", now_s + self._config.tick_s))
        for job in list(self._jobs.values()):
            self._advance(job)

    def _change(self, job: Job, now_s: float, fact: str = "", **changes: Any) -> None:
        """Store the changed record, then tell `fact`."""
        record = msgspec.structs.replace(job.record, epoch=self._epoch, **changes)
        job.record = record
        self._out.append(Persist(JOBS_BUCKET, record.spec.id, record))
        if fact:
            self._tell(job, fact, now_s)

    def _tell(self, job: Job, fact: str, now_s: float, reason: str = "") -> None:
        record = job.record
        self._out.append(
            Publish(
                subjects.event("job", record.spec.id, fact),
                JobEvent(
                    job=JobId(record.spec.id),
                    fact=fact,
                    at_s=now_s,
                    cluster=record.cluster,
                    reason=reason or record.reason,
                ),
            )
        )

    # People's requests ----------------------------------------------------------------------------

    def _submit(self, token: int, message: SubmitJob, now_s: float) -> None:
        refusal = self._admit(message.spec.id, message, now_s)
        self._reply(token, refusal or JobAccepted(job=message.spec.id))
        if refusal is None and message.spec.program and not self._blocked:
            self._start_waiting(now_s)

    def _admit(self, id: str, message: SubmitJob, now_s: float) -> Refused | None:
        known = self._jobs.get(JobId(id))
        if known is not None:
            if known.record.spec == message.spec:
                return None  # A retry: the first answer stands.
            return Refused(reason=f"job {id} exists with another spec; choose another id")
        if self._live >= limits.JOBS_MAX:
            reason = f"{limits.JOBS_MAX} jobs are pending or running already"
            return Refused(reason=reason, retry_after_s=5.0)
        job = Job(JobRecord(spec=message.spec, submitted_s=now_s), heard_s=now_s)
        self._jobs[JobId(id)] = job
        self._live += 1
        self._change(job, now_s, "pending")
        return None

    def _cancel(self, token: int, message: CancelJob, now_s: float) -> None:
        job = self._jobs.get(JobId(message.job))
        if job is None:
            self._reply(token, Refused(reason=unknown(message.job)))
            return
        if not job.ended:
            self._end(job, "cancelled", "cancelled by its user", now_s)
        self._reply(token, Ok())

    def _get(self, token: int, message: GetJob, now_s: float) -> None:
        job = self._jobs.get(JobId(message.job))
        if job is None:
            self._reply(token, Refused(reason=unknown(message.job)))
            return
        (record,) = shown([job], self._jobs.values(), self._nodes, self._clusters, now_s)
        self._reply(token, JobInfo(job=record))

    def _list(self, token: int, message: ListJobs, now_s: float) -> None:
        found = [job for job in self._jobs.values() if message.state in (None, job.record.state)]
        found.sort(key=lambda job: (-job.record.submitted_s, job.id))
        page = found[message.offset : message.offset + limits.LIST_JOBS_MAX]
        records = shown(page, self._jobs.values(), self._nodes, self._clusters, now_s)
        self._reply(token, JobList(jobs=tuple(map(brief, records)), total=len(found)))

    # Agents ---------------------------------------------------------------------------------------

    def _register(self, token: int, message: RegisterJob, now_s: float) -> None:
        id = JobId(message.job)
        if id not in self._jobs and message.spec is not None:
            if message.spec.id != id:
                reason = f"job {id}: its spec says {message.spec.id}; use one id"
                self._reply(token, Refused(reason=reason))
                return
            refusal = self._admit(id, SubmitJob(spec=message.spec), now_s)
            if refusal is not None:
                self._reply(token, refusal)
                return
        job = self._jobs.get(id)
        refusal = unfit(job, message)
        if job is None or refusal is not None:
            self._reply(token, refusal or Refused(reason=unknown(id)))
            return
        job.heard_s = now_s
        if job.record.state == "pending" and job.by_hand:
            self._change(job, now_s, "running", state="running", started_s=now_s)
        if not job.tensors:
            job.tensors, job.update = message.tensors, message.update
        if job.placed:
            self._reply(token, self._registered(job))
            return
        job.waiting[token] = message.rank
        self._place(job, now_s)

    def _registered(self, job: Job) -> JobRegistered:
        assert job.record.cluster is not None
        return JobRegistered(
            job=job.record.spec.id, cluster=job.record.cluster, workers=job.record.spec.workers
        )

    def _place(self, job: Job, now_s: float) -> None:
        """Step one of the placement, then the order to the chosen cluster's controller."""
        if "place" in job.asked:
            return
        if job.record.cluster is None:
            cluster = self._choose_cluster(job, now_s)
            if cluster is None:
                self._answer_waiting(
                    job, Refused(reason=f"job {job.id} {NO_CONTROLLER}", retry_after_s=RETRY_S)
                )
                return
            self._change(job, now_s, "placed", cluster=cluster)
        assert job.record.cluster is not None
        self._ask(
            job,
            "place",
            subjects.command("controller", job.record.cluster, "place"),
            PlaceJob(spec=job.spec, tensors=job.tensors),
        )

    def _choose_cluster(self, job: Job, now_s: float) -> ClusterId | None:
        share = self._pool.share()
        clusters = self._clusters
        placed = [
            (
                other.record.cluster,
                id,
                # What it holds for its profiling is not unallocated any more.
                max(
                    0.0,
                    clusters.demand_cpu(other.record.spec, share) - self._pool.lent(id) * share,
                ),
            )
            for id, other in self._jobs.items()
            if other.record.cluster is not None and not other.ended
        ]
        lendable = {c: self._pool.unallocated(c) for c in clusters.known}
        unallocated_cpu = {c: count * share for c, count in lendable.items()}
        rooms = clusters.rooms(unallocated_cpu, placed, now_s)
        # Where the job's profiling would wait for temporaries is worse than any other fit.
        ready = [room for room in rooms if lendable[room.id] >= job.record.spec.servers]
        demand_cpu = clusters.demand_cpu(job.record.spec, share)
        clusters.scale(placed, self._config.aggregators_max * share, now_s)
        return clusters.choose(ready or rooms, demand_cpu)

    def _answer_waiting(self, job: Job, message: Message) -> None:
        for token in job.waiting:
            self._reply(token, message)
        job.waiting.clear()

    def _finish(self, token: int, message: FinishJob, now_s: float) -> None:
        job = self._jobs.get(JobId(message.job))
        if job is None or message.rank >= job.record.spec.workers:
            reason = f"{unknown(message.job)}, or it has no rank {message.rank}"
            self._reply(token, Refused(reason=reason))
            return
        if job.by_hand:  # Of the others, the worker node reports the end.
            self._rank_ended(job, message.rank, message.result, now_s)
        self._reply(token, Ok())

    # Worker nodes ---------------------------------------------------------------------------------

    def _worker_exited(self, token: int, message: WorkerExited, now_s: float) -> None:
        job = self._jobs.get(JobId(message.job))
        if job is not None and not job.ended:
            if message.code == 0:
                self._rank_ended(job, message.rank, message.result, now_s)
            else:
                reason = f"rank {message.rank} on {message.node} ended with code {message.code}"
                detail = f": {message.result[:1024]}" if message.result else ""
                self._end(job, "failed", reason + detail, now_s)
        self._reply(token, Ok())

    def _rank_ended(self, job: Job, rank: int, result: str, now_s: float) -> None:
        if job.ended or str(rank) in job.record.results:
            return
        workers = job.record.spec.workers
        room = min(limits.RESULT_BYTES_MAX, RESULTS_BYTES_MAX // workers)
        kept = result.encode()[:room].decode(errors="ignore")
        results = job.record.results | {str(rank): kept}
        if len(results) == workers:
            self._end(job, "completed", "", now_s, results=results)
        else:
            self._change(job, now_s, results=results)
        self._start_waiting(now_s)

    def _end(self, job: Job, state: JobState, reason: str, now_s: float, **changes: Any) -> None:
        self._live -= 1
        self._change(job, now_s, state, state=state, reason=reason, finished_s=now_s, **changes)
        self._answer_waiting(job, Refused(reason=f"job {job.record.spec.id} is {state}"))
        self._advance(job)
        self._start_waiting(now_s)

    def _start_waiting(self, now_s: float) -> None:
        """Give the worker nodes' free slots to the jobs that wait for them."""
        waiting = [job.record for job in self._jobs.values() if job.queued]
        self._blocked = False
        if not waiting:
            return
        running = [j.record for j in self._jobs.values() if j.record.state == "running"]
        starts, waits = self._nodes.assign(waiting, running, now_s)
        self._blocked = any(wait.cause != "larger-node" for wait in waits)
        for record, node in starts:
            job = self._jobs[JobId(record.spec.id)]
            self._change(job, now_s, "running", state="running", started_s=now_s, node=node)
            self._advance(job)
        for wait in waits:
            job = self._jobs[JobId(wait.job)]
            if job.waits_for != wait.cause:  # Not with every slot that comes or goes.
                job.waits_for = wait.cause
                self._tell(job, "waiting", now_s, wait.reason)

    # What others must be told, from the record alone ----------------------------------------------

    def _advance(self, job: Job) -> None:
        """Order whatever the job's state demands and nobody has confirmed."""
        record = job.record
        id = record.spec.id
        if record.state == "running" and record.node is not None:
            self._ask(
                job,
                "start",
                self._worker(job, "start"),
                StartWorkers(
                    job=id,
                    ranks=tuple(
                        r for r in range(record.spec.workers) if str(r) not in record.results
                    ),
                    workers=record.spec.workers,
                    program=record.spec.program,
                ),
            )
        if job.ended and not record.released:
            if record.node is not None and record.state != "completed":
                self._ask(job, "stop", self._worker(job, "stop"), StopWorkers(job=id))
            if record.cluster is not None:
                subject = subjects.command("controller", record.cluster, "release")
                self._ask(job, "release", subject, ReleaseJob(job=id))
            self._settle(job)

    def _worker(self, job: Job, verb: str) -> str:
        assert job.record.node is not None
        return subjects.command("worker", self._nodes.service_id(job.record.node), verb)

    def _ask(self, job: Job, what: str, subject: str, message: Message) -> None:
        if what in job.asked or what in job.told:
            return
        job.asked.add(what)
        key = f"{what}/{job.record.spec.id}"
        # Start, stop: in order, or a start that is repeated late would follow the stop.
        lane = f"worker/{job.record.spec.id}" if what in ("start", "stop") else ""
        self._out.append(
            Request(subject, message, key, lane=lane, budget_s=ASK_BUDGET_S, hear_refusals=True)
        )

    def _settle(self, job: Job) -> None:
        """An ended job is settled when all who knew of it have let it go."""
        record = job.record
        needed = {"release"} if record.cluster is not None else set()
        if record.node is not None and record.state != "completed":
            needed.add("stop")
        if job.ended and not record.released and needed <= job.told:
            self._change(job, record.finished_s, released=True)
            self._prune()

    def _answered(self, key: str, message: Message, now_s: float) -> None:
        again = key.startswith(REFUSED)
        what, _, id = key.removeprefix(REFUSED).partition("/")
        if what == "held":
            self._out += self._pool.held(AggregatorId(id), message)
            return
        job = self._jobs.get(JobId(id))
        if job is None:
            return
        refused = message if isinstance(message, Refused) else None
        job.refusals.pop(what, None)
        if refused is not None:
            job.refusals[what] = refused.reason
        if again:
            return
        job.asked.discard(what)
        if what == "place":
            job.placed = refused is None and not job.ended
            if refused is not None:
                job.tensors = ()  # The next rank's list may be the one that the controller has.
            if job.waiting:
                self._answer_waiting(job, refused or self._registered(job))
            self._advance(job)
            return
        if refused is None:
            job.told.add(what)
            self._settle(job)
        elif what == "start" and refused.retry_after_s == 0.0 and not job.ended:
            self._end(job, "failed", f"it cannot be started: {refused.reason}", now_s)
        else:
            self._out.append(
                Log("ask.refused", {"what": what, "job": id, "reason": refused.reason}, "warning")
            )

    def _prune(self) -> None:
        settled = [job.record for job in self._jobs.values() if job.record.released]
        surplus = len(settled) - self._config.jobs_kept_max
        if surplus > 0:
            settled.sort(key=lambda r: (r.finished_s, r.spec.id))
            for record in settled[:surplus]:
                del self._jobs[JobId(record.spec.id)]
                self._out.append(Persist(JOBS_BUCKET, record.spec.id, None))

    # What is observed -----------------------------------------------------------------------------

    def _observe(self, message: Message, now_s: float) -> None:
        match message:
            case AggregatorHeartbeat():
                self._out += self._pool.heard(message, now_s)
            case WorkerHeartbeat():
                if self._nodes.heard(message, now_s):
                    self._start_waiting(now_s)
            case ClusterReport():
                self._clusters.heard(message, now_s)
            case JobProfiled():
                job = self._jobs.get(message.job)
                if job is not None:
                    self._clusters.learned(job.record.spec.model, message.profile)
            case JobEvent():
                job = self._jobs.get(message.job)
                if job is not None and not job.record.optimizer_state_lost:
                    self._change(job, now_s, optimizer_state_lost=True)
            case IterationsObserved():
                job = self._jobs.get(message.job)
                if job is not None:
                    job.heard_s = now_s
            case _:
                self._out.append(Log("unexpected", {"type": type(message).__name__}, "warning"))

    def _tick(self, now_s: float) -> None:
        self._out.append(StartTimer("tick", now_s + self._config.tick_s))
        self._out += self._pool.tick(now_s)
        for job in list(self._jobs.values()):
            reason = "" if job.ended else dead(job, self._nodes, self._config, self._begun_s, now_s)
            if reason:
                self._end(job, "failed", reason, now_s)
            self._advance(job)
        self._start_waiting(now_s)
