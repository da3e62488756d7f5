"""Jobs that hang and count no iterations: found by what their ranks print and compute.

Pure. For jobs that have a hang timeout, and whose programs have no Agent or have not begun to
iterate. Their nodes are asked time and again where each rank stands (LookAtRank). A job is silent
while no rank prints and none takes CPU time; one that spins in a collective, as those of NCCL do,
and never leaves that line, takes none. After half of the timeout the job is said to hang, with the
place of its ranks; after all of it, it is started again.
"""

from typing import Final

from slackwater.schemas.hangs import RankLook
from slackwater.services.master.hangs import (
    LOOKED_S,
    ask_ranks,
    described,
    going,
    stands,
    unserved,
    waits,
)
from slackwater.services.master.jobs import Job, Silence
from slackwater.services.master.lifecycle import advance, leave
from slackwater.services.master.state import State

SPENT_CORES: Final = 0.05
"""Cores that a program keeps busy which only waits: threads that wake to look, and no more."""
LOOKS: Final = 8
"""Looks within one timeout, at least."""
PERIOD_S_MIN: Final = 1.0
PERIOD_S_MAX: Final = 30.0


def watch(state: State, job: Job, now_s: float) -> None:
    """Find out whether the job is silent; say so, and have it started again."""
    timeout_s = job.record.spec.hang_timeout_s
    if not timeout_s or not _watched(job) or unserved(state, job, now_s):
        job.silence = None
        return
    silence = job.silence
    if silence is None:
        job.silence = Silence(now_s, ask_ranks(state, job, going(job), now_s))
        return
    look = silence.look
    if not silence.compared and look.answered(now_s, LOOKED_S):
        silence.compared = True
        elapsed_s = look.asked_s - silence.before_s
        if any(_moved(silence.before.get(r), look.looks.get(r), elapsed_s) for r in look.asked):
            silence.since_s, silence.hang = look.asked_s, None
        silence.before, silence.before_s = look.looks, look.asked_s
    if silence.compared and now_s - look.asked_s >= period_s(timeout_s):
        silence.look, silence.compared = ask_ranks(state, job, going(job), now_s), False
    since_s = silence.since_s = max(silence.since_s, *job.died_s.values(), 0.0)
    if silence.hang is None and now_s - since_s > timeout_s / 2:
        said = f"it has printed and computed nothing for {now_s - since_s:.0f} s"
        apart = [r for r in sorted(silence.before) if not waits(silence.before[r])]
        ranks = apart or sorted(silence.before)
        silence.hang = described(state, job, silence.before, ranks, since_s, said, now_s)
    if silence.hang is not None and now_s - since_s > timeout_s:
        leave(state, job, (), now_s, reason=f"{silence.hang.reason}; it is started again")
        advance(state, job)


def period_s(timeout_s: float) -> float:
    return min(max(timeout_s / LOOKS, PERIOD_S_MIN), PERIOD_S_MAX)


def _watched(job: Job) -> bool:
    """Tell whether the job runs, and iterations do not tell whether it goes on."""
    record = job.record
    if record.state != "running" or not record.spec.program:
        return False
    ranks = going(job)
    return job.progress.quiet(ranks) is None and not any(job.awaited(rank) for rank in ranks)


def _moved(before: RankLook | None, now: RankLook | None, elapsed_s: float) -> bool:
    """Tell whether a rank did anything between two looks, or nobody can say."""
    if before is None or now is None or not before.state or not now.state:
        return True
    if now.log_bytes != before.log_bytes:
        return True
    if 0.0 <= now.cpu_s - before.cpu_s <= SPENT_CORES * elapsed_s:
        return False
    return not (waits(now) and stands(now.stack) == stands(before.stack))
