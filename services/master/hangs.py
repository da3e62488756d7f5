"""Jobs that hang: which rank holds the others up, and where its program stands.

Pure. A job hangs when no rank of it has ended an iteration for ten times as long as one takes, and
for FLOOR_S at least. Its nodes are asked then where its ranks stand (LookAtRank). A rank that
computes meanwhile evaluates, saves, or has a longer iteration: it is given ten times as long
again. The rank that holds the others up is, first, whom they say they wait for; else who is behind;
else who does not wait in a collective by its stack, as all of them would.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from slackwater.common.base.effects import Count, Request
from slackwater.common.base.limits import REQUEST_TIMEOUT_S
from slackwater.schemas import subjects
from slackwater.schemas.base import Message
from slackwater.schemas.hangs import Hang, HangingRank, LookAtRank, RankLook, RankLooked
from slackwater.services.master.gangs import node_of, processes
from slackwater.services.master.jobs import Job, Suspicion
from slackwater.services.master.keys import LookKey
from slackwater.services.master.lifecycle import advance, leave
from slackwater.services.master.missing_ranks import FRESH_S
from slackwater.services.master.state import State

TIMES: Final = 10
FLOOR_S: Final = 10.0
"""Agents report each second, and each two seconds where no iteration ends."""
BUSY_CORES: Final = 0.3
LOOKED_MAX: Final = 16
"""Ranks that are looked at, at most."""
LOOKED_S: Final = 5.0
"""Seconds within which nodes answer, or are not waited for."""
AGAIN_S: Final = 10.0
"""Seconds until ranks are looked at once more that computed."""
_WAITS: Final = re.compile(
    r"\bin (all_|reduce|broadcast|barrier|_?gather|scatter|recv|irecv|send|wait|_wait|sleep_until"
    r"|synchronize|monitored_barrier)\w*"
)
"""The innermost frame of a rank that waits for others."""
_FRAME: Final = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')


def watch(state: State, job: Job, now_s: float) -> None:
    """Find out whether the job hangs, and have it started again where its spec says so."""
    quiet = _quiet(state, job, now_s)
    if quiet is None:
        job.suspicion = None
        return
    since_s, limit_s, median_s = quiet
    found = job.suspicion
    if found is None or (found.hang is None and now_s - found.asked_s >= AGAIN_S):
        named = _behind(job, now_s) or going(job)
        job.suspicion = ask_ranks(state, job, named, now_s)
        return
    if found.hang is None and found.answered(now_s, LOOKED_S):
        ranks = _culprits(job, found, now_s)
        busy = any(found.looks.get(rank, RankLook()).cores >= BUSY_CORES for rank in ranks)
        if not busy or now_s - since_s > TIMES * limit_s:
            said = (
                f"no iteration has ended for {now_s - since_s:.0f} s, where one takes "
                f"{median_s:.2g} s"
            )
            found.hang = described(state, job, found.looks, ranks, since_s, said, now_s)
    allowed_s = job.record.spec.hang_timeout_s
    if found.hang is not None and allowed_s and now_s - since_s > max(allowed_s, limit_s):
        leave(state, job, (), now_s, reason=f"{found.hang.reason}; it is started again")
        advance(state, job)


def looked(state: State, job: Job, rank: int, answer: Message) -> None:
    """Take what a node says of a rank."""
    found = job.suspicion or (job.silence.look if job.silence is not None else None)
    if found is not None and rank in found.asked:
        silent = RankLook(why=f"worker node {node_of(job.record, rank)} does not say where it is")
        found.looks[rank] = answer.look if isinstance(answer, RankLooked) else silent


def hang_of(job: Job) -> Hang | None:
    found = job.suspicion or job.silence
    return found.hang if found is not None else None


def stands(stack: str) -> str:
    """Name the place where the main thread stands: the last that faulthandler lists."""
    main = re.split(r"^(?:Current thread|Thread) ", stack, flags=re.MULTILINE)[-1]
    frame = _FRAME.search(main)
    return f"{frame[1]}:{frame[2]} {frame[3]}" if frame else ""


def _quiet(state: State, job: Job, now_s: float) -> tuple[float, float, float] | None:
    """Since when no rank has gone on, after how long that is a hang, and how long an iteration
    takes; None: it is none, or there is a reason for it that is told elsewhere."""
    record = job.record
    if record.state != "running" or not record.spec.program:
        return None
    ranks = going(job)
    if any(job.awaited(rank) for rank in ranks):
        return None
    quiet = job.progress.quiet(ranks)
    if quiet is None or quiet[0] < max(record.since_s, *job.died_s.values(), 0.0):
        return None
    since_s, median_s = quiet
    limit_s = max(TIMES * median_s, FLOOR_S)
    if now_s - since_s <= limit_s:
        return None
    if unserved(state, job, now_s):
        return None
    return since_s, limit_s, median_s


def unserved(state: State, job: Job, now_s: float) -> bool:
    """Say whether it waits for its aggregators."""
    cluster = job.record.cluster
    return cluster is not None and bool(
        state.clusters.silent(cluster, now_s) or state.clusters.waiting(cluster, job.id)
    )


def going(job: Job) -> list[int]:
    """List the ranks that have not ended."""
    ended = job.record.results
    return [rank for rank in range(processes(job.record)) if str(rank) not in ended]


def ask_ranks(state: State, job: Job, ranks: Sequence[int], now_s: float) -> Suspicion:
    """Ask their nodes where these ranks stand, LOOKED_MAX of them at most."""
    asked = set(ranks[:LOOKED_MAX])
    for rank in sorted(asked):
        node = node_of(job.record, rank)
        if node is None:
            continue
        subject = subjects.command("worker", state.nodes.service_id(node), "look")
        ask = LookAtRank(job=job.id, rank=rank)
        key = LookKey(job.id, rank)
        timeout_s = max(REQUEST_TIMEOUT_S, LOOKED_S)
        state.out.append(Request(subject, ask, key, timeout_s=timeout_s, budget_s=timeout_s))
    return Suspicion(now_s, asked)


def _behind(job: Job, now_s: float) -> list[int]:
    """Name the ranks that others say they wait for, else those that are behind; empty: none is."""
    at_s, waited_for, _, _ = job.stalled
    ranks = going(job)
    if now_s - at_s <= FRESH_S and (named := [rank for rank in waited_for if rank in ranks]):
        return named
    return job.progress.behind(ranks)


def _culprits(job: Job, found: Suspicion, now_s: float) -> list[int]:
    ranks = sorted(found.asked)
    if behind := _behind(job, now_s):
        return [rank for rank in ranks if rank in behind] or behind[:1]
    apart = [rank for rank in ranks if not waits(found.looks.get(rank, RankLook()))]
    return apart or ranks


def waits(look: RankLook) -> bool:
    """Say whether the rank stands where it waits for others."""
    if look.state == "T" or not look.stack:
        return False
    main = re.split(r"^(?:Current thread|Thread) ", look.stack, flags=re.MULTILINE)[-1]
    return any(_WAITS.search(line) for line in main.splitlines()[1:4])


def described(
    state: State,
    job: Job,
    looks: Mapping[int, RankLook],
    ranks: Sequence[int],
    since_s: float,
    said: str,
    now_s: float,
) -> Hang:
    """Tell people that the job hangs, and return it. `ranks` hold the others up; `said`: how that
    is known."""
    hanging = tuple(
        HangingRank(rank=rank, node=node, look=looks.get(rank, RankLook()))
        for rank in ranks
        if (node := node_of(job.record, rank)) is not None
    )
    places = "; ".join(_said(each) for each in hanging[:4])
    more = f" (and {len(hanging) - 4} more ranks)" if len(hanging) > 4 else ""
    reason = f"{places}{more}: {said}"[:1024]
    state.tell(job, "hung", now_s, reason)
    state.out.append(Count("hangs"))
    return Hang(since_s=since_s, reason=reason, ranks=hanging)


def _said(one: HangingRank) -> str:
    place = stands(one.look.stack)
    where = f"in {place}" if place else one.look.why or "nobody can say where"
    busy = "computes without an end" if one.look.cores >= BUSY_CORES else "hangs"
    return f"rank {one.rank} on {one.node} {busy}, {where}"
