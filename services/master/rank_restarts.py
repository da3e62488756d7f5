"""Decide what follows when a rank dies: its job fails, or the rank is started again where the job's
spec allows it.

Pure. How often each rank was started again is in the job's record before anything is ordered, and
each order names the attempt, so that whoever is killed in between, no attempt runs twice and none
is left out. The others wait meanwhile; the aggregators keep parameters and optimiser state, and the
new process goes on where the job is.

Ranks that meet without aggregators (torch.distributed) cannot take a new one in: all of them are
stopped, and started again as the job's next attempt on the same GPUs, from its last checkpoint.
That counts as one restart, and the ends of the others as consequences.
"""

import signal
from math import inf
from typing import Final

from slackwater.common.base.effects import StartTimer
from slackwater.common.base.words import number_of
from slackwater.schemas.base import COUNT_MAX
from slackwater.schemas.workers import USELESS_TO_RESTART, WorkerExited
from slackwater.services.master.gangs import processes
from slackwater.services.master.jobs import Job
from slackwater.services.master.keys import RankDue
from slackwater.services.master.lifecycle import advance, end, leave, meets_alone
from slackwater.services.master.state import State

FIRST_WAIT_S: Final = 0.5
WAIT_S_MAX: Final = 30.0
"""Seconds before a rank is started again: the first, then twice as many each time, up to the
second. A fault that kills a program at once would do so again."""
LIVED_S: Final = 60.0
"""Seconds after which a rank that was started again has lived: its next death waits as the
first."""


def rank_died(state: State, job: Job, exited: WorkerExited, now_s: float) -> None:
    """Told by its worker node, perhaps not for the first time. The job has not ended."""
    rank, made = str(exited.rank), job.record.restarts
    if rank in job.record.results or exited.attempt < made.get(rank, 0):
        return
    reason, total = death(exited), sum(made.values())
    allowed = job.record.spec.restarts
    if total >= allowed or exited.code == USELESS_TO_RESTART:
        if allowed and exited.code != USELESS_TO_RESTART:
            reason = f"{reason} (after {total} of {number_of(allowed, 'restart')})"
        end(state, job, "failed", reason, now_s)
        return
    attempt = min(exited.attempt, COUNT_MAX - 1) + 1
    restarts = made | {rank: attempt}
    together = meets_alone(job.record) and processes(job.record) > 1
    if together and job.record.state not in ("starting", "running"):
        return  # It holds nothing: no rank of it can die.
    wait_s = _wait_s(total + 1 if together else _quick_deaths(job, exited.rank, now_s))
    which = "all ranks are started again" if together else "it is started again"
    left = f"{total + 1} of {number_of(allowed, 'restart')}"
    told = f"{reason}; {which} in {wait_s:g} s ({left})"
    if together:
        job.rests = True
        same = job.record.allocation
        leave(state, job, same, now_s, "rank-restarted", reason=told, restarts=restarts)
        advance(state, job)
    else:
        state.change(job, now_s, restarts=restarts)
        state.tell(job, "rank-restarted", now_s, told)
        job.resting.add(exited.rank)
    job.died_s[exited.rank] = now_s
    job.missing_since_s.pop(exited.rank, None)
    state.out.append(StartTimer(RankDue(job.id, exited.rank), now_s + wait_s))


def _quick_deaths(job: Job, rank: int, now_s: float) -> int:
    """Count the deaths of the rank up to this one that followed soon after one another."""
    before = job.quick_deaths.get(rank, 0)
    lived_s = now_s - job.died_s.get(rank, -inf) - _wait_s(before)
    job.quick_deaths[rank] = 1 if lived_s > LIVED_S else before + 1
    return job.quick_deaths[rank]


def _wait_s(times: int) -> float:
    return min(WAIT_S_MAX, FIRST_WAIT_S * 2.0 ** min(times - 1, 16))


def on_delay_over(state: State, key: RankDue) -> None:
    """Start the rank again when its timer fires, or all of them."""
    job = state.jobs.get(key.job)
    if job is not None and (job.rests or key.rank in job.resting):
        job.rests = False
        job.resting.discard(key.rank)
        advance(state, job)


def death(exited: WorkerExited) -> str:
    """Say how the rank ended: its signal or exit code, and what it said last."""
    who, said = f"rank {exited.rank} on {exited.node}", exited.result[:1024]
    if not exited.code_known:
        said = f"; its log ends with: {said}" if said else ""
        return (
            f"{who} ended, and its exit code is not known: it was killed with all its processes, "
            f"or its node's disk is full; whether it had completed is for you to see{said}"
        )
    if exited.code > 0:
        said = f": {said}" if said else ", and printed nothing"
        return f"{who} ended with exit code {exited.code}{said}"
    number = -exited.code
    try:
        name, plain = signal.Signals(number).name, signal.strsignal(number)
    except ValueError:
        name, plain = "unknown", None
    said = f": {said}" if said and said != plain else ""  # A shell prints "Killed".
    return f"{who} was killed by signal {number} ({name}){said}"
