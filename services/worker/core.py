"""The worker service's core: which job processes must run here, and what the master must learn.

Pure. Each attempt of a rank is started once: `StartWorkers` may come any number of times, from a
master that was restarted, too. That a rank ended is told to the master until it says that it has
stored it. The truth about processes is on disk, written by the processes themselves (see
processes.py), so that a service which was killed and came back finds what ran, what ended and what
was only intended.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, assert_never

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
    Reply,
    Request,
    Requested,
    StartTimer,
    TimerFired,
)
from slackwater.schemas import subjects
from slackwater.schemas.base import (
    ATTEMPTS_MAX,
    CONFLICT,
    RUN_ATTEMPTS,
    TOO_MANY,
    Count,
    JobId,
    Message,
    NodeId,
    Ok,
    Refused,
)
from slackwater.schemas.hangs import LookAtRank
from slackwater.schemas.logs import ReadLog, no_log
from slackwater.schemas.terminals import TypeIn, no_terminal
from slackwater.schemas.workers import (
    Prepared,
    PrepareWorkers,
    StartWorkers,
    StopWorkers,
    WorkerExited,
    room_s,
)
from slackwater.services.worker.effects import (
    AwaitEnd,
    FindProcesses,
    ForgetRank,
    KillDue,
    LookAtProcesses,
    LookAtProgram,
    ReadRankLog,
    ReportKey,
    ReservationDue,
    SignalRank,
    TypeAtTerminal,
    WatchRank,
)
from slackwater.services.worker.events import (
    AnswerReady,
    Event,
    Found,
    JobsPruned,
    ProcessesFound,
    ProcessExited,
    ProgramLooked,
    RankState,
    RoomLooked,
)
from slackwater.services.worker.rank_state import Rank as _Rank
from slackwater.services.worker.rank_state import Reserved as _Reserved
from slackwater.services.worker.rank_state import misfit, run, said, still_reading

STOPPED_S: Final = 60.0
"""Seconds for which an attempt that was told to stop is not begun by an order that comes late: no
sender repeats one for as long."""


class WorkerCore:
    def __init__(self, node: NodeId, slots: int, stop_grace_s: float, keep_jobs: bool) -> None:
        self._node = node
        self._slots = slots
        self._stop_grace_s = stop_grace_s
        self._keep_jobs = keep_jobs
        self._ranks: dict[tuple[JobId, int], _Rank] = {}
        self._stopping: dict[KillDue, list[int]] = {}
        """Processes of a job -> who waits to be told that they have ended."""
        self._reserved: dict[JobId, _Reserved] = {}
        self._stopped_until: dict[JobId, tuple[int, float]] = {}
        """Job -> the last attempt that was told to stop, and until when that is remembered."""
        self._ready = False
        self._draining = False
        self._short = ""

    def running(self) -> tuple[tuple[JobId, Count], ...]:
        """Job and rank of every process, for the heartbeat."""
        return tuple((rank.job, rank.rank) for rank in self._with("running"))

    def counts(self) -> Counter[RankState]:
        """Count ranks by state."""
        return Counter(rank.state for rank in self._ranks.values())

    def step(self, event: Event, now_s: float) -> Sequence[Effect]:
        match event:
            case Recovered():
                return [FindProcesses()]
            case ProcessesFound(found=found):
                return self._adopt(found)
            case Requested(token=token, message=PrepareWorkers() as message):
                return self._prepare(token, message, now_s)
            case ProgramLooked():
                return self._looked(event, now_s)
            case Requested(token=token, message=StartWorkers() as message):
                return self._start(token, message, now_s)
            case Requested(token=token, message=StopWorkers() as message):
                return self._told_to_stop(token, message, now_s)
            case Requested(token=token, message=ReadLog() as message, tenant=tenant):
                return [self._read(token, message, tenant)]
            case Requested(token=token, message=LookAtRank() as message):
                return [self._look_at(token, message)]
            case Requested(token=token, message=TypeIn() as message, tenant=tenant):
                return [self._type(token, message, tenant)]
            case AnswerReady(token=token, answer=answer):
                return [Reply(token, answer)]
            case RoomLooked(short=short):
                self._short = short
                return [Log("disk.full", {"reason": short}, "warning")] if short else []
            case JobsPruned(jobs=pruned):
                self._ranks = {key: one for key, one in self._ranks.items() if key[0] not in pruned}
                self._reserved = {j: r for j, r in self._reserved.items() if j not in pruned}
                return [Log("jobs.pruned", {"jobs": len(pruned)})]
            case Requested(token=token, message=message):
                return [Reply(token, Refused(reason=f"{type(message).__name__}: not for workers"))]
            case ProcessExited():
                return self._exited(event)
            case Answered(key=key, message=message):
                return self._answered(key, message, now_s)
            case TimerFired(key=key):
                return self._fired(key)
            case Draining():
                self._draining = True
                if self._keep_jobs:
                    return []
                jobs = dict.fromkeys(job for job, _ in self.running())
                stops = [
                    effect
                    for job in jobs
                    for effect in self._stop(KillDue(job, ATTEMPTS_MAX), now_s, self._stop_grace_s)
                ]
                return [*stops, AwaitEnd()]
            case RefusedSoFar() | Observed():
                return []
        assert_never(event)

    def _with(self, state: RankState, job: JobId | None = None) -> Iterator[_Rank]:
        for rank in self._ranks.values():
            if rank.state == state and job in (None, rank.job):
                yield rank

    # A life of a rank -----------------------------------------------------------------------------

    def _adopt(self, found: tuple[Found, ...]) -> list[Effect]:
        self._ready = True
        effects: list[Effect] = []
        for each in found:
            rank = _Rank(each.job, each.rank, each.state, each.code, each.result, each.attempt)
            rank.gpu_ids = each.gpu_ids
            self._ranks[each.job, each.rank] = rank
            self._remember_meeting(each)
            if each.state == "intended":
                # The service died between the intention and the process.
                rank.state = "running"
                effects.append(run(rank, each))
            elif each.state == "running":
                effects.append(WatchRank(rank.job, rank.rank, rank.attempt))
            elif each.state == "exited":
                effects.append(self._report(rank))
        running = sum(1 for _ in self._with("running"))
        if found:
            effects.append(Log("processes.found", {"found": len(found), "running": running}))
        return effects

    def _remember_meeting(self, found: Found) -> None:
        """Let ranks that start later meet where those did which a former life started."""
        host, _, port = found.rendezvous.rpartition(":")
        if not port.isdecimal() or found.state == "exited":
            return
        kept = _Reserved(found.attempt // RUN_ATTEMPTS, 0, (), host=host, port=int(port))
        kept.rendezvous = found.rendezvous
        self._reserved[found.job] = kept

    def _start(self, token: int, message: StartWorkers, now_s: float) -> list[Effect]:
        job = JobId(message.job)
        if refused := self._not_now(job, message.job_attempt) or misfit(self._node, message):
            return [Reply(token, refused)]
        attempts = message.attempts or (0,) * len(message.ranks)
        asked = zip(message.ranks, attempts, strict=True)
        new = [
            _Rank(job, rank, "running", attempt=attempt, gpu_ids=message.gpus_of(rank))
            for rank, attempt in asked
            if self._may_start(self._ranks.get((job, rank)), attempt)
        ]
        if refused := self._came_late(job, message, new, now_s):
            return [Reply(token, refused)]
        ids = tuple(id for rank in new for id in rank.gpu_ids)
        if new and (refused := self._no_room(job, len(new), ids)):
            return [Reply(token, refused)]
        message = self._meeting(job, message)
        effects: list[Effect] = []
        for rank in new:
            self._ranks[job, rank.rank] = rank
            effects.append(run(rank, message))
        # The processes are started (their intentions are on disk) before the master hears of it.
        return [*effects, Reply(token, Ok())]

    def _not_now(self, job: JobId, attempt: int) -> Refused | None:
        """Say why nothing of the attempt is begun at this moment."""
        if not self._ready:
            return still_reading()
        if self._draining:
            return Refused(reason=f"{self._node} drains", retry_after_s=1.0)
        for former in self._with("running", job):
            if former.attempt // RUN_ATTEMPTS < attempt:
                reason = f"{self._node}: a former process of job {job}, rank {former.rank}, ends"
                return Refused(reason=reason, retry_after_s=1.0)
        return None

    def _no_room(self, job: JobId, ranks: int, gpu_ids: tuple[str, ...]) -> Refused | None:
        """Say why so many new ranks of the job cannot run beside what runs and is reserved: slots,
        GPUs or disk that others have."""
        if self._short:
            # A refusal for good would fail each queued job that is sent here, one after the other.
            return Refused(reason=f"{self._node}: {self._short}", retry_after_s=1.0, code=TOO_MANY)
        holders = {
            id: f"job {rank.job}, rank {rank.rank}"
            for rank in self._with("running")
            for id in rank.gpu_ids
        }
        others = [(of, kept) for of, kept in self._reserved.items() if of != job]
        holders |= {id: f"job {of}, which starts" for of, kept in others for id in kept.gpu_ids}
        for id in gpu_ids:
            if id in holders:
                reason = f"{self._node}: GPU {id} is held by {holders[id]}"
                return Refused(reason=reason, retry_after_s=1.0, code=TOO_MANY)
        if gpu_ids:
            return None
        running = sum(1 for rank in self._with("running") if not rank.gpu_ids)
        running += sum(kept.ranks for _, kept in others if not kept.gpu_ids)
        if running + ranks > self._slots:
            reason = f"{self._node}: {running} of {self._slots} slots run, {ranks} more asked"
            return Refused(reason=reason, retry_after_s=1.0, code=TOO_MANY)
        return None

    # Room for a gang ------------------------------------------------------------------------------

    def _prepare(self, token: int, message: PrepareWorkers, now_s: float) -> list[Effect]:
        job, attempt = JobId(message.job), message.attempt
        refused = self._not_now(job, attempt) or misfit(self._node, message)
        if refused := refused or self._was_stopped(job, attempt, now_s):
            return [Reply(token, refused)]
        known = self._reserved.get(job)
        if known is not None and known.attempt > attempt:
            reason = f"{self._node}: attempt {known.attempt} of job {job} is prepared here already"
            return [Reply(token, Refused(reason=reason, code=CONFLICT))]
        begun = [rank for rank in message.ranks if self._began(job, rank, attempt)]
        new = len(message.ranks) - len(begun)
        if new and (refused := self._no_room(job, new, message.gpu_ids)):
            return [Reply(token, refused)]
        if known is None or known.attempt < attempt:
            kept_s = room_s(message.pack, message.venv)
            gpu_ids = message.gpu_ids if new else ()
            self._reserved[job] = _Reserved(attempt, new, gpu_ids, seconds=kept_s)
        path = message.env.get("PATH")
        program, folder = message.program, message.folder
        packs = message.pack, message.venv
        return [LookAtProgram(token, job, attempt, program, folder, path, *packs)]

    def _meeting(self, job: JobId, message: StartWorkers) -> StartWorkers:
        """Give up the kept room, and let ranks that start later meet where the others do."""
        kept = self._reserved.get(job)
        if kept is None or kept.attempt != message.job_attempt:
            self._reserved.pop(job, None)
            return message
        kept.ranks, kept.gpu_ids = 0, ()
        kept.rendezvous = kept.rendezvous or message.rendezvous
        return msgspec.structs.replace(message, rendezvous=kept.rendezvous)

    def _was_stopped(self, job: JobId, attempt: int, now_s: float) -> Refused | None:
        last, until_s = self._stopped_until.get(job, (-1, now_s))
        if attempt > last or now_s >= until_s:
            return None
        reason = f"{self._node}: attempt {attempt} of job {job} was told to stop"
        return Refused(reason=reason, retry_after_s=1.0)

    def _came_late(
        self, job: JobId, message: StartWorkers, new: list[_Rank], now_s: float
    ) -> Refused | None:
        """Say why processes are not started, a gang's first ones above all: its master has given
        the attempt up, or is about to, since this node lost its room or did not hear for long."""
        if new and (refused := self._was_stopped(job, message.job_attempt, now_s)):
            return refused
        if not message.rendezvous or all(rank.attempt % RUN_ATTEMPTS for rank in new):
            return None
        kept = self._reserved.get(job)
        if (
            kept is not None
            and kept.attempt == message.job_attempt
            and (kept.rendezvous or now_s - kept.since_s <= kept.seconds)
        ):
            return None
        reason = f"{self._node}: no room is kept for attempt {message.job_attempt} of job {job}"
        return Refused(reason=reason, retry_after_s=1.0)

    def _began(self, job: JobId, rank: int, attempt: int) -> bool:
        """Tell whether a process of the attempt was started: its master was restarted since."""
        known = self._ranks.get((job, rank))
        return known is not None and known.attempt // RUN_ATTEMPTS >= attempt

    def _looked(self, event: ProgramLooked, now_s: float) -> list[Effect]:
        kept = self._reserved.get(event.job)
        if kept is None or kept.attempt != event.attempt:
            reason = f"{self._node}: attempt {event.attempt} of job {event.job} was given up"
            return [Reply(event.token, Refused(reason=reason, code=CONFLICT))]
        if event.why:
            del self._reserved[event.job]
            return [Reply(event.token, Refused(reason=f"{self._node}: {event.why}"))]
        if not kept.port:
            kept.host, kept.port = event.host, event.port
        kept.since_s = now_s
        due = StartTimer(ReservationDue(event.job, event.attempt), now_s + kept.seconds)
        answer = Prepared(host=kept.host, port=kept.port, code=event.code)
        return [due, Reply(event.token, answer)]

    def _give_up(self, job: JobId, last: int) -> None:
        kept = self._reserved.get(job)
        if kept is not None and kept.attempt <= last:
            del self._reserved[job]

    def _read(self, token: int, message: ReadLog, tenant: str) -> Effect:
        if not self._ready:
            return Reply(token, still_reading())
        rank = self._ranks.get((JobId(message.job), message.rank))
        if rank is None:
            return Reply(token, Refused(reason=no_log(self._node, message)))
        return ReadRankLog(token, message, tenant, rank.attempt, rank.over, said(rank.code))

    def _look_at(self, token: int, message: LookAtRank) -> Effect:
        rank = self._ranks.get((JobId(message.job), message.rank))
        if rank is None or rank.state != "running":
            reason = f"{self._node} runs no process of job {message.job}, rank {message.rank}"
            return Reply(token, Refused(reason=reason))
        return LookAtProcesses(token, rank.job, rank.rank, rank.attempt)

    def _type(self, token: int, message: TypeIn, tenant: str) -> Effect:
        if not self._ready:
            return Reply(token, still_reading())
        rank = self._ranks.get((JobId(message.job), message.rank))
        if rank is None or rank.state != "running":
            return Reply(token, Refused(reason=no_terminal(self._node, message)))
        if message.attempt not in (None, rank.attempt):
            reason = f"job {message.job}, rank {message.rank} was started again meanwhile"
            return Reply(token, Refused(reason=reason, code=CONFLICT))
        return TypeAtTerminal(token, message, tenant, rank.attempt)

    @staticmethod
    def _may_start(known: _Rank | None, attempt: int) -> bool:
        """Say whether the attempt may start: its master has stored how the one before ended."""
        if known is None:
            return True
        return attempt > known.attempt and known.state in ("exited", "reported")

    def _told_to_stop(self, token: int, message: StopWorkers, now_s: float) -> list[Effect]:
        """Answer once no process is left, so that nobody begins the next run beside this one."""
        which = KillDue(JobId(message.job), message.last_attempt, message.ranks)
        if not self._ready:
            return [Reply(token, still_reading())]
        if not message.ranks:
            self._give_up(which.job, which.last)
            kept = self._stopped_until.items()
            self._stopped_until = {job: stop for job, stop in kept if stop[1] > now_s}
            self._stopped_until[which.job] = which.last, now_s + STOPPED_S
        if not any(self._which(which)):
            return [Reply(token, Ok())]
        known = which in self._stopping
        self._stopping.setdefault(which, []).append(token)
        grace_s = message.grace_s or self._stop_grace_s
        return [] if known else self._stop(which, now_s, grace_s)

    def _which(self, which: KillDue) -> Iterator[_Rank]:
        """List the job's running processes of this attempt and of those before."""
        for rank in self._with("running", which.job):
            named = not which.ranks or rank.rank in which.ranks
            if named and rank.attempt < RUN_ATTEMPTS * (which.last + 1):
                yield rank

    def _stop(self, which: KillDue, now_s: float, grace_s: float) -> list[Effect]:
        """SIGTERM to every process group of them, SIGKILL to what is left after the grace."""
        signals: list[Effect] = [
            SignalRank(which.job, rank.rank, kill=False) for rank in self._which(which)
        ]
        return [*signals, StartTimer(which, now_s + grace_s)]

    def _kill(self, which: KillDue) -> list[Effect]:
        """Kill them. Whether that helped is asked again, not awaited."""
        if which.ranks and which not in self._stopping:
            return []  # They have ended; such ranks may have been started again since.
        kills: list[Effect] = [
            SignalRank(which.job, rank.rank, kill=True) for rank in self._which(which)
        ]
        waiting = self._stopping.pop(which, [])
        reason = f"{self._node}: processes of job {which.job} are being killed"
        retry_s = limits.RETRY_WAIT_S_MIN
        answers = [Reply(token, Refused(reason=reason, retry_after_s=retry_s)) for token in waiting]
        return [*kills, *answers]

    def _stopped(self, job: JobId) -> list[Effect]:
        """Answer those who wait for its end."""
        over = [key for key in self._stopping if key.job == job and not any(self._which(key))]
        return [Reply(token, Ok()) for key in over for token in self._stopping.pop(key)]

    def _exited(self, event: ProcessExited) -> list[Effect]:
        rank = self._ranks.get((event.job, event.rank))
        if rank is None or rank.state != "running" or rank.attempt != event.attempt:
            return []
        rank.state, rank.code, rank.result = "exited", event.code, event.result
        fields = {"job": rank.job, "rank": rank.rank, "code": rank.code}
        if rank.code != 0:
            fields["reason"] = rank.result
        level = "info" if rank.code == 0 else "warning"
        told = Log("process.exited", fields, level)
        return [told, self._report(rank), *self._stopped(rank.job)]

    # Reports to the master ------------------------------------------------------------------------

    def _report(self, rank: _Rank) -> Request:
        message = WorkerExited(
            job=rank.job,
            rank=rank.rank,
            node=self._node,
            code=said(rank.code),
            code_known=rank.code is not None,
            result=rank.result[: limits.RESULT_BYTES_MAX],
            attempt=rank.attempt,
        )
        return Request(
            subject=subjects.command("master", subjects.MASTER, "worker-exited"),
            message=message,
            key=ReportKey(rank.job, rank.rank, rank.attempt),
            lane=rank.job,
            timeout_s=limits.REQUEST_TIMEOUT_S,
            budget_s=limits.RETRY_BUDGET_S,
        )

    def _answered(self, key: object, message: Message, now_s: float) -> list[Effect]:
        rank = self._unreported(key)
        if rank is None:
            return []
        if isinstance(message, Refused):
            wait_s = max(message.retry_after_s, limits.RETRY_WAIT_S_MAX)
            fields = {"job": rank.job, "rank": rank.rank, "reason": message.reason}
            return [
                Log("report.refused", fields, "warning"),
                StartTimer(ReportKey(rank.job, rank.rank, rank.attempt), now_s + wait_s),
            ]
        rank.state = "reported"
        return [ForgetRank(rank.job, rank.rank, rank.attempt)]

    def _fired(self, key: object) -> list[Effect]:
        if isinstance(key, KillDue):
            return self._kill(key)
        if isinstance(key, ReservationDue):
            kept = self._reserved.get(key.job)
            if kept is not None and kept.attempt == key.attempt and not kept.rendezvous:
                del self._reserved[key.job]
            return []
        rank = self._unreported(key)
        return [self._report(rank)] if rank is not None else []

    def _unreported(self, key: object) -> _Rank | None:
        """Find the rank of a report, if the master has not stored its end yet."""
        if not isinstance(key, ReportKey):
            return None
        rank = self._ranks.get((key.job, key.rank))
        if rank is None or rank.attempt != key.attempt or rank.state != "exited":
            return None
        return rank
