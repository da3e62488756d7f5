"""Ranks that others wait for: who they are, where they are, and whether they will ever push.

Pure. An Agent that has waited for a while reads in the bucket's region whose push is missing, and
asks. A rank that has ended will not push any more: who waits for it is told so. All others are only
named: a debugger may hold one, and one that is started again needs its time.
"""

from typing import Final

from slackwater.common.base.effects import Request
from slackwater.common.base.limits import REQUEST_TIMEOUT_S
from slackwater.schemas import subjects
from slackwater.schemas.base import Message
from slackwater.schemas.job_requests import AskMissing, MissingRanks
from slackwater.schemas.logs import LogPiece, ReadLog
from slackwater.services.master.gangs import node_of
from slackwater.services.master.jobs import Job
from slackwater.services.master.keys import LineKey
from slackwater.services.master.progress import own_iterations
from slackwater.services.master.state import State

UNHEARD_S: Final = 4.5
"""An Agent says every two seconds that it is there, whatever its program does."""
SILENT_S: Final = 30.0
"""Seconds without a push after which a rank is named with the last line of its log."""
FRESH_S: Final = 5.0
"""Seconds for which a waiting Agent's question counts; it asks every second."""


def answer(state: State, job: Job, message: AskMissing, now_s: float) -> MissingRanks:
    """Answer a rank that waits; the answer is remembered for whoever looks at the job."""
    if job.ended:
        why = job.record.reason or "it ended"
        return MissingRanks(reason=f"job {job.id} is {job.record.state}: {why}", final=True)
    ranks = [rank for rank, _ in message.behind]
    for rank in ranks:
        if message.waited_s >= SILENT_S and not _over(job, rank):
            _read_line(state, job, rank)
    final = any(_over(job, rank) for rank in ranks)
    told = "; ".join(
        _where(job, rank, at, message.waited_s, now_s) for rank, at in message.behind[:4]
    )
    more = f" (and {len(ranks) - 4} more ranks)" if len(ranks) > 4 else ""
    waits = f"rank {message.rank} waits at iteration {message.iteration}"
    reason = f"{told}{more}; {waits}"
    if final:
        reason += (
            "; give every rank the same number of iterations (leave out what is over of a data set "
            "that does not divide evenly), then run the job again"
        )
    job.stalled = (now_s, tuple(ranks), message.iteration, reason)
    awaited = any(job.awaited(rank) for rank in ranks)
    return MissingRanks(reason=reason, final=final, restarting=awaited)


def stall(job: Job, now_s: float) -> str:
    """Say why the job does not go on, as heard in the last seconds; empty: no rank complained."""
    at_s, ranks, iteration, reason = job.stalled
    known = [job.progress.ranks.get(rank) for rank in ranks]
    if known and all(rank is not None and rank.iteration > iteration for rank in known):
        return ""  # They have pushed what was waited for, and more.
    return reason if now_s - at_s <= FRESH_S else ""


def unheard(job: Job, agent_silent_s: float, now_s: float) -> str:
    """Why a job that was started by hand does not go on: nobody watches its processes."""
    silent_s = now_s - job.heard_s
    if not job.by_hand or silent_s <= FRESH_S:
        return ""
    return (
        f"none of its ranks was heard for {silent_s:.0f} s: they ended with an error, were killed, "
        f"or are out of reach; start them again, or it fails after {agent_silent_s:g} s "
        "(agent_silent_s)"
    )


def line_read(job: Job, rank: int, message: Message) -> None:
    """Take the answer of the rank's worker node, which may know no such log."""
    if isinstance(message, LogPiece):
        lines = message.data.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        job.lines[rank] = last[:200]


def _over(job: Job, rank: int) -> bool:
    return str(rank) in job.record.results


def _where(job: Job, rank: int, iteration: int, waited_s: float, now_s: float) -> str:
    """`iteration`: the newest that the rank has pushed."""
    known = job.progress.ranks.get(rank)
    if _over(job, rank):
        total = own_iterations(job.record.spec)
        of = f" of {total}" if total else ""
        return f"rank {rank} ended after iteration {iteration}{of}"
    if job.awaited(rank):
        again = job.record.restarts[str(rank)]
        return f"rank {rank} died and is being started again (its attempt {again + 1})"
    died_s = job.died_s.get(rank)
    if died_s is not None and (known is None or known.heard_s <= died_s):
        again = job.record.restarts[str(rank)]
        return (
            f"rank {rank} died {now_s - died_s:.0f} s ago, was started again (its attempt "
            f"{again + 1}), and is not heard of yet"
        )
    if known is None:
        return f"rank {rank} has not been heard of yet"
    line = job.lines.get(rank, "")
    last = f", last line: {line}" if line else ""
    unheard_s = now_s - known.heard_s
    if unheard_s > UNHEARD_S:
        return f"rank {rank} is silent since {unheard_s:.0f} s (iteration {iteration}{last})"
    return (
        f"rank {rank} has not pushed for {waited_s:.0f} s, though its process was heard "
        f"{max(0.0, unheard_s):.0f} s ago (iteration {iteration}{last})"
    )


def _read_line(state: State, job: Job, rank: int) -> None:
    node = node_of(job.record, rank)
    if node is None or rank in job.reading:
        return
    job.reading.add(rank)
    subject = subjects.command("worker", state.nodes.service_id(node), "log")
    state.out.append(
        Request(
            subject,
            ReadLog(job=job.id, rank=rank, tail=1),
            LineKey(job.id, rank),
            timeout_s=REQUEST_TIMEOUT_S,
            budget_s=REQUEST_TIMEOUT_S,
        )
    )
